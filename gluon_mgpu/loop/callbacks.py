"""Callbacks of fit(): what they get, the progress, early stopping, the history."""

from __future__ import annotations

import math
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple, Union

from mxnet import gluon

from ..checkpoint.resume import Row
from ..checkpoint.snapshot import CheckpointData, ProgressRecord
from ..checks import instance, is_number, one_of, path_of, real_number, short
from ..distributed.process import this_process
from ..errors import TrainerError
from ..nested import Array
from ..plots import figure
from ..runtime.units import format_column
from ..trainer.trainer import Trainer
from .batch_loop import EpochProgress
from .history import History
from .metrics import direction_of


@dataclass
class FitState:
    """The state of fit() that callbacks receive.

    Attributes
    ----------
    net : gluon.Block
    trainer : Trainer
    epochs : int
        The number of epochs to train.
    num_batches : int
        Batches of an epoch; 0 if the data iterator has no length.
    epoch : int
        The current epoch, from 1.
    history : History
        A row is added before `on_epoch_end`.
    stop : str
        The reason to stop after this epoch; a callback sets it.
    error : BaseException, optional
        The error that ended the run, in `on_fit_end`.
    interrupted : bool
        Whether a signal stopped the run between two batches, so that all devices hold the same weights.
    tests : bool
        Whether there is a test set.
    batches, step : int
        Batches trained on in this epoch, and since the run began.
    batch_size : int
        Examples of the latest batch, over all devices; of this process alone with `sharded_data`.
    pending : int
        Batches since the last update; see `accumulate_grad_batches`.
    resumed : CheckpointData, optional
        The content of the checkpoint that the run resumed from. Its rows are in the history.
    where : callable () -> (dict, dict of NDArray)
        Returns what a checkpoint needs to resume here. It does not wait.
    """

    net: gluon.Block
    trainer: Trainer
    epochs: int
    num_batches: int
    epoch: int = 0
    history: History = field(default_factory=History)
    stop: str = ""
    error: Optional[BaseException] = None
    interrupted: bool = False
    tests: bool = False
    batches: int = 0
    step: int = 0
    batch_size: int = 0
    pending: int = 0
    resumed: Optional[CheckpointData] = None
    where: Callable[[], Tuple[ProgressRecord, Dict[str, Array]]] = lambda: ({}, {})


class Callback:
    """Base class, whose methods do nothing: override those you need. `fit` calls callbacks in their order."""

    def on_fit_begin(self, state: FitState) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, state: FitState) -> None:
        """Before the first batch of an epoch."""

    def on_batch_end(self, state: FitState) -> None:
        """After each batch of training has been queued on the devices. Do not wait for it here."""

    def on_phase(self, state: FitState, phase: str) -> None:
        """Several times per batch, when a phase begins: see `EpochOptions`. Keep it as short as possible."""

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        """Every half second or 256 batches while training, when the sums have been read."""

    def on_test_begin(self, state: FitState) -> None:
        """Before an evaluation, after an epoch or within it."""

    def on_test_report(self, state: FitState, progress: EpochProgress) -> None:
        """About twice a second while evaluating, when the sums have been read."""

    def on_test_end(self, state: FitState) -> None:
        """After an evaluation, also if an error or a signal ends it."""

    def on_epoch_end(self, state: FitState) -> None:
        """After training and evaluation of an epoch; its row is the last one of `state.history`."""

    def state_arrays(self, state: FitState) -> Dict[str, Array]:
        """Return the arrays that a checkpoint must hold so that this callback resumes. It does not wait.

        `state.resumed.arrays` holds them in `on_fit_begin`. Begin their names with that of the callback and a slash.
        """
        return {}

    def on_fit_end(self, state: FitState) -> None:
        """After the last epoch, and also when an error or Ctrl-C ends the run, if `on_fit_begin` was called."""


