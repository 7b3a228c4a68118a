"""Memory that grows: made on purpose, and told apart."""

import gc
import logging
import mmap
import re
import threading

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.monitor import leaks
from gluon_mgpu.monitor.leaks import Growth, LeakCheck, MemoryReading, judge, theil_sen
from gluon_mgpu.runtime.engine import is_serial, when_ready
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import assert_house_style, small_batches

CE = gluon.loss.SoftmaxCrossEntropyLoss


@pytest.fixture(autouse=True)
def little_garbage():
    """What there is before a test is no garbage of its own: each look collects, and would go through all of it."""
    gc.collect()
    gc.freeze()


# The slope


def test_the_slope_is_that_of_sen():
    """Ten points of y = 3x with two wild ones: the median of the 45 slopes, and the 9th and the 37th of them, counted by hand.

    N = 45 and C = 1.96 * sqrt(10 * 9 * 25 / 18) = 21.9, so that the bounds are number (45 - 21.9) / 2 = 11.5 from either end.
    """
    x = list(range(10))
    y = [0, 3, 6, 9, 1000, 15, 18, -500, 24, 27]
    slopes = sorted((y[j] - y[i]) / (x[j] - x[i]) for i in range(10) for j in range(i + 1, 10))
    slope = theil_sen(x, y)
    assert slope.value == 3.0 == np.median(slopes)
    assert (slope.low, slope.high) == (slopes[11], slopes[34])


def test_the_bounds_hold_the_true_slope():
    """In 95 of 100 runs; here at least 180 of 200, and a slope of 1 is not held as often."""
    rng = np.random.RandomState(0)
    x = np.arange(20)
    found = [theil_sen(x.tolist(), (2 * x + rng.normal(0, 3, 20)).tolist()) for _ in range(200)]
    assert 180 <= sum(slope.low <= 2 <= slope.high for slope in found) < 200
    assert sum(slope.low <= 1 <= slope.high for slope in found) < 20


def test_no_slope_of_one_place():
    with pytest.raises(ValueError, match="two values that differ") as caught:
        theil_sen([1, 1], [2, 3])
    assert_house_style(caught.value)


# The verdict on series that are known


def waves(*, leak=0, queue=0, warm_up=0, noise=0, num=30, inflight=20):
    """Samples every 5 steps, every fourth after waiting: 5, 10, 15 queued, then none, unless `inflight` bounds the queue."""
    rng = np.random.RandomState(0)
    samples = []
    for look in range(1, 4 * num):
        step, queued = 5 * look, min(inflight, 5 * (look % 4))
        number = 10**8 + leak * step + queue * queued + int(rng.normal(0, noise)) - (warm_up if step < 100 else 0)
        samples.append(MemoryReading(step, number, queued))
    return samples


@pytest.mark.parametrize(
    ("series", "verdict"),
    [
        ({}, "flat"),
        ({"noise": 50_000}, "flat"),
        ({"warm_up": 10**7, "noise": 1000}, "flat"),
        ({"leak": 200}, "flat"),  # bookkeeping
        ({"leak": 1000}, "leak"),
        ({"leak": 1000, "noise": 20_000}, "leak"),
        ({"leak": 5000, "queue": 10**5, "warm_up": 10**7}, "leak"),
        ({"queue": 10**5}, "queue"),
        ({"queue": 10**5, "noise": 50_000, "warm_up": 10**7}, "queue"),
        ({"queue": 10**5, "inflight": 2}, "flat"),  # fit keeps two on purpose
        ({"leak": 1000, "num": 8}, "unknown"),
    ],
)
def test_leak_and_queue_are_told_apart(series, verdict):
    growth = judge(waves(**series))
    assert growth.verdict == verdict, growth
    if verdict == "leak":
        assert growth.slope.low <= series["leak"] <= growth.slope.high
        assert growth.slope.value == pytest.approx(series["leak"], rel=0.3)
    if verdict == "queue":
        assert growth.queued_bytes == pytest.approx(1e5, rel=0.1)
        assert growth.max_queued == 15


