"""Buffers: parameters whose gradients are summed, clipped and applied in one operation per device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import gluon

from ..nested import Array
from .buckets import Bucket, BucketSlice, place_of


@dataclass(frozen=True, eq=False)
class Buffer:
    """Adjacent parameters of a bucket, or one parameter: what one operation per device reduces, clips and updates.

    Attributes
    ----------
    indices : tuple of int
        The positions of its parameters in the network, in the order of memory; keys of their optimizer states.
    weights, gradients : list of NDArray
        One per replica, in the order of the contexts; of shape (size,), except for a single parameter: see `one_each`.
    bucket : Bucket or None
    begin, end : int
        The part of the bucket, in elements.
    owner : int or None
        The replica that alone gets the sum of the gradients and updates the weights; None: all do.
    """

    indices: Tuple[int, ...]
    weights: List[Array]
    gradients: List[Array]
    bucket: Optional[Bucket] = None
    begin: int = 0
    end: int = 0
    owner: Optional[int] = None

    @property
    def summed(self) -> List[Array]:
        """The gradients that hold the sum after a reduction: all, or the owner's."""
        return self.gradients if self.owner is None else [self.gradients[self.owner]]


def group(params: Sequence[gluon.Parameter], indices: Sequence[int]) -> List[Buffer]:
    """Return buffers of neighbours with the same multipliers, in the order in which the backward pass fills them."""
    runs: List[Tuple[Bucket, List[Tuple[int, BucketSlice]]]] = []
    last: Dict[Bucket, List[Tuple[int, BucketSlice]]] = {}
    single = []
    for index in reversed(indices):
        param, found = params[index], place_of(params[index])
        if found is None:
            single.append(index)
            continue
        run = last.get(found.bucket)
        before = params[run[-1][0]] if run else None
        multipliers = (param.lr_mult, param.wd_mult)
        if run and before and run[-1][1].end == found.begin and (before.lr_mult, before.wd_mult) == multipliers:
            run.append((index, found))
        else:
            last[found.bucket] = [(index, found)]
            runs.append((found.bucket, last[found.bucket]))
    buffers = [_buffer(bucket, run) for bucket, run in runs]
    # the buffer that is full first is reduced first
    position = {index: at for at, index in enumerate(indices)}
    buffers.sort(key=lambda buffer: -position[buffer.indices[-1]])
    return buffers + one_each(params, single)


def one_each(params: Sequence[gluon.Parameter], indices: Sequence[int]) -> List[Buffer]:
    """Return one buffer per parameter, for parameters outside of buckets and for steps that leave some parameters out."""
    return [Buffer((index,), params[index]._data, params[index].list_grad()) for index in indices]


def zero(gradient: Array) -> None:
    """Set a gradient to zero, dense or sparse."""
    if gradient.stype == "default":
        classic = gradient.as_nd_ndarray()
        mx.nd.zeros_like(classic, out=classic)  # np's scalars take no [:]
    else:
        # without rows: assigning 0 would create all rows, and lazy optimizers would update them
        mx.nd.sparse.zeros(gradient.stype, gradient.shape, ctx=gradient.context, dtype=gradient.dtype).copyto(gradient)


def _buffer(bucket: Bucket, run: Sequence[Tuple[int, BucketSlice]]) -> Buffer:
    begin, end = run[0][1].begin, run[-1][1].end
    weights = [flat[begin:end] for flat in bucket.weights]
    gradients = [flat[begin:end] for flat in bucket.gradients]
    return Buffer(tuple(index for index, _ in run), weights, gradients, bucket, begin, end)
