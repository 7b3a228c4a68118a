"""Copies and pickles of networks: independent, trainable; those of a trainer are refused."""

import copy
import pickle

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.errors import TrainerError
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import largest_difference, mostly_two, small_batches, weights_of

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
MODES = {"plain": None, "hybrid": {}, "static": {"static_alloc": True, "static_shape": True}}
WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing))}


def build(ctx, mode="plain"):
    """A network with weights in a bucket and alone, BatchNorm, and a tied pair of layers."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(3, 3, in_channels=1), nn.BatchNorm(in_channels=3), nn.Flatten())
    net.add(nn.Dense(6, activation="tanh", in_units=3 * 4 * 4), nn.Dense(6, activation="tanh", in_units=6))
    net.add(nn.Dense(6, in_units=6, params=net[-1].params), nn.Dense(3, in_units=6))
    mx.random.seed(0)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    return net


def train(net, trainer, sizes):
    for X, y in small_batches(sizes):
        mgpu.train_batch(net, LOSS, trainer, X, y)
    mx.nd.waitall()


def values(net):
    return [param.list_data()[0].asnumpy() for param in net.collect_params().values()]


@pytest.mark.pairwise
@pytest.mark.parametrize("mode, way", [("plain", "pickle"), ("hybrid", "deepcopy"), ("hybrid", "pickle"), ("static", "deepcopy")])
def test_a_copy_is_a_network_of_its_own(devices, arrays, mode, way):
    """Its weights were no variables, those of cpu(1) lay on cpu(0), and a compiled network raised a ValueError of ctypes."""
    net = build(devices, mode)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    train(net, trainer, [6] * 3)
    copied, before = WAYS[way](net), values(net)
    assert largest_difference(values(copied), before) == 0.0
    assert [param.list_ctx() for param in copied.collect_params().values()] == [devices] * len(before)
    assert all([a.context for a in param.list_data()] == devices for param in copied.collect_params().values())
    assert copied[5].weight is copied[4].weight and copied[4].weight is not net[4].weight

    train(copied, mgpu.Trainer(copied, "sgd", {"learning_rate": 0.1}), [6] * 2)
    assert largest_difference(values(net), before) == 0.0
    assert largest_difference(weights_of(copied), weights_of(net)) > 1e-4
    after = values(copied)
    train(net, trainer, [6] * 2)
    assert largest_difference(values(copied), after) == 0.0
    assert mgpu.data_parallel.replica_difference(copied) == mgpu.data_parallel.replica_difference(net) == 0.0


def test_a_copy_trains_as_a_network_that_was_never_copied(arrays):
    devices = [mx.cpu(0), mx.cpu(1)]
    weights = []
    for copies in (False, True):
        net = build(devices)
        train(net, mgpu.Trainer(net, "adam"), [6] * 2)
        net = copy.deepcopy(net) if copies else net
        train(net, mgpu.Trainer(net, "adam"), [6, 5, 1])
        weights.append(values(net))
    assert largest_difference(*weights) == 0.0


@pytest.mark.parametrize(
    "way, num_devices", [pytest.param("deepcopy", 1, marks=pytest.mark.exhaustive), ("deepcopy", 2), ("pickle", 2)]
)
def test_a_copy_made_while_gradients_add_up_starts_with_none(num_devices, arrays, way):
    """It kept `grad_req="add"`, so that each of its gradients was the sum of all before."""
    devices = [mx.cpu(i) for i in range(num_devices)]
    net = build(devices)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    with trainer.accumulate():
        train(net, trainer, [6])
        copied = WAYS[way](net)
    trainer.flush()
    straight = build(devices)
    for each in (copied, straight):
        train(each, mgpu.Trainer(each, "sgd", {"learning_rate": 0.1}), [6, 4, 5])
    assert {param.grad_req for param in copied.collect_params().values()} == {"write", "null"}
    assert largest_difference(weights_of(copied), weights_of(straight)) == 0.0


@mostly_two
def test_frozen_constant_and_deferred_parameters_are_copied_as_they_are(devices, arrays):
    net = nn.Sequential()
    net.add(nn.Dense(4, in_units=3), nn.Dense(2))
    with net.name_scope():
        net.scale = net.params.get_constant("scale", arrays.array([2.0]))
    net.initialize(mx.init.One(), ctx=devices)
    net[0].weight.grad_req = "null"
    copied = copy.deepcopy(net)
    assert copied[0].weight.grad_req == "null" and copied[0].weight._grad is None and copied[1].weight._data is None
    assert [copied.scale.data(ctx).asnumpy().tolist() for ctx in devices] == [[2.0]] * len(devices)
    copied(arrays.ones((1, 3), ctx=devices[-1]))
    assert copied[1].weight.shape == (2, 4) and net[1].weight._data is None


@pytest.mark.pairwise
@pytest.mark.parametrize("way", [*WAYS.values(), copy.copy])
@pytest.mark.parametrize("kind", [mgpu.Trainer, lambda *args: mgpu.LocalSGD(*args, every=2)])
def test_copies_of_a_trainer_are_refused(devices, kind, way):
    """They were None."""
    trainer = kind(build(devices), "sgd")
    for thing in (trainer, [trainer]):
        if thing is trainer or way is not copy.copy:
            with pytest.raises(TrainerError, match="save_states"):
                way(thing)


def test_a_copied_graph_of_np_arrays_stays_one():
    """MXNet's own pickle restores a graph of legacy arrays, whose operators follow other rules."""
    mx.npx.set_np()
    try:
        graph = mx.sym.var("x").as_np_ndarray() + 1
        for way in WAYS.values():
            copied = way(graph)
            assert type(copied) is type(graph) is mx.sym.np._Symbol and copied.tojson() == graph.tojson()
    finally:
        mx.npx.reset_np()
