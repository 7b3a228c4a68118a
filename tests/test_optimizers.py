"""Optimizers of MXNet's, alone and over devices."""

from contextlib import suppress

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.c_calls import Operator, PushPull
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import LOSS, initialized, small_batches, small_net
from .versions import nd


@pytest.mark.parametrize("optimizer", ["rmsprop", "ftrl", "adagrad", "adadelta", "groupadagrad"])
@pytest.mark.parametrize("is_cast_later", [False, True])
def test_float16_weights_with_float32_states(optimizer, is_cast_later):
    """MXNet's operators reject them. Weights in float32 as well have such states."""

    def train(**options):
        net = initialized(nn.Embedding(5, 4, dtype="float32" if is_cast_later else "float16"), [mx.cpu(0), mx.cpu(1)])
        trainer = mgpu.Trainer(net, optimizer, {"learning_rate": 0.1, **options})
        assert is_cast_later or options, "refused before the first step"
        net.cast("float16")
        with autograd.record():
            losses = [net(nd.array([1, 2], ctx=context)).sum() for context in trainer.contexts]
        trainer.backward(losses)
        trainer.step(4)
        return net.weight.data(mx.cpu(1)).asnumpy()

    with pytest.raises(mgpu.errors.TrainerError, match=r"weight .*multi_precision=True"):
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


def test_states_that_one_device_uses_are_not_compared(tmp_path):
    net = small_net([mx.cpu(0), mx.cpu(1)])
    trainer, (batch,) = mgpu.Trainer(net, "nadam", check_replicas_every=1), small_batches([4])
    for _ in range(2):
        mgpu.train_batch(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, *batch)
        trainer.save_states(str(tmp_path / "states"))
        trainer.load_states(str(tmp_path / "states"))


@pytest.mark.parametrize(("name", "option"), [("sgd", "momentum"), ("adam", "wd")])
def test_numbers_of_numpy_are_taken(name, option):
    def train(number):
        net = small_net([mx.cpu(0), mx.cpu(1)])
        trainer = mgpu.Trainer(net, name, {"learning_rate": 0.1, option: number(0.01), "clip_gradient": number(0.5)})
        mgpu.train_batch(net, LOSS, trainer, *small_batches([4])[0])
        return net[0].weight.data(mx.cpu(1)).asnumpy()

    np.testing.assert_array_equal(train(np.array), train(float))


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 1e39])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop", "adagrad"])
def test_a_rate_of_a_schedule_that_is_no_number_changes_no_weight(optimizer, rate):
    class Schedule(mx.lr_scheduler.LRScheduler):
        def __call__(self, num_update):
            return 0.1 if num_update < 2 else rate

    net = small_net([mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(net, optimizer, {"lr_scheduler": Schedule()})
    first, second = small_batches([4, 4])
    mgpu.train_batch(net, LOSS, trainer, *first)
    before = [param.data(mx.cpu(1)).asnumpy() for param in net.collect_params().values()]
    with pytest.raises(mgpu.errors.TrainerError, match="learning_rate"):
        mgpu.train_batch(net, LOSS, trainer, *second)
    assert all(np.array_equal(a, b.data(mx.cpu(1)).asnumpy()) for a, b in zip(before, net.collect_params().values()))


@pytest.mark.parametrize("done", [1, 2, 3, 9])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad", "nadam", "sharded sgd"])
def test_an_update_that_is_interrupted_leaves_equal_devices(calls_to, optimizer, done):
    net = small_net([mx.cpu(0), mx.cpu(1)])
    name, is_sharded = optimizer.split()[-1], "sharded" in optimizer
    trainer = mgpu.Trainer(net, name, {"learning_rate": 0.1}, shard_optimizer=is_sharded, bucket_bytes=600)
    left = [0]  # calls before the interruption

    def interrupt(*_):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt

    for owner, name in ((Operator, "run"), (mx.optimizer.Updater, "__call__"), (PushPull, "run")):
        calls_to(owner, name, note=interrupt)
    for at, (X, y) in enumerate(small_batches([6, 5, 6, 4])):
        left[0] = 99 if at else done
        with suppress(KeyboardInterrupt):  # of the first step
            mgpu.train_batch(net, LOSS, trainer, X, y)
        assert mgpu.replica_difference(net) == 0.0


def test_an_optimizer_gets_the_parameters_when_it_is_made():
    @mx.optimizer.register
    class OfWeights(mx.optimizer.SGD):
        def __init__(self, **options):
            super().__init__(**options)
            self.weights = [index for index, param in self.param_dict.items() if param.name.endswith("weight")]

    net = initialized(mx.gluon.nn.Dense(1, in_units=2))
    try:
        assert mgpu.Trainer(net, "ofweights").optimizer.weights == [0]
    finally:
        del mx.optimizer.Optimizer.opt_registry["ofweights"]
