"""Processes that differ in one thing raise, all of them, and name it and the ranks: no job trains two networks."""

import json
import sys
import textwrap

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from gluon_mgpu.trainer.first_weights import broadcast_parameters
from mxnet import gluon

from .test_processes import BEGIN, ended, launched
from .versions import nd

pytestmark = pytest.mark.timeout(600)

WORLD = """
    import contextlib
    from gluon_mgpu.errors import ReplicaError, TrainerError
    other = me.rank == 1
    loss, X, y = gluon.loss.L2Loss(), np.ones((4, 2), "float32"), np.zeros((4, 2), "float32")
    class Cosine(mx.lr_scheduler.CosineScheduler):
        pass
    def made(units=2, names="ab", dtype="float32", req="write", mult=1.0, num=2, seed=0, **options):
        optimizer, params = options.pop("optimizer", "sgd"), {"learning_rate": options.pop("rate", 0.1)}
        params.update(options.pop("params", {}))
        net = gluon.nn.Sequential()
        for name in list(names)[:num]:
            own_name = {} if is_mxnet2() else {"prefix": f"{name}_"}
            net.add(gluon.nn.Dense(units, in_units=2, use_bias=False, dtype=dtype, **own_name))
        net.initialize(init.One(), ctx=options.pop("ctx", ctx))
        net[0].weight.grad_req, net[0].weight.lr_mult = req, mult
        given = list(net.collect_params().values()) if options.pop("flat", False) else net
        return net, mgpu.Trainer(given, optimizer, params, **options)
    def train(net, trainer, labels=y, size=4):
        Xs, ys = mgpu.split_batch(X, labels, ctx)
        with autograd.record():
            losses = [loss(net(x), t) for x, t in zip(Xs, ys)]
        trainer.backward(losses)
        trainer.step(size)
    def error(function, *args, **options):
        try:
            function(*args, **options)
        except (TrainerError, ReplicaError) as error:
            return f"{type(error).__name__}: {error}"
"""

SGD = "sgd.SGD" if is_mxnet2() else "optimizer.SGD"
# what rank 1 has otherwise, and how every rank names it
AT_START = {
    "a layer more": ({"num": 1}, "number of parameters: 2 in rank 0; 1 in rank 1"),
    "other shapes": ({"units": 3}, "shape of 0.weight: (2, 2) in rank 0; (3, 2) in rank 1"),
    "another dtype": ({"dtype": "float64"}, "dtype of 0.weight"),
    "another order": ({"names": "ba", "flat": True}, "parameter 0: a_weight in rank 0; b_weight in rank 1"),
    "another order of layers": ({"names": "ba"}, "Gluon's name of 0.weight: a_weight in rank 0; b_weight in rank 1"),
    "a frozen layer of a list": (
        {"req": "null", "flat": True},
        f"grad_req of {'0.' if is_mxnet2() else 'a_'}weight: write in rank 0; null in rank 1",
    ),
    "a frozen layer": ({"req": "null"}, "grad_req of 0.weight: write in rank 0; null in rank 1"),
    "a multiplier": ({"mult": 0.5}, "lr_mult of 0.weight: 1.0 in rank 0; 0.5 in rank 1"),
    "another rate": ({"rate": 0.2}, "learning_rate: 0.1 in rank 0; 0.2 in rank 1"),
    "another optimizer": (
        {"optimizer": "adam"},
        f"optimizer: mxnet.optimizer.{SGD} in rank 0; ",
    ),
    "momentum": ({"params": {"momentum": 0.9}}, "momentum: 0.0 in rank 0; 0.9 in rank 1"),
    "a scale": ({"params": {"rescale_grad": 0.5}}, "rescale_grad: 1.0 in rank 0; 0.5 in rank 1"),
    "a schedule": ({"params": {"lr_scheduler": 0}}, "lr_scheduler.max_update: 50 in rank 0; 90 in rank 1"),
    "clipping": ({"clip_norm": 1.0}, "clip_norm: None in rank 0; 1.0 in rank 1"),
    "sharded data": ({"sharded_data": True}, "sharded_data: False in rank 0; True in rank 1"),
    "devices": ({"ctx": 2}, "number of devices: 1 in rank 0; 2 in rank 1"),
    "comparisons": ({"check_replicas_every": 5}, "check_replicas_every: None in rank 0; 5 in rank 1"),
    "buckets": ({"bucket_bytes": 4}, "bucket_bytes: "),
    "virtual shards": ({"virtual_shards": 4}, "virtual_shards: None in rank 0; 4 in rank 1"),
}

START = """
    def differing(options):
        if "ctx" in options:
            options = {"ctx": [mx.cpu(i) for i in range(options["ctx"])]}
        same = {"flat": True, "names": "ab"} if "flat" in options else {}
        if "lr_scheduler" in options.get("params", {}):
            same, options = ({"params": {"lr_scheduler": Cosine(n)}} for n in (50, 90))
        return made(**{**same, **(options if other else {})})
    tell("start", **{name: error(differing, options) for name, options in json.loads(DIFFERENCES).items()})
"""

