"""Batches of this process until no process of the job has more: the others would wait for it."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

import numpy as np

from ..distributed import group
from ..errors import DataError
from ..nested import map_leaves
from .iterators import as_pair, batches_of, check_iterable


class JoinedBatches:
    """Yields the batches of this process, then empty ones, until all processes of the job have yielded theirs.

    ```
    process 0   4 examples │ 4 examples │ 1 example
    process 1   4 examples │ 4 examples │ 0 examples      contributes zeros: the step divides by 1 + 0
    ```

    Every step of a job waits for all processes. Pass it to `fit`, or loop over it, with `Trainer(sharded_data=True)`. A loop by
    hand splits inside `own_batches()`, gets no shards from an empty batch, and calls `backward([])` and `step(0)`. All processes
    must begin each pass. A pass exchanges one number per batch, and waits for it. In a single process it yields the batches.

    Parameters
    ----------
    data_iter : iterable of (X, y)
        It yields one batch or more in each process.
    batch_axis : int, or nested ints of the form of (X, y)

    Raises
    ------
    TrainerError
        It is not an iterable, or an item is not a pair.
    DataError
        A process has no batch at all, so that the form of an empty one is unknown.

    Examples
    --------
    >>> [X.shape for X, y in JoinedBatches([(np.zeros((4, 2)), np.zeros(4)), (np.zeros((1, 2)), np.zeros(1))])]
    [(4, 2), (1, 2)]

    Source: PyTorch's `Join` and Accelerate's `join_uneven_inputs` are for the same.
    """

    def __init__(self, data_iter: Iterable[Any], *, batch_axis: Any = 0) -> None:
        check_iterable("JoinedBatches", "data_iter", data_iter, reader="JoinedBatches")
        self._data_iter, self._batch_axis = data_iter, batch_axis

    def __iter__(self) -> Iterator[Any]:
        processes, batches, empty = group(), batches_of(self._data_iter), None
        while True:
            item = next(batches, None)
            has_more = np.array([item is not None], np.float32)
            if not (has_more if processes is None else processes.all_gather(has_more)).any():
                return
            if item is not None:
                empty = map_leaves(_empty, as_pair(item, "JoinedBatches"), self._batch_axis)
            elif empty is None:
                raise DataError(
                    "JoinedBatches: got no batch in this process; expected one or more in each. Give each a part of the data."
                )
            yield empty if item is None else item


def _empty(_: str, leaf: Any, axis: int) -> np.ndarray:
    shape = list(np.shape(leaf) if not hasattr(leaf, "shape") else leaf.shape)
    shape[axis] = 0
    return np.empty(shape, getattr(leaf, "dtype", np.float32))
