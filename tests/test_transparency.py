"""Contract: k devices train as one does, for every kind of batch, array, compilation and optimizer; replicas stay identical."""

from functools import lru_cache

import gluon_mgpu as mgpu
import mxnet as mx
import pytest

from .conftest import HYBRIDIZE, OPTIMIZERS, gluon_loop, largest_difference, small_batches, small_net, train, weights_of

BATCHES = {
    "even": [24] * 5,
    "uneven": [13, 7, 24, 11, 5],
    "fewer": [1, 2, 3, 1, 24, 2],  # than devices, in most steps
}


@lru_cache(maxsize=None)
def reference(batches, optimizer, np_arrays):
    """Weights of the hand-written loop on one device, made once for each kind of batch, optimizer and array."""
    assert np_arrays == mx.util.is_np_array()
    return weights_of(gluon_loop(small_net([mx.cpu(0)]), *OPTIMIZERS[optimizer], small_batches(BATCHES[batches])))


def assert_hidden(num_devices, batches, optimizer, arrays, *, hybridize="plain", atol=1e-5, **options):
    """Train on so many devices: the weights are those of the loop on one."""
    net = small_net([mx.cpu(i) for i in range(num_devices)], hybridize=HYBRIDIZE[hybridize])
    train(net, mgpu.Trainer(net, *OPTIMIZERS[optimizer]), small_batches(BATCHES[batches]), **options)
    assert mgpu.replica_difference(net) == 0.0
    assert largest_difference(weights_of(net), reference(batches, optimizer, arrays is mx.np)) <= atol


@pytest.mark.each_value
@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_devices_do_not_show_in_the_weights(num_devices, optimizer, batches, hybridize, arrays):
    assert_hidden(num_devices, batches, optimizer, arrays, hybridize=hybridize)


@pytest.mark.parametrize("weights", [[1, 1, 2], [0, 3, 1]])
def test_weighted_shards_do_not_show(weights, arrays):
    def split(X, y, devices):
        return mgpu.split_batch(X, y, devices, weights=weights)

    assert_hidden(3, "uneven", "momentum", arrays, split_f=split)


@pytest.mark.each_value
@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_micro_steps_do_not_show(num_devices, optimizer, hybridize, arrays):
    """Uneven batches in 3 uneven parts, some of which leave devices without data."""
    assert_hidden(num_devices, "uneven", optimizer, arrays, hybridize=hybridize, atol=1e-6, micro_steps=3)
