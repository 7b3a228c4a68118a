"""The norm of gradients, their clipping, and whether they are finite: on every device, without waiting."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context

from ..nested import Array
from .slab import Slab

_LARGEST = 3.4028234e38  # float32
_MOST_ARRAYS = 200  # of one call of MXNet's finite check


def clip(
    slabs: List[Slab], home: Context, clip_norm: Optional[float], clip_value: Optional[float], *, measures: bool
) -> Optional[Array]:
    """Clip the gradients of these slabs, on every device, and return their common norm on `home` if it was computed.

    Parameters
    ----------
    clip_norm, clip_value : float, optional
        Of the sums, before they are divided by the examples.

    Returns
    -------
    NDArray, shape (1,), or None
    """
    by_context: Dict[Context, List[Array]] = {}
    for slab in slabs:
        for gradient in slab.summed:
            by_context.setdefault(gradient.context, []).append(gradient)
    norm = global_norm([slab.summed[0] for slab in slabs]).as_in_context(home) if slabs and measures else None
    for context, gradients in by_context.items():
        if clip_norm is not None and norm is not None:
            scale_to_limit(gradients, norm.as_in_context(context), clip_norm)
        if clip_value is not None:
            clip_values(gradients, clip_value)
    return norm


def global_norm(gradients: Sequence[Array]) -> Array:
    """Return the common 2-norm of gradients, without waiting.

    Parameters
    ----------
    gradients : sequence of NDArray, any shapes

    Returns
    -------
    NDArray, shape (1,)
        float32, on the first one's device.

    Examples
    --------
    >>> float(global_norm([mx.nd.array([3.0]), mx.nd.array([[4.0]])]).asscalar())
    5.0
    """
    classic = [gradient.as_nd_ndarray() for gradient in gradients]
    squares: List[Array] = [mx.nd.sum(mx.nd.square(gradient.astype("float32", copy=False))).reshape((1,)) for gradient in classic]
    home = squares[0].context
    return mx.nd.sqrt(mx.nd.add_n(*(one.as_in_context(home) for one in squares)))


def clip_values(gradients: Sequence[Array], most: float) -> None:
    """Clip the elements of one device's gradients to -most .. most, in place, without waiting. NaN stays NaN.

    Examples
    --------
    >>> g = mx.nd.array([-3.0, 0.5, 2.0])
    >>> clip_values([g], 1.0)
    >>> g.asnumpy().tolist()
    [-1.0, 0.5, 1.0]
    """
    for gradient in (gradient.as_nd_ndarray() for gradient in gradients):
        mx.nd.clip(gradient, -most, most, out=gradient)


def scale_to_limit(gradients: Sequence[Array], norm: Array, max_norm: float) -> None:
    """Scale one device's gradients, whose common norm is known on that device, so that it is at most `max_norm`."""
    # max(norm, max_norm), and not min(1, max_norm / norm): no division by zero
    scale = max_norm / mx.nd.maximum(norm, max_norm)
    # by 1 if the norm is not finite: the padding between parameters in a bucket is 0, and must not become NaN forever
    scale = mx.nd.where(norm <= _LARGEST, scale, mx.nd.ones_like(scale))
    for gradient in gradients:
        in_place(mx.nd.broadcast_mul, gradient, scale)


def finite_on_each(gradients: Sequence[Array]) -> List[Array]:
    """Return for each device whether all numbers of its gradients are finite, without waiting.

    Parameters
    ----------
    gradients : sequence of NDArray, any shapes, of floating point

    Returns
    -------
    list of NDArray, shape (1,)
        1.0 or 0.0, on the devices of the gradients.

    Examples
    --------
    >>> [float(finite.asscalar()) for finite in finite_on_each([mx.nd.ones((2, 2)), mx.nd.array([float("inf")])])]
    [0.0]
    """
    alike: Dict[Tuple[Context, object], List[Array]] = {}
    for gradient in gradients:
        dense = (gradient if gradient.stype == "default" else gradient.data).as_nd_ndarray()
        alike.setdefault((dense.context, dense.dtype), []).append(dense)
    finite = {context: mx.nd.ones((1,), ctx=context) for context, _ in alike}
    for (context, _), arrays in alike.items():
        for begin in range(0, len(arrays), _MOST_ARRAYS):
            some = arrays[begin : begin + _MOST_ARRAYS]
            mx.nd.multi_all_finite(*some, num_arrays=len(some), init_output=False, out=finite[context])
    return list(finite.values())


def in_place(operator: Any, gradient: Array, number: Array) -> None:
    """Multiply or divide a gradient by a number on its device, in place."""
    classic = gradient.as_nd_ndarray()
    operator(classic, number.astype(classic.dtype, copy=False).reshape((1,) * len(classic.shape)), out=classic)
