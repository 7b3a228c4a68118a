"""Memory over the steps of a run: whether it leaks, or only waits in the queue, and which arrays became more."""

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

_WARM_UP = 0.25  # of the samples: memory pools, caches and compiled graphs fill then
_MIN_SAMPLES, _MAX_SAMPLES = 8, 400
_DRAIN_EVERY = 4  # samples for each of which the devices are waited for
_Z95 = 1.96
_SHOWN = 5


@dataclass(frozen=True)
class MemoryReading:
    """Memory at a step: `num_bytes` are in use, `queued` steps are dispatched and have not run; 0 after waiting for all."""

    step: int
    num_bytes: int
    queued: int = 0


@dataclass(frozen=True)
class Slope:
    """The median slope between all pairs of points, and the bounds that hold the true one in 95 of 100 runs."""

    value: float
    low: float
    high: float


def theil_sen(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Return the slope of y over x: a few wild points do not change it.

    Parameters
    ----------
    x, y : sequence of float
        Of one length.

    Raises
    ------
    ValueError
        No two points have different x.

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
    """How memory behaves.

    Attributes
    ----------
    verdict : str
        `flat`; `queue`: it grows with the steps that are queued, and falls back; `leak`: it grows when nothing is queued, too;
        `unknown`: too few samples.
    slope : Slope, optional
        Bytes a step, of the samples after waiting.
    queued_bytes : float
        What a queued step holds, 0 where none was seen.
    max_queued : int
    num_samples : int
        After waiting, without those of the warm-up.
    """

    verdict: str
    slope: Optional[Slope] = None
    queued_bytes: float = 0.0
    max_queued: int = 0
    num_samples: int = 0

    def __str__(self) -> str:
        if self.slope is None:
            return f"unknown: {self.num_samples} samples, {_MIN_SAMPLES} are needed. Run more steps."
        bounds = f"95%: {self.slope.low:.0f} to {self.slope.high:.0f}"
        rate = f"{self.slope.value:.0f} bytes a step ({bounds}; {self.num_samples} samples)"
        if self.verdict == "queue":
            return (
                f"grows with the queue: {self.queued_bytes:.0f} bytes a queued step, up to {self.max_queued} queued, and "
                "falls back when they have run. Wait for the loss of some steps ago, as fit does (max_inflight)."
            )
        return f"leak of {rate}" if self.verdict == "leak" else f"flat: {rate}"


def judge(samples: Sequence[MemoryReading], *, tolerance_bytes: float = 256.0, max_inflight: int = 2) -> Growth:
    """Tell a leak from a queue that grows. The first quarter of the samples is left out.

    Parameters
    ----------
    samples : sequence of MemoryReading
        In the order of their steps, some of them after waiting for all devices.
    tolerance_bytes : float, bytes a step
        Growth that is none: bookkeeping. A leak's lower bound is above it; an array that is kept takes twice as much.
    max_inflight : int
        Steps that are queued on purpose.

    Examples
    --------
    >>> judge([Sample(step, 1000 * step) for step in range(20)]).verdict
    'leak'
    >>> judge([Sample(step, 1000 * (step % 5), queued=step % 5) for step in range(80)]).verdict
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
    """Return the memory of this process: what malloc has handed out, and shared memory.

    The resident size says less: malloc keeps what is freed. It is what is returned where glibc is older than 2.33.
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
    """Return how many of MXNet's arrays Python holds, of each context, dtype and shape.

    Examples
    --------
    >>> kept = mx.nd.ones((3, 1, 4, 1, 5))
    >>> live_arrays()["cpu(0)", "float32", (3, 1, 4, 1, 5)]
    1
    """
    return Counter((str(array.context), np.dtype(array.dtype).name, array.shape) for array in held_arrays())


def held_arrays() -> List[Array]:
    """Return MXNet's arrays that Python holds.

    Ask in the thread that makes and drops arrays: another could meet one whose memory is just being given back.
    """
    kinds = {mx.nd.NDArray, mx.np.ndarray, mx.nd.sparse.CSRNDArray, mx.nd.sparse.RowSparseNDArray}
    return [thing for thing in gc.get_objects() if type(thing) in kinds and getattr(thing, "handle", None)]


class LeakCheck(Callback):
    """Watches memory over the steps of a run, and says whether it leaks, how much a step, and which arrays became more.

    A callback of `fit`; in a loop by hand, call `step` after each step. It waits for the devices now and then, and collects
    garbage: for finding leaks, not for every run.

    Parameters
    ----------
    every : int
        Steps between two samples; more in a long run. In `fit` the reports, about two a second, come on top.
    contexts : sequence of mxnet.Context
        GPUs to watch beside the host; in `fit`, the trainer's. CPU contexts have the host's memory.
    tolerance_bytes, max_inflight
        See `judge`.

    Raises
    ------
    TrainerError
        `every` or `max_inflight` is no whole number of 1 or more, `tolerance_bytes` no number of 0 or more, or `contexts` no list
        of contexts.

    Examples
    --------
    >>> check, kept = LeakCheck(every=1), []
    >>> for _ in range(60):
    ...     kept.append(mx.nd.ones((1000,)))  # 4 kB
    ...     check.step(kept[-1:])
    >>> check.growth()["host"].verdict
    'leak'
    """

    def __init__(
        self, every: int = 5, *, contexts: Sequence[Context] = (), tolerance_bytes: float = 256.0, max_inflight: int = 2
    ) -> None:
        whole_number("LeakCheck", "every", every, advice="5 steps are usual.")
        real_number("LeakCheck", "tolerance_bytes", tolerance_bytes, advice="256 bytes a step are usual.")
        whole_number("LeakCheck", "max_inflight", max_inflight, advice="2 steps are what fit queues.")
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
            Its losses, one a shard: the step has run when they are there. They are not kept.

        Raises
        ------
        TrainerError
            They are no arrays.
        """
        if not isinstance(losses, (list, tuple)) or not losses or not all(map(is_device_array, losses)):
            found = repr(losses) if isinstance(losses, (list, tuple)) else type(losses).__name__
            raise TrainerError(f"LeakCheck.step: got {found}; expected the step's losses, one array a shard. Pass a list.")
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
        """Return how the memory of the `host`, and of each GPU, behaves."""
        options = {"tolerance_bytes": self._tolerance_bytes, "max_inflight": self._max_inflight}
        return {name: judge(samples, **options) for name, samples in self._samples.items()}  # type: ignore[arg-type]

    def report(self) -> str:
        """Return a line for the host and each GPU; where there is a leak, also which arrays became more, and what to do."""
        growth = self.growth() or {"host": Growth("unknown")}  # no sample yet
        lines = [f"{name}: {found}" for name, found in growth.items()]
        if any(found.verdict == "leak" for found in growth.values()):
            lines += self._culprits()
        return "\n".join(lines)

    def on_fit_begin(self, state: FitState) -> None:
        self._contexts = self._contexts or [context for context in state.trainer.contexts if context.device_type == "gpu"]
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
                "No arrays of MXNet's became more in Python: what grows is something else that Python holds, such as NumPy's, or "
                "is held by MXNet or another library. A loss that is added up inside of autograd.record() keeps every step's "
                "graph: add up outside, or read it with asscalar()."
            ]
        told = [f"  {more[kind]} more since step {step}: {kind[1]} {kind[2]} on {kind[0]}" for kind in worst]
        return [
            "Arrays that Python holds:",
            *told,
            "Something keeps them, such as a list of losses: keep numbers, read now and then.",
        ]
