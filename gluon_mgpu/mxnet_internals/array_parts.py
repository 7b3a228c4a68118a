"""Copies whose calls of MXNet's C interface are prepared once: parts of arrays of one form, each on its device."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context
from mxnet.base import _LIB, NDArrayHandle, check_call
from mxnet.ndarray.ndarray import _DTYPE_NP_TO_MX

from ..nested import Array
from .c_calls import Copy, creation
from .versions import is_mxnet2

ShardRange = Tuple[int, int, Context]  # a shard: its bounds [begin, end) in the batch, and its device

_FREE, _MEMORY, _SLICE = _LIB.MXNDArrayFree, _LIB.MXNDArrayGetData, _LIB.MXNDArraySlice


def slicer(array: Array, ranges: Sequence[ShardRange], dtype: Any) -> Optional[Callable[[Any], List[Array]]]:
    """Return a function that returns parts along axis 0 of arrays like this one, each on its device; None where that cannot be.

    It does not wait for devices. A part that is on its device already is a view.

    Parameters
    ----------
    array : numpy.ndarray or NDArray
        The form: type, dtype, shape and device.
    ranges : list of (int, int, Context)
    dtype : numpy.dtype
        Of the parts. That of MXNet's arrays stays.
    """
    is_host, kind = isinstance(array, np.ndarray), type(array)
    if is_host:
        kind = mx.np.ndarray if mx.util.is_np_array() else mx.nd.NDArray
    needs_pinned = is_host and any(context.device_type != "cpu" for _, _, context in ranges)
    is_known = np.dtype(dtype).isnative and np.dtype(dtype).type in _DTYPE_NP_TO_MX and kind in (mx.nd.NDArray, mx.np.ndarray)
    if needs_pinned or not is_known or not 0 < np.prod(array.shape, dtype=float) < 2**31 or is_mxnet2():
        return None
    if not is_host and ranges == [(0, len(array), array.context)]:
        return lambda whole: [whole]
    prepared = []
    for begin, end, context in ranges:
        create = creation((end - begin, *array.shape[1:]), context, dtype, delayed=not is_host)
        prepared.append((begin, end, create if is_host or array.context != context else None))
    return partial(_of_host, prepared, kind, np.dtype(dtype)) if is_host else partial(_of_device, prepared, kind, Copy())


def _of_host(ranges: List[Any], kind: Any, dtype: np.dtype, array: np.ndarray) -> List[Array]:
    parts, memory = [], ctypes.c_void_p()
    for begin, end, create in ranges:
        part = np.ascontiguousarray(array[begin:end], dtype)
        handle = NDArrayHandle()
        # the memory is new: no operation uses it
        if create(ctypes.byref(handle)) or _MEMORY(handle, ctypes.byref(memory)):
            check_call(-1)
        ctypes.memmove(memory, part.__array_interface__["data"][0], part.nbytes)
        parts.append(kind(handle))
    return parts


def _of_device(ranges: List[Any], kind: Any, copy: Copy, array: Array) -> List[Array]:
    parts, status = [], 0
    for begin, end, create in ranges:
        part, handle = NDArrayHandle(), NDArrayHandle()
        status |= _SLICE(array.handle, begin, end, ctypes.byref(part))
        if create is None:  # it is there
            parts.append(kind(part))
            continue
        status |= create(ctypes.byref(handle))
        copy.source[0], copy.target[0] = part, handle
        status |= copy.queue() | _FREE(part)
        parts.append(kind(handle))
    check_call(status)
    return parts
