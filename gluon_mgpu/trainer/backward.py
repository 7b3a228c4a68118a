"""One backward pass over all devices, for one trainer or several."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Sequence, Set

from mxnet import autograd

from ..checks import explaining, short
from ..distributed import group
from ..errors import TrainerError
from ..nested import Array, is_device_array
from ..refusals import refusal
from .steps import Steps


def run_backward(operation: str, losses: Sequence[Array], trainers: Sequence[Steps] = ()) -> None:
    """Compute the gradients of all losses, and give the pass to these trainers. Arguments and errors are those of `backward`."""
    is_list = isinstance(losses, (list, tuple)) and all(map(is_device_array, losses))
    if not is_list or not (losses or group() is not None):  # a small batch has no examples for a process
        raise TrainerError(
            f"{operation}: got {short(losses)}; expected a list of one or more MXNet arrays, one loss per shard. "
            "Pass [loss(net(x), y) for x, y in zip(Xs, ys)]."
        )
    if not losses and any(one.fresh.latest is not None for one in trainers):
        raise refusal(operation, "several processes", "several passes before a step")
    for trainer in trainers:
        trainer.process_sync.check_begun(operation)
    if len(trainers) > 1 and any(one.loss_scaler is not None for one in trainers):
        raise refusal(operation, "precision='fp16'", "a pass for several trainers")
    _check_apart(operation, trainers)
    with ExitStack() as stack:
        found = [stack.enter_context(one.recorder.one_pass(keeps=True)) for one in trainers]
        differentiate(operation, scaled_losses(trainers[0], losses) if trainers else losses)
    for trainer, one in zip(trainers, found):
        trainer.take(trainer.recorder.counted(one, losses))


def _check_apart(operation: str, trainers: Sequence[Steps]) -> None:
    """Raise `TrainerError` if two trainers train one parameter: the first step sums its gradients, and the second would again."""
    taken: Set[int] = set()
    for trainer in trainers if len(trainers) > 1 else ():
        trained = {id(param): param for param in trainer.layout.params if param.grad_req != "null"}
        shared = next((param.name for key, param in trained.items() if key in taken), None)
        if shared is not None:
            raise TrainerError(
                f"{operation}: got two trainers of {shared}; expected each parameter in one, as one step uses it. Make them of "
                "different parts of the network, or call backward() and step() of one after the other."
            )
        taken.update(trained)


def scaled_losses(trainer: Steps, losses: Sequence[Array]) -> Sequence[Array]:
    """Return the losses times the loss scale of fp16, or as they are."""
    return losses if trainer.loss_scaler is None else trainer.loss_scaler.scale_losses(losses)


def differentiate(operation: str, losses: Sequence[Array]) -> None:
    """Compute the gradients of losses, of which a process of several may have none."""
    expected = "losses that were recorded, each once"
    advice = "Compute them inside autograd.record(), call backward() once, and do not freeze all parameters."
    if losses:
        with explaining(operation, "an error", expected, advice=advice):
            autograd.backward(list(losses))
