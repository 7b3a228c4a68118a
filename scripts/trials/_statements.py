"""What programs are made of: each statement as users write it, and what it means on one device."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Dict, List, Optional, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from _models import made
from _worlds import Ours, Plain, World, cut, device_array, mapped, net_params, sizes_of
from mxnet import autograd, gluon

Shares = Tuple[int, ...]  # one a device, or () for an even split


@dataclass(frozen=True)
class Statement:
    """One line of a program, or some."""

    def ours(self, world: Ours) -> None:
        """Do it as a user of gluon_mgpu does."""
        self.both(world)

    def plain(self, world: Plain) -> None:
        """Do what it means with plain Gluon and NumPy."""
        self.both(world)

    def both(self, world: World) -> None:
        """Do it where both are the same."""
        raise NotImplementedError


def _split(world: Ours, X: Any, y: Any, how: str, shares: Shares) -> Tuple[List[Any], List[Any]]:
    """Return shards as the program splits them."""
    contexts, axis = world.contexts, world.model.batch_axis
    weights = _weights(shares, len(contexts))
    if how == "gluon" and y.shape[axis] >= len(contexts):
        load = partial(gluon.utils.split_and_load, ctx_list=contexts, batch_axis=axis, even_split=False)
        loaded = mapped(lambda x: load(device_array(x, contexts[0])), X)
        Xs = list(zip(*loaded)) if isinstance(X, tuple) else loaded
        return Xs, load(device_array(y, contexts[0]))
    if how == "split_and_load":
        load = partial(mgpu.split_and_load, ctx_list=contexts, batch_axis=axis, even_split=False, weights=weights)
        on_host = [mapped(lambda x: device_array(x, mx.cpu(0)), part) for part in (X, y)]
        return load(on_host[0]), load(on_host[1])
    split_f = partial(mgpu.split_batch, batch_axis=axis, weights=weights, dtype=_dtype(world))
    if how == "prefetch":
        return next(iter(mgpu.prefetch([(X, y)], contexts, split_f=split_f)))
    return split_f(X, y, contexts)


def _dtype(world: World) -> Optional[str]:
    """Return what the split is told for a network of float64, whose integers stay as they are in legacy arrays' floats."""
    return "float64" if world.setting.dtype == "float64" else None


def _weights(shares: Shares, num_devices: int) -> Optional[List[int]]:
    weights = list((shares * num_devices)[:num_devices])
    return weights if any(weights) else None


def _sizes(world: Plain, num: int, shares: Shares) -> List[int]:
    """Return the shards' sizes, of which only networks that look at whole shards know anything."""
    return [num] if shares else sizes_of(num, world.setting.num_devices)


def _devices(world: Plain, num: int, shares: Shares) -> List[int]:
    """Return which devices a batch is split over."""
    weights = _weights(shares, world.setting.num_devices)
    return [i for i, size in enumerate(mgpu.plan_shards(num, world.setting.num_devices, weights)) if size]


@dataclass(frozen=True)
class Pass(Statement):
    """A forward and a backward pass by hand."""

    what: str
    num: int
    seed: int
    split: str = "split_batch"
    back: str = "mgpu"
    shares: Shares = ()

    def ours(self, world: Ours) -> None:
        """Split, record, go backward."""
        Xs, ys = _split(world, *world.batch(self.num, self.seed), self.split, self.shares)
        with autograd.record():
            shards = [world.model.losses[self.what](world.nets, x, t) for x, t in zip(Xs, ys)]
        losses = [loss for shard in shards for loss in shard]
        if self.back == "mgpu":
            mgpu.backward(losses)
        elif self.back == "each":
            for shard in shards:
                autograd.backward(shard)  # a shard's losses share a graph, which is gone after one pass
        else:
            autograd.backward(losses)
        world.num_examples = self.num

    def plain(self, world: Plain) -> None:
        """The same on one device."""
        sizes = _sizes(world, self.num, self.shares)
        where: Dict[str, Any] = {"is_whole": self.back == "mgpu", "devices": _devices(world, self.num, self.shares)}
        world.backward(self.what, *world.batch(self.num, self.seed), sizes, **where)


