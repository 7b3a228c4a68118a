"""A running average of a network's weights on every device: few operations for all parameters of a device."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..mxnet_internals.parameters import has_values, is_differentiable
from ..nested import Array
from ..trainer.parameters import named_params

_MOST_ARRAYS = 45  # of one operation of MXNet's


class AveragedWeights:
    """A running average of the weights of a network, held next to them on each device.

    The replicas of a `Trainer` are equal, so each device averages its own and nothing is copied between devices. Averages of
    float16 weights are float32.

    Parameters
    ----------
    net : gluon.Block
        With values. The average begins with them.

    Examples
    --------
    >>> net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> average = AveragedWeights(net)
    >>> net.weight.set_data(mx.nd.array([[3.0]]))
    >>> average.update(0.25)
    >>> average.put()
    >>> net.weight.data(mx.cpu(1)).asnumpy().item()
    1.5
    >>> average.take_back()
    >>> net.weight.data(mx.cpu(1)).asnumpy().item()
    3.0
    """

    def __init__(self, net: gluon.Block) -> None:
        self.net = net
        self._averages: Dict[gluon.Parameter, List[Array]] = {}  # on each device
        self._before: List[Tuple[Array, Array]] = []  # weights, and their values before `put`
        self._followed()

    def update(self, rate: float) -> None:
        """Move the average towards the weights by this part of the difference. It does not wait."""
        alike: Dict[Tuple[Any, ...], List[Tuple[Array, Array]]] = {}
        for weight, average in self._pairs():
            alike.setdefault((average.context, average.dtype), []).append((average, weight.astype(average.dtype, copy=False)))
        for pairs in alike.values():
            for begin in range(0, len(pairs), _MOST_ARRAYS):
                some = pairs[begin : begin + _MOST_ARRAYS]
                options = {"lrs": [rate] * len(some), "wds": [1.0] * len(some), "rescale_grad": -1.0, "num_weights": len(some)}
                averages = [average for average, _ in some]
                # (1 - rate) * average + rate * weight
                mx.nd.multi_sgd_update(*(array for pair in some for array in pair), **options, out=averages)

    def put(self) -> None:
        """Set the weights of the network to the average, and remember their values."""
        self.take_back()
        with autograd.pause():
            for weight, average in self._pairs():
                self._before.append((weight, weight.copy()))
                average.copyto(weight)

    def take_back(self) -> None:
        """Set the weights to their values before `put`, if there was one."""
        before, self._before = self._before, []
        for weight, value in before:
            value.copyto(weight)

    def arrays(self) -> Dict[str, Array]:
        """Return the average on the first device by the parameters' structural names, without waiting."""
        return {name: averages[0] for name, (_, averages) in self._followed().items()}

    def restore(self, arrays: Dict[str, Any]) -> None:
        """Set the average to the values that `arrays` has returned, on all devices."""
        for name, (_, averages) in self._followed().items():
            for average in averages if name in arrays else ():
                average[:] = mx.nd.array(arrays[name], ctx=average.context, dtype=average.dtype)

    def _pairs(self) -> List[Tuple[Array, Array]]:
        """Return each weight on each device, and its average."""
        return [pair for weights, averages in self._followed().values() for pair in zip(weights, averages)]

    def _followed(self) -> Dict[str, Tuple[List[Array], List[Array]]]:
        """Return the weights and averages of each parameter with values, by its name; begin the averages that are missing."""
        found = {}
        for name, param in named_params(self.net).items():
            is_float = np.issubdtype(np.dtype(param.dtype), np.floating)
            if has_values(param) and is_differentiable(param) and is_float:
                weights = [one.as_nd_ndarray() for one in param.list_data()]
                if param not in self._averages:
                    dtype = np.promote_types(np.dtype(param.dtype), np.float32)
                    with autograd.pause():
                        self._averages[param] = [weight.astype(dtype, copy=True) for weight in weights]
                found[name] = weights, self._averages[param]
        return found
