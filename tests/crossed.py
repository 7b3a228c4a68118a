"""Runs programs that cross modes on several devices, also in jobs of processes, and compares them with plain Gluon."""

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from gluon_mgpu.mxnet_internals.blocks import children
from gluon_mgpu.mxnet_internals.parameters import gradients_of
from gluon_mgpu.refusals import JOINING
from mxnet import autograd
from mxnet.gluon import nn

from .crossing_nets import Fork, Join, load, make_generator, make_net, shortened
from .crossings import LOSS, Plain, Program, World

ROOT = Path(__file__).parent.parent
BOUND = 1e-5  # of weights around 1; larger ones in proportion
FLAGS = {"dynamic": {}, "static": {"static_alloc": True, "static_shape": True}}


class BrokenError(Exception):
    """What a program's own code raises in the middle of a batch."""


def break_last(output, label):
    """A loss that raises at the shard with the last example, whose label is -1: all others have been computed."""
    if (label.asnumpy() < 0).any():
        raise BrokenError
    return LOSS(output, label)


class Ours(World):
    """Several devices, with gluon_mgpu."""

    def __init__(self, program):
        super().__init__(program)
        self.loss, self.generator, self.former = LOSS, None, []
        self.early = {}  # batches that were split early, and their shards
        self.split = partial(mgpu.split_batch, weights=list(program.weights)) if program.weights else mgpu.split_batch
        self.begin(program.num_devices)

    def begin(self, num_devices):
        """Make the network and its trainer."""
        program = self.program
        rank = mgpu.distributed.this_process().rank
        contexts = [mx.cpu(i) for i in range(num_devices)]
        net = make_net(program, mx.cpu(0) if program.stages else contexts, seed=rank)
        if program.stages:
            net = self.pipeline(net)
        if program.hybridize is not None:
            net.hybridize(**FLAGS[program.hybridize])
        self.begin_with([net])
        self.net, self.steps = net, {}
        if self.is_adding:
            self.require("add")
        if self.bn != "local":
            mgpu.set_batch_norm(net, self.bn)
        self.trainer = self.make_trainer()

    def next_batch(self, size):
        """Return a batch, whose shards may be made now."""
        X, y = super().next_batch(size)
        if self.program.splits == "early":
            self.early[id(X)] = X, self.split(X, y, self.trainer.contexts)
        return X, y

    def shards_of(self, X, y):
        """Return the shards of a batch."""
        if self.program.splits == "twice":
            self.split(X, y, self.trainer.contexts)
        return self.early.pop(id(X))[1] if id(X) in self.early else self.split(X, y, self.trainer.contexts)

    def make_trainer(self):
        """Return a trainer of the network."""
        program = self.program
        options = {name: getattr(program, name) for name in ("clip_norm", "clip_value", "shard_optimizer")}
        if program.virtual_shards:
            options["virtual_shards"] = program.virtual_shards
        kind = mgpu.LocalSGD if program.local_steps else mgpu.Trainer
        if program.local_steps:
            options["every"] = program.local_steps
        return kind(self.net, *program.trainer, **options)

    def renew(self):
        """Train on with a new trainer; the former one stays alive, as it does until Python collects garbage."""
        self.average()
        self.former.append(self.trainer)
        self.trainer, self.steps = self.make_trainer(), {}

    def reload(self, num_devices):
        """Go on from a checkpoint with a new network and trainer."""
        self.average()
        frozen = [name for name, param in self.net.collect_params().items() if param.grad_req == "null" and name in self.thawed]
        thawed, layers, old = self.thawed, self.layers, self.net
        with tempfile.TemporaryDirectory() as own:
            folder = Path("checkpoint") if self.program.num_processes > 1 else Path(own, "checkpoint")
            mgpu.save_checkpoint(self.net, folder, self.trainer)
            self.former.append(self.trainer)
            self.begin(num_devices)
            self.thawed, self.layers = thawed, layers
            for name in self.thawed:
                one, other = self.net.collect_params()[name], old.collect_params()[name]
                one.lr_mult, one.wd_mult = other.lr_mult, other.wd_mult
            for name in frozen:
                self.net.collect_params()[name].grad_req = "null"
            mgpu.load_checkpoint(self.net, folder, self.trainer)

    def pipeline(self, net):
        """Return a pipeline of the network."""
        program = self.program
        if program.own_stages:  # two devices take turns
            stages = [Fork(net), Join(net), net.d] if program.net == "skip" else children(net)
            places = [i % 2 for i in range(len(stages))]
        else:
            sample = load(np.zeros((2, 5), "float32"), mx.cpu(0))
            stages, places = mgpu.split_stages(net, program.stages, sample, balance="bytes"), range(program.stages)
        width = max(places) + 1
        devices = [[mx.cpu(width * replica + place) for place in places] for replica in range(program.replicas)]
        options = {"schedule": program.schedule, "recompute": program.recompute}
        return mgpu.Pipeline(stages, devices, micro_batches=program.micro_batches, **options)

    def require(self, grad_req):
        """Set how backward passes write the gradients of parameters that are not frozen."""
        for param in self.trained(self.net).values():
            param.grad_req = grad_req

    def step(self, how, size, micro_steps):
        """One update by one batch."""
        self.train(how, [self.next_batch(size)], micro_steps)

    def group(self, how, sizes, ends):
        """One update by several batches."""
        batches = [self.next_batch(size) for size in sizes]
        if "fit" in how:
            self.train(how, batches, 1)
            return
        with self.trainer.accumulate():
            for one in batches[: None if ends == "flush" else -1]:
                self.train(how, [one], 1)
        if ends == "flush":
            self.trainer.flush(self.program.ignore_stale)
        else:
            self.train(how, batches[-1:], 1)

    def parts(self, how, sizes):
        """One update by several batches, of the network and of the one without its last layer in turns."""
        with self.trainer.accumulate():
            for number, size in enumerate(sizes):
                self.num_left_out = number % 2
                self.train(how, [self.next_batch(size)], 1)
        self.num_left_out = 0
        self.trainer.flush(self.program.ignore_stale)

    def train(self, how, batches, micro_steps):
        """Train on batches, which make one update unless `accumulate` is open."""
        ignore, options = self.program.ignore_stale, {"micro_steps": micro_steps, "split_f": self.split}
        (X, y), net, trainer = batches[0], shortened(self.net, self.num_left_out), self.trainer
        if how == "train_batch":
            mgpu.train_batch(net, self.loss, trainer, X, y, ignore_stale_grad=ignore, **options)
        elif how == "compiled":
            kind = micro_steps, self.num_left_out
            if kind not in self.steps:
                self.steps[kind] = mgpu.compile_step(net, LOSS, trainer, ignore_stale_grad=ignore, **options)
            self.steps[kind](X, y)
        elif "fit" in how:
            options.update(accumulate_grad_batches=len(batches), metrics=(), callbacks=[], epochs=1)
            options.update(compiled="on" if how == "compiled fit" else "auto")
            mgpu.fit(net, LOSS, trainer, batches, **options)
        else:
            self.backward(X, y, how=how)
            if how == "reduce":
                trainer.allreduce_grads()
                trainer.update(len(X), ignore)
            else:
                trainer.step(len(X), ignore)

    def backward(self, X, y, generator=None, how="hand"):
        """A loop by hand: the passes of a batch."""
        Xs, ys = self.shards_of(X, y)
        with autograd.record():
            Xs = Xs if generator is None else [generator(x) for x in Xs]
            net = shortened(self.net, self.num_left_out)
            outputs = mgpu.data_parallel.forward_shards(net, Xs) if self.bn == "sync" else [net(x) for x in Xs]
            losses = [self.loss(output, y.as_in_context(output.context)) for output, y in zip(outputs, ys)]
        self.split(X[:1], y[:1], self.trainer.contexts)  # of a batch that is trained on later, or never
        # MXNet's backward() counts no examples of statistics, and a generator's pass may have reached more devices
        is_plain = how == "plain" and not self.program.recompute and "norm" not in self.program.net
        if is_plain and (len(losses) == len(self.trainer.contexts) or self.generator is None):
            if losses:  # a process without examples has none
                autograd.backward(losses)
        else:
            mgpu.backward(losses, [self.trainer] if generator is None else [self.trainer, self.generator_trainer])

    def other(self, size, how="hand"):
        """A generator's pass through the network, and the generator's step."""
        if self.generator is None:
            self.generator = make_generator(self.trainer.contexts)
            self.generator_trainer = mgpu.Trainer(self.generator, "sgd", {"learning_rate": 0.5})
        if how == "hand":
            self.backward(*self.next_batch(size), self.generator)
            self.generator_trainer.step(size)
            if self.program.num_processes > 1:  # one without examples does not know what its next pass replaces in others
                self.trainer.discard()
        else:
            self.average()
            both = nn.HybridSequential(prefix="")
            both.add(self.generator, self.net)
            mgpu.compile_step(both, LOSS, self.generator_trainer)(*self.next_batch(size))

    def dropped(self, size):
        """A pass that no step uses."""
        self.backward(*self.next_batch(size))
        self.trainer.discard()

    def add(self, is_on):
        """Let passes add to gradients, from 0, or replace them."""
        self.is_adding = is_on
        self.require("add" if is_on else "write")

    def zero(self):
        """Set the gradients to 0."""
        for param in self.trained(self.net).values():
            for gradient in param.list_grad() if gradients_of(param) else ():
                gradient[:] = 0

    def norm(self, bn):
        """Normalise otherwise from now on."""
        self.average()
        self.bn = bn
        mgpu.set_batch_norm(self.net, bn)

    def average(self):
        """Average what the devices have of their own."""
        if self.program.local_steps:
            self.trainer.average_replicas()
        X, y = np.zeros((2, 5), "float32"), np.zeros(2, "float32")
        mgpu.evaluate(self.net, [(X, y)], {}, loss=LOSS)  # running statistics, over processes as well; it decides shapes

    def broken(self, how, size):
        """An exception in the middle of a batch: nothing of it counts later."""
        X, y = self.next_batch(size)
        y[-1] = -1
        self.early.clear()  # its shards have another label
        self.loss = break_last
        try:
            self.train(how, [(X, y)], 1)
        except BrokenError:
            self.loss = LOSS
        else:
            raise AssertionError("the batch did not break")

    def rate(self, rate):
        """Another learning rate."""
        self.trainer.set_learning_rate(rate)

    def look(self, size):
        """Evaluate."""
        X, y = self.next_batch(size)
        if self.program.local_steps:
            self.trainer.average_replicas()
        self.outputs.append(mgpu.evaluate(self.net, [(X, y)], {}, loss=LOSS)["loss"])

    def values(self):
        """Return all weights and running statistics by name, after an average: a list over devices."""
        self.average()
        owners = [self.net] + [self.generator] * (self.generator is not None)
        params = {name: param for owner in owners for name, param in owner.collect_params().items()}
        return {name: [array.asnumpy() for array in param.list_data()] for name, param in params.items()}


