"""Which gradients no step has used: those of the latest pass, or those whose flags MXNet has set.

```
a parameter's gradients on 3 devices  before     the pass writes     after
a batch with 2 shards                 1 1 1      1 1 0               1 1 0    device 2 holds another pass's gradient: zero
a parameter that it does not reach    1 1 1      0 0 0               1 1 1    still the gradient of the pass before
```

`train_batch`, compiled steps, pipelines and `trainer.backward` make a `Pass`. Plain loops call `autograd.backward` or
`loss.backward()`. There MXNet's flags count, as in Gluon: what was written since the trainer's last step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import Iterable, List, Mapping, Optional, Sequence, Set, Union

import numpy as np
from mxnet import Context, gluon

from ..mxnet_internals.blocks import rebind_graphs
from ..mxnet_internals.c_calls import Flags
from ..mxnet_internals.parameters import gradients_of, values_of
from .layout import Layout
from .slab import Slab, zero

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


class FreshGradients:
    """The gradients of a network on all devices that no step has used, as tables of bool.

    Attributes
    ----------
    latest : Pass or None
        The pass that the next step uses. None: MXNet's flags count.
    all : Table
        True everywhere.
    running : Table
        The gradients to which all passes add (`grad_req="add"`), except for `adding`.
    adding : set of int
        The indices of parameters whose gradients add up only while several passes are one.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.latest: Optional[Pass] = None
        self.adding: Set[int] = set()
        self._are_unread = False  # compiled steps came since the flags were cleared: one that is set may be older
        self._watch()

    def _watch(self) -> None:
        """Find the parameters that have gradients now."""
        params, contexts_of = self._layout.params, self._layout.contexts_of
        trained = [index for index, param in enumerate(params) if param.grad_req != "null"]
        found = [index for index in trained if len(gradients_of(params[index]) or []) == len(contexts_of[index])]
        self._version = self._layout.version
        self._seen = [(gradients_of(param) or [None])[0] for param in params]  # their first arrays, which stay in other memory
        self._reqs = [param.grad_req for param in params]
        self._entries = [(index, replica) for index in found for replica in range(len(contexts_of[index]))]
        self._indices = np.array([index for index, _ in self._entries], dtype=int)
        self._contexts = [context for index in found for context in contexts_of[index]]
        self._flags = Flags([weight for index in found for weight in values_of(params[index])])
        self.running_indices = {index for index in found if params[index].grad_req == "add"} - self.adding
        self.all = np.ones(len(self._entries), dtype=bool)
        self.running = np.array([index in self.running_indices for index in self._indices.tolist()], dtype=bool)

    def follow(self, *, looks: bool = True, by_hand: bool = False) -> bool:
        """Put parameters into buckets that have moved, and watch again what has changed: see `look`, and `Layout.follow`."""
        self._layout.follow(looks=looks, by_hand=by_hand)
        return self._version != self._layout.version and self.watch_again()

    def look(self) -> bool:
        """Look at the parameters, and watch again what has changed; they stay where a recorded pass has found them.

        Return whether a pass recorded before now may write into arrays that Gluon has replaced: MXNet's static graphs keep
        theirs, unless grad_req is another one than in their last pass.
        """
        self._layout.look()
        return self._version != self._layout.version and self.watch_again()

    def watch_again(self) -> bool:
        """Watch again what has changed. Return what `look` does."""
        params, latest, entries, seen, reqs = self._layout.params, self.latest, self._entries, self._seen, self._reqs
        self._watch()
        if latest is not None:  # arrays that are new since hold nothing of it
            written = set(entries if latest.written is None else compress(entries, latest.written.tolist()))
            stay = [one is other for one, other in zip(seen, self._seen)]
            table = np.array([stay[entry[0]] and entry in written for entry in self._entries], dtype=bool)
            self.latest = replace(latest, written=table)
        replaced = {id(param) for param, old, new in zip(params, seen, self._seen) if old is not None and new is not old}
        return bool(replaced) and rebind_graphs(replaced) and reqs == self._reqs

    def table(self) -> Table:
        """Return which gradients the next step uses."""
        latest = self.latest
        if latest is None:
            return np.zeros_like(self.all) if self._are_unread else self._flags.read()
        return self.all if latest.written is None else latest.written

    def read(self) -> Table:
        """Look at the parameters, and return which gradients the next step uses."""
        self.look()
        return self.table()

    def has_new(self) -> bool:
        """Return whether there is a gradient that was not used or counted."""
        return bool(self.read().any())

    def unused(self) -> Examples:
        """Return one example for each device whose flags show a gradient that no step has used or counted."""
        return {} if self.latest is not None else dict.fromkeys(self.devices_of(self.read()), 1.0)

    def flags(self) -> Table:
        """Return the gradients that MXNet's backward has written since the flags were cleared."""
        if self._version != self._layout.version:
            self.watch_again()
        return self._flags.read()

    def are_ambiguous(self) -> bool:
        """Return whether a flag that is set may be older than the latest compiled step."""
        return self._are_unread and bool(self._flags.read().any())

    def leave_out(self, params: Iterable[gluon.Parameter]) -> None:
        """Let no step use gradients of these parameters: another trainer's pass has written over them."""
        if self.latest is not None:
            others = set(map(id, params))
            stay = [id(self._layout.params[index]) not in others for index, _ in self._entries]
            self.latest = replace(self.latest, written=self.table() & np.array(stay, dtype=bool))

    def clear(self, *, everything: bool = False) -> None:
        """Note that all gradients have been used or dropped; with `everything`, also flags that compiled steps have not read."""
        if self._version != self._layout.version:
            self.watch_again()
        self.latest, self._are_unread = None, self._are_unread and not everything
        if not self._are_unread:
            self._flags.clear()

    def drop_unused(self) -> None:
        """Drop gradients that no step has used or counted, except for running sums."""
        kept = self.read() & self.running
        self.clear(everything=True)
        self._flags.put(kept, True)

    def begin_graphs(self) -> None:
        """Drop gradients that no step has used, except for running sums: bound graphs, which set no flags, write over them."""
        if self.latest is not None or not self._are_unread:
            self.drop_unused()
            self._are_unread = not self.running_indices

    def written_by(self, params: Mapping[int, gluon.Parameter], contexts: Iterable[Context]) -> Table:
        """Return the gradients of these parameters, by their ids, on these devices."""
        own, there = [id(self._layout.params[index]) in params for index, _ in self._entries], set(contexts)
        return np.array([is_own and context in there for is_own, context in zip(own, self._contexts)], dtype=bool)

    def reached_by(self, which: Table) -> Table:
        """Return all gradients of the parameters that have one of these on some device."""
        return np.bincount(self._indices, weights=which)[self._indices] > 0

    def devices_of(self, which: Table) -> Set[Context]:
        """Return the devices of gradients."""
        return set(compress(self._contexts, which.tolist()))

    def indices_of(self, which: Table) -> List[int]:
        """Return the positions of the gradients' parameters."""
        return self._indices[which].tolist()  # type: ignore[no-any-return]

    def zero(self, which: Table, slabs: Sequence[Slab]) -> None:
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

    def is_running(self, slab: Slab) -> bool:
        """Return whether the gradients of a slab are running sums: all of a bucket have one grad_req."""
        return slab.indices[0] in self.running_indices
