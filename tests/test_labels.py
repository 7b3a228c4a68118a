"""Labels that are no classes: MXNet takes the nearest class, and trained in silence."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import DataError
from gluon_mgpu.models import SequenceLoss
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import LOSS, as_array, initialized, largest_difference, small_batches, small_net, weights_of
from .versions import nd

CTX = [mx.cpu(0), mx.cpu(1)]
CE = gluon.loss.SoftmaxCrossEntropyLoss


def batches_with(label, at, num=4):
    """Batches of 6 with 3 classes; one label of this batch is another number."""
    batches = small_batches([6] * num)
    batches[at][1][4] = label
    return batches


def as_given(batches, form):
    if form == "arrays":
        return [(as_array(X), as_array(y)) for X, y in batches]
    X, y = (np.concatenate(parts) for parts in zip(*batches))
    if form == "DataLoader":
        return gluon.data.DataLoader(gluon.data.ArrayDataset(X, y.astype("float32")), 6)
    return mx.io.NDArrayIter(X, y.astype("float32"), 6) if form == "NDArrayIter" else batches


@pytest.mark.parametrize("label, shown", [(3, "3"), (-1, "-1"), (float("nan"), "nan"), (254, "254")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_steps": 2},
        {"virtual_shards": 4},
        pytest.param({"compiled": "on"}, marks=pytest.mark.mxnet1("compiled passes")),
    ],
    ids=str,
)
def test_a_batch_with_a_label_that_is_no_class_changes_nothing(label, shown, options, arrays):
    (good, bad), options, net = small_batches([6, 6]), dict(options), small_net(CTX)
    mgpu.eval_batch(net, *good, ctx=CTX)  # decides shapes
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, virtual_shards=options.pop("virtual_shards", None))
    labels = bad[1].astype("float32" if label != label else "int64")
    labels[4] = label
    make = mgpu.compile_step if "compiled" in options else lambda *args, **kw: lambda X, y: mgpu.train_batch(*args, X, y, **kw)
    step = make(net, LOSS, trainer, **options)
    for _ in range(2):
        before = weights_of(net)
        index, shape = (1, 3) if "micro_steps" in options else (4, 6)
        with pytest.raises(
            DataError, match=rf"got label {shown} at \[{index}\] of labels of shape \({shape},\), for 3 classes; expected 0 to 2"
        ):
            step(bad[0], labels)
        assert largest_difference(before, weights_of(net)) == 0.0
        step(*good)  # and it can go on
        assert largest_difference(before, weights_of(net)) > 0.0


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("form", ["numpy", "arrays", "DataLoader", "NDArrayIter"])
@pytest.mark.parametrize("run", ["fit", "its evaluation", "evaluate"])
def test_a_run_names_the_batch_wherever_it_comes_from(run, form, at):
    net = small_net(CTX)
    data, good = as_given(batches_with(7, at), form), small_batches([6])
    operation = "fit" if run == "fit" else "evaluate"
    with pytest.raises(
        DataError, match=rf"^{operation}: got an error at step {at + 1}: got label 7 at \[4\] of labels of shape \(6,\)"
    ):
        if run == "evaluate":
            mgpu.evaluate(net, data, loss=LOSS)
        else:
            sets = (data,) if run == "fit" else (good, data)
            mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), *sets, epochs=1, callbacks=[])


def test_arrays_of_a_loop_by_hand_are_checked_when_they_are_computed():
    net = small_net(CTX)
    trainer = mgpu.Trainer(net, "sgd")
    with pytest.raises(DataError, match="got label 7"):
        for X, y in as_given(batches_with(7, 2, num=40), "arrays"):
            mgpu.train_batch(net, LOSS, trainer, X, y)


class Same(CE):
    """A subclass that computes the same."""


class Ignoring(CE):
    """One that ignores negative labels: it says so nowhere."""

    def forward(self, pred, label):
        return super().forward(pred, nd.maximum(label, 0)) * (label >= 0)


@pytest.mark.parametrize(
    "loss, shape, labels, is_wrong",
    [
        (Same(), (3,), [0, 1, 2, 3], True),
        (Ignoring(), (3,), [0, 1, 2, -1], False),
        (lambda output, label: CE()(output, label), (3,), [0, 1, 2, -1], False),
        (CE(sparse_label=False), (3,), np.full((4, 3), 9), False),
        (gluon.loss.L2Loss(), (3,), np.full((4, 3), 9), False),
        (CE(axis=1), (3, 2), np.full((4, 2), 3), True),  # 3 classes, 2 positions
        (CE(axis=-1), (2, 3), np.full((4, 2), 2), False),
        (CE(axis=-1), (3, 2), np.full((4, 3), 2), True),
        (SequenceLoss(), (2, 3), (np.array([[0, 1], [2, -1], [2, 99], [1, 3]]), np.array([2, 1, 1, 2])), True),
        (SequenceLoss(0.1), (2, 3), (np.array([[0, 1], [2, -1], [2, 99], [1, 2]]), np.array([2, 1, 1, 2])), False),
    ],
)
@pytest.mark.parametrize("to_arrays", [False, True])
def test_the_loss_decides_which_labels_are_classes(loss, shape, labels, is_wrong, to_arrays):
    net = initialized(nn.Lambda(lambda x: x), CTX)
    X = np.random.RandomState(0).rand(4, *shape).astype("float32")
    y = tuple(map(np.float32, labels)) if isinstance(labels, tuple) else np.float32(labels)
    if to_arrays:
        y = tuple(map(as_array, y)) if isinstance(y, tuple) else as_array(y)
    for _ in range(2):
        if is_wrong:
            with pytest.raises(DataError, match="got label 3 at|got label 2 at"):
                mgpu.eval_batch(net, X, y, ctx=CTX, loss=loss)
        else:
            mgpu.eval_batch(net, X, y, ctx=CTX, loss=loss)
