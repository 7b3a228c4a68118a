"""Several processes train as one does, with as many devices: the same script, started by the launcher."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import textwrap
from functools import partial
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu import distributed
from gluon_mgpu.errors import MissingExtraError, ProcessError
from mxnet import gluon

from .versions import nd

pytestmark = pytest.mark.timeout(600)
NO_HOROVOD = importlib.util.find_spec("horovod") is None
needs_horovod = pytest.mark.skipif(NO_HOROVOD, reason="Horovod is not installed: sh scripts/build_horovod.sh")
BACKENDS = ["dist_sync", pytest.param("horovod", marks=needs_horovod)]
NUMBERS = [2, pytest.param(3, marks=pytest.mark.exhaustive)]
STARTERS = ("GLUON_MGPU_", "DMLC_", "HOROVOD_")
BEGIN = """
import json, sys
from functools import partial
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from gluon_mgpu.distributed.process import this_process
from gluon_mgpu.distributed import any_process, group, without_group
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import autograd, gluon, init
nd = mx.np if is_mxnet2() else mx.nd
me = this_process()
folder, num_devices = sys.argv[1], int(sys.argv[2])
ctx = mgpu.devices.resolve_devices([mx.cpu(i) for i in range(num_devices)])
told = {}
def tell(name, **found):
    told[name] = found
    with open(f"{folder}/{me.rank}.json", "w") as file:
        json.dump(told, file)
