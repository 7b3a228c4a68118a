"""Contract: a wrong argument is told in the house's words, before anything was changed: no weight, no state, no file."""

import functools
import re

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checks import real_number
from gluon_mgpu.data_parallel.batchnorm import is_synchronised
from gluon_mgpu.errors import ShardError, TrainerError
from gluon_mgpu.mxnet_internals.parameters import is_differentiable, trainer_of
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from gluon_mgpu.trainer.local_sgd import LocalSGD
from gluon_mgpu.trainer.precision import precision_of
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import LOSS, initialized, largest_difference, small_batches, small_net, weights_of
from .versions import nd, reset_ctx

CTX = [mx.cpu(0), mx.cpu(1)]
X, Y = small_batches([6])[0]
ITERATOR = mx.io.NDArrayIter(X, Y, 3)


class World:
    """A network that has trained a step, its trainer, and a folder."""

    def __init__(self):
        self.folder = None
        self.net = small_net(CTX)
        self.trainer = mgpu.Trainer(self.net, "adam", {"learning_rate": 0.01})
        mgpu.train_batch(self.net, LOSS, self.trainer, X, Y)

    def state(self):
        moments = [array.asnumpy() for pair in self.trainer.steps.update.states().values() for array in pair]
        return weights_of(self.net, CTX[0]) + weights_of(self.net, CTX[1]) + moments

    def train(self, X=X, y=Y, loss=LOSS, **options):
        return mgpu.train_batch(self.net, loss, self.trainer, X, y, **options)

    def fit(self, train_iter=((X, Y),), **options):
        net, loss = options.pop("net", self.net), options.pop("loss", LOSS)
        return mgpu.fit(net, loss, self.trainer, train_iter, **{"epochs": 1, "callbacks": [], **options})


