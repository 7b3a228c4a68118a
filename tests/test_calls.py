"""Contract: a step makes few Python calls, which grow with the devices and not with the parameters. Noise cannot change them."""

import sys

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.c_calls import Flags
from gluon_mgpu.trainer.layout import Layout
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .versions import set_params

CONTEXTS = [mx.cpu(i) for i in range(8)]

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
COMPILED = (60, 30)  # at most so many calls for a step, and so many more for each device
RECORDED = (100, 30)  # more than Gluon's own split, forward and backward


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Without the synchronised layers of other tests."""
    monkeypatch.setattr("gluon_mgpu.data_parallel.batchnorm.SyncBatchNorm.was_made", False)


def calls_of(step):
    """The number of Python functions that a step calls, once it has run some times."""
    for _ in range(4):
        step()
    mx.nd.waitall()
    count = [0]

    def profile(frame, event, argument):
        count[0] += event == "call"

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    mx.nd.waitall()
    return count[0]


def world(num_devices, num_params=62):
    """A network of so many parameters, and a batch."""
    net = nn.HybridSequential()
    for _ in range(num_params // 2 - 1):
        net.add(nn.Dense(8, activation="relu", in_units=8))
    net.add(nn.Dense(10, in_units=8))
    net.initialize(mx.init.Xavier(), ctx=CONTEXTS[:num_devices])
    net.hybridize(static_alloc=True, static_shape=True)
    rng = np.random.RandomState(0)
    return net, rng.randn(64, 8).astype("float32"), rng.randint(0, 10, 64).astype("float32")


def compiled(num_devices, **options):
    net, X, y = world(num_devices, **options)
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}))
    return calls_of(lambda: step(X, y))


@pytest.mark.mxnet1("compiled passes")
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_a_compiled_step(num_devices):
    assert compiled(num_devices) <= COMPILED[0] + COMPILED[1] * num_devices


@pytest.mark.mxnet1("compiled passes")
def test_a_compiled_step_of_many_parameters():
    assert compiled(2, num_params=500) <= 1.1 * compiled(2)


@pytest.mark.mxnet1("compiled passes")
def test_an_average_of_many_parameters():
    def average(num_params):
        net, X, y = world(2, num_params)
        step = mgpu.compile_step(net, LOSS, mgpu.LocalSGD(net, "adam", every=1))
        return calls_of(lambda: step(X, y))

    assert average(500) <= 1.1 * average(62)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_a_recorded_step_beside_gluons_split_and_passes(num_devices):
    net, X, y = world(num_devices)

    def gluons():
        with autograd.record():
            shards = zip(*(gluon.utils.split_and_load(one, CONTEXTS[:num_devices]) for one in (X, y)))
            losses = [LOSS(net(features), label) for features, label in shards]
        autograd.backward(losses)

    allowed = calls_of(gluons) + RECORDED[0] + RECORDED[1] * num_devices
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    trainer.discard()
    assert calls_of(lambda: mgpu.train_batch(net, LOSS, trainer, X, y)) <= allowed


def test_a_recorded_batch_reads_the_flags_before_and_after_its_pass(calls_to):
    net, X, y = world(2)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    mgpu.train_batch(net, LOSS, trainer, X, y)
    reads = calls_to(Flags, "read")
    mgpu.train_batch(net, LOSS, trainer, X, y)
    assert len(reads) == 2


def test_only_the_first_batch_walks_through_the_network():
    """Sentences have many lengths: what a batch of a new form costs more does not grow with the network."""

    def calls(num_params):
        net, X, y = world(1, num_params)
        trainer, sizes = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), iter(range(60, 1, -1))

        def step(size):
            mgpu.train_batch(net, LOSS, trainer, X[:size], y[:size])

        return calls_of(lambda: step(next(sizes))) - calls_of(lambda: step(64))

    assert calls(200) <= 1.1 * calls(20)


@pytest.mark.parametrize("compiled", [pytest.param("on", marks=pytest.mark.mxnet1("compiled passes")), "off"])
def test_a_batch_looks_at_the_parameters_once_and_after_python_again(compiled, calls_to):
    net, X, y = world(2)
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), compiled=compiled)
    step(X, y)
    looks = calls_to(Layout, "look", note=lambda name, layout: layout)
    step(X, y)
    assert len(looks) == (1 if compiled == "on" else 2)
    set_params(net[0], "grad_req", "null")
    step(X, y)
    assert looks[0].trainable == list(range(2, 62))
