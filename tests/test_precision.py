"""set_precision: which operators compute in which type, what stays float32, and that training is as with float32."""

import os
import subprocess
import sys

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import DeviceError, TrainerError
from gluon_mgpu.mxnet_internals.blocks import traced
from gluon_mgpu.trainer.precision import can_compute_bf16, precision_of, reduce_precision, set_precision
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import HYBRIDIZE, LOSS, initialized, largest_difference, ready, sequential, small_batches, small_net, weights_of
from .worlds import devices as devices

pytestmark = [
    pytest.mark.mxnet1("bf16 and fp16"),
    pytest.mark.skipif(not can_compute_bf16(), reason="MXNet cannot compute in bfloat16 on this processor"),
]
EPS = 2.0**-8  # of bfloat16: half a unit in the last of its 8 digits


def bf16(values):
    """NumPy numbers rounded to bfloat16, to the nearest, ties to even."""
    bits = np.asarray(values, "float32").view("uint32").astype("uint64")
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype("uint32")).view("float32")


def as_array(values):
    return (mx.np.array if mx.util.is_np_array() else mx.nd.array)(values, dtype=values.dtype)


def smooth_net(ctx, hybridize=None, normalize=False):
    """A convolutional network without pooling, of which rounding may change the largest one of a window."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, kernel_size=3, padding=1))
    if normalize:
        net.add(nn.BatchNorm())
    net.add(nn.Activation("relu"), nn.Dense(8, activation="tanh"), nn.Dense(3))
    return ready(net, ctx, hybridize)


def distance(left, right):
    """The 2-norm of the difference of two lists of arrays."""
    return float(np.sqrt(sum(np.square(a.astype("float64") - b).sum() for a, b in zip(left, right))))


def layers():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, kernel_size=3), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D(2), nn.Flatten(), nn.Dropout(0.5))
    net.add(nn.Dense(5), nn.Dense(3))
    net.initialize(ctx=mx.cpu())
    net(as_array(np.ones((2, 1, 6, 6), "float32")))
    return net


def types_of(graph):
    """The type that each operator of a graph gives, in the graph's order; casts and copies left out."""
    inner = graph.get_internals()
    told = inner.infer_type(**dict.fromkeys(graph.list_inputs(), "float32"))[1]
    names = {np.dtype("float32"): "fp32", np.dtype("float16"): "fp16", mx.contrib.amp.amp.bfloat16: "bf16"}
    params = {*graph.list_inputs()}
    found = zip(inner.list_outputs(), told)
    return [names[np.dtype(one)] for name, one in found if "cast" not in name and "copy" not in name and name not in params]


# Operators


@pytest.mark.parametrize("precision, flatten, dropout", [("bf16", "fp32", "fp32"), ("fp16", "fp16", "fp16")])
def test_each_layer_gives_the_type_of_the_lists(precision, flatten, dropout, arrays):
    net = layers()
    inputs, graph = traced(net, as_array(np.ones((2, 1, 6, 6), "float32")))
    assert types_of(graph) == ["fp32"] * 8
    found = types_of(reduce_precision(graph, precision, {}))
    #                conv       batchnorm  relu       pool                       dense      dense
    assert found == [precision, precision, precision, precision, flatten, dropout, precision, precision]


def join(F, *parts):
    return F.np.concatenate(parts, axis=1) if mx.util.is_np_array() else F.concat(*parts, dim=1)


