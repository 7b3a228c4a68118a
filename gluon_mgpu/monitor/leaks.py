"""Memory over the steps of a run: whether it leaks or only grows with the queue, and which arrays increase in number."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import real_number, short, whole_number
from ..errors import TrainerError
from ..loop.callbacks import Callback, FitState
from ..loop.epoch import EpochProgress
from ..nested import Array, is_device_array
from ..runtime.engine import Marker
from ..runtime.environment import logger
from ..runtime.threads import read_lines

Kind = Tuple[str, str, Tuple[int, ...]]  # context, dtype, shape

_WARM_UP = 0.25  # of the samples, in which memory pools, caches and compiled graphs fill
_MIN_SAMPLES, _MAX_SAMPLES = 8, 400
_DRAIN_EVERY = 4  # samples between two that wait for the devices
_Z95 = 1.96
_SHOWN = 5


@dataclass(frozen=True)
class MemoryReading:
    """Memory at a step: `num_bytes` in use, and `queued` steps that are dispatched and have not run (0 after waiting for all)."""

    step: int
    num_bytes: int
    queued: int = 0


@dataclass(frozen=True)
class Slope:
    """The median slope between all pairs of points, and bounds that contain the true slope in 95 of 100 runs."""

    value: float
    low: float
    high: float


def theil_sen(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Return the slope of y over x; it is robust to a few outliers.

    Parameters
    ----------
    x, y : sequence of float
        Of equal length.

    Raises
    ------
    ValueError
        All points have the same x.

    Examples
    --------
    >>> theil_sen([0, 1, 2, 3, 4], [0, 2, 4, 600, 8])
    Slope(value=2.0, low=-592.0, high=596.0)

    Source: Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63, 1968.
    """
    points = list(zip(x, y))
    slopes = sorted((d - b) / (c - a) for i, (a, b) in enumerate(points) for c, d in points[i + 1 :] if a != c)
    if not slopes:
        raise ValueError(f"theil_sen: got x {list(x)[:_SHOWN]}; expected two values that differ. Measure at several steps.")
    num, spread = len(slopes), _Z95 * math.sqrt(len(points) * (len(points) - 1) * (2 * len(points) + 5) / 18)
    low, high = math.floor((num - spread) / 2), math.ceil((num + spread) / 2)
    return Slope(median(slopes), slopes[max(0, low)], slopes[min(num - 1, high)])


@dataclass(frozen=True)
class Growth:
    """The growth of memory over a run.

    Attributes
    ----------
    verdict : str
        `flat`; `queue`: grows with the queued steps, and falls back; `leak`: also grows when no step is queued; `unknown`: too
        few samples.
    slope : Slope, optional
        Bytes per step, from the samples after waiting.
    queued_bytes : float
        Bytes of a queued step; 0 if none was queued.
    max_queued : int
    num_samples : int
        Samples after waiting, without those of the warm-up.
    """

    verdict: str
    slope: Optional[Slope] = None
    queued_bytes: float = 0.0
    max_queued: int = 0
    num_samples: int = 0

    def __str__(self) -> str:
        if self.slope is None:
            return f"unknown: {self.num_samples} samples of at least {_MIN_SAMPLES}. Run more steps."
        bounds = f"95%: {self.slope.low:.0f} to {self.slope.high:.0f}"
        rate = f"{self.slope.value:.0f} bytes per step ({bounds}; {self.num_samples} samples)"
        if self.verdict == "queue":
            return (
                f"grows with the queue: {self.queued_bytes:.0f} bytes per queued step, up to {self.max_queued} queued, and "
                "falls back when they have run. Wait for the loss of an earlier step, as fit does (max_inflight)."
            )
        return f"leak of {rate}" if self.verdict == "leak" else f"flat: {rate}"


