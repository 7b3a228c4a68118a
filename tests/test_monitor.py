"""Watching real runs on CPU contexts, GPUs that are a stand-in, and the command."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.monitor import _live
from gluon_mgpu.cli.monitor import monitor as command
from gluon_mgpu.errors import DataError, TrainerError
from gluon_mgpu.monitor import Finding, GpuSample, LiveArrays, Monitor, Reader, callback, read_samples
from gluon_mgpu.monitor.gpus import GpuReader, may_have_gpus, visible
from gluon_mgpu.monitor.host import HostReader, Throttled, name_thread, threads_of
from gluon_mgpu.monitor.view import view
from gluon_mgpu.runtime.engine import ON_WORKER, Marker, is_serial
from gluon_mgpu.runtime.nvidia.nvml import Gpu
from mxnet import gluon
from rich.console import Console

from .conftest import assert_house_style, small_batches, small_net
from .fake_nvml import install, v100s

pytest.importorskip("psutil")
CE = gluon.loss.SoftmaxCrossEntropyLoss


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """No NVIDIA driver, whatever the machine has; tests that want one install another stand-in."""
    return install(monkeypatch, [], error="LibraryNotFound")


def until(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Slow:
    """Batches that take `seconds`, and at least four times as long as the step before, on any machine."""

    def __init__(self, num, seconds):
        self._num, self._seconds = num, seconds

    def __iter__(self):
        step_s = 0.0
        for batch in small_batches([12] * self._num):
            time.sleep(max(self._seconds, 4 * step_s))
            began = time.monotonic()
            yield batch
            step_s = time.monotonic() - began


def fit(monitor, batches, epochs=1):
    with mgpu.use_devices("cpu:2") as ctx:
        net = small_net(ctx)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        return mgpu.fit(net, CE(), trainer, batches, epochs=epochs, callbacks=[monitor])


def test_all_devices_of_a_pipeline_are_watched():
    monitor = Monitor(interval_s=0.1)
    with mgpu.use_devices("cpu:2") as ctx:
        net = mgpu.Pipeline([gluon.nn.Dense(8, in_units=36), gluon.nn.Dense(3, in_units=8)], ctx, micro_batches=2)
        net.initialize()
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        history = mgpu.fit(net, CE(), trainer, Slow(3, 0.1), epochs=1, callbacks=[monitor])
    assert history.rows[-1]["host_gib"] > 0
    if not is_serial():
        assert {"load_cpu(0)", "load_cpu(1)"} <= set(history.rows[-1])


def test_fit_is_watched(tmp_path, caplog):
    caplog.set_level(logging.INFO, "gluon_mgpu")
    monitor = Monitor(tmp_path / "run", interval_s=0.1)
    history = fit(monitor, Slow(5, 0.1), epochs=2)
    assert not any(thread.name == "Monitor" for thread in threading.enumerate())
    samples = read_samples(tmp_path / "run" / "monitor.jsonl")
    assert len(samples) == len(monitor.samples) >= 3
    assert samples[-1].step == 10 and samples[-1].epoch == 2 and samples[-1].host.rss_bytes > 2**24
    row = history.rows[-1]
    assert row["host_gib"] > 0 and row["time_in_data"] > 0.5
    if not is_serial():
        assert [cpu.name for cpu in samples[-1].cpus] == ["cpu(0)", "cpu(1)"] and {"load_cpu(0)", "load_cpu(1)"} <= set(row)
    assert (tmp_path / "run" / "monitor.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "run" / "monitor.json").read_text(encoding="utf-8"))
    assert max(summary["spent"], key=summary["spent"].get) == "data"
    assert "the training thread: data" in caplog.text


def test_slow_data_is_named_with_its_line(caplog):
    if is_serial():
        pytest.skip("the serial engine has no workers, whose load could be low")
    monitor = Monitor(interval_s=0.1)

    def found():
        return [one for one in monitor.findings if (one.what, one.cause) == ("idle", "data")]

    class Standing:
        def __iter__(self):
            deadline = time.monotonic() + 240
            for batch in small_batches([12] * 5):
                yield batch
                while not found() and time.monotonic() < deadline:
                    time.sleep(0.05)

    fit(monitor, Standing())
    (idle,) = found()  # perhaps among findings of other processes' load
    assert "test_monitor.py" in idle.message and "(__iter__)" in idle.message
    warned = [record.message for record in caplog.records if "monitor: idle" in record.message]
    assert sum("waits for the next batch" in message for message in warned) == 1


def test_a_loop_by_hand_that_reads_every_loss():
    if is_serial():
        pytest.skip("the serial engine computes where it is called")
    x = mx.nd.ones((700, 700))
    with Monitor(interval_s=0.2) as monitor:
        while len(monitor.samples) < 6:
            float(mx.nd.dot(x, x).sum().asscalar())
    spent = monitor.summary().spent
    assert max(spent, key=spent.get) == "sync"
    assert any("test_monitor.py" in sample.where.get("sync", "") for sample in monitor.samples)


def test_arrays_that_are_kept_on_one_context_are_found():
    monitor = Monitor(interval_s=0.1, contexts=[mx.cpu(0), mx.cpu(1)])
    kept = [mx.nd.ones((50, 1031), ctx=mx.cpu(1)) for _ in range(20)]
    mx.nd.waitall()
    with monitor:
        monitor.count_arrays()
        until(lambda: monitor.samples and all(cpu.held for cpu in monitor.samples[-1].cpus))
    if not is_serial():
        held = {cpu.name: cpu.held for cpu in monitor.samples[-1].cpus}["cpu(1)"]
        assert (held.more, held.shape, held.dtype) == (len(kept), (50, 1031), "float32")


def test_the_watching_thread_asks_nothing_about_arrays(monkeypatch):
    """An array that its own thread is freeing is still among Python's objects: to ask about it there was a crash."""
    asked_by = []
    monkeypatch.setattr(callback, "live_arrays", lambda: asked_by.append(threading.current_thread().name) or {})
    with Monitor(interval_s=0.1) as monitor:
        monitor.count_arrays()
        until(lambda: len(monitor.samples) > 2)
    assert asked_by == [threading.current_thread().name]


