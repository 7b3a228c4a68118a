"""Checkpoints: what is in the folder, that it is always whole, and that fit() goes on from it to the bit."""

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import threading
import zipfile
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint import atomic_folder, snapshot
from gluon_mgpu.errors import SaveError, StateError, TrainerError
from gluon_mgpu.models.seq2seq.callbacks import PlateauSchedule
from gluon_mgpu.trainer.loss_scaler import LossScaler
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import assert_house_style, largest_difference, small_batches, small_net, weights_of

OPTIMIZERS = {
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}),
    "adam": ("adam", {"learning_rate": 0.01}),
}
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def contexts(num_devices):
    return [mx.cpu(i) for i in range(num_devices)]


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


def told(call, *arguments):
    with pytest.raises(StateError) as caught:
        call(*arguments)
    assert_house_style(caught.value)
    return str(caught.value)


def resume(folder, make_before, make_after, forget=""):
    """Networks after two epochs in one go, and after one, saving, and another with everything made again."""
    straight = make_before()
    train(*straight, epochs=2)
    first = make_before()
    train(*first, epochs=1)
    mgpu.save_checkpoint(folder, first[0], first[1], {"epoch": first[2].epoch})
    del first
    small_net(contexts(1))  # other layers were made in between, so that the names of parameters differ
    net, trainer, loader = make_after()
    progress = mgpu.load_checkpoint(folder, net, None if forget == "optimizer" else trainer)
    loader.epoch = 0 if forget == "epoch" else progress["epoch"]
    train(net, trainer, loader, epochs=1)
    assert mgpu.replica_difference(net) == 0.0
    assert trainer.learning_rate == straight[1].learning_rate
    return straight[0], net


@pytest.mark.pairwise
@pytest.mark.parametrize("optimizer, normalize", [("momentum", False), ("adam", True)], ids=["plain", "batch norm"])
def test_resuming_on_the_same_devices_shows_in_no_bit(tmp_path, devices, arrays, optimizer, normalize):
    make = partial(make_run, devices, optimizer, normalize=normalize)
    straight, resumed = resume(tmp_path / "c", make, make)
    assert largest_difference(weights_of(straight), weights_of(resumed)) == 0.0


@pytest.mark.parametrize("before, after, optimizer", [(1, 3, "momentum"), (2, 1, "adam"), (3, 2, "momentum")])
def test_resuming_on_other_devices_shows_in_no_digit(tmp_path, before, after, optimizer):
    makes = [partial(make_run, contexts(num_devices), optimizer) for num_devices in (before, after)]
    straight, resumed = resume(tmp_path / "c", *makes)
    assert largest_difference(weights_of(straight), weights_of(resumed)) <= 1e-5


def test_the_statistics_of_batch_norm_go_on(tmp_path):
    """They are one set per device until they are saved or evaluated; their mean is what counts."""
    make = partial(make_run, contexts(3), normalize=True)
    straight, resumed = resume(tmp_path / "c", make, make)
    mgpu.average_running_stats(straight)
    mgpu.average_running_stats(resumed)
    for mine, theirs in zip(all_of(straight), all_of(resumed)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("forget, optimizer", [("optimizer", "momentum"), ("optimizer", "adam"), ("epoch", "momentum")])
def test_what_is_forgotten_shows(tmp_path, optimizer, forget):
    """The tests above can fail: each thing that a checkpoint brings back matters."""
    make = partial(make_run, contexts(2), optimizer)
    straight, resumed = resume(tmp_path / "c", make, make, forget)
    assert largest_difference(weights_of(straight), weights_of(resumed)) > 1e-4


def test_a_schedule_goes_on(tmp_path):
    """Six steps in all; the learning rate is halved after the second and the fourth."""

    def make():
        schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
        net = small_net(contexts(2))
        return net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "lr_scheduler": schedule}), make_loader()

    straight, resumed = resume(tmp_path / "c", make, make)
    assert largest_difference(weights_of(straight), weights_of(resumed)) == 0.0


def test_a_compiled_network_goes_on(tmp_path):
    static = {"static_alloc": True, "static_shape": True}
    make = partial(make_run, contexts(2), "adam", normalize=True, hybridize=static)
    straight, resumed = resume(tmp_path / "c", make, make)
    assert largest_difference(weights_of(straight), weights_of(resumed)) == 0.0


# What is in the folder


ALONE = ["manifest.json", "net.params", "progress.json"]
FILES = [*ALONE, "states.npz", "training.json"]


