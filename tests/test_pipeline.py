"""Networks divided over devices compute what one device computes, in the order of their schedule."""

import gc
import sys
from collections import Counter
from functools import partial
from itertools import accumulate

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel.graph import trace
from gluon_mgpu.data_parallel.stats_of_parts import StatsOfParts
from gluon_mgpu.errors import DeviceError, StaleGradientError, TrainerError
from gluon_mgpu.mxnet_internals.blocks import children
from gluon_mgpu.mxnet_internals.parameters import is_fresh, structural_params
from gluon_mgpu.pipeline.schedule import COSTS, SCHEDULES, simulate
from gluon_mgpu.pipeline.split import _divide
from gluon_mgpu.pipeline.stage import CutGraph
from gluon_mgpu.runtime.device_threads import in_own_thread
from gluon_mgpu.runtime.profiler import Recording, tasks_of
from gluon_mgpu.trainer.precision import can_compute_bf16
from hypothesis import given
from hypothesis import strategies as st
from mxnet import autograd
from mxnet.gluon import nn

from .conftest import LOSS, gluon_loop, initialized, largest_difference, stack, train
from .test_no_sync import waits as waits

pytestmark = pytest.mark.mxnet1("Pipeline")

SIZES = (14, 14, 9)  # the last batch has fewer examples than the others, and no multiple of the micro-batches


def batches(sizes=SIZES, features=16):
    rng = np.random.RandomState(0)
    return [(rng.randn(n, features).astype("float32"), rng.randint(0, 5, n).astype("int32")) for n in sizes]


def seeded(net, ctx=None):
    mx.random.seed(3)
    net.initialize(mx.init.Xavier(), ctx=ctx or mx.cpu(0))
    return net


def dense(num_layers=4, dropout=0.0):
    net = nn.HybridSequential()
    for _ in range(num_layers):
        net.add(nn.Dense(16, in_units=16, activation="tanh"))
        if dropout:
            net.add(nn.Dropout(dropout))
    net.add(nn.Dense(5, in_units=16))
    return seeded(net)


class Crossing(nn.HybridBlock):
    """A skip connection over all layers, and one weight in two of them."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(16, in_units=16, activation="tanh")
            self.second = nn.Dense(16, in_units=16, activation="tanh")
            self.third = nn.Dense(16, in_units=16, activation="tanh", params=self.first.params)
            self.last = nn.Dense(5, in_units=32)

    def hybrid_forward(self, F, x):
        h = self.first(x)
        concat = F.np.concatenate if mx.util.is_np_array() else F.concat
        both = h + x, self.third(self.second(h))
        return self.last(concat(both, axis=1) if mx.util.is_np_array() else concat(*both, dim=1))


def contexts(num_stages, num_replicas=1):
    found = [[mx.cpu(r * num_stages + s) for s in range(num_stages)] for r in range(num_replicas)]
    return found if num_replicas > 1 else found[0]


def values(net):
    return [param.data(param.list_ctx()[0]).asnumpy() for param in net.collect_params().values()]


def trained(net, optimizer="sgd", data=None, epochs=2, **options):
    """The values after training, and the trainer."""
    params = {"learning_rate": 0.05, "momentum": 0.9} if optimizer == "sgd" else {"learning_rate": 0.003, "epsilon": 1e-5}
    trainer = mgpu.Trainer(net, optimizer, params, **options)
    mgpu.fit(net, LOSS, trainer, data or batches(), epochs=epochs, metrics=(), callbacks=[], compiled="off")
    return values(net), trainer


# Transparency


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_train_what_one_device_trains(num_stages, micro_batches, schedule, recompute, optimizer):
    alone, _ = trained(dense(), optimizer)
    stages = mgpu.split_stages(dense(), num_stages, batches()[0][0], balance="bytes")
    model = mgpu.Pipeline(stages, contexts(num_stages), micro_batches, schedule=schedule, recompute=recompute)
    found, _ = trained(model, optimizer)
    scale = max(np.abs(value).max() for value in alone)
    assert largest_difference(found, alone) <= (0 if micro_batches == 1 else 1e-6 * scale)


@pytest.mark.each_value
@pytest.mark.parametrize("num_stages, micro_batches, replicas, recompute", [(2, 1, 2, False), (5, 4, 1, True), (3, 2, 2, True)])
def test_skip_connections_and_tied_weights(arrays, num_stages, micro_batches, replicas, recompute):
    bounds = {"clip_norm": 0.5, "clip_value": 0.1}
    alone, expected = trained(seeded(Crossing()), **bounds)
    stages = mgpu.split_stages(seeded(Crossing()), num_stages, batches()[0][0], balance="bytes")
    readers = Counter(source for stage in stages for source in stage.sources)
    assert readers[-1, 0] == 2, "the input goes over several stages"
    assert num_stages < 5 or readers[1, 0] == 2, "two stages read the output of another"
    model = mgpu.Pipeline(stages, contexts(num_stages, replicas), micro_batches, recompute=recompute)
    found, trainer = trained(model, **bounds)
    assert largest_difference(found, alone) < 1e-6
    assert float(trainer.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-5)
    tied = next(param for name, param in structural_params(model).items() if name == "first.weight")
    copies = [array.asnumpy() for array in tied.list_data()]
    assert len(copies) >= replicas
    assert all((copy == copies[0]).all() for copy in copies)


def test_replicas_of_several_stages_on_one_device_save_activations():
    """What `recompute` is for where a network fits on one device: it trains like any data-parallel network."""
    alone, _ = trained(seeded(Crossing()))
    stages = mgpu.split_stages(seeded(Crossing()), 3, batches()[0][0], balance="bytes")
    model = mgpu.Pipeline(stages, [[mx.cpu(0)] * 3, [mx.cpu(1)] * 3], recompute=True)
    found, trainer = trained(model)
    assert largest_difference(found, alone) < 1e-6 and trainer.contexts == [mx.cpu(0), mx.cpu(1)]


class Tokens(nn.HybridBlock):
    """A Dense layer, and an Embedding of numbers that are made of the same input: MXNet refuses gradients of them."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first, self.embedding, self.last = nn.Dense(4, in_units=16), nn.Embedding(3, 4), nn.Dense(5, in_units=68)

    def hybrid_forward(self, F, x):
        return self.last(F.concat(self.first(x), F.reshape(self.embedding(F.clip(x, 0, 2)), shape=(0, -1)), dim=1))