def test_arrays_of_bf16_count(monkeypatch):
    """NumPy calls MXNet's bfloat16 `void16`, a name that it does not take back."""
    monkeypatch.setattr(callback, "live_arrays", lambda: {("cpu(0)", "void16", (3, 5)): 2})
    assert callback._find_held() == {"cpu(0)": LiveArrays(60, 2, (3, 5), "bfloat16")}


def test_told_phases_are_exact():
    monitor = Monitor(interval_s=0.1)
    with monitor:
        monitor.on_phase(None, "data")
        until(lambda: len(monitor.samples) > 2)
    assert monitor.samples[-1].spent == {"data": 1.0}


def test_a_watcher_that_fails_does_not_end_the_run(monkeypatch, caplog):
    with Monitor(interval_s=0.1) as monitor:
        monkeypatch.setattr(monitor._reader, "read", lambda **_: 1 / 0)
        until(lambda: "Monitoring has stopped" in caplog.text)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"interval_s": 0}, {"interval_s": True}, {"interval_s": "1"}, {"contexts": "cpu"}, {"contexts": [1]}]
)
def test_wrong_arguments(wrong):
    with pytest.raises(TrainerError) as caught:
        Monitor(**wrong)
    assert_house_style(caught.value)


def test_no_such_process():
    with pytest.raises(DataError) as caught:
        HostReader(2**22 + 1)
    assert_house_style(caught.value)


def test_the_worker_of_a_context_has_a_name():
    if is_serial():
        pytest.skip("the serial engine has no workers")
    marker = Marker(context=mx.cpu(3), where=ON_WORKER)
    until(lambda: marker.done)
    name_thread(marker.thread, "cpu(3)")
    assert threads_of(os.getpid())[marker.thread].name == "mxnet cpu(3)"
    reader = HostReader(num_threads={"cpu(3)": 1})
    x = mx.nd.ones((600, 600), ctx=mx.cpu(3))
    before_s = threads_of(os.getpid())[marker.thread].cpu_s
    while threads_of(os.getpid())[marker.thread].cpu_s < before_s + 0.3:
        mx.nd.dot(x, x).wait_to_read()
    _, cpus = reader.read()
    busy = {cpu.name: cpu.cores for cpu in cpus}["cpu(3)"]
    assert 0.0 < busy < 1.5
    time.sleep(0.3)
    _, cpus = reader.read()
    assert {cpu.name: cpu.cores for cpu in cpus}["cpu(3)"] < busy / 2


