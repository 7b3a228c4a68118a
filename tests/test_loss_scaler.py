"""LossScaler: which steps are left out, and how the scale goes up and down."""

from dataclasses import replace

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.errors import ModesError, NonFiniteLossError, StateError, TrainerError
from gluon_mgpu.trainer.loss_scaler import LossScaler
from gluon_mgpu.trainer.trainer_state import check_fits, restore, state_of
from mxnet import autograd

from .conftest import small_net

pytestmark = pytest.mark.mxnet1("bf16 and fp16")

INF, NAN = float("inf"), float("nan")


def array(values):
    return (mx.np.array if mx.util.is_np_array() else mx.nd.array)(values)


# gradient, what update returns, the scale and the number of good steps after it
TABLE = [(1.0, 1024.0, 1024.0, 1), (1.0, 1024.0, 1024.0, 2), (1.0, 1024.0, 2048.0, 0), (1.0, 2048.0, 2048.0, 1)]
TABLE += [(INF, None, 1024.0, 0), (NAN, None, 512.0, 0), (-INF, None, 256.0, 0)]
TABLE += [(1.0, 256.0, 256.0, 1), (1.0, 256.0, 256.0, 2), (INF, None, 128.0, 0)]
TABLE += [(3e38, 128.0, 128.0, 1), (0.0, 128.0, 128.0, 2), (1.0, 128.0, 256.0, 0)]


def test_scales_over_good_and_bad_steps(arrays):
    scaler = LossScaler(scale=1024, every=3)
    for step, (value, returned, scale, num_good) in enumerate(TABLE):
        gradients = [array([[1.0, 2.0]]), array([0.5, value, 1.0])]
        assert scaler.update(gradients[:: 1 if step % 2 else -1]) == returned, step
        assert scaler.state() == {"scale": scale, "num_good": num_good}, step


def test_the_scale_has_bounds():
    scaler = LossScaler(scale=2.0**22.5, every=1)
    assert [scaler.update([mx.nd.ones((1,))]) for _ in range(3)] == [2.0**22.5, 2.0**23.5, 2.0**24]
    scaler = LossScaler(scale=3.0)
    assert [scaler.update([mx.nd.array([INF])]) or scaler.scale for _ in range(2)] == [1.5, 1.0]
    with pytest.raises(NonFiniteLossError, match="scale of 1"):
        scaler.update([mx.nd.array([NAN])])


def test_sparse_and_no_gradients():
    sparse = mx.nd.sparse.row_sparse_array(([[1.0, INF]], [3]), shape=(5, 2))
    assert LossScaler().update([mx.nd.ones((2,)), sparse]) is None
    assert LossScaler().update([mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [3]), shape=(5, 2))]) == 65536.0
    assert LossScaler().update([mx.nd.sparse.zeros("row_sparse", (5, 2))]) == 65536.0
    assert LossScaler().update([]) == 65536.0


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
    autograd.backward(scaled)
    for weight, loss, product in zip(weights, losses, scaled):
        assert loss.asnumpy().tolist() == [4.0, 9.0]
        assert product.asnumpy().tolist() == [2048.0, 4608.0]
        assert weight.grad.asnumpy().tolist() == [2048.0, 3072.0]
    assert not autograd.is_recording()


def test_one_pass_has_one_scale():
    trainers = [mgpu.Trainer(small_net([mx.cpu(0)]), "sgd") for _ in range(2)]
    trainers[1].steps.loss_scaler = LossScaler()
    with pytest.raises(ModesError, match="each trainer has a loss scale of its own"):
        mgpu.backward([mx.nd.ones((1,))], trainers)


def test_gradients_that_were_not_scaled_are_refused():
    scaler = LossScaler()
    with pytest.raises(TrainerError, match="a list of MXNet arrays"):
        scaler.scale_losses([1.0])
    with pytest.raises(TrainerError, match="not scaled"):
        scaler.check("Trainer.step")
    scaler.scale_losses([mx.nd.ones((1,))])
    scaler.check("Trainer.step")
    scaler.update([mx.nd.ones((1,))])
    with pytest.raises(TrainerError):
        scaler.check("Trainer.step")


WRONG = [{"scale": scale, "num_good": num_good} for scale, num_good in ((0.0, 0), (NAN, 0), (8.0, 1.5))]


@pytest.mark.parametrize("state", [None, {}, 3, {"scale": 8.0}, *WRONG])
def test_a_wrong_state_is_refused(state):
    scaler = LossScaler(scale=4.0)
    with pytest.raises((TrainerError, TypeError, KeyError)):
        scaler.restore(state)
    assert scaler.state() == {"scale": 4.0, "num_good": 0}


def test_a_scale_is_restored_where_both_have_one(devices):
    trainers = [mgpu.Trainer(small_net(devices), "sgd").steps for _ in range(3)]
    trainers[0].loss_scaler, trainers[1].loss_scaler = LossScaler(8.0), LossScaler()
    states = [state_of(trainer) for trainer in trainers]
    for wrong in ({"scale": -1.0, "num_good": 0}, {"scale": 8.0}, {"scale": 8.0, "num_good": -1}):
        with pytest.raises(StateError):
            check_fits(trainers[0], replace(states[0], loss_scaler=wrong), "a file", "load_states")
    for trainer in trainers:
        restore(trainer, states[2])
    assert [trainers[i].loss_scaler.scale for i in range(2)] == [8.0, 65536.0]
    for trainer in trainers:
        restore(trainer, states[0])
    assert trainers[1].loss_scaler.scale == 8.0 and trainers[2].loss_scaler is None
