"""What TensorBoard, Weights & Biases and MLflow get of a run."""

import re
import struct
import sys
import types
from pathlib import Path

import gluon_mgpu as mgpu
import mxnet as mx
import pytest

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
    FakeWriter.made = []
    return FakeWriter.made


def test_a_resumed_run_continues_the_curves(writers, tmp_path):
    data, ctx = batches_of(*three_clouds()), [mx.cpu(0), mx.cpu(1)]
    saves = [mgpu.Checkpoint(tmp_path / "run", monitor=None), mgpu.TensorBoard(tmp_path / "board")]
    for epochs in (1, 2):
        net = make_net(ctx)
        mgpu.fit(net, LOSS, make_trainer(net), data, epochs=epochs, callbacks=saves, resume="auto")
    assert [writer.purge_step for writer in writers] == [None, len(data) + 1]
    assert {step for _, _, step in writers[1].scalars} == {2 * len(data)}


def test_only_the_first_process_writes(writers, become, tmp_path):
    become(rank=1)
    train([mx.cpu()], callbacks=[mgpu.TensorBoard(tmp_path)])
    assert writers == []


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


def test_the_program_of_the_docs(monkeypatch):
    logged = []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: run))
    (program,) = re.findall(r"^```text\n(import wandb\n.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    data, net = batches_of(*three_clouds()), make_net([mx.cpu()])
    names = {"mgpu": mgpu, "net": net, "loss": LOSS, "trainer": make_trainer(net), "train_iter": data, "test_iter": data[:1]}
    exec(program, names)
    assert logged.pop() == "finished"
    assert [step for step, _ in logged] == [len(data) * epoch for epoch in range(1, 9)]
    assert all("test_loss" in row for _, row in logged)
