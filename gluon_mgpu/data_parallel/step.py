"""One batch of training on all devices: train_batch(), compile_step()."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import is_
from typing import Any, Callable, Deque, List, Optional, Sequence, Tuple
from weakref import WeakSet

from mxnet import Context, gluon

from ..checks import check_function, flag, instance, whole_number
from ..distributed import group, own_batches
from ..errors import TrainerError
from ..mxnet_internals.parameters import is_open
from ..mxnet_internals.versions import require_np_arrays
from ..nested import Array, Fields, is_device_array
from ..protocols import SpansDevices
from ..refusals import refusal
from ..trainer.first_weights import check_others
from ..trainer.options import check_not_recording
from ..trainer.parameters import has_values, trainers_of
from ..trainer.recorder import drop_flags
from ..trainer.running_stats import running_stats
from ..trainer.seeded_dropout import check_seeds, seed_dropout
from ..trainer.trainer import Trainer
from .batchnorm import check_shards
from .compiled import make_passes
from .cudnn_batchnorm import check_values, moves_in_forward
from .graph import symbols_of
from .passes import decide_shapes, forgetting_graphs
from .plan import Plan, Planner, as_split
from .sharding import SplitFunction, count_examples, split_batch, split_data
from .virtual_passes import VirtualPasses

Checks = Sequence[Callable[[], None]]


@dataclass(frozen=True)
class Batch:
    """The outputs and losses of a batch. The arrays are on their devices, which may still be computing them.

    Attributes
    ----------
    outputs, labels : list
        One item per shard of each micro-step, as the network and the split returned them. A label may share the memory of its
        batch.
    losses : list of NDArray, shapes (shard size, ...)
        Empty after `eval_batch` without a loss.
    num_examples : int
        Over all devices, of all processes that share the batch.
    num_units : int, optional
        The units that a loss with `num_units` counts instead, such as target tokens, in this process's part of the batch.
    shard_numbers : list of int, optional
        With virtual shards, the number of the one that each item belongs to.
    plan : Plan, optional
        Of a compiled batch: those with the same plan have outputs of the same form.
    checks : sequence of callable ()
        To call once the losses are computed; they raise if class labels are out of range.
    """

    outputs: List[Any]
    labels: List[Any]
    losses: List[Array]
    num_examples: int
    num_units: Optional[int] = None
    shard_numbers: Optional[List[int]] = None
    plan: Optional[Plan] = None
    checks: Checks = ()


def train_batch(
    net: gluon.Block,
    loss: Callable[[Any, Any], Array],
    trainer: Trainer,
    X: Any,
    y: Any,
    *,
    split_f: SplitFunction = split_batch,
    ignore_stale_grad: bool = False,
    micro_steps: int = 1,
    compiled: str = "off",
) -> Batch:
    """Train on one batch over the trainer's devices, and return its outputs and losses. It does not wait.

    ```
    micro_steps=2:  batch ─┬─ first half ─► shards ─► forward, backward ─┐ gradients add up on each device
                           └─ second half ─► shards ─► forward, backward ┴─► reduced once, one update
    ```

    The gradient is divided by the number of examples, which is counted: the last batch of an epoch may be smaller, and shards
    may be uneven. If the loss has a method `num_units(y)`, the gradient is divided by its result for the complete batch instead:
    `models.SequenceLoss` counts target tokens. With `micro_steps` it is the sum over the parts, each of which needs 1 or more.

    Class labels of `gluon.loss.SoftmaxCrossEntropyLoss` must be in range, as MXNet takes the nearest class: NumPy arrays are
    checked before the update, MXNet's arrays on CPUs when their batch is computed. Subclasses that override `hybrid_forward` are
    not checked, unless they have a method `class_labels(y)`, which takes and returns NumPy arrays, with 0 in the place of labels
    that the loss ignores.

    Gradients of earlier backward passes that no `step` has used are dropped, except those that `accumulate` or
    `grad_req="add"` adds up. Splits, divisors and checks are decided by the first batch of each shape.

    Parameters
    ----------
    net : gluon.Block
        Called once per shard, with the shard of `X` as its one argument.
    loss : callable (output, label) -> NDArray, shape (shard size,)
        One number per example, not their mean, like Gluon's losses.
    trainer : Trainer
    X, y : array, or nested data
        A batch, shapes (B, ...).
    split_f : callable (X, y, devices) -> (list of X shards, list of y shards)
        `split_batch`, d2l's functions, or a `functools.partial` with another `batch_axis`. Your own function splits along axis 0,
        or along the default of its parameter `batch_axis`.
    ignore_stale_grad : bool
        Allow parameters that no shard used.
    micro_steps : int
        The number of parts that run one after the other, so that each device holds the activations of one part only. Each part
        is split over all devices; sizes differ by at most one example, and there are at most as many parts as examples. The
        update equals that of the complete batch, except that Dropout draws for each part, and BatchNorm normalises each
        shard of each part separately (synchronised: each part). The batch is split along the `batch_axis` of the split, or along
        axis 0.
    compiled : str
        `"off"`, `"auto"` or `"on"`: see `compile_step`.

    Raises
    ------
    TrainerError
        The loss does not hold one number per example. Nothing was updated.
    DataError
        A class label is out of range.
    """
    options = split_f, ignore_stale_grad, micro_steps
    step = trainer.kept.get("train_batch") if isinstance(trainer, Trainer) else None
    if not isinstance(step, TrainStep) or not step.is_of(net, loss, *options, compiled, trainer.virtual_shards):
        step = TrainStep("train_batch", net, loss, trainer, *options, compiled=compiled)
        trainer.kept["train_batch"] = step
    return step(X, y)


def compile_step(
    net: gluon.Block,
    loss: Callable[[Any, Any], Array],
    trainer: Trainer,
    *,
    split_f: SplitFunction = split_batch,
    ignore_stale_grad: bool = False,
    micro_steps: int = 1,
    compiled: str = "on",
) -> TrainStep:
    """Return a function `step(X, y)` that does what `train_batch` does, with compiled passes.

    A compiled pass takes two calls of MXNet's C interface for each device, whatever the number of layers. So the host can keep
    more devices busy. Weights, running statistics and random numbers are those of `train_batch` with a network hybridized with
    `static_alloc=True, static_shape=True`, bit for bit; up to rounding if one output is computed from another. Weights may be
    set, loaded, frozen and thawed between steps. Your own loop with this trainer calls `trainer.backward`, or first
    `trainer.discard()`: compiled steps look at no flag of a gradient.

    Parameters
    ----------
    net : gluon.HybridBlock
        Hybridized or not. Its Python code runs once for each form of data, as with `hybridize()`: the first trace is kept, for
        training and for prediction.
    loss : gluon.HybridBlock
        A loss of `gluon.loss`, for example.
    trainer, split_f, ignore_stale_grad, micro_steps
        As for `train_batch`.
    compiled : str
        `"on"` raises at the first batch if the passes cannot be compiled. `"auto"` records such passes as `train_batch` does, and
        logs the reason at level DEBUG; it compiles only a network and a loss that are hybridized, or a loss of `gluon.loss`.
        On CPUs it compiles recurrent layers only on several contexts, without Dropout: each shape of the data takes memory for
        them. `"off"` records all.

    Returns
    -------
    callable (X, y) -> Batch

    Raises
    ------
    TrainerError
        An argument is invalid; or, in a step, the passes cannot be compiled. Nothing was changed.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> step = compile_step(net, gluon.loss.L2Loss(), Trainer(net, "sgd", {"learning_rate": 0.5}))
    >>> batch = step(mx.nd.array([[1, 0], [0, 1]]), mx.nd.zeros(2))
    >>> net.weight.data(mx.cpu(1)).asnumpy().tolist()
    [[0.75, 0.75]]
    """
    return TrainStep("compile_step", net, loss, trainer, split_f, ignore_stale_grad, micro_steps, compiled=compiled)


def most_in_flight(contexts: Sequence[Context]) -> int:
    """Return how many batches a loop may queue that never waits. Each keeps its inputs on the devices, where GPUs are small."""
    return 4 if any(context.device_type == "gpu" for context in contexts) else 24


class TrainStep:
    """What `train_batch` does with each batch. Arguments are those of `train_batch` and `compile_step`.

    Parameters
    ----------
    operation : str
        The caller's name, for errors.
    on_phase : callable (str), optional
        Called when a part of the step begins: `split`, `forward`, `backward`, `update`; and `dispatch` at its end.
    check : callable (outputs, labels), optional
        Called with the shards of the first batch of each shape, before any update. It may raise.

    Attributes
    ----------
    passes : Passes

    Raises
    ------
    TrainerError
        An argument is invalid.
    """

    def __init__(
        self,
        operation: str,
        net: Any,
        loss: Any,
        trainer: Any,
        split_f: Any,
        ignore_stale_grad: Any,
        micro_steps: Any,
        *,
        compiled: Any = "off",
        on_phase: Optional[Callable[[str], None]] = None,
        check: Optional[Callable[[Sequence[Any], Sequence[Any]], None]] = None,
    ) -> None:
        check_trainer(operation, trainer, net, loss)
        check_function(operation, "loss", loss, advice="Pass a loss of gluon.loss, such as SoftmaxCrossEntropyLoss().")
        flag(operation, "ignore_stale_grad", ignore_stale_grad)
        self._asked = (net, loss, split_f, ignore_stale_grad, micro_steps, compiled, trainer.virtual_shards)
        micro_steps = whole_number(operation, "micro_steps", micro_steps, advice="1 is one batch.")
        blocks = (net, loss, *(stage.block for stage in (net.stages if isinstance(net, SpansDevices) else ())))
        trainer.steps.layout.watch(*blocks)
        self.passes = make_passes(operation, net, loss, compiled, trainer=trainer, kept=trainer.kept)
        num_virtual = (trainer.virtual_shards or 0) * micro_steps
        split = as_split(operation, split_f, num_virtual)
        if num_virtual:
            check_seeds(operation, "virtual_shards", net, trainer.contexts)
            self.passes, micro_steps = VirtualPasses(self.passes, num_virtual, micro_steps), 1
        seed_dropout(trainer.devices, *blocks)
        self._trainer: Trainer = trainer
        self._operation, self._net = operation, net
        self._ignore_stale_grad, self._micro_steps = ignore_stale_grad, micro_steps
        self._on_phase = on_phase or bool  # no Python function
        self._check = check
        self._planner = Planner(operation, loss, split, trainer.contexts)
        self._split = split
        self._others: List[gluon.Parameter] = []  # the network's that the trainer does not have
        self._open = True  # whether shapes may be open
        self._in_flight: Deque[Tuple[List[Array], Checks]] = deque()  # losses of the latest batches
        self._most_in_flight = most_in_flight(trainer.contexts)

    def is_of(self, *asked: Any) -> bool:
        """Return whether it was made for these arguments."""
        return all(map(is_, self._asked, asked))

    def __call__(self, X: Any, y: Any) -> Batch:
        """Train on one batch."""
        check_not_recording(self._operation)
        train = self._train_parts if self._micro_steps > 1 else self._train
        try:
            if self._trainer.steps.sharded_data:
                with own_batches():
                    return train(X, y)
            return train(X, y)
        except BaseException:
            if self.passes.in_parts:  # gradients of the last part, which another trainer must not take
                self._trainer.steps.fresh.drop_unused()
            raise

    def _train_parts(self, X: Any, y: Any) -> Batch:
        trainer, axis = self._trainer, self._split.batch_axis
        num_examples = count_examples(self._operation, Fields((X, y)), axis)  # its errors name the caller
        if not num_examples:  # of a process that has no more
            return self._train(X, y)
        parts = split_data(Fields((X, y)), min(self._micro_steps, num_examples), axis, even_split=False)
        try:
            with trainer.accumulate():
                batches = [self._train(Xp, yp) for Xp, yp in parts]
            Trainer.flush(trainer, self._ignore_stale_grad)  # not LocalSGD's, which also averages the devices
        except BaseException:
            trainer.discard()  # a part of a batch must not count in the next
            raise
        units = [batch.num_units for batch in batches if batch.num_units is not None]
        return Batch(
            [output for batch in batches for output in batch.outputs],
            [label for batch in batches for label in batch.labels],
            [one for batch in batches for one in batch.losses],
            sum(batch.num_examples for batch in batches),
            sum(units) if units else None,
            checks=[check for batch in batches for check in batch.checks],
        )

    def _train(self, X: Any, y: Any) -> Batch:
        trainer, passes, planner, on_phase = self._trainer, self.passes, self._planner, self._on_phase
        on_phase("split")
        plan, Xs, ys = planner.split(X, y)
        Xs, ys = passes.arrange(self._operation, Xs, ys, self._split)
        on_phase("forward")
        if plan.is_new and len(Xs) < len(trainer.contexts):
            check_shards(self._operation, self._net, len(Xs))
        if self._open and plan.is_new:  # batches of another form may reach other layers
            self._first_batch(X, y, Xs, ys)
        if plan.is_new:
            self._check_values(Xs)
        trainer.steps.fresh.follow()  # graphs of the coming pass must not write into former arrays
        outputs, losses, found = passes.run(self._operation, Xs, ys, plan, trainer, on_phase)
        if plan.is_new and self._check is not None:
            self._check(outputs, ys)
        checks = planner.check_labels(plan, outputs, y)
        divisor, num_units = planner.count(plan, losses, y, ys, is_compiled=passes.is_compiled)
        on_phase("update")
        trainer.steps.take(found)
        if self._others and (passes.in_parts or self._micro_steps > 1):
            drop_flags(self._others)  # they are of a part of the batch
            for other in trainers_of(self._others):
                other.steps.leave_out(self._others)
        trainer.step(divisor, self._ignore_stale_grad)
        on_phase("dispatch")
        self._in_flight.append((losses, checks))
        if len(self._in_flight) > self._most_in_flight:  # a loop that never waits must not fill the memory with batches
            finished, late = self._in_flight.popleft()
            for one in finished:
                one.wait_to_read()
            for check in late:
                check()
        known = plan if passes.is_compiled and plan.slices else None
        return Batch(outputs, ys, losses, plan.num_examples, num_units, passes.shard_numbers, known, checks)

    def _check_values(self, Xs: Sequence[Any]) -> None:
        axis, net = self._split.batch_axis, self._net
        axis = axis[0] if isinstance(axis, (list, tuple)) else axis
        if not isinstance(net, gluon.HybridBlock):
            return  # it cannot be traced
        for X in Xs:
            if is_device_array(X) and moves_in_forward(X.context) and X.shape[axis] == 1:
                with forgetting_graphs(net):
                    check_values(self._operation, X, symbols_of(net, [X]))

    def _first_batch(self, X: Any, y: Any, Xs: Sequence[Any], ys: Sequence[Any]) -> None:
        """Let the first batch decide the shapes of parameters that layers leave open."""
        trainer = self._trainer
        trainer.steps.resolve_shapes()
        params = list(self._net.collect_params().values())
        if any(map(is_open, params)):
            if not Xs:  # of a batch with fewer examples than processes: every process needs the shapes
                with own_batches():
                    _, Xs, ys = self._planner.split(X, y)
            decide_shapes(self._operation, self._net, Xs, ys)
            trainer.steps.resolve_shapes()
        if group() is not None and not has_values(trainer.params):
            raise refusal(self._operation, "several processes", "layers that the first batch does not reach")
        self._open = any(map(is_open, params))
        compared = trainer.kept.setdefault("compared", WeakSet())
        if group() is not None and isinstance(compared, WeakSet) and self._net not in compared:
            compared.add(self._net)
            check_others(self._operation, self._net, trainer.params)
        trained = set(map(id, trainer.params))
        self._others = [param for param in params if id(param) not in trained]
        trainer.steps.running_stats.add(running_stats(self._net))


def check_trainer(operation: str, trainer: Any, net: Any, loss: Any) -> None:
    """Raise `TrainerError` unless this is a trainer of this network or its loss."""
    advice = "Make one: it takes the arguments of gluon.Trainer."
    instance(operation, "trainer", trainer, Trainer, "a gluon_mgpu.Trainer", advice=advice)
    check_network(operation, net)
    blocks = [block for block in (net, loss) if isinstance(block, gluon.Block)]
    found = {id(param): param for block in blocks for param in block.collect_params().values()}
    if found and found.keys().isdisjoint(map(id, trainer.params)):
        first = next(iter(found.values()))
        raise TrainerError(
            f"{operation}: got a trainer of {trainer.params[0].name} and a network of {first.name}; expected a trainer of this "
            "network. Make it after the network that it trains."
        )


def check_network(operation: str, net: Any) -> None:
    """Raise `TrainerError` unless this is a network."""
    instance(operation, "net", net, gluon.Block, "a gluon.Block", advice="Pass net.module of a DataParallelModel.")
    require_np_arrays(operation)
