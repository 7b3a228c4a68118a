"""All processes of a job: what each is, sums over all of them, and what all of them say."""

from __future__ import annotations

import functools
import os
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Dict, Iterator, List, Optional, Protocol, Sequence, Tuple

import mxnet as mx
import numpy as np

from ..errors import ProcessError
from ..nested import Array
from .dist_sync import DistSync
from .horovod import Horovod
from .process import Process, this_process

_LEAST_BYTES = 256  # of a message: its room doubles until it fits
_MOST_BYTES = 2**24  # of one message; float32 counts as far exactly


class Backend(Protocol):
    """What joins processes: `DistSync` or `Horovod`."""

    def all_reduce(self, arrays: List[Array], *, exact: bool) -> Any:
        """Return what sums these arrays, one a device, over all devices and processes, in place: it has `run(priority)`."""

    def compress(self, params: Dict[str, Any]) -> None:
        """Send what is smaller than float32 gradients from now on."""

    def all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of every process, float32, shape (processes, n), of this process's, shape (n,). It waits."""

    def barrier(self) -> None:
        """Wait until every process has come here."""


class Group:
    """The processes of a job, joined by MXNet's `dist_sync` store or by Horovod, as the job was started.

    Every call is to be made by all of them, in the same order. Messages are never compressed.

    Parameters
    ----------
    process : Process

    Raises
    ------
    ProcessError
        The job has neither: it was not started by the launcher.
    MissingExtraError
        It was started for Horovod, which is not here.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.backend: Backend = Horovod(process) if _is_horovods() else DistSync(process)
        self._compression: Dict[str, Any] = {}

    def all_reduce(self, gradients: Sequence[Array], *, exact: bool = False) -> Any:
        """Return what sums these arrays, one a device, over all devices and processes, in place: it has `run(priority)`.

        `exact` is for what must not be sent in fewer bits.
        """
        return self.backend.all_reduce([gradient.as_nd_ndarray() for gradient in gradients], exact=exact)

    def compress(self, params: Dict[str, Any]) -> None:
        """Let float32 gradients be sent in fewer bits from now on; see the backends' own `compress`."""
        if self._compression and self._compression != _filled(params):
            raise ProcessError(
                f"Trainer: got compression_params {params}; expected {self._compression}, as before. One store serves all."
            )
        if not self._compression:
            self.backend.compress(params)
            self._compression = _filled(params)

    def all_gather_bytes(self, message: bytes) -> List[bytes]:
        """Return what every process says here, in the order of their ranks. It waits for all."""
        sizes = [int(size) for size in self.backend.all_gather(np.array([len(message)], np.float32))[:, 0]]
        if max(sizes) > _MOST_BYTES:
            raise ProcessError(f"processes: got a message of {max(sizes):,} bytes; expected at most {_MOST_BYTES:,}. Say less.")
        room = _LEAST_BYTES
        while room < max(sizes):
            room *= 2
        numbers = np.zeros(room, np.float32)
        numbers[: len(message)] = np.frombuffer(message, np.uint8)
        return [row[:size].astype(np.uint8).tobytes() for row, size in zip(self.backend.all_gather(numbers), sizes)]

    def all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of every process, float32, shape (processes, n), of this process's, shape (n,). It waits for all."""
        return self.backend.all_gather(numbers)

    def average(self, arrays: Sequence[Array], behind: Optional[Sequence[Tuple[float, float]]] = None) -> None:
        """Set arrays of floating point to their mean over the processes, in place. It waits.

        `behind` holds two weights of each array. The first ones count, unless those of all processes are 0; then the second ones
        do, and then all processes alike.
        """
        numbers = np.concatenate([array.asnumpy().astype(np.float32).reshape(-1) for array in arrays])
        weights = np.asarray([(1, 1)] * len(arrays) if behind is None else behind, np.float32).reshape(-1)
        rows = self.backend.all_gather(np.concatenate([numbers, weights])).astype(np.float64)
        pairs = rows[:, numbers.size :].reshape(len(rows), len(arrays), 2)
        begin = 0
        for at, array in enumerate(arrays):
            known = [pairs[:, at, kind] for kind in (0, 1) if pairs[:, at, kind].any()]
            shares = known[0] if known else np.ones(len(rows))
            values = rows[:, begin : begin + array.size]
            _write(array.as_nd_ndarray(), np.average(values[shares > 0], axis=0, weights=shares[shares > 0]))
            begin += array.size

    def broadcast(self, arrays: Sequence[Array]) -> None:
        """Set arrays of floating point to those of process 0, in place. It waits."""
        classic = [array.as_nd_ndarray() for array in arrays]
        numbers = np.concatenate([array.asnumpy().astype(np.float32).reshape(-1) for array in classic])
        together = mx.nd.array(np.zeros_like(numbers) if self.process.rank else numbers)
        self.backend.all_reduce([together], exact=True).run(0)  # with zeros, which is exact
        total, begin = together.asnumpy(), 0
        for array in classic:
            _write(array, total[begin : begin + array.size])
            begin += array.size

    def barrier(self) -> None:
        """Wait until every process has come here."""
        mx.nd.waitall()
        self.backend.barrier()


def _write(array: Array, numbers: np.ndarray) -> None:
    """Set an array by way of another: a weight may be in oneDNN's own layout, in which NumPy's numbers cannot be written."""
    mx.nd.array(numbers.reshape(array.shape), ctx=array.context, dtype=array.dtype).copyto(array)


def _filled(params: Dict[str, Any]) -> Dict[str, Any]:
    return {"threshold": 0.5, **params} if params["type"] == "2bit" else params


def _is_horovods() -> bool:
    """Return whether this process was started for Horovod, by our launcher or its own."""
    return "HOROVOD_RANK" in os.environ and os.environ.get("DMLC_ROLE") != "worker"


@functools.lru_cache(maxsize=None)
def _group() -> Optional[Group]:
    process = this_process()
    return Group(process) if process.num_processes > 1 else None


_apart: ContextVar[bool] = ContextVar("_apart", default=False)
_own: ContextVar[bool] = ContextVar("_own", default=False)


def group() -> Optional[Group]:
    """Return the processes that this one works with; None where it is the only one, or works `without_group`."""
    return None if _apart.get() else _group()


def any_process(yes: bool) -> bool:
    """Return whether any process says yes here; they wait for each other."""
    processes = group()
    return yes if processes is None else any(processes.all_gather_bytes(b"yes" if yes else b""))


def process_shard() -> Tuple[int, int]:
    """Return which part of every batch is this process's, and of how many: (0, 1) where all of it is."""
    process = this_process()
    return (0, 1) if _apart.get() or _own.get() else (process.rank, process.num_processes)


@contextmanager
def without_group() -> Iterator[None]:
    """Let this process work by itself in this block: on whole batches, and without a word to the others."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


@contextmanager
def own_batches(are_own: bool = True) -> Iterator[None]:
    """In this block, batches are this process's own, and not to be divided over the processes."""
    token = _own.set(are_own or _own.get())
    try:
        yield
    finally:
        _own.reset(token)
