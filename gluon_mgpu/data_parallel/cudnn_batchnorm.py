"""When BatchNorm's running statistics move, and what lets GPUs and CPUs agree on it.

| | CPU: MXNet's own operator | GPU: cuDNN's |
|---|---|---|
| they move in | the backward pass (`batch_norm.cc:265-271`) | the forward pass (`cudnn_batch_norm-inl.h:132`) |
| layers that no backward pass reaches | stay | move |
| by the variance of n values | divided by n | by n - 1, so that of one value is NaN |

On a GPU, `cudnn_off=True` chooses MXNet's own operator, which moves them as on a CPU (`batch_norm.cu:355-365`), but runs one
block of threads for each channel. So layers stay with cuDNN, and the cases that differ are kept out:

- `use_running_stats` lets frozen layers normalise by their running statistics, which then stay on both.
- `check_values` refuses one value per channel.
- A pipeline that computes a stage twice counts one of its passes (`pipeline/dispatch.py`).
- `SyncBatchNorm` asks `would_move`, so that it equals MXNet's layer on the same kind of device.

Source: MXNet 1.9.1, src/operator/nn.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..errors import StepError
from ..mxnet_internals.blocks import BaseBatchNorm, batch_norm_options, forget_graph
from ..nested import Array
from ..trainer.wrong_graphs import hybrid_blocks

_OF_CUDNN = "gpu"  # devices on which cuDNN computes


def moves_in_forward(context: Context) -> bool:
    """Return whether BatchNorm moves its running statistics in the forward pass on a device."""
    return context.device_type == _OF_CUDNN


def would_move(layer: BaseBatchNorm, x: Array) -> bool:
    """Return whether MXNet's own layer, recorded with this input, would move its running statistics."""
    if moves_in_forward(x.context) or any(param.grad_req != "null" for param in (layer.gamma, layer.beta)):
        return True
    try:
        autograd.get_symbol(x)
    except mx.MXNetError:  # no parameter leads to it, so no backward pass reaches the layer
        return False
    return True


def use_running_stats(roots: Sequence[gluon.Block], layers: Sequence[BaseBatchNorm], is_frozen: bool) -> None:
    """Let layers normalise by their running statistics in training, or by those of each shard again, in these networks."""
    if is_frozen:
        changing = [layer for layer in layers if not batch_norm_options(layer)["use_global_stats"]]
    else:
        changing = [layer for layer in layers if vars(layer).get("was_frozen")]
    if not changing:
        return
    mx.nd.waitall()  # a graph must not be deleted while it runs
    for layer in changing:  # those with `use_global_stats=True` of their own stay
        batch_norm_options(layer)["use_global_stats"] = layer.was_frozen = is_frozen
    for block in hybrid_blocks(roots):
        forget_graph(block)


def check_values(operation: str, X: Array, graph: Optional[Tuple[Any, Any]]) -> None:
    """Raise `StepError` if a shard has one value per channel for a BatchNorm on a GPU.

    Parameters
    ----------
    X : NDArray, shape (shard size, ...)
    graph : pair of symbols, optional
        The network's input and output; None if it cannot be traced.
    """
    if graph is None:
        return
    (data,), output = graph
    inside, shapes = output.as_nd_ndarray().get_internals(), {}
    with suppress(mx.MXNetError):  # the forward pass says it better
        shapes = dict(zip(inside.list_outputs(), inside.infer_shape_partial(**{data.name: X.shape})[1]))
    for node in json.loads(output.tojson())["nodes"]:
        options, shape = node.get("attrs", {}), shapes.get(f"{node['name']}_output")
        if node["op"] != "BatchNorm" or options.get("use_global_stats") == "True" or not shape:
            continue
        if np.prod(shape) == shape[int(options.get("axis", 1))]:
            raise StepError(
                f"{operation}: got one example on {X.context}, whose values at {node['name']} have the shape {shape}; expected "
                "two values or more for each channel, as cuDNN's running variance of one is NaN. Use batches whose parts have "
                "two examples or more: another batch_size, or last_batch='discard'."
            )