UNEVEN = """
    rng = np.random.RandomState(0)
    data = rng.normal(size=(22, 2)).astype("float32"), rng.normal(size=(22, 2)).astype("float32")
    bounds = [(0, 4), (4, 8), (8, 12)] if not me.rank else [(12, 16), (16, 22)]
    batches = [tuple(one[begin:end] for one in data) for begin, end in bounds]
    def uneven(way):
        net, trainer = made(sharded_data=True, optimizer="adam")
        joined = mgpu.data.JoinedBatches(iter(batches) if way == "once" else batches)
        if way == "fit":
            mgpu.fit(net, loss, trainer, joined, epochs=1, callbacks=[], metrics=())
        for features, labels in joined if way != "fit" else ():
            if way == "hand":
                with mgpu.distributed.own_batches():
                    Xs, ys = mgpu.split_batch(features, labels, ctx)
                with autograd.record():
                    losses = [loss(net(x), t) for x, t in zip(Xs, ys)]
                trainer.backward(losses)
                trainer.step(len(features))
            else:
                mgpu.train_batch(net, loss, trainer, features, labels, micro_steps=1 + (way == "micro"))
        return [param.data().asnumpy().tolist() for param in net.collect_params().values()]
    tell("uneven", **{way: uneven(way) for way in ("hand", "train_batch", "once", "micro", "fit")})
"""

