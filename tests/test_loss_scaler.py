"""LossScaler: which steps are left out, and how the scale goes up and down."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import NonFiniteLossError, StateError, TrainerError
from gluon_mgpu.trainer.loss_scaler import LossScaler
from gluon_mgpu.trainer.reduction import Reduction
from gluon_mgpu.trainer.replicas import Replicas
from mxnet import autograd

from .conftest import assert_house_style, small_net

INF, NAN = float("inf"), float("nan")


def array(values):
    return (mx.np.array if mx.util.is_np_array() else mx.nd.array)(values)


def test_the_defaults_are_those_of_the_field():
    assert LossScaler().state() == {"scale": 65536.0, "num_good": 0}
    scaler = LossScaler()
    for _ in range(1999):
        assert scaler.settle([mx.nd.ones((1,))]) == 65536.0
    assert scaler.scale == 65536.0
    assert scaler.settle([mx.nd.ones((1,))]) == 65536.0  # what these were multiplied by
    assert scaler.scale == 131072.0


TABLE = [  # gradient, what settle returns, the scale and the number of good steps after it
    (1.0, 1024.0, 1024.0, 1),
    (1.0, 1024.0, 1024.0, 2),
    (1.0, 1024.0, 2048.0, 0),
    (1.0, 2048.0, 2048.0, 1),
    (INF, None, 1024.0, 0),
    (NAN, None, 512.0, 0),
    (-INF, None, 256.0, 0),
    (1.0, 256.0, 256.0, 1),
    (1.0, 256.0, 256.0, 2),
    (INF, None, 128.0, 0),
    (3e38, 128.0, 128.0, 1),
    (0.0, 128.0, 128.0, 2),
    (1.0, 128.0, 256.0, 0),
]


def test_scales_over_good_and_bad_steps(arrays):
    scaler = LossScaler(scale=1024, every=3)
    for step, (value, returned, scale, num_good) in enumerate(TABLE):
        gradients = [array([[1.0, 2.0]]), array([0.5, value, 1.0])]
        assert scaler.settle(gradients[:: 1 if step % 2 else -1]) == returned, step
        assert scaler.state() == {"scale": scale, "num_good": num_good}, step


def test_the_scale_has_bounds():
    scaler = LossScaler(scale=2.0**23, factor=4, every=1)
    assert [scaler.settle([mx.nd.ones((1,))]) for _ in range(3)] == [2.0**23, 2.0**24, 2.0**24]
    scaler = LossScaler(scale=3.0, factor=2.0)
    assert [scaler.settle([mx.nd.array([INF])]) or scaler.scale for _ in range(2)] == [1.5, 1.0]
    with pytest.raises(NonFiniteLossError, match="scale of 1") as raised:
        scaler.settle([mx.nd.array([NAN])])
    assert_house_style(raised.value)


@pytest.mark.pairwise
@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_an_overflow_of_any_device_counts(bad, value, kvstore, arrays):
    """In every parameter of each device in turn: in a bucket, and with an array of its own."""
    ctx = [mx.cpu(i) for i in range(3)]
    net = small_net(ctx)
    net(array(np.ones((1, 1, 6, 6), "float32")).as_in_context(ctx[0]))
    replicas, reduction = Replicas(net), Reduction(kvstore, ctx)
    for place, param in enumerate(net.collect_params().values()):
        for is_bad in (False, True):
            with autograd.record():
                losses = [net(array(np.ones((1, 1, 6, 6), "float32")).as_in_context(one)).sum() for one in ctx]
            mgpu.backward(losses)
            if is_bad:
                gradient = param.grad(ctx[bad]).asnumpy()
                gradient.flat[-1] = value
                param.grad(ctx[bad])[:] = array(gradient)
            buffers = replicas.collect(ignore_stale_grad=False)
            reduction.sum(buffers)
            replicas.mark_used(buffers)
            for replica in range(3):  # whichever is asked
                scaler = LossScaler()
                assert scaler.settle([buffer.gradients[replica] for buffer in buffers]) == (None if is_bad else 65536.0), place


@pytest.mark.parametrize("bad", range(3))
def test_gradients_that_were_not_summed_are_looked_at_on_every_device(bad):
    gradients = [mx.nd.ones((2,), ctx=mx.cpu(i)) for i in (0, 1, 2, 0, 1, 2)]
    assert LossScaler().settle(gradients) == 65536.0
    gradients[3 + bad][1] = NAN
    assert LossScaler().settle(gradients) is None


def test_sparse_and_no_gradients():
    sparse = mx.nd.sparse.row_sparse_array(([[1.0, INF]], [3]), shape=(5, 2))
    assert LossScaler().settle([mx.nd.ones((2,)), sparse]) is None
    assert LossScaler().settle([mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [3]), shape=(5, 2))]) == 65536.0
    assert LossScaler().settle([mx.nd.sparse.zeros("row_sparse", (5, 2))]) == 65536.0
    assert LossScaler().settle([]) == 65536.0


@pytest.mark.pairwise
@pytest.mark.parametrize("inside", [True, False])
def test_losses_are_multiplied_within_the_graph(inside, arrays, devices):
    weights = [array([2.0, 3.0]).as_in_context(one) for one in devices]
    for weight in weights:
        weight.attach_grad()
    scaler = LossScaler(scale=512.0)
    with autograd.record():
        losses = [weight * weight for weight in weights]
        scaled = scaler.scale_losses(losses) if inside else losses
    if not inside:
        scaled = scaler.scale_losses(losses)
    mgpu.backward(scaled)
    for weight, loss, product in zip(weights, losses, scaled):
        assert loss.asnumpy().tolist() == [4.0, 9.0]
        assert product.asnumpy().tolist() == [2048.0, 4608.0]
        assert weight.grad.asnumpy().tolist() == [2048.0, 3072.0]
    assert not autograd.is_recording()


def test_gradients_that_were_not_scaled_are_refused():
    scaler = LossScaler()
    with pytest.raises(TrainerError, match="not scaled") as raised:
        scaler.check("Trainer.step")
    assert_house_style(raised.value)
    scaler.scale_losses([mx.nd.ones((1,))])
    scaler.check("Trainer.step")
    scaler.settle([mx.nd.ones((1,))])
    with pytest.raises(TrainerError):
        scaler.check("Trainer.step")


def test_what_is_restored_goes_on():
    scaler, other = LossScaler(scale=64.0, every=3), LossScaler(every=3)
    for value in (1.0, 1.0):
        scaler.settle([mx.nd.array([value])])
    other.restore(scaler.state())
    for value, scale in ((1.0, 128.0), (INF, 64.0), (1.0, 64.0)):
        scaler.settle([mx.nd.array([value])])
        other.settle([mx.nd.array([value])])
        assert other.state() == scaler.state() and other.scale == scale
    shorter = LossScaler(every=2)
    shorter.restore({"scale": 8.0, "num_good": 1000})  # of a scaler that waits longer
    shorter.settle([mx.nd.ones((1,))])
    assert shorter.state() == {"scale": 16.0, "num_good": 0}


@pytest.mark.parametrize(
    "state",
    [None, {}, 3, {"scale": 8.0}, {"scale": 0.0, "num_good": 0}, {"scale": NAN, "num_good": 0}, {"scale": 8.0, "num_good": 1.5}],
)
def test_a_wrong_state_is_refused(state):
    scaler = LossScaler(scale=4.0)
    with pytest.raises(StateError) as raised:
        scaler.restore(state)
    assert_house_style(raised.value)
    assert scaler.state() == {"scale": 4.0, "num_good": 0}


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.5},
        {"scale": 2.0**25},
        {"scale": "1"},
        {"scale": NAN},
        {"factor": 1.0},
        {"factor": True},
        {"every": 0},
        {"every": 2.5},
    ],
)
def test_wrong_numbers_are_refused(options):
    with pytest.raises(TrainerError) as raised:
        LossScaler(**options)
    assert_house_style(raised.value)
