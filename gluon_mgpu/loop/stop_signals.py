"""Ctrl-C, SIGTERM and SIGUSR1 while `fit` runs: recorded, agreed on by all processes, and raised between two batches.

signal ──► recorded ──► the current batch ends ──► all processes agree on the step ──► callbacks save ──► KeyboardInterrupt,
                                                                                    SystemExit(143), or SystemExit(85)
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from types import FrameType
from typing import Dict, Iterator, Optional

import numpy as np

from ..distributed import group
from ..distributed.process import exit_code_of
from ..runtime.environment import logger

# A SIGTERM within this time after another one belongs to the same request. timeout(1) sends two. Slurm and systemd send one to
# every process, including the launcher, which forwards its own.
_SAME_REQUEST_S = 0.5
_VOTE_S = 0.5  # about how often processes vote
_MAX_STEPS = 16  # between two votes, however fast the steps are


class Terminated(SystemExit):
    """Ends a program after SIGTERM, once `fit` has saved, with exit code 143: a shell reports SIGTERM the same way."""

    signum: int = signal.SIGTERM
    title = "Terminated"

    def __init__(self, where: str) -> None:
        super().__init__(exit_code_of(self.signum))
        self._where = where

    def __str__(self) -> str:
        return self._where


class Requeue(Terminated):
    """Ends a program after SIGUSR1, once `fit` has saved, with exit code 85: start the same command again."""

    signum = signal.SIGUSR1
    title = "Saved, to be started again"


def raise_interrupt(signum: int, where: str) -> None:
    """Raise the exception that ends the program: `Terminated`, `Requeue` or `KeyboardInterrupt`."""
    for end in (Terminated, Requeue):
        if signum == end.signum:
            logger.warning("%s, because of %s", where, signal.Signals(signum).name)  # Python does not print a SystemExit
            raise end(where)
    raise KeyboardInterrupt(where)


@contextmanager
def raise_on_sigterm(where: str) -> Iterator[None]:
    """Raise `Terminated` in this block when SIGTERM arrives, and ignore later ones: timeout(1) sends two."""

    def handle(signum: int, frame: Optional[FrameType]) -> None:
        signal.signal(signum, signal.SIG_IGN)
        raise_interrupt(signum, where)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class CaughtSignal:
    """The signal that has asked this process to stop.

    Attributes
    ----------
    signum : int
        Its number; 0 for none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._at: Optional[float] = None  # when Ctrl-C or SIGTERM asked first
        self._pid = os.getpid()

    def handle(self, signum: int, frame: Optional[FrameType]) -> None:
        """Record the first signal. A later one ends the process immediately, unless it belongs to the same request.

        A SIGUSR1 never does. The SIGTERM after it is the scheduler's own, at the time limit: the process may still be saving.
        """
        if os.getpid() != self._pid:  # a fork, such as a worker of a DataLoader; the parent handles Ctrl-C
            if signum == signal.SIGTERM:
                _end_by(signum)
        elif signum == signal.SIGUSR1:
            self.signum = self.signum or signum
        elif self.signum and signum == signal.SIGINT:
            signal.default_int_handler(signum, frame)
        elif self._at is None:
            self.signum, self._at = self.signum or signum, time.monotonic()
        elif time.monotonic() - self._at >= _SAME_REQUEST_S:
            _end_by(signum)


def _end_by(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


@contextmanager
def catch_signals(caught: CaughtSignal) -> Iterator[None]:
    """Record Ctrl-C, SIGTERM and SIGUSR1 in this block instead of cutting an update in two.

    Raise at its end if one is still pending. A program's own handlers and ignored signals stay.
    """
    defaults: Dict[int, object] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_DFL}
    defaults[signal.SIGINT] = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    ours = [signum for signum, default in defaults.items() if is_main and signal.getsignal(signum) is default]
    for signum in ours:
        signal.signal(signum, caught.handle)
    try:
        yield
    finally:
        for signum in ours:
            signal.signal(signum, defaults[signum])  # type: ignore[arg-type]
    if caught.signum:
        raise_interrupt(caught.signum, "fit: stopped at its end")


class StopVote:
    """Decides after which step of a pass to stop: immediately in a single process, else at a step on which all processes agree.

    ```
    step    1   2       4               8                               16     fast steps: after 1, 2, 4, 8, then every 16
            │   │       │               │                               │
    vote    ●   ●       ●               ●                               ●      steps of 0.5 s or more: after each
    ```

    A vote costs milliseconds, so fast steps share one. The slowest process's clock decides how many steps make `_VOTE_S` seconds,
    so that all processes vote after the same step. A new object votes at its first step.
    """

    def __init__(self) -> None:
        self._interval = 1
        self._num_steps = 0
        self._since = time.perf_counter()

    def after_step(self, signum: int, *, may_stop: bool = True) -> int:
        """Return the signal on which to stop after this step, 0 to continue.

        Parameters
        ----------
        signum : int
            The signal that this process received; 0 for none.
        may_stop : bool
            Whether the pass can stop here; the same in all processes.
        """
        processes = group()
        self._num_steps += 1
        if not may_stop:
            return 0
        if processes is None:
            return signum
        if self._num_steps < self._interval:
            return 0
        step_s = (time.perf_counter() - self._since) / self._num_steps
        signals, seconds = processes.all_gather(np.array([signum, step_s], np.float32)).max(axis=0)
        self._interval = max(1, min(2 * self._interval, _MAX_STEPS, int(_VOTE_S / max(float(seconds), 1e-6))))
        self._num_steps, self._since = 0, time.perf_counter()
        return int(signals)
