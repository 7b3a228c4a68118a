"""Numbers of bytes and columns of a history as text, with their units."""

from __future__ import annotations

import re
from numbers import Real
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


_NAMES = {"bleu": "BLEU", "chrf": "chrF"}  # scores from 0 to 100 that are no shares


def column_title(name: str) -> str:
    """Return the name of a history's column as people write it.

    Examples
    --------
    >>> column_title("test_exact_match"), column_title("test_bleu")
    ('test exact match', 'test BLEU')
    """
    return " ".join(_NAMES.get(word, word) for word in name.split("_"))


def in_percent(name: str, value: float) -> Optional[float]:
    """Return a column that is a share in percent; None for other columns.

    A history keeps accuracies from 0 to 1, and the exact match of translations in percent.

    Examples
    --------
    >>> in_percent("train_accuracy", 0.5), in_percent("test_exact_match", 50.0), in_percent("train_loss", 0.5)
    (50.0, 50.0, None)
    """
    if name.endswith("exact_match"):
        return value
    return 100 * value if re.search(r"accuracy(_\d+)?$", name) and not (value < 0 or value > 1) else None


def format_column(name: str, value: object) -> str:
    """Return a column of a history with its name and unit; other things than numbers, which a callback may add, as they are.

    Examples
    --------
    >>> format_column("test_accuracy", 0.883), format_column("test_exact_match", 0.8), format_column("test_bleu", 10.57)
    ('test accuracy 88.30 %', 'test exact match 0.80 %', 'test BLEU 10.57')
    >>> format_column("train_loss", 0.5), format_column("test_verdict", "good")
    ('train loss 0.5000', 'test verdict good')
    """
    if not isinstance(value, Real):
        return f"{column_title(name)} {value}"
    percent = in_percent(name, float(value))
    if percent is not None:
        return f"{column_title(name)} {percent:.2f} %"
    return f"{column_title(name)} {value:.{2 if name.split('_')[-1] in _NAMES else 4}f}"
