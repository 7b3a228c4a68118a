"""Contract: a run that is killed at any moment of saving resumes, and ends with the `last` and `best` of an undisturbed one.

`python scripts/trials crash_images` takes every moment; here are those that have gone wrong.
"""

import json
import os
import shutil

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint import atomic_folder, rotation
from gluon_mgpu.errors import StateError
from gluon_mgpu.models.seq2seq.translator import load_translator
from mxnet.gluon import nn

from .test_translator import made as made_translator

CTX = [mx.cpu(0), mx.cpu(1)]


class KilledError(BaseException):
    """Nothing of the program runs after it: not even cleaning up, which the tests take away."""


class Scripted(mgpu.Callback):
    """A column of the history that rises until an epoch, and then falls."""

    def __init__(self, best):
        self.best = best

    def on_epoch_end(self, state):
        state.history.rows[-1]["score"] = float(-abs(state.epoch - self.best))


def fit(folder, *, best=2, epochs=3, keep=1, resume="auto"):
    mx.random.seed(1)
    net = nn.Dense(2, in_units=4)
    net.initialize(mx.init.Xavier(), ctx=CTX)
    X, y = np.random.RandomState(0).rand(12, 4).astype("float32"), np.arange(12) % 2
    data = mgpu.data.ArrayLoader(X, y, 4, shuffle=True, seed=2)
    callbacks = [Scripted(best), mgpu.Checkpoint(folder, "score", mode="max", keep=keep)]
    loss, trainer = mx.gluon.loss.SoftmaxCrossEntropyLoss(), mgpu.Trainer(net, "adam", {"learning_rate": 0.05})
    return mgpu.fit(net, loss, trainer, data, epochs=epochs, metrics=(), callbacks=callbacks, resume=resume)


def bits(folder):
    return {name: [(folder / name / file).read_bytes() for file in ("net.params", "states.npz")] for name in ("best", "last")}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    fit(folder)
    assert mgpu.load_checkpoint(folder / "best", nn_of())["epoch"] == 2
    return bits(folder)


def nn_of():
    net = nn.Dense(2, in_units=4)
    net.initialize(ctx=CTX)
    return net


