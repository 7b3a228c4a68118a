"""Steps that do not come: stalls that are made on purpose, and told apart."""

import ctypes
import faulthandler
import io
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.monitor import watchdog as module
from gluon_mgpu.monitor.watchdog import Watchdog, Worker, diagnose
from gluon_mgpu.runtime.engine import is_serial
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import assert_house_style, small_batches, small_net

CE = gluon.loss.SoftmaxCrossEntropyLoss


@pytest.mark.parametrize(
    ("workers", "num_pending", "serial", "told"),
    [
        (
            [Worker("cpu(0)", True, 0.99), Worker("cpu(1)", True, 0.97)],
            4,
            False,
            "computes on cpu(0) and cpu(1) for a long time .* OMP_NUM_THREADS=1",
        ),
        ([Worker("cpu(0)", False), Worker("cpu(1)", True, 0.97)], 4, False, "computes on cpu(1) for a long time .* OpenBLAS"),
        ([Worker("cpu(0)", True, 0.97)], 4, False, "computes on cpu(0) for a long time or without end"),
        (
            [Worker("cpu(0)", False), Worker("cpu(1)", True, 0.01)],
            4,
            False,
            "An operation on cpu(1) sleeps: .* SyncBatchNorm",
        ),
        ([Worker("cpu(0)", False)], 4, False, "4 arrays are not written yet. .* a custom operator"),
        ([], 0, False, "the program itself is blocked"),
        ([], 0, True, "The engine is serial"),
    ],
)
def test_what_it_looks_like(workers, num_pending, serial, told):
    pattern = re.escape(told).replace(r"\ \.\*\ ", " .* ")
    assert re.search(pattern, diagnose(workers, num_pending, serial=serial))


