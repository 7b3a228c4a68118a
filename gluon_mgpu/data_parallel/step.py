"""One batch on all devices: backward(), train_batch(), eval_batch()."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from ..checks import check_function, flag, short, whole_number
from ..devices.select import check_contexts
from ..distributed import own_batches, process_shard
from ..errors import ShardError, TrainerError
from ..nested import Array, Fields, is_device_array, leaves
from ..trainer.groups import spans_devices
from ..trainer.running_stats import claim_examples
from ..trainer.trainer import Trainer
from .balancer import Balancer
from .passes import Passes, dtype_of
from .sharding import count_examples, floats_as, part_of_process, split_batch, split_data
from .virtual import VirtualPasses, VirtualSplit

SplitFunction = Callable[[Any, Any, Sequence[Context]], Tuple[List[Any], List[Any]]]


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
    """

    outputs: List[Any]
    labels: List[Any]
    losses: List[Array]
    num_examples: int
    num_units: Optional[int] = None
    shard_numbers: Optional[List[int]] = None


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
) -> Batch:
    """Train on one batch over the trainer's devices, and return its outputs and losses. It does not wait.

    ```
    micro_steps=2:  batch ─┬─ first half ─► shards ─► forward, backward ─┐ gradients add up on each device
                           └─ second half ─► shards ─► forward, backward ┴─► reduced once, one update
    ```

    The gradient is divided by the number of examples, which is counted: the last batch of an epoch may be smaller, and shards
    may be uneven. If the loss has a method `num_units(y)`, the gradient is divided by its result for the complete batch instead:
    `models.SequenceLoss` counts target tokens.

    Gradients of earlier backward passes that no `step` has used are dropped, except those that `accumulate` or
    `grad_req="add"` adds up.

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
        `split_batch`, d2l's functions, or a `functools.partial` with another `batch_axis`. On one device the axis of your own
        function is unknown: pass such a `partial` if it is not 0.
    ignore_stale_grad : bool
        Allow parameters that no shard used.
    micro_steps : int
        The number of parts that run one after the other, so that each device holds the activations of one part only. Each part
        is split over all devices; sizes differ by at most one example, and there are at most as many parts as examples. The
        update equals that of the complete batch, except that BatchNorm normalises each shard of each part separately
        (synchronised: each part). The batch is split along the `batch_axis` of a `functools.partial`, or along axis 0.

    Raises
    ------
    TrainerError
        The loss does not hold one number per example. Nothing was updated.
    """
    return make_step("train_batch", net, loss, trainer, split_f, ignore_stale_grad, micro_steps, Passes)(X, y)


def make_step(
    operation: str,
    net: Any,
    loss: Any,
    trainer: Any,
    split_f: Any,
    ignore_stale_grad: Any,
    micro_steps: Any,
    make_passes: Callable[..., Passes],
    on_phase: Callable[[str], None] = lambda phase: None,
) -> TrainStep:
    """Return the step for these arguments of `train_batch`, checked.

    Parameters
    ----------
    operation : str
        The caller's name, for errors.
    make_passes : callable (net, loss, *, trains) -> Passes
    on_phase : callable (str)
        Called when a part of the step begins: `split`, `forward`, `backward`, `update`; and `dispatch` at its end.

    Raises
    ------
    TrainerError
        An argument is invalid.
    """
    if not isinstance(trainer, Trainer):
        raise TrainerError(
            f"{operation}: got {type(trainer).__name__} as the trainer; expected a gluon_mgpu.Trainer. Pass Trainer(net, 'sgd')."
        )
    check_network(operation, net)
    _check_functions(operation, loss, split_f)
    flag(operation, "ignore_stale_grad", ignore_stale_grad)
    micro_steps = whole_number(operation, "micro_steps", micro_steps, advice="1 is one batch.")
    if spans_devices(net):
        if isinstance(split_f, Balancer):
            raise TrainerError(
                f"{operation}: got weights or a Balancer for a {type(net).__name__}; expected equal parts, as it measures whole "
                "networks. Give the stages equal costs instead: split_stages() measures them."
            )
        passes = net.make_passes(loss, trainer=trainer)
    else:
        passes = make_passes(net, loss, trains=True)
    if trainer.virtual_shards is not None:
        split_f = VirtualSplit(split_f, trainer.virtual_shards * micro_steps)
        passes, micro_steps = VirtualPasses(passes, net, loss, split_f, trainer, micro_steps), 1
    return TrainStep(net, loss, trainer, split_f, ignore_stale_grad, micro_steps, passes, on_phase)


