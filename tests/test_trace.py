"""Trace: lanes, names of idle time, the window of steps, and that training does not notice."""

import json
import logging
import sys
import time

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import SaveError, TrainerError
from gluon_mgpu.loop.timeline import HOST, Timeline
from gluon_mgpu.mxnet_internals.engine import CPU, ON_WORKER, EngineContext, push
from gluon_mgpu.plots import plot_schedule, plot_trace
from gluon_mgpu.runtime.profiler import Operation, Recording, operations_of, recordable_devices, task_mark
from mxnet.gluon import nn

from .conftest import LOSS, initialized, sequential
from .versions import nd

MS = 1e-3


def timeline(phases, operations, devices=("cpu(0)", "cpu(1)"), length=10):
    """Of one step; times in ms from its begin."""
    ops = sorted((Operation(device, name, b * MS, e * MS) for device, name, b, e in operations), key=lambda one: one.begin)
    return Timeline([Operation(HOST, "step 1", 0.0, length * MS)], [(b * MS, name) for b, name in phases], ops, devices)


def in_ms(spans):
    return [(span.name, round(span.begin / MS, 6), round(span.end / MS, 6)) for span in spans]


def test_idle_time_is_named_by_what_the_host_does():
    found = timeline([(0, "data"), (4, "split"), (5, "forward"), (6, "devices")], [("cpu(0)", "dot", 5.5, 10)], ("cpu(0)",))
    idle = [("idle: host in data", 0, 4), ("idle: host in split", 4, 5), ("idle: host in dispatch", 5, 5.5)]
    assert in_ms(found.idle["cpu(0)"]) == idle
    shares = {"idle: host in data": 0.4, "idle: host in split": 0.1, "idle: host in dispatch": 0.05}
    assert found.shares()["cpu(0)"] == pytest.approx({"operations": 0.45, "sums and updates": 0, **shares})
    assert found.shares()["host"] == pytest.approx({"data": 0.4, "split": 0.1, "dispatch: forward": 0.1, "wait": 0.4})


def test_a_device_waits_while_the_host_waits_for_all():
    operations = [("cpu(0)", "dot", 0, 4), ("cpu(1)", "dot", 0, 9), ("cpu(0)", "ElementwiseSum", 9, 10)]
    found = timeline([(0, "devices")], operations)
    assert in_ms(found.idle["cpu(0)"]) == [("idle: waits for others", 4, 9)]
    assert in_ms(found.updates["cpu(0)"]) == [("ElementwiseSum", 9, 10)]
    assert found.shares()["cpu(0)"]["sums and updates"] == pytest.approx(0.1)


def test_short_gaps_belong_to_the_engine():
    operations = [("cpu(0)", "dot", 0, 4), ("cpu(0)", "dot", 4.05, 10)]
    found = timeline([(0, "data")], operations, ("cpu(0)",))
    assert in_ms(found.idle["cpu(0)"]) == [("idle: between operations", 4, 4.05)]


def test_overlapping_operations_count_once():
    found = timeline([(0, "devices")], [("cpu(0)", "dot", 0, 6), ("cpu(0)", "dot", 2, 4), ("cpu(0)", "sum", 5, 8)], ("cpu(0)",))
    assert found.shares()["cpu(0)"]["operations"] == pytest.approx(0.8)
    lanes = {event["tid"] for event in found.events() if event["ph"] == "X" and event["cat"] == "devices"}
    assert len(lanes) == 2  # dot and the dot within it


def test_what_runs_before_and_after_the_steps_is_cut_off():
    found = timeline([(-3, "data"), (2, "devices")], [("cpu(0)", "dot", -2, 1), ("cpu(0)", "dot", 9, 14)], ("cpu(0)",))
    assert in_ms(found.operations["cpu(0)"]) == [("dot", 0, 1), ("dot", 9, 10)]
    assert sum(found.shares()["host"].values()) == pytest.approx(1.0)


def marks(*tasks):
    """The marks of tasks (device, name, begin, end) as the profiler records them: short operations on cpu(0)."""
    return [
        ("cpu(0)", task_mark(name, device, edge), at, at)
        for device, name, begin, end in tasks
        for edge, at in (("begins", begin), ("ends", end))
    ]


TASKS = [("cpu(0)", "F0.0", 0, 2), ("cpu(1)", "F1.0", 2, 4), ("cpu(1)", "B1.0", 4, 6), ("cpu(0)", "B0.0", 6, 9)]


