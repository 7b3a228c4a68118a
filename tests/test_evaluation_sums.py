"""Metric objects of MXNet, on several devices, against MXNet's own loop on one."""

import math
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.loop.metrics import direction_of
from gluon_mgpu.mxnet_internals.versions import is_mxnet2, metric
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import initialized
from .test_processes import BACKENDS, launched

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


class Largest(metric.EvalMetric):
    """The last of the largest outputs, and the calls: both depend on the order of the examples, and on the batches."""

    def __init__(self, name="largest"):
        super().__init__(name)

    def reset(self):
        self.last, self.calls, self.names = math.nan, 0, ["last", "calls"]

    def update(self, labels, preds):
        assert [type(array) for array in (*labels, *preds)] == [mx.np.ndarray if is_mxnet2() else mx.nd.NDArray] * 2
        self.last, self.calls = preds[0].asnumpy()[-1].max() + labels[0].asnumpy()[-1], self.calls + 1

    def get(self):
        return self.names, [self.last, self.calls]


class Flat(Largest):
    """Of sequences of one step, with the examples along axis 1."""

    def update(self, labels, preds):
        assert preds[0].shape == (1, labels[0].shape[1], 2)
        super().update([labels[0][0]], [preds[0][0]])

    def get(self):
        return self.name, self.last


class Broken(metric.EvalMetric):
    def update(self, labels, preds):
        raise KeyError("no such class")


class NoNumber(metric.EvalMetric):
    def update(self, labels, preds):
        pass

    def get(self):
        return self.name, "high"


def make_net(ctx, num_outputs=2):
    return initialized(
        nn.Dense(num_outputs, in_units=4, flatten=False, bias_initializer=mx.init.Uniform(0.5)), ctx, mx.init.Uniform(1.0)
    )


def make_batches(sizes, num_outputs=2):
    draw = np.random.uniform
    labels = [np.random.randint(0, 2, n).astype("float32") if num_outputs > 1 else draw(size=(n, 1)) for n in sizes]
    return [(draw(-1, 1, (n, 4)).astype("float32"), label) for n, label in zip(sizes, labels)]


def by_mxnet(net, batches, metrics):
    """Values of MXNet's loop, whose batches are on one device."""
    context, make = next(iter(net.collect_params().values())).list_ctx()[0], mx.np.array if is_mxnet2() else mx.nd.array
    found = {}
    for one in metrics:
        one.reset()
        for X, y in batches:
            output = net(mx.np.array(X, ctx=context) if mx.util.is_np_array() else make(X, ctx=context))
            one.update([make(y)], [make(output.asnumpy())])
        prefix = f"{one.name}_" if isinstance(one, Largest) else ""
        found.update((prefix + name, value) for name, value in one.get_name_value())
    return found


def classification():
    composite = metric.CompositeEvalMetric([metric.Accuracy(), metric.F1(name="own")])
    return [metric.F1(), metric.MCC(), metric.TopKAccuracy(2), composite, Largest()]


@pytest.mark.parametrize("sizes", [[6, 6, 5], [2, 1], [1]], ids=["uneven", "few", "one"])
def test_values_are_those_of_mxnet_on_one_device(devices, arrays, sizes):
    """F1 by itself averages batches or not, as its option says: objects see the batches, not the shards."""
    net, batches, metrics = make_net(devices), make_batches(sizes), classification()
    found = mgpu.evaluate(net, batches, metrics)
    assert found == pytest.approx(by_mxnet(net, batches, classification()))  # outputs of shards may round differently
    assert list(found) == ["f1", "mcc", "top_k_accuracy_2", "accuracy", "own", "largest_last", "largest_calls"]


@pytest.mark.parametrize("sizes", [[6, 6, 5], [2, 2]], ids=["uneven", "few"])
def test_correlations_are_those_of_mxnet_on_one_device(devices, arrays, sizes):
    net, batches = make_net(devices, 1), make_batches(sizes, 1)
    for one in (metric.PearsonCorrelation(), metric.RMSE()):
        found = mgpu.evaluate(net, batches, one)
        assert found == pytest.approx(by_mxnet(net, batches, [one]))
        assert list(found) == [one.name]


