"""Checkpoints: what is in the folder, that it is always whole, and that fit() goes on from it to the bit."""

import hashlib
import json
import os
import pickle
import random
import shutil
from functools import partial
from pathlib import Path

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint import snapshot
from gluon_mgpu.errors import SaveError, StateError, TrainerError
from gluon_mgpu.models.hybrid_block import new_parameter
from gluon_mgpu.mxnet_internals.parameters import has_values
from gluon_mgpu.trainer.loss_scaler import LossScaler
from mxnet.gluon import nn

from .conftest import LOSS, cpus, initialized, largest_difference, seed_all, sequential, small_batches, small_net, weights_of
from .versions import nd, sharing

OPTIMIZERS = {"momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}), "adam": ("adam", {"learning_rate": 0.01})}


def make_loader():
    """21 images in batches of 8: the last batch holds 5."""
    ((X, y),) = small_batches([21])
    return mgpu.data.ArrayLoader(X, y, 8, shuffle=True, seed=3)


def make_run(ctx, optimizer="momentum", **net_options):
    net = small_net(ctx, **net_options)
    name, options = OPTIMIZERS[optimizer]
    return net, mgpu.Trainer(net, name, dict(options)), make_loader()


def train(net, trainer, loader, epochs):
    mgpu.fit(net, LOSS, trainer, loader, epochs=epochs, callbacks=[])


def all_of(net):
    """Weights, and BatchNorm's running statistics."""
    params = net.collect_params().values()
    return [param.data(param.list_ctx()[0]).asnumpy() for param in params]


def told(call, *arguments, **options):
    with pytest.raises(StateError) as caught:
        call(*arguments, **options)
    return str(caught.value)


# What is in the folder


ALONE = ["manifest.json", "net.params", "progress.json"]
FILES = [*ALONE, "states.npz", "training.json"]


def test_a_checkpoint_is_five_files(tmp_path):
    net, trainer, loader = make_run(cpus(2))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(net, tmp_path / "new" / "c", trainer, progress={"epoch": 7, "note": "schön"})
    assert sorted(path.name for path in (tmp_path / "new" / "c").iterdir()) == FILES
    assert json.loads((tmp_path / "new" / "c" / "progress.json").read_text(encoding="utf-8")) == {"epoch": 7, "note": "schön"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c"]


def test_a_network_alone_is_a_checkpoint(tmp_path):
    net, trainer, loader = make_run(cpus(3))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(net, str(tmp_path / "c"))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ALONE
    other = small_net(cpus(1))
    assert mgpu.load_checkpoint(other, str(tmp_path / "c")) == {}
    assert largest_difference(all_of(other), all_of(net)) == 0.0
    assert "without states.npz, training.json" in told(mgpu.load_checkpoint, net, tmp_path / "c", trainer)


# A folder of this name is complete


@pytest.mark.parametrize("broken", [None, (snapshot, "write_params"), (snapshot, "write_arrays"), (os, "fsync")])
def test_a_checkpoint_is_replaced_or_stays(tmp_path, monkeypatch, failing, broken):
    net = initialized(nn.Dense(1, in_units=1), cpus(2), mx.init.One())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0})
    mgpu.save_checkpoint(net, tmp_path / "c", trainer, progress={"number": 1})
    net.weight.set_data(nd.array([[2.0]]))
    if broken is None:
        mgpu.save_checkpoint(net, tmp_path / "c", trainer, progress={"number": 2})
    else:
        failing(*broken, error=OSError("disk full"))
        with pytest.raises(SaveError, match="disk full"):
            mgpu.save_checkpoint(net, tmp_path / "c", trainer, progress={"number": 2})
        monkeypatch.undo()
    number = 1 if broken else 2
    assert mgpu.load_checkpoint(net, tmp_path / "c", trainer) == {"number": number}
    assert [net.weight.data(context).asnumpy().item() for context in cpus(2)] == [number, number]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