def test_what_is_said():
    assert str(judge(waves(leak=1000))) == "leak of 1000 bytes per step (95%: 1000 to 1000; 22 samples)"
    assert str(judge(waves())) == "flat: 0 bytes per step (95%: 0 to 0; 22 samples)"
    assert str(judge(waves(queue=10))) == "flat: 0 bytes per step (95%: 0 to 0; 22 samples)"
    assert "100000 bytes per queued step, up to 15 queued" in str(judge(waves(queue=10**5)))
    assert str(Growth("unknown", num_samples=3)).startswith("unknown: 3 samples")


# What is measured


def test_host_bytes_are_those_of_arrays():
    before = leaks.host_bytes()
    array = mx.nd.ones((1000, 1000))
    array.wait_to_read()
    assert leaks.host_bytes() - before == pytest.approx(4e6, abs=5e5)
    del array
    mx.nd.waitall()
    assert abs(leaks.host_bytes() - before) < 5e5


def test_without_a_counter_of_malloc_the_resident_size_is_taken(monkeypatch):
    monkeypatch.setattr(leaks, "_malloc_counter", lambda: None)
    held, grown = [], []
    for _ in range(3):  # a kernel short of memory may take other pages away meanwhile
        before = leaks.host_bytes()
        held.append(mmap.mmap(-1, 8 * 10**7))  # malloc would give out what it has kept
        np.frombuffer(held[-1], np.uint8)[:] = 1
        grown.append(leaks.host_bytes() - before)
    assert 7e7 < max(grown) < 12e7


def test_live_arrays(arrays):
    kept = [arrays.ones((7, 11, 13)) for _ in range(3)]
    assert leaks.live_arrays()["cpu(0)", "float32", (7, 11, 13)] == len(kept)


# Loops that leak, and loops that do not


def loop(kind, num_steps=160):
    """A loop by hand over two contexts, as it stands in many scripts."""
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = nn.Dense(3, in_units=36)
    net.initialize(ctx=ctx)
    loss = CE()
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    ((X, y),) = small_batches([8])
    check, kept, total = LeakCheck(every=2), [], 0
    for _ in range(num_steps):
        Xs, ys = mgpu.split_batch(X, y, ctx)
        with autograd.record():
            losses = [loss(net(x), t) for x, t in zip(Xs, ys)]
            if kind == "a graph":
                total = total + losses[0].mean()
        mgpu.backward(losses)
        trainer.step(8)
        if kind == "a list":
            kept.append(losses[0])
        if kind == "clean":
            total = total + losses[0].mean()
        check.step(losses)
    return check.growth()["host"], check.report()  # while what is kept is kept


def test_a_clean_loop_is_flat():
    for _ in range(3):  # memory that is allocated once, late, looks like growth; a leak leaks each time
        growth, report = loop("clean")
        if growth.verdict in ("flat", "queue"):
            return
    pytest.fail(report)


def test_a_list_of_losses_is_a_leak_and_is_named():
    growth, report = loop("a list")
    assert growth.verdict == "leak", report
    assert 256 < growth.slope.value < 10_000
    assert "float32 (4,) on cpu(0)" in report
    assert "float32 (4,) on cpu(1)" not in report


def test_a_graph_that_goes_on_is_a_leak_that_no_array_shows():
    """The classic: total_loss += loss inside of record(), never read."""
    growth, report = loop("a graph")
    assert growth.verdict == "leak", report
    assert "The number of MXNet's arrays in Python does not increase" in report