def test_tasks_are_lanes_and_their_marks_are_no_operations():
    operations = [(device, "dot", b, e) for device, _, b, e in TASKS]
    found = timeline([(0, "forward")], [*operations, *marks(*TASKS)])
    assert {device: in_ms(spans) for device, spans in found.tasks.items()} == {
        "cpu(0)": [("F0.0", 0, 2), ("B0.0", 6, 9)],
        "cpu(1)": [("F1.0", 2, 4), ("B1.0", 4, 6)],
    }
    assert {span.name for spans in found.operations.values() for span in spans} == {"dot"}
    lanes = {(e["cat"], e["name"]) for e in found.events() if e["ph"] == "X" and e["cat"] == "tasks"}
    assert lanes == {("tasks", name) for _, name, _, _ in TASKS}
    assert timeline([(0, "forward")], operations).tasks == {}


def test_tasks_of_a_batch_that_began_before_the_trace_are_left_out():
    before = [(device, name, b - 6, e - 8) for device, name, b, e in TASKS]  # its last task begins with the trace
    found = timeline([(0, "forward")], marks(*before, *TASKS))
    assert in_ms(found.tasks["cpu(0)"]) == [("F0.0", 0, 2), ("B0.0", 6, 9)]


def test_files_of_the_profiler_after_the_first_begin_with_a_comma():
    text = '{"traceEvents": [\n,\n{"ph": "B", "name": "dot", "pid": 0, "tid": 1, "ts": 1000000},'
    text += '{"ph": "E", "name": "dot", "pid": 0, "tid": 1, "ts": 1000005}]}'
    assert operations_of(text, ("cpu(0)",)) == [Operation("cpu(0)", "dot", 1.0, 1.000005)]


def train(trace, ctx, *, batches=20, epochs=1, sleep_s=0.0, compiled="auto", missing=-1):
    """Train a small network; return its weights."""
    mx.random.seed(3)
    net = sequential(nn.Dense(8, activation="relu", in_units=4), nn.Dense(2, in_units=8), ctx=ctx, init=mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, bucket_bytes=64)  # each device updates some
    X, y = nd.ones((12, 4)), nd.arange(12) % 2

    class Data:
        def __iter__(self):
            for number in range(batches):
                time.sleep(sleep_s)
                if number == missing:
                    raise LookupError("no such batch")
                yield X, y

        def __len__(self):
            return batches

    mgpu.fit(net, LOSS, trainer, Data(), epochs=epochs, callbacks=[], trace=trace, compiled=compiled)
    return [param.data(ctx[0]).asnumpy() for param in net.collect_params().values()]