class Initial(mx.init.Initializer):
    def _init_weight(self, name, array):
        array[()] = 3


def test_a_parameter_without_axes(tmp_path):
    """It could be saved, and not loaded."""
    mx.npx.set_np()
    try:
        net = nn.HybridSequential()
        net.scale = new_parameter(net, "scale", shape=(), init=Initial())
        net.initialize(ctx=cpus(2))
        trainer = mgpu.Trainer(net, "adam", {"learning_rate": 1.0})
        mgpu.save_checkpoint(net, tmp_path / "c", trainer)
        for array in net.scale.list_data():
            array[()] = 4
        mgpu.load_checkpoint(net, tmp_path / "c", trainer)
        assert [array.item() for array in net.scale.list_data()] == [3, 3]
    finally:
        mx.npx.reset_np()


BFLOAT16 = pytest.param(np.dtype([("bfloat16", np.uint16)]), marks=pytest.mark.mxnet1("bf16 and fp16"))


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float64", "int32"], ids=str)
def test_parameters_of_any_dtype(tmp_path, dtype):
    """bfloat16 ended in an error of NumPy."""
    net, other = (nn.Dense(2, in_units=3) for _ in range(2))
    for one in (net, other):
        one.cast(dtype)
        one.initialize(mx.init.One(), ctx=cpus(2))
    net.weight.set_data(nd.array([[1.0, 2.0, 3.0]] * 2).astype(dtype))
    mgpu.save_checkpoint(net, tmp_path / "c")
    mgpu.load_checkpoint(other, tmp_path / "c")
    assert other.weight.data(mx.cpu(1)).astype("float32").asnumpy().tolist() == [[1.0, 2.0, 3.0]] * 2


def test_what_would_not_be_read_is_not_written(tmp_path, monkeypatch):
    """Files are not read if they are larger than a network explains."""
    net = dense(4)
    monkeypatch.setattr(snapshot, "_MOST_OTHERS", 0)
    with pytest.raises(StateError, match="bytes of states and of callbacks' arrays; expected"):
        snapshot.take_snapshot(net, mgpu.Trainer(net, "sgd"), arrays={"mine/array": nd.zeros(1000)})
    monkeypatch.setattr("gluon_mgpu.checkpoint.manifest.MOST_JSON", 99)
    assert "of progress.json; expected 99 at most" in told(mgpu.save_checkpoint, net, tmp_path / "c", progress={"text": "x" * 99})
    for value in ([10**50], json.loads("[" * 99 + "]" * 99), object(), np.ones(2)):
        assert "JSON cannot hold" in told(mgpu.save_checkpoint, net, tmp_path / "c", progress={"text": value})
    assert list(tmp_path.iterdir()) == []


# What is refused


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    net, trainer, _ = make_run(cpus(1))
    assert f"got {tmp_path} without net.params, progress.json" in told(mgpu.load_checkpoint, net, tmp_path, trainer)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "c"
    net, trainer, loader = make_run(cpus(2))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(net, folder, trainer)
    return folder


@pytest.fixture
def checkpoint(saved_once, tmp_path):
    """The same checkpoint each time, in a folder that the test may change."""
    return Path(shutil.copytree(saved_once, tmp_path / "c"))


@pytest.fixture(scope="module")
def other_run():
    """A network with known shapes, and its trainer, into which no test loads anything."""
    net, trainer, _ = make_run(cpus(2))
    mgpu.eval_batch(net, *small_batches([4])[0], ctx=cpus(2))
    return net, trainer


def dense(units):
    return sequential(nn.Dense(units, in_units=3), ctx=cpus(2))


def normalized():
    return small_net(cpus(2), normalize=True)


def of_float64():
    net = dense(4)
    net.cast("float64")
    return net