def test_a_checkpoint_is_five_files(tmp_path):
    net, trainer, loader = make_run(contexts(2))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(tmp_path / "new" / "c", net, trainer, {"epoch": 7, "note": "schön"})
    assert sorted(path.name for path in (tmp_path / "new" / "c").iterdir()) == FILES
    assert json.loads((tmp_path / "new" / "c" / "progress.json").read_text(encoding="utf-8")) == {"epoch": 7, "note": "schön"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c"]


def test_a_network_alone_is_a_checkpoint(tmp_path):
    net, trainer, loader = make_run(contexts(3))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(str(tmp_path / "c"), net)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ALONE
    other = small_net(contexts(1))
    assert mgpu.load_checkpoint(str(tmp_path / "c"), other) == {}
    assert largest_difference(all_of(other), all_of(net)) == 0.0
    assert "without states.npz, training.json" in told(mgpu.load_checkpoint, tmp_path / "c", net, trainer)


def test_plain_gluon_reads_the_network(tmp_path, arrays):
    net, trainer, loader = make_run(contexts(3), normalize=True)
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    plain = small_net([mx.cpu(4)], normalize=True)
    plain.load_parameters(str(tmp_path / "c" / "net.params"), ctx=mx.cpu(4))
    mgpu.average_running_stats(net)
    assert largest_difference(all_of(plain), all_of(net)) == 0.0


def test_what_is_saved_is_what_evaluate_measures(tmp_path):
    """BatchNorm's running statistics are one set per device; their mean is saved, and the devices keep their own."""
    net = nn.BatchNorm(in_channels=2)
    net.initialize(ctx=contexts(3))
    for i, context in enumerate(contexts(3)):
        net.running_mean.data(context)[:] = mx.nd.array([i, 10 * i])
    mgpu.save_checkpoint(tmp_path / "c", net)
    for i, context in enumerate(contexts(3)):
        assert net.running_mean.data(context).asnumpy().tolist() == [i, 10 * i]
    other = nn.BatchNorm(in_channels=2)
    other.initialize(ctx=contexts(2))
    mgpu.load_checkpoint(tmp_path / "c", other)
    assert other.running_mean.data(mx.cpu(1)).asnumpy().tolist() == [1.0, 10.0]


def test_parameters_whose_shape_is_unknown_are_loaded(tmp_path):
    net, trainer, loader = make_run(contexts(3))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(tmp_path / "c", net)
    fresh = small_net(contexts(2))
    assert fresh[0].weight.shape == (4, 0, 3, 3)
    mgpu.load_checkpoint(tmp_path / "c", fresh)
    assert largest_difference(all_of(fresh), all_of(net)) == 0.0


# A folder of this name is whole


def saved_twice(folder, monkeypatch, break_second=None):
    """A checkpoint of ones, replaced by one of twos, or not, if that breaks."""
    net = nn.Dense(1, in_units=1)
    net.initialize(mx.init.One(), ctx=contexts(2))
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0})
    mgpu.save_checkpoint(folder, net, trainer, {"number": 1})
    net.weight.set_data(mx.nd.array([[2.0]]))
    if break_second is not None:
        monkeypatch.setattr(*break_second)
        with pytest.raises(OSError, match="disk full"):
            mgpu.save_checkpoint(folder, net, trainer, {"number": 2})
        monkeypatch.undo()
    else:
        mgpu.save_checkpoint(folder, net, trainer, {"number": 2})
    return net, trainer


def number_in(folder, net, trainer):
    number = mgpu.load_checkpoint(folder, net, trainer)["number"]
    assert [net.weight.data(context).asscalar() for context in contexts(2)] == [number, number]
    return number


def test_a_checkpoint_is_replaced(tmp_path, monkeypatch):
    run = saved_twice(tmp_path / "c", monkeypatch)
    assert number_in(tmp_path / "c", *run) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def disk_full(*arguments, **kwargs):
    raise OSError("disk full")


