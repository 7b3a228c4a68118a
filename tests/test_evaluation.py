"""Evaluation on k devices against NumPy, with BatchNorm averaged first."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import ShardError, TrainerError
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import assert_house_style

SIZES = [6, 6, 5]  # the last batch is uneven on 2 and on 3 devices


def linear_net(ctx):
    """Three classes of four numbers."""
    net = nn.Dense(3, in_units=4, bias_initializer=mx.init.Uniform(0.5))
    net.initialize(mx.init.Uniform(1.0), ctx=ctx)
    return net


def make_batches(sizes=SIZES):
    return [(np.random.uniform(-1, 1, (n, 4)).astype("float32"), np.random.randint(0, 3, n).astype("int32")) for n in sizes]


def in_numpy(net, X):
    context = net.weight.list_ctx()[0]
    return X @ net.weight.data(context).asnumpy().T + net.bias.data(context).asnumpy()


def right_in_numpy(net, batches):
    right = sum((in_numpy(net, X).argmax(axis=1) == y).sum() for X, y in batches)
    return right / sum(len(y) for _, y in batches)


def losses_in_numpy(net, X, y):
    scores = in_numpy(net, X).astype("float64")
    return np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(y)), y]


@pytest.mark.pairwise
@pytest.mark.parametrize("sizes", [SIZES, [6, 1], [2], [1]], ids=["uneven", "then one", "two", "one"])
def test_accuracy_is_that_of_numpy(devices, arrays, sizes):
    net, batches = linear_net(devices), make_batches(sizes)
    found = mgpu.evaluate_accuracy_gpus(net, batches)
    assert type(found) is float
    assert found == right_in_numpy(net, batches)


def test_the_oracle_can_tell(devices):
    """A right answer more or fewer shows: the test above does not compare constants."""
    net, ((X, y),) = linear_net(devices), make_batches([30])
    right = right_in_numpy(net, [(X, y)])
    y[0] = (in_numpy(net, X)[0].argmax() + (y[0] == in_numpy(net, X)[0].argmax())) % 3  # right becomes wrong, and the other way
    assert abs(mgpu.evaluate_accuracy_gpus(net, [(X, y)]) - right) == pytest.approx(1 / 30)


def test_mxnet_batches_count_as_numpys(devices, arrays):
    net, batches = linear_net(devices), make_batches()
    on_device = [(arrays.array(X), arrays.array(y, dtype="int32")) for X, y in batches]
    assert mgpu.evaluate_accuracy_gpus(net, on_device) == right_in_numpy(net, batches)


def test_a_gluon_data_loader_is_an_iterator(devices):
    net, ((X, y),) = linear_net(devices), make_batches([17])
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), batch_size=6)
    assert mgpu.evaluate_accuracy_gpus(net, loader) == right_in_numpy(net, [(X, y)])


def test_the_loss_is_the_mean_over_examples(devices, arrays):
    """Not the mean of the batches' or the shards' means: the last batch is smaller."""
    net, batches = linear_net(devices), make_batches([6, 6, 1])
    found = mgpu.evaluate(net, batches, loss=gluon.loss.SoftmaxCrossEntropyLoss())
    losses = np.concatenate([losses_in_numpy(net, X, y) for X, y in batches])
    assert list(found) == ["accuracy", "loss"]
    np.testing.assert_allclose(found["loss"], losses.mean(), rtol=1e-5)
    assert found["accuracy"] == right_in_numpy(net, batches)


def test_metrics_are_what_was_asked_for(devices):
    net, batches = linear_net(devices), make_batches()
    assert list(mgpu.evaluate(net, batches, {"hits": mgpu.accuracy})) == ["hits"]
    assert list(mgpu.evaluate(net, batches, mgpu.top_k_accuracy(2))) == ["top_2_accuracy"]
    assert mgpu.evaluate(net, batches, [mgpu.top_k_accuracy(3)]) == {"top_3_accuracy": 1.0}
    assert mgpu.evaluate(net, batches, []) == {}


def test_a_split_of_ones_own_is_used(devices):
    net, batches = linear_net(devices), make_batches()
    seen = []

    def split(X, y, contexts):
        seen.append((X.shape, contexts))
        return mgpu.split_batch(X, y, contexts[-1:])

    assert mgpu.evaluate_accuracy_gpus(net, batches, split) == right_in_numpy(net, batches)
    assert seen == [((n, 4), devices) for n in SIZES]


def diverged_norm(ctx):
    """A BatchNorm whose running statistics are other ones on each device."""
    net = nn.BatchNorm(in_channels=2)
    net.initialize(ctx=ctx)
    for i, context in enumerate(ctx):
        net.running_mean.data(context)[:] = mx.nd.array([i + 1.0, -3.0 * i], ctx=context)
        net.running_var.data(context)[:] = mx.nd.array([1.0 + i * i, 4.0 + i], ctx=context)
    return net


def mean_output(output, label):
    return output.sum().reshape((1,)), output.size


@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}], ids=["plain", "hybrid", "static"])
def test_batch_norm_is_averaged_over_the_devices_first(devices, hybridize):
    net, k = diverged_norm(devices), len(devices)
    if hybridize is not None:
        net.hybridize(**hybridize)
    mean = np.mean([[i + 1.0, -3.0 * i] for i in range(k)], axis=0)
    variance = np.mean([[1.0 + i * i, 4.0 + i] for i in range(k)], axis=0)
    X = np.random.uniform(-1, 1, (7, 2)).astype("float32")
    found = mgpu.evaluate(net, [(X, np.zeros(7))], {"mean": mean_output})
    np.testing.assert_allclose(found["mean"], ((X - mean) / np.sqrt(variance + 1e-5)).mean(), rtol=1e-5)
    for context in devices:
        np.testing.assert_allclose(net.running_mean.data(context).asnumpy(), mean, rtol=1e-6)
        np.testing.assert_allclose(net.running_var.data(context).asnumpy(), variance, rtol=1e-6)


def test_batch_norm_is_averaged_for_np_arrays_too(devices, arrays):
    net, k = nn.BatchNorm(in_channels=1), len(devices)
    net.initialize(ctx=devices)
    for i, context in enumerate(devices):
        net.running_mean.data(context)[:] = 2.0 * i
    mgpu.evaluate(net, [(np.zeros((4, 1), "float32"), np.zeros(4))], [])
    assert [net.running_mean.data(context).asnumpy().tolist() for context in devices] == [[k - 1.0]] * k


def test_averaging_leaves_weights_alone(devices):
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=4), nn.BatchNorm(in_channels=2))
    net.initialize(ctx=devices)
    for i, context in enumerate(devices):
        net[0].weight.data(context)[:] = float(i)
        net[1].gamma.data(context)[:] = float(i)
    mgpu.average_running_stats(net)
    for i, context in enumerate(devices):
        assert (net[0].weight.data(context).asnumpy() == i).all()
        assert (net[1].gamma.data(context).asnumpy() == i).all()


def test_evaluation_predicts_and_trains_nothing(devices):
    """Dropout is off, BatchNorm's statistics are used and not changed, nothing is recorded."""
    modes = []

    def spy(x):
        modes.append((autograd.is_recording(), autograd.is_training()))
        return x

    net = nn.Sequential()
    net.add(nn.Dropout(0.9), nn.BatchNorm(in_channels=4, epsilon=0), nn.Lambda(spy))
    net.initialize(ctx=devices)
    X = np.random.uniform(1, 2, (9, 4)).astype("float32")
    with autograd.record():  # even inside
        found = mgpu.evaluate(net, [(X, np.zeros(9))], {"mean": mean_output})
    np.testing.assert_allclose(found["mean"], X.mean(), rtol=1e-5)
    assert modes == [(False, False)] * len(devices)
    assert all((net[1].running_mean.data(context).asnumpy() == 0).all() for context in devices)


