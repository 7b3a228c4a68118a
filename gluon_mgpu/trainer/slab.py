"""Buckets: parameters of one kind in two flat arrays on each device; the network's are views of them, and slabs are parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Dict, List, Optional, Protocol, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..mxnet_internals.blocks import rebind_graphs
from ..mxnet_internals.engine import EngineContext, WrittenWith
from ..mxnet_internals.parameters import (
    buffers_of,
    has_dense_gradient,
    is_dense,
    is_differentiable,
    is_fresh,
    trainer_of,
    use_memory,
    values_of,
)
from ..nested import Array, num_bytes

BUCKET_BYTES = 8 * 2**20  # one device sums and updates a bucket: the last one of a pass must be over soon
CUT_BYTES = 2 * BUCKET_BYTES  # of smaller parameters, the parts would be many operations for little time
_NUM_BUCKETS = 16  # of a network that is large enough, so that devices share its update evenly
_SMALLEST = 2**20  # bytes of a bucket, except for the last one of its kind
_ALIGNMENT = 64  # bytes: the alignment that oneDNN and cuDNN prefer
_DTYPES = ("float16", "float32", "float64")
multipliers_of = attrgetter("lr_mult", "wd_mult")


@dataclass(eq=False)
class Bucket:
    """The memory of some parameters on every device.

    ```
    weights[device]    │ weight 9 │ bias 8 │ weight 8 │ ...        in reverse order of use: the backward pass
    gradients[device]  │ weight 9 │ bias 8 │ weight 8 │ ...        fills it from the beginning
    ```

    Attributes
    ----------
    weights, gradients : list of NDArray, shapes (size,)
        One per device. Running statistics have no gradients.
    """

    weights: List[Array]
    gradients: List[Array]


@dataclass(frozen=True, eq=False)
class BucketSlice:
    """The place of a parameter in its bucket: elements [begin, end), of which the first `size` are its values."""

    bucket: Bucket
    begin: int
    end: int
    size: int
    arrays: List[Array]  # Gluon's list of gradients, or of running statistics: with new arrays it makes a new list


class Summand(Protocol):
    """What a sum over devices reads: of a slab its gradients."""

    @property
    def indices(self) -> Tuple[int, ...]:
        """See `Slab`; with `bucket` and `part`, they are the key of a sum."""

    @property
    def part(self) -> int:
        """See `Slab`."""

    @property
    def contexts(self) -> Tuple[Context, ...]:
        """See `Slab`."""

    @property
    def bucket(self) -> Optional[Bucket]:
        """See `Slab`."""

    @property
    def arrays(self) -> List[Array]:
        """Those that are summed, one for each device."""

    @property
    def summed(self) -> List[Array]:
        """Those of them that get the sum."""


@dataclass(frozen=True, eq=False)
class Slab:
    """Adjacent parameters of a bucket, one parameter, or a part of one: what one operation per device sums, clips and may update.

    Attributes
    ----------
    indices : tuple of int
        The positions of its parameters in the network, in the order of memory; keys of their optimizer states.
    contexts : tuple of mxnet.Context
    weights, gradients : list of NDArray
        One per context; of shape (size,), except for a single parameter: see `slab_of`.
    bucket : Bucket or None
    begin, end : int
        The part of the bucket, in elements.
    owner : int or None
        The replica that alone gets the sum of the gradients and updates the weights; None: all do.
    part : int
        The number of this part of a parameter, 0 if it is not cut.
    """

    indices: Tuple[int, ...]
    contexts: Tuple[Context, ...]
    weights: List[Array]
    gradients: List[Array]
    bucket: Optional[Bucket] = None
    begin: int = 0
    end: int = 0
    owner: Optional[int] = None
    part: int = 0

    @property
    def arrays(self) -> List[Array]:
        """The gradients."""
        return self.gradients

    @property
    def summed(self) -> List[Array]:
        """The gradients that hold the sum: all, or the owner's."""
        return self.gradients if self.owner is None else [self.gradients[self.owner]]


def slice_of(param: gluon.Parameter) -> Optional[BucketSlice]:
    """Return the slice of a bucket that holds a parameter, None if it has its own arrays."""
    found: Optional[BucketSlice] = vars(param).get("bucket_slice")
    return found if found is not None and found.arrays is buffers_of(param) else None


