"""Sums of gradients: over devices, over processes, or by one tree (`tree_sum.py`); and the clipping of sums."""

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
from .slab import Slab

# Gluon silently treats any other name, and None, as "local" or as no reduction.
LOCAL_STORES = ("device", "local", "nccl", "local_allreduce_device", "local_allreduce_cpu", "local_update_cpu")
_LARGEST = 3.4028234e38  # float32
_MOST_ARRAYS = 200  # of one call of MXNet's finite check


class Sum:
    """How a trainer sums gradients. The options of the trainer decide which one it has, when it is made."""

    def run(self, slabs: List[Slab]) -> None:
        """Replace the gradients on every device, or on the slab's owner, by their sum, bit-identical on each."""
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
        self._latest: List[Slab] = []
        self._calls: List[Callable[[], None]] = []  # of the latest slabs
        self._shared: List[Slab] = []
        self._shares: List[Callable[[], None]] = []  # copies of their weights

    def run(self, slabs: List[Slab]) -> None:
        """Queue the sums.

        Each waits only for the operations that write its slab: it runs while the backward pass fills the next slab.
        """
        if slabs is not self._latest:
            several = [(slab, -place) for place, slab in enumerate(slabs) if len(slab.contexts) > 1]
            self._calls = [self._prepared(slab, slab.gradients, slab.summed, priority) for slab, priority in several]
            self._latest = slabs
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
        return self._prepared(slab, [slab.weights[owner]], slab.weights[:owner] + slab.weights[owner + 1 :], 0)

    def _prepared(self, slab: Slab, arrays: List[Array], outputs: List[Array], priority: int) -> Callable[[], None]:
        """Return the sum of arrays of a slab."""
        if slab.contexts not in self._stores:
            self._stores[slab.contexts] = _Store(self._name, slab.contexts)
        arguments = *self._stores[slab.contexts].key_of(slab), arrays, outputs, priority
        return PushPull(*arguments).run if arrays[0].stype == "default" else partial(_push_and_pull, *arguments)


class _Store:
    """MXNet's store for sums over some devices, and the keys of the slabs in it."""

    def __init__(self, name: str, contexts: Sequence[Context]) -> None:
        # "device" sums on the devices, which must be of one kind
        self._name = name if len({context.device_type for context in contexts}) == 1 else "local"
        self._keys: Dict[Tuple[object, ...], int] = {}
        self._kv: mx.kvstore.KVStore = mx.kv.create(self._name)

    def key_of(self, slab: Slab) -> Tuple[mx.kvstore.KVStore, int]:
        """Return the store of a slab, and its key there."""
        known = (slab.bucket is not None, slab.indices, slab.gradients[0].shape, slab.gradients[0].dtype)
        if known not in self._keys:
            if slab.bucket is not None and any(one[0] and set(one[1]).intersection(slab.indices) for one in self._keys):  # type: ignore[call-overload]
                self._keys = {}  # divided anew: another store frees the memory of the old sums
                self._kv = mx.kv.create(self._name)
            self._kv.init(len(self._keys), slab.gradients[0])
            self._keys[known] = len(self._keys)
        return self._kv, self._keys[known]


def _push_and_pull(kv: mx.kvstore.KVStore, key: int, arrays: List[Array], outputs: List[Array], priority: int) -> None:
    """Queue a sum of sparse gradients, which takes two calls of the store."""
    kv.push(key, arrays, priority=priority)
    kv.pull(key, outputs, priority=priority, ignore_sparse=False)


class ProcessSum(Sum):
    """Sums over the devices of all processes of a job."""

    def __init__(self, processes: Group) -> None:
        self._processes = processes
        self._sums: Dict[Tuple[object, ...], QueuedSum] = {}  # by the slab's parameters and arrays

    def run(self, slabs: List[Slab]) -> None:
        """Queue the sums, prepared once for each set of parameters."""
        for place, slab in enumerate(slabs):
            if slab.gradients[0].stype != "default":
                raise refusal("Trainer", "several processes", "sparse gradients")
            known = (slab.indices, *map(id, slab.gradients))
            if known not in self._sums:
                self._sums[known] = self._processes.all_reduce(slab.gradients)
            self._sums[known].run(-place)


