"""Plan, split and gather: divide a batch over the devices, and put shards together again."""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import explaining, flag, instance, is_whole, short, whole_number
from ..devices.select import check_contexts
from ..distributed import process_shard
from ..errors import ShardError
from ..nested import Array, Fields, is_device_array, leaves, map_leaves
from ..trainer.freshness import history
from .transfer import on_device

# A dtype of NumPy's that MXNet lacks becomes the next larger one; float64, which networks do not take, becomes float32.
DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool")
_MOST_SHARDS = 2**16  # no machine has more devices
_MXNET_DTYPES = {"float64": "float32", "int16": "int32", "uint16": "int32", "uint32": "int64"}

Bounds = Tuple[int, int]  # [begin, end) along the batch axis


def plan_shards(num_examples: int, num_shards: int, weights: Optional[Sequence[float]] = None) -> List[int]:
    """Return how many examples each shard holds.

    Without weights, sizes differ by at most one and the larger ones come first, as in `numpy.array_split`. With weights, each
    shard gets its proportion rounded down, and the remaining examples go to the largest remainders.

    Parameters
    ----------
    num_examples : int
    num_shards : int
    weights : sequence of float, optional
        One per shard, not negative, in any unit, such as speeds.

    Raises
    ------
    ShardError
        A number is out of range.

    Examples
    --------
    >>> plan_shards(10, 4)
    [3, 3, 2, 2]
    >>> plan_shards(10, 3, weights=[2, 1, 1])
    [5, 3, 2]
    >>> plan_shards(2, 3)
    [1, 1, 0]

    Source: largest remainders (Hamilton's method of apportionment).
    """
    advice = "Pass the batch size and the number of devices."
    most = 2**53  # floats count exactly up to here
    num_examples = whole_number("plan_shards", "num_examples", num_examples, low=0, high=most, advice=advice, error=ShardError)
    num_shards = whole_number("plan_shards", "num_shards", num_shards, high=_MOST_SHARDS, advice=advice, error=ShardError)
    if weights is None:
        each, extra = divmod(num_examples, num_shards)
        return [each + (i < extra) for i in range(num_shards)]
    try:
        numbers = [float(weight) for weight in weights]
    except Exception:  # whatever an object's own code raises
        raise ShardError(
            f"plan_shards: got weights {short(weights)}; expected one number for each shard. Pass the devices' speeds."
        ) from None
    total = sum(numbers)
    if len(numbers) != num_shards or not 0 < total < math.inf or any(not number >= 0 for number in numbers):
        raise ShardError(
            f"plan_shards: got weights {short(numbers)} for {num_shards} shards; expected one finite number of 0 or more "
            "for each, not all 0. Pass the devices' speeds."
        )
    quotas = [num_examples * number / total for number in numbers]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(num_shards), key=lambda i: sizes[i] - quotas[i])  # stable: ties go to the first
    for i in by_remainder[: num_examples - sum(sizes)]:
        sizes[i] += 1
    return sizes


def split_data(
    data: Any,
    num_slice: int,
    batch_axis: Any = 0,
    even_split: bool = True,
    *,
    weights: Optional[Sequence[float]] = None,
) -> List[Any]:
    """Return slices of a batch, without moving it to another device.

    Parameters
    ----------
    data : array, or tuple, list or dict of nested data
        Shapes (B, ...), with the same B at `batch_axis` of each.
    num_slice : int
        With fewer examples than slices, only slices that hold examples are returned.
    batch_axis : int, or nested ints of the data's form
    even_split : bool
        Raise if the batch is not a multiple of `num_slice`. Not used with `weights`.
    weights : sequence of float, optional
        Split in these proportions; see `plan_shards`.

    Raises
    ------
    ShardError
        The batch cannot be split like this.

    Examples
    --------
    >>> [x.shape for x in split_data(mx.nd.ones((10, 3)), 4, even_split=False)]
    [(3, 3), (3, 3), (2, 3), (2, 3)]

    Source: signature and balance are those of `mxnet.gluon.utils.split_data`.
    """
    num_slice = whole_number("split_data", "num_slice", num_slice, advice="Pass the number of devices.", error=ShardError)
    flag("split_data", "even_split", even_split, error=ShardError)
    found = _leaves(data, batch_axis)
    if weights is None and not even_split:
        num_slice = min(num_slice, _batch_size("split_data", found))  # the others would be empty
    bounds = _plan("split_data", found, num_slice, batch_axis, even_split, weights)
    return [_like(data, [_slice_leaf(leaf, begin, end, axis) for _, leaf, axis in found]) for begin, end in bounds if end > begin]


