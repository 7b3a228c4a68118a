"""Flat memory shows in no bit: whatever is done to a network whose parameters are views of buckets, Gluon gives the same."""

import gc
import os
import weakref

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import StaleGradientError, TrainerError
from gluon_mgpu.models.hybrid_block import named, new_parameter
from gluon_mgpu.mxnet_internals.blocks import compiled_graph, graph_of
from gluon_mgpu.mxnet_internals.parameters import has_values
from gluon_mgpu.trainer.slab import slice_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import HYBRIDIZE, LOSS, as_array, freeze_count, initialized, ready, small_batches, small_net, stack, weights_of
from .versions import HybridBlock, nd, set_params, sharing
from .worlds import Scale

CTX = [mx.cpu(0), mx.cpu(1)]
MOMENTUM = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})
FLAT = {
    "sgd": MOMENTUM,
    "plain sgd": ("sgd", {"learning_rate": 0.05}),
    "nag": ("nag", {"learning_rate": 0.05, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01, "wd": 1e-3}),
    "rmsprop": ("rmsprop", {"learning_rate": 0.01}),
    "centered": ("rmsprop", {"learning_rate": 0.01, "centered": True}),
    "lamb": ("lamb", {"learning_rate": 0.01}),
}


def trainers(net, name, params, **options):
    """Gluon's trainer in the way that is right, and ours: parameters in structural order for both."""

    def theirs():
        trainer = gluon.Trainer(list(net.collect_params().values()), name, dict(params), update_on_kvstore=False)
        if all(has_values(param) and len(param.list_ctx()) > 1 for param in net.collect_params().values()):
            # this makes its store; otherwise the first step does, and replaces BatchNorm's statistics by the first device's
            trainer.save_states(os.devnull)
        return trainer

    return {"gluon": theirs, "ours": lambda: mgpu.Trainer(net, name, dict(params), **options)}


def step(net, trainer, X, y, ctx=CTX, **options):
    Xs, ys = (gluon.utils.split_and_load(as_array(values), ctx) for values in (X, y))
    with autograd.record():
        losses = [LOSS(net(x), t) for x, t in zip(Xs, ys)]
    autograd.backward(losses)
    trainer.step(len(X), **options)


def outputs(net, X, ctx=CTX):
    return [net(as_array(X, context)).asnumpy() for context in ctx]


def assert_same(mine, theirs, atol=0.0):
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def compare(story, ctx=CTX, mode=None, optimizer=MOMENTUM, make=small_net, atol=0.0, **options):
    """Run a story with Gluon's trainer and with ours, and hold all that it yields together, to the bit."""
    told = {}
    for who in ("gluon", "ours"):
        net = make(ctx, hybridize=mode)
        told[who] = [
            np.array(array) for array in story(net, lambda net=net, who=who: trainers(net, *optimizer, **options)[who]())
        ]
        told[who] += weights_of(net, ctx[-1])
    assert_same(told["ours"], told["gluon"], atol)


def conv_net(ctx, hybridize=None):
    """Convolutions wide enough for oneDNN to choose a layout of its own for their weights, normalisation, tied layers."""
    net = nn.HybridSequential()
    # Gluon lets each device have running statistics of its own
    net.add(nn.Conv2D(16, kernel_size=3, padding=1), nn.BatchNorm(use_global_stats=True), nn.Activation("relu"))
    net.add(nn.Conv2D(32, kernel_size=3, padding=1, strides=2), nn.BatchNorm(use_global_stats=True), nn.Activation("relu"))
    net.add(nn.Conv2DTranspose(16, kernel_size=2, strides=2), nn.Conv2D(16, kernel_size=1, groups=4))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(16, activation="tanh"))
    tied = nn.Dense(16, activation="tanh", in_units=16)
    net.add(tied, sharing(tied, nn.Dense, 16, activation="tanh", in_units=16), nn.Dense(3))
    return ready(net, ctx, hybridize, 3)


