"""Gradients that add up over several backward passes before a step uses them."""

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

    MXNet can only replace sparse gradients, so `note` adds them up separately.

    Parameters
    ----------
    params : list of gluon.Parameter
    num_replicas : int

    Attributes
    ----------
    is_on : bool
    is_open : bool
        An `accumulate` context is open, so more passes may follow.
    has_earlier : bool
        The gradients are of a pass before the accumulation. They count if a step comes next, and not if another pass does.
    num_marked : int
        How often these parameters were marked as variables again: flags found before are outdated.
    """

    def __init__(self, params: Sequence[gluon.Parameter], num_replicas: int) -> None:
        self.is_on = self.is_open = self.has_earlier = False
        self.num_marked = 0
        self._params = list(params)
        self._num_replicas = num_replicas
        self._changed: List[gluon.Parameter] = []  # parameters whose gradients were replaced before
        self._sparse: Dict[Tuple[int, int], Array] = {}  # sums by parameter and replica
        self._is_taken_over = self._is_invalid = False
        self._added: Any = None  # gradients to which calls have added that no step has counted
        self._outside: Tuple[Optional[Pass], Any] = (None, None)  # the latest such pass outside of contexts; its parameters
        self._forget()
        _all.add(self)
        finalize(self, _orphans.update, self._changed).atexit = False  # the list stays the same one

    def start(self) -> List[gluon.Parameter]:
        """Let backward passes add to gradients, and return the changed parameters. Stale gradients must be zero before."""
        self.is_on = True
        return self.extend()

    def check_alone(self, operation: str) -> None:
        """Raise `TrainerError` if another trainer adds up gradients of these parameters, or has ended this accumulation.

        An accumulation without gradients so far is simply stopped. The sum of a trainer that no longer exists cannot be separated
        from later gradients.
        """
        self.check_own(operation)
        for other in _sharing(self):
            name = next(param.name for param in other._params if id(param) in self._own())
            if other.is_open or other._reached.any() or other._is_invalid:
                raise TrainerError(
                    f"{operation}: got {name!r}, of which another trainer accumulates gradients; expected one at a time. "
                    "Call flush() or discard() of that trainer first."
                )
            other.stop(keeps_fresh=True)
        if _orphans and self._reset_orphans():
            raise TrainerError(
                f"{operation}: got gradients that were added to those of a trainer that no longer exists; expected those of "
                "later passes. Run the backward pass again."
            )

    def check_own(self, operation: str) -> None:
        """Raise `TrainerError` if a trainer that was made later has ended this accumulation."""
        if self._is_taken_over:
            raise TrainerError(
                f"{operation}: got gradients that were accumulated until another trainer of these parameters was made; "
                "expected one trainer at a time. Call discard(), and run the passes of this update again."
            )

    def give_up(self) -> None:
        """Continue without the sum that another trainer has ended."""
        self._is_taken_over = False

    def take_over(self) -> None:
        """End the accumulations of other trainers of these parameters."""
        for other in _sharing(self):
            other._is_taken_over = bool(other._reached.any() or other.is_open)
            other.stop()
        self._reset_orphans()

    def extend(self) -> List[gluon.Parameter]:
        """Let parameters add that were unfrozen, or got a shape, since the start; return them."""
        writing = [param for param in self._params if param.grad_req == "write" and param._grad_stype == "default"]
        for param in writing:
            param._grad_req = "add"  # its setter would make new arrays
        self._changed += writing
        self._mark(writing, "add")
        return writing

    def adds_by_itself(self, param: gluon.Parameter) -> bool:
        """Return whether the user, and not a trainer, lets a parameter's gradients add up."""
        return param.grad_req == "add" and not any(param is one for other in _all for one in other._changed)

    def note_call(self, which: Any, replaced: Any, current: Optional[Pass]) -> None:
        """Note a backward call that has added to gradients, or replaced some: sparse ones, and those of an earlier graph.

        A step counts all passes since the last one that were made inside of a context. Outside it counts one: further passes
        were of another loss, or skipped, but are in the sum.
        """
        rows = which.any(axis=1)
        if self._added is None or self._added.shape != which.shape:
            self._added, self._outside = np.zeros_like(which), (None, np.zeros_like(rows))
        self._is_invalid |= bool((replaced & self._added).any())
        self._added |= which
        before, outside = self._outside
        if before is not current:
            self._is_invalid |= bool((rows & outside).any())
        if not self.is_open:
            self._outside = current, outside | rows

    def check_sum(self) -> None:
        """Raise `TrainerError` if the sum contains passes that no step counts, or lacks passes that were replaced."""
        if self._is_invalid:
            raise TrainerError(
                "Trainer.step: got a backward pass between those of one update that no step has counted, or one that has "
                "replaced gradients; expected one for each step. Make other losses' passes outside of accumulate(), count "
                "each of sparse gradients, record inside, and run the passes of this update again: they were dropped."
            )

    def stop(self, *, keeps_fresh: bool = False) -> List[gluon.Parameter]:
        """Let backward passes replace gradients again; present gradients become stale. Return the changed parameters."""
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
        """Count a pass: remember the gradients to which it has added.

        Parameters
        ----------
        indices : sequence of int
            The parameters of the rows of `fresh`.
        fresh : numpy.ndarray of bool, shape (parameters, replicas)
        """
        self._reached[np.array(indices, dtype=int)] |= fresh
        self._forget_calls()
        for index, flags in zip(indices, fresh):
            if self._params[index]._grad_stype != "default" and self._params[index].grad_req == "write":
                for replica in np.flatnonzero(flags):
                    self._add_sparse(index, int(replica))

    def reached(self, indices: Sequence[int]) -> np.ndarray:
        """Return the gradients to which counted passes have added, a mask of shape (parameters, replicas)."""
        return self._reached[np.array(indices, dtype=int)]

    def put_back(self) -> None:
        """Write the sums of sparse gradients over those of the last pass."""
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

    def _reset_orphans(self) -> bool:
        """Reset parameters that a deleted trainer has left adding up; return whether a pass has come since."""
        params = [param for param in self._params if param in _orphans]
        weights = [weight for param in params for weight in (param._data or []) if param._grad]
        was_fresh = any(weight._fresh_grad for weight in weights)
        for param in params:
            param._grad_req = "write" if param._grad_req == "add" else param._grad_req
        self._mark([param for param in params if param.grad_req == "write"], "write")
        for weight in weights:
            weight._fresh_grad = False
        _orphans.difference_update(params)
        return was_fresh

    def _add_sparse(self, index: int, replica: int) -> None:
        gradient, total = self._params[index].list_grad()[replica], self._sparse.get((index, replica))
        self._sparse[index, replica] = gradient.copy() if total is None else mx.nd.sparse.elemwise_add(total, gradient)

    def _forget(self) -> None:
        self._reached = np.zeros((len(self._params), self._num_replicas), dtype=bool)
        self._sparse.clear()
        self._is_invalid = False
        self._forget_calls()

    def _forget_calls(self) -> None:
        self._added, self._outside = None, (None, None)


