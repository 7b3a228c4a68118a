"""Folders replaced by renames: complete or absent, whenever the program is killed, and read while they are replaced."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Optional

from ..errors import SaveError, StateError
from ..runtime.environment import logger
from ..runtime.new_files import sync
from ..runtime.untrusted_files import MEMORY, Most, read_regular
from .manifest import MANIFEST, Files

_ATTEMPTS = 50  # to read a folder that is replaced at the same time


def read_files(folder: Path, sizes: Mapping[str, Most], operation: str) -> Files:
    """Return the content of those of these files that exist, all of one version of the folder.

    Parameters
    ----------
    folder : pathlib.Path
        If a killed program left the folder under another name, that one is read: see `recover_path`.
    sizes : mapping of str to int or callable
        The file names, with a slash for files in subfolders, and how many bytes each may have: see `open_regular`. They are read
        in this order.
    operation : str
        Name of the operation in errors.

    Raises
    ------
    StateError
        The folder does not exist, or it or a file cannot be read, is a link or larger.
    """
    path = folder
    try:
        for _ in range(_ATTEMPTS):
            path = recover_path(folder)
            with suppress(FileNotFoundError, NotADirectoryError), ExitStack() as opened:
                number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # while it is open, no other folder gets its inode
                opened.callback(os.close, number)
                found: Dict[str, bytes] = {}
                for name, most in sizes.items():
                    inner = os.path.dirname(name)
                    if inner and os.path.islink(path / inner):
                        raise OSError(errno.ELOOP, "Is a link", inner)
                    with suppress(FileNotFoundError, NotADirectoryError):
                        found[name] = read_regular(name, most, folder=number)
                if os.path.samestat(os.fstat(number), os.stat(path)):
                    return Files(path, found)
            time.sleep(0.001)
    except OSError as error:
        raise StateError(
            f"{operation}: got {folder}, which cannot be read ({error}); expected regular files that this process may read, no "
            "larger than the network needs. Check permissions and disk, copy what links point to, or build the network that was "
            "saved."
        ) from error
    state = "is not a folder" if os.path.lexists(folder) else "does not exist"
    raise StateError(f"{operation}: got {str(folder)!r}, which {state}; expected a folder. Check the path.")


@contextmanager
def new_folder(folder: Path, *, old: Optional[Path] = None) -> Iterator[Path]:
    """Yield an empty folder that then replaces this one; remove it on an exception.

    The previous folder is removed, or renamed to `old`. A link of this name is replaced; its target is not changed.

    ```
    .last.new  last        the new one is written and synced
    .last.new  .last.old   if the program is killed here, `recover_path` finds the new one
    last       .last.old
    last
    ```
    """
    recover(folder)
    remove_left_over(folder.parent, re.escape(folder.name))
    make(folder.parent)
    new = _sibling(folder, "new")
    new.mkdir()
    try:
        sync(new.parent)
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    away = _sibling(folder, "old") if old is None or folder.is_symlink() else old
    if os.path.lexists(folder):
        remove(away)
        folder.rename(away)
    new.rename(folder)
    sync(folder.parent)
    remove(_sibling(folder, "old"))


def recover(folder: Path) -> None:
    """Finish the renames of a program that was killed between two of them: see `recover_path`."""
    found = recover_path(folder)
    if found != folder and not os.path.lexists(folder):
        found.rename(folder)
        sync(folder.parent)


def recover_path(folder: Path) -> Path:
    """Return the path of this folder's content: a sibling if a program was killed between two renames.

    The new folder is used if it is complete: its manifests fit its files.
    """
    if not folder.name or os.path.lexists(folder):
        return folder
    if not os.path.exists(folder.parent):
        is_in_replaced = os.path.exists(folder.parent.parent)
        return recover_path(folder.parent) / folder.name if is_in_replaced else folder
    new, old = _sibling(folder, "new"), _sibling(folder, "old")
    return new if _is_complete(new) else old if _is_folder(old) else folder


def _is_complete(folder: Path) -> bool:
    if not _is_folder(folder):
        return False
    try:
        parts = [part for part in (folder, *folder.iterdir()) if _is_folder(part) and MANIFEST in os.listdir(part)]
        for part in parts:
            names = [path.name for path in part.iterdir() if not _is_folder(path)]
            Files(part, {name: read_regular(part / name, MEMORY) for name in names}).check("recover")
    except (StateError, OSError):
        return False
    return bool(parts)


def _is_folder(path: Path) -> bool:
    """Return whether this is a folder, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def copy_files(folder: Path, new: Path) -> None:
    """Copy files into an existing, empty folder, and sync them. Damage to the one folder does not reach the other.

    Links, pipes and devices, which no checkpoint has, are left out.
    """

    def others(inner: str, names: List[str]) -> List[str]:
        modes = {name: os.lstat(os.path.join(inner, name)).st_mode for name in names}
        return [name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))]

    shutil.copytree(folder, new, dirs_exist_ok=True, ignore=others)
    for path in (*new.rglob("*"), new):
        sync(path)


def remove(path: Path) -> None:
    """Remove a folder, or a file of this name. It is renamed first, so that an interrupted removal leaves no partial folder.

    Files that cannot be removed, such as open files on NFS, stay under the new name until `remove_left_over`.
    """
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    gone = path
    if not re.search(r"\.gone\d+$", path.name):
        gone = path.with_name(f".{path.name.lstrip('.')}.gone{time.time_ns()}")
        path.rename(gone)
    try:
        shutil.rmtree(gone)
    except OSError as error:
        if os.path.lexists(gone):
            logger.warning("checkpoints: could not remove the unused folder %s: %s", gone, error)


def remove_left_over(folder: Path, names: str) -> None:
    """Remove what killed programs, or others, left under the names of `new_folder` and `remove`, of folders of these names.

    `names` is a regular expression.
    """
    for path in folder.glob(".*"):
        if re.fullmatch(rf"\.({names})\.(new|old|new\.gone\d+|old\.gone\d+|gone\d+)", path.name):
            remove(path)


def _sibling(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def make(folder: Path) -> None:
    """Make a folder and its missing parents, and sync their names to the disk."""
    missing = list(takewhile(lambda path: not path.is_dir(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


@contextmanager
def explained(operation: str, folder: Path, *, left: str = "") -> Iterator[None]:
    """Raise an OSError of this block as a `SaveError` with the folder, the cause and advice.

    `left` is a sentence about the folder that is kept, added if the folder exists.
    """
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        why = error.args[0][-1][-1] if isinstance(error, shutil.Error) else error.strerror or error  # the last copy that failed
        kept = f" {left}" if left and os.path.isdir(recover_path(folder)) else ""
        raise SaveError(
            f"{operation}: got {folder}, which cannot be written ({why}); expected a folder that this "
            f"process may write to, with enough disk space. Check its permissions and disk, or pass another folder.{kept}",
            error.errno,
        ) from error