def test_tokens_that_a_stage_with_parameters_has_made_get_no_gradients():
    alone, _ = trained(seeded(Tokens()))
    net, X = seeded(Tokens()), mx.nd.array(batches()[0][0])
    mgpu.split_stages(net, 3, X)  # it measures without gradients of tokens
    stages = CutGraph(trace(net, None, X, None)).stages([2], net)
    assert [sorted(param.name.split("_", 1)[1] for param in stage.params()) for stage in stages] == [
        ["dense0_bias", "dense0_weight"],
        ["dense1_bias", "dense1_weight", "embedding0_weight"],
    ]
    found, _ = trained(mgpu.Pipeline(stages, contexts(2), 2))
    assert largest_difference(found, alone) < 1e-6


class Skip(nn.HybridBlock):
    """A skip connection that a stage adds to its result, and a weight that is a sum."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first, self.second, self.third = (nn.Dense(16, in_units=16) for _ in range(3))
            self.last = nn.Dense(5, in_units=16)
            self.one, self.other = (self.params.get(name, shape=(1, 16)) for name in ("one", "other"))

    def hybrid_forward(self, F, x, one, other):
        scale = one + other
        f = self.first(x)
        h = F.tanh(self.third(F.relu(self.second(f)))) + f + x
        return self.last(F.broadcast_mul(scale, h))


def cut_everywhere(make):
    """Yield equal networks with their graph in three stages, cut at all neighbouring places."""
    X = mx.nd.array(batches()[0][0])
    cut = CutGraph(trace(make(), None, X, None))
    places = [place for place in range(1, len(cut.operators)) if cut.is_after_data(place)]
    assert len(places) > 3
    for before, after in zip(places, places[1:]):
        net = make()
        yield net, CutGraph(trace(net, None, X, None)).stages([before, after], net)


def trained_by_steps(model, data):
    train(model, mgpu.Trainer(model, "sgd", {"learning_rate": 0.1}), data, ignore_stale_grad=True)
    return values(model)


@pytest.mark.parametrize("micro_batches, recompute", [(1, False), (3, False), (2, True)])
def test_no_gradient_is_lost_wherever_a_graph_is_cut(micro_batches, recompute):
    """MXNet replaces a variable's gradient array where its gradient is that of an output."""
    expected = values(gluon_loop(seeded(Skip()), "sgd", {"learning_rate": 0.1}, batches()))
    for _, stages in cut_everywhere(lambda: seeded(Skip())):
        model = mgpu.Pipeline(stages, contexts(3), micro_batches, recompute=recompute)
        assert largest_difference(trained_by_steps(model, batches()), expected) < 1e-5, model


