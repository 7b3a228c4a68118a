"""Averages of weights: those that NumPy computes, on any devices, also after a stop; what is evaluated."""

import signal
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.loop.averaged_weights import AveragedWeights
from gluon_mgpu.mxnet_internals.parameters import structural_params
from mxnet.gluon import nn

from .conftest import initialized, mostly_two, sequential, stack
from .test_fit import LOSS, batches_of, make_net, make_trainer, three_clouds
from .versions import HybridBlock, nd, sharing

DATA = batches_of(*three_clouds())  # 4 batches
DECAY = 0.9


def weights(net, context=None):
    params = structural_params(net).items()
    return {name: param.data(context or param.list_ctx()[0]).asnumpy().copy() for name, param in params}


class Weights(mgpu.Callback):
    """Notes the weights after each batch and before each evaluation."""

    def __init__(self):
        self.after_batches, self.tested = [], []

    def on_batch_end(self, state):
        self.after_batches.append(weights(state.net))

    def on_test_begin(self, state):
        self.tested.append(weights(state.net))


def assert_close(one, other, tolerance=1e-6):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=tolerance, err_msg=name)


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(value.tobytes() == other[name].tobytes() for name, value in one.items())


def run(ctx, average, *, epochs=2, net=None, callbacks=(), **options):
    net = net or make_net(ctx)
    notes = Weights()
    history = mgpu.fit(
        net, LOSS, make_trainer(net, momentum=0.9), DATA, DATA, epochs=epochs, callbacks=[average, notes, *callbacks], **options
    )
    return net, notes, history


def test_ema_is_that_of_numpy(devices, arrays):
    average = mgpu.WeightAverage("ema", decay=DECAY)
    net, notes, history = run(devices, average)
    expected = {}
    for n, found in enumerate(notes.after_batches):
        decay = min(DECAY, (1 + n) / (10 + n)) if n else 0.0
        expected = {name: decay * expected.get(name, 0.0) + (1 - decay) * value for name, value in found.items()}
        if n == 3:
            assert_close(notes.tested[0], expected)
    assert_close(weights(net), expected)
    assert average.num_updates == 8 and mgpu.replica_difference(net) == 0.0
    result = mgpu.evaluate(net, DATA, loss=LOSS)
    assert history.rows[-1]["test_loss"] == pytest.approx(result["loss"], abs=1e-6)


@mostly_two
def test_swa_is_the_mean_over_epochs_and_training_keeps_its_weights(devices, tmp_path):
    plain_notes = Weights()
    net = make_net(devices)
    mgpu.fit(net, LOSS, make_trainer(net, momentum=0.9), DATA, DATA, epochs=4, callbacks=[plain_notes])
    averaged, notes, _ = run(devices, mgpu.WeightAverage("swa", start_epoch=2), epochs=4, callbacks=[mgpu.Checkpoint(tmp_path)])
    for plain, found in zip(plain_notes.after_batches, notes.after_batches):
        assert_same(plain, found)  # training has not noticed
    ends = plain_notes.after_batches[3::4]
    assert_same(notes.tested[0], ends[0])  # the first epoch is not averaged
    assert_close(notes.tested[2], {name: (ends[1][name] + ends[2][name]) / 2 for name in ends[0]})
    assert_close(weights(averaged), {name: sum(end[name] for end in ends[1:]) / 3 for name in ends[0]})
    mgpu.load_checkpoint(averaged, tmp_path / "last")
    assert_same(weights(averaged), ends[-1])


def test_it_follows_updates():
    average = mgpu.WeightAverage("ema")
    run([mx.cpu()], average, accumulate_grad_batches=3)
    assert average.num_updates == 4  # after batches 3 and 4 of each epoch


class Press(mgpu.Callback):
    def __init__(self, step):
        self.step = step

    def on_batch_end(self, state):
        if state.step == self.step:
            signal.raise_signal(signal.SIGINT)

    def on_test_begin(self, state):
        if self.step == -state.epoch:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.pairwise
@pytest.mark.parametrize("method", ["ema", "swa"])
@pytest.mark.parametrize("first", [True, False], ids=["before Checkpoint", "after Checkpoint"])
@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.exhaustive) for step in (1, 6, -2)), 4, -1])
def test_a_resumed_run_has_the_same_bits(tmp_path, method, first, step):
    """Stopped after a batch, at the end of an epoch, and in an evaluation."""
    ctx = [mx.cpu(0), mx.cpu(1)]
    expected, _, history = run(ctx, mgpu.WeightAverage(method, decay=DECAY), epochs=3)

    def part(*more):
        average, saves = mgpu.WeightAverage(method, decay=DECAY), mgpu.Checkpoint(tmp_path, monitor=None, every=3)
        callbacks = [average, saves] if first else [saves, average]
        net = make_net(ctx)
        options = {"epochs": 3, "callbacks": [*callbacks, *more], "resume": "auto"}
        return net, mgpu.fit(net, LOSS, make_trainer(net, momentum=0.9), DATA, DATA, **options)

    with pytest.raises(KeyboardInterrupt):
        part(Press(step))
    net, resumed = part()
    assert_same(weights(net), weights(expected))
    assert [row["test_loss"] for row in resumed.rows] == [row["test_loss"] for row in history.rows]