"""


def ended(command, folder, code=0):
    """The end of a command that starts processes, with this code; it finds nothing of another job in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(STARTERS)}
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": folder}
    done = subprocess.run(list(map(str, command)), env={**environment, "OMP_NUM_THREADS": "1"}, **options)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def launched(folder, parts, num_processes, num_devices=1, backend="dist_sync"):
    """What each process tells, of a program of several parts that is launched."""
    script = folder / "program.py"
    script.write_text(BEGIN + "".join(map(textwrap.dedent, parts)))
    command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", num_processes, "--log-dir", folder / "logs"]
    command += ["--backend", backend, *(["--servers", 2] if backend == "dist_sync" else [])]
    ended([*command, script, folder, num_devices], folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What each process of a job tells in all parts; each job is launched once."""
    made = {}

    def of(num_processes, backend="dist_sync"):
        key = num_processes, backend
        if key not in made:
            folder = tmp_path_factory.mktemp("job")
            made[key] = launched(folder, [SAY, TRAIN, AGREE], num_processes, backend=backend)
        return made[key]

    return of


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What this process tells alone, with a device for each process of a job."""
    made = {}

    def with_devices(num_devices):
        if num_devices not in made:
            folder = tmp_path_factory.mktemp("alone")
            (folder / "program.py").write_text(BEGIN + textwrap.dedent(TRAIN))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", ["program.py", str(folder), str(num_devices)])
                runpy.run_path(str(folder / "program.py"))
            made[num_devices] = json.loads((folder / "0.json").read_text())
        return made[num_devices]

    return with_devices


SAY = """
    g, n = group(), me.num_processes
    said = [one.decode() for one in g.all_gather_bytes(f"{me.rank}".encode() * (1 + 500 * me.rank))]
    empty = [len(one) for one in g.all_gather_bytes(b"")]
    first = [mx.nd.full((2, 2), me.rank + 0.1), mx.nd.full((3,), me.rank + 7, dtype="float16")]
    first += [mx.nd.array([me.rank + 1e-50], dtype="float64")]
    g.broadcast(first)
    numbers = np.float32([[1e8, 1, 3], [-1e8, 2, 5], [1, 4, 7]])[me.rank]  # the first come to 1, 0 or 2, as they are ordered
    arrays = [mx.nd.array(numbers), mx.nd.zeros((3,), ctx=mx.cpu(1))]
    total = g.all_reduce(arrays)
    sums = []
    for _ in range(3):
        arrays[0][:], arrays[1][:] = mx.nd.array(numbers), 0
        total.run(0)
        sums += [array.asnumpy().tolist() for array in arrays]
    with without_group():
        alone = group() is None and len(mgpu.split_batch(np.zeros((4, 1)), np.zeros(4), ctx)[0][0])
    part = [x.asnumpy().tolist() for x in mgpu.split_batch(np.arange(7.0), np.arange(7), ctx)[0]]
    g.barrier()
    tell("say", said=said, empty=empty, first=[array.asnumpy().tolist() for array in first], sums=sums,
         alone=alone, part=part, any=[any_process(me.rank == 1), any_process(False)])
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_processes", NUMBERS)
def test_processes_sum_and_say(job, num_processes, backend):
    found = [told["say"] for told in job(num_processes, backend)]
    expected = {2: [0.0, 3.0, 8.0], 3: [1.0, 7.0, 15.0]}[num_processes]  # (1e8 - 1e8) + 1, in float32
    if backend == "horovod" and num_processes == 3:
        expected = found[0]["sums"][0]  # a ring begins elsewhere in each third, but always there
        assert expected[0] in (0.0, 1.0)
        assert expected[1:] == [7.0, 15.0]
    for rank, told in enumerate(found):
        assert told["said"] == [str(one) * (1 + 500 * one) for one in range(num_processes)]
        assert told["empty"] == [0] * num_processes
        assert told["first"] == [np.full((2, 2), 0.1, "float32").tolist(), [7.0] * 3, [1e-50]]
        assert told["sums"] == [expected] * 6
        assert told["alone"] == 4
        assert told["any"] == [True, False]
        assert told["part"] == [np.array_split(np.arange(7.0), num_processes)[rank].tolist()]


TRAIN = """
    def trained(optimizer, norm, sharded, seed):
        mx.random.seed(me.rank + seed)  # other weights in each process: those of the first count
        net = gluon.nn.Sequential()
        net.add(gluon.nn.Dense(8, activation="tanh", in_units=5), norm, gluon.nn.Dense(4, in_units=8))
        net.initialize(init.Xavier(), ctx=ctx)
        trainer = mgpu.Trainer(net, *optimizer, clip_norm=0.5, sharded_data=sharded)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        rng = np.random.RandomState(0)
        X, y = rng.normal(size=(47, 5)).astype("float32"), rng.randint(0, 4, 47)
        batches = [(X[i : i + 11], y[i : i + 11]) for i in range(0, 45, 11)]  # the last has one example
        if sharded:
            sampler = mgpu.data.ShardedSampler(47, 11, seed=1)
            batches = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), batch_sampler=sampler)
        tests = [(X[:20], y[:20]), (X[20:], y[20:])]
        history = mgpu.fit(net, loss, trainer, batches, tests, epochs=2, callbacks=[], micro_steps=2)
        for _ in range(2):  # by hand, the first of two steps being accumulated
            Xs, ys = mgpu.split_batch(X[:7], y[:7], ctx)
            with trainer.accumulate():
                with autograd.record():
                    losses = [loss(net(x), t) for x, t in zip(Xs, ys)]
                trainer.backward(losses)
                trainer.step(7 if not sharded else len(ys[0]) if ys else 0)
            trainer.flush()
        mean = mgpu.evaluate(net, [(X[:1], y[:1]), (X, y)], loss=loss)
        weights = [param.data(one).asnumpy().tolist() for one in ctx for param in net.collect_params().values()]
        rows = [{name: value for name, value in row.items() if name[:5] in ("train", "test_", "grad_")} for row in history.rows]
        return {"weights": weights, "rows": rows, "mean": mean, "outputs": mgpu.predict(net, [X]).tolist()}
    def convolved():
        # Shapes are decided by the first batch, whose forward pass puts weights into oneDNN's layout.
        mx.random.seed(me.rank)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Conv2D(8, 3, activation="relu"), gluon.nn.BatchNorm(), gluon.nn.Dense(4))
        net.initialize(init.Xavier(), ctx=ctx)
        net.hybridize(static_alloc=True, static_shape=True)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        rng = np.random.RandomState(0)
        X, y = rng.normal(size=(12, 3, 6, 6)).astype("float32"), rng.randint(0, 4, 12)
        mgpu.fit(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, [(X, y)] * 3, epochs=1, callbacks=[])
        return {"outputs": mgpu.predict(net, [X]).tolist(), "weights": []}
    sgd, adam = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}), ("adam", {"learning_rate": 0.01})
    found = {"adam": trained(adam, gluon.nn.Dense(8, in_units=8), False, 3)}
    found["normed"] = trained(sgd, gluon.nn.BatchNorm(in_channels=8), False, 5)
    found["sharded"] = trained(sgd, gluon.nn.Dense(8, in_units=8), True, 7)
    def translated():
        # Batches are sized by tokens; the loss divides by target tokens.
        mx.random.seed(3)
        net = mgpu.models.Seq2Seq(9, 8, embed_size=6, hidden_size=6)
        net.initialize(init.Xavier(), ctx=ctx)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5})
        rng = np.random.RandomState(0)
        pairs = [[rng.randint(4, size, rng.randint(1, 7)).tolist() for _ in range(29)] for size in (9, 8)]
        loader = mgpu.data.PairLoader(*pairs, 60, shuffle=True, num_shards=num_devices * me.num_processes)
        loss = mgpu.models.SequenceLoss()
        history = mgpu.fit(net, loss, trainer, loader, loader, epochs=2, metrics=(), callbacks=[])
        rows = [{name: row[name] for name in ("train_loss", "test_loss")} for row in history.rows]
        return {"weights": [param.data(ctx[0]).asnumpy().tolist() for param in net.collect_params().values()], "rows": rows}
    def stacked():
        # Networks share a layer, and have different numbers of running statistics.
        head, X = gluon.nn.Dense(1, in_units=2), np.random.RandomState(0).normal(5, 2, (8, 2)).astype("float32")
        head.initialize(init.One(), ctx=ctx)
        trainer, norms = mgpu.Trainer(head, "sgd", virtual_shards=6), [gluon.nn.BatchNorm(in_channels=2) for _ in range(3)]
        for own in (norms[:1], norms[1:]):
            net = gluon.nn.Sequential()
            for norm in own:
                norm.initialize(ctx=ctx)
            net.add(*own, head)
            mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, X, np.zeros((8, 1)))
        return {"weights": head.weight.data(ctx[0]).asnumpy().tolist(),
                "rows": [norm.running_mean.data(ctx[0]).asnumpy().tolist() for norm in norms]}
    found["convolved"], found["translated"], found["stacked"] = convolved(), translated(), stacked()
    tell(f"train on {num_devices}", **found)
