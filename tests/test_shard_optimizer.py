"""Contract: one device updates each parameter, with the bits of an update on every device (`shard_optimizer=False`)."""

import copy
from importlib import import_module

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.versions import load_amp
from gluon_mgpu.nested import leaves, num_bytes
from gluon_mgpu.trainer.loss_scaler import LossScaler
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import LOSS, cpus, sequential, small_batches, small_net, states_of, weights_of
from .versions import nd, set_params
from .worlds import Scale

SGD = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})
ADAM = ("adam", {"learning_rate": 0.01})
OPTIMIZERS = {"sgd": SGD, "adam": ADAM, "lamb": ("lamb", {}), "adagrad": ("adagrad", {"learning_rate": 0.05})}
BUCKET = 300  # bytes: the Dense layers of `small_net` take several


@pytest.fixture(autouse=True, params=[False, True], ids=["whole", "cut"])
def cuts(request, monkeypatch):
    """Whether parameters larger than a bucket are cut: one of `small_net`."""
    if request.param:
        monkeypatch.setattr("gluon_mgpu.trainer.trainer.CUT_BYTES", BUCKET)
    return request.param


def make_trainer(net, shards, optimizer=SGD, **options):
    """A trainer whose update is divided, as it is by default, or on every device."""
    name, params = optimizer
    if not shards:
        options["shard_optimizer"] = False
    return mgpu.Trainer(net, name, copy.deepcopy(params), bucket_bytes=BUCKET, **options)


def everywhere(net):
    """The trainable weights on every device."""
    return [weights_of(net, context) for context in next(iter(net.collect_params().values())).list_ctx()]


def assert_equal_bits(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        for mine, theirs in zip(one, other):
            np.testing.assert_array_equal(mine, theirs)


def compare(story, num_devices=3, **options):
    """Run a story with the ordinary update and with the sharded one; return the trainer of the latter."""
    found = []
    for shards in (False, True):
        net = small_net(cpus(num_devices), normalize=True)
        net(nd.zeros((1, 1, 6, 6)))  # shapes become known
        trainer = make_trainer(net, shards, **options)
        story(net, trainer)
        found.append(everywhere(net))
        assert_equal_bits(found[-1], [found[-1][0]] * num_devices)
    assert_equal_bits(found[1], found[0])
    assert_one_owner_each(trainer)
    return trainer


def assert_one_owner_each(trainer):
    """Each number of a state is on one device, and every device has some."""
    held = [parts["states"] for parts in trainer.bytes_per_device().values()]
    assert sum(held) == sum(num_bytes(array) for _, array in leaves(list(trainer.steps.update.states().values()))) > 0
    if len(held) > 1:
        assert sum(map(bool, held)) > 1


def train(net, trainer, sizes=(6, 7, 2), **options):
    for X, y in small_batches(sizes):
        mgpu.train_batch(net, LOSS, trainer, X, y, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("compiled", [pytest.param("on", marks=pytest.mark.mxnet1("compiled passes")), "off"])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.3}, {"clip_value": 0.01, "kvstore": "local"}, {"clip_norm": 0.3, "clip_value": 0.01}],
    ids=["", "norm", "value-local", "both"],
)
def test_the_weights_have_the_same_bits(arrays, num_devices, optimizer, compiled, micro_steps, options):
    """Also with idle devices: the last batch has one example."""
    found, norms = [], []
    for shards in (False, True):
        net = small_net(cpus(num_devices), hybridize={"static_alloc": True, "static_shape": True}, normalize=True)
        trainer = make_trainer(net, shards, OPTIMIZERS[optimizer], **options)
        step = mgpu.compile_step(net, LOSS, trainer, compiled=compiled, micro_steps=micro_steps)
        for X, y in small_batches((6, 7, 6, 1)):
            step(X, y)
        found.append(everywhere(net))
        norms.append(None if trainer.grad_norm is None else float(trainer.grad_norm))
    assert_equal_bits(found[1], found[0])
    assert_equal_bits(found[1], [found[1][0]] * num_devices)
    assert norms[0] == norms[1]
    assert_one_owner_each(trainer)


def test_options_and_changes_during_training(tmp_path):
    def story(net, trainer):
        train(net, trainer)
        trainer.set_learning_rate(0.01)
        net[5].bias.set_data(nd.ones(8))
        set_params(net[6], "lr_mult", 0.5)
        train(net, trainer)
        net.save_parameters(str(tmp_path / "net"))
        train(net, trainer)
        net.load_parameters(str(tmp_path / "net"), ctx=trainer.contexts)
        train(net, trainer)

    compare(story)
    compare(story, optimizer=ADAM, clip_norm=0.2)


