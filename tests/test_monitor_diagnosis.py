"""Recorded samples -> what is wrong and why; stacks -> where a thread is; laps -> shares."""

import os
from dataclasses import replace
from pathlib import Path

import gluon_mgpu
import mxnet as mx
import pytest
from gluon_mgpu.errors import DataError
from gluon_mgpu.monitor import (
    CpuSample,
    GpuSample,
    HostSample,
    LiveArrays,
    Sample,
    diagnose,
    plot_samples,
    read_samples,
    summarise,
)
from gluon_mgpu.monitor.memory import held_by
from gluon_mgpu.monitor.phases import PhaseTimer, refined
from gluon_mgpu.monitor.sample import from_json, joined, to_json
from gluon_mgpu.monitor.stacks import Frame, place_of

from .conftest import assert_house_style

GIB = 2**30
HOST = HostSample(GIB, 0, 0, 1.0, 0.5, 1.1, 8, 32 * GIB, 64 * GIB)
OURS = os.path.dirname(gluon_mgpu.__file__)
SHARDING = f"{OURS}/data_parallel/sharding.py"
STEP, RUN = f"{OURS}/data_parallel/step.py", f"{OURS}/loop/run.py"
MXNET = os.path.dirname(mx.__file__)


def gpu(i, used_gib=4.0, **more):
    return GpuSample(
        f"gpu({i})",
        "Tesla V100-SXM2-16GB",
        **{"total_bytes": 16 * GIB, "used_bytes": int(used_gib * GIB), "own_bytes": int(used_gib * GIB), "load": 0.9, **more},
    )


def cpu(i, cores=0.9, waiting=0.0, **more):
    return CpuSample(f"cpu({i})", cores, waiting, **{"num_threads": 1, **more})


def over_time(num=10, **what):
    """So many samples, a second apart, in which nothing changes."""
    return [Sample(1e9 + i, float(i), 1.0, **{"host": HOST, **what}) for i in range(num)]


def found(samples, what):
    return [(one.device, one.cause) for one in diagnose(samples) if one.what == what]


def test_four_equal_busy_gpus_are_well():
    assert diagnose(over_time(gpus=tuple(gpu(i) for i in range(4)))) == []


def test_two_samples_say_nothing():
    full = over_time(gpus=(gpu(0, 10.0, held=LiveArrays(0)), gpu(1)))
    assert diagnose(full[:2]) == [] and diagnose(full) != []


# The case of the post on PyTorch: GPU 0 holds 6 GiB more than the three others.
SIX_MORE = {
    "other process": gpu(0, 10.0, own_bytes=4 * GIB, foreign=(("python (77)", 6 * GIB),), held=LiveArrays(GIB)),
    "kept in a list": gpu(0, 10.0, held=LiveArrays(7 * GIB, 800, (64, 30000), "float32")),
    "gathered": gpu(0, 10.0, held=LiveArrays(7 * GIB, 1, (50, 30000, 1024), "float32")),
    "gathered in a step": gpu(0, 10.0, held=LiveArrays(GIB)),
    "unknown": gpu(0, 10.0),
}


@pytest.mark.parametrize("cause", list(SIX_MORE))
def test_memory_imbalance_has_a_cause(cause):
    others = tuple(gpu(i, held=None if cause == "unknown" else LiveArrays(GIB)) for i in (1, 2, 3))
    samples = over_time(gpus=(SIX_MORE[cause], *others))
    assert found(samples, "memory imbalance") == [("gpu(0)", cause)]
    (finding,) = [one for one in diagnose(samples) if one.what == "memory imbalance"]
    assert "gpu(0) holds 10.0 GiB, 6.0 GiB more than the others" in finding.message
    assert {"other process": "python (77)", "kept in a list": "800 more arrays float32 (64, 30000)"}.get(
        cause, ""
    ) in finding.message


def test_processes_whose_ids_are_not_ours_are_not_blamed():
    gpus = (
        gpu(0, 10.0, own_bytes=0, foreign=(("python (1)", 10 * GIB),), held=LiveArrays(GIB)),
        gpu(1, own_bytes=0, held=LiveArrays(GIB)),
    )
    assert found(over_time(gpus=gpus), "memory imbalance") == [("gpu(0)", "gathered in a step")]


