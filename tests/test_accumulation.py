"""Several backward passes make one update: the same as one batch of all their examples."""

from contextlib import nullcontext
from functools import lru_cache

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import StaleGradientError, TrainerError
from gluon_mgpu.trainer.sums import DeviceSum
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

from .conftest import LOSS, gluon_loop, initialized, largest_difference, sequential, small_batches, small_net, weights_of
from .versions import nd
from .worlds import devices as devices

CTX = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
HYBRIDIZE = {"plain": None, "static": {"static_alloc": True, "static_shape": True}}
MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3})
GROUPS = [[5, 3, 9], [1, 1], [7], [2, 1, 4, 1]]  # examples of each micro-batch, of each update


def grouped(groups=GROUPS):
    """Micro-batches by update, and the batches that they make together."""
    groups = [small_batches(sizes) for sizes in groups]
    return groups, [tuple(np.concatenate(parts) for parts in zip(*group)) for group in groups]


def losses_of(net, trainer, X, y):
    Xs, ys = mgpu.split_batch(X, y, trainer.contexts)
    with autograd.record():
        return [LOSS(net(x), t) for x, t in zip(Xs, ys)]


def pass_back(net, trainer, X, y):
    trainer.backward(losses_of(net, trainer, X, y))


def known(net, ctx):
    """The network, with its shapes known and its weights drawn."""
    mgpu.eval_batch(net, *small_batches([1])[0], ctx=ctx)
    return net


def last_outside(net, trainer, group):
    """Each batch is recorded before it is decided whether it makes the update."""
    for i, (X, y) in enumerate(group):
        losses = losses_of(net, trainer, X, y)
        with trainer.accumulate() if i + 1 < len(group) else nullcontext():
            trainer.backward(losses)
            trainer.step(len(X))


def all_inside(net, trainer, group):
    with trainer.accumulate():
        for X, y in group:
            pass_back(net, trainer, X, y)
            trainer.step(len(X))
    trainer.flush()


def backward_before(net, trainer, group):
    """The first backward pass, or all but its step, is done before the context opens."""
    for X, y in group:
        pass_back(net, trainer, X, y)
        with trainer.accumulate():
            trainer.step(len(X))
    trainer.flush()


def one_in_another(net, trainer, group):
    with trainer.accumulate():
        for X, y in group:
            with trainer.accumulate():
                mgpu.train_batch(net, LOSS, trainer, X, y)
            trainer.flush()  # not yet
    trainer.flush()


def summed_by_hand(net, trainer, group):
    *earlier, (X, y) = group
    with trainer.accumulate():
        for batch in earlier:
            mgpu.train_batch(net, LOSS, trainer, *batch)
    pass_back(net, trainer, X, y)
    if len(trainer.contexts) > 1:
        trainer.allreduce_grads()
    trainer.update(len(X))


LOOPS = [last_outside, all_inside, backward_before, one_in_another, summed_by_hand]


@lru_cache(maxsize=None)
def reference(np_arrays):
    """Weights of Gluon's loop over the whole batches, made once for each kind of array."""
    assert np_arrays == mx.util.is_np_array()
    return weights_of(gluon_loop(small_net(CTX[:1]), *MOMENTUM, grouped()[1]))