@dataclass(frozen=True)
class TrainStep:
    """What `train_batch` does with each batch; its arguments are checked."""

    net: gluon.Block
    loss: Any
    trainer: Trainer
    split_f: SplitFunction
    ignore_stale_grad: bool
    micro_steps: int
    passes: Passes
    on_phase: Callable[[str], None]

    def __call__(self, X: Any, y: Any) -> Batch:
        """Train on one batch."""
        with own_batches(self.trainer.sharded_data):
            return self._train_parts(X, y) if self.micro_steps > 1 or self.passes.adds else self._train(X, y)

    def _train_parts(self, X: Any, y: Any) -> Batch:
        trainer, split_f = self.trainer, self.split_f
        axis = _batch_axis(split_f)
        parts = split_data(Fields((X, y)), self.micro_steps, axis, even_split=False)
        try:
            with trainer.accumulate():
                batches = [self._train(Xp, yp) for Xp, yp in parts]
            Trainer.flush(trainer, self.ignore_stale_grad)  # not LocalSGD's, which also averages the devices
        except BaseException:
            trainer.discard()  # a part of a batch must not count in the next
            raise
        return Batch(
            [output for batch in batches for output in batch.outputs],
            [label for batch in batches for label in batch.labels],
            [one for batch in batches for one in batch.losses],
            sum(batch.num_examples for batch in batches),
            _own_units("train_batch", self.loss, y, split_f, trainer.contexts),
        )

    def _train(self, X: Any, y: Any) -> Batch:
        net, loss, trainer, split_f = self.net, self.loss, self.trainer, self.split_f
        self.on_phase("split")
        _check_loss("train_batch", loss, y, split_f)
        Xs, ys = _split(net, loss, split_f, X, y, trainer.contexts)
        Xs, ys = self.passes.arrange("train_batch", Xs, ys, _batch_axis(split_f))
        self.on_phase("forward")
        if not trainer.resolve_shapes():
            Passes(net, None, trains=False).forward("train_batch", Xs[:1], ys[:1])
            trainer.resolve_shapes()
        trainer._replicas.drop_earlier()
        outputs, losses = self.passes.forward("train_batch", Xs, ys)
        _check_outputs.get()(outputs, ys)
        num_examples = _count_all("train_batch", split_f, losses, y, ys, trainer.contexts)
        num_units = _num_units("train_batch", loss, y)
        self.on_phase("backward")
        self.passes.backward(trainer, losses)
        self.on_phase("update")
        claim_examples(trainer.running_stats_of(net) if self.passes.running_stats is None else self.passes.running_stats)
        if isinstance(split_f, Balancer):
            split_f.watch(losses)
        trainer.step(num_examples if num_units is None else num_units, self.ignore_stale_grad)
        self.on_phase("dispatch")
        own_units = num_units if process_shard()[1] == 1 else _own_units("train_batch", loss, y, split_f, trainer.contexts)
        return Batch(outputs, ys, losses, num_examples, own_units, self.passes.shard_numbers(len(outputs)))


def eval_batch(
    net: gluon.Block,
    X: Any,
    y: Any,
    devices: Sequence[Context],
    *,
    loss: Any = None,
    split_f: SplitFunction = split_batch,
) -> Batch:
    """Run one batch forward over the devices, in prediction mode, and return its outputs. It does not wait.

    Parameters
    ----------
    net : gluon.Block
    X, y : array, or nested data
        A batch, shapes (B, ...).
    devices : list of mxnet.Context
    loss : callable (output, label) -> NDArray, optional
    split_f : callable (X, y, devices) -> (list of X shards, list of y shards)
    """
    check_network("eval_batch", net)
    _check_functions("eval_batch", loss, split_f, optional=True)
    check_contexts(devices, "eval_batch")
    passes = net.make_passes(loss) if spans_devices(net) else Passes(net, loss, trains=False)
    return run_eval_batch(passes, net, X, y, devices, loss, split_f)


def run_eval_batch(
    passes: Passes, net: gluon.Block, X: Any, y: Any, devices: Sequence[Context], loss: Any, split_f: SplitFunction
) -> Batch:
    """Do what `eval_batch` does, through these passes. The arguments are checked."""
    _check_loss("eval_batch", loss, y, split_f)
    Xs, ys = _split(net, loss, split_f, X, y, devices)
    Xs, ys = passes.arrange("eval_batch", Xs, ys, _batch_axis(split_f))
    outputs, losses = passes.forward("eval_batch", Xs, ys)
    counts = losses or process_shard()[1] > 1
    num_examples = _count_all("eval_batch", split_f, losses, y, ys, devices) if counts else _num_labels(ys)
    own_units = _own_units("eval_batch", loss, y, split_f, devices)
    return Batch(outputs, ys, losses, num_examples, own_units, passes.shard_numbers(len(outputs)))


