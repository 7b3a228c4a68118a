"""DataParallelModel and DataParallelCriterion: a script of GluonCV's on k devices against one device, and where bytes lie."""

import copy

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel.gluoncv import DataParallelCriterion, DataParallelModel
from gluon_mgpu.errors import DeviceError, ShardError, StepError, TrainerError
from gluon_mgpu.mxnet_internals.blocks import is_hybridized
from gluon_mgpu.mxnet_internals.parameters import values_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import LOSS, gluon_loop, initialized, largest_difference, sequential, small_batches, small_net, weights_of
from .versions import nd

HYBRIDIZE = {"plain": None, "hybrid": {}, "static": {"static_alloc": True, "static_shape": True}}
TWO = [mx.cpu(0), mx.cpu(1)]


def gluoncv_script(module, ctx, batches, make_trainer, sync=False, **options):
    """The loop of GluonCV's segmentation program, with its positional arguments."""
    net = DataParallelModel(module, ctx, sync, **options)
    criterion = DataParallelCriterion(LOSS, ctx, sync)
    trainer = make_trainer(net.module.collect_params())
    array = mx.np.array if mx.util.is_np_array() else nd.array
    for X, y in batches:
        data, target = array(X, dtype=X.dtype), array(y, dtype=y.dtype)
        with autograd.record(True):
            outputs = net(data.astype("float32", copy=False))
            losses = criterion(outputs, target)
            mx.nd.waitall()
            autograd.backward(losses)
        trainer.step(len(X))
        assert all(np.isfinite(np.mean(loss.asnumpy())) for loss in losses)
    return module


def momentum(trainer):
    return lambda params: trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9})


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", HYBRIDIZE)
@pytest.mark.parametrize("sizes", [[12] * 5, [7, 12, 1, 2, 5]], ids=["even", "uneven and fewer"])
def test_a_script_of_gluoncvs_trains_as_on_one_device(devices, arrays, sizes, mode):
    batches = small_batches(sizes)
    one = gluon_loop(small_net([mx.cpu(0)]), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, batches)
    net = gluoncv_script(small_net([mx.cpu(0)], hybridize=HYBRIDIZE[mode]), devices, batches, momentum(mgpu.Trainer))
    for context in devices:
        assert largest_difference(weights_of(net, context), weights_of(one)) <= 1e-5


def dense(ctx=None, **options):
    return initialized(nn.Dense(2, in_units=3, **options), ctx, mx.init.Uniform(1))


class Calls:
    """A network that is no Block, as GluonCV's SegEvalModel, and returns what it is told to."""

    def __init__(self, function):
        self.net, self.function, self.seen = dense(), function, []

    def collect_params(self):
        return self.net.collect_params()

    def __call__(self, *inputs, **kwargs):
        self.seen.append((inputs, kwargs))
        return self.function(*inputs, **kwargs)


def test_outputs_have_gluoncvs_form(devices, arrays):
    """A tuple of one tuple a device: scripts take `[x[0] for x in outputs]`."""
    X = arrays.array(np.random.rand(5, 3), dtype="float32")
    net = dense()
    sizes = mgpu.data_parallel.plan_shards(5, len(devices))
    outputs = DataParallelModel(net, devices)(X)
    assert type(outputs) is tuple and all(type(output) is tuple and len(output) == 1 for output in outputs)
    assert [(output[0].context, output[0].shape) for output in outputs] == [(c, (n, 2)) for c, n in zip(devices, sizes)]
    weight, bias = net.weight.data(devices[0]).asnumpy(), net.bias.data(devices[0]).asnumpy()
    found = np.concatenate([output[0].asnumpy() for output in outputs])
    np.testing.assert_allclose(found, X.asnumpy() @ weight.T + bias, rtol=1e-5, atol=1e-6)


def test_arguments_are_split_wherever_they_are_and_the_rest_goes_to_each_device(devices, arrays):
    n = 2 * len(devices)
    calls = Calls(lambda *inputs, **kwargs: inputs[0])
    numbers = np.arange(n, dtype="float32")
    x = arrays.array(numbers)
    DataParallelModel(calls, devices)(x, [numbers, ("word", 3)], None, mask={"m": x, "on": True}, scale=[1, 2])
    assert len(calls.seen) == len(devices)
    for i, ((first, nested, nothing), kwargs) in enumerate(calls.seen):
        wanted = [2 * i, 2 * i + 1]
        assert type(nested) is list and nested[1] == ("word", 3) and nothing is None
        assert kwargs["scale"] == [1, 2] and kwargs["mask"]["on"] is True
        for array in (first, nested[0], kwargs["mask"]["m"]):
            assert isinstance(array, type(x)) and array.context == devices[i] and array.asnumpy().tolist() == wanted


