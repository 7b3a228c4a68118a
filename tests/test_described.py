"""Optimizers and schedules as plain values."""

import json

import gluon_mgpu
import numpy as np
import pytest
from gluon_mgpu.errors import StateError
from gluon_mgpu.trainer.optimizer_config import describe, restore_optimizer
from mxnet import gluon, lr_scheduler
from mxnet import optimizer as opt

from .versions import nd

NAMES = sorted(set(opt.Optimizer.opt_registry) - {"test", "lbsgd", "ccsgd"})
SCHEDULES = [
    lambda: lr_scheduler.FactorScheduler(step=3, factor=0.5, base_lr=0.4, warmup_steps=2),
    lambda: lr_scheduler.MultiFactorScheduler([2, 5], factor=0.5, base_lr=0.4),
    lambda: lr_scheduler.PolyScheduler(20, base_lr=0.4, pwr=3),
    lambda: lr_scheduler.CosineScheduler(20, base_lr=0.4, final_lr=0.1, warmup_steps=2, warmup_mode="constant"),
]


def told(optimizer):
    return json.loads(json.dumps(describe(optimizer)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("taken", [True, False])
def test_the_rate_is_taken_and_the_options_stay(name, taken):
    optimizer = opt.create(name, learning_rate=0.125, wd=0.5)
    optimizer.num_update = 7
    again = opt.create(name, learning_rate=0.25, wd=0.25)
    restore_optimizer(told(optimizer), again, learning_rate=taken)
    assert (again.learning_rate, again.wd, again.num_update) == (0.125 if taken else 0.25, 0.25, 7)


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("num_updates", [0, 1, 4, 9, 30])
def test_a_schedule_goes_on(make, num_updates):
    first, second, whole = ("sgd", make()), ("sgd", make()), make()
    first, second = (opt.create(name, lr_scheduler=schedule, learning_rate=0.4) for name, schedule in (first, second))
    for first.num_update in range(num_updates + 1):
        assert first.learning_rate == whole(first.num_update)
    restore_optimizer(told(first), second)
    for second.num_update in range(num_updates, num_updates + 10):
        assert second.learning_rate == whole(second.num_update)


def test_a_rate_that_is_set_after_a_restore_stays():
    first, second = (opt.SGD(lr_scheduler=lr_scheduler.FactorScheduler(2, 0.5, base_lr=1.0)) for _ in range(2))
    first.num_update = 5
    restore_optimizer(told(first), second)
    second.lr_scheduler.base_lr = 0.05
    assert second.learning_rate == 0.05


class Own(opt.SGD):
    """Keeps a number that moves."""

    def __init__(self, gamma=1.0, **options):
        super().__init__(**options)
        self.gamma = gamma
        self.seen = (1, [2.5, None], {"a": np.float32(0.5), 3: True})


def test_of_ones_own_classes_what_moves_is_taken():
    one, other = Own(gamma=0.25, momentum=0.5), Own()
    one.seen = {"a": np.float32(0.5), 3: (True, None)}
    restore_optimizer(told(one), other)
    assert (other.gamma, other.momentum, other.seen) == (1.0, 0.0, one.seen)


def test_options_in_a_file_are_not_taken():
    saved, again = describe(opt.SGD()), opt.SGD(momentum=0.5)
    saved["values"]["momentum"] = 0.25
    restore_optimizer(saved, again)
    assert again.momentum == 0.5


VALUES = {"NumPy": np.zeros(2), "MXNet": nd.zeros(2), "object": object(), "dict": {1: nd.zeros(2)}, "list": [object()]}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_json_cannot_hold_is_reported_by_name(value):
    optimizer = Own()
    optimizer.seen = value
    with pytest.raises(StateError, match="seen of type .* in Own"):
        describe(optimizer)


class Halves(lr_scheduler.LRScheduler):
    """Like GluonCV's LRSequential: one schedule after the other."""

    def __init__(self, schedules, at):
        super().__init__()
        self.schedules, self.at = schedules, at

    def __call__(self, num_update):
        self.latest = num_update
        return self.schedules[num_update >= self.at](num_update)


def test_schedules_within_a_schedule_belong_to_the_program():
    first, second = (opt.SGD(lr_scheduler=Halves([make() for make in SCHEDULES[2:]], 4)) for _ in range(2))
    first.num_update = 6
    assert first.learning_rate != second.learning_rate
    restore_optimizer(told(first), second)
    assert second.lr_scheduler.latest == 6 and second.learning_rate == first.learning_rate


@pytest.mark.parametrize("make", SCHEDULES)
def test_states_of_an_earlier_step_bring_back_its_rate(make, tmp_path):
    """The same trainer goes back, for example after NaN: MXNet's schedules count forward only."""
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    trainer = gluon_mgpu.Trainer(net, "sgd", {"lr_scheduler": make()})

    def steps(count):
        rates = []
        for _ in range(count):
            gluon_mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, nd.ones((2, 1)), nd.zeros(2))
            rates.append(trainer.learning_rate)
        return rates

    steps(2)
    trainer.save_states(str(tmp_path / "states"))
    rates = steps(12)
    trainer.load_states(str(tmp_path / "states"))
    assert steps(12) == rates


def test_a_schedule_that_the_program_has_changed_stays(tmp_path):
    """Also another one."""
    for new in (0.01, lr_scheduler.FactorScheduler(100, base_lr=0.003)):
        net = gluon.nn.Dense(1, in_units=1)
        net.initialize()
        trainer = gluon_mgpu.Trainer(net, "sgd", {"lr_scheduler": lr_scheduler.FactorScheduler(100, base_lr=0.1)})
        trainer.save_states(str(tmp_path / "states"))
        gluon_mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, nd.ones((2, 1)), nd.zeros(2))
        of, name = (trainer.optimizer.lr_scheduler, "base_lr") if new == 0.01 else (trainer.optimizer, "lr_scheduler")
        setattr(of, name, new)
        trainer.load_states(str(tmp_path / "states"))
        assert trainer.learning_rate == getattr(new, "base_lr", new)
