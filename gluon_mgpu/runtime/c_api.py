"""Calls of MXNet's C interface that every step makes, with their arguments converted once."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache, partial
from typing import Any, Callable, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, NDArrayHandle, OpHandle, c_handle_array, c_str, c_str_array, check_call, mx_uint
from mxnet.kvstore.kvstore import _ctype_key_value

from ..nested import Array

_NODE_IN_NDARRAY, _INFO_IN_NODE, _FLAG_IN_INFO = 88, 176, 80  # bytes


class Flags:
    """Which gradients are fresh: written by a backward pass since they were used.

    MXNet keeps one flag a variable, in memory of its own, and has no function for many. Where they can be found, all are read
    and cleared where they stand, by two NumPy operations; elsewhere by two calls of the C interface for each.

    Parameters
    ----------
    weights : list of lists of NDArray
        One list a parameter, in it one array a replica. Marked as variables; to be made anew after they are marked again.
    """

    def __init__(self, weights: Sequence[Sequence[Array]]) -> None:
        self._shape = (len(weights), len(weights[0]) if weights else 0)
        self._kept = [_shallow_copy(weight) for replicas in weights for weight in replicas]  # and with them, what is marked
        self._handles = [array.handle for array in self._kept]
        self._get, self._set = _flag_functions()
        places = _addresses_of_flags(self._handles)
        self._memory = _memory_between(places)
        self._places: Any = None if self._memory is None else np.array(places).reshape(self._shape) - min(places)

    def all(self) -> bool:
        """Return whether every one is fresh, on every device."""
        return bool(self.read().all())

    def read(self) -> Any:
        """Return them as NumPy array of bool, shape (parameters, replicas)."""
        if self._memory is not None:
            return self._memory[self._places]
        return np.array([read_flag(self._get, handle) for handle in self._handles], dtype=bool).reshape(self._shape)

    def clear(self, which: Optional[Sequence[bool]] = None) -> None:
        """Unset all flags, or those of these parameters."""
        if self._memory is not None:
            self._memory[self._places if which is None else self._places[np.array(which, dtype=bool)]] = False
            return
        for i, handle in enumerate(self._handles):
            if which is None or which[i // self._shape[1]]:
                check_call(self._set(handle, 0))

    def put(self, which: Any, value: bool) -> None:
        """Set or unset the flags where an array of bool, shape (parameters, replicas), is true."""
        if self._memory is not None:
            self._memory[self._places[which]] = value
            return
        for handle, is_wanted in zip(self._handles, np.ravel(which)):
            if is_wanted:
                check_call(self._set(handle, int(value)))


def on_backward(before: Callable[[], Any], after: Callable[[Any], None]) -> None:
    """Call `before`, then `after` with what that returned, around every backward pass that writes gradients.

    `autograd.grad`, which returns them, is left out. Both functions are MXNet's C interface, which its Python looks up by name
    at each call.
    """
    for name, may_return in (("MXAutogradBackwardEx", True), ("MXAutogradBackward", False)):
        setattr(_LIB, name, _between(before, getattr(_LIB, name), after, may_return=may_return))


def _between(before: Callable[[], Any], function: Any, after: Callable[[Any], None], *, may_return: bool) -> Callable[..., int]:
    def backward(*arguments: Any) -> int:
        if may_return and arguments[3]:  # the number of arrays whose gradients are returned
            returned: int = function(*arguments)
            return returned
        found = before()
        try:
            status: int = function(*arguments)
        finally:
            after(found)
        return status

    return backward


def write_unheld(array: Array, data: np.ndarray) -> None:
    """Write NumPy's numbers into a legacy array on the CPU that no operation is to read or write, without asking the engine.

    MXNet's own way waits until a worker thread of the context has time for it, behind all that computes.
    """
    np.copyto(_memory_of(array), data, casting="unsafe")


def values_of(array: Array) -> np.ndarray:
    """Return an array's values when it has them, to be read only: where they are, of a dense one on the CPU, else a copy.

    A copy would take as much memory again. Nobody may write to the array as long as its values are in use.

    Examples
    --------
    >>> values_of(mx.nd.array([[1, 2]])).tolist()
    [[1.0, 2.0]]
    """
    if array.context.device_type != "cpu" or array.stype != "default" or not array.size:
        copied: np.ndarray = array.asnumpy()
        return copied
    array.wait_to_read()
    values = _memory_of(array)
    values.flags.writeable = False
    return values


def _memory_of(array: Array) -> np.ndarray:
    """Return the memory of a dense array on the CPU, which lives as long as what is returned."""
    place = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(place)))
    dtype = np.dtype(array.dtype)
    memory: Any = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(place.value or 0)
    memory.owner = array
    return np.frombuffer(memory, dtype).reshape(array.shape)


def read_flag(get: Any, handle: Any) -> int:
    """Return one flag, by the C interface's function for it."""
    value = ctypes.c_int()
    check_call(get(handle, ctypes.byref(value)))
    return value.value


def _shallow_copy(array: Array) -> Array:
    """Return another NDArray of the same memory and the same variable, which live as long as it does."""
    handle = NDArrayHandle()
    check_call(_LIB.MXShallowCopyNDArray(array.handle, ctypes.byref(handle)))
    return mx.nd.NDArray(handle)


def _addresses_of_flags(handles: Sequence[Any]) -> List[int]:
    """Return where each array's flag stands, [] where that cannot be found.

    ```
    NDArray ── autograd_entry_.node ──► Node ── info, a dmlc::any ──► AGInfo ── fresh_out_grad
    ```

    Each is tried: it must follow what the C interface sets. Memory that is not there gives an error, not the end of the process.

    Source: MXNet 1.9.1, mxnet/ndarray.h, nnvm/node.h, mxnet/imperative.h, as its wheels for x86-64 lay them out.
    """
    if mx.__version__ != "1.9.1" or platform.machine() != "x86_64":
        return []
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            addresses = [_follow(memory, handle.value) for handle in handles]
            return addresses if all(map(partial(_is_flag, memory), handles, addresses)) else []
    except (OSError, OverflowError):
        return []


def _is_flag(memory: Any, handle: Any, address: int) -> bool:
    """Return whether the byte at an address is the flag of an array, which keeps its value."""
    get, set_ = _flag_functions()
    before = read_flag(get, handle)
    seen: List[int] = []
    for value in (1 - before, before):
        check_call(set_(handle, value))
        seen += os.pread(memory.fileno(), 1, address)
    return seen == [1 - before, before]


def _follow(memory: Any, address: int) -> int:
    for offset in (_NODE_IN_NDARRAY, _INFO_IN_NODE):
        address = int.from_bytes(os.pread(memory.fileno(), 8, address + offset), "little")
    return address + _FLAG_IN_INFO


def _memory_between(addresses: Sequence[int]) -> Any:
    """Return this process's memory from the lowest address to the highest as a NumPy array of bool, None without addresses.

    It is to be indexed by whole-number arrays alone: not all of it is there.
    """
    if not addresses:
        return None

    class Memory:
        __array_interface__ = {
            "version": 3,
            "data": (min(addresses), False),
            "shape": (max(addresses) - min(addresses) + 1,),
            "typestr": "|b1",
        }

    return np.asarray(Memory())


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

    def __init__(self, store: Any, keys: List[int], arrays: List[List[Array]]) -> None:
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

    def __init__(self, name: str, inputs: List[Array], outputs: List[Array]) -> None:
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