class Both(nn.Block):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Dense(16, in_units=16), nn.Dense(16, in_units=16)

    def forward(self, x):
        return self.one(x), self.other(x)


class Hybrid(nn.HybridBlock):
    def hybrid_forward(self, F, h, g):
        return F.tanh(h), g


def test_a_tied_weight_of_one_device_is_thawed():
    """Two of its stages add to its gradient, from then on."""
    tied, found = nn.Dense(16, in_units=16, use_bias=False), []
    stages = [tied, nn.Dense(16, in_units=16), nn.Dense(16, in_units=16, use_bias=False, params=tied.params)]
    model = initialized(mgpu.Pipeline(stages, [mx.cpu(0), mx.cpu(1), mx.cpu(0)]), init=mx.init.One())
    trainer = mgpu.Trainer(model, "sgd", {"learning_rate": 0.0})
    for grad_req in ("write", "null", "write"):
        tied.weight.grad_req = grad_req
        mgpu.train_batch(model, LOSS, trainer, *batches()[0])
        if grad_req == "write":
            found.append(tied.weight.grad(mx.cpu(0)).asnumpy())
    assert found[0].any() and (found[0] == found[1]).all()


def test_a_hybridized_stage_that_returns_its_input_is_refused():
    """MXNet cannot differentiate through it, or loses its gradient."""
    blocks = [seeded(Both()), Hybrid(), Joined()]
    blocks[2].initialize()
    blocks[1].hybridize()
    model = mgpu.Pipeline(blocks, contexts(3))
    trainer = mgpu.Trainer(model, "sgd")
    with pytest.raises(TrainerError):
        mgpu.train_batch(model, LOSS, trainer, *batches()[0])
    blocks[1].hybridize(False)
    mgpu.train_batch(model, LOSS, trainer, *batches()[0])


