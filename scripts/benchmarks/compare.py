"""Measures contenders in turns, round after round: a slow moment of the machine affects all of them.

Each row has a process of its own: a network and a trainer that another row left alive would cost time in it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence

from case import Case
from gluon_mgpu.runtime import environment

OnMessage = Callable[[str], None]

WORKER = Path(__file__).with_name("worker.py")
_END_S = 10.0


class ContenderError(RuntimeError):
    """A contender cannot continue: it is not installed, failed, crashed, or did not answer in time."""


@dataclass
class Row:
    """The measurements of one contender in one group of rows that are compared with each other.

    Attributes
    ----------
    contender : str
    group : str
        `2 contexts, 1 thread each`.
    case : Case
    environment : dict of str to str
        Variables that its process gets in addition to the user's. Rows of a contender with the same variables share a process.
    versions : dict of str to str
    rounds : list of dict of str to float
        The measurements of each round, in order.
    reason : str
        Why there are no more rounds; empty if all succeeded.
    """

    contender: str
    group: str
    case: Case
    environment: Dict[str, str] = field(default_factory=dict)
    versions: Dict[str, str] = field(default_factory=dict)
    rounds: List[Dict[str, float]] = field(default_factory=list)
    reason: str = ""


def compare(
    rows: Sequence[Row],
    *,
    rounds: int,
    pythons: Optional[Dict[str, str]] = None,
    timeout_s: float = 120.0,
    on_message: OnMessage = lambda text: None,
) -> None:
    """Fill the rows with the measurements of each round, or with the reason why there are none.

    Parameters
    ----------
    rows : sequence of Row
        The rows of a group are adjacent, so that they are measured one after another.
    rounds : int
        Every other round goes through the rows in reverse order.
    pythons : dict of contender to path, optional
        Interpreters other than this one.
    timeout_s : float, seconds
        The longest wait for an answer of a contender.
    on_message : callable (str)
        Called with the current activity.
    """
    workers: List[_Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, row in enumerate(rows):
                on_message(f"{number + 1} of {len(rows)}: {row.contender} prepares {row.group}")
                python = (pythons or {}).get(row.contender, sys.executable)
                workers.append(_Worker(row, python, os.path.join(folder, str(number)), timeout_s))
                _attempt(row, workers[-1].set_up, "")
            measured = list(enumerate(zip(rows, workers), 1))
            for number in range(rounds):
                for i, (row, worker) in measured if number % 2 == 0 else measured[::-1]:
                    if not row.reason:
                        on_message(f"round {number + 1} of {rounds}, {i} of {len(rows)}: {row.contender}, {row.group}")
                        _attempt(row, worker.run_round, f"in round {number + 1}: ")
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join()


def _attempt(row: Row, work: Callable[[Row], None], when: str) -> None:
    try:
        work(row)
    except ContenderError as error:
        row.reason = f"{when}{error}"


class _Worker:
    """The process of a contender, in a process group of its own, so that the processes it starts end with it."""

    def __init__(self, row: Row, python: str, folder: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pending = b""
        self._broken = ""
        self._versions: Optional[Dict[str, str]] = None
        self._process: Optional[subprocess.Popen[bytes]] = None
        os.mkdir(folder)
        self._log = os.path.join(folder, "stderr")
        inherited = {name: value for name, value in os.environ.items() if name not in settled_names()}
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [python, str(WORKER), row.contender, row.case.workload],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**inherited, **row.environment},
                    cwd=folder,
                    start_new_session=True,
                )
        except OSError as error:
            self._broken = f"{python}: {error.strerror}"

    def set_up(self, row: Row) -> None:
        if self._versions is None:
            self._versions = self._answer()["versions"]
        row.versions = self._versions
        self._ask({"setup": row.group, "case": asdict(row.case)})

    def run_round(self, row: Row) -> None:
        row.rounds.append(self._ask({"round": row.group})["found"])

    def kill(self) -> None:
        """Kill the process and all processes it has started: there is nothing to save."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def join(self) -> None:
        if self._process is not None:
            self._process.wait(_END_S)
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]

    def _ask(self, request: Dict[str, Any]) -> Dict[str, Any]:
        self._check()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError:
            self._break(self._describe_end())
        return self._answer()

    def _answer(self) -> Dict[str, Any]:
        self._check()
        line = self._line()
        try:
            answer: Dict[str, Any] = json.loads(line)
        except ValueError:
            self._break(f"answered {line[:80]!r}")
        if "failed" in answer:
            if self._versions is None:
                self._break(answer["failed"])
            raise ContenderError(answer["failed"])
        return answer

    def _line(self) -> bytes:
        """Return the contender's next line; the timeout counts for the whole line."""
        end = time.monotonic() + self._timeout_s
        file = self._process.stdout.fileno()  # type: ignore[union-attr]
        while b"\n" not in self._pending:
            ready, _, _ = select.select([file], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._break(f"no answer within {self._timeout_s:g} s")
            found = os.read(file, 65536)
            if not found:
                self._break(self._describe_end())
            self._pending += found
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def _check(self) -> None:
        if self._broken:
            raise ContenderError(self._broken)

    def _break(self, why: str) -> NoReturn:
        self._broken = why
        self.kill()
        raise ContenderError(why)

    def _describe_end(self) -> str:
        """Return how the process ended, and the last line of its standard error."""
        try:
            code = self._process.wait(_END_S)  # type: ignore[union-attr]
            how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        except subprocess.TimeoutExpired:
            how = "closed its output"
        lines = Path(self._log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{how}: {lines[-1].strip()}" if lines else how


def settled_names() -> List[str]:
    """Return the variables that importing gluon_mgpu may have set here: a row sets them, or its contender's process has none."""
    return [*environment.ENVIRONMENT, "OMP_NUM_THREADS"]
