"""Contract: a wrong argument is told in the house's words, before anything was changed: no weight, no state, no file."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checks import short
from gluon_mgpu.errors import StepError, TrainerError
from gluon_mgpu.trainer.local_sgd import LocalSGD
from gluon_mgpu.trainer.loss_scaler import LossScaler
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import assert_house_style, largest_difference, small_batches, small_net, weights_of

CTX = [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
X, Y = small_batches([6])[0]


class World:
    """A network that has trained a step, its trainer, and a folder."""

    def __init__(self):
        self.folder = None
        self.net = small_net(CTX)
        self.trainer = mgpu.Trainer(self.net, "adam", {"learning_rate": 0.01})
        mgpu.train_batch(self.net, LOSS, self.trainer, X, Y)

    def state(self):
        moments = [array.asnumpy() for pair in self.trainer._updaters[1].states.values() for array in pair]
        return weights_of(self.net, CTX[0]) + weights_of(self.net, CTX[1]) + moments

    def train(self, X=X, y=Y, loss=LOSS, **options):
        return mgpu.train_batch(self.net, loss, self.trainer, X, y, **options)

    def fit(self, train_iter=((X, Y),), **options):
        net, loss = options.pop("net", self.net), options.pop("loss", LOSS)
        return mgpu.fit(net, loss, self.trainer, train_iter, **{"epochs": 1, "callbacks": [], **options})


WRONG = {
    "features and labels of other lengths": lambda w: w.train(y=Y[:5]),
    "an empty batch": lambda w: w.train(X[:0], Y[:0]),
    "a batch of one number": lambda w: w.train(np.float32(1)),
    "images of another shape": lambda w: w.train(X[:, :, :3]),
    "the mean of the losses": lambda w: w.train(loss=lambda out, y: LOSS(out, y).mean()),
    "a loss that is no array": lambda w: w.train(loss=lambda out, y: None),
    "a split of nothing": lambda w: w.train(split_f=lambda X, y, ctx: ([], [])),
    "weights for other devices": lambda w: w.train(split_f=lambda X, y, ctx: mgpu.split_batch(X, y, ctx, weights=[1, 2, 3])),
    "a step of nothing": lambda w: w.trainer.step(6),
    "a step by zero": lambda w: w.trainer.step(0),
    "an update without a sum": lambda w: w.trainer.update(6),
    "no parts": lambda w: w.train(micro_steps=0),
    "half a part": lambda w: w.train(micro_steps=1.5),
    "parts with a loss that is no array": lambda w: w.train(loss=lambda out, y: None, micro_steps=2),
    "parts of an empty batch": lambda w: w.train(X[:0], Y[:0], micro_steps=2),
    "parts of other lengths": lambda w: w.train(y=Y[:5], micro_steps=2),
    "no losses": lambda w: mgpu.backward([]),
    "a trainer of Gluon's": lambda w: mgpu.train_batch(w.net, LOSS, gluon.Trainer(w.net.collect_params(), "sgd"), X, Y),
    "a norm to clip to of zero": lambda w: mgpu.Trainer(w.net, "sgd", clip_norm=0),
    "a value to clip to that is none": lambda w: mgpu.Trainer(w.net, "sgd", clip_value="1"),
    "devices apart for no step": lambda w: LocalSGD(w.net, "sgd", every=0),
    "a trained bias of frozen weights": lambda w: frozen_weight(w).step(6),
    "weights on other devices than the trainer's": lambda w: moved(w).step(6),
    "an optimizer that is a class": lambda w: mgpu.Trainer(w.net, mx.optimizer.SGD),
    "options that are a number": lambda w: mgpu.Trainer(w.net, "sgd", 0.1),
    "options by number": lambda w: mgpu.Trainer(w.net, "sgd", {1: 0.1}),
    "an optimizer that is none": lambda w: mgpu.Trainer(w.net, "bogus"),
    "a split that returns nothing": lambda w: w.train(split_f=lambda X, y, ctx: None),
    "no data at all": lambda w: w.fit(None),
    "a callback that is a class": lambda w: w.fit(callbacks=[mgpu.Checkpoint]),
    "no epochs": lambda w: w.fit(epochs=0),
    "half an epoch": lambda w: w.fit(epochs=0.5),
    "no parts of a batch": lambda w: w.fit(micro_steps=0),
    "updates without batches": lambda w: w.fit(accumulate_grad_batches=0),
    "fit with a trainer of Gluon's": lambda w: mgpu.fit(w.net, LOSS, gluon.Trainer(w.net.collect_params(), "sgd"), [], epochs=1),
    "no queue": lambda w: w.fit(max_inflight=0),
    "no batches": lambda w: w.fit([]),
    "batches of three": lambda w: w.fit([(X, Y, Y)]),
    "batches that are no pairs": lambda w: w.fit([X]),
    "a metric that is no function": lambda w: w.fit(metrics=["accuracy"]),
    "two metrics of one name": lambda w: w.fit(metrics=[mgpu.accuracy, mgpu.accuracy]),
    "nothing to evaluate": lambda w: mgpu.evaluate(w.net, []),
    "a network on no device": lambda w: mgpu.evaluate(nn.Dense(1), [(X, Y)]),
    "a network without parameters": lambda w: mgpu.evaluate_accuracy_gpus(nn.Flatten(), [(X, Y)]),
    "a patience below zero": lambda w: mgpu.EarlyStopping(patience=-1),
    "a mode that is none": lambda w: mgpu.Checkpoint(w.folder, mode="best"),
    "states of no file": lambda w: mgpu.load_checkpoint(w.folder / "nowhere", w.net, w.trainer),
    "batches of no examples": lambda w: mgpu.data.ArrayLoader(X, Y, 0),
    "arrays of other lengths": lambda w: mgpu.data.ArrayLoader(X, Y[:2], 2),
    "no arrays": lambda w: mgpu.data.ArrayLoader(X[:0], Y[:0], 2),
    "rows of unequal length": lambda w: mgpu.data.ArrayLoader([[1.0], [1.0, 2.0]], [0, 1], 2),
    "a last batch that is neither": lambda w: mgpu.data.ArrayLoader(X, Y, 2, last_batch="rollover"),
    "no classes": lambda w: mgpu.models.resnet18(0),
    "a test set that is a number": lambda w: w.fit(test_iter=5),
    "a test set that is no pairs": lambda w: w.fit(test_iter=[X]),
    "a loss that is a class": lambda w: w.fit(loss=gluon.loss.L2Loss),
    "two outputs with the metrics of one": lambda w: w.fit(net=TwoHeads(w.net), loss=lambda out, y: LOSS(out[0], y)),
    "two outputs with the loss of one": lambda w: w.fit(net=TwoHeads(w.net), metrics=()),
    "labels of another shape with the usual metrics": lambda w: w.fit([(X, X)], loss=lambda out, y: out.sum(axis=1)),
    "a schedule that is a function": lambda w: mgpu.Trainer(w.net, "sgd", {"lr_scheduler": lambda count: 0.1}),
    "an optimizer whose schedule is a function": lambda w: mgpu.Trainer(w.net, mx.optimizer.SGD(lr_scheduler=len)),
    "an option that the optimizer has not": lambda w: mgpu.Trainer(w.net, "sgd", {"beta1": 0.9}),
    "a switch that is an array": lambda w: mgpu.Trainer(w.net, "sgd", measure_grad_norm=X),
    "a norm below zero": lambda w: mgpu.clip_global_norm([mx.nd.ones((2,))], -1),
    "a norm of nothing": lambda w: mgpu.clip_global_norm([], 1.0),
    "shards of NaN": lambda w: mgpu.plan_shards(float("nan"), 2),
    "weights of NaN": lambda w: mgpu.plan_shards(4, 2, [float("nan"), 1]),
    "more shards than any machine has": lambda w: mgpu.plan_shards(10, 10**30),
    "more slices than can be counted": lambda w: mgpu.split_data(X, 10**30, even_split=False),
    "more epochs than anyone has": lambda w: w.fit(epochs=10**30),
    "more parts than can be counted": lambda w: w.train(micro_steps=10**30),
    "more devices than threads": lambda w: mgpu.resolve_devices("cpu:20000"),
    "a device for each number": lambda w: mgpu.resolve_devices(10**30),
    "a folder with a name of 5000 letters": lambda w: mgpu.save_checkpoint("x" * 5000, w.net),
    "a folder that is an array": lambda w: mgpu.save_checkpoint(X, w.net),
    "a patience that is a word": lambda w: mgpu.EarlyStopping(patience="long"),
    "shards of unlike arrays": lambda w: mgpu.gather([mx.nd.ones((1, 2)), mx.nd.ones((1, 2), dtype="int32")]),
    "rows of unequal length to split": lambda w: mgpu.split_data([[1.0], [1.0, 2.0]], 2),
    "losses to scale that are numbers": lambda w: LossScaler().scale_losses([1.0]),
    "an axis that is a word": lambda w: mgpu.gather([mx.nd.ones((1, 2))], batch_axis="N"),
    "shards that are a network": lambda w: mgpu.forward_shards(w.net, w.net),
    "shards that the network does not take": lambda w: mgpu.forward_shards(w.net, [mx.nd.ones((2, 3))]),
    "losses that were not recorded": lambda w: mgpu.backward([mx.nd.ones((2,))]),
    "nested data without an end": lambda w: mgpu.split_data(endless(), 2),
}


class TwoHeads(gluon.Block):
    """A network that returns its scores twice."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x), self.net(x)


