"""Compiled passes: the same bits as recorded ones, whatever happens between steps; and why some passes cannot be compiled."""

import gc
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from contextlib import nullcontext

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel import compiled as compiled_module
from gluon_mgpu.data_parallel import executors
from gluon_mgpu.data_parallel.compiled import CompiledPasses
from gluon_mgpu.data_parallel.executors import Executor
from gluon_mgpu.data_parallel.graph import NotCompilableError, trace
from gluon_mgpu.errors import ShardError, StepError, TrainerError
from gluon_mgpu.models.seq2seq.network import Seq2Seq
from gluon_mgpu.models.seq2seq.sequence_loss import SequenceLoss
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from gluon_mgpu.runtime.device_threads import environment_with, in_own_thread
from gluon_mgpu.trainer.loss_scaler import LossScaler
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import LOSS, initialized, sequential, stack
from .versions import HybridBlock

pytestmark = pytest.mark.mxnet1("compiled passes")
if is_mxnet2():  # which makes no blocks with hybrid_forward
    pytest.skip("MXNet 1.9's own: compiled passes", allow_module_level=True)

STATIC = {"static_alloc": True, "static_shape": True}
SIZES = [9, 8, 2, 9, 1, 9, 7]  # fewer examples than devices, uneven shards, and shapes that come back


def build(num_devices, *, hybridize=True, dropout=0.3, has_shapes=False):
    mx.random.seed(3)
    channels, units = (1, 64) if has_shapes else (0, 0)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=channels), nn.BatchNorm(in_channels=4 * channels), nn.Activation("relu"))
    net.add(nn.Dropout(dropout), nn.Dense(8, in_units=units), nn.Dense(3, in_units=units // 8))
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(i) for i in range(num_devices)])
    if hybridize:
        net.hybridize(**STATIC)
    return net


def batches(sizes=SIZES, seed=0):
    draw = np.random.RandomState(seed)
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return [(array(draw.randn(n, 1, 6, 6), dtype="float32"), array(draw.randint(0, 3, n), dtype="float32")) for n in sizes]


def trained(compiled, num_devices, change=None, *, optimizer=("sgd", {"learning_rate": 0.1, "momentum": 0.9}), **options):
    """Train, and return every weight and statistic on each device, and all outputs and losses, read at the end."""
    micro_steps, accumulated = options.pop("micro_steps", 1), options.pop("accumulated", ())
    net = build(num_devices, has_shapes=options.pop("has_shapes", False))
    trainer = mgpu.Trainer(net, *optimizer, **options)
    step = mgpu.compile_step(net, LOSS, trainer, micro_steps=micro_steps, compiled=compiled)
    mx.random.seed(7)
    found = []
    for i, (X, y) in enumerate(batches(), 1):
        if change is not None:
            change(i, net, trainer)
        with trainer.accumulate() if i in accumulated else nullcontext():
            found.append(step(X, y))
    trainer.flush()
    arrays = [array for batch in found for array in (*batch.outputs, *batch.losses)]
    arrays += [param.data(context) for param in net.collect_params().values() for context in trainer.contexts]
    assert getattr(step.passes, "reason", "") == ""
    return [array.asnumpy() for array in arrays]


def assert_same_bits(one, other):
    assert len(one) == len(other)
    assert all(np.array_equal(a, b) for a, b in zip(one, other))


def test_train_batch_compiles_as_compile_step_does():
    found = []
    for compiled in ("off", "on"):
        net = build(2)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        mx.random.seed(7)
        for X, y in batches([6, 5]):
            mgpu.train_batch(net, LOSS, trainer, X, y, compiled=compiled)
        assert trainer.kept["train_batch"].passes.is_compiled == (compiled == "on")
        found.append([param.data(mx.cpu(1)).asnumpy() for param in net.collect_params().values()])
    assert_same_bits(*found)