class Two(nn.Block):
    """The gradient of one of its outputs leads to frozen layers alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.fixed = nn.Dense(16, in_units=16), nn.Dense(16, in_units=16)
        self.fixed.collect_params().setattr("grad_req", "null")

    def forward(self, x):
        fixed = self.fixed(x)  # before x is an input of what trains
        return self.layer(x), fixed


class Three(Two):
    def forward(self, h, x):
        return mx.nd.tanh(self.layer(h)), x


class Joined(nn.Block):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(5, in_units=32)

    def forward(self, h, x):
        return self.layer(mx.nd.concat(h, x, dim=1))


@pytest.mark.each_value
@pytest.mark.parametrize("devices", [(0, 1, 2), (0, 1, 0)], ids=["own", "shared"])
@pytest.mark.parametrize("frozen", [(), (1,), (0, 1), pytest.param((0,), marks=pytest.mark.exhaustive)], ids=str)
def test_blocks_with_tuples_and_frozen_stages(frozen, devices):
    def stages():
        blocks = [seeded(kind()) for kind in (Two, Three, Joined)]
        for i in frozen:
            blocks[i].collect_params().setattr("grad_req", "null")
        return blocks

    alone, _ = trained(mgpu.Pipeline(stages(), [mx.cpu(0)] * 3))
    before = [value for block in stages() for value in values(block)]
    found, _ = trained(mgpu.Pipeline(stages(), [mx.cpu(i) for i in devices], 4))
    assert largest_difference(found, alone) < 1e-6
    moved = [not (one == other).all() for one, other in zip(found, before)]
    assert moved == [param.grad_req != "null" for block in stages() for param in block.collect_params().values()]


class TakesOneTuple(nn.HybridBlock):
    """Or two arrays, so that a trial with two would decide the form of its graph."""

    def hybrid_forward(self, F, x, *more):
        x, y = (x, *more) if more else x
        return x + 2 * y


def test_a_hybridized_first_stage_takes_the_input_as_it_comes():
    first = TakesOneTuple()
    first.hybridize()
    model = initialized(mgpu.Pipeline([first, nn.Dense(5, in_units=16)], contexts(2), 2))
    X, y = batches()[0]
    assert len(mgpu.train_batch(model, LOSS, mgpu.Trainer(model, "sgd"), (X, X), y).losses) > 0


class Asking(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return x * 1 if autograd.is_training() else F.softmax(10 * x)


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("kind", [nn.Sequential, nn.HybridSequential, type("Network", (nn.HybridSequential,), {})])
def test_python_that_asks_for_training_is_traced_for_training(hybridized, kind):
    def build():
        net = kind()
        net.add(nn.Dense(16, activation="tanh"), nn.Dense(5), Asking())
        net.initialize(mx.init.One(), ctx=mx.cpu(0))
        for block in (net, *children(net)) if hybridized else ():
            if isinstance(block, nn.HybridBlock):
                block.hybridize()
        return net

    alone, _ = trained(build())
    for balance in ("bytes", "time"):
        model = mgpu.Pipeline(mgpu.split_stages(build(), 2, batches()[0][0], balance=balance), contexts(2))
        assert largest_difference(trained(model)[0], alone) == 0


def test_a_call_in_python_is_no_graph():
    net = type("Scaling", (nn.HybridSequential,), {"__call__": lambda self, x: nn.HybridSequential.__call__(self, x / 2)})()
    net.add(nn.Dense(4, in_units=16), nn.Dense(5, in_units=4))
    with pytest.raises(TrainerError, match="a __call__.. of its own"):
        mgpu.split_stages(seeded(net), 2, batches()[0][0])


def test_dropout_draws_the_same_numbers_in_all_schedules_and_again():
    def losses(schedule, recompute):
        stages = mgpu.split_stages(dense(dropout=0.5), 3, batches()[0][0], balance="bytes")
        model = mgpu.Pipeline(stages, contexts(3), 4, schedule=schedule, recompute=recompute)
        mx.random.seed(7)
        return trained(model)[0]

    expected = losses("1f1b", False)
    assert largest_difference(losses("1f1b", False), expected) == 0
    assert largest_difference(losses("1f1b", True), expected) == 0
    assert largest_difference(losses("gpipe", True), losses("gpipe", False)) == 0
    assert largest_difference(losses("gpipe", False), expected) < 1e-6  # in another order of the sum
    assert largest_difference(trained(dense(dropout=0.5))[0], expected) > 1e-3


def test_the_precision_of_a_pipeline_stays():
    model = mgpu.Pipeline(mgpu.split_stages(dense(), 2, batches()[0][0]), contexts(2), 2)
    mgpu.set_precision(model, "fp32")
    with pytest.raises(TrainerError, match="Pipeline"):
        mgpu.set_precision(model, "bf16")


@pytest.mark.parametrize(
    "make, hybridized", [(dense, False), (dense, True), (lambda: seeded(Crossing()), True)], ids=["layers", "hybridized", "graph"]
)
def test_stages_compute_in_the_precision_of_the_network(make, hybridized):
    if not can_compute_bf16():
        pytest.skip("MXNet cannot compute in bfloat16 on this processor")
    found = []
    for divides in (False, True):
        net = make()
        if hybridized:
            net.hybridize()
        mgpu.set_precision(net, "bf16")
        if divides:
            net = mgpu.Pipeline(mgpu.split_stages(net, 2, batches()[0][0]), contexts(2), 2)
        found.append(trained(net, precision="bf16")[0])
    assert largest_difference(*found) < 0.02
    assert largest_difference(found[1], trained(make())[0]) > 1e-5, "not in float32"


# BatchNorm


def normalized():
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=16, momentum=0.8), nn.Dense(16, in_units=16), nn.BatchNorm(in_channels=16))
    net.add(nn.Dense(5, in_units=16))
    return seeded(net)


def in_parts(net, data, way):
    """The running statistics of the first layer after training on batches in four parts."""
    if way == "virtual shards":
        model, options = net, {"virtual_shards": 4}
        net.collect_params().reset_ctx(contexts(2))
    else:
        stages = mgpu.split_stages(net, 2, data[0][0], balance="bytes")
        model, options = mgpu.Pipeline(stages, contexts(2), 4, recompute=way == "recompute"), {}
    train(model, mgpu.Trainer(model, "sgd", {"learning_rate": 0.01}, **options), data)
    return [stat.data(mx.cpu(0)).asnumpy() for stat in (net[0].running_mean, net[0].running_var)]


@pytest.mark.parametrize("way", ["micro-batches", "recompute", "virtual shards"])
@pytest.mark.parametrize("mean", [0, 10000])
def test_running_statistics_move_by_the_mean_of_the_changes_of_all_parts(mean, way):
    """Squares of values far from zero have no room for a variance in float32: it was negative."""
    data = [((X * 0.1 + mean).astype("float32"), y) for X, y in batches()]
    expected = [np.zeros(16), np.ones(16)]
    for X, _ in data:
        parts = [part.astype("float64") for part in np.array_split(X, 4)]
        means = [sum(len(part) * value for part, value in zip(parts, values)) / len(X) for values in moments(parts)]
        expected = [0.8 * old + 0.2 * new for old, new in zip(expected, means)]
    found = in_parts(normalized(), data, way)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5 if mean == 0 else 2e-2)


def test_statistics_are_taken_once_from_each_micro_batch(calls_to):
    taken = calls_to(StatsOfParts, "take", note=lambda name, self, number: number)
    in_parts(normalized(), batches((8,)), "micro-batches")
    assert taken == [2] * 4 * 2  # of two stages


def moments(parts):
    return [part.mean(axis=0) for part in parts], [part.var(axis=0) for part in parts]


def test_replicas_keep_the_same_statistics_in_a_loop_by_hand_with_autograd():
    """Those of the last stages were not moved alike."""
    net, X = normalized(), batches()[0][0]
    model = mgpu.Pipeline(mgpu.split_stages(net, 2, X[:4], balance="bytes"), contexts(2, 2))
    trainer = mgpu.Trainer(model, "sgd")
    with autograd.record():
        losses = [model(one).square().sum(axis=1) for one in mgpu.split_and_load(X[:8], model.replica_contexts)]
    autograd.backward(losses)
    trainer.step(8)
    for stat in (net[0].running_var, net[2].running_var):
        first, second = stat.list_data()
        assert (first.asnumpy() == second.as_in_context(first.context).asnumpy()).all()


class BehindFrozen(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.frozen, self.other, self.last = nn.Dense(16, in_units=16), nn.Dense(16, in_units=16), nn.Dense(5, in_units=16)
            self.norm = nn.BatchNorm(in_channels=16, center=False, scale=False)
        self.frozen.collect_params().setattr("grad_req", "null")

    def hybrid_forward(self, F, x):
        return self.last(self.norm(self.frozen(x)) + F.tanh(self.other(x)))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_running_statistics_behind_frozen_layers_stay(micro_batches):
    for net, stages in cut_everywhere(lambda: seeded(BehindFrozen())):
        trained_by_steps(mgpu.Pipeline(stages, contexts(3), micro_batches), batches())
        var = net.norm.running_var
        assert (var.data(var.list_ctx()[0]).asnumpy() == 1).all(), stages


class Fixed(nn.HybridBlock):
    """Layers that do not train read one that does and one that does not. An output is ready before the last operators."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.fixed, self.layer, self.last = nn.Dense(16, in_units=16), nn.Dense(16, in_units=16), nn.Dense(5, in_units=16)
        for block in (self.fixed, self.last):
            block.collect_params().setattr("grad_req", "null")

    def hybrid_forward(self, F, x):
        fixed = self.fixed(x)
        return self.last(fixed * F.tanh(self.layer(x))), F.sigmoid(fixed)


