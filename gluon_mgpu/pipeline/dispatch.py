"""The tasks of one batch through a pipeline, dispatched to its devices in the order of the schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from operator import is_, itemgetter
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import mxnet as mx
from mxnet import Context, MXNetError, autograd

from ..checks import OF_WRONG_DATA
from ..data_parallel.batchnorm import is_synchronised
from ..data_parallel.passes import Passes, raise_named
from ..data_parallel.sharding import count_examples, split_data
from ..errors import ShardError
from ..nested import Array, is_device_array, is_float, leaves, map_leaves
from ..refusals import refusal
from ..runtime.c_api import unallocated
from ..runtime.device_threads import in_own_thread
from ..runtime.engine_push import queue_in_order
from ..runtime.profiler import Recording, task_mark
from ..trainer.gradients import empty_pass, note_parts, one_pass
from ..trainer.running_stats import StatsOfParts, is_running_stat, note_examples, statistics_slabs
from ..trainer.trainer import Trainer
from .schedule import Planned, Task, plan
from .stage import NETWORK, check_outputs, draws_numbers


@dataclass(eq=False)
class _Visit:
    """A micro-batch at one stage.

    Attributes
    ----------
    inputs : list of NDArray
        Copies on the stage's device, until its backward pass.
    gradients : list
        Those of the inputs, where they are needed, None elsewhere.
    outputs : list of NDArray
    apart : set of int
        Which of these are inputs without a gradient that the stage passed on.
    """

    inputs: List[Array]
    gradients: List[Optional[Array]]
    outputs: List[Array] = field(default_factory=list)
    apart: Set[int] = field(default_factory=set)


@dataclass(eq=False)
class _MicroBatch:
    """One micro-batch on its way through a replica.

    Attributes
    ----------
    shard : int
        The position of its first label in the batch.
    ys : list
        Its label, or the parts of it if several devices share the last stage.
    sizes : list of int
        The examples of each part; [0] for a batch that is not divided.
    seeds : list of int
        One for each stage; [] if none draws.
    visits : dict of int to _Visit
        By the stage; of `NETWORK`, whose outputs are the network's inputs on the first device.
    losses, results : dict of int to NDArray
        Loss and network's output of each part.
    """

    shard: int
    X: Any
    ys: List[Any]
    sizes: List[int]
    seeds: List[int] = field(default_factory=list)
    visits: Dict[int, _Visit] = field(default_factory=dict)
    losses: Dict[int, Array] = field(default_factory=dict)
    results: Dict[int, Any] = field(default_factory=dict)


class _Place:
    """A stage on its device, prepared until a parameter changes.

    Attributes
    ----------
    number : int
    part : int, optional
        Which part of a micro-batch it computes, if it is the last stage.
    trained : NDArray, optional
        A gradient of its parameters.
    updated : list of NDArray
        One of the weights that a step updates, if any.
    needs_backward : bool
        Whether it trains, or comes after a stage that does.
    readers : list of _Place
        The stages that read its outputs; of a divided one, all its parts.
    """

    def __init__(self, pipeline: Any, number: int, device: Context, former: Sequence[_Place]) -> None:
        self.stage, self.number, self.device, self.part = pipeline.stages[number], number, device, pipeline.part(number)
        gradients = [param.grad(device) for param in pipeline.trained(number)]
        self.updated: List[Array] = [param.data(device) for param in pipeline.trained(number)[:1]]
        self.trained: Optional[Array] = gradients[0] if gradients else None
        producers = pipeline.producers(number)
        self.needs_backward: bool = bool(gradients) or any(former[producer].needs_backward for producer in producers)
        self.recomputes = pipeline.recompute and self.needs_backward and self.part is None
        self._is_trained = {producer: former[producer].needs_backward for producer in producers}
        self.readers: List[_Place] = []
        for producer in producers:
            former[producer].readers.append(self)
        stats = [param for param in self.stage.params() if is_running_stat(param)]
        self.stats = StatsOfParts(statistics_slabs(stats), device) if stats else None

    def read(self, micro_batch: _MicroBatch) -> _Visit:
        """Copy a stage's inputs to its device."""
        visits, sources = micro_batch.visits, self.stage.sources
        if sources is None:
            before = self.number - 1  # of the first stage, NETWORK
            sources = [(before, at) for at in range(len(visits[before].outputs))]
        visit = _Visit([], [])
        for (producer, at), is_wanted in zip(sources, self.stage.gradients_for(len(sources), is_first=self.number == 0)):
            # also from the same device: no task may write what another one reads
            array = _part(visits[producer].outputs[at], self.part, micro_batch.sizes).copyto(self.device)
            needs = is_wanted and self._is_trained[producer] and at not in visits[producer].apart and is_float(array)
            visit.inputs.append(array)
            visit.gradients.append(unallocated(array) if needs else None)
        return visit


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

    notes_examples = True

    def __init__(self, pipeline: Any, loss: Any, trainer: Optional[Trainer] = None) -> None:
        super().__init__(pipeline, loss, trains=trainer is not None)
        self.pipeline, self._trainer = pipeline, trainer
        self._plans: Dict[int, List[Planned]] = {}  # by the number of micro-batches
        self._places: List[List[_Place]] = []  # by the replica
        self._params = list(pipeline.collect_params().values())
        self._stats = list(filter(is_running_stat, self._params))
        self._known: List[Any] = []  # what the places depend on
        self._shares = False  # whether two stages on one device add to a parameter's gradient
        self._sizes: List[List[int]] = []  # of each micro-batch: the examples of its parts, if it is divided

    def arrange(self, operation: str, Xs: List[Any], ys: List[Any], batch_axis: Any) -> Tuple[List[Any], List[Any]]:
        """Return one item for each part of each micro-batch, instead of one per replica: all of X, and its part of the labels."""
        pipeline = self.pipeline
        arranged: Tuple[List[Any], List[Any]] = ([], [])
        label_axis = batch_axis[1] if isinstance(batch_axis, (list, tuple)) else batch_axis
        num_micro_batches, num_parts = (1, 1) if self._trainer is None else (pipeline.micro_batches, pipeline.num_parts)
        is_divided = num_micro_batches > 1 or num_parts > 1
        self._sizes = []
        for X, y in zip(Xs, ys):
            batches = [(X, y)]
            if num_micro_batches > 1:
                batches = split_data((X, y), num_micro_batches, batch_axis, even_split=False)
            devices = pipeline.devices[self._replica(X)][-num_parts:]
            for one, label in batches:
                labels = [label] if num_parts == 1 else split_data(label, num_parts, label_axis, even_split=False)
                self._sizes.append([count_examples(operation, part, label_axis) if is_divided else 0 for part in labels])
                for device, part in zip(devices, labels):
                    arranged[0].append(one)
                    arranged[1].append(map_leaves(partial(_moved, device), part))
        return arranged

    def forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], plan: Any = None) -> Tuple[List[Any], List[Array]]:
        """Dispatch the tasks of all micro-batches, with a trainer also their backward passes. Return outputs and losses."""
        if self._trainer is None:
            return super().forward(operation, Xs, ys)
        if is_synchronised(self.pipeline.net):
            raise refusal(operation, "Pipeline", "synchronised BatchNorm")
        micro_batches: List[_MicroBatch] = []
        shard = 0
        for sizes in self._sizes:
            inputs = _Visit([], [], self.pipeline.stages.inputs(Xs[shard]))
            micro_batches.append(
                _MicroBatch(shard, Xs[shard], list(ys[shard : shard + len(sizes)]), sizes, visits={NETWORK: inputs})
            )
            shard += len(sizes)
        scale = 1.0 if self._trainer.loss_scaler is None else self._trainer.loss_scaler.begin()
        if not micro_batches:
            note_examples((), self._stats)
            empty_pass(self._trainer.gradients)
            return [], []
        self._seed(micro_batches)
        run = _Run(operation, self.pipeline, self._loss, scale)
        own: Dict[int, List[_MicroBatch]] = {}  # by the replica
        for one in micro_batches:
            own.setdefault(self._replica(one.X), []).append(one)
        planned = [(one.begin, replica, one.task) for replica, ones in own.items() for one in self.plan(len(ones))]
        planned.sort(key=itemgetter(0, 1))
        places = self._prepared()
        adds = self.pipeline.micro_batches > 1 or self._shares
        with self._trainer.gradients.adding() if adds else one_pass(self._trainer.gradients):
            examples = run.dispatch([(places[replica][task.stage], task, own[replica]) for _, replica, task in planned])
        if adds:
            note_parts(self._trainer.gradients)
        note_examples(examples.items(), self._stats)
        parts = [(one, part) for one in micro_batches for part in range(len(one.ys))]
        return [one.results[part] for one, part in parts], [one.losses[part] for one, part in parts]

    def backward(self, trainer: Trainer, losses: Sequence[Array]) -> None:
        """Do nothing: the forward passes have dispatched the backward passes, as the schedule alternates them."""

    def plan(self, num_micro_batches: int) -> List[Planned]:
        """Return the tasks of so many micro-batches on one replica."""
        if num_micro_batches not in self._plans:
            pipeline = self.pipeline
            numbers = {context: number for number, context in enumerate(dict.fromkeys(pipeline.devices[0]))}
            devices = [numbers[context] for context in pipeline.devices[0]]
            sources = [pipeline.producers(stage) for stage in range(pipeline.num_stages)]
            self._plans[num_micro_batches] = plan(sources, devices, num_micro_batches, pipeline.schedule)
        return self._plans[num_micro_batches]

    def _prepared(self) -> List[List[_Place]]:
        """Return the stages of each replica on their devices."""
        now = [one for param in self._params for one in (param._grad_req, param._grad, param._data)]
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            self._known, self._places = now, []
            stages = [(stage, device) for devices in self.pipeline.devices for stage, device in enumerate(devices)]
            trained = [(device, id(param)) for stage, device in stages for param in self.pipeline.trained(stage)]
            self._shares = len(set(trained)) < len(trained)
            for devices in self.pipeline.devices:
                places: List[_Place] = []
                for number, device in enumerate(devices):
                    places.append(_Place(self.pipeline, number, device, places))
                self._places.append(places)
        return self._places

    def _replica(self, X: Any) -> int:
        first = X if is_device_array(X) else next(leaf for _, leaf in leaves(X))
        return self.pipeline.replica_of(first.context)

    def _seed(self, micro_batches: Sequence[_MicroBatch]) -> None:
        """Draw a seed for each task, so that its random numbers depend neither on the schedule nor on recomputation."""
        pipeline = self.pipeline
        if all(stage.draws is False for stage in pipeline.stages):  # unknown before the first batch
            return
        count = len(micro_batches) * pipeline.num_stages
        drawn = mx.nd.random.randint(0, 2**31 - 1, shape=(count,), ctx=pipeline.devices[0][0]).asnumpy().tolist()
        for number, one in enumerate(micro_batches):
            one.seeds = drawn[number * pipeline.num_stages : (number + 1) * pipeline.num_stages]


