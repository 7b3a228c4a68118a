"""The command gluon-mgpu agree: what it prints and writes, and its exit status."""

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.main import main
from gluon_mgpu.data import ImageData, load_digits

from .test_agreement import step_by, stepping  # noqa: F401  a fixture

QUICK = ["--steps", "12", "--batch-size", "16"]


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    digits = load_digits()
    parts = (digits.train_images[:90], digits.train_labels[:90], digits.test_images[:60], digits.test_labels[:60])
    monkeypatch.setattr("gluon_mgpu.data.load_digits", lambda: ImageData("few digits", *parts))


def invoke(*arguments):
    return CliRunner().invoke(main, ["agree", *map(str, arguments)])


def test_it_agrees(tmp_path):
    result = invoke(*QUICK, "--devices", "cpu*3", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-2] == "the same batches: cpu(0), cpu(1), cpu(2) and cpu(0) agree"
    found = json.loads((tmp_path / "agree.json").read_text())
    assert found["verdict"] == "agree"
    assert len(found["losses"]["ours"]) == 12
    assert np.abs(np.subtract(found["losses"]["ours"], found["losses"]["reference"])).max() <= 1e-5


def test_a_trainer_with_a_bug_ends_it_with_1(tmp_path, step_by):  # noqa: F811
    step_by(stepping(lambda X: 16))  # the nominal batch size
    result = invoke(*QUICK, "--output", tmp_path)
    assert result.exit_code == 1
    assert result.output.splitlines()[-2] == "the same batches: cpu(0), cpu(1) and cpu(0) do not agree"


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--lr", "0"], "--lr"),
        (["--steps", "0"], "--steps"),
        (["--processes", "3"], "got --processes without --bits"),
        (["--virtual-shards", "4"], "got --virtual-shards without --bits"),
        (["--network", "networks.py:make"], "without --bits; expected mlp or resnet18"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, expected, tmp_path):
    result = invoke(*options, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_results_that_could_not_be_saved_are_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    result = invoke("--output", tmp_path / "new" / "out")
    assert result.exit_code == 2 and "expected a writable folder" in " ".join(result.output.split())