class Progress(Callback):
    """Shows loss, metrics, examples per second and time left: a line that changes on a terminal, new lines elsewhere.

    After the first batch it prints the number of parameters, the bytes and examples of each device, and the steps of an epoch.

    Parameters
    ----------
    unit : str
        The plural of an example: `images`.
    every_s : float, seconds
        Time between two lines of an epoch, without a terminal.
    """

    def __init__(self, unit: str = "examples", *, every_s: float = 5.0) -> None:
        instance("Progress", "unit", unit, str, "a text", advice="For example, pass 'images'.")
        self._unit = unit
        self._every_s = real_number("Progress", "every_s", every_s, advice="5 seconds are usual.")

    def on_fit_begin(self, state: FitState) -> None:
        self._began = self._printed = time.perf_counter()
        self._done_before = len(state.history.rows) + (state.batches / state.num_batches if state.num_batches else 0.0)
        self._is_line_open = self._has_summary = False
        if state.resumed is not None:
            self._print(f"resumes from {state.resumed.folder}, after step {state.step}")

    def on_batch_end(self, state: FitState) -> None:
        if not self._has_summary:  # now shapes and states are known
            self._has_summary = True
            self._print(_summary(state))
        found = state.history.evaluations[-1:]
        if found and found[0]["step"] == state.step:
            self._print("  ".join([f"step {state.step}", *_columns(found[0], "test_")]))

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        batch = f"batch {progress.num_batches}/{state.num_batches or '?'}"
        speed = [f"{progress.examples_per_s:.0f} {self._unit}/s", *self._left(state, progress)]
        self._show(f"epoch {state.epoch}/{state.epochs}", batch, *speed, *_columns(progress.means, ""))

    def on_test_report(self, state: FitState, progress: EpochProgress) -> None:
        batch = f"evaluates batch {progress.num_batches}"
        self._show(f"epoch {state.epoch}/{state.epochs}", batch, *_columns(progress.means, ""))

    def on_epoch_end(self, state: FitState) -> None:
        row = state.history.rows[-1]
        means = _columns(row, "train_", "test_", "valid_")
        rate = [f"{row['examples_per_s']:.0f} {self._unit}/s", f"{row['seconds']:.1f} s"]
        self._print("  ".join([f"epoch {state.epoch}/{state.epochs}", *means, *rate]))

    def on_fit_end(self, state: FitState) -> None:
        if self._is_line_open:
            self._print("")

    def _left(self, state: FitState, progress: EpochProgress) -> List[str]:
        done = state.epoch - 1 + progress.num_batches / (state.num_batches or math.inf)
        if done <= self._done_before:  # a run that had stopped after the last batch of an epoch, or a loader without a length
            return []
        seconds = (time.perf_counter() - self._began) / (done - self._done_before) * (state.epochs - done)
        return [f"{_clock(seconds)} left"]

    def _show(self, *columns: str) -> None:
        """Print a line that changes on a terminal, without the last columns if it is narrow, otherwise one every few seconds."""
        line = "  ".join(columns)
        if getattr(sys.stdout, "isatty", bool)():  # which an object that copies the output to a file may lack
            width, shown = shutil.get_terminal_size().columns - 1, list(columns)
            while len(shown) > 1 and len("  ".join(shown)) > width:
                shown.pop()
            self._print("  ".join(shown)[:width], end="")
        elif time.perf_counter() - self._printed > self._every_s:
            self._print(line)

    def _print(self, line: str, end: str = "\n") -> None:
        """Print a line in the place of one that is not ended yet."""
        self._printed = time.perf_counter()
        if not this_process().rank:
            print(f"\r\x1b[K{line}" if self._is_line_open else line, end=end, flush=True)
            self._is_line_open = not end


