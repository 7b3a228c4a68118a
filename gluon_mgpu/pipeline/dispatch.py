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


@dataclass(eq=False)
class _MicroBatch:
    """One micro-batch on its way through a replica. The dicts are by stage.

    Attributes
    ----------
    shard : int
        The position of its first label in the batch.
    ys : sequence
        Its label, or the parts of it if several devices share the last stage.
    sizes : list of int
        The examples of each part; [0] for a batch that is not divided.
    outputs : dict of int to list of NDArray
        Until the stage's backward pass. Those of `NETWORK` are the network's inputs, on the first device.
    seeds : list of int
        One for each stage; [] if none draws.
    inputs : dict of int to list of NDArray
        Copies on the stage's device, until its backward pass.
    gradients : dict of int to list
        Those of the inputs, where they are needed, None elsewhere.
    apart : set of (int, int)
        Outputs that are inputs without a gradient, which their stage has passed on.
    losses, results : dict of int to NDArray
        Loss and network's output of each part, without their graph.
    """

    shard: int
    X: Any
    ys: Sequence[Any]
    sizes: List[int]
    outputs: Dict[int, List[Array]]
    seeds: List[int] = field(default_factory=list)
    inputs: Dict[int, List[Array]] = field(default_factory=dict)
    gradients: Dict[int, List[Optional[Array]]] = field(default_factory=dict)
    apart: Set[Source] = field(default_factory=set)
    losses: Dict[int, Array] = field(default_factory=dict)
    results: Dict[int, Any] = field(default_factory=dict)


