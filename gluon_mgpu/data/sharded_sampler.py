"""The examples of this process: every batch is divided over the processes of a job."""

from __future__ import annotations

from typing import Iterator, List, Optional

import numpy as np

from ..checks import MOST_SEED, flag, instance, whole_number
from ..distributed.process import Process, this_process
from ..errors import DataError


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
        advice = f"Give each of {least} processes at least one example of each batch."
        for name, number in (("num_examples", num_examples), ("batch_size", batch_size)):
            whole_number("ShardedSampler", name, number, low=least, advice=advice, error=DataError)
        whole_number("ShardedSampler", "seed", seed, low=0, high=MOST_SEED, advice="Pass for example 0.", error=DataError)
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
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.num_examples) if self.shuffle else np.arange(self.num_examples)
        for begin, end in self._bounds:
            yield np.array_split(order[begin:end], self._process.num_processes)[self._process.rank].tolist()
