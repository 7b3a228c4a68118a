"""BatchNorm's running statistics in a pipeline: they move once a batch, however many micro-batches it has."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import mxnet as mx
from mxnet import Context, gluon
from mxnet.gluon.nn.basic_layers import _BatchNorm

from ..nested import Array
from ..trainer.parameters import blocks_of


class BatchStats:
    """Collects mean and variance of each micro-batch on one device, and moves the running statistics by those of the batch.

    MXNet computes `running = momentum * running + (1 - momentum) * statistic` in each backward pass. From `running` zero, that
    shows the statistic of the micro-batch.

    Parameters
    ----------
    layers : sequence of nn.BatchNorm
    context : mxnet.Context

    Source: Kim et al., "torchgpipe", 2020, section on deferred batch normalization.
    """

    def __init__(self, layers: Sequence[Any], context: Context) -> None:
        self._layers: List[Tuple[float, Array, Array]] = []  # momentum, running mean and variance
        for layer in layers:
            arrays = [param.data(context).as_nd_ndarray() for param in (layer.running_mean, layer.running_var)]
            self._layers.append((float(layer._kwargs["momentum"]), arrays[0], arrays[1]))
        self._former = [(mean.copy(), var.copy()) for _, mean, var in self._layers]
        self._sums = [(mx.nd.zeros_like(mean), mx.nd.zeros_like(var)) for _, mean, var in self._layers]
        self._num_examples = 0
        self.clear()

    def clear(self) -> None:
        """Set the running statistics to zero, before a micro-batch."""
        for _, mean, var in self._layers:
            mx.nd.zeros_like(mean, out=mean)
            mx.nd.zeros_like(var, out=var)

    def add(self, num_examples: int, *, counts: bool = True) -> None:
        """Collect the statistics that the latest pass of a micro-batch has left, and clear them.

        Parameters
        ----------
        num_examples : int
        counts : bool
            Whether this is the micro-batch's backward pass: its examples count once.
        """
        self._num_examples += num_examples if counts else 0
        for (momentum, mean, var), (sum_mean, sum_square) in zip(self._layers, self._sums):
            of_mean, of_var = mean / (1 - momentum), var / (1 - momentum)
            sum_mean += num_examples * of_mean
            sum_square += num_examples * (of_var + mx.nd.square(of_mean))
        self.clear()

    def finish(self) -> None:
        """Move the running statistics by those of the complete batch."""
        for (momentum, mean, var), (sum_mean, sum_square), former in zip(self._layers, self._sums, self._former):
            batch_mean = sum_mean / max(1, self._num_examples)
            batch_var = sum_square / max(1, self._num_examples) - mx.nd.square(batch_mean)
            weight = (1 - momentum) if self._num_examples else 0.0
            for array, before, of_batch in ((mean, former[0], batch_mean), (var, former[1], batch_var)):
                array[:] = (1 - weight) * before + weight * of_batch

    def restore(self) -> None:
        """Set the running statistics back to those before the batch."""
        for (_, mean, var), (former_mean, former_var) in zip(self._layers, self._former):
            former_mean.copyto(mean)
            former_var.copyto(var)


def batch_norms(net: gluon.Block, params: Sequence[gluon.Parameter]) -> List[Any]:
    """Return the BatchNorm layers of a network whose running statistics are among these parameters and move."""
    known = {id(param) for param in params}
    found: Dict[int, Any] = {}
    for block in blocks_of(net):
        if isinstance(block, _BatchNorm) and id(block.running_mean) in known and _moves(block):
            found[id(block.running_mean)] = block
    return list(found.values())


def _moves(block: Any) -> bool:
    return not block._kwargs["use_global_stats"] and block._kwargs["momentum"] < 1
