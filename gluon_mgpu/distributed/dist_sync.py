"""MXNet's own store for several processes, `dist_sync`: all-reduce and all-gather through parameter servers."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Sequence, Union

import mxnet as mx
import numpy as np

from ..errors import ProcessError
from ..mxnet_internals.c_calls import barrier, leave_at_exit
from ..mxnet_internals.living import living
from ..mxnet_internals.versions import is_mxnet2
from ..nested import Array
from .process import Process


class DistSync:
    """Connects processes through MXNet's parameter servers.

    ```
    process 0   devices ─► sum ─┐                      ┌─► every device of every process
                                ├─► servers: one sum ──┤
    process 1   devices ─► sum ─┘                      └─►
    ```

    A server adds gradients in the order of their arrival. Two numbers have one sum, so two processes always get the same bits.
    The sum of three or more depends on the order: those processes exchange their parts, and each adds them in rank order.

    Parameters
    ----------
    process : Process
    """

    def __init__(self, process: Process) -> None:
        if any(store.type.startswith("dist") for store in living(mx.kvstore.KVStore)):
            raise ProcessError(
                "Trainer: got a program with a store of its own, mx.kv.create('dist_sync'); expected none: MXNet hangs with a "
                "second one. Leave it out: mgpu.distributed.this_process() has rank and num_processes, and gradients are summed."
            )
        self._process = process
        before = os.umask(0o077)  # only this user may connect to a Unix socket, which the launcher asks for on one machine
        try:
            self._store = mx.kv.create("dist_sync")
        finally:
            os.umask(before)
        leave_at_exit(self._store)
        self._num_keys = 0
        self._rows: Dict[int, _Rows] = {}  # for all_gather, by message size

    def all_reduce(self, arrays: List[Array], *, any_order: bool = False) -> Union[_ArrivalSum, _RankSum]:
        """Return an operation whose `run(priority)` sums the arrays, one per device, over devices and processes, in place.

        `any_order`: the sum does not depend on the order, as only one process has other numbers than zeros.

        Raises
        ------
        ProcessError
            The arrays are float64, and the servers are MXNet 2's.
        """
        if is_mxnet2() and arrays[0].dtype == np.float64:
            raise ProcessError(
                "Trainer: got gradients in float64 from several processes; expected float32, in which MXNet 2's servers add "
                "them. Call net.cast('float32')."
            )
        if any_order or self._process.num_processes == 2:
            return _ArrivalSum(self._store, self._new_key(arrays[0].shape, arrays[0].dtype), arrays)
        return _RankSum(self._new_rows(arrays[0].size, arrays[0].dtype), arrays)

    def all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """Gather float32 numbers, shape (n,), from every process; return them in rank order, shape (processes, n). Waits."""
        if len(numbers) not in self._rows:
            self._rows[len(numbers)] = self._new_rows(len(numbers), np.float32)
        return self._rows[len(numbers)].show(mx.nd.array(numbers.reshape(1, -1))).asnumpy()

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        barrier(self._store)

    def _new_rows(self, size: int, dtype: Any) -> _Rows:
        key = self._new_key((self._process.num_processes, size + 1), dtype, "row_sparse")
        return _Rows(self._store, key, self._process.rank, size, dtype)

    def _new_key(self, shape: Sequence[int], dtype: Any, stype: str = "default") -> int:
        key, self._num_keys = self._num_keys, self._num_keys + 1
        fill = mx.nd.zeros if stype == "default" else mx.nd.ones  # the store rejects an initial value with missing rows
        self._store.init(key, fill(shape, dtype=dtype).tostype(stype))
        return key


class _Rows:
    """Shows every process the numbers of all, as rows in rank order, without waiting for them.

    Each process sends only its own row of a sparse array, followed by a one: MXNet would drop a row of zeros.
    """

    def __init__(self, store: Any, key: int, rank: int, size: int, dtype: Any) -> None:
        self._store, self._key, self._dtype = store, key, dtype
        self.shape = (store.num_workers, size + 1)
        others = rank, store.num_workers - rank - 1
        self._before, self._behind = ([mx.nd.zeros((n, size + 1), dtype=dtype)] if n else [] for n in others)
        self._one = mx.nd.ones((1, 1), dtype=dtype)
        self._all = mx.nd.arange(store.num_workers, dtype="int64")

    def show(self, row: Array, priority: int = 0) -> Array:
        """Send this process's row, shape (1, size); return the rows of all processes, shape (processes, size)."""
        parts = [*self._before, mx.nd.concat(row, self._one, dim=1), *self._behind]
        mine = mx.nd.concat(*parts, dim=0).tostype("row_sparse")
        rows = mx.nd.sparse.zeros("row_sparse", self.shape, dtype=self._dtype)
        self._store.push(self._key, mine, priority=priority)
        self._store.row_sparse_pull(self._key, out=rows, row_ids=self._all, priority=priority)
        return mx.nd.slice_axis(rows.tostype("default"), axis=1, begin=0, end=self.shape[1] - 1)


class _ArrivalSum:
    """Sums over the devices of this process, then over the processes, with one message per process."""

    def __init__(self, store: Any, key: int, arrays: List[Array]) -> None:
        self._store, self._key, self._arrays = store, key, arrays

    def run(self, priority: int) -> None:
        """Queue the sum."""
        self._store.pushpull(self._key, self._arrays, out=self._arrays, priority=priority)  # one message each way


class _RankSum:
    """Sums over the devices of this process, sends the sum as its row, and adds the rows of all processes in rank order."""

    def __init__(self, rows: _Rows, arrays: List[Array]) -> None:
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
