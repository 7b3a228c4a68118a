"""Ctrl-C and SIGTERM while `fit` runs: noted, agreed on by all processes, and raised between two batches.

signal ──► noted ──► the batch under way ends ──► all processes agree on the step ──► callbacks save ──► KeyboardInterrupt
                                                                                                     or SystemExit(143)
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
from ..runtime.environment import logger

# A SIGTERM so soon after another one belongs to the same request: timeout(1) sends two, and Slurm and systemd send one to every
# process, also to the launcher, which passes its own on.
_SAME_S = 0.5
_ASK_S = 0.5  # about how often processes ask each other
_MOST_STEPS = 16  # after so many they ask each other, however fast the steps are


class Terminated(SystemExit):
    """Ends a program after SIGTERM when `fit` has saved, with exit code 143, as a shell reports SIGTERM."""

    def __init__(self, where: str) -> None:
        super().__init__(128 + signal.SIGTERM)
        self._where = where

    def __str__(self) -> str:
        return self._where


def raise_interrupt(signum: int, where: str) -> None:
    """Raise what ends the program: `KeyboardInterrupt`, after SIGTERM `Terminated`."""
    if signum == signal.SIGTERM:
        logger.warning("%s, because of SIGTERM", where)  # the interpreter prints nothing of a SystemExit
        raise Terminated(where)
    raise KeyboardInterrupt(where)


class Interrupts:
    """The signal that has asked this process to stop.

    Attributes
    ----------
    first : int
        Its number; 0 for none.
    """

    def __init__(self) -> None:
        self.first = 0
        self._at = 0.0
        self._pid = os.getpid()

    def note(self, signum: int, frame: Optional[FrameType]) -> None:
        """Remember the first signal. A later one ends the process at once, unless it belongs to the same request."""
        if os.getpid() != self._pid:
            self._end_fork(signum)
        elif not self.first:
            self.first, self._at = signum, time.monotonic()
        elif signum != signal.SIGTERM:
            signal.default_int_handler(signum, frame)
        elif time.monotonic() - self._at >= _SAME_S:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(self._pid, signum)

    def _end_fork(self, signum: int) -> None:
        """Let SIGTERM end a fork of this process, such as a worker of a DataLoader. Ctrl-C is the parent's to handle."""
        if signum == signal.SIGTERM:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Note Ctrl-C and SIGTERM in this block, as they must not cut an update in two; raise what came too late for it at its end.

    A program's own handlers stay, and so do ignored signals.
    """
    interrupts = Interrupts()
    defaults: Dict[int, object] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    ours = [signum for signum, default in defaults.items() if is_main and signal.getsignal(signum) is default]
    for signum in ours:
        signal.signal(signum, interrupts.note)
    try:
        yield interrupts
    finally:
        for signum in ours:
            signal.signal(signum, defaults[signum])  # type: ignore[arg-type]
    if interrupts.first:
        raise_interrupt(interrupts.first, "fit: stopped at its end")


def any_asks(signum: int) -> int:
    """Return the signal that asked any process to stop, 0 for none; they wait for each other."""
    processes = group()
    return signum if processes is None else int(processes.all_gather(np.array([signum], np.float32)).max())


class Stops:
    """Decides after which step of one pass to stop: at once in a process that is alone, else where all processes agree.

    ```
    step    1   2       4               8                               16     fast steps: after 1, 2, 4, 8, then each 16 more
            │   │       │               │                               │
    ask     ●   ●       ●               ●                               ●      steps of 0.5 s or more: after each
    ```

    Asking costs milliseconds, so fast steps are not asked about one by one. The slowest process's clock decides how many steps
    make `_ASK_S` seconds, so that all processes ask after the same step.
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
            The signal that this process got; 0 for none.
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
        self._interval = max(1, min(2 * self._interval, _MOST_STEPS, int(_ASK_S / max(float(seconds), 1e-6))))
        self._num_steps, self._since = 0, time.perf_counter()
        return int(signals)