@dataclass(frozen=True)
class Failure:
    """An exception of a statement; -1 is the trainer's construction."""

    place: int
    kind: str
    text: str
    modes: tuple = ()  # those that exclude each other

    @property
    def is_expected(self):
        """Whether all processes raise it alike, so that the next program can run."""
        return bool(self.modes) or self.kind == "StaleGradientError"

    def __str__(self):
        return f"statement {self.place}: {self.kind}: {self.text}"


def run(program):
    """Return the values after a program on several devices, its outputs, and a Failure or None."""
    (mx.npx.set_np if program.arrays == "np" else mx.npx.reset_np)()
    place = -1
    mx.random.seed(5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world = Ours(program)
            for place, statement in enumerate(program.statements):  # noqa: B007
                world.do(statement)
            place += 1
            return world.values(), world.outputs, None
    except Exception as error:
        failure = Failure(place, type(error).__name__, str(error)[:600], tuple(getattr(error, "modes", ())))
        mx.nd.waitall()
        return {}, [], failure
    finally:
        mx.npx.reset_np()


def run_plain(program):
    """Return the values, outputs, and the number of statements until Gluon raises for stale gradients."""
    (mx.npx.set_np if program.arrays == "np" else mx.npx.reset_np)()
    try:
        world = Plain(program)
        for place, statement in enumerate(program.statements):
            try:
                world.do(statement)
            except UserWarning:
                return {}, [], place
        return world.values(), world.outputs, len(program.statements)
    finally:
        mx.npx.reset_np()


def finding(program, ours=None):
    """Return what is wrong with a program; "" if it equals plain Gluon, or is refused rightly."""
    values, outputs, failure = ours or run(program)
    if failure is not None and failure.modes and set(failure.modes) <= modes_of(program):
        return ""
    right, seen, stopped = run_plain(program)
    if failure is not None:
        if failure.kind == "StaleGradientError" and failure.place == stopped:
            return ""
        return str(failure)
    if stopped < len(program.statements):
        return f"statement {stopped}: no error, where Gluon finds stale gradients"
    for name, replicas in values.items():
        if not all(np.array_equal(replicas[0], one) for one in replicas):
            return f"{name}: replicas differ"
        found = difference(replicas[0], right[name])
        if found:
            return f"{name}: {found}"
    return next(
        (f"output {i}: {found}" for i, pair in enumerate(zip(outputs, seen)) for found in [difference(*pair)] if found), ""
    )


def difference(one, other):
    """Return by how much two arrays differ; "" for rounding."""
    bound = BOUND * max(1.0, float(np.abs(other).max()))
    largest = float(np.abs(np.subtract(one, other, dtype="float64")).max())
    return "" if largest <= bound else f"off by {largest:.3g}"


def modes_of(program):
    """Return the modes of a program, as docs/limitations.md names them."""
    verbs = {statement[0] for statement in program.statements}
    by_hand = {"hand", "plain", "reduce"}
    first = {*by_hand, "other"} & set(program.statements[0][:2])
    hows = {statement[1] for statement in program.statements if statement[0] in ("step", "group")}
    found = {
        "virtual_shards": program.virtual_shards,
        "Pipeline": program.stages,
        "LocalSGD": program.local_steps,
        "several processes": program.num_processes > 1,
        JOINING: program.optimizer == "nadam",
        "grad_req='add'": program.adds or ("add", True) in program.statements,
        "a loop by hand": hows & by_hand or verbs & {"other", "dropped"},
        "a loop by hand whose first batch decides shapes": program.deferred and first,
        "a split of your own": program.weights and program.virtual_shards,
        "static_shape": program.hybridize == "static",
        "a loop by hand after a change of grad_req": (hows & by_hand or "other" in verbs) and verbs & {"thaw", "add"},
        "several passes before a step": program.num_processes > 1 and verbs & {"other", "dropped"},
        "allreduce_grads()": "reduce" in hows,
        "compile_step() or trainer.backward()": hows & {"hand", "reduce", "compiled"} or "other" in verbs,
        "loss.backward()": "plain" in hows,
        "synchronised BatchNorm": program.bn == "sync" or ("norm", "sync") in program.statements,
        "compiled='on'": hows & {"compiled", "compiled fit"} or "compiled" in [one[-1] for one in program.statements],
        "accumulate()": "group" in verbs,
    }
    return {name for name, is_there in found.items() if is_there}


def unequal(program, other):
    """Return what differs between the weights of two programs on gluon_mgpu, by a bit."""
    one, two = run(program), run(other)
    if one[2] is not None or two[2] is not None:
        return "" if one[2] == two[2] is not None and one[2].modes else f"{one[2]}; {two[2]}"
    same = [np.array_equal(array, two[0][name][0]) for name, arrays in one[0].items() for array in arrays]
    return "" if all(same) else "other bits"


def findings_of_jobs(programs, folder, end):
    """Yield each program of several processes with its finding. A job runs many; after one that breaks it, another continues."""
    left = list(programs)
    while left and time.monotonic() < end:
        own = folder / str(len(left))
        own.mkdir()
        (own / "programs.json").write_text(json.dumps([asdict(program) for program in left]))
        (own / "job.py").write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.crossed import main\nmain({str(own)!r})\n"
        )
        ended = _launched(own, left[0].num_processes, 60 + 5 * len(left))
        for number, program in enumerate(left):
            told = [_told(own / f"{number}-{rank}") for rank in range(program.num_processes)]
            if None in told:
                yield program, f"job: {ended}"
                left = left[number + 1 :]
                break
            yield program, _of_processes(program, told)
            if any(failure is not None and not failure.is_expected for _, _, failure in told):
                left = left[number + 1 :]
                break
        else:
            left = []


