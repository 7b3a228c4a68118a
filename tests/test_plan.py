"""gluon-mgpu plan: which layouts there are, what is predicted for them, and which one it prints."""

import csv
import inspect
import json

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.cli._pipeline import check_stages
from gluon_mgpu.cli._plan_target import PROGRAMS, File, Program
from gluon_mgpu.cli._training import split_options
from gluon_mgpu.cli.plan import Plan
from gluon_mgpu.runtime.profiler import memory_peaks
from gluon_mgpu.tuning import trial as trial_module
from gluon_mgpu.tuning.layouts import Costs, Curve, Layout, choose, layouts_of, predict, ranked
from gluon_mgpu.tuning.trial import Trial
from mxnet import gluon, init
from mxnet.gluon import nn

from .test_cli import data_dir  # noqa: F401  a fixture
from .test_train_seq2seq import SMALL, WORDS, tsv  # noqa: F401  a fixture


def pipeline_costs(**more):
    """Two stages whose forward passes take 1 s for 8 examples and whose backward passes take 2 s."""
    tasks = [{"F": Curve({8: 1.0, 16: 2.0}), "B": Curve({8: 2.0, 16: 4.0})} for _ in range(2)]
    return Costs(tasks=tasks, rest=Curve({16: 1.0}), sources=[[], [0]], devices=[0, 1], **more)


@pytest.mark.parametrize(
    "layout, costs, seconds",
    [
        (Layout("model", 16, stages=2, micro_batches=2), pipeline_costs(), 1 + (2 + 1) * (1 + 2)),
        (Layout("model", 16, stages=2, micro_batches=1), pipeline_costs(), 1 + 2 * (2 + 4)),
        (Layout("model", 16, stages=2, micro_batches=4), pipeline_costs(), 1 + (4 + 1) * (0.5 + 1)),
        (Layout("model", 16, stages=2, micro_batches=2), pipeline_costs(slowdown=1.5), 1 + 1.5 * 9),
        # F0 F0 .. .. B0 B0 B0 B0 B0 B0      stage 0 computes its forward pass again
        # .. F1 B1 B1 F1 B1 B1
        (Layout("model", 16, stages=2, micro_batches=2, recompute=True), pipeline_costs(), 1 + 10),
        (Layout("data", 16, micro_batches=2), Costs(batches={2: Curve({16: 3.0})}), 3),
    ],
)
def test_the_prediction_is_the_simulated_schedule(layout, costs, seconds):
    predicted = predict(layout, costs, num_examples=16, num_devices=2)
    assert predicted.seconds == pytest.approx(seconds) and predicted.examples_per_s == pytest.approx(16 / seconds)
    assert predicted.bytes_per_device is None


def test_replicas_divide_the_batch():
    one = predict(Layout("model", 16, stages=2, micro_batches=2), pipeline_costs(), 16, 2)
    two = predict(Layout("model", 32, stages=2, micro_batches=2), pipeline_costs(), 32, 4)
    assert two.seconds - Curve({16: 1.0}).at(32) == one.seconds - 1


@pytest.mark.parametrize(
    "schedule, recompute, num_bytes",
    [("1f1b", False, 100 + 2 * 4 * 10), ("gpipe", False, 100 + 4 * 4 * 10), ("gpipe", True, 200)],
)
def test_bytes_follow_the_micro_batches_that_are_held(schedule, recompute, num_bytes):
    costs = pipeline_costs(fixed_bytes=[100, 120], held_bytes={False: [10.0, 5.0], True: [3.0, 5.0]})
    layout = Layout("model", 16, stages=2, micro_batches=4, schedule=schedule, recompute=recompute)
    assert predict(layout, costs, 16, 2).bytes_per_device == num_bytes


def test_a_layout_with_more_micro_batches_than_examples_or_without_measurements_is_not_predicted():
    assert predict(Layout("model", 16, stages=2, micro_batches=8), pipeline_costs(), 7, 2) is None
    assert predict(Layout("model", 16, stages=2, micro_batches=8), Costs(), 16, 2) is None
    assert predict(Layout("data", 16, micro_batches=4), Costs(batches={1: Curve({16: 3.0})}), 16, 2) is None