def test_frozen_layers_behind_others_and_early_outputs():
    def both(outputs, y):
        return LOSS(outputs[0], y) + (outputs[0] * outputs[1][:, :5]).sum(axis=1)

    def weights_after(model):
        mgpu.fit(model, both, mgpu.Trainer(model, "sgd", {"learning_rate": 0.05}), batches(), epochs=1, metrics=(), callbacks=[])
        return values(model)

    alone, before = weights_after(seeded(Fixed())), values(seeded(Fixed()))
    assert [(one != other).any() for one, other in zip(alone, before)] == [False, False, True, True, False, False]
    for _, stages in cut_everywhere(lambda: seeded(Fixed())):
        assert largest_difference(weights_after(mgpu.Pipeline(stages, contexts(3), 2)), alone) <= 1e-6, stages


def test_a_batch_that_fails_leaves_the_running_statistics():
    class Fails(nn.Block):
        def forward(self, x):
            raise ValueError("this stage fails")

    model = mgpu.Pipeline([normalized(), Fails()], contexts(2), 2)
    before = [value.copy() for value in values(model)]
    trainer = mgpu.Trainer(model, "sgd")
    with pytest.raises(ValueError, match="this stage fails"):
        mgpu.train_batch(model, LOSS, trainer, *batches()[0])
    assert largest_difference(values(model), before) == 0


# The order