def until(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


ended = threading.Event()  # the watchdog has told, and what stands may go on


class Told(io.StringIO):
    """What a watchdog says."""

    def write(self, text):
        written = super().write(text)
        if text.startswith("Likely cause"):
            ended.set()
        return written


class Waits(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        assert ended.wait(240)
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("watchdog_waits")
class WaitsProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Waits()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def on_worker(_context, spins):
    while spins and not ended.is_set():
        pass
    ended.wait(240)


def occupy(x, *, spins):
    """The worker of an array's context goes into an operation that writes the array, and stays there."""
    place, written = (ctypes.c_int * 2)(1, x.context.device_id), (ctypes.c_void_p * 1)(x.handle)
    param = ctypes.c_void_p(int(spins))
    mx.base._LIB.MXEnginePushSyncND(on_worker, param, None, ctypes.byref(place), None, 0, written, 1, None, 0, b"occupy")


def stall(stand_still, file=None):
    """What the watchdog says when this stands, on two contexts whose workers have run before."""
    if is_serial():
        pytest.skip("the serial engine has no workers")
    told = file or Told()
    with mgpu.use_devices("cpu:2") as ctx, Watchdog(0.8, file=told) as watchdog:
        x = mx.nd.ones((3, 4), ctx=ctx[1])

        def step():
            (x + 1).wait_to_read()
            watchdog.beat(x, [mx.nd.ones((3,))])
            return {"cpu(0)", "cpu(1)"} <= set(watchdog._worker_ids) and not watchdog._reported

        until(step)
        ended.clear()
        stand_still(x)
    told.seek(0)
    return told.read()


def assert_told(text):
    assert "last batch: (3, 4), (3,)\n" in text
    assert "native threads" in text


def test_a_custom_operator_that_waits():
    told = stall(lambda x: (mx.nd.Custom(x, op_type="watchdog_waits") + 1).asnumpy())
    assert_told(told)
    assert "in forward\n" in told  # where the operator waits
    assert "in asnumpy\n" in told  # where the program waits for it
    assert "worker of cpu(1): free" in told
    assert "1 of float32 (3, 4) on cpu(1)\nLikely cause: No worker of a CPU context is inside an operation, but" in told


def test_a_worker_that_sleeps():
    told = stall(lambda x: (occupy(x, spins=False), mx.nd.waitall()))
    assert_told(told)
    assert "in waitall\n" in told
    assert "worker of cpu(0): free" in told
    assert "worker of cpu(1): inside an operation" in told
    assert "Likely cause: An operation on cpu(1) sleeps" in told
    assert "1 of float32 (3, 4) on cpu(1)\n" in told


def test_a_worker_that_spins_is_seen_to_compute():
    """Where cores are scarce it may be given little: only its name is certain."""
    told = stall(lambda x: (occupy(x, spins=True), mx.nd.waitall()))
    assert "worker of cpu(1): inside an operation" in told
    assert "in on_worker\n" in told


def test_python_that_cannot_run(tmp_path):
    """A thread that keeps Python's lock inside C: faulthandler tells, the watchdog when it can again."""

    def stand_still(x):
        ctypes.PyDLL(None).usleep(1_200_000)
        until(lambda: "Likely cause" in path.read_text(encoding="utf-8"))

    path = tmp_path / "told"
    with open(path, "w+", encoding="utf-8") as file:
        told = stall(stand_still, file)
    assert told.startswith("Timeout (")
    assert "in stand_still\n" in told
    assert_told(told)


def test_a_process_that_stands_is_ended():
    program = """
        import threading, time
        import gluon_mgpu as mgpu, mxnet as mx
        from gluon_mgpu.monitor.watchdog import Watchdog

        def stand_still():
            threading.Event().wait()

        with mgpu.use_devices("cpu:2") as ctx, Watchdog(3.0, end_process=True) as watchdog:
            x = mx.nd.ones((3, 4), ctx=ctx[1])
            for _ in range(6):
                (x + 1).wait_to_read()
                watchdog.beat(x, [mx.nd.ones((3,))])
            stand_still()
        """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MXNET_", "GLUON_MGPU_"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=clean, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == module.EXIT_STALLED, done.stderr
    assert_told(done.stderr)
    assert "after 6; " in done.stderr
    assert "in stand_still\n" in done.stderr
    assert "arrays that are not written yet: 0" in done.stderr
    assert "the program itself is blocked" in done.stderr


def test_it_is_silent_while_steps_come_tells_once_and_goes_on(monkeypatch):
    told, clock, polls = io.StringIO(), [1000.0], []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    with Watchdog(0.2, file=told) as watchdog:
        monkeypatch.setattr(watchdog, "_arm_faulthandler", lambda: polls.append(len(polls)))

        def poll():
            """Wait until it has looked once more, from beginning to end."""
            num_polls = len(polls)
            until(lambda: len(polls) >= num_polls + 2)

        for _ in range(4):
            clock[0] += 0.19
            poll()
            watchdog.beat()
        assert told.getvalue() == ""
        clock[0] += 0.21
        until(lambda: "Likely cause" in told.getvalue())
        clock[0] += 1.0
        poll()
        assert told.getvalue().count("gluon_mgpu: no step for 0.2 s") == told.getvalue().count("no step for") == 1
        watchdog.beat()
        until(lambda: "steps continue after the stall" in told.getvalue())
    assert not [thread for thread in threading.enumerate() if thread.name == "Watchdog"]


def test_batches_are_beats():
    watchdog = Watchdog(60)
    batches = small_batches([4, 2])
    assert watchdog.watch(batches) is not batches
    assert len(watchdog.watch(batches)) == 2
    watched = watchdog.watch(iter(batches))
    assert not hasattr(watched, "__len__")
    assert [len(X) for X, _ in watched] == [4, 2]
    assert watchdog._num_beats == 2
    assert watchdog._shapes == "(2, 1, 6, 6), (2,)"


@pytest.mark.parametrize("stops", [False, True])
def test_fit_tells_it(stops):
    """An iterator that stands still in the second epoch is seen from within fit, and the watchdog ends with fit."""
    told = io.StringIO()
    batches = small_batches([4, 4])
    passes = []

    class Standing:
        def __iter__(self):
            passes.append(1)
            yield batches[0]
            if stops and len(passes) == 2:
                before = len(told.getvalue())  # on a busy machine, the first step may have taken a second
                until(lambda: "the program itself is blocked" in told.getvalue()[before:])
            yield batches[1]

    net = small_net([mx.cpu(0)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    mgpu.fit(net, CE(), trainer, Standing(), epochs=2, callbacks=[Watchdog(1.0 if stops else 600.0, file=told)])
    assert ("in __iter__\n" in told.getvalue()) == stops
    assert not [thread for thread in threading.enumerate() if thread.name == "Watchdog"]


def test_native_threads():
    """A thread that computes is told from one that sleeps."""
    ids, done = {}, threading.Event()

    def note(name, work):
        ids[name] = threading.get_native_id()
        work()

    def compute():
        while not done.is_set():
            sum(range(1000))

    workers = [
        threading.Thread(target=note, args=("computes", compute)),
        threading.Thread(target=note, args=("sleeps", done.wait)),
    ]
    for worker in workers:
        worker.start()
    until(lambda: len(ids) == 2)
    before = module.native_threads()
    until(lambda: module.native_threads()[ids["computes"]].cpu_s > before[ids["computes"]].cpu_s + 0.1)
    after = module.native_threads()
    done.set()
    for worker in workers:
        worker.join()
    assert after[ids["sleeps"]].cpu_s - before[ids["sleeps"]].cpu_s < 0.05
    assert after[ids["sleeps"]].state == "S"
    until(lambda: set(ids.values()).isdisjoint(module.native_threads()))


def test_a_network_of_np_arrays_is_watched():
    mx.npx.set_np()
    try:
        told = io.StringIO()
        net = nn.Dense(2, in_units=2)
        net.initialize()
        with Watchdog(0.2, file=told) as watchdog:
            watchdog.beat(net(mx.np.ones((3, 2))))
            until(lambda: "Likely cause" in told.getvalue())
        assert "last batch: (3, 2)" in told.getvalue()
    finally:
        mx.npx.reset_np()


@pytest.mark.parametrize(
    "timeout_s", [0, -1, float("nan"), float("inf"), 10**400, "60", None, True], ids=lambda value: str(value)[:9]
)
def test_a_timeout_that_is_none(timeout_s):
    with pytest.raises(TrainerError) as caught:
        Watchdog(timeout_s)
    assert_house_style(caught.value)


def test_more_seconds_than_faulthandler_counts_are_watched_too(tmp_path):
    with open(tmp_path / "told", "w") as file:
        watchdog = Watchdog(1e300, file=file)
        try:
            watchdog._arm_faulthandler()
        finally:
            faulthandler.cancel_dump_traceback_later()
