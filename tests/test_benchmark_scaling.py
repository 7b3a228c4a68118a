"""The benchmarks of several processes and of checkpoints: turns, failures, the fit of made-up links. No test reads a clock."""

import json
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace

import mxnet as mx
import pytest
from click.testing import CliRunner
from gluon_mgpu.benchmark import checkpointing, scaling, scaling_report
from gluon_mgpu.benchmark.case import Case
from gluon_mgpu.benchmark.compare import ContenderError, Row
from gluon_mgpu.benchmark.scaling_model import Fit, Link, Traffic, between_machines, fit, project
from gluon_mgpu.cli import main

from .conftest import assert_house_style
from .test_launch import mark, marked

__all__ = ["mark"]  # a fixture

pytestmark = pytest.mark.timeout(200)
PNG = b"\x89PNG\r\n\x1a\n"
SIZES = (4_000, 300_000, 44_000_000)


# The model, on links that are made up


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


@pytest.mark.parametrize("points, processes", [([(1e3, 1e-3)], 2), ([(1e3, 1e-3), (2e3, 2e-3)], 1)], ids=["one-size", "alone"])
def test_too_little_cannot_be_fitted(points, processes):
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
        (Traffic("ring", 1), 0.1, 1e9, (0.0, 0.0), "compute"),
    ],
    ids=["latency", "bandwidth", "compute", "a-server-each", "servers", "rows", "alone"],
)
def test_what_bounds_a_step(traffic, compute_s, num_bytes, parts, bound):
    found = project(traffic, GIGABYTE, compute_s=compute_s, num_bytes=num_bytes)
    assert (found.latency_s, found.transfer_s) == pytest.approx(parts)
    assert found.bound == bound
    assert found.efficiency == pytest.approx(compute_s / (compute_s + sum(parts)))


def test_between_machines_software_stays():
    assert between_machines(Link(1e-3, 5e9), Link(50e-6, 1.25e9)) == Link(1.05e-3, 1.25e9)
    assert between_machines(Link(1e-3, 5e8), Link(50e-6, 1.25e9)).bytes_per_s == 5e8


# Turns and failures, with crews that are made up


class FakeCrew:
    """Finds what `seconds` says, and fails where it says why."""

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


def test_a_contender_that_fails_is_reported_and_the_others_go_on(crews):
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


def test_a_projection_says_that_it_is_one():
    fits = {("dist_sync", 2): fit([(1e3, 1e-3), (1e6, 2e-3)], Traffic("servers", 2, 2))}
    job = scaling.Job(0.1, 1_000_000, Link(50e-6, 1.25e9))
    found = scaling.projections(fits, [8, 64], job)
    assert set(found) == {"2 servers", "a server each"}
    assert [one.traffic for one in found["a server each"]] == [Traffic("rows", 8, 8), Traffic("rows", 64, 64)]
    assert "not measured" in scaling_report.projection_table(found, job)[0]
    told = scaling_report.results([], [], rounds=1, fits=fits, projections=found, job=job)
    assert told["projection"]["is_measured"] is False
    assert len(told["projection"]["steps"]) == 4
    json.dumps(told)


@pytest.mark.parametrize(
    "contender, num_processes, traffic",
    [
        ("dist_sync", 2, Traffic("servers", 2, 2)),
        ("dist_sync", 3, Traffic("rows", 3, 2)),
        ("dist_sync-1-server", 2, Traffic("servers", 2, 1)),
        ("horovod", 4, Traffic("ring", 4)),
        ("torch", 4, Traffic("ring", 4)),
    ],
    ids=["two", "three", "one-server", "horovod", "torch"],
)
def test_how_each_contender_sums(contender, num_processes, traffic):
    assert scaling.traffic_of(contender, num_processes) == traffic


def test_the_cost_of_checkpoints():
    seconds = {"none": [(1.0, 1.0)] * 3, "background": [(1.02, 1.0), (1.1, 1.0), (1.0, 1.01)], "in the loop": [(2.0, 1.0)] * 3}
    found = [checkpointing.Pair(way, *pair, False) for way, pairs in seconds.items() for pair in pairs]
    lines = checkpointing.table(found, every=10)[2]
    assert lines[0] == ["none", "100", "0 (0 to 0)", "-", "0"]
    assert lines[1] == ["background", "100 (100–101)", "20 (-10 to 100)", "1.0", "0"]
    assert lines[2] == ["in the loop", "100", "1000 (1000 to 1000)", "50.0", "0"]
    assert checkpointing.ranges(found)["a checkpoint"]["background"] == pytest.approx((20, -10, 100))


