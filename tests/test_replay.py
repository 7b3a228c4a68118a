"""gluon-mgpu replay: a step of a run is computed again, and compared with the run's checkpoint."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint.rotation import find_checkpoints, step_of
from gluon_mgpu.cli import replay as module
from gluon_mgpu.cli._command import COMMAND, TrainingCommand, read_command

from .conftest import assert_house_style
from .test_cli import data_dir  # noqa: F401  a fixture
from .test_cli_resume import programs, run, small  # noqa: F401  a fixture
from .test_train_seq2seq import tsv, without_sacrebleu  # noqa: F401  fixtures

pytestmark = pytest.mark.usefixtures("small", "without_pictures")
OFTEN = ["--checkpoint-every", "1", "--keep", "100"]


def steps_in(out):
    return sorted({step_of(path) for path in find_checkpoints(out)})


def files_in(out):
    """Every file with its content and time."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def trained(request, tmp_path):
    def train(name, *options, folder="run", devices="cpu:2"):
        words = [*programs(request)[name], "--epochs", "2", "--devices", devices, *OFTEN]
        run(*words, "--output", tmp_path / folder, *options)
        return tmp_path / folder

    return train


def replay(out, step, *options, exit_code=0):
    before = files_in(out)
    lines = run("replay", out, "--step", step, *options, exit_code=exit_code).splitlines()
    assert files_in(out) == before, "the run was changed"
    return lines


@pytest.mark.parametrize("name", ["resnet18", pytest.param("seq2seq", marks=pytest.mark.exhaustive)])
def test_virtual_shards_give_the_same_bits_on_other_devices(name, trained):
    out = trained(name, "--virtual-shards", "4")
    steps = steps_in(out)
    for step, devices in [(steps[1], "cpu:4"), (steps[-1], "cpu:1")]:  # within an epoch, and at the end of one
        lines = replay(out, step, "--devices", devices)
        assert lines[-1].startswith(f"step {step} has the same bits as {out}")
        table = [line.split("│") for line in lines if line.startswith("│")]
        counts = {cells[1].strip(): int(cells[2]) for cells in table}
        assert counts["weights"] > 100 and counts["optimizer states"] >= 4
        assert counts["history"] > 0 if step == steps[-1] else counts["sums of the epoch"] > 0


@pytest.mark.parametrize("name", [pytest.param("resnet18", marks=pytest.mark.exhaustive), "seq2seq"])
def test_the_same_devices_give_the_same_bits(name, trained):
    out = trained(name)
    step = steps_in(out)[2]
    assert replay(out, step)[-1].startswith(f"step {step} has the same bits as {out}")


def test_other_devices_agree_without_virtual_shards(trained, monkeypatch):
    monkeypatch.setattr("gluon_mgpu.cli.train.resnet18", without_dropout)
    out = trained("resnet18")
    step = steps_in(out)[-2]
    (*_, last) = replay(out, step, "--devices", "cpu:4")
    begins = f"step {step} agrees with", f"step {step} has the same bits as"  # some processors add in the same order
    assert last.startswith(begins[0]) and last.endswith("allowed 1e-05") or last.startswith(begins[1])


def without_dropout(num_classes):
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Flatten(), mx.gluon.nn.Dense(8, activation="relu"), mx.gluon.nn.Dense(num_classes))
    return net


@pytest.mark.parametrize("options", [["--virtual-shards", "2"], []], ids=["bits", "difference"])
def test_another_checkpoint_is_found_out(options, trained):
    out, other = trained("resnet18", *options), trained("resnet18", *options, "--clip-value", "1e-3", folder="other")
    name = f"step-{steps_in(out)[1]:08d}"
    shutil.rmtree(out / name)
    shutil.copytree(other / name, out / name)
    lines = replay(out, steps_in(out)[1], exit_code=1)
    assert (" has other bits than " if options else " does not agree with ") in lines[-1]
    row = next(line.split("│") for line in lines if line.startswith("│ weights"))
    assert int(row[3]) > 0 and float(row[4]) > 1e-5 and row[5].strip().endswith(("weight", "bias"))


def test_steps_without_checkpoints_are_reported(trained, tmp_path):
    out = trained("resnet18", "--keep", "2")
    first, *more = steps_in(out)
    assert len(more) == 2  # best, and two of the last
    for step in (first, more[-1] + 1, 1000):
        output = " ".join(replay(out, step, exit_code=1))
        assert f"checkpoints at the steps {first}, {more[0]}, {more[1]}; expected one of {more[0]}, {more[1]}" in output
        assert "--checkpoint-every 1 --keep 100" in output
    for path in (out / "best", *out.glob("step-*")):
        shutil.rmtree(path)
    assert "expected two checkpoints or more" in " ".join(replay(out, more[-1], exit_code=1))


