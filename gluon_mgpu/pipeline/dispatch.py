"""The tasks of one batch through a pipeline, dispatched to its devices in the order of the schedule."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Dict, List, Optional, Protocol, Sequence, Set, Tuple

import mxnet as mx
from mxnet import Context, MXNetError, autograd

from ..checks import OF_WRONG_DATA, instance
from ..data_parallel.batchnorm import is_synchronised
from ..data_parallel.cudnn_batchnorm import moves_in_forward
from ..data_parallel.graph import draws_numbers
from ..data_parallel.passes import Passes, Phase, Trained, raise_named
from ..data_parallel.plan import Plan
from ..data_parallel.sharding import Split, count_examples, split_data
from ..data_parallel.stats_of_parts import StatsOfParts
from ..devices.transfer import as_in_context
from ..errors import ShardError
from ..mxnet_internals.c_calls import unallocated
from ..mxnet_internals.engine import queue_in_order
from ..mxnet_internals.parameters import binding_of, is_fresh
from ..nested import Array, is_float, leaves, map_leaves
from ..refusals import refusal
from ..runtime.device_threads import in_own_thread
from ..runtime.profiler import Recording, task_mark
from ..trainer.fresh import Pass
from ..trainer.running_stats import is_running_stat, statistics_slabs
from ..trainer.trainer import Trainer
from .schedule import Task, simulate
from .stage import NETWORK, Source, Stages, check_outputs


class Divided(Protocol):
    """What the passes read of a `Pipeline`, whose docstring explains it."""

    stages: Stages
    devices: List[List[Context]]
    num_parts: int
    micro_batches: int
    schedule: str
    recompute: bool

    def replica_of(self, context: Context) -> int:
        """Return the number of the replica whose data are on a device."""


class _DeviceStage:
    """A stage on its device, prepared until a parameter changes.

    Attributes
    ----------
    common : Stage
        What it has in common with this stage of other replicas.
    number : int
    part : int, optional
        Which part of a micro-batch it computes, if it is the last stage.
    params : list of gluon.Parameter
        Those that have gradients.
    trained : set of int
        The stages whose outputs it reads that have a backward pass.
    needs_backward : bool
        Whether it trains, or comes after a stage that does.
    """

    def __init__(self, pipeline: Divided, number: int, device: Context, former: Sequence[_DeviceStage]) -> None:
        self.common, self.number, self.device = pipeline.stages[number], number, device
        part = number - len(pipeline.stages) + pipeline.num_parts
        self.part = part if part >= 0 else None
        params = self.common.params()
        self.params = [param for param in params if param.grad_req != "null"]
        self.trained = {producer for producer in pipeline.stages.producers(number) if former[producer].needs_backward}
        self.needs_backward: bool = bool(self.params or self.trained)
        self.recomputes = pipeline.recompute and self.needs_backward and self.part is None
        self.stats = StatsOfParts(statistics_slabs(list(filter(is_running_stat, params))), device)


@dataclass(eq=False)
class _StageTasks:
    """The forward and the backward task of a stage for one micro-batch. It lives until the latter has ended.

    Attributes
    ----------
    sources : list of (int, int)
        Where its inputs come from.
    inputs : list of NDArray
        Copies on the stage's device.
    gradients : list
        Arrays for the gradients of the inputs that need one, None for others.
    outputs : list of NDArray
        After the last stage, the loss is the last one.
    constants : set of int
        Outputs that are inputs without a gradient, which the stage has passed on.
    returned : list of (int, int or None, int, NDArray)
        Gradients from the stages that read its outputs: the number of the stage, its part, the number of the output, the array.
    """

    sources: List[Source]
    inputs: List[Array] = field(default_factory=list)
    gradients: List[Optional[Array]] = field(default_factory=list)
    outputs: List[Array] = field(default_factory=list)
    constants: Set[int] = field(default_factory=set)
    returned: List[Tuple[int, Optional[int], int, Array]] = field(default_factory=list)


@dataclass(eq=False)
class _MicroBatch:
    """One micro-batch on its way through a replica.

    Attributes
    ----------
    shard : int
        The position of its first label in the batch.
    ys : sequence
        Its label, or the parts of it if several devices share the last stage.
    sizes : list of int
        The examples of each part; [0] for a batch that is not divided.
    inputs : list of NDArray
        The network's, on the first device.
    seeds : list of int
        One for each stage; [] if none draws.
    tasks : dict of int to _StageTasks
        By the number of the stage: those that have begun and not ended.
    results : dict of int to (object, NDArray)
        The network's output and the loss of each part, without their graph.
    """

    shard: int
    X: Any
    ys: Sequence[Any]
    sizes: List[int]
    inputs: List[Array]
    seeds: List[int] = field(default_factory=list)
    tasks: Dict[int, _StageTasks] = field(default_factory=dict)
    results: Dict[int, Tuple[Any, Array]] = field(default_factory=dict)

    def outputs_of(self, producer: int) -> List[Array]:
        """Return the outputs of a stage, or the network's inputs."""
        return self.inputs if producer == NETWORK else self.tasks[producer].outputs