"""


def numbers(told):
    """All numbers of what was told, in order."""
    if isinstance(told, dict):
        return [number for name in sorted(told) for number in numbers(told[name])]
    return [number for one in told for number in numbers(one)] if isinstance(told, list) else [told]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_processes", NUMBERS)
def test_processes_do_not_show_in_the_weights(job, alone, num_processes, backend):
    first, *others = [told["train on 1"] for told in job(num_processes, backend)]
    for other in others:
        assert other == first  # to the bit: weights, statistics, history, metrics, outputs
    expected = alone(num_processes)[f"train on {num_processes}"]
    for name in expected:
        width = len(first[name]["weights"])
        found = dict(first[name], weights=first[name]["weights"])
        there = dict(expected[name], weights=expected[name]["weights"][:width])  # of its first device
        np.testing.assert_allclose(numbers(found), numbers(there), rtol=1e-5, atol=1e-5)


AGREE = """
    from gluon_mgpu.errors import ModesError, TrainerError
    def linear(units=1, **options):
        net = gluon.nn.Dense(units, in_units=2, use_bias=False)
        net.initialize(init.One(), ctx=ctx)
        return net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.25}, **options)
    def refused(function, *args):
        try:
            function(*args)
        except TrainerError as error:
            return type(error).__name__
    class Masked(gluon.loss.L2Loss):
        def num_units(self, y):
            return int(np.count_nonzero(y))
    class Stop(mgpu.Callback):
        def on_epoch_end(self, state):
            state.stop = "enough" if state.epoch == 2 and not me.rank else state.stop
    found, loss, X, y = [], gluon.loss.L2Loss(), np.ones((6, 2), "float32"), np.zeros(6, "float32")
    net, trainer = linear()
    for _ in range(2):
        mgpu.train_batch(net, loss, trainer, X, y)
        mgpu.save_checkpoint(net, f"{folder}/saved", trainer)
        trainer.save_states(f"{folder}/states")
    mgpu.load_checkpoint(net, f"{folder}/saved", trainer)
    trainer.load_states(f"{folder}/states")
    found.append(net.weight.data().asnumpy().tolist())
    epochs = len(mgpu.fit(net, loss, trainer, [(X, y)], epochs=4, metrics=(), callbacks=[Stop()]).rows)
    mgpu.train_batch(net, Masked(), trainer, X, np.float32([0, 0, 0, 0, 0, 1]))
    found.append(net.weight.data().asnumpy().tolist())
    net, trainer = linear(sharded_data=True)
    trainer.step(0)
    losses = []
    with trainer.accumulate():
        if not me.rank:
            with autograd.record():
                losses = [loss(net(nd.array(X)), nd.array(y))]
        trainer.backward(tuple(losses))
        trainer.step(6 * len(losses))
    trainer.flush()
    found.append(net.weight.data().asnumpy().tolist())
    data = [(X, y)] * (1 + me.rank)
    def retried(*callbacks):
        net = gluon.nn.Dense(2000)
        net.initialize()
        saves = mgpu.Checkpoint(f"{folder}/retried", every=1)
        batch = np.ones((2, 3000), "float32"), np.ones((2, 2000), "float32")
        mgpu.fit(net, loss, mgpu.Trainer(net, "sgd"), [batch] * 2, epochs=1, callbacks=[saves, *callbacks], resume="auto")
    class Fails(mgpu.Callback):
        def on_batch_end(self, state):
            raise TrainerError("the same in all processes")
    errors = [refused(retried, Fails()), refused(retried), refused(mgpu.Trainer, net, "sgld"), refused(linear, 1 + me.rank)]
    errors += [refused(partial(mgpu.fit, epochs=1), net, loss, trainer, data)]
    Xs, ys = mgpu.split_batch(X, y, ctx)
    with autograd.record():
        losses = [loss(net(x), label) for x, label in zip(Xs, ys)]
    trainer.backward(losses)
    errors.append(refused(trainer.step, 6))
    net = gluon.nn.Sequential()
    net.add(*[one for _ in range(6) for one in (gluon.nn.Dense(2, in_units=2), gluon.nn.BatchNorm(in_channels=2))])
    net.initialize(init.Xavier(), ctx=ctx)
    trainers, X = [mgpu.Trainer(net[i], "sgd") for i in range(1, 12, 2)], np.float32(range(12)).reshape(6, 2)
    mgpu.train_batch(net, loss, trainers[-1], X, X)
    statistics = [param.data().asnumpy().tolist() for param in net.collect_params(".*running.*").values()]
    tell("agree", found=found, statistics=statistics, epochs=epochs, errors=errors)
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_processes", NUMBERS)
def test_what_one_process_does_alone_the_others_know(job, num_processes, backend):
    """Checkpoints that one writes, batches without examples or units in some, a callback that stops in one, other data."""
    told = [one["agree"] for one in job(num_processes, backend)]
    for one in told:
        assert one["found"][0] == [[0.25, 0.25]]  # 1 - 0.25 · (1 + 1), and again
        assert one["found"][1] == [[0.25 / 4 - 0.25 * 6 * (0.125) + 0.25] * 2]
        assert one["found"][2] == [[0.5, 0.5]]
        assert one["statistics"] == told[0]["statistics"]  # of layers of six trainers, summed in one order
        assert (one["epochs"], one["errors"]) == (2, ["TrainerError", None, "ModesError", *["TrainerError"] * 2, "ModesError"])


