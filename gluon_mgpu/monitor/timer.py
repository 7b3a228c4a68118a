"""Timers that are correct for an asynchronous engine: start and stop wait for all devices."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any, List

from ..runtime.loaded import mxnet as mx


class Timer:
    """Measures seconds, like d2l's `Timer`, from idle devices to idle devices.

    MXNet returns from an operation before the device has run it. A timer that does not wait measures only the time to queue
    operations; this one calls `waitall` when it starts and when it stops.

    Attributes
    ----------
    times : list of float, seconds
        One entry per `stop`.

    Examples
    --------
    >>> timer = Timer()
    >>> seconds = timer.stop()
    >>> timer.start()
    >>> timer.times == [seconds, timer.stop()]
    True
    >>> with Timer() as timer:
    ...     total = mx.nd.ones((3, 3)).sum()
    >>> len(timer.times)
    1

    Source: the interface is that of d2l, chapter "Minibatch Stochastic Gradient Descent".
    """

    def __init__(self) -> None:
        self.times: List[float] = []
        self.start()

    def start(self) -> None:
        """Wait for all devices, then start the clock."""
        mx.nd.waitall()
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Wait for all devices, then record and return the seconds since `start`."""
        mx.nd.waitall()
        self.times.append(time.perf_counter() - self._started)
        return self.times[-1]

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:  # an error from waitall must not hide this one
            self.stop()

    def avg(self) -> float:
        """Return the mean of the recorded times, in seconds.

        Raises
        ------
        ValueError
            No time was recorded.
        """
        if not self.times:
            raise ValueError("Timer.avg: got no recorded time; expected at least one. Call stop() first.")
        return sum(self.times) / len(self.times)

    def sum(self) -> float:
        """Return the sum of the recorded times, in seconds."""
        return sum(self.times)

    def cumsum(self) -> List[float]:
        """Return the running sums of the recorded times, in seconds."""
        return list(accumulate(self.times))
