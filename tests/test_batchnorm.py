"""Synchronised BatchNorm against one device with Gluon's own; what a conversion keeps and refuses."""

import os
import subprocess
import sys

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel.batchnorm import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    forward_shards,
    is_synchronised,
    revert_sync_batchnorm,
    set_batch_norm,
)
from gluon_mgpu.errors import StepError, TrainerError
from gluon_mgpu.mxnet_internals.blocks import batch_norm_options, is_hybridized, options_of
from gluon_mgpu.mxnet_internals.parameters import structural_params
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import HYBRIDIZE, LOSS, SEED, gluon_loop, initialized, largest_difference, ready, small_batches, stack
from .test_no_sync import waits as waits

SIZES = {"even": [24] * 3, "uneven": [13, 9, 24, 11], "idle": [1, 2, 13, 1]}
sync = pytest.mark.mxnet1("synchronised BatchNorm")
MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})


def build(ctx, hybridize=None):
    """Convolutions with a BatchNorm of each kind of options. Shapes are deferred."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, padding=1), nn.BatchNorm(), nn.Activation("tanh"), nn.Conv2D(6, 3))
    net.add(nn.BatchNorm(scale=False, momentum=0.7, epsilon=1e-3), nn.Activation("tanh"), nn.Conv2D(5, 1))
    net.add(nn.BatchNorm(axis=-1, center=False), nn.Flatten(), nn.Dense(3))
    return ready(net, ctx, hybridize)


def everything(net, ctx):
    """All parameters on a device, running statistics included."""
    return [param.data(ctx).asnumpy() for param in net.collect_params().values()]


def forward(net, ctx, X, y):
    Xs, ys = mgpu.split_batch(X, y, ctx)
    with autograd.record():
        outputs = forward_shards(net, Xs) if is_synchronised(net) else [net(x) for x in Xs]
        return [LOSS(output, t) for output, t in zip(outputs, ys)]


def train(net, batches):
    trainer = mgpu.Trainer(net, *MOMENTUM)
    for X, y in batches:
        mgpu.train_batch(net, LOSS, trainer, X, y)
    mx.nd.waitall()
    return net


@pytest.fixture(scope="module")
def one_device():
    """What Gluon's loop makes of the network on one device, with Gluon's BatchNorm; made once a kind of batch."""
    made = {}

    def result(sizes):
        key = mx.util.is_np_array(), sizes  # the two draw different weights
        if key not in made:
            made[key] = everything(gluon_loop(build([mx.cpu(0)]), *MOMENTUM, small_batches(SIZES[sizes])), mx.cpu(0))
        return made[key]

    return result


@sync
@pytest.mark.each_value
@pytest.mark.parametrize("mode", HYBRIDIZE)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_devices_train_as_one(one_device, arrays, num_devices, sizes, mode):
    ctx = [mx.cpu(i) for i in range(num_devices)]
    net = train(convert_sync_batchnorm(build(ctx, HYBRIDIZE[mode])), small_batches(SIZES[sizes]))
    assert [is_hybridized(block) for block in net] == [mode != "plain" and not isinstance(block, SyncBatchNorm) for block in net]
    on_each = [everything(net, context) for context in ctx]
    assert all(largest_difference(each, on_each[0]) == 0.0 for each in on_each)
    assert largest_difference(on_each[0], one_device(sizes)) <= 1e-5


SHAPES = [((7, 3), {}), ((7, 3, 4), {"epsilon": 0.1}), ((5, 4, 4, 3), {"axis": 3})]
SHAPES += [((5, 3, 2, 2, 2), {"scale": False}), ((5, 3, 4, 4), {"center": False, "momentum": 0.5})]


@sync
@pytest.mark.parametrize("shape, options", SHAPES)
def test_outputs_and_gradients_are_those_of_the_batch(shape, options, arrays):
    rng = np.random.RandomState(SEED)
    data, weight = (rng.uniform(-2, 9, shape).astype("float32") for _ in range(2))
    found = []
    for ctx in ([mx.cpu(0)], [mx.cpu(i) for i in range(3)]):
        layer = nn.BatchNorm(in_channels=3, gamma_initializer=mx.init.Uniform(2), beta_initializer=mx.init.Uniform(2), **options)
        mx.random.seed(SEED)
        layer.initialize(ctx=ctx)
        if len(ctx) > 1:
            convert_sync_batchnorm(layer)
        xs, ws = mgpu.split_batch(data, weight, ctx)
        for x in xs:
            x.attach_grad()
        with autograd.record():
            outputs = forward_shards(layer, xs)
            losses = [(y * w).sum() for y, w in zip(outputs, ws)]
        autograd.backward(losses)
        mx.nd.waitall()
        parts = [np.concatenate([y.asnumpy() for y in outputs]), np.concatenate([x.grad.asnumpy() for x in xs])]
        parts += [sum(g.asnumpy() for g in p.list_grad()) for p in (layer.gamma, layer.beta) if p.grad_req != "null"]
        found.append(parts + [layer.running_mean.data(ctx[-1]).asnumpy(), layer.running_var.data(ctx[-1]).asnumpy()])
    for one, several in zip(*found):
        np.testing.assert_allclose(several, one, rtol=3e-5, atol=3e-5)


@sync
@pytest.mark.parametrize("mode", ["plain", "static"])
def test_predicting_takes_the_running_statistics(mode, arrays):
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = train(convert_sync_batchnorm(build(ctx, HYBRIDIZE[mode])), small_batches([12, 12]))
    X, _ = small_batches([5])[0]
    x = mgpu.split_and_load(X, ctx[1:])[0]
    synchronised = net(x).asnumpy()
    revert_sync_batchnorm(net)
    assert largest_difference([synchronised], [net(x).asnumpy()]) <= 1e-6


class Residual(nn.HybridBlock):
    """A Block of a user's, with a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2D(2, 1)
        self.norm = nn.BatchNorm()
        self.again = self.norm
        self.rest = nn.HybridSequential()
        self.rest.add(nn.BatchNormReLU(), nn.BatchNorm(use_global_stats=True))

    def hybrid_forward(self, F, x):
        return self.rest(self.again(F.tanh(self.norm(self.first(x)))))


