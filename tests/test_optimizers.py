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


def test_the_decay_is_decoupled():
    """Adam lets the decay pass through its moments: with a gradient of zero it moves by the rate, whatever the decay."""
    w, zero = mx.nd.ones((1,)), mx.nd.zeros((1,))
    optimizer = mx.optimizer.create("adamw", learning_rate=0.1, wd=0.5)
    optimizer.update(0, w, zero, optimizer.create_state(0, w))
    assert w.asscalar() == pytest.approx(0.95, abs=1e-6)


def test_multipliers_rescaling_and_clipping_reach_adamw():
    optimizer = mx.optimizer.create("adamw", learning_rate=0.1, wd=0.5, rescale_grad=0.25, clip_gradient=0.5)
    optimizer.set_wd_mult({0: 0.0})
    w, g = mx.nd.ones((1,)), mx.nd.array([8.0])
    state = optimizer.create_state(0, w)
    optimizer.update(0, w, g, state)
    assert state[0].asscalar() == pytest.approx(0.1 * 0.5)  # 8 * 0.25, clipped
    assert w.asscalar() == pytest.approx(0.9, abs=1e-6)


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


def test_adamw_is_known_to_gluon_and_survives_its_file(tmp_path):
    net = nn.Dense(2, in_units=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "adamw", {"learning_rate": 0.1, "beta1": 0.8})
    with autograd.record():
        loss = net(mx.nd.ones((1, 3))).sum()
    loss.backward()
    trainer.step(1)
    trainer.save_states(str(tmp_path / "states"))
    trainer.load_states(str(tmp_path / "states"))
    assert type(trainer._optimizer).__name__ == "AdamW" and trainer._optimizer.beta1 == 0.8