def test_the_limit_excludes_the_fastest_layout():
    costs = pipeline_costs(fixed_bytes=[100, 100], held_bytes={False: [10.0, 10.0], True: [1.0, 10.0]})
    layouts = [one for one in layouts_of(2, [16]) if one.kind == "model"]
    predicted = [predict(layout, costs, 16, 2) for layout in layouts]
    fastest, small = ranked(predicted)[0], ranked(predicted, memory_limit=130)
    assert fastest.bytes_per_device > 130
    assert small and all(one.bytes_per_device <= 130 for one in small)
    assert [one.examples_per_s for one in small] == sorted((one.examples_per_s for one in small), reverse=True)


def test_the_layouts_of_four_devices():
    found = layouts_of(4, [64, 128], ["fp32", "bf16"], ["data", "model", "hybrid"])
    assert len(set(found)) == len(found) and found[0] == Layout("data", 64)
    assert {(one.kind, one.stages) for one in found} == {
        ("data", 1),
        *((kind, p) for kind in ("model", "hybrid") for p in (2, 4)),
    }
    assert {one.micro_batches for one in found if one.stages == 4} == {1, 2, 4, 8, 16}
    assert {one.kind for one in layouts_of(1, [64])} == {"data"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_layout_is_a_command_of_the_training_program(name):
    target = Program(name, [])
    layouts = layouts_of(4, [target.batch_size, 640], ["fp32", "bf16"], target.kinds)
    assert target.command(layouts[0], "cpu:4") == f"gluon-mgpu train {name} --devices cpu:4"
    for layout in layouts:
        words = target.command(layout, "cpu:4").split()
        options, own = split_options({"choice": {}, **target._context(words[3:]).params})
        check_stages(options, 4)
        assert (options.stages or 1, options.recompute, options.precision) == (layout.stages, layout.recompute, layout.precision)
        assert (options.parallel or ("model" if options.stages else "data")) == layout.kind
        assert (options.micro_batches or options.micro_steps, options.pipeline_schedule or "1f1b") == (
            layout.micro_batches,
            layout.schedule,
        )
        assert own["batch_size" if name == "resnet18" else "batch_tokens"] == layout.batch_size


def test_of_text_the_batch_is_named(tmp_path):
    """The program's default depends on the text, so the command of what was measured has the number."""
    text = tmp_path / "pairs.tsv"
    text.write_text("one\t일\n", encoding="utf-8")
    target = Program("seq2seq", ["--tsv", str(text)])
    layout = layouts_of(1, [target.batch_size], ["fp32"], ["data"])[0]
    assert f"--batch-tokens {layout.batch_size} --tsv" in target.command(layout, "cpu:1")


class Made:
    """A target whose layouts have these rates; the trial of a kind that is missing fails."""

    def __init__(self, rates, during=lambda layout: None):
        self.rates, self.during, self.visited = rates, during, []

    def visit(self, layout, contexts, work):
        self.visited.append(layout)
        if layout.kind not in self.rates:
            raise mgpu.errors.TrainerError("split_stages: got a Block")
        work(self)

    def rate(self, layout):
        self.during(layout)
        return self.rates[layout.kind]

    num_examples = 16

    def measure_batches(self, costs, numbers, has_time):
        costs.batches = {number: Curve({16: 16 / self.rates["data"] + number}) for number in numbers}

    def measure_tasks(self, costs, numbers, has_time):
        vars(costs).update(vars(pipeline_costs()))


def plan_of(target, layouts=None):
    return Plan(target, [mx.cpu(0), mx.cpu(1)], layouts or layouts_of(2, [16]))


@pytest.mark.parametrize("model, kind", [(9.0, "data"), (10.0, "data"), (12.0, "model")])
def test_the_choice_is_never_slower_than_the_default(model, kind):
    plan = plan_of(Made({"data": 10.0, "model": model}))
    plan.measure(60.0, str)
    plan.target.visited.clear()
    plan.run([plan.default, plan.layouts[3]], 3, str)
    assert choose(plan.rates, plan.default)[0].kind == kind
    assert [one.kind for one in plan.target.visited] == ["data", "model", "model", "data", "data", "model"]  # in turns


def test_without_time_the_default_alone_is_predicted():
    plan = plan_of(Made({"data": 10.0, "model": 20.0}))
    plan.measure(0.0, str)
    assert {one.layout.kind for one in plan.predictions} == {"data"} == {one.kind for one in plan.target.visited}
    assert {plan.left_out[layout] for layout in plan.layouts[3:]} == {"not measured within --seconds"}


def test_a_network_that_cannot_be_divided_is_left_out_with_its_reason():
    plan = plan_of(Made({"data": 10.0}))
    plan.measure(60.0, str)
    assert {plan.left_out[layout] for layout in plan.layouts[3:]} == {"split_stages: got a Block"}


def test_without_the_default_the_others_are_compared():
    """The network may not fit on one device, or its bytes not into the limit."""
    plan = plan_of(Made({"model": 10.0}))
    plan.measure(60.0, str)
    assert {one.layout.kind for one in plan.predictions} == {"model"}
    assert plan.reference == plan.predictions[0].layout


def test_a_layout_that_fails_while_it_runs_is_left_out():
    plan = plan_of(Made({"data": 10.0, "model": 12.0}))
    plan.measure(60.0, str)
    del plan.target.rates["data"]
    plan.run([plan.default, plan.layouts[3]], 2, str)
    assert plan.rates == {plan.layouts[3]: [12.0, 12.0]} and plan.reference.kind == "model"
    del plan.target.rates["model"]
    with pytest.raises(mgpu.errors.TrainerError, match="plan: got no layout that can run: "):
        plan.run([plan.layouts[3]], 2, str)


def test_without_any_layout_it_reports_why():
    with pytest.raises(mgpu.errors.TrainerError, match="plan: got no layout that can run: data .*: split_stages: got a"):
        plan_of(Made({})).measure(60.0, str)


def test_ctrl_c_keeps_the_complete_rounds():
    layouts, left = layouts_of(2, [16]), [3]

    def during(layout):
        left[0] -= layout.kind == "model"
        if not left[0]:
            raise KeyboardInterrupt

    plan = plan_of(Made({"data": 10.0, "model": 12.0}, during), layouts)
    plan.measure(60.0, str)
    with pytest.raises(KeyboardInterrupt):
        plan.run([layouts[0], layouts[3]], 5, str)
    assert plan.rates == {layouts[0]: [10.0, 10.0], layouts[3]: [12.0, 12.0]}


# Real networks


def make_net(batch_size, ctx):
    net = nn.HybridSequential()
    net.add(nn.Dense(32, activation="relu"), nn.Dense(32, activation="relu"), nn.Dense(4))
    net.initialize(init.Xavier(), ctx=list(ctx))
    net.hybridize()
    X, y = np.ones((batch_size, 8), "float32"), np.zeros(batch_size, "int32")
    return net, gluon.loss.SoftmaxCrossEntropyLoss(), mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), X, y


