"""One network on all devices: its weights and gradients side by side, idle devices, BatchNorm statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from .errors import StaleGradientError, TrainerError
from .nested import Leaf

Params = Union[gluon.Block, Dict[str, gluon.Parameter], Sequence[gluon.Parameter]]


@dataclass(frozen=True)
class Buffer:
    """What is reduced and updated in one operation a device: today one parameter.

    Whoever reduces, clips, updates or compares works on buffers alone, so that a buffer can come to hold many parameters.

    Attributes
    ----------
    index : int
        Its place in the network; the key of its optimizer state.
    weights, gradients : list of NDArray
        One a replica, in the order of the contexts.
    """

    index: int
    weights: List[Leaf]
    gradients: List[Leaf]


class Replicas:
    """The parameters of a network, one replica a device.

    Parameters
    ----------
    params : gluon.Block, dict of gluon.Parameter, or sequence of gluon.Parameter
        In structural order: as the layers were made, not as their names sort (`dense10_` comes before `dense9_` there).

    Attributes
    ----------
    names : list of str
        Structural names (`0.weight`) for a Block, the parameters' own (`dense7_weight`) otherwise.
    structural : bool
        Which of the two.
    params : list of gluon.Parameter
    contexts : list of mxnet.Context

    Raises
    ------
    TrainerError
        The parameters are not parameters, not initialised, or not all on the same devices.
    """

    def __init__(self, params: Params) -> None:
        named = _named(params)
        self.names = list(named)
        self.structural = isinstance(params, gluon.Block)
        self.params = list(named.values())
        self.contexts = _common_contexts(named)
        self._initialised: Dict[int, Any] = {}  # what Gluon makes anew whenever it initialises a parameter

    def check_unmoved(self) -> None:
        """Raise `TrainerError` if a parameter was put on other devices since, or initialised again.

        A network hybridized with `static_alloc` and `static_shape` would go on writing gradients into the old arrays.
        """
        for index, (name, param) in enumerate(zip(self.names, self.params)):
            if param._data is not None and self._initialised.setdefault(index, param._ctx_list) is not param._ctx_list:
                raise TrainerError(
                    f"Trainer: got parameter {name} initialised again on {param.list_ctx()}; need the arrays of the first step. "
                    "Call net.hybridize() again and make a new Trainer after initialize(force_reinit=True) or reset_ctx()."
                )
            if param.list_ctx() != self.contexts:
                raise TrainerError(
                    f"Trainer: got parameter {name} on {param.list_ctx()}; need {self.contexts}, where it was when the "
                    "trainer was made. Make a new Trainer after reset_ctx()."
                )

    def collect(self, ignore_stale_grad: bool) -> List[Buffer]:
        """Return the buffers that take part in this step, with zeros where a device has no gradient.

        A device that got no data, or whose data did not reach a parameter, still holds the gradient of an earlier step there.
        Its share of this step's sum is zero. A parameter that got no gradient on any device is left out.

        Raises
        ------
        StaleGradientError
            A parameter is left out and `ignore_stale_grad` is false. Nothing was changed.
        """
        self.check_unmoved()
        buffers, fresh, stale = [], [], []
        for index, param in self._trainable():
            weights = param._data or []  # a parameter whose shape is still unknown has none
            flags = [weight._fresh_grad for weight in weights]
            if any(flags):
                buffers.append(Buffer(index, weights, param.list_grad()))
                fresh.append(flags)
            else:
                stale.append(index)
        self._check_stale(stale, ignore_stale_grad)
        for buffer, flags in zip(buffers, fresh):
            for weight, gradient, is_fresh in zip(buffer.weights, buffer.gradients, flags):
                if not is_fresh:
                    gradient[:] = 0
                    weight._fresh_grad = True
        return buffers

    def collect_summed(self, indices: Sequence[int], ignore_stale_grad: bool) -> List[Buffer]:
        """Return the buffers of these parameters, whose gradients have been summed, and are marked as used.

        Raises
        ------
        StaleGradientError
            Another parameter is trainable, and `ignore_stale_grad` is false.
        TrainerError
            There was a backward pass after the sum.
        """
        buffers = [Buffer(i, self.params[i].list_data(), self.params[i].list_grad()) for i in indices]
        if any(weight._fresh_grad for buffer in buffers for weight in buffer.weights):
            raise TrainerError(
                "Trainer.update: got gradients of a backward pass after allreduce_grads(); need their sum over the devices. "
                "Call allreduce_grads() again, or step(), which does both."
            )
        self._check_stale([i for i, _ in self._trainable() if i not in set(indices)], ignore_stale_grad)
        return buffers

    def _trainable(self) -> List[Tuple[int, gluon.Parameter]]:
        return [(index, param) for index, param in enumerate(self.params) if param.grad_req != "null"]

    def _check_stale(self, stale: Sequence[int], ignore_stale_grad: bool) -> None:
        if stale and not ignore_stale_grad:
            told = _some([self.names[index] for index in stale])
            raise StaleGradientError(
                f"Trainer.step: got no gradient for {told} on any device since the last step; need a backward pass "
                "through every parameter. If this network uses only a part of them, pass ignore_stale_grad=True."
            )


def mark_used(buffers: Iterable[Buffer]) -> None:
    """Note that these gradients have been applied: until the next backward pass they are stale."""
    for buffer in buffers:
        for weight in buffer.weights:
            weight._fresh_grad = False


def average_running_stats(params: Params) -> None:
    """Set BatchNorm's running means and variances, on every device, to their mean over the devices.

    Each device sees its own shards, so each has its own statistics; Gluon evaluates with those of one device and saves
    their mean. Averaging is linear, as their running update is, so that doing it now does not change what it gives later.

    Devices count alike, also where their shards are not of one size.

    It waits for the devices: a network hybridized with `static_alloc` and `static_shape` writes these arrays without
    telling the engine.
    """
    # Not differentiable is how Gluon marks them; a frozen weight has grad_req "null" but is differentiable.
    stats = [param for param in _named(params).values() if not param._differentiable and len(param._data or []) > 1]
    if not stats:
        return
    mx.nd.waitall()
    for param in stats:
        arrays = param.list_data()
        mean = sum((array.as_in_context(arrays[0].context) for array in arrays[1:]), arrays[0]) / len(arrays)
        for array in arrays:
            mean.copyto(array)


def shape_fits(saved: Optional[Sequence[int]], wanted: Optional[Sequence[int]]) -> bool:
    """Return whether two shapes are equal, but for what is not known yet: 0 or -1, or no shape at all."""
    if not saved or not wanted:
        return True
    return len(saved) == len(wanted) and all(a == b or a in (0, -1) or b in (0, -1) for a, b in zip(saved, wanted))


def has_values(params: Params) -> bool:
    """Return whether every parameter has values: one whose shape the first batch decides has none before it."""
    return all(param._data is not None for param in _named(params).values())


def replica_difference(params: Params) -> float:
    """Return the largest absolute difference between the weights of any two devices; 0.0 when replicas are identical.

    It reads all weights. BatchNorm's running statistics are not counted: they differ by design.

    Examples
    --------
    >>> net = gluon.nn.Dense(2, in_units=3)
    >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> replica_difference(net)
    0.0
    """
    largest = 0.0
    for param in _named(params).values():
        if param._differentiable and param._data:
            first, *others = [array.asnumpy() for array in param.list_data()]
            for other in others:
                if not np.array_equal(first, other):
                    largest = max(largest, float(np.abs(first.astype(np.float64) - other).max()))
    return largest


def _named(params: Params) -> Dict[str, gluon.Parameter]:
    if isinstance(params, gluon.Block):
        first_names: Dict[int, str] = {}  # a tied parameter has several structural names; the first one stands
        for name, param in params._collect_params_with_prefix().items():
            first_names.setdefault(id(param), name)
        return {first_names.get(id(param), param.name): param for param in params.collect_params().values()}
    if isinstance(params, (gluon.ParameterDict, dict)):
        named: Dict[str, Any] = dict(params.items())
    elif isinstance(params, (list, tuple)):
        named = {getattr(param, "name", str(i)): param for i, param in enumerate(params)}
        if len(named) < len(params):
            raise TrainerError(
                f"Trainer: got {len(params)} parameters with {len(named)} names; need different ones. Pass each once."
            )
    else:
        raise TrainerError(
            f"Trainer: got {type(params).__name__} as the parameters; need a Block, a dict or a list of "
            "Parameters. Pass the network."
        )
    for name, param in named.items():
        if not isinstance(param, gluon.Parameter):
            raise TrainerError(
                f"Trainer: got {type(param).__name__} for {name}; need a gluon.Parameter. Pass net or net.collect_params()."
            )
    return named


def _common_contexts(named: Dict[str, gluon.Parameter]) -> List[Context]:
    if not named:
        raise TrainerError("Trainer: got no parameters; need at least one. Pass a network that has layers.")
    contexts: List[Context] = []
    for name, param in named.items():
        if param._data is None and not param._deferred_init:
            raise TrainerError(
                f"Trainer: got {name} not initialised; need values on the devices. Call net.initialize(ctx=ctx) first."
            )
        contexts = contexts or list(param.list_ctx())
        if param.list_ctx() != contexts:
            raise TrainerError(
                f"Trainer: got {name} on {param.list_ctx()} and others on {contexts}; need all parameters on the same devices. "
                "Call net.collect_params().reset_ctx(ctx)."
            )
    return contexts


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