def frozen_weight(world):
    """A trainer of another network, whose first layer trains only its bias: MXNet computes no such gradient on a CPU."""
    net = nn.Dense(1, in_units=2)
    net.initialize(ctx=CTX)
    net.weight.grad_req = "null"
    trainer = mgpu.Trainer(net, "sgd")
    with mx.autograd.record():
        losses = [net(mx.nd.ones((3, 2), ctx=context)) for context in CTX]
    mgpu.backward(losses)
    return trainer


def moved(world):
    """A trainer of another network, which has left the trainer's devices before its first step."""
    net = nn.Dense(1, in_units=2)
    net.initialize(ctx=CTX)
    trainer = mgpu.Trainer(net, "sgd")
    net.collect_params().reset_ctx(mx.cpu(2))
    return trainer


def endless():
    items = [X]
    items.append(items)
    return items


INTACT = []  # worlds of the tests that passed


@pytest.fixture
def world(tmp_path):
    """The world of the test before, if that passed: making one takes longer than a test."""
    world = INTACT.pop() if INTACT else World()
    world.folder = tmp_path
    return world


@pytest.mark.parametrize("wrong", WRONG)
def test_nothing_was_changed(wrong, world, tmp_path):
    before = world.state()
    with pytest.raises((ValueError, RuntimeError, UserWarning)) as caught:
        WRONG[wrong](world)
    assert_house_style(caught.value)
    assert type(caught.value).__module__ == "gluon_mgpu.errors"
    assert len(str(caught.value)) <= 600 and len(str(caught.value).splitlines()) == 1
    assert largest_difference(before, world.state()) == 0.0
    assert list(tmp_path.iterdir()) == []
    world.train()  # and it can go on
    assert largest_difference(before, world.state()) > 0.0
    INTACT.append(world)


