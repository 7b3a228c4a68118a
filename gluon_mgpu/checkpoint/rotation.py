"""The checkpoints of a run: the last ones and the best, optionally written in a thread."""

from __future__ import annotations

import json
import os
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from ..errors import SaveError, StateError
from ..runtime.environment import logger
from ..schema import MOST_STEPS, is_whole
from .atomic_folder import MANIFEST, commit, copy_folder, explained, left_over, make, new_folder, recover, recover_path, remove
from .snapshot import PARAMS, TRAINING

INNER = "checkpoint"  # the checkpoint's subfolder in the folder of something larger, such as a translator

Write = Callable[[Path], None]


class CheckpointRotation:
    """Keeps the checkpoint folders of a run next to each other, each of them complete at any time.

    ```
    last             the latest checkpoint
    step-00000200    earlier ones, with their steps: `keep` in total, including `last`
    step-00000100
    best             a copy of the best one, with separate files
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
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[BaseException] = None
        self._num_bytes = 0  # of what is being written

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
            if others and (resumed is None or self.folder.resolve() not in resumed.resolve().parents):
                raise StateError(
                    f"{self._operation}: got {self.folder}, which holds {others[-1].name} of another run; expected a folder "
                    "of its own. Resume that run with resume='auto', or pass another folder."
                )
            make(self.folder)
            for name in ("last", "best"):
                recover(self.folder / name)
            for path in left_over(self.folder):
                if re.match(r"\.(last|best|step-\d+)\.", path.name):
                    remove(path)

    def restore_best(self, is_best: Callable[[Path], bool], others: Sequence[Path] = ()) -> bool:
        """Restore `best` if it is missing or outdated; return whether there is a best one.

        `last` is written first and then copied: a program that is killed in between leaves an outdated `best`, or none.

        Parameters
        ----------
        is_best : callable (pathlib.Path) -> bool
            Whether a folder is the best one, and complete.
        others : sequence of pathlib.Path
            More folders to search, after those of this run.

        Raises
        ------
        SaveError
            `best` cannot be written.
        """
        best = self.folder / "best"
        named = [best, self.folder / "last", *reversed(self.steps()), *others]
        found = next((path for path in named if path.is_dir() and is_best(path)), None)
        if found is not None and found != best:
            logger.info("%s: copying %s from %s", self._operation, best, found)
            with explained(self._operation, best, num_bytes=_size_of(found)):
                copy_folder(found, best)
        return found is not None

    def put(self, write: Write, step: int, *, is_best: bool = False, num_bytes: int = 0) -> None:
        """Write a checkpoint folder as `last`. Existing folders are kept until it is synced to the disk.

        Parameters
        ----------
        write : callable (pathlib.Path)
            Fills an empty folder; it writes the checkpoint's manifest last.
        step : int
        is_best : bool
            Also copy it to `best`.
        num_bytes : int
            Its approximate size, for errors; 0 if unknown.

        Raises
        ------
        SaveError, StateError
            This folder, or the previous one in the background, could not be written.
        """
        self.wait()
        self._num_bytes = num_bytes
        if not self._background:
            self._put(write, step, is_best)
            return
        # Not a daemon thread: the program waits for it at its exit.
        self._thread = threading.Thread(target=self._try, args=(write, step, is_best), name="gluon_mgpu checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last `put` is written, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """Remove folders beyond `keep`, which a run that was killed after its last save has left."""
        step = step_of(self.folder / "last")
        if step is not None:
            with explained(self._operation, self.folder):
                self._prune(step)

    def steps(self) -> List[Path]:
        """Return the folders earlier than `last`, the oldest first."""
        if not os.path.isdir(self.folder):
            return []
        found = [path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        return sorted(found, key=_number)

    def _try(self, write: Write, step: int, is_best: bool) -> None:
        try:
            self._put(write, step, is_best)
        except BaseException as error:
            logger.warning("step %d was not saved: %s", step, error)
            self._error = error

    def _put(self, write: Write, step: int, is_best: bool) -> None:
        last = self.folder / "last"
        with self._explained(last):
            with new_folder(last) as new:
                write(new)
            before = step_of(last)
            # A folder of a later or unknown step belongs to a run that was abandoned for an earlier checkpoint: remove it.
            is_kept = self._keep > 1 and before is not None and before < step
            commit(last, old=self.folder / f"step-{before:08d}" if is_kept else None)
        if is_best:
            with self._explained(self.folder / "best"):
                copy_folder(last, self.folder / "best")
        with self._explained(self.folder):
            self._prune(step)

    def _prune(self, step: int) -> None:
        """Remove folders beyond `keep` before this step, and folders of later steps."""
        steps = self.steps()
        earlier = [path for path in steps if _number(path) < step]
        for path in steps:
            if path not in earlier[len(earlier) - (self._keep - 1) :]:
                remove(path)

    @contextmanager
    def _explained(self, folder: Path) -> Iterator[None]:
        """Do what `explained` does, and list the existing checkpoints in the error."""
        try:
            with explained(self._operation, folder, num_bytes=self._num_bytes):
                yield
        except SaveError as error:
            there = ", ".join(f"{outer_of(path).name} of step {step_of(path)}" for path in find_checkpoints(self.folder))
            left = f"Saved and kept: {there}; resume='auto' resumes from the latest" if there else "No checkpoint was saved yet"
            raise SaveError(f"{error} {left}.", error.errno) from error.__cause__


def find_checkpoints(folder: Path) -> List[Path]:
    """Return the checkpoints in the folder of a run, the latest first, whether valid or not."""
    named = [folder / "last", *reversed(CheckpointRotation(folder).steps()), folder / "best"]
    there = [inner for inner in (checkpoint_in(recover_path(path)) for path in named) if inner is not None]

    def key(place: int) -> Any:
        step = step_of(there[place])
        at = _number(there[place]) if step is None else step
        return (-at, place)

    return [there[place] for place in sorted(range(len(there)), key=key)]


def checkpoint_in(folder: Path) -> Optional[Path]:
    """Return the checkpoint of a folder: the folder itself, or its subfolder `INNER`; None if it has none."""
    for path in (folder, folder / INNER):
        if any(os.path.exists(path / name) for name in (MANIFEST, TRAINING, PARAMS)):  # False without permission to read
            return path
    return None


def outer_of(checkpoint: Path) -> Path:
    """Return the folder in the run's folder that holds a checkpoint: the checkpoint itself, or its parent."""
    return checkpoint.parent if checkpoint.name == INNER else checkpoint


def step_of(folder: Path) -> Optional[int]:
    """Return the step at which a folder was written; None if it cannot be read."""
    inner = checkpoint_in(folder)
    try:
        training: Dict[str, Any] = json.loads(((inner or folder) / TRAINING).read_text(encoding="utf-8"))
        step = training["place"]["step"]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return step if is_whole(step) and 0 <= step <= MOST_STEPS else None


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _number(path: Path) -> int:
    """Return the step in a folder's name; a larger number than any for `last`, a smaller one for `best`."""
    name = outer_of(path).name
    found = re.fullmatch(r"step-(\d+)", name)
    return int(found.group(1)) if found else 2**62 if "last" in name else -1
