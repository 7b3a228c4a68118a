"""Gradients that add up over several backward passes before they are used."""

from __future__ import annotations

from typing import Dict, List, MutableSet, Sequence, Tuple
from weakref import WeakSet

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from .errors import TrainerError
from .nested import Leaf, num_bytes


class Accumulation:
    """Lets backward passes add to gradients instead of replacing them, and remembers which devices they reached.

    ```
    start()      "write" becomes "add"         note()  ...  note()       one for each step that only counts
    stop()       "add" becomes "write" again, for those that start() changed
    ```

    Sparse gradients, which MXNet can only write, are added up beside, by `note`.

    Parameters
    ----------
    params : list of gluon.Parameter
    num_replicas : int

    Attributes
    ----------
    is_on : bool
    is_outdated : bool
        Another one has marked parameters of these anew: flags that were found before are no longer theirs.
    """

    def __init__(self, params: Sequence[gluon.Parameter], num_replicas: int) -> None:
        self.is_on = self.is_outdated = False
        self._params = list(params)
        self._num_replicas = num_replicas
        self._changed: List[gluon.Parameter] = []  # those that wrote before
        self._sparse: Dict[Tuple[int, int], Leaf] = {}  # sums, by parameter and replica
        self._forget()
        _all.add(self)

    def start(self) -> List[gluon.Parameter]:
        """Let the coming backward passes add to what is there, and return for which parameters. What is stale is to be zero."""
        self.is_on = True
        return self.extend()

    def check_alone(self) -> None:
        """Raise `TrainerError` where another trainer adds up gradients of these parameters, which this one would begin anew."""
        own = {id(param) for param in self._params if param.grad_req != "null"}
        shared = [
            param.name
            for other in _all
            if other is not self and other.is_on
            for param, reached in zip(other._params, other._reached)
            if reached.any() and id(param) in own
        ]
        if shared:
            raise TrainerError(
                f"Trainer.accumulate: got {shared[0]!r}, of which another trainer accumulates gradients; need one at a time. "
                "Call that one's flush() or discard() before."
            )

    def extend(self) -> List[gluon.Parameter]:
        """Take those in, too, that write: they were thawed or given a shape since."""
        writing = [param for param in self._params if param.grad_req == "write" and param._grad_stype == "default"]
        for param in writing:
            param._grad_req = "add"  # its setter would make new arrays; without arrays yet, they will be made so
        self._changed += writing
        self._mark(writing, "add")
        return writing

    def stop(self) -> List[gluon.Parameter]:
        """Let backward passes replace gradients again, and return of which parameters; those that are there are stale."""
        self.is_on = False
        adding = [param for param in self._changed if param.grad_req == "add"]
        for param in adding:
            param._grad_req = "write"
        self._mark(adding, "write")
        for param in self._params:
            for weight in (param._data or []) if param._grad else []:
                weight._fresh_grad = False
        self._changed = []
        self._forget()
        return adding

    def note(self, indices: Sequence[int], fresh: np.ndarray) -> None:
        """Remember which gradients a pass has added to.

        Parameters
        ----------
        indices : sequence of int
            Parameters.
        fresh : numpy.ndarray of bool, shape (parameters, replicas)
        """
        self._reached[np.array(indices, dtype=int)] |= fresh
        for index, flags in zip(indices, fresh):
            if self._params[index]._grad_stype != "default" and self._params[index].grad_req == "write":
                for replica in np.flatnonzero(flags):
                    self._add_sparse(index, int(replica))

    def reached(self, indices: Sequence[int]) -> np.ndarray:
        """Return which gradients any noted pass has added to, shape (parameters, replicas)."""
        return self._reached[np.array(indices, dtype=int)]

    def put_back(self) -> None:
        """Write the sums of sparse gradients where the last pass has left its own."""
        for (index, replica), total in self._sparse.items():
            total.copyto(self._params[index].list_grad()[replica])

    def bytes_held(self) -> List[int]:
        """Return the bytes of the sums of sparse gradients on each device."""
        return [
            sum(num_bytes(total) for (_, where), total in self._sparse.items() if where == replica)
            for replica in range(self._num_replicas)
        ]

    def _mark(self, params: Sequence[gluon.Parameter], grad_req: str) -> None:
        _mark([param for param in params if param._grad], grad_req)
        marked = set(map(id, params))
        for other in _all:
            if other is not self and not marked.isdisjoint(map(id, other._params)):
                other.is_outdated = True

    def _add_sparse(self, index: int, replica: int) -> None:
        gradient, total = self._params[index].list_grad()[replica], self._sparse.get((index, replica))
        self._sparse[index, replica] = gradient.copy() if total is None else mx.nd.sparse.elemwise_add(total, gradient)

    def _forget(self) -> None:
        self._reached = np.zeros((len(self._params), self._num_replicas), dtype=bool)
        self._sparse.clear()


_all: MutableSet[Accumulation] = WeakSet()  # of several trainers, that may share parameters


def _mark(params: Sequence[gluon.Parameter], grad_req: str) -> None:
    """Say what backward passes do to gradients, in the arrays where they are, which stay as fresh as they were.

    MXNet compiles static graphs anew when this has changed: `tests/test_accumulation.py`.
    """
    weights = [weight for param in params for weight in param._data]
    if weights:
        fresh = [weight._fresh_grad for weight in weights]
        autograd.mark_variables(weights, [gradient for param in params for gradient in param._grad], grad_req)
        for weight in (weight for weight, is_fresh in zip(weights, fresh) if is_fresh):
            weight._fresh_grad = True