@pytest.mark.parametrize("compiled", ["auto", "on"])
def test_a_late_error_of_the_data_is_no_reason_not_to_compile(compiled):
    """MXNet shows it once, in whatever waits next: here before more memory is bound for a larger batch."""
    net, (X, y) = build(2), batches([8])[0]
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd"), compiled=compiled)
    step(X[:4], y[:4])
    mx.nd.waitall()
    failing = mx.nd.linalg.potrf(-mx.nd.ones((1, 1)))
    with pytest.raises(mx.MXNetError, match="potrf"):
        step(X * failing.reshape((1, 1, 1, 1)), y)
    mx.nd.waitall()


@pytest.mark.each_value
@pytest.mark.parametrize(
    "num_devices, options",
    [
        (1, {}),
        (3, {"clip_norm": 0.5}),
        (2, {"micro_steps": 3, "clip_value": 0.01}),
        (3, {"accumulated": (1, 3, 4)}),  # 5 makes an update with 3 and 4, and 6 one alone
        (2, {"optimizer": ("adam", {"learning_rate": 0.01, "wd": 0.1})}),
    ],
)
def test_the_bits_are_those_of_recorded_passes(num_devices, options, arrays):
    """Also Dropout's masks, running statistics, shards of any sizes, and shapes that the first batch decides."""
    assert_same_bits(trained("on", num_devices, **options), trained("off", num_devices, **options))


def set_weights(i, net, trainer):
    if i == 3:
        net[5].weight.set_data(mx.nd.ones((3, 8)))


def scale_losses(i, net, trainer):
    if i == 1:
        trainer.steps.loss_scaler = LossScaler(scale=8.0, every=2)  # 16 from the third step, 32 from the fifth
    if i == 6:
        trainer.steps.loss_scaler.scale = 1.0


def load_weights(i, net, trainer):
    if i == 2:
        mx.nd.waitall()  # a static graph writes running statistics without telling the engine
        net.save_parameters("net.params")
    if i == 5:
        net.load_parameters("net.params", ctx=trainer.contexts)


def freeze_and_thaw(i, net, trainer):
    if i in (2, 4):
        for param in [*net[0].collect_params().values(), *net[4].collect_params().values()]:
            param.grad_req = "null" if i == 2 else "write"


def hybridize_again(i, net, trainer):
    if i == 3:
        net.hybridize(**STATIC)