def test_a_small_difference_is_none():
    assert found(over_time(gpus=(gpu(0, 4.2), gpu(1))), "memory imbalance") == []  # less than 256 MiB
    assert found(over_time(gpus=(gpu(0, 15.0), gpu(1, 14.0))), "memory imbalance") == []  # less than a tenth


def test_arrays_kept_on_a_cpu_context_are_found():
    cpus = (cpu(0), cpu(1, held=LiveArrays(3 * GIB, 500, (64, 1000), "float32")))
    samples = over_time(cpus=(replace(cpus[0], held=LiveArrays(GIB)), cpus[1]))
    assert found(samples, "memory imbalance") == [("cpu(1)", "kept in a list")]


def test_memory_that_is_nearly_full():
    assert found(over_time(gpus=(gpu(0, 15.9),)), "memory full") == [("gpu(0)", "device memory")]
    host = replace(HOST, available_bytes=GIB)
    assert found(over_time(host=host), "memory full") == [("host", "host memory")]


@pytest.mark.parametrize(
    ("reasons", "cause"),
    [(("temperature", "power limit"), "temperature"), (("power limit",), "power limit"), (("sync boost",), None)],
)
def test_throttling(reasons, cause):
    samples = over_time(gpus=(gpu(0, throttled=reasons, temperature_c=91, power_w=299, power_limit_w=300), gpu(1)))
    assert found(samples, "throttled") == ([("gpu(0)", cause)] if cause else [])
    once = samples[:1] + over_time(gpus=(gpu(0), gpu(1)))[1:]
    assert found(once, "throttled") == []


def test_the_device_that_others_wait_for():
    idle = gpu(1, load=0.3)
    assert found(over_time(gpus=(gpu(0), idle)), "uneven load") == [("gpu(0)", "larger share")]
    assert found(over_time(gpus=(gpu(0, throttled=("temperature",)), idle)), "uneven load") == [("gpu(0)", "throttled")]
    shared = gpu(0, foreign=(("python (77)", GIB),))
    assert found(over_time(gpus=(shared, idle)), "uneven load") == [("gpu(0)", "other process")]
    assert found(over_time(cpus=(cpu(0), cpu(1, 0.4))), "uneven load") == [("cpu(0)", "larger share")]


@pytest.mark.parametrize("place", ["data", "dispatch", "sync", "devices", "callbacks", "other"])
def test_idle_devices_have_the_reason_where_most_time_goes(place):
    spent = {"data": 0.1, "dispatch": 0.1, place: 0.7}
    samples = over_time(gpus=(gpu(0, load=0.3), gpu(1, load=0.2)), spent=spent, where={place: "train.py:42 (step)"})
    assert found(samples, "idle") == [("gpu(0), gpu(1)", place)]
    (finding,) = [one for one in diagnose(samples) if one.what == "idle"]
    assert "gpu(0) 30%, gpu(1) 20%" in finding.message and "70%" in finding.message
    assert ("train.py:42 (step)" in finding.message) == (place != "devices")


def test_a_busy_device_is_not_idle():
    assert found(over_time(gpus=(gpu(0), gpu(1, load=0.2)), spent={"data": 0.9}), "idle") == []


def test_cores_that_others_take():
    starved = (cpu(0, 0.4, 0.5), cpu(1, 0.4, 0.5))
    samples = over_time(cpus=starved, host=replace(HOST, machine_cores=3.0, num_cores=2), spent={"devices": 0.9})
    assert found(samples, "idle") == [("cpu(0), cpu(1)", "other processes")]
    samples = over_time(cpus=starved, host=replace(HOST, cores=2.0, machine_cores=2.1, num_cores=2), spent={"devices": 0.9})
    assert found(samples, "idle") == [("cpu(0), cpu(1)", "too many threads")]


def test_idle_from_outside():
    busy_main, gpus = replace(HOST, main_cores=0.95), (gpu(0, load=0.1),)
    assert found(over_time(gpus=gpus, host=busy_main), "idle") == [("gpu(0)", "host")]
    assert found(over_time(gpus=gpus, host=replace(HOST, main_cores=0.05)), "idle") == [("gpu(0)", "unknown")]
    assert found(over_time(gpus=(gpu(0, load=0.1, own_bytes=None),)), "idle") == []  # nobody is to compute there