class PipelinePasses(Passes):
    """Forward and backward passes of a batch through a `Pipeline`, which dispatches all tasks at once and waits for none.

    MXNet's engine runs whatever is ready, in any order. So the first input of each task also waits for the task before it on the
    same device: the devices keep to the schedule, and no stage runs ahead with activations that it would have to hold.

    Parameters
    ----------
    pipeline : Pipeline
    loss : callable (output, label) -> NDArray, or None
    trainer : Trainer, optional
        None for passes forward only.
    """

    in_parts = True

    def __init__(self, pipeline: Divided, loss: Any, trainer: Optional[Trainer] = None) -> None:
        super().__init__(pipeline, loss, trains=trainer is not None)
        self.pipeline, self._trainer = pipeline, trainer
        sources = [pipeline.stages.producers(stage) for stage in range(len(pipeline.stages))]
        # the tasks of so many micro-batches on one replica
        self._simulate = lru_cache(maxsize=None)(partial(simulate, sources, pipeline.devices[0], schedule=pipeline.schedule))
        self._stages: List[List[_DeviceStage]] = []  # by the replica
        self._params = list(self._net.collect_params().values())
        self._known: List[Any] = []  # what these depend on
        self._shares = False  # whether two stages on one device add to a parameter's gradient
        # of each micro-batch: its replica, and the examples of its parts, or [0] if it is not divided
        self._divided: List[Tuple[int, List[int]]] = []

    def arrange(self, operation: str, Xs: List[Any], ys: List[Any], split: Split) -> Tuple[List[Any], List[Any]]:
        """Return one item for each part of each micro-batch, instead of one per replica: all of X, and its part of the labels."""
        pipeline = self.pipeline
        arranged: List[Tuple[Any, Any]] = []
        num_micro_batches, num_parts = (1, 1) if self._trainer is None else (pipeline.micro_batches, pipeline.num_parts)
        is_divided = num_micro_batches > 1 or num_parts > 1
        self._divided = []
        for X, y in zip(Xs, ys):
            batches = split_data((X, y), num_micro_batches, split.batch_axis, even_split=False)
            replica = pipeline.replica_of(next(leaf for _, leaf in leaves(X)).context)
            for one, label in batches:
                labels = [label] if num_parts == 1 else split_data(label, num_parts, split.label_axis, even_split=False)
                sizes = [count_examples(operation, part, split.label_axis) if is_divided else 0 for part in labels]
                self._divided.append((replica, sizes))
                for device, part in zip(pipeline.devices[replica][-num_parts:], labels):
                    arranged.append((one, as_in_context(part, device)))
        return [one for one, _ in arranged], [part for _, part in arranged]

    def run(
        self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], plan: Optional[Plan], trainer: Trainer, on_phase: Phase = bool
    ) -> Trained:
        """Dispatch the tasks of all micro-batches, forward and backward, as the schedule alternates them."""
        if is_synchronised(self._net):
            raise refusal(operation, "Pipeline", "synchronised BatchNorm")
        micro_batches: List[_MicroBatch] = []
        by_replica: Dict[int, List[_MicroBatch]] = {}
        shard = 0
        for replica, sizes in self._divided:
            X, parts = Xs[shard], ys[shard : shard + len(sizes)]
            micro_batches.append(_MicroBatch(shard, X, parts, sizes, self.pipeline.stages.inputs(X)))
            by_replica.setdefault(replica, []).append(micro_batches[-1])
            shard += len(sizes)
        scale = 1.0 if trainer.steps.loss_scaler is None else trainer.steps.loss_scaler.begin()
        for one, seeds in zip(micro_batches, self._seeds() if micro_batches else ()):  # a batch that is refused draws none
            one.seeds = seeds
        task_run = _Run(operation, self.pipeline, self._loss, scale)
        planned = [(begin, replica, task) for replica, ones in by_replica.items() for begin, task in self._simulate(len(ones))]
        planned.sort(key=itemgetter(0, 1))
        stages = self._prepared()
        adds = self.pipeline.micro_batches > 1 or self._shares
        with trainer.steps.recorder.adding() if adds and micro_batches else trainer.steps.recorder.one_pass() as found:
            examples = task_run.dispatch(
                [(stages[replica][task.stage], task, by_replica[replica]) for _, replica, task in planned]
            )
        results = [one.results[part] for one in micro_batches for part in range(len(one.ys))]
        return [result for result, _ in results], [loss for _, loss in results], Pass(found.written, examples)

    def _prepared(self) -> List[List[_DeviceStage]]:
        """Return the stages of each replica on their devices."""
        now = list(chain.from_iterable(map(binding_of, self._params)))
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            self._known, self._stages = now, []
            for devices in self.pipeline.devices:
                stages: List[_DeviceStage] = []
                for number, device in enumerate(devices):
                    stages.append(_DeviceStage(self.pipeline, number, device, stages))
                self._stages.append(stages)
            trained = [(stage.device, id(param)) for stages in self._stages for stage in stages for param in stage.params]
            self._shares = len(set(trained)) < len(trained)
        return self._stages

    def _seeds(self) -> List[List[int]]:
        """Draw a seed for each task, so that its random numbers depend neither on the schedule nor on recomputation."""
        pipeline = self.pipeline
        if all(stage.draws is False for stage in pipeline.stages):  # unknown before the first batch
            return [[]] * len(self._divided)
        shape = len(self._divided), len(pipeline.stages)
        return mx.nd.random.randint(0, 2**31 - 1, shape=shape, ctx=pipeline.devices[0][0]).asnumpy().tolist()


