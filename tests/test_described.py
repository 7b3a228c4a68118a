"""Optimizers and schedules as plain values."""

import json

import gluon_mgpu  # noqa: F401  registers adamw
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import StateError
from gluon_mgpu.trainer.optimizer_config import describe, differences, failure, misfit, plain_attributes, restore_optimizer
from mxnet import lr_scheduler
from mxnet import optimizer as opt

from .conftest import assert_house_style

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
def test_one_that_is_made_alike_is_the_same(name):
    optimizer = opt.create(name, learning_rate=0.125, wd=0.5)
    assert differences(told(optimizer), opt.create(name, learning_rate=0.25, wd=0.5)) == []
    assert differences(told(optimizer), opt.create(name, wd=0.25)) == ["wd 0.5 where this one has 0.25"]
    again = opt.create(name, learning_rate=0.25, wd=0.5)
    restore_optimizer(told(optimizer), again)
    assert again.learning_rate == 0.125


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("num_updates", [0, 1, 4, 9, 30])
def test_a_schedule_goes_on(make, num_updates):
    first, second, whole = ("sgd", make()), ("sgd", make()), make()
    first, second = (opt.create(name, lr_scheduler=schedule, learning_rate=0.4) for name, schedule in (first, second))
    for first.num_update in range(num_updates + 1):
        assert first.learning_rate == whole(first.num_update)
    assert differences(told(first), second) == []
    restore_optimizer(told(first), second)
    assert vars(second.lr_scheduler) == vars(first.lr_scheduler)
    for second.num_update in range(num_updates, num_updates + 10):
        assert second.learning_rate == whole(second.num_update)


class Own(opt.SGD):
    """Keeps a number that moves."""

    def __init__(self, gamma=1.0, **options):
        super().__init__(**options)
        self.gamma = gamma
        self.seen = (1, [2.5, None], {"a": np.float32(0.5), 3: True})


def test_of_ones_own_classes_only_the_name_is_compared():
    one, other = Own(gamma=0.25, momentum=0.5), Own()
    one.seen = (7,)
    assert differences(told(one), other) == []
    restore_optimizer(told(one), other)
    assert (other.gamma, other.momentum, other.seen) == (0.25, 0.5, (7,))
    assert differences(told(opt.SGD()), other) == ["SGD where this one has Own"]


def test_tuples_dicts_and_numpys_numbers_come_back():
    one, other = Own(), Own()
    other.seen = None
    restore_optimizer(told(one), other)
    assert other.seen == (1, [2.5, None], {"a": 0.5, 3: True})
    assert [type(key) for key in other.seen[2]] == [str, int]


def test_a_function_as_a_schedule_keeps_nothing():
    optimizer = opt.SGD(lr_scheduler=lambda step: 1 / (step + 1))
    again = opt.SGD(lr_scheduler=lambda step: 1 / (step + 1))
    assert differences(told(optimizer), again) == []
    restore_optimizer(told(optimizer), again)
    assert again.learning_rate == 1.0
    assert differences(told(optimizer), opt.SGD()) == ["function as its schedule where this one has none"]


VALUES = {
    "NumPy": np.zeros(2),
    "MXNet": mx.nd.zeros((2,)),
    "object": object(),
    "dict": {1: mx.nd.zeros((2,))},
    "list": [object()],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_json_cannot_hold_is_told_by_name(value):
    optimizer = opt.SGD(lr_scheduler=lr_scheduler.FactorScheduler(3))
    optimizer.lr_scheduler.table = value
    with pytest.raises(StateError, match="got table of type .* in FactorScheduler; expected numbers") as caught:
        describe(optimizer)
    assert_house_style(caught.value)


def test_methods_are_not_overwritten():
    optimizer = opt.SGD()
    description = told(optimizer)
    description["values"].update({"update": "gone", "__class__": "gone", "a b": "gone"})
    restore_optimizer(description, optimizer)
    assert callable(optimizer.update) and type(optimizer) is opt.SGD and "a b" not in vars(optimizer)


def misfits(theirs, thing, **options):
    wrong = misfit(describe(thing)["values"], {**describe(thing)["values"], **theirs}, thing, **options)
    return None if wrong is None else (wrong.path, wrong.expected)


def test_values_of_another_kind_do_not_replace_those_of_known_optimizers():
    assert misfits({"momentum": 0.5, "lazy_update": False}, opt.SGD()) is None
    assert misfits({"momentum": None}, opt.SGD()) == (("momentum",), "a finite number")
    assert misfits({"lazy_update": 1}, opt.SGD()) == (("lazy_update",), "true or false")
    assert misfits({"momentum": True}, opt.SGD()) == (("momentum",), "a finite number")
    assert misfits({"clip_weights": None}, opt.RMSProp(clip_weights=0.5)) is None  # an option that may be missing
    assert misfits({"extra": 1.0}, opt.SGD()) is None
    assert misfits({"extra": 1.0}, opt.SGD(), exact=True) == (("extra",), "no attributes but those of SGD")


def test_ones_own_optimizers_may_count_with_any_numbers_and_gain_attributes():
    """A flag that becomes a count, or an attribute that the first step makes, is their own affair. Their methods are not."""
    assert misfits({"gamma": 3, "later": 2.0}, Own(), exact=True) is None
    assert misfits({"gamma": True}, Own()) is None
    assert misfits({"gamma": "text"}, Own()) == (("gamma",), "a finite number")
    assert misfits({"seen": [1, 2]}, Own()) == (("seen",), "a tuple")
    for name in ("update", "__class__", "a b"):
        assert misfits({name: 1.0}, Own(), exact=True) == ((name,), "no attributes but those of Own")


def test_an_attribute_that_is_no_plain_value_is_named_by_its_class():
    optimizer = Own()
    optimizer.table = np.zeros(2)
    assert plain_attributes(optimizer)["table"] == {"ndarray": None} and plain_attributes(optimizer)["gamma"] == 1.0


def test_a_schedule_without_a_rate_cannot_train():
    schedule = lr_scheduler.FactorScheduler(1, base_lr=0.5)
    assert failure(opt.SGD(lr_scheduler=schedule), {0: 1}) == ""
    schedule.base_lr = float("nan")
    assert failure(opt.SGD(lr_scheduler=schedule), {0: 1}) == "its schedule returns no finite number"