# What looks wrong and is not


def test_bool_labels_are_numbers_for_the_losses_of_gluon(arrays):
    """MXNet's `pick` does not know bool: the error came when the weights were spoilt, and asked for other devices."""
    trained = []
    for labels in (Y > 0, (Y > 0).astype("float32")):
        net = small_net(CTX)
        history = mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), [(X, labels)] * 2, [(X, labels)], epochs=1, callbacks=[])
        trained.append([*weights_of(net), np.array([history.rows[0]["test_accuracy"]])])
    assert largest_difference(*trained) == 0.0


@pytest.mark.parametrize("k, dtype", [(1, "float64"), (3, "float64"), (2, "float32")])
def test_a_network_of_float64_is_trained_in_float64(k, dtype):
    """A split made float32 of everything, which the network refused; now it is NumPy's linear regression to 13 digits."""
    rng = np.random.RandomState(0)
    data, target = rng.normal(size=(8, 3)).astype(dtype), rng.normal(size=(8, 1)).astype(dtype)
    net = nn.Dense(1, in_units=3)
    net.initialize(mx.init.Constant(0.5), ctx=[mx.cpu(i) for i in range(k)])
    net.cast("float64")
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.125})  # which float32 holds, as MXNet does
    history = mgpu.fit(net, gluon.loss.L2Loss(), trainer, [(data, target)], epochs=5, metrics=(), callbacks=[])
    weight, bias = np.full((3, 1), 0.5), 0.0
    for _ in range(5):
        error = data.astype("float64") @ weight + bias - target
        weight, bias = weight - data.T.astype("float64") @ error / 64, bias - error.mean() / 8
    assert np.abs(net.weight.data(mx.cpu(0)).asnumpy().T - weight).max() < 1e-13
    assert abs(history.rows[-1]["train_loss"] - (error**2).mean() / 2) < 1e-13
    predicted = mgpu.predict(net, [data])
    assert predicted.dtype == np.float64 and np.abs(predicted - (data @ weight + bias)).max() < 1e-6


