"""Each step moves the running statistics of all devices by the mean of their changes: a device without data does not count."""

from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.models.hybrid_block import new_parameter
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import HYBRIDIZE, largest_difference, sequential
from .versions import nd

LOSS = gluon.loss.L2Loss()
MOMENTUM = 0.9


def normed(num_devices, mode="plain"):
    """A BatchNorm of two channels and a layer after it."""
    layers = nn.BatchNorm(in_channels=2, momentum=MOMENTUM), nn.Dense(1, in_units=2)
    net = sequential(*layers, ctx=[mx.cpu(i) for i in range(num_devices)], hybridize=HYBRIDIZE[mode])
    return net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})


def batch(size, seed=0):
    X = np.random.RandomState(seed).normal(seed + 1.0, 2.0, (size, 2)).astype("float32")
    return X, np.zeros((size, 1), "float32")


def moved(before, X):
    """NumPy's update of (mean, variance) by one shard."""
    return [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip(before, (X.mean(axis=0), X.var(axis=0)))]


INITIAL = [np.zeros(2), np.ones(2)]


def assert_stats(net, expected, atol=1e-5):
    for param, wanted in zip((net[0].running_mean, net[0].running_var), expected):
        for array in param.list_data():
            np.testing.assert_allclose(array.asnumpy(), wanted, atol=atol)


def by_train_batch(net, trainer, X, y):
    mgpu.train_batch(net, LOSS, trainer, X, y)


def by_trainer(trainer, losses):
    trainer.backward(losses)


def by_gluon(trainer, losses):
    autograd.backward(losses)


def go_back(net, trainer, X, y, backward=by_trainer):
    Xs, ys = mgpu.split_batch(X, y, trainer.contexts)
    with autograd.record():
        losses = [LOSS(net(x), t) for x, t in zip(Xs, ys)]
    backward(trainer, losses)


def by_backward(net, trainer, X, y, backward=by_trainer):
    go_back(net, trainer, X, y, backward)
    trainer.step(np.array(len(X)))  # as d2l's programs do


def by_autograd(net, trainer, X, y):
    by_backward(net, trainer, X, y, by_gluon)


LOOPS = [by_train_batch, by_backward, by_autograd]


@pytest.mark.pairwise
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("loop", LOOPS)
def test_devices_that_never_get_data_do_not_count(num_devices, loop, arrays):
    """Their 0 and 1 entered the mean: with 2 images a batch, -0.45 became -0.30 on three devices, and -0.23 on four."""
    net, trainer = normed(num_devices)
    expected = INITIAL
    for seed in range(4):
        X, y = batch(2, seed)
        loop(net, trainer, X, y)
        expected = np.mean([moved(expected, X[:1]), moved(expected, X[1:])], axis=0)
        assert_stats(net, expected)


@pytest.mark.parametrize("mode", HYBRIDIZE)
def test_a_device_counts_by_its_examples(mode, arrays):
    net, trainer = normed(2, mode)
    X, y = batch(3)  # 2 and 1
    by_train_batch(net, trainer, X, y)
    one, other = moved(INITIAL, X[:2]), moved(INITIAL, X[2:])
    assert_stats(net, [(2 * a + b) / 3 for a, b in zip(one, other)])


@pytest.mark.parametrize("weights", [[1, 0], [0, 1], [3, 1]])
def test_fixed_shares_give_the_statistics_of_one_device_that_weighs_its_shards(weights):
    net, trainer = normed(2)
    data = [batch(8, seed) for seed in range(5)]
    mgpu.fit(
        net, LOSS, trainer, data, data[:1], epochs=2, metrics={}, callbacks=[], split_f=partial(mgpu.split_batch, weights=weights)
    )
    expected, part = INITIAL, 8 * weights[0] // sum(weights)
    for X, _ in data * 2:
        parts = [(len(shard), moved(expected, shard)) for shard in (X[:part], X[part:]) if len(shard)]
        expected = [sum(size * stats[i] for size, stats in parts) / 8 for i in (0, 1)]
    assert_stats(net, expected)