@pytest.mark.parametrize("change", [set_weights, scale_losses, load_weights, freeze_and_thaw, hybridize_again])
def test_weights_may_change_between_steps(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_same_bits(trained("on", 2, change, has_shapes=True), trained("off", 2, change, has_shapes=True))


@pytest.mark.each_value
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_translator_of_bucketed_sentences(cell, arrays):
    def run(compiled):
        mx.random.seed(3)
        net = Seq2Seq(20, 30, embed_size=4, hidden_size=6, num_layers=2, dropout=0.2, cell=cell)
        net.initialize(mx.init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
        net.hybridize(**STATIC)
        trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
        step = mgpu.compile_step(net, SequenceLoss(0.1), trainer, compiled=compiled)
        mx.random.seed(7)
        draw, outputs = np.random.RandomState(1), []
        for n, source, target in [(6, 5, 7), (6, 9, 4), (3, 3, 3), (1, 5, 7), (6, 5, 7)]:
            X = draw.randint(0, 20, (n, source)), draw.randint(1, source + 1, n), draw.randint(0, 30, (n, target))
            y = draw.randint(0, 30, (n, target)), draw.randint(1, target + 1, n)
            outputs += step(*[tuple(one.astype("float32") for one in side) for side in (X, y)]).outputs
        return [array.asnumpy() for array in (*outputs, *(p.data(mx.cpu(1)) for p in net.collect_params().values()))]

    assert_same_bits(run("on"), run("off"))


class Gated(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(3, in_units=4)

    def hybrid_forward(self, F, pair):
        return self.layer(pair[0]) * F.sigmoid(pair[1])


def test_a_network_of_two_inputs():
    rng, found = np.random.RandomState(0), []
    X, y = (rng.randn(5, 4).astype("float32"), rng.randn(5, 3).astype("float32")), rng.randn(5, 3).astype("float32")
    for compiled in ("on", "off"):
        mx.random.seed(0)
        net = initialized(Gated(), [mx.cpu(0), mx.cpu(1)], mx.init.Xavier())
        step = mgpu.compile_step(net, gluon.loss.L2Loss(), mgpu.Trainer(net, "sgd", {"learning_rate": 0.5}), compiled=compiled)
        outputs = [output.asnumpy() for _ in range(2) for output in step(X, y).outputs]
        found.append([*outputs, net.layer.weight.data(mx.cpu(1)).asnumpy()])
    assert_same_bits(*found)


def test_fit_evaluate_and_predict_compile(caplog):
    def run(compiled):
        net = build(2)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        mx.random.seed(7)
        history = mgpu.fit(net, LOSS, trainer, batches(), batches(seed=1), epochs=2, callbacks=[], compiled=compiled)
        means = mgpu.evaluate(net, batches(), loss=LOSS, compiled=compiled)
        outputs = mgpu.predict(net, [X for X, _ in batches()], compiled=compiled)
        rows = [{name: row[name] for name in row if name not in ("seconds", "examples_per_s")} for row in history.rows]
        return rows, means, outputs.tolist()

    with caplog.at_level(logging.DEBUG, "gluon_mgpu"):
        assert run("on") == run("auto") == run("off")
    assert "not compiled" not in caplog.text


class Counting(nn.HybridBlock):
    """Does something else in each call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0
        self.dense = nn.Dense(3, in_units=36)

    def forward(self, x):
        self.calls += 1
        return self.dense(x) * self.calls


class Deciding(Counting):
    """Decides by values, which a graph cannot."""

    forward = nn.HybridBlock.forward

    def hybrid_forward(self, F, x):
        return self.dense(x) if x.sum().asscalar() > 0 else -self.dense(x)


class Scaling(nn.HybridSequential):
    """Prepares its input before the graph, as GluonNLP's networks do."""

    def __call__(self, x):
        return super().__call__(x / 2)


class Dropped(gluon.Parameter):
    """Like GluonNLP's weight drop: each call draws another mask."""

    def data(self, ctx=None):
        return mx.nd.Dropout(super().data(ctx), 0.5)


class Growing(gluon.loss.L2Loss):
    calls = 0

    def forward(self, output, y):
        self.calls += 1
        return output.sum(axis=1) * self.calls


class Calling(gluon.loss.L2Loss):
    def __call__(self, output, y):
        return output.sum(axis=1)


def scaling():
    net = Scaling()
    net.add(nn.Dense(3, in_units=36))
    return net


def with_weight_drop():
    net = nn.Dense(3, in_units=36)
    net.weight.__class__ = Dropped
    return net


def with_hook(net):
    net[4].register_forward_hook(lambda *_: None)
    return net


def plain():
    return stack(nn.Dense(3, in_units=36), kind=nn.Sequential)


def dense(**options):
    net = stack(nn.Dense(3, in_units=36))
    net.hybridize(**options)
    return net


CANNOT = [
    (plain, LOSS, "not a HybridBlock"),
    (Counting, LOSS, "a forward() of its own"),
    (Deciding, LOSS, "tracing failed"),
    (dense, lambda output, y: LOSS(output, y), "the loss is a function"),
    (lambda: mgpu.data_parallel.convert_sync_batchnorm(build(2)), LOSS, "synchronised"),
    (lambda: with_hook(build(2)), LOSS, "has hooks"),
    (lambda: sparse(), LOSS, "has sparse gradients"),
    (scaling, LOSS, "a __call__() of its own"),
    (with_weight_drop, LOSS, "a data() of its own"),
    (dense, Growing(), "a forward() of its own"),
    (dense, Calling(), "a __call__() of its own"),
]


def sparse():
    net = stack(nn.Flatten(), nn.HybridLambda("zeros_like"), nn.Embedding(4, 2, sparse_grad=True), nn.Dense(3, in_units=72))
    net.hybridize()
    return net


@pytest.mark.parametrize("make, loss, reason", CANNOT)
def test_what_cannot_be_compiled_is_recorded_or_refused(make, loss, reason, caplog):
    net = make()
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)], force_reinit=True)
    X, y = batches()[0]
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    with pytest.raises(TrainerError, match="cannot be compiled|compiled='on'") as raised:
        mgpu.compile_step(net, loss, trainer)(X, y)
    assert reason in str(raised.value)
    step = mgpu.compile_step(net, loss, trainer, compiled="auto")
    with caplog.at_level(logging.DEBUG, "gluon_mgpu"):
        step(X, y)
        step(X, y)
    assert step.passes.reason
    lines = [record.getMessage() for record in caplog.records if "not compiled" in record.getMessage()]
    assert len(lines) == 1 and (reason in lines[0] or "not hybridized" in lines[0])


