"""Calls of MXNet's C interface: in every step, with arguments that are converted once; the memory and flags of arrays."""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import compress, repeat
from typing import Any, Callable, List, Sequence, Tuple

import numpy as np
from mxnet import Context
from mxnet.base import _LIB, NDArrayHandle, OpHandle, c_handle_array, c_str, c_str_array, check_call, mx_uint
from mxnet.kvstore.kvstore import _ctype_key_value
from mxnet.ndarray import NDArray
from mxnet.ndarray.ndarray import _DTYPE_MX_TO_NP, _DTYPE_NP_TO_MX, _new_alloc_handle

from ..nested import Array
from .mxnet_import import as_text
from .versions import is_mxnet2


def write_unheld(array: Array, data: np.ndarray) -> None:
    """Write a NumPy array into a legacy array on the CPU without the engine. No pending operation may use the array.

    MXNet's own copy waits for a worker thread of the context, behind all queued operations.
    """
    place, dtype = ctypes.c_void_p(), np.dtype(array.dtype)
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(place)))
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(place.value or 0)
    np.copyto(np.frombuffer(memory, dtype).reshape(array.shape), data, casting="unsafe")


def wait_until_unused(array: Array) -> None:
    """Wait until no queued operation reads or writes an array."""
    check_call(_LIB.MXNDArrayWaitToWrite(array.handle))


def is_recording() -> bool:
    """Return what `autograd.is_recording` does, in one Python call: each step asks."""
    found = ctypes.c_bool()
    _LIB.MXAutogradIsRecording(ctypes.byref(found))
    return found.value


def set_context(context: Context) -> None:
    """Set the current context of this thread."""
    Context._default_ctx.value = context


def fill(array: Array, values: np.ndarray) -> None:
    """Write values of the same dtype into a legacy array, from memory of any alignment."""
    array._sync_copyfrom(np.require(values, requirements="A"))


def number_of(dtype: Any) -> int:
    """Return MXNet's number of a dtype. Raises `KeyError` if it has none."""
    kind = np.dtype(dtype)
    return _DTYPE_NP_TO_MX[kind if kind.names else kind.type]  # type: ignore[no-any-return]  # bfloat16 has names


dtype_of = _DTYPE_MX_TO_NP.get  # the dtype of a number, None if there is none
slice_rows = NDArray._slice  # array[begin:end] of a legacy array, in half of the time


def unallocated(array: Array) -> Array:
    """Return a legacy array of the same form and device, whose memory the first operation that writes it allocates."""
    return NDArray(_new_alloc_handle(array.shape, array.context, True, array.dtype))


class PushPull:
    """A sum over devices that a store computes in one call.

    Parameters
    ----------
    store : mxnet.kvstore.KVStore
    key : int
        Initialised in the store.
    arrays : list of NDArray
        One per device.
    outputs : list of NDArray
        The arrays that get the sum.
    priority : int
    """

    def __init__(self, store: Any, key: int, arrays: List[Array], outputs: List[Array], priority: int) -> None:
        self._kept = store, arrays, outputs
        (ckeys, values, _), (targets, sums, _) = _ctype_key_value(key, arrays), _ctype_key_value(key, outputs)
        numbers = mx_uint(len(ckeys)), ckeys, mx_uint(len(targets)), targets
        self._arguments = (store.handle, *numbers, values, sums, ctypes.c_int(priority))

    def run(self) -> None:
        """Queue the sum."""
        if _LIB.MXKVStorePushPull(*self._arguments):
            check_call(-1)


_INVOKE = _LIB.MXImperativeInvoke if is_mxnet2() else _LIB.MXImperativeInvokeEx


def operator_handle(name: str) -> OpHandle:
    """Return the handle of one of MXNet's operators."""
    handle = OpHandle()
    check_call(_LIB.NNGetOpHandle(c_str(name), ctypes.byref(handle)))
    return handle


def creation(shape: Tuple[int, ...], context: Context, dtype: Any, *, delayed: bool) -> Callable[[Any], int]:
    """Return a function that makes an array of this form in a handle that it gets by reference, and returns a status.

    `delayed`: the first operation that writes it allocates its memory.
    """
    sizes = (mx_uint * len(shape))(*shape), mx_uint(len(shape))
    place = ctypes.c_int(context.device_typeid), ctypes.c_int(context.device_id)
    return partial(_LIB.MXNDArrayCreateEx, *sizes, *place, ctypes.c_int(delayed), ctypes.c_int(number_of(dtype)))