def test_gradients_that_were_not_summed_over_the_processes_are_refused(become):
    place = distributed.Process(0, 2, 0, 2, 0, 1, 0)
    twin = SimpleNamespace(process=place, has_divided=False, broadcast=list)  # the other process has the same
    twin.all_gather_bytes, twin.exchange = lambda message: [message] * 2, lambda number: nd.array([number] * 2)
    twin.all_reduce, summed = lambda arrays: SimpleNamespace(run=summed.append), []
    become(twin)
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(ctx=[mx.cpu(0)])
    trainer = mgpu.Trainer(net, "sgd")
    with mx.autograd.record():
        loss = net(nd.ones((1, 2)))
    mgpu.backward([loss])
    with pytest.raises(mgpu.errors.TrainerError):
        trainer.update(1)
    for step in (partial(trainer.step, 6), trainer.allreduce_grads):  # of whole batches: n processes took n times the gradient
        with pytest.raises(mgpu.errors.ModesError, match="Divide it with mgpu.split_batch"):
            step()
    mgpu.Trainer(net, "sgd", sharded_data=True).allreduce_grads()
    assert len(summed) == 1


@needs_horovod
def test_horovods_own_launcher(tmp_path):
    """A script that horovodrun starts is told its place in Horovod's words."""
    script = tmp_path / "program.py"
    script.write_text(
        BEGIN
        + textwrap.dedent("""
        tell("place", place=vars(me), said=[one.decode() for one in group().all_gather_bytes(str(me.rank).encode())])
    """)
    )
    command = ["horovodrun", "--gloo", "-np", 2, "-H", "localhost:2", sys.executable, script, tmp_path, 1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(STARTERS)}
    path = os.pathsep.join([os.path.dirname(sys.executable), environment["PATH"]])
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env={**environment, "PATH": path})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())["place"]
        assert told["said"] == ["0", "1"]
        assert (told["place"]["rank"], told["place"]["num_processes"], told["place"]["num_nodes"]) == (rank, 2, 1)


