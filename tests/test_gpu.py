"""What only GPUs can show; and, so that this code is known to be right, the same on CPU contexts: the rehearsal.

Each test runs twice: `gpu` on gpu(0) and gpu(1), skipped where they are not; `rehearsal` on CPU contexts, everywhere. What it
replaces is in the class `Machine`, and nowhere else. `python scripts/gpu_report.py` runs this file for people with GPUs.
"""

import gc
import importlib
import os

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # Ampere's libraries would round the factors of products to 10 bits

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.monitor.leaks import live_arrays
from gluon_mgpu.trainer.loss_scaler import LossScaler
from mxnet import gluon

from .conftest import LOSS, OPTIMIZERS, gluon_loop, largest_difference, small_batches, small_net, train, weights_of
from .test_no_sync import waits  # noqa: F401

transfer = importlib.import_module("gluon_mgpu.devices.transfer")
BATCHES = {"even": [24] * 10, "uneven": [13, 1, 7, 24, 1, 5, 9, 23, 2, 14]}
SAME_KIND = 1e-5  # the contract's bound, between devices of one kind
OTHER_KIND = 1e-3  # between a GPU and a CPU, whose libraries add in another order


class Machine:
    """The devices of a test: GPUs, or what stands for them."""

    def __init__(self, is_gpu):
        self.is_gpu = is_gpu
        self.there = mgpu.devices.usable_gpus() if is_gpu else [mx.cpu(1), mx.cpu(2)]

    def devices(self, number):
        if len(self.there) < number:
            pytest.skip(f"needs {number} GPUs that MXNet can run on; there is {len(self.there)}")
        return self.there[:number]

    def kvstore(self):
        return "nccl" if self.is_gpu else "device"  # NCCL sums on GPUs only

    def pinned(self, context):
        return mx.cpu_pinned(context.device_id) if self.is_gpu else mx.cpu(7)

    def reduced_trainer(self, net, *optimizer, scale, every):
        """A trainer of fp16; on CPUs, which have none, of float32 with the same scaler, which does not know what it scales."""
        trainer = mgpu.Trainer(net, *optimizer, precision="fp16") if self.is_gpu else mgpu.Trainer(net, *optimizer)
        trainer.steps.loss_scaler = LossScaler(scale, every=every)
        return trainer

    def used_bytes(self, context):
        """Memory in use on a device: as the driver says, or what MXNet's arrays there would take."""
        mx.nd.waitall()
        if self.is_gpu:
            free, total = mx.context.gpu_memory_info(context.device_id)
            return total - free
        gc.collect()
        held = live_arrays().items()
        return sum(n * int(np.prod(shape)) * np.dtype(dtype).itemsize for (at, dtype, shape), n in held if at == str(context))


@pytest.fixture(params=[pytest.param(True, id="gpu", marks=pytest.mark.gpu), pytest.param(False, id="rehearsal")])
def machine(request):
    return Machine(request.param)


def trained(ctx, batches, name="momentum", *, hybridize=None, **options):
    net = small_net(ctx, hybridize=hybridize)
    trainer = mgpu.Trainer(net, *OPTIMIZERS[name], **options)
    train(net, trainer, batches)
    return net, trainer


# What is there


# Transparency


@pytest.mark.pairwise
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("number", [1, 2])
def test_devices_do_not_show_in_the_weights(machine, number, batches, optimizer):
    ctx = machine.devices(number)
    data = small_batches(BATCHES[batches])
    on_one = weights_of(gluon_loop(small_net(ctx[:1]), *OPTIMIZERS[optimizer], data))
    on_cpu = weights_of(gluon_loop(small_net([mx.cpu(0)]), *OPTIMIZERS[optimizer], data))
    assert largest_difference(on_one, on_cpu) <= OTHER_KIND
    for hybridize in (None, {"static_alloc": True, "static_shape": True}):
        net, _ = trained(ctx, data, optimizer, hybridize=hybridize)
        assert mgpu.replica_difference(net) == 0.0
        assert largest_difference(weights_of(net), on_one) <= SAME_KIND


# Reduction


def test_the_trainer_reduces_with_nccl(machine):
    ctx = machine.devices(2)
    batches = small_batches(BATCHES["uneven"])
    net, _ = trained(ctx, batches, kvstore=machine.kvstore())
    assert mgpu.replica_difference(net) == 0.0
    expected = weights_of(gluon_loop(small_net(ctx[:1]), *OPTIMIZERS["momentum"], batches))
    assert largest_difference(weights_of(net), expected) <= SAME_KIND


# Transfer


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "uint8"])
def test_what_is_copied_is_the_same(machine, dtype):
    (first,) = machine.devices(1)
    numbers = np.random.RandomState(0).randint(0, 200, (129, 65)).astype(dtype)
    there = mgpu.copyto({"a": [mx.nd.array(numbers, ctx=mx.cpu(), dtype=dtype)]}, first)
    back = mgpu.devices.as_in_context(there, mx.cpu())["a"][0]
    assert (there["a"][0].context, back.context) == (first, mx.cpu())
    assert back.asnumpy().tobytes() == numbers.tobytes()