@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("mode", ["plain", "static"])
@pytest.mark.parametrize("optimizer", FLAT)
def test_training_and_predicting_in_turns_gives_gluons_bits(num_devices, arrays, mode, optimizer):
    devices = [mx.cpu(i) for i in range(num_devices)]
    batches = small_batches([6 * num_devices] * 3)

    def story(net, make_trainer):
        yield from outputs(net, batches[0][0], devices)  # before: oneDNN lays the weights out for itself
        trainer = make_trainer()
        for X, y in batches:
            step(net, trainer, X, y, devices)
            yield from outputs(net, X, devices)
            yield from outputs(net, X, devices)

    compare(story, devices, HYBRIDIZE[mode], FLAT[optimizer], conv_net)


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", HYBRIDIZE)
@pytest.mark.parametrize("known", [True, False])
def test_the_networks_arrays_are_views_of_few_buckets(arrays, mode, known):
    net = small_net(CTX, hybridize=HYBRIDIZE[mode])
    X, y = small_batches([4])[0]
    if known:
        outputs(net, X)
    held = [(param, param.data(CTX[0])) for param in net.collect_params().values()] if known else []
    step(net, mgpu.Trainer(net, *MOMENTUM), X, y)
    convolution, *params = net.collect_params().values()
    places = [slice_of(param) for param in params]
    assert slice_of(convolution) is None and len({place.bucket for place in places}) == 1
    for param, place in zip(params, places):
        for replica, context in enumerate(CTX):
            flat = place.bucket.gradients[replica][place.begin : place.begin + place.size]
            np.testing.assert_array_equal(flat.asnumpy(), param.grad(context).asnumpy().reshape(-1))
            place.bucket.weights[replica][place.begin : place.begin + place.size] = 7
            assert (param.data(context).asnumpy() == 7).all()
    for param, array in held:
        assert array is param.data(CTX[0])  # what a user held before is the network's still


def test_buckets_are_filled_in_reverse_and_closed_at_their_size():
    net = nn.HybridSequential()
    for _ in range(6):
        net.add(nn.Dense(16, in_units=16, use_bias=False))  # 1,024 bytes each
    net.initialize(ctx=CTX)
    params = list(net.collect_params().values())
    params[2].lr_mult = 0.5
    params[4].wd_mult = 0.0
    mgpu.Trainer(net, "sgd", bucket_bytes=2048)
    places = [slice_of(param) for param in params]
    groups = {}
    for index, place in enumerate(places):
        groups.setdefault(id(place.bucket), []).append(index)
    assert sorted(groups.values()) == [[0, 1], [2], [3, 5], [4]]
    assert [places[i].begin for i in (5, 3, 1, 0)] == [0, 256, 0, 256]


@pytest.mark.each_value
@pytest.mark.parametrize("mode", HYBRIDIZE)
def test_a_network_may_be_touched_between_steps(tmp_path, arrays, mode):
    batches = small_batches([4] * 8)
    zeros = np.zeros((8, 36), dtype="float32")

    def story(net, make_trainer):
        trainer = make_trainer()
        step(net, trainer, *batches[0])
        net[4].weight.set_data(as_array(zeros))
        step(net, trainer, *batches[1])
        net[5].weight.data(CTX[0])[:] = net[5].weight.data(CTX[1]).asnumpy() * 0.5
        net[5].weight.data(CTX[1])[:] = net[5].weight.data(CTX[0]).as_in_context(CTX[1])
        step(net, trainer, *batches[2])
        path = str(tmp_path / "net.params")
        net.save_parameters(path)
        step(net, trainer, *batches[3])
        yield from weights_of(net)
        net.load_parameters(path, ctx=CTX)
        yield from outputs(net, batches[0][0])
        step(net, trainer, *batches[4])
        net.hybridize(static_alloc=True, static_shape=True)
        step(net, trainer, *batches[5])
        net.hybridize(False)
        step(net, trainer, *batches[6])
        if not mx.util.is_np_array():
            net.collect_params().zero_grad()
        step(net, trainer, *batches[7])
        yield from outputs(net, batches[0][0])
        fresh = small_net(CTX)
        fresh.load_parameters(path, ctx=CTX)
        yield from weights_of(fresh)

    compare(story, mode=HYBRIDIZE[mode])


def test_graphs_are_bound_again_and_stay():
    """A trainer raised on MXNet 2 if any hybridized network was in memory. Without the graph, PReLU in it was not seen."""
    net = initialized(nn.Dense(2, in_units=3), hybridize={})
    with autograd.record():
        loss = net(nd.ones((1, 3))).sum()
    loss.backward()
    graph, bound = graph_of(net), compiled_graph(net)
    mgpu.Trainer(net, "sgd")
    assert graph_of(net) is graph is not None and compiled_graph(net) is not bound
    assert net(nd.ones((1, 3))).shape == (1, 2)


