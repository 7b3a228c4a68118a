"""The command gluon-mgpu: what it prints and writes, and how it ends."""

import csv
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from functools import partial

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
from .versions import nd

PNG = b"\x89PNG\r\n\x1a\n"
TRAIN = ["train", "resnet18"]


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="gluon-mgpu")


def run(*arguments, exit_code=0):
    """The output of a command that ends with this code."""
    result = invoke(*arguments)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


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
def pressed(monkeypatch):
    """Ctrl-C, in the training data of a program, before this batch of this epoch; each once."""
    moments = []

    def interrupting(kind):
        class Interrupting(kind):
            def __iter__(self):
                for number, pair in enumerate(super().__iter__(), 1):
                    if self.shuffle and (self.epoch, number) in moments:
                        moments.remove((self.epoch, number))
                        signal.raise_signal(signal.SIGINT)
                    yield pair

        return Interrupting

    for program, kind in {"resnet18": mgpu.data.ArrayLoader, "seq2seq": mgpu.data.PairLoader}.items():
        monkeypatch.setattr(f"gluon_mgpu.cli.train_{program}.{kind.__name__}", interrupting(kind))
    return moments


@pytest.fixture
def use_network(monkeypatch):
    """A function that puts another network in the place of ResNet-18."""
    return partial(monkeypatch.setattr, "gluon_mgpu.cli.train_resnet18.resnet18")


@pytest.fixture
def tiny(use_network):
    use_network(tiny_network)


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
def test_help_explains_every_option(path, command):
    output = run(*path, "--help")
    assert output.startswith(f"Usage: {' '.join(('gluon-mgpu', *path))} ")
    for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
        assert option.help and any(flag in output for flag in option.opts) == (not option.hidden)


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
    + [[*TRAIN, "--micro-steps", str(2**31 - 1)], [*TRAIN, "--micro-batches", str(2**31 - 1)]]
    + [["train", "seq2seq", "--num-layers", str(2**31 - 1)]]
    + [["monitor", "--interval", "\u0661"], [*TRAIN, "--epochs", "1_0"], [*TRAIN, "--epochs", "\u0661"]],
    ids=" ".join,
)
def test_wrong_usage_is_reported(arguments):
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


def test_devices_are_json():
    cpu, *others = json.loads(run("devices", "--json"))
    assert (cpu["name"], cpu["usable"], cpu["reason"]) == ("cpu(0)", True, "")
    assert 2**28 < cpu["memory_bytes"] < 2**50
    assert all(device["usable"] or device["reason"] for device in others)


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


def test_training_learns(quick, data_dir, tmp_path):
    lines, rows = train_tiny(data_dir, tmp_path / "out", "--epochs", "6", "--lr", "0.2")
    assert rows[-1]["test_accuracy"] == 1.0
    assert lines[-1].startswith("test accuracy 100.00 %, ")
    assert lines[-1].endswith(" s/epoch on cpu(0), cpu(1)")
    assert len(rows) == 6


MINE = """
import gluon_mgpu as mgpu
from mxnet import gluon

def make(batch_size, ctx):
    digits = mgpu.data.load_digits()
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Flatten(), gluon.nn.Dense(10))
    train = mgpu.data.ArrayLoader(digits.train_images, digits.train_labels, batch_size)
    test = mgpu.data.ArrayLoader(digits.test_images, digits.test_labels, batch_size)
    return net, gluon.loss.SoftmaxCrossEntropyLoss(), train, test

def initialised(batch_size, ctx):
    net, loss, train, _ = make(batch_size, ctx)
    net.initialize(ctx=ctx[0])
    return net, loss, list(train)

def wrong(batch_size, ctx):
    return 3
"""


