"""The command gluon-mgpu agree: what it prints and writes, and its exit status."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import agree as module
from gluon_mgpu.data import ImageData, load_digits
from gluon_mgpu.data_parallel.step import train_batch
from gluon_mgpu.plots import figure

QUICK = ["--epochs", "2", "--seeds", "2", "--batch-size", "16", "--margin", "0.5"]


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    digits = load_digits()
    parts = (digits.train_images[:90], digits.train_labels[:90], digits.test_images[:60], digits.test_labels[:60])
    monkeypatch.setattr(module, "load_digits", lambda: ImageData("few digits", *parts))


def invoke(*arguments):
    return CliRunner().invoke(module.agree, [str(argument) for argument in arguments])


def test_it_agrees(tmp_path):
    result = invoke(*QUICK, "--devices", "cpu:3", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    runs = [line for line in result.output.splitlines() if line.startswith("run ")]
    assert [line.split(":")[0] for line in runs] == [f"run {i} of 7" for i in range(1, 8)]  # it was silent for a minute
    assert result.output.splitlines()[-2:] == [
        "the same batches: cpu(0), cpu(1), cpu(2) and cpu(0) agree",
        "3 times the batch: mean accuracies agree, within 50 percentage points",
    ]
    found = json.loads((tmp_path / "agree.json").read_text())
    same, larger = found["same_batch"], found["larger_batch"]
    assert same["verdict"] == larger["verdict"] == "agree"
    assert len(same["runs"]["ours"]["losses"]) == same["num_comparable"] == 12
    assert np.abs(np.subtract(same["runs"]["ours"]["losses"], same["runs"]["reference"]["losses"])).max() <= 1e-5
    assert [len(run["losses"]) for run in larger["runs"]["ours"]] == [4, 4]
    assert (tmp_path / "agree.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options, exit_code, told",
    [
        (["--devices", "cpu:4", "--stages", "2", "--micro-batches", "3"], 0, "cpu(0), cpu(1), cpu(2), cpu(3) and cpu(0) agree"),
        (["--devices", "cpu:3", "--stages", "2"], 2, "got --stages 2 for 3 devices; expected a multiple"),
        (["--micro-batches", "3"], 2, "got --micro-batches without --stages; expected both"),
    ],
)
def test_pipelines_agree(tmp_path, options, exit_code, told):
    result = invoke(*QUICK, *options, "--output", tmp_path)
    assert result.exit_code == exit_code, result.output
    assert told in result.output
    if not exit_code:
        assert json.loads((tmp_path / "agree.json").read_text())["same_batch"]["num_comparable"] == 12


@pytest.fixture
def without_curves(monkeypatch):
    monkeypatch.setattr(module, "plot_agreement", lambda *found: figure(1, 1))


def test_a_trainer_with_a_bug_ends_it_with_1(tmp_path, monkeypatch, without_curves):
    def step(net, loss, trainer, X, y):
        trainer.step, right = (lambda num_examples, *rest: right(16, *rest)), trainer.step  # the nominal batch size
        try:
            return train_batch(net, loss, trainer, X, y)
        finally:
            trainer.step = right

    monkeypatch.setattr(module, "same_batch", lambda recipe, ctx, tell: _same_batch(recipe, ctx, step=step, tell=tell))
    result = invoke(*QUICK, "--output", tmp_path, "--no-larger")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "the same batches: cpu(0), cpu(1) and cpu(0) do not agree"
    assert "larger_batch" not in json.loads((tmp_path / "agree.json").read_text())


_same_batch = module.same_batch


def test_accuracies_that_cannot_be_told_end_it_with_1(tmp_path, without_curves):
    result = invoke(*QUICK[:-1], "1e-9", "--output", tmp_path)
    assert result.exit_code == 1
    assert "accuracies" in result.output.splitlines()[-1] and "accuracies agree" not in result.output.splitlines()[-1]


@pytest.mark.parametrize(
    "wrong", [("--seeds", 1), ("--margin", 0), ("--lr", 0), ("--scaling", "cubic"), ("--epochs", 0)], ids=str
)
def test_wrong_options_are_refused(wrong, tmp_path):
    result = invoke(*wrong, "--output", tmp_path)
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_one_device_is_compared_with_gluon(tmp_path, without_curves):
    result = invoke(*QUICK, "--devices", "cpu", "--output", tmp_path, "--no-larger")
    assert result.exit_code == 0, result.output
