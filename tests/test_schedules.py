"""Learning rates for larger batches, against the papers' formulas written out."""

import math
import pickle

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.trainer.schedules import scaled_learning_rate, scaled_params
from mxnet import gluon

from .conftest import assert_house_style

FOUR_TIMES = {"base_batch_size": 64, "batch_size": 256}


@pytest.mark.parametrize(
    ("batch_size", "linear", "sqrt"), [(64, 0.1, 0.1), (256, 0.4, 0.2), (16, 0.025, 0.05), (8192, 12.8, 1.13137)]
)
def test_the_rules(batch_size, linear, sqrt):
    assert scaled_learning_rate(0.1, base_batch_size=64, batch_size=batch_size) == pytest.approx(linear)
    assert scaled_learning_rate(0.1, base_batch_size=64, batch_size=batch_size, rule="sqrt") == pytest.approx(sqrt, rel=1e-5)


def test_the_warm_up_grows_evenly_and_stays():
    schedule = scaled_params(0.1, **FOUR_TIMES, steps_per_epoch=5, warmup_epochs=2)["lr_scheduler"]
    assert [schedule(step) for step in range(11)] == pytest.approx([0.1 + 0.03 * step for step in range(11)])
    assert [schedule(step) for step in (11, 50, 10**9)] == [0.4] * 3


def test_the_cosine_ends_at_zero():
    schedule = scaled_params(0.1, **FOUR_TIMES, steps_per_epoch=10, warmup_epochs=1, epochs=5)["lr_scheduler"]
    rates = [schedule(step) for step in range(51)]
    assert rates[:11] == pytest.approx([0.1 + 0.03 * step for step in range(11)])
    assert rates[10:] == pytest.approx([0.2 * (1 + math.cos(math.pi * step / 40)) for step in range(41)])


@pytest.mark.parametrize("options", [{"warmup_epochs": 0}, {"warmup_epochs": 0, "epochs": 1}])
def test_no_warm_up_begins_at_the_scaled_rate(options):
    assert scaled_params(0.1, **FOUR_TIMES, steps_per_epoch=100, **options)["lr_scheduler"](0) == pytest.approx(0.4)


def test_a_smaller_batch_has_nothing_to_warm_up():
    params = scaled_params(0.1, base_batch_size=64, batch_size=32, steps_per_epoch=10)
    assert [params["lr_scheduler"](step) for step in (0, 1, 100)] == [0.05] * 3


def test_the_trainer_follows_it(devices, arrays, capsys):
    """Each step of w' = w - rate, with a gradient of 1; and MXNet says nothing of a rate that was overwritten."""
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Zero(), ctx=devices)
    params = scaled_params(0.1, **FOUR_TIMES, steps_per_epoch=2, warmup_epochs=1)
    trainer = mgpu.Trainer(net, "sgd", params)
    weights, rates = [0.0], []
    for _ in range(4):
        with mx.autograd.record():
            losses = [net(arrays.ones((1, 1), ctx=context)).sum() for context in devices]
        mgpu.backward(losses)
        trainer.step(len(devices))
        weights.append(float(net.weight.data(devices[0]).asnumpy()[0, 0]))
        rates.append(trainer.learning_rate)
    assert [before - after for before, after in zip(weights, weights[1:])] == pytest.approx([0.25, 0.4, 0.4, 0.4], rel=1e-5)
    assert rates == pytest.approx([0.25, 0.4, 0.4, 0.4])
    assert capsys.readouterr().out == ""


def test_it_can_be_saved_with_the_trainer():
    schedule = pickle.loads(pickle.dumps(scaled_params(0.1, **FOUR_TIMES, steps_per_epoch=10)["lr_scheduler"]))
    assert schedule(25) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0},
        {"learning_rate": "0.1"},
        {"batch_size": -1},
        {"batch_size": 10**400},
        {"base_batch_size": math.nan},
        {"steps_per_epoch": 0},
        {"warmup_epochs": -1},
        {"warmup_epochs": math.nan},
        {"warmup_epochs": math.inf},
        {"warmup_epochs": 5, "epochs": 5},
        {"warmup_epochs": "5"},
        {"warmup_epochs": None},
        {"warmup_epochs": True},
        {"epochs": math.inf},
        {"epochs": "30"},
        {"warmup_epochs": 0, "epochs": True},
        {"rule": "cubic"},
        {"rule": ["linear"]},
        {"rule": None},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(TrainerError) as caught:
        scaled_params(**{"learning_rate": 0.1, **FOUR_TIMES, "steps_per_epoch": 10, **wrong})
    assert_house_style(caught.value)
