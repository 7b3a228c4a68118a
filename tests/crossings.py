"""Programs that cross modes, and what they mean: one device, gluon.Trainer, sums in NumPy. `crossed.py` runs them on several."""

from dataclasses import dataclass
from typing import Any, Optional, Tuple

import mxnet as mx
import numpy as np
from gluon_mgpu.mxnet_internals.parameters import is_fresh
from mxnet import autograd, gluon

from .conftest import set_fresh, states_of
from .crossing_nets import MOMENTUM, load, make_generator, make_net, shortened

OPTIMIZERS = {  # a large epsilon, so that rounding does not grow where gradients are near 0
    "sgd": {"learning_rate": 0.1, "wd": 0.01},
    "momentum": {"learning_rate": 0.05, "momentum": 0.9},
    "nag": {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01, "epsilon": 0.01, "wd": 0.01},
    "rmsprop": {"learning_rate": 0.01, "epsilon": 0.01},
    "adagrad": {"learning_rate": 0.1, "eps": 0.01},
    "nadam": {"learning_rate": 0.01, "epsilon": 0.01},
}
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


@dataclass(frozen=True)
class Program:
    """The modes of a program, and its statements: each a verb, which is a method of both worlds, and its values."""

    net: str = "plain"
    arrays: str = "nd"
    num_devices: int = 1  # of each process; a pipeline has `replicas` times `stages`
    num_processes: int = 1
    hybridize: Optional[str] = None
    deferred: bool = False
    optimizer: str = "sgd"
    offset: float = 0.0  # the mean of the data
    stages: int = 0  # of a pipeline; 0 without
    replicas: int = 1  # of the pipeline
    own_stages: bool = False
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: bool = False
    virtual_shards: int = 0
    shard_optimizer: bool = True
    local_steps: int = 0  # of LocalSGD; 0 for a Trainer
    clip_norm: Optional[float] = None
    clip_value: Optional[float] = None
    ignore_stale: bool = False
    adds: bool = False  # grad_req="add" before the trainer is made
    bn: str = "local"
    weights: Tuple[float, ...] = ()  # of the devices' shards; () splits evenly
    splits: str = "late"  # of loops by hand: "early", before the batches of the same statement are trained on, or "twice"
    statements: Tuple[Tuple[Any, ...], ...] = ()

    @property
    def num_shards(self):
        """How many parts a batch has that are computed at the same time."""
        return (self.replicas if self.stages else self.num_devices) * self.num_processes

    @property
    def trainer(self):
        """The optimizer's name and options."""
        return ("sgd" if self.optimizer == "momentum" else self.optimizer), dict(OPTIMIZERS[self.optimizer])


def pieces(begin, end, number):
    """Return how examples are divided into so many parts: (place, begin, end) of those that hold some."""
    ends = begin + np.cumsum([0] + [len(part) for part in np.array_split(np.arange(end - begin), number)])
    return [(place, one, other) for place, (one, other) in enumerate(zip(ends, ends[1:])) if other > one]


