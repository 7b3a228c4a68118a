"""Devices that compute wrongly, found by comparing the bits of replicas: after each update they must all be the same.

```
every n updates     copies of weights and states  ─►  read at the next update  ─►  a checksum of each bucket on each device
                    on every device                   (no step waits for its own devices)
```
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import optimizer as opt

from ..checks import whole_number
from ..distributed import group
from ..errors import ReplicaError, TrainerError
from ..nested import Array, is_device_array, leaves
from .layout import Layout
from .parameters import has_values
from .slab import Slab

_MOST_NAMES = 3  # parameters of a bucket in a message


class ReplicaCheck:
    """Compares the replicas of a trainer every so many updates.

    One wrong bit of a weight or of an optimizer's state changes a checksum, and a wrong bit of a summed gradient becomes one of a
    weight. A device that computes a wrong gradient of its own shard is not found: the sum, and so all replicas, contain it.

    Parameters
    ----------
    layout : Layout
    updaters : callable () -> list of mxnet.optimizer.Updater
        Returns those that hold the optimizer's states now.
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

    def __init__(
        self, layout: Layout, updaters: Callable[[], Sequence[opt.Updater]], every: object, *, trains_apart: bool
    ) -> None:
        self.every = whole_number("Trainer", "check_replicas_every", every, advice="100 is usual.")
        self.num_verified, self.checkpoint = 0, "the last checkpoint"
        self._layout, self._updaters, self._num_updates = layout, updaters, 0
        # updates by then, the buckets, and copies by bucket and replica
        self._taken: Optional[Tuple[int, List[Slab], List[List[List[Array]]]]] = None
        processes = group()
        self._num_processes = 1 if processes is None else processes.process.num_processes
        num_replicas = len(layout.contexts) * self._num_processes
        refused = layout.spans_devices or layout.is_sharded
        if refused or num_replicas < 2 or trains_apart:
            raise TrainerError(
                f"Trainer: got check_replicas_every={self.every} with {num_replicas} replicas of one network; expected two or "
                "more that hold the same weights and states. Leave it out on one device, and with shard_optimizer, pipelines "
                "and LocalSGD."
            )

    def after_update(self) -> None:
        """Read what was copied after an earlier update; copy again if it is time to."""
        self._num_updates += 1
        if self._taken is not None:
            self._settle()
        if self._num_updates % self.every == 0:
            self._take()

    def verify(self) -> None:
        """Compare the replicas now, and wait for them: before a checkpoint."""
        if has_values(self._layout.params):
            self._take()
            self._settle()

    def _take(self) -> None:
        copies, buffers = [], self._layout.slabs
        for buffer in buffers:
            replicas = []
            for replica in range(len(self._layout.contexts)):
                by_dtype: Dict[object, List[Array]] = {}
                for array in self._arrays(buffer, replica):
                    by_dtype.setdefault(array.dtype, []).append(array.reshape((-1,)))
                replicas.append([mx.nd.concat(*arrays, dim=0) for arrays in by_dtype.values()])
            copies.append(replicas)
        self._taken = self._num_updates, buffers, copies

    def _arrays(self, buffer: Slab, replica: int) -> List[Array]:
        """Return the weights of a bucket on one device, and the states of its parameters if every device has them."""
        updaters = self._updaters()
        arrays = [buffer.weights[replica].as_nd_ndarray()]
        for index in buffer.indices:
            if all(index in updater.states for updater in updaters):
                found = [leaf for _, leaf in leaves(updaters[replica].states[index]) if is_device_array(leaf)]
                arrays += [leaf.as_nd_ndarray() for leaf in found]
        return arrays

    def _settle(self) -> None:
        """Compare the copies, and raise if they differ."""
        assert self._taken is not None, "copies were taken"
        (num_updates, buffers, copies), self._taken = self._taken, None
        own = [[_checksum(arrays) for arrays in replicas] for replicas in copies]
        processes = group()
        everyone = [own]
        if processes is not None:
            everyone = [json.loads(one) for one in processes.all_gather_bytes(json.dumps(own).encode())]
        for at, buffer in enumerate(buffers):
            sums = {(rank, replica): one for rank, found in enumerate(everyone) for replica, one in enumerate(found[at])}
            (most, count), *others = Counter(sums.values()).most_common()
            if others:
                is_known = 2 * count > len(sums)  # the others agree
                wrong = [place for place, one in sums.items() if one != most or not is_known]
                raise ReplicaError(
                    f"Trainer.step: got other bits on {self._places(wrong)} in bucket {at} ({self._names(buffer)}) after update "
                    f"{num_updates}; expected the same weights and states on all devices, as after update {self.num_verified}. "
                    f"Test {'this device' if len(wrong) == 1 else 'these devices'}, and resume from {self.checkpoint}."
                )
        self.num_verified = num_updates

    def _names(self, buffer: Slab) -> str:
        names = [self._layout.names[index] for index in buffer.indices]
        return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")

    def _places(self, replicas: Sequence[Tuple[int, int]]) -> str:
        contexts = self._layout.contexts
        several = self._num_processes > 1
        return ", ".join(f"{contexts[replica]}{f' of process {owner}' if several else ''}" for owner, replica in replicas)


def _checksum(arrays: Sequence[Array]) -> int:
    """Return a checksum of the bits of arrays: CRC-32 finds every change of up to 32 adjacent bits."""
    found = 0
    for array in arrays:
        found = zlib.crc32(array.asnumpy().view("uint8"), found)
    return found