@pytest.mark.parametrize("where", [(snapshot, "write_params"), (snapshot, "_write_arrays"), (os, "fsync"), (os, "open")])
def test_saving_that_fails_leaves_the_old_one(tmp_path, monkeypatch, where):
    net, trainer = saved_twice(tmp_path / "c", monkeypatch, (*where, disk_full))
    assert number_in(tmp_path / "c", net, trainer) == 1
    mgpu.save_checkpoint(tmp_path / "c", net, trainer, {"number": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]  # what the failure left is gone


@pytest.mark.parametrize("which_rename", [1, 2])
def test_a_program_that_is_killed_between_the_renames_leaves_a_whole_one(tmp_path, monkeypatch, which_rename):
    """Killed: nothing after this point runs, not even cleaning up."""
    path_class = type(tmp_path)
    rename, renamed = path_class.rename, []

    def killed(self, target):
        renamed.append(target)
        if len(renamed) == which_rename:
            raise OSError("disk full")
        return rename(self, target)

    net, trainer = saved_twice(tmp_path / "c", monkeypatch, (path_class, "rename", killed))
    assert number_in(tmp_path / "c", net, trainer) == which_rename  # the old one, or the new one, which is whole by now
    net.weight.set_data(mx.nd.array([[3.0]]))
    mgpu.save_checkpoint(tmp_path / "c", net, trainer, {"number": 3})
    assert number_in(tmp_path / "c", net, trainer) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def adam_after(steps):
    """A network and its trainer after so many steps: the weights and Adam's counts say how many."""
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Zero(), ctx=contexts(2))
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 1.0})
    for step in range(steps):
        net.weight.set_data(mx.nd.array([[step]]))
        mgpu.train_batch(net, lambda output, label: output.reshape((-1,)), trainer, mx.nd.ones((2, 1)), mx.nd.ones((2,)))
    net.weight.set_data(mx.nd.array([[steps]]))
    return net, trainer


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_one_of_the_two(tmp_path, monkeypatch):
    """Its checksums were compared, and then its files were opened again by their path: weights of step 4, counts of step 2."""
    mgpu.save_checkpoint(tmp_path / "c", *adam_after(2))
    second, check = adam_after(4), atomic_folder.OpenFolder.check

    def replaced(opened, operation):
        manifest = check(opened, operation)
        mgpu.save_checkpoint(tmp_path / "c", *second)
        return manifest

    net, trainer = adam_after(0)
    monkeypatch.setattr(atomic_folder.OpenFolder, "check", replaced)
    for steps in (2, 4):
        mgpu.load_checkpoint(tmp_path / "c", net, trainer)
        assert net.weight.data(mx.cpu(1)).asscalar() == steps
        assert set(trainer._update.counts().values()) == {steps}


def test_a_checkpoint_is_read_while_another_thread_writes_it(tmp_path):
    """One of the two each time, and no error: between two renames, none has the name."""
    snapshots = [snapshot.take_snapshot(*adam_after(steps), {"steps": steps}) for steps in (1, 2)]
    done = threading.Event()

    def write():
        for number in count():
            with atomic_folder.new_folder(tmp_path / "c") as new:
                snapshots[number % 2].write(new)
            atomic_folder.commit(tmp_path / "c")
            if done.is_set():
                return

    mgpu.save_checkpoint(tmp_path / "c", *adam_after(1), {"steps": 1})
    net, trainer = adam_after(0)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(30):
            steps = mgpu.load_checkpoint(tmp_path / "c", net, trainer)["steps"]
            assert net.weight.data(mx.cpu(0)).asscalar() == steps and set(trainer._update.counts().values()) == {steps}
    finally:
        done.set()
        thread.join()


# What is refused


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    net, trainer, _ = make_run(contexts(1))
    for folder in (tmp_path, tmp_path / "not there"):
        message = told(mgpu.load_checkpoint, folder, net, trainer)
        assert f"got {folder} without net.params, progress.json" in message


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "c"
    net, trainer, loader = make_run(contexts(2))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(folder, net, trainer)
    return folder


@pytest.fixture
def checkpoint(saved_once, tmp_path):
    """The same checkpoint each time, in a folder that the test may change."""
    return Path(shutil.copytree(saved_once, tmp_path / "c"))


@pytest.fixture(scope="module")
def other_run():
    """A network with known shapes, and its trainer, into which no test loads anything."""
    net, trainer, _ = make_run(contexts(2))
    mgpu.eval_batch(net, *small_batches([4])[0], contexts(2))
    return net, trainer


def dense(units):
    net = nn.HybridSequential()
    net.add(nn.Dense(units, in_units=3))
    net.initialize(ctx=contexts(2))
    return net


def test_another_network_is_refused(checkpoint):
    assert f"got {checkpoint} of another network" in told(mgpu.load_checkpoint, checkpoint, dense(4))
    normalized = small_net(contexts(2), normalize=True)
    assert f"got {checkpoint} of another network" in told(mgpu.load_checkpoint, checkpoint, normalized)


def test_other_shapes_are_refused(tmp_path):
    mgpu.save_checkpoint(tmp_path / "c", dense(4))
    message = told(mgpu.load_checkpoint, tmp_path / "c", dense(5))
    assert "weight float32 (4, 3) where this one has float32 (5, 3)" in message


def test_another_optimizer_is_refused(checkpoint):
    net, trainer, _ = make_run(contexts(2), "adam")
    mgpu.eval_batch(net, *small_batches([4])[0], contexts(2))
    assert "of a trainer with SGD where this one has Adam" in told(mgpu.load_checkpoint, checkpoint, net, trainer)


def test_a_trainer_of_another_mxnet_is_refused(checkpoint, monkeypatch):
    """MXNet 2 moved each optimizer to a module of its own, and gave it other attributes: `SGD where this one has SGD`."""
    net, trainer, _ = make_run(contexts(2))
    monkeypatch.setattr(type(trainer.optimizer), "__module__", "mxnet.optimizer.sgd")
    message = told(mgpu.load_checkpoint, checkpoint, net, trainer)
    assert "mxnet.optimizer.optimizer.SGD, of another version of MXNet" in message and "the network alone" in message


