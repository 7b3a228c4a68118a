"""Prediction on k devices against NumPy, in the order of the examples, and what it holds meanwhile."""

import gc

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data.prefetch import NUM_HELD
from gluon_mgpu.errors import ShardError, StepError, TrainerError
from gluon_mgpu.loop.predict import predict, predict_batches
from gluon_mgpu.models.hybrid_block import new_parameter
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import HYBRIDIZE, initialized, sequential
from .test_no_sync import waits  # noqa: F401  a fixture
from .versions import nd


def linear_net(ctx, hybridize=None):
    """Three numbers of four."""
    layer = nn.Dense(3, in_units=4, bias_initializer=mx.init.Uniform(0.5))
    return sequential(layer, ctx=ctx, init=mx.init.Uniform(1.0), hybridize=hybridize)


def in_numpy(net, X):
    weight, bias = [param.list_data()[0].asnumpy() for param in net.collect_params().values()]
    return X @ weight.T + bias


def make_batches(*sizes):
    return [np.random.uniform(-1, 1, (n, 4)).astype("float32") for n in sizes]


class Calls(nn.Block):
    """A function as a network that is on devices."""

    def __init__(self, function, ctx):
        super().__init__()
        self.function = function
        self.unused = new_parameter(self, "unused", shape=(1,))
        self.initialize(ctx=ctx)

    def forward(self, x):
        return self.function(x)


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", HYBRIDIZE)
@pytest.mark.parametrize("sizes", [[6] * 12 + [5], [6, 1], [2], [1]], ids=["uneven", "then one", "two", "one"])
def test_it_is_that_of_numpy_in_order(devices, arrays, sizes, mode):
    net, batches = linear_net(devices, HYBRIDIZE[mode]), make_batches(*sizes)
    found = predict(net, batches)
    assert type(found) is np.ndarray and found.dtype == np.float32
    np.testing.assert_allclose(found, in_numpy(net, np.concatenate(batches)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_devices", [4, 8])
@pytest.mark.parametrize("max_inflight", [1, 2, 30])
def test_the_order_is_that_of_the_examples_for_many_devices_and_queues(num_devices, max_inflight):
    net = Calls(lambda x: x * 2, [mx.cpu(i) for i in range(num_devices)])
    numbers = np.arange(107, dtype="float32")
    batches = [numbers[i : i + 10] for i in range(0, 107, 10)]
    assert predict(net, batches, max_inflight=max_inflight).tolist() == (2 * numbers).tolist()
    for found, batch in zip(predict_batches(net, batches, max_inflight=max_inflight), batches):
        assert found.tolist() == (2 * batch).tolist()


def test_pairs_leave_the_labels_alone(devices):
    net, batches = linear_net(devices), make_batches(6, 5)
    wanted = in_numpy(net, np.concatenate(batches))
    np.testing.assert_allclose(predict(net, [(X, "any") for X in batches], pairs=True), wanted, rtol=1e-5, atol=1e-6)
    dataset = gluon.data.ArrayDataset(np.concatenate(batches), np.zeros(11))
    loader = gluon.data.DataLoader(dataset, batch_size=4)
    np.testing.assert_allclose(predict(net, loader, pairs=True), wanted, rtol=1e-5, atol=1e-6)
    loader = gluon.data.DataLoader(np.concatenate(batches), batch_size=4)
    np.testing.assert_allclose(predict(net, loader), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(predict(net, (X for X in batches)), wanted, rtol=1e-5, atol=1e-6)


def test_inputs_and_outputs_may_be_nested(devices, arrays):
    net = Calls(lambda x: {"sum": x["a"] + x["b"][0], "both": (x["a"], [x["b"][0]])}, devices)
    batches = [{"a": np.arange(float(n)), "b": [np.full(n, n / 2)]} for n in (5, 1, 4)]
    found = predict(net, batches)
    a, b = (np.concatenate([leaf(batch) for batch in batches]) for leaf in (lambda x: x["a"], lambda x: x["b"][0]))
    assert found["sum"].tolist() == (a + b).tolist()
    assert type(found["both"]) is tuple and type(found["both"][1]) is list
    assert found["both"][0].tolist() == a.tolist() and found["both"][1][0].tolist() == b.tolist()
    assert [part["both"][0].shape for part in predict_batches(net, batches)] == [(5,), (1,), (4,)]


def test_examples_may_lie_along_another_axis(devices):
    X = np.random.rand(3, 5, 2).astype("float32")  # T, N, C
    layers = initialized(nn.Dense(4, flatten=False, in_units=2), devices, mx.init.Uniform(1))
    wanted = in_numpy(layers, X)
    found = predict(layers, [X, X[:, :1]], batch_axis=1)
    np.testing.assert_allclose(found, np.concatenate([wanted, wanted[:, :1]], axis=1), rtol=1e-5, atol=1e-6)
    last = Calls(lambda x: x[-1], devices)
    np.testing.assert_array_equal(predict(last, [X], batch_axis=1, output_axis=0), X[-1])
    both = Calls(lambda x: (x[0], x[1]), devices)
    tokens, lengths = predict(both, [(X, np.arange(5.0))], batch_axis=(1, 0), output_axis=(1, 0))
    np.testing.assert_array_equal(tokens, X)
    assert lengths.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("max_inflight", [1, 3])
def test_no_more_than_max_inflight_batches_are_ahead(devices, max_inflight):
    drawn = []

    def source():
        for i in range(10):
            drawn.append(i)
            yield np.full(4, i, "float32")

    batches = predict_batches(Calls(lambda x: x + 1, devices), source(), max_inflight=max_inflight)
    assert drawn == []
    for i, found in enumerate(batches):
        assert found.tolist() == [i + 1] * 4
        assert len(drawn) == min(10, i + 1 + max_inflight)


def test_it_waits_for_the_oldest_batch_alone(devices, waits):  # noqa: F811
    """Reading is all that waits: a copy a shard, first whether devices agree, and no earlier than the queue is full."""
    seen = []
    net = Calls(lambda x: seen.append(list(waits)) or x * 2, devices)
    predict(net, [np.ones(6)] * 5, max_inflight=3)
    k = len(devices)
    assert seen[: 4 * k] == [[]] * (4 * k)  # four batches are queued, and then the first one is read
    assert seen[4 * k :] == [["MXNDArraySyncCopyToCPU"] * (k + (k > 1))] * k
    assert waits == ["MXNDArraySyncCopyToCPU"] * (5 * k + (k > 1))


def num_arrays():
    gc.collect()
    return sum(isinstance(item, mx.nd.NDArray) for item in gc.get_objects())


@pytest.mark.parametrize("form", ["NumPy", "MXNet"])
def test_what_it_holds_does_not_grow(devices, form):
    """The arrays that Python holds: after 30 batches no more than after 10, but for memory that waits to be written again."""
    net = linear_net(devices)
    before = num_arrays()
    held = {}
    source = (nd.array(X) if form == "MXNet" else X for X in make_batches(*[6] * 32))
    for number, _ in enumerate(predict_batches(net, source, max_inflight=2)):
        if number in (10, 30):
            held[number] = num_arrays()
    assert held[30] - held[10] <= (2 + NUM_HELD) * len(devices) < 50
    assert num_arrays() == before


@pytest.mark.mxnet1("compiled passes")
def test_a_few_batches_make_no_graph(devices, calls_to):
    """MXNet never frees the text of one: a server that predicts each request by a call grew with each."""
    net, made = linear_net(devices, {"static_alloc": True}), calls_to(mx.sym.Symbol, "tojson")
    for number, graphs in ((3, 0), (4, 1)):
        X = make_batches(*[5] * number)
        np.testing.assert_allclose(predict(net, X), in_numpy(net, np.concatenate(X)), rtol=1e-5)
        assert len(made) == graphs


def test_dropout_is_off_and_batch_norm_predicts(devices, arrays):
    net = sequential(nn.Dropout(0.9), nn.BatchNorm(in_channels=2), ctx=devices)
    for context in devices:
        net[1].running_mean.data(context)[:] = 1.5
        net[1].running_var.data(context)[:] = 2.0
    X = np.random.uniform(-1, 1, (7, 2)).astype("float32")
    with autograd.record():
        found = predict(net, [X, X])
    np.testing.assert_allclose(found, np.concatenate([X, X] - np.float32(1.5)) / np.sqrt(2.0 + 1e-5), rtol=1e-4, atol=1e-6)
    assert all((net[1].running_mean.data(context).asnumpy() == 1.5).all() for context in devices)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.reshape((len(x), 1, -1))], ids=["itself", "a view"])
def test_an_iterator_may_write_each_batch_into_the_arrays_of_the_one_before(devices, view):
    """As MXNet's own iterators do, and a network may return what it was given."""
    rows = np.random.rand(20, 6, 3).astype("float32")

    def recycling():
        X = nd.zeros((6, 3))
        for row in rows:
            X[:] = row
            yield X

    found = predict(Calls(view, devices), recycling())
    assert (found.reshape(20, 6, 3) == rows).all()


def test_memory_of_numpy_batches_is_not_written_while_outputs_share_it(devices):
    rows = np.random.rand(30, 6, 3).astype("float32")
    assert (predict(Calls(lambda x: x, devices), list(rows), max_inflight=2).reshape(30, 6, 3) == rows).all()


@pytest.mark.parametrize("compiled", ["auto", pytest.param("on", marks=pytest.mark.mxnet1("compiled passes"))])
def test_a_network_whose_shapes_are_unknown_yet_predicts(devices, arrays, compiled):
    net = initialized(nn.Dense(3), devices, mx.init.Uniform(1))
    (X,) = make_batches(6)
    np.testing.assert_allclose(predict(net, [X], compiled=compiled), in_numpy(net, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at", [1, 4, 6])
@pytest.mark.parametrize("shard", [0, 1])
def test_the_error_of_a_device_names_its_batch_and_device(at, shard):
    """A matrix that has no Cholesky factor: it fails on its device, after it was queued."""
    net = Calls(mx.np.linalg.cholesky if is_mxnet2() else mx.nd.linalg.potrf, [mx.cpu(0), mx.cpu(1)])
    batches = [np.array([np.eye(2)] * 4, dtype="float32") for _ in range(6)]
    for batch in batches[at - 1 :]:
        batch[2 * shard] *= -1
    given = []
    with pytest.raises(StepError) as caught:
        for found in predict_batches(net, batches, max_inflight=2):
            given.append(found)
    mx.nd.waitall()  # nothing is left to surface later, in something else
    assert len(given) == at - 1
    assert str(caught.value).startswith(f"predict: got an error of cpu({shard}) at batch {at}: ")
    assert "potrf" in str(caught.value) and isinstance(caught.value.__cause__, mx.MXNetError)
    assert predict(net, [np.array([np.eye(2)] * 3)]).shape == (3, 2, 2)


def test_what_the_network_does_not_take_is_reported_with_its_batch_and_device(devices):
    good, bad = np.ones((6, 4), "float32"), np.ones((6, 5), "float32")
    with pytest.raises(StepError, match=r"^predict: got an error at batch 3: .* for shard 0 on cpu\(0\)"):
        predict(linear_net(devices), [good, good, bad])


def test_an_error_of_the_network_itself_stays_what_it_is():
    def fails(x):
        assert len(x) == 3, "three"

    for X in (np.ones(2), (np.ones(2), np.ones(2), np.ones(2), np.ones(2))):
        with pytest.raises(AssertionError, match="three"):
            predict(Calls(fails, [mx.cpu(0)]), [X])
    with pytest.raises(AssertionError, match="three"):
        predict(Calls(fails, [mx.cpu(0)]), [(np.ones(2), 0)], pairs=True)


NET = {"a sum": lambda x: x.sum(), "a row for all": lambda x: x[0:1], "a number": lambda x: 3, "a word": lambda x: "word"}


@pytest.mark.parametrize(
    "name, error, told",
    [
        ("a sum", ShardError, r"got output of shape \((1,)?\) at batch 1, for 2 examples along axis 0"),
        ("a row for all", ShardError, r"got output of shape \(1, 3\) at batch 1, for 2 examples"),
        ("a number", TrainerError, "got output of type int at batch 1"),
        ("a word", TypeError, "got str"),
    ],
)
def test_outputs_that_are_not_one_an_example_are_refused(name, error, told):
    with pytest.raises(error, match=told):
        predict(Calls(NET[name], [mx.cpu(0), mx.cpu(1)]), [np.ones((4, 3))])


X = np.ones((2, 4), "float32")
CTX = [mx.cpu(0), mx.cpu(1)]


WRONG = {
    "no batch": (TrainerError, "got no batch", lambda net: predict(net, [])),
    "a batch of nothing": (ShardError, "0 examples", lambda net: predict(net, [X[:0]])),
    "no data": (TrainerError, "expected an iterable", lambda net: predict_batches(net, None)),
    "an array of NumPy's": (TrainerError, r"Pass \[X\]", lambda net: predict(net, X)),
    "a word": (TrainerError, r"Pass \[X\]", lambda net: predict(net, "word")),
    "a word later": (TrainerError, r"^predict: got no array at batch 2 \(data: got str", lambda net: predict(net, [X, "word"])),
    "no queue": (TrainerError, "max_inflight=0", lambda net: predict_batches(net, [X], max_inflight=0)),
    "no weights": (TrainerError, "^predict: got (dense.*|weight) not initialised", lambda net: predict_batches(nn.Dense(3), [X])),
    "no pairs": (TrainerError, "expected pairs", lambda net: predict(net, [X], pairs=True)),
    "pairs that are not called so": (TrainerError, "Pass pairs=True", lambda net: predict(net, [(X, X[:, 0])])),
    "no such axis": (ShardError, "batch_axis", lambda net: predict(net, [X], batch_axis=3)),
    "no such output axis": (ShardError, "output_axis", lambda net: predict(net, [X], output_axis=2)),
    "other outputs": (ShardError, "do not fit together", lambda net: predict(Calls(lambda x: x, CTX), [X, np.ones((2, 5))])),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_reported(name):
    error, told, call = WRONG[name]
    with pytest.raises(error, match=told):
        call(linear_net(CTX))