def place(params: Sequence[gluon.Parameter], bucket_bytes: int = BUCKET_BYTES, *, statistics: bool = False) -> None:
    """Move the weights and gradients of parameters into buckets. All parameters are on the same devices.

    The arrays of `param.data()` and `param.grad()` stay the same objects, with other memory. Parameters that have a place keep
    it, also in another trainer's bucket. Parameters without values, and frozen, sparse, empty or integer ones, get no place.

    Parameters
    ----------
    params : sequence of gluon.Parameter
        In order of use. A bucket holds parameters of one dtype, one `grad_req`, and one pair of `lr_mult` and `wd_mult`.
    bucket_bytes : int
        A bucket is closed if the next parameter would make it larger than this, or than a sixteenth of all and 1 MiB. So buckets
        do not depend on the number of devices.
    statistics : bool
        Move the running statistics instead.
    """
    new = [one for one in reversed(params) if is_differentiable(one) != statistics and _fits(one) and slice_of(one) is None]
    total = sum(num_bytes(values_of(param)[0]) for param in new)
    bucket_bytes = min(bucket_bytes, max(_SMALLEST, total // _NUM_BUCKETS))
    groups: List[List[gluon.Parameter]] = []
    latest: Dict[Tuple[object, ...], List[gluon.Parameter]] = {}
    filled: Dict[Tuple[object, ...], int] = {}  # bytes of the latest group
    for param in new:
        key = (np.dtype(param.dtype).name, param.grad_req, multipliers_of(param))
        size = _padded(param) * np.dtype(param.dtype).itemsize
        if key not in latest or filled[key] + size > bucket_bytes:
            latest[key], filled[key] = [], 0
            groups.append(latest[key])
        latest[key].append(param)
        filled[key] += size
    if not new:
        return
    # a backward pass may have written a gradient: its flag shows it, which only a trainer clears
    may_have_graphs = not statistics and any(trainer_of(one) or any(map(is_fresh, values_of(one))) for one in new)
    if statistics:
        mx.nd.waitall()  # a static graph writes them without telling the engine
    with autograd.pause():
        for group in groups:
            _fill(group)
    if may_have_graphs:
        rebind_graphs(set(map(id, new)))


def _fits(param: gluon.Parameter) -> bool:
    dense = is_dense(param) and has_dense_gradient(param)
    known = buffers_of(param) and param.shape and np.prod(param.shape) > 0  # no shape in a SymbolBlock that was loaded
    return bool(dense and known and np.dtype(param.dtype).name in _DTYPES and not _is_laid_out(param))


def _is_laid_out(param: gluon.Parameter) -> bool:
    """Return whether oneDNN may write this parameter's memory in its own layout.

    On the CPU, a convolution in prediction rewrites its weight like this, from the beginning of the memory that the array is a
    view of. A transposed convolution writes its gradient there. With a view, both overwrite other parameters. Weights of
    convolutions have three axes or more; fully connected layers keep the plain layout.

    Source: MXNet 1.9.1, src/operator/nn/mkldnn/mkldnn_convolution.cc and mkldnn_deconvolution.cc,
    NDArray::MKLDNNDataReorderAsync; `tests/test_regressions.py`.
    """
    return len(param.shape) > 2 and any(context.device_type == "cpu" for context in param.list_ctx())


def _padded(param: gluon.Parameter) -> int:
    """Return the number of elements that a parameter takes in a bucket."""
    step = _ALIGNMENT // np.dtype(param.dtype).itemsize
    return -(-int(np.prod(param.shape)) // step) * step


def _fill(params: Sequence[gluon.Parameter]) -> None:
    first, size = params[0], sum(_padded(param) for param in params)
    kinds = 2 if is_differentiable(first) else 1
    made = [[mx.nd.zeros((size,), ctx=one, dtype=first.dtype) for one in first.list_ctx()] for _ in range(kinds)]
    bucket = Bucket(made[0], made[1] if kinds == 2 else [])
    begin = 0
    for param in params:
        size, shape = int(np.prod(param.shape)), param.shape
        use_memory(param, *([flat[begin : begin + size].reshape(shape) for flat in arrays] for arrays in made))
        end = begin + _padded(param)
        param.bucket_slice = BucketSlice(bucket, begin, end, size, buffers_of(param))
        begin = end


def slabs_of(params: Sequence[gluon.Parameter], indices: Sequence[int], contexts: Sequence[Context]) -> List[Slab]:
    """Return slabs of neighbours with the same multipliers, in the order in which the backward pass fills them."""
    runs: List[List[Tuple[int, BucketSlice]]] = []
    last: Dict[Bucket, List[Tuple[int, BucketSlice]]] = {}
    single = []
    for index in reversed(indices):
        found = slice_of(params[index])
        if found is None:
            single.append(index)
            continue
        run = last.get(found.bucket)
        if not run or run[-1][1].end != found.begin or multipliers_of(params[run[-1][0]]) != multipliers_of(params[index]):
            run = last[found.bucket] = []
            runs.append(run)
        run.append((index, found))
    slabs = [_slab(run, contexts) for run in runs]
    slabs.sort(key=lambda slab: -slab.indices[-1])  # the slab that is full first is reduced first
    return slabs + [slab_of(params[index], index, contexts) for index in single]


def slab_of(param: gluon.Parameter, index: int, contexts: Sequence[Context]) -> Slab:
    """Return a slab of one parameter, which is outside of buckets, or for a step that leaves others out."""
    return Slab((index,), tuple(contexts), values_of(param), param.list_grad() if is_differentiable(param) else [])


def parts_of(param: gluon.Parameter, num: int, most_bytes: int) -> List[Tuple[int, int]]:
    """Return the elements [begin, end) of so many parts of a parameter; none if it has at most so many bytes, or is not cut.

    Only one that is alone in its bucket is cut, as all are that are larger than a bucket may be. So no state is of another part
    after `lr_mult` has changed.
    """
    found, itemsize = slice_of(param), np.dtype(param.dtype).itemsize
    if found is None or found.end < found.bucket.weights[0].size or found.begin or found.size * itemsize <= most_bytes:
        return []
    step = _ALIGNMENT // itemsize
    bounds = [found.size * i // num // step * step for i in range(num)] + [found.size]
    return list(zip(bounds, bounds[1:]))


def cut(slab: Slab, parts: Sequence[Tuple[int, int]]) -> List[Slab]:
    """Return the parts of a slab, each with an owner of its own."""
    found = []
    for part, (begin, end) in enumerate(parts):
        weights, gradients = ([flat[begin:end] for flat in arrays] for arrays in (slab.weights, slab.gradients))
        found.append(replace(slab, weights=weights, gradients=gradients, begin=begin, end=end, owner=part, part=part))
    return found


def zero(gradient: Array) -> None:
    """Set a gradient to zero, dense or sparse."""
    if gradient.stype == "default":
        classic = gradient.as_nd_ndarray()
        mx.nd.zeros_like(classic, out=classic)  # np's scalars take no [:]
    else:
        # without rows: assigning 0 would create all rows, and lazy optimizers would update them
        mx.nd.sparse.zeros(gradient.stype, gradient.shape, ctx=gradient.context, dtype=gradient.dtype).copyto(gradient)


def _slab(run: Sequence[Tuple[int, BucketSlice]], contexts: Sequence[Context]) -> Slab:
    bucket, begin, end = run[0][1].bucket, run[0][1].begin, run[-1][1].end
    weights, gradients = ([flat[begin:end] for flat in arrays] for arrays in (bucket.weights, bucket.gradients))
    return Slab(tuple(index for index, _ in run), tuple(contexts), weights, gradients, bucket, begin, end)


def written_with(statistics: Sequence[Slab], trained: Sequence[Slab], context: Context) -> WrittenWith:
    """Return what lets statistics of a device count as written with these gradients: static graphs write them untracked."""
    arrays, others = _arrays_of(statistics, "weights", context), _arrays_of(trained, "gradients", context)
    return WrittenWith(arrays, others, EngineContext(context.device_typeid, context.device_id))


def _arrays_of(slabs: Sequence[Slab], kind: str, context: Context) -> List[Array]:
    """Return the `weights` or `gradients` of slabs on a device, those of a bucket once."""
    places = {slab.bucket or slab: slab.contexts.index(context) for slab in slabs if context in slab.contexts}
    return [getattr(owner, kind)[place] for owner, place in places.items()]
