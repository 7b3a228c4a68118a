"""Which backward pass wrote each gradient: a sum over devices takes the gradients of one pass."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, MutableSet, Optional, Sequence, Set, Tuple
from weakref import WeakSet

import numpy as np
from mxnet import Context, gluon

from ..errors import TrainerError
from ..runtime.c_api import on_backward
from ..runtime.gradient_flags import Flags

Device = Tuple[int, int]  # MXNet's numbers of the device's kind and of the device
_MOST_CALLS = 4096  # remembered


@dataclass(eq=False)
class Pass:
    """The calls of autograd's `backward` that compute the gradients of one batch: one for all devices, or one per device.

    Attributes
    ----------
    number : int
        The number of its first call.
    era : int
        The number of trainers' steps before it.
    is_one_call : bool
        It is one call of `mgpu.backward`.
    devices : list of (int, int)
        The devices that it has reached, the latest last.
    replaced_by : Pass or None
        The next pass, which began when a call replaced gradients of this one. The calls before that may belong to either pass,
        until the next pass has reached their devices.
    """

    number: int
    era: int
    is_one_call: bool
    devices: List[Device] = field(default_factory=list)
    replaced_by: Optional[Pass] = None


@dataclass(frozen=True, eq=False)
class Call:
    """One call of autograd's `backward`, and the devices that it has reached."""

    of: Pass
    devices: FrozenSet[Device]


class Writers:
    """The backward call and the pass that wrote each gradient of some parameters; 0 if none was seen.

    Parameters
    ----------
    num_params : int
    contexts : sequence of mxnet.Context
        The replicas.

    Attributes
    ----------
    calls, passes : numpy.ndarray of int, shape (parameters, replicas)
        Their numbers.
    devices : list of (int, int)
    """

    def __init__(self, num_params: int, contexts: Sequence[Context]) -> None:
        self.calls = np.zeros((num_params, len(contexts)), dtype=np.int64)
        self.passes = np.zeros_like(self.calls)
        self.devices: List[Device] = [(context.device_typeid, context.device_id) for context in contexts]

    def is_one_each(self) -> bool:
        """Return whether all gradients of each parameter are certainly of one pass."""
        passes = self.passes
        return not passes.size or bool((passes == passes[:, :1]).all() and passes.min() > history.latest_doubtful)

    def forget(self, which: Any = None) -> None:
        """Forget the passes of these parameters, by default of all: their gradients have been used."""
        for numbers in (self.calls, self.passes):
            numbers[slice(None) if which is None else np.array(which, dtype=bool)] = 0

    def take(self, other: Writers, rows: Sequence[Tuple[int, int]]) -> None:
        """Copy rows of other writers, by pairs of rows here and there."""
        for here, there in rows:
            self.calls[here], self.passes[here] = other.calls[there], other.passes[there]

    def of_latest(self, fresh: Any, names: Sequence[str]) -> Any:
        """Return which fresh gradients are of the latest pass that wrote their parameter, on any device.

        Gluon on one device uses, for each parameter, the gradient of the last pass that wrote it. Passes of different parameters
        may differ.

        Parameters
        ----------
        fresh : numpy.ndarray of bool, shape (parameters, replicas)
        names : sequence of str
            Names of the parameters, for the error.

        Raises
        ------
        TrainerError
            The passes of the gradients are ambiguous. Nothing was changed.
        """
        calls = np.where(fresh, self.calls, 0)
        latest = np.broadcast_to(calls.max(axis=1, initial=0)[:, None], calls.shape)
        older = (calls > 0) & (calls < latest)
        foreign = np.zeros_like(older)
        for number, last in set(zip(calls[older].tolist(), latest[older].tolist())):
            which = older & (calls == number) & (latest == last)
            is_foreign = _is_foreign(number, last)
            if is_foreign is None:
                row, replica = np.argwhere(which)[0]
                raise _undecided(names[row], self.devices[replica])
            if is_foreign:
                foreign |= which
        return fresh & ~foreign

    def since_empty(self, fresh: Any, names: Sequence[str], *, may_be_of_others: bool) -> Any:
        """Return which fresh gradients are newer than a pass without data in this process of several.

        Arguments and errors as for `of_latest`.

        Parameters
        ----------
        may_be_of_others : bool
            That pass may have gone through other trainers' parameters.
        """
        older = fresh & (self.calls > 0) & (self.calls < history.empty)
        for number in set(self.calls[older].tolist()):
            call = history.call(number)
            if call is not None and call.of.era == history.empty_era and (may_be_of_others or not history.is_empty_pass):
                row, replica = np.argwhere(older & (self.calls == number))[0]
                raise _undecided(names[row], self.devices[replica])
        return fresh & ~older


