"""Gradients that add up over several backward passes before they are used."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple
from weakref import WeakSet, finalize

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..errors import TrainerError
from ..nested import Array, num_bytes
from .freshness import Pass


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
    is_open : bool
        More passes are to come: an `accumulate` context is open.
    has_earlier : bool
        The gradients are those of a pass before all this. They count if a step comes next, and not if another pass does.
    num_marked : int
        How often parameters of these were marked anew: flags that were found before are no longer theirs.
    """

    def __init__(self, params: Sequence[gluon.Parameter], num_replicas: int) -> None:
        self.is_on = self.is_open = self.has_earlier = False
        self.num_marked = 0
        self._params = list(params)
        self._num_replicas = num_replicas
        self._changed: List[gluon.Parameter] = []  # those that wrote before
        self._sparse: Dict[Tuple[int, int], Array] = {}  # sums, by parameter and replica
        self._is_taken_over = self._is_spoilt = False
        self._added: Any = None  # which gradients calls have added to that no step has counted
        self._outside: Tuple[Optional[Pass], Any] = (None, None)  # the latest such outside of contexts; which parameters
        self._forget()
        _all.add(self)
        finalize(self, _left_behind.update, self._changed).atexit = False  # the list stays the same one

    def start(self) -> List[gluon.Parameter]:
        """Let the coming backward passes add to what is there, and return for which parameters. What is stale is to be zero."""
        self.is_on = True
        return self.extend()

    def check_alone(self, operation: str) -> None:
        """Raise `TrainerError` where another trainer adds up gradients of these parameters, or this one was taken over.

        Where it has added none, it need not go on. What a trainer that is gone has added cannot be told from what came after.
        """
        self.check_own(operation)
        for other in _sharing(self):
            name = next(param.name for param in other._params if id(param) in self._own())
            if other.is_open or other._reached.any() or other._is_spoilt:
                raise TrainerError(
                    f"{operation}: got {name!r}, of which another trainer accumulates gradients; expected one at a time. "
                    "Call that one's flush() or discard() before."
                )
            other.stop(keeps_fresh=True)
        if _left_behind and self._take_left_behind():
            raise TrainerError(
                f"{operation}: got gradients that were added to those of a trainer that is gone; expected those of the "
                "passes since. Run the backward pass again."
            )

    def check_own(self, operation: str) -> None:
        """Raise `TrainerError` where a trainer that was made since has ended what this one has added up."""
        if self._is_taken_over:
            raise TrainerError(
                f"{operation}: got gradients that were accumulated until another trainer of these parameters was made; "
                "expected one trainer at a time. Call discard(), and run the passes of this update again."
            )

    def give_up(self) -> None:
        """Go on without what another trainer has ended."""
        self._is_taken_over = False

    def take_over(self) -> None:
        """End what other trainers add up of these parameters: this one has taken their place."""
        for other in _sharing(self):
            other._is_taken_over = bool(other._reached.any() or other.is_open)
            other.stop()
        self._take_left_behind()

    def extend(self) -> List[gluon.Parameter]:
        """Take those in, too, that write: they were thawed or given a shape since."""
        writing = [param for param in self._params if param.grad_req == "write" and param._grad_stype == "default"]
        for param in writing:
            param._grad_req = "add"  # its setter would make new arrays; without arrays yet, they will be made so
        self._changed += writing
        self._mark(writing, "add")
        return writing

    def adds_by_itself(self, param: gluon.Parameter) -> bool:
        """Return whether the user lets a parameter's gradients add up, and no trainer does."""
        return param.grad_req == "add" and not any(param is one for other in _all for one in other._changed)

    def note_call(self, which: Any, replaced: Any, current: Optional[Pass]) -> None:
        """Note a backward call that has added to gradients, or replaced some: sparse ones, and those of an earlier graph.

        A step counts the passes since the last one where they were made inside of a context. Outside it counts one: others were
        another loss's, or left out, and are in the sum all the same.
        """
        rows = which.any(axis=1)
        if self._added is None or self._added.shape != which.shape:
            self._added, self._outside = np.zeros_like(which), (None, np.zeros_like(rows))
        self._is_spoilt |= bool((replaced & self._added).any())
        self._added |= which
        before, loose = self._outside
        if before is not current:
            self._is_spoilt |= bool((rows & loose).any())
        if not self.is_open:
            self._outside = current, loose | rows

    def check_sum(self) -> None:
        """Raise `TrainerError` where passes are in the sum that no step is to count, or were replaced in it."""
        if self._is_spoilt:
            raise TrainerError(
                "Trainer.step: got a backward pass between those of one update that no step has counted, or one that has "
                "replaced gradients; expected one for each step. Make other losses' passes outside of accumulate(), count "
                "each of sparse gradients, record inside, and run the passes of this update again: they were dropped."
            )

    def stop(self, *, keeps_fresh: bool = False) -> List[gluon.Parameter]:
        """Let backward passes replace gradients again, and return of which parameters; those that are there are stale."""
        self.is_on = self.is_open = self.has_earlier = False
        adding = [param for param in self._changed if param.grad_req == "add"]
        for param in adding:
            param._grad_req = "write"
        self._mark(adding, "write")
        for param in [] if keeps_fresh else self._params:
            for weight in (param._data or []) if param._grad else []:
                weight._fresh_grad = False
        self._changed.clear()
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
        self._forget_calls()
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

    def _own(self) -> Set[int]:
        return {id(param) for param in self._params if param.grad_req != "null"}

    def _mark(self, params: Sequence[gluon.Parameter], grad_req: str) -> None:
        _mark([param for param in params if param._grad], grad_req)
        marked = set(map(id, params))
        for one in _all:
            one.num_marked += not marked.isdisjoint(map(id, one._params))

    def _take_left_behind(self) -> bool:
        """Let parameters write again that a trainer, gone since, has let add up; return whether there was a pass since."""
        params = [param for param in self._params if param in _left_behind]
        weights = [weight for param in params for weight in (param._data or []) if param._grad]
        was_fresh = any(weight._fresh_grad for weight in weights)
        for param in params:
            param._grad_req = "write" if param._grad_req == "add" else param._grad_req
        self._mark([param for param in params if param.grad_req == "write"], "write")
        for weight in weights:
            weight._fresh_grad = False
        _left_behind.difference_update(params)
        return was_fresh

    def _add_sparse(self, index: int, replica: int) -> None:
        gradient, total = self._params[index].list_grad()[replica], self._sparse.get((index, replica))
        self._sparse[index, replica] = gradient.copy() if total is None else mx.nd.sparse.elemwise_add(total, gradient)

    def _forget(self) -> None:
        self._reached = np.zeros((len(self._params), self._num_replicas), dtype=bool)
        self._sparse.clear()
        self._is_spoilt = False
        self._forget_calls()

    def _forget_calls(self) -> None:
        self._added, self._outside = None, (None, None)


_all: WeakSet[Accumulation] = WeakSet()  # of several trainers, that may share parameters
_left_behind: WeakSet[gluon.Parameter] = WeakSet()  # whose gradients add up, for a trainer that is gone


def _sharing(one: Accumulation) -> List[Accumulation]:
    """Return those of other trainers that add up gradients of the same parameters."""
    on = [other for other in _all if other.is_on and other is not one]
    own = one._own() if on else set()
    return [other for other in on if not own.isdisjoint(other._own())]


def is_made_to_add(param: gluon.Parameter) -> bool:
    """Return whether `grad_req` of a parameter is "add" only for the group of steps that is under way."""
    return any(one.is_on and any(param is changed for changed in one._changed) for one in list(_all))


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
