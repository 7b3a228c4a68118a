"""Forward and backward passes of one batch on all devices, recorded by autograd."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from mxnet import MXNetError, autograd, gluon

from ..checks import OF_WRONG_DATA, explaining, is_of_mxnet, reason_of, short
from ..distributed import process_shard
from ..errors import StepError, TrainerError
from ..nested import Array, is_device_array, leaves
from ..runtime.mxnet2 import children
from ..trainer.freshness import history
from ..trainer.running_stats import note_examples
from ..trainer.trainer import Trainer
from .batchnorm import run_shards

_OF_INTEGERS = re.compile(r"expected u?int\d+, got float|expected float\d+, got u?int")


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
    running_stats : list of gluon.Parameter, optional
        Those of the network, if the passes know them.
    adds : bool
        Whether there are several backward passes for each device, whose gradients add up.
    is_compiled : bool
        Whether the latest passes ran as one graph, which writes all gradients.
    draws : bool or None
        Whether they may draw random numbers; None if it is unknown.
    """

    running_stats: Optional[List[gluon.Parameter]] = None
    adds = is_compiled = False
    draws: Optional[bool] = None

    def __init__(self, net: gluon.Block, loss: Any, *, trains: bool) -> None:
        self._net, self._loss, self._trains = net, loss, trains

    def shard_numbers(self, count: int) -> Optional[List[int]]:
        """Return the number of the virtual shard of each result, None if there is one shard for each device."""
        return None

    def arrange(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], batch_axis: Any) -> Tuple[List[Any], List[Any]]:
        """Return the shards of a batch as `forward` takes them."""
        return list(Xs), list(ys)

    def forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any]) -> Tuple[List[Any], List[Array]]:
        """Return every shard's output, and its losses if there is a loss. It does not wait.

        Parameters
        ----------
        operation : str
            The caller's name, for errors.
        Xs, ys : sequence
            One shard per device.

        Raises
        ------
        StepError
            The network or the loss rejects a shard.
        """
        with autograd.record() if self._trains else autograd.pause(train_mode=False):
            return self._forward(operation, Xs, ys)

    def backward(self, trainer: Trainer, losses: Sequence[Array]) -> None:
        """Compute the gradients of the losses that the latest forward pass has returned, in one pass over all devices."""
        backward(trainer.scale(losses) if losses else [])

    def _forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any]) -> Tuple[List[Any], List[Array]]:
        net, loss = self._net, self._loss

        def through(shard: int) -> Any:
            with naming(operation, "network", shard, Xs[shard], ys[shard], net):
                return net(Xs[shard])

        outputs = run_shards(net, [partial(through, shard) for shard in range(len(Xs))])
        losses: List[Array] = []
        for shard, (output, y) in enumerate(zip(outputs, ys)):
            if loss is not None:
                with naming(operation, "loss", shard, Xs[shard], y, net):
                    losses.append(loss(output, y))
        return outputs, losses


def backward(losses: Sequence[Array]) -> None:
    """Compute the gradients of all shards' losses in one backward pass.

    Separate passes fail if two shards went through one BatchNorm, and they give the engine less to run in parallel.

    Parameters
    ----------
    losses : sequence of NDArray, any shapes
        Recorded, one per shard.

    Raises
    ------
    TrainerError
        The losses are not a list of arrays.
    """
    if isinstance(losses, list) and not losses and process_shard()[1] > 1:  # a small batch has no examples for this process
        history.note_empty()
        return
    if not isinstance(losses, (list, tuple)) or not losses or not all(is_device_array(loss) for loss in losses):
        raise TrainerError(
            f"backward: got {_kinds(losses)}; expected a list of one or more MXNet arrays, one loss per shard. "
            "Pass [loss(net(x), y) for x, y in zip(Xs, ys)]."
        )
    note_examples(losses)
    expected = "losses that were recorded, each once"
    advice = "Compute them inside autograd.record(), and call backward() once."
    with explaining("backward", "an error", expected, advice=advice), history.single_call():
        autograd.backward(list(losses))


@contextmanager
def naming(operation: str, what: str, shard: int, X: Any, y: Any, net: Any) -> Iterator[None]:
    """Name the shard, its device, shapes and dtypes in MXNet's errors."""
    try:
        yield
    except (MXNetError, *OF_WRONG_DATA) as error:
        if not is_of_mxnet(error):
            raise
        found = [leaf for _, leaf in (*leaves(X), *leaves(y)) if is_device_array(leaf)]
        places = ", ".join(sorted({str(leaf.context) for leaf in found}))
        shapes = short([tuple(leaf.shape) for leaf in found])
        reason = reason_of(error)
        raise StepError(
            f"{operation}: got an error of the {what} for shard {shard} on {places}, shapes {shapes}: {reason}; "
            f"expected data of a shape and dtype that it accepts. {_advice(found, net, reason)}"
        ) from error


def dtype_of(net: Any) -> str:
    """Return the dtype of a network's first parameter, "" if it has no parameter."""
    if not isinstance(net, gluon.Block):
        return ""
    for param in net._reg_params.values():
        return np.dtype(param.dtype).name
    return next((name for name in map(dtype_of, children(net)) if name), "")


def _advice(found: Sequence[Array], net: Any, reason: str) -> str:
    """Return advice for data that a network or a loss does not accept."""
    dtypes, own = {np.dtype(leaf.dtype).name for leaf in found}, dtype_of(net)
    if "bool" in dtypes:
        return "Few operators take bool: cast it with astype('float32'), or 'int32'."
    if own.startswith("float") and own not in dtypes and any(dtype.startswith("float") for dtype in dtypes):
        return f"The network is of {own}: pass split_f=functools.partial(split_batch, dtype={own!r})."
    if own.startswith("float") and _OF_INTEGERS.search(reason):
        return f"The network is of {own}: cast its data with astype({own!r})."
    return "Try it on one device, with one example."


def _kinds(losses: Any) -> str:
    if isinstance(losses, (list, tuple)):
        return f"a {type(losses).__name__} of {sorted({type(loss).__name__ for loss in losses})}" if losses else f"{losses!r}"
    return type(losses).__name__