def test_shards_wait_in_pinned_memory_for_their_copy(machine, monkeypatch):
    ctx = machine.devices(1)
    if not machine.is_gpu:
        monkeypatch.setattr(transfer, "_pinned", machine.pinned)
    assert transfer._pinned(ctx[0]) == machine.pinned(ctx[0])
    data = [np.full((64, 32), i, "float32") for i in range(6)]
    for i, (Xs, _) in enumerate(mgpu.prefetch([(X, np.zeros(64, "int32")) for X in data], ctx)):
        assert Xs[0].context == ctx[0]
        assert set(np.unique(Xs[0].asnumpy())) == {i}


# Stop and go on


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_elsewhere(machine, tmp_path, optimizer):
    """Saved on the devices; loaded there, on one alone, and on the CPU: equal when loaded, and nearly so six steps later."""
    ctx = machine.devices(2)
    batches = small_batches(BATCHES["uneven"])
    straight, trainer = trained(ctx, batches[:4], optimizer)
    mgpu.save_checkpoint(straight, tmp_path / "checkpoint", trainer)
    saved = weights_of(straight)
    train(straight, trainer, batches[4:])
    for devices, bound in [(ctx, SAME_KIND), (ctx[:1], SAME_KIND), ([mx.cpu(0)], OTHER_KIND)]:
        net = small_net(devices)
        trainer = mgpu.Trainer(net, *OPTIMIZERS[optimizer])
        mgpu.eval_batch(net, *batches[0], ctx=devices)  # shapes become known
        mgpu.load_checkpoint(net, tmp_path / "checkpoint", trainer)
        assert largest_difference(weights_of(net), saved) == 0.0
        train(net, trainer, batches[4:])
        assert largest_difference(weights_of(net), weights_of(straight)) <= bound


# Mixed precision


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reduced_precision_trains_and_raises_its_scale(machine, number, optimizer):
    net = small_net(machine.devices(number), hybridize={})
    trainer = machine.reduced_trainer(net, *OPTIMIZERS[optimizer], scale=2.0**10, every=5)
    ((X, y),) = small_batches([24])
    losses = []
    for _ in range(20):
        batch = mgpu.train_batch(net, LOSS, trainer, X, y)
        losses.append(float(np.mean(np.concatenate([loss.asnumpy() for loss in batch.losses]))))
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.steps.loss_scaler.scale == 2.0**14  # 20 good steps, of which each 5 double it
    assert mgpu.replica_difference(net) == 0.0
    assert {np.dtype(param.dtype).name for param in net.collect_params().values()} == {"float32"}


def test_a_step_that_overflows_is_left_out(machine):
    net = small_net(machine.devices(2))
    trainer = machine.reduced_trainer(net, *OPTIMIZERS["momentum"], scale=2.0**10, every=100)
    X, y = small_batches([8])[0]
    mgpu.train_batch(net, LOSS, trainer, X, y)
    before = weights_of(net)
    spoilt = X.copy()
    spoilt[-1] = np.inf  # on the last device only
    mgpu.train_batch(net, LOSS, trainer, spoilt, y)
    assert trainer.steps.loss_scaler.scale == 2.0**9
    assert largest_difference(weights_of(net), before) == 0.0
    mgpu.train_batch(net, LOSS, trainer, X, y)
    assert largest_difference(weights_of(net), before) > 0.0
    assert mgpu.replica_difference(net) == 0.0


# Memory, and waiting


def test_memory_is_balanced_over_the_devices(machine):
    ctx = machine.devices(2)
    before = [machine.used_bytes(context) for context in ctx]
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(2048, in_units=2048), gluon.nn.Dense(2048, in_units=2048), gluon.nn.Dense(3, in_units=2048))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 1e-4})
    for _ in range(3):
        mgpu.train_batch(net, LOSS, trainer, np.ones((64, 2048), "float32"), np.zeros(64, "int32"))
    first, second = (machine.used_bytes(context) - start for context, start in zip(ctx, before))
    weights = sum(int(np.prod(param.shape)) for param in net.collect_params().values()) * 4
    assert min(first, second) >= 4 * weights  # weights, gradients and Adam's two moments
    assert abs(first - second) <= 0.2 * max(first, second)


@pytest.mark.parametrize("number", [1, 2])
def test_a_training_step_does_not_wait(machine, waits, number):  # noqa: F811
    net = small_net(machine.devices(number), hybridize={}, normalize=True)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    batches = small_batches([12, 7, 12, 1])
    mgpu.train_batch(net, LOSS, trainer, *batches[0])
    del waits[:]
    train(net, trainer, batches)
    assert waits == []
    assert float(trainer.grad_norm) > 0
    assert len(waits) == 1
