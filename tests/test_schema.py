"""Altered files: what is well formed and wrong is refused by name, before network, trainer, data or random numbers change."""

import hashlib
import json
import logging
import pickle
import random
import re
import shutil

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu import schema
from gluon_mgpu.data import ArrayLoader, build_vocabulary
from gluon_mgpu.errors import DataError, StateError
from mxnet import gluon, lr_scheduler
from mxnet.gluon import nn

from .conftest import assert_house_style

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
        arrays += [state for updater in update.updaters for _, state in sorted(updater.states.items())]
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


def forge(folder, name, content):
    """Replace a file, and let the manifest say that it is right."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


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
PLACE, VALUES, SCHEDULE = ("place",), ("optimizer", "values"), ("optimizer", "schedule", "values")
ALTERED = {
    "a step as a text": (setting("place", "step", "7"), 'place.step = "7"; expected a whole number of 0 or more'),
    "an epoch as a text": (setting("place", "epoch", "2"), 'place.epoch = "2"; expected a whole number of 1 or more'),
    "an epoch of 10**30": (
        setting("place", "epoch", 10**30),
        "place.epoch = 1000000000000000000000000000000; expected a whole number of at most",
    ),
    "an infinite time": (
        setting("place", "seconds", float("inf")),
        "place.seconds = Infinity; expected a finite number, 0 or more",
    ),
    "no number of batches": (setting("place", "num_batches", dropped), "without place.num_batches"),
    "more batches than the data have": (
        lambda c: (c["place"].update(batches=7, step=7, num_batches=4), c["random"].update(step=7)),
        "got a train_iter of 4 batches, and a checkpoint after 7",
    ),
    "examples before the first batch": (
        setting("place", "batches", 0),
        "place.examples = 9; expected 0 where",
    ),
    "more batches than steps": (setting("place", "batches", 9), "place.batches = 9; expected at most as many as place.step, 3"),
    "an epoch that is not the history's": (
        setting("place", "epoch", 2),
        "with 0 epochs in its history, 0 completed, and in its place epoch 2",
    ),
    "a count of a metric that has no sum": (setting("place", "counts", "other", 3), "sums of metrics"),
    "a count as a list": (setting("place", "counts", "loss", [9]), "place.counts.loss = a list of 1; expected a whole number"),
    "norms that are not there": (setting("place", "norms", 0), "sums of metrics and 2 of norms"),
    "a loader's epoch below 0": (setting("place", "loader_epoch", -1), "place.loader_epoch = -1"),
    "shares of another sum": (setting("place", "shares", [0.5, 0.1]), "expected shares that add up to 1"),
    "an unknown key": (setting("place", "stepp", 1), "place.stepp = 1; expected no keys but epoch"),
    "a state of random that is cut": (
        setting("place", "generators", "python", 1, "00"),
        'place.generators.python[1] = "00"; expected 5000 hex',
    ),
    "a place of NumPy's generator": (
        setting("random", "numpy", 2, 10**6),
        "random.numpy[2] = 1000000; expected a whole number of at most 624",
    ),
    "a seed of another step": (setting("random", "step", 2), "random.step = 2; expected the step of the place, 3"),
    "a count of updates dropped": (setting("counts", "0", dropped), "with a state or a count of 0.weight, and not both"),
    "a count of updates of 10**30": (setting("counts", "0", 10**30), 'counts["0"] = 1000000000000000000000000000000'),
    "a count of another parameter": (setting("counts", "99", 3), "parameter 99; expected parameters of 0 to 7"),
    "a state of another parameter": (
        setting("states", "0", {"array": "state/1"}),
        'states["0"].array = "state/1"; expected "state/0"',
    ),
    "a state as a text": (setting("states", "0", "x"), "another form of state|expected shape"),
    "a rate as a text": (setting(*VALUES, "lr", "0.1"), 'optimizer.values.lr = "0.1"; expected a finite number'),
    "a multiplier as a text": (
        setting(*VALUES, "lr_mult", {"dict": [[0, "1"]]}),
        'lr_mult.dict[0][1] = "1"; expected a finite number',
    ),
    "an option of another type": (setting(*VALUES, "lazy_update", 1), "optimizer.values.lazy_update = 1; expected true or false"),
    "an option dropped": (setting(*VALUES, "wd_mult", dropped), "without optimizer.values.wd_mult"),
    "a property as an attribute": (
        setting(*VALUES, "learning_rate", 1.0),
        "optimizer.values.learning_rate = 1.0; expected no attributes but",
    ),
    "updates that a schedule would count for hours": (
        setting(*VALUES, "num_update", 2 * 10**9),
        "its schedule is 2e+09 steps behind",
    ),
    "a schedule's rate as a list": (setting(*SCHEDULE, "base_lr", [0.1]), "optimizer.schedule.values.base_lr = a list of 1"),
    "a class as a list": (setting("optimizer", "class", ["x"]), "optimizer.class = a list of 1; expected a text"),
    "a number of devices that contradicts the arrays": (setting("devices", 3), "expected one for each of 3 devices"),
    "a scale of zero": (
        setting("loss_scaler", {"scale": 0, "num_good": 1}),
        "loss_scaler.scale = 0; expected a finite number, 1 or more",
    ),
    "a shape that is not the parameter's": (
        setting("shapes", 0, []),
        "shapes[0] = a list of 0; expected (4, 5), as in net.params",
    ),
    "an order with one update twice": (
        lambda c: c.update(order=[0, *c["order"][:-1]]),
        "order = a list of 8; expected each of 0 to 7 once",
    ),
    "examples of devices that are not there": (
        setting("seen", "1.running_mean", "examples", [3]),
        'seen["1.running_mean"].examples = a list of 1; expected one for each of 2 devices',
    ),
    "a name of three lines": (setting("names", 0, "a\nb\n" + "x" * 500), "of another network"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_training_json_is_refused_before_anything_changes(saved, run, tmp_path, name):
    alter, words = ALTERED[name]
    folder = tmp_path / "c"
    shutil.copytree(saved / "step-00000003", folder)
    training = json.loads((folder / "training.json").read_text())
    alter(training)
    forge(folder, "training.json", json.dumps(training).encode())
    assert_refused(run, lambda: run.fit(tmp_path / "new", resume=folder), words)


HISTORY = {
    "the last epoch dropped": (
        setting("history", -1, dropped),
        "with 1 epochs in its history, 2 completed, and in its place epoch 3",
    ),
    "an epoch dropped": (setting("history", 0, dropped), "history[0].epoch = 2; expected 1"),
    "epochs in another order": (lambda c: c["history"].reverse(), "history[0].epoch = 2; expected 1"),
    "a loss as a text": (setting("history", 1, "test_loss", "low"), 'history[1].test_loss = "low"; expected a number'),
    "a number of epochs that is not the history's": (setting("epochs_completed", 3), "2 epochs in its history, 3 completed"),
    "no history": (setting("history", dropped), "without history"),
    "a list": (lambda c: None, "progress.json with a list of 1; expected an object"),
}


@pytest.mark.parametrize("name", HISTORY)
def test_an_altered_history_is_refused_before_anything_changes(saved, run, tmp_path, name):
    alter, words = HISTORY[name]
    folder = tmp_path / "c"
    shutil.copytree(saved / "last", folder)
    progress = json.loads((folder / "progress.json").read_text())
    alter(progress)
    forge(folder, "progress.json", json.dumps([1] if name == "a list" else progress).encode())
    assert_refused(run, lambda: run.fit(tmp_path / "new", resume=folder), words)


TEXTS = {
    "a key twice": (lambda text: text.replace('"devices":', '"devices": 1, "devices":'), 'the key "devices" appears twice'),
    "a thousand levels": (lambda text: "[" * 100_000 + "]" * 100_000, "RecursionError"),
    "1e999": (lambda text: re.sub(r'"base": \d+', '"base": 1e999', text), "random.base = Infinity; expected a whole number"),
    "a number of 5000 digits": (
        lambda text: re.sub(r'"base": \d+', f'"base": {"9" * 4000}', text),
        "random.base = a whole number of 13288 bits",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_another_text_is_refused_before_anything_changes(saved, run, tmp_path, name):
    alter, words = TEXTS[name]
    folder = tmp_path / "c"
    shutil.copytree(saved / "last", folder)
    forge(folder, "training.json", alter((folder / "training.json").read_text()).encode())
    assert_refused(run, lambda: mgpu.load_checkpoint(folder, run.net, run.trainer), words)


def moved_dtype(arrays):
    arrays["state/0"] = arrays["state/0"].astype("float64")


ARRAYS = {
    "no statistics of a device": lambda arrays: arrays.pop("device/1/1.running_mean"),
    "states of another dtype": moved_dtype,
    "statistics of another shape": lambda arrays: arrays.update({"device/1/1.running_mean": np.zeros(3, "float32")}),
    "a sum of two numbers": lambda arrays: arrays.update({"sum/cpu(0)/loss": np.ones(2)}),
    "a sum of no metric": lambda arrays: arrays.update({"sum/x": np.ones(1)}),
    "texts": lambda arrays: arrays.update({"state/0": np.array(["a"])}),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_altered_arrays_are_refused_before_anything_changes(saved, run, tmp_path, name):
    folder = tmp_path / "c"
    shutil.copytree(saved / "step-00000003", folder)
    with np.load(folder / "states.npz") as file:
        arrays = dict(file.items())
    ARRAYS[name](arrays)
    np.savez(tmp_path / "other.npz", **arrays)
    forge(folder, "states.npz", (tmp_path / "other.npz").read_bytes())
    assert_refused(run, lambda: run.fit(tmp_path / "new", resume=folder), "states.npz")


def test_parameters_are_not_given_to_mxnet_before_their_sizes_fit_the_file(saved, run, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(saved / "last", folder)
    content = (folder / "net.params").read_bytes()
    large = content[:36] + (2**60).to_bytes(8, "little") + content[44:]  # the first axis of the first array
    for altered in (content[:-3], content[:200], large, content + b"x", b"", bytes(len(content))):
        forge(folder, "net.params", altered)
        for trainer in (None, run.trainer):
            assert_refused(run, lambda: mgpu.load_checkpoint(folder, run.net, trainer), "net.params, which is damaged")  # noqa: B023


def test_a_network_without_shapes_stays_without_where_states_do_not_fit(saved, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(saved / "last", folder)
    with np.load(folder / "states.npz") as file:
        arrays = {name: array[:1] if name == "state/0" else array for name, array in file.items()}
    np.savez(tmp_path / "other.npz", **arrays)
    forge(folder, "states.npz", (tmp_path / "other.npz").read_bytes())
    fresh = Run(begun=False)
    assert_refused(fresh, lambda: mgpu.load_checkpoint(folder, fresh.net, fresh.trainer), "expected shape")
    assert all(param._data is None for param in fresh.net.collect_params().values() if "dense0_weight" in param.name)


def test_the_checkpoint_before_is_taken_and_gives_the_same_run(saved, tmp_path):
    def straight():
        one = Run(begun=False)
        one.fit(tmp_path / "straight", epochs=3)
        return one.state()

    shutil.copytree(saved, tmp_path / "run")
    training = json.loads((saved / "last" / "training.json").read_text())
    training["place"]["loader_epoch"] = "2"
    forge(tmp_path / "run" / "last", "training.json", json.dumps(training).encode())
    shutil.rmtree(tmp_path / "run" / "best")
    random.seed(0), np.random.seed(0)
    expected = straight()
    resumed = Run(begun=False)
    resumed.fit(tmp_path / "run", epochs=3, resume="auto")
    assert weights(expected) == weights(resumed.state())


def weights(state):
    return re.match(r"\((\[.*?\]), \{", state).group(1)


def altered_optimizer(**values):
    def alter(content):
        optimizer = pickle.loads(content["optimizer"])
        for name, value in values.items():
            vars(optimizer).pop(name) if value is dropped else setattr(optimizer, name, value)
        content["optimizer"] = pickle.dumps(optimizer)

    return alter


def late_schedule(content):
    optimizer = pickle.loads(content["optimizer"])
    optimizer.num_update, optimizer.lr_scheduler.count = 2 * 10**9, 0
    content["optimizer"] = pickle.dumps(optimizer)


STATES = {
    "a cut optimizer": (lambda c: c.update(optimizer=c["optimizer"][:-9]), "which is damaged"),
    "no optimizer": (setting("optimizer", None), "optimizer = null; expected a pickled optimizer"),
    "a number as an optimizer": (lambda c: c.update(optimizer=pickle.dumps(5)), "which contains no trainer states"),
    "a momentum as a text": (altered_optimizer(momentum="0.9"), 'optimizer.momentum = "0.9"; expected a finite number'),
    "a momentum of NaN": (altered_optimizer(momentum=float("nan")), "optimizer.momentum = NaN; expected a finite number"),
    "an attribute dropped": (altered_optimizer(clip_gradient=dropped), "without optimizer.clip_gradient"),
    "a schedule as a text": (altered_optimizer(lr_scheduler="x"), "of an optimizer that cannot train"),
    "a schedule that is far behind": (late_schedule, "its schedule is 2e+09 steps behind"),
    "no counts": (setting("counts", dropped), "without counts"),
    "a count as a text": (setting("counts", 0, "3"), 'counts[0] = "3"; expected a whole number'),
    "a count dropped": (setting("counts", 0, dropped), "with a state or a count of 0.weight, and not both"),
    "objects as a state": (lambda c: c["states"].update({0: c["states"][0].astype(object)}), "expected numbers"),
    "a state of another form": (lambda c: c["states"].update({0: [c["states"][0]]}), "got list in|another form of state"),
    "no version": (setting("version", dropped), "without version"),
    "a scale as a text": (setting("loss_scaler", "8"), "expected an object with scale or num_good, or null"),
}


def version_1(path):
    """The content of a file of states as version 1 held it: in one pickle, by place in the network."""
    with open(path, "rb") as file:
        (states, optimizer), content = pickle.load(file), pickle.load(file)
    order = content.pop("order")
    states = {order[number]: state.asnumpy() for number, state in states.items()}
    return {**content, "version": 1, "states": states, "optimizer": pickle.dumps(optimizer)}


@pytest.mark.parametrize("name", STATES)
def test_an_altered_file_of_states_is_refused_before_anything_changes(run, tmp_path, name):
    alter, words = STATES[name]
    run.trainer.save_states(str(tmp_path / "states"))
    content = version_1(tmp_path / "states")
    alter(content)
    (tmp_path / "states").write_bytes(pickle.dumps(content))
    assert_refused(run, lambda: run.trainer.load_states(str(tmp_path / "states")), words)


def test_an_order_with_one_update_twice_is_refused(run, tmp_path):
    path = tmp_path / "states"
    run.trainer.save_states(str(path))
    with open(path, "rb") as file:
        gluons, content = pickle.load(file), pickle.load(file)
    content["order"][1] = content["order"][0]
    path.write_bytes(pickle.dumps(gluons) + pickle.dumps(content))
    words = "with an order of 8 numbers; expected each of 0 to 7"
    assert_refused(run, lambda: run.trainer.load_states(str(path)), words)


def test_gluons_states_with_counts_of_another_kind_are_refused(run, tmp_path):
    optimizer = mx.optimizer.SGD(momentum=0.9, learning_rate=0.1)
    states = {0: mx.nd.zeros((4, 5))}
    for counts in (None, {0: None}, {0: {0: "3"}}, {0: {0: 10**30}}):
        optimizer._all_index_update_counts = counts
        (tmp_path / "states").write_bytes(pickle.dumps((states, optimizer)))
        assert_refused(run, lambda: run.trainer.load_states(str(tmp_path / "states")), "counts")
    for key in (-1, True, "0", 99):
        (tmp_path / "states").write_bytes(pickle.dumps({key: mx.nd.zeros((4, 5))}))
        assert_refused(run, lambda: run.trainer.load_states(str(tmp_path / "states")), "contains no trainer states")


MODELS = {
    "a size of 10**9": (setting("network", "hidden_size", 10**9), "of another network"),
    "a size of 10**30": (setting("network", "embed_size", 10**30), "network.embed_size = 1000000000000000000000000000000"),
    "a million layers": (setting("network", "num_layers", 10**6), "network.num_layers = 1000000; expected at most"),
    "a cell that is none": (setting("network", "cell", "rnn"), 'network.cell = "rnn"; expected gru or lstm'),
    "an option that is none": (setting("network", "params", 5), "network.params = 5; expected no keys but"),
    "weights that are tied here alone": (
        setting("network", "tied", True),
        "with different values of target_embedding.weight and output.weight",
    ),
    "no vocabulary": (setting("source_vocabulary", dropped), "without source_vocabulary"),
    "a fingerprint of two lines": (setting("source_vocabulary", "fingerprint", "a\nb"), "fingerprint = "),
}


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    vocabularies = [build_vocabulary(["one two three"], "words") for _ in range(2)]
    made = mgpu.Translator(*vocabularies, embed_size=4, hidden_size=4, tied=False)
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
        mgpu.load_translator(tmp_path / "t", mx.cpu())
    assert_told(caught.value, words)


def test_damaged_subwords_never_reach_sentencepiece(tmp_path):
    pytest.importorskip("sentencepiece")
    vocabularies = [build_vocabulary(["one two three four"] * 3, "subwords", size=20) for _ in range(2)]
    made = mgpu.Translator(*vocabularies, embed_size=4, hidden_size=4)
    made.net.initialize(ctx=mx.cpu())
    made.best(["one"])
    made.save(tmp_path / "t")
    content = (tmp_path / "t" / "source.vocab").read_bytes()
    (tmp_path / "t" / "source.vocab").write_bytes(content[:50] + b"\xff" * 8 + content[58:])
    with pytest.raises(DataError, match="whose bytes are not those that model.json knows") as caught:
        mgpu.load_translator(tmp_path / "t", mx.cpu())
    assert_house_style(caught.value)


# Other data


def test_other_data_after_an_epoch_are_warned_of(saved, tmp_path, caplog):
    shutil.copytree(saved, tmp_path / "run")
    with caplog.at_level(logging.WARNING, "gluon_mgpu"):
        Run(begun=False).fit(tmp_path / "run", epochs=3, resume=tmp_path / "run" / "last")
        assert not caplog.messages
        Run(begun=False, num_examples=9).fit(tmp_path / "run", epochs=4, resume=tmp_path / "run" / "last")
        assert (
            "fit: got a train_iter of 3 batches, and a checkpoint of a run with 4; expected the same data" in caplog.messages[0]
        )
        caplog.clear()
        Run(begun=False, num_examples=8).fit(tmp_path / "run", epochs=5, resume=tmp_path / "run" / "last")  # 3 batches as well
    assert "fit: got a train_iter of 8 examples, and a checkpoint of a run with 9; expected the same data" in caplog.messages[0]


def test_other_examples_in_an_epoch_are_refused(saved, run, tmp_path):
    run.data, data = ArrayLoader(X[:11], Y[:11], 3, shuffle=True), run.data  # 4 batches as well
    try:
        words = "got a train_iter of 11 examples, and a checkpoint in the middle of an epoch of 12; expected the same examples"
        assert_refused(run, lambda: run.fit(tmp_path, resume=saved / "step-00000003"), words)
    finally:
        run.data = data


# The schemas themselves


@pytest.mark.parametrize(
    ("one", "good", "wrong"),
    [
        (schema.integer(1, 5), [1, 5, np.int64(3)], [0, 6, 1.0, True, "1", None, 10**30]),
        (schema.number(0, below=1), [0, 0.5, np.float32(0.25)], [-0.1, 1, float("nan"), float("inf"), 10**400, True, "0"]),
        (schema.constant(False, 1), [False, 1], [True, 0, 1.0, "1"]),
        (schema.nullable(schema.text(3)), [None, "", "abc"], ["abcd", 3, []]),
        (schema.list_of(schema.integer(), length=2), [[1, 2], (0, 0)], [[1], [1, 2, 3], [1, "2"], "12"]),
        (schema.items(schema.integer(), schema.text()), [[1, "a"]], [["a", 1], [1], {}]),
        (
            schema.record({"a": schema.integer()}, {"b": schema.text()}),
            [{"a": 1}, {"a": 1, "b": ""}],
            [{}, {"a": 1, "c": 2}, {"a": ""}],
        ),
        (
            schema.mapping(schema.index_as_text(), schema.integer()),
            [{}, {"0": 1, "12": 2}],
            [{"01": 1}, {"-1": 1}, {"²": 1}, {0: 1}],
        ),
    ],
)
def test_schemas(one, good, wrong):
    assert all(one(value) is None for value in good)
    assert all(one(value) is not None for value in wrong)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": 1, "b": 2}, "with x = an object of 2 keys; expected"),
        ([1] * 1000, "with x = a list of 1000; expected"),
        (np.zeros((1000, 2), "float32"), r"with x = an array of shape (1000, 2) and dtype float32; expected"),
        ({1, 2}, "with x = an object of type set; expected"),
        (True, "with x = true; expected"),
        ("a" * 1000, 'with x = "aaaa'),
    ],
)
def test_errors_show_what_a_value_is_and_not_all_of_it(value, told):
    with pytest.raises(StateError) as caught:
        schema.check(schema.record({"x": schema.integer()}), {"x": value}, operation="load", file="f")
    assert_told(caught.value, told)
    assert len(str(caught.value)) < 200


def test_errors_are_one_short_line():
    deep = schema.record({"a b\n": schema.list_of(schema.integer())})
    with pytest.raises(StateError) as caught:
        schema.check(deep, {"a b\n": [1, "x\n" * 1000]}, operation="load", file="f")
    assert_told(caught.value, '["a b\\n"][1] = "x\\nx')
    assert len(str(caught.value)) < 200


def assert_refused(run, load, words):
    before = run.state()
    with pytest.raises(StateError) as caught:
        load()
    assert_told(caught.value, words)
    assert run.state() == before


def assert_told(error, words):
    assert_house_style(error)
    told = str(error)
    assert any(one in told for one in words.split("|")) and "\n" not in told and len(told) < 1000, told