@pytest.mark.parametrize(
    "make, words",
    [
        (normalized, "of another network"),
        (lambda: dense(5), "weight float32 (4, 3) where this one has float32 (5, 3)"),
        (of_float64, "float32 (4, 3) where this one has float64"),
    ],
)
def test_another_network_is_refused(tmp_path, make, words):
    mgpu.save_checkpoint(dense(4), tmp_path / "c")
    assert words in told(mgpu.load_checkpoint, make(), tmp_path / "c")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "changed", "longer", "gone"])
def test_damaged_files_are_reported(checkpoint, other_run, file, damage):
    path = checkpoint / file
    content = path.read_bytes()
    half = len(content) // 2
    changed = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
    path.write_bytes({"truncated": content[:half], "changed": changed, "longer": content + b"x", "gone": b""}[damage])
    if damage == "gone":
        path.unlink()
    net, trainer = other_run
    before = weights_of(net)
    if (file, damage) == ("manifest.json", "changed"):
        changed_json = path.read_bytes().replace(b'"version": 1', b'"version": [2]')
        path.write_bytes(changed_json)
    message = told(mgpu.load_checkpoint, net, checkpoint, trainer)
    assert file in message and (
        "damaged" in message or (file, damage) == ("manifest.json", "gone") or "something else" in message
    )
    assert largest_difference(weights_of(net), before) == 0.0


