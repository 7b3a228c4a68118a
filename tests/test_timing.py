import gluon_mgpu as mgpu
import mxnet as mx


def test_both_ends_wait_before_they_read_the_clock(monkeypatch):
    """What was queued before does not count, and what was queued inside does."""
    events, clock = [], iter([10.0, 12.5, 20.0, 21.0])
    waitall = mx.nd.waitall
    monkeypatch.setattr(mx.nd, "waitall", lambda: events.append("wait") or waitall())
    monkeypatch.setattr("gluon_mgpu.monitor.timer.time.perf_counter", lambda: events.append("clock") or next(clock))
    timer = mgpu.monitor.Timer()
    assert timer.stop() == 2.5
    timer.start()
    assert timer.stop() == 1.0
    assert timer.times == [2.5, 1.0]
    assert events == ["wait", "clock"] * 4


def test_sums():
    timer = mgpu.monitor.Timer()
    timer.times = [1.0, 2.0, 4.0]
    assert (timer.sum(), timer.avg(), timer.cumsum()) == (7.0, 7 / 3, [1.0, 3.0, 7.0])
