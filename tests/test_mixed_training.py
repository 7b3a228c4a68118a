"""A Trainer in mixed precision: what precision= changes, and that steps whose gradients overflow leave everything alone."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.trainer import precision
from gluon_mgpu.trainer.loss_scaler import LossScaler
from gluon_mgpu.trainer.precision import can_compute_bf16, precision_of, reduce_precision
from mxnet.gluon import nn

from .conftest import LOSS, as_array, largest_difference, ready, small_batches, small_net, train, weights_of
from .worlds import devices as devices

pytestmark = pytest.mark.mxnet1("bf16 and fp16")

MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})


def scaled_trainer(net, *optimizer, scale=2.0**10, every=2, **options):
    """fp16's scaler with a network in float32: CPUs have no fp16, but the scaler does not know what it scales."""
    trainer = mgpu.Trainer(net, *optimizer, **options)
    trainer.steps.loss_scaler = LossScaler(scale, every=every)
    return trainer


def made_net(ctx):
    """A network with all its weights: without, the first batch would draw them."""
    net = small_net(ctx)
    mgpu.eval_batch(net, *small_batches([3])[0], ctx=ctx)
    return net


def spoil(net, context):
    param = next(param for param in net.collect_params().values() if param.name.endswith("weight"))
    gradient = param.grad(context).asnumpy()
    gradient.flat[0] = np.inf
    param.grad(context)[:] = as_array(gradient)


def by_hand(net, trainer, X, y, bad=None):
    Xs, ys = mgpu.split_batch(X, y, trainer.contexts)
    with mx.autograd.record():
        losses = [LOSS(net(x), t) for x, t in zip(Xs, ys)]
    trainer.backward(losses)
    if bad is not None:
        spoil(net, bad)
    trainer.step(len(X))


@pytest.mark.pairwise
@pytest.mark.parametrize("optimizer", [MOMENTUM, ("adam", {"learning_rate": 0.01})], ids=["momentum", "adam"])
def test_a_scale_does_not_show(devices, arrays, optimizer):
    """A power of 2 changes no bit of a float32 gradient, and clipping sees what was divided by it."""
    trained = []
    for make in (mgpu.Trainer, scaled_trainer):
        net = small_net(devices)
        trainer = make(net, *optimizer, clip_norm=0.5)
        train(net, trainer, small_batches([13, 7, 2, 24]))
        trained.append(weights_of(net))
    assert largest_difference(*trained) <= 1e-6
    assert trainer.steps.loss_scaler.scale == 4096.0


def test_a_copy_stands_between_each_parameter_and_its_cast():
    """The backward pass of a cast alone would ignore grad_req="add". The data and a layer's output need no copy."""
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(2, in_units=3, prefix="one_"), nn.Dense(2, in_units=2, prefix="two_"))
    graph = reduce_precision(net(mx.sym.var("data")), "fp16", {"data": np.float32})
    copied = {one[: -len("_copy_output")] for one in graph.get_internals().list_outputs() if one.endswith("_copy_output")}
    assert copied == set(net.collect_params())


@pytest.mark.parametrize("by_trainer", [True, False])
def test_a_network_in_fp16_has_its_losses_scaled(monkeypatch, by_trainer):
    monkeypatch.setitem(precision._WHERE, "fp16", ("cpu", "", ""))  # CPUs trace it; nothing is computed
    net = ready(nn.Dense(2, in_units=3), [mx.cpu()], {})
    if not by_trainer:
        mgpu.set_precision(net, "fp16")
    trainer = mgpu.Trainer(net, "sgd", precision="fp16" if by_trainer else None)
    assert trainer.steps.loss_scaler is not None
    assert "amp_cast" in net._get_graph(mx.nd.ones((1, 3)))[1].tojson(remove_amp_cast=False)


def test_overflowing_steps_leave_everything_alone(arrays):
    """On each of three devices in turn; the others are those of a training without the bad batches."""
    ctx = [mx.cpu(i) for i in range(3)]
    batches = small_batches([13, 7, 2, 24, 9, 9])
    plan = [None, ctx[0], None, ctx[1], ctx[2], None]
    scales = [1024.0, 512.0, 512.0, 256.0, 128.0, 128.0]
    for optimizer in (MOMENTUM, ("adam", {"learning_rate": 0.01})):
        net, good = made_net(ctx), made_net(ctx)
        trainer, plain = scaled_trainer(net, *optimizer, every=100), mgpu.Trainer(good, *optimizer)
        for (X, y), bad, scale in zip(batches, plan, scales):
            before = weights_of(net) if bad else []
            by_hand(net, trainer, X, y, bad)
            if bad is None:
                by_hand(good, plain, X, y)
            else:
                assert largest_difference(weights_of(net), before) == 0.0
            assert trainer.steps.loss_scaler.scale == scale
            assert mgpu.replica_difference(net) == 0.0
        assert largest_difference(weights_of(net), weights_of(good)) <= 1e-6
        assert trainer.steps.update.counts() == plain.steps.update.counts()


@pytest.mark.skipif(not can_compute_bf16(), reason="MXNet cannot compute in bfloat16 on this processor")
def test_a_trainer_sets_the_precision(devices, arrays):
    net = small_net(devices)
    trainer = mgpu.Trainer(net, *MOMENTUM, precision="bf16")
    assert precision_of(net) == "bf16" and trainer.steps.loss_scaler is None
    mgpu.Trainer(net, *MOMENTUM)
    assert precision_of(net) == "bf16"  # another trainer leaves it
    ((X, y),) = small_batches([6])
    batch = mgpu.train_batch(net, LOSS, trainer, X, y)
    out = batch.outputs[0].asnumpy()
    assert (out.view("uint32") & 0xFFFF == 0).all()  # the last bits of a rounded number
    assert any((weight.view("uint32") & 0xFFFF).any() for weight in weights_of(net))
    mgpu.Trainer(net, *MOMENTUM, precision="fp32")
    assert precision_of(net) == "fp32"