WRONG = {
    "features and labels of other lengths": lambda w: w.train(y=Y[:5]),
    "an empty batch": lambda w: w.train(X[:0], Y[:0]),
    "images of another shape": lambda w: w.train(X[:, :, :3]),
    "the mean of the losses": lambda w: w.train(loss=lambda out, y: LOSS(out, y).mean()),
    "a loss that is no array": lambda w: w.train(loss=lambda out, y: None),
    "a split of nothing": lambda w: w.train(split_f=lambda X, y, ctx: ([], [])),
    "an option that no split has": lambda w: w.train(split_f=functools.partial(mgpu.split_batch, batch_axes=1)),
    "weights for other devices": lambda w: w.train(split_f=lambda X, y, ctx: mgpu.split_batch(X, y, ctx, weights=[1, 2, 3])),
    "a step of nothing": lambda w: w.trainer.step(6),
    "an update without a sum": lambda w: w.trainer.update(6),
    "a step that is recorded": lambda w: recorded(w, "step", 6),
    "an update that is recorded": lambda w: recorded(w, "update", 6),
    "a sum that is recorded": lambda w: recorded(w, "allreduce_grads"),
    "a flush that is recorded": lambda w: recorded(w, "flush"),
    "no losses": lambda w: mgpu.backward([]),
    "a trainer of Gluon's": lambda w: mgpu.train_batch(w.net, LOSS, gluon.Trainer(w.net.collect_params(), "sgd"), X, Y),
    "a value to clip to that is none": lambda w: mgpu.Trainer(w.net, "sgd", clip_value="1"),
    "data that are sharded perhaps": lambda w: mgpu.Trainer(w.net, "sgd", sharded_data="no"),
    "unused parameters by name": lambda w: mgpu.Trainer(w.net, "sgd", find_unused_parameters=["weight"]),
    "devices apart for no step": lambda w: LocalSGD(w.net, "sgd", every=0),
    "a trained bias of frozen weights": lambda w: frozen_weight(w).step(6),
    "weights on other devices than the trainer's": lambda w: moved(w).step(6),
    "options that are a number": lambda w: mgpu.Trainer(w.net, "sgd", 0.1),
    "a learning rate that is a text": lambda w: mgpu.Trainer(w.net, "sgd", {"learning_rate": "0.1"}),
    "a learning rate that is no number": lambda w: w.trainer.set_learning_rate(float("nan")),
    "an optimizer that is none": lambda w: mgpu.Trainer(w.net, "bogus"),
    "a batch inside record": lambda w: recording(w.train),
    "parts of a batch inside record": lambda w: recording(lambda: w.train(micro_steps=2)),
    "a run inside record": lambda w: recording(lambda: w.fit(callbacks=[mgpu.Checkpoint(w.folder, None)])),
    "no data at all": lambda w: w.fit(None),
    "a callback that is a class": lambda w: w.fit(callbacks=[mgpu.Checkpoint]),
    "two folders to resume from": lambda w: w.fit(callbacks=[mgpu.Checkpoint(w.folder / "a"), mgpu.Checkpoint(w.folder / "b")]),
    "updates without batches": lambda w: w.fit(accumulate_grad_batches=0),
    "fit with a trainer of Gluon's": lambda w: mgpu.fit(w.net, LOSS, gluon.Trainer(w.net.collect_params(), "sgd"), [], epochs=1),
    "batches of three": lambda w: w.fit([(X, Y, Y)]),
    "a metric that is no function": lambda w: w.fit(metrics=["accuracy"]),
    "nothing to evaluate": lambda w: mgpu.evaluate(w.net, []),
    "a network on no device": lambda w: mgpu.evaluate(nn.Dense(1), [(X, Y)]),
    "a network without parameters": lambda w: mgpu.evaluate_accuracy_gpus(nn.Flatten(), [(X, Y)]),
    "a patience below zero": lambda w: mgpu.EarlyStopping(patience=-1),
    "a difference below zero": lambda w: mgpu.EarlyStopping(min_delta=-0.1),
    "a mode of stopping that is none": lambda w: mgpu.EarlyStopping(mode="least"),
    "no column": lambda w: mgpu.EarlyStopping(None),
    "a mode that is none": lambda w: mgpu.Checkpoint(w.folder, mode="best"),
    "states of no file": lambda w: mgpu.load_checkpoint(w.net, w.folder / "nowhere", w.trainer),
    "batches of no examples": lambda w: mgpu.data.ArrayLoader(X, Y, 0),
    "rows of unequal length": lambda w: mgpu.data.ArrayLoader([[1.0], [1.0, 2.0]], [0, 1], 2),
    "no classes": lambda w: mgpu.models.resnet18(0),
    "a test set that is a number": lambda w: w.fit(test_iter=5),
    "a loss that is a class": lambda w: w.fit(loss=gluon.loss.L2Loss),
    "labels of another shape with the usual metrics": lambda w: w.fit([(X, X)], loss=lambda out, y: out.sum(axis=1)),
    "a schedule that is a function": lambda w: mgpu.Trainer(w.net, "sgd", {"lr_scheduler": lambda count: 0.1}),
    "an option that the optimizer has not": lambda w: mgpu.Trainer(w.net, "sgd", {"beta1": 0.9}),
    "more shards than any machine has": lambda w: mgpu.data_parallel.plan_shards(10, 10**30),
    "a folder for checkpoints without a name": lambda w: mgpu.Checkpoint(""),
    "shards of unlike arrays": lambda w: mgpu.gather([nd.ones((1, 2)), nd.ones((1, 2), dtype="int32")]),
    "shards that are a network": lambda w: mgpu.data_parallel.forward_shards(w.net, w.net),
    "shards that the network does not take": lambda w: mgpu.data_parallel.forward_shards(w.net, [nd.ones((2, 3))]),
    "losses that were not recorded": lambda w: mgpu.backward([nd.ones((2,))]),
    "nested data without an end": lambda w: mgpu.data_parallel.split_data(endless(), 2),
    "one iterator for two things at once": lambda w: w.fit(ITERATOR, test_iter=ITERATOR, evaluate_every=1),
    "a checkpoint without a layer of the loss": lambda w: mgpu.save_checkpoint(w.net[0], w.folder, w.trainer),
    "a metric with a name that fit uses": lambda w: w.fit(metrics={"grad_norm": mgpu.accuracy}),
    "a choice that is an array": lambda w: w.fit(bn=np.array(["local", "sync"])),
    "a number of a device below zero": lambda w: mgpu.split_and_load(X, [mx.cpu(-1)]),
    "a learning rate that float32 cannot hold": lambda w: w.trainer.set_learning_rate(1e39),
    "an option that adam has not": lambda w: mgpu.Trainer(w.net, "adam", {"bogus": 1}),
    "a momentum that is a text": lambda w: mgpu.Trainer(w.net, "sgd", {"momentum": "0.9"}),
    "a decay that is no number": lambda w: mgpu.Trainer(w.net, "adam", {"wd": float("nan")}),
    "options beside an optimizer": lambda w: mgpu.Trainer(w.net, mx.optimizer.SGD(), {"momentum": 0.9}),
    "virtual shards for other devices": lambda w: mgpu.Trainer(w.net, "sgd", precision="bf16", virtual_shards=3),
    "virtual shards that are an array": lambda w: mgpu.Trainer(w.net, "sgd", virtual_shards=np.ones(2)),
    "replicas that are never compared": lambda w: mgpu.Trainer(w.net, "sgd", precision="bf16", check_replicas_every=0),
    "the precision of another device": lambda w: mgpu.Trainer(w.net, "sgd", precision="fp16"),
    "devices apart with a joining optimizer": lambda w: LocalSGD(w.net, "nadam", every=2, precision="bf16"),
    "a batch that cannot be sliced": lambda w: w.train(mx.nd.array(X).tostype("row_sparse")),
    "columns of a sparse batch": lambda w: mgpu.split_and_load(mx.nd.ones((4, 6)).tostype("csr"), CTX, batch_axis=1),
    "examples without labels": lambda w: mgpu.evaluate(w.net, [(X, None)]),
    "compiled layers that are synchronised": lambda w: w.fit(bn="sync", compiled="on"),
    "a frozen part that is none": lambda w: w.fit(callbacks=[mgpu.Finetune("0"), mgpu.Finetune("typo")]),
    "a column without a name": lambda w: mgpu.EarlyStopping(""),
    "a column that is an array": lambda w: mgpu.EarlyStopping(np.ones(2)),
    "data-parallel layers that are an array": lambda w: mgpu.split_stages(w.net, 2, X, data_parallel=np.ones(2)),
}


