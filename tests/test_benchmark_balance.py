"""The benchmark of the Balancer: it binds workers to cores, measures, and releases them. Speeds are not tested."""

import os
import signal

import balance
import mxnet as mx
import pytest
from balance import Round, measure, ranges, table
from gluon_mgpu.errors import DeviceError
from gluon_mgpu.runtime.engine import when_ready

from .conftest import assert_house_style

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
CORES = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core; the benchmark binds two workers to one core each")


def cores_of(context):
    """The cores that the worker of a context may run on, asked from that worker."""
    found = []
    when_ready([mx.nd.zeros((1,), ctx=context)], lambda: found.append(os.sched_getaffinity(0)), on_worker=True)
    mx.nd.waitall()
    return found[0]


@two_cores
def test_both_splits_are_measured_in_turns(monkeypatch):
    bound = []
    plain = balance._looper

    def looper(*arguments, **options):
        bound.append([cores_of(context) for context in CONTEXTS])
        return plain(*arguments, **options)

    monkeypatch.setattr(balance, "_looper", looper)
    found = measure(CONTEXTS, shared=True, rounds=2, num_steps=2, num_first=2, batch_size=16)
    assert bound[0] == [{CORES[0]}, {CORES[1]}]
    assert [cores_of(context) for context in CONTEXTS] == [set(CORES)] * 2
    assert [(one.group, one.even_s > 0, one.auto_s > 0) for one in found] == [("one core shared", True, True)] * 2
    assert sum(found[0].weights) == pytest.approx(1)


@two_cores
def test_the_busy_process_ends_with_the_block():
    with balance._busy(CORES[0]) as process:
        assert process.poll() is None
        assert os.sched_getaffinity(process.pid) == {CORES[0]}
    assert process.returncode == -signal.SIGKILL


def test_medians_and_gains():
    found = [Round("equal cores", even, auto, [0.25, 0.75]) for even, auto in ((0.03, 0.02), (0.04, 0.02), (0.02, 0.02))]
    _, columns, rows = table(found)
    assert rows == [["equal cores", "30.0", "20.0", "1.50 (1.00 to 2.00)", "0.25 : 0.75"]]
    assert len(columns) == len(rows[0])
    assert ranges(found) == {"equal cores": {"even": pytest.approx((30, 20, 40)), "auto": pytest.approx((20, 20, 20))}}


@pytest.mark.parametrize("contexts", [[mx.cpu(0)], [mx.cpu(0), mx.gpu(0)]], ids=str)
def test_other_devices_are_refused(contexts):
    with pytest.raises(DeviceError) as caught:
        measure(contexts, shared=True)
    assert_house_style(caught.value)
