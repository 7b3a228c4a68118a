"""Blocks that are computed again in the backward pass give the gradients of those that keep their activations."""

import copy
import gc
import time

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel.passes import WaitingPass
from gluon_mgpu.errors import ModesError, TrainerError
from gluon_mgpu.pipeline.recompute import _OPERATOR, _Properties
from mxnet import autograd
from mxnet.gluon import nn

from .conftest import largest_difference
from .test_pipeline import CE, batches, seeded

pytestmark = pytest.mark.timeout(60)  # a second forward pass that waits for the update waits forever


def layers(hybridized=False):
    block = nn.HybridSequential()
    block.add(nn.Dense(16, in_units=16), nn.BatchNorm(in_channels=16), nn.Activation("tanh"))
    if hybridized:
        block.hybridize()
    return block


class Residual(nn.Block):
    """A block that is used twice, next to paths around it, with integers, tuples and a layer that is not used."""

    def __init__(self, wrapped, hybridized):
        super().__init__()
        self.embedding = wrapped(Embedded())
        self.first = nn.Dense(16, in_units=16)
        self.block = wrapped(layers(hybridized))

    def forward(self, x):
        tokens = mx.nd.arange(x.shape[0], ctx=x.context).astype("int32") % 5
        h, x = self.embedding(tokens, self.first(x))
        h = h + self.block(h)
        return h + self.block(h) + x


class Embedded(nn.Block):
    def __init__(self):
        super().__init__()
        self.weight = nn.Embedding(5, 16)
        self.unused = nn.Dense(3, in_units=3)

    def forward(self, tokens, x):
        return self.weight(tokens) + x, x


def build(wrapped, hybridized, ctx):
    net = nn.Sequential()
    net.add(Residual(wrapped, hybridized), nn.Dense(5, in_units=16))
    return seeded(net, ctx)


def plain(block):
    return block


@pytest.mark.each_value
@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"micro_steps": 2}], ids=str)
def test_it_trains_the_same_weights(options, hybridized):
    found = []
    for wrapped in (plain, mgpu.recompute):
        net = build(wrapped, hybridized, [mx.cpu(0), mx.cpu(1)])
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.05, "momentum": 0.9}, find_unused_parameters=True)
        mgpu.fit(net, CE, trainer, batches(), epochs=2, callbacks=[], **options)
        found.append({name: param.data(mx.cpu(0)).asnumpy() for name, param in net._collect_params_with_prefix().items()})
    assert list(found[0]) == list(found[1])  # files fit
    difference = largest_difference(*(list(one.values()) for one in found))
    assert difference < 1e-6  # in another order of the sums of a block that is used twice
    deadline = time.monotonic() + 10
    while WaitingPass.calls and time.monotonic() < deadline:  # a thread of MXNet drops a graph a moment later
        gc.collect()
        time.sleep(0.01)
    assert not WaitingPass.calls


class Pair(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Dense(6), nn.Dense(6)

    def hybrid_forward(self, F, x):
        return self.one(x), self.other(x)


def sequence(*layers, **hybridize):
    net = nn.HybridSequential()
    net.add(*layers)
    if hybridize:
        net.hybridize(**hybridize)
    return net


STATIC = {"static_alloc": True, "static_shape": True}
NETWORKS = {  # the layers, some of them wrapped, for images or for whole numbers
    "oneDNN's layouts": lambda wrapped: [
        wrapped(sequence(nn.Conv2D(16, 3, padding=1), nn.BatchNorm())),
        nn.Conv2D(16, 3),
        wrapped(sequence(nn.Conv2D(4, 3))),
        nn.GlobalAvgPool2D(),
    ],
    "BatchNorm around": lambda wrapped: [nn.BatchNorm(), wrapped(sequence(nn.Dense(6), nn.BatchNorm())), nn.BatchNorm()],
    "static memory": lambda wrapped: [nn.Dense(4), wrapped(sequence(nn.Dense(4), nn.LayerNorm(), nn.Dense(2), **STATIC))],
    "one output and two": lambda wrapped: [nn.Dense(4), wrapped(nn.Dense(6)), wrapped(Pair()), nn.Lambda(lambda h: h[0] + h[1])],
    "whole numbers as floats": lambda wrapped: [wrapped(sequence(nn.Embedding(5, 6), nn.Dense(4)))],
    "nothing to train first": lambda wrapped: [wrapped(sequence(nn.BatchNorm(center=False, scale=False), nn.Dense(6)))],
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_the_same_weights_and_statistics(name):
    X = np.random.RandomState(0).uniform(0, 5, (9, 2, 6, 6)).astype("float32")
    X = np.floor(X[:, 0, 0]) if name == "whole numbers as floats" else X
    found = []
    for wrapped in (plain, *[mgpu.recompute] * 4):  # what is read too early is not wrong each time
        net = nn.Sequential()
        net.add(*NETWORKS[name](wrapped), nn.Dense(5))
        net = copy.deepcopy(seeded(net, [mx.cpu(0), mx.cpu(1)]))
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.05})
        for _ in range(3):
            mgpu.train_batch(net, CE, trainer, X, np.arange(9) % 5)
        mx.nd.waitall()
        found.append([param.data(mx.cpu(1)).asnumpy() for param in net.collect_params().values()])
    assert max(largest_difference(found[0], other) for other in found[1:]) < 1e-6


