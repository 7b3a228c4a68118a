"""Gradients that the user lets add up from step to step (`grad_req="add"`)."""

from __future__ import annotations

from typing import List, Sequence, Set, Tuple

from mxnet import autograd, gluon

from ..nested import Array
from .buffers import Buffer, zero


class RunningSums:
    """Each device's own running sum of such gradients. For one update, the sum over devices replaces it in the gradient.

    Parameters
    ----------
    params : list of gluon.Parameter

    Attributes
    ----------
    indices : set of int
        The parameters whose gradients add up.
    """

    def __init__(self, params: Sequence[gluon.Parameter]) -> None:
        self.indices: Set[int] = set()
        self._params = list(params)
        self._own: List[Tuple[Array, Array]] = []  # gradients that hold a sum over devices, each with a copy of the device's own
        self._reduced: List[Tuple[Array, Array]] = []  # gradients that hold the device's own, each with a copy of the sum

    def keep(self, buffers: Sequence[Buffer]) -> None:
        """Copy the devices' own sums in these buffers, before they are summed over the devices."""
        self.restore()
        for buffer in buffers if self.indices else ():
            own = self.indices.intersection(buffer.indices)
            is_all = len(own) == len(buffer.indices)
            self._keep(buffer.gradients if is_all else [one for i in own for one in self._params[i].list_grad()])

    def restore(self) -> None:
        """Write each device's own sum back into its gradient."""
        own, self._own, self._reduced = self._own, [], []
        _write(own)

    def before_backward(self) -> None:
        """Write the devices' own sums back before a backward pass adds to them, and keep the sums over devices."""
        if self._own:
            reduced = _copies([gradient for gradient, _ in self._own])
            self.restore()
            self._reduced = reduced

    def before_update(self) -> None:
        """Write the sums over devices into the gradients again: the backward pass since was of another network."""
        if self._reduced:
            reduced, self._reduced = self._reduced, []
            self._keep([gradient for gradient, _ in reduced])
            _write(reduced)

    def drop(self) -> None:
        """Set these gradients to zero and forget all copies."""
        self._own, self._reduced = [], []
        with autograd.pause():
            for index in self.indices:
                for gradient in self._params[index]._grad or []:
                    zero(gradient)

    def _keep(self, gradients: Sequence[Array]) -> None:
        self._own += _copies(gradients)


def _copies(arrays: Sequence[Array]) -> List[Tuple[Array, Array]]:
    with autograd.pause():
        return [(array, array.copy()) for array in arrays]


def _write(copies: Sequence[Tuple[Array, Array]]) -> None:
    with autograd.pause():
        for array, copy in copies:
            copy.copyto(array)
