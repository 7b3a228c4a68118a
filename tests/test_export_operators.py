"""Operators in exported files: those that MXNet's converter lacks or converts wrongly."""

import ast
import inspect
import textwrap
from functools import reduce
from importlib import import_module

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.exporters.onnx_graph import _complete
from gluon_mgpu.exporters.onnx_operators import OPERATORS
from gluon_mgpu.exporters.sampled_graph import parsed
from mxnet.gluon import nn, rnn

from .conftest import stack
from .test_export import initialized, run_onnx

pytestmark = pytest.mark.mxnet1("export")

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
    net = initialized(stack(nn.BatchNorm(axis=-1, in_channels=6, scale=False), nn.PReLU(in_channels=6)))
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


# Attributes: an operator that is made without one has MXNet's default, and its converter may assume another


def registry():
    """MXNet's converters by the names of their operators, without those that we replace."""
    pytest.importorskip("onnx")
    found = import_module("mxnet.onnx.mx2onnx._export_onnx").MXNetGraph.registry_
    return {name: convert for name, convert in {**found[12], **found[13]}.items() if name not in OPERATORS}


def assumed(convert):
    """The attributes that a converter reads, with the text of the default that it assumes."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(convert)))):
        function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if function == "attrs.get":
            yield node.args[0].value, ast.unparse(node.args[1]) if len(node.args) > 1 else "None"
        elif function == "get_boolean_attribute_value":
            yield node.args[1].value, "False"


def are_same(*texts):
    """Whether two defaults are, such as "0.001" and "0.00100000005", or "'False'" and "False"."""
    one, other = (parsed(parsed(text)) for text in texts)
    return one == other or (isinstance(one, float) and abs(one - other) < 1e-6)


WRONG = {  # of MXNet's own converters
    *[("Deconvolution", "no_bias"), ("FullyConnected", "flatten"), ("LRN", "knorm"), ("_contrib_box_nms", "force_suppress")],
    *[("_contrib_BilinearResize2D", name) for name in ("height", "width")],
    *[("Crop", "h_w"), ("Crop", "offset"), ("_ones", "dtype"), ("_zeros", "dtype")],
    *[("_maximum_scalar", "scalar"), ("_minimum_scalar", "scalar"), ("_split_v2", "axis")],
}


@pytest.mark.skipif(not hasattr(ast, "unparse"), reason="Python 3.8 cannot write code")
def test_every_default_that_a_converter_would_assume_otherwise_is_written():
    found = set()
    for operator, convert in registry().items():
        node = {"op": operator}
        try:
            _complete(node)
        except mx.MXNetError:  # a name of MXNet 2
            continue
        found |= {(operator, name) for name, value in assumed(convert) if not are_same(value, node["attrs"].get(name, value))}
    assert found == WRONG


KERNEL = {"kernel": (3, 3), "num_filter": 4}
POOL = {"kernel": (3, 2), "pool_type": "avg"}
CASES = [  # operator, shapes of its inputs, attributes of each trial, inputs of small whole numbers
    ("LRN", [(2, 8, 5, 4)], [{"nsize": 5}, {"nsize": 3, "alpha": 0.5, "beta": 0.5, "knorm": 1.5}]),
    ("Convolution", [IMAGES, (4, 4, 3, 3), (4,)], [KERNEL, {**KERNEL, "stride": (2, 1), "pad": (1, 2), "dilate": (1, 2)}]),
    ("Deconvolution", [IMAGES, (4, 4, 3, 3)], [KERNEL, {**KERNEL, "stride": (2, 2), "pad": (1, 0), "adj": (1, 0), "no_bias": 1}]),
    ("FullyConnected", [(4, 2, 3), (5, 6), (5,)], [{"num_hidden": 5}]),
    ("FullyConnected", [(4, 2, 3), (5, 3)], [{"num_hidden": 5, "flatten": 0, "no_bias": 1}]),
    (
        "Pooling",
        [IMAGES],
        [POOL, {**POOL, "stride": (2, 1), "pad": (1, 1), "count_include_pad": 0, "pooling_convention": "full"}],
    ),
    ("Pooling", [IMAGES], [{"global_pool": 1}, {"kernel": (2, 2), "global_pool": 0}]),
    ("InstanceNorm", [IMAGES, (4,), (4,)], [{}, {"eps": 0.5}]),
    ("LayerNorm", [ROWS, (6,), (6,)], [{}, {"eps": 0.5, "axis": -1}]),
    ("GroupNorm", [IMAGES, (2,), (2,)], [{"num_groups": 2}, {"num_groups": 2, "eps": 0.5}]),
    ("L2Normalization", [IMAGES], [{}, {"mode": "spatial", "eps": 0.5}]),
    ("LeakyReLU", [IMAGES], [{}, {"act_type": "elu", "slope": 0.5}]),
    ("softmax", [IMAGES], [{}, {"axis": 1, "temperature": 2.0}]),
    ("log_softmax", [IMAGES], [{}, {"axis": 1}]),
    ("batch_dot", [(2, 4, 6), (2, 6, 3)], [{}, {"transpose_a": 0, "transpose_b": False}]),
    ("dot", [ROWS, (6, 3)], [{}, {"transpose_b": 0}]),
    ("linalg.gemm2", [(2, 4, 6), (2, 6, 3)], [{}, {"alpha": 2.0, "axis": -2}]),
    ("contrib.BilinearResize2D", [IMAGES], [{"height": 7}, {"scale_height": 2.0, "scale_width": 3.0}]),
    ("_internal._maximum_scalar", [ROWS], [{}, {"scalar": 0.5}]),
    ("_internal._plus_scalar", [ROWS], [{}, {"scalar": 0.5}]),
    ("_internal._split_v2", [ROWS], [{"indices": (0, 2)}, {"indices": (), "sections": 2, "axis": 1, "squeeze_axis": 0}]),
    ("SliceChannel", [IMAGES], [{"num_outputs": 2}, {"num_outputs": 4, "axis": 1, "squeeze_axis": 1}]),
    ("slice_like", [ROWS, (2, 3)], [{}, {"axes": (1,)}]),
    ("sum", [IMAGES], [{}, {"axis": (1, 2), "keepdims": 1}]),
    ("argmax", [ROWS], [{"axis": 1}, {"axis": 1, "keepdims": 1}]),
    ("topk", [ROWS], [{}, {"k": 2, "axis": 1, "ret_typ": "value", "is_ascend": 1}]),
    ("hard_sigmoid", [ROWS], [{}, {"alpha": 0.5, "beta": 0.1}]),
    ("repeat", [ROWS], [{"repeats": 2}, {"repeats": 2, "axis": 1}]),
    ("take", [(5, 6), (4,)], [{}, {"axis": 1, "mode": "wrap"}], 1),
    ("Embedding", [ROWS, (3, 4)], [{"input_dim": 3, "output_dim": 4}], 0),
    ("one_hot", [ROWS], [{"depth": 3}, {"depth": 3, "on_value": 2.0, "off_value": -1.0}], 0),
    ("SequenceMask", [(5, 4, 3), (4,)], [{"use_sequence_length": 1}, {"use_sequence_length": 1, "value": 2.0}], 1),
    (
        "contrib.ROIAlign",
        [IMAGES, (2, 5)],
        [{"pooled_size": (2, 2), "spatial_scale": 0.5, **one} for one in ({}, {"sample_ratio": 2})],
        1,
    ),
]
CASES = [(*case[:2], attributes, [*case[3:]]) for case in CASES for attributes in case[2]]


@pytest.mark.parametrize(
    "operator, shapes, attributes, whole", CASES, ids=[f"{name}-{attributes}" for name, _, attributes, _ in CASES]
)
def test_attributes_at_their_defaults_and_others(tmp_path, operator, shapes, attributes, whole):
    """The sample is of zeros, which most wrong files compute right."""
    pytest.importorskip("onnx")

    def function(F, *arrays):
        found = reduce(getattr, operator.split("."), F)(*arrays, **attributes)
        return list(found) if attributes.get("num_outputs") or "indices" in attributes else found

    net = Calls(function)
    mgpu.export(net, tmp_path / "net.onnx", tuple(np.zeros(shape, "float32") for shape in shapes))
    for number in range(2):
        arrays = [drawn(shape, number) for shape in shapes]
        arrays = [np.floor(1.5 * (array + 1)) if at in whole else array for at, array in enumerate(arrays)]
        for ours, theirs in zip(run_onnx(tmp_path / "net.onnx", *arrays), values(net(*map(mx.nd.array, arrays)))):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