_all: WeakSet[Accumulation] = WeakSet()  # of all trainers, which may share parameters
_orphans: WeakSet[gluon.Parameter] = WeakSet()  # parameters that a deleted trainer has left adding up


def _sharing(one: Accumulation) -> List[Accumulation]:
    """Return the accumulations of other trainers with the same parameters."""
    on = [other for other in _all if other.is_on and other is not one]
    own = one._own() if on else set()
    return [other for other in on if not own.isdisjoint(other._own())]


def is_made_to_add(param: gluon.Parameter) -> bool:
    """Return whether `grad_req` of a parameter is "add" only for the accumulation in progress."""
    return any(one.is_on and any(param is changed for changed in one._changed) for one in list(_all))


def _mark(params: Sequence[gluon.Parameter], grad_req: str) -> None:
    """Set whether backward passes replace gradients or add to them. Arrays and fresh flags stay.

    MXNet compiles static graphs again after this change: `tests/test_accumulation.py`.
    """
    weights = [weight for param in params for weight in param._data]
    if weights:
        fresh = [weight._fresh_grad for weight in weights]
        autograd.mark_variables(weights, [gradient for param in params for gradient in param._grad], grad_req)
        for weight in (weight for weight, is_fresh in zip(weights, fresh) if is_fresh):
            weight._fresh_grad = True