def test_children_count():
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(10**8); input()"], stdin=subprocess.PIPE)
    try:
        until(lambda: HostReader().read()[0].children_bytes > 9e7)
        assert child.pid in HostReader(whole_tree=True).pids()
    finally:
        child.communicate(b"\n", timeout=240)


def test_a_process_that_ends_while_it_is_read_counts_for_nothing(monkeypatch):
    reader = HostReader(whole_tree=True)
    ended = reader._psutil.NoSuchProcess(4711)

    def failing(*_, **__):
        raise ended

    for name in ("cpu_times", "memory_info", "children", "status"):
        monkeypatch.setattr(type(reader._process), name, failing)
    host, _ = reader.read()
    assert (host.rss_bytes, host.children_bytes, host.num_children, host.cores) == (0, 0, 0, 0.0)
    assert reader.pids() == [os.getpid()] and not reader.is_running()
    assert HostReader(0).is_running()  # the machine
    assert threads_of(2**22 + 1) == {} and name_thread(2**22 + 1, "cpu(0)") is None


def test_what_is_dear_is_found_seldom():
    found = []
    seldom = Throttled(lambda: found.append(1) or len(found), every_s=1000.0)
    assert [seldom(), seldom(), seldom()] == [1, 1, 1]


def test_gpus_as_the_driver_tells(monkeypatch):
    nvml = install(monkeypatch, v100s(2))
    nvml.gpus[1].used_bytes, nvml.gpus[1].utilization, nvml.gpus[1].throttle_bits = 10 * 2**30, 87, 0x20
    nvml.gpus[1].processes = [(os.getpid(), "python", 3 * 2**30), (4242, "other", 2**30)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reader = Reader(gpu_ids=[1])
    (gpu,) = reader.read().gpus
    reader.close()
    assert (gpu.name, gpu.load, gpu.used_bytes, gpu.own_bytes) == ("gpu(1)", 0.87, 10 * 2**30, 3 * 2**30)
    assert gpu.foreign == (("other (4242)", 2**30),) and gpu.throttled == ("temperature",)
    assert nvml.users == 0


def test_without_a_gpu_no_driver_is_wanted(monkeypatch, tmp_path):
    """It told users to install NVIDIA's driver on machines without a GPU."""

    def pci(**devices):
        folder = tmp_path / "-".join(["pci", *devices])
        for name, (vendor, kind) in devices.items():
            (folder / name).mkdir(parents=True)
            (folder / name / "vendor").write_text(vendor + "\n")
            (folder / name / "class").write_text(kind + "\n")
        return folder

    monkeypatch.setattr("gluon_mgpu.monitor.gpus._OF_WINDOWS", tmp_path / "nowhere")
    network, graphics, sound = ("0x1af4", "0x020000"), ("0x10de", "0x030200"), ("0x10de", "0x040300")
    assert not may_have_gpus(pci(a=network)) and not may_have_gpus(pci(b=sound))
    assert may_have_gpus(pci(a=network, c=graphics)) and may_have_gpus(tmp_path / "nowhere")
    monkeypatch.setattr("gluon_mgpu.monitor.gpus.may_have_gpus", lambda: False)
    assert GpuReader().why_not == "this machine has no NVIDIA GPU; the host is shown."


def test_without_a_driver_there_is_a_reason(monkeypatch):
    monkeypatch.setattr("gluon_mgpu.monitor.gpus.may_have_gpus", lambda: True)
    reader = GpuReader()
    assert reader.read([1]) == () and "libnvidia-ml.so.1" in reader.why_not


def test_cuda_visible_devices():
    gpus = [Gpu(i, uuid=f"GPU-{i}a") for i in range(4)]
    numbers = {"2,0": [2, 0], "GPU-3": [3], "1,9,2": [1], "": [], "-1": []}
    assert [one.index for one in visible(gpus, {})] == [0, 1, 2, 3]
    for named, expected in numbers.items():
        assert [one.index for one in visible(gpus, {"CUDA_VISIBLE_DEVICES": named})] == expected, named


def test_the_table(monkeypatch):
    reader = Reader()
    time.sleep(0.05)
    sample = reader.read()
    gpus = (
        GpuSample(
            "gpu(0)", "V100", 16 * 2**30, 10 * 2**30, 4 * 2**30, (("other (77)", 2**30),), 0.5, 71, 250, 300, ("temperature",)
        ),
        GpuSample("gpu(1)", "V100", trouble="GPU is lost"),
    )
    file = io.StringIO()
    finding = Finding("idle", "gpu(0)", "data", "the devices [compute] little")
    Console(file=file, width=160).print(view(type(sample)(**{**vars(sample), "gpus": gpus}), [finding], pid=os.getpid()))
    told = file.getvalue()
    for part in ("10.0 of 16.0", "50%", "71", "250 of 300", "temperature", "own 4.0, other (77) 1.0", "GPU is lost", "machine"):
        assert part in told, part
    assert f"process {os.getpid()}" in told and "idle: the devices [compute] little" in told


def test_lines_where_there_is_no_terminal():
    done = CliRunner().invoke(command, ["--count", "2", "--interval", "0.1", "--pid", str(os.getpid())])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert len(lines) == 2 and lines[1]["host"]["rss_bytes"] > 2**24 and lines[1]["gpus"] == []


def test_a_table_where_there_is_a_terminal(capsys):
    reader = Reader(0, whole_tree=True)
    with _live(reader, 0) as show:
        show(reader.read(), [Finding("idle", "cpu(0)", "data", "the devices compute little")])
    reader.close()
    told = capsys.readouterr().out
    assert "machine" in told and "process" not in told and "idle: the devices compute little" in told


def test_from_outside_gpus_have_the_numbers_of_the_driver(monkeypatch):
    """Which of them a process sees is its own affair."""
    nvml = install(monkeypatch, v100s(3))
    nvml.gpus[2].processes = [(77, "python", 2**30)]
    nvml.gpus[2].refuses["nvmlDeviceGetUtilizationRates"] = "NotSupported"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    reader = GpuReader()
    found = reader.read([77])
    reader.close()
    assert [gpu.name for gpu in found] == ["GPU 0", "GPU 1", "GPU 2"]
    assert (found[2].own_bytes, found[2].load, found[1].load) == (2**30, None, 0.0)
    file = io.StringIO()
    Console(file=file, width=160).print(view(replace(Reader(0).read(), gpus=found), [], pid=0))
    assert "?" in next(line for line in file.getvalue().splitlines() if "GPU 2" in line)


def test_a_long_run_keeps_few_samples(monkeypatch):
    """Pairs are merged, so that the whole run stays in the summary: their times add up."""
    monkeypatch.setattr(callback, "_MOST", 5)
    sample = Reader(0).read()
    samples = []
    for number in range(1, 20):
        samples = callback._merged([*samples, replace(sample, over_s=1.0)])
        assert len(samples) < 5 and sum(one.over_s for one in samples) == pytest.approx(number)


def test_without_a_process_it_is_the_machine():
    done = CliRunner().invoke(command, ["--duration", "0.2", "--interval", "0.1"])
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert lines and all(line["host"]["rss_bytes"] == 0 and line["host"]["total_bytes"] > 0 for line in lines)


PROGRAM = """
from gluon_mgpu.cli.monitor import monitor
try:
    monitor(["--interval", "0.1"])
except SystemExit as error:
    print("ended with", error.code, flush=True)
monitor(["--interval", "0.1"])
"""


def test_ctrl_c_and_a_reader_that_leaves_end_it_quietly():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert next(line for line in process.stdout if not line.startswith("{")) == "ended with 0\n"
        assert json.loads(process.stdout.readline())
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(240) == 0
    assert "Traceback" not in errors and "Broken" not in errors


def test_it_ends_with_the_process_that_it_looks_at():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    threading.Timer(0.5, child.communicate, [b"\n"]).start()
    done = CliRunner().invoke(command, ["--pid", str(child.pid), "--interval", "0.1", "--duration", "600"])
    assert done.exit_code == 0 and f"Process {child.pid} has ended." in done.output + done.stderr