def test_multipliers_count_whenever_they_are_set():
    batches = small_batches([4] * 6)

    def story(net, make_trainer):
        for param in net.collect_params(".*bias").values():
            param.wd_mult = 0.0
        outputs(net, batches[0][0])
        trainer = make_trainer()
        step(net, trainer, *batches[0])
        set_params(net[5], "lr_mult", 0.1)
        step(net, trainer, *batches[1])
        step(net, trainer, *batches[2])
        net[4].weight.wd_mult = 5.0
        step(net, trainer, *batches[3])
        trainer.set_learning_rate(0.01)
        step(net, trainer, *batches[4])
        set_params(net, "lr_mult", 1.0)
        step(net, trainer, *batches[5])
        yield from outputs(net, batches[0][0])

    compare(story, optimizer=FLAT["adam"])
    compare(story, optimizer=MOMENTUM)


class TwoHeads(nn.Block):
    """A network of which each step may use another part."""

    def __init__(self, ctx, **_):
        super().__init__()
        with named(self):
            self.body, self.left, self.right = nn.Dense(8, in_units=4), nn.Dense(3, in_units=8), nn.Dense(3, in_units=8)
        mx.random.seed(1)
        self.initialize(mx.init.Xavier(), ctx=ctx)

    def run(self, x, heads):
        hidden = self.body(x)
        return sum(getattr(self, head)(hidden) for head in heads)


@pytest.mark.parametrize("optimizer", FLAT)
def test_a_part_that_is_not_used_stays_and_counts_its_own_updates(optimizer):
    """Right after a step that left it out, Adam's corrections differ by parameter: Gluon's bits show them."""

    def story(net, make_trainer):
        trainer, rng = make_trainer(), np.random.RandomState(0)
        for heads in ("left", "left right", "right", "left right"):
            xs = gluon.utils.split_and_load(nd.array(rng.rand(4, 4)), CTX)
            with autograd.record():
                losses = [(net.run(x, heads.split()) ** 2).sum(axis=1) for x in xs]
            autograd.backward(losses)
            trainer.step(4, ignore_stale_grad=True)
        yield from weights_of(net)

    compare(story, optimizer=FLAT[optimizer], make=TwoHeads)


def test_trainers_one_after_another_and_side_by_side_share_the_memory():
    batches = small_batches([4] * 6)

    def story(net, make_trainer):
        outputs(net, batches[0][0])
        first = make_trainer()
        step(net, first, *batches[0])
        second = make_trainer()
        step(net, second, *batches[1])
        step(net, first, *batches[2])
        step(net, second, *batches[3])
        yield from outputs(net, batches[0][0])

    compare(story)
    net = small_net(CTX)
    outputs(net, batches[0][0])
    mgpu.Trainer(net, *MOMENTUM)
    places = [slice_of(param) for param in net.collect_params().values()]
    mgpu.Trainer(net.collect_params(), *MOMENTUM)
    assert [slice_of(param) for param in net.collect_params().values()] == places


def test_a_trainer_for_each_half_of_a_network():
    batches = small_batches([4] * 4)
    told = {}
    for who in ("gluon", "ours"):
        net = small_net(CTX)
        outputs(net, batches[0][0])
        make = gluon.Trainer if who == "gluon" else mgpu.Trainer
        parts = [net[0].collect_params(), {**net[4].collect_params(), **net[5].collect_params()}]
        options = {"update_on_kvstore": False}
        two = [make(list(part.values()), "sgd", {"learning_rate": rate}, **options) for part, rate in zip(parts, (0.01, 0.1))]
        for X, y in batches:
            Xs, ys = gluon.utils.split_and_load(nd.array(X), CTX), gluon.utils.split_and_load(nd.array(y), CTX)
            with autograd.record():
                losses = [LOSS(net(x), t) for x, t in zip(Xs, ys)]
            autograd.backward(losses)
            for trainer in two:
                trainer.step(4)
        told[who] = weights_of(net)
    assert_same(told["ours"], told["gluon"])


@pytest.mark.parametrize("mode", HYBRIDIZE)
def test_a_graph_that_was_cached_before_the_trainer_is_made_again(mode):
    """It would go on writing gradients into the arrays that it knew. Here it belongs to a block around the network."""
    batches = small_batches([4] * 4)

    class Outer(HybridBlock):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def compute(self, F, x):
            return self.inner(x) * 2

    def story(net, make_trainer):
        outer = Outer(net)
        if HYBRIDIZE[mode] is not None:
            outer.hybridize(**HYBRIDIZE[mode])
        for _ in range(2):  # trained by nobody, so that forward and backward graphs are cached
            with autograd.record():
                values = [outer(nd.array(batches[0][0], ctx=context)) for context in CTX]
            autograd.backward(values)
        trainer = make_trainer()
        for X, y in batches:
            step(outer, trainer, X, y)
        yield from weights_of(net)

    compare(story)