class World:
    """What both worlds share: the batches, and which layers are frozen."""

    def __init__(self, program):
        self.program, self.is_adding, self.bn = program, program.adds, program.bn
        self.num_batches, self.outputs, self.num_left_out = 0, [], 0

    def do(self, statement):
        """Run one statement; without anything to train, those that train do nothing."""
        verb, *values = statement
        if verb in ("step", "group", "parts", "dropped", "broken") and not {
            name for name in self.trained(self.nets[0]) if name[0] != "x"
        }:
            return
        getattr(self, verb)(*values)

    def begin_with(self, nets):
        """Remember the networks, and what can be thawed."""
        self.nets = nets
        self.thawed = sorted(self.trained(nets[0]))
        self.layers = sorted({name.split("_")[0] for name in self.thawed})

    def next_batch(self, size):
        """Return a batch that both worlds see: NumPy arrays."""
        self.num_batches += 1
        rng = np.random.RandomState(self.num_batches)
        X = self.program.offset + (0.1 if self.program.offset else 1) * rng.uniform(-1, 1, (size, 5))
        return X.astype("float32"), rng.randint(0, 5, size).astype("float32")

    def trained(self, net):
        """Return the parameters of a network that are trained now, by name."""
        return {name: param for name, param in net.collect_params().items() if param.grad_req != "null"}

    def freeze(self, layer, grad_req="null"):
        """Freeze a layer, or all with -1."""
        for net in self.nets:
            for name in self.thawed:
                param = net.collect_params()[name]
                is_chosen = layer < 0 or name.split("_")[0] == self.layers[layer % len(self.layers)]
                if is_chosen and param.grad_req != grad_req:  # Gluon makes a new array
                    param.grad_req = grad_req
                    self.forget(name)

    def multiply(self, layer, rate, decay):
        """Let a layer learn or decay at another rate."""
        for net in self.nets:
            for name in self.thawed:
                if name.split("_")[0] == self.layers[layer % len(self.layers)]:
                    net.collect_params()[name].lr_mult, net.collect_params()[name].wd_mult = rate, decay

    def thaw(self, layer):
        """Train a layer again, or all with -1."""
        self.freeze(layer, "add" if self.is_adding and not isinstance(self, Plain) else "write")

    def forget(self, name):
        """Drop sums of a parameter whose gradient has become another array."""


