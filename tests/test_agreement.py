"""agreement: what trains as one device does is said to agree, and what does not, for each of several mistakes, is not."""

import math
from dataclasses import replace
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.tuning import agreement
from gluon_mgpu.tuning.agreement import AGREE, DIFFER, UNKNOWN, Recipe, SameBatch, same_batch
from mxnet import autograd
from mxnet.gluon import nn

CONTEXTS = [mx.cpu(i) for i in range(3)]


@pytest.fixture(scope="module")
def data():
    """Two classes of images of four pixels, nearly separable."""
    rng = np.random.RandomState(0)
    found = []
    for num_images in (70, 30):
        labels = rng.randint(0, 2, num_images).astype("int32")
        images = rng.normal(0, 0.7, (num_images, 1, 2, 2)) + (2 * labels - 1)[:, None, None, None]
        found += [images.astype("float32"), labels]
    return mgpu.data.ImageData("two blobs", *found)


def mlp(num_classes):
    net = nn.HybridSequential()
    net.add(nn.Flatten(), nn.Dense(8, activation="tanh"), nn.Dense(num_classes))
    return net


def normalized(num_classes):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 1), nn.BatchNorm(), nn.Flatten(), nn.Dense(num_classes))
    return net


@pytest.fixture
def recipe(data):
    return Recipe(mlp, data, batch_size=16, num_steps=15, learning_rate=0.1)


def stepping(divisor=len, *, split=mgpu.split_batch, scale=1.0):
    """The loop by hand, with mistakes."""

    def step(net, loss, trainer, X, y):
        Xs, ys = split(X, y, trainer.contexts)
        with autograd.record():
            losses = [loss(net(x), t) * scale for x, t in zip(Xs, ys)]
        trainer.backward(losses)
        trainer.step(divisor(X))
        return mgpu.data_parallel.Batch([], ys, [one / scale for one in losses], len(X))

    return step


def leaving_a_device_out(X, y, contexts):
    """The last device's examples are lost."""
    Xs, ys = mgpu.split_batch(X, y, contexts)
    return Xs[:-1], ys[:-1]


@pytest.mark.each_value
@pytest.mark.parametrize("build", [mlp, normalized])
def test_the_toolkit_agrees_with_gluon(recipe, devices, arrays, build):
    same = same_batch(replace(recipe, build=build), devices)
    assert same.verdict == AGREE
    assert len(same.differences()) == len(same.ours) == 15
    assert max(same.differences()) <= 1e-5
    assert same.ours[-1] < same.ours[0] / 2


@pytest.fixture
def step_by(monkeypatch):
    """A function that puts another step in the place of the toolkit's."""
    return partial(monkeypatch.setattr, agreement, "train_batch")


@pytest.mark.parametrize(
    "step",
    {
        "the nominal batch size": stepping(lambda X: 16),
        "a mean for each device": stepping(lambda X: len(X) / len(CONTEXTS)),
        "a loss that is scaled": stepping(scale=1.01),
        "a device that is left out": stepping(split=leaving_a_device_out),
    }.values(),
)
def test_what_trains_otherwise_does_not(recipe, step, step_by):
    step_by(step)
    same = same_batch(recipe, CONTEXTS)
    assert same.verdict == DIFFER
    assert max(same.differences()) > 10 * max(same.allowed())


@pytest.mark.parametrize(
    ("losses", "rounding", "verdict", "num_comparable"),
    [
        ([1 + 9e-6] * 20, [1.0] * 20, AGREE, 20),
        ([1 + 2e-5] * 20, [1.0] * 20, DIFFER, 20),
        ([1 + 2e-5] * 20, [1 + 3e-6] * 20, AGREE, 20),
        ([1.0] * 12 + [2.0] * 8, [1.0] * 12 + [1.1] * 8, AGREE, 12),  # it is rounding that grows
        ([1.0] * 5 + [2.0] * 15, [1.0] * 5 + [1.1] * 15, UNKNOWN, 5),
        ([1.0] * 5 + [2.0] * 15, [1.0] * 6 + [1.1] * 14, DIFFER, 6),
        ([math.nan] * 20, [1.0] * 20, DIFFER, 20),
    ],
)
def test_the_verdict_on_the_same_batch(losses, rounding, verdict, num_comparable):
    same = SameBatch([1.0] * 20, losses, rounding)
    assert (same.verdict, len(same.allowed())) == (verdict, num_comparable)
