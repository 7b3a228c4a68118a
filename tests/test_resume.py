"""Contract: stop anywhere, go on from the checkpoint: the same bits on the same devices, within 1e-5 on another number."""

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from mxnet import gluon

from .conftest import largest_difference, small_batches, small_net, weights_of

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
BATCHES = [7, 12, 3, 12, 1, 9]


def schedule():
    return mx.lr_scheduler.CosineScheduler(max_update=8, base_lr=0.05, final_lr=0.0, warmup_steps=2)


def made(ctx, optimizer, normalize):
    net = small_net(ctx, normalize=normalize)
    params = {"learning_rate": 0.05, "lr_scheduler": schedule()}
    return net, mgpu.Trainer(net, optimizer, {**params, "momentum": 0.9} if optimizer == "sgd" else params)


@pytest.mark.parametrize("stop_after", [1, 3, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "BatchNorm"])
def test_a_run_in_two_parts_is_a_run(arrays, tmp_path, stop_after, optimizer, normalize):
    ctx = [mx.cpu(0), mx.cpu(1)]
    batches = small_batches(BATCHES)
    straight, trainer = made(ctx, optimizer, normalize)
    for i, (X, y) in enumerate(batches):
        mgpu.train_batch(straight, LOSS, trainer, X, y)
        if i + 1 == stop_after:
            mgpu.save_checkpoint(tmp_path / "checkpoint", straight, trainer, {"step": i + 1})
    other_devices = [] if normalize else [[mx.cpu(2)], [mx.cpu(i) for i in range(4)]]
    for devices, bound in [(ctx, 0.0)] + [(devices, 1e-5) for devices in other_devices]:
        mx.random.seed(99)
        net, trainer = made(devices, optimizer, normalize)
        mgpu.eval_batch(net, *batches[0], devices)  # shapes become known
        progress = mgpu.load_checkpoint(tmp_path / "checkpoint", net, trainer)
        for X, y in batches[progress["step"] :]:
            mgpu.train_batch(net, LOSS, trainer, X, y)
        assert mgpu.replica_difference(net) == 0.0
        assert largest_difference(weights_of(net), weights_of(straight)) <= bound


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_of_micro_steps_in_two_parts_is_a_run(tmp_path, optimizer):
    """Nothing of a group of micro-steps is left over for the next."""
    ctx = [mx.cpu(0), mx.cpu(1)]
    batches = small_batches(BATCHES)
    straight, trainer = made(ctx, optimizer, False)
    for i, (X, y) in enumerate(batches):
        mgpu.train_batch(straight, LOSS, trainer, X, y, micro_steps=3)
        if i + 1 == 3:
            mgpu.save_checkpoint(tmp_path / "checkpoint", straight, trainer)
    net, trainer = made(ctx, optimizer, False)
    mgpu.eval_batch(net, *batches[0], ctx)
    mgpu.load_checkpoint(tmp_path / "checkpoint", net, trainer)
    for X, y in batches[3:]:
        mgpu.train_batch(net, LOSS, trainer, X, y, micro_steps=3)
    assert largest_difference(weights_of(net), weights_of(straight)) == 0.0


def test_the_order_of_the_data_goes_on(tmp_path):
    data = small_batches([20])[0]
    whole = mgpu.data.ArrayLoader(*data, batch_size=6, shuffle=True, seed=3)
    epochs = [[y.tolist() for _, y in whole] for _ in range(3)]
    resumed = mgpu.data.ArrayLoader(*data, batch_size=6, shuffle=True, seed=3)
    resumed.epoch = 2
    assert [y.tolist() for _, y in resumed] == epochs[2] != epochs[1]
