"""In a script that was written for d2l: its functions and ours side by side. Skipped where d2l is not installed."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.parameters import structural_params
from mxnet import autograd, gluon, init, npx

d2l = pytest.importorskip("d2l.mxnet", reason="d2l is not installed: pip install '.[d2l]'")

CTX = [mx.cpu(0), mx.cpu(1)]


@pytest.fixture(autouse=True)
def np_arrays():
    npx.set_np()
    yield
    npx.reset_np()


@pytest.fixture
def loaders():
    """The embedded digits in Gluon's DataLoaders, as d2l's load_data_... functions return them."""
    digits = mgpu.data.load_digits()
    train = gluon.data.ArrayDataset(digits.train_images[:1280], digits.train_labels[:1280])
    test = gluon.data.ArrayDataset(digits.test_images[:300], digits.test_labels[:300])  # d2l splits even batches only
    return gluon.data.DataLoader(train, 64), gluon.data.DataLoader(test, 100)


def chapter_loop(loaders, net, trainer_class, split_batch, evaluate, backward, epochs=3):
    """The training loop of d2l's chapter "Concise Implementation for Multiple GPUs", with its pieces as arguments."""
    train_iter, test_iter = loaders
    mx.random.seed(0)
    net.initialize(init=init.Xavier(), ctx=CTX, force_reinit=True)
    trainer = trainer_class(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    accuracies = []
    for _ in range(epochs):
        for features, labels in train_iter:
            X_shards, y_shards = split_batch(features, labels, CTX)
            with autograd.record():
                losses = [loss(net(X), y) for X, y in zip(X_shards, y_shards)]
            backward(losses)
            trainer.step(features.shape[0])
        npx.waitall()
        accuracies.append(evaluate(net, test_iter))
    return accuracies


def each_backward(losses):
    for loss in losses:
        loss.backward()


def small():
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Conv2D(8, 3, padding=1, activation="relu"), gluon.nn.Flatten(), gluon.nn.Dense(10))
    return net


def test_the_chapter_s_loop_gives_the_same_accuracy(loaders):
    theirs = chapter_loop(loaders, small(), gluon.Trainer, d2l.split_batch, d2l.evaluate_accuracy_gpus, each_backward)
    ours = chapter_loop(loaders, small(), mgpu.Trainer, mgpu.split_batch, mgpu.evaluate_accuracy_gpus, mgpu.backward)
    assert ours == pytest.approx(theirs, abs=1e-12)
    assert ours[-1] > 0.5


def test_resnet18_is_d2l_s():
    theirs, ours = d2l.resnet18(10), mgpu.models.resnet18(10)
    X = mx.np.array(np.random.RandomState(0).uniform(size=(2, 1, 16, 16)), dtype="float32")
    for net in (theirs, ours):
        net.initialize()
        net(X)
    shapes = [[(name, param.shape) for name, param in structural_params(net).items()] for net in (theirs, ours)]
    assert sorted(shapes[0]) == sorted(shapes[1])
    assert sum(int(np.prod(shape)) for _, shape in shapes[1]) == 11183626


def test_train_ch13_takes_the_trainer_and_the_split(loaders, capsys):
    """The lines of docs/migrating.md; batches of 100 and 64 divide evenly, the last one of the test set does not."""
    train_iter, _ = loaders
    digits = mgpu.data.load_digits()
    test_iter = gluon.data.DataLoader(gluon.data.ArrayDataset(digits.test_images[:101], digits.test_labels[:101]), 100)
    net = small()
    net.initialize(init=init.Xavier(), ctx=CTX)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    d2l.train_ch13(net, train_iter, test_iter, loss, trainer, 2, CTX, mgpu.split_batch)
    assert "examples/sec on [cpu(0), cpu(1)]" in capsys.readouterr().out
