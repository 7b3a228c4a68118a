"""A network on its devices, to be measured: the tasks of its stages, its batches, and the bytes that it holds."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple

import mxnet as mx
from mxnet import gluon

from ..data_parallel.batchnorm import set_batch_norm
from ..data_parallel.compiled import passes_of
from ..data_parallel.sharding import count_examples, split_batch
from ..data_parallel.step import SplitFunction, TrainStep, make_step
from ..nested import Fields
from ..pipeline.network import Pipeline
from ..pipeline.schedule import Task
from ..runtime.profiler import memory_peaks
from ..trainer.trainer import Trainer
from .layouts import Costs, Curve, Layout

_MOST_READ = 64  # batches, of which the typical one is taken
_WARM_UP_STEPS = 2  # the first one makes graphs and states; MXNet's buffers still grow in the second
_LEAST_STEPS = 3
_ROUND_S = 1.0
_QUEUED = 2  # batches, as fit's max_inflight


class Trial:
    """A network on its devices, and one batch.

    Parameters
    ----------
    net : gluon.Block
        In all layouts of one `Layout.network`.
    loss : callable (output, label) -> NDArray
    trainer : Trainer
    batches : iterable of (X, y)
        The one with the median number of examples is used.
    split_f : callable
        See `train_batch`.
    compiled : str
        See `fit`.
    bn : str, optional
        See `fit`.
    """

    def __init__(
        self,
        net: gluon.Block,
        loss: Any,
        trainer: Trainer,
        batches: Iterable[Any],
        *,
        split_f: SplitFunction = split_batch,
        compiled: str = "auto",
        bn: Any = None,
    ) -> None:
        self.net, self.loss, self.trainer = net, loss, trainer
        self._split_f, self._make_passes = split_f, passes_of(compiled, trainer)
        if bn is not None:
            set_batch_norm(net, bn)
        self.X, self.y, self.num_examples = _typical(batches, getattr(split_f, "keywords", {}).get("batch_axis", 0))

    def step_of(self, layout: Layout, on_phase: Callable[[str], None] = lambda phase: None) -> TrainStep:
        """Return the training step of a layout, as `fit` makes it."""
        net, micro_steps = self.net, layout.micro_batches
        if isinstance(net, Pipeline):
            net.micro_batches, net.schedule, net.recompute = layout.micro_batches, layout.schedule, layout.recompute
            micro_steps = 1
        return make_step("plan", net, self.loss, self.trainer, self._split_f, False, micro_steps, self._make_passes, on_phase)

    def rate(self, layout: Layout) -> float:
        """Train for some batches, for about a second, and return examples/s."""
        step = self.step_of(layout)
        seconds = self._seconds(step, _WARM_UP_STEPS)
        return self.num_examples / self._seconds(step, max(_LEAST_STEPS, round(_ROUND_S / seconds)))

    def measure_batches(self, costs: Costs, micro_steps: Sequence[int], has_time: Callable[[], bool]) -> None:
        """Measure data parallelism: batches in so many micro-steps. The first number is measured in any case."""
        for at, number in enumerate(micro_steps):
            if self.num_examples < number * len(self.trainer.contexts) or (at and not has_time()):
                continue
            step = self.step_of(Layout("data", 0, micro_batches=number))
            if number > 1 and not costs.held_bytes:  # a new shape: its buffers are made now, the parameters' exist
                peaks = memory_peaks(partial(step, self.X, self.y), self.trainer.devices)
                if peaks:
                    costs.held_bytes[False] = [max(peaks.values()) * len(peaks) * number / self.num_examples]
            self._seconds(step, _WARM_UP_STEPS)
            seconds = [self._seconds(step, 1) for _ in range(_LEAST_STEPS)]
            costs.batches.setdefault(number, Curve()).add(self.num_examples, seconds)
        costs.fixed_bytes = [max(sum(parts.values()) for parts in self.trainer.bytes_per_device().values())]

    def measure_tasks(self, costs: Costs, micro_batches: Sequence[int], has_time: Callable[[], bool]) -> None:
        """Measure a pipeline: its tasks one at a time, with so many micro-batches, and one batch as it runs.

        The first number is measured in any case.
        """
        net = self.net
        assert isinstance(net, Pipeline)
        if not costs.tasks:
            costs.tasks = [{"F": Curve(), "B": Curve()} for _ in net.stages]
            costs.sources = [net.producers(stage) for stage in range(net.num_stages)]
            costs.devices = [net.devices[0].index(device) for device in net.devices[0]]
            costs.num_parts = net.num_parts
        for at, number in enumerate(micro_batches):
            part = self.num_examples / len(net.devices) / number
            if part < net.num_parts or (at and not has_time()):
                continue
            layout = Layout("model", 0, stages=net.num_stages, micro_batches=number)
            self._timed(layout)
            times, rest = self._timed(layout)
            for (kind, stage), seconds in times.items():
                costs.tasks[stage][kind].add(part, seconds)
            costs.rest.add(self.num_examples, [rest])
            if not at:
                self._measure_whole(costs, layout, part)

    def _measure_whole(self, costs: Costs, layout: Layout, part: float) -> None:
        """Measure a batch of a pipeline as it runs: its seconds, and its bytes with recomputation and without."""
        net, step, planned = self.net, self.step_of(layout), costs.simulate(layout, part)
        self._seconds(step, 1)
        costs.whole.add(self.num_examples, [self._seconds(step, 1) for _ in range(_LEAST_STEPS)])
        seconds = costs.whole.at(self.num_examples) - costs.rest.at(self.num_examples)
        costs.slowdown = max(0.5, seconds / max(one.end for one in planned))
        if costs.fixed_bytes:
            return
        devices = list(zip(*net.devices))[: max(costs.devices) + 1]  # each with its replicas
        fixed = {device: sum(parts.values()) for device, parts in self.trainer.bytes_per_device().items()}
        costs.fixed_bytes = [max(fixed[str(one)] for one in replicas) for replicas in devices]
        for recompute in (False, True):
            net.recompute = recompute
            peaks = memory_peaks(partial(step, self.X, self.y), net.all_contexts)
            held = costs.num_held(planned, recompute=recompute)
            if peaks:
                per_device = [max(peaks[str(one)] for one in replicas) for replicas in devices]
                costs.held_bytes[recompute] = [one / count / part for one, count in zip(per_device, held)]

    def _timed(self, layout: Layout) -> Tuple[Dict[Tuple[str, int], List[float]], float]:
        """Train on the batch with one task at a time. Return the seconds of each stage's tasks, and those outside tasks."""
        found: Dict[Tuple[str, int], List[float]] = defaultdict(list)
        ended = 0.0

        def restart(phase: str = "forward") -> None:
            nonlocal ended
            if phase == "forward":
                mx.nd.waitall()
                ended = time.perf_counter()

        def on_task(task: Task) -> None:
            begin = ended
            restart()
            found[task.kind, task.stage].append(ended - begin)

        step = self.step_of(layout, restart)
        step.passes.on_task = on_task  # type: ignore[attr-defined]
        total = self._seconds(step, 1)
        return found, max(0.0, total - sum(map(sum, found.values())))

    def _seconds(self, step: TrainStep, num_steps: int) -> float:
        """Return the seconds of one batch, over so many."""
        mx.nd.waitall()
        began = time.perf_counter()
        for number in range(1, num_steps + 1):
            step(self.X, self.y)
            if number % _QUEUED == 0 or number == num_steps:
                mx.nd.waitall()
        return (time.perf_counter() - began) / num_steps


def _typical(batches: Iterable[Any], batch_axis: Any) -> Tuple[Any, Any, int]:
    """Return the batch with the median number of examples, of the first ones, and that number."""
    found: List[Tuple[int, int, Any, Any]] = []
    for X, y in copy.copy(batches):  # the loader's epochs stay
        found.append((count_examples("plan", Fields((X, y)), batch_axis), len(found), X, y))
        if len(found) == _MOST_READ:
            break
    num_examples, _, X, y = sorted(found, key=lambda one: one[:2])[len(found) // 2]
    return X, y, num_examples