LATER = """
    def at_third_step(change, until=40):
        net, trainer = made()
        for step in range(until):
            if step == 2 and other:
                change(net, trainer)
            train(net, trainer)
    def weights(net, trainer):
        net[0].weight.set_data(nd.full((2, 2), 7))
    def checked(change):
        net, trainer = made()
        train(net, trainer)
        if other:
            change(net, trainer)
        train(net, trainer)
        trainer.check_replicas()
    def hand(**options):
        train(*made(), **(options if other else {}))
    def with_train_batch():
        net, trainer = made()
        mgpu.train_batch(net, loss, trainer, X, y + me.rank)
    def alike():
        net, trainer = made()
        for step in range(40):
            trainer.set_learning_rate(0.1 / (step + 1))
            net[0].weight.grad_req = "null" if step % 3 else "write"
            train(net, trainer, y + step)
        trainer.check_replicas()
        return net[1].weight.data().asnumpy().tolist()
    class Sets(mgpu.Callback):
        def on_batch_end(self, state):
            weights(state.net, state.trainer) if other else None
    def fitted():
        net, trainer = made()
        mgpu.fit(net, loss, trainer, [(X, y)] * 3, epochs=1, metrics=(), callbacks=[Sets()])
    def frozen():
        net, trainer = made(req="null")
        train(net, trainer)
        weights(net, trainer) if other else None
        trainer.check_replicas()
    def part():
        net, _ = made()
        weights(net, None) if other else None
        mgpu.train_batch(net, loss, mgpu.Trainer(net[1].collect_params(), "sgd"), X, y)
    def accumulating():
        net, trainer = made()
        with trainer.accumulate() if other else contextlib.nullcontext():
            train(net, trainer)
    def counted_names():
        gluon.nn.Dense(1) if other else None
        net = gluon.nn.Sequential()
        net.add(*[gluon.nn.Dense(2, in_units=2, use_bias=False) for _ in range(2)])
        net.initialize(init.One(), ctx=ctx)
        train(net, mgpu.Trainer(net.collect_params(), "sgd"))
    def saved():
        net, trainer = made()
        weights(net, trainer) if other else None
        mgpu.save_checkpoint(net, f"{folder}/saved", trainer)
    rate, clip = lambda net, trainer: trainer.set_learning_rate(0.3), lambda net, trainer: setattr(trainer.optimizer, "wd", 0.5)
    found = {"rate": error(at_third_step, rate), "wd": error(at_third_step, clip), "size": error(hand, size=2)}
    found.update(labels=error(hand, labels=y + 1), batch=error(with_train_batch))
    found.update(weights=error(checked, weights), rate_checked=error(checked, rate), fit=error(fitted), save=error(saved))
    found.update(frozen=error(frozen), part=error(part), accumulating=error(accumulating))
    net, trainer = made()
    weights(net, trainer) if not me.rank else None
    mgpu.broadcast_parameters(net)
    other_net = gluon.nn.Dense(3 + other, in_units=2)
    other_net.initialize(ctx=ctx)
    special = {}
    for dtype in ("int32", "float16", "float64", "int64" if is_mxnet2() else mx.nd.ndarray._DTYPE_MX_TO_NP[12]):
        one = special[str(dtype)] = gluon.Parameter("one", shape=(2,), dtype=dtype, grad_req="null")
        one.initialize(init.Zero(), ctx=[mx.cpu(0), mx.cpu(1)])
        one.set_data(nd.array([me.rank + 1, 300 + me.rank]).astype(dtype))
    mgpu.broadcast_parameters(special)
    numbers = [data.astype("float32").asnumpy().tolist() for one in special.values() for data in one.list_data()]
    tell("later", weights=net[0].weight.data().asnumpy().tolist(), alike=alike(), numbers=numbers,
         counted_names=error(counted_names), broadcast=error(mgpu.broadcast_parameters, other_net),
         **{"error " + name: one for name, one in found.items()})
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    differences = {name: options for name, (options, _) in AT_START.items()}
    program = [f"DIFFERENCES = {json.dumps(differences)!r}\n", WORLD, START, UNEVEN, LATER]
    return launched(tmp_path_factory.mktemp("job"), program, 2)


own_names = pytest.mark.mxnet1("names of parameters")


@pytest.mark.parametrize(
    "difference", [pytest.param(name, marks=own_names if "another order" in name else ()) for name in AT_START]
)
def test_trainers_that_differ(told, difference):
    for one in told:
        assert one["start"][difference].startswith("TrainerError: Trainer: got "), one["start"][difference]
        assert AT_START[difference][1] in one["start"][difference]


def test_what_one_process_changes_later(told):
    for one in told:
        found = {name[6:]: text for name, text in one["later"].items() if name.startswith("error ")}
        assert "Trainer.step: got learning_rate: 0.1 in rank 0; 0.3 in rank 1" in found["rate"]
        assert "got wd: 0.0 in rank 0; 0.5 in rank 1" in found["wd"]
        assert "got batch size: 4 in rank 0; 2 in rank 1" in found["size"]
        assert "learning_rate: 0.1 in rank 0; 0.3 in rank 1" in found["rate_checked"]
        for name in ("labels", "batch"):
            assert "got checksum of the labels of the first batch: " in found[name]
            assert "Trainer(sharded_data=True)" in found[name]
        assert "got inside accumulate(): False in rank 0; True in rank 1" in found["accumulating"]
        assert found["part"].startswith("TrainerError: train_batch: got values of 0.weight: ")
        assert "mgpu.broadcast_parameters(net)" in found["part"]
        for name in ("weights", "fit", "save", "frozen"):
            assert found[name].startswith("ReplicaError: ")
            assert "set_data" in found[name].split("test")[0]  # before the devices


def test_one_call_gives_all_the_weights_of_the_first(told):
    for one in told:
        assert one["later"]["weights"] == [[7, 7]] * 2
        assert one["later"]["numbers"] == [[1, 300]] * 8  # int32, float16, float64, bfloat16 or int64
        assert "broadcast_parameters: got shape of weight: (3, 2) in rank 0; (4, 2) in rank 1" in one["later"]["broadcast"]


@pytest.mark.parametrize("way", ["hand", "train_batch", "once", "micro", "fit"])
def test_a_process_with_fewer_batches_goes_on_with_empty_ones(told, way):
    """The others would wait for it: the third step is of the examples of process 0 alone."""
    rng = np.random.RandomState(0)
    X, y = (nd.array(rng.normal(size=(22, 2)).astype("float32")) for _ in range(2))
    net = gluon.nn.Sequential()
    net.add(*[gluon.nn.Dense(2, in_units=2, use_bias=False) for _ in range(2)])
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
    for rows in ([*range(4), *range(12, 16)], [*range(4, 8), *range(16, 22)], [*range(8, 12)]):
        with mx.autograd.record():
            loss = gluon.loss.L2Loss()(net(X[rows]), y[rows])
        loss.backward()
        trainer.step(len(rows))
    for one in told:
        for found, param in zip(one["uneven"][way], net.collect_params().values()):
            np.testing.assert_allclose(found, param.data().asnumpy(), rtol=1e-5, atol=1e-6)


def test_changes_that_all_make_are_no_difference(told):
    assert told[0]["later"]["alike"] == told[1]["later"]["alike"]
    assert [one["later"]["counted_names"] for one in told] == [None, None]


def test_a_layer_that_one_process_freezes_ends_the_job(tmp_path):
    """That process would sum other arrays than the others, and all would wait: it notices before, and raises."""
    script = tmp_path / "program.py"
    steps = """
    net, trainer = made()
    for step in range(30):
        if step == 3 and other:
            net[0].weight.grad_req = 'null'
        train(net, trainer)
    mx.nd.waitall()
    """
    script.write_text(BEGIN + textwrap.dedent(WORLD) + textwrap.dedent(steps))
    command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", 2, "--log-dir", tmp_path / "logs", script, tmp_path, 1]
    done = ended(command, tmp_path, code=1)
    assert "got grad_req of 0.weight changed from write to null in rank 1, and not in all others" in done.stderr


def test_devices_get_the_values_of_the_first_one():
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(2, in_units=2), gluon.nn.BatchNorm(in_channels=2))
    net.initialize(mx.init.Normal(), ctx=[mx.cpu(0), mx.cpu(1)])
    for param in net.collect_params().values():
        param.data(mx.cpu(0))[:] = 3
    broadcast_parameters(net)
    assert all((array == 3).asnumpy().all() for one in net.collect_params().values() for array in one.list_data())
