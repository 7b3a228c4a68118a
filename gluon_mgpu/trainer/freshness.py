"""Which backward pass wrote each gradient: a sum over devices takes the gradients of one pass."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, Iterator, List, MutableSet, Optional, Sequence, Set, Tuple
from weakref import WeakSet

import numpy as np
from mxnet import Context

from ..errors import TrainerError
from ..runtime.c_api import on_backward
from ..runtime.gradient_flags import Flags

Device = Tuple[int, int]  # MXNet's numbers of a device's kind and of the device
_MOST_CALLS = 4096  # that are remembered


@dataclass(eq=False)
class Pass:
    """The calls of autograd's `backward` that compute the gradients of one batch: one for all devices, or one per device.

    Attributes
    ----------
    number : int
        That of its first call.
    era : int
        How many steps of trainers came before.
    is_whole : bool
        It is one call of `mgpu.backward`.
    devices : list of (int, int)
        Those that it has reached, the latest last.
    replaced_by : Pass or None
        The next pass, which began when a call replaced gradients of this one. Which of the two the calls before that belong to
        is a guess, until the next pass has come to their devices, too.
    """

    number: int
    era: int
    is_whole: bool
    devices: List[Device] = field(default_factory=list)
    replaced_by: Optional[Pass] = None


@dataclass(frozen=True, eq=False)
class Call:
    """One call of autograd's `backward`, with the devices that it has reached."""

    of: Pass
    devices: FrozenSet[Device]


class Writers:
    """Of the gradients of some parameters: which backward call and which pass wrote each; 0 where none was seen.

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
        """Return whether all gradients of each parameter are of one pass, without a doubt."""
        passes = self.passes
        return not passes.size or bool((passes == passes[:, :1]).all() and passes.min() > history.latest_doubtful)

    def forget(self, which: Any = None) -> None:
        """Forget who wrote the gradients of these parameters, by default of all: they have been used."""
        for numbers in (self.calls, self.passes):
            numbers[slice(None) if which is None else np.array(which, dtype=bool)] = 0

    def take(self, other: Writers, rows: Sequence[Tuple[int, int]]) -> None:
        """Take over what another one knows, by pairs of rows here and there."""
        for here, there in rows:
            self.calls[here], self.passes[here] = other.calls[there], other.passes[there]

    def of_latest(self, fresh: Any, names: Sequence[str]) -> Any:
        """Return which fresh gradients are of the latest pass that wrote their parameter, on any device.

        Gluon on one device uses what the last pass wrote of each parameter; that of another parameter may be an earlier one.

        Parameters
        ----------
        fresh : numpy.ndarray of bool, shape (parameters, replicas)
        names : sequence of str
            Of the parameters, for the error.

        Raises
        ------
        TrainerError
            It cannot be known which gradients belong together. Nothing was changed.
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
        """Return which fresh gradients are newer than a pass for which this process of several had no data.

        Arguments and errors as for `of_latest`.

        Parameters
        ----------
        may_be_of_others : bool
            That pass may have been one through other trainers' parameters.
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
        """Return the flags that the call may set: those of the writers' parameters, in their order."""
        raise NotImplementedError

    def after_call(self, written: Any, late: List[Any]) -> None:
        """Take note of what a call wrote.

        Parameters
        ----------
        written : numpy.ndarray of bool, shape (parameters, replicas)
        late : list of the same
            What each of the flags but the first has shown of it.
        """
        raise NotImplementedError