class SaveHistory(Callback):
    """Writes the history's table and figure after each epoch, and at the end: see `History.save`. In a job, process 0 writes.

    Parameters
    ----------
    folder : str or pathlib.Path
    """

    def __init__(self, folder: Union[str, Path]) -> None:
        self.folder = path_of("SaveHistory", "folder", folder)

    def on_fit_begin(self, state: FitState) -> None:
        figure()  # raises before the first epoch if matplotlib is missing

    def on_epoch_end(self, state: FitState) -> None:
        if not this_process().rank:
            state.history.save(self.folder)

    def on_fit_end(self, state: FitState) -> None:
        if state.history.rows:
            self.on_epoch_end(state)  # with the reason why it stopped


class EarlyStopping(Callback):
    """Stops when a metric has not improved for some epochs.

    Parameters
    ----------
    monitor : str
        A column of the history: `test_loss`, `test_accuracy`.
    patience : int
        Number of epochs without improvement that are allowed.
    min_delta : float
        The smallest improvement that counts.
    mode : "min", "max" or None
        Whether smaller or larger is better. None: by the name, which must be that of a usual metric, such as `test_mae`.
    """

    def __init__(
        self, monitor: str = "test_loss", patience: int = 3, *, min_delta: float = 0.0, mode: Optional[str] = None
    ) -> None:
        real_number("EarlyStopping", "patience", patience, advice="3 epochs are usual.")
        real_number("EarlyStopping", "min_delta", min_delta, advice="0 is usual.")
        self._best = Best(monitor, mode, min_delta)
        self._patience = patience

    def on_fit_begin(self, state: FitState) -> None:
        self._best.begin(state)
        self._stop(state)  # the resumed run may have been stopped

    def on_epoch_end(self, state: FitState) -> None:
        if not self._best.improves(state):
            self._stop(state)

    def _stop(self, state: FitState) -> None:
        best = self._best
        if len(state.history.rows) - best.epoch > self._patience:
            state.stop = f"{best.monitor} was best ({best.value:.4g}) in epoch {best.epoch}"


class ReduceLROnPlateau(Callback):
    """Multiplies the learning rate by `factor` when a metric has not improved for some epochs.

    Place it before `Checkpoint`. A resumed run counts on from its history. The trainer must have no `lr_scheduler`.

    Parameters
    ----------
    monitor : str
        A column of the history: `test_loss`, `test_accuracy`.
    factor : float
        Above 0 and below 1.
    patience : int
        Number of epochs without improvement that are allowed, since the best one or the latest reduction.
    min_lr : float
        The learning rate does not fall below it.
    min_delta, mode
        As for `EarlyStopping`.
    """

    def __init__(
        self,
        monitor: str = "test_loss",
        factor: float = 0.1,
        patience: int = 3,
        *,
        min_lr: float = 0.0,
        min_delta: float = 0.0,
        mode: Optional[str] = None,
    ) -> None:
        self._factor = real_number("ReduceLROnPlateau", "factor", factor, advice="0.1 is usual.")
        if not 0 < factor < 1:
            raise TrainerError(f"ReduceLROnPlateau: got factor={factor}; expected one between 0 and 1. 0.1 is usual.")
        self._patience = real_number("ReduceLROnPlateau", "patience", patience, advice="3 epochs are usual.")
        self._min_lr = real_number("ReduceLROnPlateau", "min_lr", min_lr, advice="0 is usual.")
        real_number("ReduceLROnPlateau", "min_delta", min_delta, advice="0 is usual.")
        self._best = Best(monitor, mode, min_delta)

    def on_fit_begin(self, state: FitState) -> None:
        if state.trainer.optimizer.lr_scheduler is not None:
            raise TrainerError(
                "ReduceLROnPlateau: got a trainer with an lr_scheduler, which sets the rate at each step; expected one without. "
                "Leave the lr_scheduler out, or this callback."
            )
        self._best.begin(state)

    def on_epoch_end(self, state: FitState) -> None:
        rates = state.history.column("learning_rate")
        if not self._best.improves(state) and len(rates) - max(self._best.epoch, _last_change(rates)) > self._patience:
            state.trainer.set_learning_rate(max(self._min_lr, rates[-1] * self._factor))