def not_initialised():
    return nn.Dense(3, in_units=4)


def without_parameters():
    return nn.Flatten()


@pytest.mark.parametrize("make", [not_initialised, without_parameters])
def test_a_network_on_no_device_is_refused(make):
    with pytest.raises(TrainerError, match="^evaluate: got a network without initialised parameters") as caught:
        mgpu.evaluate_accuracy_gpus(make(), make_batches())
    assert_house_style(caught.value)


def test_a_network_whose_shapes_are_unknown_yet_is_evaluated(devices):
    net, batches = nn.Dense(3), make_batches()
    net.initialize(ctx=devices)
    assert mgpu.evaluate_accuracy_gpus(net, batches) == right_in_numpy(net, batches)


@pytest.mark.parametrize("items", [[], iter([]), (item for item in ())], ids=["list", "iterator", "generator"])
def test_no_batch_is_refused(items):
    with pytest.raises(TrainerError, match="^evaluate: got no batch") as caught:
        mgpu.evaluate_accuracy_gpus(linear_net([mx.cpu()]), items)
    assert_house_style(caught.value)


X, Y = np.zeros((2, 4), "float32"), np.zeros(2, "int32")


@pytest.mark.parametrize(
    "item, told",
    [
        (X, "ndarray"),
        ((X,), "tuple of 1"),
        ([X, Y, Y], "list of 3"),
        ({"X": X, "y": Y}, "dict"),
        ("XY", "str"),
        (None, "NoneType"),
    ],
)
def test_items_that_are_no_pairs_are_refused(item, told):
    with pytest.raises(TrainerError, match=f"^evaluate: got {told} from the data iterator") as caught:
        mgpu.evaluate(linear_net([mx.cpu()]), [(X, Y), item])
    assert_house_style(caught.value)


def test_labels_that_are_not_as_many_are_refused(devices):
    with pytest.raises(ShardError, match="got 2 examples in .* and 3 in ") as caught:
        mgpu.evaluate(linear_net(devices), [(X, np.zeros(3))])
    assert_house_style(caught.value)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_iterator_may_write_each_batch_into_the_arrays_of_the_one_before(num_devices):
    """As MXNet's own iterators do: the metrics see a batch when later ones are on their way."""
    ctx = [mx.cpu(i) for i in range(num_devices)]
    rng = np.random.RandomState(0)
    features, labels = rng.rand(40, 8, 5).astype("float32"), rng.randint(0, 5, (40, 8))
    net = mx.gluon.nn.Dense(5, in_units=5)
    net.initialize(mx.init.Xavier(), ctx=ctx)

    def recycling():
        X, y = mx.nd.zeros((8, 5)), mx.nd.zeros((8,))
        for one, other in zip(features, labels):
            X[:], y[:] = one, other
            yield X, y

    weight, bias = net.weight.data(ctx[0]).asnumpy(), net.bias.data(ctx[0]).asnumpy()
    right = ((features @ weight.T + bias).argmax(axis=2) == labels).mean()
    assert mgpu.evaluate_accuracy_gpus(net, recycling()) == pytest.approx(right)
