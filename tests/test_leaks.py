"""Leaks: the slope, and loops that leak and that do not."""

import logging

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.monitor import leaks
from gluon_mgpu.monitor.leaks import LeakCheck, theil_sen
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import initialized, small_batches

pytest.importorskip("psutil")
CE = gluon.loss.SoftmaxCrossEntropyLoss


def test_the_slope_is_that_of_sen():
    """Ten points of y = 3x with two outliers: the median of the 45 slopes, and the 12th and the 35th of them, counted by hand.

    N = 45 and C = 1.96 * sqrt(10 * 9 * 25 / 18) = 21.9, so that the bounds are number (45 - 21.9) / 2 = 11.5 from either end.
    """
    x = list(range(10))
    y = [0, 3, 6, 9, 1000, 15, 18, -500, 24, 27]
    slopes = sorted((y[j] - y[i]) / (x[j] - x[i]) for i in range(10) for j in range(i + 1, 10))
    slope = theil_sen(x, y)
    assert slope.value == 3.0 == np.median(slopes)
    assert (slope.low, slope.high) == (slopes[11], slopes[34])


def test_an_array_that_nothing_has_filled_is_not_counted():
    """MXNet gives it no context: asking for one raises KeyError."""
    empty = mx.nd.NDArray(mx.ndarray.ndarray._new_empty_handle())
    assert empty.stype == "undefined"
    assert all(dtype != "undefined" for _, dtype, _ in leaks.live_arrays())


def test_live_arrays_are_counted(arrays):
    kept = [arrays.ones((7, 11, 13)) for _ in range(3)]
    assert leaks.live_arrays()["cpu(0)", "float32", (7, 11, 13)] == len(kept)


def loop(kind, num_steps=240):
    """A loop by hand over two contexts, as it stands in many scripts."""
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = initialized(nn.Dense(64, in_units=36), ctx)
    loss = CE()
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    ((X, y),) = small_batches([256])
    check, kept = LeakCheck(every=4), []
    for _ in range(num_steps):
        Xs, ys = mgpu.split_batch(X, y, ctx)
        with autograd.record():
            losses = [loss(net(x), t) for x, t in zip(Xs, ys)]
        trainer.backward(losses)
        trainer.step(256)
        if kind == "a list":
            kept.append(losses[0])
        check.step()
    return check.leaks(), check.report(), kept


def test_a_clean_loop_is_flat():
    for _ in range(3):  # memory that is allocated once, late, looks like growth; a leak leaks each time
        found, report, *_ = loop("clean")
        if not found:
            assert report.startswith("host: flat: ")
            return
    pytest.fail(report)


def test_a_list_of_losses_is_a_leak_of_arrays_and_is_named():
    found, report, *_ = loop("a list")
    assert found["live arrays"].value == 1.0, report
    assert "more of float32 (128,) on cpu(0)" in report and "float32 (128,) on cpu(1)" not in report


class Keeps(mgpu.Callback):
    def __init__(self):
        self.kept = []

    def on_batch_end(self, state):
        self.kept.append(mx.nd.ones((2000,)))


@pytest.mark.parametrize("leaks", [False, True])
def test_in_fit(report_every, caplog, leaks):
    report_every(seconds=0.0)
    net = initialized(nn.Dense(3, in_units=36), [mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    check = LeakCheck(every=4)
    callbacks = [*([Keeps()] if leaks else []), check]
    with caplog.at_level(logging.INFO, "gluon_mgpu"):
        mgpu.fit(net, CE(), trainer, small_batches([8] * 4), epochs=40, max_inflight=1, callbacks=callbacks)
    assert ("live arrays" in check.leaks()) == leaks, check.report()
    (said,) = [record for record in caplog.records if record.message.startswith("memory: host: ")]
    if leaks:
        assert said.levelno == logging.WARNING and "more of float32 (2000,) on cpu(0)" in said.message


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"every": True}, {"tolerance_bytes": float("nan")}, {"ctx": "cpu"}, {"ctx": ["gpu(0)"]}]
)
def test_wrong_arguments(wrong):
    with pytest.raises(TrainerError):
        LeakCheck(**wrong)


def test_a_report_too_early_says_so():
    check = LeakCheck(every=1)
    for num_samples in range(3):
        assert check.report().startswith(f"unknown: {num_samples} samples")
        check.step()
