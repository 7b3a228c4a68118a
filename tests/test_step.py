import re
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import ShardError, StepError, TrainerError
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

from .conftest import LOSS, initialized, largest_difference, sequential, small_batches, small_net, stack, weights_of
from .versions import nd

CTX = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]


@pytest.mark.parametrize("micro_steps, shards", [(1, [3, 2, 2]), (2, [2, 1, 1, 1, 1, 1])])
def test_a_batch_tells_what_came_of_it(micro_steps, shards, arrays):
    net = small_net(CTX)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    X, y = small_batches([7])[0]
    batch = mgpu.train_batch(net, LOSS, trainer, X, y, micro_steps=micro_steps)
    assert batch.num_examples == 7 and batch.plan is None
    assert [output.shape for output in batch.outputs] == [(size, 3) for size in shards]
    assert [loss.context for loss in batch.losses] == CTX * micro_steps
    np.testing.assert_array_equal(np.concatenate([label.asnumpy() for label in batch.labels]), y)


def test_prediction_mode_and_training_mode():
    net = initialized(nn.Dropout(0.5), CTX)
    ones = np.ones((60, 10), "float32")
    batch = mgpu.eval_batch(net, ones, np.zeros(60), ctx=CTX)
    assert all((output.asnumpy() == 1).all() for output in batch.outputs)
    assert (batch.losses, batch.num_examples) == ([], 60)
    split = partial(mgpu.split_batch, batch_axis=(0, 1))
    assert mgpu.eval_batch(net, ones, {"y": np.zeros((9, 60))}, ctx=CTX, split_f=split).num_examples == 60  # was 0
    with autograd.record():  # inside somebody's record, too
        assert all((output.asnumpy() == 1).all() for output in mgpu.eval_batch(net, ones, np.zeros(60), ctx=CTX).outputs)


def test_losses_are_those_of_the_loss(devices):
    net = small_net(devices)
    X, y = small_batches([5])[0]
    batch = mgpu.eval_batch(net, X, y, ctx=devices, loss=LOSS)
    scores = np.concatenate([output.asnumpy() for output in batch.outputs]).astype("float64")
    by_hand = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(5), y]
    np.testing.assert_allclose(np.concatenate([loss.asnumpy() for loss in batch.losses]), by_hand, rtol=1e-5)


class Tagger(gluon.Block):
    """Tokens in TNC layout, and their lengths, to one score a sentence."""

    def __init__(self):
        super().__init__()
        self.rnn = rnn.GRU(4, input_size=2)
        self.out = nn.Dense(2, in_units=4)

    def forward(self, inputs):
        tokens, scale = inputs["tokens"], inputs["scale"]
        return self.out(self.rnn(tokens)[-1] * scale)


@pytest.mark.parametrize("hybridize", [None, {}])
def test_a_failure_names_shard_and_device(hybridize):
    net = sequential(nn.Dense(2, in_units=3), ctx=CTX, hybridize=hybridize)
    trainer = mgpu.Trainer(net, "sgd")
    with pytest.raises(StepError, match=r"shard 0 on cpu\(0\), shapes \[\(2, 7\), \(2,\)\]") as caught:
        mgpu.train_batch(net, LOSS, trainer, np.ones((6, 7)), np.zeros(6))
    assert isinstance(caught.value.__cause__, AssertionError if is_mxnet2() else mx.MXNetError)


@pytest.mark.mxnet1("messages of MXNet")
@pytest.mark.parametrize(
    "wrap", [lambda net: net, lambda net: mgpu.data_parallel.convert_sync_batchnorm(net) or net], ids=["plain", "sync"]
)
def test_a_value_error_of_mxnets_names_shard_and_device_too(wrap):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 3), nn.BatchNorm())  # shapes unknown yet, and a row is no picture
    net.initialize(ctx=CTX)
    net.hybridize()
    net = wrap(net)
    with pytest.raises(StepError, match=r"eval_batch: .* network for shard 0 on cpu\(0\), shapes \[\(2, 7\), \(2,\)\]") as caught:
        mgpu.eval_batch(net, np.ones((6, 7)), np.zeros(6), ctx=CTX)
    assert type(caught.value.__cause__) is ValueError


