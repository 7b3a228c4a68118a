import time

import gluon_mgpu as mgpu
import mxnet as mx
import pytest


def work():
    """Queue what takes far longer to run than to queue."""
    x = mx.nd.ones((700, 700))
    for _ in range(20):
        x = mx.nd.dot(x, x) * 0
    return x


def test_both_ends_wait(monkeypatch):
    waited = []
    waitall = mx.nd.waitall
    monkeypatch.setattr(mx.nd, "waitall", lambda: waited.append(1) or waitall())
    timer = mgpu.Timer()
    assert len(waited) == 1
    timer.stop()
    assert len(waited) == 2


def test_what_was_queued_before_does_not_count_and_what_was_queued_inside_does():
    started = time.perf_counter()
    work().wait_to_read()
    needed = time.perf_counter() - started
    work()
    timer = mgpu.Timer()
    idle = timer.stop()
    timer.start()
    work()
    busy = timer.stop()
    assert idle < needed / 2
    assert busy > needed / 4


def test_sums():
    timer = mgpu.Timer()
    timer.times = [1.0, 2.0, 4.0]
    assert (timer.sum(), timer.avg(), timer.cumsum()) == (7.0, 7 / 3, [1.0, 3.0, 7.0])


def test_no_time_no_mean():
    with pytest.raises(ValueError, match="Timer.avg: got no recorded time; need"):
        mgpu.Timer().avg()


def test_an_error_inside_is_not_timed():
    timer = mgpu.Timer()
    with pytest.raises(KeyError), timer:
        raise KeyError
    assert timer.times == []
    with timer:
        pass
    assert len(timer.times) == 1
