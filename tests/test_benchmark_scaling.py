"""The benchmarks of several processes and of checkpoints: turns, failures, the fit of invented links. No test reads a clock."""

import json
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import checkpointing
import commands
import mxnet as mx
import numpy as np
import pytest
import scaling
import scaling_report
from case import Case
from click.testing import CliRunner
from commands import main
from compare import ContenderError, Row
from gluon_mgpu.distributed import horovod
from report import Spread, interval
from scaling_model import Fit, Link, Traffic, between_machines, fit, project

from .conftest import assert_house_style
from .test_launch import mark, marked

__all__ = ["mark"]  # a fixture

PNG = b"\x89PNG\r\n\x1a\n"
PROGRAM = Path(commands.__file__).parent
SIZES = (4_000, 300_000, 44_000_000)


# The model, on invented links


@pytest.mark.parametrize(
    "traffic, num_messages, share",
    [
        (Traffic("ring", 2), 2, 1.0),
        (Traffic("ring", 4), 6, 1.5),
        (Traffic("servers", 2, 2), 2, 2.0),
        (Traffic("servers", 2, 1), 2, 4.0),
        (Traffic("rows", 3, 2), 2, 6.0),
    ],
    ids=["ring-2", "ring-4", "servers-2", "one-server", "rows"],
)
def test_the_fit_finds_the_link(traffic, num_messages, share):
    points = [(size, num_messages * 20e-6 + share * size / 2.5e9) for size in SIZES]
    found = fit(points, traffic)
    assert found.link.latency_s == pytest.approx(20e-6)
    assert found.link.bytes_per_s == pytest.approx(2.5e9)
    assert found.error < 1e-9


def test_small_sums_count_as_much_as_large_ones():
    """A tenth more for the largest would drown the latency, were the errors not relative."""
    points = [(size, 1.1 * (2 * 50e-6 + size / 1e9) if size == SIZES[-1] else 2 * 50e-6 + size / 1e9) for size in SIZES]
    found = fit(points, Traffic("ring", 2))
    assert found.link.latency_s == pytest.approx(50e-6, rel=0.05)
    assert 0 < found.error < 0.1


def test_neither_latency_nor_bandwidth_is_negative():
    faster_than_nothing = fit([(1e6, 1e-3), (2e6, 3e-3)], Traffic("ring", 2))
    assert faster_than_nothing.link.latency_s == 0
    assert 6e8 < faster_than_nothing.link.bytes_per_s < 1e9
    less_for_more = fit([(1e6, 2e-3), (2e6, 1e-3)], Traffic("ring", 2))
    assert less_for_more.link.bytes_per_s == float("inf")
    assert 0.5e-3 <= less_for_more.link.latency_s <= 1e-3


@pytest.mark.parametrize("wait_s", [0.0, 5e-3, 9e-3])
def test_a_wait_per_sum_is_not_latency(wait_s):
    """The fit subtracts the wait first, and 1,024 processes wait as long as two."""
    traffic = Traffic("ring", 2, wait_s=wait_s)
    found = fit([(size, wait_s + 2 * 20e-6 + size / 2.5e9) for size in SIZES], traffic)
    assert (found.link.latency_s, found.link.bytes_per_s) == pytest.approx((20e-6, 2.5e9))
    assert found.error < 1e-9
    assert sum(traffic.seconds(SIZES[1], found.link)) == pytest.approx(wait_s + 40e-6 + SIZES[1] / 2.5e9)
    many = project(replace(traffic, num_processes=1024), found.link, compute_s=1.0, num_bytes=2.5e9)
    assert (many.latency_s, many.transfer_s) == pytest.approx((wait_s + 2046 * 20e-6, 2 * 1023 / 1024))


def test_sums_faster_than_the_known_wait_give_a_link_without_cost():
    found = fit([(1e3, 1e-3), (1e6, 2e-3)], Traffic("ring", 2, wait_s=5e-3))
    assert found.link == Link(0.0, float("inf"))
    assert found.error == pytest.approx(4)  # five times the time of the smallest sum