def test_mixed_precision_parameters_have_buckets_of_their_own():
    def make(ctx, **_):
        net = nn.Sequential()
        net.add(nn.Dense(3, in_units=2), Scale("float16"), Scale("float32"), Scale("float64"), Scale("float16"))
        mx.random.seed(0)
        net.initialize(ctx=ctx)
        return net

    def story(net, make_trainer):
        trainer, params = make_trainer(), list(net.collect_params().values())
        for _ in range(3):
            with autograd.record():
                losses = [(net(nd.ones((2, 2), ctx=context)) - 3) ** 2 for context in CTX]
            autograd.backward(losses)
            trainer.step(4)
        yield from weights_of(net)
        if isinstance(trainer, mgpu.Trainer):
            assert len({slice_of(param).bucket for param in params}) == 3

    compare(story, optimizer=("sgd", {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}), make=make)


def test_casting_under_a_trainer_is_refused():
    net = small_net(CTX)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    X, y = small_batches([4])[0]
    step(net, trainer, X, y)
    net.cast("float64")
    with autograd.record():
        losses = [LOSS(net(nd.array(X[:2], ctx=context, dtype="float64")), nd.array(y[:2], ctx=context)) for context in CTX]
    autograd.backward(losses)
    with pytest.raises(TrainerError, match="float64"):
        trainer.step(4)


def test_frozen_objects_do_not_hide_a_graph(monkeypatch, calls_to):
    monkeypatch.setattr(gc, "get_freeze_count", freeze_count)
    batches = small_batches([4] * 3)

    def story(net, make_trainer):
        trainer = make_trainer()
        calls_to(trainer, "step", note=lambda *_: gc.freeze())
        step(net, trainer, *batches[0])  # its parameters move now
        assert gc.get_freeze_count() > 0
        for batch in batches[1:]:
            step(net, trainer, *batch)
        yield from weights_of(net)

    compare(story, mode=HYBRIDIZE["static"])


def test_a_network_may_be_made_anew_before_the_first_step():
    net = small_net(CTX)
    X, y = small_batches([4])[0]
    outputs(net, X)
    trainer = mgpu.Trainer(net, *MOMENTUM)
    net.initialize(mx.init.Xavier(), ctx=CTX, force_reinit=True)
    before = weights_of(net)
    step(net, trainer, X, y)
    step(net, trainer, X, y)
    assert all((a != b).any() for a, b in zip(before, weights_of(net)))
    assert mgpu.replica_difference(net) == 0.0


def test_memory_goes_with_the_network():
    net = small_net(CTX)
    X, y = small_batches([4])[0]
    trainer = mgpu.Trainer(net, *MOMENTUM)
    step(net, trainer, X, y)
    bucket = weakref.ref(slice_of(net[5].weight).bucket)
    del net, trainer
    gc.collect()
    assert bucket() is None


def two_layers(ctx=CTX):
    net = stack(nn.Dense(3, in_units=4), nn.Dense(1, in_units=3), kind=nn.Sequential)
    net.initialize(mx.init.One(), ctx=ctx)
    return net


def sum_step(net, trainer, ctx=CTX, layers=None, **options):
    with autograd.record():
        losses = []
        for context in ctx:
            out = nd.ones((2, 4), ctx=context)
            for layer in layers or net:
                out = layer(out)
            losses.append(out.sum())
    autograd.backward(losses)
    trainer.step(2 * len(ctx), **options)


