"""Contract: a wrong argument is told in the house's words, before anything was changed: no weight, no state, no file."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.local_sgd import LocalSGD
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import assert_house_style, largest_difference, small_batches, small_net, weights_of

CTX = [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
X, Y = small_batches([6])[0]


class World:
    """A network that has trained a step, its trainer, and a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.net = small_net(CTX)
        self.trainer = mgpu.Trainer(self.net, "adam", {"learning_rate": 0.01})
        mgpu.train_batch(self.net, LOSS, self.trainer, X, Y)

    def state(self):
        moments = [array.asnumpy() for pair in self.trainer._updaters[1].states.values() for array in pair]
        return weights_of(self.net, CTX[0]) + weights_of(self.net, CTX[1]) + moments

    def train(self, X=X, y=Y, loss=LOSS, **options):
        return mgpu.train_batch(self.net, loss, self.trainer, X, y, **options)

    def fit(self, train_iter=((X, Y),), **options):
        return mgpu.fit(self.net, LOSS, self.trainer, train_iter, **{"epochs": 1, "callbacks": [], **options})


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
    "a last batch that is neither": lambda w: mgpu.data.ArrayLoader(X, Y, 2, last_batch="rollover"),
    "no classes": lambda w: mgpu.models.resnet18(0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_nothing_was_changed(wrong, tmp_path):
    world = World(tmp_path)
    before = world.state()
    with pytest.raises((ValueError, RuntimeError, UserWarning)) as caught:
        WRONG[wrong](world)
    assert_house_style(caught.value)
    assert type(caught.value).__module__ == "gluon_mgpu.errors"
    assert largest_difference(before, world.state()) == 0.0
    assert list(tmp_path.iterdir()) == []
    world.train()  # and it can go on
    assert largest_difference(before, world.state()) > 0.0