@pytest.mark.mxnet1("compiled passes")
@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("mode", HYBRIDIZE)
def test_compiled_steps_and_accumulated_ones(mode, num_devices, arrays):
    """A static graph writes the statistics without telling the engine: reading them without waiting found older ones."""
    net, trainer = normed(num_devices, mode)
    step, expected = mgpu.compile_step(net, LOSS, trainer), INITIAL

    def train(size, seed):
        X, y = batch(size, seed)
        step(X, y)
        shards = [shard for shard in np.array_split(X, num_devices) if len(shard)]
        found = [moved(expected, shard) for shard in shards]
        return [np.average([one[i] for one in found], axis=0, weights=list(map(len, shards))) for i in (0, 1)]

    for seed in range(20):
        expected = train(6, seed)
    assert_stats(net, expected)
    with trainer.accumulate():  # a device without data in one batch lagged behind
        for size in (6, 2, 1, 4):
            expected = train(size, size)
    trainer.flush()
    assert_stats(net, expected)


def gathered(trainer, losses):
    with autograd.record():
        trainer.backward([mgpu.gather(losses)])


def regularized(trainer, losses):
    with autograd.record():
        trainer.backward([*losses, losses[0].tile(9)])


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize(
    ("backward", "weights"), [(by_trainer, (2, 1)), (by_gluon, (1, 1)), (gathered, (1, 1)), (regularized, (2, 1))]
)
def test_a_pass_that_no_step_used_counts_before_evaluation(backward, weights, drops):
    net, trainer = normed(2)
    X, y = batch(3)
    go_back(net, trainer, X, y, backward)
    if drops:
        trainer.discard()
    mgpu.evaluate(net, [(X, y)], {}, loss=LOSS)
    shards = zip(moved(INITIAL, X[:2]), moved(INITIAL, X[2:]))
    assert_stats(net, [np.average(pair, axis=0, weights=weights) for pair in shards])
    trainer.step(3, ignore_stale_grad=True) if drops else trainer.step(3)
    go_back(net, trainer, X * np.nan, y, backward)
    net[0].running_var.set_data(nd.array([0.1, 0.3]))  # such as those of an earlier checkpoint
    if drops:
        trainer.discard()
    mgpu.evaluate(net, [(X, y)], {}, loss=LOSS)
    assert all((array.asnumpy() == np.float32([0.1, 0.3])).all() for array in net[0].running_var.list_data())


def test_a_pass_that_no_step_used_counts_before_update_bn():
    """By its own examples, not by those of the next batch."""
    net, trainer = normed(2)
    X, y = batch(3)
    go_back(net, trainer, X, y)
    trainer.discard()
    mgpu.update_bn(net, [batch(4, 1)])
    one, other = moved(INITIAL, X[:2]), moved(INITIAL, X[2:])
    skipped = [(2 * a + b) / 3 for a, b in zip(one, other)]
    later = batch(4, 1)[0]
    assert_stats(net, np.mean([moved(skipped, later[:2]), moved(skipped, later[2:])], axis=0))


def test_other_values_without_a_gradient_stay():
    """The mean of the changes of a mask of attention would be NaN."""
    net, _ = normed(2)
    mask = new_parameter(net, "mask", shape=(2,), init=mx.init.Constant(-np.inf), differentiable=False)
    mask.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    by_train_batch(net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.0}), *batch(3))
    assert all((array.asnumpy() == -np.inf).all() for array in mask.list_data())