@pytest.mark.skipif(is_mxnet2(), reason="its F1 has other averages")
def test_averages_over_batches_are_those_of_the_batches(devices):
    net, batches = make_net(devices), make_batches([6, 6, 5])
    metrics = {"mean": metric.F1(average="macro"), "all": metric.F1(average="micro")}
    found = mgpu.evaluate(net, batches, metrics)
    assert found == {name: by_mxnet(net, batches, [one])["f1"] for name, one in metrics.items()}
    assert found["mean"] != found["all"]


def test_virtual_shards_and_axes_change_nothing(devices):
    net, batches = make_net(devices), make_batches([6, 5])
    expected = by_mxnet(net, batches, classification())
    found = mgpu.evaluate(net, batches, classification(), virtual_shards=6)
    assert found == pytest.approx(expected)  # a virtual shard may round differently
    rows = [(X.reshape(1, -1, 4), y.reshape(1, -1)) for X, y in batches]
    flat = mgpu.evaluate(net, rows, Flat("flat"), split_f=partial(mgpu.split_batch, batch_axis=1))
    assert flat == {"flat": pytest.approx(expected["largest_last"])}


class Fork(gluon.Block):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(2, in_units=4)

    def forward(self, X):
        return {"scores": self.layer(X), "twice": [2 * self.layer(X)]}


def test_nested_outputs_are_a_list_of_arrays(devices):
    """Each array of the batch is one, as MXNet's metrics take several outputs."""
    net, (X, y) = initialized(Fork(), devices), make_batches([5])[0]
    found = mgpu.evaluate(net, [(X, (y, y))], metric.F1())
    single = mgpu.evaluate(net.layer, [(X, y)], [metric.F1(), metric.Accuracy()])
    assert found["f1"] == pytest.approx(single["f1"])


def test_every_evaluation_begins_anew_and_leaves_the_object_alone(devices):
    net, batches, own = make_net(devices), make_batches([6, 5]), metric.F1()
    by_mxnet(net, make_batches([4]), [own])
    before = own.get(), own.num_inst
    first = mgpu.evaluate(net, batches, [mgpu.accuracy, own], loss=LOSS)
    assert list(first) == ["accuracy", "loss", "f1"]
    assert mgpu.evaluate(net, batches, [mgpu.accuracy, own], loss=LOSS) == first
    assert first["f1"] == by_mxnet(net, batches, [metric.F1()])["f1"]
    assert (own.get(), own.num_inst) == before


def test_fit_updates_objects_in_evaluations_alone(devices):
    net, batches, tests = make_net(devices), make_batches([6, 5]), make_batches([4, 3])
    trainer, own = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5}), [mgpu.accuracy, metric.F1(), Largest()]
    stopping = mgpu.EarlyStopping("test_f1", patience=9)
    history = mgpu.fit(net, LOSS, trainer, batches, tests, epochs=3, metrics=own, evaluate_every=1, callbacks=[stopping])
    expected = by_mxnet(net, tests, [metric.F1(), Largest()])
    assert {name: history.rows[-1][f"test_{name}"] for name in expected} == pytest.approx(expected)
    assert [row["test_largest_calls"] for row in history.rows] == [2.0] * 3
    assert "test_f1" in history.evaluations[0]
    assert [name for name in history.rows[0] if name.startswith("train_")] == ["train_accuracy", "train_loss"]
    assert [direction_of(f"test_{name}") for name in ("f1", "mcc", "pearsonr", "nll-loss")] == ["max", "max", "max", "min"]