def test_what_is_refused_changes_nothing(checkpoint, tmp_path):
    """Gluon assigns parameter by parameter as it reads them: a wrong last layer was told when the first were overwritten."""
    net, trainer, _ = make_run(contexts(2), "adam")
    mgpu.eval_batch(net, *small_batches([4])[0], contexts(2))
    before = weights_of(net)
    told(mgpu.load_checkpoint, checkpoint, net, trainer)  # another optimizer
    assert largest_difference(weights_of(net), before) == 0.0


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
        changed_json = path.read_bytes().replace(b'"version": 2', b'"version": [2]')
        path.write_bytes(changed_json)
    message = told(mgpu.load_checkpoint, checkpoint, net, trainer)
    assert file in message and (
        "damaged" in message or (file, damage) == ("manifest.json", "gone") or "something else" in message
    )
    if damage in ("truncated", "longer") and file != "manifest.json":
        assert f"{path.stat().st_size} bytes of {len(content)}" in message
    assert largest_difference(weights_of(net), before) == 0.0


def test_a_network_without_values_is_not_saved(tmp_path):
    net = mx.gluon.nn.Dense(3)
    net.initialize()
    assert "a network without values" in told(mgpu.save_checkpoint, tmp_path / "c", net)
    assert list(tmp_path.iterdir()) == []


