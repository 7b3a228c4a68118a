"""Contract: a run that is killed at any moment of saving resumes, and ends with the `last` and `best` of an undisturbed one.

`python scripts/faults.py images` takes random moments of random scenarios.
"""

import os
import shutil
from itertools import count

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint.replace_folder import recover_path
from gluon_mgpu.errors import SaveError, StateError, TrainerError
from gluon_mgpu.models.seq2seq.translator import load_translator
from mxnet.gluon import nn

from .conftest import initialized
from .test_folders import killed_at, names
from .test_translator import made as made_translator

CTX = [mx.cpu(0), mx.cpu(1)]


class Scripted(mgpu.Callback):
    """A column of the history that rises until an epoch, and then falls."""

    def __init__(self, best):
        self.best = best

    def on_epoch_end(self, state):
        state.history.rows[-1]["score"] = float(-abs(state.epoch - self.best))


def fit(folder, *, best=2, epochs=3, keep=1, resume="auto"):
    mx.random.seed(1)
    net = network()
    X, y = np.random.RandomState(0).rand(12, 4).astype("float32"), np.arange(12) % 2
    data = mgpu.data.ArrayLoader(X, y, 4, shuffle=True, seed=2)
    callbacks = [Scripted(best), mgpu.Checkpoint(folder, "score", mode="max", keep=keep)]
    loss, trainer = mx.gluon.loss.SoftmaxCrossEntropyLoss(), mgpu.Trainer(net, "adam", {"learning_rate": 0.05})
    return mgpu.fit(net, loss, trainer, data, epochs=epochs, metrics=(), callbacks=callbacks, resume=resume)


def network():
    return initialized(nn.Dense(2, in_units=4), CTX, mx.init.Xavier())


