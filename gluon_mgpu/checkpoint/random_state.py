"""The global random generators of a program: Python's, NumPy's and MXNet's."""

from __future__ import annotations

import hashlib
import random
from typing import Any, Dict, List

import mxnet as mx
import numpy as np
from mxnet import Context

from ..distributed import group


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


def draw_base(context: Context) -> int:
    """Draw a number from MXNet's generator of a device, in process 0 for the whole job. Waits for it.

    The state of MXNet's generators cannot be read, so checkpoints reseed them. The seeds are derived from this number, which is
    the same for every program with the same initial seed.
    """
    drawn = int(mx.nd.random.randint(0, 2**31 - 1, shape=(1,), ctx=context).asscalar())
    processes = group()  # generators with the same seed diverge if processes draw for parts of different sizes
    return drawn if processes is None else int(processes.all_gather_bytes(str(drawn).encode())[0])


def seed_of(base: int, step: int, rank: int = 0) -> int:
    """Return the seed of MXNet's generators after a checkpoint at this step, in this process.

    Examples
    --------
    >>> seed_of(7, 100) == seed_of(7, 100) != seed_of(7, 200)
    True
    """
    digest = hashlib.sha256(f"{base} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
