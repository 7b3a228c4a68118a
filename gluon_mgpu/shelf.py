"""The checkpoints of a run: the last ones and the best, written in a thread if asked."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from .errors import StateError
from .folders import MANIFEST, copy_folder, new_folder, put_in_place, remove, whole
from .runtime import logger
from .snapshot import PARAMS, TRAINING

INNER = "checkpoint"  # where the checkpoint is in the folder of something larger, such as a translator

Write = Callable[[Path], None]


class Shelf:
    """Keeps folders of a run beside each other, each of them whole at any time.

    ```
    last             the one that was written last
    step-00000200    those before it, with their steps: `keep` in all
    step-00000100
    best             a copy of the one that was the best, with files of its own
    ```

    Parameters
    ----------
    folder : pathlib.Path
    keep : int
    background : bool
        Write in a thread: one folder after the other, so that `put` waits for the one before.
    """

    def __init__(self, folder: Path, *, keep: int = 1, background: bool = False) -> None:
        self.folder = folder
        self._keep = keep
        self._background = background
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[BaseException] = None

    def begin(self, resumed: Optional[Path]) -> None:
        """Make the folder, or tidy up what a killed program has left in it.

        Parameters
        ----------
        resumed : pathlib.Path, optional
            The checkpoint that the run goes on from.

        Raises
        ------
        StateError
            The folder holds checkpoints of another run, which this one would remove. Nothing was changed.
        """
        others = self.steps()
        if others and (resumed is None or self.folder.resolve() not in resumed.resolve().parents):
            raise StateError(
                f"Checkpoint: got {self.folder}, which holds {others[-1].name} of another run; need a folder of its own. Go on "
                "from it with resume='auto', or pass another folder."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in [self.folder / "last", self.folder / "best"]:
            found = whole(path)
            if found != path:
                found.rename(path)
        for path in self.folder.glob(".*"):
            if re.fullmatch(r"\.(last|best|step-\d+)\.(new|old)", path.name):
                remove(path)

    def put(self, write: Write, step: int, *, is_best: bool = False) -> None:
        """Write a folder, and let it be the last one. What is there stays until it is on the disk.

        Parameters
        ----------
        write : callable (pathlib.Path)
            Fills an empty folder, the manifest of its checkpoint being written at last.
        step : int
        is_best : bool
            It is the best one, too.

        Raises
        ------
        OSError, StateError
            It could not be written, or the one before it, in the background.
        """
        self.wait()
        if not self._background:
            self._put(write, step, is_best)
            return
        # No daemon: a program that ends waits for it.
        self._thread = threading.Thread(target=self._try, args=(write, step, is_best), name="gluon_mgpu checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until what was put is written, and raise what has gone wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def steps(self) -> List[Path]:
        """Return the folders before the last one, the oldest first."""
        found = [path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        return sorted(found, key=_number)

    def _try(self, write: Write, step: int, is_best: bool) -> None:
        try:
            self._put(write, step, is_best)
        except BaseException as error:
            logger.warning("Checkpoint: could not write the checkpoint of step %d: %s", step, error)
            self._error = error

    def _put(self, write: Write, step: int, is_best: bool) -> None:
        last = self.folder / "last"
        with new_folder(last) as new:
            write(new)
        before = step_of(last)
        # Of a run that was left for an earlier checkpoint, or cannot be read: there is nothing to go back to.
        is_kept = self._keep > 1 and before is not None and before < step
        put_in_place(last, old=self.folder / f"step-{before:08d}" if is_kept else None)
        if is_best:
            copy_folder(last, self.folder / "best")
        steps = self.steps()
        earlier = [path for path in steps if _number(path) < step]
        for path in steps:
            if path not in earlier[len(earlier) - (self._keep - 1) :]:
                remove(path)


def find_checkpoints(folder: Path) -> List[Path]:
    """Return the checkpoints in the folder of a run, the latest first, be they good or not."""
    named = [folder / "last", *reversed(Shelf(folder).steps()), folder / "best"]
    there = [inner for inner in (checkpoint_in(whole(path)) for path in named) if inner is not None]

    def key(place: int) -> Any:
        step = step_of(there[place])
        at = _number(there[place]) if step is None else step
        return (-at, place)

    return [there[place] for place in sorted(range(len(there)), key=key)]


def checkpoint_in(folder: Path) -> Optional[Path]:
    """Return where the checkpoint is in a folder: in itself, or a level below; None where it has none."""
    for path in (folder, folder / INNER):
        if any((path / name).exists() for name in (MANIFEST, TRAINING, PARAMS)):
            return path
    return None


def step_of(folder: Path) -> Optional[int]:
    """Return the step that a folder was written at, None where it does not tell."""
    inner = checkpoint_in(folder)
    try:
        told: Dict[str, Any] = json.loads(((inner or folder) / TRAINING).read_text(encoding="utf-8"))
        return int(told["place"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _number(path: Path) -> int:
    """Return the step in a folder's name; of the last one, more than any; of the best one, less."""
    name = path.parent.name if path.name == INNER else path.name
    found = re.fullmatch(r"step-(\d+)", name)
    return int(found.group(1)) if found else 2**62 if "last" in name else -1
