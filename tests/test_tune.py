"""Search with Ray Tune: its bridge everywhere, and Ray itself where it is installed: `pip install '.[tune]'`."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.cli import search as command
from gluon_mgpu.errors import DataError, MissingExtraError, TrainerError
from gluon_mgpu.plots import plot_trials
from gluon_mgpu.tune import report
from gluon_mgpu.tune.results import Request, Results, Trial, read_request
from gluon_mgpu.tune.space import read_space, sample_trials
from mxnet import gluon

from .conftest import assert_house_style, largest_difference, small_batches, small_net, weights_of

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[tune]'")


# A space, as text


def test_a_space_is_read_from_text():
    space = read_space(["lr=log:1e-4:1e-1 batch_size=choice:64,128", "--cell=choice:gru,lstm", "num-layers=int:1:3"])
    assert list(space) == ["lr", "batch-size", "cell", "num-layers"]
    assert (space["lr"].kind, space["lr"].low, space["lr"].high) == ("log", 1e-4, 1e-1)
    assert (space["batch-size"].choices, space["cell"].choices) == ((64, 128), ("gru", "lstm"))


@pytest.mark.parametrize(
    "text",
    ["lr", "lr=", "lr=log", "lr=log:1", "lr=log:0:1", "lr=log:2:1", "lr=log:1:x", "lr=log:1:2:3", "lr=log:nan:1", "lr=exp:1:2"]
    + ["n=int:1:2.5", "n=choice:", "n=choice:1,,2", "=choice:1", "lr=log:1:2 lr=log:1:2", "lr=uniform:1:inf"],
)
def test_a_space_that_cannot_be_read(text):
    with pytest.raises(DataError) as caught:
        read_space([text])
    assert_house_style(caught.value)


def test_sampled_values_lie_in_the_space():
    space = read_space(["lr=log:1e-4:1e-1 dropout=uniform:0:0.5 num-layers=int:1:3 cell=choice:gru,lstm"])
    trials = sample_trials(space, 300, seed=0)
    assert all(1e-4 <= trial["lr"] <= 1e-1 and 0 <= trial["dropout"] <= 0.5 for trial in trials)
    assert {trial["num-layers"] for trial in trials} == {1, 2, 3}
    assert {trial["cell"] for trial in trials} == {"gru", "lstm"}
    below = sum(trial["lr"] < 10**-2.5 for trial in trials)  # the middle of the logarithms; binomial, sigma 8.7
    assert 110 < below < 190


def test_a_seed_gives_the_same_trials_and_more_trials_keep_the_earlier_ones():
    space = read_space(["lr=log:1e-4:1e-1", "batch-size=choice:16,32,64"])
    assert sample_trials(space, 4, seed=5) == sample_trials(space, 9, seed=5)[:4] != sample_trials(space, 4, seed=6)
    assert sample_trials(space, 1, seed=0) == [{"lr": 0.03549, "batch-size": 32}]  # on every version of Python


def test_a_changed_value_stays_in_the_space():
    space = read_space(["lr=log:1e-4:1e-1 layers=int:1:3 cell=choice:gru,lstm"])
    assert [space["lr"].clipped(value) for value in (0.12, 0.0123456, 1e-9)] == [0.1, 0.01235, 1e-4]
    assert [space["layers"].clipped(value) for value in (3.6, 0)] == [3, 1]
    assert space["cell"].clipped("gru") == "gru"


# The command line


@pytest.fixture
def any_ray(monkeypatch):
    """The command believes that Ray is installed."""
    monkeypatch.setattr(command, "require_tune", lambda operation: None)
    monkeypatch.setattr(command, "set_defaults", lambda: None)


@pytest.fixture
def asked(any_ray, monkeypatch):
    """Calls the command, and returns the request that it would run, or its output."""

    def ask(*words):
        found = []

        def run(trainable, folder):
            found.append(read_request(folder))
            return SimpleNamespace(best=lambda: True)

        monkeypatch.setattr(command, "run_trials", run)
        monkeypatch.setattr(command, "_summarize", lambda results: None)
        result = CliRunner().invoke(main, ["search", *words])
        return found[0] if found else result

    return ask


@pytest.mark.parametrize("program", ["resnet18", "seq2seq"])
def test_the_best_trial_is_a_command_that_can_be_run(asked, tmp_path, program):
    request = asked(program, "--trials", "12", "--epochs", "3", "--output", str(tmp_path / "s"), "--", "--hybridize", "off")
    assert len(request.trials) == 12
    for trial in request.trials:
        words = shlex.split(request.command(trial))
        assert words[:3] == ["gluon-mgpu", "train", program]
        parsed = main.commands["train"].commands[program].make_context("train", words[3:])
        assert (parsed.params["epochs"], parsed.params["devices"], parsed.params["hybridize"]) == (3, "cpu", "off")
        for name, value in trial.items():
            assert parsed.params[name.replace("-", "_")] == value


def test_defaults_of_the_programs(asked, tmp_path):
    images, pairs = (asked(program, "--output", str(tmp_path / program)) for program in ("resnet18", "seq2seq"))
    assert (images.metric, images.mode, images.scheduler, len(images.trials)) == ("test_accuracy", "max", "asha", 20)
    assert (pairs.metric, pairs.mode) == ("test_exact_match", "max")
    loss = asked("seq2seq", "--metric", "test_loss", "--output", str(tmp_path / "loss"))
    assert (loss.metric, loss.mode) == ("test_loss", "min")


@pytest.mark.parametrize(
    "words, told",
    [
        (["--space", "lr=log:1:0"], "expected NAME=log"),
        (["--space", "colour=choice:1,2"], "take a value"),
        (["--space", "output=choice:a,b"], "take a value"),
        (["--space", "debug=choice:a,b"], "take a value"),
        (["--space", "batch-size=choice:0,0"], "batch-size"),
        (["--space", "clip-value=uniform:-1:0"], "clip-value"),
        (["--devices-per-trial", "cuda:1"], "expected cpu*N or gpu*N"),
        (["--devices-per-trial", "cpu:0"], "expected cpu*N or gpu*N"),
        (["--scheduler", "pbt", "--space", "batch-size=choice:32,64"], "which pbt can change"),
        (["--", "--output", "x"], "expected only options that the search does not set"),
        (["--", "--epochs", "2"], "expected only options that the search does not set"),
        (["--", "--lr", "0.1"], "expected one of them"),
        (["--", "--colour", "red"], "No such option"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_is_written(asked, tmp_path, words, told):
    result = asked("resnet18", "--output", str(tmp_path / "s"), *words)
    assert result.exit_code in (1, 2) and told in " ".join(result.output.split()), result.output
    assert not (tmp_path / "s").exists()


def test_a_search_is_resumed_only_with_its_own_options(asked, tmp_path):
    folder = str(tmp_path / "s")
    assert "expected the folder of a search" in asked("resnet18", "--output", folder, "--resume").output
    first = asked("resnet18", "--output", folder, "--trials", "3", "--", "--optimizer", "adam")
    assert "Pass --resume" in " ".join(asked("resnet18", "--output", folder).output.split())
    assert asked("resnet18", "--output", folder, "--resume") == first
    assert asked("resnet18", "--output", folder, "--resume", "--trials", "3", "--", "--optimizer", "adam") == first
    for words in (["--trials", "4"], ["--space", "lr=log:1:2"], ["--", "--optimizer", "sgd"]):
        output = asked("resnet18", "--output", folder, "--resume", *words).output
        assert "for a search that was started with" in " ".join(output.split())
    output = asked("seq2seq", "--output", folder, "--resume").output
    assert "for a search that was started with" in " ".join(output.split())


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(command, "set_defaults", lambda: None)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(MissingExtraError, match=r"gluon_mgpu\[tune\]") as caught:
        report.require_tune("search")
    assert_house_style(caught.value)
    result = CliRunner().invoke(main, ["search", "resnet18"])
    assert result.exit_code == 1 and "gluon_mgpu[tune]" in result.output


@pytest.mark.parametrize("name, value", [("sys.version_info", (3, 8, 18)), ("platform.machine", lambda: "riscv64")])
def test_where_ray_has_no_wheel_the_error_says_so(monkeypatch, name, value):
    monkeypatch.setattr(f"gluon_mgpu.tune.report.{name}", value)
    with pytest.raises(MissingExtraError, match="no wheel") as caught:
        report.require_tune("search")
    assert_house_style(caught.value)


def test_an_old_ray_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.10.0"))
    monkeypatch.setitem(sys.modules, "ray.tune", SimpleNamespace())
    with pytest.raises(MissingExtraError, match=r"got Ray 2\.10\.0; expected 2\.44") as caught:
        report.require_tune("search")
    assert_house_style(caught.value)


# Results


def make_request(**changes):
    trials = [{"lr": 0.1, "cell": "gru"}, {"lr": 0.2, "cell": "lstm"}, {"lr": 0.3, "cell": "gru"}]
    usual = {"program": "resnet18", "arguments": ["--epochs", "2"], "trials": trials, "space": ["lr=log:0.1:1"]}
    usual.update(metric="test_accuracy", mode="max", scheduler="asha", devices="cpu:1", epochs=2, seed=0)
    return Request(**{**usual, **changes})


def make_results(folder, request=None):
    results = Results(request or make_request(), folder)
    for number, values in ((1, (0.5, 0.7)), (2, (0.9, 0.8)), (3, (0.9,))):
        for epoch, value in enumerate(values, 1):
            trial = results.trials[number]
            trial.add({"epoch": epoch, "test_accuracy": value, "train_loss": 1 / epoch}, trial.options)
    return results


def test_the_best_trial_has_the_best_epoch(tmp_path):
    results = make_results(tmp_path)
    assert [results.value(trial) for trial in results.trials.values()] == [0.7, 0.9, 0.9]
    assert results.best().number == 2  # the first of two equal ones
    results.trials[2].status = "failed"
    assert results.best().number == 3
    assert make_results(tmp_path, make_request(mode="min")).best().number == 1
    assert Results(make_request(), tmp_path).best() is None


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path):
    results = make_results(tmp_path)
    for number, epoch, value in ((1, 3, float("nan")), (3, 2, float("inf"))):
        trial = results.trials[number]
        trial.add({"epoch": epoch, "test_accuracy": value}, trial.options)
    assert [results.value(trial) for trial in results.trials.values()] == [0.7, 0.9, 0.9]


def test_a_trial_that_resumes_repeats_no_row():
    trial = Trial(1, {"lr": 0.1})
    for epoch in (1, 2, 3, 2):
        trial.add({"epoch": epoch, "test_accuracy": float(epoch)}, trial.options)
    assert [row["epoch"] for row in trial.rows] == [1, 2]


def test_epochs_before_a_change_of_hyperparameters_do_not_count():
    """Population-based training replaces the weights that reached them."""
    trial = Trial(1, {"lr": 0.1})
    trial.add({"epoch": 1, "test_accuracy": 0.9}, trial.options)
    trial.options = {"lr": 0.2}
    assert trial.best_row("test_accuracy", "max") is None
    trial.add({"epoch": 2, "test_accuracy": 0.5}, trial.options)
    assert trial.best_row("test_accuracy", "max")["epoch"] == 2
    assert [row["options"]["lr"] for row in trial.rows] == [0.1, 0.2]


def test_results_are_written_and_read_again(tmp_path):
    results = make_results(tmp_path)
    results.trials[3].status, results.trials[3].reason = "failed", "DataError: no file"
    results.save()
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["best"] == 2
    assert content["command"] == "gluon-mgpu train resnet18 --devices cpu --epochs 2 --lr 0.2 --cell lstm"
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {
        "trial": "2",
        "status": "waiting",
        "epochs": "2",
        "best_test_accuracy": "0.9",
        "lr": "0.2",
        "cell": "lstm",
        "test_accuracy": "0.8",
        "train_loss": "0.5",
        "reason": "",
    }
    again = Results(make_request(), tmp_path)
    assert again.trials == results.trials


def test_devices_of_a_trial_as_train_takes_them():
    names = [make_request(devices=devices).device_names for devices in ("cpu*1", "cpu*2", "cpu:2", "gpu*1", "gpu*3", "gpu:3")]
    assert names == ["cpu", "cpu*2", "cpu*2", "gpu:0", "gpu:0-2", "gpu:0-2"]


def test_the_picture_shows_each_trial_and_marks_the_best():
    points = [({"lr": 0.1, "cell": "gru"}, 0.5, False), ({"lr": 0.01, "cell": "lstm"}, 0.7, True)]
    points.append(({"lr": 1.0, "cell": "gru"}, None, False))
    left, right = plot_trials(points, {"lr": "log", "cell": "choice"}, "test_accuracy").axes
    assert (left.get_xscale(), left.get_xlabel(), left.get_ylabel()) == ("log", "lr", "test accuracy, %")
    assert [tuple(dots.get_offsets()[0]) for dots in left.collections] == [(0.1, 50.0), (0.01, 70.0)]
    assert [tuple(dots.get_offsets()[0]) for dots in right.collections] == [(0, 50.0), (1, 70.0)]
    assert [text.get_text() for text in right.get_xticklabels()] == ["gru", "lstm"]
    assert left.collections[1].get_sizes() > left.collections[0].get_sizes()
    five = plot_trials([], dict.fromkeys("abcde", "int"), "test_accuracy")
    assert [axes.axison for axes in five.axes] == [True] * 5 + [False]  # no empty chart in the last row


# Reports and checkpoints, with a stand-in for Ray


class FakeTune:
    """What ReportToTune and trial_folder use of `ray.tune`: a report copies the checkpoint's folder, as Ray does."""

    RunConfig = None

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
    states = trainer._updaters[0].states
    return [states[index].asnumpy() for index in sorted(states)]