@contextmanager
def checking_outputs(check: Callable[[Sequence[Any], Sequence[Any]], None]) -> Iterator[None]:
    """Let `train_batch` call `check(outputs, labels)`, one item per shard, before any update. The check may raise."""
    token = _check_outputs.set(check)
    try:
        yield
    finally:
        _check_outputs.reset(token)


_check_outputs: ContextVar[Callable[[Sequence[Any], Sequence[Any]], None]] = ContextVar(
    "_check_outputs", default=lambda outputs, labels: None
)


def _split(
    net: Any, loss: Any, split_f: SplitFunction, X: Any, y: Any, devices: Sequence[Context]
) -> Tuple[List[Any], List[Any]]:
    """Return the shards of a batch: float64 for a network of float64, and bool labels as float32 for Gluon's losses."""
    several = process_shard()[1] > 1
    if several and getattr(split_f, "func", split_f) is not split_batch and not isinstance(split_f, VirtualSplit):
        raise TrainerError(
            f"train_batch: got split_f={split_f!r} in a job of {process_shard()[1]} processes; expected split_batch, which gives "
            "each process its part of the batch. Pass it, or a functools.partial of it."
        )
    with floats_as("float64" if dtype_of(net) == "float64" else ""):
        shards = split_f(X, y, list(devices))
    pair = isinstance(shards, (list, tuple)) and len(shards) == 2 and all(isinstance(side, (list, tuple)) for side in shards)
    if not pair or len(shards[0]) != len(shards[1]) or not (shards[0] or several):
        found = f"{len(shards[0])} shards of features and {len(shards[1])} of labels" if pair else type(shards).__name__
        raise ShardError(
            f"split_f: got {found}; expected as many of each, 1 or more. Return (list of X shards, list of y shards)."
        )
    ys = list(shards[1])
    if isinstance(loss, gluon.loss.Loss):  # they do not take bool
        ys = [label.astype("float32") if is_device_array(label) and label.dtype == np.bool_ else label for label in ys]
    return list(shards[0]), ys


def _check_functions(operation: str, loss: Any, split_f: Any, *, optional: bool = False) -> None:
    if not optional or loss is not None:
        check_function(operation, "loss", loss, advice="Pass a loss of gluon.loss, such as SoftmaxCrossEntropyLoss().")
    check_function(operation, "split_f", split_f, advice="Pass split_batch, which takes (X, y, devices).")


def check_network(operation: str, net: Any) -> None:
    """Raise `TrainerError` unless this is a network."""
    if not isinstance(net, gluon.Block):
        raise TrainerError(
            f"{operation}: got {short(net)} as the network; expected a gluon.Block. Pass net.module of a DataParallelModel."
        )


def _count_all(
    operation: str,
    split_f: SplitFunction,
    losses: Sequence[Array],
    label: Any,
    labels: Sequence[Any],
    devices: Sequence[Context],
) -> int:
    """Return the number of examples of a batch over all processes; check the losses of this one."""
    if process_shard()[1] == 1:
        return _count(operation, split_f, losses, label, labels)
    if losses:
        _count(operation, split_f, losses, _own_part(label, split_f, devices), labels)
    return count_examples(operation, label, _label_axis(split_f))


def _count(operation: str, split_f: SplitFunction, losses: Sequence[Array], label: Any, labels: Sequence[Any]) -> int:
    """Return the number of examples of these losses; check that each loss holds one number per example of its shard."""
    num_examples = 0
    for shard, (loss, sizes) in enumerate(zip(losses, _shard_sizes(split_f, label, labels))):
        if not is_device_array(loss):
            raise TrainerError(
                f"{operation}: got a loss of type {type(loss).__name__}; expected an MXNet array. Use a loss of gluon.loss."
            )
        shape = loss.shape
        if not shape or (sizes and shape[0] not in sizes):
            raise TrainerError(
                f"{operation}: got a loss of shape {shape} for shard {shard} on {loss.context}, which holds "
                f"{' or '.join(map(str, sorted(sizes)))} examples; expected one number for each example, so that uneven "
                "shards count correctly. Leave the mean out of the loss, and pass it the axis of the examples (batch_axis)."
            )
        num_examples += int(shape[0])
    return num_examples


def _own_units(operation: str, loss: Any, label: Any, split_f: SplitFunction, devices: Sequence[Context]) -> Optional[int]:
    """Return the units that a loss with `num_units` counts in this process's part of a batch; None for other losses."""
    if process_shard()[1] == 1 or not callable(getattr(loss, "num_units", None)):
        return _num_units(operation, loss, label)
    part = _own_part(label, split_f, devices)
    return _num_units(operation, loss, part) if part is not None else 0


