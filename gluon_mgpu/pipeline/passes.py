"""The passes of one batch through a pipeline: its tasks, queued in the order of the schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context, autograd

from ..data_parallel.passes import Passes, naming
from ..data_parallel.sharding import count_examples, split_data
from ..errors import ShardError
from ..nested import Array, is_device_array, is_float, leaves, map_leaves
from ..runtime.c_api import unallocated
from ..runtime.context_threads import in_own_thread
from ..runtime.engine_push import queue_in_order
from ..runtime.profiler import Recording, TaskMark
from ..trainer.freshness import as_one_call, history
from ..trainer.running_stats import note_examples_on
from ..trainer.trainer import Trainer
from .running_stats import BatchStats, batch_norms
from .schedule import Planned, Task, plan
from .stage import NETWORK, draws_numbers


@dataclass(eq=False)
class _MicroBatch:
    """One micro-batch on its way through a replica.

    Attributes
    ----------
    shard : int
        The position of its first label in the batch.
    ys : list
        Its label, or the parts of it if several devices share the last stage.
    arrays : list of NDArray
        The network's inputs, on the first device.
    sizes : list of int
        The examples of each part; [0] for a batch that is not divided.
    inputs : dict of int to list of NDArray
        What each stage read, until its backward pass: copies on its device.
    gradients : dict of int to list
        Those of these inputs, where they are needed, None elsewhere.
    outputs : dict of int to list of NDArray
    losses, results : dict of int to NDArray
        Loss and network's output of each part.
    """

    shard: int
    X: Any
    ys: List[Any]
    arrays: List[Array]
    sizes: List[int]
    inputs: Dict[int, List[Array]] = field(default_factory=dict)
    gradients: Dict[int, List[Optional[Array]]] = field(default_factory=dict)
    outputs: Dict[int, List[Array]] = field(default_factory=dict)
    losses: Dict[int, Array] = field(default_factory=dict)
    results: Dict[int, Any] = field(default_factory=dict)
    seeds: List[int] = field(default_factory=list)  # one for each stage; [] if none draws


class PipelinePasses(Passes):
    """Forward and backward passes of a batch through a `Pipeline`, which queues all tasks at once and waits for none.

    MXNet's engine runs whatever is ready, in any order. So the first input of each task also waits for the task before it on the
    same device: the devices keep to the schedule, and no stage runs ahead with activations that it would have to hold.

    Parameters
    ----------
    pipeline : Pipeline
    loss : callable (output, label) -> NDArray, or None
    trainer : Trainer, optional
        None for passes forward only.

    Attributes
    ----------
    on_task : callable (Task), optional
        Called when a task has been queued.
    """

    on_task: Optional[Callable[[Task], None]] = None

    def __init__(self, pipeline: Any, loss: Any, trainer: Optional[Trainer] = None) -> None:
        super().__init__(pipeline, loss, trains=trainer is not None)
        self.adds = trainer is not None and (pipeline.micro_batches > 1 or pipeline.has_shared)
        self._pipeline, self._trainer = pipeline, trainer
        self._plans: Dict[int, List[Planned]] = {}  # by the number of micro-batches
        self._sizes: List[List[int]] = []  # of each micro-batch: the examples of its parts, if it is divided
        several = pipeline.stages if self.adds else []
        self.batch_norms = [batch_norms(pipeline.net, stage.params()) for stage in several]  # their statistics are put together

    def arrange(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], batch_axis: Any) -> Tuple[List[Any], List[Any]]:
        """Return one item for each part of each micro-batch, instead of one per replica: all of X, and its part of the labels."""
        pipeline = self._pipeline
        arranged: Tuple[List[Any], List[Any]] = ([], [])
        label_axis = batch_axis[1] if isinstance(batch_axis, (list, tuple)) else batch_axis
        num_micro_batches, num_parts = (1, 1) if self._trainer is None else (pipeline.micro_batches, pipeline.num_parts)
        self._sizes = []
        for X, y in zip(Xs, ys):
            batches = [(X, y)]
            if num_micro_batches > 1:
                batches = split_data((X, y), num_micro_batches, batch_axis, even_split=False)
            devices = pipeline.devices[self._replica(X)][-num_parts:]
            for one, label in batches:
                labels = [label] if num_parts == 1 else split_data(label, num_parts, label_axis, even_split=False)
                is_divided = num_micro_batches > 1 or num_parts > 1
                self._sizes.append([count_examples(operation, part, label_axis) if is_divided else 0 for part in labels])
                for device, part in zip(devices, labels):
                    arranged[0].append(one)
                    arranged[1].append(map_leaves(lambda _, leaf, device=device: _on(leaf, device), part))
        return arranged

    def forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any]) -> Tuple[List[Any], List[Array]]:
        """Queue the tasks of all micro-batches, with a trainer also their backward passes. Return outputs and losses."""
        if self._trainer is None:
            return super().forward(operation, Xs, ys)
        replicas: List[List[_MicroBatch]] = [[] for _ in self._pipeline.devices]
        shard = 0
        for sizes in self._sizes:
            X, labels = Xs[shard], list(ys[shard : shard + len(sizes)])
            replicas[self._replica(X)].append(_MicroBatch(shard, X, labels, self._pipeline.stages.inputs(X), sizes))
            shard += len(sizes)
        self._seed(replicas)
        scale = 1.0 if self._trainer.loss_scaler is None else self._trainer.loss_scaler.begin()
        runs = [_Run(self, replica, own, operation, scale) for replica, own in enumerate(replicas) if own]
        if runs:
            with as_one_call():
                _queue(runs)
        else:
            history.note_empty()
        in_order = sorted((one for own in replicas for one in own), key=lambda one: one.shard)
        for run in runs:
            run.note_examples()
        parts = [(one, part) for one in in_order for part in range(len(one.ys))]
        return [one.results[part] for one, part in parts], [one.losses[part] for one, part in parts]

    def backward(self, trainer: Trainer, losses: Sequence[Array]) -> None:
        """Do nothing: the forward passes have queued the backward passes, as the schedule alternates them."""

    def plan(self, num_micro_batches: int) -> List[Planned]:
        """Return the tasks of so many micro-batches on one replica."""
        if num_micro_batches not in self._plans:
            pipeline = self._pipeline
            numbers = {context: number for number, context in enumerate(dict.fromkeys(pipeline.devices[0]))}
            devices = [numbers[context] for context in pipeline.devices[0]]
            sources = [pipeline.producers(stage) for stage in range(pipeline.num_stages)]
            times = pipeline.stages.times(pipeline.num_parts)
            self._plans[num_micro_batches] = plan(sources, devices, num_micro_batches, pipeline.schedule, costs=times)
        return self._plans[num_micro_batches]

    def _replica(self, X: Any) -> int:
        first = next(leaf for _, leaf in leaves(X))
        return self._pipeline.replica_of(first.context)

    def _seed(self, replicas: List[List[_MicroBatch]]) -> None:
        """Draw a seed for each task, so that its random numbers depend neither on the schedule nor on recomputation."""
        pipeline = self._pipeline
        micro_batches = [one for own in replicas for one in own]
        if not micro_batches or not any(self._may_draw(stage) for stage in range(pipeline.num_stages)):
            return
        count = len(micro_batches) * pipeline.num_stages
        drawn = mx.nd.random.randint(0, 2**31 - 1, shape=(count,), ctx=pipeline.devices[0][0]).asnumpy().tolist()
        for number, one in enumerate(micro_batches):
            one.seeds = drawn[number * pipeline.num_stages : (number + 1) * pipeline.num_stages]

    def _may_draw(self, stage: int) -> bool:
        return self._pipeline.stages[stage].draws is not False  # unknown before the first batch


def _queue(runs: Sequence[_Run]) -> None:
    """Queue the tasks of all replicas in the order of their times."""
    tasks = sorted(((one.begin, run.replica, one.task) for run in runs for one in run.tasks), key=lambda item: item[:2])
    by_replica = {run.replica: run for run in runs}
    try:
        for _, replica, task in tasks:
            by_replica[replica].queue(task)
    except BaseException:
        for run in runs:
            run.give_up()
        raise
    for run in runs:
        run.finish()


class _Run:
    """The tasks of one batch on one replica."""

    def __init__(
        self, passes: PipelinePasses, replica: int, micro_batches: List[_MicroBatch], operation: str, scale: float
    ) -> None:
        pipeline = passes._pipeline
        self.replica, self.tasks = replica, passes.plan(len(micro_batches))
        self._passes, self._pipeline, self._operation, self._scale = passes, pipeline, operation, scale
        self._micro_batches = micro_batches
        self.devices = pipeline.devices[replica]
        self._readers = [
            [reader for reader in range(pipeline.num_stages) if stage in pipeline.producers(reader)]
            for stage in range(pipeline.num_stages)
        ]
        self._needs_backward: List[bool] = []  # a stage that trains, or comes after one that does
        self._trained: List[Optional[Array]] = []  # a gradient of each stage's parameters
        for stage in range(pipeline.num_stages):
            gradients = [param.grad(self.devices[stage]) for param in pipeline.trained(stage)]
            self._trained.append(gradients[0] if gradients else None)
            before = any(self._needs_backward[producer] for producer in pipeline.producers(stage))
            self._needs_backward.append(bool(gradients) or before)
        self._last: Dict[Context, List[Array]] = {}  # what the latest task of each device writes
        self._stats: Dict[int, BatchStats] = {}
        for stage, layers in enumerate(passes.batch_norms if len(micro_batches) > 1 else []):
            if layers:
                self._stats[stage] = BatchStats(layers, self.devices[stage])

    def queue(self, task: Task) -> None:
        """Queue a task."""
        micro_batch = self._micro_batches[task.micro_batch]
        part = self._pipeline.part(task.stage) or 0
        if part >= len(micro_batch.ys):
            return  # it has fewer examples than devices
        y, stage = micro_batch.ys[part], task.stage - part
        with naming(self._operation, f"stage {stage}", micro_batch.shard + part, micro_batch.X, y, self._pipeline):
            function = self._forward if task.kind == "F" else self._backward
            device = self.devices[task.stage]
            in_own_thread(device, partial(function, task, micro_batch))
            if Recording.is_on:
                queue_in_order(device, self._last[device], [], _mark(task, device, "ends"))
        if self._passes.on_task is not None:
            self._passes.on_task(task)

    def finish(self) -> None:
        """Move the running statistics."""
        for stats in self._stats.values():
            stats.finish()

    def give_up(self) -> None:
        """Undo what a batch that failed has changed, except for gradients."""
        for stats in self._stats.values():
            stats.restore()

    def note_examples(self) -> None:
        """Count the examples for the running statistics of all of this replica's devices."""
        number = sum(sum(one.sizes) or int((*one.losses[0].shape, 1)[0]) for one in self._micro_batches)
        note_examples_on(set(self.devices), number)

    def _forward(self, task: Task, micro_batch: _MicroBatch) -> None:
        pipeline, stage, device = self._pipeline, task.stage, self.devices[task.stage]
        sources = pipeline.stages[stage].sources
        producers = [stage - 1 if stage else NETWORK] * _MANY if sources is None else [producer for producer, _ in sources]
        found = [micro_batch.outputs.get(number, []) for number in range(pipeline.num_stages)]
        inputs, gradients = [], []
        read = pipeline.inputs_of(stage, micro_batch.arrays, found)
        wanted = pipeline.stages[stage].gradients_for(len(read), is_first=stage == 0)
        with autograd.pause():
            for producer, array, is_wanted in zip(producers, read, wanted):
                array = _part(array, pipeline.part(stage), micro_batch.sizes)
                array = array.copyto(device)  # also from the same device: no task may write what another one reads
                needs = is_wanted and self._needs_backward[producer] and is_float(array)
                inputs.append(array)
                gradients.append(unallocated(array) if needs else None)
        self._in_order(task, inputs)
        micro_batch.inputs[stage], micro_batch.gradients[stage] = inputs, gradients
        recomputes = pipeline.recompute and self._needs_backward[stage] and pipeline.part(stage) is None
        outputs = self._run(stage, micro_batch, records=not recomputes)
        if stage in self._stats and device.device_type == "gpu" and not recomputes:
            self._stats[stage].add(sum(micro_batch.sizes), counts=False)  # cuDNN moves them in the forward pass
        self._last[device] = outputs
        micro_batch.outputs[stage] = [one.detach() for one in outputs] if recomputes else outputs

    def _run(self, stage: int, micro_batch: _MicroBatch, *, records: bool) -> List[Array]:
        """Run a stage on its inputs, and the loss after the last one."""
        pipeline, device = self._pipeline, self.devices[stage]
        if micro_batch.seeds and self._passes._may_draw(stage):
            mx.random.seed(micro_batch.seeds[stage], device)
        inputs, gradients = micro_batch.inputs[stage], micro_batch.gradients[stage]
        marked = [(array, gradient) for array, gradient in zip(inputs, gradients) if gradient is not None]
        if marked and records:
            autograd.mark_variables(*map(list, zip(*marked)), "write")
        block = pipeline.stages[stage]
        if block.draws is None:
            block.draws = draws_numbers(block.block, inputs)
        with autograd.record() if records else autograd.pause(train_mode=True):
            outputs: List[Array] = block.run(inputs)
            part = pipeline.part(stage)
            if part is not None:
                micro_batch.results[part] = pipeline.stages.output(outputs)
                micro_batch.losses[part] = self._passes._loss(micro_batch.results[part], micro_batch.ys[part])
                outputs = [*outputs, micro_batch.losses[part]]
        return outputs

    def _backward(self, task: Task, micro_batch: _MicroBatch) -> None:
        pipeline, stage, device = self._pipeline, task.stage, self.devices[task.stage]
        part = pipeline.part(stage)
        if self._needs_backward[stage]:
            outputs = micro_batch.outputs[stage]
            with autograd.pause():
                if part is not None:
                    loss = micro_batch.losses[part]
                    given: List[Optional[Array]] = [None] * (len(outputs) - 1) + [_filled(loss, self._scale)]
                else:
                    given = self._gradients_of(stage, micro_batch, len(outputs))
            recomputes = pipeline.recompute and part is None
            waiting = [one for one in given if one is not None]
            self._in_order(task, waiting + (micro_batch.inputs[stage] if recomputes else []))
            if recomputes:
                if stage in self._stats:
                    self._stats[stage].clear()  # on GPUs the first forward pass has moved them, too
                outputs = self._run(stage, micro_batch, records=True)
            own = set(map(id, micro_batch.inputs[stage]))  # a stage may pass an input on
            heads = [pair for pair in zip(outputs, given) if pair[1] is not None and id(pair[0]) not in own]
            if heads:
                # shared and frozen inputs: without retain_graph, MXNet fails in the second of several passes
                autograd.backward(*map(list, zip(*heads)), retain_graph=True)
            if stage in self._stats:
                self._stats[stage].add(sum(micro_batch.sizes))
            written = [one for one in micro_batch.gradients[stage] if one is not None]
            trained = self._trained[stage]
            self._last[device] = written + ([] if trained is None else [trained])
        micro_batch.outputs[stage] = []  # the graph holds the activations, and goes with its outputs
        micro_batch.inputs[stage] = []
        if part is not None:
            micro_batch.losses[part] = micro_batch.losses[part].detach()
            micro_batch.results[part] = map_leaves(lambda _, leaf: leaf.detach(), micro_batch.results[part])

    def _gradients_of(self, stage: int, micro_batch: _MicroBatch, count: int) -> List[Optional[Array]]:
        """Return the gradients of a stage's outputs on its device: the sums over all stages that read them."""
        device, parts = self.devices[stage], range(len(micro_batch.ys))
        found: List[List[Array]] = [[] for _ in range(count)]
        for reader in self._readers[stage]:
            part = self._pipeline.part(reader)
            if part:
                continue  # its gradients are with those of part 0
            sources = self._pipeline.stages[reader].sources
            places = [(stage, at) for at in range(count)] if sources is None else sources
            readers = [reader] if part is None else [reader + one for one in parts]
            for place, (producer, at) in enumerate(places):
                gradients = [micro_batch.gradients[one][place] for one in readers if producer == stage]
                here = [gradient.copyto(device) for gradient in gradients if gradient is not None]
                if here:
                    found[at].append(here[0] if len(here) == 1 else mx.nd.concat(*here, dim=0))
        return [sum(ones[1:], ones[0]) if ones else None for ones in found]

    def _in_order(self, task: Task, arrays: Sequence[Array]) -> None:
        """Let a task wait for the one before it on the same device."""
        device = self.devices[task.stage]
        last = self._last.get(device, [])
        if arrays and (last or Recording.is_on):
            queue_in_order(device, last, arrays, _mark(task, device, "begins"))


def _mark(task: Task, device: Context, edge: str) -> str:
    """Return a name for MXNet's profiler while it records, otherwise none."""
    return str(TaskMark(str(task), str(device), edge)) if Recording.is_on else ""


_MANY = 2**16  # more than a stage's inputs


def _part(array: Array, part: Optional[int], sizes: Sequence[int]) -> Array:
    """Return the rows of a part of the last stage; other stages take the whole micro-batch."""
    if part is None or len(sizes) == 1:
        return array
    if not array.ndim or array.shape[0] != sum(sizes):
        raise ShardError(
            f"Pipeline: got an array of shape {array.shape} where the data-parallel stage begins, for {sum(sizes)} examples; "
            "expected the examples on axis 0. Begin the stage at another layer."
        )
    begin = sum(sizes[:part])
    return array[begin : begin + sizes[part]]


def _on(leaf: Any, device: Context) -> Any:
    return leaf.as_in_context(device) if is_device_array(leaf) else leaf


def _filled(array: Array, value: float) -> Array:
    return mx.nd.full(array.shape, value, ctx=array.context, dtype=array.dtype)
