"""From samples to what is wrong, and its likely cause. Nothing here looks at the machine."""

from __future__ import annotations

from typing import List, Sequence

from .finding import Finding
from .load import idling, lost, throttling, uneven_load
from .memory import LEAST_BYTES, memory_full, memory_imbalance
from .sample import Sample

_FEWEST = 3


def diagnose(samples: Sequence[Sample], *, least_bytes: int = LEAST_BYTES) -> List[Finding]:
    """Return what is wrong in these samples, each with its likely cause.

    Parameters
    ----------
    samples : sequence of Sample
        Of some seconds to a whole run, in their order. Fewer than three say nothing.
    least_bytes : int
        A difference in memory that is worth a word.
    """
    if len(samples) < _FEWEST:
        return []
    last = samples[-1]
    memory = [*memory_imbalance(last, least_bytes=least_bytes), *memory_full(last)]
    return [*memory, *throttling(samples), *uneven_load(samples), *idling(samples), *lost(last)]