def test_a_loss_takes_several_outputs_several_labels_and_options(devices):
    n = 2 * len(devices)
    rng = np.random.RandomState(0)
    a, b, y, z = (rng.rand(n).astype("float32") for _ in range(4))
    net = DataParallelModel(Calls(lambda a, b: (a, b)), devices)
    criterion = DataParallelCriterion(lambda a, b, y, z, weight, scale=1: scale * weight * (a * y - b * z), devices)
    losses = criterion(net(a, b), y, z, weight=y, scale=3)
    assert type(losses) is tuple and [loss.context for loss in losses] == devices
    np.testing.assert_allclose(np.concatenate([loss.asnumpy() for loss in losses]), 3 * y * (a * y - b * z), rtol=1e-5, atol=1e-6)


def test_without_devices_calls_go_through():
    net = dense(mx.cpu(1))
    model, criterion = DataParallelModel(net), DataParallelCriterion(lambda out, y, scale: (out - y) * scale)
    x = nd.ones((1, 3), ctx=mx.cpu(1))
    assert model(x).shape == (1, 2) and net.weight.list_ctx() == [mx.cpu(1)]
    assert criterion(model(x), model(x), scale=2).asnumpy().tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("start", [TWO[:1], TWO], ids=["one", "two"])
def test_a_static_graph_follows_its_parameters_to_other_devices(start):
    """It went on writing gradients into the arrays that were replaced: those of cpu(0) stayed 0."""
    ctx = [mx.cpu(i) for i in range(3)]
    module = sequential(nn.Dense(4, in_units=3, activation="relu"), nn.Dense(2, in_units=4), ctx=start, init=mx.init.One())
    module.hybridize(static_alloc=True, static_shape=True)
    for _ in range(3):
        with autograd.record():
            outputs = [module(nd.ones((2, 3), ctx=context)) for context in start]
        autograd.backward(outputs)
    net = DataParallelModel(module, ctx)
    for _ in range(3):
        with autograd.record():
            outputs = [output[0].sum() for output in net(nd.ones((6, 3)))]
        autograd.backward(outputs)
    mx.nd.waitall()
    assert [grad.asnumpy().tolist() for grad in module[1].weight.list_grad()] == [[[6.0] * 4] * 2] * 3  # two examples, 3 each


def test_parameters_that_are_there_already_stay_the_same_arrays(devices):
    """So that a trainer that was made before goes on, and an evaluator may share the network."""
    module = small_net(devices)
    trainer = mgpu.Trainer(module, "sgd", {"learning_rate": 0.1})
    X, y = small_batches([6])[0]
    mgpu.train_batch(module, LOSS, trainer, X, y)
    before = [values_of(param) for param in module.collect_params().values()]
    net, criterion = DataParallelModel(module, devices), DataParallelCriterion(LOSS, devices)
    assert all(values_of(param) is data for param, data in zip(module.collect_params().values(), before))
    with autograd.record():
        losses = criterion(net(X), y)
    trainer.backward(losses)
    trainer.step(6)
    assert mgpu.replica_difference(module) == 0.0


def test_what_it_has_not_it_takes_from_the_network(tmp_path):
    module = small_net(TWO)
    net = DataParallelModel(module, TWO, True)
    assert net.module is module and net.ctx_list == TWO and net.sync is True
    net(small_batches([4])[0][0])
    assert net.collect_params().keys() == module.collect_params().keys()
    net.hybridize()
    assert is_hybridized(module)
    net.save_parameters(str(tmp_path / "net.params"))
    other = small_net(TWO)
    other.load_parameters(str(tmp_path / "net.params"), ctx=TWO)
    assert repr(module) in repr(net) and "cpu(1)" in repr(net)
    assert repr(LOSS) in repr(DataParallelCriterion(LOSS, TWO))
    with pytest.raises(AttributeError):
        net.no_such_thing  # noqa: B018
    with pytest.raises(AttributeError):
        net._no_such_thing  # noqa: B018
    assert copy.copy(net).module is module


