"""Which gradients a step takes: for each parameter, what the last pass wrote; zeros for devices that it did not reach.

```
flags of a parameter on 3 devices     before     the pass writes     after
a batch with 2 shards                 1 1 1      1 1 0               1 1 0    device 2 holds another pass's gradient: zero
a parameter that it does not reach    1 1 1      0 0 0               1 1 1    still the gradient of the pass before
```

A pass is a batch of `train_batch`, of a compiled step or of a pipeline (with `micro_steps`, a part of one), or one call of
`mgpu.backward`. Plain loops call `autograd.backward` or `loss.backward()`: there the flags count as MXNet sets them, as in Gluon.
Compiled steps know what they write, and look at no flag. One that is set after them may be older, so the step of a plain loop
raises then.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress, filterfalse
from operator import attrgetter, is_not
from typing import Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union
from weakref import WeakSet, WeakValueDictionary

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..distributed import group
from ..errors import StaleGradientError, TrainerError
from ..nested import Array
from ..refusals import refusal
from ..runtime.c_api import Flags
from .layout import Layout
from .slab import Bucket, Moves, Slab, forget_graphs, zero

_GRAD = attrgetter("_grad")
_EACH_DEVICE = "calls of mgpu.backward on one device each"
_IDLE = "devices that the latest split left without examples"
_PARTS = "the parts of a batch of another trainer, one by one (micro_steps, virtual_shards or micro_batches)"
_EMPTY = "a pass before one without examples in this process"
_SPLIT = " If that split was of another batch: split this one with split_batch, too, and the next one after step()."
_MOST_NAMES = 5  # in an error
Table = np.ndarray  # of bool: one element for each parameter with a gradient and each of its replicas


class _Written(NamedTuple):
    """What the latest pass wrote, the flags after it, and the number of steps before it."""

    written: Table
    flags: Table
    num_steps: int


class _Marked(NamedTuple):
    """What passes without autograd through these parameters on these devices write, and their gradients on other devices."""

    params: Mapping[int, gluon.Parameter]
    contexts: List[Context]
    written: Table
    idle: Table


class Gradients:
    """The gradients of a network on all devices: which ones are fresh, and their sums over several passes.

    ```
    state        set by                                           until                         the next step
    _is_full     a pass that has written all of them              it is used, or shared         reads no flag
    _is_behind   a compiled step that has written all of them     a recorded pass, or drop()    raises if a flag is set
    _is_lost     a pass into arrays that Gluon has replaced       the next pass                 raises
    _doubt       passes that do not belong together               a pass that has written all   raises, and says which
    ```

    Parameters
    ----------
    layout : Layout
    find_unused : bool
        Leave out parameters that got no gradient on any device, instead of raising, if others got some.

    Attributes
    ----------
    all_take_part : bool
        Also parameters without a gradient in this process take part in a step: other processes may have one.
    has_counted : bool
        Passes were counted that no update has used.
    is_reached : bool
        Whether the latest pass has written one of them.
    version : pair of int
        Changes when parameters move, get other arrays, or other multipliers.
    is_fixed : bool
        No parameter changes now: in `train_batch`, after the forward pass.
    """

    def __init__(self, layout: Layout, *, find_unused: bool) -> None:
        self._layout = layout
        self.all_take_part = group() is not None
        self.has_counted = self.is_reached = self.is_fixed = False
        self._find_unused = find_unused
        self._sums: Dict[Union[Bucket, Tuple[int, ...]], List[Array]] = {}  # of counted passes, one per replica
        self._reached: Set[int] = set()  # parameters that counted passes have written
        self._own: List[Tuple[Array, Array]] = []  # gradients that hold a sum over devices, each with a copy of the device's own
        self._doubt = ""  # what makes the gradients ambiguous
        self._parts: Set[int] = set()  # parameters that a batch of another trainer has written part by part
        self._is_lost = self._is_behind = False  # see above
        self._watch()
        for one in _alive():  # whose steps may be of the same parameters
            one._is_full = False
            self._is_behind = self._is_behind or (one._is_behind and one.shares(self))
        _all[id(self)] = self

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
        self._running_indices = {index for index in found if params[index].grad_req == "add" and params[index] not in _adding}
        self._all = np.ones(len(self._entries), dtype=bool)
        self._running = np.array([index in self._running_indices for index, _ in self._entries], dtype=bool)
        self._latest: Optional[_Written] = None
        self._marked: _Marked = _Marked({}, [], self._running, self._running)
        self._is_full = False  # whether passes have written all, so that no flag must be read

    # Steps

    def collect(self, ignore_stale_grad: bool) -> List[Slab]:
        """Return the slabs that take part in this step, with zeros where a device has no gradient.

        A device whose data did not reach a parameter, or that got no data, still holds the gradient of an earlier step. It adds
        zero to this step's sum. A parameter without a gradient on any device is left out.

        Returns
        -------
        list of Slab
            The same list while every parameter takes part and none was moved.

        Raises
        ------
        StaleGradientError
            A parameter is left out and `ignore_stale_grad` is false. Nothing was changed.
        TrainerError
            The passes of the gradients are ambiguous. Nothing was changed.
        """
        layout = self._layout
        fresh = self._of_step()
        slabs = layout.slabs
        is_whole = not (self.has_counted or layout.shapeless) and (self._is_full or fresh.all())
        if not is_whole and (layout.shapeless or not self.all_take_part):
            used = self._used(fresh)
            self._check_unused(used, ignore_stale_grad)
            slabs = slabs if used == layout.trainable else layout.one_each(used)
        if self._running_indices:
            self._keep_running(slabs)
        if not is_whole:
            self._zero(~fresh & ~self._running, layout.slabs if self.has_counted else slabs)
            self._add_sums()
        return slabs

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
        _now.end_step()

    def count(self, *, adds: bool) -> None:
        """Add the gradients of the latest pass to the sums; without `adds`, only note which ones it has written.

        Raises
        ------
        StaleGradientError
            There are none. Nothing was changed.
        """
        fresh = self._of_step()
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
                for slab in filterfalse(self._is_running, self._layout.slabs):
                    for total, gradient in zip(self._sums_of(slab), slab.gradients):
                        _add(total, gradient, total)
        self._clear()
        _now.end_step()

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
        self._is_behind, self._own = False, []
        self.mark_used()
        with autograd.pause():
            for index in self._running_indices:  # which may have no place in a slab yet
                for gradient in self._layout.params[index].list_grad():
                    zero(gradient)

    def drop_unused(self) -> None:
        """Drop gradients that no step has used or counted, except for running sums."""
        kept = self.read() & self._running
        self._is_behind = False
        self._clear()
        self._flags.put(kept, True)

    def current_slabs(self) -> List[Slab]:
        """Return the slabs of all trained parameters, for virtual shards. `begin_batch` has put them into their places before.

        Raises
        ------
        ModesError
            Backward passes add to gradients instead of replacing them.
        """
        if self._running_indices:
            raise refusal("Trainer", "virtual_shards", "grad_req='add'")
        return self._layout.slabs

    def has_new(self) -> bool:
        """Return whether there is a gradient that was not used or counted."""
        return self._is_full or (not self._is_behind and bool(self.read().any()))

    def begin_batch(self) -> None:
        """Put parameters into buckets that have moved: graphs of the coming pass must not write into former arrays."""
        self.is_fixed = False
        self._layout.follow()
        self._follow(looks=False)

    def watch(self, *blocks: object) -> None:
        """Check the graphs of a network and a loss in addition to those of the trainer's network."""
        self._layout.watch(*blocks)

    def fix(self, *, looks: bool) -> None:
        """Look at the parameters no more for this batch; now once more, after a forward pass that runs Python."""
        if looks:
            self._layout.look()
            if self._layout.has_new_graphs:
                self._layout.check_graphs()
        self.is_fixed = True

    @contextmanager
    def adding(self) -> Iterator[None]:
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
        with one_pass(self):
            _mark(writing, "add")
            try:
                yield
            finally:
                _mark(writing, "write")

    def _of_step(self) -> Table:
        """Return which gradients are fresh, for a step; raise `TrainerError` if their passes are ambiguous."""
        self._layout.follow(looks=not self.is_fixed, by_hand=not self.is_fixed)
        self._is_lost = self._follow(looks=False) or self._is_lost
        fresh = self._read()
        if not (fresh.any() or (len(fresh) and self._doubt == _PARTS)):
            return fresh
        if self._is_lost:
            raise refusal("Trainer.step", "static_shape", "a loop by hand after a change of grad_req")
        if self._doubt == _EMPTY:
            raise refusal("Trainer.step", "several processes", "several passes before a step")
        if self._is_behind and not self._is_full:
            raise refusal("Trainer.step", "compile_step()", "loss.backward()")
        if self._own:
            raise refusal("Trainer.step", "allreduce_grads()", "another pass with grad_req='add'")
        doubt = _IDLE if _now.idle and (fresh & self._idle()).any() else self._doubt
        if doubt and not (doubt == _PARTS and fresh.any() and self._parts.issubset(self._indices[fresh].tolist())):
            raise TrainerError(
                f"Trainer.step: got gradients of {self._layout.params[self._entries[0][0]].name} and others from several "
                f"backward passes: those of {doubt}; expected those of one pass. Call mgpu.backward([...]) once with the losses "
                f"of all devices, and discard() after a pass that no step must use.{_SPLIT if doubt == _IDLE else ''}"
            )
        return fresh

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
            for slab in filter(self._is_running, slabs):
                self._own += [(gradient, gradient.copy()) for gradient in slab.gradients]

    def _is_running(self, slab: Slab) -> bool:
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

    # Passes

    def read(self) -> Table:
        """Return which gradients are fresh."""
        self._follow()
        return self._read()

    def _read(self) -> Table:
        return self._all if self._is_full else self._flags.read()

    def begin_pass(self, own: Optional[Gradients]) -> Table:
        """Clear flags, so that new ones show what the pass writes. Return the former ones; of the `own`, only running sums."""
        self._is_lost = self._follow()  # the forward pass is over
        fresh = self.read()
        self._flags.put(fresh, False)
        self._is_full = False
        if self is own:  # its earlier passes are dropped
            self._doubt, self._latest, self._parts = "", None, set()
        return fresh & self._running if self is own else fresh

    def end_pass(self, before: Table, written: Table, *, is_alone: bool) -> None:
        """Set the flags again of parameters that the pass has not written. If it has written all, a step need not read them.

        `is_alone`: no step of other trainers uses gradients of the same parameters before.
        """
        reached = self._reached_by(written)
        if len(before) != len(written):  # a parameter was frozen or thawed inside
            before = np.zeros_like(written)
        kept = before & ~reached
        if not kept.any():
            self._is_behind = False
        self._flags.put(kept, True)
        self._is_full = is_alone and bool(written.all())
        self.is_reached = bool(written.any()) or not len(written)  # without trained parameters, it is unknown
        if written.any():
            last = self._latest
            alone = written & ~self._running
            if last is not None and last.num_steps == _now.num_steps and self._are_apart(last.written, alone):
                self._doubt = _EACH_DEVICE
            elif reached.all():
                self._doubt = ""
            self._latest = _Written(written, written | kept, _now.num_steps)

    def end_empty_pass(self, own: Optional[Gradients], *, has_others: bool) -> None:
        """Drop the gradients of earlier passes: in other processes, this one has replaced them.

        With trainers of other parameters, the pass may have been through theirs alone, unless a step came before it.
        """
        fresh, last = self.read() & ~self._running, self._latest
        is_older = last is not None and last.num_steps < _now.num_steps and not (fresh & ~last.flags).any()
        if self is own or is_older or not has_others:
            self.drop_unused()
        else:
            self._doubt = _EMPTY if fresh.any() else ""

    def mark(self, params: Mapping[int, gluon.Parameter], contexts: Sequence[Context], own: Gradients, *, joins: bool) -> None:
        """Note gradients that a pass has written without autograd, and clear those of its other devices.

        The step that follows is of the `own` ones, which need no flags for it. Others may share parameters with them, or stay
        fresh after it. With `joins`, it is a part of a pass, and clears nothing.
        """
        self._follow()
        marked = self._marked
        if marked.params is not params or marked.contexts != contexts:
            own_params = np.array([id(self._layout.params[index]) in params for index, _ in self._entries], dtype=bool)
            reached = np.array([context in contexts for context in self._contexts], dtype=bool)
            marked = self._marked = _Marked(params, list(contexts), own_params & reached, own_params & ~reached)
        _, _, written, idle = marked
        writes_all = bool(written.all())
        self.is_reached = writes_all or bool(written.any())
        if self is own and writes_all:
            if not (joins or self._is_behind):
                self.drop_unused()
                self._is_behind = not self._running_indices
            self._is_full = True
        else:
            if self is own and not joins:
                self.drop_unused()
            if not written.any():
                return
            self._is_behind = self._is_behind and bool(self._flags.read().any())  # unless an older one is set
            self._flags.put(written, True)
            own._is_behind = False
            if not joins:
                self._flags.put(idle, False)
        if not joins:
            self._doubt, self._latest = _PARTS if self._parts else "", _Written(written, written, _now.num_steps)

    def drop_parts(self, own: Gradients) -> None:
        """Drop what the latest pass has written: it was the last of several parts, and only the `own` ones have their sum.

        The step that follows is of the own ones, and drops those of parameters that both have.
        """
        if self.is_reached and self._latest is not None and self.has_new():
            params, shared = self._layout.params, set(map(id, own._layout.params))
            alone = np.array([id(params[index]) not in shared for index, _ in self._entries], dtype=bool)
            self._flags.put(self._latest.written & alone, False)
            self._parts.update(self._indices[self._latest.written & alone].tolist())
            self._is_full, self._doubt = False, _PARTS

    def reached(self) -> Set[Context]:
        """Return the devices on which the latest pass has written a gradient."""
        return set() if self._latest is None else set(compress(self._contexts, self._latest.written.tolist()))

    def note_idle(self) -> None:
        """Remember that devices hold gradients which the latest split left idle, before another split comes."""
        if (self.read() & self._idle()).any():
            self._doubt = _IDLE

    def shares(self, other: Gradients) -> bool:
        """Return whether two networks have a parameter in common."""
        return not set(map(id, self._layout.params)).isdisjoint(map(id, other._layout.params))

    def _follow(self, *, looks: bool = True) -> bool:
        """Watch again if parameters were moved, frozen, unfrozen or initialised.

        Return whether a pass recorded before now may write into arrays that Gluon has replaced: MXNet's static graphs keep
        theirs, unless grad_req is another one than in their last pass.
        """
        if looks and not self.is_fixed:
            self._layout.look()
        if self.version == (Moves.count, self._layout.version):
            return False
        params, former, reqs = self._layout.params, self._seen, self._reqs
        self._watch()
        replaced = {id(param) for param, old in zip(params, former) if old and param._grad is not old}
        return bool(replaced) and forget_graphs(replaced) and reqs == self._reqs

    def _clear(self) -> None:
        """Note that all gradients have been used or dropped."""
        self._follow()
        if not self._is_behind:
            self._flags.clear()
        self._is_full = False
        self._doubt, self._latest, self._is_lost, self._parts = "", None, False, set()

    def _reached_by(self, written: Table) -> Table:
        """Return all gradients of the parameters that a pass has written on some device."""
        return np.bincount(self._indices, weights=written)[self._indices] > 0

    def _are_apart(self, one: Table, other: Table) -> bool:
        """Return whether two passes have written the same parameters on other replicas alone."""
        shares = (self._reached_by(one) & self._reached_by(other)).any()
        return bool(shares and not (one & other).any())

    def _idle(self) -> Table:
        """Return the gradients on devices that the latest split left without a shard, except for running sums."""
        return np.array([context in _now.idle for context in self._contexts], dtype=bool) & ~self._running