def most_held(planned, stage):
    """Of how many micro-batches a stage holds the activations, at most."""
    changes = [1 if task.kind == "F" else -1 for _, task in planned if task.stage == stage]
    return max(accumulate(changes))


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(SCHEDULES), st.data())
def test_every_schedule_runs_each_task_once_after_what_it_needs(num_stages, num_micro_batches, schedule, data):
    sources = [
        sorted({stage - 1, *data.draw(st.sets(st.integers(0, stage - 1), max_size=2))}) if stage else []
        for stage in range(num_stages)
    ]
    devices = [data.draw(st.integers(0, num_stages - 1)) for _ in range(num_stages)]
    planned = simulate(sources, devices, num_micro_batches, schedule)
    at = {(task.kind, task.stage, task.micro_batch): place for place, (_, task) in enumerate(planned)}
    assert len(at) == len(planned) == 2 * num_stages * num_micro_batches
    for (kind, stage, micro_batch), place in at.items():
        if kind == "F":
            assert all(at["F", source, micro_batch] < place for source in sources[stage])
        else:
            assert at["F", stage, micro_batch] < place
            assert all(at["B", other, micro_batch] < place for other in range(num_stages) if stage in sources[other])
    for device in set(devices):
        own = [(begin, begin + COSTS[task.kind]) for begin, task in planned if devices[task.stage] == device]
        assert all(before[1] <= after[0] for before, after in zip(own, own[1:])), "one task at a time"
    for stage in range(num_stages):
        most = num_stages - stage if schedule == "1f1b" else num_micro_batches
        assert most_held(planned, stage) <= most


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages, num_micro_batches", [(2, 8), (4, 4), (4, 16)])
def test_a_schedule_of_equal_stages_takes_the_least_time(num_stages, num_micro_batches, schedule):
    planned = simulate([[s - 1] if s else [] for s in range(num_stages)], list(range(num_stages)), num_micro_batches, schedule)
    assert max(begin + COSTS[task.kind] for begin, task in planned) == 3 * (num_micro_batches + num_stages - 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_devices_run_their_tasks_in_the_planned_order(schedule):
    """A stage whose next inputs are ready would run ahead: here the second one is much slower than the first."""
    net = stack(nn.Dense(16, in_units=16), nn.Dense(2000, in_units=16), nn.Dense(2000, in_units=2000), nn.Dense(5, in_units=2000))
    seeded(net)
    first, second = nn.HybridSequential(), nn.HybridSequential()
    first.add(net[0])
    second.add(*[net[i] for i in (1, 2, 3)])
    model = mgpu.Pipeline([first, second], contexts(2), 6, schedule=schedule)
    trainer = mgpu.Trainer(model, "sgd", {"learning_rate": 0.01})
    data = batches((48,))[0]
    mgpu.train_batch(model, LOSS, trainer, *data)
    recording = Recording()
    try:
        mgpu.train_batch(model, LOSS, trainer, *data)
    finally:
        operations = recording.stop()
    planned = simulate([[], [0]], [0, 1], 6, schedule)
    tasks = tasks_of(operations)
    for device in (0, 1):
        ran = [task for task in tasks if task.device == f"cpu({device})"]
        assert [task.name for task in ran] == [str(task) for _, task in planned if task.stage == device]
        assert all(before.end <= after.begin for before, after in zip(ran, ran[1:]))
    held = 0
    for name in [task.name for task in tasks if task.device == "cpu(0)"]:
        held += 1 if name.startswith("F") else -1
        assert held <= (2 if schedule == "1f1b" else 6)


def test_a_step_does_not_wait(waits):
    model = mgpu.Pipeline(mgpu.split_stages(dense(), 2, batches()[0][0], balance="bytes"), contexts(2), 4)
    trainer = mgpu.Trainer(model, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    mgpu.train_batch(model, LOSS, trainer, *batches()[0])  # the first one finds out whether it draws
    del waits[:]
    train(model, trainer, batches())
    assert waits == []


def test_nothing_is_left_of_a_batch():
    model = mgpu.Pipeline(mgpu.split_stages(dense(), 2, batches()[0][0], balance="bytes"), contexts(2), 4)
    trainer = mgpu.Trainer(model, "sgd", {"learning_rate": 0.01})

    def num_arrays(num_batches):
        for _ in range(num_batches):
            mgpu.train_batch(model, LOSS, trainer, *batches()[0])
        mx.nd.waitall()
        gc.collect()
        return sum(issubclass(type(one), mx.nd.NDArray) for one in gc.get_objects())

    before = num_arrays(30)  # some memory is kept for later batches
    assert num_arrays(10) == before


@pytest.mark.parametrize("num_stages, most", [(2, 4500), (4, 7500)])
def test_a_step_makes_few_python_calls(num_stages, most):
    """There were 6,300 and 11,600."""
    net = dense(8)
    net.hybridize()
    model = mgpu.Pipeline(mgpu.split_stages(net, num_stages, batches()[0][0], balance="bytes"), contexts(num_stages), 4)
    trainer = mgpu.Trainer(model, "sgd", {"learning_rate": 0.01})
    X, y = map(mx.nd.array, batches()[0])
    for _ in range(2):
        mgpu.train_batch(model, LOSS, trainer, X, y)
    calls = Counter()

    def profile(frame, event, arg):
        calls[event] += 1

    def set_everywhere(function):
        for context in contexts(num_stages):
            in_own_thread(context, partial(sys.setprofile, function))
        sys.setprofile(function)

    gc.collect()
    set_everywhere(profile)
    try:
        mgpu.train_batch(model, LOSS, trainer, X, y)
    finally:
        set_everywhere(None)
    assert calls["call"] < most


# Division


def test_layers_are_divided_by_bytes_and_by_time():
    net = nn.HybridSequential()
    inner = stack(nn.Dense(300, in_units=300), nn.Dense(300, in_units=300))
    net.add(nn.Dense(300, in_units=16), inner, nn.Dense(5, in_units=300))
    seeded(net)
    by_bytes = mgpu.split_stages(net, 2, batches()[0][0], balance="bytes")
    assert [len(stage.block) for stage in by_bytes] == [2, 2]  # within the inner container
    for register in (inner.register_forward_hook, inner.register_forward_pre_hook):
        hook = register(lambda *_: None)
        by_bytes = mgpu.split_stages(net, 2, batches()[0][0], balance="bytes")
        assert sum(len(stage.block) for stage in by_bytes) == 3  # the hook is of the whole container
        hook.detach()
    slow = stack(nn.Dense(1500, in_units=16), nn.Dense(1500, in_units=1500), nn.Dense(5, in_units=1500), nn.Dense(5, in_units=5))
    by_time = mgpu.split_stages(seeded(slow), 2, np.zeros((64, 16)))
    assert [len(stage.block) for stage in by_time][1] >= 2  # the large layer alone, or with the one before


def test_measuring_changes_nothing():
    net = stack(nn.Dense(16, in_units=16), nn.BatchNorm(in_channels=16), nn.Dropout(0.5), nn.Dense(5, in_units=16))
    before = [value.copy() for value in values(seeded(net))]
    mx.random.seed(1)
    expected = mx.nd.random.uniform(shape=(4,)).asnumpy()
    mx.random.seed(1)
    mgpu.split_stages(net, 2, batches()[0][0])
    assert (mx.nd.random.uniform(shape=(4,)).asnumpy() == expected).all()
    assert largest_difference(values(net), before) == 0
    assert not any(is_fresh(param.data()) for param in net.collect_params().values() if param.grad_req != "null")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5))
