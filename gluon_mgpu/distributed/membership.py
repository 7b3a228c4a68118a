"""The processes of a job: all-reduce, all-gather, broadcast and barrier over all of them."""

from __future__ import annotations

import functools
import os
import zlib
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Callable, ContextManager, Iterator, List, Optional, Protocol, Sequence, Tuple, Union

import numpy as np

from ..errors import ProcessError
from ..mxnet_internals.versions import is_mxnet2
from ..nested import Array
from ..runtime.loaded import mxnet as mx
from .dist_sync import DistSync
from .horovod import Horovod
from .process import COLLECTIVES, LATEST, Process, this_process

_LEAST_BYTES = 256  # smallest buffer of a message: it doubles until the message fits
_MOST_BYTES = 2**24 - 1  # largest message: its size is sent as a float32, to which 2**24 and 2**24 + 1 are the same


class QueuedSum(Protocol):
    """A sum of arrays over processes, prepared."""

    def run(self, priority: int) -> None:
        """Queue it."""


class Group:
    """The processes of a job, connected by MXNet's `dist_sync` store or by Horovod, as the job was started.

    All processes must make every call, in the same order.

    Parameters
    ----------
    process : Process

    Attributes
    ----------
    has_divided : bool
        Whether this process has divided a batch that processes share.
    num_divided : int
        The examples of the latest such batch.
    labels : tuple of int
        Checksums of the first one since the latest trainer was made, the labels last.

    Raises
    ------
    ProcessError
        The job has neither: it was not started by the launcher.
    MissingExtraError
        The job was started for Horovod, which is not installed.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        if os.environ.get("DMLC_ROLE") != "worker" and "HOROVOD_RANK" not in os.environ:
            raise ProcessError(f"Trainer: got {process} without a store; expected its servers. Start it with gluon-mgpu launch.")
        self.backend: Union[DistSync, Horovod] = (
            DistSync(process) if os.environ.get("DMLC_ROLE") == "worker" else Horovod(process)
        )
        path = os.environ.get(COLLECTIVES)
        notes = np.memmap(path, np.int64, "r+") if path else np.zeros(process.local_processes * (1 + LATEST), np.int64)
        self._notes = notes.reshape(process.local_processes, -1)[process.local_rank]
        self._calls, self._kinds = 0, 0
        self._numbers: Optional[Tuple[Array, QueuedSum]] = None  # one of each process, and what exchanges them
        self.has_divided, self.num_divided = False, 0
        self.labels: Tuple[int, ...] = ()

    def note_divided(self, num_examples: int, checksum: Callable[[], int], *, is_pair: bool) -> None:
        """Note a batch of which this process takes a part: its labels are those of a pair, or the second array alone."""
        self.has_divided, self.num_divided = True, num_examples
        if len(self.labels) < 2:
            self.labels += (checksum(),) * (1 + is_pair)

    def _note(self, kind: bytes) -> None:
        """Note a collective call where the launcher sees it: it ends a job in which processes wait for each other for ever."""
        self._calls, self._kinds = self._calls + 1, zlib.crc32(kind, self._kinds)
        self._notes[1 + self._calls % LATEST] = self._kinds
        self._notes[0] = self._calls

    def all_reduce(self, gradients: Sequence[Array]) -> QueuedSum:
        """Return an operation whose `run(priority)` sums the arrays, one per device, over devices and processes, in place."""
        return self.backend.all_reduce([gradient.as_nd_ndarray() for gradient in gradients])

    def all_gather_bytes(self, message: bytes) -> List[bytes]:
        """Gather a message from every process; return them in rank order. Waits for all processes."""
        self._note(b"messages")
        sizes = [int(size) for size in self.backend.all_gather(np.array([len(message)], np.float32))[:, 0]]
        if max(sizes) > _MOST_BYTES:
            raise ProcessError(
                f"processes: got a message of {max(sizes):,} bytes; expected at most {_MOST_BYTES:,}. Send a shorter one."
            )
        room = _LEAST_BYTES
        while room < max(sizes):
            room *= 2
        numbers = np.zeros(room, np.float32)
        numbers[: len(message)] = np.frombuffer(message, np.uint8)
        return [row[:size].astype(np.uint8).tobytes() for row, size in zip(self.backend.all_gather(numbers), sizes)]

    def all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """Gather float32 numbers, shape (n,), from every process; return them in rank order, shape (processes, n). Waits."""
        self._note(b"numbers")
        return self.backend.all_gather(numbers)

    def exchange(self, number: int) -> Array:
        """Queue an exchange of one number below 2**24; return the array, shape (processes,), that will hold those of all."""
        if self._numbers is None:
            numbers = mx.nd.zeros((self.process.num_processes,), ctx=mx.cpu())
            self._numbers = numbers, self.backend.all_reduce([numbers], any_order=True)
        self._note(b"step")
        numbers, total = self._numbers
        numbers[:] = 0
        numbers[self.process.rank] = number
        total.run(1)  # before the gradients, which come later
        return numbers.copy()

    def broadcast(self, arrays: Sequence[Array]) -> None:
        """Set arrays to those of process 0, in place. Waits for all processes."""
        self._note(b"broadcast")
        own = [array.as_nd_ndarray() for array in arrays]
        numbers = [_as_floats(array.asnumpy()) for array in own]
        together = np.concatenate([np.zeros(1, np.float32), *numbers])
        total = mx.nd.array(np.zeros_like(together) if self.process.rank else together, dtype=together.dtype)
        self.backend.all_reduce([total], any_order=True).run(0)  # with zeros, which is exact
        ends = np.cumsum([1, *map(len, numbers)])
        for array, part in zip(own, np.split(total.asnumpy(), ends)[1:]):
            values = array.asnumpy()
            values = part.astype(values.dtype) if _is_sent(values) else part.astype(np.uint8).view(values.dtype)
            # through a copy: a weight may be in oneDNN's own layout, into which NumPy cannot write
            mx.nd.array(values.reshape(array.shape), ctx=array.context, dtype=array.dtype).copyto(array)

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        self._note(b"barrier")
        mx.nd.waitall()
        self.backend.barrier()


def _is_sent(values: np.ndarray) -> bool:
    """Return whether numbers are sent as they are: floats, except that MXNet 2's servers turn float64 into float32."""
    return np.issubdtype(values.dtype, np.floating) and not (is_mxnet2() and values.dtype == np.float64)