def test_each_task_of_a_pipeline_is_measured():
    ctx = mgpu.resolve_devices("cpu:2")
    net, loss, _, X, y = make_net(16, ctx[:1])
    model = mgpu.Pipeline(mgpu.split_stages(net, 2, X[:8], balance="bytes"), ctx, micro_batches=2)
    trial, costs = Trial(model, loss, mgpu.Trainer(model, "sgd"), [(X, y)]), Costs()
    trial.measure_tasks(costs, [2, 1, 4, 32], lambda: True)
    for task in costs.tasks:
        assert sorted(task["F"].points) == sorted(task["B"].points) == [4, 8, 16]
        assert all(seconds > 0 for curve in task.values() for seconds in curve.points.values())
    assert (costs.sources, costs.devices, costs.num_parts) == ([[], [0]], [0, 1], 1)
    assert costs.slowdown >= 0.5 and list(costs.rest.points) == [16]
    assert costs.fixed_bytes == [sum(parts.values()) for parts in trial.trainer.bytes_per_device().values()]
    before = {part: costs.tasks[0]["F"].at(part) for part in (4, 8, 16)}
    trial.measure_tasks(costs, [2, 8], lambda: False)  # again, and out of time: the shortest counts
    assert sorted(costs.tasks[0]["F"].points) == [4, 8, 16]
    assert all(costs.tasks[0]["F"].at(part) <= seconds for part, seconds in before.items())