def test_no_other_division_has_a_smaller_largest_part(costs, num_parts):
    if num_parts > len(costs):
        return
    places = _divide(costs, num_parts, [1] * (len(costs) - 1))
    bounds = [0, *places, len(costs)]
    assert all(begin < end for begin, end in zip(bounds, bounds[1:]))
    assert len(bounds) == num_parts + 1

    def best(count, parts):
        if parts == 1:
            return sum(costs[:count])
        return min(max(best(at, parts - 1), sum(costs[at:count])) for at in range(parts - 1, count))

    assert max(sum(costs[begin:end]) for begin, end in zip(bounds, bounds[1:])) == best(len(costs), num_parts)


# What works as for any network


@pytest.mark.parametrize("num_stages", [None, 3])
def test_a_run_resumes_on_other_stages(tmp_path, num_stages):
    def run(stages, epochs, resume=None):
        net = dense()
        if stages is not None:
            net = mgpu.Pipeline(mgpu.split_stages(net, stages, batches()[0][0]), contexts(stages), 4)
        trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.003, "epsilon": 1e-5})
        saving = [mgpu.Checkpoint(tmp_path, "train_loss")]
        mgpu.fit(net, LOSS, trainer, batches(), epochs=epochs, callbacks=saving, resume=resume)
        return values(net)

    expected, _ = trained(dense(), "adam", epochs=3)
    run(2, 1)
    run(3, 2, "auto")
    assert largest_difference(run(num_stages, 3, "auto"), expected) < 2e-6