class Copy:
    """MXNet's copy of an array into another one. Set `source[0]` and `target[0]` to handles, and call `queue()`."""

    def __init__(self) -> None:
        self.source, self.target = (NDArrayHandle * 1)(), (NDArrayHandle * 1)()
        targets = ctypes.cast(self.target, ctypes.POINTER(NDArrayHandle))
        results = ctypes.byref(ctypes.c_int(1)), ctypes.byref(targets), ctypes.c_int(0), None, None
        stypes = ctypes.byref(ctypes.POINTER(ctypes.c_int)())
        self.queue: Callable[[], int] = partial(
            _INVOKE, operator_handle("_copyto"), ctypes.c_int(1), self.source, *results, stypes
        )


def converted(attributes: Sequence[Tuple[str, Any]]) -> Tuple[Any, ...]:
    """Return attributes of an operator, pairs of name and value, as its C function takes them."""
    names, values = [name for name, _ in attributes], [as_text(value) for _, value in attributes]
    return ctypes.c_int(len(names)), c_str_array(names), c_str_array(values)


class Operator:
    """An operator with its arrays, converted once.

    Parameters
    ----------
    name : str
        MXNet's name, such as `multi_sgd_mom_update`.
    inputs, outputs : list of NDArray
    """

    def __init__(self, name: str, inputs: List[Array], outputs: List[Array]) -> None:
        self._kept = inputs, outputs
        self._outputs = ctypes.cast(c_handle_array(outputs), ctypes.POINTER(NDArrayHandle))
        self._arrays = operator_handle(name), ctypes.c_int(len(inputs)), c_handle_array(inputs)
        self._num_outputs = ctypes.c_int(len(outputs))

    def run(self, attributes: Tuple[Any, ...]) -> None:
        """Queue the operator with these attributes, which are `converted`."""
        outputs, stypes = ctypes.byref(self._outputs), ctypes.byref(ctypes.POINTER(ctypes.c_int)())
        if _INVOKE(*self._arrays, ctypes.byref(self._num_outputs), outputs, *attributes, stypes):
            check_call(-1)


_LOCKED = ctypes.PyDLL(_LIB._name)  # its calls keep the interpreter's lock, which is cheaper


class Flags:
    """The fresh flags of some variables of autograd. Calls of MXNet's C interface are prepared once.

    Parameters
    ----------
    weights : list of NDArray
        Marked as variables. Make new `Flags` when they get other handles.
    """

    def __init__(self, weights: Sequence[Array]) -> None:
        self._kept = list(weights)  # keeps the handles alive
        self._values = np.zeros(len(self._kept), np.intc)
        self._handles = [array.handle for array in self._kept]
        begin, size = self._values.ctypes.data, self._values.itemsize
        self._places = [ctypes.c_void_p(begin + size * i) for i in range(len(self._kept))]

    def read(self) -> Any:
        """Return the flags as a NumPy array of bool, one per variable."""
        if any(map(_LOCKED.MXNDArrayGetGradState, self._handles, self._places)):  # no Python call per variable
            check_call(-1)  # raises MXNet's error
        return self._values != 0

    def put(self, which: Any, value: bool) -> None:
        """Set or clear the flags where `which`, an array of bool, is true."""
        if any(map(_LOCKED.MXNDArraySetGradState, compress(self._handles, which.tolist()), repeat(int(value)))):
            check_call(-1)

    def clear(self) -> None:
        """Clear all flags."""
        self._put_all(0)

    def set(self) -> None:
        """Set all flags."""
        self._put_all(1)

    def _put_all(self, value: int) -> None:
        if any(map(_LOCKED.MXNDArraySetGradState, self._handles, repeat(value))):
            check_call(-1)


def leave_at_exit(store: Any) -> None:
    """Let a store of several processes not wait at its exit for the others: where this process has failed, they wait for it."""
    check_call(_LIB.MXKVStoreSetBarrierBeforeExit(store.handle, 0))


def barrier(store: Any) -> None:
    """Wait until all processes of a store have reached this call."""
    store._barrier()