@pytest.mark.parametrize(
    "first, data, label, reason, advice",
    [
        (
            nn.Conv2D(4, 3),
            np.ones((6, 8, 8)),
            np.zeros(6),
            "Input data should be 4D in batch-",
            "`x.expand_dims(1)` for the channels",
        ),
        pytest.param(
            nn.Conv2D(4, 3, in_channels=1),
            np.ones((6, 3, 8, 8)),
            np.zeros(6),
            "inferred shape=(4,3,3,3)",
            "number of channels",
            marks=pytest.mark.mxnet1("messages of MXNet"),
        ),
        (nn.Flatten(), np.ones((6, 4)), np.eye(6, 3), "Provided = [2,3]", "`y.argmax(axis=-1)`"),
        (nn.Flatten(), np.ones((6, 4), "uint8"), np.zeros(6), "expected uint8, got float32", '`x.astype("float32")`'),
        (nn.Activation("relu"), np.ones((6, 4)), np.zeros((6, 2, 3)), "Provided = [2,2,3]", "the shape (N,)"),
        (gluon.rnn.GRU(4), np.ones((6, 4)), np.zeros(6), "[sequence length, batch size, input size]", '`layout="NTC"`'),
    ],
)
def test_errors_of_mxnet_keep_their_end_and_take_their_advice_from_the_list(first, data, label, reason, advice):
    """The first 200 characters were shown, and for everything "Cast them with astype()"."""
    net = sequential(first, nn.Dense(3), ctx=CTX)
    with pytest.raises(StepError, match=re.escape(reason)) as caught:
        mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), [(data, label)], epochs=1, callbacks=[])
    assert advice in str(caught.value) and "; expected data that it accepts. " in str(caught.value)


@pytest.mark.mxnet1("legacy arrays")
def test_legacy_and_np_arrays_in_one_network_are_named():
    net = stack(nn.Lambda(lambda x: x.as_np_ndarray()), nn.Dense(3, in_units=4), kind=nn.Sequential)
    net.initialize(ctx=CTX)
    with pytest.raises(StepError, match=r"Legacy arrays \(`mx.nd`\) and np arrays \(`mx.np`\) are mixed"):
        mgpu.eval_batch(net, np.ones((6, 4)), np.zeros(6), ctx=CTX)


@pytest.mark.parametrize("error", [ValueError("mine"), ShardError("mine")], ids=lambda error: type(error).__name__)
def test_a_value_error_of_the_programs_own_stays_what_it_is(error):
    def fails(output, label):
        raise error

    X, y = small_batches([6])[0]
    with pytest.raises(ValueError, match="mine") as caught:
        mgpu.eval_batch(small_net(CTX), X, y, ctx=CTX, loss=fails)
    assert caught.value is error


def test_a_layer_that_no_batch_reaches_costs_one_look():
    """The first batch of each form is passed through in prediction mode to learn the shapes."""

    class Lazy(mx.gluon.nn.HybridSequential):
        predicted = 0

        def forward(self, x):
            Lazy.predicted += not mx.autograd.is_training()
            return self[0](x)

    net = Lazy()
    net.add(mx.gluon.nn.Dense(1), mx.gluon.nn.Dense(1))
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer, loss = mgpu.Trainer(net, "sgd"), mx.gluon.loss.L2Loss()
    for size in (4, 4, 3, 3, 4):
        X = np.ones((size, 2), "float32")
        mgpu.train_batch(net, loss, trainer, X, X[:, :1], ignore_stale_grad=True)
    assert Lazy.predicted == 2
    assert mgpu.replica_difference(net[0]) == 0.0


@pytest.mark.parametrize(
    "micro_steps, sizes", [(1, [10]), (2, [5, 5]), (4, [3, 3, 2, 2]), (10, [1] * 10), (99, [1] * 10)], ids=repr
)
def test_parts_differ_by_one_example_at_most(micro_steps, sizes):
    seen = []

    def split(X, y, devices):
        seen.append(len(X))
        return mgpu.split_batch(X, y, devices)

    net = small_net(CTX[:1])
    X, y = small_batches([10])[0]
    mgpu.train_batch(net, LOSS, mgpu.Trainer(net, "sgd"), X, y, split_f=split, micro_steps=micro_steps)
    assert seen == sizes


