"""Running statistics of which several parts of a batch each compute a change: virtual shards, or micro-batches."""

from __future__ import annotations

from typing import List, Sequence

from mxnet import Context

from ..nested import Array
from ..trainer.slab import Slab, written_with


class StatsOfParts:
    """Lets the parts of a batch move running statistics on one device from the same values: virtual shards, or micro-batches.

    ```
    before ── part 0 ──► change 0, put back ─┐
    before ── part 1 ──► change 1, put back ─┴─► before + mean of the changes, weighted by examples
    ```

    Where MXNet moves nothing, as in frozen layers that no backward pass reaches, the change is 0.

    Parameters
    ----------
    slabs : list of Slab
        Of the statistics.
    context : mxnet.Context
    trained : list of Slab
        Of the gradients that each part writes on this device, for graphs that write the statistics untracked.

    Attributes
    ----------
    arrays : list of NDArray
        The statistics on this device.
    before : list of NDArray
        Their values before the batch.

    Source: Kim et al., "torchgpipe", 2020, section on deferred batch normalization.
    """

    def __init__(self, slabs: Sequence[Slab], context: Context, trained: Sequence[Slab] = ()) -> None:
        self._written = written_with(slabs, trained, context) if slabs and trained else None
        self.arrays: List[Array] = [slab.weights[slab.contexts.index(context)].as_nd_ndarray() for slab in slabs]
        self.before: List[Array] = []

    def remember(self) -> None:
        """Note the values before a batch."""
        self.before = [array.copy() for array in self.arrays]

    def take(self, num_examples: int) -> List[Array]:
        """Put the values back, and return how far the latest part has moved them, times its examples."""
        if self._written is not None:
            self._written.push()
        moved = [(array - before) * num_examples for array, before in zip(self.arrays, self.before)]
        self.put_back()
        return moved

    def put_back(self) -> None:
        """Set the values to those before the batch."""
        for array, before in zip(self.arrays, self.before):
            before.copyto(array)

    def move(self, changes: Sequence[Array]) -> None:
        """Move the values before the batch."""
        for array, before, change in zip(self.arrays, self.before, changes):
            (before + change).copyto(array)
