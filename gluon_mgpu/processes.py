"""All processes of a job: what each is, sums over all of them, and what all of them say, by way of MXNet's own store."""

from __future__ import annotations

import functools
import os
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from .distributed.process import Process, this_process
from .errors import ProcessError
from .nested import Leaf

_LEAST_BYTES = 256  # of a message's key in the store: it doubles until the message fits
_MOST_BYTES = 2**24  # of one message; float32 counts as far exactly


class Group:
    """The processes of a job, joined by MXNet's `dist_sync` store. Every call is to be made by all of them, in the same order.

    ```
    process 0   devices ─► sum ─┐                      ┌─► every device of every process
                                ├─► servers: one sum ──┤
    process 1   devices ─► sum ─┘                      └─►
    ```

    The store adds what comes in the order in which it comes. Two numbers have one sum, so that two processes always get the
    same bits; three or more would not, and send their parts side by side, to be added in the order of their ranks by each. So do
    messages, which are never compressed.

    Parameters
    ----------
    process : Process

    Raises
    ------
    ProcessError
        The job has no store: it was not started by the launcher.
    """

    def __init__(self, process: Process) -> None:
        if os.environ.get("DMLC_ROLE") != "worker":
            raise ProcessError(
                f"Trainer: got process {process.rank} of {process.num_processes} without a store (DMLC_ROLE="
                f"{os.environ.get('DMLC_ROLE', '')!r}); need the launcher's scheduler and servers. Start it with "
                "gluon-mgpu launch."
            )
        self.process = process
        self._store = mx.kv.create("dist_sync")
        # A process that fails must not wait at its exit for the others, which wait for it.
        check_call(_LIB.MXKVStoreSetBarrierBeforeExit(self._store.handle, 0))
        self._compression: Dict[str, Any] = {}
        self._num_keys = 0
        self._rows: Dict[int, _Rows] = {}  # of messages, by their size
        self._bit_keys: Dict[int, int] = {}  # of the same in bits

    def sum_of(self, gradients: Sequence[Leaf]) -> Any:
        """Return what sums these arrays, one a device, over all devices and processes, in place: it has `run(priority)`."""
        classic = [gradient.as_nd_ndarray() for gradient in gradients]
        if self._compression and classic[0].dtype != np.float32:
            raise ProcessError(
                f"Trainer: got a gradient of {np.dtype(classic[0].dtype)} and compression_params; need float32. Leave one "
                "of them out."
            )
        if self.process.num_processes == 2 or self._compression:
            return _ArrivalSum(self._store, self._new_key(classic[0].shape, classic[0].dtype), classic)
        return _RankSum(self._new_rows(classic[0].size, classic[0].dtype), classic)

    def compress(self, params: Dict[str, Any]) -> None:
        """Let float32 gradients be sent in 2 bits from now on: -threshold, 0 or threshold, what is left over going with the next.

        Source: `mxnet.kvstore.KVStore.set_gradient_compression`; Strom, "Scalable distributed DNN training using commodity GPU
        cloud computing", 2015.
        """
        if self._compression and self._compression != {"threshold": 0.5, **params}:
            raise ProcessError(
                f"Trainer: got compression_params {params}; need {self._compression}, as before. One store serves all."
            )
        if not self._compression:
            self._store.set_gradient_compression(params)
            self._compression = {"threshold": 0.5, **params}

    def say(self, message: bytes) -> List[bytes]:
        """Return what every process says here, in the order of their ranks. It waits for all."""
        sizes = [int(size) for size in self._exchange(np.array([len(message)], np.float32))[:, 0]]
        if max(sizes) > _MOST_BYTES:
            raise ProcessError(f"processes: got a message of {max(sizes):,} bytes; need at most {_MOST_BYTES:,}. Say less.")
        room = _LEAST_BYTES
        while room < max(sizes):
            room *= 2
        numbers = np.zeros(room, np.float32)
        numbers[: len(message)] = np.frombuffer(message, np.uint8)
        return [row[:size].astype(np.uint8).tobytes() for row, size in zip(self._exchange(numbers), sizes)]

    def average(self, arrays: Sequence[Leaf]) -> None:
        """Set arrays of floating point to their mean over the processes, in place. It waits."""
        numbers = np.concatenate([array.asnumpy().astype(np.float32).reshape(-1) for array in arrays])
        means = self._exchange(numbers).mean(axis=0, dtype=np.float64)
        begin = 0
        for array in arrays:
            _write(array.as_nd_ndarray(), means[begin : begin + array.size])
            begin += array.size

    def share_first(self, arrays: Sequence[Leaf]) -> None:
        """Set arrays of floating point to those of process 0, in place. It waits."""
        classic = [array.as_nd_ndarray() for array in arrays]
        numbers = np.concatenate([array.asnumpy().astype(np.float32).reshape(-1) for array in classic])
        if self.process.rank:
            numbers[:] = 0
        total = self._exchange(numbers).sum(axis=0)  # with zeros, which is exact
        begin = 0
        for array in classic:
            _write(array, total[begin : begin + array.size])
            begin += array.size

    def wait(self) -> None:
        """Wait until every process has come here."""
        mx.nd.waitall()
        self._store._barrier()

    def _new_rows(self, size: int, dtype: Any) -> _Rows:
        key = self._new_key((self.process.num_processes, size + 1), dtype, "row_sparse")
        return _Rows(self._store, key, self.process.rank, size, dtype)

    def _new_key(self, shape: Sequence[int], dtype: Any, stype: str = "default") -> int:
        key, self._num_keys = self._num_keys, self._num_keys + 1
        # The store refuses to begin with rows that are not there; and what it compresses must leave nothing for the next time.
        fill = mx.nd.zeros if stype == "default" else mx.nd.ones
        self._store.init(key, fill(shape, dtype=dtype).tostype(stype))
        return key

    def _exchange(self, numbers: np.ndarray) -> np.ndarray:
        """Return a row of numbers, float32, of every process."""
        if self._compression:
            return self._exchange_bits(numbers)
        if len(numbers) not in self._rows:
            self._rows[len(numbers)] = self._new_rows(len(numbers), np.float32)
        found: np.ndarray = self._rows[len(numbers)].show(mx.nd.array(numbers.reshape(1, -1))).asnumpy()
        return found

    def _exchange_bits(self, numbers: np.ndarray) -> np.ndarray:
        """The same where the store sends -threshold, 0 and threshold only: each bit is one of these, beside the others' zeros."""
        threshold = self._compression["threshold"]
        rows = np.zeros((self.process.num_processes, 32 * len(numbers)), np.float32)
        rows[self.process.rank] = np.unpackbits(numbers.astype(np.float32).view(np.uint8)) * np.float32(threshold)
        if rows.shape[1] not in self._bit_keys:
            self._bit_keys[rows.shape[1]] = self._new_key(rows.shape, np.float32)
        array = mx.nd.array(rows)
        self._store.push(self._bit_keys[rows.shape[1]], array)
        self._store.pull(self._bit_keys[rows.shape[1]], out=array)
        bits: np.ndarray = np.packbits(array.asnumpy() > threshold / 2, axis=1)
        return bits.view(np.float32)


