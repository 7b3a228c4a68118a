"""Finetune: what is frozen, when it unfreezes, and at which rate; LearningRateFinder: what it suggests and restores."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import initialized, ready, small_batches, stack, train
from .test_fit import LOSS, batches_of, make_net, make_trainer, three_clouds
from .test_weight_average import Press, assert_close, assert_same, weights
from .versions import nd, set_params

SIZES = [6, 6, 5]
OPTIMIZERS = {"sgd": {"learning_rate": 0.1, "momentum": 0.9}, "adam": {"learning_rate": 0.01}}


def conv_net(ctx, hybridize=None):
    """A convolution, whose weights are in no bucket on a CPU, and Dense layers, whose weights are."""
    net = nn.HybridSequential()
    body = stack(nn.Conv2D(4, kernel_size=3, in_channels=1, activation="tanh"), nn.Flatten(), nn.Dense(5, in_units=64))
    net.add(body, nn.Dense(3, in_units=5))
    ready(net, ctx, hybridize, 5)
    if is_mxnet2():
        net(nd.ones((1, 1, 6, 6), ctx=ctx[0]))  # decides the shape of the convolution
    return net


def by_hand(optimizer, epochs, unfreeze_epoch, lr_mult):
    """Plain Gluon on one device."""
    net, ctx = conv_net([mx.cpu()]), mx.cpu()
    body = list(net[0].collect_params().values())
    for param in body:
        param.grad_req, param.lr_mult = "null", lr_mult
    trainer = gluon.Trainer(net.collect_params(), optimizer, OPTIMIZERS[optimizer])
    for epoch in range(1, epochs + 1):
        if epoch == unfreeze_epoch:
            for param in body:
                param.grad_req = "write"
        for X, y in small_batches(SIZES):
            with autograd.record():
                loss = LOSS(net(nd.array(X, ctx=ctx)), nd.array(y, ctx=ctx))
            loss.backward()
            trainer.step(len(X))
    return weights(net)


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("hybridize", "compiled"),
    [(None, "auto"), ({}, "off"), ({"static_alloc": True, "static_shape": True}, "off"), ({"static_alloc": True}, "auto")],
)
def test_it_is_the_loop_by_hand(devices, optimizer, hybridize, compiled):
    net = conv_net(devices, hybridize)
    before = weights(net)
    trainer = mgpu.Trainer(net, optimizer, OPTIMIZERS[optimizer])
    data, tuned = small_batches(SIZES), mgpu.Finetune(net[0], unfreeze_epoch=3, lr_mult=0.5)
    seen = []

    class Notes(mgpu.Callback):
        def on_epoch_end(self, state):
            seen.append(weights(state.net))

    mgpu.fit(net, LOSS, trainer, data, epochs=4, callbacks=[tuned, Notes()], compiled=compiled)
    assert_close(weights(net), by_hand(optimizer, 4, 3, 0.5), tolerance=1e-5)
    for name, value in before.items():
        frozen = name.startswith("0.")
        assert (seen[1][name].tobytes() == value.tobytes()) == frozen
        assert seen[3][name].tobytes() != seen[1][name].tobytes()
    assert mgpu.replica_difference(net) == 0.0


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("step", [2, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (3, 4)), 8])
def test_a_resumed_run_has_the_same_bits(tmp_path, optimizer, step):
    ctx = [mx.cpu(0), mx.cpu(1)]

    def part(folder, *more):
        net = conv_net(ctx)
        callbacks = [mgpu.Finetune(net[0], unfreeze_epoch=3), mgpu.Checkpoint(folder, monitor=None), *more]
        trainer = mgpu.Trainer(net, optimizer, OPTIMIZERS[optimizer])
        mgpu.fit(net, LOSS, trainer, small_batches(SIZES), epochs=4, callbacks=callbacks, resume="auto")
        return weights(net)

    expected = part(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        part(tmp_path / "parts", Press(step))
    assert_same(part(tmp_path / "parts"), expected)


@pytest.mark.parametrize("unfreeze_epoch", [None, 2])
def test_a_run_that_has_ended_leaves_layers_as_the_run_did(tmp_path, unfreeze_epoch):
    for _ in range(2):
        net = conv_net([mx.cpu(0)])
        callbacks = [mgpu.Finetune(net[0], unfreeze_epoch=unfreeze_epoch), mgpu.Checkpoint(tmp_path, monitor=None)]
        mgpu.fit(net, LOSS, make_trainer(net), small_batches(SIZES), epochs=1, callbacks=callbacks, resume="auto")
        assert {param.grad_req for param in net[0].collect_params().values()} == {"null"}


@pytest.mark.parametrize(
    ("freeze", "options", "expected"),
    [
        ("features", {}, "selects no parameter; expected one or more of .'0.0.weight'"),
        ("(", {}, "regular expression"),
        (3, {}, "freeze"),
        ("0", {"unfreeze_epoch": 0}, "unfreeze_epoch"),
        ("0", {"lr_mult": -1}, "lr_mult"),
    ],
)
def test_wrong_options(freeze, options, expected):
    net = conv_net([mx.cpu()])
    with pytest.raises(mgpu.errors.TrainerError, match=expected):
        mgpu.fit(
            net, LOSS, mgpu.Trainer(net, "sgd"), small_batches(SIZES), epochs=1, callbacks=[mgpu.Finetune(freeze, **options)]
        )
    assert all(param.grad_req == "write" for param in net.collect_params().values())


def trained(net, trainer, data):
    train(net, trainer, data)
    return weights(net)


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_finder_changes_nothing(devices, arrays, optimizer):
    """Weights, momentum, update counts, schedule, running statistics, the order of the data, Python's and NumPy's numbers."""
    X, y = three_clouds()

    def make():
        net = stack(nn.Dense(8, in_units=2), nn.BatchNorm(in_channels=8), nn.Dense(3, in_units=8))
        mx.random.seed(2)
        net.initialize(mx.init.Xavier(), ctx=devices)
        schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
        params = {"learning_rate": 0.1, "lr_scheduler": schedule, **({"momentum": 0.9} if optimizer == "sgd" else {})}
        loader = mgpu.data.ArrayLoader(X, y, 16, shuffle=True)
        trainer = mgpu.Trainer(net, optimizer, params)
        trained(net, trainer, loader)
        return net, trainer, loader

    net, trainer, loader = make()
    np.random.seed(4)
    finder = mgpu.tuning.LearningRateFinder(net, LOSS, trainer)
    finder.sweep(loader, num_steps=12, end=1.0)
    rate, drawn = trainer.learning_rate, np.random.rand()
    np.random.seed(4)
    other, other_trainer, other_loader = make()
    np.random.seed(4)
    assert (rate, drawn, loader.epoch) == (other_trainer.learning_rate, np.random.rand(), other_loader.epoch)
    assert_same(trained(net, trainer, loader), trained(other, other_trainer, other_loader))
    assert len(finder.rates) == 12 and finder.rates[0] == pytest.approx(1e-7) and finder.rates[-1] == pytest.approx(1.0)


def test_the_losses_are_those_of_training():
    """An oracle by hand: SGD with these rates; the smoothed loss by its formula."""
    data, net = batches_of(*three_clouds()), make_net([mx.cpu(0), mx.cpu(1)])
    finder = mgpu.tuning.LearningRateFinder(net, LOSS, make_trainer(net))
    finder.sweep(data, start=0.01, end=1.0, num_steps=6)
    by_hand, smooth, losses = make_net([mx.cpu()]), 0.0, []
    trainer = gluon.Trainer(by_hand.collect_params(), "sgd")
    for step in range(6):
        X, y = data[step % len(data)]
        trainer.set_learning_rate(0.01 * 100 ** (step / 5))
        with autograd.record():
            loss = LOSS(by_hand(nd.array(X)), nd.array(y))
        loss.backward()
        trainer.step(len(X))
        losses.append(loss.mean().asnumpy().item())
        smooth = 0.98 * smooth + 0.02 * losses[-1]
        assert finder.smoothed[step] == pytest.approx(smooth / (1 - 0.98 ** (step + 1)), rel=1e-5)
    assert finder.losses == pytest.approx(losses, rel=1e-5)


def test_it_suggests_a_rate_that_trains_and_stops_when_the_loss_diverges(tmp_path):
    pytest.importorskip("matplotlib")
    X, _ = three_clouds()
    data, loss = batches_of(X, X @ np.float32([[1.0], [2.0]])), gluon.loss.L2Loss()

    def linear():
        return initialized(nn.Dense(1, in_units=2), [mx.cpu(0), mx.cpu(1)], mx.init.Zero())

    net = linear()
    finder = mgpu.tuning.LearningRateFinder(net, loss, make_trainer(net))
    rate = finder.sweep(data, start=1e-5, end=1e3)
    assert len(finder.rates) < 100 and finder.smoothed[-1] > 4 * min(finder.smoothed)
    assert 1e-3 < rate < 1 and rate == finder.suggestion
    finder.plot(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    net = linear()
    history = mgpu.fit(net, loss, make_trainer(net, rate), data, epochs=8, metrics=(), callbacks=[])
    assert history.rows[-1]["train_loss"] < 0.1 * history.rows[0]["train_loss"]


def test_an_error_in_the_sweep_restores_everything():
    net, data = make_net([mx.cpu()]), batches_of(*three_clouds())
    trainer, before = make_trainer(net), weights(net)
    with pytest.raises(mgpu.errors.TrainerError, match="pairs"):
        mgpu.tuning.LearningRateFinder(net, LOSS, trainer).sweep(iter([*data, (1, 2, 3)]), start=0.1)
    assert_same(weights(net), before)
    assert trainer.learning_rate == 0.5
    set_params(net, "grad_req", "add")
    with pytest.raises(mgpu.errors.ModesError):  # of sums that the program goes on with
        mgpu.tuning.LearningRateFinder(net, LOSS, trainer).sweep(data)