@dataclass(frozen=True)
class Step(Statement):
    """An update with the examples of the latest pass."""

    trainer: str = "trainer"
    form: str = "step"

    def ours(self, world: Ours) -> None:
        """In one call or two."""
        trainer = world.trainers[self.trainer]
        if self.form == "halves":
            trainer.allreduce_grads()
            trainer.update(world.num_examples)
        else:
            trainer.step(world.num_examples, ignore_stale_grad=self.form == "ignore")

    def plain(self, world: Plain) -> None:
        """Gluon's step."""
        world.step(self.trainer, world.num_examples, ignore=self.form == "ignore")


@dataclass(frozen=True)
class Group(Statement):
    """Passes that add up."""

    trainer: str
    body: Tuple[Statement, ...]

    def ours(self, world: Ours) -> None:
        """In the trainer's context."""
        with world.trainers[self.trainer].accumulate():
            for statement in self.body:
                statement.ours(world)

    def plain(self, world: Plain) -> None:
        """Steps inside only count."""
        world.open(self.trainer)
        for statement in self.body:
            statement.plain(world)
        world.close(self.trainer)


@dataclass(frozen=True)
class Flush(Statement):
    """Update with the accumulated gradients."""

    trainer: str = "trainer"
    ignore: bool = False

    def ours(self, world: Ours) -> None:
        """One call."""
        world.trainers[self.trainer].flush(self.ignore)

    def plain(self, world: Plain) -> None:
        """Apply the sums."""
        if world.counted.get(self.trainer):
            world.apply(self.trainer, 0, self.ignore)


@dataclass(frozen=True)
class Discard(Statement):
    """Drop what no step has used."""

    trainer: str = "trainer"

    def ours(self, world: Ours) -> None:
        """One call."""
        world.trainers[self.trainer].discard()

    def plain(self, world: Plain) -> None:
        """Nothing is fresh afterwards."""
        world.discard(self.trainer)


@dataclass(frozen=True)
class TrainBatch(Statement):
    """A whole step in one call."""

    what: str
    num: int
    seed: int
    micro_steps: int = 1
    shares: Shares = ()
    ignore: bool = False

    def ours(self, world: Ours) -> None:
        """train_batch."""
        net, loss = world.model.whole[self.what]
        weights = _weights(self.shares, len(world.contexts))
        split_f = partial(mgpu.split_batch, batch_axis=world.model.batch_axis, weights=weights, dtype=_dtype(world))
        trainer = world.trainers[world.model.trained_by[self.what]]
        options: Dict[str, Any] = {"micro_steps": self.micro_steps, "split_f": split_f, "ignore_stale_grad": self.ignore}
        mgpu.train_batch(world.nets[net], loss, trainer, *world.batch(self.num, self.seed), **options)

    def plain(self, world: Plain) -> None:
        """One pass of the whole batch, and a step."""
        trainer = world.model.trained_by[self.what]
        world.begin(trainer)
        parts = sizes_of(self.num, self.micro_steps)
        sizes = [size for part in parts for size in _sizes(world, part, self.shares)]
        world.note_batch_axis()
        where: Dict[str, Any] = {"is_whole": True, "devices": _devices(world, self.num, self.shares)}
        world.backward(self.what, *world.batch(self.num, self.seed), sizes, **where)
        world.step(trainer, self.num, ignore=self.ignore)


