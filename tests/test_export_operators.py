"""Operators in exported files: those that MXNet's converter lacks or converts wrongly, and their counterparts in PyTorch."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from mxnet import gluon
from mxnet.gluon import contrib, nn, rnn

from .conftest import assert_house_style
from .test_export import initialized, run_onnx

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


class Steps(nn.HybridBlock):
    """Five steps of a cell."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def hybrid_forward(self, F, x):
        self.cell.reset()
        return self.cell.unroll(5, x, layout="NTC", merge_outputs=True)[0]


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
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda F, x: (1 - x) / 2 + 3 / (x + 4) + 2**x, ROWS),
        (lambda F, x: F.broadcast_add(x > 0, (x <= 0.5) + (x != 0) * (x == x)), ROWS),
        (lambda F, x: F.where(x > F.zeros_like(x), F.rsqrt(F.abs(x) + 1), F.log1p(F.abs(x)) + F.expm1(x)), ROWS),
        (lambda F, x: F.softmin(F.softsign(x)), ROWS),
        (lambda F, x: F.pick(x, F.abs(x).sum(axis=1)), ROWS),
        (lambda F, x: F.pick(x, F.abs(x).sum(axis=1, keepdims=True), keepdims=True), ROWS),
        (lambda F, x: F.flip(x, axis=(1, 2)), IMAGES),
        (lambda F, x: F.broadcast_add(F.mean(x, axis=1, exclude=True), F.sum(x).reshape((1, 1))), IMAGES),
        (lambda F, x: F.max(x, axis=(1, -1), keepdims=True), IMAGES),
        (lambda F, x: F.LRN(x, nsize=3, alpha=0.5), IMAGES),
        *[(lambda F, x, mode=mode: F.L2Normalization(x, mode=mode), IMAGES) for mode in ("instance", "channel", "spatial")],
    ],
)
def test_functions_in_onnx(tmp_path, capsys, function, shape):
    """MXNet converts `1 - x` by the name of its node, and prints that name; and LRN with another default."""
    agrees_in_onnx(tmp_path, Calls(function), shape)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "function",
    [
        lambda F, x: 1 - x + 2 / (x + 3) + 2**x,
        lambda F, x: F.np.where(x > 0, x, F.np.exp(x)) + (x == x) + F.np.arange(6),
        lambda F, x: (x - x.mean(axis=1, keepdims=True)) / (F.np.var(x, axis=1, keepdims=True) + F.np.std(x, axis=-1).max()),
        lambda F, x: F.np.dot(x, x.T) + F.np.matmul(x, x.reshape(-1, 6).T),
        lambda F, x: (F.np.argmax(x, axis=1), x.max(), F.np.ones_like(x) + x.sum()),
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


@pytest.mark.parametrize(
    "layers",
    [(nn.Dense(6, activation="tanh"),), (rnn.LSTM(6, 2), nn.Dense(6, flatten=False)), (rnn.GRU(3, bidirectional=True),)],
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


def test_outputs_in_bfloat16_are_refused(tmp_path, monkeypatch):
    """MXNet's `amp.init` changes operators for the whole process, and the check saw differences of 1.0."""
    halves = np.zeros((2, 3), [("bfloat16", "<u2")])  # as `asnumpy` returns them
    monkeypatch.setattr("gluon_mgpu.exporters.graph._predicted", lambda *_: [halves])
    with pytest.raises(TrainerError, match=r"got outputs in bfloat16; expected float32.*amp.init") as caught:
        mgpu.export(initialized(nn.Dense(3)), tmp_path / "net", drawn(ROWS))
    assert_house_style(caught.value)


def test_the_error_shows_shapes_that_differ(tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    monkeypatch.setattr("gluon_mgpu.exporters.export.run_onnx", lambda *_: [np.ones((2, 4))])
    with pytest.raises(TrainerError, match=r"shapes \(2, 4\); expected the network's, \(4, 6\)") as caught:
        mgpu.export(Calls(lambda F, x: x * 2), tmp_path / "net.onnx", drawn(ROWS))
    assert_house_style(caught.value)


def attention(F, x):
    heads = x.reshape((0, 0, 2, -1)).transpose((0, 2, 1, 3)).reshape((-3, 0, 0))
    found = F.batch_dot(F.softmax(F.batch_dot(heads, heads, transpose_b=True), temperature=3.0), heads)
    return found.reshape((-4, -1, 2, 0, 0)).transpose((0, 2, 1, 3)).reshape((0, 0, -3))


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (Calls(attention), (2, 5, 6)),
        (Calls(lambda F, x: F.take(x, F.argmax(x, axis=1), axis=1) + F.one_hot(F.argmax(x, axis=1), 4)), (4, 3)),
        (Calls(lambda F, x: F.slice(x, begin=(0, 1), end=(None, -1)) * F.pick(x, x.sum(axis=1), keepdims=True)), ROWS),
        (Calls(lambda F, x: F.where(x > 0, F.maximum(x, 0.3), F.broadcast_lesser(x, x * 2)) + (x <= 0.5)), ROWS),
        (Calls(lambda F, x: F.dot(F.L2Normalization(x), x, transpose_b=True) + F.sum(x, axis=1, exclude=True).sum()), ROWS),
        (Calls(lambda F, x: F.LRN(F.pad(x, "edge", (0, 0, 0, 0, 1, 2, 0, 1)), nsize=3, alpha=0.5)), IMAGES),
        (Calls(lambda F, x: F.SequenceMask(x, F.ones_like(x).sum(axis=(0, 2)) / 4, use_sequence_length=True)), (4, 3, 2)),
        (Calls(lambda F, x: F.SequenceLast(F.UpSampling(x, scale=2, sample_type="nearest"), axis=1)), IMAGES),
        (nn.GroupNorm(2, beta_initializer=mx.init.Uniform()), IMAGES),
        (nn.LayerNorm(axis=1, beta_initializer=mx.init.Uniform()), IMAGES),
        (nn.BatchNorm(axis=-1, beta_initializer=mx.init.Uniform()), (4, 3, 2)),
        (rnn.LSTM(5, 2, projection_size=3, bidirectional=True), (4, 2, 3)),
        *[
            (Steps(cell), (2, 5, 3))
            for cell in (rnn.ZoneoutCell(rnn.LSTMCell(4), 0.2), rnn.GRUCell(4), contrib.rnn.LSTMPCell(4, 2))
        ],
    ],
)
def test_operators_in_pytorch(tmp_path, net, shape):
    """The check of a state dict runs the graph, with its first states of zeros."""
    pytest.importorskip("torch")
    exported = mgpu.export(initialized(net), tmp_path / "net.pt", drawn(shape))
    assert exported.difference is not None, exported.unchecked
    assert exported.difference < 1e-5


def test_pytorch_loads_a_projected_lstm(tmp_path):
    torch = pytest.importorskip("torch")
    net, X = initialized(rnn.LSTM(5, 2, projection_size=3)), drawn((4, 2, 3))
    mgpu.export(net, tmp_path / "net.pt", X)
    twin = torch.nn.LSTM(3, 5, 2, proj_size=3)
    twin.load_state_dict(torch.load(tmp_path / "net.pt"))
    np.testing.assert_allclose(twin(torch.from_numpy(X))[0].detach().numpy(), net(mx.nd.array(X)).asnumpy(), rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_classifier_in_onnx(tmp_path):
    """With labels as a second input."""
    pytest.importorskip("onnx")
    net = initialized(Calls(lambda F, dense, loss, x, y: loss(dense(x), y), nn.Dense(4), gluon.loss.SoftmaxCrossEntropyLoss()))
    assert mgpu.export(net, tmp_path / "net.onnx", (drawn(ROWS), np.array([0, 3, 1, 2], "float32"))).difference < 1e-5
