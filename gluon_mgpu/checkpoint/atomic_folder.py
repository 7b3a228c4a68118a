"""Folders that are complete or absent: written under another name, synced, checksummed and renamed; read consistently."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ..errors import SaveError, StateError
from ..runtime.environment import logger

MANIFEST = "manifest.json"
FORMAT, VERSION = "gluon_mgpu checkpoint", 2  # 1 had pickled states, and no manifest

_ATTEMPTS = 50  # to open a folder that is replaced at the same time
_HIDDEN = r"\.(?P<name>.+)\.(new|old|gone\d*)"


class WrittenFile:
    """A binary file, written once from its beginning to its end, that computes its checksum.

    It is not seekable: a change of written bytes would make the checksum wrong.
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
        """Pass buffered bytes to the operating system."""
        self._file.flush()

    def manifest_entry(self) -> Dict[str, Any]:
        """Return the manifest's entry for this file: size and checksum."""
        return {"bytes": self._num_bytes, "sha256": self._sha256.hexdigest()}


class FolderWriter:
    """Writes the files of a folder, syncs each to the disk, and finally writes the manifest that lists them.

    Parameters
    ----------
    folder : pathlib.Path
        An existing, empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: Dict[str, Dict[str, Any]] = {}

    @contextmanager
    def file(self, name: str) -> Iterator[WrittenFile]:
        """Yield a file to write to; it is synced to the disk afterwards."""
        with open(self._folder / name, "wb") as raw:
            written = WrittenFile(raw)
            yield written
            raw.flush()
            os.fsync(raw.fileno())
        self._files[name] = written.manifest_entry()

    def text(self, name: str, text: str) -> None:
        """Write a text, in UTF-8."""
        with self.file(name) as file:
            file.write(text.encode())

    def finish(self, **values: Any) -> None:
        """Write the manifest, with these additional values. A folder with a manifest is complete."""
        content = {"format": FORMAT, "version": VERSION, **values, "files": dict(self._files)}
        sync(self._folder)  # the names of the other files reach the disk before the manifest's
        self.text(MANIFEST, json.dumps(content, indent=1))
        sync(self._folder)


class OpenFolder:
    """Open files of one folder. Replacing the folder does not change them. See `open_folder`.

    Attributes
    ----------
    path : pathlib.Path
        The folder's path when it was opened.
    """

    def __init__(self, path: Path, files: Mapping[str, BinaryIO]) -> None:
        self.path = path
        self._files = dict(files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def inner(self, name: str) -> OpenFolder:
        """Return a subfolder, with those of its files that are open."""
        found = {path[len(name) + 1 :]: file for path, file in self._files.items() if path.startswith(f"{name}/")}
        return OpenFolder(self.path / name, found)

    def file(self, name: str) -> BinaryIO:
        """Return a file, at its beginning."""
        file = self._files[name]
        file.seek(0)
        return file

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return self.file(name).read()

    def location(self, name: str) -> str:
        """Return a path by which other libraries can open this file, even after it was renamed or removed."""
        return f"/dev/fd/{self.file(name).fileno()}"

    def check(self, operation: str) -> Dict[str, Any]:
        """Check the size and checksum of every file in the manifest; return the manifest.

        Raises
        ------
        StateError
            The manifest is invalid or of a later version, or a file is missing or has another size or checksum.
        """
        path = self.path / MANIFEST
        manifest = _parsed(self.read(MANIFEST), path, operation)
        if manifest["version"] > VERSION:
            raise StateError(
                f"{operation}: got {self.path} of version {manifest['version']}; expected {VERSION} or older. Install a newer "
                "gluon_mgpu."
            )
        for name, entry in manifest["files"].items():
            damage = self._damage(name, entry)
            if damage:
                raise StateError(
                    f"{operation}: got {self.path / name}, which is damaged ({damage}); expected the file as it was written. Use "
                    "another checkpoint."
                )
        return manifest

    def _damage(self, name: str, entry: Dict[str, Any]) -> str:
        """Return why a file is damaged; "" if it matches its manifest entry."""
        if name not in self:
            return "it is missing"
        file, sha256 = self.file(name), hashlib.sha256()
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            return f"{size} bytes of {entry['bytes']}"
        for block in iter(lambda: file.read(2**20), b""):
            sha256.update(block)
        return "" if sha256.hexdigest() == entry["sha256"] else "its checksum differs"


@contextmanager
def open_folder(folder: Path, names: Sequence[str], operation: str) -> Iterator[OpenFolder]:
    """Yield the named files that exist in a folder, all of the same version even if the folder is replaced meanwhile.

    A replaced folder is renamed and removed, and its files are never written to again. So files that were opened while the
    folder had its name belong together, and do not change.

    Parameters
    ----------
    folder : pathlib.Path
        If a killed program left the folder under another name, that one is read: see `recover_path`.
    names : sequence of str
        File names, with a slash for files in subfolders.
    operation : str
        Name of the operation in errors.

    Raises
    ------
    StateError
        The folder or a file cannot be read.
    """
    with ExitStack() as stack:
        try:
            yield _opened(folder, names, stack)
        except OSError as error:
            raise StateError(
                f"{operation}: got {folder}, which cannot be read ({error.strerror or error}); expected a folder that this "
                "process may read. Check its permissions and its disk."
            ) from error


def _opened(folder: Path, names: Sequence[str], stack: ExitStack) -> OpenFolder:
    attempt = 0
    while True:
        attempt += 1
        with ExitStack() as opened:
            path = recover_path(folder)
            number = _open_directory(path)
            if number is None:
                files: Dict[str, BinaryIO] = {}
            else:
                opened.callback(os.close, number)
                found = ((name, _open_file(name, number)) for name in names)
                files = {name: opened.enter_context(file) for name, file in found if file is not None}
            if attempt == _ATTEMPTS or (recover_path(folder) == path and _is_at(path, number)):
                stack.push(opened.pop_all())
                return OpenFolder(path, files)
        time.sleep(0.001)


def _open_directory(path: Path) -> Optional[int]:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte in the name
        return None


def _open_file(name: str, folder: int) -> Optional[BinaryIO]:
    """Return a file of an open folder; None if it is missing or not a regular file: opening a pipe would block."""
    try:
        number = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        return None
    return open(number, "rb")


def _is_at(path: Path, number: Optional[int]) -> bool:
    """Return whether an open folder still has its name; if none is open, whether there is still no folder of this name."""
    try:
        there = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return number is None
    return os.path.samestat(there, os.fstat(number)) if number is not None else not stat.S_ISDIR(there.st_mode)


def _parsed(content: bytes, path: Path, operation: str) -> Dict[str, Any]:
    try:
        manifest: Dict[str, Any] = json.loads(content.decode())
        known = manifest["format"] == FORMAT and isinstance(manifest["version"], int)
        named = all(os.path.basename(name) == name for name in manifest["files"])
        sized = all(isinstance(entry["bytes"], int) and entry["sha256"] for entry in manifest["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{operation}: got {path}, which is damaged ({type(error).__name__}: {error}); expected a checkpoint's manifest. Use "
            "another checkpoint."
        ) from error
    if not (known and named and sized):
        raise StateError(
            f"{operation}: got {path}, which is not a checkpoint's manifest; expected a checkpoint folder. Check the path."
        )
    return manifest


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to this one; remove it on an exception. See `commit`."""
    recover(folder)
    new = sibling(folder, "new")
    remove(new)
    try:
        make(new)
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def commit(folder: Path, *, old: Optional[Path] = None) -> None:
    """Replace this folder by the one of `new_folder`. The previous one is removed, or renamed to `old`.

    A link of this name is replaced; its target is not changed.

    ```
    .last.new  last        the new one is written and synced
    .last.new  .last.old   if the program is killed here, `recover_path` finds the new one
    last       .last.old
    last
    ```
    """
    new, away = sibling(folder, "new"), sibling(folder, "old")
    if old is not None and not folder.is_symlink():
        away = old
    if os.path.lexists(folder):
        remove(away)
        folder.rename(away)
    new.rename(folder)
    sync(folder.parent)
    remove(sibling(folder, "old"))
    for path in left_over(folder.parent):
        if path.name.startswith(f".{folder.name}.gone"):
            _remove_tree(path)


