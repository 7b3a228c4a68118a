"""BatchNorm on GPUs and CPUs: a stand-in moves statistics as cuDNN does, in the forward pass, by the unbiased variance."""

from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel import cudnn_batchnorm
from gluon_mgpu.errors import StepError
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

from .conftest import ready

LOSS = gluon.loss.L2Loss()
pytestmark = pytest.mark.mxnet1("legacy arrays")


@pytest.fixture(params=["cpu", "cudnn"])
def kind(request, monkeypatch):
    """BatchNorm as on CPUs, or on CPUs as on GPUs."""
    if request.param == "cudnn":
        stand_in(monkeypatch)
    return request.param


@pytest.fixture
def cudnn(monkeypatch):
    stand_in(monkeypatch)


def stand_in(monkeypatch):
    own = mx.nd.BatchNorm

    def batch_norm(x, gamma, beta, mean, var, momentum=0.9, axis=1, use_global_stats=False, **options):
        options.update(momentum=momentum, axis=axis, use_global_stats=use_global_stats)
        if use_global_stats or not autograd.is_training():
            return own(x, gamma, beta, mean, var, **options)
        with autograd.pause():
            values = x.asnumpy().astype("float64").swapaxes(0, axis).reshape(x.shape[axis], -1)
            with np.errstate(all="ignore"):
                moments = values.mean(axis=1), values.var(axis=1) * values.shape[1] / np.float64(values.shape[1] - 1)
            copies = mean.copy(), var.copy()  # MXNet's own operator moves these in the backward pass
            for array, moment in zip((mean, var), moments):
                array[:] = momentum * array + (1 - momentum) * mx.nd.array(moment, ctx=x.context)
        return own(x, gamma, beta, *copies, **options)

    monkeypatch.setattr(mx.nd, "BatchNorm", batch_norm)
    monkeypatch.setattr(cudnn_batchnorm, "_OF_CUDNN", "cpu")


def network(ctx):
    net = nn.HybridSequential()
    net.add(nn.Dense(6, in_units=4), nn.BatchNorm(in_channels=6), nn.Activation("tanh"), nn.Dense(3, in_units=6))
    return ready(net, ctx, None, 0)


def batches(number=3, size=8):
    rng = np.random.RandomState(0)
    return [(mx.nd.array(rng.randn(size, 4) + 2), mx.nd.array(rng.randn(size, 3))) for _ in range(number)]


def statistics(net):
    return [param.data(param.list_ctx()[0]).asnumpy() for param in net.collect_params(".*running").values()]


def test_the_stand_in_moves_in_the_forward_pass(cudnn):
    layer = nn.BatchNorm(in_channels=1, momentum=0.0)
    layer.initialize()
    with autograd.record():
        layer(mx.nd.array([[1.0], [3.0]]))
    assert [layer.running_mean.data().asscalar(), layer.running_var.data().asscalar()] == [2.0, 2.0]
    with autograd.record():
        layer(mx.nd.array([[1.0]]))
    assert np.isnan(layer.running_var.data().asscalar())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_stage_that_is_computed_twice_moves_once(kind, micro_batches):
    """With one micro-batch, both forward passes moved the statistics on GPUs."""

    def trained(recompute):
        net = network([mx.cpu(0)])
        model = mgpu.Pipeline([*net], [mx.cpu(0)] * 4, micro_batches=micro_batches, recompute=recompute)
        trainer = mgpu.Trainer(model, "sgd", {"learning_rate": 0.1})
        for X, y in batches():
            mgpu.train_batch(model, LOSS, trainer, X, y)
        return [param.data(mx.cpu(0)).asnumpy() for param in net.collect_params().values()]

    for one, other in zip(trained(True), trained(False)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "kind, compiled", [("cpu", "off"), ("cpu", "auto"), ("cpu", "on"), ("cudnn", "off")], indirect=["kind"]
)  # the stand-in reads arrays, which a graph does not have
def test_frozen_layers_stay_on_both_kinds_of_device(kind, compiled):
    """BatchNorm of frozen layers followed the data on GPUs, and not on CPUs."""
    net = network([mx.cpu(0), mx.cpu(1)])
    if compiled == "auto":
        net.hybridize()
    trainer, seen = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), [statistics(net)]

    class Notes(mgpu.Callback):
        def on_epoch_end(self, state):
            seen.append(statistics(net))

    callbacks = [mgpu.Finetune("[01]", unfreeze_epoch=3), Notes()]
    mgpu.fit(net, LOSS, trainer, batches(), epochs=3, metrics=(), callbacks=callbacks, compiled=compiled)
    for before, frozen, still, moved in zip(*seen):
        assert (before == frozen).all() and (frozen == still).all() and (still != moved).all()
    assert not net[1]._kwargs["use_global_stats"]


def test_a_frozen_layer_predicts_what_it_trains_with():
    """Its output in training is that in prediction, also synchronised."""
    for bn in ("local", "sync"):
        net = network([mx.cpu(0), mx.cpu(1)])
        net[1].running_mean.set_data(mx.nd.arange(6))
        callbacks = [mgpu.Finetune(net[1])]
        mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), batches(), epochs=1, metrics=(), callbacks=callbacks, bn=bn)
        X = batches()[0][0]
        with autograd.record():
            (output,) = mgpu.data_parallel.forward_shards(net, [X])
        np.testing.assert_allclose(output.asnumpy(), net(X).asnumpy(), atol=1e-6)
        np.testing.assert_array_equal(net[1].running_mean.data(mx.cpu(1)).asnumpy(), np.arange(6))


