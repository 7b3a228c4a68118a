"""Loads shards onto their devices before their step."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Deque, Generator, Iterable, Iterator, Optional, Sequence

from mxnet import Context

from ..checks import whole_number
from ..data_parallel.plan import Planner, as_split
from ..data_parallel.sharding import Shards, SplitFunction, split_batch
from ..devices.select import check_contexts
from ..mxnet_internals.c_calls import wait_until_unused
from ..nested import leaves
from .iterators import batches_of, check_iterable, own_pair

NUM_HELD = 4  # batches in use, in addition to those loaded ahead: the user's, and those of steps that still run


def prefetch(
    data_iter: Iterable[Any], ctx: Sequence[Context], *, split_f: SplitFunction = split_batch, num_batches: int = 2
) -> Generator[Shards, None, None]:
    """Yield the shards of every batch, each on its device, and load the next batches while the last step runs.

    ```
    your loop      step 1 queued           step 2 queued        step 3 queued
                        │    ▲                  │    ▲               │    ▲
    prefetch   load 1 ──┘    └ load 2, load 3 ──┘    └── load 4 ─────┘    └── load 5     (num_batches=2)
    devices             ├──── step 1 ───────────┼──── step 2 ────────┼──── step 3 ───
    ```

    In a loop that never waits, slicing and copying overlap with the queued step. For an iterator that waits for a disk, a network
    or a decoder, use a `DataLoader` with workers.

    NumPy arrays are written without waiting for the devices; for a GPU, into pinned memory that is copied asynchronously. The
    result is bit-identical to that of `split_f`.

    Parameters
    ----------
    data_iter : iterable of (X, y)
        Shapes (B, ...). While your step runs, `num_batches - 1` more batches have been drawn than yielded. Other readers of the
        same iterator do not see them.
    ctx : list of mxnet.Context
    split_f : callable (X, y, devices) -> (list of X shards, list of y shards)
    num_batches : int
        Batches loaded ahead, including the next one. 1 loads each batch when you ask for it.

    Yields
    ------
    (list of X shards, list of y shards)

    Raises
    ------
    TrainerError
        An argument is invalid (raised at once), or an item is not a pair.
    Exception
        The exception of the iterator or of `split_f`, with its traceback, after the batches before it.

    Examples
    --------
    >>> import mxnet as mx
    >>> import numpy as np
    >>> batches = [(np.ones((4, 3)), np.arange(4)), (np.ones((2, 3)), np.arange(2))]
    >>> for Xs, ys in prefetch(batches, [mx.cpu(0), mx.cpu(1)]):
    ...     print([x.shape for x in Xs], [y.asnumpy().tolist() for y in ys])
    [(2, 3), (2, 3)] [[0, 1], [2, 3]]
    [(1, 3), (1, 3)] [[0], [1]]
    """
    check_contexts(ctx, "prefetch")
    num_batches = whole_number("prefetch", "num_batches", num_batches, advice="2 is usual.")
    check_iterable("prefetch", "data_iter", data_iter)
    planner = Planner("prefetch", None, as_split("prefetch", split_f), ctx)
    return _load_ahead(data_iter, planner, num_batches)


def _load(data_iter: Iterable[Any], planner: Planner) -> Iterator[Shards]:
    for item in batches_of(data_iter):
        shards = planner.split(*own_pair(item, "prefetch", data_iter))[1:]
        del item  # the iterator's batch must not outlive its shards
        yield shards


def _load_ahead(data_iter: Iterable[Any], planner: Planner, num_batches: int) -> Generator[Shards, None, None]:
    loaded: Deque[Shards] = deque()
    in_use: Deque[Shards] = deque()
    failed: Optional[Exception] = None
    rest = _load(data_iter, planner)
    wanted = 1  # the first step starts as soon as its batch is loaded
    while True:
        try:
            loaded.extend(islice(rest, wanted - len(loaded)))
        except Exception as error:  # raised after the batches before it
            failed = error
        if not loaded:
            break
        wanted = num_batches
        shards = loaded.popleft()
        in_use.append(shards)
        if len(in_use) > NUM_HELD:  # a loop that never waits must not fill the memory
            for _, array in leaves(in_use.popleft()):
                wait_until_unused(array)
        yield shards
    if failed is not None:
        raise failed
