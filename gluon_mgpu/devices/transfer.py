"""copyto and as_in_context for nested data."""

from __future__ import annotations

from collections import deque
from typing import Any, ContextManager, Deque, Dict, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import explaining, instance, short
from ..errors import DeviceError
from ..mxnet_internals.c_calls import wait_until_unused, write_unheld
from ..mxnet_internals.versions import ContextType
from ..nested import Array, is_device_array, map_leaves

_RING = 2  # the host fills one while the other is copied


def copyto(data: Any, target: Any) -> Any:
    """Return a copy of nested data on another context, or write it into existing arrays.

    Like `NDArray.copyto`, it always copies, even if the data is already on that context. The copy is queued; it does not wait.

    Parameters
    ----------
    data : array, or tuple, list or dict of nested data
        MXNet arrays, legacy or np, any shape and dtype; NumPy arrays become MXNet arrays of the current mode, with their dtype.
    target : mxnet.Context, or nested arrays of the same form as `data`
        The target. Arrays are overwritten and must have the same shapes as the data.

    Returns
    -------
    nested data
        The copy; `target` itself if it holds arrays.

    Raises
    ------
    DeviceError
        The target is neither a context nor arrays.

    Examples
    --------
    >>> x = mx.nd.ones((2, 3))
    >>> y = copyto({"x": x}, mx.cpu(1))["x"]
    >>> y.context, y is x
    (cpu(1), False)

    Source: the semantics are MXNet's; d2l, chapter "GPUs", section "Copying".
    """
    with _explaining("copyto", target):
        if isinstance(target, ContextType):
            return map_leaves(lambda _, leaf: leaf.copyto(target) if is_device_array(leaf) else on_device(leaf, target), data)
        map_leaves(_check_target, data, target)
        map_leaves(lambda _, leaf, to: _as_device_array(leaf, to.context).copyto(to), data, target)
        return target


def as_in_context(data: Any, ctx: Context) -> Any:
    """Return nested data on a context; arrays that are already there stay the same objects.

    Parameters
    ----------
    data : array, or tuple, list or dict of nested data
        As for `copyto`. A NumPy array is always copied into a new MXNet array.
    ctx : mxnet.Context

    Raises
    ------
    DeviceError
        `ctx` is not a context.

    Examples
    --------
    >>> x = mx.nd.ones((2, 3), ctx=mx.cpu(0))
    >>> as_in_context(x, mx.cpu(0)) is x, as_in_context([x], mx.cpu(1))[0] is x
    (True, False)

    Source: the semantics are MXNet's; d2l, chapter "GPUs", section "Copying".
    """
    advice = "Pass mx.cpu(0) or mx.gpu(0)."
    instance("as_in_context", "ctx", ctx, ContextType, "an mxnet.Context", advice=advice, error=DeviceError)
    with _explaining("as_in_context", ctx):
        return map_leaves(lambda _, leaf: on_device(leaf, ctx), data)


def _explaining(operation: str, target: Any) -> ContextManager[None]:
    what, expected = f"an error for {short(target)}", "an existing device, and arrays of numbers"
    return explaining(operation, what, expected, advice="describe_devices() lists them.", error=DeviceError)


def on_device(leaf: Array, ctx: Context) -> Array:
    """Return one array on a context: the same object if it is already there (np's `as_in_context` would make a new one)."""
    array = _as_device_array(leaf, ctx)
    return array if array.context == ctx else array.copyto(ctx)


def _check_target(path: str, leaf: Array, target: Any) -> None:
    if not is_device_array(target) or target.shape != np.shape(leaf):
        raise DeviceError(
            f"copyto: got {short(target)} as the target of {path} of shape {np.shape(leaf)}; expected a context, or an MXNet "
            "array of this shape. Pass mx.cpu(0) to make a new copy."
        )


def _as_device_array(leaf: Array, ctx: Context) -> Array:
    return leaf if is_device_array(leaf) else new_array(leaf, ctx, getattr(leaf, "dtype", None))


def new_array(data: Any, ctx: Context, dtype: Any) -> Array:
    """Return a NumPy array as a new MXNet array of the current mode."""
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return array(data, ctx=ctx, dtype=dtype)


class Uploads:
    """Makes NumPy arrays MXNet arrays of the current mode, without waiting for a worker thread, as MXNet's copy does.

    So the number of batches in use must be bounded in another way. For a GPU, arrays are copied from pinned memory, two of
    each form and device in turn. MXNet 1.9.1 does not pool it: it would page-lock and free each array, under the lock of GPU
    allocations (src/storage/storage.cc:86; pinned_memory_storage.h:57-69).
    """

    def __init__(self) -> None:
        self._rings: Dict[Tuple[object, ...], Deque[Array]] = {}  # of pinned arrays, the one that is free first

    def __call__(self, data: np.ndarray, ctx: Context, dtype: np.dtype) -> Array:
        """Return the array on a device."""
        pinned = _pinned(ctx)
        array = mx.nd.empty(data.shape, ctx=ctx, dtype=dtype) if pinned is None else self._next(data.shape, ctx, pinned, dtype)
        if data.size:
            write_unheld(array, data)
        loaded = array.copyto(ctx) if pinned else array
        return loaded.as_np_ndarray() if mx.util.is_np_array() else loaded

    def _next(self, shape: Tuple[int, ...], ctx: Context, pinned: Context, dtype: np.dtype) -> Array:
        """Return a pinned array that no copy reads."""
        ring = self._rings.setdefault((ctx, shape, dtype), deque())
        array = ring.popleft() if len(ring) == _RING else mx.nd.empty(shape, ctx=pinned, dtype=dtype)
        ring.append(array)
        wait_until_unused(array)
        return array


def _pinned(ctx: Context) -> Optional[Context]:
    """Return the pinned memory from which arrays are copied to this device, None if the host can write its arrays."""
    return mx.cpu_pinned(ctx.device_id) if ctx.device_type == "gpu" else None