def test_statistics_of_a_large_mean():
    """E[x^2] - E[x]^2 in float32 is negative from a mean of 10,000 and a deviation of 0.1 on."""
    net, trainer = normed(3)
    rng = np.random.RandomState(0)
    for _ in range(60):
        X = rng.normal(10000.0, 0.1, (30, 2)).astype("float32")
        by_train_batch(net, trainer, X, np.zeros((30, 1), "float32"))
    np.testing.assert_allclose(net[0].running_mean.data(mx.cpu(2)).asnumpy(), 10000 * (1 - MOMENTUM**60), rtol=1e-6)
    expected = MOMENTUM**60 + (1 - MOMENTUM**60) * 0.01
    np.testing.assert_allclose(net[0].running_var.data(mx.cpu(2)).asnumpy(), expected, rtol=0.3)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_checkpoint_holds_what_evaluation_takes_and_a_resumed_run_continues(loop, tmp_path):
    data = [batch(size, seed) for seed, size in enumerate([3, 1, 1, 4, 1])]
    found = []
    for resumes in (False, True):
        net, trainer = normed(2)
        for X, y in data[:3]:
            loop(net, trainer, X, y)
        if resumes:
            mgpu.save_checkpoint(net, tmp_path / "c", trainer)
            alone = normed(1)[0]
            mgpu.load_checkpoint(alone, tmp_path / "c")
            net, trainer = normed(2)
            mgpu.load_checkpoint(net, tmp_path / "c", trainer)
        else:
            saved = [param.data(mx.cpu(1)).asnumpy() for param in (net[0].running_mean, net[0].running_var)]
        for X, y in data[3:]:
            loop(net, trainer, X, y)
        found.append([param.data(mx.cpu(1)).asnumpy() for param in (net[0].running_mean, net[0].running_var)])
    assert largest_difference(*found) == 0.0
    assert_stats(alone, saved, atol=0)


def test_statistics_that_training_leaves_alone_stay(devices):
    """`use_global_stats`, and a network that only predicts."""
    net = sequential(nn.BatchNorm(in_channels=2, use_global_stats=True), nn.Dense(1, in_units=2), ctx=devices)
    net[0].running_mean.set_data(nd.array([0.1, 0.7]))
    by_train_batch(net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), *batch(5))
    gamma = net[0].gamma.data(devices[0]).asnumpy()
    assert_stats(net, [np.array([0.1, 0.7]), np.ones(2)], atol=1e-7)
    np.testing.assert_array_equal(net[0].gamma.data(devices[-1]).asnumpy(), gamma)


@pytest.mark.parametrize("loop", LOOPS)
def test_those_whose_shapes_the_first_batch_decides_move_alike(loop):
    net = sequential(nn.BatchNorm(momentum=MOMENTUM), nn.Dense(1), ctx=[mx.cpu(0), mx.cpu(1)])
    X, y = batch(4)
    loop(net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.0}), X, y)
    assert_stats(net, np.mean([moved(INITIAL, X[:2]), moved(INITIAL, X[2:])], axis=0))


def test_those_of_layers_that_are_not_trained_move_alike():
    net, _ = normed(2)
    trainer, (X, y) = mgpu.Trainer(net[1].collect_params(), "sgd", {"learning_rate": 0.0}), batch(5)
    mgpu.train_batch(net, LOSS, trainer, X, y)
    means = [(3 * one + 2 * other) / 5 for one, other in zip(moved(INITIAL, X[:3]), moved(INITIAL, X[3:]))]
    assert_stats(net, means)


@pytest.mark.mxnet1("export")
@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_those_of_a_symbol_block_move_alike(tmp_path):
    """As in GluonCV's SSD. Gluon marks them as frozen weights."""
    net, _ = normed(1)
    mgpu.export(net, tmp_path / "net", batch(2)[0])
    params, symbol = sorted(str(path) for path in tmp_path.iterdir())
    loaded = gluon.SymbolBlock.imports(symbol, ["data"], params, ctx=[mx.cpu(0), mx.cpu(1)])
    trainer, (X, y) = mgpu.Trainer(loaded.collect_params(), "sgd", {"learning_rate": 0.0}), batch(5)
    mgpu.train_batch(loaded, LOSS, trainer, X, y)
    means = [(3 * one + 2 * other) / 5 for one, other in zip(moved(INITIAL, X[:3]), moved(INITIAL, X[3:]))]
    found = {name.rsplit("_", 1)[1]: param for name, param in loaded.collect_params().items() if "running" in name}
    for name, wanted in zip(("mean", "var"), means):
        for array in found[name].list_data():
            np.testing.assert_allclose(array.asnumpy(), wanted, atol=1e-5)


