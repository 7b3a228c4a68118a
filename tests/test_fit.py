"""fit(): it learns, tells what each epoch gave, and ends well, whatever ends it."""

import signal
import threading

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import NonFiniteLossError, TrainerError
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet.gluon import nn

from .conftest import LOSS, SEED, largest_difference, sequential, weights_of
from .worlds import devices

__all__ = ["devices"]  # a fixture


def make_net(ctx, classes=3):
    mx.random.seed(SEED)
    return sequential(nn.Dense(8, activation="tanh", in_units=2), nn.Dense(classes, in_units=8), ctx=ctx, init=mx.init.Xavier())


def make_trainer(net, learning_rate=0.5, **kwargs):
    return mgpu.Trainer(net, "sgd", {"learning_rate": learning_rate, **kwargs})


def three_clouds(num_examples=60):
    """Points around three corners of a triangle: (points, corner)."""
    rng = np.random.RandomState(0)
    labels = rng.randint(0, 3, num_examples).astype("int32")
    corners = np.array([[0, 2], [-2, -1], [2, -1]], "float32")
    return corners[labels] + rng.normal(0, 0.3, (num_examples, 2)).astype("float32"), labels


def batches_of(X, y, size=16):
    return [(X[i : i + size], y[i : i + size]) for i in range(0, len(X), size)]


def train(ctx, train_iter=None, test_iter=None, *, epochs=1, learning_rate=0.5, net=None, **kwargs):
    """Fit a small network on the clouds, silently."""
    net = net or make_net(ctx)
    kwargs = {"callbacks": [], **kwargs}
    train_iter = batches_of(*three_clouds()) if train_iter is None else train_iter
    return mgpu.fit(net, LOSS, make_trainer(net, learning_rate), train_iter, test_iter, epochs=epochs, **kwargs)


class Recorder(mgpu.Callback):
    """Notes what it was called with."""

    def __init__(self):
        self.calls = []
        self.state = None

    def note(self, what, state):
        self.state = state
        self.calls.append((what, state.epoch, len(state.history.rows)))

    def on_fit_begin(self, state):
        self.note("fit begins", state)

    def on_epoch_begin(self, state):
        self.note("epoch begins", state)

    def on_report(self, state, progress):
        self.note(f"report of {progress.num_batches}", state)

    def on_epoch_end(self, state):
        self.note("epoch ends", state)

    def on_fit_end(self, state):
        self.note("fit ends", state)


def interrupting(items, at, times=1):
    """The items; before item `at`, from 1, is given, Ctrl-C is pressed."""
    for number, item in enumerate(items, 1):
        if number == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        yield item


# What it does


@pytest.mark.parametrize("num_devices, arrays", [(1, "nd"), (3, "np")], indirect=["arrays"])
def test_it_learns(num_devices, arrays):
    devices = [mx.cpu(i) for i in range(num_devices)]
    X, y = three_clouds(150)
    net = make_net(devices)
    history = train(devices, batches_of(X[:100], y[:100]), batches_of(X[100:], y[100:]), epochs=8, net=net)
    assert history.column("train_loss")[-1] < 0.3 * history.column("train_loss")[0]
    assert history.column("test_accuracy")[-1] > 0.95
    assert history.stopped == ""
    assert mgpu.evaluate_accuracy_gpus(net, batches_of(X, y)) > 0.95
    assert mgpu.replica_difference(net) == 0.0


def test_it_is_train_batch_in_a_loop(devices):
    by_hand, fitted = make_net(devices), make_net(devices)
    trainer = make_trainer(by_hand)
    for X, y in batches_of(*three_clouds()) * 2:
        mgpu.train_batch(by_hand, LOSS, trainer, X, y)
    train(devices, net=fitted, epochs=2)
    assert largest_difference(weights_of(by_hand), weights_of(fitted)) == 0.0


def test_a_row_an_epoch(devices):
    data = batches_of(*three_clouds(60))
    rows = train(devices, data, data, epochs=3).rows
    columns = "epoch train_accuracy train_loss seconds examples_per_s learning_rate test_accuracy test_loss"
    assert [" ".join(row) for row in rows] == [columns] * 3
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert all(type(value) in (int, float) for value in row.values())
        assert row["seconds"] > 0
        assert row["seconds"] * row["examples_per_s"] == pytest.approx(60)
        assert row["learning_rate"] == 0.5


def test_the_training_metrics_are_over_every_example(devices):
    """Where the weights do not move, training measures what evaluating does."""
    data = batches_of(*three_clouds(37))
    net = make_net(devices)
    (row,) = train(devices, data, net=net, learning_rate=1e-12, metrics=[mgpu.accuracy, mgpu.top_k_accuracy(2)]).rows
    measured = mgpu.evaluate(net, data, [mgpu.accuracy, mgpu.top_k_accuracy(2)], loss=LOSS)
    assert row["train_accuracy"] == measured["accuracy"]
    assert row["train_top_2_accuracy"] == measured["top_2_accuracy"]
    assert row["train_loss"] == pytest.approx(measured["loss"], rel=1e-6)