@pytest.mark.mxnet1("synchronised BatchNorm")
def test_a_device_that_others_wait_for_is_not_left_out_when_training():
    module = initialized(gluon.contrib.nn.SyncBatchNorm(num_devices=2, in_channels=3))
    net = DataParallelModel(module, TWO, sync=True)
    with autograd.record(), pytest.raises(StepError, match="got a batch for 1 of the 2 devices"):
        net(nd.ones((1, 3)))
    assert len(net(nd.ones((1, 3)))) == 1  # predicting, nobody waits
    with autograd.record():
        assert len(DataParallelModel(dense(), TWO, sync=True)(nd.ones((1, 3)))) == 1
    module = initialized(nn.BatchNorm(in_channels=3))
    with autograd.record():
        assert len(DataParallelModel(mgpu.set_batch_norm(module, "sync"), TWO, sync=True)(nd.ones((1, 3)))) == 1


WRONG = {
    "not initialised": (TrainerError, lambda: DataParallelModel(nn.Dense(2), TWO)),
    "no network": (TrainerError, lambda: DataParallelModel(None)),
    "a function on devices": (TrainerError, lambda: DataParallelModel(abs, TWO)),
    "no loss": (TrainerError, lambda: DataParallelCriterion(None, TWO)),
    "a device twice": (DeviceError, lambda: DataParallelModel(dense(), TWO[:1] * 2)),
    "no device": (DeviceError, lambda: DataParallelModel(dense(), [])),
    "devices of a loss": (DeviceError, lambda: DataParallelCriterion(LOSS, TWO[:1] * 2)),
    "a word": (ShardError, lambda: DataParallelModel(dense(), TWO)("word")),
    "other lengths": (ShardError, lambda: DataParallelModel(dense(), TWO)(np.ones((4, 3)), np.ones((3, 3)))),
    "no such axis": (ShardError, lambda: DataParallelModel(dense(), TWO, batch_axis=2)(np.ones((4, 3)))),
    "outputs of others": (ShardError, lambda: DataParallelCriterion(LOSS, TWO)([1], np.ones(4))),
    "outputs that are none": (ShardError, lambda: DataParallelCriterion(LOSS, TWO)(nd.ones(2), np.ones(4))),
    "no labels": (ShardError, lambda: DataParallelCriterion(LOSS, TWO)([1, 2])),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_reported(name):
    error, call = WRONG[name]
    with pytest.raises(error):
        call()


def test_what_is_refused_was_not_moved():
    module = dense(mx.cpu(3))
    with pytest.raises(DeviceError):
        DataParallelModel(module, [mx.cpu(0)] * 2)
    assert module.weight.list_ctx() == [mx.cpu(3)]


def test_an_error_of_the_network_or_the_loss_names_its_device():
    net = DataParallelModel(dense(flatten=False), TWO)
    told = r"^DataParallelModel: got an error of the module for shard 0 on cpu\(0\), shapes \[\(2, 4\)\]"
    with pytest.raises(StepError, match=told):
        net(np.ones((4, 4), "float32"))

    def refuses(output, label):
        return output.reshape((9, 9)) if output.context == mx.cpu(1) else output

    with pytest.raises(StepError, match=r"^DataParallelCriterion: got an error of the module for shard 1 on cpu\(1\)"):
        DataParallelCriterion(refuses, TWO)(net(np.ones((4, 3), "float32")), np.ones((4, 2), "float32"))


@pytest.mark.mxnet1("synchronised BatchNorm")
def test_a_synchronised_network_is_as_one_device():
    ctx = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    X, y = small_batches([10])[0]
    found = []
    for devices in (ctx[:1], ctx):
        net = small_net(devices, normalize=True)
        mgpu.train_batch(net, LOSS, mgpu.Trainer(net, "sgd", {"learning_rate": 0}), X, y)  # shapes
        mgpu.data_parallel.convert_sync_batchnorm(net)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5})
        model, criterion = mgpu.DataParallelModel(net, devices), mgpu.DataParallelCriterion(LOSS, devices)
        with autograd.record():
            losses = criterion(model(X), y)
        autograd.backward(losses)
        trainer.step(10)
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-5
