"""Contract: written by hand with Gluon's pieces or with ours, a right loop gives the same weights, to the bit."""

import gluon_mgpu as mgpu
import numpy as np
import pytest
from mxnet import autograd, gluon

from .conftest import LOSS, as_array, small_batches, small_net, train, weights_of
from .worlds import devices as devices


def by_hand(net, ctx, trainer, batches):
    """The loop of the Gluon tutorials, with the divisor that was seen."""
    for X, y in batches:
        Xs, ys = (gluon.utils.split_and_load(as_array(values), ctx) for values in (X, y))
        with autograd.record():
            losses = [LOSS(net(x), t) for x, t in zip(Xs, ys)]
        for value in losses:
            value.backward()
        trainer.step(len(X))


@pytest.mark.pairwise
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop", "nag"])
@pytest.mark.parametrize("normalize", [False, True])
def test_even_batches_give_the_bits_of_gluon(devices, arrays, optimizer, normalize):
    batches = small_batches([6 * len(devices)] * 3)
    ours = small_net(devices, normalize=normalize)
    train(ours, mgpu.Trainer(ours, optimizer, {"learning_rate": 0.01}), batches)
    theirs = small_net(devices, normalize=normalize)
    params = theirs.collect_params()
    by_hand(theirs, devices, gluon.Trainer(params, optimizer, {"learning_rate": 0.01}, update_on_kvstore=False), batches)
    for mine, gluons in zip(weights_of(ours), weights_of(theirs)):
        np.testing.assert_array_equal(mine, gluons)