@sync
def test_a_conversion_keeps_everything_else(tmp_path):
    net = initialized(Residual())
    net.hybridize(static_alloc=True)
    x = mx.nd.random.uniform(shape=(3, 2, 4, 4))
    net(x)
    names, params = list(structural_params(net)), list(net.collect_params().values())
    before, norm, prediction = everything(net, mx.cpu(0)), net.norm, net(x).asnumpy()
    assert convert_sync_batchnorm(net) is net
    convert_sync_batchnorm(net)  # once more changes nothing
    assert net.norm is norm is net.again and isinstance(norm, SyncBatchNorm) and isinstance(net.rest[0], SyncBatchNorm)
    assert type(net.rest[1]) is nn.BatchNorm
    assert list(structural_params(net)) == names and list(net.collect_params().values()) == params
    assert largest_difference(everything(net, mx.cpu(0)), before) == 0.0
    assert is_hybridized(net.first) and not is_hybridized(net)
    assert largest_difference([net(x).asnumpy()], [prediction]) <= 1e-6
    net.save_parameters(str(tmp_path / "net.params"))
    plain = Residual()
    plain.load_parameters(str(tmp_path / "net.params"))
    assert largest_difference([plain(x).asnumpy()], [prediction]) <= 1e-6
    revert_sync_batchnorm(net)
    assert (type(net.norm), type(net.rest[0])) == (nn.BatchNorm, nn.BatchNormReLU)
    assert vars(net.norm).keys() == vars(plain.norm).keys()
    assert is_hybridized(net) and options_of(net)["static_alloc"] and vars(net).keys() == vars(plain).keys()
    assert largest_difference([net(x).asnumpy()], [prediction]) == 0.0
    net.export(str(tmp_path / "net"))