@dataclass
class _Now:
    """What trainers share.

    Attributes
    ----------
    num_steps : int
        Steps so far.
    idle : set of Context
        Devices that the latest split left without a shard.
    divided : int
        Examples of its batch, if other processes have got some of them and no step has followed.
    num_counted : number
        Examples in the losses of the latest pass of `mgpu.backward`, if no step has followed.
    is_inside : bool
        Whether a pass runs.
    has_split : bool
        Whether this process has divided a batch.
    labels : tuple of int
        Checksums of the first batch that it has divided since the latest trainer was made, the labels last.
    """

    num_steps: int = 0
    idle: FrozenSet[Context] = frozenset()
    divided: int = 0
    num_counted: float = 0
    is_inside: bool = False
    has_split: bool = False
    labels: Tuple[int, ...] = ()

    def end_step(self) -> None:
        self.num_steps, self.divided, self.num_counted = self.num_steps + 1, 0, 0


_now = _Now()
# Of all trainers, by id, in the order in which they were made.
_all: WeakValueDictionary[int, Gradients] = WeakValueDictionary()
_adding: WeakSet[gluon.Parameter] = WeakSet()
_lock = threading.RLock()  # a pass sets the flags of all trainers


def _add(one: Array, other: Array, out: Array) -> None:
    """Write the sum of two gradients to one of them, dense or sparse."""
    if out.stype == "default":
        mx.nd.elemwise_add(one.as_nd_ndarray(), other.as_nd_ndarray(), out=out.as_nd_ndarray())
    else:
        mx.nd.elemwise_add(one, other).copyto(out)