class Watcher:
    """Reads the flags of gradients before and after every backward call."""

    @property
    def writers(self) -> Writers:
        """The calls and passes that wrote its gradients."""
        raise NotImplementedError

    def before_call(self) -> List[Flags]:
        """Return the flags that the call may set, first those of the writers' parameters in their order."""
        raise NotImplementedError

    def mark_written(self, params: Mapping[int, gluon.Parameter], contexts: Sequence[Context]) -> Set[int]:
        """Set the flags of gradients that a call has written without autograd, and return the ids of its own parameters.

        Parameters
        ----------
        params : dict of int to gluon.Parameter
            By their ids.
        contexts : sequence of mxnet.Context
        """
        raise NotImplementedError

    def after_call(self, written: Any, late: List[Any]) -> None:
        """Note the gradients that a call wrote.

        Parameters
        ----------
        written : numpy.ndarray of bool, shape (parameters, replicas)
        late : list of the same
            The same for each of the flags except for the first.
        """
        raise NotImplementedError


class History:
    """The backward calls of this process, and the passes that they form.

    ```
    mgpu.backward([l0, l1])                          one call, one pass
    l0.backward()   l1.backward()                    two calls on different devices: one pass
    l0.backward()   l1.backward()   m0.backward()    m0 is on l0's device, so it begins another pass
    ```

    A generator's pass, or a batch without a step, leaves fresh gradients on devices that the next batch does not reach. The flags
    alone do not distinguish them from gradients of that batch. So the flags of all trainers are read before and after each
    backward pass. Loops may call MXNet's `backward` several times between two steps, without any function of ours. Therefore the
    function of the C interface that every backward pass of MXNet's Python calls is replaced. MXNet looks it up at each call, and
    its development has ended, so this does not change. A fresh gradient of a pass that was not seen counts, as in Gluon.

    Attributes
    ----------
    number : int
        The number of the latest call.
    current : Pass or None
        The pass that the next call may belong to.
    is_one_call : bool
        The next call of this thread is a complete pass.
    latest_doubtful : int
        The number of the latest pass that reached a device twice, was empty, or had gradients replaced.
    empty, empty_era : int
        The number reserved for the latest pass without data in this process, and its era.
    is_empty_pass : bool
        That pass is certain, not inferred.
    """

    def __init__(self) -> None:
        self.number = self.empty = self.empty_era = self._era = 0
        self._calls: Dict[int, Call] = {}
        self.current: Optional[Pass] = None
        self.latest_doubtful = 0
        self._of_thread = threading.local()
        self.is_empty_pass = True
        self.is_inside = False  # of a call that consists of several

    @property
    def is_one_call(self) -> bool:
        return getattr(self._of_thread, "is_one_call", False)

    @contextmanager
    def single_call(self) -> Iterator[None]:
        """Let the call inside be a complete pass, with the losses of all devices."""
        before, self._of_thread.is_one_call = self.is_one_call, True
        try:
            yield
        finally:
            self._of_thread.is_one_call = before

    def begin_era(self) -> None:
        """Let the next call begin another pass: a trainer has made a step, or dropped gradients."""
        self._era += 1
        self.current = None

    def note_empty(self, *, is_pass: bool = True) -> None:
        """Note a pass without data in this process of several.

        Parameters
        ----------
        is_pass : bool
            False for a batch without a part for this process: a loop over its losses calls nothing. Loops with `mgpu.backward`
            call it also for such a batch.
        """
        latest = self.latest_pass()
        if is_pass or (threading.current_thread() is threading.main_thread() and latest and not latest.is_one_call):
            self.number += 1
            self.empty, self.empty_era, self.current = self.number, self._era, None
            self.latest_doubtful = self.number
            self.is_empty_pass = is_pass

    def call(self, number: int) -> Optional[Call]:
        """Return a call, None if it is too old, or came before its trainer."""
        return self._calls.get(number)

    def latest_pass(self) -> Optional[Pass]:
        """Return the pass of the latest call."""
        call = self.call(self.number)
        return None if call is None else call.of

    def note_unseen(self, writers: Writers, fresh: Any) -> None:
        """Note gradients that were fresh before they were watched, as those of an earlier pass."""
        unseen = fresh & (writers.calls == 0)
        if unseen.any():
            self.number += 1
            self.current = None
            writers.calls[unseen] = writers.passes[unseen] = self.number

    def note(self, written: Sequence[Tuple[Writers, Any]]) -> None:
        """Note a call that has written these gradients.

        Parameters
        ----------
        written : sequence of (Writers, numpy.ndarray of bool, shape (parameters, replicas))
            Each with at least one true element.
        """
        reached: Set[Device] = set()
        for writers, which in written:
            reached.update(device for device, has in zip(writers.devices, which.any(axis=0)) if has)
        current, is_next = self.current, True
        replaces = current is not None and any((writers.passes[which] == current.number).any() for writers, which in written)
        if current is not None and not self.is_one_call:
            # several losses may follow each other on one device if they share no parameters
            is_next = replaces or not (reached.isdisjoint(current.devices) or reached == {current.devices[-1]})
        self.number += 1
        if current is None or is_next:
            self.current = Pass(self.number, self._era, self.is_one_call)
            if current is not None and replaces:
                current.replaced_by, self.latest_doubtful = self.current, current.number
            current = self.current
        if not reached.isdisjoint(current.devices):
            self.latest_doubtful = current.number
        current.devices += sorted(reached)
        self._calls[self.number] = Call(current, frozenset(reached))
        self._calls.pop(self.number - _MOST_CALLS, None)
        for writers, which in written:
            writers.calls[which] = self.number
            writers.passes[which] = current.number
        if self.is_one_call:
            self.current = None


