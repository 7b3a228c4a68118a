"""The examples of this process: every batch is divided over the processes of a job."""

from __future__ import annotations

from itertools import islice
from typing import Any, Iterable, Iterator, List, Optional, TypeVar

import numpy as np
from mxnet import gluon

from ..checks import MOST, MOST_SEED, flag, instance, whole_number
from ..distributed.process import Process, this_process
from ..errors import DataError

Item = TypeVar("Item")


class ShardedSampler:
    """Yields the indices of this process's part of each batch: a `batch_sampler` for `gluon.data.DataLoader`.

    ```
    10 examples, batches of 4, 2 processes      process 0   0 1 │ 4 5 │ 8
                                                process 1   2 3 │ 6 7 │ 9
    ```

    Each pass yields every example once, in one process. All processes get the same number of batches, each with at least one
    example. A last batch that is too small for this is joined to the previous one. Otherwise the batches equal those of one
    process with the same seed. Make the trainer with `sharded_data=True`, which divides by the examples of all processes.

    Parameters
    ----------
    num_examples : int
    batch_size : int
        Over all processes.
    shuffle : bool
    seed : int
        The order depends only on it and the epoch's number.
    process : Process, optional
        `this_process()` by default.

    Attributes
    ----------
    epoch : int
        The number of passes begun. Set it to resume another run.

    Raises
    ------
    DataError
        There are fewer examples, or smaller batches, than processes.

    Examples
    --------
    >>> second = Process(1, 2, 1, 2, 0, 1, 0)  # of two
    >>> sampler = ShardedSampler(10, 4, shuffle=False, process=second)
    >>> list(sampler), len(sampler)
    ([[2, 3], [6, 7], [9]], 3)
    """

    def __init__(
        self, num_examples: int, batch_size: int, *, shuffle: bool = True, seed: int = 0, process: Optional[Process] = None
    ) -> None:
        self._process = this_process() if process is None else process
        instance("ShardedSampler", "process", self._process, Process, "a Process", advice="Leave it out.", error=DataError)
        flag("ShardedSampler", "shuffle", shuffle, error=DataError)
        least = self._process.num_processes
        sizes = (("num_examples", num_examples, least), ("batch_size", batch_size, least), ("seed", seed, 0))
        for name, number, smallest in sizes:
            advice = f"Give each of {least} processes at least one example of each batch."
            most = MOST_SEED if name == "seed" else MOST
            whole_number("ShardedSampler", name, number, low=smallest, high=most, advice=advice, error=DataError)
        self.num_examples, self.batch_size, self.shuffle, self.seed = int(num_examples), int(batch_size), shuffle, int(seed)
        self.epoch = 0
        begins = list(range(0, self.num_examples, self.batch_size))
        if len(begins) > 1 and self.num_examples - begins[-1] < least:
            begins.pop()
        self._bounds = list(zip(begins, begins[1:] + [self.num_examples]))

    def __len__(self) -> int:
        """Return the number of batches of one pass, the same in every process."""
        return len(self._bounds)

    def __iter__(self) -> Iterator[List[int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = np.arange(self.num_examples)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)
        for begin, end in self._bounds:
            yield np.array_split(order[begin:end], self._process.num_processes)[self._process.rank].tolist()


def skip_first_batches(loader: Iterable[Item], num_batches: int) -> LaterBatches[Item]:
    """Return an iterable that skips the first batches of its first pass only, to resume within an epoch.

    Gluon's DataLoader does not read the skipped examples; other iterators read and drop them.

    Parameters
    ----------
    loader : iterable
        A loader or a sampler.
    num_batches : int

    Raises
    ------
    DataError
        The number is not a whole number of 0 or more.

    Examples
    --------
    >>> batches = skip_first_batches([10, 20, 30], 2)
    >>> list(batches), list(batches)
    ([30], [10, 20, 30])

    Source: the name is Accelerate's.
    """
    instance(
        "skip_first_batches", "loader", loader, Iterable, "an iterable of batches", advice="Pass a DataLoader.", error=DataError
    )
    advice = "Pass batches, not examples."
    return LaterBatches(
        loader, whole_number("skip_first_batches", "num_batches", num_batches, low=0, advice=advice, error=DataError)
    )


class LaterBatches(Iterable[Item]):
    """The iterable that `skip_first_batches` returns."""

    def __init__(self, loader: Iterable[Item], num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __len__(self) -> int:
        """Return the number of batches of the next pass."""
        return max(0, len(self._loader) - self._num_batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Item]:
        num_left_out, self._num_batches = self._num_batches, 0
        loader = self._loader
        if num_left_out and isinstance(loader, gluon.data.DataLoader):
            return _without_reading(loader, num_left_out)
        return islice(loader, num_left_out, None)


def _without_reading(loader: gluon.data.DataLoader, num_batches: int) -> Iterator[Any]:
    """Yield a loader's batches after the first `num_batches`: these are drawn from its sampler, but not read."""
    sampler = loader._batch_sampler
    loader._batch_sampler = skip_first_batches(sampler, num_batches)
    try:
        loader.refresh()  # workers get the first batches of a pass before it begins
        batches = iter(loader)
        first = list(islice(batches, 1))
    finally:
        loader._batch_sampler = sampler
    yield from first
    yield from batches
