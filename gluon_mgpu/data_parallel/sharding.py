"""Plan, split and gather: divide a batch over the devices, and put shards together again."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Callable, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import explaining, flag, is_whole, short, whole_number
from ..devices.select import check_contexts
from ..devices.transfer import Uploads, new_array, on_device
from ..distributed.membership import group, has_own_batches, process_shard
from ..errors import ShardError
from ..mxnet_internals.array_parts import ShardRange, slicer
from ..mxnet_internals.c_calls import slice_rows
from ..nested import Array, Fields, host_array, is_device_array, joinable, leaves, map_leaves, with_leaves

_MOST_SHARDS = 2**16  # no machine has more devices
# A dtype of NumPy's that MXNet lacks becomes the next larger one; float64, which networks do not take, becomes float32.
_MXNET_DTYPES = {"float64": "float32", "int16": "int32", "uint16": "int32", "uint32": "int64"}

Shards = Tuple[List[Any], List[Any]]  # of features and of labels, each on its device
SplitFunction = Callable[[Any, Any, Sequence[Context]], Shards]
Leaf = Tuple[str, Array, Any]  # an array of nested data: its path, the array, and its batch axis


@dataclass(frozen=True)
class Split:
    """How batches are divided: the arguments of `split_and_load`, and others.

    Attributes
    ----------
    virtual : int
        So many shards over all devices and processes, equally many on each, in their order, and each in memory of its own:
        operators may round differently in a part of another array. 0: one on each device.
    function : callable, optional
        Another function than `split_batch`, which divides them itself: d2l's, or the user's.
    trains : bool
        Whether they are trained on, so that the processes of a job compare the first one.
    """

    batch_axis: Any = 0
    even_split: bool = False
    weights: Optional[Sequence[float]] = None
    virtual: int = 0
    function: Optional[SplitFunction] = None
    trains: bool = True

    @property
    def label_axis(self) -> Any:
        """The axis of the labels, if features and labels each have their own."""
        return self.batch_axis[1] if isinstance(self.batch_axis, (list, tuple)) else self.batch_axis


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
        total = sum(numbers)
    except Exception:  # whatever an object's own code raises
        numbers, total = [], 0.0
    if len(numbers) != num_shards or not 0 < total < math.inf or any(not number >= 0 for number in numbers):
        raise ShardError(
            f"plan_shards: got weights {short(weights)} for {num_shards} shards; expected one finite number of 0 or more "
            "for each, not all 0. Pass the devices' speeds."
        )
    quotas = [num_examples * number / total for number in numbers]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(num_shards), key=lambda i: sizes[i] - quotas[i])  # stable: ties go to the first
    for i in by_remainder[: num_examples - sum(sizes)]:
        sizes[i] += 1
    return sizes


def split_data(data: Any, num_slice: int, batch_axis: Any = 0, even_split: bool = True) -> List[Any]:
    """Return slices of a batch, without moving it to another device.

    Parameters
    ----------
    data : array, or tuple, list or dict of nested data
        Shapes (B, ...), with the same B at `batch_axis` of each.
    num_slice : int
        With fewer examples than slices, only slices that hold examples are returned.
    batch_axis : int, or nested ints of the data's form
    even_split : bool
        Raise if the batch is not a multiple of `num_slice`.

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
    num_examples = count_examples("split_data", data, batch_axis)
    bounds = _bounds("split_data", num_examples, num_slice, Split(batch_axis, even_split))
    return [_slice_data(data, batch_axis, begin, end) for begin, end in bounds if end > begin]


def split_and_load(
    data: Any,
    ctx_list: Sequence[Context],
    batch_axis: Any = 0,
    even_split: bool = True,
    *,
    weights: Optional[Sequence[float]] = None,
) -> List[Any]:
    """Return the shards of a batch, each on its device.

    NumPy arrays are sliced on the host, and each slice is sent once. Plain lists of numbers count as NumPy arrays. They become
    np or legacy arrays, depending on the mode. They keep their dtype, except that float64 becomes float32, int16 and uint16
    become int32, uint32 becomes int64, and bool becomes float32 if they become legacy arrays, whose operators do not take it.
    MXNet's arrays keep their dtype, except for legacy ones of bool. A shard that is already on its device may share the batch's
    memory.

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
    >>> [(x.shape, np.dtype(x.dtype).name, y.shape, y.context) for x, y in shards]
    [((3, 2), 'float32', (3,), cpu(0)), ((2, 2), 'float32', (2,), cpu(1))]

    Source: the signature is that of `mxnet.gluon.utils.split_and_load`.
    """
    return SplitPlan("split_and_load", data, ctx_list, Split(batch_axis, even_split, weights)).shards(data)


