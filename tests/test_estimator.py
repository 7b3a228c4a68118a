"""Gluon's Estimator with this Trainer, and its metrics with predictions: the numbers of one device."""

import re
import signal
from pathlib import Path

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import autograd, gluon

from .test_fit import LOSS, batches_of, make_net, make_trainer, three_clouds
from .test_weight_average import assert_close, assert_same, weights
from .versions import nd

DOCS = Path(__file__).parent.parent / "docs" / "migrating.md"
metrics = (gluon if is_mxnet2() else mx).metric


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
        train_metrics=metrics.Accuracy(),
        trainer=make_trainer(net),
        batch_processor=names["UnevenBatches"](),
        **{"device" if is_mxnet2() else "context": devices},
    )
    est.logger.handlers.clear()
    before = signal.getsignal(signal.SIGINT)
    est.fit(data, val_data=data, epochs=2)
    assert signal.getsignal(signal.SIGINT) is before
    history = mgpu.fit(by_hand, LOSS, make_trainer(by_hand), data, data, epochs=2, callbacks=[])
    assert_close(weights(net), weights(by_hand), tolerance=1e-5)
    accuracies = {metric.get()[0]: metric.get()[1] for metric in est.val_metrics}
    assert accuracies["validation accuracy"] == pytest.approx(history.rows[-1]["test_accuracy"])
    assert_same(weights(net), weights(net, devices[-1]))


def test_a_metric_of_mxnet_takes_the_predictions(devices):
    X, y = three_clouds()
    net, metric = make_net(devices), metrics.Accuracy()
    metric.update([nd.array(y)], [nd.array(mgpu.predict(net, batches_of(X, y), pairs=True))])
    assert metric.get()[1] == mgpu.evaluate_accuracy_gpus(net, batches_of(X, y))
    assert mgpu.evaluate(net, batches_of(X, y), [metric]) == {"accuracy": metric.get()[1]}
