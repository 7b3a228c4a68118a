"""Items of data iterators: as pairs, and batches of MXNet's iterators without their padding."""

from __future__ import annotations

from functools import partial
from itertools import chain, repeat
from typing import Any, Iterable, Iterator, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet.io import DataBatch, DataIter

from ..checks import short
from ..errors import TrainerError
from ..mxnet_internals.loaders import keeps_last_batch
from ..nested import Array, is_device_array, map_leaves

_OWN_MEMORY = (list, tuple, mx.gluon.data.DataLoader)  # iterators whose batches each have memory of their own


def check_iterable(
    operation: str, name: str, data_iter: Any, *, reader: str = "", pairs: bool = True, each_once: bool = False
) -> None:
    """Raise `TrainerError` unless this is an iterable of batches, whose padding is known. The items of a list must be pairs.

    Parameters
    ----------
    operation, name : str
        Names for the error message.
    data_iter : iterable of (X, y)
    pairs : bool
        Whether its items must be pairs, or only features.
    reader : str
        The operation that takes the pairs. The items of a list or tuple are checked for it; a loader is not read.
    each_once : bool
        Whether every pass must have each example once, as an evaluation.
    """
    is_data = isinstance(data_iter, (str, bytes, dict, np.ndarray, mx.nd.NDArray))
    if not isinstance(data_iter, Iterable) or is_data:
        expected, example = ("pairs (X, y)", "[(X, y)]") if pairs else ("batches", "[X]")
        raise TrainerError(
            f"{operation}: got {short(data_iter)} as {name}; expected an iterable of {expected}. Pass {example}, or a DataLoader."
        )
    if isinstance(data_iter, DataIter) and not _last_batch(data_iter):
        raise TrainerError(
            f"{operation}: got a {name} written in C++ that does not say what fills its last batch; expected last_batch_handle. "
            f"Set {name}.last_batch_handle: 'roll_over' to train with round_batch=True, 'pad' with a CSVIter of "
            "round_batch=False, or where all batches are full, as those of MNISTIter."
        )
    if each_once and rolls_over(data_iter):
        raise TrainerError(
            f"{operation}: got a {name} that leaves the last examples of a pass to the next one (roll over); expected each "
            "example once in every pass. Let it pad or keep its last batch; its batch_size must divide the examples if it cannot."
        )
    if reader and isinstance(data_iter, (list, tuple)):
        if not data_iter:
            raise TrainerError(f"{reader}: got no batch in {name}; expected one or more. Pass [(X, y)].")
        for item in data_iter:
            as_pair(item, reader)


def no_batch(operation: str) -> TrainerError:
    """Return the error of an iterable that has no batch."""
    return TrainerError(
        f"{operation}: got no batch; expected one or more. Check that the data set is not empty. A generator is empty when it is "
        "read a second time: pass a list or a loader."
    )