def recover(folder: Path) -> None:
    """Finish the renames of a program that was killed between two of them: see `recover_path`."""
    found = recover_path(folder)
    if found != folder and not os.path.lexists(folder):
        found.rename(folder)
        sync(folder.parent)


def recover_path(folder: Path) -> Path:
    """Return the path of this folder's content: a sibling if a program was killed between two renames.

    The new folder is used if it is complete: it holds a manifest, which is written last, and the files that the manifest lists.
    """
    if not folder.name or os.path.lexists(folder):
        return folder
    if not os.path.exists(folder.parent):  # a folder in one that is being replaced
        return recover_path(folder.parent) / folder.name
    new, old = sibling(folder, "new"), sibling(folder, "old")
    return new if _is_finished(new) else old if os.path.isdir(old) else folder


def _is_finished(folder: Path) -> bool:
    """Return whether a folder or its subfolder has a valid manifest, and all listed files in their sizes."""
    if not os.path.isdir(folder):
        return False
    manifests = [path for path in (folder / MANIFEST, *folder.glob(f"*/{MANIFEST}")) if os.path.isfile(path)]
    for path in manifests:
        try:
            files = _parsed(path.read_bytes(), path, "recover")["files"]
            if any((path.parent / name).stat().st_size != entry["bytes"] for name, entry in files.items()):
                return False
        except (StateError, OSError):
            return False
    return bool(manifests)