def test_a_lost_gpu():
    assert found(over_time(gpus=(GpuSample("gpu(0)", trouble="GPU is lost"),)), "lost") == [("gpu(0)", "driver")]


def test_the_kind_of_arrays_that_a_device_has_more_of():
    counts = {("cpu(0)", "float32", (10,)): 3, ("cpu(1)", "float32", (10,)): 3, ("cpu(1)", "float32", (5,)): 100}
    held = held_by(counts, lambda kind: 4 * kind[2][0])
    assert held == {"cpu(0)": LiveArrays(120, 0, (10,), "float32"), "cpu(1)": LiveArrays(120 + 2000, 100, (5,), "float32")}


def test_lines_of_json_give_the_samples_back(tmp_path):
    foreign = (("python (7)", 5),)
    samples = over_time(
        2,
        gpus=(gpu(0, foreign=foreign, throttled=("temperature",), held=LiveArrays(8, 2, (1, 2), "int8")),),
        cpus=(cpu(0),),
        spent={"data": 1.0},
    )
    (tmp_path / "monitor.jsonl").write_text("\n".join(map(to_json, samples)) + "\n", encoding="utf-8")
    assert read_samples(tmp_path / "monitor.jsonl") == samples
    with pytest.raises(DataError) as caught:
        from_json(to_json(samples[0])[:80])
    assert_house_style(caught.value)


def test_joined_samples_keep_peaks_and_means():
    first, second = over_time(2, gpus=(gpu(0, 9.0, load=0.2, temperature_c=80),), cpus=(cpu(0, 0.5),), spent={"data": 1.0})
    second = replace(
        second, over_s=3.0, gpus=(gpu(0, 4.0, load=0.6, temperature_c=70),), cpus=(cpu(0, 0.9),), spent={"sync": 1.0}
    )
    one = joined(first, second)
    assert one.over_s == 4.0 and one.spent == {"data": 0.25, "sync": 0.75}
    assert one.gpus[0].used_bytes == 9 * GIB and one.gpus[0].temperature_c == 80 and one.gpus[0].load == pytest.approx(0.5)
    assert one.cpus[0].cores == pytest.approx(0.8)


def test_joined_samples_keep_the_larger_growth():
    small, large = LiveArrays(8, 2, (1, 2), "int8"), LiveArrays(800, 2, (10, 2), "float32")
    for pair, kept in (((small, large), large), ((large, small), large), ((small, None), small), ((None, small), small)):
        first, second = over_time(2, cpus=(cpu(0),))
        first, second = (replace(one, cpus=(replace(cpu(0), held=held),)) for one, held in zip((first, second), pair))
        assert joined(first, second).cpus[0].held == kept


def test_summary():
    samples = over_time(
        gpus=(gpu(0, 10.0, load=0.9, held=LiveArrays(GIB)), gpu(1, 4.0, load=0.5, held=LiveArrays(GIB))), spent={"devices": 1.0}
    )
    summary = summarise(samples)
    assert summary.peak_bytes == {"gpu(0)": 10 * GIB, "gpu(1)": 4 * GIB} and summary.imbalance == 2.5
    assert summary.load == {"gpu(0)": pytest.approx(0.9), "gpu(1)": pytest.approx(0.5)} and summary.seconds == 10
    assert [one.what for one in summary.findings] == ["memory imbalance", "uneven load"]
    assert "holds 2.50 times as much as" in str(summary) and "memory imbalance: gpu(0)" in str(summary)


def test_a_picture_has_a_line_a_device():
    made = plot_samples(over_time(gpus=(gpu(0), gpu(1)), spent={"data": 0.3, "sync": 0.7}))
    loads, memory, spent = made.axes
    assert [line.get_label() for line in loads.lines] == ["gpu(0)", "gpu(1)"]
    assert len(memory.lines) == 3 and len(spent.collections) == 2


def test_a_picture_of_hardly_anything():
    assert len(plot_samples(over_time(1)).axes) == 3


