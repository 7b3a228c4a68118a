"""Sums over devices: values, balance, and that they run while the backward pass does; clipping, the finite check."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.trainer.buckets import Bucket
from gluon_mgpu.trainer.buffers import Buffer
from gluon_mgpu.trainer.reduction import Reduction, all_finite, clip_values, global_norm
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import assert_house_style


def flat_buffer(sizes_by_device, ctx):
    gradients = [mx.nd.array(values, ctx=context) for values, context in zip(sizes_by_device, ctx)]
    return Buffer((0, 1), gradients, gradients, Bucket(gradients, gradients), 0, gradients[0].size)


@pytest.mark.pairwise
@pytest.mark.parametrize("size", [1, 16, 1000, 40000, 300001])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_a_buffer_becomes_its_sum_on_every_device(size, num_devices, kvstore):
    ctx = [mx.cpu(i) for i in range(num_devices)]
    values = np.random.RandomState(0).randn(num_devices, size).astype("float32")
    buffer = flat_buffer(values, ctx)
    Reduction(kvstore, ctx).sum([buffer])
    expected = values[0].copy()
    for other in values[1:]:
        expected += other  # in this order: the bits tell
    for gradient in buffer.gradients:
        if kvstore == "device":
            np.testing.assert_array_equal(gradient.asnumpy(), expected)
        else:
            np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-4, atol=1e-5)


def test_every_device_sums_its_slice():
    ctx = [mx.cpu(i) for i in range(4)]
    reduction = Reduction("device", ctx)
    buffer = flat_buffer(np.ones((4, 200003), "float32"), ctx)
    parts = reduction._divided(buffer)
    keys, slices = [sum(side, []) for side in zip(*parts)]
    sizes = [one[0].size for one in slices]
    assert len(keys) == 4 and sum(sizes) == 200003
    assert max(sizes) - min(sizes) <= 4 * 16  # whole cache lines
    assert [len(one) for one in slices] == [4] * 4


class Doubling:
    """A group whose other process has the same gradients; it notes how often it prepares a sum."""

    def __init__(self):
        self.prepared = 0

    def all_reduce(self, gradients, *, exact=False):
        self.prepared += 1

        def run(priority):
            total = 2 * sum(gradient.asnumpy() for gradient in gradients)
            for gradient in gradients:
                gradient[:] = mx.nd.array(total, ctx=gradient.context)

        return SimpleNamespace(run=run)


def test_sums_over_processes_are_prepared_once(monkeypatch):
    """Each prepared sum takes keys of the store, which are never given back."""
    processes = Doubling()
    monkeypatch.setattr("gluon_mgpu.trainer.reduction.group", lambda: processes)
    ctx = [mx.cpu(0), mx.cpu(1)]
    reduction = Reduction("device", ctx)
    one, two = flat_buffer(np.ones((2, 8), "float32"), ctx), Buffer((3,), [], [mx.nd.ones((2, 3), ctx=c) for c in ctx])
    for number, buffers in enumerate(([one], [two], [one, two], [one]), 1):
        reduction.sum(buffers)
        assert processes.prepared == min(number, 2)
    assert [gradient.asnumpy().tolist() for gradient in one.gradients] == [[4.0**3] * 8] * 2
    sparse = Buffer((4,), [], [mx.nd.sparse.zeros("row_sparse", (5, 2), ctx=c) for c in ctx])
    with pytest.raises(TrainerError, match="a sparse gradient in a job of several processes") as caught:
        reduction.sum([sparse])
    assert_house_style(caught.value)


def test_devices_of_two_kinds_sum_on_the_host():
    assert [Reduction("device", ctx)._name for ctx in ([mx.cpu(0), mx.cpu(1)], [mx.gpu(0), mx.cpu(0)])] == ["device", "local"]


def test_steps_that_use_other_parameters_reuse_the_store():
    ctx = [mx.cpu(0), mx.cpu(1)]
    reduction = Reduction("device", ctx)
    one, two = flat_buffer(np.ones((2, 8), "float32"), ctx), Buffer((3,), [], [mx.nd.ones((2, 3), ctx=c) for c in ctx])
    for buffers in ([one], [two], [one, two], [two], [one]):
        reduction.sum(buffers)
    assert one.gradients[0].asnumpy().tolist() == [8.0] * 8  # doubled three times
    assert two.gradients[1].asnumpy().tolist() == [[8.0] * 3] * 2
    assert sorted(key for keys in reduction._keys.values() for key in keys) == [0, 1]


BACKWARD = {"plain": "ImperativeBulk", "static": "backward"}
OVERLAP = """
import sys
import gluon_mgpu as mgpu
import mxnet as mx
from mxnet.gluon import nn

