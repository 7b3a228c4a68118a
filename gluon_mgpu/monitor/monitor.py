"""Monitor: records what a training program's devices and host do while it runs."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, TextIO, Union

from mxnet import Context

from ..checks import path_of, real_number, short
from ..distributed.process import this_process
from ..errors import TrainerError
from ..loop.callbacks import Callback, FitState
from ..mxnet_internals.versions import ContextType
from ..plots import figure, save
from ..runtime.environment import logger
from .figures import plot_samples
from .reader import Reader
from .sample import Sample, Summary, summarise, to_json

_MOST = 2048  # samples in memory; beyond this number, every second one is dropped
_GIB = 2**30


def gpus_among(operation: str, ctx: Sequence[Context]) -> List[Context]:
    """Return the GPUs among contexts; raise `TrainerError` unless this is a list of contexts."""
    if not isinstance(ctx, (list, tuple)) or not all(isinstance(context, ContextType) for context in ctx):
        raise TrainerError(f"{operation}: got ctx={short(ctx)}; expected a list of contexts. Pass [mx.gpu(0)], or leave it out.")
    return [context for context in ctx if context.device_type == "gpu"]


class Monitor(Callback):
    """Records the load and the memory of the GPUs and the host from a separate thread; it never waits in a step.

    As a callback of `fit`, it adds `load_<gpu>`, `memory_gib_<gpu>`, `host_gib` and `host_cores` to each row of the history, and
    logs a summary at the end. In your own loop, use a `with` block.

    Parameters
    ----------
    folder : str or pathlib.Path, optional
        Gets `monitor.jsonl` with one line per sample, the summary `monitor.json`, and the plot `monitor.png`. In a job, process
        1 writes `monitor-1.jsonl`, and so on.
    interval_s : float, seconds
        Between two samples.
    ctx : sequence of mxnet.Context
        The GPUs to monitor; the trainer's in `fit`. CPU contexts share the host's memory and cores.

    Attributes
    ----------
    samples : list of Sample
        In long runs, some are dropped; `monitor.jsonl` holds all.

    Raises
    ------
    TrainerError
        `interval_s` is not a number of 0.1 or more, or `ctx` is not a list of contexts.
    MissingExtraError
        When it starts: psutil is not installed; for a folder, matplotlib.

    Examples
    --------
    >>> with Monitor(interval_s=0.1) as monitor:
    ...     time.sleep(0.3)
    >>> monitor.summary().host_peak_bytes > 0
    True
    """

    def __init__(self, folder: Union[None, str, Path] = None, *, interval_s: float = 1.0, ctx: Sequence[Context] = ()) -> None:
        self.interval_s = real_number("Monitor", "interval_s", interval_s, low=0.1, high=1e6, advice="1 second is usual.")
        self.folder = None if folder is None else path_of("Monitor", "folder", folder)
        self.samples: List[Sample] = []
        self._gpus = gpus_among("Monitor", ctx)
        self._state: Optional[FitState] = None
        self._thread: Optional[threading.Thread] = None
        self._stop = threading.Event()
        self._epoch_began = 0.0

    def start(self) -> None:
        """Start to monitor."""
        self.stop()
        if self.folder is not None:
            figure()  # raises before the first step if the extra is missing
            self.folder.mkdir(parents=True, exist_ok=True)
        self._reader = Reader(gpu_ids=[gpu.device_id for gpu in self._gpus])
        self.samples = []
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
            summary = {"command": "gluon_mgpu.monitor.Monitor", **asdict(self.summary())}
            self._path("json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
            save(plot_samples(self.samples), self._path("png"))

    def summary(self) -> Summary:
        """Return the run so far in a few numbers."""
        return summarise(self.samples)

    def __enter__(self) -> Monitor:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def on_fit_begin(self, state: FitState) -> None:
        self._state = state
        self._gpus = self._gpus or gpus_among("Monitor", state.trainer.devices)
        self.start()

    def on_epoch_begin(self, state: FitState) -> None:
        self._epoch_began = time.time()

    def on_epoch_end(self, state: FitState) -> None:
        samples = [one for one in self.samples if one.unix_s >= self._epoch_began] or self.samples[-1:]
        if samples:
            state.history.rows[-1].update(_columns(summarise(samples)))

    def on_fit_end(self, state: FitState) -> None:
        self.stop()
        self._state = None
        if self.samples and not this_process().rank:
            logger.info("monitor: %s", self.summary())

    def _path(self, suffix: str) -> Path:
        rank = this_process().rank
        return (self.folder or Path()) / f"monitor{f'-{rank}' if rank else ''}.{suffix}"

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.interval_s):
                self._take()
            self._take()
        except Exception as error:  # an error of the monitor must not end the run
            logger.warning("Monitor: got %r while it read a sample; expected readable counters. Monitoring has stopped.", error)

    def _take(self) -> None:
        state = self._state
        sample = self._reader.read(step=state.step, epoch=state.epoch) if state is not None else self._reader.read()
        if self._file is not None:
            self._file.write(to_json(sample) + "\n")
        kept = self.samples[::2] if len(self.samples) >= _MOST else self.samples
        self.samples = [*kept, sample]  # a new list: other threads read the one before


def _columns(summary: Summary) -> Dict[str, float]:
    """Return a summary as columns of the history."""
    found = {f"load_{name}": load for name, load in summary.load.items()}
    found.update({f"memory_gib_{name}": num_bytes / _GIB for name, num_bytes in summary.peak_bytes.items()})
    return {**found, "host_gib": summary.host_peak_bytes / _GIB, "host_cores": summary.host_cores}
