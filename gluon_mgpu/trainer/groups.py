"""Networks whose parameters are on different devices: one group of parameters for each set of devices.

```
Pipeline on [[gpu0, gpu1], [gpu2, gpu3]]      weights of stage 0     on gpu0, gpu2     one group
                                              weights of stage 1     on gpu1, gpu3     another
                                              an embedding in both   on all four       a third: its gradients are summed over them
```

Each group has the replicas, sums and updates of an ordinary network. The classes here do what those do, for all groups at once.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import mxnet as mx
from mxnet import Context, gluon
from mxnet import optimizer as opt

from ..errors import TrainerError
from ..nested import Array
from .buffers import Buffer
from .parameters import Params, named_params
from .reduction import Reduction, clip_values, global_norm, scale_to_limit
from .replicas import Replicas
from .update import State, Update


def spans_devices(params: Any) -> bool:
    """Return whether this is a network that keeps its parameters on different devices, such as a `Pipeline`."""
    return isinstance(params, gluon.Block) and hasattr(params, "replica_contexts")


class _Part(gluon.Block):  # type: ignore[misc]
    """Some parameters of a network, under its names."""

    def __init__(self, net: gluon.Block, params: Dict[str, gluon.Parameter]) -> None:
        super().__init__(prefix="")
        self._named = params
        self._children.update(net._children)  # for checks of layers

    def _collect_params_with_prefix(self, prefix: str = "") -> Dict[str, gluon.Parameter]:
        return dict(self._named)

    def collect_params(self, select: Optional[str] = None) -> Dict[str, gluon.Parameter]:
        """Return the parameters by their own names."""
        return {param.name: param for param in self._named.values()}


class GroupedBuffers(List[Buffer]):
    """The buffers of all groups, in the order of the groups; `by_group` holds each group's own list."""

    def __init__(self, by_group: Sequence[List[Buffer]]) -> None:
        super().__init__(buffer for buffers in by_group for buffer in buffers)
        self.by_group = list(by_group)


