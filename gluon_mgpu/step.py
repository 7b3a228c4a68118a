"""One batch on all devices: backward(), train_batch(), eval_batch()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, List, Sequence, Tuple

from mxnet import Context, MXNetError, autograd, gluon

from .errors import ShardError, StepError, TrainerError
from .nested import Leaf, is_device_array, leaves
from .sharding import split_batch
from .trainer import Trainer

SplitFunction = Callable[[Any, Any, Sequence[Context]], Tuple[List[Any], List[Any]]]


@dataclass(frozen=True)
class Batch:
    """What came of a batch; its arrays are still on their devices, and may still be being computed.

    Attributes
    ----------
    outputs, labels : list
        One item a shard, as the network and the split returned them.
    losses : list of NDArray, shapes (shard size, ...)
        Empty after `eval_batch` without a loss.
    num_examples : int
        Over all devices.
    """

    outputs: List[Any]
    labels: List[Any]
    losses: List[Leaf]
    num_examples: int


def backward(losses: Sequence[Leaf]) -> None:
    """Compute the gradients of all shards' losses in one backward pass.

    Separate passes fail where two shards went through one BatchNorm, and give the engine less to run at once.

    Parameters
    ----------
    losses : sequence of NDArray, any shapes
        Recorded, one a shard.

    Raises
    ------
    TrainerError
        Not a list of arrays.
    """
    if not isinstance(losses, (list, tuple)) or not losses or not all(is_device_array(loss) for loss in losses):
        raise TrainerError(
            f"backward: got {_kinds(losses)}; need a list of one or more MXNet arrays, one loss a shard. "
            "Pass [loss(net(x), y) for x, y in zip(Xs, ys)]."
        )
    autograd.backward(list(losses))


def train_batch(
    net: gluon.Block,
    loss: Callable[[Any, Any], Leaf],
    trainer: Trainer,
    X: Any,
    y: Any,
    *,
    split_f: SplitFunction = split_batch,
    ignore_stale_grad: bool = False,
) -> Batch:
    """Train on one batch over the trainer's devices, and return what came of it. It does not wait.

    The gradient is divided by the number of examples that were seen, which is counted: the last batch of an epoch may hold
    fewer than the others, and shards may be uneven.

    Parameters
    ----------
    net : gluon.Block
        Called once a shard, with the shard of `X` as its one argument.
    loss : callable (output, label) -> NDArray, shape (shard size,)
        One number an example, not their mean: Gluon's losses.
    trainer : Trainer
    X, y : array, or nested data
        A batch, shapes (B, ...).
    split_f : callable (X, y, devices) -> (list of X shards, list of y shards)
        `split_batch`, d2l's functions, or a `functools.partial` with another `batch_axis`.
    ignore_stale_grad : bool
        Allow parameters that no shard used.

    Raises
    ------
    TrainerError
        The loss has not one number an example. Nothing was updated.
    """
    Xs, ys = _split(split_f, X, y, trainer.contexts)
    with autograd.record():
        outputs = _forward(net, Xs, "train_batch")
        losses = [loss(output, label) for output, label in zip(outputs, ys)]
    num_examples = _count(losses, ys)
    backward(losses)
    trainer.step(num_examples, ignore_stale_grad)
    return Batch(outputs, ys, losses, num_examples)


def eval_batch(
    net: gluon.Block,
    X: Any,
    y: Any,
    devices: Sequence[Context],
    *,
    loss: Any = None,
    split_f: SplitFunction = split_batch,
) -> Batch:
    """Run one batch forward over the devices, in prediction mode, and return what came of it. It does not wait.

    Parameters
    ----------
    net : gluon.Block
    X, y : array, or nested data
        A batch, shapes (B, ...).
    devices : list of mxnet.Context
    loss : callable (output, label) -> NDArray, optional
    split_f : callable (X, y, devices) -> (list of X shards, list of y shards)
    """
    Xs, ys = _split(split_f, X, y, devices)
    with autograd.pause(train_mode=False):
        outputs = _forward(net, Xs, "eval_batch")
        losses = [loss(output, label) for output, label in zip(outputs, ys)] if loss is not None else []
    return Batch(outputs, ys, losses, _count(losses, ys) if losses else _num_labels(ys))


def _split(split_f: SplitFunction, X: Any, y: Any, devices: Sequence[Context]) -> Tuple[List[Any], List[Any]]:
    Xs, ys = split_f(X, y, list(devices))
    if len(Xs) != len(ys) or not Xs:
        raise ShardError(
            f"split_f: got {len(Xs)} shards of features and {len(ys)} of labels; need as many of each, 1 or more. "
            "Return (list of X shards, list of y shards)."
        )
    return list(Xs), list(ys)


def _forward(net: gluon.Block, Xs: Sequence[Any], operation: str) -> List[Any]:
    outputs = []
    for shard, X in enumerate(Xs):
        try:
            outputs.append(net(X))
        except MXNetError as error:
            places = sorted({str(leaf.context) for _, leaf in leaves(X) if is_device_array(leaf)})
            shapes = [leaf.shape for _, leaf in leaves(X)]
            raise StepError(
                f"{operation}: got an error of the network for shard {shard} on {', '.join(places)}, shapes {shapes}: "
                f"{str(error).strip().splitlines()[-1].strip()}; need an input that the network takes. Try net(X) on one device."
            ) from error
    return outputs


def _count(losses: Sequence[Leaf], labels: Sequence[Any]) -> int:
    """Return the examples that these losses are of, having checked that each loss holds one number for each."""
    for shard, (loss, label) in enumerate(zip(losses, labels)):
        if not is_device_array(loss):
            raise TrainerError(
                f"train_batch: got a loss of type {type(loss).__name__}; need an MXNet array. Use a loss of gluon.loss."
            )
        if not loss.shape or (loss.size == 1 and is_device_array(label) and label.size > 1):
            raise TrainerError(
                f"train_batch: got a loss of shape {loss.shape} for shard {shard} on {loss.context}, whose label has shape "
                f"{getattr(label, 'shape', None)}; need one number for each example, so that uneven shards count right. "
                "Leave the mean out of the loss."
            )
    return sum(int(loss.shape[0]) for loss in losses)


def _num_labels(labels: Sequence[Any]) -> int:
    return sum(int(label.shape[0]) for label in labels if is_device_array(label) and label.shape)


def _kinds(losses: Any) -> str:
    if isinstance(losses, (list, tuple)):
        return f"a {type(losses).__name__} of {sorted({type(loss).__name__ for loss in losses})}" if losses else f"{losses!r}"
    return type(losses).__name__
