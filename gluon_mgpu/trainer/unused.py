"""Parameters that got no gradient on any device: they raise, or are logged and left out."""

from __future__ import annotations

import logging
from typing import Iterable, Sequence, Set

from ..errors import StaleGradientError

logger = logging.getLogger("gluon_mgpu")


class UnusedParameters:
    """Checks which parameters a step leaves out.

    Parameters
    ----------
    names : list of str
    find_unused : bool
        Log the names of unused parameters, each once, instead of raising.
    """

    def __init__(self, names: Sequence[str], *, find_unused: bool) -> None:
        self._names = list(names)
        self._find_unused = find_unused
        self._logged: Set[str] = set()

    def check(self, trainable: Iterable[int], used: Iterable[int], ignore_stale_grad: bool) -> None:
        """Raise `StaleGradientError`, or log, if a trainable parameter is not used."""
        used = set(used)
        unused = [self._names[index] for index in sorted(set(trainable).difference(used))]
        if self._find_unused and used:  # with no gradient at all, the backward pass is missing
            self._log(unused)
        elif unused and not ignore_stale_grad:
            raise StaleGradientError(
                f"Trainer.step: got no gradient for {_some(unused)} on any device since the last step; expected a backward pass "
                "through every parameter. If this network uses only a part of them, pass ignore_stale_grad=True, or make the "
                "trainer with find_unused_parameters=True."
            )

    def _log(self, unused: Sequence[str]) -> None:
        new = [name for name in unused if name not in self._logged]
        if new:
            self._logged.update(new)
            logger.warning(
                "Trainer: %d parameters got no gradient on any device, and are left alone: %s", len(new), ", ".join(new)
            )


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