class Asking(nn.HybridBlock):
    """Has other outputs while training, as GluonCV's detectors have."""

    def __init__(self, in_units):
        super().__init__()
        self.dense = nn.Dense(3, in_units=in_units)

    def hybrid_forward(self, F, x):
        output = self.dense(x)
        return output if autograd.is_training() and autograd.is_recording() else F.softmax(10 * output)


@pytest.mark.parametrize("in_units", [36, 0], ids=["known", "open"])
def test_python_that_asks_for_training_is_traced_for_training(in_units):
    """Gluon keeps the graph of the first call, which here was a prediction that decided shapes, or a trace without autograd."""

    def train(way):
        net, ctx = Asking(in_units), [mx.cpu(0), mx.cpu(1)]
        net.initialize(mx.init.One(), ctx=ctx)
        net.hybridize()
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
        step = mgpu.compile_step(net, LOSS, trainer, compiled=way) if way in ("on", "off") else None
        if way == "fit":
            mgpu.fit(net, LOSS, trainer, batches(), epochs=1, callbacks=[], metrics=())
        for X, y in batches() if way != "fit" else ():
            if step is not None:
                step(X, y)
                continue
            with autograd.record():
                losses = [LOSS(net(x), label) for x, label in zip(*mgpu.split_batch(X, y, ctx))]
            trainer.backward(losses)
            trainer.step(len(X))
        return [net.dense.weight.data(context).asnumpy() for context in ctx]

    expected = train("by hand")
    for way in ("off", "on", "fit"):
        assert_same_bits(train(way), expected)


def test_python_that_asks_for_training_is_traced_for_predicting():
    net = initialized(Asking(36), [mx.cpu(0), mx.cpu(1)], mx.init.One())
    X, _ = batches()[0]
    expected = net(mx.nd.array(X)).asnumpy()
    np.testing.assert_array_equal(expected.argmax(axis=1), mgpu.predict(net, [X], compiled="on").argmax(axis=1))
    np.testing.assert_allclose(mgpu.predict(net, [X], compiled="on"), expected, rtol=1e-5)


class Heads(nn.HybridBlock):
    """Has a head that only training reaches, and layers that are called in another order than their graph has."""

    def __init__(self):
        super().__init__()
        self.body, self.side, self.head = nn.Dense(4), nn.Dense(4), nn.Dense(3)

    def hybrid_forward(self, F, x):
        body = self.body(x)
        both = self.side(x) + body
        return self.head(both) if autograd.is_training() else both


@pytest.mark.parametrize("way", ["off", "on"])
def test_shapes_are_decided_as_by_a_recorded_call(way):
    """Also the order in which weights are drawn: a hybridized network draws in that of its graph."""
    found = []
    for by_hand in (True, False):
        mx.random.seed(2)
        net, ctx = Heads(), [mx.cpu(0), mx.cpu(1)]
        net.initialize(ctx=ctx)
        net.hybridize()
        X, y = batches()[0]
        trainer = None if by_hand else mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})
        if trainer is None:
            with autograd.record():
                net(mx.nd.array(X))
        else:
            mgpu.compile_step(net, LOSS, trainer, compiled=way)(X, y)
        found.append([param.data(mx.cpu(0)).asnumpy() for param in net.collect_params().values()])
    assert_same_bits(*found)