def split_and_load(
    data: Any,
    ctx_list: Sequence[Context],
    batch_axis: Any = 0,
    even_split: bool = True,
    *,
    weights: Optional[Sequence[float]] = None,
    dtype: Optional[str] = None,
) -> List[Any]:
    """Return the shards of a batch, each on its device.

    NumPy arrays are sliced on the host, and each slice is sent once. Plain lists of numbers count as NumPy arrays. They become
    np or legacy arrays, depending on the mode. They keep their dtype, except that float64 becomes float32, int16 and uint16
    become int32, and uint32 becomes int64. MXNet's arrays keep their dtype. A shard that is already on its device may share the
    batch's memory.

    Parameters
    ----------
    data : array, or tuple, list or dict of nested data
        Shapes (B, ...), with the same B at `batch_axis` of each.
    ctx_list : list of mxnet.Context
        With fewer examples than devices, only shards that hold examples are returned.
    batch_axis : int, or nested ints of the data's form
        The axis of the examples: 0, or 1 for the TNC layout of recurrent networks. `(1, 0)` for `(tokens, label)`.
    even_split : bool
        Raise if the batch is not a multiple of the devices, like Gluon. Not used with `weights`.
    weights : sequence of float, optional
        Split in these proportions; see `plan_shards`. A device of weight 0 gets no shard.
    dtype : str, optional
        Cast every array to it.

    Returns
    -------
    list
        One item per device, of the data's form.

    Raises
    ------
    ShardError
        The batch cannot be split like this.
    DeviceError
        The devices are not different contexts.

    Examples
    --------
    >>> shards = split_and_load((np.zeros((5, 2)), np.arange(5)), [mx.cpu(0), mx.cpu(1)], even_split=False)
    >>> [(x.shape, str(x.dtype.__name__), y.shape, y.context) for x, y in shards]
    [((3, 2), 'float32', (3,), cpu(0)), ((2, 2), 'float32', (2,), cpu(1))]

    Source: the signature is that of `mxnet.gluon.utils.split_and_load`.
    """
    return _split("split_and_load", data, ctx_list, batch_axis, even_split, weights, dtype)


def split_batch(
    X: Any,
    y: Any,
    devices: Sequence[Context],
    *,
    batch_axis: Any = 0,
    even_split: bool = False,
    weights: Optional[Sequence[float]] = None,
    dtype: Optional[str] = None,
) -> Tuple[List[Any], List[Any]]:
    """Return the shards of features and labels, each on its device.

    Like d2l's function, but it also splits a batch that is not a multiple of the devices. See `split_and_load`.

    Parameters
    ----------
    X, y : array, or tuple, list or dict of nested data
        Shapes (B, ...), the same B.
    devices : list of mxnet.Context
    batch_axis : int, or a pair (for X, for y) of ints or nested ints

    Examples
    --------
    >>> Xs, ys = split_batch(mx.nd.ones((5, 2)), mx.nd.arange(5), [mx.cpu(0), mx.cpu(1)])
    >>> [x.shape for x in Xs], [y.shape for y in ys]
    ([(3, 2), (2, 2)], [(3,), (2,)])

    Source: the signature is that of d2l, chapter "Training on Multiple GPUs".
    """
    shards = _split("split_batch", Fields((X, y)), devices, batch_axis, even_split, weights, dtype)
    return [shard[0] for shard in shards], [shard[1] for shard in shards]


def split_batch_multi_inputs(
    X: Sequence[Any], y: Any, devices: Sequence[Context], *, batch_axis: Any = 0, dtype: Optional[str] = None
) -> Tuple[List[Any], List[Any]]:
    """Return the shards of several features, one tuple per device, and of their label.

    Parameters
    ----------
    X : sequence of arrays, shapes (B, ...)
    y : array, shape (B, ...)
    devices : list of mxnet.Context

    Examples
    --------
    >>> X = [mx.nd.ones((3, 2)), mx.nd.zeros((3, 4))]
    >>> Xs, ys = split_batch_multi_inputs(X, mx.nd.arange(3), [mx.cpu(0), mx.cpu(1)])
    >>> [[x.shape for x in features] for features in Xs]
    [[(2, 2), (2, 4)], [(1, 2), (1, 4)]]

    Source: the signature is that of d2l, chapter "Natural Language Inference: Using Attention".
    """
    advice = "Pass [X1, X2], for example."
    instance("split_batch_multi_inputs", "X", X, (list, tuple), "a list of arrays", advice=advice, error=ShardError)
    shards = _split("split_batch_multi_inputs", Fields((Fields(X), y)), devices, batch_axis, False, None, dtype)
    return [tuple(shard[0]) for shard in shards], [shard[1] for shard in shards]


