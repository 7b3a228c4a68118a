"""Which gradients a step uses: those that one backward pass over all devices has written, and zeros elsewhere.

```
a parameter's gradients on 3 devices  before     the pass writes     after
a batch with 2 shards                 1 1 1      1 1 0               1 1 0    device 2 holds another pass's gradient: zero
a parameter that it does not reach    1 1 1      0 0 0               1 1 1    still the gradient of the pass before
```

`train_batch`, compiled steps, pipelines and `trainer.backward` make such a pass, a `Pass`; with `micro_steps`, one for each part
of a batch. Plain loops call `autograd.backward` or `loss.backward()`. There MXNet's flags count, as in Gluon: what was written
since the trainer's last step.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress, filterfalse
from operator import attrgetter
from typing import Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..distributed import group
from ..errors import StaleGradientError, TrainerError
from ..mxnet_internals.c_calls import Flags
from ..nested import Array
from ..refusals import refusal
from .layout import Layout
from .slab import Bucket, Moves, Slab, forget_graphs, zero

_GRAD = attrgetter("_grad")
_MOST_NAMES = 5  # in an error
Table = Union[np.ndarray]  # of bool: one element for each parameter with a gradient and each of its replicas
Examples = Mapping[Context, float]  # of a pass, on each device


@dataclass
class Pass:
    """What one backward pass over all devices has left.

    Attributes
    ----------
    written : array of bool, optional
        Which gradients hold what the next step uses; None: all.
    examples : mapping of Context to number
        Those of each device.
    is_current : bool
        Whether the step that follows need not look at the parameters again.
    """

    written: Optional[Table]
    examples: Examples
    is_current: bool = False


class Gradients:
    """The gradients of a network on all devices: which ones a step uses, and their sums over several passes.

    Parameters
    ----------
    layout : Layout
    find_unused : bool
        Leave out parameters that got no gradient on any device, instead of raising, if others got some.

    Attributes
    ----------
    latest : Pass or None
        The pass that the next step uses. None: MXNet's flags count.
    all_take_part : bool
        Also parameters without a gradient in this process take part in a step: other processes may have one.
    has_counted : bool
        Passes were counted that no update has used.
    version : pair of int
        Changes when parameters move, get other arrays, or other multipliers.
    """

    def __init__(self, layout: Layout, *, find_unused: bool) -> None:
        self._layout = layout
        self.latest: Optional[Pass] = None
        self.all_take_part = group() is not None
        self.has_counted = False
        self._find_unused = find_unused
        self._sums: Dict[Union[Bucket, Tuple[int, ...]], List[Array]] = {}  # of counted passes, one per replica
        self._reached: Set[int] = set()  # parameters that counted passes have written
        self._own: List[Tuple[Array, Array]] = []  # gradients that hold a sum over devices, each with a copy of the device's own
        self._adding: Set[gluon.Parameter] = set()  # while several passes are one
        self._are_unread = False  # compiled steps came since the flags were cleared: one that is set may be older
        self._is_running = threading.Lock()  # a pass
        self._watch()

    def _watch(self) -> None:
        """Find the parameters that have gradients now."""
        params, contexts_of = self._layout.params, self._layout.contexts_of
        found = [i for i, one in enumerate(params) if one.grad_req != "null" and len(one._grad or []) == len(contexts_of[i])]
        self._seen, self.version = list(map(_GRAD, params)), (Moves.count, self._layout.version)
        self._reqs = [param.grad_req for param in params]
        self._entries = [(index, replica) for index in found for replica in range(len(contexts_of[index]))]
        self._indices = np.array([index for index, _ in self._entries], dtype=int)
        self._contexts = [context for index in found for context in contexts_of[index]]
        self._flags = Flags([weight for index in found for weight in params[index]._data])
        self._running_indices = {
            index for index in found if params[index].grad_req == "add" and params[index] not in self._adding
        }
        self._all = np.ones(len(self._entries), dtype=bool)
        self._running = np.array([index in self._running_indices for index, _ in self._entries], dtype=bool)

    def follow(self, *, looks: bool = True, by_hand: bool = False) -> bool:
        """Put parameters into buckets that have moved, and watch again what has changed: see `look`, and `Layout.follow`."""
        self._layout.follow(looks=looks, by_hand=by_hand)
        return self._watch_again()

    def look(self) -> bool:
        """Look at the parameters, and watch again what has changed; they stay where a recorded pass has found them.

        Return whether a pass recorded before now may write into arrays that Gluon has replaced: MXNet's static graphs keep
        theirs, unless grad_req is another one than in their last pass.
        """
        self._layout.look()
        return self._watch_again()

    def _watch_again(self) -> bool:
        if self.version == (Moves.count, self._layout.version):
            return False
        params, latest, entries, seen, reqs = self._layout.params, self.latest, self._entries, self._seen, self._reqs
        self._watch()
        if latest is not None:  # arrays that are new since hold nothing of it
            written = set(entries if latest.written is None else compress(entries, latest.written.tolist()))
            stay = [one is other for one, other in zip(seen, self._seen)]
            table = np.array([stay[entry[0]] and entry in written for entry in self._entries], dtype=bool)
            self.latest = replace(latest, written=table)
        replaced = {id(param) for param, old in zip(params, seen) if old and param._grad is not old}
        return bool(replaced) and forget_graphs(replaced) and reqs == self._reqs

    # Passes

    @contextmanager
    def one_pass(self, *, keeps: bool = False) -> Iterator[Pass]:
        """Let all backward calls inside be one pass over all devices. Yield the pass, complete at the end, without examples.

        With `keeps`, gradients of parameters that it does not reach stay those of earlier passes; otherwise they are dropped.

        Raises
        ------
        TrainerError
            Another thread runs a pass of this trainer; or, with `keeps`, an earlier pass without a step was on other devices.
        """
        if not self._is_running.acquire(blocking=False):
            raise TrainerError(
                "Trainer.backward: got a call while another thread runs one of this trainer; expected one pass over all devices. "
                "Call trainer.backward(losses) once with the losses of all devices."
            )
        found, latest = Pass(None, {}), self.latest if keeps else None
        try:
            if self.look():
                raise refusal("Trainer.backward", "static_shape", "a loop by hand after a change of grad_req")
            former = self._fresh() & (self._all if keeps else self._running)
            self._clear(everything=True)
            try:
                yield found
                found.written = self._end(former, latest)
            except BaseException:
                self._clear(everything=True)
                raise
        finally:
            self._is_running.release()

    def _end(self, former: Table, latest: Optional[Pass]) -> Table:
        self._watch_again()
        written = self._flags.read()
        if len(former) != len(written):  # a parameter was frozen or thawed inside
            former = np.zeros_like(written)
        reached = self._reached_by(written)
        if latest is not None and latest.written is not None and len(latest.written) == len(written):
            alone = written & ~self._running
            shares = (self._reached_by(latest.written) & self._reached_by(alone)).any()
            if shares and not (latest.written & alone).any():
                raise TrainerError(
                    "Trainer.backward: got passes over different devices, and no step between them; expected one over all. Call "
                    "trainer.backward(losses) once with the losses of all devices, and discard() after a pass that no step uses."
                )
        self._flags.clear()  # from now on, they show passes that came later
        return written | (former & ~reached)

    def counted(self, found: Pass, losses: Sequence[Array]) -> Pass:
        """Return a pass from these losses with its examples: divided equally if it has reached a device without a loss."""
        examples, written = examples_of(losses, self._layout.stages_before), found.written
        assert written is not None, "it has ended"
        reached = self._devices_of(written)
        if self._entries and not reached:
            examples = {}
        elif not reached.issubset(examples):
            examples = dict.fromkeys(reached, sum(examples.values()) / len(reached))
        return Pass(written, examples)

    def begin_graphs(self) -> None:
        """Drop gradients that no step has used, except for running sums: bound graphs, which set no flags, write over them."""
        if self.latest is not None or not self._are_unread:
            self.drop_unused()
            self._are_unread = not self._running_indices

    def by_graphs(self, params: Mapping[int, gluon.Parameter], examples: Examples) -> Pass:
        """Return a pass whose graphs have written the gradients of these parameters, by their ids, on the devices of examples."""
        own = [id(self._layout.params[index]) in params for index, _ in self._entries]
        written = np.array([is_own and context in examples for is_own, context in zip(own, self._contexts)], dtype=bool)
        return Pass(None if written.all() else written, examples, is_current=True)

    def joined(self, passes: Sequence[Pass]) -> Pass:
        """Return the pass that these are parts of, without examples."""
        tables = [self._all if one.written is None else one.written for one in passes]
        return Pass(np.logical_or.reduce([np.zeros_like(self._all), *tables]), {})

    def take(self, found: Pass) -> None:
        """Let the next step use a pass."""
        self.latest = found

    def leave_out(self, params: Iterable[gluon.Parameter]) -> None:
        """Let no step use gradients of these parameters: another trainer's pass has written over them."""
        if self.latest is not None:
            others = set(map(id, params))
            stay = [id(self._layout.params[index]) not in others for index, _ in self._entries]
            written = self._fresh() & np.array(stay, dtype=bool)
            self.latest = replace(self.latest, written=written)

    @contextmanager
    def adding(self) -> Iterator[Pass]:
        """Let the gradients of all backward passes inside add up: they are one pass."""
        params = [self._layout.params[index] for index in self._layout.trainable]
        writing = [param for param in params if param.grad_req == "write" and param._grad]
        sparse = [param.name for param in writing if param._grad_stype != "default"]
        if sparse:
            raise TrainerError(
                f"Trainer: got the sparse gradient of {sparse[0]} and several passes over each device; expected dense gradients, "
                "which MXNet can add up. Leave sparse_grad out of Embedding."
            )
        with autograd.pause():
            self._zero(~self._running, self._layout.slabs)
        with self.one_pass() as found:
            self._adding = set(writing)
            _mark(writing, "add")
            try:
                yield found
            finally:
                _mark(writing, "write")
                self._adding = set()

    def unused(self) -> Examples:
        """Return one example for each device whose flags show a gradient that no step has used or counted."""
        return {} if self.latest is not None else dict.fromkeys(self._devices_of(self.read()), 1.0)

    def has_new(self) -> bool:
        """Return whether there is a gradient that was not used or counted."""
        return bool(self.read().any())

    def read(self) -> Table:
        """Return which gradients were not used or counted."""
        self.look()
        return self._fresh()

    def _fresh(self) -> Table:
        """Return which gradients the next step uses."""
        latest = self.latest
        if latest is None:
            return np.zeros_like(self._all) if self._are_unread else self._flags.read()
        if latest.written is None:
            return self._all
        return latest.written

    # Steps

    def collect(self, ignore_stale_grad: bool, num_examples: Optional[float] = None) -> Tuple[List[Slab], Examples]:
        """Return the slabs that take part in this step, with zeros where a device has no gradient; and examples of flags.

        A device whose data did not reach a parameter, or that got no data, still holds the gradient of an earlier step. It adds
        zero to this step's sum. A parameter without a gradient on any device is left out.

        Returns
        -------
        list of Slab, mapping of Context to number
            The same list while every parameter takes part and none was moved. After MXNet's own `backward`, one example for each
            device that has a gradient; none for a `Pass`, which has its own.

        Raises
        ------
        StaleGradientError
            A parameter is left out and `ignore_stale_grad` is false. Nothing was changed.
        TrainerError
            The passes of the gradients are ambiguous. Nothing was changed.
        """
        layout = self._layout
        fresh, examples = self._of_step(num_examples)
        slabs = layout.slabs
        is_whole = not (self.has_counted or layout.shapeless) and bool(fresh is self._all or fresh.all())
        if not is_whole and (layout.shapeless or not self.all_take_part):
            used = self._used(fresh)
            self._check_unused(used, ignore_stale_grad)
            slabs = slabs if used == layout.trainable else layout.one_each(used)
        if self._running_indices:
            self._keep_running(slabs)
        if not is_whole:
            self._zero(~fresh & ~self._running, layout.slabs if self.has_counted else slabs)
            self._add_sums()
        return slabs, examples

    def check_summed(self, slabs: Sequence[Slab], ignore_stale_grad: bool) -> None:
        """Raise unless these slabs, whose gradients were summed and marked as used, can be applied.

        Raises
        ------
        StaleGradientError
            Another parameter is trainable, and `ignore_stale_grad` is false.
        TrainerError
            A backward pass or a change of a parameter came after the sum.
        """
        summed = {index for slab in slabs for index in slab.indices}
        if self._layout.has_changed() or summed.intersection(self._used(self.read())):
            raise TrainerError(
                "Trainer.update: got a backward pass, or parameters that were frozen, initialised or cast after allreduce_grads()"
                "; expected the gradients that were summed. Call allreduce_grads() after the pass, or step(), which does both."
            )
        self._check_unused(summed, ignore_stale_grad)

    def mark_used(self) -> None:
        """Note that all gradients were applied or dropped: they are stale until the next backward pass."""
        self._clear()
        self.has_counted, self._sums, self._reached = False, {}, set()

    def count(self, num_examples: float, *, adds: bool) -> Examples:
        """Add the gradients of the latest pass to the sums; without `adds`, only note which ones. See `collect`.

        Raises
        ------
        StaleGradientError
            There are none. Nothing was changed.
        """
        fresh, examples = self._of_step(num_examples)
        if len(fresh) and not fresh.any() and not self.all_take_part:
            raise StaleGradientError(
                "Trainer.step: got no gradient on any device since the last step; expected a backward pass for each step that is "
                "accumulated. Call flush() to update with the gradients so far."
            )
        self.has_counted = True
        self._reached.update(self._indices[fresh].tolist())
        if adds:
            with autograd.pause():
                self._zero(~fresh & ~self._running, self._layout.slabs)
                for slab in filterfalse(self._is_running_sum, self._layout.slabs):
                    for total, gradient in zip(self._sums_of(slab), slab.gradients):
                        _add(total, gradient, total)
        self._clear()
        return examples

    def put_back_running(self) -> None:
        """Restore each device's own running sums (`grad_req="add"`), which the sums over devices have replaced for one update."""
        if not self._own:
            return
        own, self._own = self._own, []
        with autograd.pause():
            for gradient, copy in own:
                copy.copyto(gradient)

    def drop(self) -> None:
        """Drop all gradients that no step has used, also running sums."""
        self._own = []
        self._clear(everything=True)
        self.mark_used()
        with autograd.pause():
            for index in self._running_indices:  # which may have no place in a slab yet
                for gradient in self._layout.params[index].list_grad():
                    zero(gradient)

    def drop_unused(self) -> None:
        """Drop gradients that no step has used or counted, except for running sums."""
        kept = self.read() & self._running
        self._clear(everything=True)
        self._flags.put(kept, True)

    def current_slabs(self) -> List[Slab]:
        """Return the slabs of all trained parameters, for virtual shards. `follow` has put them into their places before.

        Raises
        ------
        ModesError
            Backward passes add to gradients instead of replacing them.
        """
        if self._running_indices:
            raise refusal("Trainer", "virtual_shards", "grad_req='add'")
        return self._layout.slabs

    def watch(self, *blocks: object) -> None:
        """Check the graphs of a network and a loss in addition to those of the trainer's network."""
        self._layout.watch(*blocks)

    def _of_step(self, num_examples: Optional[float]) -> Tuple[Table, Examples]:
        """Return which gradients a step uses, and examples: see `collect`. Raise `TrainerError` if that is ambiguous."""
        latest = self.latest
        may_have_changed = latest is None or not latest.is_current
        is_lost = self.follow(looks=may_have_changed, by_hand=may_have_changed)
        fresh, are_set = self._fresh(), latest is None and self._flags.read().any()
        if is_lost and are_set:
            raise refusal("Trainer.step", "static_shape", "a loop by hand after a change of grad_req")
        if self._are_unread and are_set:
            raise refusal("Trainer.step", "compile_step()", "loss.backward()")
        if self._own and fresh.any():
            raise refusal("Trainer.step", "allreduce_grads()", "another pass with grad_req='add'")
        if latest is not None:
            if not latest.is_current and self._flags.read().any():
                raise refusal("Trainer.step", "trainer.backward()", "loss.backward()")
            return fresh, {}
        num_replicas = self._layout.num_replicas(self._devices_of(fresh & ~self._running))
        if num_examples is not None and num_replicas > max(num_examples, 1):
            raise TrainerError(
                f"Trainer.step: got gradients on {len(self._devices_of(fresh))} devices for {num_examples} examples; expected at "
                "most as many devices, as others hold those of another pass. Call trainer.backward(losses) instead of "
                "autograd.backward(losses), also where losses are averaged and this number is 1; or trainer.discard() after a "
                "pass that no step uses."
            )
        return fresh, dict.fromkeys(self._devices_of(fresh), 1.0)

    def _devices_of(self, which: Table) -> Set[Context]:
        return set(compress(self._contexts, which.tolist()))

    def _used(self, fresh: Table) -> List[int]:
        """Return the parameters that have a fresh gradient, or a sum, on some device."""
        return sorted(self._reached.union(self._indices[fresh].tolist()).intersection(self._indices.tolist()))

    def _check_unused(self, used: Iterable[int], ignore_stale_grad: bool) -> None:
        """Raise `StaleGradientError` if a trainable parameter is not used."""
        used, names = set(used), self._layout.names
        unused = [names[index] for index in sorted({*self._layout.trainable, *self._layout.shapeless}.difference(used))]
        if unused and not (ignore_stale_grad or (self._find_unused and used)):  # with no gradient at all, the pass is missing
            more = f" and {len(unused) - _MOST_NAMES} more" if len(unused) > _MOST_NAMES else ""
            raise StaleGradientError(
                f"Trainer.step: got no gradient for {', '.join(unused[:_MOST_NAMES])}{more} on any device since the last step; "
                "expected a backward pass through every parameter. If this network uses only a part of them, pass "
                "ignore_stale_grad=True, or make the trainer with find_unused_parameters=True. After "
                "building it again, make a new Trainer."
            )

    def _zero(self, which: Table, slabs: Sequence[Slab]) -> None:
        """Set these gradients to zero, of the parameters in the slabs."""
        chosen = {self._entries[at] for at in np.flatnonzero(which).tolist()}
        for slab in slabs if chosen else ():
            for replica, gradient in enumerate(slab.gradients):
                own = [index for index in slab.indices if (index, replica) in chosen]
                if len(own) == len(slab.indices):
                    zero(gradient)
                else:
                    for index in own:
                        zero(self._layout.params[index].list_grad()[replica])

    def _keep_running(self, slabs: Sequence[Slab]) -> None:
        """Copy the devices' own running sums in these slabs, before they are summed over the devices."""
        self.put_back_running()
        with autograd.pause():
            for slab in filter(self._is_running_sum, slabs):
                self._own += [(gradient, gradient.copy()) for gradient in slab.gradients]

    def _is_running_sum(self, slab: Slab) -> bool:
        """Return whether its gradients are running sums: all of a bucket have one grad_req."""
        return slab.indices[0] in self._running_indices

    # Sums over several passes

    def _add_sums(self) -> None:
        """Add the sums to the gradients, which are zero where no pass came later."""
        with autograd.pause():
            for slab in self._layout.slabs:
                if (slab.bucket or slab.indices) in self._sums:
                    for total, gradient in zip(self._sums_of(slab), slab.gradients):
                        _add(total, gradient, gradient)

    def _sums_of(self, slab: Slab) -> List[Array]:
        key = slab.bucket or slab.indices
        if key not in self._sums:
            self._sums[key] = [mx.nd.zeros_like(one.as_nd_ndarray()) for one in (slab.bucket or slab).gradients]
        return [one[slab.begin : slab.end] for one in self._sums[key]] if slab.bucket else self._sums[key]

    def _clear(self, *, everything: bool = False) -> None:
        """Note that all gradients have been used or dropped; with `everything`, also flags that compiled steps have not read."""
        self._watch_again()
        self.latest, self._are_unread = None, self._are_unread and not everything
        if not self._are_unread:
            self._flags.clear()

    def _reached_by(self, written: Table) -> Table:
        """Return all gradients of the parameters that a pass has written on some device."""
        return np.bincount(self._indices, weights=written)[self._indices] > 0


