"""Replicas that must hold the same values: compared after updates, in all processes, and where a network is used or saved."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import Dict, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet import optimizer as opt

from ..checks import whole_number
from ..distributed import group
from ..errors import ReplicaError, TrainerError
from ..mxnet_internals.blocks import options_of
from ..mxnet_internals.parameters import is_differentiable, values_of
from ..nested import Array, is_device_array, leaves
from ..runtime.environment import logger
from .layout import Layout
from .parameters import Params, named_params, trainers_of
from .slab import Slab, slice_of
from .wrong_graphs import hybrid_blocks

_MOST_NAMES = 3  # parameters of a bucket in a message


class ReplicaComparison:
    """Whether the devices of a network hold the same values, computed on the first device of each parameter.

    Parameters
    ----------
    operation : str
        For the error.
    params : gluon.Block, ParameterDict, dict or list of gluon.Parameter
    """

    def __init__(self, operation: str, params: Params) -> None:
        self._operation, self._params = operation, named_params(params)
        self._is_ours = bool(trainers_of(params))
        if any(options_of(block).get("static_shape") for block in hybrid_blocks([params])):
            mx.nd.waitall()  # a static graph writes running statistics without telling the engine
        held: Dict[int, Sequence[Array]] = {}  # of each bucket, and of each parameter outside of buckets
        for param in self._params.values():
            found = slice_of(param)
            held[id(found.bucket if found else param)] = found.bucket.weights if found else values_of(param) or ()
        with autograd.pause():
            flags = [_differ(arrays[0], other) for arrays in held.values() for other in arrays[1:] if other.size]
            self._num_different = mx.nd.add_n(*(one.as_in_context(flags[0].context) for one in flags)) if flags else None

    def check(self) -> None:
        """Wait for the result.

        Raises
        ------
        ReplicaError
            They differ, and a trainer of this package trains the network or a part of it. In other programs, log a warning.
        """
        number, self._num_different = self._num_different, None
        if number is None or not number.asscalar():
            return
        differing = (f"{name} on {one.list_ctx()}" for name, one in self._params.items() if _any_differ(values_of(one) or ()))
        what = next(differing, "a parameter, which a later step has made equal")  # where it is written in the background
        message = (
            f"{self._operation}: got other values of {what}; expected the same on all devices. "
            "Give the trainer the whole network, Trainer(net): it moves running statistics alike, also those of frozen layers. "
            "Or call mgpu.broadcast_parameters(net) before; after steps of a LocalSGD, its average_replicas()."
        )
        if self._is_ours:
            raise ReplicaError(message)
        logger.warning("%s", message)


def _any_differ(arrays: Sequence[Array]) -> bool:
    return any(_differ(arrays[0], other).asscalar() for other in arrays[1:] if other.size)


def _differ(first: Array, other: Array) -> Array:
    """Return 1, shape (1,), if a number differs, otherwise 0. NaN is equal to NaN."""
    one, two = (mx.nd.reshape(array.as_nd_ndarray(), shape=(-1,)) for array in (first, other.as_in_context(first.context)))
    if one.dtype == np.bool_ or np.dtype(one.dtype).names:  # which MXNet cannot compare: bool, and bfloat16, a dtype with names
        one, two = one.astype("float32"), two.astype("float32")
    return mx.nd.max((one != two) * ((one == one) + (two == two))).astype("float32")


class ReplicaCheck:
    """Compares the replicas of a trainer, in all processes of a job.

    One wrong bit of a weight or of an optimizer's state changes a checksum, and a wrong bit of a summed gradient becomes one of a
    weight. A device that computes a wrong gradient of its own shard is not found: the sum, and so all replicas, contain it.

    Parameters
    ----------
    layout : Layout
    updaters : list of mxnet.optimizer.Updater
        Those that hold the optimizer's states.
    every : int, optional
        Compare after every so many updates, not only when `verify` is called.
    trains_apart : bool
        Whether the devices' weights differ between averages.

    Attributes
    ----------
    is_on : bool
        Whether runs compare by themselves: in several processes, and where the user has asked for it.
    num_verified : int
        Updates after which all replicas were last known to be the same.
    checkpoint : str
        The last checkpoint of these replicas, for the error.
    """

    def __init__(self, layout: Layout, updaters: Sequence[opt.Updater], every: object, *, trains_apart: bool) -> None:
        self.every = None if every is None else whole_number("Trainer", "check_replicas_every", every, advice="100 is usual.")
        self.num_verified, self.checkpoint = 0, "the last checkpoint"
        self._layout, self._updaters, self._num_updates = layout, updaters, 0
        self._processes = group()
        self.is_on = self.every is not None or self._processes is not None
        num_replicas = len(layout.contexts) * (1 if self._processes is None else self._processes.process.num_processes)
        if self.every is not None and (layout.spans_devices or num_replicas < 2 or trains_apart):
            raise TrainerError(
                f"Trainer: got check_replicas_every={self.every} with {num_replicas} replicas of one network; expected two or "
                "more that hold the same weights and states. Leave it out on one device, and with pipelines and LocalSGD."
            )

    def after_update(self) -> bool:
        """Count an update; return whether it is time to compare."""
        self._num_updates += 1
        return self.every is not None and self._num_updates % self.every == 0

    def verify(self) -> None:
        """Compare the replicas now, and wait for them; raise `ReplicaError` if they differ."""
        layout, processes = self._layout, self._processes
        slabs = list(layout.slabs)
        for index, param in enumerate(layout.params):
            if param.grad_req == "null" and is_differentiable(param) and values_of(param):  # frozen
                slabs.append(Slab((index,), tuple(param.list_ctx()), param.list_data(), []))
        of_process = "" if processes is None else f" of process {processes.process.rank}"
        own = [{f"{one}{of_process}": self._checksum(slab, i) for i, one in enumerate(slab.contexts)} for slab in slabs]
        everyone = [own]
        if processes is not None:
            everyone = [json.loads(one) for one in processes.all_gather_bytes(json.dumps(own).encode())]
        for at, (slab, *found) in enumerate(zip(slabs, *everyone)):
            sums = {device: one for each in found for device, one in each.items()}
            (most, count), *others = Counter(sums.values()).most_common()
            if others:
                is_known = 2 * count > len(sums)  # the others agree
                wrong = [device for device, one in sums.items() if one != most or not is_known]
                names = [layout.names[index] for index in slab.indices]
                more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
                raise ReplicaError(
                    f"Trainer.step: got other bits on {', '.join(wrong)} in bucket {at} ({', '.join(names[:_MOST_NAMES])}{more}) "
                    f"after update {self._num_updates}; expected the same weights and states on all devices, as after update "
                    f"{self.num_verified}. If the program has set weights or options there alone (set_data, load_parameters), "
                    "set them on all, or call mgpu.broadcast_parameters(net) in all processes. If not, test "
                    f"{'this device' if len(wrong) == 1 else 'these devices'}, and resume from {self.checkpoint}."
                )
        self.num_verified = self._num_updates

    def _checksum(self, slab: Slab, replica: int) -> int:
        """Return the CRC-32 of the weights of a slab on one device, and of their states if every device has them.

        It finds every change of up to 32 adjacent bits.
        """
        held = [updater.states for updater in self._updaters]
        whole = [index for index in slab.indices if self._layout.owner_of(index) is None]  # others may hold a part each
        states = [held[replica][index] for index in whole if all(index in own for own in held)]
        found = 0
        for _, leaf in leaves([slab.weights[replica], states]):
            if is_device_array(leaf):
                found = zlib.crc32(leaf.asnumpy().tobytes(), found)
        return found
