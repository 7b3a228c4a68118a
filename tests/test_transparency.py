"""Contract: k devices train as one does, for every kind of batch, array, compilation and optimizer; replicas stay identical."""

from functools import lru_cache

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from mxnet import gluon

from .conftest import gluon_loop, largest_difference, small_batches, small_net, weights_of

BATCHES = {
    "even": [24] * 5,
    "uneven": [13, 7, 24, 11, 5],
    "fewer": [1, 2, 3, 1, 24, 2],  # than devices, in most steps
}
HYBRIDIZE = {"plain": None, "hybrid": {}, "static": {"static_alloc": True, "static_shape": True}}
OPTIMIZERS = {
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}),
    "adam": ("adam", {"learning_rate": 0.01}),
}


@lru_cache(maxsize=None)
def reference(batches, optimizer, np_arrays):
    """Weights of the hand-written loop on one device, made once for each kind of batch, optimizer and array."""
    assert np_arrays == mx.util.is_np_array()
    return weights_of(gluon_loop(small_net([mx.cpu(0)]), *OPTIMIZERS[optimizer], small_batches(BATCHES[batches])))


@pytest.mark.each_value
@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_devices_do_not_show_in_the_weights(num_devices, optimizer, batches, hybridize, arrays):
    ctx = [mx.cpu(i) for i in range(num_devices)]
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    net = small_net(ctx, hybridize=HYBRIDIZE[hybridize])
    trainer = mgpu.Trainer(net, *OPTIMIZERS[optimizer])
    for X, y in small_batches(BATCHES[batches]):
        mgpu.train_batch(net, loss, trainer, X, y)
    assert mgpu.data_parallel.replica_difference(net) == 0.0
    assert largest_difference(weights_of(net), reference(batches, optimizer, arrays is mx.np)) <= 1e-5


@pytest.mark.parametrize("weights", [[1, 1, 2], [0, 3, 1]])
def test_weighted_shards_do_not_show(weights, arrays):
    ctx = [mx.cpu(i) for i in range(3)]
    net = small_net(ctx)
    trainer = mgpu.Trainer(net, *OPTIMIZERS["momentum"])

    def split(X, y, devices):
        return mgpu.split_batch(X, y, devices, weights=weights)

    for X, y in small_batches(BATCHES["uneven"]):
        mgpu.train_batch(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, X, y, split_f=split)
    assert largest_difference(weights_of(net), reference("uneven", "momentum", arrays is mx.np)) <= 1e-5


@pytest.mark.each_value
@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_micro_steps_do_not_show(num_devices, optimizer, hybridize, arrays):
    """Uneven batches in 3 uneven parts, some of which leave devices without data."""
    ctx = [mx.cpu(i) for i in range(num_devices)]
    net = small_net(ctx, hybridize=HYBRIDIZE[hybridize])
    trainer = mgpu.Trainer(net, *OPTIMIZERS[optimizer])
    for X, y in small_batches(BATCHES["uneven"]):
        mgpu.train_batch(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, X, y, micro_steps=3)
    assert mgpu.data_parallel.replica_difference(net) == 0.0
    assert largest_difference(weights_of(net), reference("uneven", optimizer, arrays is mx.np)) <= 1e-6