def test_gradients_belong_to_the_numbers_that_dropout_drew(arrays):
    block = mgpu.recompute(nn.Dropout(0.5))
    x = arrays.ones((50, 40))
    x.attach_grad()
    mx.random.seed(1)
    outputs = []
    for _ in range(2):
        with autograd.record():
            y = block(x)
        mgpu.backward([y])
        assert (x.grad.asnumpy() == y.asnumpy()).all()
        assert 0.4 < (y.asnumpy() == 0).mean() < 0.6
        outputs.append(y.asnumpy())
    assert (outputs[0] != outputs[1]).any()
    mx.random.seed(1)
    with autograd.record():
        assert (block(x).asnumpy() == outputs[0]).all()


def test_activations_are_not_kept():
    inner = []

    class Watched(nn.Block):
        def forward(self, x):
            inner.append(x * 2)
            return inner[-1] * inner[-1]

    x = mx.nd.ones((4, 4))
    x.attach_grad()
    with autograd.record():
        y = mgpu.recompute(Watched())(x)
    assert len(autograd.get_symbol(y).get_internals().list_outputs()) == 3  # x, the block, and its product with 1
    mgpu.backward([y])
    assert (x.grad.asnumpy() == 8).all()
    assert len(inner) == 2


def test_prediction_and_shapes_that_are_not_known():
    net = nn.Sequential()
    net.add(mgpu.recompute(nn.Dense(16)), nn.Dense(5))
    net.initialize()
    X = mx.nd.ones((3, 7))
    with autograd.record():
        recorded = net(X)
    assert np.array_equal(recorded.asnumpy(), net(X).asnumpy())
    assert net[0].block.weight.shape == (16, 7)


def test_an_error_of_the_second_forward_pass_is_raised():
    class Once(nn.Block):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                raise ValueError("the second time")
            return x * 2

    x = mx.nd.ones((2,))
    x.attach_grad()
    with autograd.record():
        y = mgpu.recompute(Once())(x)
    with pytest.raises(ValueError, match="the second time"):
        mgpu.backward([y])


def test_what_is_refused(capfd):
    with pytest.raises(TrainerError, match="a gluon.Block"):
        mgpu.recompute(3)
    block = seeded(mgpu.recompute(layers()))
    with pytest.raises(ModesError):
        mgpu.Pipeline([block], [mx.cpu(0)])
    sparse = seeded(mgpu.recompute(nn.Embedding(5, 3, sparse_grad=True)))
    with autograd.record(), pytest.raises(ModesError, match="sparse gradients"):
        sparse(mx.nd.ones((2,)))
    with autograd.record():
        loss = block(mx.nd.ones((4, 16)))
    with pytest.raises(mx.MXNetError):
        loss.backward()
        mx.nd.waitall()
    assert "mgpu.backward" in capfd.readouterr().out  # printed by MXNet


def test_it_takes_arrays_of_both_kinds(arrays):
    mx.operator.register(_OPERATOR)(_Properties)  # MXNet notes here which kind the operator gets
    found = []
    for wrapped in (plain, mgpu.recompute):
        net = nn.Sequential()
        net.add(wrapped(layers()), nn.Dense(5, in_units=16))
        net = seeded(net, [mx.cpu(0), mx.cpu(1)])
        mgpu.train_batch(net, CE, mgpu.Trainer(net, "sgd", {"learning_rate": 0.5}), arrays.ones((5, 16)), arrays.zeros(5))
        found.append([param.data(mx.cpu(1)).asnumpy() for param in net.collect_params().values()])
    assert largest_difference(*found) == 0.0


@pytest.mark.parametrize("form", ["twice", "outside of the graph"])
def test_outputs_that_are_one_array_or_not_recorded(form):
    class Net(nn.Block):
        def __init__(self):
            super().__init__()
            self.layer = nn.Dense(3, in_units=2)

        def forward(self, x):
            h = self.layer(x)
            return h, h if form == "twice" else x.detach()

    net, X = Net(), mx.nd.array([[1.0, 2.0]])
    net.initialize(mx.init.One())
    found = []
    for block in (net, mgpu.recompute(net)):
        with autograd.record():
            one, other = block(X)
            loss = (one * 2).sum() + (other * 3).sum()
        mgpu.backward([loss])
        found.append(net.layer.weight.grad().asnumpy().copy())
    assert (found[0] == found[1]).all() and found[0].any()