def _alive() -> List[Gradients]:
    """Return the gradients of all trainers. Another thread may make one meanwhile."""
    return [one for one in [reference() for reference in _all.valuerefs()] if one is not None]


def idle_devices() -> FrozenSet[Context]:
    """Return the devices that the latest split left without a shard."""
    return _now.idle


def note_split(idle: FrozenSet[Context], divided: int) -> None:
    """Note a split: see `_Now`. Until a pass of ours comes, the gradients of its idle devices are of another batch."""
    for one in _alive() if _now.idle else ():
        one.note_idle()
    _now.idle, _now.divided = idle, divided


def note_labels(checksum: Callable[[], int], *, are_pairs: bool) -> None:
    """Note the labels of the first batch that processes divide: those of a pair, or the second array that comes alone."""
    _now.has_split = True
    if len(_now.labels) < 2:
        _now.labels += (checksum(),) * (1 + are_pairs)


def forget_labels() -> None:
    """Note those of the next batch."""
    _now.labels = ()


def first_labels() -> Tuple[int, ...]:
    """Return what `note_labels` has noted: the checksum of the labels, or () if none has come."""
    return _now.labels[-1:]


def has_split() -> bool:
    """Return whether this process has divided a batch between the processes."""
    return _now.has_split


def note_size(num_examples: float) -> None:
    """Note the examples in the losses of a pass by hand."""
    _now.num_counted = num_examples