def test_parts_of_nested_inputs_with_axes_of_their_own():
    """A batch is cut where the split function would cut it."""
    rng = np.random.RandomState(0)
    X = {"tokens": rng.uniform(size=(6, 5, 2)).astype("float32"), "scale": rng.uniform(size=(5, 1)).astype("float32")}
    y = rng.randint(0, 2, 5)
    split = partial(mgpu.split_batch, batch_axis=({"tokens": 1, "scale": 0}, 0))
    found = []
    for num_devices, micro_steps in ((1, 1), (3, 1), (2, 4)):
        mx.random.seed(1)
        net = initialized(Tagger(), CTX[:num_devices], mx.init.Uniform(0.5))
        trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
        for _ in range(5):
            mgpu.train_batch(net, LOSS, trainer, X, y, split_f=split, micro_steps=micro_steps)
        found.append(weights_of(net))
    assert largest_difference(found[0], found[1]) <= 1e-5
    assert largest_difference(found[0], found[2]) <= 1e-5


def test_labels_of_an_axis_of_their_own():
    net = stack(nn.Lambda(lambda x: x.sum(axis=0)), nn.Dense(2, in_units=3), kind=nn.Sequential)
    net.initialize(ctx=CTX[:2])
    split = partial(mgpu.split_batch, batch_axis=(1, 0))
    X, y = np.ones((4, 5, 3), "float32"), np.zeros((5, 2), "float32")
    assert mgpu.train_batch(net, gluon.loss.L2Loss(), mgpu.Trainer(net, "sgd"), X, y, split_f=split).num_examples == 5


def time_major(devices):
    """A layer over (T, N, C), whose outputs keep the axes; its weight."""
    net = initialized(gluon.nn.Dense(2, in_units=3, flatten=False), devices, mx.init.One())
    return net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})


@pytest.mark.pairwise
@pytest.mark.parametrize("num_steps, num_examples", [(4, 6), (4, 4), (2, 4), (5, 1)])
@pytest.mark.parametrize("loss", [gluon.loss.L2Loss, gluon.loss.L1Loss, gluon.loss.SoftmaxCrossEntropyLoss])
def test_a_loss_over_another_axis_than_the_split_is_refused_on_any_devices(devices, arrays, loss, num_steps, num_examples):
    """np losses ignore batch_axis=1, as does a loss that was not told of it: one device divided by T, two raised."""
    net, trainer = time_major(devices)
    before = net.weight.data(devices[0]).asnumpy()
    X = np.random.RandomState(0).uniform(-1, 1, (num_steps, num_examples, 3)).astype("float32")
    y = np.zeros((num_steps, num_examples, 2) if loss is not gluon.loss.SoftmaxCrossEntropyLoss else (num_steps, num_examples))
    split = partial(mgpu.split_batch, batch_axis=1)
    is_np = mx.util.is_np_array()
    for wrong in [loss(batch_axis=0)] if not is_np else [loss(batch_axis=0), loss(batch_axis=1)]:
        for run in (
            lambda wrong: mgpu.train_batch(net, wrong, trainer, X, y.astype("float32"), split_f=split),
            lambda wrong: mgpu.fit(net, wrong, trainer, [(X, y.astype("float32"))], epochs=1, split_f=split, callbacks=[]),
            lambda wrong: mgpu.evaluate(net, [(X, y.astype("float32"))], {}, loss=wrong, split_f=split),
        ):
            with pytest.raises(TrainerError, match="batch_axis"):
                run(wrong)
    assert (net.weight.data(devices[0]).asnumpy() == before).all()
    right = loss(batch_axis=1)
    if is_np:
        on_axis_0 = loss(batch_axis=0)
        right = lambda output, label: on_axis_0(output.swapaxes(0, 1), label.swapaxes(0, 1))  # noqa: E731
    batch = mgpu.train_batch(net, right, trainer, X, y.astype("float32"), split_f=split)
    assert batch.num_examples == num_examples


@pytest.mark.parametrize("change", ["another layer", "a multiplier"])
def test_what_a_forward_pass_changes_counts_in_its_step(change, devices):
    class Changing(gluon.Block):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.is_later = nn.Dense(1), nn.Dense(1), False

        def forward(self, x):
            if self.is_later and change == "a multiplier":
                self.first.weight.lr_mult = 0.0
            return self.first(x) + self.second(x) if self.is_later or change == "a multiplier" else self.first(x)

    net, loss, found = Changing(), gluon.loss.L2Loss(), []
    net.initialize(mx.init.One(), ctx=devices)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, find_unused_parameters=True)
    for net.is_later in (False, True):
        mgpu.train_batch(net, loss, trainer, nd.ones((4, 2)), nd.zeros(4))
        found.append(net.first.weight.data(devices[-1]).asnumpy().tolist())
    assert (found[0] == found[1]) == (change == "a multiplier") and net.second.weight.data(devices[-1]).asnumpy().min() < 1
