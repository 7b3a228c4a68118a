"""The checkpoints of a run: how many stay, in which order they are found, and what is written in a thread."""

import shutil
import signal
import threading

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.checkpoint.rotation import CheckpointRotation, find_checkpoints, step_of
from gluon_mgpu.checkpoint.snapshot import take_snapshot
from gluon_mgpu.errors import StateError
from mxnet.gluon import nn


def make_run(value=1.0):
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(value), ctx=[mx.cpu(0), mx.cpu(1)])
    return net, mgpu.Trainer(net, "sgd", {"learning_rate": 1.0, "momentum": 0.5})


def snapshot_at(step):
    return take_snapshot(*make_run(step), {"step": step}, place={"step": step})


def put(rotation, *steps, best=()):
    for step in steps:
        rotation.put(snapshot_at(step).write, step, is_best=step in best)
    rotation.wait()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def value_in(folder):
    net, trainer = make_run(0.0)
    step = mgpu.load_checkpoint(net, folder, trainer)["step"]
    assert net.weight.data(mx.cpu(1)).asnumpy().item() == step
    return step


@pytest.mark.parametrize("keep", [1, 2, 4, 7])
def test_as_many_are_kept_as_were_asked_for(tmp_path, keep):
    for step in range(1, 10):
        put(CheckpointRotation(tmp_path, keep=keep), step)
        assert names(tmp_path) == ["last", *(f"step-{one:08d}" for one in range(max(1, step - keep + 1), step))]
    put(CheckpointRotation(tmp_path, keep=2), 10)
    assert names(tmp_path) == ["last", "step-00000009"]


def test_going_back_leaves_the_later_ones_behind(tmp_path):
    """At the first save, and not before; of the same step, the new one counts."""
    put(CheckpointRotation(tmp_path, keep=9), 10, 20, 30, 40)
    rotation = CheckpointRotation(tmp_path, keep=9)
    rotation.begin(tmp_path / "step-00000020")
    assert names(tmp_path) == ["last", "step-00000010", "step-00000020", "step-00000030"]
    put(rotation, 25)
    assert names(tmp_path) == ["last", "step-00000010", "step-00000020"]
    put(rotation, 25, 26)
    assert names(tmp_path) == ["last", "step-00000010", "step-00000020", "step-00000025"]


def test_a_run_that_replaces_another_one_says_so(tmp_path, caplog):
    rotation = CheckpointRotation(tmp_path)
    rotation.begin(None)
    put(rotation, 1)
    rotation.begin(tmp_path / "last")
    assert not caplog.messages
    rotation.begin(None)
    assert str(tmp_path) in caplog.messages[0]


def test_a_run_of_another_name_is_not_mixed_in(tmp_path):
    put(CheckpointRotation(tmp_path / "run", keep=2), 1, 2)
    before = names(tmp_path / "run")
    for resumed in (None, tmp_path / "elsewhere" / "last"):
        with pytest.raises(StateError, match="step-00000001"):
            CheckpointRotation(tmp_path / "run", keep=2).begin(resumed)
    assert names(tmp_path / "run") == before


def test_what_a_killed_program_left_is_tidied_up(tmp_path):
    put(CheckpointRotation(tmp_path, keep=2), 1, 2)
    (tmp_path / "last").rename(tmp_path / ".last.new")  # between two renames
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000000.old")
    (tmp_path / ".best.new").mkdir()
    (tmp_path / ".mine").write_text("")
    assert value_in(tmp_path / "last") == 2
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [2, 1]
    CheckpointRotation(tmp_path).begin(tmp_path / "last")
    assert names(tmp_path) == [".mine", "last", "step-00000001"]
    assert value_in(tmp_path / "last") == 2


def test_a_best_one_that_is_damaged_does_not_replace_the_last_one(tmp_path):
    """A run that resumed from `last` copied a later `best` over it, whatever its files were."""
    put(CheckpointRotation(tmp_path), 1)
    shutil.copytree(tmp_path / "last", tmp_path / "good")
    put(CheckpointRotation(tmp_path), 2, best=[2])
    shutil.rmtree(tmp_path / "last")
    (tmp_path / "good").rename(tmp_path / "last")
    (tmp_path / "best" / "net.params").write_text("")
    CheckpointRotation(tmp_path).begin(tmp_path / "last")
    assert value_in(tmp_path / "last") == 1


def test_damage_to_the_last_one_does_not_reach_the_best(tmp_path):
    put(CheckpointRotation(tmp_path), 1, best=[1])
    path = tmp_path / "last" / "net.params"
    with open(path, "r+b") as file:
        file.truncate(10)
    assert value_in(tmp_path / "best") == 1
    with pytest.raises(StateError, match="damaged"):
        value_in(tmp_path / "last")


def test_a_thread_writes_and_the_next_save_waits_for_it(tmp_path):
    rotation, go = CheckpointRotation(tmp_path, background=True), threading.Event()
    first, second = snapshot_at(1), snapshot_at(2)
    writers = []

    def slow(folder):
        writers.append(threading.current_thread())
        assert go.wait(240)
        first.write(folder)

    rotation.put(slow, 1)  # returns
    assert "last" not in names(tmp_path)
    threading.Timer(0.2, go.set).start()
    rotation.put(second.write, 2)
    assert go.is_set()
    rotation.wait()
    assert value_in(tmp_path / "last") == 2
    assert writers[0] is not threading.main_thread() and not writers[0].daemon


def test_a_wait_that_ctrl_c_interrupts_ends_when_all_is_written(tmp_path):
    rotation, go = CheckpointRotation(tmp_path, background=True), threading.Event()
    snapshot = snapshot_at(1)
    rotation.put(lambda folder: (go.wait(240), snapshot.write(folder)), 1)
    threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    threading.Timer(0.4, go.set).start()
    with pytest.raises(KeyboardInterrupt):
        rotation.wait()
    assert value_in(tmp_path / "last") == 1


@pytest.mark.parametrize("where", ["put", "wait"])
def test_an_error_of_the_thread_is_raised_once(tmp_path, where):
    rotation = CheckpointRotation(tmp_path, background=True)
    put(rotation, 1)

    def failing(folder):
        (folder / "half").write_text("")
        raise OSError("disk full")

    rotation.put(failing, 2)
    with pytest.raises(OSError, match="disk full"):
        rotation.wait() if where == "wait" else rotation.put(snapshot_at(3).write, 3)
    assert names(tmp_path) == ["last"] and value_in(tmp_path / "last") == 1
    rotation.wait()
    put(rotation, 4)
    assert value_in(tmp_path / "last") == 4
