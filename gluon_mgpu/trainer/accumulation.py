"""Gradients of several passes: summed apart from the gradients for one update, or running on in them (`grad_req="add"`)."""

from __future__ import annotations

from typing import Dict, Iterable, List, Set, Tuple, Union

import mxnet as mx
from mxnet import autograd

from ..nested import Array
from .slab import Bucket, Slab


class GradientSums:
    """The sums of the gradients of passes that were counted, on each device, until an update uses them.

    Attributes
    ----------
    has_counted : bool
        Passes were counted that no update has used.
    reached : set of int
        Parameters that counted passes have written.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Begin with none."""
        self.has_counted = False
        self.reached: Set[int] = set()
        self._sums: Dict[Union[Bucket, Tuple[int, ...]], List[Array]] = {}  # one array for each replica

    def add(self, slabs: Iterable[Slab]) -> None:
        """Add the gradients of a pass."""
        with autograd.pause():
            for slab in slabs:
                for total, gradient in zip(self._of(slab), slab.gradients):
                    _add(total, gradient, total)

    def add_to(self, slabs: Iterable[Slab]) -> None:
        """Add the sums to the gradients, which are zero where no pass came later."""
        with autograd.pause():
            for slab in slabs:
                if (slab.bucket or slab.indices) in self._sums:
                    for total, gradient in zip(self._of(slab), slab.gradients):
                        _add(total, gradient, gradient)

    def _of(self, slab: Slab) -> List[Array]:
        key = slab.bucket or slab.indices
        if key not in self._sums:
            self._sums[key] = [mx.nd.zeros_like(one.as_nd_ndarray()) for one in (slab.bucket or slab).gradients]
        return [one[slab.begin : slab.end] for one in self._sums[key]] if slab.bucket else self._sums[key]


class RunningSums:
    """Each device's own running sums, which the sums over devices replace for one update."""

    def __init__(self) -> None:
        self.kept: List[Tuple[Array, Array]] = []  # gradients, each with a copy

    def keep(self, slabs: Iterable[Slab]) -> None:
        """Copy gradients before they are summed over the devices."""
        self.put_back()
        with autograd.pause():
            self.kept = [(gradient, gradient.copy()) for slab in slabs for gradient in slab.gradients]

    def put_back(self) -> None:
        """Restore the gradients."""
        kept, self.kept = self.kept, []
        with autograd.pause():
            for gradient, copy in kept:
                copy.copyto(gradient)


def _add(one: Array, other: Array, out: Array) -> None:
    """Write the sum of two gradients to one of them, dense or sparse."""
    if out.stype == "default":
        mx.nd.elemwise_add(one.as_nd_ndarray(), other.as_nd_ndarray(), out=out.as_nd_ndarray())
    else:
        mx.nd.elemwise_add(one, other).copyto(out)