def _last_change(rates: Sequence[float]) -> int:
    """Return after which epoch the learning rate changed last; 0 if it has not."""
    return max((number for number in range(1, len(rates)) if rates[number] != rates[number - 1]), default=0)


class Best:
    """The best value of one column so far, and the epoch that gave it."""

    def __init__(self, monitor: str, mode: Optional[str] = None, min_delta: float = 0.0) -> None:
        one_of("callbacks", "mode", mode, (None, "min", "max"), advice="None decides by the name.")
        named = None if isinstance(monitor, str) and not monitor else monitor
        instance("callbacks", "monitor", named, str, "a column of the history", advice="For example, pass 'test_loss'.")
        if mode is None and monitor != "auto" and not direction_of(monitor):
            raise TrainerError(
                f"callbacks: got monitor {short(monitor)} without a mode; expected one, as the name does not say whether a "
                "smaller value is better. Pass mode='min' or mode='max'."
            )
        self.value, self.epoch, self.monitor = math.nan, 0, monitor
        self._asked, self._mode, self._min_delta = monitor, mode, min_delta

    def begin(self, state: FitState) -> None:
        """Start again, with the history of the resumed run if there is one.

        Raises
        ------
        TrainerError
            The column needs a test set, and there is none.
        """
        self.value, self.epoch, self.monitor = math.nan, 0, self._asked
        if self.monitor.startswith(("test_", "valid_", "auto")) and not state.tests:
            raise TrainerError(
                f"callbacks: got monitor {self.monitor!r} without a test set; expected a column of the history. Pass "
                "test_iter to fit, or another monitor: 'train_loss', or None for a Checkpoint."
            )
        for epoch, row in enumerate(state.history.rows, 1):
            self._note(row, epoch)

    def improves(self, state: FitState) -> bool:
        """Return whether the last epoch is the best so far, and remember it if so.

        Raises
        ------
        TrainerError
            There is no such column.
        """
        row = state.history.rows[-1]
        is_best = self._note(row, state.epoch)
        if self.monitor not in row:
            raise TrainerError(
                f"callbacks: got monitor {self.monitor!r}; expected one of {', '.join(row)}. Pass a test_iter for test_... "
                "columns."
            )
        return is_best

    def _note(self, row: Row, epoch: int) -> bool:
        if self.monitor == "auto":
            self.monitor = "test_accuracy" if "test_accuracy" in row else "test_loss"
        value = row.get(self.monitor, math.nan)
        # NaN, or a text that a callback has added, is never better, and any number is better than NaN.
        sign = 1 if (self._mode or direction_of(self.monitor)) == "min" else -1
        better = is_number(value) and not sign * value >= sign * self.value - self._min_delta and value == value
        if better:
            self.value, self.epoch = float(value), epoch
        return better


def _summary(state: FitState) -> str:
    """Return two lines: the network on its devices, and the batches."""
    trainer, processes = state.trainer, this_process().num_processes
    held = trainer.bytes_per_device()
    largest = max(sum(parts.values()) for parts in held.values()) / 2**10
    size = f"{largest:.3g} KiB" if largest < 1000 else f"{largest / 2**10:,.3g} MiB"
    params = [param for param in state.net.collect_params().values() if param.shape]
    shards = len(trainer.contexts) * (1 if trainer.steps.sharded_data else processes)
    steps = f"  {state.num_batches} step{'s' * (state.num_batches > 1)} per epoch" if state.num_batches else ""
    job = f" in each of {processes} processes" if processes > 1 else ""
    return (
        f"{sum(math.prod(param.shape) for param in params):,} parameters  {size} per device  "
        f"on {', '.join(held)}{job}\nbatch of {state.batch_size}  {state.batch_size / shards:.3g} per device{steps}"
    )


def _columns(row: Row, *beginnings: str) -> List[str]:
    """Return the columns to show whose names begin so, one beginning after the other."""
    return [format_column(*column) for begin in beginnings for column in row.items() if column[0].startswith(begin)]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