def is_too_large(batch_size: float) -> bool:
    """Return whether this is the size of a batch of which other processes have got a part, and the pass was of this one's."""
    return batch_size == _now.divided and 0 < _now.num_counted < batch_size


def latest_split() -> Tuple[FrozenSet[Context], int, bool, Tuple[int, ...]]:
    """Return what `note_split` has noted, for `restore_split`."""
    return _now.idle, _now.divided, _now.has_split, _now.labels


def restore_split(noted: Tuple[FrozenSet[Context], int, bool, Tuple[int, ...]]) -> None:
    """Let an earlier split be the latest one: its batch is trained on now."""
    _now.idle, _now.divided, _now.has_split, _now.labels = noted


@contextmanager
def one_pass(own: Optional[Gradients] = None) -> Iterator[None]:
    """Let all backward calls inside be one pass over all devices, for a step with the `own` gradients alone if given."""
    with _lock:
        if _now.is_inside:
            yield
            return
        watching = sorted(_alive(), key=partial(is_not, own))  # the own ones drop gradients of parameters that others share
        before = [one.begin_pass(own) for one in watching]
        _now.is_inside, _now.idle = True, frozenset()
        try:
            yield
        finally:
            _now.is_inside = False
            written = [one.read() for one in watching]
            for one, fresh, shown in zip(watching, before, written):
                one.end_pass(fresh, shown, is_alone=one is own or len(watching) == 1)