def test_progress_that_json_cannot_hold_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        mgpu.save_checkpoint(tmp_path / "c", dense(4), progress={"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert "which holds thesis.tex" in told(mgpu.save_checkpoint, tmp_path / "mine", dense(4))
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    told(mgpu.save_checkpoint, tmp_path / "file", dense(4))


def test_files_can_be_read_by_others(checkpoint):
    """As every file that is written here: as the umask says."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in checkpoint.iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_another_dtype_is_refused(tmp_path):
    mgpu.save_checkpoint(tmp_path / "c", dense(4))
    net = dense(4)
    net.cast("float64")
    assert "float32 (4, 3) where this one has float64" in told(mgpu.load_checkpoint, tmp_path / "c", net)


def forge(folder, **files):
    """Replace files, and let the manifest say that they are right."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, content in files.items():
        name = name.replace("_", ".")
        (folder / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_newer_version_is_refused(checkpoint):
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    net, trainer, _ = make_run(contexts(1))
    assert "of version 3; expected 2 or older. Install a newer gluon_mgpu" in told(mgpu.load_checkpoint, checkpoint, net, trainer)


@pytest.mark.parametrize("content", ['{"format": "other", "version": 1, "files": {}}', "[]", "", '{"files": {"../../x": {}}}'])
def test_a_foreign_manifest_is_refused(checkpoint, content):
    (checkpoint / "manifest.json").write_text(content)
    net, trainer, _ = make_run(contexts(1))
    assert "manifest.json, which is " in told(mgpu.load_checkpoint, checkpoint, net, trainer)


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
    net, trainer, _ = make_run(contexts(1))
    assert "states.npz, which is damaged" in told(mgpu.load_checkpoint, checkpoint, net, trainer)
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(FileExistsError):  # the trap works
        (tmp_path / "trapped").mkdir()
        pickle.loads(pickle.dumps(trap))


@pytest.mark.parametrize("name", ["names", "optimizer", "states", "counts", "random", "devices", "shapes"])
def test_a_file_that_lacks_something_is_reported(checkpoint, other_run, name):
    training = json.loads((checkpoint / "training.json").read_text())
    del training[name]
    forge(checkpoint, training_json=json.dumps(training).encode())
    net, trainer = other_run
    assert f"training.json without {name}; expected it." in told(mgpu.load_checkpoint, checkpoint, net, trainer)


def test_states_of_other_shapes_are_refused(checkpoint, other_run, tmp_path):
    with np.load(checkpoint / "states.npz") as file:
        arrays = {name: array[:1] for name, array in file.items()}
    np.savez(tmp_path / "other.npz", **arrays)
    forge(checkpoint, states_npz=(tmp_path / "other.npz").read_bytes())
    net, trainer = other_run
    before = weights_of(net)
    assert "expected shape" in told(mgpu.load_checkpoint, checkpoint, net, trainer)
    assert largest_difference(weights_of(net), before) == 0.0


def test_folders_of_the_version_before_give_the_network_and_execute_nothing(tmp_path):
    net, trainer, loader = make_run(contexts(2))
    train(net, trainer, loader, epochs=1)
    old = tmp_path / "old"
    old.mkdir()
    net.save_parameters(str(old / "net.params"))
    trainer.save_states(str(old / "trainer.states"))
    (old / "progress.json").write_text('{"epoch": 4}')
    other, again, _ = make_run(contexts(1))
    message = told(mgpu.load_checkpoint, old, other, again)
    assert "trainer.states is a pickle" in message and "load_states" in message
    assert mgpu.load_checkpoint(old, other) == {"epoch": 4}
    assert largest_difference(weights_of(other), weights_of(net)) == 0.0
    again.load_states(str(old / "trainer.states"))  # whoever trusts it
    mgpu.save_checkpoint(old, other, again)  # and the folder is replaced
    assert sorted(path.name for path in old.iterdir()) == FILES


def test_legacy_arrays_are_not_read_from_np_arrays(tmp_path):
    mx.npx.set_np()
    try:
        mgpu.save_checkpoint(tmp_path / "c", dense(4))
    finally:
        mx.npx.reset_np()
    assert "saved with mx.npx.set_np()" in told(mgpu.load_checkpoint, tmp_path / "c", dense(4))


# The optimizer and its schedule


def cosine(**options):
    return mx.lr_scheduler.CosineScheduler(**{"max_update": 100, "base_lr": 0.1, **options})


@pytest.mark.parametrize(
    "saved, made, difference",
    [
        ({"momentum": 0.9}, {"momentum": 0.5}, "momentum 0.9 where this one has 0.5"),
        ({"momentum": 0.9}, {}, "momentum 0.9 where this one has 0.0"),
        ({"wd": 0.1}, {"wd": 0.2}, "wd 0.1 where this one has 0.2"),
        ({"clip_gradient": 1.0}, {}, "clip_gradient 1.0 where this one has None"),
        ({"lr_scheduler": cosine()}, {}, "CosineScheduler as its schedule where this one has none"),
        (
            {"lr_scheduler": cosine()},
            {"lr_scheduler": cosine(max_update=200)},
            "schedule's max_update 100 where this one has 200",
        ),
        (
            {"lr_scheduler": cosine()},
            {"lr_scheduler": mx.lr_scheduler.FactorScheduler(3, base_lr=0.1)},
            "schedule's CosineScheduler where this one has FactorScheduler",
        ),
    ],
)
def test_other_options_are_refused_by_name(tmp_path, saved, made, difference):
    first, second = ({"learning_rate": 0.1, **options} for options in (saved, made))
    net = dense(4)
    mgpu.save_checkpoint(tmp_path / "c", net, mgpu.Trainer(net, "sgd", first))
    assert difference in told(mgpu.load_checkpoint, tmp_path / "c", net, mgpu.Trainer(net, "sgd", second))


def test_a_learning_rate_that_was_set_goes_on(tmp_path):
    net = dense(4)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    trainer.set_learning_rate(0.025)
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    other = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    mgpu.load_checkpoint(tmp_path / "c", net, other)
    assert other.learning_rate == 0.025


def test_the_loss_scale_is_restored(tmp_path):
    """In float32, since CPUs have no fp16: the scaler does not know what it scales."""
    net = dense(4)
    trainer, other = mgpu.Trainer(net, "sgd"), mgpu.Trainer(net, "sgd")
    trainer.loss_scaler, other.loss_scaler = LossScaler(512.0, every=9), LossScaler(1024.0, every=9)
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    mgpu.load_checkpoint(tmp_path / "c", net, other)
    assert other.loss_scaler.state() == trainer.loss_scaler.state() == {"scale": 512.0, "num_good": 0}


def test_the_schedule_stays_the_object_that_it_is(tmp_path):
    """A callback that moves it, such as Plateau, holds it, too."""
    net = dense(4)
    schedules = [PlateauSchedule(0.5, warmup_steps=2) for _ in range(2)]
    trainers = [mgpu.Trainer(net, "sgd", {"learning_rate": 0.5, "lr_scheduler": schedule}) for schedule in schedules]
    schedules[0].factor = 0.25
    mgpu.save_checkpoint(tmp_path / "c", net, trainers[0])
    mgpu.load_checkpoint(tmp_path / "c", net, trainers[1])
    assert trainers[1].optimizer.lr_scheduler is schedules[1]
    assert schedules[1].factor == 0.25


KINDS = {
    "nag": {"momentum": 0.9},
    "rmsprop": {"centered": True},
    "nadam": {},
    "lamb": {},
    "adagrad": {},
    "ftml": {},
}
MORE_KINDS = {"adamw": {}, "adadelta": {}, "ftrl": {}, "adamax": {}, "signum": {}, "lars": {"momentum": 0.9}}


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_KINDS)])
@pytest.mark.usefixtures("fresh_names")
def test_optimizers_go_on(tmp_path, name):
    batches, options = small_batches([4] * 4), {**KINDS, **MORE_KINDS}[name]
    nets = []
    for stop in (None, 2):
        net = small_net(contexts(2))
        nets.append(net)
        trainer = mgpu.Trainer(net, name, dict(options))
        for i, (X, y) in enumerate(batches):
            if i == stop:
                mgpu.save_checkpoint(tmp_path / "c", net, trainer)
                trainer = mgpu.Trainer(net, name, dict(options))
                for param in net.collect_params().values():
                    param.set_data(param.data(mx.cpu(0)) * 0)
                mgpu.load_checkpoint(tmp_path / "c", net, trainer)
            mgpu.train_batch(net, LOSS, trainer, X, y)
    assert largest_difference(*map(weights_of, nets)) == 0.0