LOOP = Frame(f"{OURS}/loop/epoch.py", "run_epoch", 1)
USER = Frame("/home/me/train.py", "decode", 42)
WAIT = [Frame(f"{MXNET}/ndarray/ndarray.py", "asnumpy", 1), Frame(f"{MXNET}/ndarray/ndarray.py", "asscalar", 1)]
LINES = Path(LOOP.file).read_text(encoding="utf-8").splitlines()
FOR_LINE = next(i for i, line in enumerate(LINES, 1) if line.lstrip().startswith("for step, item in enumerate"))


@pytest.mark.parametrize(
    ("frames", "kind", "where"),
    [
        ([USER, LOOP], "data", "train.py:42 (decode)"),
        ([*WAIT, USER, LOOP], "data", "train.py:42 (decode)"),  # an iterator that reads an array
        ([Frame(f"{OURS}/loop/epoch.py", "run_epoch", FOR_LINE)], "data", f"epoch.py:{FOR_LINE} (run_epoch)"),
        ([Frame(f"{OURS}/data/array_loader.py", "__iter__", 9), LOOP], "data", "array_loader.py:9 (__iter__)"),
        (
            [USER, Frame(STEP, "_forward", 1), Frame(RUN, "_train_batch", 2), LOOP],
            "dispatch",
            USER.location,
        ),
        (
            [
                *WAIT,
                USER,
                Frame(STEP, "_forward", 1),
                Frame(RUN, "_train_batch", 2),
                LOOP,
            ],
            "sync",
            USER.location,
        ),
        (
            [WAIT[0], Frame(f"{OURS}/loop/epoch.py", "_wait_for_oldest", 5), Frame(f"{OURS}/loop/epoch.py", "_checked", 6), LOOP],
            "devices",
            "epoch.py:5 (_wait_for_oldest)",
        ),
        (
            [WAIT[0], Frame(f"{OURS}/loop/metrics.py", "read", 7), Frame(f"{OURS}/loop/epoch.py", "_report", 6), LOOP],
            "devices",
            "metrics.py:7 (read)",
        ),
        ([USER, Frame(RUN, "call_each", 1), LOOP], "callbacks", USER.location),
        ([*WAIT, USER, Frame(RUN, "call_each", 1), LOOP], "sync", USER.location),
        (
            [Frame(f"{OURS}/checkpoint/snapshot.py", "write", 3), Frame(RUN, "call_each", 1)],
            "callbacks",
            "snapshot.py:3 (write)",
        ),
        ([*WAIT, USER], "sync", USER.location),
        ([Frame(f"{MXNET}/gluon/block.py", "__call__", 1), USER], "dispatch", USER.location),
        ([Frame(f"{MXNET}/gluon/data/dataloader.py", "__next__", 1), USER], "data", USER.location),
        (
            [
                Frame(SHARDING, "split_batch", 1),
                Frame(f"{OURS}/data_parallel/prefetch.py", "_load_ahead", 1),
                USER,
            ],
            "dispatch",
            USER.location,
        ),
        ([USER], "other", USER.location),
        ([], "other", ""),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_where_a_stack_is(frames, kind, where):
    place = place_of(frames)
    assert (place.kind, place.where) == (kind, where)


def test_laps_add_up_between_takes():
    clock = iter([0.0, 1.0, 3.0, 4.0, 9.0])
    laps = PhaseTimer(clock.__next__)
    laps.enter("data")
    laps.enter("dispatch")
    assert laps.take() == {"data": 2.0, "dispatch": 1.0, "": 1.0}
    assert laps.take() == {"dispatch": 5.0}


def test_laps_that_nobody_told_say_nothing():
    assert PhaseTimer(iter([0.0, 5.0]).__next__).take() == {}
    assert refined({"data": 0.4, "other": 0.6}, {}) == {"data": 0.4, "other": 0.6}


def test_exact_laps_correct_what_looks_missed():
    """A batch made by Python code that holds the lock: looks find the step that follows."""
    assert refined({"dispatch": 1.0}, {"data": 6.0, "dispatch": 2.0}) == {"data": 0.75, "dispatch": 0.25}
