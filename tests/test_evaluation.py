"""Evaluation on k devices against NumPy, with BatchNorm averaged first."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import initialized, stack
from .versions import nd

SIZES = [6, 6, 5]  # the last batch is uneven on 2 and on 3 devices


def linear_net(ctx):
    """Three classes of four numbers."""
    return initialized(nn.Dense(3, in_units=4, bias_initializer=mx.init.Uniform(0.5)), ctx, mx.init.Uniform(1.0))


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


def test_the_loss_is_the_mean_over_examples(devices, arrays):
    """Not the mean of the batches' or the shards' means: the last batch is smaller."""
    net, batches = linear_net(devices), make_batches([6, 6, 1])
    found = mgpu.evaluate(net, batches, loss=gluon.loss.SoftmaxCrossEntropyLoss())
    losses = np.concatenate([losses_in_numpy(net, X, y) for X, y in batches])
    assert list(found) == ["accuracy", "loss"]
    np.testing.assert_allclose(found["loss"], losses.mean(), rtol=1e-5)
    assert found["accuracy"] == right_in_numpy(net, batches)


def mean_output(output, label):
    return output.sum().reshape((1,)), output.size


def test_evaluation_predicts_and_trains_nothing(devices):
    """Dropout is off, BatchNorm's statistics are used and not changed, nothing is recorded."""
    modes = []

    def spy(x):
        modes.append((autograd.is_recording(), autograd.is_training()))
        return x

    net = stack(nn.Dropout(0.9), nn.BatchNorm(in_channels=4, epsilon=0), nn.Lambda(spy), kind=nn.Sequential)
    net.initialize(ctx=devices)
    X = np.random.uniform(1, 2, (9, 4)).astype("float32")
    with autograd.record():  # even inside
        found = mgpu.evaluate(net, [(X, np.zeros(9))], {"mean": mean_output})
    np.testing.assert_allclose(found["mean"], X.mean(), rtol=1e-5)
    assert modes == [(False, False)] * len(devices)
    assert all((net[1].running_mean.data(context).asnumpy() == 0).all() for context in devices)


X, Y = np.zeros((2, 4), "float32"), np.zeros(2, "int32")


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_iterator_may_write_each_batch_into_the_arrays_of_the_one_before(num_devices):
    """As MXNet's own iterators do: the metrics see a batch when later ones are on their way."""
    ctx = [mx.cpu(i) for i in range(num_devices)]
    rng = np.random.RandomState(0)
    features, labels = rng.rand(40, 8, 5).astype("float32"), rng.randint(0, 5, (40, 8))
    net = initialized(mx.gluon.nn.Dense(5, in_units=5), ctx, mx.init.Xavier())

    def recycling():
        X, y = nd.zeros((8, 5)), nd.zeros((8,))
        for one, other in zip(features, labels):
            X[:], y[:] = one, other
            yield X, y

    weight, bias = net.weight.data(ctx[0]).asnumpy(), net.bias.data(ctx[0]).asnumpy()
    right = ((features @ weight.T + bias).argmax(axis=2) == labels).mean()
    assert mgpu.evaluate_accuracy_gpus(net, recycling()) == pytest.approx(right)


def test_labels_may_be_bool(devices, arrays):
    net = linear_net(devices)
    batches = [(X, y == 1) for X, y in make_batches()[:1] * 3]
    X, y = batches[0]
    assert mgpu.evaluate_accuracy_gpus(net, batches) == pytest.approx(np.mean(in_numpy(net, X).argmax(axis=1) == y))
    assert mgpu.gather(mgpu.split_batch(X, y, devices)[1], mx.cpu(0)).asnumpy().tolist() == y.tolist()


def test_a_map_of_classes_has_batches_of_several_sizes(devices):
    """An executor of another shape has an output in a layout of oneDNN's, in memory that executors share."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, padding=1, in_channels=3, activation="relu"), nn.Conv2D(4, 1, in_channels=8))
    net.initialize(mx.init.Xavier(), ctx=devices)
    data = [(np.random.rand(n, 3, 16, 16).astype("float32"), np.random.randint(0, 4, (n, 16, 16))) for n in (6, 6, 2)]
    expected = mgpu.evaluate_accuracy_gpus(net, data)
    net.hybridize()
    assert mgpu.evaluate_accuracy_gpus(net, data) == pytest.approx(expected, abs=0.01)
    mx.nd.waitall()