@dataclass(frozen=True)
class Fit(Statement):
    """Some epochs."""

    what: str
    num: int  # examples of the data set
    batch_size: int
    seed: int
    epochs: int = 1
    group: int = 1
    micro_steps: int = 1
    loader: str = "list"

    def ours(self, world: Ours) -> None:
        """mgpu.fit."""
        net, loss = world.model.whole[self.what]
        split_f = partial(mgpu.split_batch, batch_axis=world.model.batch_axis, dtype=_dtype(world))
        mgpu.fit(
            world.nets[net],
            loss,
            world.trainers[world.model.trained_by[self.what]],
            self._data(world),
            epochs=self.epochs,
            metrics=(mgpu.accuracy,) if world.model.scores else (),
            callbacks=[],
            split_f=split_f,
            micro_steps=self.micro_steps,
            accumulate_grad_batches=self.group,
        )

    def plain(self, world: Plain) -> None:
        """A pass a batch; an update a group."""
        trainer, axis = world.model.trained_by[self.what], world.model.batch_axis
        if self.loader == "NDArrayIter":
            world.notes.append("fit with an NDArrayIter")
        world.note_batch_axis()
        world.begin(trainer)
        X, y = world.batch(self.num, self.seed)
        begins = range(0, self.num, self.batch_size)
        for _ in range(self.epochs):
            for i, begin in enumerate(begins, 1):
                end = min(begin + self.batch_size, self.num)
                parts = sizes_of(end - begin, self.micro_steps)
                sizes = [size for part in parts for size in _sizes(world, part, ())]
                world.backward(self.what, cut(X, begin, end, axis), cut(y, begin, end, axis), sizes, is_whole=True)
                world.note(trainer, end - begin)
                if i % self.group == 0 or i == len(begins):
                    world.apply(trainer, 0, False)

    def _data(self, world: Ours) -> Any:
        X, y = world.batch(self.num, self.seed)
        axis = world.model.batch_axis
        if self.loader == "ArrayLoader":
            return mgpu.data.ArrayLoader(X, y, batch_size=self.batch_size)
        if self.loader == "DataLoader":
            return gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), batch_size=self.batch_size, last_batch="keep")
        if self.loader == "NDArrayIter":
            return mx.io.NDArrayIter(X, y, batch_size=self.batch_size)
        ranges = [(begin, min(begin + self.batch_size, self.num)) for begin in range(0, self.num, self.batch_size)]
        return [(cut(X, *one, axis), cut(y, *one, axis)) for one in ranges]


@dataclass(frozen=True)
class Parallel(Statement):
    """GluonCV's classes."""

    what: str
    num: int
    seed: int

    def ours(self, world: Ours) -> None:
        """Model and criterion, backward and step as GluonCV's users write them."""
        net, loss = world.model.whole[self.what]
        model = mgpu.DataParallelModel(world.nets[net], world.contexts)
        criterion = mgpu.DataParallelCriterion(loss, world.contexts)
        X, y = (device_array(part, world.contexts[0]) for part in world.batch(self.num, self.seed))
        with autograd.record():
            losses = criterion(model(X), y)
        autograd.backward(losses)
        world.trainers[world.model.trained_by[self.what]].step(self.num)

    def plain(self, world: Plain) -> None:
        """A pass and a step."""
        sizes = _sizes(world, self.num, ())
        world.backward(self.what, *world.batch(self.num, self.seed), sizes, is_whole=False)
        world.step(world.model.trained_by[self.what], self.num)


@dataclass(frozen=True)
class Rate(Statement):
    """Another learning rate."""

    rate: float
    trainer: str = "trainer"

    def both(self, world: World) -> None:
        """Gluon's call."""
        world.trainers[self.trainer].set_learning_rate(self.rate)


@dataclass(frozen=True)
class Multiply(Statement):
    """Multipliers of one layer's learning rate and weight decay."""

    net: str
    layer: int
    lr_mult: float
    wd_mult: float

    def both(self, world: World) -> None:
        """Gluon's attributes."""
        for param in _layer(world, self.net, self.layer):
            param.lr_mult, param.wd_mult = self.lr_mult, self.wd_mult


@dataclass(frozen=True)
class Freeze(Statement):
    """Freeze a layer, or thaw it."""

    net: str
    layer: int
    grad_req: str = "null"

    def both(self, world: World) -> None:
        """Gluon's attribute."""
        for param in _layer(world, self.net, self.layer):
            if "running" not in param.name:
                param.grad_req = self.grad_req


def _layer(world: World, net: str, layer: int) -> List[gluon.Parameter]:
    blocks = world.blocks(net)
    return list(blocks[layer % len(blocks)]._reg_params.values())