def split_batch(
    X: Any, y: Any, devices: Sequence[Context], *, batch_axis: Any = 0, weights: Optional[Sequence[float]] = None
) -> Shards:
    """Return the shards of features and labels, each on its device.

    Like d2l's function, but it also splits a batch that is not a multiple of the devices. See `split_and_load`.

    Parameters
    ----------
    X, y : array, or tuple, list or dict of nested data
        Shapes (B, ...), the same B.
    devices : list of mxnet.Context
    batch_axis : int, or a pair (for X, for y) of ints or nested ints
    weights : sequence of float, optional
        Split in these proportions; see `plan_shards`.

    Examples
    --------
    >>> Xs, ys = split_batch(mx.nd.ones((5, 2)), mx.nd.arange(5), [mx.cpu(0), mx.cpu(1)])
    >>> [x.shape for x in Xs], [y.shape for y in ys]
    ([(3, 2), (2, 2)], [(3,), (2,)])

    Source: the signature is that of d2l, chapter "Training on Multiple GPUs".
    """
    return SplitPlan("split_batch", Fields((X, y)), devices, Split(batch_axis, weights=weights)).pair(X, y)


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
    forms = [[path for path, _ in leaves(shard, "shard")] for shard in shards]
    if any(form != forms[0] for form in forms):
        raise ShardError(
            "gather: got shards of different forms; expected the same tuples, lists and dicts in each. Gather them one by one."
        )
    return map_leaves(partial(_concatenate, ctx), shards[0], batch_axis, *shards[1:], path="shard")


