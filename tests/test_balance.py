"""Balancer: what it makes of devices whose speeds are given, of one that is really slow, and that weights do not show it."""

import time
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel import balancer as module
from gluon_mgpu.data_parallel.balancer import NUM_KEPT, Balancer
from gluon_mgpu.errors import ShardError, TrainerError
from gluon_mgpu.runtime.engine_push import CPU, ON_WORKER, EngineContext, push
from mxnet import autograd, gluon
from mxnet.base import _LIB

from .conftest import gluon_loop, largest_difference, small_batches, small_net, weights_of
from .test_no_sync import WAITING

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3})


class Machine:
    """Devices of given costs, in seconds an example, in the place of MXNet's engine and of the clock."""

    def __init__(self, monkeypatch, costs, overhead=0.0):
        self.costs, self.overhead = list(costs), overhead
        self.num_measured = 0
        self._times, self._now = {}, 0.0
        monkeypatch.setattr(module, "when_ready", self._when_ready)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self._now)

    def _when_ready(self, arrays, function):
        self._now = self._times[arrays[0].context]
        function()

    def split(self, balance, X, y, contexts):
        """Split, all devices beginning at 0, and set the times at which they will be done."""
        self._times = dict.fromkeys(contexts, 0.0)
        Xs, ys = balance(X, y, contexts)
        self.num_measured += balance._begun is not None
        self._times = {x.context: self.overhead + len(x) * self.costs[contexts.index(x.context)] for x in Xs}
        return Xs, ys

    def run(self, balance, contexts, num_steps, batch_size=64):
        """Return the sizes of the shards of the last step."""
        for _ in range(num_steps):
            Xs, _ = self.split(balance, np.zeros((batch_size, 2)), np.zeros(batch_size), contexts)
            balance.watch([mx.nd.zeros((len(x),), ctx=x.context) for x in Xs])
        return {str(x.context): len(x) for x in Xs}


@pytest.fixture
def contexts():
    return [mx.cpu(i) for i in range(3)]


def balancer(contexts, **options):
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(ctx=contexts)
    return Balancer(mgpu.Trainer(net, "sgd"), **options)


@pytest.mark.parametrize(
    ("costs", "sizes"),
    [([1, 1, 1], [22, 21, 21]), ([1, 1, 2], [26, 25, 13]), ([4, 1, 1], [7, 29, 28]), ([1, 1.04, 1.02], [22, 21, 21])],
    ids=str,
)
def test_shards_are_in_proportion_to_speed(costs, sizes, contexts, monkeypatch):
    machine = Machine(monkeypatch, costs)
    assert list(machine.run(balancer(contexts), contexts, NUM_KEPT + 1).values()) == sizes


def test_it_measures_now_and_then_and_sees_what_changes(contexts, monkeypatch):
    machine, balance = Machine(monkeypatch, [1, 1, 1]), balancer(contexts, every=10)
    machine.run(balance, contexts, NUM_KEPT + 100)
    assert machine.num_measured == NUM_KEPT + 10 - 1  # after the first ones, each 11th step
    machine.costs = [1, 1, 3]
    machine.run(balance, contexts, 11 + NUM_KEPT)
    assert balance.weights == pytest.approx([3 / 7, 3 / 7, 1 / 7])


def test_one_step_out_of_line_changes_nothing(contexts, monkeypatch):
    machine, balance = Machine(monkeypatch, [1, 1, 1]), balancer(contexts, every=1)
    for _ in range(10):
        machine.costs = [1, 1, 50]
        machine.run(balance, contexts, 1)
        machine.costs = [1, 1, 1]
        machine.run(balance, contexts, NUM_KEPT - 1)
    assert balance.weights == [1 / 3] * 3


def test_a_device_too_slow_for_an_example_is_asked_again(contexts, monkeypatch):
    machine, balance = Machine(monkeypatch, [1, 1, 1000]), balancer(contexts, every=10)
    assert machine.run(balance, contexts, 2 * NUM_KEPT + 5, batch_size=8) == {"cpu(0)": 4, "cpu(1)": 4}
    machine.costs = [1, 1, 1]
    assert machine.run(balance, contexts, 11 + NUM_KEPT + 5, batch_size=8) == {"cpu(0)": 3, "cpu(1)": 3, "cpu(2)": 2}


def test_batches_smaller_than_the_devices_are_split_and_not_measured(contexts, monkeypatch):
    machine, balance = Machine(monkeypatch, [1, 2, 4]), balancer(contexts)
    assert machine.run(balance, contexts, 20, batch_size=2) == {"cpu(0)": 1, "cpu(1)": 1}
    assert balance.weights == [1 / 3] * 3
    machine.run(balance, contexts, NUM_KEPT + 1)
    assert machine.run(balance, contexts, 1, batch_size=1) == {"cpu(0)": 1}


def test_one_device_gets_everything_unmeasured(monkeypatch):
    contexts = [mx.cpu(0)]
    machine = Machine(monkeypatch, [1])
    assert machine.run(balancer(contexts), contexts, 20) == {"cpu(0)": 64}
    assert machine.num_measured == 0


def train(net, trainer, balance, batches, machine=None):
    """The loop by hand, with a balancer."""
    for X, y in batches:
        split = balance if machine is None else lambda *batch: machine.split(balance, *batch)
        Xs, ys = split(X, y, trainer.contexts)
        with autograd.record():
            losses = [LOSS(net(x), t) for x, t in zip(Xs, ys)]
        mgpu.backward(losses)
        balance.watch(losses)
        trainer.step(len(X))


