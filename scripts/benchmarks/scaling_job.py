"""A contender of several processes: the project's launcher starts them, all get the same requests, and all end together."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional

from compare import ContenderError, Row, settled_names
from gluon_mgpu.distributed.launcher.job import Job, run_job
from gluon_mgpu.distributed.launcher.supervisor import Limits
from scaling_rank import ADDRESS

RANK = Path(__file__).with_name("scaling_rank.py")
_GRACE_S = 1.0
_END_S = 10.0
_END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class Crew:
    """The processes of a contender, each connected to this process.

    ```
    this process ──► launcher ──► rank 0, rank 1, ... (and a scheduler and servers, where the contender needs them)
         └──────── a socket ───────► one request to all, one answer from each
    ```

    Parameters
    ----------
    row : Row
        Gives the contender, the environment, and the number of processes: the devices of its case.
    options : dict
        Further options of the launcher: fields of `Job`.
    python : str
        The interpreter of the ranks.
    folder : str
        A folder to create, with a path short enough for a socket (about 90 characters).
    timeout_s : float, seconds
        The longest wait for an answer.
    """

    def __init__(self, row: Row, options: Dict[str, Any], *, python: str, folder: str, timeout_s: float) -> None:
        self._timeout_s, self._count = timeout_s, row.case.num_devices
        self._broken = ""
        self._connections: List[socket.socket] = []
        self._pending: Dict[socket.socket, bytes] = {}
        os.mkdir(folder)
        self._log = Path(folder, "log")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.path.join(folder, ADDRESS))
        self._listener.listen(self._count)
        program = [python, str(RANK), row.contender, folder]
        job = {"program": program, "num_processes": self._count, "log_dir": os.path.join(folder, "logs"), **options}
        inherited = {name: value for name, value in os.environ.items() if name not in settled_names()}
        with open(self._log, "wb") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, __file__, json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, **row.environment},
                start_new_session=True,
            )
        self._versions: Optional[Dict[str, str]] = None

    def set_up(self, row: Row) -> None:
        """Let every process build the row's case."""
        if self._versions is None:
            self._versions = self._await_all()
        row.versions = self._versions
        self._ask({"setup": row.group, "case": asdict(row.case)})

    def run_round(self, row: Row) -> None:
        """Let every process run a round; the slowest one counts."""
        answers = [answer["found"] for answer in self._ask({"round": row.group})]
        row.rounds.append({name: max(found[name] for found in answers) for name in answers[0]})

    def close(self) -> None:
        """End all processes: they end when their connection closes; otherwise the launcher ends them."""
        for connection in [*self._connections, self._listener]:
            connection.close()
        if not self._broken and len(self._connections) == self._count:
            with suppress(subprocess.TimeoutExpired):
                self._launcher.wait(_END_S)
        self._stop()

    def _stop(self) -> None:
        if self._launcher.poll() is None:
            self._launcher.terminate()
            try:
                self._launcher.wait(_GRACE_S + _END_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()  # its guards notice, and end the ranks
                self._launcher.wait()

    def _await_all(self) -> Dict[str, str]:
        """Wait until all processes are connected, and return the versions in the first one."""
        end = time.monotonic() + self._timeout_s
        while len(self._connections) < self._count:
            ready, _, _ = select.select([self._listener], [], [], 0.1)
            if ready:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._pending[connection] = b""
            elif self._launcher.poll() is not None:
                self._break(self._describe_end())
            elif time.monotonic() > end:
                self._break(f"{len(self._connections)} of {self._count} processes connected within {self._timeout_s:g} s")
        answers = sorted(self._answers(), key=lambda answer: int(answer["rank"]))
        return dict(answers[0]["versions"])

    def _ask(self, request: Dict[str, Any]) -> List[Dict[str, Any]]:
        self._check()
        for connection in self._connections:
            with suppress(BrokenPipeError, ConnectionResetError):  # reported when the answer is read
                connection.sendall(json.dumps(request).encode() + b"\n")
        return self._answers()

    def _answers(self) -> List[Dict[str, Any]]:
        """Return the next answer of each process; the timeout counts for all of them."""
        self._check()
        end = time.monotonic() + self._timeout_s
        answers: Dict[socket.socket, Dict[str, Any]] = {}
        while len(answers) < self._count:
            waiting = [connection for connection in self._connections if connection not in answers]
            ready, _, _ = select.select(waiting, [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._break(f"no answer from {len(waiting)} of {self._count} processes within {self._timeout_s:g} s")
            for connection in ready:
                line = self._line(connection)
                if line is not None:
                    answers[connection] = json.loads(line)
                    if "failed" in answers[connection]:
                        self._break(str(answers[connection]["failed"]))
        return list(answers.values())

    def _line(self, connection: socket.socket) -> Optional[bytes]:
        """Return the line that has arrived, or None if it is incomplete."""
        try:
            found = connection.recv(65536)
        except ConnectionResetError:
            found = b""
        if not found:
            self._break(self._describe_end())
        line, newline, rest = (self._pending[connection] + found).partition(b"\n")
        self._pending[connection] = rest if newline else line
        return line if newline else None

    def _check(self) -> None:
        if self._broken:
            raise ContenderError(self._broken)

    def _break(self, why: str) -> NoReturn:
        self._broken = why
        self._stop()  # the other processes wait for the failed one
        raise ContenderError(why)

    def _describe_end(self) -> str:
        """Return how the job ended, with the launcher's last message."""
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_END_S)
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        messages = [line for line in lines if not line.startswith("The logs are in")]
        return f"the job ended with exit status {self._launcher.poll()}: {messages[-1] if messages else 'no output'}"


def main(description: str) -> int:
    """Run the job that JSON describes, until it ends or the process that started this one ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGTERM)
    options = json.loads(description)
    options["program"], options["log_dir"] = tuple(options["program"]), Path(options["log_dir"])
    return run_job(Job(limits=Limits(grace_s=_GRACE_S, timeout_s=0), **options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