def test_evaluate_predict_and_a_loop_by_hand(arrays):
    net, data = dense(), batches()
    model = mgpu.Pipeline(mgpu.split_stages(dense(), 2, data[0][0]), contexts(2, 2), 4)
    assert mgpu.evaluate(model, data, loss=LOSS) == pytest.approx(mgpu.evaluate(net, data, loss=LOSS), rel=1e-5)
    outputs = mgpu.predict(model, [X for X, _ in data])
    np.testing.assert_allclose(outputs, mgpu.predict(net, [X for X, _ in data]), rtol=1e-5, atol=1e-6)
    trainers = [mgpu.Trainer(one, "sgd", {"learning_rate": 0.1}) for one in (net, model)]
    for one, trainer in zip((net, model), trainers):
        Xs, ys = mgpu.split_batch(*data[0], trainer.contexts)
        with autograd.record():
            found = [one(X) for X in Xs]
            losses = [LOSS(output, y.as_in_context(output.context)) for output, y in zip(found, ys)]
        trainer.backward(losses)
        trainer.step(len(data[0][0]))
    assert largest_difference(values(net), values(model)) < 1e-6


# What is refused


REFUSED = {
    "no list": lambda: mgpu.Pipeline(dense(), contexts(2)),
    "devices": lambda: mgpu.Pipeline([dense()], contexts(2)),
    "ctx": lambda: mgpu.Pipeline([dense()], "cpu"),
    "twice": lambda: mgpu.Pipeline([dense()], [[mx.cpu(0)], [mx.cpu(0)]]),
    "schedule": lambda: mgpu.Pipeline([dense()], [mx.cpu(0)], 1, schedule="2f2b"),
    "sync": lambda: mgpu.Pipeline([mgpu.set_batch_norm(normalized(), "sync")], [mx.cpu(0)]),
    "sample": lambda: mgpu.split_stages(dense(), 2, np.zeros((3, 7))),
    "layers": lambda: mgpu.split_stages(dense(), 9, np.zeros((3, 16))),
    "python": lambda: mgpu.split_stages(seeded(Two()), 2, np.zeros((3, 16))),
    "ctx again": lambda: mgpu.Pipeline([dense()], [mx.cpu(0)]).initialize(ctx=mx.cpu(1)),
    "nadam": lambda: mgpu.Trainer(mgpu.Pipeline([dense()], [mx.cpu(0)]), "nadam"),
    "local": lambda: mgpu.LocalSGD(mgpu.Pipeline([dense()], [mx.cpu(0)]), "sgd", every=2),
    "compiled": lambda: fitted(compiled="on"),
    "losses": lambda: fitted(lambda output, label: [LOSS(output, label)]),
    "step": lambda: mgpu.Trainer(mgpu.Pipeline([dense()], [mx.cpu(0)]), "sgd").step(1),
    "elsewhere": lambda: mgpu.Pipeline([dense()], [mx.cpu(1)])(mx.nd.zeros((1, 16))),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(make):
    with pytest.raises((TrainerError, DeviceError, StaleGradientError)):
        make()


def fitted(loss=LOSS, **options):
    model = mgpu.Pipeline(mgpu.split_stages(dense(), 2, batches()[0][0]), contexts(2, 2), 4)
    mgpu.fit(model, loss, mgpu.Trainer(model, "sgd"), batches(), epochs=1, callbacks=[], **options)


def test_shapes_that_the_first_batch_decides():
    blocks = [nn.Dense(16, activation="tanh"), nn.Dense(5)]
    model = initialized(mgpu.Pipeline(blocks, contexts(2), 4), init=mx.init.Xavier())
    trained(model)
    assert [block.weight.shape for block in blocks] == [(16, 16), (5, 16)]
    assert [block.weight.list_ctx() for block in blocks] == [[mx.cpu(0)], [mx.cpu(1)]]
    assert repr(model).splitlines()[1] == "  stage 0 on cpu(0): 2 parameters"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_one_example_reaches_all_stages_in_a_loop_by_hand_with_autograd(num_replicas):
    """Its step was refused: each stage counted as a device with another example."""
    devices = contexts(2, num_replicas)
    model = mgpu.Pipeline(list(dense(1)), devices)
    trainer = mgpu.Trainer(model, "sgd", {"learning_rate": 0.1})
    for number in range(1, num_replicas + 1):
        with autograd.record():
            losses = [model(mx.nd.ones((1, 16), ctx=one)).square().sum(axis=1) for one in trainer.contexts[:number]]
        autograd.backward(losses)
        if number > 1:
            with pytest.raises(TrainerError, match="got gradients on"):
                trainer.step(1)
        trainer.step(number)
    assert trainer.optimizer.num_update == num_replicas
