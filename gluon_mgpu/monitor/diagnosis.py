"""From samples to problems and their likely causes. Nothing here reads the machine."""

from __future__ import annotations

from typing import List, Sequence

from .finding import Finding
from .load import idling, lost, throttling, uneven_load
from .memory import LEAST_BYTES, memory_full, memory_imbalance
from .sample import Sample

_FEWEST = 3


def diagnose(samples: Sequence[Sample], *, least_bytes: int = LEAST_BYTES) -> List[Finding]:
    """Return the problems in these samples, each with its likely cause.

    Parameters
    ----------
    samples : sequence of Sample
        From some seconds up to a complete run, in order. Fewer than three give no findings.
    least_bytes : int
        The smallest difference in memory that counts.
    """
    if len(samples) < _FEWEST:
        return []
    last = samples[-1]
    memory = [*memory_imbalance(last, least_bytes=least_bytes), *memory_full(last)]
    return [*memory, *throttling(samples), *uneven_load(samples), *idling(samples), *lost(last)]