def copy_folder(folder: Path, target: Path) -> None:
    """Copy a folder to another path. The files are separate, so damage to one folder does not affect the other.

    Manifests are copied last, after all other files are synced: an interrupted copy does not count as complete.
    """
    with new_folder(target) as new:
        paths = sorted(folder.rglob("*"))
        inner = [new / path.relative_to(folder) for path in paths if path.is_dir()]
        for path in inner:
            path.mkdir(parents=True)
        files = [path for path in paths if not path.is_dir()]
        for are_manifests in (False, True):
            for path in files:
                if (path.name == MANIFEST) == are_manifests:
                    to = new / path.relative_to(folder)
                    shutil.copyfile(path, to)
                    sync(to)
            for path in (*inner, new):
                sync(path)
    commit(target)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a new file to, which then replaces the file at `path`; remove it on an exception."""
    new = path.with_name(f".new.{path.name}")
    try:
        yield new
        sync(new)
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def remove(path: Path) -> None:
    """Remove a folder, or a file of this name. It is renamed first, so that an interrupted removal leaves no partial folder.

    Files that cannot be removed, such as open files on NFS, stay under the new name until a later call removes them.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    hidden = re.fullmatch(_HIDDEN, path.name)
    named = path.with_name(hidden["name"]) if hidden else path
    names = (sibling(named, f"gone{number or ''}") for number in count())
    away = next(name for name in names if not os.path.lexists(name))
    path.rename(away)
    _remove_tree(away)


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        logger.warning("checkpoints: could not remove the unused folder %s: %s", path, error)


def left_over(folder: Path) -> List[Path]:
    """Return the hidden folders that killed programs left in `new_folder`, `commit` or `remove`."""
    return [path for path in sorted(folder.glob(".*")) if re.fullmatch(_HIDDEN, path.name)]


def sibling(folder: Path, what: str) -> Path:
    """Return a hidden path next to a folder, derived from its name."""
    return folder.with_name(f".{folder.name}.{what}")


def make(folder: Path) -> None:
    """Make a folder and its missing parents, and sync their names to the disk."""
    missing = []
    for path in (folder, *folder.parents):
        if path.is_dir():
            break
        missing.append(path)
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


_ROOM = (errno.ENOSPC, errno.EDQUOT)
_ADVICE: Dict[Optional[int], Tuple[str, str]] = {
    **dict.fromkeys(_ROOM, ("enough disk space", "Free disk space, or pass a folder on another disk")),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        ("a folder that this process may write to", "Check its permissions and how its disk is mounted, or pass another folder"),
    ),
    errno.EFBIG: ("files of any size", "Raise the limit of file sizes (ulimit -f)"),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTEMPTY),
        ("a folder that no other program writes to or removes", "Look for another run with the same folder, or pass another one"),
    ),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), ("a path whose parents are folders, not files", "Check the path")),
}
_OTHERS = ("a folder that can be written", "Check the path and its disk, or pass another folder")


@contextmanager
def explained(operation: str, folder: Path, *, num_bytes: int = 0, left: str = "") -> Iterator[None]:
    """Raise an OSError of this block as a `SaveError` with the folder, the cause and advice.

    Parameters
    ----------
    operation : str
    folder : pathlib.Path
    num_bytes : int
        Bytes to write; 0 if unknown.
    left : str
        A sentence for the error about the folder that is kept, added if the folder exists.
    """
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        needed = f"{_mb(num_bytes)} needed" if num_bytes else ""
        free = f"{_mb(_free(folder))} free" if error.errno in _ROOM else ""
        details = ", ".join(part for part in (error.strerror or str(error), needed, free) if part)
        condition, advice = _ADVICE.get(error.errno, _OTHERS)
        kept = f" {left}" if left and os.path.isdir(recover_path(folder)) else ""
        raise SaveError(
            f"{operation}: got {folder}, which cannot be written ({details}); expected {condition}. {advice}.{kept}", error.errno
        ) from error


def _free(folder: Path) -> int:
    for path in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(path).free
    return 0


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,} bytes"