history = History()
_watching: MutableSet[Watcher] = WeakSet()


def watch(watcher: Watcher) -> None:
    """Let a watcher see every backward call from now on, as long as it exists."""
    _watching.add(watcher)


def watchers() -> List[Watcher]:
    """Return all watchers of backward calls."""
    return list(_watching)


def _is_foreign(number: int, last_number: int) -> Optional[bool]:
    """Return whether a call belongs to another pass than a later one, None if that is ambiguous.

    A pass reaches a device once, unless it has several losses on each device: then its calls may have any order.
    """
    call, last = history.call(number), history.call(last_number)
    if call is None or last is None:
        return True
    one, other = call.of, last.of
    if one is other:
        after = one.replaced_by.devices if one.replaced_by else []
        is_sure = call.devices.isdisjoint(after) == last.devices.isdisjoint(after)
        return False if is_sure and _reaches_once(one, number, last_number) else None
    if not call.devices.isdisjoint(last.devices) or one.is_one_call != other.is_one_call:
        return True
    if one.era < other.era and (one.is_one_call or not set(one.devices).isdisjoint(other.devices)):
        return True
    return None


def _reaches_once(one: Pass, number: int, last_number: int) -> bool:
    """Return whether a pass reaches no device twice between two of its calls, or reaches all devices equally often."""
    calls = [history.call(between) for between in range(number, last_number + 1)]
    devices = [device for call in calls if call is not None and call.of is one for device in call.devices]
    return len(set(devices)) == len(devices) or len({one.devices.count(device) for device in one.devices}) == 1


def _undecided(name: str, device: Device) -> TrainerError:
    where = Context(Context.devtype2str[device[0]], device[1])
    return TrainerError(
        f"Trainer.step: got gradients of {name} from several backward passes, an earlier one on {where}; expected those of "
        "one pass. "
        "Call mgpu.backward([...]) once with the losses of all devices, and discard() after a pass that no step must use."
    )


Seen = List[Tuple[Watcher, List[Flags], List[Any]]]


def _before_call() -> Seen:
    """Clear the flags that are set, and return them, so that new flags show which gradients the call writes."""
    seen: Seen = []
    if history.is_inside:
        return seen
    for watcher in list(_watching):
        flags = watcher.before_call()
        seen.append((watcher, flags, [one.read() for one in flags]))
    for _, flags, found in seen:
        for one, which in zip(flags, found):
            if which.any():
                one.put(which, False)
    return seen


def _after_call(seen: Seen) -> None:
    """Note the gradients that the call wrote, and set the former flags again."""
    written = []
    for watcher, flags, _ in seen:
        shown = [one.read() for one in flags]
        which = np.logical_or.reduce(shown) if len(shown) > 1 else shown[0]
        if which.any():
            written.append((watcher, which, shown[1:]))
    if written:
        history.note([(watcher.writers, which) for watcher, which, _ in written])
    for watcher, which, late in written:
        watcher.after_call(which, late)
    for _, flags, found in seen:
        for one, which in zip(flags, found):
            if which.any():
                one.put(which, True)


@contextmanager
def as_one_call() -> Iterator[None]:
    """Let all backward calls inside count as one, of one pass: a pipeline makes one for each stage and micro-batch."""
    with history.single_call():
        seen = _before_call()
        history.is_inside = True
        try:
            yield
        finally:
            history.is_inside = False
            _after_call(seen)


@contextmanager
def writing_gradients(params: Mapping[int, gluon.Parameter], contexts: Sequence[Context]) -> Iterator[None]:
    """Let trainers see the gradients that the code inside writes without autograd, as one pass over these devices.

    Parameters
    ----------
    params : dict of int to gluon.Parameter
        By their ids. Frozen ones get no gradient.
    contexts : sequence of mxnet.Context
    """
    with history.single_call():
        seen = _before_call()
        try:
            yield
            known = [watcher.mark_written(params, contexts) for watcher, _, _ in seen]
            for number in params.keys() - set().union(*known):  # unfrozen since the last step, or of no trainer
                for context in contexts if params[number]._grad else ():
                    params[number].data(context)._fresh_grad = True
        finally:
            _after_call(seen)


_lock = threading.Lock()
_running: Set[int] = set()  # threads inside of a backward call
_unfinished: List[Seen] = []  # of calls that ended while an overlapping one of another thread continued


def _enter() -> Optional[Seen]:
    """Begin a call of this thread. It is part of the calls of other threads that it overlaps: they set flags at the same time."""
    thread = threading.get_ident()
    with _lock:
        if _running - {thread}:
            _running.add(thread)
            return None
        seen = _before_call()
        _running.add(thread)
        return seen


def _leave(seen: Optional[Seen]) -> None:
    """End a call of this thread: the last one of those that overlap notes the gradients of all."""
    with _lock:
        _running.discard(threading.get_ident())
        if seen is not None:
            _unfinished.append(seen)
        while _unfinished and not _running:
            _after_call(_unfinished.pop())


on_backward(_enter, _leave)
