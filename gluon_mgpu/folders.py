"""Folders that are whole or not there: written beside, forced to the disk, checksummed and renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from .errors import StateError

MANIFEST = "manifest.json"
FORMAT, VERSION = "gluon_mgpu checkpoint", 2  # 1 had pickled states, and no manifest


class WrittenFile:
    """A binary file that is only written to, from its beginning to its end, and knows its checksum.

    It is no seekable file, so that nobody goes back and changes what was counted.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Write bytes, all of them."""
        self._file.write(data)
        self._sha256.update(data)
        size = memoryview(data).nbytes
        self._num_bytes += size
        return size

    def flush(self) -> None:
        """Give what was written to the system."""
        self._file.flush()

    def described(self) -> Dict[str, Any]:
        """Return what the manifest says of this file."""
        return {"bytes": self._num_bytes, "sha256": self._sha256.hexdigest()}


class FolderWriter:
    """Writes the files of a folder, each to the disk and not only into memory, and at last the manifest that tells of them.

    Parameters
    ----------
    folder : pathlib.Path
        There, and empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: Dict[str, Dict[str, Any]] = {}

    @contextmanager
    def file(self, name: str) -> Iterator[WrittenFile]:
        """Yield a file to write to; it is on the disk afterwards."""
        with open(self._folder / name, "wb") as raw:
            written = WrittenFile(raw)
            yield written
            raw.flush()
            os.fsync(raw.fileno())
        self._files[name] = written.described()

    def text(self, name: str, text: str) -> None:
        """Write a text, in UTF-8."""
        with self.file(name) as file:
            file.write(text.encode())

    def finish(self, **told: Any) -> None:
        """Write the manifest, with whatever else it is to tell: a folder that has one is whole."""
        content = {"format": FORMAT, "version": VERSION, **told, "files": dict(self._files)}
        self.text(MANIFEST, json.dumps(content, indent=1))
        sync(self._folder)


def read_manifest(folder: Path, operation: str) -> Dict[str, Any]:
    """Return the manifest of a folder, having compared every file with it.

    Raises
    ------
    StateError
        The manifest is no manifest, or of a later version; or a file is missing, is longer or shorter, or has other bytes.
    """
    manifest = _parsed(folder / MANIFEST, operation)
    if manifest["version"] > VERSION:
        raise StateError(
            f"{operation}: got {folder} of version {manifest['version']}; need {VERSION} or older. Install a newer gluon_mgpu."
        )
    for name, told in manifest["files"].items():
        damage = _damage(folder / name, told)
        if damage:
            raise StateError(
                f"{operation}: got {folder / name}, which is damaged ({damage}); need it as it was. Use another one."
            )
    return manifest


def _parsed(path: Path, operation: str) -> Dict[str, Any]:
    try:
        manifest: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and isinstance(manifest["version"], int)
        named = all(os.path.basename(name) == name for name in manifest["files"])
        sized = all(isinstance(told["bytes"], int) and told["sha256"] for told in manifest["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"{operation}: got {path}, which is damaged ({type(error).__name__}: {error}); need a checkpoint's. Use another one."
        ) from error
    if not (known and named and sized):
        raise StateError(f"{operation}: got {path}, which is of something else; need a checkpoint's. Check the path.")
    return manifest


def _damage(path: Path, told: Dict[str, Any]) -> str:
    """Return what is wrong with a file; nothing where it is as the manifest says."""
    if not path.is_file():
        return "it is not there"
    if path.stat().st_size != told["bytes"]:
        return f"{path.stat().st_size} bytes of {told['bytes']}"
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            sha256.update(block)
    return "" if sha256.hexdigest() == told["sha256"] else "its bytes are others than were written"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside this one, which an exception removes again: see `put_in_place`."""
    new = beside(folder, "new")
    remove(new)
    new.mkdir(parents=True)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def put_in_place(folder: Path, *, old: Optional[Path] = None) -> None:
    """Let what `new_folder` has made be this folder. The one before it is removed, or named `old`.

    ```
    .last.new  last        written, and on the disk
    .last.new  .last.old   killed here: `whole` finds the new one
    last       .last.old
    last
    ```
    """
    new, away = beside(folder, "new"), old or beside(folder, "old")
    if folder.exists():
        remove(away)
        folder.rename(away)
    new.rename(folder)
    sync(folder.parent)
    remove(beside(folder, "old"))


def whole(folder: Path) -> Path:
    """Return where the folder of this name is: beside it, if the program was killed between two renames.

    The new one counts where it holds a manifest, which is written last.
    """
    new, old = beside(folder, "new"), beside(folder, "old")
    if folder.exists() or not (new.is_dir() or old.is_dir()):
        return folder
    return new if any(new.rglob(MANIFEST)) else old if old.is_dir() else folder


def copy_folder(folder: Path, target: Path) -> None:
    """Let another folder be a copy of this one, as whole as it is: other files, which damage to these does not reach."""
    with new_folder(target) as new:
        for path in sorted(folder.rglob("*")):
            to = new / path.relative_to(folder)
            if path.is_dir():
                to.mkdir(parents=True)
            else:
                shutil.copyfile(path, to)
                sync(to)
        for path in [new, *(path for path in new.rglob("*") if path.is_dir())]:
            sync(path)
    put_in_place(target)


def remove(folder: Path) -> None:
    """Remove a folder. Killed half way, what is left of it has a name that nobody takes for the folder's."""
    if not folder.exists():
        return
    if not folder.name.startswith("."):
        away = beside(folder, "old")
        shutil.rmtree(away, ignore_errors=True)
        folder.rename(away)
        folder = away
    shutil.rmtree(folder)


def beside(folder: Path, what: str) -> Path:
    """Return a hidden name for something of a folder's."""
    return folder.with_name(f".{folder.name}.{what}")


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