def recorded(world, method, *arguments):
    """Call a method of a trainer of adagrad inside record(), after a pass; MXNet refused it after some weights had changed."""
    net = small_net(CTX)
    trainer = mgpu.Trainer(net, "adagrad")
    with mx.autograd.record():
        losses = [LOSS(net(x), y) for x, y in zip(*mgpu.split_batch(X, Y, CTX))]
    trainer.backward(losses)
    before = weights_of(net)
    with pytest.raises(Exception) as caught, mx.autograd.record():
        getattr(trainer, method)(*arguments)
    assert largest_difference(before, weights_of(net)) == 0.0
    if isinstance(caught.value, ValueError):
        trainer.step(6)  # and it can go on
    raise caught.value


def recording(function):
    with mx.autograd.record():
        return function()


def frozen_weight(world):
    """A trainer of another network, whose first layer trains only its bias: MXNet computes no such gradient on a CPU."""
    net = initialized(nn.Dense(1, in_units=2), CTX)
    net.weight.grad_req = "null"
    trainer = mgpu.Trainer(net, "sgd")
    with mx.autograd.record():
        losses = [net(nd.ones((3, 2), ctx=context)) for context in CTX]
    trainer.backward(losses)
    return trainer


def moved(world):
    """A trainer of another network, which has left the trainer's devices before its first step."""
    net = initialized(nn.Dense(1, in_units=2), CTX)
    trainer = mgpu.Trainer(net, "sgd")
    reset_ctx(net, mx.cpu(2))
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
    assert type(caught.value).__module__ == "gluon_mgpu.errors"
    assert re.fullmatch(r"[\w. \-\[\]']+: got .+; expected .+[.:] .+", str(caught.value)), str(caught.value)
    assert len(str(caught.value)) <= 600 and len(str(caught.value).splitlines()) == 1
    assert largest_difference(before, world.state()) == 0.0
    params = world.net.collect_params().values()
    assert all(type(one) is gluon.Trainer or one in (world.trainer, None) for one in map(trainer_of, params))
    assert precision_of(world.net) == "fp32"
    assert {param.grad_req for param in params if is_differentiable(param)} == {"write"} and not is_synchronised(world.net)
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