class GroupedReplicas:
    """Does what `Replicas` does, for a network whose parameters are on different devices.

    Parameters
    ----------
    net : gluon.Block
        It has `replica_contexts`: the device of each replica that takes its data; and `all_contexts`: its devices, each once.
    **options
        As for `Replicas`.

    Attributes
    ----------
    groups : list of Replicas
    indices : list of lists of int
        The positions of each group's parameters in the network.
    contexts : list of mxnet.Context
        One per replica: where its data go.
    devices : list of mxnet.Context
        All devices, each once.
    """

    def __init__(self, net: gluon.Block, **options: Any) -> None:
        named = named_params(net)
        self.names, self.params, self.structural = list(named), list(named.values()), True
        self.contexts: List[Context] = list(net.replica_contexts)
        placed: Dict[Tuple[str, ...], Dict[str, gluon.Parameter]] = {}
        for name, param in named.items():
            if param._data is None and not param._deferred_init:
                raise TrainerError(
                    f"Trainer: got {name} not initialised; expected values on the devices. Call net.initialize() first."
                )
            placed.setdefault(tuple(map(str, param.list_ctx())), {})[name] = param
        if not placed:
            raise TrainerError("Trainer: got no parameters; expected at least one. Pass a network that has layers.")
        place = {name: index for index, name in enumerate(named)}
        self.groups = [Replicas(_Part(net, params), **options) for params in placed.values()]
        self.indices = [[place[name] for name in params] for params in placed.values()]
        self.devices: List[Context] = list(net.all_contexts)

    @property
    def needs_sum(self) -> bool:
        """Whether a parameter is on several devices."""
        return any(group.needs_sum for group in self.groups)

    @property
    def all_take_part(self) -> bool:
        """Whether parameters without a gradient in this process take part."""
        return self.groups[0].all_take_part

    @all_take_part.setter
    def all_take_part(self, value: bool) -> None:
        for group in self.groups:
            group.all_take_part = value

    @property
    def is_adding(self) -> bool:
        """Whether backward passes add to the gradients that are there."""
        return any(group.is_adding for group in self.groups)

    @property
    def is_sharded(self) -> bool:
        """Whether each parameter is updated by one device, which copies it to the others."""
        return any(group.is_sharded for group in self.groups)

    def owner_of(self, index: int) -> Optional[int]:
        """Return the replica of its group that updates a parameter; None if all do, or if it was not chosen yet."""
        found = [group.owner_of(own.index(index)) for group, own in zip(self.groups, self.indices) if index in own]
        return found[0]

    def resolve_shapes(self) -> bool:
        """Return whether all shapes are known."""
        known = [group.resolve_shapes() for group in self.groups]  # of each: not all() of a generator
        return all(known)

    def collect(self, ignore_stale_grad: bool) -> GroupedBuffers:
        """Return the buffers that take part in this step."""
        return GroupedBuffers([group.collect(ignore_stale_grad) for group in self.groups])

    def collect_summed(self, buffers: GroupedBuffers, ignore_stale_grad: bool) -> GroupedBuffers:
        """Return these buffers, which were summed."""
        for group, own in zip(self.groups, buffers.by_group):
            group.collect_summed(own, ignore_stale_grad)
        return buffers

    def mark_used(self, buffers: GroupedBuffers) -> None:
        """Note that these gradients were applied."""
        for group, own in zip(self.groups, buffers.by_group):
            group.mark_used(own)

    def note_pass(self, ignore_stale_grad: bool = True) -> None:
        """Count the gradients that were added since the last call."""
        trained = [group for group in self.groups if group.has_trainable()]
        new = [group for group in trained if group.has_new() or group.all_take_part]
        for group in new or trained[:1]:  # without any gradient, the first one raises
            group.note_pass(ignore_stale_grad)
        if not ignore_stale_grad and len(new) < len(trained):
            for group in trained:
                group.check_reached()

    def has_new(self) -> bool:
        """Return whether there is a gradient that was not used or counted."""
        return any(group.has_new() for group in self.groups)

    def put_back_running(self) -> None:
        """Restore each device's own running sums."""
        for group in self.groups:
            group.put_back_running()

    def drop(self) -> None:
        """Drop all gradients that no step has used."""
        for group in self.groups:
            group.drop()

    def drop_earlier(self) -> None:
        """Drop gradients that no step has used or counted."""
        for group in self.groups:
            group.drop_earlier()

    def start_adding(self) -> None:
        """Let the coming backward passes add up."""
        for group in self.groups:
            group.start_adding()

    def close(self) -> None:
        """Note the end of an `accumulate` context."""
        for group in self.groups:
            group.close()

    def take_over(self) -> None:
        """End the accumulation of other trainers of these parameters."""
        for group in self.groups:
            group.take_over()

    def check_own(self, operation: str) -> None:
        """Raise `TrainerError` if another trainer has ended this accumulation."""
        for group in self.groups:
            group.check_own(operation)

    def bytes_held(self) -> List[Tuple[int, int]]:
        """Return the bytes of weights and of gradients on each of `devices`."""
        weights, gradients = zip(*(zip(*group.bytes_held()) for group in self.groups))
        return list(zip(self.per_device(weights), self.per_device(gradients)))

    def per_device(self, held: Sequence[Sequence[int]]) -> List[int]:
        """Return the bytes on each of `devices`, from those of each group's replicas."""
        total = dict.fromkeys(self.devices, 0)
        for group, own in zip(self.groups, held):
            for context, number in zip(group.contexts, own):
                total[context] += number
        return [total[device] for device in self.devices]


class GroupedReduction:
    """Does what `Reduction` does: each group is summed over its own devices."""

    def __init__(self, kvstore: Any, replicas: GroupedReplicas) -> None:
        self._replicas = replicas
        self._reductions = [Reduction(kvstore, group.contexts) for group in replicas.groups]

    def sum(self, buffers: GroupedBuffers) -> None:
        """Replace gradients by their sums."""
        for reduction, own in zip(self._reductions, buffers.by_group):
            reduction.sum(own)

    def share(self, buffers: GroupedBuffers) -> None:
        """Copy weights from their owners to the other devices."""
        for reduction, own in zip(self._reductions, buffers.by_group):
            reduction.share(own)

    def bytes_held(self) -> List[int]:
        """Return the bytes of the sums on each device."""
        return self._replicas.per_device([reduction.bytes_held() for reduction in self._reductions])


