"""Metrics against NumPy, and sums that stay on their devices until they are read."""

from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.loop.metrics import metrics_for, named_metrics
from mxnet import gluon
from mxnet.gluon import nn

from .versions import nd


def value(metric, output, label):
    """A metric's sum, as a float, and its count; the sum must be an array of one element."""
    total, count = metric(output, label)
    assert total.shape == (1,)
    assert isinstance(count, int)
    return float(total.asnumpy()[0]), count


def scores(*shape):
    return np.random.uniform(-1, 1, shape).astype("float32")


def shard(arrays, X, dtype=None, ctx=None):
    return arrays.array(X, dtype=dtype or X.dtype, ctx=ctx)


def add_shard(sums, output, label):
    sums.add_batch(mgpu.data_parallel.Batch([output], [label], [], 0))


@pytest.fixture
def reads(calls_to):
    """The contexts of the arrays that were copied to the host."""
    return calls_to(mx.nd.NDArray, "asnumpy", note=lambda name, array: array.context)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(40, 3), (7, 3, 5), (7, 3, 2, 2)], ids=["classes", "sequence", "pixels"])
def test_accuracy_counts_the_largest_scores(arrays, shape, dtype):
    output, label = scores(*shape), np.random.randint(0, 3, shape[:1] + shape[2:])
    found = value(mgpu.accuracy, shard(arrays, output), shard(arrays, label, dtype))
    assert found == ((output.argmax(axis=1) == label).sum(), label.size)
    assert 0 < found[0] < found[1]


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_accuracy_takes_predictions_as_they_are(arrays, shape):
    predictions, label = np.array([0, 1, 1, 0, 2, 1], "float32"), np.array([0, 1, 0, 0, 2, 2])
    found = value(mgpu.accuracy, shard(arrays, predictions.reshape(shape)), shard(arrays, label, "int32"))
    assert found == (4, 6)


@pytest.mark.parametrize("dtype, label", [("uint8", 3), ("int8", 3), ("float16", 2048)])
def test_no_class_passes_for_another_in_a_small_dtype(arrays, dtype, label):
    """As a byte, class 259 is 3; as float16, 2049 is 2048."""
    wrong = {3: 259, 2048: 2049}[label]
    output = np.zeros((2, 2100), "float32")
    output[0, wrong] = output[1, label] = 1
    labels = np.array([label, label], dtype)
    for metric in (mgpu.accuracy, mgpu.top_k_accuracy(1)):
        for kind in ("float32", "float16"):
            assert value(metric, shard(arrays, output.astype(kind)), shard(arrays, labels)) == (1, 2)
    predictions = np.array([wrong, label], "int32")
    assert value(mgpu.accuracy, shard(arrays, predictions), shard(arrays, labels)) == (1, 2)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 9])
def test_top_k_counts_the_k_largest_scores(arrays, k):
    output, label = scores(40, 4), np.random.randint(0, 4, 40)
    in_order = np.argsort(-output, axis=1)[:, :k]
    right = sum(label[i] in in_order[i] for i in range(40))
    metric = mgpu.top_k_accuracy(k)
    assert value(metric, shard(arrays, output), shard(arrays, label, "int32")) == (right, 40)
    assert metric.__name__ == f"top_{k}_accuracy"


def test_uneven_shards_weigh_what_they_hold(arrays, devices):
    sizes = [5, 1, 2, 3][: len(devices) + 1]
    sums, right, seen = mgpu.loop.MetricSums([mgpu.accuracy]), 0, 0
    for i, size in enumerate(sizes):
        output, label = scores(size, 3), np.random.randint(0, 3, size)
        ctx = devices[i % len(devices)]
        add_shard(sums, shard(arrays, output, ctx=ctx), shard(arrays, label, "int32", ctx=ctx))
        right, seen = right + (output.argmax(axis=1) == label).sum(), seen + size
    assert sums.read() == {"accuracy": right / seen}