@pytest.mark.parametrize("between", [None, "predict", "call"])
@pytest.mark.parametrize("what", ["network", "loss"])
def test_what_is_hybridized_again_is_traced_again(what, between):
    """Also if another pass has traced it since."""

    class Scaled(nn.HybridSequential):
        scale = 1.0

        def hybrid_forward(self, F, x):
            return super().hybrid_forward(F, x) * self.scale

    class Annealed(gluon.loss.Loss):
        scale = 1.0

        def hybrid_forward(self, F, output, y):
            return F.square(output).mean(axis=1) * self.scale

    net, loss = Scaled(), Annealed(None, 0)
    net.add(nn.Dense(3, in_units=36))
    net.initialize(ctx=mx.cpu(0))
    net.hybridize()
    loss.hybridize()
    step = mgpu.compile_step(net, loss, mgpu.Trainer(net, "sgd", {"learning_rate": 0.0}))
    X, y = batches()[0]
    first = step(X, y).losses[0].asnumpy()
    changed, factor = (net, 4) if what == "network" else (loss, 2)
    changed.scale = 2.0
    assert_same_bits([step(X, y).losses[0].asnumpy()], [first])
    changed.hybridize()
    if between == "predict":
        mgpu.predict(net, [X])
    elif between == "call":
        net(mx.nd.array(X))
    assert_same_bits([step(X, y).losses[0].asnumpy()], [factor * first])


@pytest.mark.parametrize("compiled", ["on", "auto"])
def test_layers_that_are_synchronised_after_a_step_are_noticed(compiled):
    net, loss = nn.HybridSequential(), gluon.loss.L2Loss()
    net.add(nn.BatchNorm(in_channels=3), nn.Dense(1, in_units=3))
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    rng = np.random.RandomState(0)
    X, y = rng.randn(8, 3).astype("float32"), rng.randn(8, 1).astype("float32")
    step = mgpu.compile_step(net, loss, trainer, compiled=compiled)
    step(X, y)
    mgpu.fit(net, loss, trainer, [(X, y)], epochs=1, callbacks=[], metrics=(), compiled=compiled)
    if compiled == "on":
        with pytest.raises(TrainerError, match="synchronised"):
            mgpu.fit(net, loss, trainer, [(X, y)], epochs=1, callbacks=[], metrics=(), compiled="on", bn="sync")
        assert type(net[0]) is nn.BatchNorm
        mgpu.set_batch_norm(net, "sync")
        with pytest.raises(TrainerError, match="synchronised"):
            step(X, y)
    else:
        before = net[0].running_var.data(mx.cpu(0)).asnumpy()
        mgpu.set_batch_norm(net, "sync")
        step(X, y)
        expected = 0.9 * before + 0.1 * X.var(axis=0)
        np.testing.assert_allclose(net[0].running_var.data(mx.cpu(0)).asnumpy(), expected, rtol=1e-5)
    mgpu.set_batch_norm(net, "local")
    assert step(X, y) and (compiled == "auto" or step.passes.is_compiled)


class Own(HybridBlock):
    """A network whose graph a function makes."""

    def __init__(self, graph):
        super().__init__()
        self.graph_of = graph

    def compute(self, F, x):
        return self.graph_of(F, x)


class InPython(Own):
    """A network whose inputs Python prepares, and which asks for Python."""

    def graph_inputs(self, X):
        return None


class Pair(gluon.loss.L2Loss):
    """Returns two losses."""

    def hybrid_forward(self, F, output, label, sample_weight=None):
        return [super().hybrid_forward(F, output, label)] * 2


@mx.operator.register("identity_of_these_tests")
class IdentityProp(mx.operator.CustomOpProp):
    """An operator that is written in Python."""


@pytest.mark.parametrize(
    "net, loss, told",
    [
        (Own(lambda F, x: F.Custom(x, op_type="identity_of_these_tests")), None, "written in Python"),
        (Own(lambda F, x: x + F.var("unheard_of")), None, "the graph reads unheard_of, which no layer holds"),
        (Own(lambda F, x: x * 2), Pair(), "the loss returns"),
        (InPython(lambda F, x: x), None, "runs these steps in Python"),
        (Own(lambda F, x: F.no_such_operator(x)), None, "tracing failed"),
        (Own(lambda F, x: F.LeakyReLU(x + 1, F.ones((3,)), act_type="prelu")), LOSS, "wrong gradients of .*PReLU"),
    ],
)
def test_graphs_that_would_not_be_the_network_are_refused(net, loss, told):
    with pytest.raises(NotCompilableError, match=told), autograd.record():
        trace(net, loss, mx.nd.ones((2, 3)), mx.nd.ones((2, 3)))


