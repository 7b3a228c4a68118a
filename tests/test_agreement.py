"""agreement: what trains as one device does is said to agree, and what does not, for each of several mistakes, is not."""

import math
from dataclasses import replace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.tuning.agreement import (
    AGREE,
    DIFFER,
    UNKNOWN,
    LargerBatch,
    Recipe,
    SameBatch,
    TrialRun,
    larger_batch,
    plot_agreement,
    same_batch,
)
from mxnet import autograd
from mxnet.gluon import nn

from .conftest import assert_house_style

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
    return Recipe(mlp, data, batch_size=16, epochs=3, learning_rate=0.1)


def stepping(divisor=len, *, split=mgpu.split_batch, scale=1.0):
    """The loop by hand, with mistakes."""

    def step(net, loss, trainer, X, y):
        Xs, ys = split(X, y, trainer.contexts)
        with autograd.record():
            losses = [loss(net(x), t) * scale for x, t in zip(Xs, ys)]
        mgpu.backward(losses)
        trainer.step(divisor(X))
        return mgpu.Batch([], ys, [one / scale for one in losses], len(X))

    return step


def leaving_a_device_out(X, y, contexts):
    """The last device's examples are lost."""
    Xs, ys = mgpu.split_batch(X, y, contexts)
    return Xs[:-1], ys[:-1]


@pytest.mark.pairwise
@pytest.mark.parametrize("build", [mlp, normalized])
def test_the_toolkit_agrees_with_gluon(recipe, devices, arrays, build):
    same = same_batch(replace(recipe, build=build), devices)
    assert same.verdict == AGREE
    assert same.num_comparable() == len(same.ours.losses) == 3 * 5
    assert max(same.differences()) <= 1e-5
    assert same.ours.losses[-1] < same.ours.losses[0] / 2


def test_a_right_step_by_hand_agrees(recipe):
    assert same_batch(recipe, CONTEXTS, step=stepping()).verdict == AGREE


@pytest.mark.parametrize(
    "step",
    {
        "the nominal batch size": stepping(lambda X: 16),
        "a mean for each device": stepping(lambda X: len(X) / len(CONTEXTS)),
        "a loss that is scaled": stepping(scale=1.01),
        "a device that is left out": stepping(split=leaving_a_device_out),
    }.values(),
)
def test_what_trains_otherwise_does_not(recipe, step):
    same = same_batch(recipe, CONTEXTS, step=step)
    assert same.verdict == DIFFER
    assert max(same.differences()) > 10 * max(same.tolerances())


def test_another_seed_does_not_agree(recipe):
    one, other = same_batch(recipe, CONTEXTS), same_batch(recipe, CONTEXTS, seed=1)
    assert SameBatch(one.reference, other.ours, one.rounding).verdict == DIFFER


def run(losses, weight=0.0):
    return TrialRun(list(losses), 0.5, [np.array([weight])])


ONES = [1.0] * 20


@pytest.mark.parametrize(
    ("losses", "weight", "rounding", "verdict", "num_comparable"),
    [
        ([1 + 9e-6] * 20, 9e-6, [1.0] * 20, AGREE, 20),
        ([1 + 2e-5] * 20, 0, [1.0] * 20, DIFFER, 20),
        ([1.0] * 20, 2e-5, [1.0] * 20, DIFFER, 20),
        ([1 + 2e-5] * 20, 0, [1 + 3e-6] * 20, AGREE, 20),
        ([1.0] * 12 + [2.0] * 8, 9.0, [1.0] * 12 + [1.1] * 8, AGREE, 12),  # it is rounding that grows
        ([1.0] * 5 + [2.0] * 15, 9.0, [1.0] * 5 + [1.1] * 15, UNKNOWN, 5),
        ([1.0] * 5 + [2.0] * 15, 9.0, [1.0] * 6 + [1.1] * 14, DIFFER, 6),
        ([1.0] * 20, 0.0, [1.0] * 5 + [1.1] * 15, AGREE, 20),  # close all the same
        ([math.nan] * 20, 0, [1.0] * 20, DIFFER, 20),
        ([1.0] * 20, math.nan, [1.0] * 20, DIFFER, 20),
    ],
)
def test_the_verdict_on_the_same_batch(losses, weight, rounding, verdict, num_comparable):
    same = SameBatch(run(ONES), run(losses, weight), run(rounding))
    assert (same.verdict, same.num_comparable()) == (verdict, num_comparable)