def test_pairs_begin_with_their_checkpoint(monkeypatch, tmp_path):
    """A way that saves for a long time shows in the first half of each pair, and in no other place."""
    saved, now = [], [0.0]
    monkeypatch.setattr(checkpointing.time, "perf_counter", lambda: now[0])

    class Slow(checkpointing.Callback):
        def __init__(self, *arguments, every, background):
            self.every = every

        def on_batch_end(self, state):
            now[0] += 1.0
            if state.step % self.every == 0 and state.batches < state.num_batches:
                saved.append(state.step)
                now[0] += 7.0

    def fit(net, loss, trainer, batches, *, callbacks, **options):
        state = checkpointing.FitState(None, None, 1, len(batches))
        for state.step in range(1, len(batches) + 1):
            state.batches = state.step
            for callback in callbacks:
                callback.on_batch_end(state)

    monkeypatch.setattr(checkpointing, "Checkpoint", Slow)
    monkeypatch.setattr(checkpointing, "fit", fit)
    found = checkpointing.measure([mx.cpu()], rounds=1, every=2, num_checkpoints=3, case=Case("train", "resnet18", batch_size=1))
    assert saved == [4, 8, 12] * 2
    costs = {way: [one.cost_s for one in found if one.way == way] for way in checkpointing.WAYS}
    assert costs == {"none": [0.0] * 3, "background": [7.0] * 3, "in the loop": [7.0] * 3}


# Processes


def python_of(path, program):
    """A program that is run instead of Python."""
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_sums_are_measured_fitted_and_drawn(tmp_path, mark):
    sizes, paths = ["--sizes", "4096,40000"], ["--json", tmp_path / "new" / "found.json", "--plot", tmp_path / "found.png"]
    options = [*sizes, *paths, "--contenders", "dist_sync-1-server,torch", "--rounds", 2, "--train-rounds", 0, "--step-ms", 10]
    broken = python_of(tmp_path / "python", "echo no torch here >&2; exit 3")
    done = CliRunner().invoke(main, ["bench", "scaling", *map(str, options), "--python", f"torch={broken}"])
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


def test_a_process_trains(mark):
    """One, which needs no store: that more of them train alike is what test_processes shows."""
    case = replace(scaling.TRAIN, batch_size=2, image_size=8, num_steps=1)
    rows = scaling.train_rows(["dist_sync"], [2], case)
    assert [(row.contender, row.case.num_devices, row.case.batch_size) for row in rows] == [("ours", 1, 2), ("dist_sync", 2, 4)]
    scaling.measure(rows[:1], rounds=1)
    assert not marked(mark)
    assert rows[0].reason == ""
    assert rows[0].rounds[0]["whole_s"] > 0
    assert scaling.compute_s_of(rows) == rows[0].rounds[0]["whole_s"]


def test_a_contender_that_says_nothing_is_ended(tmp_path, mark):
    rows = scaling.sum_rows(["torch"], [2], [4096])
    scaling.measure(rows, rounds=1, pythons={"torch": python_of(tmp_path / "python", "sleep 100")}, timeout_s=3)
    assert rows[0].reason == "0 of 2 processes have come within 3 s"
    assert not marked(mark)


def test_ctrl_c_leaves_nothing_behind(tmp_path, mark):
    there = tmp_path / "there"
    sleeping = python_of(tmp_path / "python", f"touch {there}; sleep 100")
    command = [sys.executable, "-m", "gluon_mgpu", "bench", "scaling", "--contenders", "torch", "--python", f"torch={sleeping}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while not there.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert there.exists()
    assert process.returncode == 130
    assert not marked(mark)


def test_checkpoints_are_measured(tmp_path):
    options = ["--rounds", 1, "--every", 1, "--num-checkpoints", 1, "--batch-size", 1, "--shape", 8, "--folder", tmp_path]
    options += ["--json", tmp_path / "found.json", "--plot", tmp_path / "found.png"]
    done = CliRunner().invoke(main, ["bench", "checkpoint", *map(str, options)])
    assert done.exit_code == 0, done.output
    pairs = json.loads((tmp_path / "found.json").read_text())["pairs"]
    assert [one["way"] for one in pairs] == ["none", "background", "in the loop"]
    assert all(one["with_s"] > 0 and one["without_s"] > 0 for one in pairs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.png"]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--processes", "1"], "need 2 or more"),
        (["--contenders", "horovod,mpi"], "got 'mpi'"),
        (["--python", "torch=/no/such/python"], "need NAME=PATH"),
        (["--sizes", "0"], "need whole numbers of 1 or more"),
    ],
    ids=["one-process", "contender", "python", "sizes"],
)
def test_what_makes_no_sense_is_refused(arguments, told):
    done = CliRunner().invoke(main, ["bench", "scaling", *arguments])
    assert done.exit_code == 2
    assert told in " ".join(done.output.split())