def test_the_environment_is_not_moved_while_operators_read_it(monkeypatch, calls_to):
    """Recurrent operators read it in the engine's threads. A run whose graphs were bound again and again ended in a crash."""
    monkeypatch.delenv("MXNET_SUBGRAPH_VERBOSE", raising=False)
    place = os if sys.version_info >= (3, 9) else os.environ
    removed = calls_to(place, "unsetenv")
    added = calls_to(place, "putenv", note=lambda _, name, value: (name.decode(), value.decode()))
    waits = calls_to(mx.nd, "waitall", note=lambda name: len(added))
    for _ in range(2):
        with environment_with({"MXNET_SUBGRAPH_VERBOSE": "0"}):
            assert os.environ["MXNET_SUBGRAPH_VERBOSE"] == "0"
        assert os.environ["MXNET_SUBGRAPH_VERBOSE"] == ""
    assert added == [("MXNET_SUBGRAPH_VERBOSE", value) for value in ("0", "", "0", "")]
    assert (waits, removed) == ([0], [])  # before the first was added


def test_what_mxnet_reads_when_it_binds_a_graph_is_put_back(monkeypatch):
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "MKLDNN")
    monkeypatch.delenv("MXNET_SUBGRAPH_VERBOSE", raising=False)
    net = initialized(dense(forward_bulk_size=3), mx.cpu())
    CompiledPasses(net, LOSS, None, "on").forward("test", [mx.nd.ones((2, 36))], [mx.nd.zeros(2)])
    assert os.environ["MXNET_SUBGRAPH_BACKEND"] == "MKLDNN" and not os.environ["MXNET_SUBGRAPH_VERBOSE"]
    assert not os.environ["MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD"]


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_data_that_the_network_rejects_change_nothing(mode):
    net = build(2)
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), compiled=mode)
    X, y = batches()[0]
    step(X, y)
    before = net[5].weight.data(mx.cpu(0)).asnumpy()
    with pytest.raises(StepError, match="shard 0 on cpu"):
        step(mx.nd.ones((9, 2, 6, 6)), y)
    assert np.array_equal(net[5].weight.data(mx.cpu(0)).asnumpy(), before)
    step(X, y)
    assert step.passes.reason == ""


def test_several_shards_on_one_device_are_recorded():
    def halves(X, y, devices):
        return [X[:4], X[4:]], [y[:4], y[4:]]

    net = initialized(dense(**STATIC), mx.cpu())
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), split_f=halves, compiled="auto")
    X, y = batches([8])[0]
    batch = step(X, y)
    assert "several shards are on one device" in step.passes.reason
    assert np.array_equal(batch.losses[1].asnumpy(), LOSS(batch.outputs[1], y[4:]).asnumpy())