def test_what_a_file_cannot_hold_is_told_before_anything_is_written(tmp_path):
    """DCASGD keeps the weights of the step before on the side."""
    net = dense(4)
    trainer = mgpu.Trainer(net, "dcasgd")
    trainer.optimizer.weight_previous[0] = mx.nd.ones((1,))
    assert "weight_previous of type dict in DCASGD" in told(mgpu.save_checkpoint, tmp_path / "c", net, trainer)
    assert list(tmp_path.iterdir()) == []


class Noting(mx.optimizer.SGD):
    """Keeps an object as the state of each weight."""

    def create_state(self, index, weight):
        return SimpleNamespace(number=index)

    def update(self, index, weight, grad, state):
        self._update_count(index)


def test_a_state_that_no_file_can_hold_is_told(tmp_path):
    net = small_net(contexts(2))
    trainer = mgpu.Trainer(net, Noting())
    mgpu.train_batch(net, LOSS, trainer, *small_batches([4])[0])
    assert "got SimpleNamespace as an optimizer's state" in told(mgpu.save_checkpoint, tmp_path / "c", net, trainer)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_with_two_names_is_saved_under_both(tmp_path):
    net, other = tied(), tied()
    mgpu.save_checkpoint(tmp_path / "c", net)
    mgpu.load_checkpoint(tmp_path / "c", other)
    assert sorted(mx.nd.load(str(tmp_path / "c" / "net.params"))) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert largest_difference(weights_of(net), weights_of(other)) == 0.0 and other[0].weight is other[1].weight


def tied():
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=3))
    net.add(nn.Dense(3, in_units=3, params=net[0].params))
    net.initialize(mx.init.Normal(1.0), ctx=contexts(2))
    return net


def test_gradients_that_were_not_applied_are_told(tmp_path):
    net = small_net(contexts(2))
    trainer = mgpu.Trainer(net, "sgd")
    with trainer.accumulate():
        mgpu.train_batch(net, LOSS, trainer, *small_batches([4])[0])
    with pytest.raises(TrainerError, match="got gradients of 4 examples that were not applied") as caught:
        mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    assert_house_style(caught.value)
    assert list(tmp_path.iterdir()) == []


# What else goes on


def draws():
    return random.random(), np.random.normal(), mx.nd.random.uniform(shape=(3,)).asnumpy().tolist()


def test_random_numbers_go_on(tmp_path):
    net = dense(4)
    trainer = mgpu.Trainer(net, "sgd")
    np.random.normal()  # NumPy keeps the second one of a pair
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    drawn = draws()
    draws()
    mgpu.load_checkpoint(tmp_path / "c", net, trainer)
    assert draws() == drawn
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    assert draws() != drawn


def test_two_programs_with_one_seed_draw_alike_after_saving(tmp_path):
    found = []
    for _ in range(2):
        mx.random.seed(5)
        net = dense(4)
        mgpu.save_checkpoint(tmp_path / "c", net, mgpu.Trainer(net, "sgd"))
        found.append(mx.nd.random.uniform(shape=(3,)).asnumpy().tolist())
    assert found[0] == found[1]


def test_each_device_has_its_own_statistics_again(tmp_path):
    nets = [mgpu.set_batch_norm(small_net(contexts(2), normalize=True), "local") for _ in range(2)]
    trainers = [mgpu.Trainer(net, "sgd") for net in nets]
    mgpu.train_batch(nets[0], LOSS, trainers[0], *small_batches([9])[0])
    mgpu.save_checkpoint(tmp_path / "c", nets[0], trainers[0])
    mgpu.load_checkpoint(tmp_path / "c", nets[1], trainers[1])
    for context in contexts(2):
        means = [net[2].running_mean.data(context).asnumpy() for net in nets]
        assert largest_difference(means[:1], means[1:]) == 0.0
    assert largest_difference(means[1:], [nets[1][2].running_mean.data(mx.cpu(0)).asnumpy()]) > 0.0