def test_the_cycle_is_that_of_the_environment(monkeypatch):
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    assert scaling.traffic_of("horovod", 2).wait_s == float(horovod.DEFAULTS["HOROVOD_CYCLE_TIME"]) / 1e3 > 0
    assert scaling.traffic_of("torch", 2).wait_s == scaling.traffic_of("dist_sync", 2).wait_s == 0
    for text, seconds in (("2.5", 2.5e-3), ("0", 0), ("-1", 0), ("soon", 0)):
        monkeypatch.setenv("HOROVOD_CYCLE_TIME", text)
        assert scaling.traffic_of("horovod", 8).wait_s == seconds


@pytest.mark.parametrize("points, processes", [([(1e3, 1e-3)], 2), ([(1e3, 1e-3), (2e3, 2e-3)], 1)], ids=["one-size", "alone"])
def test_too_few_points_are_refused(points, processes):
    with pytest.raises(ValueError) as caught:
        fit(points, Traffic("ring", processes))
    assert_house_style(caught.value)


GIGABYTE = Link(1e-3, 1e9)


@pytest.mark.parametrize(
    "traffic, compute_s, num_bytes, parts, bound",
    [
        (Traffic("ring", 1024), 1.0, 1e6, (2.046, 0.001998046875), "latency"),
        (Traffic("ring", 8), 0.1, 1e9, (0.014, 1.75), "bandwidth"),
        (Traffic("ring", 8), 9.0, 1e9, (0.014, 1.75), "compute"),
        (Traffic("servers", 8, 8), 0.1, 1e9, (0.002, 2.0), "bandwidth"),
        (Traffic("servers", 8, 2), 0.1, 1e9, (0.002, 8.0), "servers"),
        (Traffic("rows", 8, 8), 0.1, 1e9, (0.002, 9.0), "bandwidth"),
        (Traffic("ring", 1, wait_s=0.5), 0.1, 1e9, (0.0, 0.0), "compute"),
        (Traffic("ring", 8, wait_s=0.5), 0.1, 1e3, (0.514, 1.75e-6), "latency"),
    ],
    ids=["latency", "bandwidth", "compute", "one-server-per-process", "servers", "rows", "alone", "wait"],
)
def test_what_bounds_a_step(traffic, compute_s, num_bytes, parts, bound):
    found = project(traffic, GIGABYTE, compute_s=compute_s, num_bytes=num_bytes)
    assert (found.latency_s, found.transfer_s) == pytest.approx(parts)
    assert found.bound == bound
    assert found.efficiency == pytest.approx(compute_s / (compute_s + sum(parts)))


def test_the_software_s_latency_counts_between_machines():
    assert between_machines(Link(1e-3, 5e9), Link(50e-6, 1.25e9)) == Link(1.05e-3, 1.25e9)
    assert between_machines(Link(1e-3, 5e8), Link(50e-6, 1.25e9)).bytes_per_s == 5e8


# Turns and failures, with fake crews


class FakeCrew:
    """Measures what `seconds` gives, and raises the error it holds."""

    log = []
    seconds = {}

    def __init__(self, row, options, *, python, folder, timeout_s):
        self.name = row.contender, row.case.num_devices
        self.log.append(("start", *self.name, options, python))

    def set_up(self, row):
        self.log.append(("set up", *self.name))
        if isinstance(self.seconds.get(row.contender), Exception):
            raise self.seconds[row.contender]

    def run_round(self, row):
        self.log.append(("round", row.contender, row.group))
        row.rounds.append({"sum_s": self.seconds[row.contender](row), "whole_s": self.seconds[row.contender](row)})

    def close(self):
        self.log.append(("close", *self.name))


@pytest.fixture
def crews(monkeypatch):
    monkeypatch.setattr(scaling, "Crew", FakeCrew)
    monkeypatch.setattr(FakeCrew, "log", [])
    monkeypatch.setattr(FakeCrew, "seconds", {})
    return FakeCrew


