"""Sums over devices: values, and that they run while the backward pass does; clipping, the finite check."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.mxnet_internals.c_calls import PushPull
from gluon_mgpu.trainer.clip import clip_values, finite_on_each, global_norm
from gluon_mgpu.trainer.options import check_tree
from gluon_mgpu.trainer.slab import Bucket, Slab
from gluon_mgpu.trainer.sums import make_sum
from mxnet import autograd
from mxnet.gluon import nn

from .versions import nd


def flat_slab(sizes_by_device, ctx):
    gradients = [mx.nd.array(values, ctx=context) for values, context in zip(sizes_by_device, ctx)]
    return Slab((0, 1), tuple(ctx), gradients, gradients, Bucket(gradients, gradients), 0, gradients[0].size)


@pytest.mark.pairwise
@pytest.mark.parametrize("size", [1, 16, 1000, 40000, 300001])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_a_slab_becomes_its_sum_on_every_device(size, num_devices, kvstore):
    ctx = [mx.cpu(i) for i in range(num_devices)]
    values = np.random.RandomState(0).randn(num_devices, size).astype("float32")
    slab = flat_slab(values, ctx)
    make_sum(kvstore).run([slab])
    expected = values[0].copy()
    for other in values[1:]:
        expected += other  # in this order: the bits tell
    for gradient in slab.gradients:
        if kvstore == "device":
            np.testing.assert_array_equal(gradient.asnumpy(), expected)
        else:
            np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def nccl(monkeypatch):
    """Stores that have buffers only for the keys of their first sum, as NCCL's do. Yields those that were made."""
    stores, own, run = [], mx.kv.create, PushPull.run

    def create(name):
        store = own("device")
        store.keys, store.buffers, init = [], None, store.init
        store.init = lambda key, value: (store.keys.append(key), init(key, value))
        if name == "nccl":
            stores.append(store)
        return store

    def checked(call):
        store, key = call._kept[0], call._arguments[2][0]
        store.buffers = store.buffers or list(store.keys)
        assert key in store.buffers or store not in stores, "Check failed: !is_none()"
        run(call)

    monkeypatch.setattr(mx.kv, "create", create)
    monkeypatch.setattr(PushPull, "run", checked)
    return stores


def test_slabs_that_nccl_has_not_seen_get_another_store(nccl):
    """`find_unused_parameters` and `ignore_stale_grad` sum other slabs in later steps: "Check failed: !is_none()"."""
    ctx, total = [mx.cpu(0), mx.cpu(1)], make_sum("nccl")
    slabs = [replace(flat_slab([[i, 1.0], [2.0, 3.0]], ctx), indices=(i,)) for i in range(3)]
    for some in ([0], [0, 1], [2, 0], [1, 2], [0]):
        chosen = [slabs[number] for number in some]
        before = [sum(gradient.asnumpy() for gradient in slab.gradients) for slab in chosen]
        total.run(chosen)
        for slab, expected in zip(chosen, before):
            for gradient in slab.gradients:
                np.testing.assert_array_equal(gradient.asnumpy(), expected)
    assert len(nccl) == 3 and nccl[-1].buffers == [0, 1, 2]  # none for sets of slabs that are known


def test_a_trainer_with_nccl_trains_layers_that_a_later_batch_reaches(nccl):
    def trained(kvstore):
        nets = [nn.Dense(3, in_units=2), nn.Dense(4, in_units=3)]
        net = nn.HybridSequential()
        net.add(*nets)
        net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
        options = {"kvstore": kvstore, "find_unused_parameters": True, "bucket_bytes": 1, "shard_optimizer": False}
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, **options)
        for used in (nets[:1], nets, nets[:1]):
            with autograd.record():
                outputs = [mx.nd.ones((2, 2), ctx=context) for context in net[0].weight.list_ctx()]
                for layer in used:
                    outputs = [layer(one) for one in outputs]
                losses = [output.sum(axis=1) for output in outputs]
            trainer.backward(losses)
            trainer.step(4)
        return np.concatenate([param.data(mx.cpu(1)).asnumpy().ravel() for param in net.collect_params().values()])

    np.testing.assert_array_equal(trained("nccl"), trained("device"))
    assert len(nccl) == 2