def empty_pass(own: Optional[Gradients] = None) -> None:
    """Note a pass without data in this process of several, for a step with the `own` gradients if given."""
    with _lock:
        _now.idle = frozenset()
        watching = _alive()
        for one in watching:
            one.end_empty_pass(own, has_others=not all(one.shares(other) for other in watching))


def note_parts(own: Gradients) -> None:
    """Note that the latest pass was a part of a batch, of which the `own` gradients hold the sum, and others the last part."""
    for one in _alive():
        if one is not own:
            one.drop_parts(own)


def note_written(params: Mapping[int, gluon.Parameter], contexts: Sequence[Context], own: Gradients) -> None:
    """Note that a pass has written the gradients of these parameters, by their ids, on these devices, without autograd.

    A step with the `own` ones follows.
    """
    with _lock:
        if not _now.is_inside:
            _now.idle = frozenset()
        for one in sorted(_alive(), key=partial(is_not, own)):
            one.mark(params, contexts, own, joins=_now.is_inside)


def _mark(params: Sequence[gluon.Parameter], grad_req: str) -> None:
    """Set whether backward passes replace gradients or add to them. Arrays and fresh flags stay.

    MXNet compiles static graphs again after this change: `tests/test_accumulation.py`.
    """
    for param in params:
        param._grad_req = grad_req  # its setter would make new arrays
    if grad_req == "add":
        _adding.update(params)
    else:
        _adding.difference_update(params)
    weights = [weight for param in params for weight in param._data]
    if weights:
        fresh = [weight._fresh_grad for weight in weights]
        autograd.mark_variables(weights, [gradient for param in params for gradient in param._grad], grad_req)
        for weight in (weight for weight, is_fresh in zip(weights, fresh) if is_fresh):
            weight._fresh_grad = True