def gather(shards: Sequence[Any], ctx: Optional[Context] = None, batch_axis: Any = 0) -> Any:
    """Return shards put together again on one device: the inverse of a split.

    Parameters
    ----------
    shards : sequence of nested data of one form
        Shapes (B_i, ...).
    ctx : mxnet.Context, optional
        The target device, by default the first shard's. Without it, NumPy arrays stay NumPy arrays.
    batch_axis : int, or nested ints of the data's form

    Raises
    ------
    ShardError
        No shards, or shards that do not fit together.

    Examples
    --------
    >>> gather(split_data(mx.nd.arange(5), 2, even_split=False)).asnumpy().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    if ctx is not None:
        check_contexts([ctx], "gather")
    if not isinstance(shards, (list, tuple)) or not shards:
        raise ShardError(f"gather: got {short(shards)}; expected a list of one or more shards. Pass what a split returned.")
    columns = [list(leaves(shard, "shard")) for shard in shards]
    if any([path for path, _ in column] != [path for path, _ in columns[0]] for column in columns):
        raise ShardError(
            "gather: got shards of different forms; expected the same tuples, lists and dicts in each. Gather them one by one."
        )
    parts = iter(list(zip(*([leaf for _, leaf in column] for column in columns))))
    return map_leaves(lambda path, _, axis: _concatenate(path, next(parts), ctx, axis), shards[0], batch_axis, path="shard")


def _split(
    operation: str,
    data: Any,
    contexts: Sequence[Context],
    batch_axis: Any,
    even_split: bool,
    weights: Optional[Sequence[float]],
    dtype: Optional[str],
) -> List[Any]:
    check_contexts(contexts, operation)
    _check_dtype(operation, dtype)
    flag(operation, "even_split", even_split, error=ShardError)
    found = _leaves(data, batch_axis)
    bounds = _bounds_here(operation, found, len(contexts), batch_axis, even_split, weights)

    def shard(begin: int, end: int, ctx: Context) -> Any:
        parts = [_load(operation, path, _slice_leaf(leaf, begin, end, axis), ctx, dtype) for path, leaf, axis in found]
        return _like(data, parts)

    shards = [shard(begin, end, context) for (begin, end), context in zip(bounds, contexts) if end > begin]
    if not shards and process_shard()[1] > 1:
        history.note_empty(is_pass=False)
    return shards


def split_shards(
    data: Any, contexts: Sequence[Context], num_shards: int, batch_axis: Any = 0, *, dtype: Optional[str] = None
) -> List[Any]:
    """Return this process's shards of a batch that is cut into the same number of shards on any number of devices.

    Each device gets as many, in their order, in memory of its own: operators may round differently in a part of another array.

    Parameters
    ----------
    data, batch_axis, dtype
        As for `split_and_load`.
    contexts : sequence of mxnet.Context
    num_shards : int
        Over all processes, a multiple of their devices. Shards without examples are left out: the last ones.

    Examples
    --------
    >>> [shard.shape for shard in split_shards(mx.nd.ones((6, 3)), [mx.cpu(0), mx.cpu(1)], 4)]
    [(2, 3), (2, 3), (1, 3), (1, 3)]
    """
    check_contexts(contexts, "split_batch")
    found = _leaves(data, batch_axis)
    rank, num_processes = process_shard()
    bounds = _plan("split_batch", found, num_shards, batch_axis, False, None)
    here = num_shards // num_processes
    shards = []
    for place, (begin, end) in enumerate(bounds[rank * here : (rank + 1) * here]):
        if end == begin:
            continue
        context = contexts[place // (here // len(contexts))]
        parts = []
        for path, leaf, axis in found:
            part = _slice_leaf(leaf, begin, end, axis)
            loaded = _load("split_batch", path, part, context, dtype)
            parts.append(loaded.copy() if loaded is part and is_device_array(leaf) else loaded)
        shards.append(_like(data, parts))
    if not shards and num_processes > 1:
        history.note_empty(is_pass=False)
    return shards


def count_examples(operation: str, data: Any, batch_axis: Any = 0) -> int:
    """Return how many examples a batch holds; errors as of a split."""
    return _batch_size(operation, _leaves(data, batch_axis))


def part_of_process(data: Any, num_devices: int, batch_axis: Any = 0, weights: Optional[Sequence[float]] = None) -> Any:
    """Return this process's part of a batch, on the batch's own device; None if a split gives this process no examples."""
    found = _leaves(data, batch_axis)
    bounds = _bounds_here("split_batch", found, num_devices, batch_axis, False, weights)
    begin, end = bounds[0][0], bounds[-1][1]
    return _like(data, [_slice_leaf(leaf, begin, end, axis) for _, leaf, axis in found]) if end > begin else None


def _bounds_here(
    operation: str,
    found: Sequence[Tuple[str, Array, Any]],
    num_devices: int,
    batch_axis: Any,
    even_split: bool,
    weights: Optional[Sequence[float]],
) -> List[Bounds]:
    """Return the bounds of the shards of this process's devices, of a batch that all processes share."""
    rank, num_processes = process_shard()
    all_weights = weights if weights is None or num_processes == 1 else list(weights) * num_processes
    bounds = _plan(operation, found, num_devices * num_processes, batch_axis, even_split, all_weights)
    return bounds[rank * num_devices : (rank + 1) * num_devices]