def test_a_queue_without_back_pressure_is_no_leak():
    if is_serial():
        pytest.skip("the serial engine has no queue")

    def run(wait):
        check = LeakCheck(every=3)
        batch, matrix = mx.nd.ones((125, 500)), mx.nd.ones((500, 500), ctx=mx.cpu(1))
        matrix.wait_to_read()
        slow = None
        for step in range(144):
            if not wait and step % 12 == 0:  # the other device runs nothing for 11 steps, then all of them
                slow = threading.Event()
                when_ready([matrix], lambda slow=slow: slow.wait(60), on_worker=True)
            x = batch + 1
            x.wait_to_read()  # kept until the other device comes to it
            total = mx.nd.dot(mx.nd.dot(x.as_in_context(mx.cpu(1)), matrix), matrix).sum()
            if wait:
                total.wait_to_read()
            elif step % 12 == 11:
                slow.set()  # the check waits for all that is queued in this step, the fourth that it looks at
            check.step([total])
        return check.growth()["host"]

    growing = run(False)
    assert growing.verdict == "queue", growing
    assert growing.max_queued > 3
    assert growing.queued_bytes > 0.5 * 125 * 500 * 4  # a step's batch
    bounded = run(True)
    assert bounded.verdict == "flat", bounded
    assert bounded.max_queued <= 1


class Keeps(mgpu.Callback):
    def __init__(self):
        self.kept = []

    def on_report(self, state, progress):
        self.kept += [mx.nd.ones((2000,)) for _ in range(progress.num_batches - len(self.kept) % 4)]


@pytest.mark.parametrize("leaks", [False, True])
def test_in_fit(monkeypatch, caplog, leaks):
    monkeypatch.setattr("gluon_mgpu.loop.epoch.REPORT_S", 0.0)
    net = nn.Dense(3, in_units=36)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    check = LeakCheck(every=4)
    callbacks = [*([Keeps()] if leaks else []), check]
    with caplog.at_level(logging.INFO, "gluon_mgpu"):  # sampled once per epoch, when it holds least
        mgpu.fit(net, CE(), trainer, small_batches([8] * 4), epochs=24 if leaks else 60, max_inflight=1, callbacks=callbacks)
    assert check.growth()["host"].verdict == ("leak" if leaks else "flat"), check.report()
    (told,) = [record for record in caplog.records if record.message.startswith("memory: host: ")]
    assert told.levelno == (logging.WARNING if leaks else logging.INFO)
    assert ("float32 (2000,) on cpu(0)" in told.message) == leaks


def test_samples_stay_few(monkeypatch):
    monkeypatch.setattr(leaks, "_MAX_SAMPLES", 24)
    check = LeakCheck(every=1)
    x = mx.nd.ones((1,))
    x.wait_to_read()
    for _ in range(220):
        check.step([x])
    steps = [sample.step for sample in check._samples["host"]]
    assert 12 <= len(steps) <= 24
    assert set(np.diff(steps)) == {16}  # every 4 steps, halved twice
    assert steps[-1] > 200
    assert check.growth()["host"].verdict == "flat"


def test_wrong_arguments():
    for make in (
        lambda: LeakCheck(every=0),
        lambda: LeakCheck(every=1.5),
        lambda: LeakCheck(every=True),
        lambda: LeakCheck(every="5"),
        lambda: LeakCheck(tolerance_bytes=-1),
        lambda: LeakCheck(tolerance_bytes=float("nan")),
        lambda: LeakCheck(tolerance_bytes="256"),
        lambda: LeakCheck(max_inflight=0),
        lambda: LeakCheck(max_inflight=2.5),
        lambda: LeakCheck(max_inflight="2"),
        lambda: LeakCheck(max_inflight=True),
        lambda: LeakCheck(contexts="cpu"),
        lambda: LeakCheck(contexts=mx.cpu()),
        lambda: LeakCheck(contexts=["gpu(0)"]),
        lambda: LeakCheck().step([]),
        lambda: LeakCheck().step([1.0]),
        lambda: LeakCheck().step(None),
        lambda: LeakCheck().step(mx.nd.ones((2,))),
        lambda: LeakCheck().step({mx.nd.ones((1,)): 1}),
    ):
        with pytest.raises(TrainerError) as caught:
            make()
        assert_house_style(caught.value)


def test_a_report_too_early_says_so():
    check = LeakCheck(every=1, contexts=[mx.cpu(1)])
    assert check.report() == "host: unknown: 0 samples of at least 8. Run more steps."
    for _ in range(4):  # the fourth look waits for the devices
        check.step([mx.nd.ones((1,))])
    assert re.fullmatch(r"host: unknown: \d samples of at least 8. Run more steps.", check.report())  # a CPU's is the host's
