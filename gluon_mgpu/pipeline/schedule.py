"""Schedules of a pipeline: which task runs on which device after which other one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Hashable, List, Sequence, Tuple

SCHEDULES = ("1f1b", "gpipe")
COSTS = {"F": 1.0, "B": 2.0}  # a backward pass computes about twice as much as a forward pass


@dataclass(frozen=True)
class Task:
    """One stage's forward (`F`) or backward (`B`) pass of one micro-batch."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


def simulate(
    sources: Sequence[Sequence[int]], devices: Sequence[Hashable], num_micro_batches: int, schedule: str = "1f1b"
) -> List[Tuple[float, Task]]:
    """Simulate a schedule and return its tasks, by the times at which they begin. Each device runs its tasks in this order.

    ```
    gpipe  device 0: F0 F0 F0 F0             B0 B0 B0 B0     all forward passes, then all backward passes: the activations of
           device 1:    F1 F1 F1 F1 B1 B1 B1 B1              all micro-batches are held
    1f1b   device 0: F0 F0    B0 F0 B0 F0 B0    B0           one forward, one backward pass: a stage holds those of as many
           device 1:    F1 B1 F1 B1 F1 B1 F1 B1              micro-batches as stages follow one another from it on
    ```

    Parameters
    ----------
    sources : sequence of sequences of int
        For each stage, the stages whose outputs it reads, all of them earlier ones.
    devices : sequence of hashable
        For each stage, its device, or a number for it. A device may have several stages.
    num_micro_batches : int
    schedule : str
        One of `SCHEDULES`.

    Examples
    --------
    >>> [str(task) for _, task in simulate([[], [0]], [0, 1], 2)]
    ['F0.0', 'F1.0', 'F0.1', 'B1.0', 'B0.0', 'F1.1', 'B1.1', 'B0.1']

    Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019; Narayanan et al.,
    "PipeDream: generalized pipeline parallelism for DNN training", 2019 (1F1B, here with a flush after each batch).
    """
    num_stages = len(sources)
    readers: List[List[int]] = [[other for other in range(num_stages) if stage in sources[other]] for stage in range(num_stages)]
    depths = [1] * num_stages  # stages from this one to the end of its longest way
    for stage in reversed(range(num_stages)):
        depths[stage] += max((depths[reader] for reader in readers[stage]), default=0)
    is_1f1b = schedule == "1f1b"
    most_held = depths if is_1f1b else [num_micro_batches] * num_stages
    ends: Dict[Task, float] = {}
    started = {"F": [0] * num_stages, "B": [0] * num_stages}
    free = dict.fromkeys(devices, 0.0)
    planned: List[Tuple[float, Task]] = []

    def needed(task: Task) -> List[Task]:
        if task.kind == "F":
            return [Task("F", source, task.micro_batch) for source in sources[task.stage]]
        after = [Task("B", reader, task.micro_batch) for reader in readers[task.stage]]
        return [Task("F", task.stage, task.micro_batch), *after]

    def candidates(stage: int) -> List[Task]:
        """Return the tasks of a stage that its order allows next."""
        forward, backward = started["F"][stage], started["B"][stage]
        found = []
        if forward < min(num_micro_batches, backward + most_held[stage]):
            found.append(Task("F", stage, forward))
        if backward < forward and (is_1f1b or forward == num_micro_batches):
            found.append(Task("B", stage, backward if is_1f1b else num_micro_batches - 1 - backward))
        return found

    def begin_of(task: Task) -> float:
        return max([free[devices[task.stage]], *(ends[one] for one in needed(task))])

    while len(planned) < 2 * num_stages * num_micro_batches:
        ready = [one for stage in range(num_stages) for one in candidates(stage) if all(map(ends.__contains__, needed(one)))]
        # on a tie a backward pass comes first, and then the later stage: both free memory sooner
        begin, _, _, task = min((begin_of(one), one.kind, -one.stage, one) for one in ready)
        ends[task] = free[devices[task.stage]] = begin + COSTS[task.kind]
        started[task.kind][task.stage] += 1
        planned.append((begin, task))
    return planned