def test_a_run_that_ends_before_the_step_is_reported(trained, monkeypatch):
    out = trained("resnet18")
    monkeypatch.setattr(module.End, "_end", lambda self, state: None)
    *_, step = steps_in(out)
    output = " ".join(replay(out, step, exit_code=1))
    assert f"got a run that ended after step {step}; expected one that reaches step {step}" in output


def test_other_options_than_the_checkpoints_are_reported(trained):
    out = trained("resnet18")
    content = json.loads((out / COMMAND).read_text())
    content["arguments"] += ["--lr", "0.01"]
    (out / COMMAND).write_text(json.dumps(content))
    assert "expected the same optimizer and schedule" in " ".join(replay(out, steps_in(out)[-1], exit_code=1))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_job_of_two_processes_is_replayed_in_one(request, tmp_path):
    words = [*programs(request)["seq2seq"], "--epochs", "1", "--devices", "cpu:1", "--virtual-shards", "4", *OFTEN]
    launch = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", "2", "--log-dir", tmp_path / "logs", "gluon-mgpu"]
    command = [str(word) for word in [*launch, *words, "--output", tmp_path / "run"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    step = steps_in(tmp_path / "run")[1]
    assert read_command(tmp_path / "run", "replay").num_processes == 2
    assert " has the same bits as " in replay(tmp_path / "run", step)[-1]
    assert " has the same bits as " in replay(tmp_path / "run", step, "--devices", "cpu:1")[-1]


def test_the_command_is_kept(trained, tmp_path, request):
    out = trained("resnet18", "--seed", "3", "--virtual-shards", "2")
    command = read_command(out, "replay")
    assert command.program == "resnet18" and command.devices == ["cpu(0)", "cpu(1)"]
    assert command.folder == os.getcwd() and command.num_processes == 1
    assert command.arguments[-4:] == ["--seed", "3", "--virtual-shards", "2"]
    assert [path.name for path in out.iterdir() if path.name.startswith(".command")] == []


@pytest.mark.parametrize(
    "change, told",
    [
        (None, "whose command.json cannot be read (No such file or directory); expected the folder of a run"),
        ("{", "which is damaged"),
        ({"program": "rm"}, 'with program = "rm"; expected'),
        ({"arguments": "--epochs"}, "with arguments ="),
        ({"more": 1}, "with more = 1; expected no keys but"),
    ],
    ids=str,
)
def test_invalid_commands_are_refused(change, told, tmp_path):
    content = {"format": "gluon_mgpu command", "version": 1, "program": "resnet18", "arguments": [], "folder": "/"}
    content.update(devices=["cpu(0)"], num_processes=1)
    if isinstance(change, dict):
        content.update(change)
    if change is not None:
        (tmp_path / COMMAND).write_text(change if isinstance(change, str) else json.dumps(content))
    with pytest.raises(mgpu.errors.StateError) as error:
        read_command(tmp_path, "replay")
    assert told in str(error.value)
    assert_house_style(error.value)


def test_relative_paths_are_those_of_the_run(request, tmp_path, monkeypatch):
    images = request.getfixturevalue("data_dir")
    monkeypatch.chdir(images.parent)
    words = ["train", "resnet18", "--data-dir", images.name, "--batch-size", "8", "--devices", "cpu:1", "--epochs", "2"]
    run(*words, "--output", tmp_path / "run", *OFTEN)
    monkeypatch.chdir(tmp_path)
    assert "has the same bits" in run("replay", "run", "--step", steps_in(tmp_path / "run")[1])


def test_ctrl_c_stops_it(trained, monkeypatch):
    out = trained("resnet18")
    monkeypatch.setattr(module.End, "on_batch_end", lambda self, state: signal.raise_signal(signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        output = " ".join(replay(out, steps_in(out)[-1], exit_code=130))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert f"replay: stopped before step {steps_in(out)[-1]}; {out} was not changed" in output


@pytest.mark.parametrize("devices, spec", [(["cpu(0)"], "cpu*2"), (["gpu(0)", "gpu(1)"], "gpu:0-3")])
def test_a_job_is_replayed_in_one_process(devices, spec):
    assert module._of_one_process(TrainingCommand("resnet18", [], "/", devices, 2)) == spec


@pytest.mark.parametrize(
    "mine, theirs, gap",
    [
        ([1.0, 2.0], [1.0, 2.5], (2, 1, 0.5)),
        ([0.0], [-0.0], (1, 1, 0.0)),
        ([np.nan], [np.nan], (1, 0, 0.0)),
        ([np.nan], [1.0], (1, 1, np.inf)),
        ([1.0], [1.0, 1.0], (2, 2, np.inf)),
        ([1.0], None, (1, 1, np.inf)),
    ],
)
def test_bits_and_differences_are_counted(mine, theirs, gap):
    assert module._gap(*(None if one is None else np.float32(one) for one in (mine, theirs))) == gap