with mgpu.use_devices("cpu:2") as ctx:
    loss, X, y = mx.gluon.loss.L2Loss(), mx.nd.ones((256, 256)), mx.nd.ones((256, 256))
    runs = []
    for mode in ("plain", "static"):
        net = nn.HybridSequential()
        for _ in range(24):
            net.add(nn.Dense(256, in_units=256))
        net.initialize(ctx=ctx)
        if mode == "static":
            net.hybridize(static_alloc=True, static_shape=True)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01}, bucket_bytes=2**20)
        assert len(trainer._replicas._placement.buffers) == 8
        mgpu.train_batch(net, loss, trainer, X, y)
        runs.append((net, trainer))
    mx.nd.waitall()
    mx.profiler.set_config(profile_imperative=True, profile_symbolic=True, filename=sys.argv[1], aggregate_stats=False)
    mx.profiler.set_state("run")
    for net, trainer in runs:
        mgpu.train_batch(net, loss, trainer, X, y)
        mx.nd.waitall()
        mx.nd.arctanh(mx.nd.zeros((1,)))  # tells the two apart
        mx.nd.waitall()
    mx.profiler.set_state("stop")
    mx.profiler.dump()
"""


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """The engine's own record of a step in each mode.

    MXNet runs some operations of a backward pass as one, by default so many that a small network has no time in between.
    """
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    environment = {**os.environ, "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD": "2", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", OVERLAP, str(trace)], env=environment, check=True, timeout=240)
    found = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "operator"]
    between = min(event["ts"] for event in found if event["name"] == "arctanh")
    return {
        "plain": [event for event in found if event["ts"] < between],
        "static": [event for event in found if event["ts"] > between],
    }


@pytest.mark.parametrize("mode", ["plain", "static"])
def test_sums_run_while_the_backward_pass_does(events, mode):
    """The first sum begins before the last operation of the backward pass ends."""
    names = sorted({event["name"] for event in events[mode]})
    sums = [event["ts"] for event in events[mode] if event["ph"] == "B" and event["name"] == "ElementwiseSum"]
    backward = [event["ts"] for event in events[mode] if event["ph"] == "E" and BACKWARD[mode] in event["name"]]
    assert len(sums) == 16 and len(backward) > 16, names  # two slices of eight buckets
    assert min(sums) < max(backward)


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_the_finite_check_reads_every_buffer(bad):
    gradients = [mx.nd.ones((10000,)), mx.nd.ones((3, 4)), mx.nd.ones((7,), dtype="float16")]
    if bad is not None:
        gradients[1][2, 3] = bad
    flag = all_finite(gradients)
    assert flag.shape == (1,) and bool(flag.asscalar()) is (bad is None)


def test_the_finite_check_takes_many_arrays():
    gradients = [mx.nd.ones((2,)) for _ in range(500)]
    assert all_finite(gradients).asscalar() == 1.0
    gradients[499][1] = np.inf
    assert all_finite(gradients).asscalar() == 0.0


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_clipping_over_buckets_is_clipping_over_parameters(num_devices):
    """The norm of the averaged gradient, over all parameters, whatever bucket they lie in: against NumPy."""
    ctx = [mx.cpu(i) for i in range(num_devices)]
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 3, in_channels=1), nn.Flatten(), nn.Dense(4, in_units=8), nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    params = list(net.collect_params().values())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0}, clip_norm=0.05, bucket_bytes=64)
    before = [param.data(ctx[0]).asnumpy() for param in params]
    X = np.random.RandomState(0).randn(2 * num_devices, 1, 4, 4).astype("float32")
    with autograd.record():
        losses = [net(x).sum(axis=1) for x in mgpu.split_and_load(X, ctx)]
    mgpu.backward(losses)
    local = [[param.grad(context).asnumpy() for context in ctx] for param in params]
    trainer.step(len(X))
    mean = [np.sum(np.float64(one), axis=0) / len(X) for one in local]
    norm = np.sqrt(sum((one**2).sum() for one in mean))
    assert norm > 0.05
    for param, was, gradient in zip(params, before, mean):
        for context in ctx:
            np.testing.assert_allclose(param.data(context).asnumpy(), was - gradient * 0.05 / norm, atol=1e-6)


def test_gluons_loss_scaler_sees_an_overflow_in_any_bucket():
    """mx.contrib.amp's scaler reads the parameters' own gradients, which are views."""
    from mxnet.contrib.amp.loss_scaler import LossScaler

    net = nn.Dense(2, in_units=3)
    net.initialize()
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0})
    trainer._amp_loss_scaler = LossScaler()
    before = net.weight.data().asnumpy()
    with autograd.record():
        loss = net(mx.nd.array([[np.inf, 1, 1]])).sum()
    loss.backward()
    trainer.step(1)
    np.testing.assert_array_equal(net.weight.data().asnumpy(), before)
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(mx.nd.ones((1, 3))), mx.nd.zeros((1, 2)))
    loss.backward()
    trainer.step(1)
    assert (net.weight.data().asnumpy() != before).any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_values_are_cut_and_norms_measured_as_numpy_does(dtype, arrays):
    rng = np.random.RandomState(0)
    values = [rng.randn(5).astype(dtype), rng.randn(2, 3).astype(dtype), np.array([np.nan, np.inf, -np.inf], dtype)]
    gradients = [arrays.array(value, dtype=dtype) for value in values]
    norm = np.sqrt(sum((value.astype("float64") ** 2).sum() for value in values[:2]))
    assert float(global_norm(gradients[:2]).asnumpy()[0]) == pytest.approx(norm, rel=1e-3 if dtype == "float16" else 1e-6)
    clip_values(gradients, 0.5)
    for gradient, value in zip(gradients, values):
        np.testing.assert_array_equal(gradient.asnumpy(), np.clip(value, -0.5, 0.5))
