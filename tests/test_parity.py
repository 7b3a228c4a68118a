"""Contract: written by hand with Gluon's pieces or with ours, a right loop gives the same weights, to the bit."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from .conftest import small_batches, small_net, weights_of


@pytest.fixture(params=[1, 3])
def devices(request):
    """1 and 3 CPU contexts."""
    return [mx.cpu(i) for i in range(request.param)]


def by_hand(net, ctx, trainer, batches):
    """The loop of the Gluon tutorials, with the divisor that was seen."""
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    for X, y in batches:
        Xs = gluon.utils.split_and_load(array(X, dtype=X.dtype), ctx)
        ys = gluon.utils.split_and_load(array(y, dtype=y.dtype), ctx)
        with autograd.record():
            losses = [loss(net(x), t) for x, t in zip(Xs, ys)]
        for value in losses:
            value.backward()
        trainer.step(len(X))


@pytest.mark.pairwise
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop", "nag"])
@pytest.mark.parametrize("normalize", [False, True])
def test_even_batches_give_the_bits_of_gluon(devices, arrays, optimizer, normalize):
    batches = small_batches([6 * len(devices)] * 3)
    ours = small_net(devices, normalize=normalize)
    trainer = mgpu.Trainer(ours, optimizer, {"learning_rate": 0.01})
    for X, y in batches:
        mgpu.train_batch(ours, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, X, y)
    theirs = small_net(devices, normalize=normalize)
    params = theirs.collect_params()
    by_hand(theirs, devices, gluon.Trainer(params, optimizer, {"learning_rate": 0.01}, update_on_kvstore=False), batches)
    for mine, gluons in zip(weights_of(ours), weights_of(theirs)):
        np.testing.assert_array_equal(mine, gluons)


def test_our_trainer_is_a_drop_in_in_the_hand_written_loop(devices, arrays):
    batches = small_batches([6 * len(devices)] * 3)
    nets = []
    for trainer_class in (gluon.Trainer, mgpu.Trainer):
        net = small_net(devices)
        trainer = trainer_class(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        by_hand(net, devices, trainer, batches)
        nets.append(weights_of(net))
    for gluons, ours in zip(*nets):
        np.testing.assert_allclose(ours, gluons, atol=1e-6)


def test_a_schedule_is_followed_on_every_device(devices):
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.2)
    net = small_net(devices)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.2, "lr_scheduler": schedule})
    rates = []
    for X, y in small_batches([6] * 6):
        mgpu.train_batch(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, X, y)
        rates.append(trainer.learning_rate)
    assert rates == [0.2, 0.2, 0.1, 0.1, 0.05, 0.05]
    assert mgpu.replica_difference(net) == 0.0