def test_a_network_without_values_is_not_saved(tmp_path):
    net = initialized(mx.gluon.nn.Dense(3))
    assert "a network without values" in told(mgpu.save_checkpoint, net, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert "which holds thesis.tex" in told(mgpu.save_checkpoint, dense(4), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    told(mgpu.save_checkpoint, dense(4), tmp_path / "file")


def forge(folder, **files):
    """Replace files, and let the manifest say that they are right."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, content in files.items():
        name = name.replace("_", ".")
        (folder / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("content", ['{"format": "other", "version": 1, "files": {}}', "[]", '{"files": {"../../x": {}}}'])
def test_a_foreign_manifest_is_refused(checkpoint, content):
    (checkpoint / "manifest.json").write_text(content)
    net, trainer, _ = make_run(cpus(1))
    assert "manifest.json, which is " in told(mgpu.load_checkpoint, net, checkpoint, trainer)


class Trap:
    """A pickle of it calls a function when it is read."""

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_nothing_in_a_checkpoint_is_executed(checkpoint, tmp_path):
    trap = Trap()
    trap.folder = str(tmp_path / "trapped")
    array = np.empty(1, object)
    array[0] = trap
    np.savez(tmp_path / "evil.npz", **{"state/0": array})
    forge(checkpoint, states_npz=(tmp_path / "evil.npz").read_bytes())
    net, trainer, _ = make_run(cpus(1))
    assert "'state/0.npy', which is not an array of numbers" in told(mgpu.load_checkpoint, net, checkpoint, trainer)
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(FileExistsError):  # the trap works
        (tmp_path / "trapped").mkdir()
        pickle.loads(pickle.dumps(trap))


def test_a_network_without_values_is_told_to_initialise(tmp_path):
    mgpu.save_checkpoint(initialized(nn.Dense(1, in_units=1)), tmp_path / "c")
    with pytest.raises(TrainerError, match=r"Call net.initialize\(ctx=ctx\) first"):
        mgpu.load_checkpoint(nn.Dense(1, in_units=1), tmp_path / "c")


@pytest.mark.mxnet1("legacy arrays")
def test_legacy_arrays_are_not_read_from_np_arrays(tmp_path):
    mx.npx.set_np()
    try:
        mgpu.save_checkpoint(dense(4), tmp_path / "c")
    finally:
        mx.npx.reset_np()
    assert "saved with mx.npx.set_np()" in told(mgpu.load_checkpoint, dense(4), tmp_path / "c")


# The optimizer and its schedule


def test_what_a_file_cannot_hold_is_reported_before_anything_is_written(tmp_path):
    """DCASGD keeps the weights of the step before on the side."""
    net = dense(4)
    trainer = mgpu.Trainer(net, "dcasgd")
    trainer.optimizer.weight_previous[0] = nd.ones((1,))
    assert "weight_previous of type dict in DCASGD" in told(mgpu.save_checkpoint, net, tmp_path / "c", trainer)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_with_two_names_is_saved_under_both(tmp_path):
    net, other = tied(), tied()
    mgpu.save_checkpoint(net, tmp_path / "c")
    mgpu.load_checkpoint(other, tmp_path / "c")
    assert sorted(mx.nd.load(str(tmp_path / "c" / "net.params"))) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert largest_difference(weights_of(net), weights_of(other)) == 0.0 and other[0].weight is other[1].weight


def tied():
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=3))
    net.add(sharing(net[0], nn.Dense, 3, in_units=3))
    net.initialize(mx.init.Normal(1.0), ctx=cpus(2))
    return net


def test_gradients_that_were_not_applied_are_reported(tmp_path):
    net = small_net(cpus(2))
    trainer = mgpu.Trainer(net, "sgd")
    with trainer.accumulate():
        mgpu.train_batch(net, LOSS, trainer, *small_batches([4])[0])
    with pytest.raises(TrainerError, match="of 4 examples"):
        mgpu.save_checkpoint(net, tmp_path / "c", trainer)
    assert list(tmp_path.iterdir()) == []


# What else goes on


def draws():
    return random.random(), np.random.normal(), mx.nd.random.uniform(shape=(3,)).asnumpy().tolist()


def test_random_numbers_go_on(tmp_path):
    net = dense(4)
    trainer = mgpu.Trainer(net, "sgd")
    np.random.normal()  # NumPy keeps the second one of a pair
    mgpu.save_checkpoint(net, tmp_path / "c", trainer)
    drawn = draws()
    draws()
    mgpu.load_checkpoint(net, tmp_path / "c", trainer)
    assert draws() == drawn
    mgpu.save_checkpoint(net, tmp_path / "c", trainer)
    assert draws() != drawn


def test_a_frozen_graphs_statistics_are_those_of_the_last_step(tmp_path):
    """A graph with static memory writes them without telling the engine: they are waited for, on one device, too."""
    net = small_net(cpus(1), normalize=True, hybridize={"static_alloc": True, "static_shape": True})
    trainer = mgpu.Trainer(net, "sgd")
    ((X, y),) = small_batches([64])
    for _ in range(5):
        mgpu.train_batch(net, LOSS, trainer, X, y)
        mgpu.save_checkpoint(net, tmp_path / "c", trainer)
        mx.nd.waitall()
        saved = mx.nd.load(str(tmp_path / "c" / "net.params"))["2.running_mean"].asnumpy()
        np.testing.assert_array_equal(saved, net[2].running_mean.data().asnumpy())


# Weights and states without the position and the hyper-parameters


def moved_of(trainer):
    """The optimizer's states of one device, and its update counts."""
    states = trainer.steps.update.states().values()
    arrays = [array for state in states for array in (state if isinstance(state, (list, tuple)) else [state])]
    return [array.asnumpy() for array in arrays], trainer.steps.update.counts()


@pytest.mark.parametrize("optimizer, devices_after", [("momentum", 2), ("adam", 1)])
def test_states_only_keep_the_trainers_hyperparameters(tmp_path, optimizer, devices_after):
    first = make_run(cpus(2), optimizer)
    train(*first, epochs=1)
    mgpu.save_checkpoint(first[0], tmp_path / "c", first[1], progress={"batch": 3})
    net = small_net(cpus(devices_after))
    trainer = mgpu.Trainer(net, OPTIMIZERS[optimizer][0], {"learning_rate": 0.025, "wd": 0.5, **STATES_ONLY[optimizer]})
    seed_all(4)
    assert mgpu.load_checkpoint(net, tmp_path / "c", trainer, states_only=True) == {"batch": 3}
    drawn = draws()
    seed_all(4)
    assert drawn == draws()
    assert (trainer.learning_rate, trainer.optimizer.wd, trainer.optimizer.num_update) == (0.025, 0.5, 3)
    assert all(getattr(trainer.optimizer, name) == value for name, value in STATES_ONLY[optimizer].items())
    assert largest_difference(all_of(net), all_of(first[0])) == 0.0
    (mine, counts), (theirs, counts_before) = moved_of(trainer), moved_of(first[1])
    assert largest_difference(mine, theirs) == 0.0 and counts == counts_before and set(counts.values()) == {3}


STATES_ONLY = {"momentum": {"momentum": 0.8}, "adam": {"beta1": 0.8}}


def test_a_resumed_run_keeps_its_position_and_takes_the_trainers_hyperparameters(tmp_path):
    straight = make_run(cpus(2))
    train(*straight, epochs=2)
    straight[1].set_learning_rate(0.02)
    name, options = OPTIMIZERS["momentum"]
    straight[1].optimizer.momentum = 0.5
    train(*straight, epochs=1)

    first = make_run(cpus(2))
    mgpu.fit(*[first[0], LOSS, first[1], first[2]], epochs=2, callbacks=[mgpu.Checkpoint(tmp_path / "run", None)])
    net = small_net(cpus(2))
    trainer = mgpu.Trainer(net, name, {**options, "learning_rate": 0.02, "momentum": 0.5})
    saves = mgpu.Checkpoint(tmp_path / "run", None)
    common = {"epochs": 3, "callbacks": [saves], "resume": "auto"}
    history = mgpu.fit(net, LOSS, trainer, make_loader(), **common)
    assert history.column("epoch") == [1, 2, 3]
    assert history.column("learning_rate") == [0.1, 0.1, 0.02]
    assert largest_difference(weights_of(net), weights_of(straight[0])) == 0.0


def test_states_of_another_form_or_class_raise(tmp_path):
    net, trainer, loader = make_run(cpus(1))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(net, tmp_path / "c", trainer)
    net = small_net(cpus(1))
    for name, expected in (("adam", "expected the same class"), ("sgd", "such as momentum")):
        load = partial(mgpu.load_checkpoint, states_only=True)
        assert expected in told(load, net, tmp_path / "c", mgpu.Trainer(net, name))
    assert "without a trainer" in told(lambda: mgpu.load_checkpoint(net, tmp_path / "c", states_only=True))
    assert not all(has_values(param) for param in net.collect_params().values())  # nothing was loaded


@pytest.mark.mxnet1("bf16 and fp16")
@pytest.mark.parametrize("states_only", [False, True])
def test_the_loss_scale_is_restored(tmp_path, states_only):
    """In float32, since CPUs have no fp16: the scaler does not know what it scales."""
    net = dense(4)
    trainer, other = mgpu.Trainer(net, "sgd"), mgpu.Trainer(net, "sgd")
    trainer.steps.loss_scaler, other.steps.loss_scaler = LossScaler(512.0, every=9), LossScaler(1024.0, every=9)
    mgpu.save_checkpoint(net, tmp_path / "c", trainer)
    mgpu.load_checkpoint(net, tmp_path / "c", other, states_only=states_only)
    assert other.steps.loss_scaler.state() == trainer.steps.loss_scaler.state() == {"scale": 512.0, "num_good": 0}
    trainer.steps.loss_scaler.scale = -1.0
    mgpu.save_checkpoint(net, tmp_path / "d", trainer)
    net[0].weight.set_data(mx.nd.zeros_like(net[0].weight.data()))
    with pytest.raises(StateError, match="which is damaged"):
        mgpu.load_checkpoint(net, tmp_path / "d", other, states_only=states_only)
    assert not net[0].weight.data().asnumpy().any()  # nothing was loaded
