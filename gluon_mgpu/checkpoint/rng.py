"""The global random generators of a program: Python's, NumPy's and MXNet's."""

from __future__ import annotations

import hashlib
import random
from typing import Any, Dict, List

import mxnet as mx
import numpy as np
from mxnet import Context

from .. import schema
from ..distributed import group

_NUM_WORDS = 624  # of a Mersenne Twister


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
    name, keys, place, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, _packed(numbers), gauss],
        "numpy": [name, _packed(keys), int(place), int(has_gauss), float(cached)],
    }


def set_random_state(state: Dict[str, List[Any]]) -> None:
    """Set the generators to a state that `random_state` returned.

    Raises
    ------
    ValueError, TypeError, KeyError
        The state is invalid.
    """
    check_random_state(state)
    _set(state, random, np.random)


def check_random_state(state: Dict[str, List[Any]]) -> None:
    """Raise the errors of `set_random_state`, without changing the generators."""
    _set(state, random.Random(), np.random.RandomState())


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


def _set(state: Dict[str, List[Any]], python: Any, numpy: Any) -> None:
    """Set two generators."""
    version, numbers, gauss = state["python"]
    name, keys, place, has_gauss, cached = state["numpy"]
    numpy.set_state((name, np.array(_unpacked(keys), np.uint32), place, has_gauss, cached))
    python.setstate((version, tuple(_unpacked(numbers)), gauss))


def _packed(numbers: Any) -> str:
    """Return 32-bit integers as a hexadecimal text, a fifth as long as a list of them."""
    return np.asarray(numbers, "<u4").tobytes().hex()


def _unpacked(text: str) -> List[int]:
    return np.frombuffer(bytes.fromhex(text), "<u4").tolist()


def _words(num: int) -> schema.Schema:
    """Return the schema of `num` numbers packed by `_packed`."""
    return schema.that(f"{num * 8} hexadecimal digits", lambda value: len(value) == num * 8 and len(_unpacked(value)) == num)


def _is_settable(state: Dict[str, Any]) -> bool:
    check_random_state(state)
    return True


_NUMBER, _PLACE = schema.number(), schema.integer(0, _NUM_WORDS)
STATES: Dict[str, schema.Schema] = {
    "python": schema.items(schema.constant(random.getstate()[0]), _words(_NUM_WORDS + 1), schema.nullable(_NUMBER)),
    "numpy": schema.items(schema.constant("MT19937"), _words(_NUM_WORDS), _PLACE, schema.integer(0, 1), _NUMBER),
}
is_taken = schema.that("a state that random.setstate and numpy.random.set_state accept", _is_settable)
RANDOM_STATE = schema.also(schema.record(STATES), is_taken)