def clip(
    slabs: List[Slab], home: Context, clip_norm: Optional[float], clip_value: Optional[float], *, measures: bool
) -> Optional[Array]:
    """Clip the gradients of these slabs, on every device, and return their common norm on `home` if it was computed.

    Parameters
    ----------
    clip_norm, clip_value : float, optional
        Of the sums, before they are divided by the examples.

    Returns
    -------
    NDArray, shape (1,), or None
    """
    by_context: Dict[Context, List[Array]] = {}
    for slab in slabs:
        for gradient in slab.summed:
            by_context.setdefault(gradient.context, []).append(gradient)
    norm = global_norm([slab.summed[0] for slab in slabs]).as_in_context(home) if slabs and measures else None
    for context, gradients in by_context.items():
        if clip_norm is not None and norm is not None:
            scale_to_limit(gradients, norm.as_in_context(context), clip_norm)
        if clip_value is not None:
            clip_values(gradients, clip_value)
    return norm


def finite_on_each(gradients: Sequence[Array]) -> List[Array]:
    """Return for each device whether all numbers of its gradients are finite, without waiting.

    Parameters
    ----------
    gradients : sequence of NDArray, any shapes, of floating point

    Returns
    -------
    list of NDArray, shape (1,)
        1.0 or 0.0, on the devices of the gradients.

    Examples
    --------
    >>> [float(finite.asscalar()) for finite in finite_on_each([mx.nd.ones((2, 2)), mx.nd.array([float("inf")])])]
    [0.0]
    """
    alike: Dict[Tuple[Context, object], List[Array]] = {}
    for gradient in gradients:
        dense = (gradient if gradient.stype == "default" else gradient.data).as_nd_ndarray()
        alike.setdefault((dense.context, dense.dtype), []).append(dense)
    finite = {context: mx.nd.ones((1,), ctx=context) for context, _ in alike}
    for (context, _), arrays in alike.items():
        for begin in range(0, len(arrays), _MOST_ARRAYS):
            some = arrays[begin : begin + _MOST_ARRAYS]
            mx.nd.multi_all_finite(*some, num_arrays=len(some), init_output=False, out=finite[context])
    return list(finite.values())


def global_norm(gradients: Sequence[Array]) -> Array:
    """Return the common 2-norm of gradients, without waiting.

    Parameters
    ----------
    gradients : sequence of NDArray, any shapes

    Returns
    -------
    NDArray, shape (1,)
        float32, on the first one's device.

    Examples
    --------
    >>> float(global_norm([mx.nd.array([3.0]), mx.nd.array([[4.0]])]).asscalar())
    5.0
    """
    classic = [gradient.as_nd_ndarray() for gradient in gradients]
    squares: List[Array] = [mx.nd.sum(mx.nd.square(gradient.astype("float32", copy=False))).reshape((1,)) for gradient in classic]
    home = squares[0].context
    return mx.nd.sqrt(mx.nd.add_n(*(one.as_in_context(home) for one in squares)))


def clip_values(gradients: Sequence[Array], most: float) -> None:
    """Clip the elements of one device's gradients to -most .. most, in place, without waiting. NaN stays NaN.

    Examples
    --------
    >>> g = mx.nd.array([-3.0, 0.5, 2.0])
    >>> clip_values([g], 1.0)
    >>> g.asnumpy().tolist()
    [-1.0, 0.5, 1.0]
    """
    for gradient in (gradient.as_nd_ndarray() for gradient in gradients):
        mx.nd.clip(gradient, -most, most, out=gradient)


def scale_to_limit(gradients: Sequence[Array], norm: Array, max_norm: float) -> None:
    """Scale one device's gradients, whose common norm is known on that device, so that it is at most `max_norm`."""
    # max(norm, max_norm), and not min(1, max_norm / norm): no division by zero
    scale = max_norm / mx.nd.maximum(norm, max_norm)
    # by 1 if the norm is not finite: the padding between parameters in a bucket is 0, and must not become NaN forever
    scale = mx.nd.where(norm <= _LARGEST, scale, mx.nd.ones_like(scale))
    for gradient in gradients:
        _compute(mx.nd.broadcast_mul, gradient, scale)


def _compute(operator: Any, gradient: Array, number: Array) -> None:
    """Multiply or divide a gradient by a number on its device, in place."""
    classic = gradient.as_nd_ndarray()
    operator(classic, number.astype(classic.dtype, copy=False).reshape((1,) * len(classic.shape)), out=classic)


class Divisor:
    """The number of examples of all processes, on each device of this one."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = list(contexts)
        self._counts: List[Array] = []
        self._sum: Optional[QueuedSum] = None

    def divide(self, slabs: Sequence[Slab], num_examples: float) -> None:
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
            for gradient in slab.gradients:
                _compute(mx.nd.broadcast_div, gradient, by_context[gradient.context])
