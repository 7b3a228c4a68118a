"""A process of a job, with the guard around it and its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, NamedTuple

from ..process import exit_code_of
from . import guard
from .output import Log
from .tasks import MACHINES, Task

_LATE_S = 1.0  # for the rest of an output
_READ = 1 << 16
_NAMES = {signum.value: signum.name for signum in signal.Signals}
ASKED = {exit_code_of(signum): int(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


class Failure(NamedTuple):
    """Why a job has ended: the first of its processes that failed, not those that failed because of it.

    Attributes
    ----------
    cause : str
    code : int
        The exit code of the launcher.
    slot : int
        A worker's number on its machine, else -1.
    asked : int
        The signal after which the worker has saved and exited; 0 if it has failed.
    can_restart : bool
    """

    cause: str
    code: int
    slot: int = -1
    asked: int = 0
    can_restart: bool = True


class Started:
    """A process with the guard around it, and a thread for each of its outputs.

    Attributes
    ----------
    guard : int
        The guard's process number.
    gone : bool
        Whether the program has ended, and all processes that it has started.
    status : int
        Its wait status; 0 until it has ended.
    ended_at : float, seconds
        When it ended, by the guard's clock, which keeps the order of failures.
    """

    def __init__(self, task: Task, log: Log, woken: threading.Event) -> None:
        self.task, self.log, self._woken = task, log, woken
        self.gone, self.status, self.ended_at = False, 0, 0.0
        self._report, report_end = os.pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, guard.PASSED_ON)  # until the guard is ready for them
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(report_end), *task.command],
                env=dict(task.environ),
                stdin=subprocess.PIPE if task.name == MACHINES else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[report_end],
                start_new_session=True,  # so that only the launcher gets the terminal's Ctrl-C
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(report_end)
        self.guard = self._popen.pid
        pipes = enumerate((self._popen.stdout, self._popen.stderr))
        self._readers = [threading.Thread(target=self._copy, args=pipe, daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def poll(self) -> None:
        """Check whether the program and its guard have ended."""
        if self.gone or self._popen.poll() is None:
            return
        code = self._popen.returncode
        own = (time.monotonic(), -code if code < 0 else code << 8)  # of a guard that was killed, or could not run the program
        report = os.read(self._report, _READ).split() or own
        self.ended_at, self.status = float(report[0]), int(report[1])
        os.close(self._report)
        self.end_input()
        for reader in self._readers:
            reader.join(_LATE_S)
        self.log.close()
        self.gone = True

    def signal(self, signum: int) -> None:
        """Pass a signal to the program, unless it has ended."""
        if not self.gone:
            self._popen.send_signal(signum)

    def end_input(self) -> None:
        """Let a watch know that the workers of its machine have ended."""
        stdin, self._popen.stdin = self._popen.stdin, None
        if stdin is not None:
            with suppress(OSError), stdin:  # it may have ended
                stdin.write(b"\n")

    def failure(self, num_processes: int, where: str = "") -> Failure:
        """Return the cause of the job's end, which is the end of this process.

        Parameters
        ----------
        num_processes : int
            The workers of the job.
        where : str, optional
            Follows the name of the process.
        """
        who = f"rank {self.task.name}{where}" if self.task.slot >= 0 else f"{self.task.name}{where}"
        lines, code = self.log.last_lines(), os.WEXITSTATUS(self.status)
        asked = ASKED.get(code, 0) if self.task.slot >= 0 else 0
        what = f"exited with status {code}"
        if os.WIFSIGNALED(self.status):
            signum = os.WTERMSIG(self.status)
            what, code = f"was killed by {_NAMES.get(signum, f'signal {signum}')}", 128 + signum
        elif self.task.name == MACHINES and lines:
            return Failure(lines[-1], 1)
        elif asked:
            cause = f"{who} {what}: a signal has asked it to stop. Start the job again."
            return Failure(cause, code, asked=asked, can_restart=False)
        cause = f"{who} {what}, the first of {num_processes} processes to fail. Its log is {self.log.path}"
        cause += "\n  ".join([", its last lines:", *lines]) if lines else "."
        return Failure(cause, code, self.task.slot)

    def _copy(self, stream: int, pipe: IO[bytes]) -> None:
        with pipe:
            for data in iter(lambda: os.read(pipe.fileno(), _READ), b""):
                self.log.write(data, stream)
        self._woken.set()
