"""Runs a probe in a new process, and watches it until it answers, exceeds its limit of memory or time, or ends."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, Any, Dict, Iterator, NoReturn, Tuple

from ... import errors
from ...errors import StepError
from .probe import peak_bytes, says_no_memory
from .workload import Question

INSIDE = "GLUON_MGPU_PROBE"  # in the environment of a probe's process

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gluon_mgpu.tuning.batch_size.probe import serve; serve(sys.argv[2])"
)
_POLL_S = 0.01
_HINT = "The cause is not a lack of memory: run the step alone."

# Messages of glibc when it aborts for a reason other than a lack of memory.
_NO_LACK = "assertion|free\\(\\)|double free|corrupted|stack smashing|buffer overflow"


class NoMemoryError(MemoryError):
    """The batch does not fit; `peak_bytes` is the largest memory seen."""

    def __init__(self, reason: str, seen_bytes: int) -> None:
        super().__init__(reason)
        self.peak_bytes = seen_bytes


class ProbeTimeoutError(StepError):
    """A probe did not answer in time, and was stopped."""


def ask(question: Question, *, limit_bytes: int = 0, timeout_s: float = 300.0) -> Dict[str, Any]:
    """Return the answer of a new process, in the form of `probe.serve`.

    The process has its own group, and no process of the group is left when this returns or raises. Each size gets a new process,
    because MXNet cannot be used after it ran out of memory, and a pool that has grown does not shrink.

    Parameters
    ----------
    question : Question
    limit_bytes : int
        The process is stopped when its resident memory exceeds this; 0 for no limit.
    timeout_s : float, seconds

    Raises
    ------
    NoMemoryError
        It exceeded the limit, or reported a lack of memory, or ended as processes without memory do.
    ProbeTimeoutError
        No answer within `timeout_s`.
    StepError
        It failed for another reason. An error of this package is raised with its own class.
    """
    with tempfile.TemporaryFile() as log:
        with _process(question, log) as process:
            line, seen_bytes = _watch(process, question, limit_bytes, timeout_s)
            code = None if line else process.wait()
        if code is not None:
            log.seek(0)
            _raise_end(code, log.read().decode(errors="replace").strip(), question, seen_bytes)
    answer: Dict[str, Any] = json.loads(line)
    if "kind" in answer:
        _raise_error(answer, question)
    if 0 < limit_bytes < answer["peak_bytes"]:  # a peak between two reads
        raise NoMemoryError("more than the limit", answer["peak_bytes"])
    return answer


@contextmanager
def _process(question: Question, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path), json.dumps(asdict(question))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, INSIDE: "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def _watch(process: subprocess.Popen[bytes], question: Question, limit_bytes: int, timeout_s: float) -> Tuple[bytes, int]:
    """Return the line of the process's answer, empty if it ends without one, and the largest memory seen."""
    file, line, seen_bytes = process.stdout.fileno(), b"", 0  # type: ignore[union-attr]
    end = time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        seen_bytes = max(seen_bytes, peak_bytes(process.pid))
        if 0 < limit_bytes < seen_bytes:
            raise NoMemoryError("more than the limit", seen_bytes)
        if time.monotonic() > end:
            raise ProbeTimeoutError(
                f"find_batch_size: got no answer within {timeout_s:g} s from {_name(question)}; expected one. Raise the "
                "timeout, or lower the largest batch size, and check that the step ends when it is run alone."
            )
        # WNOWAIT keeps the exit status, so that the numbers of the process and its group stay reserved until the group has ended.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        ready, _, _ = select.select([file], [], [], 0.0 if ended else _POLL_S)
        found = os.read(file, 65536) if ready else b""
        if not found and ended:
            return b"", seen_bytes
        if not found and ready:  # it has closed its output, and is about to end
            time.sleep(_POLL_S)
        line += found
    return line, seen_bytes


def _raise_end(code: int, log: str, question: Question, seen_bytes: int) -> NoReturn:
    """Raise an error for a process that has ended without an answer.

    Out of memory, the kernel ends a process by SIGKILL, and C++ ends by SIGABRT.
    """
    last = log.splitlines()[-1].strip() if log else "without output"
    how = f"ended with exit status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    aborted = code == -signal.SIGABRT and not re.search(_NO_LACK, last, re.IGNORECASE)
    if code == -signal.SIGKILL or aborted or says_no_memory(last):
        raise NoMemoryError(f"{how}: {last}", seen_bytes)
    raise StepError(
        f"find_batch_size: got a process that {how} ({last}) from {_name(question)}; expected a step that trains. {_HINT}"
    )


def _raise_error(answer: Dict[str, Any], question: Question) -> NoReturn:
    message = f"{answer['kind']}: {answer['message']}"
    if answer["no_memory"]:
        raise NoMemoryError(message, answer["peak_bytes"])
    cause = RuntimeError(f"\n{answer['traceback']}")  # as it was in the other process
    ours = getattr(errors, answer["kind"], None)
    if ours is not None:
        raise ours(answer["message"]) from cause
    raise StepError(f"find_batch_size: got {message} from {_name(question)}; expected a step that trains. {_HINT}") from cause


def _name(question: Question) -> str:
    return question.workload + (f" with a batch of {question.batch_size}" if question.batch_size else "")