def test_resumed_on_another_number_of_devices(tmp_path):
    expected, _, _ = run([mx.cpu()], mgpu.WeightAverage("ema", decay=DECAY), epochs=3)
    for epochs, k in ((1, 1), (3, 3)):
        saves = mgpu.Checkpoint(tmp_path, monitor=None)
        average = mgpu.WeightAverage("ema", decay=DECAY)
        net, _, _ = run([mx.cpu(i) for i in range(k)], average, epochs=epochs, callbacks=[saves], resume="auto")
    assert_close(weights(net), weights(expected), tolerance=1e-5)
    assert mgpu.replica_difference(net) == 0.0


def test_one_operation_per_device(calls_to):
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = sequential(*[nn.Dense(4, in_units=4) for _ in range(20)], ctx=ctx)
    mgpu.Trainer(net, "sgd")
    average, calls = AveragedWeights(net), calls_to(mx.nd, "multi_sgd_update")
    average.update(0.5)
    assert len(calls) == 2  # 40 parameters


@pytest.mark.each_value
def test_the_average_in_a_checkpoint(tmp_path, devices, arrays):
    """`best` is chosen by the average, and holds it next to the trained weights; tied parameters have several names."""

    def make(ctx):
        net = stack(nn.Dense(2, in_units=2), nn.BatchNorm(in_channels=2))
        net.add(sharing(net[0], nn.Dense, 2, in_units=2), nn.Dense(3, in_units=2))
        mx.random.seed(1)
        net.initialize(mx.init.Xavier(), ctx=ctx)
        return net

    net, saves = make(devices), mgpu.Checkpoint(tmp_path / "run")
    average = mgpu.WeightAverage("ema", decay=DECAY)
    history = mgpu.fit(net, LOSS, make_trainer(net), DATA, DATA, epochs=3, callbacks=[saves, average])
    loaded = make([mx.cpu(0), mx.cpu(1)])
    assert mgpu.load_checkpoint(loaded, tmp_path / "run" / "last", averaged=True)["epoch"] == 3
    assert_same(weights(loaded), {**weights(net), **{k: v for k, v in weights(loaded).items() if "running" in k}})
    mgpu.load_checkpoint(loaded, tmp_path / "run" / "last")
    assert weights(loaded)["0.weight"].tobytes() != weights(net)["0.weight"].tobytes()
    best = mgpu.load_checkpoint(loaded, tmp_path / "run" / "best", averaged=True)
    expected = history.rows[best["epoch"] - 1]["test_loss"]
    assert mgpu.evaluate(loaded, DATA, loss=LOSS)["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(mgpu.errors.StateError, match="expected no trainer"):
        mgpu.load_checkpoint(loaded, tmp_path / "run" / "last", make_trainer(loaded), averaged=True)
    mgpu.save_checkpoint(loaded, tmp_path / "plain", make_trainer(loaded))
    with pytest.raises(mgpu.errors.StateError, match="without averaged weights"):
        mgpu.load_checkpoint(loaded, tmp_path / "plain", averaged=True)


def bn_net(ctx):
    layers = nn.Dense(6, in_units=2), nn.BatchNorm(in_channels=6, momentum=0.5), nn.Dense(3, in_units=6)
    mx.random.seed(3)
    return sequential(*layers, ctx=ctx, init=mx.init.Xavier())


@pytest.mark.each_value
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}])
def test_update_bn_gives_the_moments_of_the_data(devices, arrays, hybridize):
    net = bn_net(devices)
    if hybridize is not None:
        net.hybridize(**hybridize)
    trainer = make_trainer(net)
    X, y = three_clouds(48)
    before = weights(net)
    mgpu.update_bn(net, [(X, y)] * 30)
    after = weights(net)
    hidden = X @ before["0.weight"].T + before["0.bias"]
    shards = np.array_split(hidden, len(devices))
    np.testing.assert_allclose(after["1.running_mean"], hidden.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(after["1.running_var"], np.mean([shard.var(axis=0) for shard in shards], axis=0), atol=1e-5)
    assert_same({k: v for k, v in before.items() if "running" not in k}, {k: v for k, v in after.items() if "running" not in k})
    with pytest.raises(mgpu.errors.StaleGradientError):  # its passes leave no gradient for a step
        trainer.step(1)


def test_update_bn_counts_examples_along_their_axis():
    """It counted the time steps of each shard, as many on both devices: the mean was 4.5."""
    net = initialized(nn.BatchNorm(axis=2, in_channels=1, momentum=0), [mx.cpu(0), mx.cpu(1)])
    X = np.tile(np.array([[0.0], [0.0], [9.0]]), (4, 1, 1))  # time steps, examples, channels
    mgpu.update_bn(net, [(X, X)], split_f=partial(mgpu.split_batch, batch_axis=1))
    assert net.running_mean.data(mx.cpu(0)).asnumpy().item() == 3


def test_update_bn_needs_no_labels():
    net = initialized(nn.BatchNorm(in_channels=1, momentum=0.0), [mx.cpu(0), mx.cpu(1)])
    mgpu.update_bn(net, [(nd.array([[4.0], [8.0], [9.0]]), None)])
    assert [float(mean.asnumpy().item()) for mean in net.running_mean.list_data()] == [7.0, 7.0]


def test_update_bn_rejects_gradients_that_it_would_lose():
    net = bn_net([mx.cpu()])
    trainer = make_trainer(net)
    with trainer.accumulate():
        mgpu.train_batch(net, LOSS, trainer, *DATA[0])
    with pytest.raises(mgpu.errors.TrainerError, match="update_bn: got gradients of 16 examples that were not applied"):
        mgpu.update_bn(net, DATA)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_update_bn_moves_as_training_does(num_devices):
    """Also with fewer examples than devices, and beside an output of whole numbers."""

    class Pair(HybridBlock):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm(in_channels=2)

        def compute(self, F, x):
            y = self.bn(x)
            return y, F.argmax(y, axis=1).astype("int32")

    def mean(how):
        net = initialized(Pair(), [mx.cpu(i) for i in range(num_devices)])
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})
        for X, y in data if how == "train" else ():
            mgpu.train_batch(net, lambda output, label: output[0].sum(axis=1), trainer, X, y)
        if how == "update":
            mgpu.update_bn(net, data)
        return net.bn.running_mean.list_data()[-1].asnumpy()

    rng = np.random.RandomState(0)
    data = [(rng.rand(n, 2).astype("float32") + (3 if n == 1 else 0), np.zeros((n, 2))) for n in (9, 8, 1)]
    np.testing.assert_allclose(mean("update"), mean("train"), rtol=1e-5)


