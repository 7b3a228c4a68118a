"""How long a thread spent in each phase of its work, measured at each change of phase."""

from __future__ import annotations

import time
from typing import Callable, Dict, Mapping, Tuple


class PhaseTimer:
    """Sums the seconds of each phase, from one `enter` to the next; another thread reads them.

    Parameters
    ----------
    clock : callable () -> float, seconds

    Examples
    --------
    >>> laps = PhaseTimer(iter([0.0, 0.0, 3.0, 5.0]).__next__)
    >>> laps.enter("data")
    >>> laps.enter("dispatch")
    >>> laps.take()
    {'data': 3.0, 'dispatch': 2.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._now = "", clock()  # phase and start time in one tuple, so that another thread reads them together
        self._done: Dict[str, float] = {}
        self._taken: Dict[str, float] = {}

    def enter(self, part: str) -> None:
        """Begin a phase; "" for none."""
        at = self._clock()
        last, since = self._now
        self._done[last] = self._done.get(last, 0.0) + at - since
        self._now = part, at

    def take(self) -> Dict[str, float]:
        """Return the seconds of each phase since the last `take`, including the current one; {} if no phase was entered."""
        part, since = self._now
        totals = {**self._done, part: self._done.get(part, 0.0) + self._clock() - since}
        found = {name: max(0.0, seconds - self._taken.get(name, 0.0)) for name, seconds in totals.items()}
        self._taken = totals
        return {name: seconds for name, seconds in found.items() if seconds} if len(totals) > 1 else {}


def refined(shares: Mapping[str, float], laps: Mapping[str, float]) -> Dict[str, float]:
    """Return shares of time from measured phases, divided further by samples of the stack.

    Stack samples are late: Python code that holds the interpreter's lock is seen up to 5 ms later, and a short phase not at all.
    But a wait releases the lock, so stack samples measure correctly which part of a step is spent in a wait.

    Parameters
    ----------
    shares : mapping of str to float
        From stack samples, as in `Sample.spent`.
    laps : mapping of str to float, seconds
        In `data`, `dispatch`, `devices` and `callbacks`, and in "", outside an epoch; {} if no phases were measured.

    Examples
    --------
    >>> refined({"dispatch": 0.25, "sync": 0.25, "other": 0.5}, {"data": 1.0, "dispatch": 2.0, "": 1.0})
    {'data': 0.25, 'dispatch': 0.25, 'sync': 0.25, 'other': 0.25}
    """
    total = sum(laps.values())
    if not total:
        return dict(shares)
    measured = {part: seconds / total for part, seconds in laps.items()}
    found = {part: share for part, share in measured.items() if part not in ("", "dispatch")}
    found.update(_divided(measured.get("dispatch", 0.0), shares, ("dispatch", "sync")))
    for place, share in _divided(measured.get("", 0.0), shares, ("other", "callbacks")).items():
        found[place] = found.get(place, 0.0) + share
    return {place: share for place, share in found.items() if share}


def _divided(share: float, sampled: Mapping[str, float], places: Tuple[str, str]) -> Dict[str, float]:
    """Divide a share over two places in the proportion of their stack samples; all of it to the first if there are none."""
    seen = [sampled.get(place, 0.0) for place in places]
    if not sum(seen):
        return {places[0]: share}
    return {place: share * number / sum(seen) for place, number in zip(places, seen)}
