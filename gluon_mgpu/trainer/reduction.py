"""Sums gradients over devices and processes, and clips the sums."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import explaining, real_number, short
from ..distributed import Group, group
from ..errors import TrainerError
from ..nested import Array, is_device_array, num_bytes
from ..runtime.c_api import PushPull
from .buffers import Buffer

# Gluon silently treats any other name, and None, as "local" or as no reduction.
LOCAL_STORES = ("device", "local", "nccl", "local_allreduce_device", "local_allreduce_cpu", "local_update_cpu")
_MIN_SLICE = 2**15  # elements: queueing a smaller slice costs more than adding it
_MULTIPLE = 16  # elements: slices begin at cache lines
# (key, array) per call: the store sorts more pairs by key, which changes the order of devices, and so the bits of sums
_MOST_PAIRS = 16
_LARGEST = 3.4028234e38  # float32
_FLOATS = (np.float16, np.float32, np.float64)
_MOST_ARRAYS = 200  # of one call of MXNet's finite check
Part = Tuple[List[int], List[List[Array]]]  # keys, each with one array per device
Sum = Union[PushPull, "SparsePushPull"]


class Reduction:
    """Sums buffers over the devices, through MXNet's kvstore, and over the processes of a job.

    Parameters
    ----------
    kvstore : str, mxnet.kvstore.KVStore or None
        `"device"` sums on the devices, `"local"` on the CPU. Of a store object, only the type is used. None is `"device"`:
        without a reduction each device would train its own network.
    contexts : list of mxnet.Context

    Raises
    ------
    TrainerError
        The store is unknown, or is for several processes: the launcher sets their number, not the store's name.
    """

    def __init__(self, kvstore: Any, contexts: Sequence[Context]) -> None:
        name = "device" if kvstore is None else getattr(kvstore, "type", kvstore)
        if not isinstance(name, str) or name not in LOCAL_STORES:
            raise TrainerError(
                f"Trainer: got kvstore {short(name)}; expected one of {', '.join(LOCAL_STORES)}. Over several processes, "
                "started by gluon-mgpu launch, gradients are always summed."
            )
        if len({context.device_type for context in contexts}) > 1:
            name = "local"  # "device" sums on the devices, which must be of one kind
        self._name = name
        self._num_devices = len(contexts)
        self._keys: Dict[Tuple[Any, ...], List[int]] = {}
        self._slice_bytes: List[int] = []
        self._group = group()
        self._sums: Dict[Tuple[Any, ...], Any] = {}  # over processes, by their buffer
        self._latest: List[Buffer] = []
        self._calls: List[List[Any]] = []  # of the latest buffers
        self._shares: List[PushPull] = []  # copies of their weights

    def sum(self, buffers: List[Buffer]) -> None:
        """Replace every device's gradients by their sum over the devices, bit-identical on each; or only the owner's.

        A sum waits in the queue only for the operations that write its buffer: it runs while the backward pass fills the next
        buffer.
        """
        if self._num_devices == 1 and self._group is None:
            return
        if buffers is not self._latest:
            self._calls, self._shares = [], []
            for buffer in buffers:
                self._prepare(buffer)
            self._latest = buffers
        for place, calls in enumerate(self._calls):
            for call in calls:
                call.run(-place)

    def share(self, buffers: List[Buffer]) -> None:
        """Copy the weights of buffers that were summed from their owners to the other devices."""
        assert buffers is self._latest or not self._shares, "the sum of these buffers has prepared their copies"
        for call in self._shares:
            call.run(0)

    def _prepare(self, buffer: Buffer) -> None:
        if self._group is not None:
            self._calls.append([self._over_processes(self._group, buffer)])
            return
        parts, owner, weights = self._divided(buffer), buffer.owner, buffer.weights
        self._calls.append([self._call(*part, owner) for part in parts])
        if owner is not None:  # the store copies a "sum" over one device to the others
            ((keys, _),) = parts
            self._shares.append(PushPull(self._store, keys, [[weights[owner]]], [weights[:owner] + weights[owner + 1 :]]))

    def _over_processes(self, processes: Group, buffer: Buffer) -> Any:
        """Return the sum of a buffer over all devices of all processes, prepared once for each set of parameters."""
        if buffer.gradients[0].stype != "default":
            raise TrainerError(
                "Trainer: got a sparse gradient in a job of several processes; expected a dense one. Leave sparse_grad out of "
                "Embedding."
            )
        known = (buffer.indices, *(id(gradient) for gradient in buffer.gradients))
        if known not in self._sums:
            self._sums[known] = processes.all_reduce(buffer.gradients)
        return self._sums[known]

    def _call(self, keys: List[int], gradients: List[List[Array]], owner: Optional[int]) -> Sum:
        kind = PushPull if gradients[0][0].stype == "default" else SparsePushPull
        return kind(self._store, keys, gradients, gradients if owner is None else [[one[owner]] for one in gradients])

    def bytes_held(self) -> List[int]:
        """Return the bytes of the store's sums on each device: one copy of a slice per device.

        The store assigns each slice, the largest first, to the device with the fewest bytes so far.

        Source: MXNet 1.9.1, src/kvstore/comm.h, CommDevice::InitMergeBuffer.
        """
        held = [0] * self._num_devices
        for size in sorted(self._slice_bytes, reverse=True) if self._name == "device" else ():
            held[held.index(min(held))] += size * self._num_devices
        return held

    def _divided(self, buffer: Buffer) -> List[Part]:
        """Return the sums of a buffer for the store: one slice per device, so that all devices add equally much.

        ```
        device 0: │ slice 0 │ slice 1 │    slice 0 of both devices is summed on device 0 and copied back,
        device 1: │ slice 0 │ slice 1 │    slice 1 on device 1
        ```

        A buffer with an owner is one slice.
        """
        gradients = buffer.gradients
        slices = [gradients]
        if buffer.bucket is not None and buffer.owner is None:
            size = gradients[0].size
            num_slices = max(1, min(self._num_devices, size // _MIN_SLICE))
            step = -(-size // (num_slices * _MULTIPLE)) * _MULTIPLE
            slices = [[flat[begin : min(begin + step, size)] for flat in gradients] for begin in range(0, size, step)]
        known = (buffer.bucket is not None, buffer.indices, gradients[0].shape, gradients[0].dtype)
        if known not in self._keys:
            if buffer.bucket is not None and any(one[0] and set(one[1]).intersection(buffer.indices) for one in self._keys):
                self._keys, self._slice_bytes = {}, []  # new groups: another store frees the memory of the old sums
            if not self._keys:
                self._store = mx.kv.create(self._name)
            first = sum(map(len, self._keys.values()))
            self._keys[known] = list(range(first, first + len(slices)))
            for key, arrays in zip(self._keys[known], slices):
                self._store.init(key, arrays[0])
                self._slice_bytes.append(num_bytes(arrays[0]))
        keys, together = self._keys[known], max(1, _MOST_PAIRS // self._num_devices)
        return [(keys[i : i + together], slices[i : i + together]) for i in range(0, len(keys), together)]


class SparsePushPull:
    """Sums of sparse gradients, which take two calls of the store. Arguments as for `PushPull`."""

    def __init__(self, store: Any, keys: List[int], arrays: List[List[Array]], outputs: List[List[Array]]) -> None:
        self._store, self._keys, self._arrays, self._outputs = store, keys, arrays, outputs

    def run(self, priority: int) -> None:
        """Queue the sums."""
        self._store.push(self._keys, self._arrays, priority=priority)
        self._store.pull(self._keys, self._outputs, priority=priority, ignore_sparse=False)


def all_finite(gradients: Sequence[Array]) -> Array:
    """Return whether all numbers of one device's gradients are finite, without waiting.

    Parameters
    ----------
    gradients : sequence of NDArray on one device, any shapes, of floating point

    Returns
    -------
    NDArray, shape (1,)
        1.0 or 0.0, on that device.

    Examples
    --------
    >>> all_finite([mx.nd.ones((2, 2)), mx.nd.array([float("inf")])]).asscalar()
    0.0
    """
    classic = [gradient.as_nd_ndarray() for gradient in gradients]
    finite = mx.nd.ones((1,), ctx=classic[0].context)
    by_dtype: Dict[Any, List[Array]] = {}
    for gradient in classic:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for arrays in by_dtype.values():
        for begin in range(0, len(arrays), _MOST_ARRAYS):
            some = arrays[begin : begin + _MOST_ARRAYS]
            mx.nd.multi_all_finite(*some, num_arrays=len(some), init_output=False, out=finite)
    return finite


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
    >>> global_norm([mx.nd.array([3.0]), mx.nd.array([[4.0]])]).asscalar()
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


def clip_global_norm(gradients: Sequence[Array], max_norm: float) -> Array:
    """Scale one device's gradients so that their common 2-norm is at most `max_norm`, without waiting.

    Reduced gradients are the same on every device, so each device computes the same result alone. NaN and infinite gradients are
    not changed.

    Parameters
    ----------
    gradients : sequence of NDArray on one device, any shapes
        Changed in place.
    max_norm : float

    Returns
    -------
    NDArray, shape (1,)
        The norm before clipping, on that device.

    Examples
    --------
    >>> g = [mx.nd.array([3.0]), mx.nd.array([[4.0]])]
    >>> clip_global_norm(g, 1.0).asnumpy().tolist(), round(g[1].asnumpy().item(), 4)
    ([5.0], 0.8)

    Raises
    ------
    TrainerError
        `max_norm` is not a number above 0, or `gradients` are not arrays. Nothing was changed.

    Source: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
    """
    real_number("clip_global_norm", "max_norm", max_norm, above=True, advice="Do not call it if you do not want to clip.")
    arrays = list(gradients) if isinstance(gradients, (list, tuple)) else []
    if not arrays or not all(is_device_array(one) and one.dtype in _FLOATS for one in arrays):
        raise TrainerError(
            f"clip_global_norm: got gradients={short(gradients)}; expected a list of MXNet arrays of floating point on one "
            "device. Pass [param.grad(ctx) for param in net.collect_params().values()]."
        )
    expected = "dense gradients on one device"
    with explaining("clip_global_norm", "an error", expected, advice="Call it once for each device."):
        return scale_to_norm(arrays, max_norm)


def scale_to_norm(gradients: Sequence[Array], max_norm: float) -> Array:
    """Do the same as `clip_global_norm`, without checks of the arguments."""
    norm = global_norm(gradients)
    scale_to_limit(gradients, norm, max_norm)
    return norm


def scale_to_limit(gradients: Sequence[Array], norm: Array, max_norm: float) -> None:
    """Scale one device's gradients, whose common norm is known on that device, so that it is at most `max_norm`."""
    # max(norm, max_norm), and not min(1, max_norm / norm): no division by zero
    scale = max_norm / mx.nd.maximum(norm, max_norm)
    # by 1 if the norm is not finite: the padding between parameters in a bucket is 0, and must not become NaN forever
    scale = mx.nd.where(norm <= _LARGEST, scale, mx.nd.ones_like(scale))
    for gradient in (gradient.as_nd_ndarray() for gradient in gradients):
        factor = scale.astype(gradient.dtype, copy=False).reshape((1,) * len(gradient.shape))
        mx.nd.broadcast_mul(gradient, factor, out=gradient)