def test_update_bn_that_fails_changes_nothing():
    net = bn_net([mx.cpu(0), mx.cpu(1)])
    mgpu.train_batch(net, LOSS, make_trainer(net), *DATA[0])
    before = [array.asnumpy() for param in net.collect_params().values() for array in param.list_data()]
    with pytest.raises(mgpu.errors.StepError):
        mgpu.update_bn(net, [DATA[0], (DATA[0][0][:, :1], DATA[0][1])])
    after = [array.asnumpy() for param in net.collect_params().values() for array in param.list_data()]
    assert all(np.array_equal(*pair) for pair in zip(before, after))


def test_update_bn_says_what_it_cannot_do():
    for net, data, told in [(bn_net([mx.cpu()]), iter(()), "got no batch"), (nn.BatchNorm(), DATA, "unknown shapes")]:
        net.initialize(force_reinit=True)
        with pytest.raises(mgpu.errors.TrainerError, match=told):
            mgpu.update_bn(net, data)


def test_swa_of_a_network_with_batchnorm_warns(caplog):
    net = bn_net([mx.cpu()])
    mgpu.fit(net, LOSS, make_trainer(net), DATA, epochs=1, callbacks=[mgpu.WeightAverage("swa")])
    assert [record.message for record in caplog.records if "update_bn(net, train_iter)" in record.message]


def test_wrong_options():
    wrong = [({"method": "mean"}, "'ema' or 'swa'|ema"), ({"decay": 1.0}, "decay"), ({"start_epoch": 0}, "start_epoch")]
    for options, expected in wrong:
        with pytest.raises(mgpu.errors.TrainerError, match=expected):
            mgpu.WeightAverage(**options)
    net = make_net([mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.LocalSGD(net, "sgd", every=2)
    with pytest.raises(mgpu.errors.TrainerError, match="got a LocalSGD"):
        mgpu.fit(net, LOSS, trainer, DATA, epochs=1, callbacks=[mgpu.WeightAverage()])
    with pytest.raises(mgpu.errors.TrainerError, match="got WeightAverage and WeightAverage; expected one"):
        mgpu.fit(net, LOSS, make_trainer(net), DATA, epochs=1, callbacks=[mgpu.WeightAverage(), mgpu.WeightAverage("swa")])