def read(path):
    """The events of a trace by lane: `(group, lane)`."""
    events = json.loads(path.read_text())["traceEvents"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {event["tid"]: (groups[event["pid"]], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    return {lane: [e for e in events if e["ph"] == "X" and e["tid"] == tid] for tid, lane in lanes.items()}


@pytest.mark.parametrize("compiled", ["auto", "off"])
def test_a_trace_has_a_lane_for_the_host_and_two_for_each_device(compiled, tmp_path):
    trace = mgpu.loop.Trace(tmp_path / "new" / "trace.json", warm_up=7, steps=4)
    train(trace, [mx.cpu(0), mx.cpu(1)], compiled=compiled)
    lanes = read(trace.path)
    assert list(lanes)[0] == ("host", "training thread")
    assert {(group, device) for group in ("devices", "sums and updates") for device in ("cpu(0)", "cpu(1)")} <= set(lanes)
    host = lanes["host", "training thread"]
    assert [event["name"] for event in host[:4]] == ["step 8", "step 9", "step 10", "step 11"]
    for phase in ("data", "split", "dispatch: forward", "dispatch: backward", "dispatch: update", "dispatch", "wait"):
        assert sum(event["name"] == phase for event in host) >= 4, phase
    length = sum(event["dur"] for event in host[:4])
    assert sum(event["dur"] for event in host[4:]) == pytest.approx(length, abs=0.05)  # each is rounded to 0.001
    for device in ("cpu(0)", "cpu(1)"):
        assert "multi_sgd_update" in [event["name"] for event in lanes["sums and updates", device]]
        assert any("FullyConnected" in event["name"] or "Bulk" in event["name"] for event in lanes["devices", device])
        assert sum(trace.summary.shares[device].values()) == pytest.approx(1.0)
    for (group, lane), events in lanes.items():
        ordered = sorted(events, key=lambda event: event["ts"])[1:] if group == "host" else events
        if group != "host":
            assert all(one["ts"] + one["dur"] <= other["ts"] + 0.01 for one, other in zip(ordered, ordered[1:])), lane
    assert trace.summary.steps == 4
    assert f"4 steps of {1000 * trace.summary.seconds:.1f} ms in {trace.path}" in str(trace.summary)
    assert trace.summary.seconds * 4e6 == pytest.approx(length)


def test_slow_data_is_seen_on_the_devices(tmp_path):
    trace = mgpu.loop.Trace(tmp_path / "trace.json", warm_up=6, steps=3)
    train(trace, [mx.cpu(0)], batches=12, sleep_s=0.1)
    seconds = 3 * trace.summary.seconds
    assert trace.summary.shares["host"]["data"] * seconds >= 0.3
    assert trace.summary.shares["cpu(0)"]["idle: host in data"] > 0


def test_training_does_not_change(tmp_path):
    ctx = [mx.cpu(0), mx.cpu(1)]
    for one, other in zip(train(None, ctx), train(str(tmp_path / "trace.json"), ctx)):
        np.testing.assert_array_equal(one, other)


def test_a_run_within_the_warm_up_writes_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "gluon_mgpu"):
        train(tmp_path / "trace.json", [mx.cpu(0)], batches=6)
    assert "got a run of 6 steps; expected more than the 10" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_leaves_the_profiler_stopped(tmp_path):
    trace = mgpu.loop.Trace(tmp_path / "trace.json", warm_up=3, steps=100)
    with pytest.raises(LookupError):
        train(trace, [mx.cpu(0)], missing=12)
    assert trace.summary.steps == 9
    again = mgpu.loop.Trace(tmp_path / "again.json", warm_up=3, steps=2)
    train(again, [mx.cpu(0)])
    assert again.summary.steps == 2 and again.path.exists()


def test_wrong_arguments(tmp_path):
    with pytest.raises(TrainerError, match="ends in .json"):
        mgpu.loop.Trace("trace.png")
    with pytest.raises(TrainerError, match="warm_up"):
        mgpu.loop.Trace("trace.json", warm_up=0)
    with pytest.raises(TrainerError, match="trace|path"):
        train(3, [mx.cpu(0)])
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="file"):
        train(tmp_path / "file" / "trace.json", [mx.cpu(0)])
    if sys.platform == "linux":
        with pytest.raises(SaveError, match="/proc"):  # before the first batch, not after the traced steps
            train("/proc/trace.json", [mx.cpu(0)], missing=0)


def test_contexts_that_the_profiler_cannot_record_are_refused(tmp_path):
    """MXNet would end the process."""
    beyond = mx.cpu(len(recordable_devices()))
    with pytest.raises(TrainerError, match="fewer devices"):
        train(tmp_path / "trace.json", [mx.cpu(0), beyond])


def test_markers_on_contexts_that_the_profiler_cannot_record():
    """A watchdog looks at the workers of all contexts, also while a trace is recorded. MXNet would end the process."""
    recording = Recording()
    reached = []
    push(lambda: reached.append(True), device=EngineContext(CPU, len(recordable_devices()) + 1), where=ON_WORKER)
    (nd.ones((2, 2), ctx=mx.cpu(1)) * 2).wait_to_read()
    operations = recording.stop()
    assert reached
    assert {operation.device for operation in operations} <= {"cpu(0)", "cpu(1)"}
    assert {"_mul_scalar", "_npi_multiply_scalar"} & {operation.name for operation in operations}


def test_the_figure_shows_every_lane(tmp_path):
    trace = mgpu.loop.Trace(tmp_path / "trace.json", warm_up=2, steps=4)
    train(trace, [mx.cpu(0), mx.cpu(1)], batches=8, sleep_s=0.1)  # the devices sum while the host waits
    axes = plot_trace(trace.path, steps=2).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "host" and {"cpu(0)", "cpu(1)", "cpu(0): sums, updates", "cpu(1): sums, updates"} <= set(labels)
    second = [e for e in read(trace.path)["host", "training thread"] if e["name"] == "step 4"][0]
    assert axes.get_xlim()[1] == pytest.approx((second["ts"] + second["dur"]) / 1e3, rel=1e-3)
    assert {"dispatch", "sums and updates"} <= {text.get_text() for text in axes.get_legend().get_texts()}


def train_pipeline(trace, ctx, *, micro_batches=2, batches=12, rows=6, **options):
    """Train a network of two layers as a pipeline."""
    layers = [nn.Dense(8, activation="relu", in_units=4), nn.Dense(2, in_units=8)]
    pipeline = initialized(mgpu.Pipeline(layers, ctx, micro_batches, **options))
    trainer = mgpu.Trainer(pipeline, "sgd", {"learning_rate": 0.1})
    data = [(np.ones((rows, 4), "float32"), np.zeros(rows, "float32"))] * batches
    mgpu.fit(pipeline, LOSS, trainer, data, epochs=1, callbacks=[], trace=trace)
    return trainer


@pytest.fixture(scope="module")
def pipeline_trace(tmp_path_factory):
    trace = mgpu.loop.Trace(tmp_path_factory.mktemp("trace") / "trace.json", warm_up=3, steps=4)
    train_pipeline(trace, [mx.cpu(0), mx.cpu(1)])
    return trace.path


@pytest.mark.mxnet1("Pipeline")
def test_a_trace_of_a_pipeline_has_its_tasks(pipeline_trace):
    lanes = read(pipeline_trace)
    assert {lane for group, lane in lanes if group == "tasks"} == {"cpu(0)", "cpu(1)"}
    for stage in (0, 1):
        names = [event["name"] for event in lanes["tasks", f"cpu({stage})"]]
        expected = ["F0.0", "F0.1", "B0.0", "B0.1"] if stage == 0 else ["F1.0", "B1.0", "F1.1", "B1.1"]
        assert len(names) >= 4 and names == expected * (len(names) // 4)
        assert not any(event["name"].startswith("task ") for event in lanes["devices", f"cpu({stage})"])


@pytest.mark.mxnet1("Pipeline")
def test_no_task_begins_while_the_device_computes_the_one_before(tmp_path):
    """The first task of a batch began with its data: while the host was ahead, in the middle of the batch before."""
    trace = mgpu.loop.Trace(tmp_path / "trace.json", warm_up=3, steps=4)
    train_pipeline(trace, [mx.cpu(0), mx.cpu(1)], rows=60_000)
    for device in ("cpu(0)", "cpu(1)"):
        tasks = read(trace.path)["tasks", device]
        assert len(tasks) >= 8 and all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in zip(tasks, tasks[1:]))


@pytest.mark.mxnet1("Pipeline")
def test_the_schedule_shows_a_box_for_each_task(pipeline_trace):
    axes = plot_schedule(pipeline_trace, step=1).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label.split("\n")[0] for label in labels] == ["cpu(0)", "cpu(1)"]
    assert all(0 <= int(label.split("\n")[1].replace("% idle", "")) <= 100 for label in labels)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward", "idle"]
    tasks = [event for device in ("cpu(0)", "cpu(1)") for event in read(pipeline_trace)["tasks", device]]
    begins = sorted(event["ts"] for event in tasks if event["name"] == "F0.0")
    ends = [event["ts"] + event["dur"] for event in tasks if begins[1] <= event["ts"] < [*begins, float("inf")][2]]
    assert axes.get_xlim()[1] == pytest.approx((max(ends) - begins[1]) / 1e3, rel=1e-6)
    # the background of each lane, and two forward and two backward tasks of each stage
    assert len([collection for collection in axes.collections if len(collection.get_paths())]) == 2 + 8


@pytest.mark.mxnet1("Pipeline")
def test_a_schedule_that_is_not_there(pipeline_trace, tmp_path):
    trace = mgpu.loop.Trace(tmp_path / "trace.json", warm_up=2, steps=2)
    train(trace, [mx.cpu(0)], batches=5)
    with pytest.raises(TrainerError, match="which has tasks of 0 batches; expected one of a Pipeline"):
        plot_schedule(trace.path)
    with pytest.raises(TrainerError, match="got step=99 of .*, which has tasks of . batches"):
        plot_schedule(pipeline_trace, step=99)
    with pytest.raises(TrainerError, match="step"):
        plot_schedule(pipeline_trace, step=-1)
