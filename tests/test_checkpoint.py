"""Checkpoints: what is in the folder, that it is always whole, and that fit() goes on from it to the bit."""

import json
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import StateError
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
    """Networks after four epochs in one go, and after two, saving, and two more with everything made anew."""
    straight = make_before()
    train(*straight, epochs=4)
    first = make_before()
    train(*first, epochs=2)
    mgpu.save_checkpoint(folder, first[0], first[1], {"epoch": first[2].epoch})
    del first
    small_net(contexts(1))  # other layers were made in between, so that the names of parameters differ
    net, trainer, loader = make_after()
    progress = mgpu.load_checkpoint(folder, net, None if forget == "optimizer" else trainer)
    loader.epoch = 0 if forget == "epoch" else progress["epoch"]
    train(net, trainer, loader, epochs=2)
    assert mgpu.replica_difference(net) == 0.0
    assert trainer.learning_rate == straight[1].learning_rate
    return straight[0], net


@pytest.mark.parametrize("optimizer, normalize", [("momentum", False), ("adam", True)], ids=["plain", "batch norm"])
def test_resuming_on_the_same_devices_shows_in_no_bit(tmp_path, devices, arrays, optimizer, normalize):
    make = partial(make_run, devices, optimizer, normalize=normalize)
    straight, resumed = resume(tmp_path / "c", make, make)
    assert largest_difference(weights_of(straight), weights_of(resumed)) == 0.0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before, after", [(1, 3), (2, 1), (2, 3), (3, 2)])
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("forget", ["optimizer", "epoch"])
def test_what_is_forgotten_shows(tmp_path, optimizer, forget):
    """The tests above can fail: each thing that a checkpoint brings back matters."""
    make = partial(make_run, contexts(2), optimizer)
    straight, resumed = resume(tmp_path / "c", make, make, forget)
    assert largest_difference(weights_of(straight), weights_of(resumed)) > 1e-4


def test_a_schedule_goes_on(tmp_path):
    """Twelve steps in all; the learning rate is halved after the fifth and the tenth."""

    def make():
        schedule = mx.lr_scheduler.FactorScheduler(step=5, factor=0.5, base_lr=0.1)
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


def test_a_checkpoint_is_three_files(tmp_path, devices):
    net, trainer, loader = make_run(devices)
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(tmp_path / "new" / "c", net, trainer, {"epoch": 7, "note": "schön"})
    assert sorted(path.name for path in (tmp_path / "new" / "c").iterdir()) == ["net.params", "progress.json", "trainer.states"]
    assert json.loads((tmp_path / "new" / "c" / "progress.json").read_text(encoding="utf-8")) == {"epoch": 7, "note": "schön"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c"]


def test_a_network_alone_is_a_checkpoint(tmp_path, devices):
    net, trainer, loader = make_run(devices)
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(str(tmp_path / "c"), net)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["net.params", "progress.json"]
    other = small_net(contexts(1))
    assert mgpu.load_checkpoint(str(tmp_path / "c"), other) == {}
    assert largest_difference(all_of(other), all_of(net)) == 0.0
    assert "without trainer.states" in told(mgpu.load_checkpoint, tmp_path / "c", net, trainer)


def test_plain_gluon_reads_the_network(tmp_path, devices, arrays):
    net, trainer, loader = make_run(devices, normalize=True)
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    plain = small_net([mx.cpu(4)], normalize=True)
    plain.load_parameters(str(tmp_path / "c" / "net.params"), ctx=mx.cpu(4))
    assert largest_difference(all_of(plain), all_of(net)) == 0.0


def test_what_is_saved_is_what_evaluate_measures(tmp_path):
    """BatchNorm's running statistics are one set per device; their mean is saved, and set on all devices."""
    net = nn.BatchNorm(in_channels=2)
    net.initialize(ctx=contexts(3))
    for i, context in enumerate(contexts(3)):
        net.running_mean.data(context)[:] = mx.nd.array([i, 10 * i])
    mgpu.save_checkpoint(tmp_path / "c", net)
    for context in contexts(3):
        assert net.running_mean.data(context).asnumpy().tolist() == [1.0, 10.0]
    other = nn.BatchNorm(in_channels=2)
    other.initialize(ctx=contexts(2))
    mgpu.load_checkpoint(tmp_path / "c", other)
    assert other.running_mean.data(mx.cpu(1)).asnumpy().tolist() == [1.0, 10.0]


def test_parameters_whose_shape_is_unknown_are_loaded(tmp_path, devices):
    net, trainer, loader = make_run(devices)
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


@pytest.mark.parametrize(
    "where",
    [(mx.nd, "save"), (mgpu.Trainer, "save_states"), (json, "dumps")],
    ids=["network", "trainer", "progress"],
)
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
    assert number_in(tmp_path / "c", net, trainer) == 1
    net.weight.set_data(mx.nd.array([[3.0]]))
    mgpu.save_checkpoint(tmp_path / "c", net, trainer, {"number": 3})
    assert number_in(tmp_path / "c", net, trainer) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# What is refused


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    net, trainer, _ = make_run(contexts(1))
    for folder in (tmp_path, tmp_path / "not there"):
        message = told(mgpu.load_checkpoint, folder, net, trainer)
        assert f"got {folder} without net.params, progress.json, trainer.states" in message


@pytest.fixture
def checkpoint(tmp_path):
    net, trainer, loader = make_run(contexts(2))
    train(net, trainer, loader, epochs=1)
    mgpu.save_checkpoint(tmp_path / "c", net, trainer)
    return tmp_path / "c"


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
    assert "optimizer SGD for a trainer with Adam" in told(mgpu.load_checkpoint, checkpoint, net, trainer)


def test_what_is_refused_changes_nothing(checkpoint, tmp_path):
    """Gluon assigns parameter by parameter as it reads them: a wrong last layer was told when the first were overwritten."""
    net, trainer, _ = make_run(contexts(2), "adam")
    mgpu.eval_batch(net, *small_batches([4])[0], contexts(2))
    before = weights_of(net)
    told(mgpu.load_checkpoint, checkpoint, net, trainer)  # another optimizer
    assert largest_difference(weights_of(net), before) == 0.0


@pytest.mark.parametrize("file", ["net.params", "progress.json"])
def test_damaged_files_are_told(checkpoint, file):
    path = checkpoint / file
    path.write_bytes(path.read_bytes()[:-1][: max(1, path.stat().st_size // 2)])
    net, trainer, _ = make_run(contexts(2), "momentum")
    assert "damaged" in told(mgpu.load_checkpoint, checkpoint, net, trainer)


def test_a_network_without_values_is_not_saved(tmp_path):
    net = mx.gluon.nn.Dense(3)
    net.initialize()
    assert "no values yet" in told(mgpu.save_checkpoint, tmp_path / "c", net)
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