@sync
@pytest.mark.parametrize("mode", HYBRIDIZE)
def test_a_layer_that_is_used_twice(mode):
    data = np.random.RandomState(SEED).uniform(-1, 1, (7, 1, 4, 4)).astype("float32")
    found = []
    for ctx in ([mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]):
        net = ready(Residual(), ctx, HYBRIDIZE[mode])
        if len(ctx) > 1:
            convert_sync_batchnorm(net)
        with autograd.record():
            xs = mgpu.split_and_load(data, ctx, even_split=False)
            losses = [(y**3).sum() for y in (forward_shards(net, xs) if len(ctx) > 1 else [net(xs[0])])]
        autograd.backward(losses)
        mx.nd.waitall()
        found.append(sum(g.asnumpy() for g in net.rest[0].gamma.list_grad()))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


class OwnBatchNorm(nn.BatchNorm):
    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        return x


def symbol_block():
    data = mx.sym.var("data", dtype="float32")
    return gluon.SymbolBlock(mx.sym.BatchNorm(data, name="norm"), data)


@sync
@pytest.mark.parametrize(
    "last, told",
    [
        (OwnBatchNorm, "OwnBatchNorm"),
        (lambda: gluon.contrib.nn.SyncBatchNorm(num_devices=2), "contrib"),
        (symbol_block, "SymbolBlock"),
    ],
)
def test_what_computes_in_a_way_of_its_own_is_refused(last, told):
    net = stack(nn.BatchNorm(), last())
    with pytest.raises(TrainerError, match=told):
        set_batch_norm(net, "sync")
    assert type(net[0]) is nn.BatchNorm


@pytest.mark.parametrize("bn", ["local", pytest.param("sync", marks=sync)])
def test_whose_statistics_predict_and_are_saved(bn, tmp_path):
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = set_batch_norm(build(ctx), bn)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    batches = small_batches([9, 12])
    for X, y in batches:
        mgpu.train_batch(net, LOSS, trainer, X, y)
    own = [net[1].running_mean.data(context).asnumpy() for context in ctx]
    assert largest_difference([own[0]], [own[1]]) == 0
    mgpu.evaluate_accuracy_gpus(net, batches)
    mgpu.save_checkpoint(net, tmp_path / "checkpoint", trainer)
    saved = mx.nd.load(str(tmp_path / "checkpoint" / "net.params"))["1.running_mean"].asnumpy()
    left = [net[1].running_mean.data(context).asnumpy() for context in ctx]
    assert largest_difference(left, own) == 0.0
    assert largest_difference([saved], left[:1]) == 0.0


@sync
def test_a_shard_alone_is_refused():
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = convert_sync_batchnorm(build(ctx))
    Xs, _ = mgpu.split_batch(*small_batches([8])[0], ctx)
    with autograd.record(), pytest.raises(TrainerError, match="alone"):
        net(Xs[0])


@sync
def test_hybridizing_after_a_conversion_is_reported():
    net = train(convert_sync_batchnorm(build([mx.cpu(0), mx.cpu(1)])), small_batches([8]))
    net.hybridize()
    with pytest.raises(TrainerError, match="after convert_sync_batchnorm"):
        train(net, small_batches([8]))
    train(convert_sync_batchnorm(net), small_batches([8]))