FAIL = """
    total = group().all_reduce([mx.nd.ones((1000,))])
    for step in range(100):
        total.run(0)
        mx.nd.waitall()
        if step == 3 and me.rank == 1 and not me.restart:
            raise ValueError("this one")
        if step == 6:
            break
    tell("end", restart=me.restart)
"""


@needs_horovod
def test_a_worker_of_horovod_that_fails(tmp_path):
    """It is the cause, not those whose connections it has broken; and with a restart all goes on."""
    for restarts, code in ((0, 1), (1, 0)):
        script = tmp_path / "program.py"
        script.write_text(BEGIN + textwrap.dedent(FAIL))
        command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", 2, "--backend", "horovod", "--max-restarts", restarts]
        done = ended([*command, script, tmp_path, 1], tmp_path, code)
        assert "rank 1 exited with status 1, the first of 2" in done.stderr
        assert "ValueError: this one" in done.stderr
    assert json.loads((tmp_path / "0.json").read_text()) == {"end": {"restart": 1}}


def test_a_job_for_horovod_where_it_is_not(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.delenv("DMLC_ROLE", raising=False)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(MissingExtraError, match="build_horovod"):
        distributed.Group(distributed.Process(0, 2, 0, 2, 0, 1, 0))


def test_a_process_alone_has_no_group():
    assert distributed.group() is None
    assert distributed.process_shard() == (0, 1)


def test_a_job_without_a_store_is_reported(monkeypatch):
    monkeypatch.delenv("DMLC_ROLE", raising=False)
    with pytest.raises(ProcessError, match="gluon-mgpu launch"):
        distributed.Group(distributed.Process(0, 2, 0, 2, 0, 1, 0))


def test_a_store_of_the_programs_own_is_reported(monkeypatch):
    monkeypatch.setenv("DMLC_ROLE", "worker")
    free = dict.fromkeys(["__init__", "__del__"], lambda self: None)
    own = type("Own", (mx.kvstore.KVStore,), {"type": "dist_sync", **free})()
    with pytest.raises(ProcessError, match="a store of its own"):
        distributed.Group(distributed.Process(0, 2, 0, 2, 0, 1, 0))
    del own


def group_of(backend):
    """A group of two processes whose backend is a stand-in."""
    group = object.__new__(distributed.Group)
    group.process, group.backend, group._note = distributed.Process(0, 2, 0, 2, 0, 1, 0), backend, lambda kind: None
    return group


def test_messages_of_any_length_come_back_and_too_long_ones_are_refused():
    """The other process sends three bytes; float32 holds a length exactly up to 2**24."""
    sent = []

    def all_gather(numbers):
        sent.append(numbers)
        other = np.zeros_like(numbers)
        other[:3] = (3,) if len(numbers) == 1 else (7, 0, 255)
        return np.stack([numbers, other])

    group = group_of(SimpleNamespace(all_gather=all_gather))
    for message in (b"", b"\x00\xff", bytes(range(256)) * 5):
        assert group.all_gather_bytes(message) == [message, b"\x07\x00\xff"]
    assert len({len(numbers) for numbers in sent}) <= 3  # few sizes: a store keeps an array for each
    with pytest.raises(ProcessError, match="processes: got a message of .* bytes"):
        group.all_gather_bytes(bytes(2**24 + 1))


def test_weights_that_train_apart_are_refused(become):
    become(object())
    net = mgpu.models.resnet18(2)
    with pytest.raises(mgpu.errors.TrainerError, match="several processes"):
        mgpu.LocalSGD(net, "sgd", every=2)


def test_another_way_to_split_is_refused(become):
    become()
    devices = mgpu.devices.resolve_devices("cpu*1")
    with pytest.raises(mgpu.errors.TrainerError, match="split_batch"):
        mgpu.eval_batch(gluon.nn.Dense(1), np.zeros((2, 1)), np.zeros(2), ctx=devices, split_f=lambda X, y, ctx: ([X], [y]))


def test_the_units_of_micro_steps_are_those_of_their_losses(become):
    """They were those of the first half of the batch, of which the first process had only a part in its micro-steps."""
    become()
    net, loss = gluon.nn.Dense(1, in_units=2), gluon.loss.L2Loss()
    net.initialize()
    loss.num_units = lambda y: int(np.count_nonzero(y))
    batch = mgpu.train_batch(net, loss, mgpu.Trainer(net, "sgd"), np.ones((8, 2)), np.float32([1, 1, 0, 0] * 2), micro_steps=2)
    assert (batch.num_units, [label.asnumpy().tolist() for label in batch.labels]) == (4, [[1, 1], [1, 1]])
