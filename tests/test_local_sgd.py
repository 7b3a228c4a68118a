"""Devices that train apart and are averaged, against networks of their own that are trained by hand and averaged with NumPy."""

from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import ReplicaError, TrainerError
from gluon_mgpu.trainer.local_sgd import LocalSGD
from gluon_mgpu.trainer.sums import DeviceSum
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import (
    LOSS,
    as_array,
    initialized,
    largest_difference,
    set_fresh,
    small_batches,
    small_net,
    states_of,
    train,
    weights_of,
)
from .test_no_sync import waits  # noqa: F401

CTX = [mx.cpu(i) for i in range(4)]
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-2}),
    "adam": ("adam", {"learning_rate": 0.01}),
}
SIZES = [12, 7, 3, 1, 12, 2, 9]


def known(ctx, **options):
    with mx.name.NameManager():  # names count from 0: Gluon's trainer sorts them as texts, dense10 before dense9
        net = small_net(ctx, **options)
    mgpu.eval_batch(net, *small_batches([1])[0], ctx=ctx)
    return net


def trained_apart(num_devices, optimizer, every, batches):
    """Networks on one device each, with gluon's trainers; weights and states averaged with NumPy. Their weights, by network."""
    nets = [known(CTX[:1]) for _ in range(num_devices)]
    trainers = [gluon.Trainer(net.collect_params(), *OPTIMIZERS[optimizer], kvstore=None) for net in nets]
    for step, (X, y) in enumerate(batches, 1):
        for net, trainer, x, t in zip(nets, trainers, np.array_split(X, num_devices), np.array_split(y, num_devices)):
            if len(x):
                with autograd.record():
                    loss = LOSS(net(as_array(x)), as_array(t))
                loss.backward()
            else:
                for param in net.collect_params().values():
                    param.grad()[:] = 0
                    set_fresh(param.data())
            trainer.step(len(X) / num_devices)
        if step % every == 0:
            average(nets, trainers)
    return [weights_of(net) for net in nets]


def average(nets, trainers):
    columns = list(zip(*([param.data() for param in net.collect_params().values()] for net in nets)))
    states = [states_of(trainer)[0] for trainer in trainers]
    for index in states[0]:
        each = [state[index] if isinstance(state[index], tuple) else (state[index],) for state in states]
        columns += [arrays for arrays in zip(*each) if arrays[0] is not None]
    for arrays in columns:
        mean = np.mean([one.asnumpy().astype("float64") for one in arrays], axis=0)
        for one in arrays:
            one[:] = mean.astype("float32")


@pytest.mark.each_value
@pytest.mark.parametrize("every", [1, 2, 3, 9])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_networks_that_are_averaged(devices, arrays, optimizer, every):
    """Uneven batches, and devices without data; convolutions have no bucket here."""
    batches = small_batches(SIZES)
    net = known(devices)
    train(net, LocalSGD(net, *OPTIMIZERS[optimizer], every=every), batches)
    for context, weights in zip(devices, trained_apart(len(devices), optimizer, every, batches)):
        assert largest_difference(weights_of(net, context), weights) <= 2e-6
    apart = len(devices) > 1 and len(SIZES) % every
    assert (mgpu.replica_difference(net) > 0) == bool(apart)


def test_devices_are_averaged_when_it_is_time_and_gradients_never(calls_to):
    sums = calls_to(DeviceSum, "run")
    net = small_net(CTX[:2])
    trainer = LocalSGD(net, *OPTIMIZERS["momentum"], every=3)
    seen = []
    for X, y in small_batches([4] * 7):
        mgpu.train_batch(net, LOSS, trainer, X, y)
        seen.append(len(sums))
    assert seen == [0, 0, 1, 1, 1, 2, 2]
    trainer.every = 1
    train(net, trainer, small_batches([4]))
    assert len(sums) == 3
    trainer.flush()
    mgpu.evaluate(net, small_batches([4]))
    assert len(sums) == 3  # they are the same already


