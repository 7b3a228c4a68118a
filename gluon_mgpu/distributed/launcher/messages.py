"""What launchers may say to each other: every message with its fields, and every field with its type and its limits.

Node 0 is checked as the others are. Limits that depend on the job, such as the number of processes of a node, are checked where
the job is known.
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
ORDERS = (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGKILL))
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
    """Return a failure as it is sent: no field longer than `TO_LEADER` takes, and a code that is not 0."""
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
    """Return a message as it is sent."""
    return json.dumps({"kind": kind, **values}, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def read(data: bytes, known: Mapping[str, Field]) -> Tuple[str, Message]:
    """Return the kind and the fields of a message that has come.

    Raises
    ------
    ValueError
        It is no message of these kinds, or a field is missing, unknown, of another type or beyond its limits.

    Examples
    --------
    >>> read(b'{"kind": "stop", "signal": 15}', TO_FOLLOWER)
    ('stop', {'signal': 15})
    """
    try:
        said = json.loads(data, object_pairs_hook=_object, parse_int=_int, parse_constant=_constant)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if type(said) is not dict or type(said.get("kind")) is not str or said["kind"] not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    kind = said.pop("kind")
    return kind, known[kind](said)


def _object(pairs: List[Tuple[str, Any]]) -> Message:
    said = dict(pairs)
    if len(said) != len(pairs):
        raise ValueError("names a field twice")
    return said


def _int(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:  # Python takes long for a number of 100,000 digits
        raise ValueError("holds a number that is too long")
    return int(digits)


def _constant(name: str) -> float:
    raise ValueError(f"holds {name}")
