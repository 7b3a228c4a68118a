"""Sum gradients over devices, and clip what was summed."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Tuple

import mxnet as mx
from mxnet import Context

from .errors import TrainerError
from .nested import Leaf
from .replicas import Buffer

# Gluon takes any other name, and None, for "local" or for no reduction at all, without a word.
LOCAL_STORES = ("device", "local", "nccl", "local_allreduce_device", "local_allreduce_cpu", "local_update_cpu")


class Reduction:
    """Sums buffers over the devices of one process, through MXNet's kvstore.

    Parameters
    ----------
    kvstore : str, mxnet.kvstore.KVStore or None
        `"device"` sums on the devices, `"local"` on the CPU. A store object stands for its type. None is `"device"`: several
        devices that are not reduced would each train a network of their own.
    contexts : list of mxnet.Context

    Raises
    ------
    TrainerError
        The store is unknown, or spans several processes.
    """

    def __init__(self, kvstore: Any, contexts: Sequence[Context]) -> None:
        name = "device" if kvstore is None else getattr(kvstore, "type", kvstore)
        if name not in LOCAL_STORES:
            raise TrainerError(
                f"Trainer: got kvstore {name!r}; need one of {', '.join(LOCAL_STORES)}. Training over several processes is "
                "not in this version; gluon.Trainer with update_on_kvstore=False takes 'dist_sync'."
            )
        if len({context.device_type for context in contexts}) > 1:
            name = "local"  # "device" sums on the devices themselves, and they must be of one kind
        self._name = name
        self._num_devices = len(contexts)
        self._shapes: Dict[int, Tuple[int, ...]] = {}

    def sum(self, buffers: Iterable[Buffer]) -> None:
        """Replace every device's gradients by their sum over the devices, the same bits on each."""
        if self._num_devices == 1:
            return
        for buffer in buffers:
            self._prepare(buffer)
            if buffer.gradients[0].stype == "default":
                self._store.pushpull(buffer.index, buffer.gradients, priority=-buffer.index)
            else:
                self._store.push(buffer.index, buffer.gradients, priority=-buffer.index)
                self._store.pull(buffer.index, buffer.gradients, priority=-buffer.index, ignore_sparse=False)

    def _prepare(self, buffer: Buffer) -> None:
        if not self._shapes:
            self._store = mx.kv.create(self._name)
        shape = buffer.gradients[0].shape
        if self._shapes.get(buffer.index, shape) != shape:
            self._shapes.clear()
            self._store = mx.kv.create(self._name)
        if buffer.index not in self._shapes:
            self._store.init(buffer.index, buffer.gradients[0])
            self._shapes[buffer.index] = shape


def clip_global_norm(gradients: Sequence[Leaf], max_norm: float) -> Leaf:
    """Scale one device's gradients so that their common 2-norm is at most `max_norm`, without waiting.

    Reduced gradients are the same on every device, so that each device can do it alone and all get the same. Gradients that
    are NaN or infinite stay so.

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

    Source: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
    """
    classic = [gradient.as_nd_ndarray() for gradient in gradients]
    squares: List[Leaf] = [mx.nd.sum(mx.nd.square(gradient.astype("float32", copy=False))).reshape((1,)) for gradient in classic]
    norm = mx.nd.sqrt(mx.nd.add_n(*squares))
    # max(norm, max_norm), and not min(1, max_norm / norm): no division by zero
    scale = max_norm / mx.nd.maximum(norm, max_norm)
    for gradient in classic:
        factor = scale.astype(gradient.dtype, copy=False).reshape((1,) * len(gradient.shape))
        mx.nd.broadcast_mul(gradient, factor, out=gradient)
    return norm
