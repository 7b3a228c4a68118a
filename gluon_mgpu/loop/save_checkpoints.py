"""Checkpoint: the callback that saves a run, after each epoch, every so many batches, and when a signal stops it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Optional, Tuple, Union

from ..checkpoint.random_state import draw_base
from ..checkpoint.replace_folder import explained, make
from ..checkpoint.rotation import CheckpointRotation
from ..checkpoint.save_and_load import check_folder
from ..checkpoint.snapshot import FILES, Snapshot, check_all_saved, take_snapshot
from ..checks import flag, path_of, whole_number
from ..distributed import any_process
from ..distributed.process import this_process
from ..runtime.file_locks import FolderLock
from ..trainer.optimizer_config import describe
from ..trainer.parameters import has_values
from .callbacks import Best, Callback, FitState

_PATIENCE_S = 10.0  # how long a restarted job waits for its previous process to end


class Checkpoint(Callback):
    """Saves the network and its trainer: `best` when a metric improves, `last` after each epoch and at the end.

    It saves when Ctrl-C, SIGTERM or SIGUSR1 stops the run, but not after an error. `fit(..., resume="auto")` resumes from the
    latest checkpoint. A run that resumes another run's checkpoint writes `best` into its own folder when an epoch improves on the
    history. One run at a time uses a folder, and a run has one Checkpoint.

    Parameters
    ----------
    folder : str or pathlib.Path
        The folder that receives the folders `best` and `last`; see `save_checkpoint`.
    monitor : str, optional
        A column of the history, for `best`. "auto": `test_accuracy`, or `test_loss` if there is none. None, or "auto" without a
        test set: only `last`.
    mode : "min", "max" or None
        As for `EarlyStopping`.
    every : int, optional
        Also save within an epoch: every so many batches, or with the update that follows.
    keep : int
        How many of the last checkpoints to keep: `last`, and earlier ones, named by their batches: `step-00000200`.
    background : bool
        Write in a thread while training continues: the values are copied on the devices first. The next save and the end of
        `fit` wait for the thread, and raise its error.

    Raises
    ------
    TrainerError
        A number is out of range.
    """

    def __init__(
        self,
        folder: Union[str, Path],
        monitor: Optional[str] = "auto",
        *,
        mode: Optional[str] = None,
        every: Optional[int] = None,
        keep: int = 1,
        background: bool = False,
    ) -> None:
        for name, number in (("every", 1 if every is None else every), ("keep", keep)):
            whole_number(type(self).__name__, name, number, advice="For example, pass every=500 and keep=3.")
        flag(type(self).__name__, "background", background)
        self.folder = path_of(type(self).__name__, "folder", folder).absolute()  # a program may change its directory
        self._best = Best("auto" if monitor is None else monitor, mode)
        self._monitor = monitor
        self._every = every
        self._rotation = CheckpointRotation(self.folder, keep=keep, background=background, operation=type(self).__name__)
        self._lock = FolderLock(self.folder, type(self).__name__)

    def hold(self) -> None:
        """Lock the folder for this run, unless it already has; in a job, process 0 does. `on_fit_end` releases it.

        Raises
        ------
        SaveError
            Another run uses it, or it cannot be written.
        """
        process = this_process()
        if not process.rank:
            with explained(type(self).__name__, self.folder):
                make(self.folder)
                self._lock.acquire(_PATIENCE_S if process.restart else 0.0)

    def release(self) -> None:
        """Release the lock on the folder."""
        self._lock.release()

    def wait(self) -> None:
        """Wait until the latest checkpoint is written, and raise its error."""
        self._rotation.wait()

    def check_resumable(self, folder: Path) -> None:
        """Raise `StateError` unless a checkpoint, which fits network and trainer, belongs to what this callback saves."""

    def on_fit_begin(self, state: FitState) -> None:
        self._has_best = self._monitor is not None and (self._monitor != "auto" or state.tests)
        if self._has_best:
            self._best.begin(state)
        for name in ("best", "last"):
            self._check_replaceable(self.folder / name)
        check_all_saved(state.net, state.trainer)
        describe(state.trainer.optimizer)  # raises before the first epoch if the optimizer cannot be saved
        self._base: Optional[Tuple[int, bool]] = None
        self._saved: Any = None
        self._reached = state.step
        if state.resumed is not None and state.resumed.training is not None:
            self._base = state.resumed.training["random"]["base"]
        any_process(False)  # a barrier: each has read its checkpoint before the first one deletes old ones
        self.hold()
        if not this_process().rank:
            self._rotation.begin(None if state.resumed is None else state.resumed.folder)

    def on_batch_end(self, state: FitState) -> None:
        # on_epoch_end saves the last batch of an epoch, after the evaluation.
        if self._every is None or state.pending or state.batches == state.num_batches:
            return
        if state.step // self._every > self._reached // self._every:
            self._save(state)

    def on_epoch_end(self, state: FitState) -> None:
        is_best = False
        try:
            is_best = self._has_best and self._best.improves(state)
        finally:
            self._save(state, is_best=is_best)

    def on_fit_end(self, state: FitState) -> None:
        with ExitStack() as ending:
            ending.callback(self.release)
            ending.callback(self._rotation.wait)
            if state.interrupted and has_values(state.net):
                self._save(state)

    def _save(self, state: FitState, *, is_best: bool = False) -> None:
        place, arrays = state.where()
        here = [place.get(name) for name in ("epoch", "batches", "step", "row")]
        if place and self._saved == here:
            return  # Ctrl-C came when everything was saved
        self._reached = state.step
        if self._base is None or not place:
            self._base = draw_base(state.trainer.contexts[0])
        rows = state.history.rows
        progress = {"epoch": state.epoch, "epochs_completed": len(rows), "history": rows}
        snapshot = take_snapshot(state.net, state.trainer, progress, place=place, arrays=arrays, base=self._base)
        if not this_process().rank:
            self._rotation.put(self._writing(snapshot), state.step, is_best=is_best)
        state.trainer.steps.replica_check.checkpoint = str(self.folder / "last")
        self._saved = here

    def _writing(self, snapshot: Snapshot) -> Callable[[Path], None]:
        """Return a function that writes the snapshot into a folder, in any thread and without reading the network."""
        return snapshot.write

    def _check_replaceable(self, folder: Path) -> None:
        check_folder(folder, FILES, type(self).__name__, "checkpoint")
