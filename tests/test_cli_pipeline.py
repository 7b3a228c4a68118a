"""Training programs with --stages: networks divided over devices, stopped and resumed on others."""

import json
from functools import partial
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.cli._training import divided
from mxnet import gluon
from mxnet.gluon import nn

from .test_cli import PNG, data_dir, run, use_network  # noqa: F401  a fixture
from .test_cli_resume import pressed, rows_in  # noqa: F401  a fixture
from .test_train_seq2seq import SMALL, WORDS, exact_match_alone, tsv  # noqa: F401  fixtures

pytestmark = pytest.mark.mxnet1("Pipeline")

STAGES = ["--devices", "cpu*2", "--stages", "2"]


def network(num_classes):
    net = nn.HybridSequential()
    net.add(nn.Flatten(), nn.Dense(8, activation="relu"), nn.Dense(6, activation="relu"), nn.Dense(num_classes))
    return net


@pytest.fixture
def images(use_network, data_dir, without_pictures):  # noqa: F811
    """The command that trains a small network in the place of ResNet-18, on 4 batches of 8 images."""
    use_network(network)
    return ["train", "resnet18", "--data-dir", data_dir, "--batch-size", "8", "--lr", "0.05"]


def test_stages_draw_nothing_of_the_order_of_the_data():
    """A DataLoader shuffles by NumPy's generator: the sample for the stages must not move it."""
    options = SimpleNamespace(stages=2, parallel=None, micro_batches=None, precision="fp32")
    net = network(3)
    net.initialize(ctx=mx.cpu(0))
    rng = np.random.RandomState(0)
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(rng.rand(32, 4).astype("float32"), np.zeros(32)), 8, shuffle=True)
    before = np.random.get_state()[1].tolist(), np.random.get_state()[2]
    divided(net, [mx.cpu(0), mx.cpu(1)], options, loader)
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before


@pytest.fixture
def sentences(tsv):  # noqa: F811
    return ["train", "seq2seq", "--data", tsv, *SMALL, *WORDS]


def same_rows(left, right):
    assert [row.keys() for row in left] == [row.keys() for row in right]
    for one, other in zip(left, right):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "options, told",
    [
        (["--devices", "cpu*2", "--stages", "2"], "pipeline of 2 stages, 8 micro-batches, 1f1b: cpu(0) "),
        (["--devices", "cpu*3", "--stages", "3", "--micro-batches", "2"], "pipeline of 3 stages, 2 micro-batches, 1f1b: cpu(0) "),
        (["--devices", "cpu*2", "--stages", "4", "--micro-batches", "4"], "pipeline of 4 stages, 4 micro-batches, 1f1b: cpu(0) "),
    ],
)
def test_stages_train_like_one_device(images, tmp_path, options, told):
    command = partial(run, *images, "--epochs", "2")
    command("--devices", "cpu*1", "--output", tmp_path / "one")
    output = command(*options, "--output", tmp_path / "stages")
    (line,) = (line for line in output.splitlines() if line.startswith("pipeline of "))
    assert line.startswith(told) and line.count("% of the time") == int(options[3])
    shares = [int(part.split()[-1].rstrip("%")) for part in line.split(" of the time")[:-1]]
    assert abs(sum(shares) - 100) <= len(shares)
    same_rows(rows_in(tmp_path / "stages"), rows_in(tmp_path / "one"))


