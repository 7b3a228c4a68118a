import json
import os
import pickle

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import StaleGradientError, StateError, TrainerError
from gluon_mgpu.models.hybrid_block import named
from gluon_mgpu.trainer.options import batch_size_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import LOSS, initialized, largest_difference, sequential, small_batches, small_net, stack, train, weights_of
from .versions import nd, reset_ctx
from .worlds import devices as devices

CTX = [mx.cpu(0), mx.cpu(1)]
OPTIMIZERS = [("sgd", {"learning_rate": 0.1}), ("sgd", {"learning_rate": 0.1, "momentum": 0.9}), ("lamb", {}), ("lars", {})]
OPTIMIZERS += [("nag", {"learning_rate": 0.1, "momentum": 0.9}), ("adam", {"learning_rate": 0.01}), ("nadam", {}), ("dcasgd", {})]
OPTIMIZERS += [("rmsprop", {"learning_rate": 0.01, "centered": True}), ("adagrad", {"learning_rate": 0.1})]
MORE_OPTIMIZERS = [("adadelta", {}), ("ftrl", {}), ("adamax", {}), ("ftml", {}), ("signum", {})]


def test_it_is_a_gluon_trainer():
    trainer = mgpu.Trainer(small_net(CTX), "sgd", {"learning_rate": 0.25})
    assert isinstance(trainer, gluon.Trainer)
    assert (trainer.learning_rate, trainer.contexts) == (0.25, CTX)
    trainer.set_learning_rate(0.5)
    assert trainer.learning_rate == trainer.optimizer.learning_rate == 0.5


@pytest.mark.parametrize("form", ["block", "ParameterDict", "dict", "list"])
def test_it_takes_a_block_or_parameters(form):
    net = small_net(CTX)
    params = net.collect_params()
    given = {"block": net, "ParameterDict": params, "dict": dict(params.items()), "list": list(params.values())}[form]
    train(net, mgpu.Trainer(given, "sgd", {"learning_rate": 0.1}), small_batches([5] * 2))
    assert mgpu.replica_difference(net) == 0.0
    reference = small_net(CTX)
    train(reference, mgpu.Trainer(reference, "sgd", {"learning_rate": 0.1}), small_batches([5] * 2))
    assert largest_difference(weights_of(net), weights_of(reference)) == 0.0


@pytest.mark.parametrize(
    "optimizer, params",
    [*OPTIMIZERS, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in MORE_OPTIMIZERS)],
    ids=[f"{name}-{'-'.join(params)}" for name, params in OPTIMIZERS + MORE_OPTIMIZERS],
)
@pytest.mark.usefixtures("fresh_names")
def test_every_optimizer_keeps_replicas_and_saves_its_states(optimizer, params, tmp_path):
    """Stop after two steps, resume in a new trainer: the bits of three steps; on other devices, the same within the bound."""
    batches = small_batches([6] * 3)
    straight = small_net(CTX)
    train(straight, mgpu.Trainer(straight, optimizer, dict(params)), batches)
    first = small_net(CTX)
    trainer = mgpu.Trainer(first, optimizer, dict(params))
    train(first, trainer, batches[:2])
    trainer.save_states(str(tmp_path / "states"))
    first.save_parameters(str(tmp_path / "params"))
    for ctx, bound in ((CTX, 0.0), (CTX + [mx.cpu(2)], 1e-5), (CTX[1:], 1e-5)):
        second = small_net(ctx)
        second.load_parameters(str(tmp_path / "params"), ctx=ctx)
        trainer = mgpu.Trainer(second, optimizer, dict(params))
        trainer.load_states(str(tmp_path / "states"))
        train(second, trainer, batches[2:])
        assert mgpu.replica_difference(second) == 0.0
        assert largest_difference(weights_of(second), weights_of(straight)) <= bound