def _leaves(data: Any, batch_axis: Any) -> List[Tuple[str, Array, Any]]:
    """Return every leaf's path, the leaf, and its batch axis."""
    found: List[Tuple[str, Array, Any]] = []
    map_leaves(lambda path, leaf, axis: found.append((path, leaf, axis)), data, batch_axis)
    return found


def _like(data: Any, parts: Sequence[Array]) -> Any:
    """Return data of this form with these leaves."""
    if type(data) in (tuple, Fields) and all(isinstance(item, (mx.nd.NDArray, np.ndarray)) for item in data):
        return tuple(parts)  # as below, but faster, for the usual (X, y)
    rest = iter(parts)
    return map_leaves(lambda path, leaf: next(rest), data)


def _plan(
    operation: str,
    found: Sequence[Tuple[str, Array, Any]],
    num_shards: int,
    batch_axis: Any,
    even_split: bool,
    weights: Optional[Sequence[float]],
) -> List[Bounds]:
    num_examples = _batch_size(operation, found)
    if even_split and weights is None and num_examples % num_shards:
        raise ShardError(
            f"{operation}: got a batch of {num_examples} along axis {batch_axis} for {num_shards} devices with "
            f"even_split=True; expected a multiple of {num_shards}. Pass even_split=False."
        )
    ends = list(accumulate(plan_shards(num_examples, num_shards, weights)))
    return list(zip([0] + ends[:-1], ends))


def _batch_size(operation: str, found: Sequence[Tuple[str, Array, Any]]) -> int:
    sizes = [(path, _length(operation, path, leaf, axis)) for path, leaf, axis in found]
    if not sizes:
        raise ShardError(f"{operation}: got no array in the batch; expected at least one. Pass the features and labels.")
    path, num_examples = sizes[0]
    for other, length in sizes:
        if length != num_examples:
            raise ShardError(
                f"{operation}: got {num_examples} examples in {path} and {length} in {other}; expected as many in each. "
                "Pass batch_axis, one number for each array."
            )
    if num_examples == 0:
        raise ShardError(f"{operation}: got a batch of 0 examples in {path}; expected 1 or more. Leave empty batches out.")
    return num_examples


def _length(operation: str, path: str, leaf: Array, axis: Any) -> int:
    shape = _shape(operation, path, leaf)
    if not is_whole(axis) or not -len(shape) <= axis < len(shape):
        raise ShardError(
            f"{operation}: got {path} of shape {shape} and batch_axis {short(axis)}; expected one of its {len(shape)} axes. "
            "Arrays without examples do not belong in the batch."
        )
    return int(shape[axis])


def _shape(operation: str, path: str, leaf: Array) -> Tuple[int, ...]:
    if is_device_array(leaf):
        return tuple(leaf.shape)
    try:
        return np.asarray(leaf).shape if isinstance(leaf, (list, tuple)) else np.shape(leaf)
    except ValueError:  # rows of unequal length
        raise ShardError(
            f"{operation}: got {path}, a {type(leaf).__name__} of rows of unequal length; expected an array. Pad the rows."
        ) from None


