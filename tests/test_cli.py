"""The command gluon-mgpu: what it prints and writes, and how it ends."""

import csv
import json
import os
import runpy
import signal
import subprocess
import sys

import click
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.cli._options import best_of
from gluon_mgpu.cli._output import print_table
from gluon_mgpu.cli.main import CommandGroup
from gluon_mgpu.loop.stop_signals import Requeue, Terminated
from mxnet.gluon import nn

from .test_idx import write_idx

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PNG = b"\x89PNG\r\n\x1a\n"
TRAIN = ["train", "resnet18"]


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="gluon-mgpu")


def run(*arguments):
    """The output of a command that succeeds."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def fail(*arguments, exit_code=1):
    """The one line that a command says when it fails."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == exit_code
    lines = result.output.strip().splitlines()
    assert "Traceback" not in result.output
    assert len(lines) == 1, result.output
    assert lines[0].startswith("Error: ")
    return lines[0]


def commands(command=main, path=()):
    """Every command and group with its path."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), (*path, name))


def tiny_network(num_classes):
    """In the place of ResNet-18, where the network does not matter."""
    net = nn.HybridSequential()
    net.add(nn.Dense(num_classes))
    return net


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("gluon_mgpu.cli.train_resnet18.resnet18", tiny_network)


@pytest.fixture
def data_dir(tmp_path):
    """40 images of 8x8 of two classes, dark and light, as one pair of idx files: 32 train and 8 test."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.RandomState(0)
    labels = np.arange(40) % 2
    write_idx(folder / "train-images-idx3-ubyte.gz", rng.randint(0, 100, (40, 8, 8)) + 150 * labels[:, None, None])
    write_idx(folder / "train-labels-idx1-ubyte.gz", labels)
    return folder


# Help


@pytest.mark.parametrize("path, command", [pytest.param(*found, id=" ".join(found[0]) or "main") for found in commands()])
def test_help_tells_of_every_flag(path, command):
    output = run(*path, "--help")
    assert output.startswith(f"Usage: {' '.join(('gluon-mgpu', *path))} ")
    assert command.help.split("\n")[0].split()[:4] == output.split("\n\n")[1].split()[:4]
    for name in command.list_commands(click.Context(command)) if isinstance(command, click.Group) else ():
        assert f"\n  {name} " in output
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.hidden:
            assert not any(flag in output for flag in parameter.opts)
        elif isinstance(parameter, click.Option):
            assert parameter.help and all(flag in output for flag in parameter.opts)
        else:
            told = parameter.name.upper() if parameter.nargs == 1 else f"{parameter.name.upper()}..."
            assert (f" {told}" if parameter.required else f"[{told}]") in output
    assert run(*path, "-h") == output


def test_the_commands_are_these():
    assert sorted(" ".join(path) for path, _ in commands()) == [
        "",
        "agree",
        "devices",
        "doctor",
        "explain",
        "export",
        "find-batch-size",
        "launch",
        "monitor",
        "predict",
        "predict resnet18",
        "train",
        "train resnet18",
        "train seq2seq",
        "translate",
    ]


