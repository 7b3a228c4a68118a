"""Numbers of bytes as text."""

from __future__ import annotations

from typing import Optional


def format_bytes(num_bytes: Optional[float], *, digits: int = 1) -> str:
    """Return a number of bytes in GiB, or in MiB below half a GiB; "?" for None.

    Examples
    --------
    >>> format_bytes(6 * 2**30), format_bytes(300 * 2**20), format_bytes(None)
    ('6.0 GiB', '300 MiB', '?')
    """
    if num_bytes is None:
        return "?"
    return f"{num_bytes / 2**30:.{digits}f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.0f} MiB"
