"""Training programs that are stopped, and go on with --resume."""

import json
import shutil
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from mxnet.gluon import nn

from .test_cli import data_dir, pressed, run, use_network  # noqa: F401  fixtures
from .test_fit import LOSS, batches_of, make_net, three_clouds
from .test_train_seq2seq import SMALL, WORDS, exact_match_alone, tsv  # noqa: F401  fixtures

TIMES = ("seconds", "examples_per_s", "tokens_per_s")


def network(num_classes):
    net = nn.HybridSequential()
    net.add(nn.Flatten(), nn.Dense(8, activation="relu"), nn.Dropout(0.2), nn.Dense(num_classes))
    return net


@pytest.fixture
def small(use_network):  # noqa: F811
    use_network(network)


def rows_in(out):
    rows = json.loads((out / "history.json").read_text())["epochs"]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def programs(request):
    images, sentences = request.getfixturevalue("data_dir"), request.getfixturevalue("tsv")
    return {
        "resnet18": ["train", "resnet18", "--data-dir", images, "--batch-size", "8", "--lr", "0.05"],
        "seq2seq": ["train", "seq2seq", "--data", sentences, *SMALL, *WORDS, "--dropout", "0.1"],
    }


CHECKPOINT = {"resnet18": "last", "seq2seq": "last/checkpoint"}


@pytest.mark.parametrize("name", ["resnet18", "seq2seq"])
def test_a_program_that_is_stopped_goes_on(name, request, small, pressed, tmp_path):  # noqa: F811
    """Its checkpoints are taken at the same batches, so that it draws the same random numbers."""
    command = partial(run, *programs(request)[name], "--devices", "cpu*2", "--epochs", "3")
    often = ["--checkpoint-every", "1", *(["--keep", "2"] if name == "resnet18" else [])]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command("--output", whole, *often)
    pressed += [(1, 2), (3, 3)]
    for moment in ("in epoch 1 after step 2", "in epoch 3 after step"):
        output = command("--output", parts, *often, "--resume", "auto", exit_code=130)
        assert f"Interrupted. fit: stopped {moment}" in output
        assert "; checkpoints are in" in output and "; resume with --resume auto" in output
    command("--output", parts, *often, "--resume", "auto")
    assert pressed == []
    assert rows_in(parts) == rows_in(whole)
    for file in ("net.params", "states.npz"):
        left, right = ((out / CHECKPOINT[name] / file).read_bytes() for out in (whole, parts))
        assert left == right
    assert len([path for path in parts.iterdir() if path.name.startswith("step-")]) == (name == "resnet18")


def test_a_folder_of_a_checkpoint_is_gone_on_from(request, small, tmp_path):
    command = partial(run, *programs(request)["resnet18"], "--devices", "cpu*1", "--epochs", "2")
    command("--output", tmp_path / "one")
    shutil.copytree(tmp_path / "one" / "last", tmp_path / "kept")
    command("--output", tmp_path / "two", "--resume", tmp_path / "kept")
    assert rows_in(tmp_path / "two") == rows_in(tmp_path / "one")


def test_more_epochs_stretch_the_schedule(request, small, tmp_path):
    """It was an error about max_update, repeated for every checkpoint of the run."""
    command = partial(run, *programs(request)["resnet18"], "--devices", "cpu*2", "--output", tmp_path / "out", "--keep", "3")
    command("--epochs", "2")
    command("--epochs", "4", "--resume", "auto")
    steps, rates = 4, [row["learning_rate"] for row in rows_in(tmp_path / "out")]
    before, after = (mx.lr_scheduler.CosineScheduler(steps * epochs, 0.05, 0.0, steps, 0.005) for epochs in (2, 4))
    assert rates == pytest.approx([(after if epoch > 2 else before)(steps * epoch) for epoch in (1, 2, 3, 4)], abs=1e-9)
    assert rates[2] > 0.01


def test_a_folder_that_is_none_is_reported(request, small, tmp_path):
    command = [*programs(request)["resnet18"], "--devices", "cpu*1", "--epochs", "1", "--output", tmp_path / "out"]
    assert "which holds no checkpoint" in run(*command, "--resume", tmp_path / "nowhere", exit_code=1)
    assert not (tmp_path / "out").exists()


SCHEDULES = {
    "factor": (mx.lr_scheduler.FactorScheduler, {"factor": 0.5, "base_lr": 0.4}, {"step": 2}, {"step": 6}),
    "multi-factor": (mx.lr_scheduler.MultiFactorScheduler, {"factor": 0.1, "base_lr": 0.4}, {"step": [2, 9]}, {"step": [5, 20]}),
    "poly": (mx.lr_scheduler.PolyScheduler, {"base_lr": 0.4, "pwr": 1}, {"max_update": 6}, {"max_update": 12, "warmup_steps": 2}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_mxnet_are_stretched(name, devices, tmp_path):
    """The oracle: the schedule itself, asked for each update."""
    kind, same, before, after = SCHEDULES[name]
    data, rates = batches_of(*three_clouds(48)), []  # 3 batches

    class Rates(mgpu.Callback):
        def on_batch_end(self, state):
            rates.append(state.trainer.learning_rate)

    for epochs, lengths in ((2, before), (4, after)):
        net = make_net(devices)
        options = {"learning_rate": 0.4, "lr_scheduler": kind(**same, **lengths)}
        callbacks = [mgpu.Checkpoint(tmp_path, monitor=None), Rates()]
        mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd", options), data, epochs=epochs, callbacks=callbacks, resume="auto")
    first, later = kind(**same, **before), kind(**same, **after)
    expected = [first(step) for step in range(1, 7)]
    asked = [later(step) for step in range(1, 13)]
    assert rates == pytest.approx(expected + asked[6:], rel=1e-6)
