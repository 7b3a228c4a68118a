"""Going on with a run: from where, with which data, and what is refused."""

import json
import logging
import shutil
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint.resume import FitProgress, check_data, loader_epoch, remaining_batches, set_loader_epoch
from gluon_mgpu.checkpoint.snapshot import read_content
from gluon_mgpu.errors import StateError, TrainerError
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import gluon

from .conftest import LOSS, largest_difference, small_batches, small_net, weights_of
from .test_checkpoint import forge

CTX = [mx.cpu(0), mx.cpu(1)]


def fit(folder, resume=None, *, net=None, params=None, epochs=2, size=6, callbacks=None):
    net = net or small_net(CTX)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9, **(params or {})})
    ((X, y),) = small_batches([24])
    data = mgpu.data.ArrayLoader(X, y, size, shuffle=True)
    callbacks = [mgpu.Checkpoint(folder, None, keep=3)] if callbacks is None else callbacks
    return net, mgpu.fit(net, LOSS, trainer, data, epochs=epochs, callbacks=callbacks, resume=resume)


def refused(match, *arguments, **options):
    """The network's weights are as they were."""
    net = options.pop("net", None) or small_net(CTX)
    mgpu.eval_batch(net, *small_batches([4])[0], ctx=CTX)
    before = weights_of(net)
    with pytest.raises((StateError, TrainerError), match=match):
        fit(*arguments, net=net, **options)
    assert largest_difference(weights_of(net), before) == 0.0


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights and history of a run of four epochs."""
    net, history = fit(tmp_path_factory.mktemp("whole"), epochs=4)
    return weights_of(net), history


@pytest.fixture(scope="module")
def three_epochs(tmp_path_factory):
    """The folder of a run that has ended after three epochs: after 4, 8 and 12 batches."""
    folder = tmp_path_factory.mktemp("three") / "run"
    fit(folder, epochs=3)
    return folder


# From where


@pytest.mark.parametrize("where", ["auto", "run", "run/last", "run/step-00000008"])
def test_epochs_count_from_the_beginning_of_the_run(tmp_path, whole, three_epochs, where):
    weights, expected = whole
    shutil.copytree(three_epochs, tmp_path / "run")
    net, history = fit(tmp_path / "run", where if where == "auto" else tmp_path / where, epochs=4)
    assert largest_difference(weights_of(net), weights) == 0.0
    assert history.column("train_loss") == expected.column("train_loss")
    assert mgpu.load_checkpoint(net, tmp_path / "run" / "last")["epoch"] == 4


@pytest.mark.parametrize("file", ["net.params", "states.npz", "training.json", "progress.json", "manifest.json"])
def test_the_one_before_is_taken_where_the_latest_is_damaged(tmp_path, caplog, whole, three_epochs, file):
    shutil.copytree(three_epochs, tmp_path / "run")
    truncate(tmp_path / "run" / "last" / file)
    with caplog.at_level(logging.INFO, logger="gluon_mgpu"):
        net, history = fit(tmp_path / "run", "auto", epochs=4)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and str(tmp_path / "run" / "last") in warnings[0] and file in warnings[0]
    assert any("resumes from" in message and "step-00000008" in message for message in caplog.messages)
    assert len(history.rows) == 4
    assert largest_difference(weights_of(net), whole[0]) == 0.0
    fit(tmp_path / "run", tmp_path / "run" / "last", epochs=4)  # whole again


def test_none_that_is_good_is_an_error_and_begins_nothing_anew(tmp_path):
    fit(tmp_path)
    for path in tmp_path.iterdir():
        truncate(path / "net.params")
    before = sorted(path.name for path in tmp_path.iterdir())
    refused("last/net.params, which is damaged", tmp_path, "auto")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("resume", ["nowhere", "empty"])
def test_a_folder_without_a_checkpoint_is_an_error(tmp_path, resume):
    (tmp_path / "empty").mkdir()
    refused("holds no checkpoint", tmp_path / "run", tmp_path / resume)
    assert not (tmp_path / "run").exists()


def test_auto_needs_a_callback_that_saves():
    refused("no callback that saves", "unused", "auto", callbacks=[])


def test_a_checkpoint_that_was_saved_by_hand_says_nothing_of_a_run(tmp_path):
    net = small_net(CTX)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    mgpu.train_batch(net, LOSS, trainer, *small_batches([4])[0])
    mgpu.save_checkpoint(net, tmp_path / "c", trainer)
    refused("holds no position of a run", tmp_path / "run", tmp_path / "c")


def test_other_batches_are_refused_in_the_middle_of_an_epoch(tmp_path):
    fit(tmp_path)
    place = read_content(tmp_path / "last", with_training=True).place
    assert (place["epoch"], place["batches"], place["num_batches"]) == (3, 0, 4)
    fit(tmp_path, "auto", size=12, epochs=3)  # between two epochs they may change
    training = json.loads((tmp_path / "last" / "training.json").read_text())
    training["place"].update(batches=1, num_batches=4)
    forge(tmp_path / "last", training_json=json.dumps(training).encode())
    refused("expected the same batches", tmp_path, tmp_path / "last", size=12, epochs=9)


# With which data


def test_what_was_done_is_drawn_and_not_given():
    loader = mgpu.data.ArrayLoader(np.arange(20), np.arange(20), 3, shuffle=True, seed=4)
    whole = [x.tolist() for x, _ in loader]
    for done in range(7):
        loader.epoch = 0
        assert [x.tolist() for x, _ in remaining_batches(loader, FitProgress(batches=done))] == whole[done:]
    loader.epoch = 0
    assert list(remaining_batches(loader, FitProgress(batches=7))) == []
    with pytest.raises(StateError, match="of 7 batches.* after 8"):
        remaining_batches(loader, FitProgress(batches=8))


def test_numpys_generator_is_where_it_was():
    """The order comes from it as it was when the epoch began; what is drawn later comes from it as it is now."""

    def drawing():
        for i in np.random.permutation(50)[:5].tolist():
            yield i, np.random.uniform()

    position = FitProgress(batches=3)
    whole = list(drawing())
    np.random.seed(9)
    rest = list(remaining_batches(drawing(), position))
    np.random.seed(9)
    assert rest == [(whole[3][0], np.random.uniform()), (whole[4][0], np.random.uniform())]


def test_iterators_that_count_their_epochs_are_known():
    assert loader_epoch(mgpu.data.ArrayLoader(np.zeros(2), np.zeros(2), 1)) == 0
    assert loader_epoch([1]) is None

    class Own:
        epoch = True

    assert loader_epoch(Own()) is None
    loader = gluon.data.DataLoader(np.arange(6), batch_sampler=mgpu.data.ShardedSampler(6, 2, seed=1))
    passes = [[x.asnumpy().tolist() for x in loader] for _ in range(3)]
    assert loader_epoch(loader) == 3
    set_loader_epoch(loader, 1)
    assert [x.asnumpy().tolist() for x in remaining_batches(loader, FitProgress(batches=1))] == passes[1][1:] != passes[0][1:]


# Several processes


def test_processes_that_would_resume_from_different_steps_are_refused(tmp_path, monkeypatch):
    """A machine that cannot read the folder begins anew, or from an older copy."""
    fit(tmp_path)
    for other in (b"none", b"4"):
        ranks = SimpleNamespace(all_gather_bytes=lambda own, other=other: [own, other])
        monkeypatch.setattr("gluon_mgpu.checkpoint.resume.group", lambda ranks=ranks: ranks)
        refused(f"would resume from the steps 8, {other.decode()}", tmp_path, "auto")


@pytest.mark.parametrize(
    "data, is_told",
    [
        (mx.io.ResizeIter(mx.io.NDArrayIter(np.zeros(40), batch_size=12, last_batch_handle="roll_over"), 3), True),
        (gluon.data.DataLoader(np.zeros(40), 12, last_batch="rollover"), True),
        *([] if is_mxnet2() else [(gluon.data.DataLoader(np.zeros(40), 12, auto_reload=True), True)]),
        (gluon.data.DataLoader(np.zeros(40), 12), False),
    ],
)
def test_what_rolls_over_to_the_next_epoch_is_reported(data, is_told, caplog):
    check_data(FitProgress(epoch=2, batches=1, step=5), data)
    assert bool(caplog.records) == is_told
