"""AdamW against its formula in float64, alone and over devices."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn


def adamw(weight, gradients, rate, beta1=0.9, beta2=0.999, epsilon=1e-8, wd=0.01):
    """The formula, as the paper and PyTorch have it."""
    w = weight.astype("float64")
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        g = g.astype("float64")
        w = w - rate * wd * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
    return w


@pytest.mark.parametrize("options", [{}, {"wd": 0.3}, {"wd": 0.0, "beta1": 0.5, "beta2": 0.9}, {"epsilon": 0.1}])
def test_adamw_is_the_formula(options):
    rng = np.random.RandomState(0)
    weight, gradients = rng.randn(4, 5).astype("float32"), [rng.randn(4, 5).astype("float32") * 0.1 for _ in range(12)]
    optimizer = mx.optimizer.create("adamw", learning_rate=0.1, **options)
    w = mx.nd.array(weight)
    state = optimizer.create_state(0, w)
    for gradient in gradients:
        optimizer.update(0, w, mx.nd.array(gradient), state)
    np.testing.assert_allclose(w.asnumpy(), adamw(weight, gradients, 0.1, **options), atol=2e-5)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_adamw_trains_a_network_by_the_formula(num_devices, arrays):
    ctx = [mx.cpu(i) for i in range(num_devices)]
    net = nn.Dense(2, in_units=3, use_bias=False)
    net.initialize(mx.init.One(), ctx=ctx)
    trainer = mgpu.Trainer(net, "adamw", {"learning_rate": 0.1, "wd": 0.2})
    rng = np.random.RandomState(1)
    gradients = []
    for _ in range(6):
        X = rng.randn(2 * num_devices, 3).astype("float32")
        with autograd.record():
            losses = [net(x).sum(axis=1) for x in mgpu.split_and_load(X, ctx)]
        mgpu.backward(losses)
        trainer.step(len(X))
        gradients.append(np.tile(X.mean(axis=0), (2, 1)))
    expected = adamw(np.ones((2, 3), "float32"), gradients, 0.1, wd=0.2)
    for context in ctx:
        np.testing.assert_allclose(net.weight.data(context).asnumpy(), expected, atol=2e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "wd": 0.01}, {"momentum": 0.5, "clip_gradient": 0.01}])
def test_sgd_of_parameters_outside_of_buckets_is_gluons(options, num_devices):
    """Convolutions, with prepared operators: also while rates, multipliers and states change. All devices see one batch."""
    X = mx.nd.random.uniform(shape=(4, 2, 5, 5))

    def train(make, ctx):
        net = nn.HybridSequential(prefix="")
        for i in range(6):
            net.add(nn.Conv2D(3, 3, padding=1, in_channels=3 if i else 2, use_bias=False, prefix=f"conv{i}_"))
        mx.random.seed(4)
        net.initialize(mx.init.Xavier(), ctx=ctx)
        net[1].weight.lr_mult, net[2].weight.wd_mult = 0.5, 3.0
        schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5)
        trainer = make(net, "sgd", {"learning_rate": 0.1, "lr_scheduler": schedule, **options})
        for number in range(6):
            if number == 3 and "momentum" in options:
                for updater in trainer._updaters:
                    updater.states[1][:] = 1
            if number == 4:
                net[3].weight.grad_req = "null"
            with autograd.record():
                losses = [(net(X.as_in_context(context)) ** 2).mean(axis=(1, 2, 3)) for context in ctx]
            autograd.backward(losses)
            trainer.step(len(X) * len(ctx))
        return [block.weight.data(ctx[-1]).asnumpy() for block in net]

    expected = train(lambda net, *rest: gluon.Trainer(list(net.collect_params().values()), *rest), [mx.cpu()])
    found = train(mgpu.Trainer, [mx.cpu(i) for i in range(num_devices)])
    for one, other in zip(found, expected):
        (np.testing.assert_array_equal if num_devices == 1 else np.testing.assert_allclose)(one, other)


@pytest.mark.parametrize("optimizer", ["rmsprop", "ftrl", "adagrad", "adadelta", "groupadagrad"])
@pytest.mark.parametrize("is_cast_later", [False, True])
def test_float16_weights_with_float32_states(optimizer, is_cast_later):
    """MXNet's operators reject them. Weights in float32 as well have such states."""

    def train(**options):
        net = nn.Embedding(5, 4, dtype="float32" if is_cast_later else "float16")
        net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        trainer = mgpu.Trainer(net, optimizer, {"learning_rate": 0.1, **options})
        net.cast("float16")
        with autograd.record():
            losses = [net(mx.nd.array([1, 2], ctx=context)).sum() for context in trainer.contexts]
        mgpu.backward(losses)
        trainer.step(4)
        return net.weight.data(mx.cpu(1)).asnumpy()

    with pytest.raises(mgpu.errors.TrainerError, match=r"embedding\d+_weight .*multi_precision=True"):
        train()
    assert np.isfinite(train(multi_precision=True)).all()


@pytest.mark.parametrize("name", ["nag", "sgd"])
def test_predictions_between_steps_do_not_move_devices_apart(name):
    """In prediction, oneDNN keeps the weights of convolutions in a layout of its own, in which NAG's operator differed."""
    mx.random.seed(1)
    ctx, net = [mx.cpu(0), mx.cpu(1)], nn.HybridSequential()
    for channels in (16, 32, 64):
        net.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize()
    params = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}
    trainer, rng = mgpu.Trainer(net, name, params, check_replicas_every=1), np.random.RandomState(0)
    X, y = rng.randn(8, 3, 16, 16).astype("float32"), rng.randint(0, 10, 8)
    for _ in range(12):
        mgpu.train_batch(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, X, y)
        mgpu.evaluate_accuracy_gpus(net, [(X, y)])
    mx.nd.waitall()
