"""LeakCheck: the growth of resident memory and of the number of live arrays over the steps of a run."""

from __future__ import annotations

import gc
import math
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import real_number, whole_number
from ..loop.batch_loop import EpochProgress
from ..loop.callbacks import Callback, FitState
from ..runtime.environment import logger, require
from .monitor import gpus_among

Kind = Tuple[str, str, Tuple[int, ...]]  # context, dtype, shape

_ARRAYS = "live arrays"
_WARM_UP = 0.25  # of the samples, in which memory pools, caches and compiled graphs fill
_MIN_SAMPLES, _MAX_SAMPLES = 8, 400
_Z95 = 1.96
_SHOWN = 5
_LEAST_ARRAYS = 0.5  # more live arrays per step


@dataclass(frozen=True)
class Slope:
    """The median slope between all pairs of points, and bounds that contain the true slope in 95 of 100 runs."""

    value: float
    low: float
    high: float


def theil_sen(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Return the slope of y over x, which is robust to a few outliers; x holds at least two values that differ.

    Examples
    --------
    >>> theil_sen([0, 1, 2, 3, 4], [0, 2, 4, 600, 8])
    Slope(value=2.0, low=-592.0, high=596.0)

    Source: Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63, 1968.
    """
    points = list(zip(x, y))
    slopes = sorted((d - b) / (c - a) for i, (a, b) in enumerate(points) for c, d in points[i + 1 :] if a != c)
    num, spread = len(slopes), _Z95 * math.sqrt(len(points) * (len(points) - 1) * (2 * len(points) + 5) / 18)
    low, high = math.floor((num - spread) / 2), math.ceil((num + spread) / 2)
    return Slope(median(slopes), slopes[max(0, low)], slopes[min(num - 1, high)])


def live_arrays() -> Dict[Kind, int]:
    """Return the number of MXNet's arrays that Python holds, by context, dtype and shape.

    Call this in the thread that creates and drops arrays: another thread could get an array whose memory is being freed.

    Examples
    --------
    >>> kept = mx.nd.ones((3, 1, 4, 1, 5))
    >>> live_arrays()["cpu(0)", "float32", (3, 1, 4, 1, 5)]
    1
    """
    kinds = {mx.nd.NDArray, mx.np.ndarray, mx.nd.sparse.CSRNDArray, mx.nd.sparse.RowSparseNDArray}
    held = (thing for thing in gc.get_objects() if type(thing) in kinds and getattr(thing, "handle", None))
    made = (array for array in held if array.stype != "undefined")  # such an array has no context yet
    return Counter((str(array.context), np.dtype(array.dtype).name, array.shape) for array in made)


class LeakCheck(Callback):
    """Measures over the steps of a run how fast resident memory, the memory of GPUs and the number of live arrays grow.

    A callback of `fit`; in your own loop, call `step` after each step. It sometimes waits for the devices and collects garbage,
    so use it to find leaks, not in every run.

    Parameters
    ----------
    every : int
        Steps between two samples; more in a long run. `fit` takes samples at its reports, about two per second.
    ctx : sequence of mxnet.Context
        GPUs to measure in addition to the host; the trainer's in `fit`. CPU contexts use the host's memory.
    tolerance_bytes : float, bytes per step
        Growth that counts as bookkeeping.

    Raises
    ------
    TrainerError
        `every` is not a whole number of 1 or more, `tolerance_bytes` is not a number of 0 or more, or `ctx` is not a list of
        contexts.
    MissingExtraError
        When it takes its first sample: psutil is not installed.

    Examples
    --------
    >>> check, kept = LeakCheck(every=1), []
    >>> for _ in range(12):
    ...     kept.append(mx.nd.ones((100000,)))  # 400 kB
    ...     check.step()  # doctest: +SKIP
    >>> check.leaks()["live arrays"].value  # doctest: +SKIP
    1.0
    """

    def __init__(self, every: int = 20, *, ctx: Sequence[Context] = (), tolerance_bytes: float = 256.0) -> None:
        self._every = whole_number("LeakCheck", "every", every, advice="20 steps are usual.")
        self._tolerance = real_number("LeakCheck", "tolerance_bytes", tolerance_bytes, advice="256 bytes per step are usual.")
        self._gpus = gpus_among("LeakCheck", ctx)
        self._process: Any = None
        self._clear()

    def step(self) -> None:
        """Count a step that was dispatched; every so many steps, wait for the devices and measure."""
        self._step += 1
        if self._step >= self._due:
            self._measure()

    def slopes(self) -> Dict[str, Slope]:
        """Return the growth per step of the `host` and each GPU in bytes, and of the number of `live arrays`; {} if too early."""
        begin = math.ceil(_WARM_UP * len(self._steps))
        steps = self._steps[begin:]
        if len(steps) < _MIN_SAMPLES or steps[0] == steps[-1]:
            return {}
        return {name: theil_sen(steps, values[begin:]) for name, values in self._samples.items()}

    def leaks(self) -> Dict[str, Slope]:
        """Return the slopes that mean a leak: their lower bound is above `tolerance_bytes`, or half an array per step."""
        limits = {_ARRAYS: _LEAST_ARRAYS}
        return {name: slope for name, slope in self.slopes().items() if slope.low > limits.get(name, self._tolerance)}

    def report(self) -> str:
        """Return a line for the host, each GPU and the live arrays; after a leak, also which arrays increase in number."""
        slopes, leaks = self.slopes(), self.leaks()
        if not slopes:
            return f"unknown: {len(self._steps)} samples, too few. Run more steps, or pass a smaller every."
        lines = []
        for name, slope in slopes.items():
            kind, unit, digits = "leak of" if name in leaks else "flat:", "bytes", 0
            if name == _ARRAYS:
                unit, digits = "arrays", 2
            bounds = f"95%: {slope.low:.{digits}f} to {slope.high:.{digits}f}; {len(self._steps)} samples"
            lines.append(f"{name}: {kind} {slope.value:.{digits}f} {unit} per step ({bounds})")
        return "\n".join([*lines, *(self._increased() if leaks else ())])

    def on_fit_begin(self, state: FitState) -> None:
        self._gpus = self._gpus or gpus_among("LeakCheck", state.trainer.devices)
        self._clear()

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        self._step = state.step - 1
        self.step()

    def on_fit_end(self, state: FitState) -> None:
        (logger.warning if self.leaks() else logger.info)("memory: %s", self.report())

    def _clear(self) -> None:
        self._step, self._due = 0, self._every
        self._steps: List[int] = []
        self._samples: Dict[str, List[float]] = {}
        self._first: Optional[Dict[Kind, int]] = None

    def _measure(self) -> None:
        if self._process is None:
            self._process = require("psutil", "monitor", "LeakCheck").Process()
        self._due = self._step + self._every
        mx.nd.waitall()
        gc.collect()
        arrays = live_arrays()
        used = {"host": float(self._process.memory_info().rss), _ARRAYS: float(sum(arrays.values()))}
        for context in self._gpus:
            free, total = mx.context.gpu_memory_info(context.device_id)
            used[str(context)] = total - free
        self._steps.append(self._step)
        for name, value in used.items():
            self._samples.setdefault(name, []).append(value)
        if len(self._steps) <= _MIN_SAMPLES:
            self._first = arrays
        if len(self._steps) > _MAX_SAMPLES:
            self._steps = self._steps[::2]
            self._samples = {name: values[::2] for name, values in self._samples.items()}
            self._every *= 2

    def _increased(self) -> List[str]:
        first = self._first or {}
        more = {kind: number - first.get(kind, 0) for kind, number in live_arrays().items()}
        worst = sorted((kind for kind in more if more[kind] > 2), key=lambda kind: -more[kind])[:_SHOWN]
        lines = [f"  {more[kind]} more of {kind[1]} {kind[2]} on {kind[0]}" for kind in worst]
        if lines:
            return ["Something keeps arrays, such as a list of losses. Keep numbers, and read them only occasionally:", *lines]
        return ["The number of MXNet's arrays does not increase: other objects, or a graph that autograd.record() keeps, grow."]