def _as_floats(values: np.ndarray) -> np.ndarray:
    """Return numbers as floats that a sum with zeros leaves as they are; others as their bytes."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat if _is_sent(values) else flat.view(np.uint8).astype(np.float32)


@functools.lru_cache(maxsize=None)  # each step asks, and reading the environment is slow
def _place() -> Tuple[int, int]:
    process = this_process()
    return process.rank, process.num_processes


@functools.lru_cache(maxsize=None)
def _group() -> Optional[Group]:
    process = this_process()
    return Group(process) if process.num_processes > 1 else None


_apart: ContextVar[bool] = ContextVar("_apart", default=False)
_own: ContextVar[bool] = ContextVar("_own", default=False)


def group() -> Optional[Group]:
    """Return the processes of this job; None for a single process, or within `without_group`."""
    return None if _apart.get() else _group()


def any_process(yes: bool) -> bool:
    """Return whether `yes` is true in any process. Waits for all processes."""
    processes = group()
    return yes if processes is None else any(processes.all_gather_bytes(b"yes" if yes else b""))


def process_shard() -> Tuple[int, int]:
    """Return the index of this process's part of every batch, and the number of parts: (0, 1) if it takes the whole batch."""
    if _apart.get() or _own.get():
        return 0, 1
    return _place()


def has_own_batches() -> bool:
    """Return whether this process of several reads its own batches: one that has no more takes part with empty ones."""
    return _own.get() and group() is not None


def without_group() -> ContextManager[None]:
    """Within this block, let this process work alone: on whole batches, without communication."""
    return _set(_apart, True)


def own_batches(are_own: bool = True) -> ContextManager[None]:
    """Within this block, batches belong to this process and are not divided over the processes."""
    return _set(_own, are_own or _own.get())


@contextmanager
def _set(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