def test_a_frozen_graphs_statistics_are_those_of_the_last_step(tmp_path):
    """A graph with static memory writes them without telling the engine: they are waited for, on one device, too."""
    net = small_net(contexts(1), normalize=True, hybridize={"static_alloc": True, "static_shape": True})
    trainer = mgpu.Trainer(net, "sgd")
    ((X, y),) = small_batches([64])
    for _ in range(5):
        mgpu.train_batch(net, LOSS, trainer, X, y)
        mgpu.save_checkpoint(tmp_path / "c", net, trainer)
        mx.nd.waitall()
        saved = mx.nd.load(str(tmp_path / "c" / "net.params"))["2.running_mean"].asnumpy()
        np.testing.assert_array_equal(saved, net[2].running_mean.data().asnumpy())


# A disk that is full


def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path):
    net = dense(400)
    trainer = mgpu.Trainer(net, "sgd")
    mgpu.save_checkpoint(tmp_path / "c", net, trainer, {"number": 1})
    before = weights_of(net)
    net[0].weight.set_data(net[0].weight.data(mx.cpu(0)) * 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            mgpu.save_checkpoint(tmp_path / "c", net, trainer, {"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert mgpu.load_checkpoint(tmp_path / "c", net, trainer) == {"number": 1}
    assert largest_difference(weights_of(net), before) == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 96 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "gluon_mgpu_test", str(disk)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_old_one(small_disk):
    net = dense(4000)  # 64 KB
    trainer = mgpu.Trainer(net, "sgd")
    mgpu.save_checkpoint(small_disk / "c", net, trainer, {"number": 1})
    for _ in range(2):
        with pytest.raises(
            SaveError,
            match=r"written .No space left on device, 64,000 bytes needed, .* free.; expected enough disk space.* is kept",
        ):
            mgpu.save_checkpoint(small_disk / "c", net, trainer, {"number": 2})
        assert mgpu.load_checkpoint(small_disk / "c", net, trainer) == {"number": 1}
        assert [path.name for path in small_disk.iterdir()] == ["c"]


def test_states_are_a_zip_of_plain_arrays(checkpoint):
    """Read by NumPy, or by anything that knows zip."""
    with zipfile.ZipFile(checkpoint / "states.npz") as archive:
        assert archive.testzip() is None
    with np.load(checkpoint / "states.npz", allow_pickle=False) as file:
        assert {array.dtype.name for _, array in file.items()} == {"float32"}
    training = json.loads((checkpoint / "training.json").read_text())
    assert training["optimizer"]["values"]["momentum"] == 0.9
    assert set(training["versions"]) == {"gluon_mgpu", "mxnet", "numpy", "python"}


# Weights and states without the position and the hyper-parameters


def moved_of(trainer):
    """The optimizer's states of one device, and its update counts."""
    states = [trainer._updaters[0].states[index] for index in sorted(trainer._updaters[0].states)]
    arrays = [array for state in states for array in (state if isinstance(state, (list, tuple)) else [state])]
    return [array.asnumpy() for array in arrays], trainer._update.counts()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("devices_after", [1, 2])
def test_states_only_keep_the_trainers_hyperparameters(tmp_path, optimizer, devices_after):
    first = make_run(contexts(2), optimizer)
    train(*first, epochs=1)
    mgpu.save_checkpoint(tmp_path / "c", first[0], first[1], {"batch": 3})
    name, options = OPTIMIZERS[optimizer]
    other = {**options, "learning_rate": 0.025, "wd": 0.5, **({"momentum": 0.8} if optimizer == "momentum" else {"beta1": 0.8})}
    net = small_net(contexts(devices_after))
    trainer = mgpu.Trainer(net, name, other)
    random.seed(4)
    np.random.seed(4)
    mx.random.seed(4)
    assert mgpu.load_checkpoint(tmp_path / "c", net, trainer, states_only=True) == {"batch": 3}
    assert trainer.learning_rate == 0.025
    assert all(getattr(trainer.optimizer, {"learning_rate": "lr"}.get(key, key)) == value for key, value in other.items())
    assert trainer.optimizer.num_update == 3
    assert largest_difference(all_of(net), all_of(first[0])) == 0.0
    (mine, counts), (theirs, counts_before) = moved_of(trainer), moved_of(first[1])
    assert largest_difference(mine, theirs) == 0.0 and counts == counts_before and set(counts.values()) == {3}
    drawn = random.random(), np.random.random(), mx.nd.random.uniform(shape=(2,)).asnumpy().tolist()
    random.seed(4)
    np.random.seed(4)
    mx.random.seed(4)
    assert drawn == (random.random(), np.random.random(), mx.nd.random.uniform(shape=(2,)).asnumpy().tolist())


def test_states_only_are_those_of_a_run_that_changed_its_learning_rate(tmp_path):
    """As if the first trainer had got the other learning rate after its first epoch."""
    straight = make_run(contexts(2))
    train(*straight, epochs=1)
    straight[1].set_learning_rate(0.01)
    train(*straight, epochs=1)
    first = make_run(contexts(2))
    train(*first, epochs=1)
    mgpu.save_checkpoint(tmp_path / "c", *first[:2])
    name, options = OPTIMIZERS["momentum"]
    net = small_net(contexts(2))
    trainer, loader = mgpu.Trainer(net, name, {**options, "learning_rate": 0.01}), make_loader()
    mgpu.load_checkpoint(tmp_path / "c", net, trainer, states_only=True)
    loader.epoch = 1
    train(net, trainer, loader, epochs=1)
    assert largest_difference(weights_of(net), weights_of(straight[0])) == 0.0


@pytest.mark.parametrize("make", [lambda: mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.4), lambda: PlateauSchedule(0.4)])
def test_a_schedule_of_other_options_follows_the_update_counts(tmp_path, make):
    net = small_net(contexts(1))
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.1, base_lr=0.1)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "lr_scheduler": schedule})
    train(net, trainer, make_loader(), epochs=2)
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    net = small_net(contexts(1))
    schedule = make()
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.4, "momentum": 0.9, "lr_scheduler": schedule})
    mgpu.load_checkpoint(tmp_path / "c", net, trainer, states_only=True)
    expected = 0.4 if isinstance(schedule, PlateauSchedule) else 0.1  # halved after updates 2 and 4, of 6
    assert trainer.learning_rate == pytest.approx(expected)