def test_crews_take_turns(crews):
    crews.seconds = {"dist_sync": lambda row: 2.0, "torch": lambda row: 1.0}
    rows = scaling.sum_rows(["dist_sync", "torch"], [2], [4096, 8192])
    scaling.measure(rows, rounds=2, pythons={"torch": "/other/python"})
    starts = [one[1:] for one in crews.log if one[0] == "start"]
    assert starts == [("dist_sync", 2, {}, sys.executable), ("torch", 2, {"servers": 0}, "/other/python")]
    groups = [f"{size} bytes, 2 processes" for size in ("4,096", "8,192")]
    forth = [("round", contender, group) for group in groups for contender in ("dist_sync", "torch")]
    assert [one for one in crews.log if one[0] == "round"] == forth + forth[::-1]
    assert [one[1] for one in crews.log[-2:]] == ["dist_sync", "torch"]
    assert [len(row.rounds) for row in rows] == [2] * 4


def test_a_contender_that_fails_is_reported_and_the_others_continue(crews):
    crews.seconds = {"dist_sync": lambda row: 2.0, "torch": ContenderError("not installed: pip install torch")}
    rows = scaling.sum_rows(["dist_sync", "torch"], [2], [4096])
    scaling.measure(rows, rounds=3)
    assert [(row.reason, len(row.rounds)) for row in rows] == [("", 3), ("not installed: pip install torch", 0)]


def test_all_crews_end_with_the_measurement(crews):
    def interrupt(_row):
        raise KeyboardInterrupt

    crews.seconds = {"dist_sync": lambda row: 2.0, "torch": interrupt}
    with pytest.raises(KeyboardInterrupt):
        scaling.measure(scaling.sum_rows(["dist_sync", "torch"], [2, 3], [4096]), rounds=3)
    assert sorted(one[1:] for one in crews.log if one[0] == "close") == sorted(one[1:3] for one in crews.log if one[0] == "start")


# Tables


def row_of(contender, num_processes, name, seconds, **sizes):
    return Row(
        contender, f"{num_processes}", Case("sum", num_devices=num_processes, **sizes), rounds=[{name: s} for s in seconds]
    )


def test_ratios_of_sums_are_to_torch():
    rows = [
        row_of("dist_sync", 2, "sum_s", (0.004, 0.003, 0.008), total_size=1024),
        row_of("torch", 2, "sum_s", (0.002, 0.002, 0.002), total_size=1024),
    ]
    lines = scaling_report.sum_table(rows)[2]
    assert lines[0] == ["2", "4,096", "dist_sync", "4.00 (3.00–8.00)", "2.00 (1.50–4.00)"]
    assert lines[1][-1] == "1.00"


def test_training_is_compared_with_one_process_and_with_torch():
    rows = [
        row_of("ours", 1, "whole_s", (0.5, 0.5), batch_size=10),
        row_of("torch", 1, "whole_s", (0.4, 0.4), batch_size=10),
        row_of("dist_sync", 2, "whole_s", (0.625, 0.625), batch_size=20),
        row_of("torch", 2, "whole_s", (0.5, 0.5), batch_size=20),
    ]
    fits = {("dist_sync", 2): Fit(Traffic("servers", 2, 2), Link(0.01, 1e6), 0.0)}
    lines = scaling_report.train_table(rows, fits, num_bytes=10_000)[2]
    assert lines[0][:5] == ["1", "ours", "20.0", "-", "0.80"]
    assert lines[2] == ["2", "dist_sync", "32.0", "1.60", "0.80", "625", "540"]  # 500 + 2 messages of 10 + 2 * 10,000 bytes
    assert lines[3][3:5] == ["1.60", "1.00"]


