"""Debugging: layers that are named, labels and indices that are none, numbers that stay."""

import re
from contextlib import nullcontext

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel import debugging
from gluon_mgpu.errors import DataError, NonFiniteLossError, StepError
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import largest_difference, small_batches, small_net, weights_of

CE = gluon.loss.SoftmaxCrossEntropyLoss


# Layers


def test_an_error_names_the_innermost_layer(devices, arrays):
    net = nn.HybridSequential()
    inner = nn.HybridSequential()
    inner.add(nn.Dense(4, in_units=3), nn.Dense(2, in_units=5))  # 4 go in
    net.add(nn.Flatten(), inner)
    net.initialize(ctx=devices)
    net.hybridize()
    xs = [arrays.ones((2, 3), ctx=context) for context in devices]
    context = devices[-1]
    with pytest.raises(StepError, match=r"in layer 1\.1 \(Dense\)") as caught, debugging(net), autograd.record():
        for x in xs:
            try:
                net(x)
            except mx.MXNetError:
                if x is xs[-1]:
                    raise
    assert f"on {context}, inputs of shapes (2, 4)" in str(caught.value)
    assert isinstance(caught.value.__cause__, mx.MXNetError)


def test_fit_tells_the_layer(arrays):
    net = small_net([mx.cpu(0), mx.cpu(1)], hybridize={})
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    batches = small_batches([6] * 3)
    batches[2][0][5, 0, 2, 2] = np.nan
    with debugging(net, CE()), pytest.raises(NonFiniteLossError) as caught:
        mgpu.fit(net, CE(), trainer, batches, epochs=1, callbacks=[])
    assert re.search(r"from layer 0 \(Conv2D\) on cpu\(1\); .* in its inputs:", str(caught.value))


class Log(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.log(x)


def test_the_cause_is_told_apart():
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), Log())
    net.initialize(mx.init.One())
    with debugging(net):
        with pytest.raises(NonFiniteLossError, match=r"got 2 numbers .* layer 1 \(Log\) .* inputs and weights are finite"):
            net(mx.nd.array([[1, 1], [1, -1]]))
        net[0].weight.set_data(mx.nd.array([[1, np.inf], [1, 1]]))
        with pytest.raises(NonFiniteLossError, match=r"layer 0 \(Dense\) .* were in its weight"):
            net(mx.nd.ones((2, 2)))
        net[0].weight.set_data(mx.nd.ones((2, 2)))
        with pytest.raises(NonFiniteLossError, match=r"layer 0 \(Dense\) .* were in its inputs"):
            net(mx.nd.array([[1, np.inf], [1, 1]]))
    with debugging(net, check_finite=False):
        net(mx.nd.array([[1, np.nan], [1, 1]]))


def test_a_late_error_belongs_to_its_layer():
    class Fails(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return x + F.random.normal(0, -1, shape=(2, 2))  # is told only when it runs

    net = nn.HybridSequential()
    net.add(nn.Flatten(), Fails(), nn.Flatten())
    net.initialize()
    with pytest.raises(StepError, match=r"MXNetError .* in layer 1 \(Fails\)"), debugging(net):
        net(mx.nd.ones((2, 2)))


# Labels and indices


@pytest.mark.parametrize("labels, told", [([0, 99, 2, -1], "99, -1"), ([0, 1, 2, 1.5], "1.5"), ([np.nan, 1, 2, 1], "nan")])
def test_a_label_that_is_no_class(arrays, labels, told):
    loss = CE()
    net = nn.Dense(3, in_units=2)
    net.initialize()
    x, y = arrays.ones((4, 2)), arrays.array(labels, dtype="float32")
    with debugging(net, loss):
        loss(net(x), arrays.array([0, 1, 2, 1]))
        with pytest.raises(DataError, match=rf"got {told} .* in layer loss .* whole numbers 0 to 2"):
            loss(net(x), y)
    loss(net(x), y)  # MXNet takes the nearest one


def test_labels_along_another_axis_and_probabilities(arrays):
    loss, dense = CE(axis=1), CE(sparse_label=False)
    pred = arrays.ones((2, 3, 4))
    with debugging(loss):
        loss(pred, arrays.array(np.full((2, 4), 2)))
        with pytest.raises(DataError):
            loss(pred, arrays.array(np.full((2, 4), 3)))
    with debugging(dense):
        dense(pred, arrays.ones((2, 3, 4)) * 7)
    with debugging(loss):  # d2l's masked loss gives padding a weight of 0
        loss(pred, arrays.array(np.full((2, 4), 3)), arrays.zeros((2, 1, 4)))


def test_an_index_that_is_in_no_table(arrays):
    net = nn.HybridSequential()
    net.add(nn.Embedding(5, 2), nn.Dense(1, flatten=False))
    net.initialize()
    net.hybridize()
    with debugging(net):
        net(arrays.array([[0, 4]]))
        with pytest.raises(DataError, match=r"got 5, -1 \(2 of 3, the first at \(0, 1\)\) in layer 0 \(Embedding\)"):
            net(arrays.array([[0, 5, -1]]))


# Nothing changes


@pytest.mark.each_value
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}], ids=["plain", "hybrid", "static"])
def test_weights_are_what_they_would_be(arrays, hybridize):
    devices = [mx.cpu(0), mx.cpu(1)]
    batches = small_batches([6, 7, 1, 6, 6])

    def train(context_manager):
        net = small_net(devices, hybridize=hybridize, normalize=True)
        trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
        loss = CE()
        mgpu.train_batch(net, loss, trainer, *batches[0])  # its graph is there, and is used again afterwards
        with context_manager(net, loss):
            for X, y in batches:
                mgpu.train_batch(net, loss, trainer, X, y)
        for X, y in batches:
            mgpu.train_batch(net, loss, trainer, X, y)
        return weights_of(net)

    assert largest_difference(train(debugging), train(lambda net, loss: nullcontext())) <= 1e-6


def test_everything_is_put_back():
    net, loss = small_net([mx.cpu()], hybridize={}), CE()
    net[0].hybridize(False)
    loss.hybridize()
    blocks = [net, *net._children.values(), loss]
    before = [{name: value for name, value in vars(block).items() if "hook" not in name} for block in blocks]
    with pytest.raises(ZeroDivisionError), debugging(net, loss):
        assert not any(block._active for block in blocks)
        assert all(block._forward_hooks for block in blocks)
        raise ZeroDivisionError
    assert [{name: value for name, value in vars(block).items() if "hook" not in name} for block in blocks] == before
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)
