"""The two places where a program runs: several devices with gluon_mgpu, and one device with plain Gluon."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from _models import Model, made
from mxnet import autograd, gluon

Options = Dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What a program trains, with what, and on what."""

    model: str
    weights_seed: int
    num_devices: int
    arrays: str  # "nd" or "np"
    dtype: str = "float32"
    optimizer: Tuple[str, Options] = ("sgd", {"learning_rate": 0.1})
    trainer: Options = field(default_factory=dict)  # what mgpu.Trainer alone takes
    passed_as: str = "block"  # the parameters: "block", "dict" or "list"
    hybridize: Optional[Options] = None
    schedule: str = ""


@dataclass(frozen=True)
class Reach:
    """A pass: whether one call of ours made it, the devices that had data of it, the parameters that it reached."""

    number: int
    is_whole: bool
    devices: FrozenSet[int]
    params: FrozenSet[int]


def batch_of(model: Model, num_examples: int, seed: int, dtype: str) -> Tuple[Any, Any]:
    """Return a batch as NumPy arrays."""
    X, y = model.batch(np.random.RandomState(seed), num_examples)
    return mapped(lambda x: x.astype(dtype) if x.dtype == np.float32 else x, X), mapped(
        lambda x: x.astype(dtype) if x.dtype == np.float32 else x, y
    )


