"""Stalls that are made on purpose."""

import ctypes
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.monitor import watchdog as module
from gluon_mgpu.monitor.watchdog import Watchdog
from gluon_mgpu.runtime.openmp_threads import runs_serially
from mxnet import gluon

from .conftest import initialized, small_batches, small_net
from .versions import with_prefix
from .worlds import until

CE = gluon.loss.SoftmaxCrossEntropyLoss


@pytest.fixture
def report(tmp_path):
    """A file for the watchdog; called, it returns what the file holds."""
    with open(tmp_path / "report", "w+", encoding="utf-8") as file:
        read = (tmp_path / "report").read_text
        yield type("Report", (), {"file": file, "__call__": lambda self: read(encoding="utf-8")})()


released = threading.Event()


class Waits(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        assert released.wait(240)
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("watchdog_waits")
class WaitsProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Waits()


def test_a_stall_shows_the_stacks_and_the_arrays_that_are_pending(report):
    if runs_serially():
        pytest.skip("the serial engine has no queue")
    released.clear()
    net = initialized(with_prefix(gluon.nn.Dense, "waits_", units=2, in_units=4), [mx.cpu(0), mx.cpu(1)])
    with Watchdog(0.5, net=net, file=report.file) as watchdog:
        watchdog.beat()
        mx.nd.waitall()
        ready = net.weight.data(mx.cpu(1)).as_nd_ndarray()
        mx.nd.Custom(ready, op_type="watchdog_waits").copyto(ready)
        assert until(lambda: "not written yet" in report())
        released.set()
        mx.nd.waitall()
    shown = report()
    assert "gluon_mgpu: no step for" in shown and "after 1" in shown
    assert "in until\n" in shown or "in <lambda>\n" in shown  # the main thread
    assert "in forward\n" in shown  # where the operator waits
    assert re.search(r"arrays that are not written yet: 1\n  \w*weight on cpu\(1\)\n", shown)


def test_python_that_cannot_run_is_shown_by_faulthandler(report):
    """A thread keeps Python's lock inside C; the watchdog reports when it can run again."""
    with Watchdog(0.8, file=report.file) as watchdog:
        watchdog.beat()
        time.sleep(0.5)
        ctypes.PyDLL(None).usleep(2_500_000)
        assert until(lambda: "not written yet" in report())
    assert report().startswith("Timeout (") and "test_python_that_cannot_run" in report()


def test_a_process_that_stalls_is_ended():
    program = """
        import threading
        import gluon_mgpu as mgpu, mxnet as mx
        from gluon_mgpu.monitor.watchdog import Watchdog

        def stand_still():
            threading.Event().wait()

        with Watchdog(2.0, end_process=True) as watchdog:
            for _ in range(6):
                watchdog.beat()
            stand_still()
        """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MXNET_", "GLUON_MGPU_"))}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == module.EXIT_STALLED, done.stderr
    full = subprocess.run(["sh", "-c", '"$0" "$1" "$2" 2> /dev/full', *command], env=clean, timeout=240)
    assert full.returncode == module.EXIT_STALLED  # also where its output cannot be written
    for part in ("after 6\n", "in stand_still\n", "arrays that are not written yet: 0\n"):
        assert part in done.stderr


def test_a_stall_is_reported_once_and_its_end_as_well(report):
    with Watchdog(0.2, file=report.file) as watchdog:
        for num_stalls in (1, 2, 3):
            assert until(lambda: report().count("gluon_mgpu: no step for") == num_stalls)  # noqa: B023
            time.sleep(0.3)  # long enough for another report
            assert until(lambda: watchdog.beat() or report().count("steps continue after the stall") == num_stalls)  # noqa: B023
    assert report().count("gluon_mgpu: no step for") == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "Watchdog"]


@pytest.mark.parametrize("stalls", [False, True])
def test_fit_beats(report, stalls):
    """An iterator that stalls in the second epoch is seen from within fit, and the watchdog ends with fit."""
    batches = small_batches([4, 4])
    passes = []

    class Standing:
        def __iter__(self):
            passes.append(1)
            yield batches[0]
            if stalls and len(passes) == 2:
                before = len(report())  # on a busy machine, the first step may have taken a second
                assert until(lambda: "not written yet" in report()[before:])
            yield batches[1]

    net = small_net([mx.cpu(0)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    watchdog = Watchdog(1.0 if stalls else 600.0, file=report.file)
    mgpu.fit(net, CE(), trainer, Standing(), epochs=2, callbacks=[watchdog])
    assert ("in __iter__\n" in report()) == stalls
    assert watchdog._net is net and not [thread for thread in threading.enumerate() if thread.name == "Watchdog"]
