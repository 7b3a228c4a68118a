"""One trainer in several processes: the same network, options and weights in each."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Deque, Dict, Optional, Tuple

from ..distributed import group
from ..errors import TrainerError
from ..nested import Array
from ..refusals import refusal
from .first_weights import copy_first
from .fresh import Pass
from .layout import Layout
from .process_facts import LABELS, SAME, Facts, check_same, described, named

_LAG = 16  # steps after which the checksums of all processes are read: they have arrived, and nothing waits for them


class ProcessSync:
    """Keeps a trainer the same as those of the other processes. In a job of one process it does nothing.

    ```
    made          parameters, optimizer and options are compared; then all processes get the weights of process 0
    first step    they are compared again, with the labels of the first batch that the processes have divided
    each step     a checksum of them is exchanged. It is read a few steps later; at once if this process has changed
                  parameters, because it would sum other arrays than the others
    ```

    Parameters
    ----------
    layout : Layout

    Attributes
    ----------
    in_job : bool
        Whether there are several processes.
    """

    def __init__(self, layout: Layout) -> None:
        self._processes = group()
        self.in_job = self._processes is not None
        self._is_waiting = self.in_job  # until all processes have the same weights
        self._layout = layout
        self._params: Dict[str, str] = {}  # as they were in the latest step, and the version of the layout then
        self._version: Optional[int] = None
        self._queued: Deque[Tuple[Facts, int, Array]] = deque()  # the facts of the latest steps, and the checksums
        if self._processes is not None:
            self._processes.labels = ()

    def begin(self, options: Facts) -> None:
        """Compare the trainers, and copy the weights of process 0 to every device of every process. Only the first call counts.

        Raises
        ------
        TrainerError
            They differ. The error names the first difference and the ranks.
        """
        if self._processes is not None and self._is_waiting:
            self._is_waiting = False
            check_same("Trainer", self._processes, {**self._description(), **options}, self._layout.names)
            copy_first(self._processes, self._layout.params)

    def step(self, options: Facts, *, divides: bool) -> None:
        """Exchange what a step depends on, in addition to the gradients, before it sums them.

        `divides`: the processes divide each batch.

        Raises
        ------
        TrainerError
            The trainers of the processes differ, or differed some steps ago.
        """
        processes, layout = self._processes, self._layout
        if processes is None:
            return
        processes.num_divided = 0
        before, is_first, has_changed = self._params, self._version is None, layout.version != self._version
        if has_changed:
            self._params, self._version = self._description(), layout.version
        facts = {**self._params, **options} if has_changed else options
        if is_first:
            labels = {LABELS: processes.labels[-1:]} if divides else {}
            check_same("Trainer.step", processes, {**facts, **labels}, layout.names)
        checksum = zlib.crc32(repr((self._params, options)).encode()) >> 8  # 24 bits, which a float32 holds
        self._queued.append((facts, checksum, processes.exchange(checksum)))
        if has_changed and not is_first and (self._queued[-1][2].asnumpy() != checksum).any():
            name = next((one for one in self._params if before.get(one) != self._params[one]), "an option")
            raise TrainerError(
                f"Trainer.step: got {named(name, layout.names)} changed from {before.get(name)} to {self._params.get(name)} in "
                f"rank {processes.process.rank}, and not in all others; expected the same change in all. {SAME}."
            )
        self._check(_LAG)

    def _description(self) -> Dict[str, str]:
        return described(self._layout.names, self._layout.params, structural=self._layout.structural)

    def settle(self) -> None:
        """Check the latest steps, too, and wait for them. All processes must call it after the same step."""
        self._check(0)

    def _check(self, num_left: int) -> None:
        while self._processes is not None and len(self._queued) > num_left:
            facts, checksum, everyones = self._queued.popleft()
            if (everyones.asnumpy() != checksum).any():  # every process sees that, after the same step
                check_same("Trainer.step", self._processes, {**facts, **self._params}, self._layout.names)

    def check_begun(self, operation: str, *, divides: bool = False) -> None:
        """Raise `TrainerError` if the latest gradients are of weights that differ between the processes.

        With `divides`, also if they are of whole batches, of which each process should take its part.
        """
        if self._is_waiting:
            raise refusal(operation, "several processes", "a loop by hand whose first batch decides shapes")
        if divides and self._processes is not None and not self._processes.has_divided:
            raise refusal(operation, "several processes", "a split of your own")

    def check_size(self, operation: str, num_examples: float, latest: Optional[Pass]) -> None:
        """Raise `ModesError` if this is the size of a batch that processes share, and the pass was of a part of it."""
        counted = 0 if latest is None else sum(latest.examples.values())
        if self._processes is not None and num_examples == self._processes.num_divided and 0 < counted < num_examples:
            raise refusal(operation, "sharded_data", "the size of a batch that processes share")
