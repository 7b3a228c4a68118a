"""Calls of MXNet's C interface in every step, with arguments that are converted once."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, Tuple

import numpy as np
from mxnet import Context
from mxnet.base import _LIB, NDArrayHandle, OpHandle, c_handle_array, c_str, c_str_array, check_call, mx_uint
from mxnet.kvstore.kvstore import _ctype_key_value
from mxnet.ndarray import NDArray
from mxnet.ndarray.ndarray import _new_alloc_handle

from ..nested import Array


def on_backward(before: Callable[[], Any], after: Callable[[Any], None]) -> None:
    """Call `before`, and then `after` with its result, around every backward pass that writes gradients.

    `autograd.grad` returns gradients and writes none; it is not included. MXNet's Python code looks up both functions of the C
    interface by name at each call, so they can be replaced.
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
    """Write a NumPy array into a legacy array on the CPU without the engine. No pending operation may use the array.

    MXNet's own copy waits for a worker thread of the context, behind all queued operations.
    """
    np.copyto(_memory_of(array), data, casting="unsafe")


def unallocated(array: Array) -> Array:
    """Return a legacy array of the same form and device, whose memory the first operation that writes it allocates."""
    return NDArray(_new_alloc_handle(array.shape, array.context, True, array.dtype))


def values_of(array: Array) -> np.ndarray:
    """Return an array's values, read-only: a view of a dense array on the CPU, otherwise a copy. It waits for the values.

    A view needs no memory of its own. Do not write to the array while its values are in use.

    Examples
    --------
    >>> import mxnet as mx
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
    """Return the memory of a dense array on the CPU. The array exists as long as the result does."""
    place = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(place)))
    dtype = np.dtype(array.dtype)
    memory: Any = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(place.value or 0)
    memory.owner = array
    return np.frombuffer(memory, dtype).reshape(array.shape)


class PushPull:
    """Sums over devices that a store computes in one call.

    Parameters
    ----------
    store : mxnet.kvstore.KVStore
    keys : list of int
        Keys initialised in the store.
    arrays : list of lists of NDArray
        For each key, one array per device.
    outputs : list of lists of NDArray
        For each key, the arrays that get the sum.
    """

    def __init__(self, store: Any, keys: List[int], arrays: List[List[Array]], outputs: List[List[Array]]) -> None:
        self._kept = store, arrays, outputs
        (ckeys, values, _), (targets, sums, _) = _ctype_key_value(keys, arrays), _ctype_key_value(keys, outputs)
        self._arguments = store.handle, mx_uint(len(ckeys)), ckeys, mx_uint(len(targets)), targets, values, sums

    def run(self, priority: int) -> None:
        """Queue the sums."""
        check_call(_LIB.MXKVStorePushPull(*self._arguments, ctypes.c_int(priority)))


_INVOKE = _LIB.MXImperativeInvokeEx
_NO_ATTRIBUTES = c_str_array([])


class Copy:
    """Copies of one array, or into one array, with less work in Python than `NDArray.copy` and `copyto`.

    Parameters
    ----------
    array : NDArray
        A legacy array.
    """

    def __init__(self, array: Array) -> None:
        self._array = array
        self._own = (ctypes.c_void_p * 1)(array.handle)
        self._source = (ctypes.c_void_p * 1)()
        target = ctypes.cast(self._own, ctypes.POINTER(ctypes.c_void_p))
        self._fill = _arguments(_COPYTO, self._source, 1, target)

    def new(self) -> Array:
        """Queue a copy in new memory on the same device, and return it."""
        outputs = ctypes.POINTER(ctypes.c_void_p)()
        check_call(_INVOKE(*_arguments(_COPY, self._own, 0, outputs)))
        return NDArray(NDArrayHandle(outputs[0]))

    def fill_from(self, source: Array) -> None:
        """Queue a copy of a source of the same shape, from any device, into the array."""
        self._source[0] = source.handle.value
        check_call(_INVOKE(*self._fill))


def copied_to(array: Array, context: Context) -> Array:
    """Queue a copy of a legacy, dense array on another device, and return it."""
    new = NDArray(_new_alloc_handle(array.shape, context, True, array.dtype))
    source, target = (ctypes.c_void_p * 1)(array.handle), (ctypes.c_void_p * 1)(new.handle)
    check_call(_INVOKE(*_arguments(_COPYTO, source, 1, ctypes.cast(target, ctypes.POINTER(ctypes.c_void_p)))))
    return new


def _operator(name: str) -> OpHandle:
    handle = OpHandle()
    check_call(_LIB.NNGetOpHandle(c_str(name), ctypes.byref(handle)))
    return handle


_COPY, _COPYTO = _operator("_copy"), _operator("_copyto")


def _arguments(operator: OpHandle, inputs: Any, num_outputs: int, outputs: Any) -> Tuple[Any, ...]:
    """Return the arguments of `_INVOKE` for an operator without attributes."""
    number, stypes = ctypes.c_int(num_outputs), ctypes.POINTER(ctypes.c_int)()
    given = len(inputs), inputs, ctypes.byref(number), ctypes.byref(outputs)
    return (operator, *given, 0, _NO_ATTRIBUTES, _NO_ATTRIBUTES, ctypes.byref(stypes))


class Operator:
    """An operator with its arrays. Each call passes attributes, which are converted only when they change.

    Parameters
    ----------
    name : str
        MXNet's name, such as `multi_sgd_mom_update`.
    inputs, outputs : list of NDArray
    """

    def __init__(self, name: str, inputs: List[Array], outputs: List[Array]) -> None:
        self._kept = inputs, outputs
        self._outputs = ctypes.cast(c_handle_array(outputs), ctypes.POINTER(NDArrayHandle))
        self._arrays = _operator(name), ctypes.c_int(len(inputs)), c_handle_array(inputs)
        self._num_outputs = ctypes.c_int(len(outputs))
        self._attributes: Tuple[Tuple[str, Any], ...] = ()
        self._converted: Tuple[Any, ...] = (ctypes.c_int(0), c_str_array([]), c_str_array([]))

    def run(self, *attributes: Tuple[str, Any]) -> None:
        """Queue the operator with these attributes, pairs of name and value."""
        if attributes != self._attributes:
            names, values = [name for name, _ in attributes], [str(value) for _, value in attributes]
            self._converted = ctypes.c_int(len(names)), c_str_array(names), c_str_array(values)
            self._attributes = attributes
        stypes = ctypes.POINTER(ctypes.c_int)()
        check_call(
            _INVOKE(
                *self._arrays,
                ctypes.byref(self._num_outputs),
                ctypes.byref(self._outputs),
                *self._converted,
                ctypes.byref(stypes),
            )
        )