def killed_while_best_is_saved(folder, monkeypatch, num_copied):
    """Killed in the second epoch, the best one, when so many files of `last` were copied."""
    copied, copy = [], shutil.copyfile

    def cut_off(source, target):
        if mgpu.checkpoint.rotation.step_of(folder / "last") == 6 and len(copied) == num_copied:
            raise KilledError
        if mgpu.checkpoint.rotation.step_of(folder / "last") == 6:
            copied.append(target)
        return copy(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder.shutil, "copyfile", cut_off)
        patch.setattr(atomic_folder.shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(KilledError):
            fit(folder)


@pytest.mark.parametrize("num_copied, before", [(0, "an older one"), (1, "none"), (4, "an older one")])
def test_best_is_made_again_after_a_kill_while_it_was_copied(tmp_path, monkeypatch, undisturbed, num_copied, before):
    """The history that is resumed counts the epoch as best: `best` was never written again, or stayed as the kill had left it."""
    killed_while_best_is_saved(tmp_path, monkeypatch, num_copied)
    assert mgpu.load_checkpoint(tmp_path / "best", nn_of())["epoch"] == 1
    if before == "none":
        shutil.rmtree(tmp_path / "best")
    fit(tmp_path)
    assert bits(tmp_path) == undisturbed
    assert names(tmp_path) == ["best", "last"]


def test_a_copy_that_begins_with_its_manifest_is_not_taken_for_whole(tmp_path, undisturbed):
    """So the version before left it, whose copies were alphabetical."""
    fit(tmp_path, epochs=2)
    (tmp_path / "best").rename(tmp_path / ".best.old")
    (tmp_path / ".best.new").mkdir()
    shutil.copyfile(tmp_path / "last" / "manifest.json", tmp_path / ".best.new" / "manifest.json")
    assert atomic_folder.recover_path(tmp_path / "best") == tmp_path / ".best.old"
    fit(tmp_path)
    assert bits(tmp_path) == undisturbed


def test_manifests_are_copied_last(tmp_path, monkeypatch):
    copied, copy = [], shutil.copyfile
    fit(tmp_path, epochs=1)
    monkeypatch.setattr(atomic_folder.shutil, "copyfile", lambda *paths: copied.append(paths[0].name) or copy(*paths))
    atomic_folder.copy_folder(tmp_path / "last", tmp_path / "copy")
    assert sorted(copied) == names(tmp_path / "last")
    assert copied[-1] == "manifest.json"


def test_a_damaged_best_is_made_again_from_an_earlier_checkpoint(tmp_path, undisturbed):
    """Also where the resumed epoch is a later one: the checkpoint of the best epoch is still there."""
    fit(tmp_path, keep=3)
    (tmp_path / "best" / "net.params").write_bytes(b"")
    fit(tmp_path, keep=3)
    assert bits(tmp_path) == undisturbed


def test_a_best_that_cannot_be_made_again_is_reported(tmp_path, caplog):
    fit(tmp_path)
    shutil.rmtree(tmp_path / "best")
    fit(tmp_path)
    assert names(tmp_path) == ["last"]
    assert "best is not of epoch 2, the best one by score, and no complete checkpoint of that epoch is left" in caplog.text


def test_best_comes_along_into_another_folder(tmp_path, undisturbed):
    fit(tmp_path / "one", epochs=2)
    fit(tmp_path / "two", resume=tmp_path / "one" / "last")
    assert bits(tmp_path / "two") == undisturbed


def test_more_checkpoints_than_are_kept_are_removed_after_a_kill(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rotation.CheckpointRotation, "_prune", lambda *arguments: None)
        fit(tmp_path, keep=2)
    assert names(tmp_path) == ["best", "last", "step-00000003", "step-00000006"]
    fit(tmp_path, keep=2)
    assert names(tmp_path) == ["best", "last", "step-00000006"]


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


def test_files_are_on_the_disk_before_the_manifest_and_the_name(tmp_path, monkeypatch):
    """Of checkpoints, their copies and translators: nothing is renamed that a power loss could empty."""
    synced, rename = set(), os.rename
    fsync = os.fsync

    def noted(number):
        fsync(number)
        synced.add(os.fstat(number).st_ino)

    def checked(source, target, **options):
        if str(source).endswith(".new"):
            files = list(type(tmp_path)(source).rglob("*"))
            assert files and {path.stat().st_ino for path in files} <= synced
        return rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", checked)
    monkeypatch.setattr(type(tmp_path), "rename", lambda self, target: checked(self, target))
    fit(tmp_path / "run", epochs=1)
    made_translator().save(tmp_path / "model")


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


def test_a_translator_that_is_replaced_while_it_is_read_is_one_of_the_two(tmp_path, monkeypatch):
    """Its options were of one network, and its weights of another."""
    made_translator().save(tmp_path / "model")
    second, read = made_translator(num_layers=2), atomic_folder.OpenFolder.read

    def replaced(opened, name):
        content = read(opened, name)
        second.save(tmp_path / "model")
        return content

    monkeypatch.setattr(atomic_folder.OpenFolder, "read", replaced)
    assert "num_layers" not in load_translator(tmp_path / "model").options
    assert load_translator(tmp_path / "model").options["num_layers"] == 2


@pytest.mark.parametrize("name, target", [("last", "nowhere"), ("best", "folder"), ("last", "file"), ("best", "last")])
def test_a_link_is_refused_before_the_first_epoch(tmp_path, name, target):
    """A dangling one was a NotADirectoryError at the end of an epoch; one to a folder failed at every save."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(
        StateError, match=f"Checkpoint: got .*{name}, which is a link to {target}; expected a folder .* Remove the link"
    ):
        fit(tmp_path, resume=None)
    assert (tmp_path / "file").read_text() == "mine" and list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("target", ["nowhere", "folder", "file"])
def test_a_link_that_comes_later_is_replaced_and_its_target_stays(tmp_path, target):
    """Nothing that was trained is lost for it."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    fit(tmp_path / "one", epochs=1)
    (tmp_path / "last").symlink_to(target)
    atomic_folder.copy_folder(tmp_path / "one" / "last", tmp_path / "last")
    assert not (tmp_path / "last").is_symlink()
    assert json.loads((tmp_path / "last" / "progress.json").read_text())["epoch"] == 1
    assert (tmp_path / "file").read_text() == "mine" and list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("folder", ["/", ".", "..", "", "/dev/null", "x" * 5000, "a\0b"])
def test_what_is_no_checkpoint_says_so(folder, tmp_path, monkeypatch):
    """The root of a file system has no name, and nothing next to it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(StateError, match="load_checkpoint: got .*; expected "):
        mgpu.load_checkpoint(folder, nn_of())
    with pytest.raises(StateError, match="load_translator: got .*; expected "):
        load_translator(folder)