class _Run:
    """The tasks of one batch."""

    def __init__(self, operation: str, pipeline: Divided, loss: Any, scale: float) -> None:
        self._operation, self._pipeline, self._loss, self._scale = operation, pipeline, loss, scale
        self._last: Dict[Context, List[Array]] = {}  # what the latest task of each device writes
        # how far each of several micro-batches has moved running statistics, times its examples
        self._moves: Dict[_DeviceStage, List[List[Array]]] = {}

    def dispatch(self, tasks: Sequence[Tuple[_DeviceStage, Task, List[_MicroBatch]]]) -> Dict[Context, int]:
        """Dispatch tasks, each with the micro-batches of its replica; move the running statistics, and return their examples."""
        examples: Dict[Context, int] = {}
        stages = {stage: micro_batches for stage, _, micro_batches in tasks}
        self._moves = {stage: [] for stage, ones in stages.items() if stage.stats.arrays and len(ones) > 1}
        for stage in self._moves:
            stage.stats.remember()
        try:
            for stage, task, micro_batches in tasks:
                self._dispatch(stage, task, micro_batches[task.micro_batch])
        except BaseException:
            for stage in self._moves:  # undo all that the batch has changed, except for gradients
                stage.stats.put_back()
            raise
        for stage, ones in stages.items():
            examples[stage.device] = sum(sum(one.sizes) or int((*one.results[0][1].shape, 1)[0]) for one in ones)
            if self._moves.get(stage):
                stage.stats.move([mx.nd.add_n(*parts) / examples[stage.device] for parts in zip(*self._moves[stage])])
        return examples

    def _dispatch(self, stage: _DeviceStage, task: Task, micro_batch: _MicroBatch) -> None:
        part = stage.part or 0
        if part >= len(micro_batch.ys):
            return  # it has fewer examples than devices
        function = self._forward if task.kind == "F" else self._backward
        try:
            in_own_thread(stage.device, partial(function, task, stage, micro_batch))
        except (MXNetError, *OF_WRONG_DATA) as error:
            what, shard, y = f"stage {task.stage - part}", micro_batch.shard + part, micro_batch.ys[part]
            raise_named(error, self._operation, what, shard, micro_batch.X, y)
        if Recording.is_on:
            queue_in_order(stage.device, self._last[stage.device], [], task_mark(str(task), str(stage.device), "ends"))

    def _forward(self, task: Task, stage: _DeviceStage, micro_batch: _MicroBatch) -> None:
        tasks = micro_batch.tasks[stage.number] = self._read(stage, micro_batch)
        self._in_order(task, stage, tasks.inputs)
        is_early = moves_in_forward(stage.device)
        is_alone = is_early and stage.recomputes and stage not in self._moves
        if is_alone:
            stage.stats.remember()
        outputs = self._compute(stage, tasks, micro_batch, records=not stage.recomputes)
        if is_alone:
            stage.stats.put_back()  # the second pass counts
        if is_early and stage in self._moves:
            moved = stage.stats.take(sum(micro_batch.sizes))
            self._moves[stage] += [] if stage.recomputes else [moved]  # the second pass counts
        if stage.recomputes:  # copies: an output may be an input, and the backward pass waits for outputs before inputs
            outputs = [one.copy() for one in outputs]
        self._last[stage.device] = tasks.outputs = outputs

    def _read(self, stage: _DeviceStage, micro_batch: _MicroBatch) -> _StageTasks:
        """Copy a stage's inputs to its device."""
        tasks = _StageTasks(self._pipeline.stages.sources(stage.number, micro_batch.outputs_of))
        for (producer, at), is_wanted in zip(tasks.sources, stage.common.gradients_for(tasks.sources)):
            # also from the same device: no task may write what another one reads
            array = _part(micro_batch.outputs_of(producer)[at], stage.part, micro_batch.sizes).copyto(stage.device)
            needs = (
                is_wanted and producer in stage.trained and at not in micro_batch.tasks[producer].constants and is_float(array)
            )
            tasks.inputs.append(array)
            tasks.gradients.append(unallocated(array) if needs else None)
        return tasks

    def _compute(self, stage: _DeviceStage, tasks: _StageTasks, micro_batch: _MicroBatch, *, records: bool) -> List[Array]:
        """Compute a stage of its inputs, and the loss after the last one."""
        common, inputs, gradients = stage.common, tasks.inputs, tasks.gradients
        if micro_batch.seeds and common.draws is not False:
            mx.random.seed(micro_batch.seeds[stage.number], stage.device)
        marked = [pair for pair in zip(inputs, gradients) if pair[1] is not None]
        if marked and records:
            autograd.mark_variables(*map(list, zip(*marked)), "write")
        if common.draws is None:
            common.draws = draws_numbers(common.block, common.arguments(inputs))
            check_outputs(self._operation, common.block, common.arguments(inputs))
        with autograd.record() if records else autograd.train_mode():  # this thread records nothing else
            found = common.run(inputs)
            by_array = dict(zip(map(id, inputs), gradients))
            tasks.constants = {at for at, one in enumerate(found) if by_array.get(id(one), one) is None}
            # a stage may pass an input on: its gradient then flows through an operator, like that of other outputs
            outputs: List[Array] = [one.copy() if id(one) in by_array else one for one in found]
            if stage.part is not None:
                output = self._pipeline.stages.output(outputs)
                loss = self._loss(output, micro_batch.ys[stage.part])
                what = "an array, one number for each example"
                instance(self._operation, "loss", loss, mx.nd.NDArray, what, advice="Return one array: add several up.")
                micro_batch.results[stage.part] = map_leaves(lambda _, leaf: leaf.detach(), output), loss.detach()
                outputs = [*outputs, loss]
        return outputs

    def _backward(self, task: Task, stage: _DeviceStage, micro_batch: _MicroBatch) -> None:
        tasks = micro_batch.tasks.pop(stage.number)  # the graph holds the activations, and goes with the outputs
        if not stage.needs_backward:
            return
        outputs = tasks.outputs
        if stage.part is None:
            given = _sums_of_returned(tasks, stage.device)
        else:
            loss = outputs[-1]
            filled = mx.nd.full(loss.shape, self._scale, ctx=stage.device, dtype=loss.dtype)
            given = [None] * (len(outputs) - 1) + [filled]
        waiting = [one for one in given if one is not None]
        self._in_order(task, stage, waiting + tasks.inputs if stage.recomputes else waiting)
        if stage.recomputes:
            outputs = self._compute(stage, tasks, micro_batch, records=True)
        _differentiate([pair for pair in zip(outputs, given) if pair[1] is not None])
        if stage in self._moves:
            self._moves[stage].append(stage.stats.take(sum(micro_batch.sizes)))
        written = []
        for (producer, at), array, marked in zip(tasks.sources, tasks.inputs, tasks.gradients):
            # MXNet may write another array than the one that was marked; none if the outputs do not depend on the input
            if marked is not None and is_fresh(array):
                written.append(array.grad)
                micro_batch.tasks[producer].returned.append((stage.number, stage.part, at, written[-1]))
        self._last[stage.device] = written + [param.grad(stage.device) for param in stage.params[:1]]

    def _in_order(self, task: Task, stage: _DeviceStage, arrays: Sequence[Array]) -> None:
        """Let a task wait for the one before it on the same device."""
        # the first task of a batch begins once the weights have been updated after the batch before
        last = self._last.get(stage.device) or [param.data(stage.device) for param in stage.params[:1]]
        name = task_mark(str(task), str(stage.device), "begins") if Recording.is_on else ""
        queue_in_order(stage.device, last, arrays, name)


