"""Devices that compute wrongly, found by comparing the bits of replicas: after each update they must all be the same.

```
every n updates     copies of weights and states  ─►  read at the next update  ─►  a checksum of each bucket  ─►  a vote
                    on every device                   (no step waits for its own devices)
```
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx

from ..checks import whole_number
from ..distributed import group
from ..errors import ReplicaError, TrainerError
from ..nested import Array, is_device_array, leaves
from ..runtime.environment import logger
from .buffers import Buffer
from .parameters import has_values

_MOST_NAMES = 3  # parameters of a bucket in a message


class ReplicaCheck:
    """Compares the replicas of a trainer every so many updates.

    One wrong bit of a weight or of an optimizer's state changes a checksum, and a wrong bit of a summed gradient becomes one of a
    weight. A device that computes a wrong gradient of its own shard is not found: the sum, and so all replicas, contain it.

    Parameters
    ----------
    trainer : Trainer
    every : int

    Attributes
    ----------
    num_verified : int
        Updates after which all replicas were last known to be the same.
    num_restored : int
        Buckets of replicas that were set to the others' bits.
    """

    def __init__(self, trainer: Any, every: Any) -> None:
        self.every = whole_number("Trainer", "check_replicas_every", every, advice="100 is usual.")
        self.num_verified = self.num_restored = 0
        self._trainer, self._num_updates = trainer, 0
        # updates by then, the buckets, and copies by bucket and replica
        self._taken: Optional[Tuple[int, List[Buffer], List[List[List[Array]]]]] = None
        processes = group()
        self._num_processes = 1 if processes is None else processes.process.num_processes
        num_replicas = len(trainer.contexts) * self._num_processes
        refused = not hasattr(trainer._replicas, "weight_buffers") or trainer._replicas.is_sharded
        if refused or num_replicas < 2 or trainer.trains_apart:
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
        if has_values(self._trainer._replicas.params):
            self._take()
            self._settle()

    def _take(self) -> None:
        copies, buffers = [], self._trainer._replicas.weight_buffers()
        for buffer in buffers:
            replicas = []
            for replica in range(len(self._trainer.contexts)):
                by_dtype: Dict[Any, List[Array]] = {}
                for array in self._arrays(buffer, replica):
                    by_dtype.setdefault(array.dtype, []).append(array.reshape((-1,)))
                replicas.append([mx.nd.concat(*arrays, dim=0) for arrays in by_dtype.values()])
            copies.append(replicas)
        self._taken = self._num_updates, buffers, copies

    def _arrays(self, buffer: Buffer, replica: int) -> List[Array]:
        """Return the weights of a bucket on one device, and the states of its parameters if every device has them."""
        updaters = self._trainer._update.updaters
        arrays = [buffer.weights[replica].as_nd_ndarray()]
        for index in buffer.indices:
            if all(index in updater.states for updater in updaters):
                found = [leaf for _, leaf in leaves(updaters[replica].states[index]) if is_device_array(leaf)]
                arrays += [leaf.as_nd_ndarray() for leaf in found]
        return arrays

    def _settle(self) -> None:
        """Compare the copies; restore the bits of the majority, or raise."""
        assert self._taken is not None, "copies were taken"
        (num_updates, buffers, copies), self._taken = self._taken, None
        own = [[_checksum(arrays) for arrays in replicas] for replicas in copies]
        processes = group()
        rank = 0 if processes is None else processes.process.rank
        everyone = [own]
        if processes is not None:
            everyone = [json.loads(one) for one in processes.all_gather_bytes(json.dumps(own).encode())]
        for at in range(len(copies)):
            votes = [(owner, replica, one) for owner, found in enumerate(everyone) for replica, one in enumerate(found[at])]
            (most, count), *others = Counter(one for *_, one in votes).most_common()
            if not others:
                continue
            wrong = [(owner, replica) for owner, replica, one in votes if one != most]
            names = self._names(buffers[at])
            if 2 * count <= len(votes):
                places = self._places([vote[:2] for vote in votes])
                raise ReplicaError(
                    f"Trainer.step: got other bits on {places} in weights or states of {names} after update {num_updates}; "
                    "expected the same on all. A device computes or stores wrongly, and too few agree to say which: test the "
                    "devices, and resume from a checkpoint before it."
                )
            right = [(owner, replica) for owner, replica, one in votes if one == most]
            self._restore(buffers[at], right, wrong, rank)
            self.num_restored += len(wrong)
            logger.warning(
                "Trainer.step: got other bits on %s in weights or states of %s after update %d; they were set to those of the "
                "other %d replicas. Test this device: it computes or stores wrongly.",
                self._places(wrong),
                names,
                num_updates,
                count,
            )
        self.num_verified = num_updates

    def _restore(self, buffer: Buffer, right: Sequence[Tuple[int, int]], wrong: Sequence[Tuple[int, int]], rank: int) -> None:
        """Set weights and states of wrong replicas to those of a right one, if possible of the same process."""
        here = dict(reversed(right))
        source, processes = right[0], group()
        for owner, replica in wrong:
            if owner in here:
                if owner == rank:
                    for one, other in zip(self._arrays(buffer, here[owner]), self._arrays(buffer, replica)):
                        one.copyto(other)
                continue
            assert processes is not None, "a replica of another process"
            of_source = self._arrays(buffer, source[1]) if rank == source[0] else []
            for at, array in enumerate(self._arrays(buffer, replica if rank == owner else 0)):
                sent = of_source[at].copy() if of_source else mx.nd.zeros_like(array)
                processes.all_reduce([sent], exact=True).run(0)  # the others send zeros
                if rank == owner:
                    sent.copyto(array)

    def _names(self, buffer: Buffer) -> str:
        names = [self._trainer._replicas.names[index] for index in buffer.indices]
        return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")

    def _places(self, replicas: Sequence[Tuple[int, int]]) -> str:
        contexts = self._trainer.contexts
        several = self._num_processes > 1
        return ", ".join(f"{contexts[replica]}{f' of process {owner}' if several else ''}" for owner, replica in replicas)


def _checksum(arrays: Sequence[Array]) -> int:
    """Return a checksum of the bits of arrays: CRC-32 finds every change of up to 32 adjacent bits."""
    found = 0
    for array in arrays:
        found = zlib.crc32(array.asnumpy().view("uint8"), found)
    return found
