"""Operators in exported files: those that MXNet's converter lacks or converts wrongly."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn, rnn

from .test_export import initialized, run_onnx, sequence

ROWS = (4, 6)
IMAGES = (2, 4, 6, 5)


class Calls(nn.HybridBlock):
    """Calls a function of F, its layers and its inputs."""

    def __init__(self, function, *layers):
        super().__init__()
        self._function = function
        self._layers = layers
        for layer in layers:
            self.register_child(layer)

    def hybrid_forward(self, F, *arrays):
        return self._function(F, *self._layers, *arrays)


def drawn(shape, number=0):
    return np.random.RandomState(number).uniform(-1, 1, shape).astype("float32")


def values(outputs):
    flat = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [array.asnumpy() for array in flat]


def agrees_in_onnx(tmp_path, net, *shapes):
    """Export for one batch, and run the file for another one, which has one example more."""
    pytest.importorskip("onnx")
    as_array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    mgpu.export(net, tmp_path / "net.onnx", tuple(drawn(shape) for shape in shapes))
    others = [drawn((shape[0] + 1, *shape[1:]), 1) for shape in shapes]
    found, expected = run_onnx(tmp_path / "net.onnx", *others), values(net(*map(as_array, others)))
    assert [array.shape for array in found] == [array.shape for array in expected]
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda F, x: (1 - x) / 2 + 3 / (x + 4) + 2**x, ROWS),
        (lambda F, x: F.broadcast_add(x > 0, (x <= 0.5) + (x != 0) * (x == x)), ROWS),
        (lambda F, x: F.softsign(x), ROWS),
        (lambda F, x: F.broadcast_add(F.mean(x, axis=1, exclude=True), F.sum(x).reshape((1, 1))), IMAGES),
        (lambda F, x: F.max(x, axis=(1, -1), keepdims=True), IMAGES),
        (lambda F, x: F.one_hot(F.floor(5 * x), depth=3, on_value=2), ROWS),
        (lambda F, x: F.softmax(300 * x, axis=1), IMAGES),
        (lambda F, x: F.softmax(x, F.cast(6 * F.relu(F.max(x, axis=1) - 0.9), "int32"), axis=1, use_length=True), ROWS),
        *[(lambda F, x, mode=mode: F.L2Normalization(x, mode=mode), IMAGES) for mode in ("instance", "channel", "spatial")],
    ],
)
def test_functions_in_onnx(tmp_path, capsys, function, shape):
    """MXNet converts `1 - x` by the name of its node, and prints that name."""
    agrees_in_onnx(tmp_path, Calls(function), shape)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "function",
    [
        lambda F, x: 1 - x + 2 / (x + 3) + 2**x,
        lambda F, x: F.np.exp(x) + (x == x) + F.np.arange(6),
        lambda F, x: x - x.mean(axis=1, keepdims=True) / F.np.square(x).max(),
        lambda F, x: F.np.dot(x, x.T) + F.np.matmul(x, x.reshape(-1, 6).T),
        lambda F, x: (F.np.argmax(x, axis=1), x.max(), x.sum(), x > 0),
        lambda F, x: F.np.matmul(x, x.T),
    ],
)
def test_functions_of_np_arrays_in_onnx(tmp_path, function):
    """Also the shape () of the sum of all elements, which legacy arrays lack, and outputs with names of np's operators."""
    with mx.util.np_shape(True), mx.util.np_array(True):
        agrees_in_onnx(tmp_path, Calls(function), ROWS)


def test_batch_norm_along_another_axis(tmp_path):
    net = nn.HybridSequential()
    net.add(nn.Dense(3, flatten=False), nn.BatchNorm(axis=-1, beta_initializer="ones"), nn.BatchNorm(axis=2))
    agrees_in_onnx(tmp_path, initialized(net), (2, 4, 5))


def test_layers_whose_parameters_mxnet_s_converter_takes_as_they_are(tmp_path):
    net = initialized(sequence(nn.BatchNorm(axis=-1, in_channels=6, scale=False), nn.PReLU(in_channels=6)))
    net[0].gamma.set_data(2 * mx.nd.ones(6))
    net.hybridize()  # in a graph, MXNet counts this gamma as 1
    agrees_in_onnx(tmp_path, net, ROWS)
    agrees_in_onnx(tmp_path, initialized(nn.PReLU(in_channels=4)), IMAGES)
    agrees_in_onnx(tmp_path, initialized(Calls(lambda F, layer, x: layer(9 * x), nn.Embedding(3, 2))), ROWS)


@pytest.mark.parametrize(
    "layers", [(nn.Dense(6, activation="tanh"),), (rnn.LSTM(6, 2), nn.Dense(6, flatten=False)), (rnn.GRU(3, bidirectional=True),)]
)
def test_a_layer_that_is_called_twice(tmp_path, layers):
    """MXNet gives its nodes the same names. Its converter then finds the outputs of the first call."""
    shape = ROWS if len(layers) == 1 and isinstance(layers[0], nn.Dense) else (4, 2, 6)

    def run(F, *arguments):
        found = arguments[-1]
        for layer in 2 * arguments[:-1]:
            found = layer(found)
        return found, arguments[0](arguments[-1])

    agrees_in_onnx(tmp_path, initialized(Calls(run, *layers)), shape)


def test_outputs_that_repeat_or_are_inputs(tmp_path):
    agrees_in_onnx(tmp_path, Calls(lambda F, x, y: [x * 2] * 2 + [y, x, y]), ROWS, ROWS)
    agrees_in_onnx(tmp_path, Calls(lambda F, x: x), ROWS)