def test_the_fit_table_shows_the_wait_per_sum():
    fits = {("horovod", 2): Fit(Traffic("ring", 2, wait_s=0.0025), Link(50e-6, 2e9), 0.12)}
    title, columns, lines = scaling_report.fit_table(fits)
    assert "Horovod's cycle" in title
    assert dict(zip(columns, lines[0])) == {
        "contender": "horovod",
        "n": "2",
        "ms per sum": "2.5",
        "µs per message": "50",
        "GB/s": "2.00",
        "largest error": "12%",
    }
    rows = [row_of("ours", 1, "whole_s", (0.5,), batch_size=10), row_of("horovod", 2, "whole_s", (0.6,), batch_size=20)]
    assert scaling_report.train_table(rows, fits, num_bytes=20_000_000)[2][1][-1] == "513"  # 500 + 2.5 + 2 messages + 10


def test_a_projection_is_marked_as_not_measured():
    fits = {("dist_sync", 2): fit([(1e3, 1e-3), (1e6, 2e-3)], Traffic("servers", 2, 2))}
    job = scaling.Job(0.1, 1_000_000, Link(50e-6, 1.25e9))
    found = scaling.projections(fits, [8, 64], job)
    assert set(found) == {"2 servers", "one server per process"}
    assert [one.traffic for one in found["one server per process"]] == [Traffic("rows", 8, 8), Traffic("rows", 64, 64)]
    assert "not measured" in scaling_report.projection_table(found, job)[0]
    content = scaling_report.results([], [], rounds=1, fits=fits, projections=found, job=job)
    assert content["projection"]["is_measured"] is False
    assert len(content["projection"]["steps"]) == 4
    json.dumps(content)


@pytest.mark.parametrize(
    "contender, num_processes, traffic",
    [
        ("dist_sync", 2, Traffic("servers", 2, 2)),
        ("dist_sync", 3, Traffic("rows", 3, 2)),
        ("dist_sync-1-server", 2, Traffic("servers", 2, 1)),
        ("horovod", 4, Traffic("ring", 4, wait_s=horovod.cycle_s())),
        ("torch", 4, Traffic("ring", 4)),
    ],
    ids=["two", "three", "one-server", "horovod", "torch"],
)
def test_how_each_contender_sums(contender, num_processes, traffic):
    assert scaling.traffic_of(contender, num_processes) == traffic


def costs_of(num_contexts, milliseconds):
    return [
        checkpointing.Cost(
            way, num_contexts, 0.1, wall_s=ms / 1e3, cpu_s=2 * ms / 1e3, held_s=0.01, writing_s=0.5, writing_cpu_s=0.3
        )
        for way, added in milliseconds.items()
        for ms in added
    ]


def test_the_cost_of_checkpoints():
    """The second and the seventh of eight values would be a 93 % interval: it takes the first and the last."""
    alone = {"none": range(-4, 4), "background": [100, 120, 110, 130, 90, 80, 140, 900], "in the loop": [600] * 8}
    both = {"none": [0], "background": [-6], "in the loop": [12]}
    found = costs_of(1, alone) + costs_of(2, both)
    first, parts, second, _ = checkpointing.tables(found)
    assert first[0].startswith("1 context: the time a checkpoint adds to steps of 100 ms, 8 laps each")
    assert first[2] == [
        ["none", "0 (-4 to 3)", "0.00 (-0.01 to 0.01)", "-"],
        ["background", "115 (80 to 900)", "0.19 (0.13 to 1.50)", "5.8 (4.0 to 45.0)"],
        ["in the loop", "600 (600 to 600)", "1.00 (1.00 to 1.00)", "30.0 (30.0 to 30.0)"],
    ]
    assert parts[2][1] == ["background", "230 (160 to 1800)", "10", "500", "300", "0"]
    assert parts[2][0][2:] == ["-", "-", "-", "0"]
    assert first[0].endswith("its 95 % confidence interval")
    assert second[0].startswith("2 contexts")
    assert "too few for an interval" in second[0]
    assert second[2][1] == ["background", "-6 (-6 to -6)", "-0.01 (-0.01 to -0.01)", "0.0 (0.0 to 0.0)"]
    assert checkpointing.ranges(found)["1 context"]["background"] == pytest.approx((115, 80, 900))


