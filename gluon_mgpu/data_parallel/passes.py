"""Forward and backward passes of one batch on all devices, recorded by autograd."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Callable, Iterator, List, NoReturn, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import MXNetError, autograd, gluon

from ..checks import OF_WRONG_DATA, advice_for, is_of_mxnet, reason_of, short
from ..errors import StepError, TrainerError
from ..mxnet_internals.blocks import forget_graph, graph_of, is_hybridized
from ..nested import Array, is_device_array, leaves
from ..trainer.backward import differentiate, run_backward, scaled_losses
from ..trainer.fresh import Pass
from ..trainer.parameters import blocks_of
from ..trainer.recorder import examples_of
from ..trainer.trainer import Trainer
from ..trainer.wrong_graphs import check_graphs, hybrid_blocks
from .batchnorm import run_shards
from .graph import own_method, symbols_of
from .plan import Plan
from .sharding import Split

Phase = Callable[[str], object]
Outputs = Tuple[List[Any], List[Array]]  # of each shard, and its loss
Trained = Tuple[List[Any], List[Array], Pass]


class Passes:
    """Passes of a network and its loss: forward on all devices, then backward on all.

    Parameters
    ----------
    net : gluon.Block
    loss : callable (output, label) -> NDArray, or None
    trains : bool
        Whether a backward pass follows each forward pass; otherwise layers such as Dropout predict.

    Attributes
    ----------
    is_compiled : bool
        Whether the latest passes ran as one graph, which writes all gradients.
    draws : bool or None
        Whether they may draw random numbers; None if it is unknown.
    in_parts : bool
        Whether a device computes a batch in several parts, whose gradients and changes of running statistics they add up.
    shard_numbers : list of int or None
        The number of the virtual shard of each latest output; None if there is one shard for each device.
    """

    is_compiled = in_parts = False
    draws: Optional[bool] = None
    shard_numbers: Optional[List[int]] = None
    _is_checked = False  # whether a graph of the network computes wrong outputs

    def __init__(self, net: gluon.Block, loss: Any, *, trains: bool) -> None:
        self._net, self._loss, self._trains = net, loss, trains

    def arrange(self, operation: str, Xs: List[Any], ys: List[Any], split: Split) -> Tuple[List[Any], List[Any]]:
        """Return the shards of a batch as `forward` takes them."""
        return Xs, ys

    def forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], plan: Optional[Plan] = None) -> Outputs:
        """Return every shard's output, and its losses if there is a loss: recorded, or in prediction mode. It does not wait.

        Parameters
        ----------
        operation : str
            The caller's name, for errors.
        Xs, ys : sequence
            One shard per device.
        plan : Plan, optional
            That of the batch.

        Raises
        ------
        StepError
            The network or the loss rejects a shard.
        """
        with autograd.record() if self._trains else autograd.pause(train_mode=False):
            shards = list(zip(count(), Xs, ys))
            tasks = [partial(call, operation, "network", *shard, self._net, shard[1]) for shard in shards]
            outputs, losses = run_shards(self._net, tasks), []
            if self._loss is not None:
                losses = [call(operation, "loss", *shard, self._loss, one, shard[2]) for one, shard in zip(outputs, shards)]
        if not self._is_checked:
            check_graphs(operation, hybrid_blocks([self._net, self._loss]), trains=False)
            self._is_checked = True
        return outputs, losses

    def run(
        self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], plan: Optional[Plan], trainer: Trainer, on_phase: Phase = bool
    ) -> Trained:
        """Train on the shards: return outputs, losses, and the pass for the trainer's step. Arguments and errors as of `forward`.

        Parameters
        ----------
        on_phase : callable (str)
            Called with `backward` before the backward pass, where it begins after all forward passes.
        """
        outputs, losses = self.forward(operation, Xs, ys, plan)
        on_phase("backward")
        return outputs, losses, self._go_back(trainer, losses, plan)

    def _go_back(self, trainer: Trainer, losses: Sequence[Array], plan: Optional[Plan]) -> Pass:
        """Compute the gradients of the losses of the latest forward passes."""
        with trainer.steps.recorder.one_pass() as found:
            differentiate("backward", scaled_losses(trainer.steps, losses))
        examples = examples_of(losses, {}) if plan is None or plan.slices is None or plan.is_new else plan.examples
        return Pass(found.written, examples, is_current=True)


@contextmanager
def forgetting_graphs(net: gluon.Block) -> Iterator[None]:
    """Let a network make no graph that stays: Gluon keeps that of the first call, also if it was a prediction."""
    new = [one for one in blocks_of(net) if isinstance(one, gluon.HybridBlock) and graph_of(one) is None]
    try:
        yield
    finally:
        try:
            mx.nd.waitall()  # their operations must not be deleted while they run
        finally:
            for block in new:
                forget_graph(block)


def decide_shapes(operation: str, net: gluon.Block, Xs: Sequence[Any], ys: Sequence[Any]) -> None:
    """Let the first shard decide the shapes of parameters that layers leave open."""
    with forgetting_graphs(net):
        if is_hybridized(net) and not own_method(net):
            symbols_of(net, Xs[:1])  # a graph of all that training reaches, which the prediction then uses
        passes = Passes(net, None, trains=False)
        passes._is_checked = True  # shapes are right in any graph
        passes.forward(operation, Xs[:1], ys[:1])


def backward(losses: Sequence[Array], trainers: Sequence[Trainer] = ()) -> None:
    """Compute the gradients of all shards' losses in one backward pass, which serves several trainers.

    For one, call `trainer.backward(losses)`. Without trainers, it is `autograd.backward`: MXNet's flags tell which gradients a
    step uses. Separate passes fail if two shards went through one BatchNorm, and they give the engine less to run in parallel.

    Parameters
    ----------
    losses : sequence of NDArray, any shapes
        Recorded, one per shard.
    trainers : sequence of Trainer
        Of the networks that the losses have gone through. Each one's next step uses this pass.

    Raises
    ------
    TrainerError
        The losses are not a list of arrays, an item is not a trainer, or two trainers train one parameter.
    """
    if not isinstance(trainers, (list, tuple)) or not all(isinstance(one, Trainer) for one in trainers):
        raise TrainerError(
            f"backward: got {short(trainers)} as the trainers; expected a list of gluon_mgpu.Trainer. Pass [trainer, other], or "
            "call trainer.backward(losses)."
        )
    run_backward("backward", losses, [one.steps for one in trainers])


def call(operation: str, what: str, shard: int, X: Any, y: Any, function: Any, *args: Any, **named: Any) -> Any:
    """Call a function, and name the shard, its device, shapes and dtypes in MXNet's errors."""
    try:
        return function(*args, **named)
    except (MXNetError, *OF_WRONG_DATA) as error:
        raise_named(error, operation, what, shard, X, y)


def raise_named(error: Exception, operation: str, what: str, shard: int, X: Any, y: Any) -> NoReturn:
    """Raise an error of MXNet's again, with the shard, its device, shapes and dtypes; others as they are."""
    if not is_of_mxnet(error):
        raise error
    found = [leaf for _, leaf in (*leaves(X), *leaves(y)) if is_device_array(leaf)]
    devices = ", ".join(sorted({str(leaf.context) for leaf in found}))
    shapes = short([tuple(leaf.shape) for leaf in found])
    advice = advice_for(error, "Let a network of several inputs take one tuple, or try one example on one device.")
    raise StepError(
        f"{operation}: got an error of the {what} for shard {shard} on {devices}, shapes {shapes}: {reason_of(error)}; expected "
        f"data that it accepts. {advice}"
    ) from error
