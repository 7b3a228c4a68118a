"""The same collectives through Horovod, where it is installed: a ring all-reduce, without servers."""

from __future__ import annotations

import importlib
import os
from typing import Any, List

import mxnet as mx
import numpy as np

from ..errors import MissingExtraError
from ..nested import Array
from .process import Process


class Horovod:
    """Connects processes through Horovod's all-reduce.

    ```
    process 0   devices ─► sum ─┐            ┌─► every device of process 0
                                ├─ ring sum ─┤   each sends to the next and receives from the one before: no servers
    process 1   devices ─► sum ─┘            └─► every device of process 1
    ```

    A ring adds an element in an order of ranks that depends on the element's place in the array. To keep this place fixed,
    Horovod must not fuse arrays that happen to be ready together (`HOROVOD_FUSION_THRESHOLD=0`). Gradients already come in
    buckets.

    Parameters
    ----------
    process : Process

    Raises
    ------
    MissingExtraError
        Horovod is not installed, or was built without MXNet.

    Source: Sergeev, Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018; Patarasuk, Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """

    def __init__(self, process: Process) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        self._process = process
        try:
            self._hvd: Any = importlib.import_module("horovod.mxnet")
        except ImportError as error:
            raise MissingExtraError(
                f"Trainer: got no Horovod that works with MXNet ({error}); expected horovod 0.28.1 built for this MXNet. Run "
                "sh scripts/build_horovod.sh, or launch with --backend dist_sync."
            ) from error
        self._hvd.init()
        self._on_gpu = bool(self._hvd.nccl_built())
        self._num_sums = 0

    def all_reduce(self, arrays: List[Array], *, any_order: bool = False) -> _RingSum:
        """Return an operation whose `run(priority)` sums the arrays, one per device, over devices and processes, in place."""
        self._num_sums += 1  # every process makes the same sums in the same order, so the names match
        return _RingSum(self._hvd, f"sum.{self._num_sums}", arrays, on_gpu=self._on_gpu)

    def all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """Gather float32 numbers, shape (n,), from every process; return them in rank order, shape (processes, n). Waits."""
        rows = np.zeros((self._process.num_processes, len(numbers)), np.float32)
        rows[self._process.rank] = numbers
        array = mx.nd.array(rows)  # all other rows are zero, so the sum is exact
        self._hvd.allreduce_(array, op=self._hvd.Sum, name=f"rows.{len(numbers)}")
        return array.asnumpy()

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        self.all_gather(np.zeros(1, np.float32))


DEFAULTS = {
    "HOROVOD_FUSION_THRESHOLD": "0",  # bytes
    # Milliseconds between two rounds in which processes agree on the arrays that all have ready, even while they compute
    # (scripts/benchmarks/RESULTS.md).
    "HOROVOD_CYCLE_TIME": "10",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",  # how late a process may be; Horovod's 30 can be too short while many import
}


class _RingSum:
    """Sums over the devices of this process on the first one, then over the processes; copies the sum to the other devices."""

    def __init__(self, hvd: Any, name: str, arrays: List[Array], *, on_gpu: bool) -> None:
        self._hvd, self._name, self._arrays = hvd, name, arrays
        self._leaves = arrays[0].context.device_type == "gpu" and not on_gpu

    def run(self, priority: int) -> None:
        """Queue the sum."""
        first, *others = self._arrays
        if others:
            mx.nd.add_n(first, *(other.as_in_context(first.context) for other in others), out=first)
        wire = first.as_in_context(mx.cpu()) if self._leaves else first
        self._hvd.allreduce_(wire, op=self._hvd.Sum, name=self._name, priority=priority)
        if wire is not first:
            wire.copyto(first)
        for other in others:
            first.copyto(other)