@dataclass(frozen=True)
class SetData(Statement):
    """Give a network other weights, by `set_data` or from a file."""

    net: str
    seed: int
    from_file: bool = False

    def ours(self, world: Ours) -> None:
        """set_data, or load_parameters."""
        if not self.from_file:
            world.set_weights(self.net, self.seed)
            return
        with autograd.pause():
            _, others = made(world.setting.model, self.seed, [mx.cpu(0)], world.setting.dtype)
        fname = str(world.folder / "loaded.params")
        others[self.net].save_parameters(fname)
        world.nets[self.net].load_parameters(fname, ctx=world.contexts)

    def plain(self, world: Plain) -> None:
        """The same values."""
        if not self.from_file:
            world.set_weights(self.net, self.seed)
            return
        _, others = made(world.setting.model, self.seed, [mx.cpu(0)], world.setting.dtype)
        for param, other in zip(net_params(world.nets[self.net]), net_params(others[self.net])):
            param.set_data(other.data())


@dataclass(frozen=True)
class ClipWeights(Statement):
    """Cut weights to a range in place, as a Wasserstein critic's."""

    net: str
    most: float

    def both(self, world: World) -> None:
        """On every device."""
        for param in net_params(world.nets[self.net]):
            for weight in param.list_data():
                weight[:] = weight.clip(-self.most, self.most)


@dataclass(frozen=True)
class AddMode(Statement):
    """Let backward passes add to gradients, for all parameters of all networks."""

    grad_req: str = "add"

    def both(self, world: World) -> None:
        """Gluon's attribute."""
        for net in world.nets.values():
            for param in net_params(net):
                if param.grad_req != "null":
                    param.grad_req = self.grad_req
        if isinstance(world, Plain):
            world.adds = self.grad_req == "add"


@dataclass(frozen=True)
class ZeroGrad(Statement):
    """Set all gradients to zero, as users of "add" do after each step."""

    def both(self, world: World) -> None:
        """Gluon's call, which np mode has not."""
        for net in world.nets.values():
            for param in net_params(net):
                if world.setting.arrays == "nd":
                    param.zero_grad()
                else:
                    for gradient in param.list_grad() if param.grad_req != "null" else ():
                        gradient[:] = 0


@dataclass(frozen=True)
class Look(Statement):
    """Evaluate or predict in the middle."""

    what: str
    num: int
    seed: int
    scores: bool = False

    def ours(self, world: Ours) -> None:
        """evaluate_accuracy_gpus or predict."""
        net = world.nets[world.model.whole[self.what][0]]
        X, y = world.batch(self.num, self.seed)
        if self.scores:
            split_f = partial(mgpu.split_batch, dtype=_dtype(world))
            world.outputs.append(np.array(mgpu.evaluate_accuracy_gpus(net, [(X, y)], split_f)))
        else:
            world.outputs.append(np.asarray(mgpu.predict(net, [X], batch_axis=world.model.batch_axis)))

    def plain(self, world: Plain) -> None:
        """One forward pass."""
        net, _ = world.model.whole[self.what]
        X, y = world.batch(self.num, self.seed)
        sizes = _sizes(world, self.num, ())
        ends = np.cumsum(sizes)
        axis = world.model.batch_axis
        parts = [cut(X, int(end) - size, int(end), axis) for size, end in zip(sizes, ends)]
        made_of = [world.nets[net](mapped(lambda x: device_array(x, world.contexts[0]), part)).asnumpy() for part in parts]
        output = np.concatenate(made_of, axis=axis)
        world.outputs.append(np.array((output.argmax(axis=1) == y).mean()) if self.scores else output)