@pytest.mark.parametrize(
    "optimizer, has_schedule",
    [
        ("sgd", False),
        ("adam", True),
        *(
            pytest.param(*pair, marks=pytest.mark.exhaustive)
            for pair in (("sgd", True), ("adam", False), ("adagrad", False), ("adagrad", True))
        ),
    ],
)
def test_a_parameter_that_is_frozen_and_trained_again_keeps_its_states(optimizer, has_schedule):
    """It comes back in a new bucket, whose owner may be another device. With a schedule, its rate follows its own updates."""

    def story(net, trainer):
        large, small = [net[5].weight, net[5].bias, net[0].weight], [net[6].weight, net[6].bias]
        before = owners(trainer)
        for changed, grad_req in ((large, "null"), (small, "null"), (small, "write"), (large, "write")):
            train(net, trainer)
            before = {**owners(trainer), **before}
            for param in changed:
                param.grad_req = grad_req
        train(net, trainer)
        moved.append(sum(owner != before[index] for index, owner in owners(trainer).items()))

    def owners(trainer):
        return {index: i for i, states in enumerate(states_of(trainer)) for index in states}

    moved = []
    name, params = OPTIMIZERS[optimizer]
    schedule = {"lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.7, base_lr=0.05)} if has_schedule else {}
    compare(story, num_devices=4, optimizer=(name, {**params, **schedule}))
    assert moved[1] > 0, "the story moves states"


def test_steps_that_leave_parameters_out():
    def story(net, trainer):
        for i, (X, y) in enumerate(small_batches((6, 7, 6, 5))):
            with autograd.record():
                losses = []
                for context, x, t in zip(trainer.contexts, np.array_split(X, 3), np.array_split(y, 3)):
                    data, label = nd.array(x, ctx=context), nd.array(t, ctx=context)
                    losses.append(LOSS(net(data), label) if i % 2 == 0 else net[0](data).sum(axis=(1, 2, 3)))
            trainer.backward(losses)
            trainer.step(len(X))

    compare(story, find_unused_parameters=True)
    compare(story, optimizer=ADAM, find_unused_parameters=True, clip_norm=0.2)


@pytest.mark.mxnet1("sparse arrays")
def test_several_dtypes_and_sparse_gradients():
    found = []
    for shards in (False, True):
        net = nn.Sequential()
        net.add(nn.Embedding(5, 2, sparse_grad=True), nn.Dense(3, in_units=4), Scale("float16"), Scale("float64"))
        mx.random.seed(0)
        net.initialize(ctx=cpus(3))
        trainer = make_trainer(net, shards, ("sgd", {**SGD[1], "multi_precision": True}))
        for _ in range(3):
            with autograd.record():
                losses = [(net(nd.array([[1, i]], ctx=c)) - 3).square() for i, c in enumerate(trainer.contexts)]
            trainer.backward(losses)
            trainer.step(3)
        found.append(everywhere(net))
    assert_equal_bits(found[1], found[0])
    assert list(map(set, states_of(trainer))) == [{0, 1, 2}, {0, 3}, {0, 4}]  # the embedding's are on all


@pytest.mark.pairwise
@pytest.mark.parametrize("number", [3, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("how", ["states", "checkpoint"])
def test_a_run_resumes_with_and_without_it(tmp_path, optimizer, number, how):
    """The files do not show who wrote them: on 3 devices, and on fewer."""
    found = {}
    for first in (False, True):
        net = small_net(cpus(3))
        trainer = make_trainer(net, first, OPTIMIZERS[optimizer])
        train(net, trainer)
        folder = tmp_path / str(first)
        mgpu.save_checkpoint(net, folder, trainer)
        net.save_parameters(str(tmp_path / "net"))
        trainer.save_states(str(tmp_path / "states"))
        for second in (False, True):
            net = small_net(cpus(number))
            trainer = make_trainer(net, second, OPTIMIZERS[optimizer])
            if how == "checkpoint":
                mgpu.load_checkpoint(net, folder, trainer)
            else:
                net.load_parameters(str(tmp_path / "net"), ctx=trainer.contexts)
                trainer.load_states(str(tmp_path / "states"))
            train(net, trainer)
            found[first, second] = everywhere(net)
            if second:
                assert_one_owner_each(trainer)
    assert_equal_bits(found[True, False], found[False, False])
    assert_equal_bits(found[False, True], found[False, False])
    assert_equal_bits(found[True, True], found[False, False])


def test_the_states_are_divided():
    net = nn.HybridSequential()
    for _ in range(16):
        net.add(nn.Dense(32, in_units=32))
    net.initialize(ctx=cpus(4))
    size = 4 * 16 * (32 * 32 + 32)
    trainer = mgpu.Trainer(net, "adam", bucket_bytes=9000)
    mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, nd.ones((4, 32)), nd.ones((4, 32)))
    held = [parts["states"] for parts in trainer.bytes_per_device().values()]
    assert sum(held) == 2 * size
    assert max(held) <= 1.1 * sum(held) / 4


@pytest.mark.mxnet1("Pipeline")
@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_pipeline_shards_each_stage(tmp_path, num_shared):
    """Stages on two devices each; or a stage on one device and the last layers on four. Files are read with and without it."""
    X, y = np.random.RandomState(0).randn(2, 8, 16).astype("float32")
    found, held = [], []
    for shards in (False, True):
        net = nn.HybridSequential()
        for _ in range(4):
            net.add(nn.Dense(16, in_units=16, activation="tanh"))
        mx.random.seed(0)
        net.initialize(ctx=mx.cpu(0))
        stages = mgpu.split_stages(net, 2, X, balance="bytes", data_parallel=list(net)[4 - num_shared :])
        model = mgpu.Pipeline(stages, [cpus(4)[:2], cpus(4)[2:]], 2)
        for is_sharded in (shards, not shards):
            trainer = mgpu.Trainer(model, *ADAM, shard_optimizer=is_sharded, bucket_bytes=500, clip_norm=0.1)
            if is_sharded is not shards:
                trainer.load_states(str(tmp_path / "states"))
            mgpu.fit(model, gluon.loss.L2Loss(), trainer, [(X, y)] * 3, epochs=1, metrics=(), callbacks=[], compiled="off")
            held.append([parts["states"] for parts in trainer.bytes_per_device().values()])
            trainer.save_states(str(tmp_path / "states"))
        found.append([[array.asnumpy() for array in param.list_data()] for param in model.collect_params().values()])
    assert_equal_bits(found[1], found[0])
    size = 2 * 4 * 4 * (16 * 16 + 16)
    whole, divided = (sum(one) for one in held[:2])
    assert divided == size < whole
    assert held[2:] == [held[1], held[0]]
    assert max(held[1]) < max(held[0])


def test_an_overflow_on_any_device_skips_the_step():
    net = small_net(cpus(3))
    trainer = make_trainer(net, shards=True)
    train(net, trainer)
    trainer.steps.loss_scaler = LossScaler(scale=8.0)
    before = everywhere(net)
    for param in (net[0].weight, net[4].weight, net[5].weight):  # of several owners
        (X, y) = small_batches((6,))[0]
        Xs, ys = mgpu.split_batch(X, y, trainer.contexts)
        with autograd.record():
            losses = [LOSS(net(x), t) for x, t in zip(Xs, ys)]
        trainer.backward(losses)
        param.grad(mx.cpu(1))[:] = np.inf
        scale = trainer.steps.loss_scaler.scale
        trainer.step(6)
        assert trainer.steps.loss_scaler.scale == scale / 2
    assert_equal_bits(everywhere(net), before)


def sum_by_hand(net, trainer):
    (X, y) = small_batches((6,))[0]
    with autograd.record():
        losses = [LOSS(net(x), t) for x, t in zip(*mgpu.split_batch(X, y, trainer.contexts))]
    trainer.backward(losses)
    trainer.allreduce_grads()
    for param in net.collect_params().values():  # every device must have the sum
        for gradient in param.list_grad() if param.grad_req != "null" else ():
            gradient[:] = gradient.clip(-0.1, 0.1)
    trainer.update(6)


def use_amp(net, trainer):
    scaler = import_module(f"{load_amp().__package__}.loss_scaler").LossScaler
    trainer._amp_loss_scaler = scaler()  # as mxnet.contrib.amp.init_trainer does


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize(
    "change",
    [
        sum_by_hand,
        pytest.param(use_amp, marks=pytest.mark.mxnet1("bf16 and fp16")),
        lambda net, trainer: trainer.steps.use_virtual_shards(3),
    ],
)
def test_other_ways_to_sum_have_the_bits_of_an_update_on_every_device(change, optimizer):
    found = []
    for shards in (False, True):
        net = small_net(cpus(3), normalize=True)
        trainer = make_trainer(net, shards, optimizer)
        train(net, trainer)
        change(net, trainer)
        train(net, trainer)
        found.append(everywhere(net))
    assert_equal_bits(found[1], found[0])
    assert trainer.steps.layout.is_sharded
    if change is use_amp:  # without a scale in the losses, it changes nothing
        net = small_net(cpus(3), normalize=True)
        trainer = make_trainer(net, True, optimizer)
        train(net, trainer)
        train(net, trainer)
        assert_equal_bits(everywhere(net), found[1])


def test_optimizers_that_join_parameters_and_other_modes_update_on_every_device():
    for make in (
        lambda net: mgpu.Trainer(net, "nadam"),
        lambda net: mgpu.Trainer(net, "sgd", kvstore="nccl"),
        lambda net: mgpu.Trainer(net, "sgd", check_replicas_every=2),
        lambda net: mgpu.LocalSGD(net, "sgd", every=2),
    ):
        assert not make(small_net(cpus(2))).steps.layout.is_sharded
    assert mgpu.Trainer(small_net(cpus(2)), "sgd").steps.layout.is_sharded


@pytest.mark.parametrize("cuts", [False], indirect=True)
def test_a_parameter_that_is_trained_later_goes_where_least_is():
    net = sequential(nn.Dense(16, in_units=16, use_bias=False), nn.Dense(2, in_units=16, use_bias=False), ctx=cpus(2))
    net[0].weight.grad_req = "null"
    trainer = mgpu.Trainer(net, "adam", bucket_bytes=1)
    for grad_req in ("null", "write"):
        net[0].weight.grad_req = grad_req
        mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, nd.ones((2, 16)), nd.zeros((2, 2)))
    assert list(map(sorted, states_of(trainer))) == [[1], [0]]