@pytest.mark.parametrize("program", ["resnet18", "seq2seq"])
def test_training_programs_have_few_options_in_groups(program):
    command = dict(commands())["train", program]
    output = run("train", program, "--help")
    groups = [line for line in output.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert 0 < sum(isinstance(option, click.Option) for option in command.params) <= 25
    assert len(groups) >= 4 and "Options:" not in groups


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["train", "nonsense"], [*TRAIN, "--nonsense"], [*TRAIN, "--epochs", "0"], [*TRAIN, "--epochs", "two"]]
    + [[*TRAIN, "--lr", "0"], [*TRAIN, "--lr", "nan"], [*TRAIN, "--lr", "inf"], [*TRAIN, "--bn", "maybe"]]
    + [[*TRAIN, "--weights", "1,many"], ["monitor", "--interval", "nan"], ["find-batch-size", "--timeout", "nan"]]
    + [["monitor", "--interval", "\u0661"]],
    ids=" ".join,
)
def test_wrong_usage_is_told(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("shares", ["3,1,1", "1,-1", "0,0"])
def test_shares_that_make_no_sense_are_refused(tiny, tmp_path, shares):
    result = invoke(*TRAIN, "--devices", "cpu*2", "--weights", shares, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "got weights [" in result.output and "for 2 shards; expected" in result.output
    assert not (tmp_path / "out").exists()


# devices


def test_devices_are_a_table():
    output = run("devices")
    assert output.startswith("devices")
    (line,) = [line for line in output.splitlines() if "cpu(0)" in line]
    assert " yes " in line
    assert "GiB" in line


def test_devices_are_json():
    cpu, *others = json.loads(run("devices", "--json"))
    assert (cpu["name"], cpu["usable"], cpu["reason"]) == ("cpu(0)", True, "")
    assert 2**28 < cpu["memory_bytes"] < 2**50
    assert all(device["usable"] or device["reason"] for device in others)


def test_a_device_that_cannot_be_used_says_why(monkeypatch):
    there = [mgpu.devices.DeviceInfo("gpu(0)", "NVIDIA H200", 143 * 2**30, False, "A test operation failed")]
    monkeypatch.setattr("gluon_mgpu.devices.describe.describe_devices", lambda: there)
    output = run("devices")
    assert all(part in output for part in ("gpu(0)", "NVIDIA H200", "143.0 GiB", " no ", "A test operation"))


# train resnet18


def test_train_resnet18_trains_saves_and_tells(tmp_path, data_dir):
    out = tmp_path / "new" / "run"
    options = ["--devices", "cpu*2", "--epochs", "1", "--batch-size", "16", "--lr", "0.05", "--optimizer", "nag", "--seed", "3"]
    output = run(*TRAIN, *options, "--data-dir", data_dir, "--output", out)
    first, *_, epoch, saved, last = output.strip().splitlines()  # a slow machine tells of batches, too
    assert first == "data: 32 images to train on, 8 to test, 2 classes, on cpu(0), cpu(1)"
    assert epoch.startswith("epoch 1/1  train accuracy ")
    assert saved == f"saved curves.png, history.csv, history.json, best and last in {out}"
    (row,) = json.loads((out / "history.json").read_text())["epochs"]
    assert last == f"test accuracy {100 * row['test_accuracy']:.2f} %, {row['seconds']:.1f} s/epoch on cpu(0), cpu(1)"
    written = ["best", "curves.png", "history.csv", "history.json", "last"]
    assert sorted(path.name for path in out.iterdir()) == written
    with open(out / "history.csv", newline="") as file:
        assert [{name: float(value) for name, value in read.items()} for read in csv.DictReader(file)] == [row]
    assert (out / "curves.png").read_bytes().startswith(PNG)
    net = mgpu.models.resnet18(2)
    net.load_parameters(str(out / "best" / "net.params"), ctx=mx.cpu(0))
    images = mgpu.data.load_idx_folder(data_dir, seed=3)
    assert mgpu.evaluate_accuracy_gpus(net, [(images.test_images, images.test_labels)]) == row["test_accuracy"]


@pytest.fixture
def quick(tiny, without_pictures):
    """A training whose network and pictures do not matter."""


def train_tiny(data_dir, out, *options):
    output = run(*TRAIN, "--devices", "cpu*2", "--batch-size", "8", "--data-dir", data_dir, "--output", out, *options)
    return output.strip().splitlines(), json.loads((out / "history.json").read_text())["epochs"]


def losses(rows):
    return [row["train_loss"] for row in rows]


@pytest.mark.parametrize("compiled", ["auto", "on", "off"])
def test_training_learns_in_every_mode(quick, data_dir, tmp_path, compiled):
    lines, rows = train_tiny(data_dir, tmp_path / "out", "--epochs", "6", "--compiled", compiled, "--lr", "0.2")
    assert rows[-1]["test_accuracy"] == 1.0
    assert lines[-1].startswith("test accuracy 100.00 %, ")
    assert lines[-1].endswith(" s/epoch on cpu(0), cpu(1)")
    assert len(rows) == 6


def test_the_seed_decides_everything(quick, data_dir, tmp_path):
    _, first = train_tiny(data_dir, tmp_path / "1", "--epochs", "1", "--seed", "5")
    mx.random.seed(77)
    np.random.seed(77)
    _, again = train_tiny(data_dir, tmp_path / "2", "--epochs", "1", "--seed", "5")
    _, other = train_tiny(data_dir, tmp_path / "3", "--epochs", "1", "--seed", "6")
    assert losses(first) == losses(again) != losses(other)


def test_the_seed_decides_the_split_and_the_order(tiny, data_dir, tmp_path, monkeypatch):
    """Beside the weights."""
    loaders = []

    def fit(net, loss, trainer, train_iter, test_iter, **kwargs):
        loaders.append((train_iter, test_iter))
        raise KeyboardInterrupt

    monkeypatch.setattr("gluon_mgpu.cli._training.fit", fit)
    for seed in (5, 6):
        assert invoke(*TRAIN, "--data-dir", data_dir, "--output", tmp_path, "--seed", seed, "--devices", "cpu*1").exit_code == 130
    (first, first_test), (second, second_test) = loaders
    assert not np.array_equal(first_test.X, second_test.X)
    second.X = second.y = first.X = first.y = np.arange(32)
    assert [y.tolist() for _, y in first] != [y.tolist() for _, y in second]


def test_an_optimizer_by_name_is_used(quick, data_dir, tmp_path):
    _, sgd = train_tiny(data_dir, tmp_path / "1", "--epochs", "1", "--lr", "0.01")
    _, adam = train_tiny(data_dir, tmp_path / "2", "--epochs", "1", "--lr", "0.01", "--optimizer", "adam")
    assert losses(sgd) != losses(adam)


def test_batches_in_parts_are_batches(quick, data_dir, tmp_path):
    _, whole = train_tiny(data_dir, tmp_path / "1", "--epochs", "1")
    _, parts = train_tiny(data_dir, tmp_path / "2", "--epochs", "1", "--micro-steps", "3")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)


def test_the_optimizer_is_sharded_on_demand(quick, data_dir, tmp_path):
    _, whole = train_tiny(data_dir, tmp_path / "1", "--epochs", "1")
    _, sharded = train_tiny(data_dir, tmp_path / "2", "--epochs", "1", "--shard-optimizer")
    assert losses(sharded) == losses(whole)
    options = ["--shard-optimizer", "--optimizer", "nadam", "--data-dir", data_dir, "--output", tmp_path / "3"]
    result = invoke(*TRAIN, "--devices", "cpu*2", *options)
    assert result.exit_code == 1
    assert "Error: Trainer: got shard_optimizer and Nadam" in result.output


def test_digits_are_the_default(quick, tmp_path):
    output = run(*TRAIN, "--epochs", "1", "--devices", "cpu*1", "--output", tmp_path)
    assert output.startswith("digits: 1438 images to train on, 359 to test, 10 classes, on cpu(0)\n")


@pytest.mark.parametrize("data", ["mnist", "fashion-mnist"])
def test_data_that_cannot_be_downloaded_is_told(tiny, tmp_path, data, monkeypatch):
    def offline(*arguments, **kwargs):
        raise ConnectionError("no network in the tests")

    monkeypatch.setattr("mxnet.gluon.data.vision.datasets.download", offline)
    monkeypatch.setenv("HOME", str(tmp_path))
    message = fail(*TRAIN, "--data", data, "--output", tmp_path / "out")
    assert f"load {data}: got ConnectionError (no network in the tests); expected the files in {tmp_path}" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, told",
    [
        (["--devices", "tpu"], "use_devices: got 'tpu'; expected a device name."),
        (["--devices", "gpu:9999"], "use_devices: got gpu(9999); expected one of the GPUs that MXNet can see"),
        (["--devices", "cpu:0,cpu:0"], "use_devices: got cpu(0) twice"),
        (["--devices", "0"], "use_devices: got 0 devices; expected 1 to 1024"),
    ],
)
def test_devices_that_are_not_there_are_told(tiny, data_dir, tmp_path, options, told):
    message = fail(*TRAIN, *options, "--data-dir", data_dir, "--output", tmp_path / "out")
    assert message.startswith(f"Error: {told}")
    assert not (tmp_path / "out").exists()


