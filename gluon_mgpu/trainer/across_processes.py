"""One trainer in several processes: the same first weights, and a common divisor."""

from __future__ import annotations

from typing import List, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet import Context

from ..distributed import group
from ..errors import TrainerError
from ..nested import Array
from ..refusals import refusal
from .layout import Layout
from .slab import Slab
from .sums import QueuedSum


class ProcessSync:
    """Synchronises a trainer with those of the other processes. In a job of one process it does nothing.

    Parameters
    ----------
    layout : Layout
    sharded_data : bool
        Whether every process reads its own batches.
    """

    def __init__(self, layout: Layout, *, sharded_data: bool) -> None:
        self._processes = group()
        self.sharded_data = sharded_data and self.is_joint
        self._params = layout.params
        self._has_begun = False
        self.divisor = Divisor(layout.devices)

    @property
    def is_joint(self) -> bool:
        """Whether there are several processes."""
        return self._processes is not None

    def begin(self) -> None:
        """Copy the weights of process 0 to every device of every process. Only the first call has an effect."""
        if self._processes is None or self._has_begun:
            return
        self._has_begun = True
        params = [param for param in self._params if np.issubdtype(np.dtype(param.dtype), np.floating)]
        if len(set(self._processes.all_gather_bytes(str([param.shape for param in params]).encode()))) > 1:
            raise TrainerError(
                "Trainer: got parameters of other shapes than in another process; expected the same network in all. Build it of "
                "values that do not depend on a process's own data."
            )
        self._processes.broadcast([param.list_data()[0] for param in params])
        for param in params:
            first, *others = param.list_data()
            for other in others:
                first.copyto(other)

    def check_begun(self, operation: str) -> None:
        """Raise `TrainerError` if the latest gradients are of weights that differ between the processes."""
        if self._processes is not None and not self._has_begun:
            raise refusal(operation, "several processes", "a loop by hand whose first batch decides shapes")

    def check_unused(self, operation: str) -> None:
        """Raise `ModesError` if a backward pass has gone through weights that the processes do not share yet."""
        if self._processes is None or self._has_begun:
            return
        trained = [param for param in self._params if param.grad_req != "null"]
        if any(array._fresh_grad for param in trained for array in param.list_data()):
            raise refusal(operation, "several processes", "a loop by hand whose first batch decides shapes")


class Divisor:
    """The number of examples of all processes, on each device of this one."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = list(contexts)
        self._counts: List[Array] = []
        self._sum: Optional[QueuedSum] = None

    def divide(self, slabs: Sequence[Slab], num_examples: float) -> None:
        """Divide these sums over processes by their number of examples, of which this process has so many. It does not wait."""
        if self._sum is None:
            processes = group()
            assert processes is not None, "in one process the number is known"
            self._counts = [mx.nd.zeros((1,), ctx=context) for context in self._contexts]
            self._sum = processes.all_reduce(self._counts)
        for replica, count in enumerate(self._counts):
            count[:] = 0 if replica else num_examples
        self._sum.run(0)
        for count in self._counts:
            count += count == 0  # no process has examples, and the sums are 0
        by_context = dict(zip(self._contexts, self._counts))
        for slab in slabs:
            for gradient in slab.gradients:
                count = by_context[gradient.context]
                classic = gradient.as_nd_ndarray()
                factor = count.astype(classic.dtype, copy=False).reshape((1,) * len(classic.shape))
                mx.nd.broadcast_div(classic, factor, out=classic)
