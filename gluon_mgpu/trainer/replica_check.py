"""Devices that compute wrongly, found by comparing the bits of replicas: after each update they must all be the same."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import Sequence

from mxnet import optimizer as opt

from ..checks import whole_number
from ..distributed import group
from ..errors import ReplicaError, TrainerError
from ..nested import is_device_array, leaves
from .layout import Layout
from .slab import Slab

_MOST_NAMES = 3  # parameters of a bucket in a message


class ReplicaCheck:
    """Compares the replicas of a trainer every so many updates.

    One wrong bit of a weight or of an optimizer's state changes a checksum, and a wrong bit of a summed gradient becomes one of a
    weight. A device that computes a wrong gradient of its own shard is not found: the sum, and so all replicas, contain it.

    Parameters
    ----------
    layout : Layout
    updaters : list of mxnet.optimizer.Updater
        Those that hold the optimizer's states.
    every : int
    trains_apart : bool
        Whether the devices' weights differ between averages.

    Attributes
    ----------
    num_verified : int
        Updates after which all replicas were last known to be the same.
    checkpoint : str
        The last checkpoint of these replicas, for the error.
    """

    def __init__(self, layout: Layout, updaters: Sequence[opt.Updater], every: object, *, trains_apart: bool) -> None:
        self.every = whole_number("Trainer", "check_replicas_every", every, advice="100 is usual.")
        self.num_verified, self.checkpoint = 0, "the last checkpoint"
        self._layout, self._updaters, self._num_updates = layout, updaters, 0
        self._processes = group()
        num_replicas = len(layout.contexts) * (1 if self._processes is None else self._processes.process.num_processes)
        if layout.spans_devices or num_replicas < 2 or trains_apart:
            raise TrainerError(
                f"Trainer: got check_replicas_every={self.every} with {num_replicas} replicas of one network; expected two or "
                "more that hold the same weights and states. Leave it out on one device, and with pipelines and LocalSGD."
            )

    def after_update(self) -> None:
        """Compare the replicas if it is time to."""
        self._num_updates += 1
        if self._num_updates % self.every == 0:
            self.verify()

    def verify(self) -> None:
        """Compare the replicas now, and wait for them; raise `ReplicaError` if they differ."""
        slabs, processes = self._layout.slabs, self._processes
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
                names = [self._layout.names[index] for index in slab.indices]
                more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
                raise ReplicaError(
                    f"Trainer.step: got other bits on {', '.join(wrong)} in bucket {at} ({', '.join(names[:_MOST_NAMES])}{more}) "
                    f"after update {self._num_updates}; expected the same weights and states on all devices, as after update "
                    f"{self.num_verified}. Test {'this device' if len(wrong) == 1 else 'these devices'}, and resume from "
                    f"{self.checkpoint}."
                )
        self.num_verified = self._num_updates

    def _checksum(self, slab: Slab, replica: int) -> int:
        """Return the CRC-32 of the weights of a slab on one device, and of their states if every device has them.

        It finds every change of up to 32 adjacent bits.
        """
        held = [updater.states for updater in self._updaters]
        states = [held[replica][index] for index in slab.indices if all(index in own for own in held)]
        found = 0
        for _, leaf in leaves([slab.weights[replica], states]):
            if is_device_array(leaf):
                found = zlib.crc32(leaf.asnumpy().tobytes(), found)
        return found
