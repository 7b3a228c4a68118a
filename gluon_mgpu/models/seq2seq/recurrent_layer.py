"""One recurrent layer, computed as one operator or step by step, with the same parameters."""

from __future__ import annotations

from typing import Any, Iterable, List, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd

from ...checks import one_of
from ...nested import Array
from ...runtime.openmp_threads import num_cores
from ..hybrid_block import HybridBlock, named, new_parameter

NUM_GATES = {"gru": 3, "lstm": 4}
NUM_STATES = {"gru": 1, "lstm": 2}  # arrays of shape (N, hidden_size): h, and c of the LSTM
RECURRENCES = ("auto", "fused", "steps")
_MANY = 3  # CPU contexts at once, for which steps, which take nearly twice as long, are faster than turns


class Recurrence(HybridBlock):
    """A GRU or LSTM layer in one direction, steps first.

    ```
    fused:   inputs ─────────────────────────► one operator ─► outputs     faster; but CPU contexts take turns
    steps:   inputs ─► i2h of all steps at once ─► step ─► step ─► step    CPU contexts work in parallel
    ```

    MXNet's operator requests a resource that all CPU contexts share. Two contexts can still overlap: one computes its output
    layer while the other runs the operator. `"auto"` chooses `"steps"` if three or more CPU contexts hold the parameters and the
    machine has as many cores. The parameters are those of Gluon's layers and cells, so either mode can continue the other's
    training.

    Parameters
    ----------
    cell : str
        `"gru"` or `"lstm"`.
    hidden_size, input_size : int
    recurrence : str
        `"auto"`, `"fused"` or `"steps"`.

    Raises
    ------
    TrainerError
        An option is invalid.

    Source: gates and their order are those of `mxnet.gluon.rnn.GRUCell` and `LSTMCell`.
    """

    def __init__(self, cell: str, hidden_size: int, input_size: int, recurrence: str = "auto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        one_of("Recurrence", "cell", cell, tuple(NUM_GATES), advice="Pass one of these.")
        one_of("Recurrence", "recurrence", recurrence, RECURRENCES, advice="Pass one of these.")
        self.hidden_size, self.num_states = hidden_size, NUM_STATES[cell]
        self._cell, self._recurrence, self._num_cores = cell, recurrence, num_cores()
        width = NUM_GATES[cell] * hidden_size
        with named(self):
            self.i2h_weight = new_parameter(self, "i2h_weight", shape=(width, input_size))
            self.h2h_weight = new_parameter(self, "h2h_weight", shape=(width, hidden_size), init=_Orthogonal())
            self.i2h_bias = new_parameter(self, "i2h_bias", shape=(width,), init="zeros")
            self.h2h_bias = new_parameter(self, "h2h_bias", shape=(width,), init="zeros")
            self.cell = _GRUStep(hidden_size) if cell == "gru" else _LSTMStep(hidden_size)

    def forward(self, inputs: Array, *states: Array) -> Tuple[Array, ...]:
        """Return the outputs of all steps, shape (T, N, hidden_size), and the states after the last.

        Parameters
        ----------
        inputs : NDArray, shape (T, N, input_size)
        states : NDArray, shapes (N, hidden_size)
            One of a GRU; two of an LSTM.
        """
        if isinstance(inputs, mx.sym.Symbol) or self.is_fused(inputs.context):
            return tuple(super().forward(inputs, *states))
        names = ("i2h_weight", "i2h_bias", "h2h_weight", "h2h_bias")
        i2h_weight, i2h_bias, *h2h = (getattr(self, name).data(inputs.context).as_nd_ndarray() for name in names)
        # of all steps at once
        projected = mx.nd.FullyConnected(inputs, i2h_weight, i2h_bias, num_hidden=i2h_bias.size, flatten=False)
        outputs: List[Array] = []
        for one in _each_step(projected):
            states = tuple(self.cell(one, *h2h, *states))
            outputs.append(states[0])
        return (mx.nd.stack(*outputs, axis=0), *states)

    def compute(self, F: Any, inputs: Any, *states: Any, **params: Any) -> Tuple[Any, ...]:
        """Return the same by one operator for all steps."""
        names = ("i2h_weight", "h2h_weight", "i2h_bias", "h2h_bias")
        # MXNet joins rows ten times as fast as single numbers.
        rows = [F.reshape(params[name].as_nd_ndarray(), shape=(-1, self.hidden_size)) for name in names]
        outputs, *after = F.RNN(
            inputs,
            F.reshape(F.concat(*rows, dim=0), shape=(-1,)),
            *(F.expand_dims(state, axis=0) for state in states),
            state_size=self.hidden_size,
            num_layers=1,
            mode=self._cell,
            state_outputs=True,
        )
        return (outputs, *(F.reshape(state, shape=(-3, 0)) for state in after))

    def is_fused(self, context: Context) -> bool:
        """Return whether one operator makes all steps on this device."""
        if self._recurrence != "auto":
            return self._recurrence == "fused"
        on_cpu = [one for one in self.i2h_weight.list_ctx() if one.device_type == "cpu"]
        return context.device_type != "cpu" or min(len(on_cpu), self._num_cores) < _MANY


@mx.init.register
class _Orthogonal(mx.init.Initializer):  # type: ignore[misc]
    """Each gate's matrix begins orthogonal, so that no direction of the state fades or grows from step to step.

    Source: Saxe, McClelland, Ganguli, "Exact solutions to the nonlinear dynamics of learning", 2014.
    """

    def _init_weight(self, _: Any, array: Array) -> None:
        size = array.shape[1]
        gates = mx.nd.random.normal(shape=(array.shape[0] // size, size, size)).asnumpy()
        for gate, (q, r) in enumerate(map(np.linalg.qr, gates)):
            array[gate * size : (gate + 1) * size] = q * np.sign(np.diag(r))


class _GRUStep(HybridBlock):
    def __init__(self, hidden_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._size = hidden_size

    def compute(self, F: Any, projected: Any, weight: Any, bias: Any, h: Any) -> Tuple[Any]:
        recurrent = F.FullyConnected(h, weight, bias, num_hidden=3 * self._size)
        i2h_gates, i2h_new = _cut(F, projected, 2 * self._size)
        h2h_gates, h2h_new = _cut(F, recurrent, 2 * self._size)
        reset, update = F.split(F.sigmoid(i2h_gates + h2h_gates), num_outputs=2, axis=1)
        new = F.tanh(i2h_new + reset * h2h_new)
        return (new + update * (h - new),)


class _LSTMStep(HybridBlock):
    def __init__(self, hidden_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._size = hidden_size

    def compute(self, F: Any, projected: Any, weight: Any, bias: Any, h: Any, c: Any) -> Tuple[Any, Any]:
        gates = projected + F.FullyConnected(h, weight, bias, num_hidden=4 * self._size)
        i, f, new, o = F.split(gates, num_outputs=4, axis=1)
        c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(new)
        return F.sigmoid(o) * F.tanh(c), c


def can_compile(layers: Iterable[Recurrence], inputs: Any) -> bool:
    """Return whether these layers can be part of a compiled graph: they are in one now, or make all steps by one operator.

    Not for a gradient of prediction: where several of MXNet's recurrent operators are in one graph, those of the last training
    come out of a static one (`tests/test_seq2seq.py`).
    """
    if isinstance(inputs, mx.sym.Symbol):
        return True
    differentiates_prediction = autograd.is_recording() and not autograd.is_training()
    return not differentiates_prediction and all(layer.is_fused(inputs.context) for layer in layers)


def _cut(F: Any, array: Any, width: int) -> Tuple[Any, Any]:
    return F.slice_axis(array, axis=1, begin=0, end=width), F.slice_axis(array, axis=1, begin=width, end=None)


def _each_step(array: Array) -> List[Array]:
    """Return the items along the first axis, cut in one operation: slices one by one would each get a gradient of full size."""
    if array.shape[0] == 1:
        return [array.reshape(array.shape[1:])]
    return list(mx.nd.split(array, num_outputs=array.shape[0], axis=0, squeeze_axis=True))