@sync
@pytest.mark.parametrize("mode", ["plain", "hybrid"])
def test_a_shard_that_fails_leaves_nothing(mode, one_device):
    ctx = [mx.cpu(i) for i in range(3)]
    net = convert_sync_batchnorm(build(ctx, HYBRIDIZE[mode]))
    batches = small_batches(SIZES["uneven"])
    Xs, _ = mgpu.split_batch(*batches[0], ctx)
    net(Xs[0])  # shapes become known
    before = [array.copy() for array in everything(net, ctx[1])]
    wrong = mx.nd.ones((2, 1, 2, 2), ctx=ctx[1])  # too small for the second convolution, behind a BatchNorm
    with pytest.raises(StepError, match="^forward_shards: got an error of the network"), autograd.record(), mx.cpu(2):
        try:
            forward_shards(net, [Xs[0], wrong, Xs[2]])
        finally:
            assert autograd.is_recording() and mx.current_context() == mx.cpu(2)
    mx.nd.waitall()
    assert all(largest_difference(everything(net, context), before) == 0.0 for context in ctx)
    train(net, batches)
    assert largest_difference(everything(net, ctx[0]), one_device("uneven")) <= 1e-5


class Choosing(nn.Block):
    """Sends large and small shards through different layers, or through none."""

    def __init__(self, small):
        super().__init__()
        self.large = nn.BatchNorm(in_channels=1)
        self.small = small

    def forward(self, x):
        return self.large(x) if len(x) > 1 else self.small(x)


@sync
@pytest.mark.parametrize("small, told", [(lambda: nn.BatchNorm(in_channels=1), "batchnorm"), (lambda: nn.Flatten(), "the end")])
def test_shards_that_part_are_reported(small, told):
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = initialized(Choosing(small()), ctx)
    convert_sync_batchnorm(net)
    with pytest.raises(StepError, match=told), autograd.record():
        forward_shards(net, [mx.nd.ones((2, 1), ctx=ctx[0]), mx.nd.ones((1, 1), ctx=ctx[1])])


@sync
def test_a_step_does_not_wait(waits):
    ctx = [mx.cpu(i) for i in range(3)]
    net = convert_sync_batchnorm(build(ctx, {}))
    trainer = mgpu.Trainer(net, *MOMENTUM)
    batches = small_batches([6, 7, 12, 1, 5])
    trainer.backward(forward(net, ctx, *batches[0]))
    trainer.step(6)
    del waits[:]
    for X, y in batches[1:]:
        trainer.backward(forward(net, ctx, X, y))
        trainer.step(len(X))
    assert waits == []


HANGING = """
import gluon_mgpu as mgpu, mxnet as mx, numpy as np
from mxnet import autograd, gluon
from gluon_mgpu.data_parallel.batchnorm import convert_sync_batchnorm, forward_shards
ctx = [mx.cpu(i) for i in range(4)]
net = gluon.nn.HybridSequential()
for _ in range(3):
    net.add(gluon.nn.Conv2D(4, 3, padding=1), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"))
net.initialize(ctx=ctx)
net.hybridize()
convert_sync_batchnorm(net)
trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
for _ in range(3):
    with autograd.record():
        losses = [y.sum() for y in forward_shards(net, [mx.nd.random.uniform(shape=(2, 3, 6, 6), ctx=c) for c in ctx])]
    trainer.backward(losses)
    trainer.step(8)
mx.nd.waitall()
print("ended")
"""


@sync
def test_no_setting_makes_it_hang():
    """MXNet's own SyncBatchNorm hangs with this one."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MXNET_CPU_TEMP_COPY": "1"}
    ended = subprocess.run([sys.executable, "-c", HANGING], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.stdout == "ended\n", ended.stderr


@sync
def test_mxnets_own_layer_is_not_left_waiting():
    net = nn.HybridSequential()
    net.add(gluon.contrib.nn.SyncBatchNorm(in_channels=3, num_devices=2), nn.Dense(1, in_units=3))
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(net, "sgd")
    with pytest.raises(StepError, match="waits for"):
        mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, mx.nd.ones((1, 3)), mx.nd.ones(1))
    batch_norm_options(net[0])["use_global_stats"] = True  # it does not wait then
    mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, mx.nd.ones((1, 3)), mx.nd.ones(1))
