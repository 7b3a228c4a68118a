"""Altered files: what is well formed and wrong is refused by name, before network, trainer, data or random numbers change."""

import copy
import io
import json
import logging
import os
import random
import shutil
import struct
import zipfile

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data import ArrayLoader, build_vocabulary
from gluon_mgpu.errors import DataError, StateError
from gluon_mgpu.mxnet_internals.parameters import has_values
from mxnet import gluon, lr_scheduler
from mxnet.gluon import nn

from .test_checkpoint import forge

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
        optimizer, update = self.trainer.optimizer, self.trainer.steps.update
        arrays = [a for p in self.net.collect_params().values() if has_values(p) for a in p.list_data()]
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
    assert_refused(run, lambda: mgpu.load_checkpoint(run.net, folder, run.trainer), "arrays=")


# Forged files: the manifest has their sizes and checksums


SWAPPED = [None, True, -1, 7, 2**31, 2**63, 10**30, 0.5, float("nan"), "", "a\n\x1b[31mb", [], [[]], {}, {"x": 1}, dropped]


def places_in(value, at=()):
    """The places of JSON data, of long lists the first and the last ones."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    few = [one for i, one in enumerate(inner) if i < 3 or i > len(value) - 3 or isinstance(value, dict)]
    return [(*at, key) for key, _ in few] + [place for key, one in few for place in places_in(one, (*at, key))]


@pytest.mark.parametrize("file", ["training.json", "progress.json", "manifest.json"])
def test_every_value_of_another_type_is_refused_or_does_no_harm(saved, tmp_path, request, caplog, file):
    """Each place of the file holds each of these values; by default, about 12 of these forgeries are tried."""
    values, run = json.loads((saved / "last" / file).read_text()), Run()
    swaps = [(place, value) for place in places_in(values) for value in SWAPPED]
    for place, value in swaps[:: 1 if request.config.getoption("exhaustive") else len(swaps) // 12 | 1]:
        altered, folder = copy.deepcopy(values), shutil.copytree(saved, tmp_path / "run")
        setting(*place, value)(altered)
        content = json.dumps(altered).encode()
        if file == "manifest.json":
            (folder / "last" / file).write_bytes(content)
        else:
            forge(folder / "last", **{file.replace(".", "_"): content})
        before = run.state()
        try:
            mgpu.load_checkpoint(run.net, folder / "last", run.trainer)
        except StateError as error:
            assert_told(error, "", place)
            assert run.state() == before, (place, value)
        else:
            run = Run()
        Run(begun=False).fit(folder, epochs=3, resume="auto")  # from this one or from the one before
        shutil.rmtree(folder)
    assert "cannot resume" in caplog.text


def npz(arrays, method=zipfile.ZIP_STORED):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.asarray(array))
    return content.getvalue()


def with_sizes(content, size):
    """The zip file, whose directory says that its first entry has another size."""
    at = content.index(b"PK\x01\x02") + 20
    return content[:at] + struct.pack("<II", size, size) + content[at + 8 :]


FORGED = {
    "compressed": lambda arrays: npz({"state/0": np.zeros(2**24, "float32")}, zipfile.ZIP_DEFLATED),
    "of 4 GB": lambda arrays: with_sizes(npz(arrays), 2**32 - 2),
    "of columns": lambda arrays: npz({**arrays, "state/0": np.asfortranarray(arrays["state/0"])}),
    "of dates": lambda arrays: npz({**arrays, "state/0": arrays["state/0"].astype("datetime64[s]")}),
    "of a huge shape": lambda arrays: npz(arrays).replace(b"'shape': (4, 5)", b"'shape': (0, 5)"),
    "of another shape": lambda arrays: npz({**arrays, "state/0": arrays["state/0"][:1]}),
    "unknown": lambda arrays: npz({**arrays, "state/0/x": 1.0}),
    "of no parameter": lambda arrays: npz({**arrays, "state/99": np.zeros(3, "float32")}),
    "gone": lambda arrays: npz({name: array for name, array in arrays.items() if name != "state/0"}),
    "no zip file": lambda arrays: b"PK",
    "of no sum": lambda arrays: npz({**arrays, "sum/x": 1.0}),
    "of no average": lambda arrays: npz({**arrays, "average/x": 1.0}),
}


@pytest.mark.parametrize("name", FORGED)
def test_arrays_of_another_kind_are_refused_and_the_checkpoint_before_is_taken(saved, run, tmp_path, name):
    folder = shutil.copytree(saved, tmp_path / "run")
    with np.load(folder / "last" / "states.npz") as file:
        forge(folder / "last", states_npz=FORGED[name](dict(file.items())))
    if name != "of no sum":  # which `fit` reads
        assert_refused(
            run,
            lambda: mgpu.load_checkpoint(run.net, folder / "last", run.trainer),
            "last, which is damaged|expected NDArray of shape",
        )
    history = Run(begun=False).fit(folder, epochs=3, resume="auto")
    assert len(history.rows) == 3


@pytest.mark.parametrize("file", ["net.params", "states.npz", "training.json", "progress.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["1 TB", "link", "endless", "pipe"])
def test_only_files_of_an_expected_size_are_read(saved, run, tmp_path, file, kind):
    folder = shutil.copytree(saved / "last", tmp_path / "last")
    path = folder / file
    path.rename(tmp_path / "elsewhere")
    if kind == "1 TB":
        path.touch()
        os.truncate(path, 2**40)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "endless" else tmp_path / "elsewhere")
    assert_refused(run, lambda: mgpu.load_checkpoint(run.net, folder, run.trainer), "which cannot be read|which is damaged")
    fresh = Run(begun=False)  # whose shapes the file may decide
    assert_refused(fresh, lambda: mgpu.load_checkpoint(fresh.net, folder), "which cannot be read|which is damaged")


def test_states_are_read_as_strictly(run, tmp_path):
    run.trainer.save_states(str(tmp_path / "states"))
    with np.load(tmp_path / "states") as file:
        arrays = dict(file.items())
    values = json.loads(arrays.pop("trainer.json").tobytes())
    texts = [json.dumps({**values, "names": 3}), "[" * 10**5, json.dumps({**values, "counts": {"0": -1}}), "[]"]
    altered = [npz({**arrays, "trainer.json": np.frombuffer(text.encode(), np.uint8)}) for text in texts]
    for content in [*altered, *(forged(arrays) for forged in list(FORGED.values())[:10])]:
        (tmp_path / "states").write_bytes(content)
        assert_refused(run, lambda: run.trainer.load_states(str(tmp_path / "states")), "which is damaged")
    assert_refused(run, lambda: run.trainer.load_states("/dev/zero"), "Not a regular file")


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


def assert_told(error, words, forgery=""):
    told = str(error)
    assert any(one in told for one in words.split("|")) and told.isprintable() and len(told) < 1000, (told, forgery)