class Plain(World):
    """One device, gluon.Trainer, and sums of gradients in NumPy. With LocalSGD there is one network for each device."""

    def __init__(self, program):
        super().__init__(program)
        nets = [make_net(program, mx.cpu(0)) for _ in range(program.num_shards if program.local_steps else 1)]
        with autograd.pause():
            for net in nets:  # the first batch decides shapes
                net(load(self.next_batch(1)[0], mx.cpu(0)))
        self.num_batches = 0
        self.begin_with(nets)
        self.make_trainers()
        self.generator = self.generator_trainer = None
        self.sums = [{} for _ in nets]  # by parameter, float64; with grad_req="add" they stay
        self.generator_sums, self.is_joint = {}, False
        self.num_steps = 0
        norms = [name[: -len("_mean")] for name in nets[0].collect_params() if name.endswith("running_mean")]
        self.stats = [{name: (np.zeros(5), np.ones(5)) for name in norms} for _ in range(program.num_shards)]
        self.behind = [0] * program.num_shards  # examples of each device since all had the same values

    def make_trainers(self):
        """Make trainers without states."""
        name, options = self.program.trainer
        self.trainers = [gluon.Trainer(net.collect_params(), name, dict(options), kvstore=None) for net in self.nets]

    def renew(self):
        """Train on with new trainers."""
        self.average_networks() if self.program.local_steps else self.average_statistics()
        self.make_trainers()

    def reload(self, _):
        """Go on with new gradients; a generator's trainer does not know the new network."""
        self.average_networks() if self.program.local_steps else self.average_statistics()
        self.sums, self.is_joint = [{} for _ in self.nets], False

    def forget(self, name):
        for sums in self.sums:
            sums.pop(name, None)

    def step(self, how, size, micro_steps):
        """One update by one batch."""
        self.group(how, [size], "step", micro_steps)

    def parts(self, how, sizes):
        """One update by several batches, of the network and of the one without its last layer in turns."""
        self.group(how, sizes, "flush", parts=True)

    def group(self, how, sizes, ends="step", micro_steps=1, *, parts=False):
        """One update by several batches."""
        for number, size in enumerate(sizes):
            self.num_left_out = number % 2 if parts else 0
            self.backward(*self.next_batch(size), micro_steps, by_hand=how in ("hand", "plain", "reduce"), moves=True)
        self.num_left_out = 0
        for at in range(len(self.nets)):
            self.apply(at, sum(sizes) / len(self.nets), self.program.ignore_stale and "fit" not in how)
        self.sums = self.sums if self.is_adding else [{} for _ in self.nets]
        self.num_steps += 1
        if self.program.local_steps and (self.num_steps == self.program.local_steps or "fit" in how or ends == "flush"):
            self.average_networks()
        if not self.program.local_steps:
            self.average_statistics()

    def backward(self, X, y, micro_steps=1, *, by_hand=True, generator=None, moves=False):
        """Add up the gradients of a batch, piece by piece, and move the running statistics."""
        for own in self.shares(len(X), *((1, 1) if by_hand else (micro_steps, self.program.micro_batches))):
            seen = []
            for place, begin, end in own:
                at = place if self.program.local_steps else 0
                self.one_pass(at, load(X[begin:end], mx.cpu(0)), load(y[begin:end], mx.cpu(0)), generator)
                seen.append((place, end - begin, self.seen_statistics()))
                self.behind[place] += end - begin
            for name in self.stats[0]:
                self.move(name, seen)
            if moves and not self.program.local_steps:
                self.average_statistics()

    def shares(self, size, micro_steps, micro_batches):
        """Return lists of pieces. Each piece is normalised by itself; the running statistics move once a list."""
        program = self.program
        if program.virtual_shards:
            return [[(0, *piece[1:]) for piece in pieces(0, size, program.virtual_shards * micro_steps)]]
        found = []
        for _, begin, end in pieces(0, size, micro_steps):
            shards = pieces(begin, end, 1 if self.bn == "sync" else program.num_shards)
            found.append([(place, *micro[1:]) for place, *bounds in shards for micro in pieces(*bounds, micro_batches)])
        return found

    def one_pass(self, at, x, y, generator):
        """Add the gradients of one piece."""
        net = self.nets[at]
        for name in self.stats[0]:
            for param, value in zip(self.statistics_of(name), (0, 1)):
                param.data()[:] = value
        with autograd.record():
            loss = LOSS(shortened(net, self.num_left_out)(x if generator is None else generator(x)), y)
        if any(self.trained(one) for one in (net, generator) if one is not None):
            loss.backward()
        for owner, sums in ((net, self.sums[at]), (generator, self.generator_sums)):
            for name, param in {} if owner is None else self.trained(owner).items():
                if is_fresh(param.data()):
                    sums[name] = sums.get(name, 0) + param.grad().asnumpy().astype("float64")
                    set_fresh(param.data(), False)

    def statistics_of(self, name):
        """Return a layer's running mean and variance."""
        params = self.nets[0].collect_params()
        return params[f"{name}_mean"], params[f"{name}_var"]

    def seen_statistics(self):
        """Return the mean and variance with which the latest pass has moved each layer from 0 and 1; MXNet may move none."""
        found = {}
        for name in self.stats[0]:
            mean, var = (param.data().asnumpy().astype("float64") for param in self.statistics_of(name))
            if (var != 1).any():
                found[name] = mean / (1 - MOMENTUM), (var - MOMENTUM) / (1 - MOMENTUM)
        return found

    def move(self, name, seen):
        """Move a layer's statistics, on each device, by the mean of the moves of its pieces."""
        seen = [(place, count, found[name]) for place, count, found in seen if name in found]
        for place in {place for place, _, _ in seen}:
            own = [(count, *found) for one, count, found in seen if one == place]
            counts, means, variances = map(np.array, zip(*own))
            moments = [np.average(values, axis=0, weights=counts) for values in (means, variances)]
            everywhere = self.bn == "sync" or self.program.virtual_shards
            for stats in self.stats if everywhere else [self.stats[place]]:
                stats[name] = tuple(MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip(stats[name], moments))

    def average_statistics(self):
        """Average the running statistics over the devices, weighted by examples, and write them to the network."""
        weights = self.behind if any(self.behind) else None
        for name in self.stats[0]:
            means = tuple(np.average([stats[name][i] for stats in self.stats], axis=0, weights=weights) for i in (0, 1))
            for stats in self.stats:
                stats[name] = means
            for param, value in zip(self.statistics_of(name), means):
                param.data()[:] = value.astype("float32")
        self.behind = [0] * len(self.stats)

    def apply(self, at, size, ignore_stale):
        """Clip the mean gradient in NumPy, write it, and step. Raise UserWarning, as Gluon does, for stale gradients."""
        trained = self.trained(self.nets[at])
        reached = [name for name in trained if any(name in sums for sums in self.sums)]  # devices without data take part
        mean = {name: self.sums[at].get(name, np.zeros(trained[name].shape)) / size for name in reached}
        norm = np.sqrt(sum((one**2).sum() for one in mean.values()))
        factor = 1 if self.program.clip_norm is None else min(1, self.program.clip_norm / max(norm, 1e-30))
        bound = np.inf if self.program.clip_value is None else self.program.clip_value
        for name, one in mean.items():
            trained[name].grad()[:] = size * np.clip(one * factor, -bound, bound)
            set_fresh(trained[name].data())
        self.trainers[at].step(size, ignore_stale_grad=ignore_stale)

    def average_networks(self):
        """Average weights and states of LocalSGD's networks."""
        self.num_steps = 0
        self.average_statistics()
        if len(self.nets) == 1:
            return
        params = [list(net.collect_params().values()) for net in self.nets]
        groups = [[param.data() for param in own] for own in zip(*params)]
        states = [states_of(trainer)[0] for trainer in self.trainers]
        groups += [[one[i] for one in states] for i in states[0] if states[0][i] is not None]
        for group in groups:
            mean = np.mean([array.asnumpy().astype("float64") for array in group], axis=0)
            for array in group:
                array[:] = mean.astype("float32")

    def other(self, size, how="hand"):
        """A generator's pass through the network, and the generator's step."""
        if self.generator is None:
            self.generator = make_generator(mx.cpu(0))
            self.generator_trainer = gluon.Trainer(self.generator.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=None)
        self.generator_sums = {}
        if how == "compiled":
            self.average_statistics()
        self.is_joint = self.is_joint or how == "compiled"
        self.dropped(size, self.generator)
        if self.is_joint:  # since then, the generator's steps move its statistics, too
            self.average_statistics()
        for name, param in self.generator.collect_params().items():
            param.grad()[:] = self.generator_sums[name]
            set_fresh(param.data())
        self.generator_trainer.step(size)

    def dropped(self, size, generator=None):
        """A pass that no step of this network uses."""
        kept = [dict(sums) for sums in self.sums]
        self.backward(*self.next_batch(size), generator=generator)
        self.sums = kept

    def add(self, is_on):
        """Let passes add to gradients, from 0, or replace them."""
        if is_on != self.is_adding:
            self.is_adding, self.sums = is_on, [{} for _ in self.nets]

    def zero(self):
        """Set the gradients to 0."""
        self.sums = [{name: 0 * total for name, total in sums.items()} for sums in self.sums]

    def norm(self, bn):
        """Normalise otherwise from now on."""
        self.average_statistics()
        self.bn = bn

    def broken(self, how, size):
        """An exception in the middle of a batch: nothing of it counts later."""
        if self.bn == "sync":  # synchronised statistics move in the forward pass
            self.dropped(size)
        else:
            self.next_batch(size)

    def rate(self, rate):
        """Another learning rate."""
        for trainer in self.trainers:
            trainer.set_learning_rate(rate)

    def look(self, size):
        """Evaluate."""
        X, y = self.next_batch(size)
        self.average_networks() if self.program.local_steps else None
        self.average_statistics()
        self.outputs.append(LOSS(self.nets[0](load(X, mx.cpu(0))), load(y, mx.cpu(0))).mean().asnumpy().item())

    def values(self):
        """Return all weights and running statistics by name, after an average."""
        self.average_networks() if self.program.local_steps else None
        self.average_statistics()
        return {
            name: param.data().asnumpy()
            for net in (self.nets[0], self.generator)
            if net is not None
            for name, param in net.collect_params().items()
        }
