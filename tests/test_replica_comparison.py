"""Whatever uses or saves a network whose devices hold other values says so."""

import logging

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import ReplicaError
from gluon_mgpu.trainer.replica_check import ReplicaComparison
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .test_checkpoint import BFLOAT16

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
X, Y = np.random.RandomState(0).normal(3, 2, (6, 4)).astype("float32") * np.arange(1, 7)[:, None], np.arange(6) % 3

USES = {
    "evaluate": lambda net, folder: mgpu.evaluate_accuracy_gpus(net, [(X, Y)]),
    "evaluate for a loss": lambda net, folder: mgpu.evaluate(net, [(X, Y)], loss=LOSS),
    "predict": lambda net, folder: mgpu.predict(net, [X]),
    "save_checkpoint": lambda net, folder: mgpu.save_checkpoint(net, folder / "c"),
    "save_checkpoint with its trainer": lambda net, folder: mgpu.save_checkpoint(net, folder / "c", mgpu.Trainer(net, "sgd")),
    "export": lambda net, folder: mgpu.export(net, folder / "n.onnx", X),
}
NAMES = [pytest.param(use, marks=pytest.mark.mxnet1("export")) if use == "export" else use for use in USES]


def network():
    net = nn.HybridSequential()
    net.add(nn.Dense(5, in_units=4), nn.BatchNorm(in_channels=5), nn.Dense(3, in_units=5))
    net.initialize(mx.init.Xavier(), ctx=CONTEXTS)
    return net


def step(net, trainer, backward=None):
    Xs, ys = mgpu.split_batch(X.astype("float32"), Y, CONTEXTS)
    with autograd.record():
        losses = [LOSS(net(x), y) for x, y in zip(Xs, ys)]
    (backward or trainer.backward)(losses)
    trainer.step(len(X))


@pytest.mark.parametrize(
    "use", [use for use in NAMES if use != "save_checkpoint with its trainer"]
)  # one of the whole network makes them equal
@pytest.mark.parametrize("hybridized", [None, {}, {"static_alloc": True, "static_shape": True}])
def test_a_trainer_of_the_last_layer_leaves_the_statistics_of_others_different(use, hybridized, tmp_path):
    """Devices predicted differently by 0.21, and the file was of one of them."""
    net = network()
    if hybridized is not None:
        net.hybridize(**hybridized)
    trainer = mgpu.Trainer(net[2].collect_params(), "sgd")
    step(net, trainer)
    told = rf"^{use.split()[0]}: got other values of 1\.running_mean on .*broadcast_parameters\(net\)"
    with pytest.raises(ReplicaError, match=told):
        USES[use](net, tmp_path)
    mgpu.broadcast_parameters(net)
    USES[use](net, tmp_path)


@pytest.mark.parametrize("use", NAMES)
def test_values_set_on_one_device(use, tmp_path):
    net = network()
    trainer = mgpu.Trainer(net, "sgd")  # noqa: F841
    net[0].weight.data(CONTEXTS[1])[2, 3] += 1e-6
    with pytest.raises(ReplicaError, match=r"got other values of 0\.weight on"):
        USES[use](net, tmp_path)


def test_a_checkpoint_in_the_background_is_not_written(tmp_path):
    class Sets(mgpu.Callback):
        def on_batch_end(self, state):
            state.net[0].weight.data(CONTEXTS[1])[0, 0] += 1

    net = network()
    saves = mgpu.Checkpoint(tmp_path, every=1, background=True)
    with pytest.raises(ReplicaError):
        mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), [(X, Y)] * 2, epochs=1, callbacks=[Sets(), saves])
    assert not (tmp_path / "last").exists()


def test_a_program_with_gluons_trainer_goes_on(caplog):
    """Gluon leaves each device its own statistics: d2l's programs are evaluated as before, with a warning."""
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    for _ in range(3):  # the first step copies those of the first device
        step(net, trainer, autograd.backward)
    with caplog.at_level(logging.WARNING, "gluon_mgpu"):
        mgpu.evaluate_accuracy_gpus(net, [(X, Y)])
    assert "evaluate: got other values of 1.running_mean" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "bool", BFLOAT16], ids=str)
def test_what_counts_as_different(dtype):
    shapes = {"one": (1,), "table": (3, 2)}
    params = {name: gluon.Parameter(name, shape=shape, dtype=dtype, grad_req="null") for name, shape in shapes.items()}
    for param in params.values():
        param.initialize(mx.init.One(), ctx=CONTEXTS)
    ReplicaComparison("use", params).check()
    if str(dtype).startswith("float"):
        for context in CONTEXTS:
            params["table"].data(context)[:] = float("nan")
        ReplicaComparison("use", params).check()  # NaN is equal to NaN, and nothing else
    params["table"].data(CONTEXTS[1])[2, 1] = 0
    trainer = mgpu.Trainer(network(), "sgd")
    params["table"]._set_trainer(trainer)
    with pytest.raises(ReplicaError, match="other values of table"):
        ReplicaComparison("use", params).check()