def _write(array: Leaf, numbers: np.ndarray) -> None:
    """Set an array by way of another: a weight may be in oneDNN's own layout, in which NumPy's numbers cannot be written."""
    mx.nd.array(numbers.reshape(array.shape), ctx=array.context, dtype=array.dtype).copyto(array)


class _Rows:
    """Lets every process see the numbers of all, as rows in the order of their ranks, without waiting for them.

    Each sends its own row only, of a sparse array; and a one behind it, as a row of zeros would not be there.
    """

    def __init__(self, store: Any, key: int, rank: int, size: int, dtype: Any) -> None:
        self._store, self._key, self._dtype = store, key, dtype
        self.shape = (store.num_workers, size + 1)
        others = rank, store.num_workers - rank - 1
        self._before, self._behind = ([mx.nd.zeros((n, size + 1), dtype=dtype)] if n else [] for n in others)
        self._one = mx.nd.ones((1, 1), dtype=dtype)
        self._all = mx.nd.arange(store.num_workers, dtype="int64")

    def show(self, row: Leaf, priority: int = 0) -> Leaf:
        """Return the rows of all, shape (processes, size), of this process's, shape (1, size)."""
        parts = [*self._before, mx.nd.concat(row, self._one, dim=1), *self._behind]
        mine = mx.nd.concat(*parts, dim=0).tostype("row_sparse")
        rows = mx.nd.sparse.zeros("row_sparse", self.shape, dtype=self._dtype)
        self._store.push(self._key, mine, priority=priority)
        self._store.row_sparse_pull(self._key, out=rows, row_ids=self._all, priority=priority)
        return mx.nd.slice_axis(rows.tostype("default"), axis=1, begin=0, end=self.shape[1] - 1)


class _ArrivalSum:
    """Sums over the devices here and then over the processes, in one message of each."""

    def __init__(self, store: Any, key: int, arrays: List[Leaf]) -> None:
        self._store, self._key, self._arrays = store, key, arrays

    def run(self, priority: int) -> None:
        """Queue the sum."""
        self._store.push(self._key, self._arrays, priority=priority)
        self._store.pull(self._key, out=self._arrays, priority=priority)


class _RankSum:
    """Sums over the devices here, sends the sum as a row of its own, and adds the rows up in their order."""

    def __init__(self, rows: _Rows, arrays: List[Leaf]) -> None:
        self._rows, self._arrays = rows, arrays

    def run(self, priority: int) -> None:
        """Queue the sum."""
        first = self._arrays[0]
        here = mx.nd.reshape(first.as_in_context(mx.cpu()), shape=(1, -1))
        for other in self._arrays[1:]:
            here = here + mx.nd.reshape(other.as_in_context(mx.cpu()), shape=(1, -1))
        total = mx.nd.reshape(mx.nd.sum(self._rows.show(here, priority), axis=0), shape=first.shape)
        for array in self._arrays:
            total.copyto(array)


@functools.lru_cache(maxsize=None)
def _group() -> Optional[Group]:
    process = this_process()
    return Group(process) if process.num_processes > 1 else None


_apart: ContextVar[bool] = ContextVar("_apart", default=False)
_own: ContextVar[bool] = ContextVar("_own", default=False)


def group() -> Optional[Group]:
    """Return the processes that this one works with; None where it is the only one, or works `apart`."""
    return None if _apart.get() else _group()


def any_says(yes: bool) -> bool:
    """Return whether any process says yes here; they wait for each other."""
    processes = group()
    return yes if processes is None else any(processes.say(b"yes" if yes else b""))


def share() -> Tuple[int, int]:
    """Return which part of every batch is this process's, and of how many: (0, 1) where all of it is."""
    process = this_process()
    return (0, 1) if _apart.get() or _own.get() else (process.rank, process.num_processes)


@contextmanager
def apart() -> Iterator[None]:
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