def test_a_bad_folder_is_told(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder, told in (("not there", "which is not a folder"), ("empty", "with train-images-idx3-ubyte")):
        message = fail(*TRAIN, "--data-dir", tmp_path / folder, "--output", tmp_path / "out")
        assert message.startswith(f"Error: load_idx_folder: got {tmp_path / folder}")
        assert told in message
    assert not (tmp_path / "out").exists()


def predict_tiny(monkeypatch, data_dir, output, *options):
    """What the command says with scores of the labels in the place of a network, and the data that were predicted."""
    calls = []

    def scores(net, loader, **options):
        calls.append(loader)
        return np.stack([1 - loader.y, loader.y], axis=1).astype("float32")

    monkeypatch.setattr("gluon_mgpu.models.resnet18", tiny_network)
    monkeypatch.setattr("gluon_mgpu.checkpoint.save_and_load.load_checkpoint", lambda folder, net: None)
    monkeypatch.setattr("gluon_mgpu.loop.predict.predict", scores)
    arguments = ["--devices", "cpu*1", "--data-dir", data_dir, "--output", output, *options]
    return invoke("predict", "resnet18", *arguments), calls


@pytest.mark.parametrize("seed", [0, 3])
def test_predict_takes_the_test_images_of_its_seed(monkeypatch, data_dir, tmp_path, seed):
    output = tmp_path / "new" / "predictions.csv"
    result, (loader,) = predict_tiny(monkeypatch, data_dir, output, *(["--seed", seed] if seed else []))
    assert result.exit_code == 0, result.output
    images = mgpu.data.load_idx_folder(data_dir, seed=seed)
    np.testing.assert_array_equal(loader.X, images.test_images)
    with open(output, newline="") as file:
        assert [int(row["label"]) for row in csv.DictReader(file)] == images.test_labels.tolist()


def test_predict_makes_its_folder_before_it_computes(monkeypatch, data_dir, tmp_path):
    (tmp_path / "file").write_text("")
    result, calls = predict_tiny(monkeypatch, data_dir, tmp_path / "file" / "predictions.csv")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert str(tmp_path / "file") in result.output
    assert not calls


def test_ctrl_c_saves_and_ends_with_130(tiny, data_dir, tmp_path, monkeypatch):
    class Interrupting(mgpu.data.ArrayLoader):
        def __iter__(self):
            for number, pair in enumerate(super().__iter__(), 1):
                if (self.epoch, number) == (2, 3):
                    signal.raise_signal(signal.SIGINT)
                yield pair

    monkeypatch.setattr("gluon_mgpu.cli.train_resnet18.ArrayLoader", Interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        options = ["--batch-size", "8", "--epochs", "3", "--devices", "cpu*1"]
        result = invoke(*TRAIN, *options, "--data-dir", data_dir, "--output", tmp_path / "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert "Interrupted. fit: stopped in epoch 2 after step 7" in result.output
    assert "Traceback" not in result.output
    assert str(tmp_path / "out") in result.output
    assert json.loads((tmp_path / "out" / "last" / "progress.json").read_text())["epoch"] == 2
    history = json.loads((tmp_path / "out" / "history.json").read_text())
    assert (history["stopped"], len(history["epochs"])) == ("interrupted", 1)
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(PNG)


def ended(error):
    """The result of a command that raises an error."""

    @click.command()
    def command():
        raise error

    return CliRunner().invoke(CommandGroup("group", commands={"command": command}), ["command"])


@pytest.mark.parametrize(("end", "code", "title"), [(Terminated, 143, "Terminated"), (Requeue, 85, "Saved, to be started again")])
def test_a_command_that_a_signal_ends_says_where_and_exits_with_its_code(end, code, title):
    result = ended(end("fit: stopped in epoch 2"))
    assert (result.exit_code, result.output) == (code, f"{title}. fit: stopped in epoch 2\n")


def test_a_broken_pipe_is_not_an_error_of_the_command():
    """It is an OSError; but an error message would have no reader."""
    result = ended(BrokenPipeError())
    assert isinstance(result.exception, BrokenPipeError) and result.output == ""
    missing = ended(FileNotFoundError(2, "No such file or directory", "x")).output
    assert missing == "Error: [Errno 2] No such file or directory: 'x'\n"


def test_python_m_is_the_command_and_reports_errors_without_a_traceback(tmp_path, monkeypatch, capfd):
    arguments = [*TRAIN, "--devices", "cpu:0,cpu:0", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["gluon-mgpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gluon_mgpu", run_name="__main__", alter_sys=True)
    assert ended.value.code == 1
    out, said = capfd.readouterr()
    assert out == ""
    (line,) = said.splitlines()
    assert line.startswith("Error: use_devices: got cpu(0) twice in [cpu(0), cpu(0)]; expected different devices.")


@pytest.mark.parametrize("there, taken", [(["best", "last"], "best"), (["last"], "last"), (["."], ""), ([], "")])
def test_the_folder_of_a_run_stands_for_its_best_checkpoint(tmp_path, capsys, there, taken):
    for name in there:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "net.params").write_bytes(b"")
    assert best_of(tmp_path, ["net.params", "manifest.json"]) == tmp_path / taken
    said = capsys.readouterr().err
    assert (f"reading {tmp_path / taken}." in said) if taken else said == ""


def test_predict_and_translate_read_the_best_of_a_run(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "net.params").write_bytes(b"damaged")
    (tmp_path / "best" / "model.json").write_text("damaged")
    for command in (["predict", "resnet18", "--checkpoint"], ["translate", "--model"]):
        result = invoke(*command, tmp_path, "--devices", "cpu")
        assert result.exit_code == 1 and f"reading {tmp_path / 'best'}." in result.output
        assert str(tmp_path / "best") in result.output.splitlines()[-1]


def test_a_reader_that_leaves_ends_a_command_without_a_word():
    """It ended with `Error: [Errno 32] Broken pipe`, or with what Python prints at its end."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "gluon_mgpu", "devices"], stdout=write, stderr=subprocess.PIPE, timeout=240)
    os.close(write)
    assert done.returncode in (0, 1) and done.stderr == b""


@pytest.mark.parametrize("words", [["devices"], ["devices", "--json"], ["devices", "--help"]], ids=" ".join)
def test_output_to_a_full_disk_fails_in_one_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gluon_mgpu", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stderr == "Error: [Errno 28] No space left on device\n"


def test_without_an_output_a_command_ends_well():
    command = f"exec {sys.executable} -m gluon_mgpu devices >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", ["\u0661\u0662", "1_0", "2.0"])
def test_counts_are_ascii_digits(number):
    assert invoke("launch", "-n", number, "train.py").exit_code == 2


def test_a_removed_current_folder_is_told(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "current folder that was removed" in fail("launch", "-n", "2", tmp_path / "train.py")


def test_tables_show_devices_as_text(capsys):
    print_table("gpu:free*2", ["spec"], [["gpu:free*2"]])
    assert capsys.readouterr().out.count("gpu:free*2") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "resnet18", "--devices", "cpu*20000"],
        ["predict", "resnet18", "--devices", "9" * 30],
        ["predict", "resnet18", "--data-dir", "x" * 5000],
    ],
)
def test_options_out_of_all_bounds_are_refused(arguments):
    assert len(fail(*arguments)) <= 620
