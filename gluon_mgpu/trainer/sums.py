"""Sums of gradients: over devices, over processes, or by one tree (`tree_sum.py`)."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context

from ..checks import short
from ..distributed import Group, group
from ..distributed.membership import QueuedSum
from ..errors import TrainerError
from ..mxnet_internals.c_calls import PushPull
from ..nested import Array
from ..refusals import refusal
from .clip import in_place
from .slab import Slab, Summand

# Gluon silently treats any other name, and None, as "local" or as no reduction.
LOCAL_STORES = ("device", "local", "nccl", "local_allreduce_device", "local_allreduce_cpu", "local_update_cpu")


class Sum:
    """How a trainer sums gradients. The options of the trainer decide which one it has, when it is made."""

    def run(self, slabs: Sequence[Summand]) -> None:
        """Replace the arrays on every device, or on the slab's owner, by their sum, bit-identical on each."""
        raise NotImplementedError

    def share(self, slabs: List[Slab]) -> None:
        """Copy the weights of these slabs from their owners to the other devices: nothing, where no slab has an owner."""

    def hold(self) -> bool:
        """Keep the sum of the latest pass for an update of several; return whether it did, or each device adds up its own."""
        return False

    def drop(self) -> None:
        """Drop all that was kept."""


def store_type(kvstore: object) -> str:
    """Return the type of MXNet's store that sums over devices; `"device"` for None.

    Without a sum, each device would train its own network.

    Raises
    ------
    TrainerError
        The store is unknown, or is for several processes: the launcher sets their number, not the store's name.
    """
    name = getattr(kvstore, "type", "device" if kvstore is None else kvstore)
    if not isinstance(name, str) or name not in LOCAL_STORES:
        raise TrainerError(
            f"Trainer: got kvstore {short(name)}; expected one of {', '.join(LOCAL_STORES)}. Over several processes, "
            "started by gluon-mgpu launch, gradients are always summed."
        )
    return name


def make_sum(kvstore: object) -> Sum:
    """Return the sum over the devices of this process, and over the processes of a job if there are several."""
    name, processes = store_type(kvstore), group()
    return DeviceSum(name) if processes is None else ProcessSum(processes)