def mapped(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to an array, or to each of a tuple."""
    return tuple(function(one) for one in data) if isinstance(data, tuple) else function(data)


def device_array(data: np.ndarray, context: mx.Context) -> Any:
    """Return a NumPy array on a device, as np or legacy array, with its dtype."""
    return (mx.np if mx.util.is_np_array() else mx.nd).array(data, ctx=context, dtype=data.dtype)


def cut(data: Any, begin: int, end: int, axis: int) -> Any:
    """Return the examples [begin, end)."""
    return mapped(lambda x: x[(slice(None),) * axis + (slice(begin, end),)], data)


def sizes_of(num: int, parts: int) -> List[int]:
    """Return how NumPy splits so many examples, without empty parts."""
    return [len(part) for part in np.array_split(np.arange(num), parts) if len(part)]


def rate_schedule(name: str, rate: float) -> Any:
    """Return a new learning-rate schedule."""
    if name == "factor":
        return mx.lr_scheduler.FactorScheduler(step=2, factor=0.7, base_lr=rate)
    if name == "cosine":
        return mx.lr_scheduler.CosineScheduler(max_update=9, base_lr=rate, final_lr=rate / 10, warmup_steps=2)
    return mx.lr_scheduler.MultiFactorScheduler(step=[2, 5], factor=0.5, base_lr=rate)


class World:
    """Networks, trainers, and what both kinds of places have in common."""

    compiled = False  # whether networks are hybridized as in the program

    def __init__(self, setting: Setting, contexts: Sequence[mx.Context], folder: Path) -> None:
        self.setting, self.contexts, self.folder = setting, list(contexts), folder
        self.optimizers: Dict[str, Tuple[str, Options]] = {}  # of trainers that were replaced
        self.trainer_options = dict(setting.trainer)
        self.num_examples = 0  # of the latest pass
        self.drew_noise = False
        self.outputs: List[np.ndarray] = []  # what evaluating and predicting gave
        self.kept: List[gluon.Block] = []  # teachers
        self.make_nets()
        self.trainers = {name: self.new_trainer(name) for name in self.model.nets_of}

    def make_nets(self) -> None:
        """Make the networks with their first weights."""
        setting = self.setting
        self.model, self.nets = made(setting.model, setting.weights_seed, self.contexts, setting.dtype)

        self.hybridize(setting.hybridize)

    def hybridize(self, flags: Optional[Options]) -> None:
        """Compile the networks where this world does; of those that leave parameters out, the layers alone.

        A compiled graph gives all its parameters a gradient, zero where the loss does not depend on them.
        """
        for net in self.nets.values() if self.compiled else ():
            for block in net._children.values() if self.model.unreached else [net]:
                block.hybridize(flags is not None, **(flags or {}))

    def batch(self, num_examples: int, seed: int) -> Tuple[Any, Any]:
        """Return a batch as NumPy arrays."""
        return batch_of(self.model, num_examples, seed, self.setting.dtype)

    def params(self, trainer: str) -> List[gluon.Parameter]:
        """Return what a trainer trains, in the order of the network."""
        named = [param for net in self.model.nets_of[trainer] for param in net_params(self.nets[net])]
        begin, end = self.model.parts.get(trainer, (0.0, 1.0))
        return named[round(begin * len(named)) : round(end * len(named))]

    def optimizer(self, trainer: str) -> Tuple[str, Options]:
        """Return a trainer's optimizer and its arguments, with a schedule of its own."""
        name, options = self.optimizers.get(trainer, self.setting.optimizer)
        self.drew_noise = self.drew_noise or name == "sgld"
        options = dict(options)
        if self.setting.schedule:
            options["lr_scheduler"] = rate_schedule(self.setting.schedule, options["learning_rate"])
        return name, options

    def passed(self, trainer: str, *, block: bool) -> Any:
        """Return the parameters in the form in which the program passes them."""
        whole = trainer not in self.model.parts
        if whole and self.setting.passed_as != "list":
            net = self.nets[self.model.nets_of[trainer][0]]
            return net if block and self.setting.passed_as == "block" else net.collect_params()
        return self.params(trainer)

    def new_trainer(self, name: str) -> Any:
        """Return a trainer."""
        raise NotImplementedError

    def weights(self) -> List[Tuple[str, np.ndarray]]:
        """Return all values of all networks on the first device; running statistics only where they are comparable."""
        return [
            (param.name, param.list_data()[0].asnumpy())
            for net in [*self.nets.values(), *self.kept]
            for param in net_params(net)
            if param._data is not None and (self.model.normalizes or param.grad_req != "null" or "running" not in param.name)
        ]

    def set_weights(self, net: str, seed: int) -> None:
        """Give a network other weights."""
        rng = np.random.RandomState(seed)
        for param in net_params(self.nets[net]):
            if "running" not in param.name and param._data is not None:
                new = rng.uniform(-0.5, 0.5, param.shape).astype(param.dtype)
                param.set_data(device_array(new, self.contexts[0]))

    def blocks(self, net: str) -> List[gluon.Block]:
        """Return the layers that have parameters of their own."""
        found: List[gluon.Block] = []
        self.nets[net].apply(lambda block: found.append(block) if block._reg_params else None)
        return found


def net_params(net: gluon.Block) -> List[gluon.Parameter]:
    """Return a network's parameters in the order of its layers, each once."""
    return list({id(param): param for param in net._collect_params_with_prefix().values()}.values())


class Ours(World):
    """Several devices with gluon_mgpu."""

    compiled = True

    def new_trainer(self, name: str) -> Any:
        """Return a Trainer or LocalSGD."""
        options = dict(self.trainer_options)
        kind = mgpu.LocalSGD if "every" in options else mgpu.Trainer
        return kind(self.passed(name, block=True), *self.optimizer(name), **options)


class Plain(World):
    """One device with gluon.Trainer, and sums of gradients in NumPy. It counts what a program leaves undecided.

    Gluon's own rule holds: a step takes each parameter's latest gradient. `notes` are the reasons for which a Trainer of several
    devices may refuse the program from that moment on, as it cannot know what Gluon does.
    """

    def __init__(self, setting: Setting, folder: Path, *, turned: bool = False, compiled: bool = False) -> None:
        self.turned = turned  # the order of shards, so that sums round otherwise
        self.compiled = compiled
        self.num_open: Dict[str, int] = {}  # groups
        self.begun: Dict[str, int] = {}  # the passes before each group
        self.sums: Dict[str, Dict[int, Any]] = {}  # by trainer and parameter: (dense sum, its rows or None)
        self.counted: Dict[str, float] = {}
        self.writer: Dict[int, int] = {}  # by parameter: the pass that wrote its gradient
        self.unused: List[Reach] = []  # passes that no step has used
        self.num_passes = 0
        self.notes: List[str] = []
        self.adds = False  # the user's grad_req
        super().__init__(setting, [mx.cpu(0)], folder)

    def new_trainer(self, name: str) -> Any:
        """Return Gluon's."""
        return gluon.Trainer(self.passed(name, block=False), *self.optimizer(name), kvstore=None)

    def backward(self, what: str, X: Any, y: Any, sizes: Sequence[int], *, is_whole: bool, devices: Sequence[int] = ()) -> None:
        """Go backward once through the losses of all shards, one after the other on this device."""
        for trainer in [name for name, num in self.num_open.items() if num]:
            self.fold(trainer)
        before = [param for net in self.nets.values() for param in net_params(net) if param._data is not None and param._grad]
        flags = {id(param): param.list_data()[0]._fresh_grad for param in before}
        for param in before:
            param.list_data()[0]._fresh_grad = False
        sizes = [sum(sizes)] if self.compiled else sizes  # a static graph that is used twice in a pass is wrong in the next
        ends = np.cumsum(sizes)
        shards = [(int(end) - size, int(end)) for size, end in zip(sizes, ends)]
        losses: List[Any] = []
        axis = self.model.batch_axis
        with autograd.record():
            for begin, end in shards:
                loaded = [mapped(lambda x: self.load(x, axis), cut(part, begin, end, axis)) for part in (X, y)]
                losses += self.model.losses[what](self.nets, *loaded)
        autograd.backward(losses)
        self.num_passes += 1
        params = [param for net in self.nets.values() for param in net_params(net) if param._data is not None and param._grad]
        reached = frozenset(id(param) for param in params if param.list_data()[0]._fresh_grad)
        self.unused.append(Reach(self.num_passes, is_whole, frozenset(devices or range(len(sizes))), reached))
        for param in params:
            if id(param) in reached:
                self.writer[id(param)] = self.num_passes
            elif flags.get(id(param)):
                param.list_data()[0]._fresh_grad = True
        self.num_examples = int(sum(sizes))

    def load(self, data: np.ndarray, axis: int) -> Any:
        """Return a shard on the device; its examples in reverse order where sums are to round otherwise."""
        return device_array(np.flip(data, axis) if self.turned and not self.model.by_shard else data, self.contexts[0])

    def fold(self, trainer: str) -> None:
        """Add what passes of this group have left, with or without a step after each, and drop what was there before it."""
        fresh = [param for param in self.trained(trainer) if param.list_data()[0]._fresh_grad]
        if any(self.writer.get(id(param), 0) > self.begun[trainer] for param in fresh):
            self.note(trainer, 0)
        elif fresh:
            self.forget(trainer)

    def note(self, trainer: str, num_examples: float) -> None:
        """Add the latest gradients to the accumulated ones."""
        fresh = [param for param in self.trained(trainer) if param.list_data()[0]._fresh_grad]
        if not fresh:
            raise UserWarning("no gradient since the last step")
        self.judge(trainer)
        sums = self.sums.setdefault(trainer, {})
        for param in fresh:
            gradient = param.list_grad()[0]
            rows = set(gradient.indices.asnumpy().tolist()) if gradient.stype == "row_sparse" else None
            dense = gradient.asnumpy().astype("float64")
            if id(param) in sums:
                dense, rows = sums[id(param)][0] + dense, rows if rows is None else rows | sums[id(param)][1]
            sums[id(param)] = dense, rows
            param.list_data()[0]._fresh_grad = False
        self.counted[trainer] = self.counted.get(trainer, 0) + num_examples
        self.use(trainer)

    def open(self, trainer: str) -> None:
        """Begin a group."""
        self.num_open[trainer] = self.num_open.get(trainer, 0) + 1
        self.begun[trainer] = self.num_passes

    def close(self, trainer: str) -> None:
        """End it."""
        self.fold(trainer)
        self.num_open[trainer] -= 1

    def begin(self, trainer: str) -> None:
        """Let only later passes count: what `train_batch` and `fit` do."""
        for param in self.trained(trainer):
            param.list_data()[0]._fresh_grad = False

    def forget(self, trainer: str) -> None:
        """Drop gradients that no step has used."""
        self.begin(trainer)
        self.use(trainer)

    def drop_sums(self, trainer: str) -> None:
        """Drop the accumulated gradients."""
        self.sums.pop(trainer, None)
        self.counted.pop(trainer, None)

    def note_batch_axis(self) -> None:
        """Note that Gluon's losses ignore `batch_axis` in np mode, so that `train_batch` and `fit` may refuse them."""
        if self.setting.model == "time_first_loss" and self.setting.arrays == "np":
            self.notes.append("a loss whose batch_axis np mode ignores")

    def trained(self, trainer: str) -> List[gluon.Parameter]:
        """Return the parameters that a trainer trains now: those that are not frozen."""
        return [param for param in self.params(trainer) if param.grad_req != "null" and param._data is not None]

    def judge(self, trainer: str) -> None:
        """Note what several devices cannot decide about the gradients that are used now."""
        own = {id(param) for param in self.trained(trainer)}
        fresh = {self.writer.get(id(p)) for p in self.trained(trainer) if p.list_data()[0]._fresh_grad}
        touching = [one for one in self.unused if one.params & own]
        if self.adds or not touching:
            return
        before, last = touching[:-1], touching[-1]
        if len(fresh) > 1:
            self.notes.append("one step takes gradients of several passes")
        elif before and self.counted.get(trainer):
            self.notes.append("a pass that no step has counted stands between those of one update")
        elif before and not last.is_whole:
            self.notes.append("a pass before was not used, and the last one is not one call of mgpu.backward")
        elif any(not one.devices & last.devices for one in before):
            self.notes.append("a pass before was not used, and the last one has reached other devices")

    def use(self, trainer: str) -> None:
        """Forget the passes that this trainer's step has used."""
        own = {id(param) for param in self.params(trainer)}
        left = [replace(one, params=one.params - own) for one in self.unused]
        self.unused = [one for one in left if one.params]

    def step(self, trainer: str, num_examples: float, ignore: bool = False) -> None:
        """Step as Gluon does, with the gradients accumulated before."""
        if self.num_open.get(trainer) or self.counted.get(trainer):
            self.note(trainer, num_examples)
            if self.num_open.get(trainer):
                return
            num_examples = 0
        self.apply(trainer, num_examples, ignore)

    def apply(self, trainer: str, num_examples: float, ignore: bool) -> None:
        """Update with the latest gradients, or with those that were accumulated."""
        if self.counted.get(trainer):
            num_examples += self.counted.pop(trainer)
            for param in self.trained(trainer):
                if id(param) in self.sums[trainer]:
                    write_gradient(param, *self.sums[trainer][id(param)])
            self.sums.pop(trainer)
        else:
            self.judge(trainer)
        ignore = ignore or bool(self.trainer_options.get("find_unused_parameters"))
        if self.trainer_options.get("clip_norm") or self.trainer_options.get("clip_value"):
            self.clip(trainer, num_examples)
        self.trainers[trainer].step(num_examples, ignore_stale_grad=ignore)
        self.use(trainer)

    def clip(self, trainer: str, num_examples: float) -> None:
        """Clip the averaged gradients in NumPy."""
        fresh = [param for param in self.trained(trainer) if param.list_data()[0]._fresh_grad]
        averaged = [param.list_grad()[0].asnumpy().astype("float64") / num_examples for param in fresh]
        most, each = self.trainer_options.get("clip_norm"), self.trainer_options.get("clip_value")
        norm = np.sqrt(sum((one**2).sum() for one in averaged))
        if most and norm > most:
            averaged = [one * (most / norm) for one in averaged]
        if each:
            averaged = [np.clip(one, -each, each) for one in averaged]
        for param, one in zip(fresh, averaged):
            stored = param.list_grad()[0]
            rows = set(stored.indices.asnumpy().tolist()) if stored.stype == "row_sparse" else None
            write_gradient(param, one * num_examples, rows)

    def discard(self, trainer: str) -> None:
        """Forget gradients that were not used, and those that were accumulated."""
        self.drop_sums(trainer)
        self.forget(trainer)


def write_gradient(param: gluon.Parameter, dense: np.ndarray, rows: Optional[Set[int]]) -> None:
    """Put a gradient where backward passes leave theirs, fresh."""
    stored, dense = param.list_grad()[0], dense.astype(param.dtype)
    if rows is None:
        stored[:] = device_array(dense, stored.context)
    else:
        which = np.array(sorted(rows), dtype="int64")
        mx.nd.sparse.row_sparse_array((dense[which], which), shape=dense.shape, dtype=param.dtype).copyto(stored)
    param.list_data()[0]._fresh_grad = True