def test_loading_takes_the_learning_rate_along_and_continues_a_schedule(tmp_path):
    net, schedules = small_net(CTX), [mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0) for _ in range(2)]
    trainer, other = (mgpu.Trainer(net, "sgd", {"learning_rate": 1.0, "lr_scheduler": schedule}) for schedule in schedules)
    train(net, trainer, small_batches([4] * 3))
    trainer.save_states(str(tmp_path / "states"))
    other.load_states(str(tmp_path / "states"))
    assert other.learning_rate == trainer.learning_rate == 0.25
    train(net, other, small_batches([4]))
    assert other.learning_rate == 0.125
    fixed, another = (mgpu.Trainer(net, "sgd", {"learning_rate": rate}) for rate in (0.5, 9.0))
    fixed.save_states(str(tmp_path / "states"))
    another.load_states(str(tmp_path / "states"))
    assert another.learning_rate == 0.5


def world(optimizer="sgd", rate=0.1):
    """A network and its trainer after a step."""
    net = small_net(CTX)
    trainer = mgpu.Trainer(net, optimizer, {"learning_rate": rate})
    train(net, trainer, small_batches([4]))
    return net, trainer


def saved_states(tmp_path, optimizer="adam"):
    net, trainer = world(optimizer, 0.01)
    path = str(tmp_path / "states")
    trainer.save_states(path)
    return net, trainer, path


def test_states_of_something_else_are_refused(tmp_path):
    _, sgd, _ = saved_states(tmp_path, "sgd")
    net, trainer, path = saved_states(tmp_path)
    train(net, trainer, small_batches([4]))
    count = dict(trainer.steps.update.counts())
    arrays = dict(np.load(path))
    values = json.loads(arrays.pop("trainer.json").tobytes())
    first = values["states"]["0"]
    wider = sequential(nn.Dense(3, in_units=4), nn.Dense(5, in_units=3), ctx=CTX)
    cases = [
        (mgpu.Trainer(wider, "adam"), {}, r"of another network: '0\.weight' \(4, 1, 3, 3\) where this one has"),
        (mgpu.Trainer(small_net(CTX), "adam"), {}, "got "),  # its first batch has not come: shapes are not known
        (sgd, {}, "Adam' where this one has mxnet.optimizer.*SGD"),
        (trainer, {"version": 3}, "of version 3; expected version 1"),
        (trainer, {"states": {**values["states"], "0": first[:1]}}, "'state/0/1', which is not a state"),
        (trainer, {"states": {**values["states"], "0": None}}, "which is not a state"),
        (trainer, {"states": {**values["states"], "99": first}}, "damaged"),
        (trainer, {"states": {**values["states"], "0": values["states"]["2"]}}, "got "),
        (trainer, {"counts": {"0": 1}}, "a state or a count of"),
        (trainer, {"optimizer": {}}, "damaged"),
        (trainer, {"order": [0]}, "damaged"),
    ]
    for one, altered, told in cases:
        content = np.frombuffer(json.dumps({**values, **altered}).encode(), np.uint8)
        with open(tmp_path / "wrong", "wb") as file:
            np.savez(file, **{**arrays, "trainer.json": content})
        with pytest.raises(StateError, match=told):
            one.load_states(str(tmp_path / "wrong"))
    whole = (tmp_path / "states").read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-10], b"not a pickle", pickle.dumps({0: 1, "some": 2})):
        (tmp_path / "wrong").write_bytes(content)
        with pytest.raises(StateError, match="damaged or no file of Trainer.save_states"):
            trainer.load_states(str(tmp_path / "wrong"))
    with pytest.raises(FileNotFoundError):
        trainer.load_states(str(tmp_path / "nowhere"))
    assert trainer.steps.update.counts() == count  # nothing was changed
    trainer.load_states(path)
    assert trainer.steps.update.counts() != count


class CopiedParameter(gluon.Parameter):
    """As GluonNLP's weight drop, whose `data` is another array each time."""

    def data(self, ctx=None):
        return super().data(ctx) * 1


@pytest.mark.parametrize("name", ["sgd", "adagrad", "nadam", "wrapped sgd"])
def test_parameters_whose_data_are_copies_are_updated(name):
    """Also by an optimizer whose method a program has wrapped."""
    found = []
    for make, ctx in ((gluon.Trainer, CTX[:1]), (mgpu.Trainer, CTX)):
        param = CopiedParameter("weight", shape=(2,), init=mx.init.One())
        param.initialize(ctx=ctx)
        optimizer = mx.optimizer.create(name.split()[-1], learning_rate=0.1)
        once = optimizer.update_multi_precision
        if "wrapped" in name:
            optimizer.update_multi_precision = lambda *args, once=once: [once(*args), once(*args)]
        trainer = make([param], optimizer)
        for _ in range(3):
            with autograd.record():
                losses = [param.data(context).sum() for context in ctx]
            autograd.backward(losses)
            trainer.step(len(ctx))
        found += [array.asnumpy() for array in param.list_data()]
    assert found[0].max() < 1 and largest_difference(found[:1] * len(CTX), found[1:]) < 1e-6


