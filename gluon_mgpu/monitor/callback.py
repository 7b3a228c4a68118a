"""Monitor: records what a training program's devices and host do while it runs."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Deque, Dict, List, Optional, Sequence, TextIO, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import path_of, real_number, short
from ..distributed.process import this_process
from ..errors import TrainerError
from ..loop.callbacks import Callback, FitState
from ..loop.epoch import DISPATCH, EpochProgress
from ..plots import figure, save
from ..runtime import threads
from ..runtime.engine import ON_WORKER, Marker
from ..runtime.environment import logger
from .diagnosis import diagnose
from .finding import Finding
from .host import Throttled, name_thread
from .leaks import live_arrays
from .memory import Kind, held_by
from .phases import PhaseTimer, refined
from .plot import plot_samples
from .reader import Reader
from .sample import LiveArrays, Sample, joined, to_json
from .stacks import StackSampler
from .summary import Summary, distinct, summarise

_STACK_S = 0.05  # between two samples of the training thread's stack, plus or minus half
_HELD_S = 5.0  # between two counts of all arrays, which visit every Python object
_RECENT = 10  # samples before a warning
_MOST = 2048  # samples kept; beyond this number, pairs are merged


class Monitor(Callback):
    """Monitors the devices, the host and the training thread from a separate thread, and warns of problems with their causes.

    As a callback of `fit`, it adds `load_<device>`, `memory_gib_<device>`, `host_gib` and `time_in_<place>` to each row of the
    history, and logs a summary at the end. In a loop by hand, use a `with` block: it monitors the thread that enters it. Call
    `count_arrays` after a step to record the arrays that Python holds on each device.

    It never waits in a step. It names the worker threads of CPU contexts (`mxnet cpu(0)`), so that `top -H` and
    `gluon-mgpu monitor --pid` can show them.

    Parameters
    ----------
    folder : str or pathlib.Path, optional
        Gets `monitor.jsonl` with one line per sample, the summary `monitor.json`, and the plot `monitor.png`. In a job, process
        1 writes `monitor-1.jsonl`, and so on.
    interval_s : float, seconds
        Between two samples.
    contexts : sequence of mxnet.Context
        The devices to monitor; the trainer's in `fit`. By default the CPU contexts used so far.

    Attributes
    ----------
    samples : list of Sample
        In long runs, neighbours are merged.
    findings : tuple of Finding
        The problems that it has warned of.

    Raises
    ------
    TrainerError
        `interval_s` is not a number of 0.1 or more, or `contexts` is not a list of contexts.
    MissingExtraError
        When it starts: psutil is not installed; for a folder, matplotlib.

    Examples
    --------
    >>> with Monitor(interval_s=0.1) as monitor:
    ...     for _ in range(30):
    ...         (mx.nd.ones((200, 200)) * 2).wait_to_read()
    >>> monitor.summary().host_peak_bytes > 0
    True
    """

    def __init__(
        self,
        folder: Union[None, str, Path] = None,
        *,
        interval_s: float = 1.0,
        contexts: Sequence[Context] = (),
    ) -> None:
        real_number("Monitor", "interval_s", interval_s, low=0.1, high=1e6, advice="1 second is usual.")
        if not isinstance(contexts, (list, tuple)) or not all(isinstance(context, Context) for context in contexts):
            raise TrainerError(
                f"Monitor: got contexts={short(contexts)}; expected a list of contexts. Pass [mx.cpu(0)], or leave it out."
            )
        self.folder = None if folder is None else path_of("Monitor", "folder", folder)
        self.interval_s = float(interval_s)
        self._requested = list(contexts)
        self._state: Optional[FitState] = None
        self._thread: Optional[threading.Thread] = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._laps = PhaseTimer()
        self._counted: Dict[str, LiveArrays] = {}
        self._held: Throttled[Dict[str, LiveArrays]] = Throttled(_find_held, every_s=_HELD_S)
        self.samples: List[Sample] = []
        self.findings: Tuple[Finding, ...] = ()

    def start(self) -> None:
        """Start to monitor the calling thread's program."""
        self.stop()
        if self.folder is not None:
            figure()  # raises before the first step if the extra is missing
            self.folder.mkdir(parents=True, exist_ok=True)
        self._contexts = self._requested or self._contexts_of_run()
        cpus = [context for context in self._contexts if context.device_type == "cpu"]
        self._markers = {} if threads.runs_serially() else {str(one): Marker(context=one, where=ON_WORKER) for one in cpus}
        self._reader = Reader(
            gpu_ids=[context.device_id for context in self._contexts if context.device_type == "gpu"],
            num_threads={str(context): threads.threads_of(context.device_id) for context in cpus},
            alone=str(cpus[0]) if len(cpus) == 1 else "",
        )
        self.samples, self.findings = [], ()
        self._epoch_samples: List[Sample] = []
        self._recent: Deque[Sample] = deque(maxlen=_RECENT)
        self._counted, self._held = {}, Throttled(_find_held, every_s=_HELD_S)
        self._stacks = StackSampler(threading.get_ident())
        self._laps = PhaseTimer()
        self._stepped = 0, time.monotonic()
        self._file: Optional[TextIO] = None
        if self.folder is not None:
            self._file = open(self._path("jsonl"), "w", encoding="utf-8", buffering=1)  # noqa: SIM115  closed by stop
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="Monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop monitoring, and write the summary and the plot."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        self._reader.close()
        if self._file is not None:
            self._file.close()
        if self.folder is not None and self.samples:
            summary = {"command": "gluon_mgpu.Monitor", **asdict(self.summary())}
            self._path("json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
            save(plot_samples(self.samples), self._path("png"))

    def count_arrays(self) -> None:
        """Count the arrays that Python holds on each device, for the next samples; most calls return at once.

        Call this in the thread that creates and drops the arrays, as `fit`'s reports do. An array that another thread is freeing
        is still among Python's objects, and reading it crashes MXNet.
        """
        self._counted = self._held() or {}

    def summary(self) -> Summary:
        """Return the run so far in a few numbers, with all warnings."""
        with self._lock:
            return summarise(self.samples, self.findings)

    def __enter__(self) -> Monitor:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def on_fit_begin(self, state: FitState) -> None:
        self._state = state
        self.start()

    def on_epoch_begin(self, state: FitState) -> None:
        with self._lock:
            self._epoch_samples = []

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        self.count_arrays()

    def on_phase(self, state: FitState, phase: str) -> None:
        self._laps.enter("dispatch" if phase in DISPATCH else phase)

    def on_epoch_end(self, state: FitState) -> None:
        with self._lock:
            samples = self._epoch_samples or self.samples[-1:]
        if samples:
            state.history.rows[-1].update(columns(summarise(samples)))

    def on_fit_end(self, state: FitState) -> None:
        self.stop()
        self._state = None
        if self.samples and not this_process().rank:
            logger.info("monitor: %s", self.summary())

    def _contexts_of_run(self) -> List[Context]:
        if self._state is not None:
            return self._state.trainer.devices
        return [mx.cpu(i) for i in threads.contexts_seen()] or [mx.cpu(0)]

    def _path(self, suffix: str) -> Path:
        rank = this_process().rank
        return (self.folder or Path()) / f"monitor{f'-{rank}' if rank else ''}.{suffix}"

    def _run(self) -> None:
        due = time.monotonic() + self.interval_s
        try:
            while not self._stop.wait(random.uniform(0.5, 1.5) * _STACK_S):  # random, to avoid sampling in step with the program
                self._stacks.sample()
                if time.monotonic() >= due:
                    self._take()
                    due = max(due + self.interval_s, time.monotonic())
            self._take()
        except Exception as error:  # an error of the monitor must not end the run
            logger.warning("Monitor: got %r while it read a sample; expected readable counters. Monitoring has stopped.", error)

    def _take(self) -> None:
        """Take a sample, write it, and warn of new problems in the last samples."""
        for context, marker in list(self._markers.items()):
            if marker.done:
                name_thread(marker.thread, context)
                del self._markers[context]
        spent, where = self._stacks.take()
        spent = refined(spent, self._laps.take())
        sample = self._with_held(self._reader.read(spent=spent, where=where, **self._place()))
        if self._file is not None:
            self._file.write(to_json(sample) + "\n")
        self._recent.append(sample)
        found = diagnose(self._recent) if len(self._recent) == _RECENT else []
        with self._lock:
            self.samples = _merged([*self.samples, sample])
            self._epoch_samples = _merged([*self._epoch_samples, sample])
            known = {(one.what, one.device, one.cause) for one in self.findings}
            self.findings = distinct([*self.findings, *found])
        for one in found:
            if (one.what, one.device, one.cause) not in known:
                logger.warning("monitor: %s: %s", one.what, one.message)

    def _place(self) -> Dict[str, Any]:
        if self._state is None:
            return {}
        step, now = self._state.step, time.monotonic()
        (before, at), self._stepped = self._stepped, (step, now)
        return {"step": step, "epoch": self._state.epoch, "steps_per_s": (step - before) / max(1e-3, now - at)}

    def _with_held(self, sample: Sample) -> Sample:
        """Return the sample with the arrays of each device, and without CPU contexts that are not monitored."""
        held, ours = self._counted, set(map(str, self._contexts))
        return replace(
            sample,
            cpus=tuple(replace(cpu, held=held.get(cpu.name)) for cpu in sample.cpus if cpu.name in ours),
            gpus=tuple(replace(gpu, held=held.get(gpu.name)) for gpu in sample.gpus),
        )


def columns(summary: Summary) -> Dict[str, float]:
    """Return a summary as columns of the history."""
    gib = 2**30
    return {
        **{f"load_{name}": load for name, load in summary.load.items()},
        **{f"memory_gib_{name}": num_bytes / gib for name, num_bytes in summary.peak_bytes.items()},
        "host_gib": summary.host_peak_bytes / gib,
        **{f"time_in_{place}": share for place, share in summary.spent.items()},
    }


def _merged(samples: List[Sample]) -> List[Sample]:
    """Return the samples; merge pairs of them if there are too many."""
    if len(samples) < _MOST:
        return samples
    return [joined(first, second) for first, second in zip(samples[::2], samples[1::2])] + samples[len(samples) // 2 * 2 :]


def _find_held() -> Dict[str, LiveArrays]:
    # MXNet's bfloat16 is a record type in NumPy, named by its size only
    counts = {(context, dtype.replace("void16", "bfloat16"), shape): n for (context, dtype, shape), n in live_arrays().items()}
    return held_by(counts, _num_bytes)


def _num_bytes(kind: Kind) -> int:
    _, dtype, shape = kind
    return int(np.prod(shape, dtype=np.int64)) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