def test_a_batch_of_nan_leaves_nothing_behind(tmp_path):
    """With clipping, NaN got into the zeros between parameters, where no backward pass writes, and into every later norm."""
    net = initialized(nn.Dense(2, in_units=3), CTX, mx.init.One())
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    loss, y = gluon.loss.L2Loss(), np.zeros((4, 2), "float32")
    good, bad = np.ones((4, 3), "float32"), np.full((4, 3), np.nan, "float32")
    mgpu.train_batch(net, loss, trainer, good, y)
    mgpu.save_checkpoint(net, tmp_path / "checkpoint", trainer)
    mgpu.train_batch(net, loss, trainer, bad, y)
    assert np.isnan(net.weight.data(CTX[0]).asnumpy()).all()
    mgpu.load_checkpoint(net, tmp_path / "checkpoint", trainer)
    mgpu.train_batch(net, loss, trainer, good, y)
    np.testing.assert_allclose(net.weight.data(CTX[1]).asnumpy(), 0.98, atol=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", FLAT)
@pytest.mark.parametrize("last", [0, 1])
def test_a_schedule_is_one_for_all_parameters_and_replicas(optimizer, last):
    """A layer that was thawed late is behind in updates: the schedule's clock must not depend on who is updated first."""
    name, params = FLAT[optimizer]
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    net = two_layers()
    set_params(net[last], "grad_req", "null")
    trainer = mgpu.Trainer(net, name, {**params, "lr_scheduler": schedule})
    rates = []
    for i in range(8):
        if i == 4:
            set_params(net[last], "grad_req", "write")
        sum_step(net, trainer)
        rates.append(trainer.learning_rate)
    assert mgpu.replica_difference(net) == 0.0
    assert rates == [params["learning_rate"] * factor for factor in (1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125)]


def test_a_graph_of_the_time_before_the_buckets_is_reported():
    """Its second backward pass would write into arrays that the network no longer has."""
    net = initialized(nn.Dense(2), CTX, mx.init.One())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    with autograd.record():
        losses = [net(nd.ones((2, 3), ctx=context)).sum() for context in CTX]
    autograd.backward(losses, retain_graph=True)
    trainer.step(4)  # the shapes are known now, and the parameters move
    autograd.backward(losses)
    with pytest.raises(StaleGradientError):
        trainer.step(4)


def test_a_step_that_raised_does_not_sum_again():
    class Schedule(mx.lr_scheduler.LRScheduler):
        broken = True

        def __call__(self, num_update):
            if self.broken:
                raise RuntimeError("broken schedule")
            return 0.1

    schedule = Schedule()
    net = initialized(nn.Dense(1, in_units=1, use_bias=False), CTX, mx.init.One())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "lr_scheduler": schedule})
    with autograd.record():
        losses = [net(nd.ones((2, 1), ctx=context)).sum() for context in CTX]
    autograd.backward(losses)
    with pytest.raises(RuntimeError, match="broken schedule"):
        trainer.step(4)
    schedule.broken = False
    with pytest.raises(StaleGradientError):
        trainer.step(4)
    trainer.update(4)
    assert net.weight.data(CTX[1]).asnumpy().item() == pytest.approx(0.9)


def test_one_large_parameter_in_full_and_partial_steps():
    class Pair(nn.Block):
        def __init__(self):
            super().__init__()
            self.a = new_parameter(self, "a", shape=(2**17,), init="ones")
            self.b = new_parameter(self, "b", shape=(8,), init="ones")

        def forward(self, x, both):
            return self.a.data(x.context).sum() + (self.b.data(x.context).sum() if both else 0)

    net = initialized(Pair(), CTX)
    net.a.lr_mult = 0.5
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    for both in (True, False, True, False):
        with autograd.record():
            losses = [net(nd.ones((1,), ctx=context), both) for context in CTX]
        autograd.backward(losses)
        trainer.step(2, ignore_stale_grad=True)
    np.testing.assert_allclose(net.a.data(CTX[1]).asnumpy(), 0.8, rtol=1e-5)
    np.testing.assert_allclose(net.b.data(CTX[0]).asnumpy(), 0.8, rtol=1e-5)


def test_grouping_anew_leaves_no_sums_behind():
    net = nn.Sequential()
    for _ in range(4):
        net.add(nn.Dense(8, in_units=8))
    net.initialize(ctx=CTX)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    rng = np.random.RandomState(0)
    held = []
    for _ in range(30):
        for layer in net:
            set_params(layer, "lr_mult", float(rng.randint(1, 4)))
        with autograd.record():
            losses = [net(nd.ones((2, 8), ctx=context)).sum() for context in CTX]
        autograd.backward(losses)
        trainer.step(4)
        held.append(len(trainer.steps.sum._stores[tuple(CTX)]._keys))
    assert max(held) <= 8


def test_a_scalar_of_np_takes_part_with_zero_where_a_device_is_idle():
    mx.npx.set_np()
    try:

        class One(mx.init.Initializer):
            def _init_weight(self, _, array):
                array[()] = 1

        class Scaled(nn.Block):
            def __init__(self):
                super().__init__()
                self.scale = new_parameter(self, "scale", shape=(), init=One())
                self.dense = nn.Dense(1, in_units=1, use_bias=False)

            def forward(self, x):
                return self.dense(x) * self.scale.data(x.ctx)

        net = initialized(Scaled(), CTX, mx.init.One())
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        for contexts in (CTX, CTX[:1]):
            with autograd.record():
                losses = [net(mx.np.ones((1, 1), ctx=context)).sum() for context in contexts]
            autograd.backward(losses)
            trainer.step(len(contexts))
        assert mgpu.replica_difference(net) == 0.0
        assert float(net.scale.data(CTX[1])) == pytest.approx(0.9 - 0.1 * 0.9)
    finally:
        mx.npx.reset_np()