JOB = """
    from gluon_mgpu.distributed import own_batches
    from gluon_mgpu.loop import evaluation_sums
    from gluon_mgpu.mxnet_internals.versions import metric
    evaluation_sums._PIECE_BYTES = 700  # a batch takes several messages, the last one full or not
    class Last(metric.EvalMetric):
        def reset(self):
            self.seen = []
        def update(self, labels, preds):
            self.seen.append([len(labels[0]), float(labels[0].asnumpy()[-1] + preds[0].asnumpy()[-1].max())])
        def get(self):
            return ["calls", "examples", "at_end"], [len(self.seen), sum(one for one, _ in self.seen), self.seen[-1][1]]
    rng = np.random.RandomState(3)
    weights, X, y = rng.normal(size=(2, 4)), rng.normal(size=(60, 4)).astype("float32"), rng.randint(0, 2, 60)
    net = gluon.nn.Dense(2, in_units=4, use_bias=False)
    net.initialize(ctx=ctx)
    net.weight.set_data(nd.array(weights))
    def batches(*sizes):
        ends = np.cumsum([0, *sizes])
        return [(X[begin:end], y[begin:end]) for begin, end in zip(ends, ends[1:])]
    metrics = [metric.F1(), metric.MCC(), metric.PCC(), Last("last"), mgpu.accuracy]
    found = {"divided": mgpu.evaluate(net, batches(29, 30, 1), metrics)}
    with without_group():
        found["alone"] = mgpu.evaluate(net, batches(29, 30, 1), metrics)
    with own_batches():  # of different sizes, and not equally many
        own = [batches(10, 20, 0, 5), batches(35, 5, 20)[1:]][me.rank]
        found["own"] = mgpu.evaluate(net, own, metrics)
        with without_group():
            joined = [(np.concatenate([X[:10], X[35:40]]), np.concatenate([y[:10], y[35:40]])),
                      (np.concatenate([X[10:30], X[40:]]), np.concatenate([y[10:30], y[40:]])), (X[30:35], y[30:35])]
            found["joined"] = mgpu.evaluate(net, joined, metrics)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    history = mgpu.fit(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, batches(20), batches(29, 1), epochs=2,
                       metrics=metrics, callbacks=[])
    with without_group():
        after = mgpu.evaluate(net, batches(29, 1), metrics)
    row = {name[5:]: value for name, value in history.rows[-1].items() if name[:5] == "test_" and name != "test_loss"}
    tell("values", **found, row=row, after=after)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_processes_report_what_one_process_does(tmp_path, backend):
    """Also where one of them has no examples of a batch, or fewer batches than another."""
    told = [one["values"] for one in launched(tmp_path, [JOB], 2, backend=backend)]
    assert told[0] == told[1]
    values = told[0]
    assert values["divided"] == pytest.approx(values["alone"], rel=1e-6)
    assert values["own"] == pytest.approx(values["joined"], rel=1e-6)
    assert values["row"] == pytest.approx(values["after"], rel=1e-6)
    assert [values[name]["last_examples"] for name in ("divided", "own", "row")] == [60, 60, 30]
    assert [values[name]["last_calls"] for name in ("divided", "own", "row")] == [3, 3, 2]


def test_fit_needs_something_to_evaluate():
    net = make_net([mx.cpu(0)])
    trainer = mgpu.Trainer(net, "sgd")
    with pytest.raises(TrainerError, match=r"^fit: got f1, largest of MXNet without a test_iter; expected one"):
        mgpu.fit(net, LOSS, trainer, make_batches([4]), epochs=1, metrics=[metric.F1(), Largest()])


@pytest.mark.parametrize(
    "metrics, told",
    [
        ([metric.F1], r"metrics: got F1=the class mxnet\.[a-z.]*F1; expected a function"),
        (["f1"], r"metrics: got f1='f1'; expected a function. Pass gluon_mgpu.accuracy, or an object such as mx.metric.F1\(\)"),
        ([mgpu.accuracy, metric.Accuracy()], "metrics: got 2 of which some share a name"),
        ([mgpu.accuracy, metric.CompositeEvalMetric([metric.Accuracy(), metric.F1()])], "metrics: got 3 of which some share"),
        ([metric.Loss()], "metrics: got 'loss'; expected another name"),
        (
            [Broken("mine")],
            "evaluate: got KeyError of the metric mine: .*no such class.*; expected labels and outputs that it takes",
        ),
        ([NoNumber("level")], "evaluate: got ValueError of the metric level: could not convert string"),
    ],
)
def test_what_is_no_metric_and_what_fails_is_reported(metrics, told):
    with pytest.raises(TrainerError, match=f"^{told}"):
        mgpu.evaluate(make_net([mx.cpu(0), mx.cpu(1)]), make_batches([4, 3]), metrics)


def test_sums_by_hand_take_functions_alone():
    with pytest.raises(
        TrainerError, match=r"^MetricSums: got f1=an object of type .*F1; expected a function. Pass metric objects"
    ):
        mgpu.loop.MetricSums([metric.F1()])
