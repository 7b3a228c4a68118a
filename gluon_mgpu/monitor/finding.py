"""Something that is wrong, and how numbers are told in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes
    ----------
    what : str
        `memory imbalance`, `memory full`, `throttled`, `uneven load`, `idle` or `lost`.
    device : str
        `gpu(0)`, `host`, or several.
    cause : str
        A word for what it most likely comes from, such as `other process`.
    message : str
        What was measured, why, and what to do.
    """

    what: str
    device: str
    cause: str
    message: str


def format_number(value: Optional[float]) -> str:
    """Return a number without decimals, `?` where nobody tells it."""
    return "?" if value is None else f"{value:.0f}"
