"""Buckets: parameters of one kind in two flat arrays on each device; the network's are views of them, and slabs are parts."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from operator import attrgetter
from typing import Dict, List, MutableMapping, Optional, Sequence, Set, Tuple
from weakref import WeakKeyDictionary

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..nested import Array, num_bytes

BUCKET_BYTES = 25 * 2**20
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
        One per device.
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


@dataclass(frozen=True, eq=False)
class Slab:
    """Adjacent parameters of a bucket, or one parameter: what one operation per device sums, clips and may update.

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
    """

    indices: Tuple[int, ...]
    contexts: Tuple[Context, ...]
    weights: List[Array]
    gradients: List[Array]
    bucket: Optional[Bucket] = None
    begin: int = 0
    end: int = 0
    owner: Optional[int] = None

    @property
    def summed(self) -> List[Array]:
        """The gradients that hold the sum: all, or the owner's."""
        return self.gradients if self.owner is None else [self.gradients[self.owner]]


class Moves:
    """How often parameters of this process have got other memory: what is bound to the former memory is stale then."""

    count = 0


_places: MutableMapping[gluon.Parameter, BucketSlice] = WeakKeyDictionary()


def place_of(param: gluon.Parameter) -> Optional[BucketSlice]:
    """Return the place of a parameter, None if it has its own arrays."""
    place = _places.get(param)
    return place if place is not None and place.arrays is _arrays_of(param) else None


def _arrays_of(param: gluon.Parameter) -> List[Array]:
    """Return Gluon's list of gradients, or of the values of a running statistic, which has no gradient."""
    return param._grad if param._differentiable else param._data


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
        Move the running statistics instead; the gradients of their buckets are memory for changes.
    """
    new = [one for one in reversed(params) if one._differentiable != statistics and _fits(one) and place_of(one) is None]
    total = sum(num_bytes(param._data[0]) for param in new)
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
    Moves.count += 1
    # a backward pass may have written a gradient: its flag shows it, which only a trainer clears
    may_have_graphs = not statistics and any(one._trainer or any(w._fresh_grad for w in one._data) for one in new)
    if statistics:
        mx.nd.waitall()  # a static graph writes them without telling the engine
    with autograd.pause():
        for group in groups:
            _fill(group)
    if may_have_graphs:
        forget_graphs(set(map(id, new)))


def _fits(param: gluon.Parameter) -> bool:
    dense = param._stype == "default" and param._grad_stype == "default"
    known = _arrays_of(param) and param.shape and np.prod(param.shape) > 0  # no shape in a SymbolBlock that was loaded
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
    first = params[0]
    size = sum(_padded(param) for param in params)
    weights, gradients = ([mx.nd.zeros((size,), ctx=one, dtype=first.dtype) for one in first.list_ctx()] for _ in range(2))
    bucket = Bucket(weights, gradients)
    begin = 0
    for param in params:
        fresh = [weight._fresh_grad for weight in param._data]
        for pair in zip(param._data, bucket.weights):
            _adopt(*pair, begin)
        if param._differentiable:
            for pair in zip(param._grad, bucket.gradients):
                _adopt(*pair, begin)
            autograd.mark_variables(param._data, param._grad, param.grad_req)
            for weight, is_fresh in zip(param._data, fresh):
                weight._fresh_grad = is_fresh
        end = begin + _padded(param)
        _places[param] = BucketSlice(bucket, begin, end, int(np.prod(param.shape)), _arrays_of(param))
        begin = end


def _adopt(array: Array, memory: Array, begin: int) -> None:
    """Turn an array, which others may hold, into a view of memory with the same values."""
    view = memory[begin : begin + array.size].reshape(array.shape)
    array.as_nd_ndarray().copyto(view)
    array.handle, view.handle = view.handle, array.handle


def forget_graphs(placed: Set[int]) -> bool:
    """Bind the graphs of hybridized blocks with these parameters anew, and return whether any was static.

    A graph with `static_alloc` and `static_shape` would still write gradients into the former arrays. It may belong to another
    block than the parameters, such as one that wraps theirs, and a trainer of a list of parameters knows no block. So all blocks
    of the process are searched, at the few times when parameters move.
    """
    stale = blocks_with(placed)
    if stale:
        mx.nd.waitall()  # once: their operations must not be deleted while they run
    for block in stale:
        # a graph that is cut, or that MXNet 2 has divided, needs the arguments of the next call
        if "_get_graph" in vars(block) or not block._cached_graph or getattr(block, "_backend", None):
            block._clear_cached_op()
            continue
        # threads that call the block at once would each trace it, and fail in its name scope
        inputs = np.array([argument[0] for argument in block._cached_op_args], dtype=bool)
        indices = [("data_indices", np.flatnonzero(inputs).tolist()), ("param_indices", np.flatnonzero(~inputs).tolist())]
        flags = [flag for flag in block._flags if flag[0] not in dict(indices)]  # MXNet 2 has added them
        block._cached_op = mx.nd.CachedOp(block._cached_graph[1], indices + flags)
    return any(dict(block._flags).get("static_shape") for block in stale)


def blocks_with(placed: Set[int]) -> List[gluon.HybridBlock]:
    """Return the blocks of this process whose graphs read one of these parameters, by their ids."""
    gc.unfreeze()  # get_objects() does not list frozen objects
    blocks = [thing for thing in gc.get_objects() if issubclass(type(thing), gluon.HybridBlock)]  # calls nothing of the things
    compiled = [block for block in blocks if getattr(block, "_cached_op", None) is not None]
    # Entries are (is input, value), and in MXNet 2 (is input, name, value).
    return [one for one in compiled if any(not entry[0] and id(entry[-1]) in placed for entry in one._cached_op_args)]


def slabs_of(params: Sequence[gluon.Parameter], indices: Sequence[int], contexts: Sequence[Context]) -> List[Slab]:
    """Return slabs of neighbours with the same multipliers, in the order in which the backward pass fills them."""
    runs: List[List[Tuple[int, BucketSlice]]] = []
    last: Dict[Bucket, List[Tuple[int, BucketSlice]]] = {}
    single = []
    for index in reversed(indices):
        found = place_of(params[index])
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
    """Return a slab of one parameter, which is outside of buckets, or for a step that leaves others out.

    The gradients of a running statistic are memory for its changes.
    """
    is_statistic = not param._differentiable
    gradients = [mx.nd.zeros_like(array.as_nd_ndarray()) for array in param._data] if is_statistic else param.list_grad()
    return Slab((index,), tuple(contexts), param._data, gradients)


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