def test_gluon_s_private_parts_of_a_step_are_refused():
    class Clipped(mgpu.Trainer):
        def _allreduce_grads(self):
            super()._allreduce_grads()

    net = small_net(CTX)
    with pytest.raises(TrainerError, match="Clipped: got _allreduce_grads"):
        Clipped(net, "sgd")
    trainer = mgpu.Trainer(net, "sgd")
    for call in (trainer._allreduce_grads, lambda: trainer._init_optimizer("adam", {})):
        with pytest.raises(TrainerError, match=": got .* Call "):
            call()
    assert type(trainer.optimizer).__name__ == "SGD"


def test_a_file_of_states_is_always_whole(tmp_path, failing):
    net, trainer, path = saved_states(tmp_path)
    before = (tmp_path / "states").read_bytes()
    train(net, trainer, small_batches([4]))
    failing(os, "fsync", error=OSError("No space left on device"))
    with pytest.raises(OSError, match="No space"):
        trainer.save_states(path)
    assert (tmp_path / "states").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["states"]


def test_an_update_of_one_device_needs_no_sum():
    alone = small_net(CTX[:1])
    with autograd.record():
        loss = LOSS(alone(nd.ones((1, 1, 6, 6))), nd.zeros((1,)))
    loss.backward()
    mgpu.Trainer(alone, "sgd", {"learning_rate": 0.1}).update(1)


def test_an_update_of_parameters_that_were_frozen_after_the_sum_is_refused():
    net, trainer = world()
    with autograd.record():
        losses = [LOSS(net(x), t) for x, t in zip(*mgpu.split_batch(*small_batches([4])[0], CTX))]
    trainer.backward(losses)
    trainer.allreduce_grads()
    before = weights_of(net)
    net[0].weight.grad_req = "null"
    with pytest.raises(TrainerError, match="frozen, initialised or cast after allreduce_grads"):
        trainer.update(4)
    net[0].weight.grad_req = "write"
    assert largest_difference(before, weights_of(net)) == 0.0


def test_a_network_that_changes_under_its_trainer():
    net, trainer = world()
    net[0].weight.set_data(nd.zeros(net[0].weight.shape))
    before = [param.data(CTX[1]).asnumpy() for param in net.collect_params().values()]
    train(net, trainer, small_batches([4]))
    assert mgpu.replica_difference(net) == 0.0
    assert largest_difference(before, weights_of(net)) < 1.0
    reset_ctx(net, [mx.cpu(2)])
    with autograd.record():
        loss = LOSS(net(nd.ones((1, 1, 6, 6), ctx=mx.cpu(2))), nd.zeros((1,), ctx=mx.cpu(2)))
    loss.backward()
    with pytest.raises(TrainerError, match=r"0\.weight initialised again, moved or cast, as float32 on \[cpu\(2\)\]"):
        trainer.step(1)


def test_a_step_without_any_backward_is_refused():
    trainer = mgpu.Trainer(small_net(CTX), "sgd", {"learning_rate": 0.1})
    with pytest.raises(StaleGradientError, match="0.weight, 0.bias"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)  # nothing to do


def scattered():
    net = stack(nn.Dense(1, in_units=1), nn.Dense(1, in_units=1), kind=nn.Sequential)
    net[0].initialize(ctx=CTX)
    net[1].initialize(ctx=CTX[:1])
    return net


def sparse_weight():
    return initialized(gluon.contrib.nn.SparseEmbedding(4, 2), CTX)