def test_the_profiler_counts_what_each_schedule_holds():
    """Stage 0 holds the activations of 2 micro-batches with 1F1B, of all 8 with GPipe, and recomputes those of 1."""
    ctx = mgpu.resolve_devices("cpu:2")
    net, loss, _, X, y = make_net(8192, ctx[:1])
    model = mgpu.Pipeline(mgpu.split_stages(net, 2, X[:8], balance="bytes"), ctx)
    trial, found = Trial(model, loss, mgpu.Trainer(model, "sgd"), [(X, y)]), []
    for layout in (Layout("model", 0, stages=2, micro_batches=8, schedule=schedule) for schedule in ("1f1b", "gpipe")):
        step = trial.step_of(layout)
        step(X, y)
        found.append(memory_peaks(lambda step=step: step(X, y), ctx)["cpu(0)"])
    assert 1.25 < found[1] / found[0] < 5  # 8/3 on a quiet machine; 1 if both held the same


def test_the_typical_batch_is_measured():
    batches = [(np.ones((count, 8), "float32"), np.zeros(count)) for count in (4, 16, 16, 16, 30)]
    net, loss, trainer, _, _ = make_net(4, mgpu.resolve_devices("cpu:2"))
    assert Trial(net, loss, trainer, batches).num_examples == 16


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(trial_module, "_ROUND_S", 0.0)
    monkeypatch.chdir(tmp_path)


def invoke(*arguments, exit_code=0):
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