def with_accuracies(*accuracies):
    return [TrialRun([], accuracy, []) for accuracy in accuracies]


def test_the_interval_is_students():
    """Gaps 0.02, 0.00, 0.01, 0.03: mean 0.015, s = 0.01291, t(0.95, 3) = 2.3534 of the printed tables."""
    larger = LargerBatch(with_accuracies(0.5, 0.6, 0.7, 0.8), with_accuracies(0.52, 0.6, 0.71, 0.83), 0.02)
    half = 2.3534 * 0.0129099 / 2
    assert larger.interval() == pytest.approx((0.015 - half, 0.015 + half), abs=1e-6)


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ((0.900, 0.910, 0.905), AGREE),
        ((0.905, 0.915, 0.912), AGREE),
        ((0.850, 0.862, 0.855), DIFFER),
        ((0.952, 0.962, 0.955), DIFFER),
        ((0.880, 0.930, 0.905), UNKNOWN),  # the same mean, far apart
        ((0.880, 0.891, 0.884), UNKNOWN),  # about the margin away
    ],
)
def test_the_verdict_on_the_larger_batch(accuracies, verdict):
    assert LargerBatch(with_accuracies(0.90, 0.91, 0.905), with_accuracies(*accuracies), 0.02).verdict == verdict


@pytest.mark.exhaustive
def test_a_larger_batch_with_a_scaled_rate_agrees_and_a_wrong_rate_does_not():
    """On the digits, with few epochs: four times the batch at the old rate has learnt less, and is told apart."""
    digits = mgpu.data.load_digits()
    recipe = Recipe(lambda num_classes: mlp_of(32, num_classes), digits, batch_size=32, epochs=6, learning_rate=0.02)
    contexts = [mx.cpu(i) for i in range(4)]
    verdicts = {
        rule: larger_batch(replace(recipe, rule=rule), contexts, seeds=range(3), margin=0.04).verdict
        for rule in ("linear", "none")
    }
    assert verdicts == {"linear": AGREE, "none": DIFFER}


def mlp_of(units, num_classes):
    net = nn.HybridSequential()
    net.add(nn.Flatten(), nn.Dense(units, activation="relu"), nn.Dense(num_classes))
    return net


def test_the_larger_batch_is_larger_and_its_rate_too(recipe):
    sizes, rates = [], []

    def noting(net, loss, trainer, X, y):
        batch = mgpu.train_batch(net, loss, trainer, X, y)
        sizes.append((len(trainer.contexts), len(X)))
        rates.append(trainer.learning_rate)
        return batch

    larger_batch(replace(recipe, epochs=4), CONTEXTS, seeds=[0, 1], step=noting)
    epoch = [(1, 6)] + [(1, 16)] * 4, [(3, 22), (3, 48)]
    assert sizes == (epoch[0] * 4 + epoch[1] * 4) * 2
    assert max(rates[:20]) == pytest.approx(0.1, rel=0.02)
    assert max(rates[20:28]) == pytest.approx(0.3)
    assert rates[20] < 0.25


def test_the_figure_shows_what_was_found(recipe):
    same = same_batch(recipe, CONTEXTS)
    larger = larger_batch(recipe, CONTEXTS, seeds=[0, 1])
    made = plot_agreement(same, larger, ("one", "three"))
    curves, gaps, epochs = made.axes
    assert [line.get_ydata().tolist() for line in curves.lines] == [same.reference.losses, same.ours.losses]
    assert gaps.lines[-1].get_ydata()[0] == same.tolerances()[0]
    assert len(epochs.lines) == 4
    assert len(plot_agreement(same, None, ("one", "three")).axes) == 2


@pytest.mark.parametrize(
    "options", [{"seeds": [0]}, {"seeds": [1, 1]}, {"margin": 0}, {"margin": math.nan}, {"margin": 1}], ids=str
)
def test_what_makes_no_sense_is_refused(recipe, options):
    with pytest.raises(TrainerError) as caught:
        larger_batch(recipe, CONTEXTS, **options)
    assert_house_style(caught.value)