class DeviceSum(Sum):
    """Sums over the devices of one process, through MXNet's kvstore.

    Parameters
    ----------
    name : str
        `"device"` sums on the devices, `"local"` on the CPU.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stores: Dict[Tuple[Context, ...], _Store] = {}  # by devices
        self._latest: Sequence[Summand] = []
        self._calls: List[Callable[[], None]] = []  # of the latest slabs
        self._shared: List[Slab] = []
        self._shares: List[Callable[[], None]] = []  # copies of their weights

    def run(self, slabs: Sequence[Summand]) -> None:
        """Queue the sums.

        Each waits only for the operations that write its slab: it runs while the backward pass fills the next slab.
        """
        if slabs is not self._latest:
            several = [slab for slab in slabs if len(slab.contexts) > 1]
            for slab in several:  # a new key may change the store
                self._key_of(slab)
            self._calls = [self._prepared(slab, slab.arrays, slab.summed) for slab in several]
            self._latest = slabs
            for store in self._stores.values():
                store.has_summed = True
        for call in self._calls:
            call()

    def share(self, slabs: List[Slab]) -> None:
        """Queue the copies of weights."""
        if slabs is not self._shared:
            self._shares = [self._share(slab, slab.owner) for slab in slabs if slab.owner is not None]
            self._shared = slabs
        for call in self._shares:
            call()

    def _share(self, slab: Slab, owner: int) -> Callable[[], None]:
        """Return the copies of weights: the store copies a "sum" over one device to the others."""
        return self._prepared(slab, [slab.weights[owner]], slab.weights[:owner] + slab.weights[owner + 1 :])

    def _prepared(self, slab: Summand, arrays: List[Array], outputs: List[Array]) -> Callable[[], None]:
        """Return the sum of arrays of a slab."""
        arguments = *self._key_of(slab), arrays, outputs, _priority_of(slab)
        return PushPull(*arguments).run if arrays[0].stype == "default" else partial(_push_and_pull, *arguments)

    def _key_of(self, slab: Summand) -> Tuple[mx.kvstore.KVStore, int]:
        if slab.contexts not in self._stores:
            self._stores[slab.contexts] = _Store(self._name, slab.contexts)
        return self._stores[slab.contexts].key_of(slab)


class _Store:
    """MXNet's store for sums over some devices, and the keys of the slabs in it.

    Attributes
    ----------
    has_summed : bool
        NCCL's store then takes no more keys: its first sum makes the buffers of all (MXNet 1.9.1, kvstore_nccl.h:235-253,496).
    """

    def __init__(self, name: str, contexts: Sequence[Context]) -> None:
        # "device" sums on the devices, which must be of one kind
        self._name = name if len({context.device_type for context in contexts}) == 1 else "local"
        self._keys: Dict[Tuple[Any, ...], int] = {}
        self._kv: mx.kvstore.KVStore = mx.kv.create(self._name)
        self.has_summed = False

    def key_of(self, slab: Summand) -> Tuple[mx.kvstore.KVStore, int]:
        """Return the store of a slab, and its key there."""
        known = (slab.bucket is not None, slab.indices, slab.arrays[0].shape, slab.arrays[0].dtype, slab.part)
        if known not in self._keys:
            others = [set(one[1]) for one in self._keys if one[0] and one[1] != slab.indices]  # not parts of the same parameter
            if slab.bucket is not None and any(one.intersection(slab.indices) for one in others):
                self._keys = {}  # divided anew: another store frees the memory of the old sums
                self._begin()
            elif self._name == "nccl" and self.has_summed:
                self._begin()
            self._kv.init(len(self._keys), slab.arrays[0])
            self._keys[known] = len(self._keys)
        return self._kv, self._keys[known]

    def _begin(self) -> None:
        """Take another store, with the keys that are known."""
        self._kv, self.has_summed = mx.kv.create(self._name), False
        for (_, _, shape, dtype, _), key in self._keys.items():
            self._kv.init(key, mx.nd.zeros(shape, dtype=dtype))


def _priority_of(slab: Summand) -> int:
    """Return the priority of a slab's copies: the front layers come first, as in `gluon.Trainer`.

    Each GPU has a queue of copies, which takes the highest priority of those that are ready (MXNet 1.9.1,
    threaded_engine_perdevice.cc:50,136-155). While links are idle, copies run in the order of the backward pass. If they are the
    limit, copies of all layers wait at its end; those of the front layers let the next forward pass begin.
    """
    return -min(slab.indices)


def _push_and_pull(kv: mx.kvstore.KVStore, key: int, arrays: List[Array], outputs: List[Array], priority: int) -> None:
    """Queue a sum of sparse gradients, which takes two calls of the store."""
    kv.push(key, arrays, priority=priority)
    kv.pull(key, outputs, priority=priority, ignore_sparse=False)


class ProcessSum(Sum):
    """Sums over the devices of all processes of a job."""

    def __init__(self, processes: Group) -> None:
        self._processes = processes
        self._sums: Dict[Tuple[object, ...], QueuedSum] = {}  # by the slab's parameters and arrays

    def run(self, slabs: Sequence[Summand]) -> None:
        """Queue the sums, prepared once for each set of parameters."""
        for slab in slabs:
            if slab.arrays[0].stype != "default":
                raise refusal("Trainer", "several processes", "sparse gradients")
            known = (slab.indices, *map(id, slab.arrays))
            if known not in self._sums:
                self._sums[known] = self._processes.all_reduce(slab.arrays)
            self._sums[known].run(_priority_of(slab))


class Divisor:
    """The number of examples of all processes, on each device of this one."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = list(contexts)
        self._counts: List[Array] = []
        self._sum: Optional[QueuedSum] = None

    def divide(self, slabs: Sequence[Summand], num_examples: float) -> None:
        """Divide these sums over processes by their number of examples, of which this process has so many. It does not wait."""
        if self._sum is None:
            processes = group()
            assert processes is not None, "in one process the number is known"
            self._counts = [mx.nd.zeros((1,), ctx=context) for context in self._contexts]
            self._sum = processes.all_reduce(self._counts)
        for replica, count in enumerate(self._counts):
            count[:] = 0 if replica else num_examples
        self._sum.run(0)
        for count in self._counts:
            count += count == 0  # no process has examples, and the sums are 0
        by_context = dict(zip(self._contexts, self._counts))
        for slab in slabs:
            for array in slab.arrays:
                in_place(mx.nd.broadcast_div, array, by_context[array.context])