def _launched(folder, num_processes, limit_s):
    """Run a job, and return how it ended."""
    command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", num_processes, folder / "job.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLUON_MGPU_", "DMLC_", "HOROVOD_"))}
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, cwd=folder, env=environment)
        try:
            code = f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            code = f"no end in {limit_s} s"
            process.terminate()
            process.wait(60)
    return f"{code}: {(folder / 'output').read_text(errors='replace')[-1500:]}"


def _told(path):
    """Return what a process has written of a program, as `run` returns it; None without."""
    if not path.with_suffix(".json").exists():
        return None
    told = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz")) as arrays:
        return dict(arrays), told["outputs"], None if told["failure"] is None else Failure(**told["failure"])


def _of_processes(program, told):
    """Return what is wrong with what the processes wrote of a program."""
    first, *others = told
    for values, outputs, failure in others:
        if failure != first[2]:
            return f"processes differ: {first[2]}; {failure}"
        differing = [name for name, value in values.items() if not np.array_equal(first[0][name], value)]
        if differing or outputs != first[1]:
            return f"processes differ in {differing or 'outputs'}"
    return finding(program, first)


def main(folder):
    """Run a job's programs in one of its processes, and write what came of each; after a finding others cannot continue."""
    rank = mgpu.distributed.this_process().rank
    for number, fields in enumerate(json.loads(Path(folder, "programs.json").read_text())):
        program = Program(**{**fields, "statements": tuple(map(tuple, fields["statements"]))})
        values, outputs, failure = run(program)
        path = Path(folder, f"{number}-{rank}")
        np.savez(path.with_suffix(".npz"), **{name: np.stack(replicas) for name, replicas in values.items()})
        failed = None if failure is None else asdict(failure)
        path.with_suffix(".json").write_text(json.dumps({"outputs": outputs, "failure": failed}))
        if failure is not None and not failure.is_expected:
            sys.exit(1)
