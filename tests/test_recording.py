"""What TensorBoard, Weights & Biases and MLflow get of a run."""

import re
import struct
import sys
import types
from pathlib import Path

import gluon_mgpu as mgpu
import mxnet as mx
import pytest

from .test_cli import data_dir  # noqa: F401  a fixture
from .test_fit import LOSS, batches_of, make_net, make_trainer, three_clouds, train

DOCS = Path(__file__).parent.parent / "docs" / "callbacks.md"


class FakeWriter:
    """tensorboardX.SummaryWriter as far as it is called."""

    made = []

    def __init__(self, log_dir, purge_step=None):
        self.log_dir, self.purge_step, self.scalars, self.calls = log_dir, purge_step, [], []
        self.made.append(self)

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def writers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=FakeWriter))
    monkeypatch.setattr(FakeWriter, "made", [])
    return FakeWriter.made


def test_a_resumed_run_continues_the_curves(writers, tmp_path):
    data, ctx = batches_of(*three_clouds()), [mx.cpu(0), mx.cpu(1)]
    saves = [mgpu.Checkpoint(tmp_path / "run", monitor=None), mgpu.TensorBoard(tmp_path / "board")]
    for epochs in (1, 2):
        net = make_net(ctx)
        mgpu.fit(net, LOSS, make_trainer(net), data, epochs=epochs, callbacks=saves, resume="auto")
    assert [writer.purge_step for writer in writers] == [None, len(data) + 1]
    assert {step for _, _, step in writers[1].scalars} == {2 * len(data)}


def test_only_the_first_process_writes(writers, monkeypatch, tmp_path):
    monkeypatch.setattr("gluon_mgpu.loop.tensorboard.this_process", lambda: types.SimpleNamespace(rank=1))
    logged = []
    callbacks = [mgpu.TensorBoard(tmp_path), mgpu.loop.LogRows(lambda row, step: logged.append(row))]
    train([mx.cpu()], callbacks=callbacks)
    assert (writers, logged) == ([], [])


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(mgpu.errors.MissingExtraError, match="extra 'tensorboard'"):
        mgpu.TensorBoard(tmp_path)


def events(folder):
    """The scalars in event files: records of a length, its checksum, a message and its checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            found += [(value.tag, value.simple_value, event.step) for value in event.summary.value]
            content = content[16 + length :]
    return found


def test_the_files_hold_the_history(tmp_path):
    pytest.importorskip("tensorboardX")
    data = batches_of(*three_clouds())
    history = train([mx.cpu()], data, epochs=2, callbacks=[mgpu.TensorBoard(tmp_path)])
    found = events(tmp_path)
    for tag, column in (("loss/train", "train_loss"), ("accuracy/train", "train_accuracy"), ("learning_rate", "learning_rate")):
        values = [(value, step) for one, value, step in found if one == tag]
        assert values == [(pytest.approx(row[column]), step * len(data)) for step, row in enumerate(history.rows, 1)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_programs_of_the_docs(name, monkeypatch):
    logged = []

    class Run:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def log(self, row, step):
            logged.append((step, row))

        def finish(self):
            pass

    run = Run()
    fakes = {
        "wandb": types.SimpleNamespace(init=lambda **options: run),
        "mlflow": types.SimpleNamespace(start_run=lambda **options: run, log_params=dict, log_metrics=run.log),
    }
    monkeypatch.setitem(sys.modules, name, fakes[name])
    (program,) = re.findall(rf"^```text\n(import {name}\n.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    data, net = batches_of(*three_clouds()), make_net([mx.cpu()])
    names = {"mgpu": mgpu, "net": net, "loss": LOSS, "trainer": make_trainer(net), "train_iter": data, "test_iter": data[:1]}
    exec(program, names)
    assert [step for step, _ in logged] == [len(data) * epoch for epoch in range(1, 9)]
    assert all(isinstance(value, (int, float)) for _, row in logged for value in row.values()) and "test_loss" in logged[0][1]
