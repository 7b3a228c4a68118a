"""The global random generators of a program: Python's, NumPy's and MXNet's."""

from __future__ import annotations

import random
from typing import Any, Dict, List

import numpy as np

from ..trainer.tree_sum import draw_base as draw_base
from ..trainer.tree_sum import seed_of as seed_of

_WORD = range(2**32)
FORM = {  # NumPy would read at any place that it is given
    "python": [3, [*[_WORD] * 624, range(625)], (None, float)],
    "numpy": ["MT19937", [_WORD] * 624, range(625), range(2), float],
}


def random_state() -> Dict[str, List[Any]]:
    """Return the state of the global generators of Python and NumPy as values for JSON.

    Examples
    --------
    >>> state = random_state()
    >>> drawn = random.random(), np.random.uniform()
    >>> set_random_state(state)
    >>> drawn == (random.random(), np.random.uniform())
    True
    """
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {"python": [version, list(numbers), gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def set_random_state(state: Dict[str, List[Any]]) -> None:
    """Set the generators to a state that `random_state` returned."""
    version, numbers, gauss = state["python"]
    np.random.set_state(tuple(state["numpy"]))
    random.setstate((version, tuple(numbers), gauss))