@pytest.mark.parametrize("num_values, low, high", [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (25, 8, 18), (2000, 956, 1045)])
def test_the_interval_of_a_median(num_values, low, high):
    """The ranks from tables of the sign test; thousands of values do not overflow."""
    assert interval([float(value) for value in range(num_values, 0, -1)]) == Spread((num_values + 1) / 2, low, high)


def test_the_interval_has_its_confidence_level():
    draws = np.random.RandomState(0).exponential(size=(2000, 20))  # whose median is log(2)
    held = [one.low <= np.log(2) <= one.high for one in map(interval, draws.tolist())]
    assert 0.95 <= np.mean(held) < 0.97


def test_laps_are_compared_with_their_neighbours(monkeypatch):
    """Saving appears in the laps that begin with it. A machine that slows down steadily appears in none."""
    now, saved, messages = [0.0], [], []
    for name in ("perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(checkpointing.time, name, lambda: now[0])

    class Slow(checkpointing.Callback):
        def __init__(self, folder, *, background):
            self.name, self.rotation = folder.name, self
            self.writings, self.is_writing = [], False

        def on_batch_end(self, state):
            saved.append((state.step, self.name))
            now[0] += 7.0 if self.name == "in the loop" else 3.0
            self.writings.append((7.0, 5.0))
            self.is_writing = self.name == "background"

    def fit(net, loss, trainer, batches, *, callbacks, **options):
        (laps,) = callbacks
        state = checkpointing.FitState(None, None, 1, len(batches))
        laps.on_fit_begin(state)
        for state.step in range(1, len(batches) + 1):
            now[0] += 1.0 + state.step / 10
            laps.on_batch_end(state)
        laps.on_fit_end(state)

    monkeypatch.setattr(checkpointing, "_Saving", Slow)
    monkeypatch.setattr(checkpointing.mgpu, "fit", fit)
    case = Case("train", "resnet18", batch_size=1)
    found = checkpointing.measure([mx.cpu()], rounds=2, every=2, case=case, on_message=messages.append)
    assert messages == ["round 1 of 2 with 1 context", "round 2 of 2 with 1 context"]
    assert saved == [(8, "background"), (12, "in the loop"), (16, "in the loop"), (20, "background")]
    assert [one.way for one in found] == ["none", "background", "in the loop", "in the loop", "background", "none"]
    for name in ("wall_s", "cpu_s", "held_s"):
        assert [getattr(one, name) for one in found] == pytest.approx([0, 3, 7, 7, 3, 0])
    assert [(one.writing_s, one.writing_cpu_s) for one in found] == [(0, 0)] + [(7, 5)] * 4 + [(0, 0)]
    assert found[0].step_s == pytest.approx(1.55)  # the mean of the steps 3, 4, 7 and 8
    assert found[1].is_late
    assert not found[0].is_late


# Processes


def python_of(path, program):
    """A program to run instead of Python."""
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.exhaustive
def test_sums_are_measured_fitted_and_drawn(tmp_path, mark):
    sizes, paths = ["--sizes", "4096,40000"], ["--json", tmp_path / "new" / "found.json", "--plot", tmp_path / "found.png"]
    options = [*sizes, *paths, "--contenders", "dist_sync-1-server,torch", "--rounds", 2, "--train-rounds", 0, "--step-ms", 10]
    broken = python_of(tmp_path / "python", "echo no torch here >&2; exit 3")
    done = CliRunner().invoke(main, ["scaling", *map(str, options), "--python", f"torch={broken}"])
    assert done.exit_code == 0, done.output
    assert not marked(mark)
    found = json.loads((tmp_path / "new" / "found.json").read_text())
    ours = [row for row in found["rows"] if row["contender"] == "dist_sync-1-server"]
    assert [(row["reason"], len(row["rounds"]), row["case"]["total_size"]) for row in ours] == [("", 2, 1024), ("", 2, 10_000)]
    assert all(one["sum_s"] > 0 for row in ours for one in row["rounds"])
    assert ours[0]["versions"]["mxnet"] == "1.9.1"
    assert all("exit status 3" in row["reason"] for row in found["rows"] if row["contender"] == "torch")
    assert "exit status 3" in " ".join(done.output.split())
    assert [one["contender"] for one in found["fits"]] == ["dist_sync-1-server"]
    assert [one["traffic"]["num_processes"] for one in found["projection"]["steps"]] == [8, 64, 1024]
    assert (tmp_path / "found.png").read_bytes().startswith(PNG)


@pytest.mark.exhaustive
def test_a_process_trains(mark):
    """One, which uses no store. test_processes shows that several train alike."""
    case = replace(scaling.TRAIN, batch_size=2, image_size=8, num_steps=1)
    rows = scaling.train_rows(["dist_sync"], [2], case)
    assert [(row.contender, row.case.num_devices, row.case.batch_size) for row in rows] == [("ours", 1, 2), ("dist_sync", 2, 4)]
    scaling.measure(rows[:1], rounds=1)
    assert not marked(mark)
    assert rows[0].reason == ""
    assert rows[0].rounds[0]["whole_s"] > 0
    assert scaling.compute_s_of(rows) == rows[0].rounds[0]["whole_s"]


def test_a_contender_that_does_not_connect_is_ended(tmp_path, mark):
    rows = scaling.sum_rows(["torch"], [2], [4096])
    scaling.measure(rows, rounds=1, pythons={"torch": python_of(tmp_path / "python", "sleep 10000")}, timeout_s=1)
    assert rows[0].reason == "0 of 2 processes connected within 1 s"
    assert not marked(mark)


@pytest.mark.exhaustive
def test_ctrl_c_leaves_nothing_behind(tmp_path, mark):
    there = tmp_path / "there"
    sleeping = python_of(tmp_path / "python", f"touch {there}; sleep 10000")
    command = [sys.executable, str(PROGRAM), "scaling", "--contenders", "torch", "--python", f"torch={sleeping}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path) as process:
        deadline = time.monotonic() + 240
        while not there.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    assert there.exists()
    assert process.returncode == 130
    assert not marked(mark)


@pytest.mark.exhaustive
def test_checkpoints_are_measured(tmp_path):
    options = ["--rounds", 1, "--every", 2, "--batch-size", 2, "--shape", 8, "--folder", tmp_path]
    options += ["--json", tmp_path / "found.json", "--plot", tmp_path / "found.png"]
    done = CliRunner().invoke(main, ["checkpoint", *map(str, options)])
    assert done.exit_code == 0, done.output
    costs = json.loads((tmp_path / "found.json").read_text())["costs"]
    assert [(one["num_contexts"], one["way"]) for one in costs] == [(n, way) for n in (1, 2) for way in checkpointing.WAYS]
    for one in costs:
        assert one["step_s"] > 0
        parts = [one["held_s"], one["writing_s"], one["writing_cpu_s"]]
        assert parts == [0, 0, 0] if one["way"] == "none" else min(parts) > 0
        if one["way"] == "in the loop":
            assert one["held_s"] > one["writing_s"] >= 0.9 * one["writing_cpu_s"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.png"]


@pytest.mark.exhaustive
def test_quick_checkpoints_ignore_the_given_sizes():
    done = CliRunner().invoke(main, ["checkpoint", "--quick", "--devices", "cpu", "--rounds", "99", "--shape", "999"])
    assert done.exit_code == 0, done.output
    assert "2 laps each" in done.output
    assert "2 contexts" not in done.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--processes", "1"], "expected 2 or more"),
        (["--contenders", "horovod,mpi"], "got 'mpi'"),
        (["--python", "torch=/no/such/python"], "expected NAME=PATH"),
        (["--sizes", "0"], "expected whole numbers of 1 or more"),
    ],
    ids=["one-process", "contender", "python", "sizes"],
)
def test_wrong_options_are_refused(arguments, message):
    done = CliRunner().invoke(main, ["scaling", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