@pytest.fixture
def mine(tmp_path, without_pictures):
    """A file with functions that return what to train."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)

    def train(function, *options):
        return ["train", f"{path}:{function}", "--devices", "cpu*2", "--output", tmp_path / "out", *options]

    return train


def test_a_function_of_yours_trains(mine, tmp_path):
    output = run(*mine("make", "--epochs", "2", "--batch-size", "32", "--limit-batches", "6", "--evaluate-every", "4"))
    history = json.loads((tmp_path / "out" / "history.json").read_text())
    assert len(history["epochs"]) == 2 and [row["step"] for row in history["evaluations"]] == [4, 8]
    assert history["epochs"][-1]["train_loss"] < history["epochs"][0]["train_loss"]
    assert (tmp_path / "out" / "best").is_dir()
    assert "step 4  test accuracy" in output
    assert "resumes from" in run(*mine("make", "--epochs", "3", "--batch-size", "32", "--limit-batches", "6", "--resume", "auto"))


def test_a_function_may_initialise_and_need_not_have_a_test_set(mine, tmp_path):
    output = run(*mine("initialised", "--max-steps", "5"))
    assert "stopped: max_steps=5" in output and "history.json and last in" in output
    assert "train accuracy" in output.splitlines()[-1]


@pytest.mark.mxnet1("Pipeline")
@pytest.mark.parametrize("stages", ["2", "4"])
def test_a_function_trains_in_stages(mine, stages, tmp_path):
    layers = "gluon.nn.Dense(8), gluon.nn.Dense(8), gluon.nn.Dense(8),"
    (tmp_path / "mine.py").write_text(MINE.replace("gluon.nn.Flatten(),", layers))
    assert f"pipeline of {stages} stages" in run(*mine("make", "--stages", stages, "--max-steps", "2"))


def test_wrong_functions_are_named(mine):
    for function, text in (("wrong", "got int from"), ("nothing", "expected a function nothing in")):
        result = invoke(*mine(function))
        assert result.exit_code == 1 and text in result.output and "Traceback" not in result.output


NOT_FUNCTIONS = {
    "nomodule:f": "got nomodule; expected a module that Python finds here",
    "mine.path.to:f": "got mine.path.to; expected a module that Python finds here",
    "data.bin:f": "got data.bin; expected a file that ends in .py",
    "folder.py:f": "folder.py; expected a file that exists",
    "folder:f": "got folder:f; expected a function f in folder",
    "binary.py:f": "binary.py: source code string cannot contain null bytes",
    "syntax.py:f": "'(' was never closed (syntax.py, line 1); expected a Python program",
    "syntax:f": "got syntax: '(' was never closed (syntax.py, line 1)",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current folder, with files that hold no function; the import path is restored, and the modules are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "nowhere")
    for name in ("fails", "syntax", "folder", "mine", "data"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    for name in ("folder", "folder.py"):
        (tmp_path / name).mkdir()
    for name in ("data.bin", "binary.py"):
        (tmp_path / name).write_bytes(b"\0\1\2")
    (tmp_path / "syntax.py").write_text("def f(\n")
    (tmp_path / "fails.py").write_text("import json\n\ndef f(batch_size, ctx):\n    json.loads('')\n\nopened = {}['mine']\n")
    return tmp_path


@pytest.mark.parametrize("reference", NOT_FUNCTIONS)
def test_what_is_no_function_is_named_in_one_line(reference, files):
    result = invoke("train", reference, "--devices", "cpu")
    assert (result.exit_code, len(result.output.splitlines())) == (1, 1)
    expected = NOT_FUNCTIONS[reference]
    if sys.version_info < (3, 11) and "null bytes" not in expected:  # whose words differ
        expected = expected.replace("'(' was never closed", "")
    assert result.output.startswith("Error: train: got ") and all(part in result.output for part in expected.split("; "))


@pytest.mark.parametrize("reference", ["fails.py:f", "fails:f", "late.py:f"])
def test_an_error_of_the_users_module_shows_its_own_frames(reference, files):
    text = (files / "fails.py").read_text()
    (files / "late.py").write_text(text.replace("opened", "#"))  # fails when it is called
    result = invoke("train", reference, "--devices", "cpu")
    shown = result.output.splitlines()
    assert result.exit_code == 1
    assert shown[0] == "Traceback (most recent call last):" and shown[1].startswith(
        f'  File "{files}/{reference.split(":")[0][:4]}'
    )
    assert shown[-1].startswith("KeyError: 'mine'" if "fails" in reference else "json.decoder.JSONDecodeError: ")
    assert "gluon_mgpu" not in "".join(shown)


@pytest.mark.parametrize(
    "error, expected",
    [
        (
            mx.MXNetError("Traceback (most recent call last):\n  File x\nMXNetError: Failed to allocate CPU Memory"),
            "no memory left",
        ),
        (mx.MXNetError("MXNetError: Size of tensor you are trying to allocate is larger than 2^31 elements."), "smaller batch"),
        (MemoryError("Unable to allocate 8.00 EiB for an array with shape (9,)"), "no memory left"),
    ],
)
def test_a_lack_of_memory_is_one_line(error, expected):
    result = ended(error)
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1
    assert result.output.startswith("Error: command: got ") and expected in result.output and "Traceback" not in result.output


def test_the_seed_decides_everything(quick, data_dir, tmp_path):
    _, first = train_tiny(data_dir, tmp_path / "1", "--epochs", "1", "--seed", "5")
    mx.random.seed(77)
    np.random.seed(77)
    _, again = train_tiny(data_dir, tmp_path / "2", "--epochs", "1", "--seed", "5")
    _, other = train_tiny(data_dir, tmp_path / "3", "--epochs", "1", "--seed", "6")
    assert losses(first) == losses(again) != losses(other)


def test_digits_are_the_default(quick, tmp_path):
    output = run(*TRAIN, "--epochs", "1", "--devices", "cpu*1", "--output", tmp_path)
    assert output.startswith("digits: 1438 images to train on, 359 to test, 10 classes, on cpu(0)\n")


@pytest.mark.parametrize("seed", [0, 3])
def test_predict_takes_the_test_images_of_its_seed(data_dir, tmp_path, seed):
    net = mgpu.models.resnet18(2)
    net.initialize(mx.init.Xavier())
    net(nd.ones((1, 1, 8, 8)))
    mgpu.save_checkpoint(net, tmp_path / "run")
    output = tmp_path / "new" / "predictions.csv"
    arguments = ["--checkpoint", tmp_path / "run", "--data-dir", data_dir, "--devices", "cpu*1", "--output", output]
    run("predict", "resnet18", *arguments, *(["--seed", seed] if seed else []))
    images = mgpu.data.load_idx_folder(data_dir, seed=seed)
    with open(output, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["label"]) for row in rows] == images.test_labels.tolist()
    odds = np.exp(net(nd.array(images.test_images)).asnumpy())
    odds /= odds.sum(axis=1, keepdims=True)
    assert [int(row["class"]) for row in rows] == odds.argmax(axis=1).tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(odds.max(axis=1), abs=2e-4)


@pytest.mark.parametrize("num_classes", [1, 2, 4])
def test_predict_knows_the_classes_of_the_network(data_dir, tmp_path, num_classes):
    """The images need not show all of them, and must not show others."""
    net = mgpu.models.resnet18(num_classes)
    net.initialize()
    net(nd.ones((1, 1, 8, 8)))
    mgpu.save_checkpoint(net, tmp_path / "run")
    data = ["--data-dir", data_dir, "--devices", "cpu*1", "--output", tmp_path / "found.csv"]
    if num_classes == 2:
        net[-1].weight.data()[:] = 3e38  # its sums are infinite
        mgpu.save_checkpoint(net, tmp_path / "bad")
        result = invoke("predict", "resnet18", "--checkpoint", tmp_path / "bad", *data)
        assert "not finite" in result.output and not (tmp_path / "found.csv").exists()
    result = invoke("predict", "resnet18", "--checkpoint", tmp_path / "run", *data)
    assert result.exit_code == (num_classes == 1), result.output
    assert ("got the label 1" if num_classes == 1 else "of 8 right, ") in result.output


@pytest.mark.parametrize("kind", [TypeError, ImportError])
def test_another_error_after_ctrl_c_ends_the_command_with_130(kind):
    """MXNet's assignments raise a TypeError instead, and NumPy's import an ImportError of another."""
    inner, error = kind("does not support assignment"), kind("another")
    inner.__cause__ = inner.__context__ = KeyboardInterrupt()
    error.__cause__ = error.__context__ = inner
    result = ended(error)
    assert (result.exit_code, result.output) == (130, "\nInterrupted.\n")


def test_ctrl_c_saves_and_ends_with_130(tiny, data_dir, tmp_path, pressed):
    pressed.append((2, 3))
    options = ["--batch-size", "8", "--epochs", "3", "--devices", "cpu*1"]
    result = invoke(*TRAIN, *options, "--data-dir", data_dir, "--output", tmp_path / "out")
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
    assert missing.startswith("Error: command: got x (No such file or directory); expected a readable or writable file.\n")


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


@pytest.mark.parametrize(
    "command, error, told",
    [
        ("train resnet18", "AttributeError('no np.long')", "got no np.long, from a package .*"),
        ("train seq2seq", "OSError('libgfortran.so.3: cannot open')", "got libgfortran.so.3: cannot open; expected the system.*"),
        ("monitor --count 1 --interval 0.1", "OSError('libcuda')", ""),
    ],
)
def test_what_mxnet_lacks_is_one_line_and_no_matter_to_the_monitor(tmp_path, monkeypatch, command, error, told):
    (tmp_path / "mxnet.py").write_text(f"raise {error}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    arguments = [sys.executable, "-m", "gluon_mgpu", *command.split()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    if told:
        assert re.match(f"Error: import gluon_mgpu: {told} Run gluon-mgpu doctor, which reports what is missing.\n$", done.stderr)
    else:
        assert json.loads(done.stdout)["host"]["num_cores"] == os.cpu_count()


@pytest.mark.parametrize("there, taken", [(["best", "last"], "best"), (["last"], "last"), (["."], ""), ([], "")])
def test_the_folder_of_a_run_stands_for_its_best_checkpoint(tmp_path, capsys, there, taken):
    for name in there:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "net.params").write_bytes(b"")
    assert best_of(tmp_path) == tmp_path / taken
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
    done = subprocess.run(
        [sys.executable, "-m", "gluon_mgpu", "explain", "numpy-2"], stdout=write, stderr=subprocess.PIPE, timeout=240
    )
    os.close(write)
    assert done.returncode in (0, 1) and done.stderr == b""


@pytest.mark.parametrize("words", [["devices"], ["devices", "--help"]], ids=" ".join)
def test_output_to_a_full_disk_fails_in_one_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gluon_mgpu", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 1
    assert re.fullmatch(
        r"Error: .*got an output \(No space left on device\); expected a (readable or )?writable file\..*\n", done.stderr
    )


def test_without_an_output_a_command_ends_well():
    command = f"exec {sys.executable} -m gluon_mgpu explain numpy-2 >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_tables_show_devices_as_text(capsys):
    print_table("gpu:free*2", ["spec"], [["gpu:free*2"]])
    assert capsys.readouterr().out.count("gpu:free*2") == 2


SIGNALLED = """
import os
class Lost:
    def __del__(self):  # which loses an exception
        os.kill(os.getpid(), int(os.environ["SIGNUM"]))
        self.number = 1