def test_a_second_fit_needs_no_second_graph(calls_to):
    """Unless something else than the data is different."""
    traced, bound = calls_to(compiled_module, "trace"), calls_to(mx.sym.Symbol, "bind")
    net = build(2, dropout=0.0)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    data = batches([6, 5])

    def fit(loss=LOSS, trainer=trainer, **options):
        traced.clear(), bound.clear()
        history = mgpu.fit(net, loss, trainer, data, data, epochs=1, callbacks=[], **options)
        assert np.isfinite(history.rows[-1]["test_loss"])
        return len(traced)

    assert fit() == 2  # to train, and to evaluate
    assert fit() == len(bound) == 0
    net[-1].weight.set_data(mx.nd.zeros((3, 8)))
    assert fit() == 0
    assert fit(loss=gluon.loss.SoftmaxCrossEntropyLoss(weight=0.5)) == 2
    net.hybridize(**STATIC)
    assert fit(loss=LOSS) == 2
    assert fit(compiled="off") == 0
    assert fit(trainer=mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_graphs_that_draw_are_bound_where_the_seed_reaches_them(dropout, calls_to):
    """Others in a thread of their context, so that recurrent operators of two contexts run at the same time."""
    bound_in = calls_to(mx.sym.Symbol, "bind", note=lambda *_, **__: threading.current_thread())
    net = build(2, dropout=dropout)
    mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd"))(*batches([6])[0])
    assert (set(bound_in) == {threading.main_thread()}) is (dropout > 0)
    assert len(set(bound_in)) == (1 if dropout else 2)


def test_graphs_of_gpus_are_bound_by_the_caller(monkeypatch):
    """A GPU has a workspace in each thread that binds. Bound elsewhere, graphs took a second one."""
    monkeypatch.setattr(executors, "_SHARING", "gpu")
    monkeypatch.setattr(executors, "in_own_thread", lambda context, bind: pytest.fail("bound in another thread"))
    net = build(2)
    mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd"))(*batches([6])[0])


def test_a_thread_takes_each_callers_mode_of_arrays():
    """A thread that began with np arrays refused a caller with legacy ones."""
    context, kinds = mx.cpu(11), []
    for is_np in (True, False, True):
        with mx.util.np_shape(is_np), mx.util.np_array(is_np):
            kinds.append(in_own_thread(context, lambda: (mx.util.is_np_shape(), mx.util.is_np_array())))
    assert kinds == [(True, True), (False, False), (True, True)]


def test_a_forked_process_binds_in_threads_of_its_own():
    """The parent's exist there in name only: waiting for them would take forever."""
    context = mx.cpu(0)
    assert in_own_thread(context, lambda: 3) == 3
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(in_own_thread(context, lambda: 4)))
    child.start()
    child.join(60)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 4


def test_what_a_step_returns_outlives_later_steps():
    net = build(2, dropout=0)
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}))
    X, y = batches()[0]
    first = step(X, y)
    read_at_once = [array.asnumpy() for array in (*first.outputs, *first.losses)]
    later = step(X, y)
    assert not np.array_equal(later.losses[0].asnumpy(), read_at_once[2])
    assert_same_bits([array.asnumpy() for array in (*first.outputs, *first.losses)], read_at_once)


def test_running_statistics_can_be_read_at_once():
    """MXNet's compiled graphs write them without telling its engine: 120 of 150 reads without a wait were stale."""
    net = build(2)
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}))
    for X, y in batches([3000] * 4):
        step(X, y)
        read = net[1].running_mean.data(mx.cpu(1)).asnumpy()
        mx.nd.waitall()
        assert np.array_equal(read, net[1].running_mean.data(mx.cpu(1)).asnumpy())


def test_the_largest_shape_owns_the_memory_and_the_others_leave_in_turn(monkeypatch):
    monkeypatch.setattr(compiled_module, "MOST", 3)
    passes = CompiledPasses(initialized(dense(**STATIC), mx.cpu()), LOSS, None, "on")

    def sizes(n):
        passes.forward("test", [mx.nd.ones((n, 36))], [mx.nd.zeros(n)])
        return [bound.executors[0].inputs[0].shape[0] for bound in passes._bound.values()]

    assert [sizes(n) for n in (4, 8, 2, 4)] == [[4], [8], [8, 2], [8, 2, 4]]
    assert sizes(2) == [8, 4, 2]
    assert sizes(3) == [4, 2, 3]  # 8 has been used least recently; its memory stays
    assert sizes(9) == [9]


