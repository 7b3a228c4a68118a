"""BatchNorm's running statistics move, on all devices alike, by the mean of the changes of all parts, weighted by examples.

```
before ── 6 examples on cpu(0) ──► change 0 ─┐
before ── 3 examples on cpu(1) ──► change 1 ─┴─► before + (6 change 0 + 3 change 1) / 9     on both, after each step
```
"""

from __future__ import annotations

from operator import attrgetter, is_not
from typing import Dict, Iterable, List, Optional, Sequence, Set, Tuple
from weakref import WeakValueDictionary

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..distributed import group
from ..nested import Array
from ..runtime.engine_push import EngineContext, WrittenWith
from .gradients import Gradients, idle_devices
from .parameters import STATISTICS, Params, named_params
from .slab import BucketSlice, Moves, Slab, place, place_of, slabs_of
from .sums import Divisor, Sum

_DATA = attrgetter("_data")

# Of all trainers, by id, in the order in which they were made: processes exchange their sums in it.
_all: WeakValueDictionary[int, RunningStats] = WeakValueDictionary()  # each statistic belongs to the latest one that has it
_num_passes = 0  # the same in all processes
_stages_before: Dict[Context, Set[Context]] = {}  # by the device of a pipeline's recorded output: those of the stages before it


def note_examples(examples: Iterable[Tuple[Context, float]], params: Optional[Sequence[gluon.Parameter]] = None) -> None:
    """Count the latest backward pass's examples on each device, for these statistics, or those of all networks it has reached.

    An empty pass of a process may have reached any network in others.
    """
    global _num_passes
    _num_passes += 1
    counted = list(examples)
    for one in list(_all.values()):
        if one.has_some(params) if params is not None else not counted or one.is_reached:
            one.count(counted if params is not None else one.divided(counted))


def note_stages(devices: Sequence[Context]) -> None:
    """Note the devices that a backward pass from an output on the last of them reaches: only that pass counts its examples."""
    _stages_before[devices[-1]] = set(devices) - {devices[-1]}


def note_losses(losses: Iterable[Array]) -> None:
    """Note the examples in the latest backward pass, which was from these losses.

    Of each device, the first one counts: others may be terms of another kind. If devices have different numbers of losses, such
    as of several shards, those count that are as long as the first one.
    """
    lengths: Dict[Context, List[int]] = {}
    for loss in losses:
        for context in (loss.context, *_stages_before.get(loss.context, ())):
            lengths.setdefault(context, []).append((*loss.shape, 1)[0])
    has_shards = len(set(map(len, lengths.values()))) > 1
    note_examples((context, own[0] * (own.count(own[0]) if has_shards else 1)) for context, own in lengths.items())
    _stages_before.clear()


def is_running_stat(param: gluon.Parameter) -> bool:
    """Return whether a parameter is a running mean or variance. Other values without a gradient, such as masks, are not."""
    # Gluon marks them as not differentiable; a frozen weight has grad_req "null" but is differentiable.
    return not param._differentiable and param.name.endswith(STATISTICS) and np.issubdtype(np.dtype(param.dtype), np.floating)


def running_stats(params: Params) -> List[gluon.Parameter]:
    """Return BatchNorm's running means and variances that have values."""
    return [param for param in named_params(params).values() if param._data and is_running_stat(param)]


def statistics_slabs(params: Sequence[gluon.Parameter]) -> List[Slab]:
    """Return slabs of running statistics: their `gradients` are memory for changes."""
    by_devices: Dict[Tuple[Context, ...], List[gluon.Parameter]] = {}
    for param in params:
        by_devices.setdefault(tuple(param.list_ctx()), []).append(param)
    found = []
    for contexts, own in by_devices.items():
        place(own, statistics=True)
        found += slabs_of(own, range(len(own)), contexts)
    return found


def written_with(statistics: Sequence[Slab], trained: Sequence[Slab], context: Context) -> WrittenWith:
    """Return what lets statistics of a device count as written with these gradients: static graphs write them untracked."""
    arrays, others = _arrays_of(statistics, "weights", context), _arrays_of(trained, "gradients", context)
    return WrittenWith(arrays, others, EngineContext(context.device_typeid, context.device_id))