def test_the_network_says_how_to_cast_the_batch():
    net = nn.Dense(1, in_units=3)
    net.initialize(ctx=CTX)
    net.cast("float16")
    with pytest.raises(StepError, match=r"is of float16: pass split_f=functools.partial\(split_batch, dtype='float16'"):
        mgpu.eval_batch(net, np.ones((2, 3), "float32"), np.ones((2, 1), "float32"), CTX, loss=gluon.loss.L2Loss())


def test_whole_numbers_for_a_network_of_floats():
    net = nn.Dense(1, in_units=3)
    net.initialize(ctx=CTX)
    with pytest.raises(StepError, match=r"The network is of float32: cast its data with astype\('float32'\)\.$"):
        mgpu.eval_batch(net, np.ones((2, 3), "int64"), np.ones((2, 1), "float32"), CTX, loss=gluon.loss.L2Loss())


def test_a_skipped_update_names_discard():
    world_net = small_net(CTX)
    trainer = mgpu.Trainer(world_net, "sgd")
    trainer._summed = []  # as after an update that raised
    with pytest.raises(TrainerError, match=r"discard\(\) to drop them") as caught, trainer.accumulate():
        pass
    assert_house_style(caught.value)


# What errors show


@pytest.mark.parametrize(
    "value, shown",
    [
        (np.zeros((1000, 3)), "ndarray of shape (1000, 3) and dtype float64"),
        (mx.nd.zeros((2, 3)), "NDArray of shape (2, 3) and dtype float32"),
        ([mx.nd.zeros((2, 3))] * 50, "[NDArray of shape (2, 3) and dtype float32, "),
        ("two\nlines", r"'two\nlines'"),
        ("x" * 10**6, "'xxxxxxx"),
        (10**5000, "a number of 16610 bits"),
        (nn.Sequential(), "an object of type Sequential"),
        (lambda: None, "the function <lambda>"),
        (gluon.loss.L2Loss, "the class L2Loss"),
        (CTX, "[cpu(0), cpu(1)]"),
    ],
    ids=range(10),
)
def test_values_are_shown_in_a_line(value, shown):
    assert short(value).startswith(shown) and len(short(value)) <= 120 and "\n" not in short(value)


def test_a_message_stays_in_one_line_whatever_is_in_it():
    error = TrainerError("fit: got a\nb" + "x" * 5000 + "; expected c. Do d.")
    assert str(error).startswith("fit: got a bxxx") and str(error).endswith("x; expected c. Do d.") and len(str(error)) <= 600
