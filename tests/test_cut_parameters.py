"""Contract: large parameters are cut over all devices, with the bits of an update of the whole parameter on one."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.c_calls import PushPull
from gluon_mgpu.trainer.slab import BUCKET_BYTES, CUT_BYTES
from mxnet import gluon, optimizer
from mxnet.gluon import nn

from .conftest import cpus, seed_all
from .versions import nd, set_params

WORDS, UNITS = 320, 768  # a hundredth of an embedding of 32,000 words
SIZE = 4 * WORDS * UNITS
ELEMENTWISE = {
    "sgd": {"learning_rate": 0.1},
    "momentum": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
    "rmsprop": {"learning_rate": 0.01},
}
LOSS = gluon.loss.L2Loss()


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    """A hundredth, too: only the embedding is larger."""
    monkeypatch.setattr("gluon_mgpu.trainer.trainer.CUT_BYTES", CUT_BYTES // 100)


class Own(optimizer.SGD):
    """An optimizer of the user's own."""


def make(num_devices, name="adam", *, words=WORDS, sparse=False, bucket_bytes=BUCKET_BYTES // 100, **options):
    """An embedding and a layer, and their trainer."""
    seed_all(3)
    net = nn.HybridSequential()
    net.add(nn.Embedding(words, UNITS, sparse_grad=sparse), nn.Dense(2, in_units=3 * UNITS))
    net.initialize(ctx=cpus(num_devices))
    made = Own(momentum=0.9) if name == "own" else "sgd" if name == "momentum" else name
    params = None if name == "own" else dict(ELEMENTWISE.get(name, {}))
    return net, mgpu.Trainer(net, made, params, bucket_bytes=bucket_bytes, **options)


def train(net, trainer, steps=3, seed=0):
    rng = np.random.RandomState(seed)
    for _ in range(steps):
        X = rng.randint(0, WORDS, (16, 3)).astype("float32")
        mgpu.train_batch(net, LOSS, trainer, X, rng.randn(16, 2).astype("float32"))


def weights(net):
    return [[array.asnumpy() for array in param.list_data()] for param in net.collect_params().values()]


def assert_same(one, other):
    for mine, theirs in zip(one, other):
        for array in mine:
            np.testing.assert_array_equal(array, theirs[0])


def parts_of(trainer):
    """How many slabs the embedding has."""
    return sum(0 in slab.indices for slab in trainer.steps.layout.slabs)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_embedding_has_the_same_bits_and_each_device_a_part_of_its_states(name, num_devices, monkeypatch):
    net, trainer = make(num_devices, name)
    train(net, trainer)
    found, held = weights(net), trainer.bytes_per_device().values()
    assert parts_of(trainer) == num_devices
    monkeypatch.setattr("gluon_mgpu.trainer.trainer.CUT_BYTES", SIZE)
    for options in ({}, {"shard_optimizer": False}):
        net, whole = make(num_devices, name, **options)
        train(net, whole)
        assert parts_of(whole) == 1
        assert_same(found, weights(net))
    num_states = {"sgd": 0, "adam": 2}.get(name, 1)
    of_layer = 4 * (2 * 3 * UNITS + 2)
    assert [one["states"] for one in held] == [
        num_states * (SIZE // num_devices + (of_layer if device == 0 else 0)) for device in range(num_devices)
    ]
    assert all(one["weights"] == one["gradients"] == SIZE + of_layer for one in held)


@pytest.mark.parametrize(
    "how",
    [
        {"name": "lamb"},
        {"name": "lars"},
        {"name": "adagrad"},
        {"name": "own"},
        {"sparse": True, "name": "sgd"},
        {"clip_norm": 1.0},
        {"measure_grad_norm": True},
        {"check_replicas_every": 2},
        {"kvstore": "nccl"},
        {"words": WORDS // 8},
    ],
    ids=str,
)
def test_what_is_not_cut(how):
    assert parts_of(make(4, **how)[1]) == 1
    assert parts_of(make(4)[1]) == 4


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("how", ["states", "checkpoint"])
def test_files_hold_whole_states_and_fit_any_number_of_devices(name, how, tmp_path):
    def saved(folder, **options):
        net, trainer = make(4, name, **options)
        train(net, trainer)
        mgpu.save_checkpoint(net, folder / "checkpoint", trainer)
        net.save_parameters(str(folder / "net"))
        trainer.save_states(str(folder / "states"))
        return (folder / "states").read_bytes()

    def resumed(folder, num_devices, **options):
        net, trainer = make(num_devices, name, **options)
        if how == "checkpoint":
            mgpu.load_checkpoint(net, folder / "checkpoint", trainer)
        else:
            net.load_parameters(str(folder / "net"), ctx=trainer.contexts)
            trainer.load_states(str(folder / "states"))
        train(net, trainer, seed=1)
        return weights(net)

    folders = tmp_path / "cut", tmp_path / "whole"
    for folder in folders:
        folder.mkdir()
    assert saved(folders[0]) == saved(folders[1], shard_optimizer=False)
    for num_devices in (1, 2, 8):
        expected = resumed(folders[1], num_devices, shard_optimizer=False)
        for folder in folders:
            assert_same(resumed(folder, num_devices), expected)


def test_a_state_of_another_shape_is_refused(tmp_path):
    net, trainer = make(2, "momentum")
    train(net, trainer)
    update = trainer.steps.update
    states, counts = update.states(), update.counts()
    for shape in ((SIZE // 8,), (UNITS, WORDS)):
        with pytest.raises(mgpu.errors.StateError):
            update.restore({**states, 0: nd.zeros(shape)}, counts)


@pytest.mark.parametrize("name", ["momentum", "nag"])
def test_changes_during_training(name):
    """Momentum of 0 and back; other multipliers; frozen and trained again; a pass without it; sums by hand; two batches."""

    def story(net, trainer):
        optimizer, embedding = trainer._optimizer, net[0].weight
        for change in (
            lambda: setattr(optimizer, "momentum", 0.0),
            lambda: setattr(optimizer, "momentum", 0.9),
            lambda: set_params(net[0], "lr_mult", 0.5),
            lambda: setattr(embedding, "grad_req", "null"),
            lambda: setattr(embedding, "grad_req", "write"),
            lambda: net[1].bias.set_data(nd.ones(2)),
        ):
            change()
            train(net, trainer, 2)
            trainer.check_replicas()
        with trainer.accumulate():
            train(net, trainer, 1)
        train(net, trainer, 1)
        for layers in (net, net[0]):
            with mx.autograd.record():
                losses = [layers(nd.ones((2, 3), ctx=context) * i).sum() for i, context in enumerate(trainer.contexts)]
            trainer.backward(losses)
            trainer.allreduce_grads()
            for context in trainer.contexts:
                np.testing.assert_array_equal(embedding.grad(context).asnumpy(), embedding.grad(mx.cpu(0)).asnumpy())
            trainer.update(6, ignore_stale_grad=True)
        train(net, trainer)
        parts.append(parts_of(trainer))

    found, parts = [], []
    for options in ({}, {"shard_optimizer": False}):
        net, trainer = make(3, name, **options)
        train(net, trainer)
        story(net, trainer)
        found.append(weights(net))
    assert_same(*found)
    assert parts == [3, 1]


def test_states_follow_into_a_bucket_of_its_own_and_back():
    """With larger buckets the embedding shares one, until it alone is trained again."""

    def trained(**options):
        net, trainer = make(3, bucket_bytes=2**20, **options)
        for params in ([], [net[0].weight], list(net.collect_params().values())):
            for grad_req in ("null", "write"):
                for param in params:
                    param.grad_req = grad_req
                if grad_req == "null" and len(params) == 1:
                    train(net, trainer, 1)
            train(net, trainer)
            parts.append(parts_of(trainer))
        return weights(net)

    parts = []
    assert_same(trained(), trained(shard_optimizer=False))
    assert parts == [1, 3, 1, 1, 1, 1]


def test_a_step_without_other_layers_keeps_the_parts_and_their_sums(monkeypatch):
    net, trainer = make(2, find_unused_parameters=True)
    train(net, trainer)
    store = trainer.steps.sum._stores[tuple(trainer.contexts)]
    kv, keys = store._kv, dict(store._keys)
    for layers in (net[0], net, net[0]):
        with mx.autograd.record():
            losses = [layers(nd.ones((2, 3), ctx=context)).sum() for context in trainer.contexts]
        trainer.backward(losses)
        trainer.step(4)
    assert store._kv is kv and store._keys == keys and len(keys) == 3
    parts = trainer.steps.layout.one_each([0])
    assert parts == [slab for slab in trainer.steps.layout.slabs if 0 in slab.indices]


def test_a_device_that_differs_is_found():
    net, trainer = make(2)
    train(net, trainer)
    trainer.check_replicas()
    net[0].weight.data(mx.cpu(1))[WORDS - 1, UNITS - 1] += 1
    with pytest.raises(mgpu.errors.ReplicaError, match="0.weight"):
        trainer.check_replicas()


def test_half_precision_has_parts_of_its_float32_weights():
    found = []
    for options in ({}, {"shard_optimizer": False}):
        net = nn.Embedding(WORDS, UNITS, dtype="float16")
        mx.random.seed(0)
        net.initialize(ctx=cpus(4))
        trainer = mgpu.Trainer(net, "sgd", {**ELEMENTWISE["momentum"], "multi_precision": True}, bucket_bytes=1000, **options)
        for _ in range(3):
            with mx.autograd.record():
                losses = [net(nd.array([1, i], ctx=context)).sum() for i, context in enumerate(trainer.contexts)]
            trainer.backward(losses)
            trainer.step(8)
        found.append(weights(net))
    assert_same(*found)
    assert parts_of(trainer) == 1


def test_front_layers_have_the_highest_priority(monkeypatch):
    """As in gluon.Trainer: priority=-index. Sums are queued in the order of the backward pass."""
    seen, run = [], PushPull.run
    monkeypatch.setattr(PushPull, "run", lambda call: (seen.append(call._arguments[-1].value), run(call)))
    net = nn.HybridSequential()
    net.add(nn.Embedding(WORDS, UNITS), nn.Dense(4, in_units=UNITS, use_bias=False), nn.Dense(2, in_units=4, use_bias=False))
    net.initialize(ctx=cpus(2))
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, bucket_bytes=1)
    for _ in range(2):
        mgpu.train_batch(net, LOSS, trainer, np.ones((4, 1), "float32"), np.ones((4, 2), "float32"))
    sums, copies = seen[: len(seen) // 4], seen[len(seen) // 4 : len(seen) // 2]
    assert sums == copies == [-2, -1, 0, 0]