def test_a_layer_with_global_statistics_of_its_own_keeps_them():
    net = nn.HybridSequential()
    net.add(nn.Dense(6, in_units=4), nn.BatchNorm(in_channels=6, use_global_stats=True), nn.Dense(3, in_units=6))
    ready(net, [mx.cpu(0)], None, 0)
    for unfreeze_epoch in (None, 1):
        callbacks = [mgpu.Finetune(net[1], unfreeze_epoch=unfreeze_epoch)]
        mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), batches(), epochs=1, metrics=(), callbacks=callbacks)
        assert net[1]._kwargs["use_global_stats"]


def test_another_run_unfreezes_what_a_run_has_left_frozen():
    net = network([mx.cpu(0)])
    for unfreeze_epoch, is_frozen in ((None, True), (1, False)):
        callbacks = [mgpu.Finetune(net[1], unfreeze_epoch=unfreeze_epoch)]
        mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), batches(), epochs=1, metrics=(), callbacks=callbacks)
        assert net[1]._kwargs["use_global_stats"] == is_frozen


@pytest.mark.parametrize("is_np", [False, True])
def test_one_value_per_channel_is_refused_on_gpus(monkeypatch, is_np):
    """cuDNN's running variance of one value is NaN, which a step gave to all devices."""
    with mx.util.np_shape(is_np), mx.util.np_array(is_np):
        net = network([mx.cpu(0), mx.cpu(1)])
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        X, y = (one.as_np_ndarray() if is_np else one for one in batches(1, 3)[0])
        mgpu.train_batch(net, LOSS, trainer, X, y)  # cpu(1) has one example
        monkeypatch.setattr(cudnn_batchnorm, "_OF_CUDNN", "cpu")
        before = [param.data(mx.cpu(1)).asnumpy() for param in net.collect_params().values()]
        with pytest.raises(StepError, match=r"got one example on cpu\(1\), whose values at .* have the shape \(1, 6\)"):
            mgpu.compile_step(net, LOSS, trainer)(X, y)
        with pytest.raises(StepError, match="got one example"):
            mgpu.train_batch(net, LOSS, trainer, X, y, split_f=partial(mgpu.split_batch, batch_axis=(0, 0)))
        assert all((one == param.data(mx.cpu(1)).asnumpy()).all() for one, param in zip(before, net.collect_params().values()))


def test_one_example_of_several_values_per_channel_is_not_refused(cudnn):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, kernel_size=2, in_channels=1), nn.BatchNorm(in_channels=2), nn.Flatten(), nn.Dense(3, in_units=8))
    net.add(nn.BatchNorm(in_channels=3, use_global_stats=True))
    ready(net, [mx.cpu(0)], None, 0)
    mgpu.train_batch(net, LOSS, mgpu.Trainer(net, "sgd"), mx.nd.ones((1, 1, 3, 3)), mx.nd.ones((1, 3)))
    assert np.isfinite(np.concatenate(statistics(net))).all()


def first_normalised():
    """A network whose first layer normalises the data without parameters, as those of the model zoo's ResNet v2 do."""
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(center=False, scale=False, in_channels=4), nn.Dense(6, in_units=4), nn.BatchNorm(in_channels=6))
    net.add(nn.BatchNorm(center=False, scale=False, in_channels=6), nn.Dense(3, in_units=6))
    return net


def zoo():
    return vision.ResNetV2(vision.BasicBlockV2, [1, 1], [4, 4, 8], classes=3, thumbnail=True)


@pytest.mark.parametrize("make", [first_normalised, zoo])
def test_synchronised_layers_move_where_those_of_one_device_do(make):
    """Predictions differed: on CPUs, MXNet never moves the statistics of a layer that no backward pass reaches."""
    rng, predictions = np.random.RandomState(0), []
    shape = (6, 4) if make is first_normalised else (6, 3, 8, 8)
    data = [(mx.nd.array(2 * rng.randn(*shape) + 1), mx.nd.array(rng.randn(6, 3))) for _ in range(3)]
    for ctx in ([mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]):
        net = ready(make(), ctx, None, 0)
        net(data[0][0])
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
        mgpu.fit(net, LOSS, trainer, data, epochs=1, metrics=(), callbacks=[], bn="sync" if len(ctx) > 1 else "local")
        predictions.append(net(data[0][0]).asnumpy())
    np.testing.assert_allclose(predictions[1], predictions[0], atol=2e-5, rtol=1e-4)


def test_synchronised_layers_move_on_gpus_as_cudnn_does(cudnn):
    net = ready(first_normalised(), [mx.cpu(0), mx.cpu(1)], None, 0)
    mgpu.set_batch_norm(net, "sync")
    X, y = batches(1)[0]
    mgpu.train_batch(net, LOSS, mgpu.Trainer(net, "sgd"), X, y)
    np.testing.assert_allclose(net[0].running_mean.data(mx.cpu(0)).asnumpy(), 0.1 * X.asnumpy().mean(axis=0), rtol=1e-5)
