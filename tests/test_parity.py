"""Contract: written by hand with Gluon's pieces or with ours, a right loop gives the same weights, to the bit."""

import random

import gluon_mgpu as mgpu
import mxnet as mx
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


OPTIONS = {
    "sgd": {"momentum": [0.0, 0.9], "wd": [0.0, 0.1], "clip_gradient": [None, 0.05]},
    "nag": {"momentum": [0.0, 0.9], "wd": [0.0, 0.1], "clip_gradient": [None, 0.05]},
    "adam": {"beta1": [0.5, 0.9], "beta2": [0.9, 0.99], "epsilon": [1e-8, 1e-3], "clip_gradient": [None, 0.05]},
    "rmsprop": {"gamma1": [0.5, 0.9], "epsilon": [1e-8, 1e-3], "clip_weights": [None, 0.2]},
    "nadam": {"schedule_decay": [0.004, 0.1], "beta2": [0.9, 0.99]},
}


def changes_of(optimizer, trainer, params, seed):
    """Before each of eight steps but the first, set an option, a multiplier of a parameter, or a divisor."""
    rng = random.Random(seed)
    yield
    for _ in range(7):
        option = rng.choice([*OPTIONS[optimizer]])
        found = [
            (trainer.optimizer, option, rng.choice(OPTIONS[optimizer][option])),
            (rng.choice(params), rng.choice(["lr_mult", "wd_mult"]), rng.choice([0.0, 0.5, 1.0])),
            (trainer.optimizer, "rescale_grad", 0.5),
            (trainer, "_scale", rng.choice([0.5, 1.0])),
        ]
        yield setattr(*rng.choice(found[:2] * 2 + found[2:]))


@pytest.mark.parametrize("optimizer", OPTIONS)
def test_options_that_change_during_training_give_the_bits_of_gluon(optimizer):
    """A momentum of 0 for some steps lost the velocity, which SGD keeps; with new multipliers, the step raised a StateError."""
    options = {"learning_rate": 0.01, **({"momentum": 0.9} if "momentum" in OPTIONS[optimizer] else {})}
    for seed in range(10):
        trained = []
        for kind in (mgpu.Trainer, gluon.Trainer):
            net = small_net([mx.cpu(0)])
            trainer = kind(net.collect_params(), optimizer, options)
            changes = changes_of(optimizer, trainer, list(net.collect_params().values()), seed)
            for _, batch in zip(changes, small_batches([6] * 8)):
                by_hand(net, [mx.cpu(0)], trainer, [batch])
            trained.append(weights_of(net))
        for mine, gluons in zip(*trained):
            np.testing.assert_array_equal(mine, gluons, err_msg=str(seed))
