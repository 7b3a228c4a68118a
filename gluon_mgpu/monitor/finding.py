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


def format_bytes(num_bytes: float) -> str:
    """Return bytes as people read them.

    Examples
    --------
    >>> format_bytes(6 * 2**30), format_bytes(300 * 2**20)
    ('6.0 GiB', '300 MiB')
    """
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.0f} MiB"


def format_number(value: Optional[float]) -> str:
    """Return a number without decimals, `?` where nobody tells it."""
    return "?" if value is None else f"{value:.0f}"