def test_a_pass_counts_for_all_networks_that_it_reaches():
    """Each by its own trainer, in any order; a network that it does not reach counts it not."""
    nets, trainers = zip(*[normed(2) for _ in range(3)])
    X, y = batch(3)
    for parts, own, sizes in ((nets[:2], trainers[:2], 3), (nets[2:], trainers[2:], 1)):
        Xs, ys = mgpu.split_batch(X[:sizes], y[:sizes], trainers[0].contexts)
        with autograd.record():
            losses = [LOSS(sum(net(x) for net in parts), label) for x, label in zip(Xs, ys)]
        mgpu.backward(losses, own)
    for trainer in trainers:
        trainer.step(3)
    whole = [(2 * first + second) / 3 for first, second in zip(moved(INITIAL, X[:2]), moved(INITIAL, X[2:]))]
    for net, expected in zip(nets, (whole, whole, moved(INITIAL, X[:1]))):
        for param, values in zip((net[0].running_mean, net[0].running_var), expected):
            for array in param.list_data():
                np.testing.assert_allclose(array.asnumpy(), values, rtol=1e-5, atol=1e-6)


def test_trainers_of_one_network_count_for_each_other():
    net, first = normed(2)
    second = mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})
    expected = INITIAL
    for trainer, size in [(first, 3), (second, 1), (first, 2), (second, 3)]:
        X, y = batch(size, size)
        by_backward(net, trainer, X, y)
        shards = [X[: (size + 1) // 2], X[(size + 1) // 2 :]]
        moves = [moved(expected, shard) for shard in shards if len(shard)]
        weights = [len(shard) for shard in shards if len(shard)]
        expected = [np.average(values, axis=0, weights=weights) for values in zip(*moves)]
        assert_stats(net, expected)


@pytest.mark.parametrize("between", ["another trainer", "virtual shards", "a restored trainer"])
def test_examples_count_once_whoever_owns_the_statistics(between, tmp_path):
    net, first = normed(2)
    first.save_states(str(tmp_path / "states"))
    if between == "virtual shards":
        by_train_batch(net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.0}, virtual_shards=2), *batch(1))
    if between == "a restored trainer":
        other = mgpu.Trainer(net, "sgd")
        go_back(net, first, *batch(1))
        first.load_states(str(tmp_path / "states"))
        assert other.params == first.params
    for param, value in zip((net[0].running_mean, net[0].running_var), INITIAL):
        param.set_data(nd.array(value))
    X, y = batch(3, 1)
    go_back(net, first, X, y)
    if between == "another trainer":
        mgpu.Trainer(net, "sgd")
    first.step(3)
    assert_stats(net, [(2 * one + two) / 3 for one, two in zip(moved(INITIAL, X[:2]), moved(INITIAL, X[2:]))])


def test_a_step_counts_for_statistics_that_a_trainer_of_other_layers_owns():
    (net, _), (other, _), (X, y) = normed(2), normed(2), batch(3)
    head = mgpu.Trainer([net[0].gamma, net[0].beta, *net[1].collect_params().values()], "sgd", {"learning_rate": 0.0})
    owner = mgpu.Trainer([*other.collect_params().values(), net[0].running_mean, net[0].running_var], "sgd")
    by_train_batch(net, head, X, y)
    assert owner.contexts == head.contexts
    assert_stats(net, [(2 * one + two) / 3 for one, two in zip(moved(INITIAL, X[:2]), moved(INITIAL, X[2:]))])


def test_a_later_trainer_of_a_part_of_the_network(monkeypatch):
    """Values that a pass has moved are nowhere taken for the common ones: processes would differ."""
    parts, (X, y) = [normed(2)[0] for _ in range(2)], batch(3)
    whole = mgpu.Trainer([param for part in parts for param in part.collect_params().values()], "sgd", {"learning_rate": 0.0})
    later = mgpu.Trainer(parts[1], "sgd")
    monkeypatch.delattr("gluon_mgpu.trainer.running_stats.RunningStats.begin")
    by_backward(lambda x: parts[0](x) + parts[1](x), whole, X, y)
    assert later.contexts == whole.contexts
    for part in parts:
        assert_stats(part, [(2 * one + two) / 3 for one, two in zip(moved(INITIAL, X[:2]), moved(INITIAL, X[2:]))])