@pytest.mark.parametrize("value", ["1", "0", "", None])
def test_sums_by_mxnets_trees_are_refused_on_gpus(monkeypatch, value):
    """They copy a sum to outputs of all devices, and a sum for the parameter's owner has one."""
    monkeypatch.delenv("MXNET_KVSTORE_USETREE", raising=False)
    if value is not None:
        monkeypatch.setenv("MXNET_KVSTORE_USETREE", value)
    check_tree([mx.cpu(0), mx.cpu(1)])
    refused = pytest.raises(TrainerError, match="got MXNET_KVSTORE_USETREE=1; expected 0 or none")
    with refused if value == "1" else nullcontext():
        check_tree([mx.gpu(0), mx.gpu(1)])


BACKWARD = {"plain": "ImperativeBulk", "static": "backward"}
OVERLAP = """
import sys
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet.gluon import nn

with mgpu.use_devices("cpu*2") as ctx:
    loss, X, y = mx.gluon.loss.L2Loss(), *np.ones((2, 256, 256), "float32")
    runs = []
    for mode in ("plain", "static"):
        net = nn.HybridSequential()
        for _ in range(24):
            net.add(nn.Dense(256, in_units=256))
        net.initialize(ctx=ctx)
        if mode == "static":
            net.hybridize(static_alloc=True, static_shape=True)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01}, bucket_bytes=2**20)
        assert len(trainer.steps.layout.slabs) == 8
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


def events_of_steps(trace):
    """The engine's own record of a step in each mode.

    MXNet runs some operations of a backward pass as one, by default so many that a small network has no time in between.
    """
    environment = {**os.environ, "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD": "2", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", OVERLAP, str(trace)], env=environment, check=True, timeout=240)
    found = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "operator"]
    between = min(event["ts"] for event in found if event["name"] == "arctanh")
    return {
        "plain": [event for event in found if event["ts"] < between],
        "static": [event for event in found if event["ts"] > between],
    }


def overlaps(events, backward):
    """Whether the first sum began before the last operation of the backward pass ended."""
    sums = [event["ts"] for event in events if event["ph"] == "B" and event["name"] == "ElementwiseSum"]
    ends = [event["ts"] for event in events if event["ph"] == "E" and backward in event["name"]]
    assert len(sums) == 8 and len(ends) > 16  # eight buckets
    return min(sums) < max(ends)


def test_sums_run_while_the_backward_pass_does(tmp_path):
    """Once in five runs is enough: on a busy machine, the thread that sums may have to wait for its turn."""
    missing = set(BACKWARD)
    for number in range(5):
        events = events_of_steps(tmp_path / str(number))
        missing = {mode for mode in missing if not overlaps(events[mode], BACKWARD[mode])}
        if not missing:
            break
    assert not missing


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_the_finite_check_reads_every_slab(bad):
    gradients = [mx.nd.ones((10000,)), mx.nd.ones((3, 4)), mx.nd.ones((7,), dtype="float16")]
    if bad is not None:
        gradients[1][2, 3] = bad
    (flag,) = finite_on_each(gradients)
    assert flag.shape == (1,) and bool(flag.asscalar()) is (bad is None)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_clipping_over_buckets_is_clipping_over_parameters(num_devices):
    """The norm of the averaged gradient, over all parameters, whatever bucket they lie in: against NumPy."""
    ctx = [mx.cpu(i) for i in range(num_devices)]
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 3, in_channels=1), nn.Flatten(), nn.Dense(4, in_units=8), nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net(nd.ones((1, 1, 4, 4)))  # MXNet 2 decides the shape of a convolution there
    params = list(net.collect_params().values())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0}, clip_norm=0.05, bucket_bytes=64)
    before = [param.data(ctx[0]).asnumpy() for param in params]
    X = np.random.RandomState(0).randn(2 * num_devices, 1, 4, 4).astype("float32")
    with autograd.record():
        losses = [net(x).sum(axis=1) for x in mgpu.split_and_load(X, ctx)]
    trainer.backward(losses)
    local = [[param.grad(context).asnumpy() for context in ctx] for param in params]
    trainer.step(len(X))
    mean = [np.sum(np.float64(one), axis=0) / len(X) for one in local]
    norm = np.sqrt(sum((one**2).sum() for one in mean))
    assert norm > 0.05
    for param, was, gradient in zip(params, before, mean):
        for context in ctx:
            np.testing.assert_allclose(param.data(context).asnumpy(), was - gradient * 0.05 / norm, atol=1e-6)


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
