import time

import gluon_mgpu as mgpu
import mxnet as mx


def test_both_ends_wait_before_they_read_the_clock(clock, calls_to):
    """What was queued before does not count, and what was queued inside does."""
    events = []
    for owner, name in ((mx.nd, "waitall"), (time, "perf_counter")):
        calls_to(owner, name, note=lambda name: events.append(name))
    timer = mgpu.monitor.Timer()
    clock[0] += 2.5
    assert timer.stop() == 2.5
    timer.start()
    clock[0] += 1.0
    assert timer.stop() == 1.0
    assert timer.times == [2.5, 1.0]
    assert events == ["waitall", "perf_counter"] * 4


def test_sums():
    timer = mgpu.monitor.Timer()
    timer.times = [1.0, 2.0, 4.0]
    assert (timer.sum(), timer.avg(), timer.cumsum()) == (7.0, 7 / 3, [1.0, 3.0, 7.0])