@dataclass(frozen=True)
class Move(Statement):
    """Save everything, and continue in other networks and trainers on another number of devices."""

    how: str  # "checkpoint", "states", or "gluon": the states of the gluon.Trainer
    num_devices: int

    def ours(self, world: Ours) -> None:
        """Save, build, load."""
        before = {name: net_params(net) for name, net in world.nets.items()}
        for name, net in world.nets.items():
            if self.how == "checkpoint":
                mgpu.save_checkpoint(world.folder / name, net, world.trainers[_trainer_of(world, name)])
            else:
                net.save_parameters(str(world.folder / name) + ".params")
        if self.how == "states":
            for name, trainer in world.trainers.items():
                trainer.save_states(str(world.folder / name) + ".states")
        world.contexts = [mx.cpu(i) for i in range(self.num_devices)]
        world.setting = replace(world.setting, weights_seed=world.setting.weights_seed + 1)
        world.make_nets()
        for name, net in world.nets.items():
            for old, new in zip(before[name], net_params(net)):
                new.lr_mult, new.wd_mult = old.lr_mult, old.wd_mult
                if new.grad_req != old.grad_req:
                    new.grad_req = old.grad_req
            if self.how != "checkpoint":
                net.load_parameters(str(world.folder / name) + ".params", ctx=world.contexts)
        world.trainers = {name: world.new_trainer(name) for name in world.trainers}
        for name, trainer in world.trainers.items():
            if self.how == "checkpoint":
                mgpu.load_checkpoint(
                    world.folder / world.model.nets_of[name][0], world.nets[world.model.nets_of[name][0]], trainer
                )
            else:
                trainer.load_states(str(world.folder / name) + ".states")

    def plain(self, world: Plain) -> None:
        """Nothing changes; other states do not count."""
        for name, trainer in world.trainers.items():
            if self.how == "gluon":
                trainer.save_states(str(world.folder / name) + ".states")
            world.discard(name)
        world.setting = replace(world.setting, num_devices=self.num_devices)


def _trainer_of(world: World, net: str) -> str:
    return next(name for name, nets in world.model.nets_of.items() if net in nets)


@dataclass(frozen=True)
class Hybridize(Statement):
    """Compile otherwise from now on."""

    flags: Optional[Tuple[Tuple[str, Any], ...]]

    def both(self, world: World) -> None:
        """Gluon's call."""
        flags = None if self.flags is None else dict(self.flags)
        world.setting = replace(world.setting, hybridize=flags)
        world.hybridize(flags)


@dataclass(frozen=True)
class NewTrainer(Statement):
    """Replace a trainer by another, maybe with another optimizer."""

    trainer: str
    optimizer: Tuple[str, Tuple[Tuple[str, Any], ...]]

    def both(self, world: World) -> None:
        """The old one is forgotten, with what it has accumulated; a gradient that no step has used is not."""
        world.optimizers[self.trainer] = self.optimizer[0], dict(self.optimizer[1])
        if isinstance(world, Plain):
            world.drop_sums(self.trainer)
        world.trainers[self.trainer] = world.new_trainer(self.trainer)


@dataclass(frozen=True)
class Copied(Statement):
    """Train a deep copy of the network instead, or keep one as a teacher."""

    net: str
    teacher: bool

    def ours(self, world: Ours) -> None:
        """copy.deepcopy."""
        world.nets[self.net].hybridize(False)  # Gluon cannot copy compiled graphs
        twin = copy.deepcopy(world.nets[self.net])
        world.hybridize(world.setting.hybridize)
        if self.teacher:
            world.kept.append(twin)
            return
        world.nets[self.net] = twin
        for name in world.trainers:
            if self.net in world.model.nets_of[name]:
                world.trainers[name] = world.new_trainer(name)

    def plain(self, world: Plain) -> None:
        """New trainers; a teacher is another network with the same values."""
        if self.teacher:
            _, nets = made(world.setting.model, 0, world.contexts, world.setting.dtype)
            for new, param in zip(net_params(nets[self.net]), net_params(world.nets[self.net])):
                new.set_data(param.data())
                new.grad_req = param.grad_req
            world.kept.append(nets[self.net])
            return
        for name in world.trainers:
            if self.net in world.model.nets_of[name]:
                world.discard(name)
                world.trainers[name] = world.new_trainer(name)


@dataclass(frozen=True)
class Follow(Statement):
    """Let the teachers' weights follow the network's, as a moving average."""

    net: str
    keep: float = 0.9

    def both(self, world: World) -> None:
        """By set_data, with the values of the first device."""
        for teacher in world.kept:
            for mean, param in zip(net_params(teacher), net_params(world.nets[self.net])):
                mean.set_data(mean.list_data()[0] * self.keep + param.list_data()[0] * (1 - self.keep))
