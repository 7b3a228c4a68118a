"""The checkpoints of a run: the last ones and the best, optionally written in a thread."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Callable, List, Optional

from ..errors import StateError
from ..runtime.environment import logger
from ..runtime.untrusted_files import COUNT, MOST_JSON, read_regular, values_of
from .manifest import MANIFEST
from .replace_folder import copy_files, explained, make, new_folder, recover, recover_path, remove, remove_left_over
from .snapshot import PARAMS, TRAINING

INNER = "checkpoint"  # the checkpoint's subfolder in the folder of something larger, such as a translator

_KEPT = "Earlier checkpoints are kept: resume='auto' resumes from the latest."
Write = Callable[[Path], None]


class CheckpointRotation:
    """Keeps the checkpoint folders of a run next to each other, each of them complete at any time.

    ```
    best             a copy of the best one, with separate files, which gets its name first
    last             the latest checkpoint
    step-00000200    earlier ones, with their steps: `keep` in total, including `last`
    step-00000100
    ```

    Parameters
    ----------
    folder : pathlib.Path
    keep : int
    background : bool
        Write in a thread, one folder after the other: `put` waits for the previous one.
    operation : str
        Name of the operation in errors.
    """

    def __init__(self, folder: Path, *, keep: int = 1, background: bool = False, operation: str = "Checkpoint") -> None:
        self.folder = folder
        self._operation = operation
        self._keep = keep
        self._background = background
        self._written = threading.Event()
        self._written.set()
        self._error: Optional[BaseException] = None

    def begin(self, resumed: Optional[Path]) -> None:
        """Make the folder, or clean up after a killed program.

        Parameters
        ----------
        resumed : pathlib.Path, optional
            The checkpoint from which the run resumes.

        Raises
        ------
        StateError
            The folder holds checkpoints of another run, which this one would remove. Nothing was changed.
        SaveError
            The folder cannot be written.
        """
        with explained(self._operation, self.folder):
            others = self.steps()
            inner = ".." if resumed is None else os.path.relpath(os.path.realpath(resumed), os.path.realpath(self.folder))
            name = (*Path(inner).parts, "..")[0]  # of the resumed checkpoint in this folder
            is_new = name == ".."
            if others and is_new:
                raise StateError(
                    f"{self._operation}: got {self.folder}, which holds {others[-1].name} of another run; expected a folder "
                    "of its own. Resume that run with resume='auto', or pass another folder."
                )
            if is_new and (self.folder / "last").exists():
                logger.warning(
                    "the checkpoints of an earlier run in %s will be replaced: resume='auto' (--resume auto) continues it",
                    self.folder,
                )
            make(self.folder)
            for one in ("last", "best"):
                recover(self.folder / one)
            remove_left_over(self.folder, r"last|best|step-\d+")
            best, step = self.folder / "best", step_of(self.folder / "best")
            is_read = name in ("best", ".best.new", ".best.old")  # and was not damaged
            if is_read and step is not None and step > (step_of(self.folder / "last") or 0):
                self._put_last(partial(copy_files, best), step)  # the save was interrupted between the two

    def put(self, write: Write, step: int, *, is_best: bool = False) -> None:
        """Write a checkpoint folder as `last`. Existing folders are kept until it is synced to the disk.

        Parameters
        ----------
        write : callable (pathlib.Path)
            Fills an empty folder; it writes the checkpoint's manifest last.
        step : int
        is_best : bool
            Also copy it to `best`.

        Raises
        ------
        SaveError, StateError
            This folder, or the previous one in the background, could not be written.
        """
        self.wait()
        if not self._background:
            self._put(write, step, is_best)
            return
        # Not a daemon thread: the program waits for it at its exit.
        self._written = written = threading.Event()  # before the thread runs: Ctrl-C may interrupt its start
        try:
            threading.Thread(target=self._try, args=(written, write, step, is_best), name="gluon_mgpu checkpoint").start()
        except RuntimeError:  # it cannot run
            written.set()
            raise

    def wait(self) -> None:
        """Wait until the last `put` is written, also if Ctrl-C interrupts that once, and raise its error."""
        try:
            self._written.wait()
        finally:
            self._written.wait()  # an interrupted Thread.join() would take the thread for ended: bpo-45274
        error, self._error = self._error, None
        if error is not None:
            raise error

    def steps(self) -> List[Path]:
        """Return the folders earlier than `last`, the oldest first."""
        if not os.path.isdir(self.folder):
            return []
        return sorted((path for path in self.folder.glob("step-*") if path.name[len("step-") :].isdecimal()), key=_number)

    def _try(self, written: threading.Event, write: Write, step: int, is_best: bool) -> None:
        try:
            self._put(write, step, is_best)
        except BaseException as error:
            logger.warning("step %d was not saved: %s", step, error)
            self._error = error
        finally:
            written.set()

    def _put(self, write: Write, step: int, is_best: bool) -> None:
        best = self.folder / "best"
        with explained(self._operation, self.folder, left=_KEPT if find_checkpoints(self.folder) else ""):
            if is_best:  # first: a run killed before it is complete comes to this step again, and later resumes from it
                with new_folder(best) as new:
                    write(new)
            self._put_last(partial(copy_files, best) if is_best else write, step)

    def _put_last(self, write: Write, step: int) -> None:
        last = self.folder / "last"
        before = step_of(last)
        # A folder of a later or unknown step belongs to a run that was abandoned for an earlier checkpoint: remove it.
        is_kept = self._keep > 1 and before is not None and before < step
        with new_folder(last, old=self.folder / f"step-{before:08d}" if is_kept else None) as new:
            write(new)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Remove folders beyond `keep` before this step, and folders of later steps."""
        steps = self.steps()
        earlier = [path for path in steps if _number(path) < step]
        kept = earlier[max(0, len(earlier) + 1 - self._keep) :]  # `last` is one of them
        for path in steps:
            if path not in kept:
                remove(path)


def find_checkpoints(folder: Path) -> List[Path]:
    """Return the checkpoints in the folder of a run, the latest first, whether valid or not."""
    named = [folder / "last", *reversed(CheckpointRotation(folder).steps()), folder / "best"]
    there = [inner for inner in (checkpoint_in(recover_path(path)) for path in named) if inner is not None]

    def latest_first(path: Path) -> int:
        step = step_of(path)
        return -(2**62 if step is None else step)  # one that cannot be read is tried first, so that it is reported

    return sorted(there, key=latest_first)


def checkpoint_in(folder: Path) -> Optional[Path]:
    """Return the checkpoint of a folder: the folder itself, or its subfolder `INNER`; None if it has none."""
    for path in (folder, folder / INNER):
        if any(os.path.exists(path / name) for name in (MANIFEST, TRAINING, PARAMS)):  # False without permission to read
            return path
    return None


def step_of(folder: Path) -> Optional[int]:
    """Return the step at which a folder was written; None if it cannot be read."""
    form = {"place": {"step": COUNT, "*": object}, "*": object}
    try:
        content = read_regular((checkpoint_in(folder) or folder) / TRAINING, MOST_JSON)
        return int(values_of(content, form, TRAINING)["place"]["step"])
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int:
    return int(path.name[len("step-") :])
