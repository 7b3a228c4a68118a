"""One trainer in several processes: the same first weights, and what a process may do before it has them."""

from __future__ import annotations

import numpy as np

from ..distributed import group
from ..errors import TrainerError
from ..refusals import refusal
from .gradients import has_split
from .layout import Layout
from .sums import Divisor


class ProcessSync:
    """Synchronises a trainer with those of the other processes. In a job of one process it does nothing.

    Parameters
    ----------
    layout : Layout

    Attributes
    ----------
    in_job : bool
        Whether there are several processes.
    divisor : Divisor
    """

    def __init__(self, layout: Layout) -> None:
        self._waiting = group()  # until all processes have the same weights
        self.in_job = self._waiting is not None
        self._params = layout.params
        self.divisor = Divisor(layout.devices)

    def begin(self) -> None:
        """Copy the weights of process 0 to every device of every process. Only the first call has an effect."""
        processes, self._waiting = self._waiting, None
        if processes is None:
            return
        params = [param for param in self._params if np.issubdtype(np.dtype(param.dtype), np.floating)]
        if len(set(processes.all_gather_bytes(str([param.shape for param in params]).encode()))) > 1:
            raise TrainerError(
                "Trainer: got parameters of other shapes than in another process; expected the same network in all. Build it of "
                "values that do not depend on a process's own data."
            )
        processes.broadcast([param.list_data()[0] for param in params])
        for param in params:
            first, *others = param.list_data()
            for other in others:
                first.copyto(other)

    def check_begun(self, operation: str, *, divides: bool = False) -> None:
        """Raise `TrainerError` if the latest gradients are of weights that differ between the processes.

        With `divides`, also if they are of whole batches, of which each process should take its part.
        """
        if self._waiting is not None:
            raise refusal(operation, "several processes", "a loop by hand whose first batch decides shapes")
        if divides and self.in_job and not has_split():
            raise refusal(operation, "several processes", "a split of your own")

    def check_unused(self, operation: str) -> None:
        """Raise `ModesError` if a backward pass has gone through weights that the processes do not share yet."""
        trained = [param for param in self._params if param.grad_req != "null"]
        if any(array._fresh_grad for param in trained for array in param.list_data()):
            self.check_begun(operation)