def _check_dtype(operation: str, dtype: Any) -> None:
    try:
        known = dtype is None or (isinstance(dtype, str) and dtype == "bfloat16") or np.dtype(dtype).name in DTYPES
    except Exception:  # whatever an object's own code raises
        known = False
    if not known:
        raise ShardError(
            f"{operation}: got dtype={short(dtype)}; expected a dtype that MXNet has: {', '.join(DTYPES)}. Pass 'float32'."
        )


def _slice_leaf(leaf: Array, begin: int, end: int, axis: int) -> Array:
    array = leaf if is_device_array(leaf) else np.asarray(leaf)
    shape = array.shape
    if (begin, end) == (0, shape[axis]):
        return array
    if axis % len(shape) == 0:
        # the same as array[begin:end] in half of the time; sparse (CSR) and np arrays have their own
        return array._slice(begin, end) if type(array) is mx.nd.NDArray else array[begin:end]
    return array[(slice(None),) * (axis % len(shape)) + (slice(begin, end),)]


def _load(operation: str, path: str, leaf: Array, ctx: Context, dtype: Optional[str]) -> Array:
    if dtype is None and _floats.get() and np.dtype(leaf.dtype).kind == "f":
        dtype = _floats.get()
    if is_device_array(leaf):
        loaded = on_device(leaf, ctx)
        return loaded if dtype is None else loaded.astype(dtype, copy=False)
    try:
        wanted = np.dtype(dtype or _MXNET_DTYPES.get(leaf.dtype.name, leaf.dtype))
        return _loader.get()(leaf, ctx, wanted)
    except (KeyError, TypeError, ValueError, mx.MXNetError) as error:
        raise ShardError(
            f"{operation}: got {path} of dtype {leaf.dtype}; expected a dtype that MXNet has: {', '.join(DTYPES)}. Pass "
            "dtype='float32'."
        ) from error


def new_array(data: np.ndarray, ctx: Context, dtype: np.dtype) -> Array:
    """Return a NumPy array as a new MXNet array of the current mode."""
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return array(data, ctx=ctx, dtype=dtype)


# The dtype that a split gives to floating point: a network's float64. "": MXNet's arrays keep theirs, NumPy's float64 becomes
# float32.
_floats: ContextVar[str] = ContextVar("_floats", default="")


@contextmanager
def floats_as(dtype: str) -> Iterator[None]:
    """Let the splits in this block cast floating point to this dtype; "" is the default behaviour."""
    token = _floats.set(dtype)
    try:
        yield
    finally:
        _floats.reset(token)


Loader = Callable[[np.ndarray, Context, np.dtype], Array]
_loader: ContextVar[Loader] = ContextVar("_loader", default=new_array)


@contextmanager
def loading(loader: Loader) -> Iterator[None]:
    """Let the splits in this block make their arrays with `loader`, which must return the same as `new_array`."""
    token = _loader.set(loader)
    try:
        yield
    finally:
        _loader.reset(token)


def _concatenate(path: str, parts: Sequence[Array], ctx: Optional[Context], axis: Any) -> Array:
    shapes = [_shape("gather", path, part) for part in parts]
    for part in parts:
        _length("gather", path, part, axis)
    around = [shape[:axis] + shape[axis:][1:] for shape in shapes]
    if any(shape != around[0] for shape in around):
        raise ShardError(
            f"gather: got shapes {short(shapes)} for {path} along batch_axis {axis}; expected equal shapes except for that axis. "
            "Pass the axis of the examples as batch_axis."
        )
    if not any(is_device_array(part) for part in parts):
        joined = np.concatenate(parts, axis=axis)
        return joined if ctx is None else _load("gather", path, joined, ctx, None)
    kinds = {(type(part), part.dtype if hasattr(part, "dtype") else None) for part in parts}
    if len(kinds) > 1:
        raise ShardError(f"gather: got arrays of different types or dtypes for {path}; expected one. Cast them with astype.")
    target = ctx or parts[0].context
    moved = [part.as_in_context(target) for part in parts]
    if len(moved) == 1:
        return moved[0]
    expected = "dense arrays of one dtype"
    with explaining("gather", f"an error for {path}", expected, advice="Cast them with tostype('default').", error=ShardError):
        if isinstance(moved[0], mx.np.ndarray):
            return mx.np.concatenate(moved, axis=axis)
        return mx.nd.concat(*moved, dim=axis)
