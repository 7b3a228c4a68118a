"""Nested data: tuples, lists and dicts of arrays, visited array by array in one order."""

from __future__ import annotations

import copy
import numbers
import warnings
from collections.abc import Mapping  # typing's is ten times slower to ask
from typing import Any, Callable, Iterable, Iterator, List, Tuple

import mxnet as mx
import numpy as np

from .errors import NestedError, ShardError

MOST_LEVELS = 32  # of tuples, lists and dicts inside each other

Array = Any  # an mx.nd.NDArray, an mx.np.ndarray or a numpy.ndarray


class Fields(tuple):
    """Features and labels: a tuple of nested data that is never read as one array, even if it holds only plain numbers."""


def is_device_array(value: Any) -> bool:
    """Return whether this is an MXNet array, legacy or np."""
    return isinstance(value, mx.nd.NDArray)  # mx.np.ndarray is a subclass


def is_float(array: Array) -> bool:
    """Return whether an MXNet array holds floating point, bfloat16 included, which gradients can be of."""
    return np.dtype(array.dtype).kind not in "iub"


def joinable(array: Array) -> Array:
    """Return an MXNet array that `concat` takes: of bool, one of uint8."""
    return array.astype("uint8") if array.dtype == np.bool_ else array


def is_leaf(value: Any) -> bool:
    """Return whether this is one array: of MXNet, of NumPy, or plain numbers that Gluon would turn into an array."""
    if is_device_array(value) or isinstance(value, (np.ndarray, np.generic, numbers.Number)):
        return True
    return isinstance(value, (list, tuple)) and not isinstance(value, Fields) and _is_numeric(value)


def map_leaves(function: Callable[..., Any], data: Any, *others: Any, path: str = "data") -> Any:
    """Return `data` with every leaf replaced by `function(path, leaf, *leaves of the others)`.

    Parameters
    ----------
    function : callable
        Called with the leaf's path, such as `data[0]['mask']`, the leaf, and the value at the same place of each of `others`.
    data : array, or tuple, list or dict of nested data
        `None` stays `None`.
    others : nested data of the same form, or a value that stands for all leaves below it
    path : str
        The caller's name of `data`, for errors.

    Raises
    ------
    NestedError
        A value in the data is neither an array nor a container.
    """
    if data is None:
        return None
    if path.count("[") > MOST_LEVELS:
        raise NestedError(f"{path[:60]}...: got data of more than {MOST_LEVELS} levels; expected fewer. Pass the inner data.")
    if is_leaf(data):
        return function(path, data, *others)
    if isinstance(data, Mapping):
        mapped = copy.copy(data)
        for key in data:
            below = [_below(other, key, data, path) for other in others]
            mapped[key] = map_leaves(function, data[key], *below, path=f"{path}[{key!r}]")  # type: ignore[index]
        return mapped
    if isinstance(data, (list, tuple)):
        items = [
            map_leaves(function, item, *(_below(other, i, data, path) for other in others), path=f"{path}[{i}]")
            for i, item in enumerate(data)
        ]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    raise NestedError(
        f"{path}: got {type(data).__name__}; expected an array, or a tuple, list or dict of arrays. "
        "Remove other values from the batch."
    )


def leaves(data: Any, path: str = "data") -> Iterator[Tuple[str, Array]]:
    """Yield (path, leaf) of every leaf of nested data, in order."""
    found: List[Tuple[str, Array]] = []
    map_leaves(lambda at, leaf: found.append((at, leaf)), data, path=path)
    return iter(found)


def with_leaves(data: Any, arrays: Iterable[Any]) -> Any:
    """Return nested data of the form of these, with other leaves, in order."""
    rest = iter(arrays)
    return map_leaves(lambda _, leaf: next(rest), data)


def num_bytes(array: Array) -> int:
    """Return the bytes of an MXNet array's elements; of a sparse one, an upper bound."""
    return int(np.prod(array.shape)) * int(np.dtype(array.dtype).itemsize)


def _below(other: Any, key: Any, data: Any, path: str) -> Any:
    """Return the value of `other` at `key`, or `other` itself where it is one value for everything below."""
    if not isinstance(other, (list, tuple, Mapping)) or is_device_array(other):
        return other
    if isinstance(other, Mapping) != isinstance(data, Mapping) or len(other) != len(data):
        raise ShardError(
            f"{path}: got a {type(data).__name__} of {len(data)} and a {type(other).__name__} of {len(other)}; "
            "expected both of one form. Pass one value for all, or one for each array."
        )
    if isinstance(other, Mapping) and key not in other:
        raise ShardError(
            f"{path}: got a dict and one that has no {key!r}; expected the same keys in both. Pass one value for each array."
        )
    return other[key]


def _is_numeric(value: Any, level: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and level <= MOST_LEVELS and all(_is_numeric(item, level + 1) for item in value)
    return isinstance(value, (numbers.Number, np.generic))


def host_array(data: Any) -> np.ndarray:
    """Return nested numbers as a NumPy array; rows of unequal length raise ValueError, of which NumPy before 1.24 only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            return np.asarray(data)
        except UserWarning as warning:
            raise ValueError(str(warning)) from None
