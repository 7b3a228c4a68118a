"""How long a thread was in each part of its work, told at each change."""

from __future__ import annotations

import time
from typing import Callable, Dict, Mapping, Tuple


class PhaseTimer:
    """Adds up the seconds of each part, from one `enter` to the next; another thread takes them.

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
        self._now = "", clock()  # the part, and since when: one value, so that no other thread sees half of it
        self._done: Dict[str, float] = {}
        self._taken: Dict[str, float] = {}

    def enter(self, part: str) -> None:
        """Begin a part; "" is none."""
        at = self._clock()
        last, since = self._now
        self._done[last] = self._done.get(last, 0.0) + at - since
        self._now = part, at

    def take(self) -> Dict[str, float]:
        """Return the seconds of each part since the last `take`, the one under way among them; {} where no part was entered."""
        part, since = self._now
        whole = {**self._done, part: self._done.get(part, 0.0) + self._clock() - since}
        found = {name: max(0.0, seconds - self._taken.get(name, 0.0)) for name, seconds in whole.items()}
        self._taken = whole
        return {name: seconds for name, seconds in found.items() if seconds} if len(whole) > 1 else {}


def refined(looks: Mapping[str, float], laps: Mapping[str, float]) -> Dict[str, float]:
    """Return the shares that laps tell, and of their parts what only looks at the stack can.

    Looks come late: Python code that does not let go of the interpreter's lock is seen when it does, up to 5 ms later, and a
    short part not at all. But which of a step's time goes by in a wait, for which the lock is let go, they see rightly.

    Parameters
    ----------
    looks : mapping of str to float
        Shares by looks at the stack, as in `Sample.spent`.
    laps : mapping of str to float, seconds
        In `data`, `dispatch`, `devices` and `callbacks`, and in "", outside of an epoch; {} where nobody tells.

    Examples
    --------
    >>> refined({"dispatch": 0.25, "sync": 0.25, "other": 0.5}, {"data": 1.0, "dispatch": 2.0, "": 1.0})
    {'data': 0.25, 'dispatch': 0.25, 'sync': 0.25, 'other': 0.25}
    """
    whole = sum(laps.values())
    if not whole:
        return dict(looks)
    shares = {part: seconds / whole for part, seconds in laps.items()}
    found = {part: share for part, share in shares.items() if part not in ("", "dispatch")}
    found.update(_divided(shares.get("dispatch", 0.0), looks, ("dispatch", "sync")))
    for place, share in _divided(shares.get("", 0.0), looks, ("other", "callbacks")).items():
        found[place] = found.get(place, 0.0) + share
    return {place: share for place, share in found.items() if share}


def _divided(share: float, looks: Mapping[str, float], places: Tuple[str, str]) -> Dict[str, float]:
    """Return a share divided as the looks at these places are; the first has it all where there were none."""
    seen = [looks.get(place, 0.0) for place in places]
    if not sum(seen):
        return {places[0]: share}
    return {place: share * number / sum(seen) for place, number in zip(places, seen)}