@pytest.mark.each_value
@pytest.mark.parametrize("hybridize", ["plain", "static"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_is_one_batch_of_all_examples(loop, hybridize, devices, arrays):
    groups, _ = grouped()
    net = known(small_net(devices, hybridize=HYBRIDIZE[hybridize]), devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    for group in groups:
        loop(net, trainer, group)
    assert mgpu.replica_difference(net) == 0.0
    assert largest_difference(weights_of(net), reference(arrays is mx.np)) <= 1e-6
    assert {param.grad_req for param in net.collect_params().values()} == {"write"}


def test_gradients_are_reduced_once(calls_to):
    sums = calls_to(DeviceSum, "run")
    net = known(small_net(CTX), CTX)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    (group,), _ = grouped([[3, 3, 3]])
    all_inside(net, trainer, group)
    assert len(sums) == 1
    mgpu.train_batch(net, LOSS, trainer, *group[0], micro_steps=3)
    assert len(sums) == 2


def test_outside_a_second_pass_replaces_the_first_as_ever(devices):
    """After an update, gradients are written again, not added: as if nothing had been accumulated."""
    (group,), (batch,) = grouped([[4, 5]])
    reference = weights_of(gluon_loop(small_net(CTX[:1]), *MOMENTUM, [batch, group[1]]))
    net = known(small_net(devices, hybridize=HYBRIDIZE["static"]), devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    all_inside(net, trainer, group)
    pass_back(net, trainer, *group[0])
    pass_back(net, trainer, *group[1])
    trainer.step(5)
    assert largest_difference(weights_of(net), reference) <= 1e-6


# What MXNet must do for this: "add" is right for every layer, and a static graph notices the change


def images():
    return np.random.RandomState(0).uniform(-1, 1, (6, 3, 8, 8)).astype("float32")


def sequences():
    return np.random.RandomState(0).uniform(-1, 1, (6, 4, 8)).astype("float32")


def words():
    return np.random.RandomState(0).randint(0, 5, (6, 4)).astype("float32")


LAYERS = {
    "dense": (lambda: nn.Dense(5, flatten=False), sequences),
    "convolution": (lambda: nn.Conv2D(4, 3), images),
    "grouped convolution": (lambda: nn.Conv2D(6, 3, groups=3), images),
    "transposed convolution": (lambda: nn.Conv2DTranspose(4, 3), images),
    "BatchNorm": (lambda: nn.BatchNorm(), images),
    "LayerNorm": (lambda: nn.LayerNorm(), sequences),
    "embedding": (lambda: nn.Embedding(5, 3), words),
    "LSTM": (lambda: rnn.LSTM(4, bidirectional=True), sequences),
    "GRU": (lambda: rnn.GRU(4), sequences),
    "PReLU": (lambda: nn.PReLU(), sequences),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("hybridize", ["plain", "static"])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_of_every_layer_add_up(layer, hybridize, arrays):
    make, data = LAYERS[layer]
    net = initialized(make(), CTX[:1], hybridize=HYBRIDIZE[hybridize])
    X = data()
    net(arrays.array(X[:2]))
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]

    def gradient_of(begin, end):
        with autograd.record():
            out = net(arrays.array(X[begin:end]))
            loss = (out * out * out + out).sum()
        loss.backward()
        return [param.grad().asnumpy().astype("float64") for param in params]

    parts = [(0, 3), (3, 6), (0, 3), (1, 3)]
    for _ in range(2):
        alone = [gradient_of(*part) for part in parts]
        trainer.step(1)
        with trainer.steps.recorder.adding() as found:
            together = [gradient_of(*part) for part in parts][-1]
        trainer.steps.take(found)
        trainer.step(1)
        for i, total in enumerate(together):
            expected = sum(one[i] for one in alone)
            np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


# Parameters of all kinds


def two_kinds(devices, sparse=False):
    mx.random.seed(1)
    return sequential(nn.Embedding(10, 4, sparse_grad=sparse), nn.Dense(3, in_units=8), ctx=devices, init=mx.init.Xavier())


@pytest.mark.mxnet1("sparse arrays")
def test_sparse_gradients(devices):
    """Device 1 has nothing in the second micro-batch; rows overlap, and differ between steps."""
    X = np.array([[1, 2], [2, 3], [3, 3], [9, 1], [0, 2]], "float32")
    y = np.array([0, 1, 2, 0, 1], "float32")
    found = []
    for sparse in (False, True):
        net = two_kinds(devices, sparse)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5}, clip_value=0.2)
        for update in range(3):
            if sparse:
                with trainer.accumulate():
                    for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
                        mgpu.train_batch(net, LOSS, trainer, (X[part] + update) % 10, y[part])
                trainer.flush()
            else:
                mgpu.train_batch(net, LOSS, trainer, (X + update) % 10, y)
        assert mgpu.replica_difference(net) == 0.0
        found.append(weights_of(net))
    assert largest_difference(*found) <= 1e-6


class Branches(gluon.Block):
    """Uses its first or its second layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential()
        self.layers.add(*[nn.Dense(1, in_units=2, use_bias=False) for _ in range(3)])
        self.register_child(self.layers)
        self.used = 0

    def forward(self, x):
        return self.layers[self.used](x)


def test_micro_steps_may_use_other_parameters():
    net = initialized(Branches(), CTX[:2], mx.init.Zero())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0})
    with trainer.accumulate():
        for net.used, X in ((0, np.ones((2, 2))), (1, 2 * np.ones((1, 2)))):
            mgpu.train_batch(net, lambda out, y: out, trainer, X, X)
    other = Branches()
    other.initialize(mx.init.Zero(), ctx=CTX[:2])
    apart = mgpu.LocalSGD(other, "sgd", every=2)
    with apart.accumulate():
        mgpu.train_batch(other, lambda out, y: out, apart, np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(StaleGradientError, match="layers.2.weight"):
        trainer.flush()
    with pytest.raises(StaleGradientError, match="layers.2.weight"):
        apart.flush()
    trainer.flush(ignore_stale_grad=True)
    for context in CTX[:2]:
        got = [layer.weight.data(context).asnumpy()[0, 0] for layer in net.layers]
        np.testing.assert_allclose(got, [-2 / 3, -2 / 3, 0], atol=1e-6)


# What goes wrong


def world(devices=CTX[:2]):
    net = known(small_net(devices), devices)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    mgpu.train_batch(net, LOSS, trainer, *small_batches([4])[0])
    return net, trainer


def test_an_exception_inside_drops_all(devices):
    net, trainer = world(devices)
    other, plain = world(devices)
    group = small_batches([3, 4, 5])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), trainer.accumulate():
            mgpu.train_batch(net, LOSS, trainer, *group[0])
            with trainer.accumulate():
                pass_back(net, trainer, *group[1])
                raise ZeroDivisionError
        trainer.flush()  # nothing
        mgpu.train_batch(net, LOSS, trainer, *group[2])
        mgpu.train_batch(other, LOSS, plain, *group[2])
    assert largest_difference(weights_of(net), weights_of(other)) == 0.0


@pytest.mark.parametrize("wrong", ["loss", "stale"])
def test_a_micro_step_that_fails_leaves_nothing_behind(wrong):
    net, trainer = world()
    before = weights_of(net)
    X, y = small_batches([12])[0]
    seen = []

    def loss(out, label):
        seen.append(len(label))
        bad = len(seen) == 5  # in the third of three micro-steps
        return LOSS(out, label).mean() if bad else LOSS(out, label)

    if wrong == "loss":
        with pytest.raises(TrainerError, match="expected one number for each example"):
            mgpu.train_batch(net, loss, trainer, X, y, micro_steps=3)
    else:
        extra = mgpu.Trainer(list(net.collect_params().values()) + [unused_parameter()], "sgd", {"learning_rate": 0.1})
        with pytest.raises(StaleGradientError, match="unused"):
            mgpu.train_batch(net, LOSS, extra, X, y, micro_steps=3)
        trainer = extra
    assert largest_difference(before, weights_of(net)) == 0.0
    assert {param.grad_req for param in net.collect_params().values()} == {"write"}
    mgpu.train_batch(net, LOSS, trainer, X, y, ignore_stale_grad=True)
    other, plain = world()
    options = {"learning_rate": 0.1} if wrong == "stale" else MOMENTUM[1]
    if wrong == "stale":
        plain = mgpu.Trainer(other, "sgd", options)
    mgpu.train_batch(other, LOSS, plain, X, y)
    assert largest_difference(weights_of(other), weights_of(net)) <= 1e-7


def unused_parameter():
    param = gluon.Parameter("unused", shape=(2,))
    param.initialize(ctx=CTX[:2])
    return param


def refused(call, error, told):
    with pytest.raises(error, match=told):
        call()


def test_what_is_out_of_order_is_reported(tmp_path):
    net, trainer = world()
    X, y = small_batches([6])[0]
    with trainer.accumulate():
        refused(lambda: trainer.step(6), StaleGradientError, "a backward pass for each step")
        pass_back(net, trainer, X, y)
        refused(lambda: trainer.step(0), TrainerError, "batch_size")
        refused(trainer.allreduce_grads, TrainerError, "accumulate.. and allreduce_grads")
        refused(lambda: trainer.update(6), TrainerError, "accumulate.. and update")
        trainer.step(6)
        refused(lambda: trainer.save_states(str(tmp_path / "states")), TrainerError, "got gradients of 6 examples")
        pass_back(net, trainer, X, y)
    before = weights_of(net)
    refused(trainer.flush, TrainerError, "after the last step")
    assert list(tmp_path.iterdir()) == []
    assert largest_difference(before, weights_of(net)) == 0.0
    trainer.step(6)
    refused(lambda: trainer.step(6), StaleGradientError, "no gradient")
    pass_back(net, trainer, X, y)
    trainer.allreduce_grads()
    refused(lambda: trainer.accumulate().__enter__(), TrainerError, "summed and not applied")
    trainer.update(6)
    other, plain = world()
    for _ in range(2):
        mgpu.train_batch(other, LOSS, plain, X, y)
    assert largest_difference(weights_of(other), weights_of(net)) <= 1e-6


def test_passes_that_no_step_counts_are_refused(devices):
    net, trainer = world(devices)
    before = weights_of(net)
    with pytest.raises(TrainerError), trainer.accumulate():
        for X, y in small_batches([3, 4]):
            pass_back(net, trainer, X, y)
    assert largest_difference(before, weights_of(net)) == 0.0


def test_states_that_are_loaded_drop_what_was_accumulated(tmp_path):
    net, trainer = world()
    batches = small_batches([4, 6])
    mgpu.save_checkpoint(net, tmp_path / "checkpoint", trainer)
    with trainer.accumulate():
        mgpu.train_batch(net, LOSS, trainer, *batches[0])
    mgpu.load_checkpoint(net, tmp_path / "checkpoint", trainer)
    mgpu.train_batch(net, LOSS, trainer, *batches[1])
    other, plain = world()
    mgpu.train_batch(other, LOSS, plain, *batches[1])
    assert largest_difference(weights_of(other), weights_of(net)) == 0.0


def test_trainers_that_share_parameters_take_turns(devices):
    """One that adds up marks the parameters anew: the other is to find their flags again."""
    net = initialized(nn.Dense(1, in_units=1, use_bias=False), devices, mx.init.One())
    rates = (0.1, 0.01)
    trainers = [mgpu.Trainer(net, "sgd", {"learning_rate": rate}) for rate in rates]
    weight, X = 1.0, np.array([[1.0], [2.0], [3.0], [0.5], [1.5]], "float32")
    for which, micro_steps in ((0, 1), (1, 1), (0, 3), (1, 1), (1, 2), (0, 1), (0, 2)):
        mgpu.train_batch(net, gluon.loss.L2Loss(), trainers[which], X, np.zeros(5, "float32"), micro_steps=micro_steps)
        weight -= rates[which] * weight * float(np.square(X).mean())
        for context in devices:
            assert net.weight.data(context).asnumpy().item() == pytest.approx(weight, rel=1e-5)


def test_an_accumulated_step_is_a_step_to_other_trainers():
    nets = [nn.Dense(2, in_units=2), nn.Dense(1, in_units=2)]
    for net in nets:
        net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    first, second = (mgpu.Trainer(net, "sgd", {"learning_rate": 0.5}) for net in nets)
    with first.accumulate():
        with autograd.record():
            loss = nets[1](nets[0](nd.ones((2, 2))))
        first.backward([loss])
        first.step(2)
    with autograd.record():
        loss = nets[1](nd.ones((2, 2), ctx=mx.cpu(1)))
    second.backward([loss])  # on another device, as a batch of one example may be
    second.step(2)
    assert nets[1].weight.data().asnumpy().tolist() == [[0.5, 0.5]]