BAD = [
    (lambda: mgpu.Trainer(nn.Dense(1, in_units=1), "sgd"), "weight not initialised"),
    (lambda: mgpu.Trainer(scattered(), "sgd"), r"got 1\.weight on \[cpu\(0\)\] and others on \[cpu\(0\), cpu\(1\)\]"),
    (lambda: mgpu.Trainer(nn.Flatten(), "sgd"), "got no parameters"),
    (lambda: mgpu.Trainer(3, "sgd"), "got int as the parameters"),
    (lambda: mgpu.Trainer([1, 2], "sgd"), "got int for 0"),
    (lambda: mgpu.Trainer(list(small_net(CTX).collect_params().values()) * 2, "sgd"), "expected different names"),
    (lambda: mgpu.Trainer(small_net(CTX), "sgd", update_on_kvstore=True), "update_on_kvstore=True"),
    (lambda: mgpu.Trainer(small_net(CTX), "sgd", compression_params={"type": "2bit"}), "expected None"),
    (lambda: mgpu.Trainer(small_net(CTX), "sgd", clip_norm=0), "got clip_norm=0"),
    (lambda: mgpu.Trainer(small_net(CTX), "sgd", clip_norm=float("nan")), "got clip_norm=nan"),
    (lambda: mgpu.Trainer(small_net(CTX), "sgd", clip_value=-1), "got clip_value=-1"),
    (lambda: mgpu.Trainer(small_net(CTX), "sgd", clip_value=True), "got clip_value=True"),
    pytest.param(lambda: mgpu.Trainer(sparse_weight(), "sgd"), "stored sparsely", marks=pytest.mark.mxnet1("sparse arrays")),
    (lambda: mgpu.Trainer(small_net(CTX), "sgd", kvstore="nonsense"), "got kvstore 'nonsense'"),
]


@pytest.mark.parametrize("call, told", BAD)
def test_what_cannot_be_trained_with_is_reported(call, told):
    with pytest.raises(TrainerError, match=told):
        call()


@pytest.mark.parametrize("batch_size", [0, -1, None, "8", float("nan"), float("inf"), True])
def test_a_batch_size_is_a_positive_number(batch_size):
    trainer = mgpu.Trainer(small_net(CTX), "sgd")
    for method in (trainer.step, trainer.update):
        with pytest.raises(TrainerError, match="got batch_size"):
            method(batch_size)


@pytest.mark.parametrize("batch_size", [np.array(4), np.float32(4), nd.array([4]), mx.np.array([[4]])])
def test_a_batch_size_may_be_an_array_of_one_element(batch_size):
    assert batch_size_of("Trainer.step", batch_size) == 4


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_update_divided_by_an_array_that_is_not_finite_is_left_out(number):
    net = initialized(nn.Dense(1, in_units=1, use_bias=False), CTX, mx.init.One())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0})
    for batch_size, weight in ((nd.array([number]), 1.0), (2, 0.0)):
        with autograd.record():
            losses = [net(nd.ones((1, 1), ctx=context)) for context in CTX]
        trainer.backward(losses)
        trainer.allreduce_grads()
        trainer.update(batch_size)
        assert net.weight.data(CTX[1]).asnumpy().item() == weight


