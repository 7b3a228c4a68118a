"""The messages between launchers: each with its fields, and each field with its type and limits.

Messages of node 0 are checked like all others. Limits that depend on the job, such as the number of processes of a node, are
checked where the job is known.
"""

from __future__ import annotations

import json
import signal
from typing import Any, Dict, List, Mapping, Tuple

from .fields import Field, flag, integer, line, lines, list_of, one_of, optional, record, seconds
from .node import Failure
from .plan import BACKENDS, MOST_NODES, MOST_PROCESSES, MOST_RESTARTS, Plan
from .printable import printable

Message = Dict[str, Any]
LONGEST_CAUSE = 40_000
LONGEST_LINE = 500
MOST_LINES = 100
ORDERS = (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGKILL))
_LONGEST_WHY = 1000
_LONGEST_PATH = 4096
_LONGEST_NUMBER = 25  # characters
_FAILURE = record(
    who=line(LONGEST_LINE),
    what=line(_LONGEST_WHY),
    code=integer(1, 255),
    lines=list_of(line(LONGEST_LINE), 0, MOST_LINES),
    log=line(_LONGEST_PATH),
    slot=integer(-1, MOST_PROCESSES),
    node_rank=integer(0, MOST_NODES),
)
TO_LEADER: Mapping[str, Field] = {
    "hello": record(
        num_nodes=integer(1, MOST_NODES),
        num_processes=integer(1, MOST_PROCESSES),
        servers=optional(integer(0, MOST_PROCESSES)),
        backend=one_of(*BACKENDS),
    ),
    "state": record(
        restart=integer(-1, MOST_RESTARTS),
        running=flag,
        workers_left=integer(0, MOST_PROCESSES),
        failure=optional(_FAILURE),
        cpu_s=seconds,
    ),
    "alive": record(),
}
TO_FOLLOWER: Mapping[str, Field] = {
    "welcome": record(),
    "refuse": record(why=line(_LONGEST_WHY)),
    "wait": record(why=line(_LONGEST_WHY)),
    "start": record(plan=Plan.from_json, node_rank=integer(1, MOST_NODES)),
    "stop": record(signal=one_of(*ORDERS)),
    "finish": record(code=integer(0, 255), cause=lines(LONGEST_CAUSE)),
    "alive": record(),
}


def failure_fields(failure: Failure) -> Message:
    """Return a failure as the fields of a message: each cut to its limit in `TO_LEADER`, with a code other than 0."""
    return {
        "who": printable(failure.who, LONGEST_LINE),
        "what": printable(failure.what, _LONGEST_WHY),
        "code": failure.code if 0 < failure.code < 256 else 1,
        "lines": [printable(text, LONGEST_LINE) for text in failure.lines[-MOST_LINES:]],
        "log": printable(failure.log, _LONGEST_PATH),
        "slot": failure.slot,
        "node_rank": failure.node_rank,
    }


def write(kind: str, values: Mapping[str, Any]) -> bytes:
    """Return a message as bytes to send."""
    return json.dumps({"kind": kind, **values}, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def read(data: bytes, known: Mapping[str, Field]) -> Tuple[str, Message]:
    """Return the kind and the fields of a received message.

    Raises
    ------
    ValueError
        The message has another kind, or a field is missing, unknown, of another type or beyond its limits.

    Examples
    --------
    >>> read(b'{"kind": "stop", "signal": 15}', TO_FOLLOWER)
    ('stop', {'signal': 15})
    """
    try:
        message = json.loads(data, object_pairs_hook=_object, parse_int=_int, parse_constant=_constant)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if type(message) is not dict or type(message.get("kind")) is not str or message["kind"] not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    kind = message.pop("kind")
    return kind, known[kind](message)


def _object(pairs: List[Tuple[str, Any]]) -> Message:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("names a field twice")
    return fields


def _int(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:  # Python parses 100,000 digits slowly
        raise ValueError("holds a number that is too long")
    return int(digits)


def _constant(name: str) -> float:
    raise ValueError(f"holds {name}")