def _own_part(label: Any, split_f: SplitFunction, devices: Sequence[Context]) -> Any:
    """Return this process's part of a batch's label, None if it has no part."""
    weights = getattr(split_f, "keywords", {}).get("weights")
    num_parts = split_f.num_shards // process_shard()[1] if isinstance(split_f, VirtualSplit) else len(devices)
    return part_of_process(label, num_parts, _label_axis(split_f), weights)


def _has_axis(split_f: SplitFunction) -> bool:
    """Return whether the axis along which a function splits is known."""
    return getattr(split_f, "func", split_f) is split_batch or "batch_axis" in getattr(split_f, "keywords", {})


def _check_loss(operation: str, loss: Any, label: Any, split_f: SplitFunction) -> None:
    """Raise `TrainerError` if one of MXNet's losses would average over other axes than those of one example.

    On one device, or if a shard has as many examples as time steps, the shape of the result does not show it.
    """
    axis: Any = getattr(loss, "_batch_axis", 0) if isinstance(loss, gluon.loss.Loss) else 0
    name, wanted = type(loss).__name__, _label_axis(split_f)
    if axis and mx.util.is_np_array() and any(isinstance(loss, kind) and _computes_as(loss, kind) for kind in _ON_AXIS_0):
        raise TrainerError(
            f"{operation}: got {name} with batch_axis={axis} and np arrays, of which MXNet then averages all axes but 0; "
            "expected "
            f"examples on axis 0. Pass lambda output, label: loss(output.swapaxes(0, {axis}), label.swapaxes(0, {axis})) with a "
            f"loss of batch_axis=0."
        )
    is_mxnets = isinstance(loss, gluon.loss.Loss) and type(loss).__module__ == gluon.loss.__name__
    ndim = label.ndim if is_device_array(label) or isinstance(label, np.ndarray) else 0
    known = is_mxnets and _has_axis(split_f) and isinstance(wanted, int) and ndim > max(axis, 0, wanted)
    if known and axis % ndim != wanted % ndim:
        raise TrainerError(
            f"{operation}: got {name} with batch_axis={axis} and labels that are split along axis {wanted}; expected the "
            f"axis of the examples for both. Pass batch_axis={wanted} to the loss, or to the split."
        )


def _computes_as(loss: Any, kind: Any) -> bool:
    return (
        getattr(type(loss), "hybrid_forward", None) is getattr(kind, "hybrid_forward", None)
        and type(loss).forward is kind.forward
    )


_ON_AXIS_0 = (gluon.loss.L1Loss, gluon.loss.L2Loss, gluon.loss.SigmoidBCELoss, gluon.loss.SoftmaxCELoss)  # with np arrays


def _batch_axis(split_f: SplitFunction) -> Any:
    return getattr(split_f, "keywords", {}).get("batch_axis", 0)


def _label_axis(split_f: SplitFunction) -> Any:
    axis = _batch_axis(split_f)
    return axis[1] if isinstance(axis, (list, tuple)) else axis


def _num_units(operation: str, loss: Any, label: Any) -> Optional[int]:
    """Return the units that a loss with `num_units` counts in the label of a complete batch; None for other losses."""
    if not callable(getattr(loss, "num_units", None)):
        return None
    num_units = loss.num_units(label)
    return whole_number(operation, "num_units(y) of the loss", num_units, advice="Leave out the batch.")


def _shard_sizes(split_f: SplitFunction, label: Any, labels: Sequence[Any]) -> List[Set[int]]:
    """Return the possible numbers of examples of each shard; an empty set if its labels do not show it.

    `split_batch`, and functions with a `batch_axis`, split along that axis. The batch axis of another function is an axis along
    which the shards add up to the batch. On one device, every axis is.
    """
    if _has_axis(split_f) and all(any(is_device_array(leaf) for _, leaf in leaves(one)) for one in labels):
        return [{count_examples("split_f", one, _label_axis(split_f))} for one in labels]
    sizes: List[Set[int]] = [set() for _ in labels]
    batch_shapes = [leaf.shape if is_device_array(leaf) else np.shape(leaf) for _, leaf in leaves(label)]
    parts = [[leaf.shape for _, leaf in leaves(one) if is_device_array(leaf)] for one in labels]
    if any([len(shape) for shape in part] != [len(shape) for shape in batch_shapes] for part in parts):
        return sizes
    for i, shape in enumerate(batch_shapes):
        for axis in range(len(shape)):
            along = [part[i][axis] for part in parts]
            if sum(along) == shape[axis]:
                for known, size in zip(sizes, along):
                    known.add(size)
    return sizes


def _num_labels(labels: Sequence[Any]) -> int:
    return sum(int(label.shape[0]) for label in labels if is_device_array(label) and label.shape)
