"""Which gradients of a network are fresh, and which of them belong to the pass that a step applies."""

from __future__ import annotations

from operator import attrgetter, is_not
from typing import Any, Callable, List, Mapping, MutableSet, Optional, Set, Tuple
from weakref import WeakSet

import numpy as np
from mxnet import gluon

from ..errors import TrainerError
from ..runtime.gradient_flags import Flags
from .accumulation import Accumulation
from .freshness import Writers, history
from .placement import Placement

_GRAD = attrgetter("_grad")


class FreshGradients:
    """The flags of the parameters that are watched, and the backward passes that wrote their gradients.

    Parameters
    ----------
    placement : Placement
    accumulation : Accumulation

    Attributes
    ----------
    watched : list of int
        Parameters whose flags are read: all trainable ones, or one of a static graph.
    flags : Flags
    writers : Writers
    """

    def __init__(self, placement: Placement, accumulation: Accumulation) -> None:
        self._placement = placement
        self._accumulation = accumulation
        self.watched: List[int] = []
        self.flags, self.writers = Flags([]), Writers(0, placement.contexts)
        self._params: List[gluon.Parameter] = []
        self._gradients: List[Any] = []  # each watched parameter's list of gradients, when its flags were found
        self._marked: Tuple[Any, Any, List[bool]] = ({}, None, [])  # the latest arguments of `mark`, and who is among them
        self._num_marked = 0  # how often the parameters had been marked as variables by then
        # The flags of graphs that were recorded before backward passes began or ceased to add, and of which watched parameters.
        self._former: Optional[Tuple[Flags, List[bool]]] = None

    def watch(self, indices: List[int]) -> None:
        """Watch these parameters from now on."""
        known = {index: row for row, index in enumerate(self.watched)}
        writers = Writers(len(indices), self._placement.contexts)
        writers.take(self.writers, [(row, known[index]) for row, index in enumerate(indices) if index in known])
        params = self._placement.params
        self.watched, self.writers = indices, writers
        self.flags = Flags([params[index]._data for index in indices])
        self._params = [params[index] for index in indices]
        self._gradients = list(map(_GRAD, self._params))
        self._num_marked = self._accumulation.num_marked
        self._former = None
        history.note_unseen(writers, self.flags.read().reshape(writers.calls.shape))

    def watch_one(self, index: int) -> None:
        """Watch one parameter of a static graph for all."""
        self.watch([index])
        _watching_one.add(self)

    def watch_present(self) -> None:
        """Watch all parameters that have gradients now, before their places are updated."""
        params = self._placement.params
        indices = self.watched if self in _watching_one else range(len(params))
        trained = [i for i in indices if params[i].grad_req != "null"]
        self.watch([i for i in trained if len(params[i]._grad or []) == len(self._placement.contexts)])

    def is_outdated(self) -> bool:
        """Return whether parameters were marked again since their flags were found, or got their first arrays."""
        if self._num_marked != self._accumulation.num_marked:
            return True
        placement = self._placement
        params = placement.params if placement.shapeless or not placement.has_begun else ()
        if sum(param._grad is not None for param in params) > len(self.watched):
            return True
        return any(map(is_not, map(_GRAD, self._params), self._gradients))

    def all_flags(self) -> List[Flags]:
        """Return all flags that a backward pass may set."""
        return [self.flags] if self._former is None else [self.flags, self._former[0]]

    def read(self) -> Any:
        """Return which gradients are fresh, shape (parameters, replicas), also those that former graphs have written.

        Raises
        ------
        TrainerError
            A graph that was recorded before gradients added up has replaced a sum, or one that was recorded while they added up
            has added to a stale gradient.
        """
        fresh = self.flags.read().reshape(len(self.watched), len(self._placement.contexts))  # also of none
        if self._former is None:
            return fresh
        late = self._former[0].read() & np.array(self._former[1])[:, None]
        if late.any() and (not self._accumulation.is_on or self._accumulation.reached(self.watched).any()):
            self._former = None
            raise TrainerError(
                "Trainer.step: got gradients of a graph that was recorded before accumulate() or before the last update; "
                "expected one that was recorded after. Record, go backward and step for one batch after the other."
            )
        return fresh | late

    def replaced(self, written: Any, late: List[Any]) -> Any:
        """Return which gradients a backward call has replaced while others add up: sparse ones, and those of former graphs.

        Arguments as for `Watcher.after_call`.
        """
        params = self._placement.params
        replaced = written & np.array([params[index]._grad_stype != "default" for index in self.watched])[:, None]
        if self._former is not None and late:
            replaced |= late[0] & np.array(self._former[1])[:, None]
        return replaced

    def mark(self, params: Mapping[int, gluon.Parameter], replicas: List[bool]) -> None:
        """Note that the gradients of these parameters, by their ids, have been written in these replicas."""
        if self._marked[0] is not params or self._marked[1] is not self._params:
            self._marked = params, self._params, [id(param) in params for param in self._params]
        self.flags.put(np.outer(self._marked[2], replicas), True)

    def clear(self, which: Optional[List[bool]] = None) -> None:
        """Note that the gradients of these watched parameters, by default of all, have been used."""
        self.flags.clear(which)
        self.writers.forget(which)

    def clear_used(self, used: Set[int]) -> None:
        """Note that the gradients of these parameters have been used."""
        self.clear([index in used for index in self.watched])

    def clear_former(self) -> None:
        """Clear the flags of graphs that were recorded before."""
        if self._former is not None:
            self._former[0].clear(self._former[1])

    def mark_again(self, mark: Callable[[], List[gluon.Parameter]]) -> None:
        """Let `mark` mark parameters as variables again; watch their new flags, and those that former graphs will set."""
        flags, marked = self.flags, set(map(id, mark()))
        which = [id(self._placement.params[index]) in marked for index in self.watched]
        self.watch(self.watched)
        if any(which):
            flags.clear(which)
            self._former = flags, which

    def used(self, fresh: Any) -> List[int]:
        """Return the parameters that have a fresh gradient on some device."""
        used = [index for index, flags in zip(self.watched, fresh.any(axis=1)) if flags]
        return self._placement.trainable if used == self.watched else used

    def idle(self, fresh: Any) -> Set[int]:
        """Return the parameters without a fresh gradient on one device, from its column of `fresh`; all where it got no data."""
        idle = {index for index, flag in zip(self.watched, fresh) if not flag}
        return set(self._placement.trainable) if len(idle) == len(self.watched) else idle

    def of_step(self, fresh: Any, running: Set[int], *, has_empty: bool, may_be_of_others: Callable[[], bool]) -> Any:
        """Return which fresh gradients are of the latest pass, and so in this step's sum.

        Parameters
        ----------
        fresh : numpy.ndarray of bool, shape (parameters, replicas)
        running : set of int
            Parameters whose gradients always add up: they are in the sum, also on devices without data.
        has_empty : bool
            Also leave out gradients that are older than a pass without data in this process.
        may_be_of_others : callable () -> bool
            Whether that pass may have been through other trainers' parameters.
        """
        names = [self._placement.names[index] for index in self.watched]
        always = np.array([index in running for index in self.watched])[:, None] & fresh
        fresh = self.writers.of_latest(fresh & ~always, names)
        if has_empty and history.empty:
            fresh = self.writers.since_empty(fresh, names, may_be_of_others=may_be_of_others())
        return fresh | always

    def clear_unwatched(self) -> None:
        """Clear the flags that static graphs of these parameters did not watch, before all flags are read."""
        params = self._placement.params
        for other in list(_watching_one):
            trainable, others = other._placement.trainable, other._placement.params
            shared = {id(param) for param in params}.intersection(map(id, others))
            if shared and not other.flags.read().any():  # else a backward pass has just set them
                Flags([others[index]._data for index in trainable if others[index]._grad]).clear()
                _watching_one.discard(other)
                other.watch(trainable)


_watching_one: MutableSet[FreshGradients] = WeakSet()  # of static graphs: the flags of their other parameters stay set