@pytest.mark.parametrize("num_devices, optimizer, states", [(1, "sgd", 0), (2, "adagrad", 1), (4, "adam", 2)])
def test_bytes_are_counted_and_alike_on_every_device(num_devices, optimizer, states):
    ctx = [mx.cpu(i) for i in range(num_devices)]
    net = nn.HybridSequential()
    for _ in range(8):
        net.add(nn.Dense(128, in_units=128))
    net.initialize(ctx=ctx)
    trainer = mgpu.Trainer(net, optimizer, shard_optimizer=False)
    with autograd.record():
        losses = [net(nd.ones((2, 128), ctx=context)).sum(axis=1) for context in ctx]
    trainer.backward(losses)
    trainer.step(2)
    size = 8 * (128 * 128 + 128) * 4
    held = trainer.bytes_per_device()
    assert list(held) == [str(context) for context in ctx]
    for parts in held.values():
        assert (parts["weights"], parts["gradients"], parts["states"]) == (size, size, states * size)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "options, optimizer_params, wanted",
    [
        ({}, {}, lambda mean: mean),
        ({"clip_norm": 2.0}, {}, lambda mean: mean * 2 / np.linalg.norm(mean)),
        ({"clip_norm": 99.0}, {}, lambda mean: mean),
        ({"clip_value": 1.5}, {}, lambda mean: np.clip(mean, -1.5, 1.5)),
        ({"clip_norm": 2.0, "clip_value": 1.5}, {}, lambda mean: np.clip(mean * 2 / np.linalg.norm(mean), -1.5, 1.5)),
        ({"clip_value": 1.5}, {"clip_gradient": 1.0}, lambda mean: np.clip(mean, -1.0, 1.0)),
        ({}, {"clip_gradient": 1.0}, lambda mean: np.clip(mean, -1.0, 1.0)),
    ],
    ids=lambda value: "wanted" if callable(value) else repr(value),
)
def test_clipping_is_of_what_was_summed_and_averaged(devices, arrays, options, optimizer_params, wanted):
    """Against NumPy; each device's gradient alone would be cut at other places."""
    net = initialized(nn.Dense(1, in_units=3, use_bias=False), devices, mx.init.Zero())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0, **optimizer_params}, measure_grad_norm=True, **options)
    assert trainer.grad_norm is None
    X = np.array([[9, -3, 0], [-1, 0, 5], [1, 1.5, -9], [0, -9, 3]], "float32")
    mgpu.train_batch(net, lambda out, y: out.reshape((-1,)), trainer, X, X)
    mean = X.astype("float64").mean(axis=0)
    for context in devices:
        np.testing.assert_allclose(net.weight.data(context).asnumpy()[0], -wanted(mean), atol=1e-6)
    assert trainer.grad_norm.context == devices[0]
    assert float(trainer.grad_norm) == pytest.approx(np.linalg.norm(mean), rel=1e-6)


def test_a_norm_that_nobody_asked_for_is_not_computed():
    net = small_net(CTX)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, clip_value=1.0)
    train(net, trainer, small_batches([4]))
    assert trainer.grad_norm is None


class TwoHeads(gluon.Block):
    """A network of which each pass uses one head."""

    def __init__(self):
        super().__init__()
        with named(self):
            self.body = nn.Dense(3, in_units=2)
            self.heads = nn.HybridSequential()
            self.heads.add(nn.Dense(2, in_units=3), nn.Dense(2, in_units=3))
        self.head = 0

    def forward(self, x):
        return self.heads[self.head](self.body(x))


def test_unused_parameters_are_left_alone(arrays):
    mx.random.seed(1)
    net = initialized(TwoHeads(), CTX, mx.init.Xavier())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, find_unused_parameters=True)
    X, y = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])
    mgpu.train_batch(net, LOSS, trainer, X, y)
    before = weights_of(net)
    mgpu.train_batch(net, LOSS, trainer, X, y)
    changed = [not np.array_equal(old, new) for old, new in zip(before, weights_of(net))]
    assert changed == [True, True, True, True, False, False]
    net.head = 1
    mgpu.train_batch(net, LOSS, trainer, X, y)
    assert mgpu.replica_difference(net) == 0.0
    with pytest.raises(StaleGradientError, match="find_unused_parameters=True"):
        trainer.step(4)  # nothing was passed back at all
    plain = mgpu.Trainer(net, "sgd")
    with pytest.raises(StaleGradientError, match=r"heads\.0\.weight"):
        mgpu.train_batch(net, LOSS, plain, X, y)


@pytest.mark.mxnet1("messages of MXNet")
@pytest.mark.parametrize("optimizer, params, name", [("adam", {"lr": 0.01}, "lr"), ("sgd", {"colour": 1}, "colour")])
def test_an_unknown_hyperparameter_is_named(optimizer, params, name):
    with pytest.raises(
        TrainerError, match=f"^Trainer: got .*unexpected keyword argument '{name}'; expected options of {optimizer}"
    ):
        mgpu.Trainer(small_net(CTX), optimizer, params)


def test_the_largest_difference_of_replicas():
    net = initialized(nn.Dense(1, in_units=2), [mx.cpu(i) for i in range(3)], mx.init.One())
    net.weight.data(mx.cpu(1))[:] = nd.array([[1.5, -1]])
    net.bias.data(mx.cpu(2))[:] = 0.25
    assert mgpu.replica_difference(net) == 2.0