def test_evaluating_and_saving_see_the_average(tmp_path):
    """Whichever comes: the accuracy, the file and each device are of the same weights."""
    batches = small_batches([12, 7, 9])
    averaged = [np.mean(each, axis=0) for each in zip(*trained_apart(2, "momentum", 99, batches))]
    for look in (
        lambda net, trainer: mgpu.evaluate_accuracy_gpus(net, batches),
        lambda net, trainer: mgpu.save_checkpoint(net, tmp_path / "with", trainer),
        lambda net, trainer: mgpu.save_checkpoint(net, tmp_path / "without"),
        lambda net, trainer: trainer.save_states(str(tmp_path / "states")),
        lambda net, trainer: trainer.flush(),
    ):
        net = known(CTX[:2])
        trainer = LocalSGD(net, *OPTIMIZERS["momentum"], every=50)
        train(net, trainer, batches)
        assert mgpu.replica_difference(net) > 1e-4
        look(net, trainer)
        assert mgpu.replica_difference(net) == 0.0
        assert largest_difference(weights_of(net), averaged) <= 1e-6
    other = known(CTX[:1])
    mgpu.load_checkpoint(other, tmp_path / "without")
    assert largest_difference(weights_of(other), weights_of(net)) <= 1e-6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_goes_on_from_a_checkpoint(tmp_path, optimizer):
    """Saved in the middle of an interval: the same bits on as many devices; states of every device on others."""
    batches = small_batches(SIZES)
    net = known(CTX[:2])
    trainer = LocalSGD(net, *OPTIMIZERS[optimizer], every=3)
    train(net, trainer, batches[:4])
    mgpu.save_checkpoint(net, tmp_path / "checkpoint", trainer)
    train(net, trainer, batches[4:])
    mx.random.seed(9)
    resumed = known(CTX[2:])
    again = LocalSGD(resumed, *OPTIMIZERS[optimizer], every=3)
    train(resumed, again, batches[:1])  # something to be replaced
    mgpu.load_checkpoint(resumed, tmp_path / "checkpoint", again)
    assert mgpu.replica_difference(resumed) == 0.0
    train(resumed, again, batches[4:])
    assert largest_difference(weights_of(resumed), weights_of(net)) == 0.0
    ordinary = known(CTX[:3])
    summing = mgpu.Trainer(ordinary, *OPTIMIZERS[optimizer])
    mgpu.load_checkpoint(ordinary, tmp_path / "checkpoint", summing)
    train(ordinary, summing, batches[4:])
    assert mgpu.replica_difference(ordinary) == 0.0


def test_each_device_clips_its_own_gradient():
    net = initialized(nn.Dense(1, in_units=2, use_bias=False), CTX[:2], mx.init.Zero())
    trainer = LocalSGD(net, "sgd", {"learning_rate": 1.0}, every=2, clip_norm=1.0)
    X = np.array([[3, 4], [0, 0.5]], "float32")
    mgpu.train_batch(net, lambda out, y: out.reshape((-1,)), trainer, X, X)
    np.testing.assert_allclose(net.weight.data(CTX[0]).asnumpy(), [[-0.6, -0.8]], atol=1e-6)
    np.testing.assert_allclose(net.weight.data(CTX[1]).asnumpy(), [[0, -0.5]], atol=1e-6)
    assert float(trainer.grad_norm.asnumpy()[0]) == pytest.approx(5.0)


def test_neither_a_step_nor_an_average_waits(devices, waits):  # noqa: F811
    net = small_net(devices, hybridize={}, normalize=True)
    trainer = LocalSGD(net, "adam", {"learning_rate": 0.01}, every=2)
    batches = small_batches([12, 7, 2, 12, 1])
    train(net, trainer, batches[:1])
    del waits[:]
    train(net, trainer, batches)
    assert waits == []


def test_what_devices_cannot_do_apart_is_refused():
    net = known(CTX[:2])
    trainer = LocalSGD(net, *OPTIMIZERS["sgd"], every=2)
    train(net, trainer, small_batches([4]))
    before = weights_of(net)
    trainer._amp_loss_scaler = object()
    for call in (
        lambda: LocalSGD(known(CTX[:2]), "nadam", every=2),
        lambda: LocalSGD(known(CTX[:2]), "sgd", every=2, update_on_kvstore=True),
        trainer.allreduce_grads,
        lambda: trainer.update(4),
        lambda: train(net, trainer, small_batches([4])),
    ):
        with pytest.raises(TrainerError):
            call()
    assert largest_difference(before, weights_of(net)) == 0.0
    del trainer._amp_loss_scaler
    train(net, trainer, small_batches([4]))
    assert mgpu.replica_difference(net) == 0.0


@pytest.mark.parametrize("kind", [mgpu.Trainer, partial(mgpu.LocalSGD, every=3)], ids=["Trainer", "LocalSGD"])
def test_a_new_trainer_begins_with_equal_devices(kind):
    net = initialized(nn.Dense(1, in_units=2), [mx.cpu(0), mx.cpu(1)])
    X, y = np.arange(8, dtype="float32").reshape(4, 2), np.zeros(4, "float32")
    former = mgpu.LocalSGD(net, "sgd", every=4)
    mgpu.train_batch(net, gluon.loss.L2Loss(), former, X, y)
    assert mgpu.replica_difference(net) > 0
    kind(net, "sgd")
    assert mgpu.replica_difference(net) == 0


def test_devices_that_train_apart_under_another_trainer_are_not_read():
    net = known(CTX[:2])
    apart = LocalSGD(net, "sgd", {"learning_rate": 0.1}, every=100)
    other = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    train(net, apart, small_batches([8, 8]))
    assert mgpu.replica_difference(net) > 0
    with pytest.raises(ReplicaError, match="average_replicas"):
        mgpu.evaluate(net, small_batches([4]))
    apart.average_replicas()
    mgpu.evaluate(net, small_batches([4]))
    assert other.params == apart.params
