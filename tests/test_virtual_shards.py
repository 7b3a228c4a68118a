"""Contract: with `virtual_shards`, weights, states, metrics and history have the same bits on any number of devices."""

import hashlib
import json
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data import ArrayLoader
from gluon_mgpu.errors import ModesError, ReplicaError, StaleGradientError, StateError, TrainerError
from gluon_mgpu.mxnet_internals.parameters import structural_params
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from gluon_mgpu.trainer.precision import can_compute_bf16
from gluon_mgpu.trainer.tree_sum import TreeSum, VirtualShards, complete_parts
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon
from mxnet.gluon import nn, rnn

from .conftest import LOSS, as_array, cpus, initialized, sequential, states_of
from .test_resume import KilledAfter, KilledError
from .versions import COMPILED, nd, set_params

OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.05, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01}),
    "rmsprop": ("rmsprop", {"learning_rate": 0.01, "wd": 0.01}),
}


def mlp():
    return [nn.Dense(32, activation="relu"), nn.Dropout(0.3), nn.BatchNorm(), nn.Dense(5)], (10,)


def cnn():
    layers = [nn.Conv2D(6, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D(), nn.Flatten()]
    return [*layers, nn.Dense(5)], (3, 8, 8)


def recurrent():
    lstm = rnn.LSTM(8, layout="NTC", dropout=0.2, num_layers=2)
    return [nn.Dense(12, flatten=False), lstm, nn.LayerNorm(), nn.Dense(5)], (6, 4)


NETWORKS = {"mlp": mlp, "cnn": cnn, "recurrent": recurrent}


def make(network, num_devices, optimizer="sgd", shards=8, *, hybridize=True, **options):
    mx.random.seed(3)
    np.random.seed(3)
    layers, shape = NETWORKS[network]()
    net = sequential(*layers, ctx=cpus(num_devices), init=mx.init.Uniform(0.3))
    if hybridize and not (network == "recurrent" and is_mxnet2()):  # its graph would keep the size of the first shard
        net.hybridize()
    name, params = OPTIMIZERS[optimizer]
    return net, mgpu.Trainer(net, name, dict(params), virtual_shards=shards, **options), shape


def digest(net, trainer, *more):
    """The bits of weights and statistics, which all devices must have, and of states."""
    found = set()
    for context in trainer.contexts:
        bits = hashlib.sha256()
        for param in structural_params(net).values():
            bits.update(param.data(context).asnumpy().tobytes())
        for _, state in sorted(trainer.steps.update.states().items()):
            for array in state if isinstance(state, (list, tuple)) else [state]:
                bits.update(array.asnumpy().tobytes())
        found.add(bits.hexdigest())
    assert len(found) == 1, "the devices differ"
    return (*found, *more)


def train(network, num_devices, optimizer, *, sizes=(20, 17, 20), compiled="auto", micro_steps=1, **options):
    net, trainer, shape = make(network, num_devices, optimizer, **options)
    rng = np.random.RandomState(0)
    step = mgpu.compile_step(net, LOSS, trainer, compiled=compiled, micro_steps=micro_steps)
    losses = b""
    for size in sizes:
        batch = step(rng.randn(size, *shape).astype("float32"), rng.randint(0, 5, size))
        losses += b"".join(loss.asnumpy().tobytes() for loss in batch.losses)
        assert {*batch.shard_numbers} == {*range(min(size, trainer.virtual_shards))}
    after = float(mx.nd.random.uniform(shape=(1,)).asnumpy().item())
    return digest(net, trainer, hashlib.sha256(losses).hexdigest(), after)


@pytest.mark.each_value
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(("compiled", "hybridize"), [("auto", True), ("off", True), ("off", False)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_bits_do_not_depend_on_the_devices(network, optimizer, compiled, hybridize, clip_norm):
    found = {
        train(network, k, optimizer, compiled=compiled, hybridize=hybridize, clip_norm=clip_norm, sizes=(20, 17))
        for k in (1, 2, 4)
    }
    assert len(found) == 1


@pytest.mark.parametrize("shards", [6, 12])
def test_shards_that_are_no_power_of_two(shards):
    assert len({train("mlp", k, "sgd", shards=shards) for k in (1, 2, 3, 6)}) == 1


def test_batches_with_fewer_examples_than_shards():
    assert len({train("cnn", k, "sgd", sizes=(16, 3, 1, 9)) for k in (1, 2, 4, 8)}) == 1


def test_both_kinds_of_arrays(arrays):
    assert len({train("mlp", k, "adam") for k in (1, 2)}) == 1


def test_a_network_that_no_shard_reaches_stays():
    nets = [nn.Dense(2, in_units=3), nn.Dense(2, in_units=3)]
    for net in nets:
        net.initialize(mx.init.One(), ctx=cpus(2))
    both = [param for net in nets for param in net.collect_params().values()]
    trainer = mgpu.Trainer(both, "sgd", {"wd": 0.5}, virtual_shards=4, find_unused_parameters=True)
    mgpu.compile_step(nets[0], gluon.loss.L2Loss(), trainer, compiled=COMPILED)(np.ones((8, 3)), np.ones((8, 2)))
    assert [(net.weight.data(mx.cpu(1)) == 1).asnumpy().all() for net in nets] == [False, True]


def test_micro_steps_are_parts_of_virtual_shards():
    assert len({train("cnn", k, "sgd", micro_steps=2) for k in (1, 2, 4)}) == 1


@pytest.mark.skipif(not can_compute_bf16(), reason="MXNet cannot compute in bfloat16 on this processor")
def test_bf16():
    assert len({train("mlp", k, "sgd", precision="bf16") for k in (1, 2)}) == 1


def test_another_number_of_shards_rounds_differently():
    """The comparison of the other tests can fail."""
    assert train("mlp", 2, "sgd", shards=8) != train("mlp", 2, "sgd", shards=4)
    assert train("mlp", 1, "sgd", sizes=(20, 17)) != train("mlp", 1, "sgd", sizes=(20, 18))


def test_gradients_of_other_parameters_are_not_added_up():
    net = sequential(nn.Dense(4, in_units=4), nn.Dense(3, in_units=4), ctx=cpus(2))
    set_params(net[0], "grad_req", "null")
    trainer = mgpu.Trainer(net, "sgd", virtual_shards=2)
    X, y = np.ones((4, 4), "float32"), np.zeros(4, "float32")
    with trainer.accumulate():
        mgpu.train_batch(net, LOSS, trainer, X, y)
    set_params(net[0], "grad_req", "write")
    with pytest.raises(ModesError, match="discard"):
        mgpu.train_batch(net, LOSS, trainer, X, y)
    trainer.discard()
    mgpu.train_batch(net, LOSS, trainer, X, y)
    assert mgpu.replica_difference(net) == 0.0


@given(st.integers(1, 24), st.data())
def test_the_tree_is_the_same_for_every_division(num_shards, data):
    """Whatever parts of the shards devices hold, the sum is that of the recursive halves of the largest power of two."""
    num_leaves = data.draw(st.integers(1, num_shards))
    num_devices = data.draw(st.sampled_from([k for k in (1, 2, 3, 4) if num_shards % k == 0]))
    leaves = np.random.RandomState(num_shards).randn(num_leaves, 5).astype("float32")
    tree = TreeSum(VirtualShards(num_shards, cpus(num_devices)), cpus(num_devices))
    each = num_shards // num_devices
    gradients = [[mx.nd.zeros(5, ctx=context)] for context in cpus(num_devices)]  # a trainer adds legacy arrays up
    for number, leaf in enumerate(leaves):
        replica = number // each
        gradients[replica][0][:] = leaf
        tree.add(number, replica, gradients[replica])
    (found,) = tree.finish(num_leaves, num_shards, gradients[0])

    def total(begin, size):
        return leaves[begin] if size == 1 else total(begin, size // 2) + total(begin + size // 2, size // 2)

    parts = [total(begin, size) for begin, size in complete_parts(0, num_leaves)]
    wanted = parts[0]
    for part in parts[1:]:
        wanted = wanted + part
    np.testing.assert_array_equal(found.asnumpy(), wanted)


def run_fit(folder, num_devices, *, stop=None, resume=None, network="cnn", shards=8, **options):
    net, trainer, shape = make(network, num_devices, "adam", shards, clip_norm=1.0)
    rng = np.random.RandomState(0)
    X, y = rng.randn(70, *shape).astype("float32"), rng.randint(0, 5, 70).astype("float32")
    callbacks = [mgpu.Checkpoint(folder, every=2, keep=3), KilledAfter(stop)]
    loaders = [ArrayLoader(X, y, 16, shuffle=True, seed=1), ArrayLoader(X[:40], y[:40], 16)]
    history = mgpu.fit(net, LOSS, trainer, *loaders, epochs=2, callbacks=callbacks, resume=resume, **options)
    timeless = [
        {name: value for name, value in row.items() if "second" not in name and "_per_s" not in name} for row in history.rows
    ]
    return digest(net, trainer, json.dumps(timeless))


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.exhaustive), {"accumulate_grad_batches": 2}], ids=["each batch", "accumulated"]
)
def test_a_run_is_the_same_on_other_devices_and_after_a_resume(tmp_path, options):
    wanted = run_fit(tmp_path / "1", 1, **options)
    assert run_fit(tmp_path / "2", 2, **options) == wanted
    with pytest.raises(KilledError):
        run_fit(tmp_path / "3", 4, stop=7, **options)
    assert run_fit(tmp_path / "3", 2, resume="auto", **options) == wanted


def test_a_checkpoint_knows_its_number(tmp_path):
    run_fit(tmp_path, 2)
    with pytest.raises(StateError, match="virtual_shards=8 for one with 4"):
        run_fit(tmp_path, 2, resume="auto", shards=4)
    with pytest.raises(StateError, match="virtual_shards=8 for one with None"):
        run_fit(tmp_path, 2, resume="auto", shards=None)


def test_evaluate():
    rng = np.random.RandomState(0)
    data = ArrayLoader(rng.randn(50, 10).astype("float32"), rng.randint(0, 5, 50), 16)
    found = set()
    for k in (1, 2, 4):
        net, _, _ = make("mlp", k)
        found.add(json.dumps(mgpu.evaluate(net, data, loss=LOSS, virtual_shards=8)))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make("mlp", 3), "got virtual_shards=8 on 3 devices; expected a multiple of 3"),
        (lambda: make("mlp", 2, shards=0), "got virtual_shards=0"),
        (lambda: mgpu.LocalSGD(make("mlp", 2, shards=None)[0], "sgd", every=2, virtual_shards=8), "virtual_shards and LocalSGD"),
        (lambda: by_hand(*make("mlp", 2)), "got virtual_shards and a loop by hand"),
        (lambda: weighted(*make("mlp", 2)), "virtual shards have equal sizes"),
        pytest.param(
            lambda: synchronised(*make("mlp", 2)),
            "virtual_shards and synchronised BatchNorm",
            marks=pytest.mark.mxnet1("synchronised BatchNorm"),
        ),
        (lambda: make("mlp", 1, check_replicas_every=10), "got check_replicas_every=10 with 1 replicas"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(TrainerError, match=message):
        call()


def by_hand(net, trainer, shape):
    with mx.autograd.record():
        losses = [net(nd.ones((2, *shape), ctx=context)).sum() for context in trainer.contexts]
    trainer.backward(losses)
    trainer.step(4)


def weighted(net, trainer, shape):
    split_f = partial(mgpu.split_batch, weights=[3, 1])
    mgpu.train_batch(net, LOSS, trainer, np.ones((4, *shape), "float32"), np.zeros(4), split_f=split_f)


def synchronised(net, trainer, shape):
    net.hybridize(False)
    mgpu.set_batch_norm(net, "sync")
    mgpu.train_batch(net, LOSS, trainer, np.ones((4, *shape), "float32"), np.zeros(4))


def test_several_threads_are_refused(monkeypatch):
    monkeypatch.setattr("gluon_mgpu.trainer.tree_sum.ask_threads", lambda device_id: 2)
    with pytest.raises(TrainerError, match=r"cpu\(0\), which computes with 2 threads"):
        make("mlp", 1)


def flip(array, rng):
    """Flip a bit of an array, except for the sign and the largest bits of the exponent."""
    values = array.asnumpy()
    values.reshape(-1).view(np.uint32)[rng.randint(array.size)] ^= np.uint32(1 << rng.randint(10, 28))
    mx.nd.array(values, ctx=array.context).copyto(array.as_nd_ndarray())


def checked(num_devices, every, shards=None):
    net, trainer, shape = make("mlp", num_devices, shards=shards, check_replicas_every=every)
    X, y = np.random.RandomState(0).randn(12, *shape).astype("float32"), np.arange(12) % 5
    step = mgpu.compile_step(net, LOSS, trainer, compiled=COMPILED)
    for _ in range(2):
        step(X, y)
    return net, trainer, lambda: step(X, y)


def choose(net, trainer, replica, rng):
    """A weight or a state of a replica."""
    params = list(net.collect_params().values())
    indices = [index for index, param in enumerate(params) if param.grad_req != "null"]
    index = indices[rng.randint(len(indices))]
    if rng.randint(2):
        return params[index].data(trainer.contexts[replica])
    return states_of(trainer)[replica][index]


@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("shards", [None, 12])
def test_a_replica_that_differs_stops_the_run(num_devices, shards):
    """Of three, the others name it. The next update finds it, or the one after."""
    rng = np.random.RandomState(0)
    for replica in range(num_devices):
        net, trainer, step = checked(num_devices, every=2, shards=shards)
        flip(choose(net, trainer, replica, rng), rng)
        with pytest.raises(ReplicaError) as caught:
            for _ in range(3):
                step()
        named = {context for context in map(str, cpus(3)) if context in str(caught.value)}
        assert named == ({f"cpu({replica})"} if num_devices == 3 else {"cpu(0)", "cpu(1)"})
        assert "bucket 0" in str(caught.value)


def test_two_replicas_stop(tmp_path):
    """Which one is wrong is unknown: the run ends, and the checkpoint before holds what was verified."""
    net, trainer, shape = make("cnn", 2, check_replicas_every=3)
    rng = np.random.RandomState(0)
    data = ArrayLoader(rng.randn(64, *shape).astype("float32"), rng.randint(0, 5, 64), 8)

    class Flip(mgpu.Callback):
        def on_batch_end(self, state):
            if state.step == 6:
                flip(net[0].weight.data(mx.cpu(1)), rng)

    saving = mgpu.Checkpoint(tmp_path, every=4, monitor=None)
    told = r"got other bits on cpu\(0\), cpu\(1\).*0.weight.*after update 8;.*update 6\. .*test these devices, and resume from "
    told += rf"{tmp_path / 'last'}\."
    with pytest.raises(ReplicaError, match=told):
        mgpu.fit(net, LOSS, trainer, data, epochs=2, callbacks=[saving, Flip()])


class Branches(gluon.Block):
    """Batches of length 2 go through one layer, others through the other one."""

    def __init__(self, in_units):
        super().__init__()
        self.a, self.b = nn.Dense(1, in_units=in_units), nn.Dense(1, in_units=in_units)

    def forward(self, x):
        return (self.a if x.shape[1] == 2 else self.b)(x.mean(axis=1))


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_layer_that_a_later_batch_reaches_first(num_devices):
    found = []
    for in_units in (3, 0):
        net = initialized(Branches(in_units), [mx.cpu(i) for i in range(num_devices)], mx.init.One())
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, virtual_shards=4)
        for length in (2, 3):
            X = nd.arange(4).reshape((4, 1, 1)).tile((1, length, 3))
            mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, X, nd.zeros(4), ignore_stale_grad=True)
        found.append([w.asnumpy().tolist() for w in net.b.weight.list_data()])
    assert found[0] == found[1] and found[0][0] == found[0][-1] != [[1.0, 1.0, 1.0]]