class GroupedUpdate:
    """Does what `Update` does. All groups share one optimizer, and so one learning rate and its schedule.

    Raises
    ------
    TrainerError
        The optimizer passes values from one parameter to the next.
    """

    def __init__(self, optimizer: opt.Optimizer, replicas: GroupedReplicas, order: Sequence[int]) -> None:
        self._replicas, self._order = replicas, list(order)
        self._updates = []
        for group, indices in zip(replicas.groups, replicas.indices):
            local = {index: at for at, index in enumerate(indices)}
            own = [local[index] for index in order if index in local]
            self._updates.append(Update(optimizer, group.params, group.contexts, own, is_sharded=group.is_sharded))
        if not self.is_alike:
            raise TrainerError(
                f"Trainer: got {type(optimizer).__name__} for a network that spans devices; expected an optimizer that updates "
                "each parameter from its own gradient and state alone. Use sgd, adam or adamw."
            )

    @property
    def updaters(self) -> List[Any]:
        """MXNet's updaters of all groups."""
        return [updater for update in self._updates for updater in update.updaters]

    @property
    def order(self) -> List[int]:
        """The positions of the parameters in Gluon's order."""
        return list(self._order)

    @property
    def is_alike(self) -> bool:
        """Whether every replica computes its own update."""
        return all(update.is_alike_anywhere for update in self._updates)

    def apply(self, buffers: GroupedBuffers) -> None:
        """Update the weights of these buffers."""
        for update, own in zip(self._updates, buffers.by_group):
            if own:
                update.apply(own)

    def arrays(self) -> List[List[Array]]:
        """Return the arrays of the optimizer's states, one list per state."""
        return [arrays for update in self._updates for arrays in update.arrays()]

    def states(self) -> Dict[int, State]:
        """Return the states of the first replica, by parameter."""
        return self._joined([update.states() for update in self._updates])

    def counts(self) -> Dict[int, int]:
        """Return the number of updates of each parameter."""
        return self._joined([update.counts() for update in self._updates])

    def bytes_held(self) -> List[int]:
        """Return the bytes of the optimizer's states on each device."""
        return self._replicas.per_device([update.bytes_held() for update in self._updates])

    def restore(self, states: Sequence[Dict[int, State]], counts: Dict[int, int], order: Optional[Sequence[int]] = None) -> None:
        """Set states, one dict per copy of a parameter, counts, and the order if it is known."""
        self._order = self._order if order is None else list(order)
        for update, group, indices in zip(self._updates, self._replicas.groups, self._replicas.indices):
            known: Set[int] = set(indices)
            local = {index: at for at, index in enumerate(indices)}
            own = [{local[i]: state for i, state in one.items() if i in known} for one in states[: len(group.contexts)]]
            update.restore(
                own,
                {local[i]: count for i, count in counts.items() if i in known},
                [local[i] for i in self._order if i in known],
            )

    def _joined(self, found: Sequence[Dict[int, Any]]) -> Dict[int, Any]:
        joined = {indices[at]: value for indices, values in zip(self._replicas.indices, found) for at, value in values.items()}
        return dict(sorted(joined.items()))


def make_replicas(params: Params, **options: Any) -> Any:
    """Return the `Replicas` of parameters, or `GroupedReplicas` of a network that spans devices."""
    return GroupedReplicas(params, **options) if spans_devices(params) else Replicas(params, **options)


def make_reduction(kvstore: Any, replicas: Any) -> Any:
    """Return the sum over devices for replicas of either kind."""
    is_grouped = isinstance(replicas, GroupedReplicas)
    return GroupedReduction(kvstore, replicas) if is_grouped else Reduction(kvstore, replicas.contexts)


def make_update(optimizer: opt.Optimizer, replicas: Any, order: Sequence[int]) -> Any:
    """Return the update for replicas of either kind."""
    if isinstance(replicas, GroupedReplicas):
        return GroupedUpdate(optimizer, replicas, order)
    return Update(optimizer, replicas.params, replicas.contexts, order, is_sharded=replicas.is_sharded)


def clip(
    buffers: List[Buffer], home: Context, clip_norm: Optional[float], clip_value: Optional[float], *, measures: bool
) -> Optional[Array]:
    """Clip gradients on different devices by one norm, and return it: shape (1,), on `home`; None if it was not computed.

    Parameters
    ----------
    clip_norm, clip_value : float, optional
        Of the sums, before they are divided by the examples.
    """
    norm = None
    if clip_norm is not None or measures:
        groups = buffers.by_group if isinstance(buffers, GroupedBuffers) else [buffers]
        norms = [global_norm([buffer.summed[0] for buffer in own]).as_in_context(home) for own in groups if own]
        norm = norms[0] if len(norms) == 1 else mx.nd.sqrt(mx.nd.add_n(*map(mx.nd.square, norms)))
    by_context: Dict[Context, List[Array]] = {}
    for buffer in buffers:
        for gradient in buffer.summed:
            by_context.setdefault(gradient.context, []).append(gradient)
    for context, gradients in by_context.items():
        if clip_norm is not None:
            assert norm is not None
            scale_to_limit(gradients, norm.as_in_context(context), clip_norm)
        if clip_value is not None:
            clip_values(gradients, clip_value)
    return norm