def judge(samples: Sequence[MemoryReading], *, tolerance_bytes: float = 256.0, max_inflight: int = 2) -> Growth:
    """Distinguish a leak from a growing queue. The first quarter of the samples is ignored.

    Parameters
    ----------
    samples : sequence of MemoryReading
        In the order of their steps, some of them after waiting for all devices.
    tolerance_bytes : float, bytes per step
        Growth that counts as bookkeeping. A leak's lower bound is above it; a kept array takes twice as much.
    max_inflight : int
        Steps that are queued on purpose.

    Examples
    --------
    >>> judge([MemoryReading(step, 1000 * step) for step in range(20)]).verdict
    'leak'
    >>> judge([MemoryReading(step, 1000 * (step % 5), queued=step % 5) for step in range(80)]).verdict
    'queue'
    """
    kept = list(samples)[math.ceil(_WARM_UP * len(samples)) :]
    drained = [sample for sample in kept if not sample.queued]
    if len(drained) < _MIN_SAMPLES or drained[0].step == drained[-1].step:
        return Growth("unknown", num_samples=len(drained))
    slope = theil_sen([sample.step for sample in drained], [sample.num_bytes for sample in drained])
    longest = max(sample.queued for sample in kept)
    queue = theil_sen([sample.queued for sample in kept], [sample.num_bytes for sample in kept]) if longest else Slope(0, 0, 0)
    verdict = "flat"
    if slope.low > tolerance_bytes:
        verdict = "leak"
    elif longest > max_inflight + 1 and queue.low > tolerance_bytes:
        verdict = "queue"
    return Growth(verdict, slope, max(0.0, queue.value), longest, len(drained))


def host_bytes() -> int:
    """Return the memory of this process: the bytes allocated by malloc, and shared memory.

    The resident size is less exact, because malloc keeps freed memory. It is returned if glibc is older than 2.33.
    """
    count = _malloc_counter()
    if count is None:
        return int(read_lines("/proc/self/statm")[0].split()[1]) * os.sysconf("SC_PAGE_SIZE")
    shared = [line.split()[1] for line in read_lines("/proc/self/status") if line.startswith("RssShmem:")]
    counted = count()
    return int(counted.uordblks + counted.hblkhd) + 1024 * sum(map(int, shared))