class Routed(gluon.Block):
    """Shards of negative features go through one layer, others through the other one. The output is a pair with a number."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Dense(1, in_units=1), nn.Dense(1, in_units=1)

    def forward(self, x):
        return (self.a if x[0, 0].asnumpy().item() < 0 else self.b)(x), len(x)


def test_a_layer_that_only_one_shard_of_a_device_reaches():
    net = initialized(Routed(), cpus(1), mx.init.One())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, virtual_shards=2)
    X = nd.array([[-2], [-1], [1], [2]])
    batch = mgpu.train_batch(net, lambda output, label: (output[0] - label) ** 2, trainer, X, nd.zeros((4, 1)))
    assert [size for _, size in batch.outputs] == [2, 2]
    np.testing.assert_allclose(
        [net.a.weight.data().asnumpy().item(), net.b.weight.data().asnumpy().item()], 1 - 0.1 * 10 / 4, rtol=1e-6
    )


def test_running_statistics_that_are_initialised_again():
    found = []
    for num_devices in (1, 2):
        net, trainer, shape = make("mlp", num_devices)
        X, y = np.random.RandomState(0).randn(16, *shape).astype("float32"), np.arange(16) % 5
        mgpu.train_batch(net, LOSS, trainer, X, y)
        for param in (net[2].running_mean, net[2].running_var):
            param.initialize(ctx=trainer.contexts, force_reinit=True)
        mgpu.train_batch(net, LOSS, trainer, X, y)
        found.append(digest(net, trainer))
    assert found[0] == found[1]


def test_a_trainer_of_the_same_network_before_changes_nothing():
    """3 of 8 virtual shards: one device has none. The former trainer is not garbage yet."""
    found = []
    for has_former in (False, True):
        net = initialized(nn.Dense(3, in_units=5), [mx.cpu(0), mx.cpu(1)], mx.init.One())
        trainers = [mgpu.Trainer(net, "sgd", virtual_shards=8) for _ in range(1 + has_former)]
        for _ in range(2):
            mgpu.train_batch(net, LOSS, trainers[-1], np.ones((3, 5), "float32"), np.array([0, 0, 1]))
        found.append(net.weight.data(mx.cpu(1)).asnumpy().tolist())
    assert found[0] == found[1] != np.ones((3, 5)).tolist()


def test_another_trainer_takes_nothing_of_a_step_that_failed():
    """Only the last part's gradient is there."""
    net = initialized(nn.Dense(3, in_units=5), [mx.cpu(0), mx.cpu(1)], mx.init.One())
    trainer, other = mgpu.Trainer(net, "sgd", virtual_shards=4), mgpu.Trainer(net, "sgd")
    trainer.step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        mgpu.train_batch(net, LOSS, trainer, np.ones((8, 5), "float32"), np.zeros(8))
    with pytest.raises(StaleGradientError):
        other.step(8)
    assert (net.weight.data(mx.cpu(1)).asnumpy() == 1).all()


def test_what_a_program_draws_between_batches_does_not_depend_on_earlier_passes():
    """A graph without random operators was seeded for its first batch alone: a resumed run drew other numbers."""
    found = []
    for is_new in (False, True):
        mx.random.seed(0)
        net = initialized(nn.Dense(1, in_units=2), hybridize={})
        trainer = mgpu.Trainer(net, "sgd", virtual_shards=2)
        steps = [mgpu.compile_step(net, gluon.loss.L2Loss(), trainer, compiled=COMPILED) for _ in range(3)]
        for step in steps if is_new else steps[:1] * 3:
            step(as_array(mx.nd.random.normal(shape=(4, 2)).asnumpy()), np.ones(4, "float32"))
        found.append(net.weight.data().asnumpy().tolist())
    assert found[0] == found[1]
