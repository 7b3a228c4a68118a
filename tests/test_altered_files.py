"""Altered files: what is well formed and wrong is refused by name, before network, trainer, data or random numbers change."""

import json
import logging
import random
import shutil

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data import ArrayLoader, build_vocabulary
from gluon_mgpu.errors import DataError, StateError
from mxnet import gluon, lr_scheduler
from mxnet.gluon import nn

CTX = [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
NUMBERS = np.random.RandomState(3)
X, Y = NUMBERS.rand(12, 5).astype("float32"), NUMBERS.randint(0, 3, 12)


class Run:
    """A network with BatchNorm, its trainer and its data, as a program makes them."""

    def __init__(self, *, begun=True, num_examples=12):
        mx.random.seed(1)
        self.net = nn.HybridSequential()
        self.net.add(nn.Dense(4), nn.BatchNorm(), nn.Dense(3))
        self.net.initialize(mx.init.Xavier(), ctx=CTX)
        schedule = lr_scheduler.FactorScheduler(1, 0.99, base_lr=0.1)
        params = {"learning_rate": 0.1, "momentum": 0.9, "lr_scheduler": schedule}
        self.trainer = mgpu.Trainer(self.net, "sgd", params, clip_norm=1.0)
        self.data = ArrayLoader(X[:num_examples], Y[:num_examples], 3, shuffle=True)
        if begun:
            for features, labels in self.data:
                mgpu.train_batch(self.net, LOSS, self.trainer, features, labels)

    def fit(self, folder, epochs=2, **options):
        callbacks = [mgpu.Checkpoint(folder, "test_loss", every=3, keep=9)]
        return mgpu.fit(self.net, LOSS, self.trainer, self.data, self.data, epochs=epochs, callbacks=callbacks, **options)

    def state(self):
        optimizer, update = self.trainer.optimizer, self.trainer._update
        arrays = [a for p in self.net.collect_params().values() if p._data is not None for a in p.list_data()]
        arrays += [state for updater in update.updaters.values() for _, state in sorted(updater.states.items())]
        values = [array.asnumpy().tolist() for array in arrays]
        schedule = vars(optimizer.lr_scheduler)
        drawn = [np.asarray(one).tolist() for one in np.random.get_state()[1:3]]
        return repr(
            (values, update.counts(), optimizer.num_update, optimizer.lr, schedule, self.data.epoch, drawn, random.getstate())
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    Run(begun=False).fit(folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def run():
    return Run()


def setting(*path):
    """Return a function that sets what is at the end of a path; a path that ends in `dropped` removes it."""

    def alter(content):
        *keys, key, value = path
        for one in keys:
            content = content[one]
        if value is dropped:
            del content[key]
        else:
            content[key] = value

    return alter


dropped = object()


MODELS = {
    "a size of 10**9": (setting("network", "hidden_size", 10**9), "of another network"),
    "weights that are tied here alone": (
        setting("network", "tied", True),
        "with different values of target_embedding.weight and output.weight",
    ),
    "no vocabulary": (setting("source_vocabulary", dropped), "damaged (KeyError: 'source_vocabulary')"),
}


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    vocabularies = [build_vocabulary(["one two three"], "words") for _ in range(2)]
    made = mgpu.models.Translator(*vocabularies, embed_size=4, hidden_size=4, tied=False)
    made.net.initialize(ctx=mx.cpu())
    made.best(["one"])
    folder = tmp_path_factory.mktemp("translator") / "t"
    made.save(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_an_altered_model_json_is_refused(translator, tmp_path, name):
    alter, words = MODELS[name]
    shutil.copytree(translator, tmp_path / "t")
    config = json.loads((tmp_path / "t" / "model.json").read_text())
    alter(config)
    (tmp_path / "t" / "model.json").write_text(json.dumps(config))
    with pytest.raises((StateError, DataError)) as caught:
        mgpu.models.load_translator(tmp_path / "t", mx.cpu())
    assert_told(caught.value, words)


@pytest.mark.parametrize("value", [dropped, "nq"])
def test_an_altered_manifest_is_refused(saved, run, tmp_path, value):
    folder = shutil.copytree(saved / "last", tmp_path / "last")
    manifest = json.loads((folder / "manifest.json").read_text())
    setting("arrays", value)(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert_refused(run, lambda: mgpu.load_checkpoint(folder, run.net, run.trainer), "arrays=")


# Other data


def test_other_data_after_an_epoch(saved, tmp_path, caplog):
    """A loader that knows its data and their order raises: another seed of a split would train on test data. Others warn."""
    folder = shutil.copytree(saved, tmp_path / "run")
    with caplog.at_level(logging.WARNING, "gluon_mgpu"):
        Run(begun=False).fit(folder, epochs=3, resume=folder / "last")
        assert not caplog.messages
        other, seeded, ordered = Run(begun=False, num_examples=9), Run(begun=False), Run(begun=False)
        seeded.data, ordered.data = ArrayLoader(X, Y, 3, shuffle=True, seed=1), ArrayLoader(X, Y, 3)
        for one in (other, seeded, ordered):
            with pytest.raises(StateError, match="other data or another seed"):
                one.fit(folder, epochs=4, resume=folder / "last")
        caplog.clear()
        other.data = list(other.data)
        other.fit(folder, epochs=4, resume=folder / "last")
    assert "fit: got a train_iter of 3 batches, and a checkpoint of a run with 4" in caplog.messages[0]


def assert_refused(run, load, words=""):
    before = run.state()
    with pytest.raises(StateError) as caught:
        load()
    assert_told(caught.value, words)
    assert run.state() == before


def assert_told(error, words):
    told = str(error)
    assert any(one in told for one in words.split("|")) and "\n" not in told and len(told) < 1000, told
