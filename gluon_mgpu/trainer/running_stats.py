"""BatchNorm's running statistics move, on all devices alike, by the mean of the changes of all parts, weighted by examples.

```
before ── 6 examples on cpu(0) ──► change 0 ─┐
before ── 3 examples on cpu(1) ──► change 1 ─┴─► before + (6 change 0 + 3 change 1) / 9     on both, after each step
```
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..distributed import group
from ..mxnet_internals.engine import WrittenWith
from ..mxnet_internals.parameters import has_values, is_differentiable, values_of
from ..nested import Array
from .parameters import STATISTICS, Params, named_params
from .slab import Slab, place, slabs_of, written_with
from .sums import Divisor, Sum


def is_running_stat(param: gluon.Parameter) -> bool:
    """Return whether a parameter is a running mean or variance. Other values without a gradient, such as masks, are not."""
    # Gluon marks them as not differentiable; a frozen weight has grad_req "null" but is differentiable.
    return not is_differentiable(param) and param.name.endswith(STATISTICS) and np.issubdtype(np.dtype(param.dtype), np.floating)


def running_stats(params: Params) -> List[gluon.Parameter]:
    """Return BatchNorm's running means and variances that have values."""
    return [param for param in named_params(params).values() if values_of(param) and is_running_stat(param)]


def statistics_slabs(params: Sequence[gluon.Parameter]) -> List[Slab]:
    """Return slabs of running statistics, which have no gradients."""
    by_devices: Dict[Tuple[Context, ...], List[gluon.Parameter]] = {}
    for param in params:
        by_devices.setdefault(tuple(param.list_ctx()), []).append(param)
    found = []
    for contexts, own in by_devices.items():
        place(own, statistics=True)
        found += slabs_of(own, range(len(own)), contexts)
    return found


@dataclass(eq=False)
class _Moving:
    """Running statistics of a slab while they move: a `Summand` of changes.

    Attributes
    ----------
    before : list of NDArray
        The common values, on each device.
    arrays : list of NDArray
        The changes since then, of each device, then their mean.
    """

    slab: Slab
    before: List[Array]
    arrays: List[Array]
    part: int = 0

    def __post_init__(self) -> None:
        self.indices, self.contexts, self.bucket = self.slab.indices, self.slab.contexts, self.slab.bucket
        self.summed = self.arrays


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
        self._values: List[Optional[List[Array]]] = []  # Gluon's lists of arrays
        self._moving: List[_Moving] = []
        self._trained: List[Slab] = []  # the slabs of gradients after which the statistics count as written
        self._written: List[WrittenWith] = []  # one for each device

    def add(self, params: Sequence[gluon.Parameter]) -> None:
        """Move these statistics too, of a network of which the trainer has only some parameters."""
        own = set(map(id, self._params))
        self._params += [param for param in params if id(param) not in own]
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
        for one in self._moving:
            first = one.slab.weights[0].as_nd_ndarray()
            one.before = [first.copyto(context) for context in one.contexts]

    def move(self, trained: List[Slab], *, anew: bool = False) -> None:
        """Move the statistics of all devices alike, after backward passes into these slabs. It does not wait.

        All devices count equally if no examples were counted. With `anew`, a program may have set the values since the passes:
        their mean counts then, not that of the changes.
        """
        examples, self._examples = self._examples, None
        if not self._params:
            return
        self._follow()
        contexts = {context for one in self._moving for context in one.contexts}
        if trained is not self._trained:
            slabs = [one.slab for one in self._moving]
            self._trained, self._written = trained, [written_with(slabs, trained, context) for context in contexts]
        for written in self._written:
            written.push()
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
        for one in self._moving:
            counts = [examples.get(context, 0) for context in one.contexts]
            if in_job or (len(counts) > 1 and any(counts)):
                moved.append((one, counts))
        for one, counts in moved:
            for values, before, change, number in zip(one.slab.weights, one.before, one.arrays, counts):
                mx.nd.elemwise_sub(values.as_nd_ndarray(), before, out=change)
                change *= number if in_job else number / sum(counts)
        self._sum.run(self._moving if len(moved) == len(self._moving) else [one for one, _ in moved])
        for one, counts in moved:
            if self._divisor is not None:
                self._divisor.divide([one], sum(counts))
            for values, before, change in zip(one.slab.weights, one.before, one.arrays):
                mx.nd.elemwise_add(before, change, out=before)
                before.copyto(values.as_nd_ndarray())

    def _follow(self) -> None:
        """Find the statistics again that got values, or other memory."""
        now = list(map(values_of, self._params))
        if len(now) == len(self._values) and all(map(is_, now, self._values)):
            return
        slabs = statistics_slabs([param for param in self._params if has_values(param)])
        self._values, self._trained = list(map(values_of, self._params)), []
        self._moving = [_Moving(slab, [], [mx.nd.zeros_like(one.as_nd_ndarray()) for one in slab.weights]) for slab in slabs]
        self._take()