class SplitPlan:
    """How batches of one form are divided: which part goes to which device is decided once.

    Parameters
    ----------
    operation : str
        For errors.
    data, contexts
        As for `split_and_load`.
    split : Split
        Without a function.
    is_prepared : bool
        Prepare the calls of MXNet, for more batches than this one. They do not wait for the devices: bound their number.

    Attributes
    ----------
    num_examples : int
        Over all processes that share the batch.
    ranges : list of (int, int, Context)
        The shards of this process that hold examples: their bounds along the batch axis, and their devices.
    """

    def __init__(
        self, operation: str, data: Any, contexts: Sequence[Context], split: Split, *, is_prepared: bool = False
    ) -> None:
        check_contexts(contexts, operation)
        rank, num_processes = process_shard()
        self._is_shared = num_processes > 1 and split.trains
        each = split.virtual // num_processes // len(contexts) or 1
        num_here = each * len(contexts)
        if num_processes > 1 and split.weights is not None:
            split = replace(split, weights=list(split.weights) * num_processes)
        self.num_examples = count_examples(operation, data, split.batch_axis)
        bounds = _bounds(operation, self.num_examples, num_here * num_processes, split)[rank * num_here : (rank + 1) * num_here]
        self.ranges = [(*pair, contexts[i // each]) for i, pair in enumerate(bounds) if pair[1] > pair[0]]
        found = leaves_and_axes(data, split.batch_axis)
        self._loads = [_loads(operation, *one, self.ranges, split, is_prepared) for one in found]
        self._is_flat = type(data) in (tuple, Fields) and all(isinstance(one, (mx.nd.NDArray, np.ndarray)) for one in data)

    def shards(self, data: Any) -> List[Any]:
        """Return the shards of a batch of this form, in its nesting."""
        return [with_leaves(data, arrays) for arrays in zip(*self._columns(data))]

    def pair(self, X: Any, y: Any) -> Shards:
        """Return the shards of features and of labels."""
        data = Fields((X, y))
        if self._is_flat:
            Xs, ys = self._columns(data)
            return Xs, ys
        shards = self.shards(data)
        return [shard[0] for shard in shards], [shard[1] for shard in shards]

    def shard_of_process(self, data: Any, batch_axis: Any) -> Any:
        """Return this process's shard of a batch or its label, on its own device; None if it has none."""
        return _slice_data(data, batch_axis, self.ranges[0][0], self.ranges[-1][1]) if self.ranges else None

    def _columns(self, data: Any) -> List[List[Array]]:
        processes = group() if self._is_shared else None
        if processes is not None:
            is_pair = isinstance(data, Fields)
            processes.note_divided(self.num_examples, partial(_checksum, data[1] if is_pair else data), is_pair=is_pair)
        arrays = data if self._is_flat else [leaf for _, leaf in leaves(data)]
        return [load(leaf) for load, leaf in zip(self._loads, arrays)]


def _loads(
    operation: str, path: str, leaf: Array, axis: int, ranges: List[ShardRange], split: Split, is_prepared: bool
) -> Callable[[Array], List[Array]]:
    """Return a function that returns the shards of such an array, each on its device."""
    if type(leaf) is mx.nd.NDArray and leaf.dtype == np.bool_:
        load = _loads(operation, path, leaf.astype("float32"), axis, ranges, split, is_prepared)
        return lambda leaf: load(leaf.astype("float32"))
    is_array = isinstance(leaf, (np.ndarray, mx.nd.NDArray))
    if is_prepared and is_array and not (split.virtual and is_device_array(leaf)) and axis % len(leaf.shape) == 0:
        wanted = leaf.dtype if is_device_array(leaf) else _dtype_of(leaf)
        prepared = slicer(leaf, ranges, wanted)
        if prepared is not None:
            return prepared

    make = Uploads() if is_prepared else new_array

    def shard(leaf: Array, begin: int, end: int, context: Context) -> Array:
        found = _slice_leaf(leaf, begin, end, axis)
        loaded = _load(operation, path, found, context, make)
        return loaded.copy() if split.virtual and loaded is found else loaded

    return lambda leaf: [shard(leaf, *one) for one in ranges]


def _checksum(labels: Any) -> int:
    checksum = 0
    for _, leaf in leaves(labels):
        checksum = zlib.crc32(leaf.asnumpy().tobytes() if is_device_array(leaf) else host_array(leaf).tobytes(), checksum)
    return checksum


def count_examples(operation: str, data: Any, batch_axis: Any) -> int:
    """Return how many examples a batch holds; errors as of a split."""
    found = leaves_and_axes(data, batch_axis)
    sizes = [(path, _shape(operation, path, leaf, axis)[axis]) for path, leaf, axis in found]
    if not sizes:
        raise ShardError(f"{operation}: got no array in the batch; expected at least one. Pass the features and labels.")
    path, num_examples = sizes[0]
    for other, length in sizes:
        if length != num_examples:
            raise ShardError(
                f"{operation}: got {num_examples} examples in {path} and {length} in {other}; expected the same number in both. "
                "Give each example its label, stack lists of examples, or pass the batch_axis of each array."
            )
    if num_examples == 0 and not has_own_batches():
        raise ShardError(f"{operation}: got a batch of 0 examples in {path}; expected 1 or more. Leave empty batches out.")
    return num_examples


def leaves_and_axes(data: Any, batch_axis: Any) -> List[Leaf]:
    """Return each array of a batch, with its path and its batch axis."""
    found: List[Leaf] = []
    map_leaves(lambda path, leaf, axis: found.append((path, leaf, axis)), data, batch_axis)
    return found


def _slice_data(data: Any, batch_axis: Any, begin: int, end: int) -> Any:
    return map_leaves(lambda path, leaf, axis: _slice_leaf(leaf, begin, end, axis), data, batch_axis)


def _bounds(operation: str, num_examples: int, num_shards: int, split: Split) -> List[Tuple[int, int]]:
    """Return [begin, end) of each shard along the batch axis."""
    flag(operation, "even_split", split.even_split, error=ShardError)
    if split.even_split and split.weights is None and num_examples % num_shards:
        raise ShardError(
            f"{operation}: got a batch of {num_examples} along axis {split.batch_axis} for {num_shards} devices with "
            f"even_split=True; expected a multiple of {num_shards}. Pass even_split=False."
        )
    ends = list(accumulate(plan_shards(num_examples, num_shards, split.weights)))
    return list(zip([0] + ends[:-1], ends))


def _shape(operation: str, path: str, leaf: Array, axis: Any) -> Tuple[int, ...]:
    """Return an array's shape, which must have this axis."""
    try:
        shape: Tuple[int, ...] = tuple(leaf.shape) if hasattr(leaf, "shape") else host_array(leaf).shape
    except ValueError:  # rows of unequal length
        raise ShardError(
            f"{operation}: got {path}, a {type(leaf).__name__} of rows of unequal length; expected an array. Pad the rows."
        ) from None
    if not is_whole(axis) or not -len(shape) <= axis < len(shape):
        raise ShardError(
            f"{operation}: got {path} of shape {shape} and batch_axis {short(axis)}; expected one of its {len(shape)} axes. "
            "Arrays without examples do not belong in the batch."
        )
    stype = getattr(leaf, "stype", "default")
    if stype != "default" and (stype != "csr" or axis % len(shape)):
        raise ShardError(
            f"{operation}: got {path}, a {stype} array, along axis {axis}; expected a dense one, or csr along axis 0, which can "
            "be sliced. Pass tostype('default')."
        )
    return shape


def _slice_leaf(leaf: Array, begin: int, end: int, axis: int) -> Array:
    array = leaf if is_device_array(leaf) else np.asarray(leaf)
    shape = array.shape
    if (begin, end) == (0, shape[axis]):
        return array
    if axis % len(shape) == 0:
        # sparse (CSR) and np arrays have their own
        return slice_rows(array, begin, end) if type(array) is mx.nd.NDArray else array[begin:end]
    return array[(slice(None),) * (axis % len(shape)) + (slice(begin, end),)]


def _dtype_of(array: np.ndarray) -> np.dtype:
    """Return the dtype of the shards of a NumPy array."""
    number = np.float32 if array.dtype == np.bool_ and not mx.util.is_np_array() else array.dtype
    return np.dtype(_MXNET_DTYPES.get(array.dtype.name, number))


def _load(operation: str, path: str, leaf: Array, ctx: Context, make: Callable[..., Array] = new_array) -> Array:
    if is_device_array(leaf):
        return on_device(leaf, ctx)
    try:
        return make(leaf, ctx, _dtype_of(leaf))
    except (KeyError, TypeError, ValueError, mx.MXNetError) as error:
        raise ShardError(
            f"{operation}: got {path} of dtype {leaf.dtype}; expected a dtype that MXNet has. Convert it to float32 or int64."
        ) from error


def _concatenate(ctx: Optional[Context], path: str, first: Array, axis: Any, *others: Array) -> Array:
    arrays = [first, *others]
    on_host = not any(is_device_array(one) for one in arrays)
    kinds = {(type(one), getattr(one, "dtype", None)) for one in arrays}
    shapes = [_shape("gather", path, one, axis) for one in arrays]
    if len({shape[:axis] + shape[axis:][1:] for shape in shapes}) > 1 or (len(kinds) > 1 and not on_host):
        raise ShardError(f"gather: got {short(arrays)} for {path}; expected {_EQUAL}. {_CAST}")
    if on_host:
        joined = np.concatenate(arrays, axis=axis)
        return joined if ctx is None else _load("gather", path, joined, ctx)
    target = ctx or arrays[0].context
    moved = [one.as_in_context(target) for one in arrays]
    if len(moved) == 1:
        return moved[0]
    with explaining("gather", f"an error for {path}", _EQUAL, advice=_CAST, error=ShardError):
        if isinstance(moved[0], mx.np.ndarray):
            return mx.np.concatenate(moved, axis=axis)
        return mx.nd.concat(*map(joinable, moved), dim=axis).astype(moved[0].dtype, copy=False)


_EQUAL = "dense arrays of one type, one dtype, and one shape except for the batch axis"
_CAST = "Cast them with astype or tostype('default'), and pass their batch_axis."