def test_a_factor_that_a_callback_lowered_stays(tmp_path):
    def make(learning_rate):
        net, schedule = small_net(contexts(1)), PlateauSchedule(learning_rate)
        return net, mgpu.Trainer(net, "sgd", {"learning_rate": learning_rate, "lr_scheduler": schedule}), schedule

    net, trainer, schedule = make(0.1)
    train(net, trainer, make_loader(), epochs=1)
    schedule.factor = 0.25
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    net, trainer, schedule = make(0.8)
    mgpu.load_checkpoint(tmp_path / "c", net, trainer, states_only=True)
    assert trainer.learning_rate == pytest.approx(0.2)


def test_a_resumed_run_keeps_its_position_and_takes_the_trainers_hyperparameters(tmp_path):
    straight = make_run(contexts(2))
    train(*straight, epochs=2)
    straight[1].set_learning_rate(0.02)
    name, options = OPTIMIZERS["momentum"]
    straight[1].optimizer.momentum = 0.5
    train(*straight, epochs=1)

    first = make_run(contexts(2))
    mgpu.fit(*[first[0], LOSS, first[1], first[2]], epochs=2, callbacks=[mgpu.Checkpoint(tmp_path / "run", None)])
    net = small_net(contexts(2))
    trainer = mgpu.Trainer(net, name, {**options, "learning_rate": 0.02, "momentum": 0.5})
    saves = mgpu.Checkpoint(tmp_path / "run", None)
    common = {"epochs": 3, "callbacks": [saves], "resume": "auto"}
    before = weights_before(net)
    assert "momentum 0.9 where this one has 0.5" in told(lambda: mgpu.fit(net, LOSS, trainer, make_loader(), **common))
    assert weights_before(net) == before  # nothing was changed
    history = mgpu.fit(net, LOSS, trainer, make_loader(), hyperparameters="trainer", **common)
    assert history.column("epoch") == [1, 2, 3]
    assert history.column("learning_rate") == [0.1, 0.1, 0.02]
    assert largest_difference(weights_of(net), weights_of(straight[0])) == 0.0


def weights_before(net):
    """Which parameters have no values yet."""
    return [param._data is None for param in net.collect_params().values()]


def test_states_of_another_form_or_class_raise(tmp_path):
    net, trainer, loader = make_run(contexts(1))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    net = small_net(contexts(1))
    before = weights_before(net)
    for name, options, expected in (("adam", {}, "SGD where this one has Adam"), ("sgd", {}, "such as momentum")):
        other = mgpu.Trainer(net, name, options)
        assert expected in told(lambda: mgpu.load_checkpoint(tmp_path / "c", net, other, states_only=True))  # noqa: B023
    assert weights_before(net) == before and any(before)
    assert "without a trainer" in told(lambda: mgpu.load_checkpoint(tmp_path / "c", net, states_only=True))
    with pytest.raises(TrainerError) as caught:
        mgpu.fit(net, LOSS, trainer, loader, epochs=1, hyperparameters="mine")
    assert_house_style(caught.value)


def test_the_loss_scale_is_one_of_the_states(tmp_path):
    def make():
        net = small_net(contexts(1))
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        trainer.loss_scaler = LossScaler(8.0)
        return net, trainer

    net, trainer = make()
    train(net, trainer, make_loader(), epochs=1)
    trainer.loss_scaler.scale = 2.0
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    net, trainer = make()
    mgpu.load_checkpoint(tmp_path / "c", net, trainer, states_only=True)
    assert trainer.loss_scaler.scale == 2.0
