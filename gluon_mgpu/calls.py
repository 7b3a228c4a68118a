"""Calls of MXNet's C interface that every step makes, with their arguments converted once."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
from mxnet.base import _LIB, NDArrayHandle, OpHandle, c_handle_array, c_str, c_str_array, check_call, mx_uint
from mxnet.kvstore.kvstore import _ctype_key_value

from .nested import Leaf


class Flags:
    """Which gradients are fresh: written by a backward pass since they were used.

    MXNet keeps one flag a variable and has no function for many, so that reading and clearing go through `map`: a quarter of
    what the property `_fresh_grad` costs.

    Parameters
    ----------
    weights : list of lists of NDArray
        One list a parameter, in it one array a replica.
    """

    def __init__(self, weights: Sequence[Sequence[Leaf]]) -> None:
        self._weights = [weight for replicas in weights for weight in replicas]  # alive as long as their handles are used
        self._handles = [weight.handle for weight in self._weights]
        self._values = np.zeros(len(self._handles), dtype=np.int32)
        self._shape = (len(weights), len(weights[0]) if weights else 0)
        address, width = self._values.ctypes.data, self._values.itemsize
        self._into = [ctypes.c_void_p(address + width * i) for i in range(len(self._handles))]
        self._zeros = [0] * len(self._handles)
        self._all = np.ones_like(self._values).tobytes()
        self._get, self._set = _flag_functions()

    def all(self) -> bool:
        """Return whether every one is fresh, on every device."""
        self._read()
        return self._values.tobytes() == self._all

    def read(self) -> Any:
        """Return them as NumPy array of bool, shape (parameters, replicas)."""
        self._read()
        return self._values.reshape(self._shape) != 0

    def clear(self, which: Optional[Sequence[bool]] = None) -> None:
        """Unset all flags, or those of these parameters."""
        handles = self._handles
        if which is not None:
            handles = [handle for i, handle in enumerate(handles) if which[i // self._shape[1]]]
        if any(map(self._set, handles, self._zeros)):
            check_call(-1)

    def _read(self) -> None:
        if any(map(self._get, self._handles, self._into)):
            check_call(-1)


@lru_cache(maxsize=None)
def _flag_functions() -> Tuple[Any, Any]:
    """Return MXNet's functions to read and to write a flag; as PyDLL they keep the interpreter's lock, which is cheaper."""
    library = ctypes.PyDLL(_LIB._name)
    return library.MXNDArrayGetGradState, library.MXNDArraySetGradState


class PushPull:
    """Sums over devices that a store does together, in place.

    Parameters
    ----------
    store : mxnet.kvstore.KVStore
    keys : list of int
        Initialised in the store.
    arrays : list of lists of NDArray
        For each key, one array a device.
    """

    def __init__(self, store: Any, keys: List[int], arrays: List[List[Leaf]]) -> None:
        self._kept = store, arrays
        ckeys, values, _ = _ctype_key_value(keys, arrays)
        number = mx_uint(len(ckeys))
        self._arguments = store.handle, number, ckeys, number, ckeys, values, values

    def run(self, priority: int) -> None:
        """Queue the sums."""
        check_call(_LIB.MXKVStorePushPull(*self._arguments, ctypes.c_int(priority)))


class Operator:
    """An operator with its arrays; attributes are given with each call, and converted when they change.

    Parameters
    ----------
    name : str
        MXNet's name of it: `multi_sgd_mom_update`.
    inputs, outputs : list of NDArray
    """

    def __init__(self, name: str, inputs: List[Leaf], outputs: List[Leaf]) -> None:
        self._kept = inputs, outputs
        handle = OpHandle()
        check_call(_LIB.NNGetOpHandle(c_str(name), ctypes.byref(handle)))
        self._outputs = ctypes.cast(c_handle_array(outputs), ctypes.POINTER(NDArrayHandle))
        self._arrays = handle, ctypes.c_int(len(inputs)), c_handle_array(inputs)
        self._num_outputs = ctypes.c_int(len(outputs))
        self._attributes: Tuple[Tuple[str, Any], ...] = ()
        self._converted: Tuple[Any, ...] = (ctypes.c_int(0), c_str_array([]), c_str_array([]))

    def run(self, *attributes: Tuple[str, Any]) -> None:
        """Queue it, with pairs of name and value."""
        if attributes != self._attributes:
            names, values = [name for name, _ in attributes], [str(value) for _, value in attributes]
            self._converted = ctypes.c_int(len(names)), c_str_array(names), c_str_array(values)
            self._attributes = attributes
        stypes = ctypes.POINTER(ctypes.c_int)()
        check_call(
            _LIB.MXImperativeInvokeEx(
                *self._arrays,
                ctypes.byref(self._num_outputs),
                ctypes.byref(self._outputs),
                *self._converted,
                ctypes.byref(stypes),
            )
        )
