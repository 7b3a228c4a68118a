"""Monitoring real runs, GPUs that are a stand-in, and the command."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading

import gluon_mgpu as mgpu
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.monitor import monitor as command
from gluon_mgpu.errors import DataError, TrainerError
from gluon_mgpu.monitor import GpuSample, HostSample, Monitor, Reader, Sample, read_samples, summarise
from gluon_mgpu.monitor.terminal_tables import view
from mxnet import gluon
from rich.console import Console

from .conftest import small_batches, small_net
from .fake_nvml import install, v100s
from .worlds import until

pytest.importorskip("psutil")
GIB = 2**30


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """No NVIDIA driver, whatever the machine has; tests of one install another stand-in."""
    return install(monkeypatch, [], error="LibraryNotFound")


def host(rss=1, cores=1.0):
    return HostSample(rss * GIB, 0, 0, cores, 2.0, 4, 8 * GIB, 16 * GIB)


def samples_of_two_gpus():
    """Three samples; by hand: mean loads 0.5 and 1.0, peaks 3 and 5 GiB, 2 GiB resident, 2 cores."""
    return [
        Sample(1000.0 + i, float(i), 10 * i, 1, host(rss, cores), (GpuSample("gpu(0)", "V100", a * GIB, 16 * GIB, load), gpu_1))
        for i, (rss, cores, a, load) in enumerate([(1, 1.0, 3, 0.0), (2, 2.0, 2, 0.5), (1, 3.0, 1, 1.0)])
        for gpu_1 in [GpuSample("gpu(1)", "V100", 5 * GIB, 16 * GIB, 1.0, throttled=("temperature",))]
    ]


# Samples


def test_a_summary_counts_means_and_peaks():
    found = summarise(samples_of_two_gpus())
    assert (found.seconds, found.load) == (2.0, {"gpu(0)": 0.5, "gpu(1)": 1.0})
    assert found.peak_bytes == {"gpu(0)": 3 * GIB, "gpu(1)": 5 * GIB}
    assert (found.host_peak_bytes, found.host_cores) == (2 * GIB, 2.0)
    assert "gpu(0): computes 50% of the time, 3" in str(found)
    assert summarise([]).host_peak_bytes == 0


@pytest.mark.parametrize("line", ["no json", "{}", '{"host": 1, "gpus": []}', "[1]"])
def test_other_lines_are_refused(tmp_path, line):
    path = tmp_path / "monitor.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(DataError):
        read_samples(path)


# The reader


def test_gpus_as_the_driver_reports_them(monkeypatch):
    nvml = install(monkeypatch, v100s(3))
    nvml.gpus[2].used_bytes, nvml.gpus[2].utilization, nvml.gpus[2].throttle_bits = 10 * GIB, 87, 0x20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    reader = Reader(gpu_ids=[1, 7])
    (gpu,) = reader.read().gpus
    assert (gpu.name, gpu.load, gpu.used_bytes, gpu.throttled) == ("gpu(1)", 0.87, 10 * GIB, ("temperature",))
    reader.close()
    outside = Reader(0)
    assert [gpu.name for gpu in outside.read().gpus] == ["GPU 0", "GPU 1", "GPU 2"]  # what a process sees does not matter
    outside.close()
    assert nvml.users == 0


def test_children_and_cores_count():
    code = "x = bytearray(10**8)\nprint(flush=True)\nwhile True: pass"
    reader = Reader()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            before = reader.read().host
            assert until(lambda: reader.read().host.cores > 0.05)  # the child computes; on a busy machine it gets little
            assert before.children_bytes > 9e7 and before.num_children >= 1 and before.rss_bytes > 2**24
        finally:
            child.kill()


# The callback


def fit(monitor, epochs=2):
    with mgpu.use_devices("cpu*2") as ctx:
        net = small_net(ctx)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        return mgpu.fit(net, loss, trainer, small_batches([12] * 3), epochs=epochs, callbacks=[Slow(monitor), monitor])


class Slow(mgpu.Callback):
    """Ends an epoch only when it was sampled twice."""

    def __init__(self, monitor):
        self.monitor = monitor

    def on_test_begin(self, state):
        assert until(lambda: len(self.monitor.samples) >= 2 * state.epoch)

    def on_batch_end(self, state):
        assert until(lambda: len(self.monitor.samples) >= 2 * state.epoch)


def test_a_run_is_recorded(tmp_path, caplog):
    pytest.importorskip("matplotlib")
    caplog.set_level(logging.INFO, "gluon_mgpu")
    monitor = Monitor(tmp_path / "run", interval_s=0.1)
    history = fit(monitor)
    assert not any(thread.name == "Monitor" for thread in threading.enumerate())
    samples = read_samples(tmp_path / "run" / "monitor.jsonl")
    assert samples == monitor.samples and len(samples) >= 4
    assert samples[-1].step == 6 and samples[-1].epoch == 2 and samples[-1].host.rss_bytes > 2**24
    assert all(row["host_gib"] > 0 and row["host_cores"] >= 0 for row in history.rows)
    assert (tmp_path / "run" / "monitor.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "run" / "monitor.json").read_text(encoding="utf-8"))
    assert summary["host_peak_bytes"] == max(one.host.rss_bytes + one.host.children_bytes for one in samples)
    assert "the process and its children" in caplog.text


def test_a_monitor_that_fails_does_not_end_the_run(failing, caplog):
    with Monitor(interval_s=0.1):
        failing(Reader, "read", error=ZeroDivisionError())
        assert until(lambda: "Monitoring has stopped" in caplog.text)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("wrong", [{"interval_s": 0}, {"interval_s": True}, {"interval_s": "1"}, {"ctx": "cpu"}, {"ctx": [1]}])
def test_wrong_arguments(wrong):
    with pytest.raises(TrainerError):
        Monitor(**wrong)


# The command


def test_the_table_shows_gpus_and_the_process():
    gpus = (
        GpuSample("GPU 0", "V100", 10 * GIB, 16 * GIB, 0.5, 71, 250, ("temperature",)),
        GpuSample("GPU 1", "V100", trouble="GPU is [lost]"),
        GpuSample("GPU 2", "V100"),
    )
    file = io.StringIO()
    Console(file=file, width=160).print(view(Sample(0.0, 0.0, 0, 0, host(), gpus), pid=77))
    for part in ("10.0 of 16.0", "50%", "71", "250", "temperature", "GPU is [lost]", "? of ?", "8.0 of 16.0", "process 77"):
        assert part in file.getvalue(), part


def run(*arguments):
    done = CliRunner().invoke(command, [*arguments, "--interval", "0.1"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]


def test_lines_where_there_is_no_terminal():
    lines = run("--count", "2", "--pid", str(os.getpid()))
    assert len(lines) == 2 and lines[1]["host"]["rss_bytes"] > 2**24 and lines[1]["gpus"] == []


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


def test_it_ends_with_the_process_that_it_monitors():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    threading.Timer(0.5, child.communicate, [b"\n"]).start()
    done = CliRunner().invoke(command, ["--pid", str(child.pid), "--interval", "0.1", "--count", "6000"])
    assert done.exit_code == 0 and f"Process {child.pid} has ended." in done.output
