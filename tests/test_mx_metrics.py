"""Objects of mx.metric in fit and evaluate, and Gluon's Estimator with this Trainer: the numbers of plain MXNet on one device."""

import re
import signal
from pathlib import Path

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .test_fit import LOSS, batches_of, make_net, make_trainer, three_clouds
from .test_weight_average import Press, assert_close, assert_same, interrupts, weights

__all__ = ["interrupts"]  # a fixture
DOCS = Path(__file__).parent.parent / "docs" / "migrating.md"


def softmax_net(ctx):
    """Probabilities, as CrossEntropy and Perplexity expect them."""
    net = make_net(ctx)
    outer = nn.HybridSequential()
    outer.add(net, nn.HybridLambda(lambda F, x: F.npx.softmax(x) if mx.util.is_np_array() else F.softmax(x)))
    return outer


def plain(metric, net, data):
    """MXNet's own loop on one device, on legacy arrays."""
    metric.reset()
    for X, y in data:
        output = net(mx.np.array(X) if mx.util.is_np_array() else mx.nd.array(X))
        metric.update([mx.nd.array(y)], [mx.nd.array(output.asnumpy())])
    return metric.get()[1]


METRICS = {
    "accuracy": lambda: mx.metric.Accuracy(),
    "top-2": lambda: mx.metric.TopKAccuracy(2),
    "cross entropy": lambda: mx.metric.CrossEntropy(),
    "perplexity": lambda: mx.metric.Perplexity(None),
    "nll": lambda: mx.metric.NegativeLogLikelihood(),
    "custom": lambda: mx.metric.CustomMetric(lambda label, output: float(output.max()), name="largest"),
    "custom pair": lambda: mx.metric.CustomMetric(lambda label, output: (float((label == 1).sum()), len(label)), name="ones"),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("name", METRICS)
def test_evaluate_gives_the_numbers_of_one_device(devices, arrays, name):
    """60 examples in batches of 16: the last batch and its shards are smaller."""
    net, data = softmax_net(devices), batches_of(*three_clouds())
    found = mgpu.evaluate(net, data, METRICS[name](), loss=LOSS)
    expected = METRICS[name]()
    assert found.pop("loss") > 0
    assert found == {expected.name: pytest.approx(plain(expected, softmax_net([mx.cpu(0)]), data), rel=1e-6)}


@pytest.mark.parametrize("make", [mx.metric.MAE, mx.metric.MSE, mx.metric.RMSE, mx.metric.PearsonCorrelation])
def test_metrics_of_batches_do_not_depend_on_the_devices(devices, make):
    """MXNet's MAE is the mean over batches. The mean over shards of different sizes is another number."""
    X, _ = three_clouds()
    y = (X @ np.float32([[1.0], [2.0]])) ** 2
    results = []
    for ctx in ([mx.cpu()], devices):
        net = nn.Dense(1, in_units=2)
        net.initialize(mx.init.One(), ctx=ctx)
        results.append(mgpu.evaluate(net, batches_of(X, y), [make()]))
    metric = make()
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[0][metric.name] == pytest.approx(float(plain(metric, net, batches_of(X, y))), rel=1e-6)


def test_f1_and_a_composite_next_to_functions(devices):
    X, y = three_clouds()
    data, net = batches_of(X, (y > 0).astype("float32")), make_net(devices, classes=2)
    both = mx.metric.CompositeEvalMetric([mx.metric.Accuracy(name="acc"), mx.metric.F1()])
    found = mgpu.evaluate(net, data, [both, mgpu.accuracy, mgpu.top_k_accuracy(2)])
    assert set(found) == {"accuracy", "top_2_accuracy", "acc", "f1"}
    assert found["acc"] == found["accuracy"] and found["top_2_accuracy"] == 1.0
    assert found["f1"] == pytest.approx(plain(mx.metric.F1(), make_net([mx.cpu()], classes=2), data))
    named = mgpu.evaluate(net, data, {"right": mx.metric.Accuracy(), "also": mgpu.accuracy})
    assert named["right"] == named["also"] == found["acc"]


def test_fit_reports_them_and_keeps_the_users_metric(devices):
    metric, data = mx.metric.Accuracy(), batches_of(*three_clouds())
    metric.update([mx.nd.array([1.0])], [mx.nd.array([[0.0, 1.0]])])
    net = make_net(devices)
    options = {"metrics": [metric, mx.metric.Perplexity(None), mgpu.top_k_accuracy(1)], "micro_steps": 2, "callbacks": []}
    history = mgpu.fit(net, LOSS, make_trainer(net), data, data, epochs=2, **options)
    for row in history.rows:
        assert row["train_accuracy"] == pytest.approx(row["train_top_1_accuracy"])
        assert row["test_accuracy"] == pytest.approx(row["test_top_1_accuracy"]) and row["test_perplexity"] > 0
    assert metric.get() == ("accuracy", 1.0)


def test_resumed_within_an_epoch(interrupts, tmp_path):
    data = batches_of(*three_clouds())

    def part(folder, *more):
        net = softmax_net([mx.cpu(0), mx.cpu(1)])
        targets = [(X, np.eye(3, dtype="float32")[y][:, :1]) for X, y in data]
        loss = gluon.loss.L2Loss()
        custom = mx.metric.CustomMetric(lambda label, output: (float(output.sum()), len(label)))
        options = {"metrics": [mx.metric.RMSE(), custom], "resume": "auto"}
        net.add(nn.Dense(1, in_units=3))
        net[2].initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
        saves = mgpu.Checkpoint(folder, monitor=None)
        history = mgpu.fit(net, loss, make_trainer(net), targets, epochs=2, callbacks=[saves, *more], **options)
        return [{name: value for name, value in row.items() if name.startswith("train_")} for row in history.rows]

    expected = part(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        part(tmp_path / "parts", Press(3))
    assert part(tmp_path / "parts") == expected and len(expected[0]) == 3


def test_in_a_job_metrics_of_batches_are_errors(monkeypatch):
    """Each process has a part of the batch: the mean over parts is not the mean over batches."""
    monkeypatch.setattr("gluon_mgpu.loop.mx_metrics.group", lambda: object())
    sums = mgpu.loop.DeviceSums([mx.metric.Accuracy()])
    sums.add_shard(mx.nd.array([[0.0, 1.0], [1.0, 0.0]]), mx.nd.array([1, 1]))
    assert sums.read() == {"accuracy": 0.5}
    with pytest.raises(mgpu.errors.TrainerError, match="MAE"):
        mgpu.loop.DeviceSums([mx.metric.MAE()]).add_shard(mx.nd.ones((2, 1)), mx.nd.ones((2, 1)))


def estimator_program():
    (program,) = re.findall(r"^```python\n(from mxnet\.gluon\.contrib.*?)^```", DOCS.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return program


def test_gluons_estimator_with_uneven_batches(devices):
    """The processor in the docs: with MXNet's own, a batch of 5 for 3 devices is an error."""
    X, y = three_clouds(17)
    names, data = {"mgpu": mgpu, "autograd": autograd}, gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), 6)
    exec(estimator_program().split("\nnet = ")[0], names)
    net, by_hand = make_net(devices), make_net([mx.cpu()])
    est = names["estimator"].Estimator(
        net,
        LOSS,
        train_metrics=mx.metric.Accuracy(),
        trainer=make_trainer(net),
        context=devices,
        batch_processor=names["UnevenBatches"](),
    )
    est.logger.handlers.clear()
    before = signal.getsignal(signal.SIGINT)
    est.fit(data, val_data=data, epochs=2)
    assert signal.getsignal(signal.SIGINT) is before
    trainer = make_trainer(by_hand)
    history = mgpu.fit(by_hand, LOSS, trainer, data, data, epochs=2, callbacks=[])
    assert_close(weights(net), weights(by_hand), tolerance=1e-5)
    accuracies = {metric.get()[0]: metric.get()[1] for metric in est.val_metrics}
    assert accuracies["validation accuracy"] == pytest.approx(history.rows[-1]["test_accuracy"])
    assert_same(weights(net), weights(net, devices[-1]))
