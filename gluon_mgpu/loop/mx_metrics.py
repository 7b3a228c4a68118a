"""Metrics of MXNet (`mx.metric`) in `fit` and `evaluate`: the numbers of one device, on any devices."""

from __future__ import annotations

import copy
import math
from typing import Any, List, Sequence, Tuple

import mxnet as mx
import numpy as np

from ..distributed import group
from ..errors import TrainerError
from ..nested import Array, is_device_array

_KEEPS_MORE = ("F1", "MCC", "PearsonCorrelation")  # with average="micro"


class MXMetric:
    """A metric of `mx.metric` as sums: it takes each batch as a whole, from all devices, on the host.

    Some of them count batches, and not examples: the mean over shards would depend on the number of devices. It works on a copy,
    so the metric of the user keeps its state.

    Parameters
    ----------
    metric : mx.metric.EvalMetric

    Examples
    --------
    >>> mae = MXMetric(mx.metric.MAE())
    >>> total, count = mae.of_batch([mx.nd.array([1.0, 2.0]), mx.nd.array([6.0])], [mx.nd.zeros(2), mx.nd.zeros(1)])
    >>> total.asscalar(), count
    (3.0, 1)
    >>> perplexity = MXMetric(mx.metric.Perplexity(None))
    >>> perplexity.mean(0.0, 5)
    1.0
    """

    def __init__(self, metric: Any) -> None:
        self.__name__ = str(metric.name)
        if type(metric).__name__ == "PCC" or (
            type(metric).__name__ in _KEEPS_MORE and "micro" in (getattr(metric, "average", ""), getattr(metric, "_average", ""))
        ):
            raise TrainerError(
                f"metrics: got {type(metric).__name__} over all batches together ({self.__name__}); expected a metric that adds "
                "up a sum and a count. Pass average='macro', or update it yourself with the labels and mgpu.predict(net, data)."
            )
        self._metric = copy.deepcopy(metric)

    def __call__(self, output: Any, label: Any) -> Tuple[Array, int]:
        """Return the sum and the count of one shard."""
        return self.of_batch([output], [label])

    def of_batch(self, outputs: Sequence[Any], labels: Sequence[Any]) -> Tuple[Array, int]:
        """Return the sum over a batch, as an array of one element on the CPU, and its count. It waits for the batch."""
        metric, wholes = self._metric, (_joined(labels), _joined(outputs))
        metric.reset()
        metric.update(*wholes)
        total, count = float(metric.sum_metric), int(metric.num_inst)
        if group() is not None and count < len(wholes[0][0]):
            raise TrainerError(
                f"metrics: got {type(metric).__name__}, which counts batches and not examples, in a job of several processes, "
                "each of which has a part of the batch; expected one that counts examples, such as mx.metric.Accuracy. Pass a "
                "function (output, label) -> (sum, count)."
            )
        return mx.nd.array([total], ctx=mx.cpu(), dtype="float64"), count

    def mean(self, total: float, count: int) -> float:
        """Return the metric's result for a sum and a count: their quotient, or what the metric makes of it."""
        self._metric.reset()
        self._metric.sum_metric, self._metric.num_inst = total, count
        value = self._metric.get()[1]
        return float(value) if value is not None else math.nan


def unpacked(metrics: Sequence[Any]) -> List[Any]:
    """Return metrics with those of `mx.metric` as `MXMetric`, and the parts of each CompositeEvalMetric."""
    found: List[Any] = []
    for metric in metrics:
        if not isinstance(metric, mx.metric.EvalMetric):
            found.append(metric)
        elif hasattr(metric, "metrics") and isinstance(metric.metrics, list):
            found += unpacked(metric.metrics)
        else:
            found.append(MXMetric(metric))
    return found


def _joined(shards: Sequence[Any]) -> List[Array]:
    """Return the arrays of all shards, joined along their first axis, as legacy arrays on the CPU: one per output or label."""
    parts = [[shard] if is_device_array(shard) else list(shard) for shard in shards]
    wholes = [np.concatenate([array.asnumpy() for array in arrays]) for arrays in zip(*parts)]
    return [mx.nd.array(whole, ctx=mx.cpu(), dtype=whole.dtype) for whole in wholes]