def test_the_split_does_not_show_in_the_weights(arrays, contexts, monkeypatch):
    """Ten steps, whose split changes after five from even to 1 : 2 : 8, end where one device ends."""
    batches = small_batches([24, 13, 24, 7, 24, 24, 23, 2, 24, 11])
    reference = weights_of(gluon_loop(small_net(contexts[:1]), *MOMENTUM, batches))
    machine = Machine(monkeypatch, [8, 4, 1])
    net = small_net(contexts)
    mgpu.eval_batch(net, *batches[0], contexts)  # shapes become known
    trainer = mgpu.Trainer(net, *MOMENTUM)
    balance = Balancer(trainer)
    train(net, trainer, balance, batches, machine)
    assert balance.weights == pytest.approx([1 / 11, 2 / 11, 8 / 11])
    assert mgpu.data_parallel.replica_difference(net) == 0.0
    assert largest_difference(weights_of(net), reference) <= 1e-5


def test_a_device_that_is_slow_gets_less(contexts):
    """MXNet's own engine and clock: the worker of cpu(0) sleeps 20 ms an example, that of cpu(1) 5 ms."""
    contexts = contexts[:2]
    net = small_net(contexts)
    batches = small_batches([20] * 60)
    mgpu.eval_batch(net, *batches[0], contexts)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    balance = Balancer(trainer)

    def split(X, y, devices):
        Xs, ys = balance(X, y, devices)
        for x, seconds in zip(Xs, [20e-3, 5e-3]):
            worker = EngineContext(CPU, x.context.device_id)
            push(partial(time.sleep, seconds * len(x)), device=worker, reads=[x], where=ON_WORKER)
        return Xs, ys

    for X, y in batches:
        Xs, ys = split(X, y, contexts)
        with autograd.record():
            losses = [LOSS(net(x), t) for x, t in zip(Xs, ys)]
        mgpu.backward(losses)
        balance.watch(losses)
        trainer.step(len(X))
        mx.nd.waitall()
        if balance.weights[0] < 0.35:
            break
    assert balance.weights[0] < 0.35


def test_it_does_not_wait(contexts, arrays, monkeypatch):
    net = small_net(contexts)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    balance = Balancer(trainer)
    batches = small_batches([12] * 12)
    train(net, trainer, balance, batches[:1])
    called = []
    for name in WAITING:
        function = getattr(_LIB, name)
        monkeypatch.setattr(_LIB, name, lambda *given, _name=name, _function=function: called.append(_name) or _function(*given))
    train(net, trainer, balance, batches)
    assert called == []
    monkeypatch.undo()
    mx.nd.waitall()
    assert len(balance._queued) + len(balance._kept) >= NUM_KEPT


@pytest.mark.parametrize(
    ("error", "wrong"),
    {
        "a trainer of Gluon's": (TrainerError, lambda balance: Balancer("trainer")),
        "no steps": (TrainerError, lambda balance: Balancer(balance._trainer, every=0)),
        "half a step": (TrainerError, lambda balance: Balancer(balance._trainer, every=0.5)),
        "other devices": (ShardError, lambda balance: balance(np.zeros((4, 2)), np.zeros(4), [mx.cpu(0), mx.cpu(5)])),
        "an empty batch": (ShardError, lambda balance: balance(np.zeros((0, 2)), np.zeros(0), balance._devices)),
        "one loss": (TrainerError, lambda balance: balance.watch(mx.nd.zeros((3,)))),
        "no loss": (TrainerError, lambda balance: balance.watch([])),
        "numbers": (TrainerError, lambda balance: balance.watch([0.5])),
        "a loss elsewhere": (TrainerError, lambda balance: balance.watch([mx.nd.zeros((2,), ctx=mx.cpu(5))])),
        "a device twice": (TrainerError, lambda balance: balance.watch([mx.nd.zeros((2,), ctx=mx.cpu(0))] * 2)),
    }.values(),
)
def test_what_makes_no_sense_is_refused(error, wrong, contexts):
    balance = balancer(contexts)
    with pytest.raises(error):
        wrong(balance)
    assert balance.weights == [1 / 3] * 3


@pytest.mark.each_value
@pytest.mark.parametrize("weights", ["auto", [1, 2, 4]], ids=str)
def test_fit_with_shares_ends_where_one_device_ends(arrays, monkeypatch, weights):
    """Three epochs, split even and then 1 : 2 : 4, or so from the start."""
    contexts = [mx.cpu(i) for i in range(3)]
    batches = small_batches([24, 13, 24, 7])
    reference = weights_of(gluon_loop(small_net(contexts[:1]), *MOMENTUM, batches * 3))
    monkeypatch.setattr("gluon_mgpu.data_parallel.balancer._Step.costs", lambda step: [4.0, 2.0, 1.0])
    net = small_net(contexts)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    split_f = Balancer(trainer) if weights == "auto" else partial(mgpu.split_batch, weights=weights)
    mgpu.fit(net, LOSS, trainer, batches, batches, epochs=3, callbacks=[], split_f=split_f)
    assert largest_difference(weights_of(net), reference) <= 1e-5
    if weights == "auto":
        assert split_f.weights == pytest.approx([1 / 7, 2 / 7, 4 / 7])


def test_parts_of_a_batch_are_measured_too(contexts, monkeypatch):
    monkeypatch.setattr("gluon_mgpu.data_parallel.balancer._Step.costs", lambda step: [4.0, 2.0, 1.0])
    net = small_net(contexts)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    balance = Balancer(trainer)
    for X, y in small_batches([24] * 12):
        mgpu.train_batch(net, LOSS, trainer, X, y, split_f=balance, micro_steps=2)
        mx.nd.waitall()
    assert balance.weights == pytest.approx([1 / 7, 2 / 7, 4 / 7])
