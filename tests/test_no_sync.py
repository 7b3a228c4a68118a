"""Contract: a training step calls nothing that waits for a device. Every such call of MXNet's goes through four C functions."""

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.data_parallel import step
from gluon_mgpu.data_parallel.passes import forgetting_graphs
from gluon_mgpu.loop.batch_loop import BatchLoop, EpochOptions
from gluon_mgpu.loop.metric_sums import MetricSums
from gluon_mgpu.trainer.precision import can_compute_bf16
from mxnet.base import _LIB

from .conftest import LOSS, as_array, small_batches, small_net, train
from .versions import nd

WAITING = ("MXNDArraySyncCopyToCPU", "MXNDArrayWaitToRead", "MXNDArrayWaitToWrite", "MXNDArrayWaitAll")


@pytest.fixture
def waits(calls_to):
    """The names of the waiting functions that were called since."""
    return calls_to(_LIB, *WAITING)


def test_the_counter_counts(waits):
    x = nd.ones((2,))
    x.asnumpy(), x.wait_to_read(), mx.nd.waitall(), float(x.sum().asnumpy().item())
    assert waits == [WAITING[0], WAITING[1], WAITING[3], WAITING[0]]


BF16 = pytest.param("bf16", marks=pytest.mark.skipif(not can_compute_bf16(), reason="MXNet cannot compute in it here"))


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", [None, BF16])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("sizes", [[12] * 4, [7, 12, 1, 5]], ids=["even", "uneven and fewer"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_training_step_does_not_wait(devices, arrays, waits, sizes, micro_steps, shards, precision):
    net = small_net(devices, hybridize={}, normalize=True)
    options = {"clip_norm": 1.0, "clip_value": 0.1, "shard_optimizer": shards, "precision": precision}
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, **options)
    batches = small_batches(sizes)
    mgpu.train_batch(net, LOSS, trainer, *batches[0])  # shapes become known, buffers are made
    del waits[:]
    train(net, trainer, batches, micro_steps=micro_steps)
    assert waits == []
    assert float(trainer.grad_norm) > 0
    assert waits == ["MXNDArraySyncCopyToCPU"]


def test_batches_in_flight_are_bounded(devices, waits, monkeypatch):
    """Each keeps its inputs: 24 of them took 0.9 GB of a GPU at 64 images of 3 x 224 x 224."""
    assert [step.most_in_flight([mx.Context(kind, 0), mx.Context(kind, 1)]) for kind in ("gpu", "cpu")] == [4, 24]
    monkeypatch.setattr(step, "most_in_flight", lambda contexts: 4)
    net = small_net(devices)
    trainer, (batch,) = mgpu.Trainer(net, "sgd"), small_batches([6])
    mgpu.train_batch(net, LOSS, trainer, *batch)
    del waits[:]
    for number in range(2, 8):
        mgpu.train_batch(net, LOSS, trainer, *batch)
        assert waits == ["MXNDArrayWaitToRead"] * len(devices) * max(0, number - 4)


def test_class_labels_that_may_still_be_computed_are_not_read(waits):
    """Those of the first batch are. A run reads the others when their batch is computed."""
    net = small_net([mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    batches = [(as_array(X), as_array(y)) for X, y in small_batches([6, 6, 4])]
    train(net, trainer, batches[:1])
    assert "MXNDArraySyncCopyToCPU" in waits
    del waits[:]
    train(net, trainer, batches)
    assert waits == []


def test_an_evaluation_reads_once_a_device(devices, waits):
    """And, on several devices, once whether they hold the same weights."""
    net = small_net(devices)
    batches = small_batches([6] * 2)
    mgpu.evaluate(net, batches, loss=LOSS)
    del waits[:]
    mgpu.evaluate(net, batches, loss=LOSS)
    assert waits == ["MXNDArrayWaitAll"] + ["MXNDArraySyncCopyToCPU"] * (len(devices) + (len(devices) > 1))


def test_an_epoch_waits_only_to_keep_the_queue_short(devices, waits, report_every):
    report_every()
    net = small_net(devices)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    batches = small_batches([6] * 8)
    mgpu.train_batch(net, LOSS, trainer, *batches[0])
    del waits[:]
    options = EpochOptions("fit", max_inflight=3)
    BatchLoop(lambda X, y: mgpu.train_batch(net, LOSS, trainer, X, y), MetricSums([mgpu.accuracy]), options).run(batches)
    assert waits.count("MXNDArraySyncCopyToCPU") == len(devices)  # the report at the end
    assert waits.count("MXNDArrayWaitToRead") == (8 - 3) * len(devices)
    assert waits.count("MXNDArrayWaitAll") == 1  # at the end, so that the last update counts
    assert waits.index("MXNDArrayWaitAll") == (8 - 3) * len(devices)


def test_a_graph_is_forgotten_when_nothing_runs_it(waits, calls_to):
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    net.hybridize()
    waited = calls_to(type(net), "_clear_cached_op", note=lambda *_: list(waits))
    with forgetting_graphs(net):
        net(nd.ones((1, 1)))
    assert waited == [["MXNDArrayWaitAll"]]