def batches_of(data_iter: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over one pass.

    An iterator of `mx.io` is reset first, and yields its batches without the examples that pad the last one. Batches of
    iterators written in C++ are copied, because these write the next batch into the same memory. They do not say what fills the
    last one: with `round_batch=True` the first examples of the next pass, which a reset leaves out of it; without, an
    `ImageRecordIter` leaves in it what the memory held, and counts that. `check_iterable` asks for their `last_batch_handle`.

    Raises
    ------
    TrainerError
        In a pass: `last_batch_handle` is "pad", and the numbers of the examples show that they roll over.

    Examples
    --------
    >>> data = mx.io.NDArrayIter(np.arange(5), np.arange(5), batch_size=3)
    >>> [batch.data[0].asnumpy().tolist() for batch in batches_of(data)]
    [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """
    if not isinstance(data_iter, DataIter):
        return iter(data_iter)
    copies, fills = isinstance(data_iter, mx.io.MXDataIter), _last_batch(data_iter)
    if not copies or data_iter.first_batch is None:  # a new one begins by itself
        data_iter.reset()
    axis = max(0, str(getattr(data_iter, "layout", "N")).find("N"))
    own = partial(_own, axis=axis, fills=fills, copies=copies)
    return map(own, data_iter if fills == "roll_over" else map(_check_filling, data_iter, chain([True], repeat(False))))


def _check_filling(batch: DataBatch, is_first: bool) -> DataBatch:
    """Return a batch; raise `TrainerError` if a pass leaves out the examples with which the one before has filled its last batch.

    Iterators written in C++ number the examples from 0, except for an ImageRecordIter: its numbers are all 0.
    """
    index: Any = () if batch.index is None else batch.index
    begins_later = is_first and len(index) > 1 and index[0] > 0 and bool((np.diff(index) == 1).all())
    if begins_later or (len(index) and batch.pad and not index[-batch.pad]):
        raise TrainerError(
            "last_batch_handle: got 'pad' and a last batch that is filled with examples which the next pass leaves out "
            "(round_batch=True); expected each example once in every pass. Choose a batch_size that divides their number, "
            "CSVIter(round_batch=False), or a DataLoader; for training, 'roll_over'."
        )
    return batch


def as_pair(item: Any, operation: str) -> Tuple[Any, Any]:
    """Return an item of a data iterator as (X, y). Several arrays of a `DataBatch` become a tuple.

    Raises
    ------
    TrainerError
        It is not a pair.
    """
    if isinstance(item, DataBatch):
        if not item.label:
            raise TrainerError(
                f"{operation}: got a DataBatch without labels; expected data and labels. Pass the iterator its label."
            )
        return features_of(item), _one(_own(item).label)
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        raise TrainerError(
            f"{operation}: got {short(item)} from the data iterator; expected pairs (X, y). Nest several inputs: ((X1, X2), y)."
        )
    return item[0], item[1]


def own_pair(item: Any, operation: str, data_iter: Any) -> Tuple[Any, Any]:
    """Return an item as (X, y), in arrays into which the iterator does not write its next batch."""
    X, y = as_pair(item, operation)
    return (X, y) if isinstance(data_iter, _OWN_MEMORY) else (map_leaves(_copied, X), map_leaves(_copied, y))


def _copied(_: str, leaf: Any) -> Any:
    return leaf.copy() if is_device_array(leaf) else leaf


def features_of(item: Any) -> Any:
    """Return the features of an item without labels: the data of a `DataBatch`, otherwise the item itself."""
    return _one(_own(item).data) if isinstance(item, DataBatch) else item


def _one(arrays: Any) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def rolls_over(data_iter: Any) -> bool:
    """Return whether one epoch leaves examples for the next; MXNet's iterators count them as `pad`."""
    return _last_batch(data_iter) == "roll_over" or keeps_last_batch(data_iter)


def _last_batch(data_iter: Any) -> str:
    """Return what a data iterator, or one that it wraps, does with a last batch that is not full; "" if it does not say so."""
    inner = getattr(data_iter, "data_iter", None) or next(iter(getattr(data_iter, "iters", None) or ()), None)
    usual = "" if isinstance(data_iter, mx.io.MXDataIter) else "pad"
    return str(getattr(data_iter, "last_batch_handle", usual if inner is None else _last_batch(inner)))


def _own(batch: DataBatch, axis: int = 0, fills: str = "pad", copies: bool = False) -> DataBatch:
    """Return a batch without its padding, as arrays of the current mode."""
    num_padded = 0 if fills == "roll_over" else batch.pad or 0

    def own(array: Optional[Array]) -> Any:
        if array is None:
            return None
        if num_padded:
            array = array.slice_axis(axis, 0, array.shape[axis] - num_padded) if axis else array[: array.shape[0] - num_padded]
        elif copies:
            array = array.copy()
        return array.as_np_ndarray() if mx.util.is_np_array() and type(array) is mx.nd.NDArray else array

    data, label = ([own(array) for array in arrays or ()] for arrays in (batch.data, batch.label))
    return DataBatch(data=data, label=label, pad=0, index=batch.index)
