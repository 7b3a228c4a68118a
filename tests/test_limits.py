"""fit(max_steps=, limit_batches=, limit_eval_batches=, evaluate_every=): short runs, and evaluations within epochs."""

import json

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from mxnet import gluon, init

from .test_resume import KilledAfter, KilledError

X = np.random.RandomState(0).randn(48, 4).astype("float32")
Y = (np.arange(48) % 3).astype("float32")


class Counted:
    """Batches of 8 that count how many were read."""

    def __init__(self, length=6):
        self.num_read, self.length = 0, length

    def __len__(self):
        return self.length

    def __iter__(self):
        for begin in range(0, 48, 8):
            self.num_read += 1
            yield X[begin : begin + 8], Y[begin : begin + 8]


def train(*, seed=0, epochs=4, length=6, **options):
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="relu", in_units=4), gluon.nn.Dense(3, in_units=8))
    net.initialize(init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
    data, test = Counted(length), Counted(length)
    options.setdefault("callbacks", [])
    history = mgpu.fit(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, data, test, epochs=epochs, **options)
    return net, history, data, test


def weights(net):
    return [param.data(mx.cpu(0)).asnumpy() for param in net.collect_params().values()]


def test_max_steps_ends_within_an_epoch_and_evaluates():
    _, history, data, test = train(max_steps=8)
    assert data.num_read == 8 and test.num_read == 12
    assert [row["epoch"] for row in history.rows] == [1, 2]
    assert history.stopped == "max_steps=8" and "test_loss" in history.rows[-1]


@pytest.mark.parametrize("every", [None, 1])
def test_max_steps_continue_where_the_run_was(tmp_path, every):
    """A finished run makes no more steps; a longer one goes on with the next epoch."""
    saving = [mgpu.Checkpoint(tmp_path, every=every)]
    train(max_steps=6, callbacks=saving)
    _, again, data, _ = train(max_steps=6, callbacks=saving, resume="auto")
    assert data.num_read == 0 and len(again.rows) == 1
    net, longer, _, _ = train(max_steps=12, callbacks=saving, resume="auto")
    whole, _, _, _ = train(max_steps=12)
    assert len(longer.rows) == 2
    assert all(np.array_equal(one, other) for one, other in zip(weights(net), weights(whole)))


def test_limit_batches_shortens_every_epoch_and_its_evaluation():
    _, history, data, test = train(limit_batches=2, limit_eval_batches=3, epochs=2)
    assert data.num_read == 4 and test.num_read == 6
    assert len(history.rows) == 2 and history.stopped == ""


def test_max_steps_end_a_run_whatever_the_length_of_its_data():
    _, history, data, _ = train(max_steps=13, length=48)  # of the examples
    assert data.num_read == 13 and history.stopped == "max_steps=13"


def test_limited_epochs_resume_in_their_middle(tmp_path):
    options = {"limit_batches": 4, "epochs": 2, "evaluate_every": 3}
    whole, expected, _, _ = train(**options)
    with pytest.raises(KilledError):
        train(callbacks=[mgpu.Checkpoint(tmp_path, every=1), KilledAfter(6)], **options)
    net, history, _, _ = train(callbacks=[mgpu.Checkpoint(tmp_path, every=1)], resume="auto", **options)
    assert all(np.array_equal(one, other) for one, other in zip(weights(net), weights(whole)))
    assert history.evaluations == expected.evaluations
    assert history.column("test_loss") == expected.column("test_loss")


def test_evaluate_every_reports_within_epochs_and_does_not_change_the_training(tmp_path):
    evaluated, history, _, test = train(evaluate_every=2, epochs=2, callbacks=[mgpu.loop.SaveHistory(tmp_path)])
    plain, other, _, _ = train(epochs=2)
    assert [(row["epoch"], row["step"]) for row in history.evaluations] == [(1, 2), (1, 4), (2, 8), (2, 10)]
    assert test.num_read == 6 * 6  # also after each epoch, once
    assert all(np.array_equal(one, two) for one, two in zip(weights(evaluated), weights(plain)))
    assert history.column("test_loss") == other.column("test_loss")
    assert json.loads((tmp_path / "history.json").read_text())["evaluations"] == history.evaluations


def test_evaluations_within_an_epoch_are_no_training_time_of_a_resumed_run(tmp_path, clock):
    """A checkpoint counted them, so that the row of the epoch told more seconds and fewer examples/s."""

    class Slow(mgpu.Callback):
        def on_test_begin(self, state):
            clock[0] += 10

    callbacks = [Slow(), mgpu.Checkpoint(tmp_path, None, every=1)]
    with pytest.raises(KilledError):
        train(evaluate_every=2, callbacks=[*callbacks, KilledAfter(5)])
    _, history, _, _ = train(epochs=1, callbacks=callbacks, resume="auto")
    assert history.column("seconds") == [0.0]


def test_an_evaluation_is_that_of_a_run_that_ends_there():
    _, history, _, _ = train(evaluate_every=2, epochs=1)
    _, short, _, _ = train(max_steps=2)
    assert history.evaluations[0]["test_loss"] == short.rows[-1]["test_loss"]


@pytest.mark.parametrize("name", ["max_steps", "limit_batches", "limit_eval_batches", "evaluate_every"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_wrong_limits_raise(name, value):
    with pytest.raises(TrainerError):
        train(**{name: value})