def test_the_learning_rate_is_that_of_each_epoch_s_last_step():
    """Four steps an epoch, and half of it after every six."""
    net = make_net([mx.cpu()])
    schedule = mx.lr_scheduler.FactorScheduler(step=6, factor=0.5, base_lr=0.4)
    trainer = make_trainer(net, 0.4, lr_scheduler=schedule)
    history = mgpu.fit(net, LOSS, trainer, batches_of(*three_clouds(60)), epochs=3, callbacks=[])
    assert history.column("learning_rate") == [0.4, 0.2, 0.2]


def test_callbacks_are_called_in_order(report_every):
    report_every()
    first, second, order = Recorder(), Recorder(), []
    first.note = lambda what, state: order.append((1, what)) or Recorder.note(first, what, state)
    second.note = lambda what, state: order.append((2, what)) or Recorder.note(second, what, state)
    train([mx.cpu()], epochs=2, callbacks=[first, second])
    calls = [("fit begins", 0, 0), ("epoch begins", 1, 0), ("report of 4", 1, 0), ("epoch ends", 1, 1)]
    calls += [("epoch begins", 2, 1), ("report of 4", 2, 1), ("epoch ends", 2, 2), ("fit ends", 2, 2)]
    assert first.calls == second.calls == calls
    assert [number for number, _ in order] == [1, 2] * 8
    assert (first.state.epochs, first.state.num_batches, first.state.error) == (2, 4, None)


def test_a_data_iterator_without_a_length_is_taken():
    class Endless:
        def __iter__(self):
            return iter(batches_of(*three_clouds()))

    recorder = Recorder()
    assert len(train([mx.cpu()], Endless(), epochs=2, callbacks=[recorder]).rows) == 2
    assert recorder.state.num_batches == 0


def test_a_split_of_ones_own_is_used(devices):
    sizes = []

    def split(X, y, contexts):
        sizes.append(len(X))
        return mgpu.split_batch(X, y, contexts[:1])

    train(devices, test_iter=batches_of(*three_clouds(20)), split_f=split)
    assert sizes == [16, 16, 16, 12, 16, 4]


# Micro-steps, and the gradient's norm


@pytest.mark.parametrize("num_devices, every", [(2, 2), (1, 3), (3, 3), (3, 9)])
def test_batches_that_make_one_update(num_devices, every):
    """An epoch of 4 batches: the last group is what is left, and the next epoch begins a group of its own."""
    devices = [mx.cpu(i) for i in range(num_devices)]
    data = batches_of(*three_clouds())
    assert len(data) == 4
    joined = [tuple(np.concatenate(parts) for parts in zip(*data[i : i + every])) for i in range(0, 4, every)]
    accumulated, whole, recorder = make_net(devices), make_net(devices), Recorder()
    train(devices, data, net=accumulated, epochs=2, accumulate_grad_batches=every, callbacks=[recorder])
    train(devices, joined, net=whole, epochs=2)
    assert largest_difference(weights_of(accumulated), weights_of(whole)) <= 1e-6
    assert recorder.state.trainer.optimizer.num_update == 2 * len(joined)


def test_ctrl_c_waits_for_the_last_batch_of_an_update(tmp_path):
    data = batches_of(*three_clouds())
    net, whole = make_net([mx.cpu()]), make_net([mx.cpu()])
    options = {"callbacks": [mgpu.Checkpoint(tmp_path, monitor=None)], "accumulate_grad_batches": 4}
    with pytest.raises(KeyboardInterrupt, match="after step 4$"):
        train([mx.cpu()], interrupting(data, at=3), net=net, **options)
    train([mx.cpu()], [tuple(np.concatenate(parts) for parts in zip(*data[:4]))], net=whole)
    assert largest_difference(weights_of(net), weights_of(whole)) <= 1e-6
    mgpu.load_checkpoint(make_net([mx.cpu()]), tmp_path / "last", make_trainer(net))


def test_an_error_drops_what_was_accumulated():
    data = batches_of(*three_clouds())
    net = make_net([mx.cpu()])
    trainer = make_trainer(net)
    with pytest.raises(TrainerError):
        mgpu.fit(net, LOSS, trainer, [*data[:2], "no pair"], epochs=1, callbacks=[], accumulate_grad_batches=4)
    assert {param.grad_req for param in net.collect_params().values()} == {"write"}
    whole = make_net([mx.cpu()])
    mgpu.train_batch(whole, LOSS, make_trainer(whole), *data[3])
    mgpu.train_batch(net, LOSS, trainer, *data[3])
    assert largest_difference(weights_of(net), weights_of(whole)) == 0.0