@pytest.mark.mxnet1("legacy arrays")
@pytest.mark.parametrize("kind", [np.array, lambda values: nd.array(values, dtype="bool")], ids=["numpy", "mxnet"])
def test_bool_labels_are_numbers_in_a_loop_by_hand_too(kind):
    """MXNet's losses of legacy arrays do not take bool ("expected float32, got unknown"); only train_batch cast them."""
    loss, binary = gluon.loss.SigmoidBCELoss(), np.stack([Y > 0] * 3, axis=1)
    trained = []
    for labels, by_hand in ((binary.astype("float32"), False), (kind(binary), False), (kind(binary), True)):
        net = small_net(CTX)
        trainer = mgpu.Trainer(net, "sgd")
        if by_hand:
            pairs = mgpu.split_batch(X, labels, CTX)
            assert {y.dtype for y in (*pairs[1], *mgpu.split_and_load(labels, CTX))} == {np.float32}
            with mx.autograd.record():
                losses = [loss(net(x), y) for x, y in zip(*pairs)]
            trainer.backward(losses)
            trainer.step(6)
        else:
            mgpu.train_batch(net, loss, trainer, X, labels)
        trained.append(weights_of(net))
    assert largest_difference(trained[0], trained[1]) == largest_difference(trained[0], trained[2]) == 0.0


DTYPES = {"uint16": "int32", "int16": "int32", "uint32": "int64", "float64": "float32", ">f4": "float32"}
DTYPES.update({} if is_mxnet2() else {"bool": "float32", "uint64": None})
DTYPES.update(dict.fromkeys(["complex64", "longdouble", "object", "datetime64[s]", "timedelta64[s]", "U3", "S3", "V4"]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_call_treats_a_dtype_that_mxnet_lacks_alike(dtype):
    y, net = np.zeros((6, 3), dtype), small_net(CTX)
    options = net, lambda output, label: (output - label.astype("float32")).sum(axis=1), mgpu.Trainer(net, "sgd")
    for split in (
        lambda: mgpu.split_batch(X, y, CTX)[1],
        lambda: mgpu.split_and_load(y, CTX),
        lambda: mgpu.train_batch(*options, X, y).labels,
        lambda: mgpu.eval_batch(net, X, y, ctx=CTX).labels,
        lambda: next(iter(mgpu.prefetch([(X, y)], CTX)))[1],
    ):
        if DTYPES[dtype] is None:
            with pytest.raises(ShardError, match="of dtype .*; expected a dtype that MXNet has. Convert it"):
                split()
        else:
            assert [shard.dtype for shard in split()] == [np.dtype(DTYPES[dtype])] * 2


# What errors show


class Trainer:
    """Of the same name as ours."""


@pytest.mark.parametrize(
    "make, name",
    [(lambda net: gluon.Trainer(net.collect_params(), "sgd"), "mxnet.gluon.Trainer"), (lambda net: Trainer(), "Trainer")],
)
def test_a_class_of_the_same_name_is_kept_apart_by_its_module(make, name, world):
    for call in (mgpu.fit, mgpu.train_batch, mgpu.compile_step):
        arguments = ([(X, Y)],) if call is mgpu.fit else (X, Y) if call is mgpu.train_batch else ()
        with pytest.raises(ValueError, match=f"object of type ([a-z._]*test_bad_input[.])?{name}; expected a gluon_mgpu.Trainer"):
            call(world.net, LOSS, make(small_net(CTX)), *arguments, **({"epochs": 1} if call is mgpu.fit else {}))


def test_a_trainer_of_another_network_is_reported_before_the_first_batch(world):
    """It said that a weight got no gradient."""
    other = mgpu.Trainer(small_net(CTX), "sgd")
    for call in (
        lambda: mgpu.fit(world.net, LOSS, other, [(X, Y)], epochs=1, callbacks=[]),
        lambda: mgpu.train_batch(world.net, LOSS, other, X, Y),
        lambda: mgpu.compile_step(world.net, LOSS, other),
    ):
        with pytest.raises(
            ValueError, match="got a trainer of .*weight and a network of .*weight; expected a trainer of this network"
        ):
            call()


def test_numbers_of_numpy_are_numbers():
    """NumPy 2 compares a float32 with the largest float in float32, and warns of an overflow."""
    assert real_number("Trainer", "clip_norm", np.float32(1.5), above=True, advice="") == 1.5
    with pytest.raises(TrainerError, match="got clip_norm=.*inf"):
        real_number("Trainer", "clip_norm", np.float32("inf"), above=True, advice="")
