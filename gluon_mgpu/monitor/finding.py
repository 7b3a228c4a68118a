"""A problem, and the format of numbers in its message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Finding:
    """A problem that the monitor has found.

    Attributes
    ----------
    what : str
        `memory imbalance`, `memory full`, `throttled`, `uneven load`, `idle` or `lost`.
    device : str
        `gpu(0)`, `host`, or several.
    cause : str
        The most likely cause in a few words, such as `other process`.
    message : str
        The measurement, its cause, and what to do.
    """

    what: str
    device: str
    cause: str
    message: str


def format_number(value: Optional[float]) -> str:
    """Return a number without decimals, `?` if it is not available."""
    return "?" if value is None else f"{value:.0f}"
