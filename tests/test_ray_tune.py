"""Trials of Ray Tune: their reports and checkpoints everywhere, and Ray itself where it is installed: `pip install '.[ray]'`."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import MissingExtraError, TrainerError

from .conftest import LOSS, initialized, largest_difference, small_batches, small_net, states_of, weights_of
from .versions import nd

SCRIPT = Path(__file__).parent.parent / "scripts" / "search_resnet18.py"
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'")


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(MissingExtraError, match=r"the extra 'ray'\. Run pip install"):
        mgpu.tuning.trial_folder()


# Reports and checkpoints, with a stand-in for Ray


class FakeTune:
    """What ReportToTune and trial_folder use of `ray.tune`: a report copies the checkpoint's folder, as Ray does."""

    def __init__(self, folder, given=None):
        self.folder, self.given, self.rows = folder, given, []
        self.Checkpoint = SimpleNamespace(from_directory=Path)

    def get_context(self):
        return SimpleNamespace(get_trial_id=lambda: "abc_00003")

    def get_checkpoint(self):
        if self.given is None:
            return None
        return SimpleNamespace(as_directory=lambda: _Entered(self.given))

    def report(self, metrics, checkpoint):
        self.rows.append(metrics)
        shutil.copytree(checkpoint, self.folder / f"checkpoint_{len(self.rows)}")

    def last(self):
        return self.folder / f"checkpoint_{len(self.rows)}"


class _Entered:
    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return self.path

    def __exit__(self, *error):
        pass


class AtBegin(mgpu.Callback):
    """What the network and its trainer hold when the epochs begin."""

    def on_fit_begin(self, state):
        if state.resumed is not None:
            self.weights, self.momentum = weights_of(state.net), momentum_of(state.trainer)
        self.learning_rate = state.trainer.learning_rate
        self.epochs = [row["epoch"] for row in state.history.rows]


def momentum_of(trainer):
    states = states_of(trainer)[0]
    return [states[index].asnumpy() for index in sorted(states)]


def train_trial(monkeypatch, folder, learning_rate, epochs, given=None, background=False):
    """A trial's function, run in this process."""
    tune = FakeTune(folder / f"ray-{learning_rate}-{epochs}", given)
    monkeypatch.setitem(sys.modules, "ray.tune", tune)
    net = small_net([mx.cpu(0)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": learning_rate, "momentum": 0.9})
    ((X, y),) = small_batches([21])
    loader = mgpu.data.ArrayLoader(X, y, 8, shuffle=True, seed=3)
    saves = mgpu.Checkpoint(mgpu.tuning.trial_folder(folder), background=background)
    at_begin = AtBegin()
    options = {"callbacks": [saves, at_begin, mgpu.tuning.ReportToTune(saves)], "resume": "auto"}
    mgpu.fit(net, LOSS, trainer, loader, [(X, y)], epochs=epochs, **options)
    return SimpleNamespace(net=net, trainer=trainer, tune=tune, begin=at_begin)


@pytest.mark.parametrize("background", [False, True])
def test_each_epoch_is_reported_with_its_checkpoint(monkeypatch, tmp_path, background):
    trial = train_trial(monkeypatch, tmp_path, 0.1, 2, background=background)
    assert [row["epoch"] for row in trial.tune.rows] == [1, 2]
    assert {"test_accuracy", "test_loss", "train_loss", "learning_rate"} <= set(trial.tune.rows[0])
    for epoch in (1, 2):
        progress = json.loads((trial.tune.folder / f"checkpoint_{epoch}" / "last" / "progress.json").read_text())
        assert progress["epochs_completed"] == epoch


def test_a_trial_resumes_with_the_bits_of_one_that_was_not_stopped(monkeypatch, tmp_path):
    straight = train_trial(monkeypatch, tmp_path / "a", 0.1, 3)
    stopped = train_trial(monkeypatch, tmp_path / "b", 0.1, 1)
    resumed = train_trial(monkeypatch, tmp_path / "b", 0.1, 3, given=stopped.tune.last())
    assert [row["epoch"] for row in resumed.tune.rows] == [2, 3]
    assert largest_difference(weights_of(straight.net), weights_of(resumed.net)) == 0.0


def test_a_trial_takes_anothers_weights_and_states_and_keeps_its_own_learning_rate(monkeypatch, tmp_path):
    """Population-based training. The oracle applies SGD with momentum by hand."""
    donor = train_trial(monkeypatch, tmp_path / "a", 0.1, 2)
    copy = train_trial(monkeypatch, tmp_path / "b", 0.02, 3, given=donor.tune.last())
    assert (copy.begin.learning_rate, copy.begin.epochs) == (0.02, [1, 2])
    assert largest_difference(copy.begin.weights, weights_of(donor.net)) == 0.0
    assert largest_difference(copy.begin.momentum, momentum_of(donor.trainer)) == 0.0
    assert largest_difference(copy.begin.momentum, [np.zeros_like(array) for array in copy.begin.momentum]) > 0

    net = small_net([mx.cpu(0)])
    net(nd.zeros((1, 1, 6, 6)))  # sets the shapes
    for param, value in zip(net.collect_params().values(), copy.begin.weights):
        param.set_data(nd.array(value))
    ((X, y),) = small_batches([21])
    third = mgpu.data.ArrayLoader(X, y, 8, shuffle=True, seed=3)
    third.epoch = 2
    momentum = copy.begin.momentum
    for X, y in third:
        with mx.autograd.record():
            loss = LOSS(net(nd.array(X)), nd.array(y)).sum()
        loss.backward()
        params = list(net.collect_params().values())
        momentum = [0.9 * old - 0.02 * param.grad().asnumpy() / len(X) for old, param in zip(momentum, params)]
        for param, change in zip(params, momentum):
            param.set_data(param.data() + nd.array(change))
    assert largest_difference(weights_of(net), weights_of(copy.net)) < 1e-6


def test_outside_ray_tune_the_error_says_so(monkeypatch, tmp_path):
    tune = FakeTune(tmp_path)
    tune.get_context = lambda: SimpleNamespace(get_trial_id=lambda: None)
    monkeypatch.setitem(sys.modules, "ray.tune", tune)
    for call in (mgpu.tuning.trial_folder, lambda: mgpu.tuning.ReportToTune(mgpu.Checkpoint(tmp_path / "c"))):
        with pytest.raises(TrainerError, match="Ray Tune does not run"):
            call()
    with pytest.raises(TrainerError, match="Pass the Checkpoint"):
        mgpu.tuning.ReportToTune(str(tmp_path))


# Ray itself


@with_ray
@pytest.mark.parametrize("scheduler", ["asha", "pbt"])
def test_the_script_searches(tmp_path, scheduler):
    """It prints the best trial, whose checkpoint a network loads."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    words = ["--scheduler", scheduler, "--trials", "2", "--epochs", "2", "--num-examples", "64", "--output", str(tmp_path / "s")]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 0, done.stdout.decode()
    best, checkpoint = [line for line in done.stdout.decode().splitlines() if line.startswith(("best: ", "checkpoint: "))]
    assert "test accuracy" in best
    net = initialized(mgpu.models.resnet18(10))
    net(nd.zeros((1, 1, 8, 8)))
    mgpu.load_checkpoint(net, checkpoint.split(": ")[1])