def _sums_of_returned(tasks: _StageTasks, device: Context) -> List[Optional[Array]]:
    """Return the gradients of a stage's outputs on its device: the sums over all stages that read them."""
    found: List[List[Array]] = [[] for _ in tasks.outputs]  # of each reader, in their order
    parts: List[List[Array]] = [[] for _ in tasks.outputs]  # of the last stage
    for _, part, at, gradient in sorted(tasks.returned, key=itemgetter(0)):
        (found if part is None else parts)[at].append(gradient.copyto(device))
    for ones, of_parts in zip(found, parts):
        if of_parts:
            ones.append(of_parts[0] if len(of_parts) == 1 else mx.nd.concat(*of_parts, dim=0))
    return [sum(ones[1:], ones[0]) if ones else None for ones in found]


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


def _differentiate(heads: Sequence[Tuple[Array, Optional[Array]]]) -> None:
    """Compute a stage's gradients from those of its outputs, some of which may come from frozen layers alone."""
    if not heads:
        return
    outputs, gradients = zip(*heads)
    try:
        # shared and frozen inputs: without retain_graph, MXNet fails in the second of several passes
        autograd.backward(list(outputs), list(gradients), retain_graph=True)
    except MXNetError:  # before it has computed anything
        rest = []
        for pair in heads:  # others than those that autograd has recorded come from frozen layers alone
            with suppress(MXNetError):
                autograd.get_symbol(pair[0])
                rest.append(pair)
        if len(rest) == len(heads):
            raise
        _differentiate(rest)
