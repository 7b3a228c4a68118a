"""Trace: where the time of some steps goes, as a file for Perfetto or Chrome."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Dict, List, Optional, Tuple, Union

import mxnet as mx

from ..checkpoint.replace_folder import explained, make
from ..checks import path_of, whole_number
from ..distributed.process import this_process
from ..errors import TrainerError
from ..runtime.environment import logger
from ..runtime.new_files import new_file
from ..runtime.profiler import Operation, Recording, recordable_devices
from .callbacks import Callback, FitState
from .timeline import HOST, Timeline

_LEAST = 0.0005  # shares below are not printed
_SETTLE = 5  # steps from the start of the profiler, which waits for the devices, to the first step of the trace


@dataclass(frozen=True)
class TraceSummary:
    """The time of the traced steps by what it was spent on; `str` makes a table of it.

    Attributes
    ----------
    path : pathlib.Path
        The trace.
    steps : int
    seconds : float
        Of one step.
    shares : dict of lane -> dict of name -> float
        Of the time of the steps: the host's phases, and what each device ran, or what the host did while it was idle.
    """

    path: Path
    steps: int
    seconds: float
    shares: Dict[str, Dict[str, float]]

    def __str__(self) -> str:
        lines = [f"{self.steps} steps of {1000 * self.seconds:.1f} ms in {self.path}"]
        for lane, names in self.shares.items():
            lines.append(f"{lane}:")
            for name, share in sorted(names.items(), key=lambda item: -item[1]):
                if share >= _LEAST:
                    lines.append(f"  {name:30}  {1000 * share * self.seconds:8.2f} ms  {share:6.1%}")
        return "\n".join(lines)


class Trace(Callback):
    """Writes a trace of some steps of `fit`: what the host did, what each device ran, and when it was idle.

    The file is in Chrome's trace format: open it at https://ui.perfetto.dev or chrome://tracing. It has a lane for the phases of
    the host (data, split, dispatch, wait, callbacks), one for the operations of each device, and one for each device's sums of
    gradients and updates. Idle time of a device has a name, such as `idle: host in data`. A `Pipeline` has another lane for each
    device, with a span for each task: `F0.3` is the forward pass of stage 0 for micro-batch 3. `plot_schedule` draws them.

    The operations come from MXNet's profiler, which runs for a few steps before the trace and for its steps. Operators that
    MXNet runs as one are one operation there; with MXNET_EXEC_BULK_EXEC_TRAIN=0 and without `hybridize`, each is its own.

    Parameters
    ----------
    path : str or pathlib.Path
        The file. In a job, process 1 writes `trace-1.json`, and so on.
    warm_up : int
        Steps before the trace: the first ones compile the network and allocate memory.
    steps : int

    Attributes
    ----------
    summary : TraceSummary, optional
        Once the trace is written.

    Raises
    ------
    TrainerError
        The name of the file does not end in `.json`. Or, when `fit` begins: MXNet's profiler cannot record one of the CPU
        contexts, as this machine has too few cores.
    SaveError
        The file cannot be written.
    """

    def __init__(self, path: Union[str, Path], *, warm_up: int = 10, steps: int = 10) -> None:
        self.path = path_of("Trace", "path", path)
        if self.path.suffix != ".json":
            raise TrainerError(f"Trace: got path {str(self.path)!r}; expected a name that ends in .json. Pass 'trace.json'.")
        advice = "10 steps after 10 are usual."
        self.warm_up = whole_number("Trace", "warm_up", warm_up, advice=advice)
        self.num_steps = whole_number("Trace", "steps", steps, advice=advice)
        self.summary: Optional[TraceSummary] = None
        self._recording: Optional[Recording] = None

    def on_fit_begin(self, state: FitState) -> None:
        self.summary = None
        self._batches, self._phase = 0, ""
        self._phases: List[Tuple[float, str]] = []  # since the trace began
        self._ends: List[float] = []  # of the warm-up, and of each traced step
        self._devices = [str(context) for context in state.trainer.devices]
        missing = [device for device in self._devices if device not in recordable_devices()]
        if missing:
            raise TrainerError(
                f"Trace: got {', '.join(missing)}; expected one of {', '.join(recordable_devices())}, the devices that MXNet's "
                "profiler can record on a machine with this number of cores. Trace a run on fewer devices."
            )
        with explained("Trace", self.path):
            make(self.path.parent)
            TemporaryFile(dir=self.path.parent).close()  # raises now, not after the traced steps

    def on_phase(self, state: FitState, phase: str) -> None:
        self._phase = phase
        if self._ends and self._recording is not None:
            self._phases.append((time.time(), phase))

    def on_batch_end(self, state: FitState) -> None:
        self._batches += 1
        if self._batches == max(1, self.warm_up - _SETTLE):
            mx.nd.waitall()  # an operation that is queued now would be missing
            self._recording = Recording()
        if self._recording is None or self._batches < self.warm_up:
            return
        self._ends.append(time.time())
        if len(self._ends) == 1:
            self._phases.append((self._ends[0], self._phase))
        elif len(self._ends) > self.num_steps:
            self._write(state, self._recording)

    def on_fit_end(self, state: FitState) -> None:
        if self._recording is not None and len(self._ends) > 1:  # the run was shorter
            self._write(state, self._recording)
        elif self._recording is not None:
            self._recording.stop()
            self._recording = None
        if self.summary is None and state.error is None:
            logger.warning(
                "Trace: got a run of %d steps; expected more than the %d of the warm-up. Nothing was written: pass "
                "Trace(path, warm_up=1), or train longer.",
                self._batches,
                self.warm_up,
            )

    def _write(self, state: FitState, recording: Recording) -> None:
        """Write what was recorded, and stop recording."""
        self._recording = None
        first = state.step - self._batches + self.warm_up + 1
        steps = [Operation(HOST, f"step {first + i}", *ends) for i, ends in enumerate(zip(self._ends, self._ends[1:]))]
        timeline = Timeline(steps, self._phases, recording.stop(), self._devices)
        seconds = (timeline.end - timeline.begin) / len(steps)
        rank = this_process().rank
        path = self.path.with_name(f"{self.path.stem}-{rank}{self.path.suffix}") if rank else self.path
        self.summary = TraceSummary(path, len(steps), seconds, timeline.shares())
        found = {
            "traceEvents": timeline.events(),
            "displayTimeUnit": "ms",
            "otherData": {"steps": len(steps), "seconds_per_step": seconds, "shares": self.summary.shares},
        }
        with explained("Trace", path), new_file(path) as new:
            new.write_text(json.dumps(found), encoding="utf-8")
        logger.info("trace: %s", self.summary)