@pytest.mark.pairwise
@pytest.mark.parametrize("every", [1, 3])
def test_the_gradients_norm_is_a_column(devices, arrays, every):
    """The mean over the epoch's updates, against those that were read one by one."""
    data = batches_of(*three_clouds())
    net = make_net(devices)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5}, measure_grad_norm=True)
    rows = [mgpu.fit(net, LOSS, trainer, data, epochs=1, callbacks=[], accumulate_grad_batches=every).rows[0] for _ in range(2)]
    by_hand = make_net(devices)
    trainer = mgpu.Trainer(by_hand, "sgd", {"learning_rate": 0.5}, measure_grad_norm=True)
    for row in rows:
        norms = []
        for i in range(0, len(data), every):
            mgpu.train_batch(by_hand, LOSS, trainer, *(np.concatenate(parts) for parts in zip(*data[i : i + every])))
            norms.append(float(trainer.grad_norm))
        assert row["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)


# What it refuses


@pytest.mark.parametrize("which, operation", [("train_iter", "fit"), ("test_iter", "evaluate")])
def test_a_generator_that_is_used_up_is_reported(which, operation):
    """Its second epoch is empty, which would otherwise look like an epoch of nothing."""
    recorder = Recorder()
    generator = (pair for pair in batches_of(*three_clouds()))
    with pytest.raises(TrainerError, match=f"^{operation}: got no batch") as caught:
        train([mx.cpu()], epochs=3, callbacks=[recorder], **{which: generator})
    assert recorder.calls[-1][:2] == ("fit ends", 2)
    assert recorder.state.error is caught.value
    assert recorder.state.history.stopped == "TrainerError"


@pytest.mark.parametrize("num_devices, step, shard", [(1, 1, 0), (2, 2, 1), (3, 5, 2), (3, 4, 0)])
def test_a_nan_in_the_data_is_reported_with_step_and_device(num_devices, step, shard, tmp_path):
    """One example of one shard of one batch of the second epoch is NaN; the weights, and so all that follows, are, too."""
    X, y = three_clouds(60)
    good, bad = batches_of(X, y, 12), batches_of(X.copy(), y, 12)
    bad[step - 1][0][shard * 12 // num_devices + 1] = np.nan

    class Epochs:
        passes = iter([good, bad, good])

        def __iter__(self):
            return iter(next(self.passes))

    ctx = [mx.cpu(i) for i in range(num_devices)]
    net, recorder = make_net(ctx), Recorder()
    with pytest.raises(NonFiniteLossError) as caught:
        train(ctx, Epochs(), net=net, epochs=3, callbacks=[recorder, mgpu.Checkpoint(tmp_path, monitor=None)])
    assert str(caught.value).startswith(f"fit: got a loss of nan at step {5 + step} on cpu({shard}) (shard {shard});")
    assert (recorder.calls[-1], recorder.state.history.stopped) == (("fit ends", 2, 1), "NonFiniteLossError")
    assert mgpu.load_checkpoint(net, tmp_path / "last")["epoch"] == 1
    assert all(np.isfinite(weight).all() for weight in weights_of(net))


# Ctrl-C


def test_ctrl_c_ends_it_after_the_batch_under_way(devices, tmp_path):
    X, y = three_clouds(50)
    data = batches_of(X, y, 10)

    class Epochs:
        passes = iter([iter(data), interrupting(data, at=3)])

        def __iter__(self):
            return next(self.passes)

    net, by_hand, recorder = make_net(devices), make_net(devices), Recorder()
    with pytest.raises(KeyboardInterrupt, match="^fit: stopped in epoch 2 after step 8$"):
        train(devices, Epochs(), epochs=2, net=net, callbacks=[mgpu.Checkpoint(tmp_path, monitor=None), recorder])
    assert recorder.calls[-1] == ("fit ends", 2, 1)
    assert recorder.state.history.stopped == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    trainer = make_trainer(by_hand)
    for pair in data + data[:3]:
        mgpu.train_batch(by_hand, LOSS, trainer, *pair)
    assert largest_difference(weights_of(net), weights_of(by_hand)) == 0.0
    progress = mgpu.load_checkpoint(make_net(devices), tmp_path / "last", make_trainer(net))
    assert (progress["epoch"], progress["epochs_completed"]) == (2, 1)
    assert progress["history"] == recorder.state.history.rows


def test_a_second_ctrl_c_does_not_wait():
    taken = []

    def endless():
        for pair in interrupting(batches_of(*three_clouds()) * 3, at=3, times=2):
            taken.append(pair)
            yield pair

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt) as caught:
        train([mx.cpu()], endless(), callbacks=[recorder])
    assert "fit: stopped" not in str(caught.value)
    assert len(taken) == 2
    assert recorder.calls[-1] == ("fit ends", 1, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_trains_in_another_thread():
    """Only the main thread may set signal handlers."""
    histories = []
    thread = threading.Thread(target=lambda: histories.append((is_mxnet2() and mx.npx.set_np(), train([mx.cpu()]))[1]))
    thread.start()
    thread.join(timeout=240)
    assert len(histories[0].rows) == 1