class History:
    """The backward calls of this process, and the passes that they make.

    ```
    mgpu.backward([l0, l1])                          one call, one pass
    l0.backward()   l1.backward()                    two calls on different devices: one pass
    l0.backward()   l1.backward()   m0.backward()    m0 comes back to l0's device, and begins another pass
    ```

    Every backward pass of MXNet's Python calls one function of the C interface. Here another one takes its place, which also
    looks at the flags of all trainers before and after: a generator's pass, or a batch without a step, leaves fresh gradients
    on devices that the next batch does not reach, and the flags alone do not tell them from those of that batch. To look at
    them only in our own functions would not do for loops that call MXNet's `backward`: between two steps there may be several
    passes, and nothing of ours is called. MXNet looks the function up at each call, and is retired, so that this stays so. A
    fresh gradient of a pass that was not seen counts, as it does in Gluon.

    Attributes
    ----------
    number : int
        Of the latest call.
    current : Pass or None
        The pass that the next call may belong to.
    is_whole : bool
        The next call is a pass.
    latest_doubtful : int
        The number of the latest pass that came to a device twice, was empty, or of which gradients were replaced.
    empty, empty_era : int
        The number that the latest pass without any data in this process would have had, and its era.
    is_empty_pass : bool
        That there was such a pass is known, and not guessed.
    """

    def __init__(self) -> None:
        self.number = self.empty = self.empty_era = self._era = 0
        self._calls: Dict[int, Call] = {}
        self.current: Optional[Pass] = None
        self.latest_doubtful = 0
        self.is_whole = False
        self.is_empty_pass = True

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Take the call inside for a pass of its own, with the losses of all devices."""
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False

    def begin_era(self) -> None:
        """Let the next call begin another pass: a trainer has made a step, or dropped what was there."""
        self._era += 1
        self.current = None

    def note_empty(self, *, is_pass: bool = True) -> None:
        """Note a pass for which this process of several had no data.

        Parameters
        ----------
        is_pass : bool
            False for a batch of which this process has no part: a loop over its losses, of which there are none, calls nothing.
            Loops that call `mgpu.backward` do so for such a batch, too.
        """
        latest = self.latest_pass()
        if is_pass or (threading.current_thread() is threading.main_thread() and latest and not latest.is_whole):
            self.number += 1
            self.empty, self.empty_era, self.current = self.number, self._era, None
            self.latest_doubtful = self.number
            self.is_empty_pass = is_pass

    def call(self, number: int) -> Optional[Call]:
        """Return what is known of a call; None of one that is long gone, or was before its trainer."""
        return self._calls.get(number)

    def latest_pass(self) -> Optional[Pass]:
        """Return the pass of the latest call."""
        call = self.call(self.number)
        return None if call is None else call.of

    def note_unseen(self, writers: Writers, fresh: Any) -> None:
        """Note gradients that were fresh before anything watched them: all of an earlier pass."""
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
            Each with one that is true, or more.
        """
        reached: Set[Device] = set()
        for writers, which in written:
            reached.update(device for device, has in zip(writers.devices, which.any(axis=0)) if has)
        current, is_next = self.current, True
        replaces = current is not None and any((writers.passes[which] == current.number).any() for writers, which in written)
        if current is not None and not self.is_whole:
            # several losses may follow each other on one device, where they have no parameters in common
            is_next = replaces or not (reached.isdisjoint(current.devices) or reached == {current.devices[-1]})
        self.number += 1
        if current is None or is_next:
            self.current = Pass(self.number, self._era, self.is_whole)
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
        if self.is_whole:
            self.current = None


history = History()
_watching: MutableSet[Watcher] = WeakSet()


def watch(watcher: Watcher) -> None:
    """Show a watcher every backward call from now on, as long as it lives."""
    _watching.add(watcher)


def watchers() -> List[Watcher]:
    """Return all that are being shown backward calls."""
    return list(_watching)


def _is_foreign(number: int, last_number: int) -> Optional[bool]:
    """Return whether a call belongs to another pass than a later one, None if it cannot be known.

    A pass comes to a device once, except where it has several losses on each: then its calls may stand in any order.
    """
    call, last = history.call(number), history.call(last_number)
    if call is None or last is None:
        return True
    one, other = call.of, last.of
    if one is other:
        after = one.replaced_by.devices if one.replaced_by else []
        is_sure = call.devices.isdisjoint(after) == last.devices.isdisjoint(after)
        return False if is_sure and _comes_once(one, number, last_number) else None
    if not call.devices.isdisjoint(last.devices) or one.is_whole != other.is_whole:
        return True
    if one.era < other.era and (one.is_whole or not set(one.devices).isdisjoint(other.devices)):
        return True
    return None


def _comes_once(one: Pass, number: int, last_number: int) -> bool:
    """Return whether a pass comes to no device twice from one of its calls to another, or to all as often."""
    calls = [history.call(between) for between in range(number, last_number + 1)]
    devices = [device for call in calls if call is not None and call.of is one for device in call.devices]
    return len(set(devices)) == len(devices) or len({one.devices.count(device) for device in one.devices}) == 1


def _undecided(name: str, device: Device) -> TrainerError:
    where = Context(Context.devtype2str[device[0]], device[1])
    return TrainerError(
        f"Trainer.step: got gradients of {name} from several backward passes, an earlier one on {where}; expected those of "
        "one pass. "
        "Call mgpu.backward([...]) once with the losses of all devices, and discard() after a pass that no step is to use."
    )


Seen = List[Tuple[Watcher, List[Flags], List[Any]]]


def _before_call() -> Seen:
    """Return the flags that are set, which are cleared, so that those show which the call sets."""
    seen: Seen = []
    for watcher in list(_watching):
        flags = watcher.before_call()
        seen.append((watcher, flags, [one.read() for one in flags]))
    for _, flags, found in seen:
        for one, which in zip(flags, found):
            if which.any():
                one.put(which, False)
    return seen


def _after_call(seen: Seen) -> None:
    """Note what the call wrote, and set the flags again that were set before."""
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


on_backward(_before_call, _after_call)