@pytest.mark.parametrize(
    "options, told",
    [
        (
            ["--devices", "cpu*4", "--parallel", "hybrid", "--stages", "2", "--micro-batches", "2"],
            "pipeline of 3 stages, of which all devices share the last, 2 micro-batches, 1f1b: cpu(0) and cpu(2) ",
        ),
        pytest.param(
            ["--devices", "cpu*1", "--parallel", "hybrid"],
            "pipeline of 2 stages, 4 micro-batches, 1f1b: cpu(0) ",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_parallel_ways_train_like_one_device_and_resume_on_it(sentences, pressed, tmp_path, options, told):  # noqa: F811
    command = partial(run, *sentences, "--epochs", "2", "--checkpoint-every", "1", "--resume", "auto")
    command("--devices", "cpu*1", "--output", tmp_path / "one")
    pressed.append((1, 2))
    output = command(*options, "--output", tmp_path / "parts", exit_code=130)
    (line,) = (line for line in output.splitlines() if line.startswith("pipeline of "))
    assert line.startswith(told)
    assert line.endswith(" of the time") and line.count("% of the time") == int(told.split()[2])
    if "hybrid" in options:
        assert f"; {' and '.join(f'cpu({i})' for i in range(int(options[1][-1])))} 4 parameters of " in line
    command("--devices", "cpu*1", "--output", tmp_path / "parts")
    same_rows(rows_in(tmp_path / "parts"), rows_in(tmp_path / "one"))


@pytest.mark.parametrize("name", [pytest.param("images", marks=pytest.mark.exhaustive), "sentences"])
def test_a_run_resumes_with_other_stages_and_on_one_device(name, request, pressed, tmp_path):  # noqa: F811
    command = partial(run, *request.getfixturevalue(name), "--epochs", "3", "--checkpoint-every", "1", "--resume", "auto")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command("--devices", "cpu*1", "--output", whole)
    pressed += [(1, 2), (2, 2)]
    for devices, options in (("cpu*2", ["--stages", "2"]), ("cpu*3", ["--stages", "3"]), ("cpu*1", [])):
        is_last = not pressed
        output = command("--devices", devices, *options, "--output", parts, exit_code=0 if is_last else 130)
        assert ("Interrupted. fit: stopped in epoch" in output) == (not is_last)
    same_rows(rows_in(parts), rows_in(whole))


def test_a_copy_on_one_device_translates_like_the_original():
    vocabularies = [mgpu.data.build_vocabulary([side], "words") for side in ("하나 둘 셋", "one two three")]
    translator = mgpu.models.Translator(*vocabularies, embed_size=4, hidden_size=8, cell="lstm")
    translator.net.initialize(mx.init.Uniform(0.5), ctx=mx.cpu(0))
    texts, search = ["하나 둘", "셋"], {"beam_size": 2, "num_best": 2}
    expected = [[found.text for found in best] for best in translator.translate(texts, **search)]
    batch = tuple(mx.nd.ones(shape, dtype="int32") for shape in ((2, 3), (2,), (2, 4)))
    mgpu.Pipeline(mgpu.split_stages(translator.net, 2, batch, balance="bytes"), [mx.cpu(0), mx.cpu(1)])
    mx.random.seed(5)
    drawn = mx.nd.random.uniform(shape=(3,)).asnumpy().tolist()
    mx.random.seed(5)
    on_one = translator.on_device(mx.cpu(1))
    assert mx.nd.random.uniform(shape=(3,)).asnumpy().tolist() == drawn  # training draws the same numbers
    assert {str(param.list_ctx()) for param in on_one.net.collect_params().values()} == {"[cpu(1)]"}
    assert [[found.text for found in best] for best in on_one.translate(texts, **search)] == expected


def test_the_schedule_is_drawn_with_the_trace(images, tmp_path, monkeypatch):
    monkeypatch.setattr("gluon_mgpu.cli._training.split_stages", partial(mgpu.split_stages, balance="bytes"))  # times vary
    command = [*images, "--epochs", "4", *STAGES, "--micro-batches", "2", "--trace", tmp_path / "run.json"]
    output = run(*command, "--output", tmp_path / "out")
    assert f"drawn in {tmp_path}/run.png, and the schedule in {tmp_path}/run-schedule.png;" in output
    for name in ("run.png", "run-schedule.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "tasks"} == {
        f"{kind}{stage}.{number}" for kind in "FB" for stage in (0, 1) for number in (0, 1)
    }


@pytest.mark.parametrize(
    "options, told, exit_code",
    [
        (["--devices", "cpu*3", "--stages", "2"], "got 2 stages for --devices of 3; expected a multiple of 2 devices", 2),
        (["--micro-batches", "4"], "got --micro-batches without --stages; expected both", 2),
        (["--trace", "run.json"], "got --trace with 4 steps; expected more than 11", 2),
        ([*STAGES, "--bn", "sync"], "as a stage sees one micro-batch at a time", 1),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_written(images, tmp_path, options, told, exit_code):
    output = run(*images, "--epochs", "1", "--output", tmp_path / "out", *options, exit_code=exit_code)
    assert told in output
    assert "Traceback" not in output and not (tmp_path / "out").exists()