class _Run:
    """The tasks of one batch."""

    def __init__(self, operation: str, pipeline: Any, loss: Any, scale: float) -> None:
        self._operation, self._pipeline, self._loss, self._scale = operation, pipeline, loss, scale
        self._last: Dict[Context, List[Array]] = {}  # what the latest task of each device writes
        self._stats: Dict[_Place, StatsOfParts] = {}  # where several micro-batches move them
        self._moves: Dict[_Place, List[List[Array]]] = {}  # of these statistics, by the micro-batches, times their examples

    def dispatch(self, tasks: Sequence[Tuple[_Place, Task, List[_MicroBatch]]]) -> Dict[Context, int]:
        """Dispatch tasks, each with the micro-batches of its replica; move the running statistics, and return their examples."""
        examples: Dict[Context, int] = {}
        places = {place: micro_batches for place, _, micro_batches in tasks}
        self._stats = {place: place.stats for place, own in places.items() if place.stats is not None and len(own) > 1}
        for stats in self._stats.values():
            stats.begin()
        try:
            for place, task, micro_batches in tasks:
                self._dispatch(place, task, micro_batches[task.micro_batch])
        except BaseException:
            for stats in self._stats.values():  # undo all that the batch has changed, except for gradients
                stats.put_back()
            raise
        for place, own in places.items():
            examples[place.device] = sum(sum(one.sizes) or int((*one.losses[0].shape, 1)[0]) for one in own)
            if place in self._moves:
                self._stats[place].move([mx.nd.add_n(*parts) / examples[place.device] for parts in zip(*self._moves[place])])
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
            queue_in_order(place.device, self._last[place.device], [], _mark(task, place.device, "ends"))

    def _forward(self, task: Task, place: _Place, micro_batch: _MicroBatch) -> None:
        visit = micro_batch.visits[place.number] = place.read(micro_batch)
        self._in_order(task, place, visit.inputs)
        outputs = self._compute(place, micro_batch, visit, records=not place.recomputes)
        if place.device.device_type == "gpu" and place in self._stats:  # cuDNN moves them in the forward pass
            if place.recomputes:
                self._stats[place].put_back()
            else:
                self._take_stats(place, micro_batch)
        if place.recomputes:  # copies: an output may be an input, and the backward pass waits for outputs before inputs
            outputs = [one.copy() for one in outputs]
        self._last[place.device] = visit.outputs = outputs

    def _compute(self, place: _Place, micro_batch: _MicroBatch, visit: _Visit, *, records: bool) -> List[Array]:
        """Compute a stage of its inputs, and the loss after the last one."""
        stage, inputs, part = place.stage, visit.inputs, place.part
        if micro_batch.seeds and stage.draws is not False:
            mx.random.seed(micro_batch.seeds[place.number], place.device)
        marked = [pair for pair in zip(inputs, visit.gradients) if pair[1] is not None]
        if marked and records:
            autograd.mark_variables(*map(list, zip(*marked)), "write")
        if stage.draws is None:
            stage.draws = draws_numbers(stage.block, inputs)
            check_outputs(self._operation, stage.block, inputs)
        with autograd.record() if records else autograd.train_mode():  # this thread records nothing else
            found = stage.run(inputs)
            by_array = dict(zip(map(id, inputs), visit.gradients))
            visit.apart = {at for at, one in enumerate(found) if by_array.get(id(one), one) is None}
            # a stage may pass an input on: its gradient then flows through an operator, like that of other outputs
            outputs: List[Array] = [one.copy() if id(one) in by_array else one for one in found]
            if part is not None:
                micro_batch.results[part] = self._pipeline.stages.output(outputs)
                micro_batch.losses[part] = self._loss(micro_batch.results[part], micro_batch.ys[part])
                outputs = [*outputs, micro_batch.losses[part]]
        return outputs

    def _backward(self, task: Task, place: _Place, micro_batch: _MicroBatch) -> None:
        visit, part = micro_batch.visits[place.number], place.part
        if place.needs_backward:
            outputs = visit.outputs
            if part is None:
                given = self._gradients_of(place, micro_batch, len(outputs))
            else:
                loss = outputs[-1]
                filled = mx.nd.full(loss.shape, self._scale, ctx=place.device, dtype=loss.dtype)
                given = [None] * (len(outputs) - 1) + [filled]
            waiting = [one for one in given if one is not None]
            self._in_order(task, place, waiting + visit.inputs if place.recomputes else waiting)
            if place.recomputes:
                outputs = self._compute(place, micro_batch, visit, records=True)
            _differentiate([pair for pair in zip(outputs, given) if pair[1] is not None])
            if place in self._stats:
                self._take_stats(place, micro_batch)
            # MXNet may write another array than the one that was marked; none if the outputs do not depend on the input
            for at, array in enumerate(visit.inputs):
                if visit.gradients[at] is not None:
                    visit.gradients[at] = array.grad if array._fresh_grad else None
            self._last[place.device] = [one for one in (*visit.gradients, place.trained) if one is not None]
        visit.outputs, visit.inputs = [], []  # the graph holds the activations, and goes with its outputs
        if part is not None:
            micro_batch.losses[part] = micro_batch.losses[part].detach()
            micro_batch.results[part] = map_leaves(lambda _, leaf: leaf.detach(), micro_batch.results[part])

    def _take_stats(self, place: _Place, micro_batch: _MicroBatch) -> None:
        """Note how far a pass has moved a stage's running statistics, and put them back."""
        self._moves.setdefault(place, []).append(self._stats[place].take(sum(micro_batch.sizes)))

    def _gradients_of(self, place: _Place, micro_batch: _MicroBatch, count: int) -> List[Optional[Array]]:
        """Return the gradients of a stage's outputs on its device: the sums over all stages that read them."""
        found: List[List[Array]] = [[] for _ in range(count)]  # by output: of each reader, in the order of its parts
        divided: Dict[int, List[Array]] = {}
        for reader in place.readers:
            if reader.number not in micro_batch.visits:
                continue  # a part without examples
            sources = reader.stage.sources or [(place.number, at) for at in range(count)]
            for (producer, at), gradient in zip(sources, micro_batch.visits[reader.number].gradients):
                if producer == place.number and gradient is not None:
                    (found[at] if reader.part is None else divided.setdefault(at, [])).append(gradient.copyto(place.device))
        for at, parts in divided.items():
            found[at].append(parts[0] if len(parts) == 1 else mx.nd.concat(*parts, dim=0))
        return [sum(ones[1:], ones[0]) if ones else None for ones in found]

    def _in_order(self, task: Task, place: _Place, arrays: Sequence[Array]) -> None:
        """Let a task wait for the one before it on the same device."""
        # the first task of a batch begins once the weights have been updated after the batch before
        last = self._last.get(place.device) or place.updated
        queue_in_order(place.device, last, arrays, _mark(task, place.device, "begins"))


def _mark(task: Task, device: Context, edge: str) -> str:
    """Return a name for MXNet's profiler while it records, otherwise none."""
    return task_mark(str(task), str(device), edge) if Recording.is_on else ""


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
        recorded = [pair for pair in heads if _is_recorded(pair[0])]
        if len(recorded) == len(heads):
            raise
        _differentiate(recorded)


def _is_recorded(array: Array) -> bool:
    try:
        autograd.get_symbol(array)
    except MXNetError:
        return False
    return True


def _moved(device: Context, _: str, leaf: Any) -> Any:
    return leaf.as_in_context(device) if is_device_array(leaf) else leaf
