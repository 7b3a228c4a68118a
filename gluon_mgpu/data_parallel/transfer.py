"""copyto and as_in_context for nested data, and the cost of a transfer."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Iterator, List, Sequence

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import explaining, short
from ..errors import DeviceError
from ..nested import Array, is_device_array, map_leaves
from ..runtime.c_api import copied_to


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
        if isinstance(target, Context):
            return map_leaves(lambda _, leaf: _copy(leaf, target), data)
        map_leaves(_check_target, data, target)
        return map_leaves(lambda _, leaf, to: _as_device_array(leaf, to.context).copyto(to), data, target)


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
    if not isinstance(ctx, Context):
        raise DeviceError(
            f"as_in_context: got {short(ctx)} for the context; expected an mxnet.Context. Pass mx.cpu(0) or mx.gpu(0)."
        )
    with _explaining("as_in_context", ctx):
        return map_leaves(lambda _, leaf: on_device(leaf, ctx), data)


@contextmanager
def _explaining(operation: str, target: Any) -> Iterator[None]:
    expected = "an existing device, and arrays of numbers"
    with explaining(
        operation, f"an error for {short(target)}", expected, advice="describe_devices() lists them.", error=DeviceError
    ):
        yield


def on_device(leaf: Array, ctx: Context) -> Array:
    """Return one array on a context: the same object if it is already there (np's `as_in_context` would make a new one)."""
    array = _as_device_array(leaf, ctx)
    if array.context == ctx:
        return array
    return copied_to(array, ctx) if type(array) is mx.nd.NDArray else array.as_in_context(ctx)


def _copy(leaf: Array, ctx: Context) -> Array:
    return leaf.copyto(ctx) if is_device_array(leaf) else _as_device_array(leaf, ctx)


def _check_target(path: str, leaf: Array, target: Any) -> None:
    if not is_device_array(target):
        raise DeviceError(
            f"copyto: got {short(target)} as the target of {path}; expected a context or an MXNet array. Pass mx.cpu(0)."
        )
    if target.shape != np.shape(leaf):
        raise DeviceError(
            f"copyto: got a target of shape {target.shape} for {path} of shape {np.shape(leaf)}; expected equal shapes. "
            "Pass a context to make a new copy."
        )


def _as_device_array(leaf: Array, ctx: Context) -> Array:
    if is_device_array(leaf):
        return leaf
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return array(leaf, ctx=ctx, dtype=getattr(leaf, "dtype", None))


@dataclass(frozen=True)
class Bandwidth:
    """The cost of copying arrays of one size from one device to another.

    Attributes
    ----------
    source, target : str
        The devices, such as `cpu(0)`.
    num_bytes : int
    seconds : float
        The median over the repeats, for one copy into an existing array.
    gb_per_s : float
        10**9 bytes per second.
    """

    source: str
    target: str
    num_bytes: int
    seconds: float
    gb_per_s: float


def measure_bandwidth(contexts: Sequence[Context], sizes_bytes: Sequence[int], *, repeats: int = 5) -> List[Bandwidth]:
    """Return the cost of copying between every pair of devices, for each size.

    The target array is allocated and written once before the clock starts, so the measurement does not include the
    allocation. Small copies are repeated inside one measurement, up to about 16 MB.

    Parameters
    ----------
    contexts : sequence of mxnet.Context
    sizes_bytes : sequence of int, bytes
        At least 4 each: arrays of float32.
    repeats : int
        The number of measurements for the median.
    """
    found = []
    for num_bytes in sizes_bytes:
        for source in contexts:
            data = mx.nd.ones((max(1, num_bytes // 4),), ctx=source)
            for target in contexts:
                buffer = mx.nd.zeros(data.shape, ctx=target)
                copies = max(1, min(64, 2**24 // num_bytes))
                _copy_seconds(data, buffer, copies)
                seconds = median(_copy_seconds(data, buffer, copies) for _ in range(repeats))
                moved = data.size * 4
                found.append(Bandwidth(str(source), str(target), moved, seconds, moved / seconds / 1e9))
    return found


def _copy_seconds(data: Array, buffer: Array, copies: int) -> float:
    mx.nd.waitall()
    started = time.perf_counter()
    for _ in range(copies):
        data.copyto(buffer)
    mx.nd.waitall()
    return (time.perf_counter() - started) / copies