def _add(one: Array, other: Array, out: Array) -> None:
    """Write the sum of two gradients to one of them, dense or sparse."""
    if out.stype == "default":
        mx.nd.elemwise_add(one.as_nd_ndarray(), other.as_nd_ndarray(), out=out.as_nd_ndarray())
    else:
        mx.nd.elemwise_add(one, other).copyto(out)


def examples_of(losses: Sequence[Array], stages_before: Mapping[Context, Collection[Context]]) -> Dict[Context, float]:
    """Return the examples of each device: the length of its losses.

    Of each device, the first one counts: others may be terms of another kind. If devices have different numbers of losses, such
    as of several shards, those count that are as long as the first one. `stages_before`: by the device of a loss, the others of
    a pipeline that its pass reaches.
    """
    lengths: Dict[Context, List[int]] = {}
    for loss in losses:
        for context in (loss.context, *stages_before.get(loss.context, ())):
            lengths.setdefault(context, []).append((*loss.shape, 1)[0])
    has_shards = len(set(map(len, lengths.values()))) > 1
    return {context: own[0] * (own.count(own[0]) if has_shards else 1) for context, own in lengths.items()}


def drop_flags(params: Iterable[gluon.Parameter]) -> None:
    """Let no step use the gradients of these parameters: they are of a part of a batch."""
    Flags([weight for param in params if param._grad for weight in param._data]).clear()


def _mark(params: Sequence[gluon.Parameter], grad_req: str) -> None:
    """Set whether backward passes replace gradients or add to them. Arrays and fresh flags stay.

    MXNet compiles static graphs again after this change: `tests/test_accumulation.py`.
    """
    for param in params:
        param._grad_req = grad_req  # its setter would make new arrays
    weights = [weight for param in params for weight in param._data]
    if weights:
        fresh = [weight._fresh_grad for weight in weights]
        autograd.mark_variables(weights, [gradient for param in params for gradient in param._grad], grad_req)
        for weight in (weight for weight, is_fresh in zip(weights, fresh) if is_fresh):
            weight._fresh_grad = True