class _Place:
    """A stage on its device, prepared until a parameter changes.

    Attributes
    ----------
    number : int
    part : int, optional
        Which part of a micro-batch it computes, if it is the last stage.
    params : list of gluon.Parameter
        Those that have gradients.
    trained : set of int
        The stages whose outputs it reads that have a backward pass.
    needs_backward : bool
        Whether it trains, or comes after a stage that does.
    readers : list of _Place
        The stages that read its outputs; of a divided one, all its parts.
    """

    def __init__(self, pipeline: Divided, number: int, device: Context, former: Sequence[_Place]) -> None:
        self.stage, self.number, self.device = pipeline.stages[number], number, device
        part = number - len(pipeline.stages) + pipeline.num_parts
        self.part = part if part >= 0 else None
        params = self.stage.params()
        self.params = [param for param in params if param.grad_req != "null"]
        producers = [former[producer] for producer in pipeline.stages.producers(number)]
        self.trained = {place.number for place in producers if place.needs_backward}
        self.needs_backward: bool = bool(self.params or self.trained)
        self.recomputes = pipeline.recompute and self.needs_backward and self.part is None
        self.readers: List[_Place] = []
        for place in producers:
            place.readers.append(self)
        self.stats = StatsOfParts(statistics_slabs(list(filter(is_running_stat, params))), device)


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
        self._places: List[List[_Place]] = []  # by the replica
        self._params = list(self._net.collect_params().values())
        self._known: List[Any] = []  # what the places depend on
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
        own: Dict[int, List[_MicroBatch]] = {}  # by the replica
        shard = 0
        for replica, sizes in self._divided:
            X, parts = Xs[shard], ys[shard : shard + len(sizes)]
            micro_batches.append(_MicroBatch(shard, X, parts, sizes, {NETWORK: self.pipeline.stages.inputs(X)}))
            own.setdefault(replica, []).append(micro_batches[-1])
            shard += len(sizes)
        scale = 1.0 if trainer.steps.loss_scaler is None else trainer.steps.loss_scaler.begin()
        for one, seeds in zip(micro_batches, self._seeds() if micro_batches else ()):  # a batch that is refused draws none
            one.seeds = seeds
        task_run = _Run(operation, self.pipeline, self._loss, scale)
        planned = [(begin, replica, task) for replica, ones in own.items() for begin, task in self._simulate(len(ones))]
        planned.sort(key=itemgetter(0, 1))
        places = self._prepared()
        adds = self.pipeline.micro_batches > 1 or self._shares
        with trainer.steps.recorder.adding() if adds and micro_batches else trainer.steps.recorder.one_pass() as found:
            examples = task_run.dispatch([(places[replica][task.stage], task, own[replica]) for _, replica, task in planned])
        results = [(one.results[part], one.losses[part]) for one in micro_batches for part in range(len(one.ys))]
        return [result for result, _ in results], [loss for _, loss in results], Pass(found.written, examples)

    def _prepared(self) -> List[List[_Place]]:
        """Return the stages of each replica on their devices."""
        now = list(chain.from_iterable(map(binding_of, self._params)))
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            self._known, self._places = now, []
            for devices in self.pipeline.devices:
                places: List[_Place] = []
                for number, device in enumerate(devices):
                    places.append(_Place(self.pipeline, number, device, places))
                self._places.append(places)
            trained = [(place.device, id(param)) for places in self._places for place in places for param in place.params]
            self._shares = len(set(trained)) < len(trained)
        return self._places

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
        self._moves: Dict[_Place, List[List[Array]]] = {}

    def dispatch(self, tasks: Sequence[Tuple[_Place, Task, List[_MicroBatch]]]) -> Dict[Context, int]:
        """Dispatch tasks, each with the micro-batches of its replica; move the running statistics, and return their examples."""
        examples: Dict[Context, int] = {}
        places = {place: micro_batches for place, _, micro_batches in tasks}
        self._moves = {place: [] for place, own in places.items() if place.stats.arrays and len(own) > 1}
        for place in self._moves:
            place.stats.begin()
        try:
            for place, task, micro_batches in tasks:
                self._dispatch(place, task, micro_batches[task.micro_batch])
        except BaseException:
            for place in self._moves:  # undo all that the batch has changed, except for gradients
                place.stats.put_back()
            raise
        for place, own in places.items():
            examples[place.device] = sum(sum(one.sizes) or int((*one.losses[0].shape, 1)[0]) for one in own)
            if self._moves.get(place):
                place.stats.move([mx.nd.add_n(*parts) / examples[place.device] for parts in zip(*self._moves[place])])
        return examples

    def _dispatch(self, place: _Place, task: Task, micro_batch: _MicroBatch) -> None:
        part = place.part or 0
        if part >= len(micro_batch.ys):
            return  # it has fewer examples than devices
        function = self._forward if task.kind == "F" else self._backward
        try:
            in_own_thread(place.device, partial(function, task, place, micro_batch))
        except (MXNetError, *OF_WRONG_DATA) as error:
            what, shard, y = f"stage {task.stage - part}", micro_batch.shard + part, micro_batch.ys[part]
            raise_named(error, self._operation, what, shard, micro_batch.X, y)
        if Recording.is_on:
            queue_in_order(place.device, self._last[place.device], [], task_mark(str(task), str(place.device), "ends"))

    def _forward(self, task: Task, place: _Place, micro_batch: _MicroBatch) -> None:
        self._read(place, micro_batch)
        self._in_order(task, place, micro_batch.inputs[place.number])
        outputs = self._compute(place, micro_batch, records=not place.recomputes)
        if place.device.device_type == "gpu" and place in self._moves:  # cuDNN moves them in the forward pass
            moved = place.stats.take(sum(micro_batch.sizes))
            self._moves[place] += [] if place.recomputes else [moved]  # the second pass counts
        if place.recomputes:  # copies: an output may be an input, and the backward pass waits for outputs before inputs
            outputs = [one.copy() for one in outputs]
        self._last[place.device] = micro_batch.outputs[place.number] = outputs

    def _read(self, place: _Place, micro_batch: _MicroBatch) -> None:
        """Copy a stage's inputs to its device."""
        number, outputs = place.number, micro_batch.outputs
        sources = self._pipeline.stages.sources(number, outputs)
        inputs = micro_batch.inputs[number] = []
        gradients = micro_batch.gradients[number] = []
        for source, is_wanted in zip(sources, place.stage.gradients_for(sources)):
            producer, at = source
            # also from the same device: no task may write what another one reads
            array = _part(outputs[producer][at], place.part, micro_batch.sizes).copyto(place.device)
            needs = is_wanted and producer in place.trained and source not in micro_batch.apart and is_float(array)
            inputs.append(array)
            gradients.append(unallocated(array) if needs else None)

    def _compute(self, place: _Place, micro_batch: _MicroBatch, *, records: bool) -> List[Array]:
        """Compute a stage of its inputs, and the loss after the last one."""
        stage, number, part = place.stage, place.number, place.part
        inputs, gradients = micro_batch.inputs[number], micro_batch.gradients[number]
        if micro_batch.seeds and stage.draws is not False:
            mx.random.seed(micro_batch.seeds[number], place.device)
        marked = [pair for pair in zip(inputs, gradients) if pair[1] is not None]
        if marked and records:
            autograd.mark_variables(*map(list, zip(*marked)), "write")
        if stage.draws is None:
            stage.draws = draws_numbers(stage.block, stage.arguments(inputs))
            check_outputs(self._operation, stage.block, stage.arguments(inputs))
        with autograd.record() if records else autograd.train_mode():  # this thread records nothing else
            found = stage.run(inputs)
            by_array = dict(zip(map(id, inputs), gradients))
            micro_batch.apart.update((number, at) for at, one in enumerate(found) if by_array.get(id(one), one) is None)
            # a stage may pass an input on: its gradient then flows through an operator, like that of other outputs
            outputs: List[Array] = [one.copy() if id(one) in by_array else one for one in found]
            if part is not None:
                output = self._pipeline.stages.output(outputs)
                loss = self._loss(output, micro_batch.ys[part])
                what = "an array, one number for each example"
                instance(self._operation, "loss", loss, mx.nd.NDArray, what, advice="Return one array: add several up.")
                micro_batch.results[part] = map_leaves(lambda _, leaf: leaf.detach(), output)
                micro_batch.losses[part] = loss.detach()
                outputs = [*outputs, loss]
        return outputs

    def _backward(self, task: Task, place: _Place, micro_batch: _MicroBatch) -> None:
        number, part = place.number, place.part
        inputs, gradients, outputs = micro_batch.inputs[number], micro_batch.gradients[number], micro_batch.outputs[number]
        if place.needs_backward:
            if part is None:
                given = self._gradients_of(place, micro_batch)
            else:
                loss = outputs[-1]
                filled = mx.nd.full(loss.shape, self._scale, ctx=place.device, dtype=loss.dtype)
                given = [None] * (len(outputs) - 1) + [filled]
            waiting = [one for one in given if one is not None]
            self._in_order(task, place, waiting + inputs if place.recomputes else waiting)
            if place.recomputes:
                outputs = self._compute(place, micro_batch, records=True)
            _differentiate([pair for pair in zip(outputs, given) if pair[1] is not None])
            if place in self._moves:
                self._moves[place].append(place.stats.take(sum(micro_batch.sizes)))
            # MXNet may write another array than the one that was marked; none if the outputs do not depend on the input
            for at, array in enumerate(inputs):
                if gradients[at] is not None:
                    gradients[at] = array.grad if is_fresh(array) else None
            own = [param.grad(place.device) for param in place.params[:1]]
            self._last[place.device] = [one for one in gradients + own if one is not None]
        del micro_batch.outputs[number], micro_batch.inputs[number]  # the graph holds the activations, and goes with its outputs

    def _gradients_of(self, place: _Place, micro_batch: _MicroBatch) -> List[Optional[Array]]:
        """Return the gradients of a stage's outputs on its device: the sums over all stages that read them."""
        found: List[List[Array]] = [[] for _ in micro_batch.outputs[place.number]]  # of each reader, in the order of its parts
        divided: Dict[int, List[Array]] = {}
        for reader in place.readers:
            sources = self._pipeline.stages.sources(reader.number, micro_batch.outputs)
            # a part without examples has none
            for (producer, at), gradient in zip(sources, micro_batch.gradients.get(reader.number, ())):
                if producer == place.number and gradient is not None:
                    (found[at] if reader.part is None else divided.setdefault(at, [])).append(gradient.copyto(place.device))
        for at, parts in divided.items():
            found[at].append(parts[0] if len(parts) == 1 else mx.nd.concat(*parts, dim=0))
        return [sum(ones[1:], ones[0]) if ones else None for ones in found]

    def _in_order(self, task: Task, place: _Place, arrays: Sequence[Array]) -> None:
        """Let a task wait for the one before it on the same device."""
        # the first task of a batch begins once the weights have been updated after the batch before
        last = self._last.get(place.device) or [param.data(place.device) for param in place.params[:1]]
        name = task_mark(str(task), str(place.device), "begins") if Recording.is_on else ""
        queue_in_order(place.device, last, arrays, name)


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