def test_the_command_of_a_training_program(quick, monkeypatch, data_dir, tmp_path):  # noqa: F811
    def network(num_classes):
        net = nn.HybridSequential()
        net.add(nn.Flatten(), nn.Dense(8, activation="relu"), nn.Dense(6), nn.Dense(num_classes))
        return net

    monkeypatch.setattr("gluon_mgpu.cli.train.resnet18", network)
    options = ["--devices", "cpu:2", "--batch-size", "8", "--rounds", "2", "--top", "2", "--output", "plan.json"]
    output = invoke("resnet18", *options, "--", "--data-dir", data_dir).splitlines()
    assert output[0] == "layouts on cpu(0), cpu(1), batch 8, fp32: examples/s"
    assert "saved plan.json" in output and output[-2].startswith(("fastest: ", "the default: "))
    assert output[-1].startswith("gluon-mgpu train resnet18 --devices cpu:2 --batch-size 8 ")
    assert output[-1].endswith(f"--data-dir {data_dir}")
    rows = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert len(rows) == len(layouts_of(2, [8]))
    run = [row for row in rows if row["rounds"]]
    assert len(run) in (2, 3) and all(len(row["rounds"]) == 2 for row in run)
    assert {row["left_out"] for row in rows} <= {"", "fewer examples than micro-batches"}
    assert all(
        row["predicted_examples_per_s"] > 0 and row["predicted_bytes_per_device"] > 500 for row in rows if not row["left_out"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "plan.json"]  # the program has not trained


def test_ctrl_c_prints_the_choice_so_far(quick, file, monkeypatch):
    run, calls = Trial.rate, []

    def rate(trial, layout):
        calls.append(layout)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(trial, layout)

    monkeypatch.setattr(Trial, "rate", rate)
    output = invoke(file, "--devices", "cpu:1", "--top", "2", "--rounds", "3", exit_code=130).splitlines()
    assert calls[0] == calls[2] == Layout("data", 64) and output[-1] == "Interrupted."
    assert any(line.startswith(("fastest: ", "the default: ")) for line in output)


@pytest.fixture
def file(tmp_path):
    text = "import gluon_mgpu as mgpu\nimport numpy as np\nfrom mxnet import gluon, init\nfrom mxnet.gluon import nn\n"
    (tmp_path / "train.py").write_text(text + inspect.getsource(make_net))
    return f"{tmp_path / 'train.py'}:make_net"


def test_the_lines_for_a_file_make_the_layout(file):
    layout = Layout("model", 64, "fp32", 2, 4, "gpipe", recompute=True)
    lines = File(file).command(layout, "cpu:4")
    names = {"mgpu": mgpu}
    names["net"], *_, names["X"], _ = make_net(64, [mx.cpu(0)])
    exec(lines, names)
    made = names["net"]
    assert (made.micro_batches, made.schedule, made.recompute) == (4, "gpipe", True)
    assert made.devices == [[mx.cpu(0), mx.cpu(1)], [mx.cpu(2), mx.cpu(3)]]


@pytest.mark.exhaustive
def test_a_file_and_every_layout(quick, file, tmp_path):
    output = invoke(file, "--devices", "cpu:2", "--rounds", "2", "--exhaustive", "--memory-limit", "1G", "--output", "plan.csv")
    rows = list(csv.DictReader((tmp_path / "plan.csv").read_text().splitlines()))
    assert len(rows) == len(layouts_of(2, [64])) and all(len(row["rounds"].split()) == 2 for row in rows)
    assert f"as fast as the fastest of all {len(rows)} layouts: " in output
    output = invoke(file, "--devices", "cpu:2", "--rounds", "1", "--memory-limit", "1k", exit_code=1)
    assert "got no layout that can run: data parallel, batch 64, fp32: needs 0 MiB per device" in output
    smallest = sorted(int(row["predicted_bytes_per_device"]) for row in rows)
    limit = str(next(size for size in smallest if size > smallest[0]))  # excludes the default
    output = invoke(file, "--devices", "cpu:2", "--rounds", "1", "--memory-limit", limit)
    assert "left out: all of data parallel" in output and "mgpu.Pipeline(" in output


@pytest.mark.exhaustive
def test_the_translator_has_hybrids(quick, tsv, tmp_path):  # noqa: F811
    options = ["--devices", "cpu:2", "--batch-size", "120", "--rounds", "1", "--exhaustive", "--output", "plan.json"]
    small = [*SMALL[:-2], *WORDS]
    invoke("seq2seq", *options, "--", "--tsv", tsv, *small)
    rows = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert {row["kind"] for row in rows if row["rounds"]} == {"data", "model", "hybrid"}
    output = invoke("seq2seq", *options, "--", "--tsv", tsv, *small, "--input-feeding")
    assert "left out: all of hybrid of 2 stages: " in output and "got --parallel hybrid with --input-feeding" in output


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["resnet34"], "got 'resnet34'; expected resnet18, seq2seq or FILE.py:FUNCTION."),
        (["resnet18", "--", "--stages", "2"], "got --stages after --; expected only options that plan does not set."),
        (["resnet18", "--", "--batch-size", "2"], "got --batch-size after --"),
        (["nothing.py:make"], "plan: got "),
        (["nothing.py:make", "--", "--lr", "1"], "got --lr 1 after --; expected it with resnet18 or seq2seq only."),
        (["resnet18", "--output", "plan.txt"], "got plan.txt; expected a name that ends in .json or .csv."),
        (["resnet18", "--batch-size", "0"], "got '0'; expected whole numbers of 1 or more"),
        (["resnet18", "--memory-limit", "much"], "got 'much'; expected a size such as 4GiB"),
        (["resnet18", "--memory-limit", "9" * 400], "expected a size such as 4GiB"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_measured(quick, arguments, told):
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exit_code in (1, 2) and told in result.output.replace("\n", " ")
