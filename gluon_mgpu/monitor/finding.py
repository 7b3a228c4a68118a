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


def format_bytes(num_bytes: float) -> str:
    """Return bytes as text with a unit.

    Examples
    --------
    >>> format_bytes(6 * 2**30), format_bytes(300 * 2**20)
    ('6.0 GiB', '300 MiB')
    """
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.0f} MiB"


def format_number(value: Optional[float]) -> str:
    """Return a number without decimals, `?` if it is not available."""
    return "?" if value is None else f"{value:.0f}"