def _arrays_of(slabs: Sequence[Slab], kind: str, context: Context) -> List[Array]:
    """Return the `weights` or `gradients` of slabs on a device, those of a bucket once."""
    places = {slab.bucket or slab: slab.contexts.index(context) for slab in slabs if context in slab.contexts}
    return [getattr(owner, kind)[place] for owner, place in places.items()]


class RunningStats:
    """The running statistics of a trainer's network on all devices, which each step makes equal again.

    Parameters
    ----------
    params : sequence of gluon.Parameter
        Running statistics, with values or without.
    total : Sum
        Over the devices and processes, for these alone.
    devices : sequence of mxnet.Context
        All devices of the network.
    gradients : Gradients, optional
        Those of the network, which know what passes reach it. Without, call `count` after each pass.
    """

    def __init__(
        self, params: Sequence[gluon.Parameter], total: Sum, devices: Sequence[Context], gradients: Optional[Gradients] = None
    ) -> None:
        self._params, self._sum, self._gradients = list(params), total, gradients
        self._reached = {id(param): param for param in params}  # all that this trainer's passes move
        self._others: List[RunningStats] = []  # that have some of these now
        self._divisor = None if group() is None else Divisor(devices)
        self._examples: Optional[Dict[Context, float]] = None  # since the latest move; None: no pass was noted
        self._num_passes, self._num_moves = _num_passes, -1
        self._data: List[Optional[List[Array]]] = []  # Gluon's lists of arrays
        self._memory: List[Tuple[Optional[BucketSlice], int]] = []
        self._slabs: List[Slab] = []
        self._before: List[List[Array]] = []  # the common values of each slab, on each device
        self._trained: List[Slab] = []  # the slabs of gradients after which the statistics count as written
        self._written: List[WrittenWith] = []  # one for each device
        self._follow()
        if gradients is not None:
            for other in list(_all.values()):
                other._leave(self)
            _all[id(self)] = self

    def add(self, params: Sequence[gluon.Parameter]) -> None:
        """Move these statistics too, of a network of which the trainer has only some parameters."""
        new = list(params)
        self._reached.update((id(param), param) for param in new)
        for one in (self, *_all.values()):
            if one.has_some(new) and one is not self and one not in self._others:
                self._others.append(one)
            new = one._without(new)
        if new:
            self._params, self._num_moves = self._params + new, -1
        for one in self._together():  # now: the next pass moves the values
            one._follow()

    def _leave(self, other: RunningStats) -> None:
        """Leave to another trainer's the statistics that it has."""
        if other.has_some(self._params):
            if self._divisor is None:  # processes may not have the same former trainers: garbage
                mx.nd.waitall()  # a static graph writes them without telling the engine
                self.catch_up(self._trained)
            self._params, self._num_moves = other._without(self._params), -1
            self._follow()
        if other.has_some(list(self._reached.values())):
            self._others = [one for one in self._others if one._params] + [other]

    def has_some(self, params: Sequence[gluon.Parameter]) -> bool:
        """Return whether any of these are its statistics."""
        return len(self._without(params)) < len(params)

    def _without(self, params: Sequence[gluon.Parameter]) -> List[gluon.Parameter]:
        own = set(map(id, self._params))
        return [param for param in params if id(param) not in own]

    @property
    def is_reached(self) -> bool:
        """Whether the latest backward pass has reached the network."""
        return self._gradients is not None and self._gradients.is_reached

    def divided(self, examples: List[Tuple[Context, float]]) -> List[Tuple[Context, float]]:
        """Return the examples; if a device that the pass has reached has none, as its loss is elsewhere, divided equally."""
        reached = self._gradients.reached() if self._gradients is not None and examples else set()
        if reached.issubset(context for context, _ in examples):
            return examples
        return [(context, sum(number for _, number in examples) / len(reached)) for context in reached]

    def count(self, examples: Sequence[Tuple[Context, float]]) -> None:
        """Count examples on their devices until the next move."""
        self._examples = {} if self._examples is None else self._examples
        for context, number in examples:
            self._examples[context] = self._examples.get(context, 0) + number

    def begin(self) -> None:
        """Take the values of each first device as the common ones, and count from here."""
        for one in self._together():
            one._follow()
            one._take()
            one._examples = None

    def _take(self) -> None:
        self._before = []
        for slab in self._slabs:
            first = slab.weights[0].as_nd_ndarray()
            self._before.append([first.copyto(context) for context in slab.contexts])

    def move(self, trained: List[Slab], idle: Iterable[Context], *, anew: bool = False) -> None:
        """Move the statistics of all devices alike, after backward passes into these slabs. It does not wait.

        Parameters
        ----------
        idle : iterable of Context
            Devices without data, if no examples were counted.
        anew : bool
            Whether a program may have set the values since the passes: their mean counts then, not that of the changes.
        """
        _stages_before.clear()
        for one in self._together():
            if one._params:
                one._move(trained, idle, anew=anew)

    def _together(self) -> List[RunningStats]:
        """Return all that have statistics which this trainer's passes move."""
        found = [self]
        for one in found:
            found += [other for other in one._others if other not in found]
        return found

    def _move(self, trained: List[Slab], idle: Iterable[Context], *, anew: bool) -> None:
        self._num_passes = _num_passes
        self._follow()
        contexts = {context for slab in self._slabs for context in slab.contexts}
        if trained is not self._trained:
            self._trained, self._written = trained, [written_with(self._slabs, trained, context) for context in contexts]
        for one in self._written:
            one.push()
        if anew:
            self._take()
        examples, self._examples = self._examples, None
        if examples is None:
            examples = {context: float(context not in set(idle)) for context in contexts}
        if len(contexts) > 1 or self._divisor is not None:
            with autograd.pause():
                self._move_by(examples)

    def catch_up(self, trained: List[Slab]) -> None:
        """Move the statistics if passes came that no step has used."""
        self.catch_up_plain(trained)
        if self._num_passes != _num_passes:
            self.move(trained, (), anew=self._divisor is None)

    def catch_up_plain(self, trained: List[Slab]) -> None:
        """Move the statistics if MXNet's own `backward` came, whose examples were not counted. A job does not know of it."""
        gradients, is_alone = self._gradients, self._divisor is None and self._examples is None
        if is_alone and gradients is not None and gradients.has_new():
            self.move(trained, idle_devices(), anew=True)

    def _move_by(self, examples: Dict[Context, float]) -> None:
        """Move the statistics of slabs that have seen examples, in some process, by the mean of their changes."""
        in_job = self._divisor is not None
        moved = []
        for slab, before in zip(self._slabs, self._before):
            counts = [examples.get(context, 0) for context in slab.contexts]
            if in_job or (len(counts) > 1 and any(counts)):
                moved.append((slab, before, counts))
        for slab, before, counts in moved:
            for values, former, change, number in zip(slab.weights, before, slab.gradients, counts):
                mx.nd.elemwise_sub(values.as_nd_ndarray(), former, out=change)
                mx.nd._internal._mul_scalar(change, scalar=number if in_job else number / sum(counts), out=change)
        self._sum.run(self._slabs if len(moved) == len(self._slabs) else [slab for slab, _, _ in moved])
        for slab, before, counts in moved:
            if self._divisor is not None:
                self._divisor.divide([slab], sum(counts))
            for values, former, change in zip(slab.weights, before, slab.gradients):
                mx.nd.elemwise_add(former, change, out=former)
                former.copyto(values.as_nd_ndarray())

    def _follow(self) -> None:
        """Find the statistics again that got values, or other memory."""
        if self._num_moves == Moves.count and not any(map(is_not, map(_DATA, self._params), self._data)):
            return
        slabs = statistics_slabs([param for param in self._params if param._data])
        memory = [(place_of(param), id(param._data)) for param in self._params]
        self._data, self._num_moves = list(map(_DATA, self._params)), Moves.count
        if memory != self._memory:  # otherwise other parameters have moved
            self._slabs, self._trained, self._memory = slabs, [], memory
            self._take()