@pytest.mark.parametrize(
    "combined, kind",
    [
        (lambda F, low, also_low, full: low + also_low, "bf16"),
        (lambda F, low, also_low, full: low * also_low, "bf16"),
        (lambda F, low, also_low, full: join(F, low, also_low), "bf16"),
        (lambda F, low, also_low, full: (F.npx if mx.util.is_np_array() else F).relu(low), "bf16"),
        (lambda F, low, also_low, full: low - full, "fp32"),
        (lambda F, low, also_low, full: full * low, "fp32"),
        (lambda F, low, also_low, full: join(F, low, full), "fp32"),
        (lambda F, low, also_low, full: low / also_low, "fp32"),
        (lambda F, low, also_low, full: low + 1, "fp32"),
    ],
)
def test_what_is_combined_has_the_wider_type(combined, kind, arrays):
    class Combined(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense, self.relu = nn.Dense(4, bias_initializer="ones"), nn.LeakyReLU(0.5)

        def hybrid_forward(self, F, x):
            low = self.dense(x)
            return combined(F, low, self.relu(low), F.npx.softmax(x) if mx.util.is_np_array() else F.softmax(x))

    net = initialized(Combined(), mx.cpu())
    x = as_array(np.linspace(-1, 1, 8, dtype="float32").reshape(2, 4))
    full = net(x).asnumpy()
    net.hybridize()
    set_precision(net, "bf16")
    out = net(x)
    assert out.dtype == np.float32
    assert np.abs(out.asnumpy() - full).max() <= 4 * EPS * np.abs(full).max()
    assert types_of(traced(net, x)[1])[-1] == kind


def test_a_fully_connected_layer_is_that_of_rounded_numbers(arrays):
    rng = np.random.RandomState(0)
    x, w, b = (rng.uniform(-1, 1, shape).astype("float32") for shape in ((16, 64), (8, 64), (8,)))
    net = initialized(nn.Dense(8, in_units=64), mx.cpu())
    net.weight.set_data(as_array(w))
    net.bias.set_data(as_array(b))
    expected = bf16(x).astype("float64") @ bf16(w).astype("float64").T + bf16(b)
    set_precision(net, "bf16")
    out = net(as_array(x)).asnumpy()
    assert np.array_equal(out, bf16(out))
    assert (np.abs(out - expected) <= 1.01 * EPS * np.maximum(np.abs(expected), 1e-2)).all()
    assert np.abs(expected - (x @ w.T + b)).max() > EPS / 4  # the oracle differs from float32


@pytest.mark.parametrize("kind", ["softsign", "prelu", "gelu", "softrelu", "tanh", "dot", "gru", "embedding"])
def test_what_bfloat16_cannot_do_is_done_in_float32(kind):
    """MXNet's own lists fail on several of these, on a CPU."""

    class Products(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return F.batch_dot(F.expand_dims(x, 1), F.expand_dims(x, 2)).reshape((0, -1)) + F.dot(x, F.ones((4, 1)))

    after = {
        "softsign": lambda: nn.Activation("softsign"),
        "prelu": nn.PReLU,
        "gelu": nn.GELU,
        "softrelu": lambda: nn.Activation("softrelu"),
        "tanh": lambda: nn.Activation("tanh"),
        "dot": Products,
        "gru": lambda: nn.HybridLambda(lambda F, x: F.reshape(x, (4, 2, 3))),
        "embedding": nn.Flatten,
    }
    for hybridize in (HYBRIDIZE["plain"], HYBRIDIZE["static"]):
        net = nn.HybridSequential()
        if kind == "embedding":
            net.add(nn.Embedding(300, 4))
        net.add(nn.Dense(6 if kind == "gru" else 4, activation=None, flatten=kind != "gru"), after[kind]())
        if kind == "gru":
            net.add(gluon.rnn.GRU(5))
        net.initialize(mx.init.Xavier(), ctx=mx.cpu())
        x = mx.nd.random.uniform(-1, 1, (4, 4)) if kind != "embedding" else mx.nd.array([[257], [299]], dtype="int32")
        full = net(x).asnumpy()
        if hybridize is not None:
            net.hybridize(**hybridize)
        set_precision(net, "bf16")
        with autograd.record():
            out = net(x)
        out.backward()
        assert np.abs(out.asnumpy() - full).max() <= 4 * EPS * max(1.0, np.abs(full).max())
        assert np.isfinite(net.collect_params(".*dense.*weight").values().__iter__().__next__().grad().asnumpy()).all()


def test_whole_numbers_stay_what_they_are():
    class Masked(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(3)

        def hybrid_forward(self, F, tokens):
            odd = F.np.bitwise_and(tokens, 1)  # refuses what is not whole
            return self.dense(F.npx.one_hot(tokens, 600)) * odd.reshape((-1, 1)), tokens

    mx.npx.set_np()
    try:
        net = initialized(Masked(), mx.cpu())
        tokens = mx.np.array([257, 513, 512], dtype="int32")
        full = net(tokens)[0].asnumpy()
        net.hybridize()
        set_precision(net, "bf16")
        out, same = net(tokens)
        assert same.dtype == np.int32 and same.asnumpy().tolist() == [257, 513, 512]
        assert 0 < np.abs(out.asnumpy() - full).max() <= EPS * np.abs(full).max()
        assert out.asnumpy()[2].tolist() == [0, 0, 0]
    finally:
        mx.npx.reset_np()


# Networks


def outcome(net, x, y):
    """Output and gradients of one training pass."""
    with autograd.record():
        out = net(x)
        loss = LOSS(out, y)
    loss.backward()
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]
    return [out.asnumpy()] + [param.grad().asnumpy() for param in params]


@pytest.mark.parametrize("normalize", [False, True])
def test_every_mode_gives_the_same(normalize, arrays):
    ((x, y),) = small_batches([16])
    x, y = as_array(x), as_array(y)
    found = {}
    for name, hybridize in HYBRIDIZE.items():
        net = smooth_net([mx.cpu()], hybridize, normalize)
        net(x)
        if name == "plain":
            full = outcome(net, x, y)
        set_precision(net, "bf16")
        found[name] = outcome(net, x, y)
        if name == "static":  # its memory is used again
            assert largest_difference(outcome(net, x, y), found[name]) == 0.0
    assert largest_difference(found["hybrid"], found["static"]) == 0.0
    # BatchNorm takes the mean from the gradient of what is before it, and leaves what rounding has changed: look at the output.
    num_compared = 1 if normalize else len(full)
    for name in ("plain", "hybrid"):
        for value, expected in list(zip(found[name], full))[:num_compared]:
            assert value.dtype == np.float32
            assert EPS / 8 <= distance([value], [expected]) / np.linalg.norm(expected) <= 4 * EPS
    assert distance(found["plain"][:1], found["hybrid"][:1]) <= 2 * EPS * np.linalg.norm(full[0])


def test_the_largest_of_a_window_is_the_one_of_float32(arrays):
    """Whole numbers below 256 are exact in bfloat16, so that nothing is rounded."""
    rng = np.random.RandomState(0)
    x = as_array((rng.permutation(256)[:144].reshape(1, 4, 6, 6) - 128.0).astype("float32"))
    head = as_array(rng.randint(1, 100, (1, 4, 3, 3)).astype("float32"))
    net = sequential(nn.Conv2D(4, kernel_size=1, use_bias=False, in_channels=4), nn.MaxPool2D(2), ctx=mx.cpu())
    net[0].weight.set_data(as_array(np.eye(4, dtype="float32").reshape(4, 4, 1, 1)))
    net.hybridize()
    x.attach_grad()
    found = []
    for precision in ("fp32", "bf16"):
        set_precision(net, precision)
        with autograd.record():
            out = net(x)
        out.backward(head)
        found.append([out.asnumpy(), x.grad.asnumpy()])
    assert largest_difference(*found) == 0.0


def test_a_network_that_has_run_changes_and_changes_back(arrays):
    ((x, y),) = small_batches([8])
    x, y = as_array(x), as_array(y)
    for hybridize in HYBRIDIZE.values():
        net, other = small_net([mx.cpu()], hybridize=hybridize), small_net([mx.cpu()], hybridize=hybridize)
        before, others = outcome(net, x, y), outcome(other, x, y)
        set_precision(net, "bf16")
        assert precision_of(net) == "bf16" and precision_of(other) == "fp32"
        assert largest_difference(outcome(net, x, y), before) > 0
        assert largest_difference(outcome(other, x, y), others) == 0
        net.hybridize(False)
        net.hybridize()  # stays what it was
        assert precision_of(net) == "bf16"
        assert np.array_equal(outcome(net, x, y)[0], bf16(outcome(net, x, y)[0]))
        set_precision(net, "fp32")
        net.hybridize(hybridize is not None, **(hybridize or {}))
        assert precision_of(net) == "fp32"
        assert largest_difference(outcome(net, x, y), before) == 0


def test_an_input_that_is_left_out():
    class Masked(nn.Dense):
        def hybrid_forward(self, F, x, mask=None, *, weight):
            out = F.FullyConnected(x, weight, num_hidden=3, no_bias=True)
            return out if mask is None else out * mask

    net = initialized(Masked(3, in_units=2, use_bias=False), mx.cpu(), mx.init.One())
    set_precision(net, "bf16")
    net.hybridize()
    assert net(mx.nd.ones((1, 2)), None).asnumpy().tolist() == [[2.0] * 3]


def test_plain_blocks_and_imported_graphs(tmp_path):
    class Plain(nn.Block):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Dense(4, in_units=4), nn.Dense(4, in_units=4)

        def forward(self, x):
            return self.two(self.one(x).tanh() + x)

    x = mx.nd.random.uniform(-1, 1, (4, 4))
    net = initialized(Plain(), mx.cpu(), mx.init.Xavier())
    full = net(x).asnumpy()
    set_precision(net, "bf16")
    out = net(x).asnumpy()
    assert np.array_equal(out, bf16(out)) and 0 < np.abs(out - full).max() <= 4 * EPS * np.abs(full).max()

    dense = sequential(nn.Dense(3, in_units=4), ctx=mx.cpu(), init=mx.init.Xavier(), hybridize={})
    full = dense(x).asnumpy()
    set_precision(dense, "bf16")
    out = dense(x).asnumpy()
    dense.export(str(tmp_path / "net"))
    graph = mx.sym.load(str(tmp_path / "net-symbol.json"))
    imported = gluon.SymbolBlock(graph, mx.sym.var("data", dtype="float32"))
    imported.load_parameters(str(tmp_path / "net-0000.params"), ctx=mx.cpu(), cast_dtype=True)
    assert np.array_equal(imported(x).asnumpy(), full)  # what is exported is the float32 network
    set_precision(imported, "bf16")
    assert np.array_equal(imported(x).asnumpy(), out)
    assert not np.array_equal(out, full)


@pytest.mark.parametrize("hybridize", [HYBRIDIZE["plain"], HYBRIDIZE["static"]], ids=["plain", "static"])
def test_gradients_add_up(hybridize, arrays):
    """The backward pass of oneDNN's cast drops what it is to add, so that the gradient would stay 0."""
    batches = [(as_array(x), as_array(y)) for x, y in small_batches([8, 5, 7])]
    net = smooth_net([mx.cpu()], hybridize, normalize=True)
    net(batches[0][0])
    set_precision(net, "bf16")
    expected, params = [], [param for param in net.collect_params().values() if param.grad_req != "null"]
    for grad_req in ("write", "add"):
        for param in params:
            param.grad_req = grad_req
        for x, y in batches:
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
            if grad_req == "write":
                expected.append([param.grad().asnumpy() for param in params])
    for param, *each in zip(params, *expected):
        np.testing.assert_array_equal(param.grad().asnumpy(), (each[0] + each[1]) + each[2], err_msg=param.name)


# Training


@pytest.mark.parametrize(
    "num_devices, arrays, hybridize", [(2, "nd", "hybrid"), (3, "np", "plain"), (3, "nd", "static")], indirect=["arrays"]
)
def test_devices_do_not_show_beyond_rounding(num_devices, arrays, hybridize):
    """One device rounds the gradient of the whole batch, several that of their shards: by 1 in 256 each."""
    devices = [mx.cpu(i) for i in range(num_devices)]

    def train(ctx, precision, sizes=(24, 13, 2, 7)):
        net = smooth_net(ctx, hybridize=HYBRIDIZE[hybridize])
        net(as_array(small_batches([2])[0][0]).as_in_context(ctx[0]))
        start = weights_of(net)
        set_precision(net, precision)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for X, y in small_batches(sizes):
            mgpu.train_batch(net, LOSS, trainer, X, y)
        assert mgpu.replica_difference(net) == 0.0
        return start, weights_of(net)

    start, full = train([mx.cpu()], "fp32")
    one, several = train([mx.cpu()], "bf16")[1], train(devices, "bf16")[1]
    moved = distance(start, full)
    assert distance(several, one) <= 2 * EPS * moved
    assert EPS / 4 * moved <= distance(several, full) <= 4 * EPS * moved
    assert distance(train(devices, "bf16", (24, 13, 2, 8))[1], one) > 8 * EPS * moved  # the bounds can tell one example


def test_weights_gradients_and_files_are_float32(tmp_path, devices):
    net = small_net(devices, hybridize={}, normalize=True)
    set_precision(net, "bf16")
    trainer = mgpu.Trainer(net, "adam", clip_norm=1.0)
    for X, y in small_batches([8, 8]):
        batch = mgpu.train_batch(net, LOSS, trainer, X, y)
    assert {np.dtype(array.dtype).name for array in batch.outputs + batch.losses} == {"float32"}
    for param in net.collect_params().values():
        assert {np.dtype(array.dtype).name for array in param.list_data()} == {"float32"}
        if param.grad_req != "null":
            assert {np.dtype(array.dtype).name for array in param.list_grad()} == {"float32"}
    net.save_parameters(str(tmp_path / "net"))
    assert {array.dtype for array in mx.nd.load(str(tmp_path / "net")).values()} == {np.float32}


# What is refused


def half():
    net = layers()
    net.cast("float16")
    return net


@pytest.mark.parametrize(
    "make, precision, error, what",
    [
        (layers, "fp8", TrainerError, "one of 'fp32', 'bf16', 'fp16'"),
        (layers, None, TrainerError, "one of"),
        (lambda: layers().collect_params(), "bf16", TrainerError, "ParameterDict"),
        (lambda: nn.Dense(1, in_units=1), "bf16", TrainerError, "initialize"),
        (half, "bf16", TrainerError, "float16"),
        (layers, "fp16", DeviceError, "FP16 gemm on cpu not implemented!"),
    ],
)
def test_what_cannot_be_is_refused(make, precision, error, what):
    net = make()
    with pytest.raises(error, match=what):
        set_precision(net, precision)
    assert precision_of(net) == "fp32"


def test_an_older_processor_is_refused():
    program = """
import gluon_mgpu, mxnet as mx
from gluon_mgpu.trainer.precision import set_precision
net = mx.gluon.nn.Dense(2, in_units=2)
net.initialize(mx.init.One(), ctx=mx.cpu(1))
try:
    set_precision(net, "bf16")
except gluon_mgpu.errors.DeviceError as error:
    print(error)
with mx.autograd.record():
    out = net(mx.nd.ones((1, 2), ctx=mx.cpu(1)))
out.backward()
mx.nd.waitall()
print(out.asnumpy().tolist())
"""
    environment = {**os.environ, "DNNL_MAX_CPU_ISA": "AVX2"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240)
    told, out = found.stdout.splitlines()
    assert "AVX-512" in told and out == "[[2.0, 2.0]]"
    assert found.returncode == 0, found.stderr