def test_sums_are_read_once_a_device(arrays, devices, reads):
    sums = mgpu.loop.MetricSums([mgpu.accuracy, mgpu.top_k_accuracy(2)])
    for _ in range(4):
        for ctx in devices:
            output, label = shard(arrays, scores(3, 3), ctx=ctx), shard(arrays, np.arange(3), "int32", ctx=ctx)
            add_shard(sums, output, label)
            sums.add("norm", nd.ones((1,), ctx=ctx), 1)
    assert reads == []
    means = sums.read()
    assert sorted(reads, key=str) == devices
    assert list(means) == ["accuracy", "top_2_accuracy", "norm"]
    assert means["norm"] == 1.0


def test_many_examples_are_counted_exactly():
    """float32 cannot count further than 2**24 one by one."""
    sums = mgpu.loop.MetricSums()
    sums.add("right", nd.array([2.0**24]), 2**24)
    for _ in range(3):
        sums.add("right", nd.ones((1,)), 1)
    assert sums.read() == {"right": 1.0}


def test_a_batch_adds_its_losses_and_metrics():
    output, label = nd.array([[2, 1], [1, 2], [1, 2]]), nd.array([0, 1, 0])
    batch = mgpu.data_parallel.Batch([output[:2], output[2:]], [label[:2], label[2:]], [nd.array([1, 2]), nd.array([6])], 3)
    sums = mgpu.loop.MetricSums({"hits": mgpu.accuracy})
    sums.add_batch(batch)
    assert sums.read() == {"hits": 2 / 3, "loss": 3.0}


def wrong(output, label):
    return (output.argmax(axis=1) != label).sum().reshape((1,)), label.size


@pytest.mark.parametrize(
    "metrics, names",
    [
        ([mgpu.accuracy, wrong], ["accuracy", "wrong"]),
        ((wrong,), ["wrong"]),
        ({"b": wrong, "a": mgpu.accuracy}, ["b", "a"]),
        (wrong, ["wrong"]),
        (mgpu.top_k_accuracy(5), ["top_5_accuracy"]),
        ([], []),
        (None, []),
    ],
    ids=["list", "tuple", "dict", "function", "made function", "empty", "none"],
)
def test_metrics_are_named(metrics, names):
    assert list(named_metrics(metrics)) == names


@pytest.mark.parametrize(
    "metrics, told",
    [
        ([5], "got 5"),
        ({"mine": "accuracy"}, "got mine='accuracy'"),
        ([mgpu.accuracy, None], "got None=None"),
        ([wrong, wrong], "got 2 of which some share a name"),
        ([lambda output, label: None, lambda output, label: None], "got 2 of which some share a name"),
    ],
)
def test_what_is_no_metric_is_reported(metrics, told):
    with pytest.raises(TrainerError, match=f"^metrics: {told}"):
        mgpu.loop.MetricSums(metrics)


def test_labels_of_one_column_are_labels():
    """Labels of shape (B, 1) were compared with everybody's scores, and more than all were right."""
    scores, labels = nd.array([[0.9, 0.1], [0.1, 0.9], [0.6, 0.4]]), nd.array([[0], [0], [1]])
    assert [float(mgpu.top_k_accuracy(k)(scores, labels)[0].asnumpy()[0]) for k in (1, 2)] == [1.0, 3.0]


def test_sums_go_on_after_shards_were_joined_and_after_they_were_read(monkeypatch):
    """Of 64 shards that wait to be joined, 150 make two full groups and a rest. Reading in between adds them up as well."""
    monkeypatch.setattr("gluon_mgpu.loop.metric_sums._MOST_SHARDS", 64)
    sums = mgpu.loop.MetricSums([mgpu.accuracy])
    correct = np.random.RandomState(0).randint(0, 2, 150)
    for number, is_correct in enumerate(correct, 1):
        add_shard(sums, nd.array([[0.0, 1.0]]), nd.array([is_correct]))
        if number in (10, 100):
            assert sums.read() == {"accuracy": pytest.approx(correct[:number].mean())}
        if number == 70:
            sums.state()
    assert sums.read() == {"accuracy": pytest.approx(correct.mean())}