def bits(folder):
    return {name: [(folder / name / file).read_bytes() for file in ("net.params", "states.npz")] for name in ("best", "last")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    fit(folder)
    assert mgpu.load_checkpoint(network(), folder / "best")["epoch"] == 2
    return bits(folder)


def test_killed_at_any_moment_of_a_save_it_ends_with_the_same_checkpoints(tmp_path, monkeypatch, undisturbed, request):
    """Every moment, by default every other one, of the save after the second epoch, which is the best one."""
    fit(tmp_path / "first", epochs=1)
    for call in count(1, 1 if request.config.getoption("exhaustive") else 2):
        folder = tmp_path / str(call)
        shutil.copytree(tmp_path / "first", folder)
        killed = killed_at(monkeypatch, call, lambda folder=folder: fit(folder, epochs=2))
        fit(folder)
        assert (bits(folder), names(folder)) == (undisturbed, ["best", "last"]), call
        if not killed:
            break
    assert call > 20


@pytest.mark.parametrize("manifest", [b"", b'{"format": "gluon_mgpu ch', None])
def test_a_run_killed_in_its_first_checkpoint_begins_again(tmp_path, undisturbed, manifest):
    """It refused to start: the folder that was not finished was taken for a damaged checkpoint."""
    fit(tmp_path, epochs=1)
    shutil.rmtree(tmp_path / "best")
    (tmp_path / "last").rename(tmp_path / ".last.new")
    (tmp_path / ".last.new" / "manifest.json").unlink()
    if manifest is not None:
        (tmp_path / ".last.new" / "manifest.json").write_bytes(manifest)
    fit(tmp_path)
    assert bits(tmp_path) == undisturbed


def test_files_are_on_the_disk_before_the_manifest_and_the_name(tmp_path, calls_to):
    """Of checkpoints, their copies and translators: nothing is renamed that a power loss could empty."""
    synced = calls_to(os, "fsync", note=lambda name, number: os.fstat(number).st_ino)

    def check(name, source, target, **options):
        is_new = str(source).endswith(".new")
        files = list(type(tmp_path)(source).rglob("*")) if is_new else []
        assert bool(files) == is_new and {path.stat().st_ino for path in files} <= set(synced)
        return is_new

    by_os, by_path = calls_to(os, "rename", note=check), calls_to(type(tmp_path), "rename", note=check)
    fit(tmp_path / "run", epochs=1)
    made_translator().save(tmp_path / "model")
    assert any(by_os + by_path)


def test_a_translator_between_two_renames_is_found(tmp_path):
    translator = made_translator()
    translator.save(tmp_path / "model")
    options = translator.options
    (tmp_path / "model").rename(tmp_path / ".model.old")
    assert load_translator(tmp_path / "model").options == options
    made_translator(num_layers=2).save(tmp_path / "second")
    (tmp_path / "second").rename(tmp_path / ".model.new")
    assert load_translator(tmp_path / "model").options["num_layers"] == 2
    (tmp_path / ".model.new" / "checkpoint" / "manifest.json").write_text("")
    assert load_translator(tmp_path / "model").options == options
    made_translator(num_layers=2).save(tmp_path / "model")
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("name, target", [("last", "nowhere"), ("best", "folder"), ("last", "file")])
def test_a_link_is_refused_before_the_first_epoch(tmp_path, name, target):
    """A dangling one was a NotADirectoryError at the end of an epoch; one to a folder failed at every save."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(StateError, match=f"link to {target}"):
        fit(tmp_path, resume=None)
    assert (tmp_path / "file").read_text() == "mine" and list((tmp_path / "folder").iterdir()) == []


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["a link", "a dangling link", "a file", "a pipe"])
@pytest.mark.parametrize("name", [".last.new", ".best.new", ".last.old", ".last.gone1", ".step-00000003.new"])
def test_what_others_left_under_our_names_is_removed(tmp_path, undisturbed, name, kind):
    """A link `.last.new` in a run from elsewhere: the files behind it were overwritten. A file of this name ended all saving."""
    run, mine, other = tmp_path / "run", tmp_path / "mine", tmp_path / "run" / name
    fit(run, epochs=1)
    before = contents(shutil.copytree(run / "last", mine))
    if kind == "a file":
        other.write_text("")
    elif kind == "a pipe":
        os.mkfifo(other)
    else:
        other.symlink_to(mine if kind == "a link" else tmp_path / "nowhere")
    fit(run)
    assert (bits(run), names(run), contents(mine)) == (undisturbed, ["best", "last"], before)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", [".last.new", ".last.old"])
def test_a_link_is_not_recovered(tmp_path, undisturbed, name):
    """It was taken for the checkpoint of a killed program, and renamed to `last`."""
    run, mine = tmp_path / "run", tmp_path / "mine"
    fit(run, epochs=1)
    shutil.rmtree(run / "best")
    (run / "last").rename(mine)
    (run / name).symlink_to(mine)
    before = contents(mine)
    assert recover_path(run / "last") == run / "last"
    fit(run)
    assert (bits(run), contents(mine)) == (undisturbed, before)


@pytest.mark.parametrize("folder", ["/", ".", "..", "", "/dev/null", "x" * 255, "x" * 5000, "a\0b", "nothere/last", "loop"])
def test_what_is_no_checkpoint_says_so(folder, tmp_path, monkeypatch):
    """The root of a file system has no name, and nothing next to it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    (tmp_path / "here" / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path / "here")
    for load in (lambda: mgpu.load_checkpoint(network(), folder), lambda: load_translator(folder)):
        with pytest.raises(StateError):
            load()
    with pytest.raises(StateError):
        fit(tmp_path / "run", resume=folder)


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("folder", ["x" * 256, "x/" * 3000 + "x", "file", "file/run", "loop", "loop/run", "a\0b"])
def test_a_folder_that_cannot_be_made_is_an_error_of_ours(folder, tmp_path, monkeypatch, resume):
    """Some were a bare OSError."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SaveError, StateError, TrainerError), match="expected"):
        fit(folder, resume=resume)
    with pytest.raises((SaveError, StateError), match="expected"):
        mgpu.save_checkpoint(network(), folder)
    assert names(tmp_path) == ["file", "loop"]
