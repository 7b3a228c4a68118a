"""One pass over the data: what is reported, when it stops, and which step and device an error names."""

import math
from contextlib import suppress

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import NonFiniteLossError, StepError
from gluon_mgpu.loop.batch_loop import BatchLoop, EpochOptions
from gluon_mgpu.loop.metric_sums import MetricSums


def run_epoch(data_iter, run_batch, metrics=(), **options):
    return BatchLoop(run_batch, MetricSums(metrics), EpochOptions(**options)).run(data_iter)


def make_batch(X, y):
    """A Batch of one shard: the outputs are X, the losses are X, too."""
    output, label = mx.nd.array(X), mx.nd.array(y)
    return mgpu.data_parallel.Batch([output], [label], [output], len(X))


def pairs(*rows):
    return [(np.array(row, "float32"), np.zeros(len(row), "float32")) for row in rows]


def positive(output, label):
    return (output > 0).sum().reshape((1,)), output.size


def read(items):
    """Items, and how many have been taken."""
    taken = []

    def generator():
        for item in items:
            taken.append(item)
            yield item

    return generator(), taken


def test_the_means_are_over_everything_that_was_seen():
    passed = run_epoch(pairs([1, -1, 3], [5]), make_batch, {"positive": positive}, operation="fit")
    assert passed.means == {"positive": 0.75, "loss": 2.0}
    assert (passed.num_batches, passed.num_examples, passed.stopped) == (2, 4, False)
    assert passed.seconds > 0
    assert passed.examples_per_s == pytest.approx(4 / passed.seconds)


def test_reports_hold_running_means_and_the_last_one_holds_all(report_every):
    report_every(batches=2)
    reports = []
    passed = run_epoch(pairs([1], [2], [3], [4], [10]), make_batch, operation="fit", on_report=reports.append)
    assert [(one.num_batches, one.num_examples, one.means["loss"]) for one in reports] == [(2, 2, 1.5), (4, 4, 2.5), (5, 5, 4.0)]
    assert passed == reports[-1]


def test_it_stops_after_the_batch_that_was_under_way():
    items, taken = read(pairs([1], [2], [3], [4]))
    passed = run_epoch(items, make_batch, operation="fit", stop_signal=lambda: len(taken) == 2)
    assert len(taken) == 2
    assert (passed.num_batches, passed.means["loss"], passed.stopped) == (2, 1.5, True)


def run_rows(X, y):
    """A Batch whose losses are the rows of X, each on a device of its own."""
    losses = [mx.nd.array(row, ctx=mx.cpu(i)) for i, row in enumerate(X)]
    return mgpu.data_parallel.Batch(losses, losses, losses, X.size)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step, shard", [(1, 0), (3, 1), (6, 2)])
def test_a_loss_that_is_not_finite_is_reported_with_its_step_and_device(step, shard, bad, report_every):
    report_every(batches=4)
    losses = np.ones((6, 3, 2))
    losses[step - 1, shard, 1] = bad
    losses[step:] = math.nan  # all that follows is spoilt, too
    with pytest.raises(NonFiniteLossError) as caught:
        run_epoch([(X, X) for X in losses], run_rows, operation="fit", first_step=101, check_finite=True)
    assert str(caught.value).startswith(f"fit: got a loss of {bad} at step {100 + step} on cpu({shard}) (shard {shard});")


def failing(at, num_batches, operation="fit", max_inflight=2):
    """Run a pass in which one batch fails on its device, some time after it was queued: its Cholesky factor does not exist."""
    matrices = [np.eye(2, dtype="float32")[None]] * num_batches
    matrices[at - 1] = -matrices[at - 1]

    def run_batch(X, y):
        output = mx.nd.linalg.potrf(mx.nd.array(X))
        return mgpu.data_parallel.Batch([output], [output], [output], 1)

    try:
        with pytest.raises(StepError) as caught:
            run_epoch([(X, X) for X in matrices], run_batch, operation=operation, max_inflight=max_inflight)
    finally:
        with suppress(mx.MXNetError):
            mx.nd.waitall()
    assert isinstance(caught.value.__cause__, mx.MXNetError)
    return str(caught.value)


@pytest.mark.parametrize("max_inflight", [1, 2, 3])
@pytest.mark.parametrize("at", [1, 3])
def test_the_error_of_a_device_names_its_step(at, max_inflight):
    message = failing(at, 8, max_inflight=max_inflight)
    assert message.startswith(f"fit: got an error of a device around step {at}: ")
    assert "potrf" in message


def test_an_error_of_the_last_update_belongs_to_the_pass():
    """The sums are read before the last update has run: its error came up in whatever happened next."""

    class Fails(mx.optimizer.SGD):
        def update_multi_precision(self, index, weight, grad, state):
            super().update_multi_precision(index, weight, grad, state)
            for array in weight if isinstance(weight, (list, tuple)) else [weight]:
                mx.nd.linalg.potrf(-mx.nd.ones((2, 2), ctx=array.context))

    net = mx.gluon.nn.Dense(2, in_units=2)
    net.initialize()
    trainer = mgpu.Trainer(net, Fails(learning_rate=0.1))
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    data = [(np.ones((2, 2), "float32"), np.zeros(2))]
    with pytest.raises(StepError, match="^fit: got an error of a device around step 1: "):
        run_epoch(data, lambda X, y: mgpu.train_batch(net, loss, trainer, X, y), operation="fit")
    mx.nd.waitall()


@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_error_of_a_metric_that_is_raised_at_once_names_its_step(at):
    def refuses(output, label):
        return mx.nd.concat(output, label, dim=9) if int(output.asscalar()) == at else output.sum(), 1

    with pytest.raises(StepError, match=f"^fit: got an error at step {at}: .*"):
        run_epoch(pairs(*([i] for i in range(1, 6))), make_batch, [refuses], operation="fit")
