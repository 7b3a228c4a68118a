"""BatchNorm's running statistics move, on all devices alike, by the mean of the changes of all parts, weighted by examples.

```
before ── 6 examples on cpu(0) ──► change 0 ─┐
before ── 3 examples on cpu(1) ──► change 1 ─┴─► before + (6 change 0 + 3 change 1) / 9     on both, after each step
```
"""

from __future__ import annotations

from operator import attrgetter, is_not
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..distributed import group
from ..mxnet_internals.engine import EngineContext, WrittenWith
from ..nested import Array
from .parameters import STATISTICS, Params, named_params
from .slab import BucketSlice, Moves, Slab, place, place_of, slabs_of
from .sums import Divisor, Sum

_DATA = attrgetter("_data")


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
    """The running statistics of the networks that a trainer was given, on all devices; each of its steps makes them equal again.

    Parameters
    ----------
    params : sequence of gluon.Parameter
        Running statistics, with values or without.
    total : Sum
        Over the devices and processes, for these alone.
    devices : sequence of mxnet.Context
        All devices of the network.
    """

    def __init__(self, params: Sequence[gluon.Parameter], total: Sum, devices: Sequence[Context]) -> None:
        self._params, self._sum = list(params), total
        self._divisor = None if group() is None else Divisor(devices)
        self._examples: Optional[Dict[Context, float]] = None  # of passes since the latest move; None: none was counted
        self._num_moves = -1
        self._data: List[Optional[List[Array]]] = []  # Gluon's lists of arrays
        self._memory: List[Tuple[Optional[BucketSlice], int]] = []
        self._slabs: List[Slab] = []
        self._before: List[List[Array]] = []  # the common values of each slab, on each device
        self._trained: List[Slab] = []  # the slabs of gradients after which the statistics count as written
        self._written: List[WrittenWith] = []  # one for each device
        self._follow()

    def add(self, params: Sequence[gluon.Parameter]) -> None:
        """Move these statistics too, of a network of which the trainer has only some parameters."""
        own = set(map(id, self._params))
        new = [param for param in params if id(param) not in own]
        if new:
            self._params, self._num_moves = self._params + new, -1
        self._follow()  # now: the next pass moves the values

    def count(self, examples: Mapping[Context, float]) -> None:
        """Count the examples of a pass on their devices until the next move."""
        self._examples = self._examples or {}
        for context, number in examples.items():
            self._examples[context] = self._examples.get(context, 0) + number

    @property
    def has_counted(self) -> bool:
        """Whether examples were counted since the latest move."""
        return self._examples is not None

    def begin(self) -> None:
        """Take the values of each first device as the common ones, and count from here."""
        self._follow()
        self._take()
        self._examples = None

    def _take(self) -> None:
        self._before = []
        for slab in self._slabs:
            first = slab.weights[0].as_nd_ndarray()
            self._before.append([first.copyto(context) for context in slab.contexts])

    def move(self, trained: List[Slab], *, anew: bool = False) -> None:
        """Move the statistics of all devices alike, after backward passes into these slabs. It does not wait.

        All devices count equally if no examples were counted. With `anew`, a program may have set the values since the passes:
        their mean counts then, not that of the changes.
        """
        examples, self._examples = self._examples, None
        if not self._params:
            return
        self._follow()
        contexts = {context for slab in self._slabs for context in slab.contexts}
        if trained is not self._trained:
            self._trained, self._written = trained, [written_with(self._slabs, trained, context) for context in contexts]
        for one in self._written:
            one.push()
        if anew:
            self._take()
        if examples is None:
            examples = dict.fromkeys(contexts, 1.0)
        if len(contexts) > 1 or self._divisor is not None:
            with autograd.pause():
                self._move_by(examples)

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
