"""A running average of a network's weights on every device: one operation per bucket, not one per parameter."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..nested import Array
from .parameters import named_params
from .slab import MOVES, Bucket, place_of

_Key = Union[Bucket, gluon.Parameter]  # a bucket, or a parameter outside of buckets


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
        self._averages: Dict[_Key, List[Array]] = {}
        self._places: Dict[gluon.Parameter, Tuple[_Key, int]] = {}  # the key of its average, and its beginning there
        self._before: List[Tuple[Array, Array]] = []  # weights, and their values before `put`
        self._num_moves = -1
        self._follow()

    def update(self, rate: float) -> None:
        """Move the average towards the weights by this part of the difference. It does not wait."""
        for weights, averages in self._pairs():
            for weight, average in zip(weights, averages):
                weight = weight.as_nd_ndarray().astype(average.dtype, copy=False)
                # (1 - rate) * average + rate * weight, in one operation
                mx.nd.sgd_update(average, weight, lr=rate, wd=1.0, rescale_grad=-1.0, out=average)

    def put(self) -> None:
        """Set the weights of the network to the average, and remember their values."""
        self.take_back()
        with autograd.pause():
            for weights, averages in self._pairs():
                for weight, average in zip(weights, averages):
                    weight = weight.as_nd_ndarray()
                    self._before.append((weight, weight.copy()))
                    average.copyto(weight)

    def take_back(self) -> None:
        """Set the weights to their values before `put`, if there was one."""
        before, self._before = self._before, []
        for weight, value in before:
            value.copyto(weight)

    def keep(self) -> None:
        """Let the network keep the weights that `put` has set."""
        self._before = []

    def arrays(self) -> Dict[str, Array]:
        """Return the average on the first device by the parameters' structural names, without waiting."""
        self._follow()
        return {name: self._view(param, 0) for name, param in named_params(self.net).items() if param in self._places}

    def restore(self, arrays: Dict[str, Any]) -> None:
        """Set the average to the values that `arrays` has returned, on all devices."""
        self._follow()
        for name, param in named_params(self.net).items():
            if param in self._places and name in arrays:
                for replica in range(len(param.list_data())):
                    view = self._view(param, replica)
                    view[:] = mx.nd.array(arrays[name], ctx=view.context, dtype=view.dtype)

    def _pairs(self) -> List[Tuple[List[Array], List[Array]]]:
        """Return the arrays of the weights on each device, and those of their average."""
        self._follow()
        return [(_weights_of(key), averages) for key, averages in self._averages.items()]

    def _follow(self) -> None:
        """Take over parameters that have moved into a bucket, or got values, since the last call."""
        if self._num_moves == MOVES.count:
            return
        self._num_moves = MOVES.count
        former = {param: [self._view(param, i) for i in range(len(param._data))] for param in self._places}
        places: Dict[gluon.Parameter, Tuple[_Key, int]] = {}
        for param in named_params(self.net).values():
            if param._data is not None and param._differentiable and np.issubdtype(np.dtype(param.dtype), np.floating):
                found = place_of(param)
                places[param] = (param, 0) if found is None else (found.bucket, found.begin)
        self._places = places
        with autograd.pause():
            keys = dict.fromkeys(key for key, _ in places.values())
            self._averages = {key: [_copy(one) for one in _weights_of(key)] for key in keys}
            for param, values in former.items():
                for replica, value in enumerate(values):
                    value.copyto(self._view(param, replica))

    def _view(self, param: gluon.Parameter, replica: int) -> Array:
        key, begin = self._places[param]
        flat = self._averages[key][replica]
        return flat if key is param else flat[begin : begin + int(np.prod(param.shape))].reshape(param.shape)


def _weights_of(key: _Key) -> List[Array]:
    weights: List[Array] = key._data if isinstance(key, gluon.Parameter) else key.weights
    return weights


def _copy(weight: Array) -> Array:
    dtype = np.promote_types(np.dtype(weight.dtype), np.float32)
    return weight.as_nd_ndarray().astype(dtype, copy=True)