class _MallocInfo(ctypes.Structure):
    """The C `struct mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


@lru_cache(maxsize=None)
def _malloc_counter() -> Optional[Callable[[], Any]]:
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is not None:
        count.restype = _MallocInfo
    return count


def live_arrays() -> Dict[Kind, int]:
    """Return the number of MXNet's arrays that Python holds, by context, dtype and shape.

    Examples
    --------
    >>> kept = mx.nd.ones((3, 1, 4, 1, 5))
    >>> live_arrays()["cpu(0)", "float32", (3, 1, 4, 1, 5)]
    1
    """
    return Counter((str(array.context), np.dtype(array.dtype).name, array.shape) for array in held_arrays())


def held_arrays() -> List[Array]:
    """Return MXNet's arrays that Python holds.

    Call this in the thread that creates and drops arrays: another thread could get an array whose memory is being freed.
    """
    kinds = {mx.nd.NDArray, mx.np.ndarray, mx.nd.sparse.CSRNDArray, mx.nd.sparse.RowSparseNDArray}
    return [thing for thing in gc.get_objects() if type(thing) in kinds and getattr(thing, "handle", None)]


class LeakCheck(Callback):
    """Measures memory over the steps of a run: whether it leaks, how much per step, and which arrays increase in number.

    A callback of `fit`; in a loop by hand, call `step` after each step. It sometimes waits for the devices and collects garbage,
    so use it to find leaks, not in every run.

    Parameters
    ----------
    every : int
        Steps between two samples; more in a long run. `fit` adds samples at its reports, about two per second.
    contexts : sequence of mxnet.Context
        GPUs to measure in addition to the host; the trainer's in `fit`. CPU contexts use the host's memory.
    tolerance_bytes, max_inflight
        See `judge`.

    Raises
    ------
    TrainerError
        `every` or `max_inflight` is not a whole number of 1 or more, `tolerance_bytes` is not a number of 0 or more, or
        `contexts` is not a list of contexts.

    Examples
    --------
    >>> check, kept = LeakCheck(every=1), []
    >>> for _ in range(56):
    ...     kept.append(mx.nd.ones((100000,)))  # 400 kB
    ...     kept[-1].wait_to_read()
    ...     check.step(kept[-1:])
    >>> check.growth()["host"].verdict
    'leak'
    """

    def __init__(
        self, every: int = 5, *, contexts: Sequence[Context] = (), tolerance_bytes: float = 256.0, max_inflight: int = 2
    ) -> None:
        whole_number("LeakCheck", "every", every, advice="5 steps are usual.")
        real_number("LeakCheck", "tolerance_bytes", tolerance_bytes, advice="256 bytes per step are usual.")
        whole_number("LeakCheck", "max_inflight", max_inflight, advice="fit queues 2 steps.")
        if not isinstance(contexts, (list, tuple)) or not all(isinstance(context, Context) for context in contexts):
            raise TrainerError(
                f"LeakCheck: got contexts={short(contexts)}; expected a list of contexts. Pass [mx.gpu(0)], or leave it out."
            )
        self._contexts = [context for context in contexts if context.device_type == "gpu"]
        self._step = self._looks = self._before = 0
        self._every, self._tolerance_bytes, self._max_inflight = int(every), tolerance_bytes, max_inflight
        self._samples: Dict[str, List[MemoryReading]] = {}
        self._queue: Deque[Marker] = deque()
        self._first: Tuple[int, Dict[Kind, int]] = (0, {})

    def step(self, losses: Sequence[Array]) -> None:
        """Count a step that was dispatched.

        Parameters
        ----------
        losses : sequence of NDArray
            Its losses, one per shard. The step has run when they are computed. They are not kept.

        Raises
        ------
        TrainerError
            The losses are not arrays.
        """
        if not isinstance(losses, (list, tuple)) or not losses or not all(map(is_device_array, losses)):
            found = repr(losses) if isinstance(losses, (list, tuple)) else type(losses).__name__
            raise TrainerError(f"LeakCheck.step: got {found}; expected the step's losses, one array per shard. Pass a list.")
        self._step += 1
        self._queue.append(Marker(losses))
        if self._step % self._every:
            return
        self._looks += 1
        while self._queue and self._queue[0].done:
            self._queue.popleft()
        if self._queue:
            self._sample(len(self._queue))
        if self._looks % _DRAIN_EVERY == 0:
            self._drain()

    def growth(self) -> Dict[str, Growth]:
        """Return the growth of memory of the `host` and of each GPU."""
        options = {"tolerance_bytes": self._tolerance_bytes, "max_inflight": self._max_inflight}
        return {name: judge(samples, **options) for name, samples in self._samples.items()}  # type: ignore[arg-type]

    def report(self) -> str:
        """Return a line for the host and each GPU; after a leak, also the arrays that increase in number, and what to do."""
        growth = self.growth() or {"host": Growth("unknown")}  # no sample yet
        lines = [f"{name}: {found}" for name, found in growth.items()]
        if any(found.verdict == "leak" for found in growth.values()):
            lines += self._culprits()
        return "\n".join(lines)

    def on_fit_begin(self, state: FitState) -> None:
        self._contexts = self._contexts or [context for context in state.trainer.devices if context.device_type == "gpu"]
        self._begin()

    def on_epoch_begin(self, state: FitState) -> None:
        self._before = self._step

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        step = self._before + progress.num_batches
        if step >= self._step + self._every:
            self._step = step
            self._drain()

    def on_fit_end(self, state: FitState) -> None:
        leaks = any(found.verdict == "leak" for found in self.growth().values())
        (logger.warning if leaks else logger.info)("memory: %s", self.report())

    def _begin(self) -> None:
        self._step = self._looks = self._before = 0
        self._samples, self._first = {}, (0, {})
        self._queue.clear()

    def _drain(self) -> None:
        mx.nd.waitall()
        self._queue.clear()
        gc.collect()
        self._sample(0)
        if len(self._samples["host"]) < _MIN_SAMPLES:
            self._first = (self._step, live_arrays())

    def _sample(self, queued: int) -> None:
        used = {"host": host_bytes()}
        for context in self._contexts:
            free, total = mx.context.gpu_memory_info(context.device_id)
            used[str(context)] = total - free
        for name, number in used.items():
            self._samples.setdefault(name, []).append(MemoryReading(self._step, number, queued))
        if len(self._samples["host"]) > _MAX_SAMPLES:
            self._samples = {name: samples[::2] for name, samples in self._samples.items()}
            self._every *= 2

    def _culprits(self) -> List[str]:
        step, first = self._first
        more = {kind: number - first.get(kind, 0) for kind, number in live_arrays().items()}
        worst = sorted((kind for kind in more if more[kind] > 2), key=lambda kind: -more[kind])[:_SHOWN]
        if not worst:
            return [
                "The number of MXNet's arrays in Python does not increase. The memory belongs to other Python objects, such as "
                "NumPy arrays, to MXNet, or to another library. A loss that is summed inside autograd.record() keeps every "
                "step's graph: sum it outside, or read it with asscalar()."
            ]
        lines = [f"  {more[kind]} more since step {step}: {kind[1]} {kind[2]} on {kind[0]}" for kind in worst]
        return [
            "Arrays that Python holds:",
            *lines,
            "Something keeps them, such as a list of losses. Keep numbers instead, and read them only occasionally.",
        ]