def test_a_metric_of_its_own_sees_each_shard_once():
    """Shards are joined for this package's metrics; others may count calls, or not be sums over examples."""
    seen = []

    def largest(output, label):
        seen.append(output.shape)
        return output.max().reshape((1,)), 1

    sums = mgpu.loop.MetricSums([mgpu.accuracy, largest])
    for number in range(3):
        add_shard(sums, nd.array([[0.0, number]]), nd.array([1]))
    assert seen == [(1, 2)] * 3
    assert sums.read() == {"accuracy": pytest.approx(2 / 3), "largest": 1.0}


@pytest.mark.parametrize(
    "output, label",
    [
        (nd.array([[0.1, 0.9], [0.8, 0.2]]), nd.array([[1], [1]])),  # a label in a column
        (mx.nd.array([[0.1, 0.9], [0.8, 0.2]]).tostype("row_sparse"), nd.array([1, 1])),
    ],
)
def test_shards_that_cannot_be_joined_are_counted_one_by_one(output, label):
    shapes = []

    def hits(X, y):
        shapes.append(X.shape)
        return mgpu.accuracy(X if X.stype == "default" else X.tostype("default"), y)

    hits.joins_shards = True
    sums = mgpu.loop.MetricSums([hits])
    for _ in range(2):
        add_shard(sums, output, label)
    assert shapes == [(2, 2)] * 2
    assert sums.read() == {"hits": 0.5}


@pytest.mark.parametrize("steps", [3, 4])
def test_classes_are_where_the_loss_takes_them(steps):
    """Also with as many steps as classes, where an argmax over the steps has the shape of the labels."""
    net = gluon.nn.Dense(3, flatten=False, in_units=3, use_bias=False)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    net.weight.set_data(nd.array(np.eye(3)))
    labels = np.arange(2 * steps).reshape(2, steps) ** 2 % 3
    assert mgpu.evaluate(net, [(np.eye(3)[labels], labels)], loss=gluon.loss.SoftmaxCELoss())["accuracy"] == 1
    with pytest.raises(TrainerError, match=rf"shape \(1, {steps}, 3\).*\(1, 2\).*axis 2"):
        metrics_for("auto", gluon.loss.SoftmaxCELoss())[0](nd.zeros((1, steps, 3)), nd.zeros((1, 2)))


def test_a_metric_is_told_which_of_two_axes_holds_the_classes():
    """A tagger with as many steps as classes had the accuracy of an argmax over the steps."""
    output, label = scores(4, 3, 3), np.random.randint(0, 3, (4, 3))
    X, y = nd.array(output), nd.array(label)
    for metric in (mgpu.accuracy, mgpu.top_k_accuracy(1), partial(mgpu.accuracy, axis=3), partial(mgpu.accuracy, axis="last")):
        with pytest.raises(TrainerError, match=r"shape \(4, 3, 3\).*to know the axis.*axis=-1"):
            metric(X, y)
    with pytest.raises(TrainerError, match="classes along axis 1. Pass axis=1 or axis=-1"):
        mgpu.accuracy(X[:, :2], y[:, :2])
    for axis in (1, 2, -1):
        right = (output.argmax(axis=axis) == label).sum()
        metrics = [partial(mgpu.accuracy, axis=axis), mgpu.top_k_accuracy(1, axis=axis)]
        assert [value(metric, X, y)[0] for metric in metrics] == [right, right]
        sums = mgpu.loop.MetricSums(metrics)
        add_shard(sums, X, y)
        assert sums.read() == {"accuracy": right / 12, "top_1_accuracy": right / 12}
    pixels, of_pixels = scores(2, 4, 4, 3), np.random.randint(0, 3, (2, 4, 4))
    found = value(mgpu.top_k_accuracy(1, axis=-1), nd.array(pixels), nd.array(of_pixels))
    assert found == ((pixels.argmax(axis=-1) == of_pixels).sum(), 32)


def test_metrics_of_the_output_alone_need_no_labels():
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    found = mgpu.evaluate(net, [(nd.ones((3, 2)), None)], {"mean": lambda output, label: (output.sum(), output.size)})
    assert found == {"mean": 2.0}