def train_trial(monkeypatch, folder, learning_rate, epochs, given=None, background=False):
    """A trial's function, run in this process."""
    tune = FakeTune(folder / f"ray-{learning_rate}-{epochs}", given)
    monkeypatch.setitem(sys.modules, "ray.tune", tune)
    monkeypatch.setattr(report, "require", lambda *names: tune)
    net = small_net([mx.cpu(0)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": learning_rate, "momentum": 0.9})
    ((X, y),) = small_batches([21])
    loader = mgpu.data.ArrayLoader(X, y, 8, shuffle=True, seed=3)
    saves = mgpu.Checkpoint(mgpu.tune.trial_folder(folder), background=background)
    at_begin = AtBegin()
    options = {"callbacks": [saves, at_begin, mgpu.tune.ReportToTune(saves)], "resume": "auto", "hyperparameters": "trainer"}
    mgpu.fit(net, LOSS, trainer, loader, [(X, y)], epochs=epochs, **options)
    return SimpleNamespace(net=net, trainer=trainer, tune=tune, begin=at_begin)


@pytest.fixture
def here(monkeypatch):
    """Python and processor are ones that Ray has wheels for."""
    monkeypatch.setattr(report.sys, "version_info", (3, 11, 0), raising=True)
    monkeypatch.setattr(report.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize("background", [False, True])
def test_each_epoch_is_reported_with_its_checkpoint(monkeypatch, tmp_path, here, background):
    trial = train_trial(monkeypatch, tmp_path, 0.1, 2, background=background)
    assert [row["epoch"] for row in trial.tune.rows] == [1, 2]
    assert {"test_accuracy", "test_loss", "train_loss", "learning_rate"} <= set(trial.tune.rows[0])
    for epoch in (1, 2):
        progress = json.loads((trial.tune.folder / f"checkpoint_{epoch}" / "last" / "progress.json").read_text())
        assert progress["epochs_completed"] == epoch


def test_a_trial_resumes_with_the_bits_of_one_that_was_not_stopped(monkeypatch, tmp_path, here):
    straight = train_trial(monkeypatch, tmp_path / "a", 0.1, 3)
    stopped = train_trial(monkeypatch, tmp_path / "b", 0.1, 1)
    resumed = train_trial(monkeypatch, tmp_path / "b", 0.1, 3, given=stopped.tune.last())
    assert [row["epoch"] for row in resumed.tune.rows] == [2, 3]
    assert largest_difference(weights_of(straight.net), weights_of(resumed.net)) == 0.0


def test_a_trial_takes_anothers_weights_and_states_and_keeps_its_own_learning_rate(monkeypatch, tmp_path, here):
    """Population-based training. The oracle applies SGD with momentum by hand."""
    donor = train_trial(monkeypatch, tmp_path / "a", 0.1, 2)
    copy = train_trial(monkeypatch, tmp_path / "b", 0.02, 3, given=donor.tune.last())
    assert (copy.begin.learning_rate, copy.begin.epochs) == (0.02, [1, 2])
    assert largest_difference(copy.begin.weights, weights_of(donor.net)) == 0.0
    assert largest_difference(copy.begin.momentum, momentum_of(donor.trainer)) == 0.0
    assert largest_difference(copy.begin.momentum, [np.zeros_like(array) for array in copy.begin.momentum]) > 0

    net = small_net([mx.cpu(0)])
    net(mx.nd.zeros((1, 1, 6, 6)))  # sets the shapes
    for param, value in zip(net.collect_params().values(), copy.begin.weights):
        param.set_data(mx.nd.array(value))
    ((X, y),) = small_batches([21])
    third = mgpu.data.ArrayLoader(X, y, 8, shuffle=True, seed=3)
    third.epoch = 2
    momentum = copy.begin.momentum
    for X, y in third:
        with mx.autograd.record():
            loss = LOSS(net(mx.nd.array(X)), mx.nd.array(y)).sum()
        loss.backward()
        params = list(net.collect_params().values())
        momentum = [0.9 * old - 0.02 * param.grad().asnumpy() / len(X) for old, param in zip(momentum, params)]
        for param, change in zip(params, momentum):
            param.set_data(param.data() + mx.nd.array(change))
    assert largest_difference(weights_of(net), weights_of(copy.net)) < 1e-6


def test_outside_ray_tune_the_error_says_so(monkeypatch, tmp_path, here):
    tune = FakeTune(tmp_path)
    tune.get_context = lambda: SimpleNamespace(get_trial_id=lambda: None)
    monkeypatch.setattr(report, "require", lambda *names: tune)
    for call in (mgpu.tune.trial_folder, lambda: mgpu.tune.ReportToTune(mgpu.Checkpoint(tmp_path / "c"))):
        with pytest.raises(TrainerError, match="Ray Tune does not run") as caught:
            call()
        assert_house_style(caught.value)
    with pytest.raises(TrainerError, match="Pass the Checkpoint") as caught:
        mgpu.tune.ReportToTune(str(tmp_path))
    assert_house_style(caught.value)


# Ray itself


def write_images(folder):
    """96 and 48 digits in idx format."""
    digits = mgpu.data.load_digits()
    folder.mkdir()
    train, test = (digits.train_images[:96], digits.train_labels[:96]), (digits.test_images[:48], digits.test_labels[:48])
    for part, (images, labels) in (("train", train), ("t10k", test)):
        for name, array in (("images-idx3", (images[:, 0] * 255).astype("uint8")), ("labels-idx1", labels.astype("uint8"))):
            head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(">" + "I" * array.ndim, *array.shape)
            (folder / f"{part}-{name}-ubyte").write_bytes(head + array.tobytes())
    return str(folder)


def start(*words, cwd):
    """The command in a session of its own, its output in a file."""
    command_line = [sys.executable, "-m", "gluon_mgpu_startup.command", "search", *words]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with open(cwd / "output.txt", "a") as output:
        return subprocess.Popen(
            command_line, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def lines(cwd):
    return [line for line in (cwd / "output.txt").read_text().splitlines() if line.startswith("trial ")]


def wait_until(condition, process, cwd, seconds=150):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, (cwd / "output.txt").read_text()
        time.sleep(0.2)


def finish(process, cwd, expected=0):
    try:
        assert process.wait(timeout=200) == expected, (cwd / "output.txt").read_text()
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def writes_to(path):
    """The processes that have opened a file."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link) == str(path):
                found.append(int(link.parts[2]))
    return found


def listening(pids):
    """The addresses at which processes accept connections, in the kernel's hexadecimal form."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(link))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def naming(name):
    """The processes whose command line or environment holds a name."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if name.encode() in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass
    return found


OPTIONS = ("--trials", "4", "--epochs", "3", "--output", "s")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The results of a search that was not interrupted."""
    cwd = tmp_path_factory.mktemp("straight")
    finish(start("resnet18", *OPTIONS, "--", "--data-dir", write_images(cwd / "images"), cwd=cwd), cwd)
    return cwd


def figures(results):
    return {
        trial["number"]: [(row["epoch"], row["test_accuracy"], row["test_loss"]) for row in trial["rows"]]
        for trial in results["trials"]
    }


def assert_same_search(found, expected):
    """The same best trial; and each trial, as far as the scheduler let it train, the same figures in each epoch."""
    assert (found["best"], found["command"]) == (expected["best"], expected["command"])
    for number, rows in figures(found).items():
        shared = min(len(rows), len(figures(expected)[number]))
        assert shared and rows[:shared] == figures(expected)[number][:shared], number


@with_ray
def test_asha_writes_all_results(straight):
    found, output = results_of(straight / "s"), (straight / "output.txt").read_text()
    assert {trial["status"] for trial in found["trials"]} <= {"done", "stopped"}
    assert max(len(rows) for rows in figures(found).values()) == 3
    assert found["command"] in output and "best: trial" in output
    assert {"results.csv", "results.json", "search.png", "search.json", "best_trial"} <= set(os.listdir(straight / "s"))
    net = mgpu.models.resnet18(10)
    net.initialize()
    net(mx.nd.zeros((1, 1, 8, 8)))
    mgpu.load_checkpoint(straight / "s" / "best_trial" / "best", net)
    assert not (straight / "s" / "ray-temporary.txt").exists()


@with_ray
def test_a_killed_and_resumed_search_ends_with_the_same_best_trial(straight, tmp_path):
    images = str(straight / "images")
    process = start("resnet18", *OPTIONS, "--", "--data-dir", images, cwd=tmp_path)
    wait_until(lambda: len(lines(tmp_path)) >= 4, process, tmp_path)
    temporary = (tmp_path / "s" / "ray-temporary.txt").read_text()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    end = time.monotonic() + 60
    while naming(temporary) and time.monotonic() < end:  # Ray notices by itself
        time.sleep(0.5)
    assert not naming(temporary)
    before = figures(results_of(tmp_path / "s"))
    assert sum(map(len, before.values())) >= 3
    finish(start("resnet18", "--output", "s", "--resume", cwd=tmp_path), tmp_path)
    assert_same_search(results_of(tmp_path / "s"), results_of(straight / "s"))
    assert not os.path.exists(temporary)


@with_ray
@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_keeps_the_results(straight, tmp_path, signum, code):
    process = start("resnet18", *OPTIONS, "--", "--data-dir", str(straight / "images"), cwd=tmp_path)
    wait_until(lambda: len(lines(tmp_path)) >= 3, process, tmp_path)
    process.send_signal(signum)
    finish(process, tmp_path, code)
    assert "--resume continues" in (tmp_path / "output.txt").read_text()
    kept = figures(results_of(tmp_path / "s"))
    assert sum(map(len, kept.values())) >= 3 and (tmp_path / "s" / "search.png").exists()
    if signum == signal.SIGINT:
        finish(start("resnet18", "--output", "s", "--resume", cwd=tmp_path), tmp_path)
        assert_same_search(results_of(tmp_path / "s"), results_of(straight / "s"))


@with_ray
def test_a_killed_trial_resumes(straight, tmp_path):
    """Its process is killed after its first epoch, and another one continues from its checkpoint."""
    words = ("--trials", "2", "--epochs", "4", "--scheduler", "none", "--output", "s")
    process = start("resnet18", *words, "--", "--data-dir", str(straight / "images"), cwd=tmp_path)
    wait_until(lambda: any(line.startswith("trial 1 ") for line in lines(tmp_path)), process, tmp_path)
    trials = writes_to(tmp_path / "s" / "logs" / "trial-1.txt")
    assert len(trials) == 1 and trials != [process.pid]
    rays = naming((tmp_path / "s" / "ray-temporary.txt").read_text())
    assert {"0100007F", "0000000000000000FFFF00000100007F"} >= listening([*rays, *trials, process.pid]) != set()  # 127.0.0.1
    os.kill(trials[0], signal.SIGKILL)
    finish(process, tmp_path)
    found = results_of(tmp_path / "s")
    assert [trial["status"] for trial in found["trials"]] == ["done", "done"]
    assert [[epoch for epoch, _, _ in rows] for rows in figures(found).values()] == [[1, 2, 3, 4]] * 2
    log = (tmp_path / "s" / "logs" / "trial-1.txt").read_text()
    assert log.count("gluon-mgpu train resnet18") == 2 and "resumes from" in log


GPUS = """
import sys, time
import ray
from gluon_mgpu.tune import running
from gluon_mgpu.tune.results import Request

folder, init = running.Path(sys.argv[1]), ray.init
ray.init = lambda **options: init(num_gpus=2, **options)  # Ray only counts them


def make():
    log = str(folder / "log.txt")

    def run(options, temporary):
        import os, sys, time
        from ray import tune

        with open(log, "a") as file:
            file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {'mxnet' in sys.modules} {os.getcwd()}\\n")
        time.sleep(5)  # both at once
        tune.report({"epoch": 1, "test_accuracy": 0.5})

    return run


trials = [{"lr": 0.1}, {"lr": 0.2}]
usual = {"program": "resnet18", "arguments": [], "space": ["lr=log:0.1:1"], "metric": "test_accuracy", "mode": "max"}
Request(trials=trials, scheduler="none", devices="gpu:1", epochs=1, seed=0, **usual).write(folder)
running.set_defaults()
results = running.run_trials(make(), folder)
assert [trial.status for trial in results.trials.values()] == ["done", "done"], results.trials
"""


@with_ray
def test_each_trial_gets_its_gpu_before_mxnet_is_imported(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    words = [sys.executable, "-W", "ignore", "-c", GPUS, str(tmp_path)]
    done = subprocess.run(words, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert done.returncode == 0, done.stdout.decode()
    seen = sorted(line.split() for line in (tmp_path / "log.txt").read_text().splitlines())
    assert seen == [["0", "False", str(tmp_path)], ["1", "False", str(tmp_path)]]


@with_ray
def test_the_function_that_is_sent_to_a_trial_imports_nothing(tmp_path):
    from ray import cloudpickle

    sent = cloudpickle.dumps(command._trainable(make_request(), tmp_path))
    (tmp_path / "sent").write_bytes(sent)
    code = "import pickle, sys; pickle.load(open('sent', 'rb')); assert 'mxnet' not in sys.modules, sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


@with_ray
def test_more_devices_than_the_machine_has(tmp_path):
    for devices, told in (("cpu:999", "cores; expected at most that many"), ("gpu:99", "GPUs; expected at most that many")):
        finish(start("resnet18", "--devices-per-trial", devices, "--output", "s", cwd=tmp_path), tmp_path, 1)
        assert told in " ".join((tmp_path / "output.txt").read_text().split())
        shutil.rmtree(tmp_path / "s")


@with_ray
def test_the_program_of_the_guide_runs(tmp_path, rays_folder):
    page = (Path(__file__).parent.parent / "docs" / "search.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    first = f"import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir={rays_folder!r})\n"
    (tmp_path / "page.py").write_text(first + "\n".join(blocks))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "HOME": str(tmp_path)}
    words = [sys.executable, "-W", "ignore", "page.py"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=270)
    assert done.returncode == 0, done.stdout.decode()
    assert re.search(r"^{'lr': [\d.e-]+}$", done.stdout.decode(), re.MULTILINE), done.stdout.decode()


PBT = """
import json, os, sys
import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining


def trainable(config):
    import gluon_mgpu as mgpu
    import mxnet as mx
    import numpy as np
    from mxnet import gluon

    class Log(mgpu.Callback):
        def write(self, state, when):
            weights = [float(np.abs(p.data().asnumpy()).sum()) for p in state.net.collect_params().values()]
            states = state.trainer._updaters[0].states
            momentum = [float(np.abs(states[i].asnumpy()).sum()) for i in sorted(states)]
            row = {"trial": tune.get_context().get_trial_id(), "when": when, "epoch": len(state.history.rows)}
            row.update(weights=weights, momentum=momentum, lr=state.trainer.learning_rate, config=config["lr"])
            with open(config["log"], "a") as file:
                file.write(json.dumps(row) + "\\n")

        def on_fit_begin(self, state):
            self.write(state, "begin")

        def on_epoch_end(self, state):
            self.write(state, "end")

    mx.random.seed(1)
    net = gluon.nn.Dense(3, in_units=8)
    net.initialize(mx.init.Xavier())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": config["lr"], "momentum": 0.9})
    X = np.random.RandomState(0).uniform(-1, 1, (40, 8)).astype("float32")
    y = X[:, :3].argmax(1).astype("float32")
    loader = mgpu.data.ArrayLoader(X, y, 10, shuffle=True, seed=1)
    saves = mgpu.Checkpoint(mgpu.tune.trial_folder())
    callbacks = [saves, Log(), mgpu.tune.ReportToTune(saves)]
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    mgpu.fit(net, loss, trainer, loader, [(X, y)], epochs=4, callbacks=callbacks, resume="auto", hyperparameters="trainer")


folder = sys.argv[1]
quiet = {"include_dashboard": False, "log_to_driver": False, "_node_ip_address": "127.0.0.1", "_temp_dir": sys.argv[2]}
ray.init(address="local", num_cpus=2, **quiet)
changed = {"lr": tune.loguniform(1e-4, 1)}
scheduler = PopulationBasedTraining(
    time_attr="epoch", perturbation_interval=1, hyperparam_mutations=changed, quantile_fraction=0.5, synch=True
)
space = {"lr": tune.grid_search([0.1, 0.0001]), "log": folder + "/log.jsonl"}
config = tune.TuneConfig(metric="test_loss", mode="min", scheduler=scheduler, reuse_actors=False)
run = tune.RunConfig(name="pbt", storage_path=folder, verbose=0)
results = tune.Tuner(trainable, param_space=space, tune_config=config, run_config=run).fit()
assert not results.errors, results.errors
ray.shutdown()
"""


@pytest.fixture
def rays_folder():
    """A folder with a short name: those of sockets have a limit."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mgpu", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


@with_ray
def test_population_based_training_copies_a_trial_and_changes_its_learning_rate(tmp_path, rays_folder):
    (tmp_path / "pbt.py").write_text(PBT)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
    words = [sys.executable, "-W", "ignore", str(tmp_path / "pbt.py"), str(tmp_path), rays_folder]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240)
    assert done.returncode == 0, done.stdout.decode()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(row["lr"] == row["config"] for row in rows)  # the rate of the trial's own configuration, always
    copied = 0
    for row in (row for row in rows if row["when"] == "begin" and row["epoch"]):
        others = [one for one in rows if one["when"] == "end" and one["trial"] != row["trial"] and one["epoch"] == row["epoch"]]
        donors = [one for one in others if one["weights"] == row["weights"]]
        copied += len(donors)
        assert all(one["momentum"] == row["momentum"] and one["lr"] != row["lr"] for one in donors)
    assert copied


@with_ray
def test_a_population_is_searched(straight, tmp_path):
    words = ("--trials", "3", "--epochs", "5", "--scheduler", "pbt", "--output", "s")
    finish(start("resnet18", *words, "--", "--data-dir", str(straight / "images"), cwd=tmp_path), tmp_path)
    found = results_of(tmp_path / "s")
    assert [trial["status"] for trial in found["trials"]] == ["done"] * 3
    rates = [[row["options"]["lr"] for row in trial["rows"]] for trial in found["trials"]]
    assert any(len(set(own)) > 1 for own in rates)  # a trial has changed its learning rate
    assert all(0.003 <= rate <= 0.3 for own in rates for rate in own)
    factors = {}
    for row in (row for trial in found["trials"] for row in trial["rows"][:-1]):  # the schedule's, alike for all trials
        factors.setdefault(row["epoch"], []).append(row["learning_rate"] / row["options"]["lr"])
    assert all(own == pytest.approx([own[0]] * len(own)) for own in factors.values())