@pytest.mark.parametrize("num_contexts, dropout, compiled", [(1, 0, False), (2, 0, True), (2, 0.5, False)])
def test_recurrent_networks_are_compiled_where_it_saves_time(num_contexts, dropout, compiled):
    """MXNet's recurrent operator keeps memory in each graph. Contexts run it at once only in graphs without Dropout."""
    net, loss = Seq2Seq(9, 9, embed_size=4, hidden_size=6, dropout=dropout), SequenceLoss()
    net.initialize(ctx=[mx.cpu(i) for i in range(num_contexts)])
    for block in (net, loss):
        block.hybridize()
    tokens, lengths = np.ones((4, 3)), np.full(4, 3)
    for mode in ("auto", "on"):
        step = mgpu.compile_step(net, loss, mgpu.Trainer(net, "sgd"), compiled=mode)
        step((tokens, lengths, tokens), (tokens, lengths))
        assert step.passes.is_compiled == (compiled or mode == "on")


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_errors_name_the_function_that_the_user_has_called(micro_steps):
    def step_of(split_f=mgpu.split_batch, loss=None, **options):
        net = initialized(nn.Dense(3, in_units=4), [mx.cpu(0), mx.cpu(1)])
        trainer = mgpu.Trainer(net, "sgd", **options)
        loss = loss or gluon.loss.SoftmaxCrossEntropyLoss()
        return mgpu.compile_step(net, loss, trainer, split_f=split_f, micro_steps=micro_steps)

    X, y = np.ones((6, 4), "float32"), np.zeros(6)
    calls = [
        lambda: step_of(loss=gluon.loss.L2Loss(batch_axis=1))(X, np.zeros((6, 3))),
        lambda: step_of(loss=Mean())(X, y),
        lambda: step_of(virtual_shards=4, split_f=lambda *batch: batch),
        lambda: step_of()(np.ones((6, 5), "float32"), y),
    ]
    if micro_steps > 1:
        calls += [lambda: step_of()(X, y[:5]), lambda: step_of()(X[:0], y[:0])]
    for call in calls:
        with pytest.raises((TrainerError, StepError, ShardError), match="^compile_step: "):
            call()


class Mean(gluon.loss.L2Loss):
    def hybrid_forward(self, F, output, label):
        return output.mean()


def test_a_batch_without_labels_is_named():
    """The executor ended in a KeyError of the label's name."""
    net = sequential(nn.Dense(2, in_units=1), ctx=mx.cpu(0))
    step = mgpu.compile_step(net, gluon.loss.SoftmaxCrossEntropyLoss(), mgpu.Trainer(net, "sgd"))
    X = np.ones((2, 1), "float32")
    step(X, np.zeros(2, "float32"))
    with pytest.raises(StepError, match="compile_step: got .* for shard 0"):
        step(X, None)


def test_networks_of_one_trainer_may_leave_their_shapes_to_their_first_batches():
    layers = sequential(nn.Dense(2), nn.Dense(1), nn.Dense(1), ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(layers, "sgd")
    for head in (1, 2):
        net = stack(layers[0], layers[head])
        mgpu.compile_step(net, gluon.loss.L2Loss(), trainer, ignore_stale_grad=True)(np.ones((4, 3)), np.ones((4, 1)))
    assert layers[2].weight.shape == (1, 2)


def test_executors_of_former_graphs_are_freed():
    net, (X, y) = dense(), batches([8])[0]
    net.initialize()
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd"))
    step(X, y)
    former = [weakref.ref(one) for one in gc.get_objects() if isinstance(one, Executor)]
    net.hybridize()
    step(X[:2], y[:2])
    gc.collect()
    assert former and all(one() is None for one in former)


class MaybeWeighted(gluon.loss.Loss):
    """Takes labels, or labels and their weights."""

    def hybrid_forward(self, F, output, label):
        y, weight = label if isinstance(label, (list, tuple)) else (label, 1)
        return (output.reshape((-1,)) - y) ** 2 * weight


def test_labels_of_another_nesting_have_another_graph():
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    step = mgpu.compile_step(net, MaybeWeighted(None, 0), mgpu.Trainer(net, "sgd", {"learning_rate": 0.0}))
    X, y, weight = mx.nd.ones((1, 2)), mx.nd.zeros((1,)), mx.nd.full((1,), 5)
    assert [step(X, label).losses[0].asscalar() for label in (y, (y, weight), y)] == [4, 20, 4]


class Summed(gluon.HybridBlock):
    """Takes an array, or a pair."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(1, in_units=2)

    def hybrid_forward(self, F, x):
        return self.layer(x[0] + x[1] if isinstance(x, (list, tuple)) else x)


def test_data_of_another_nesting_do_not_get_the_first_graph():
    """Gluon keeps the graph of a network's first call."""
    net, X = Summed(), mx.nd.ones((1, 2))
    net.initialize()
    with pytest.raises(TrainerError, match="another nesting"):
        mgpu.predict(net, [X, (X, X)], compiled="on")