Lost()
raise ImportError("not ended")
"""


@pytest.mark.each_value
@pytest.mark.parametrize("module", ["numpy", "click", "mxnet"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("way", ["script", "module"])
def test_a_signal_while_modules_are_imported(tmp_path, module, signum, way):
    """It printed the traceback of an import."""
    (tmp_path / f"{module}.py").write_text(SIGNALLED)
    (tmp_path / "gluon-mgpu").write_text("from gluon_mgpu.cli.main import run\nrun()")
    command = [sys.executable, *([str(tmp_path / "gluon-mgpu")] if way == "script" else ["-m", "gluon_mgpu"])]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "SIGNUM": str(int(signum))}
    done = subprocess.run([*command, "predict", "resnet18"], env=environ, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (128 + signum, "\nInterrupted.\n")


def test_a_package_that_imports_this_one_keeps_its_signals(tmp_path):
    """While `python -m` imports it, its first argument is that of `python -m gluon_mgpu`."""
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("import sys, gluon_mgpu\nassert sys.argv[0] == '-m'")
    (tmp_path / "tool" / "__main__.py").write_text("import signal\nprint(*map(signal.getsignal, (2, 15)))")
    command = [sys.executable, "-m", "tool"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout == f"{signal.default_int_handler} {signal.SIG_DFL}\n", done.stderr
