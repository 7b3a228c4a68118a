"""Where files go: checkpoints, temporary files, and the shared memory of DataLoader workers."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import List, Optional

from ..runtime.units import format_bytes
from .findings import Problem

_FULL_BYTES = 100 * 2**20  # a checkpoint of ResNet-18 with momentum: 11.2 million weights, 8 bytes each
_LITTLE_BYTES = 2 * 2**30
_LITTLE_SHARED_BYTES = 2**30
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class StorageLocation:
    """A folder and the room in its file system.

    Attributes
    ----------
    use : str
        What goes there: `checkpoints`, `temporary files`, `shared memory`.
    folder : str
        That was asked for.
    exists_at : str
        It, or the nearest folder above that exists.
    total_bytes, free_bytes : int
        Of the file system, free for this user. A quota may leave less.
    free_files : int or None
        How many more files it holds; None where the file system does not count.
    writable : bool
    """

    use: str
    folder: str
    exists_at: str
    total_bytes: int
    free_bytes: int
    free_files: Optional[int]
    writable: bool


def look_at_place(use: str, folder: str) -> StorageLocation:
    """Return the room where a folder is, or would be made."""
    there = os.path.abspath(folder)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    system = os.statvfs(there)
    writable = os.access(there, os.W_OK | os.X_OK) and not system.f_flag & os.ST_RDONLY
    free_files = system.f_favail if system.f_files else None
    return StorageLocation(
        use, folder, there, system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize, free_files, writable
    )


def look_at_checkpoints(folder: str) -> StorageLocation:
    """Return the room for checkpoints."""
    return look_at_place("checkpoints", folder)


def look_at_temporary() -> Optional[StorageLocation]:
    """Return the room for temporary files, None where there is no folder in which one could be made."""
    try:
        return look_at_place("temporary files", tempfile.gettempdir())
    except FileNotFoundError:  # of all candidates, none can be written in
        return None


def look_at_shared_memory() -> Optional[StorageLocation]:
    """Return the room in shared memory, None where there is none."""
    return look_at_place("shared memory", SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None


def check_checkpoints(place: StorageLocation) -> List[Problem]:
    """Return whether checkpoints can be written; a run ends where the first one cannot."""
    choose = "choose a folder elsewhere: --output"
    if not os.path.isdir(place.exists_at):
        return [Problem("disk space", f"{place.exists_at} is no folder, and checkpoints go below it.", f"Please {choose}.", True)]
    if not place.writable:
        what = f"Checkpoints cannot be written to {place.folder}: {place.exists_at} is read-only for this user."
        return [Problem("disk space", what, f"Get the right to write there, or {choose}.", True)]
    if place.free_files == 0:
        what = f"The file system of {place.exists_at} holds no more files: it has no free inode."
        return [Problem("disk space", what, f"Delete small files there, or {choose}.", True)]
    if place.free_bytes < _LITTLE_BYTES:
        free = f"{format_bytes(place.free_bytes)} of {format_bytes(place.total_bytes)}"
        what = f"{free} are free where checkpoints go, {place.exists_at}."
        to_do = f"Delete old runs, keep fewer checkpoints, or {choose}."
        return [Problem("disk space", what, to_do, place.free_bytes < _FULL_BYTES)]
    return []


def check_temporary(place: Optional[StorageLocation]) -> List[Problem]:
    """Return whether temporary files can be written."""
    if place is None:
        what = "There is no folder in which a temporary file can be made."
        return [Problem("disk space", what, "Make room in /tmp, or set TMPDIR to a folder that can be written to.")]
    if place.free_bytes < _FULL_BYTES or place.free_files == 0:
        what = f"The file system of temporary files, {place.folder}, is full: {format_bytes(place.free_bytes)} are free."
        return [Problem("disk space", what, f"Delete what is old in {place.folder}, or set TMPDIR to another folder.")]
    return []


def check_shared_memory(place: Optional[StorageLocation]) -> List[Problem]:
    """Return whether DataLoader workers can hand over their batches."""
    without = "or use DataLoader(num_workers=0), or ArrayLoader, which need none."
    if place is None:
        what = f"There is no {SHARED_MEMORY}: DataLoader workers cannot hand over batches."
        return [Problem("shared memory", what, f"Mount it: sudo mount -t tmpfs shm {SHARED_MEMORY}; {without}")]
    if not place.writable:
        what = f"{SHARED_MEMORY} cannot be written to: DataLoader workers cannot hand over batches."
        return [Problem("shared memory", what, f"Run sudo chmod 1777 {SHARED_MEMORY}, {without}")]
    if place.total_bytes < _LITTLE_SHARED_BYTES:
        what = (
            f"{SHARED_MEMORY} holds {format_bytes(place.total_bytes)}: a DataLoader worker that finds no room for its batch "
            "there ends with a bus error, and the loader waits for it until its timeout."
        )
        return [Problem("shared memory", what, f"Start the container with --shm-size=8g or --ipc=host, {without}")]
    if place.free_bytes < _LITTLE_SHARED_BYTES / 4:
        what = f"{SHARED_MEMORY} has {format_bytes(place.free_bytes)} of {format_bytes(place.total_bytes)} free."
        return [Problem("shared memory", what, f"Delete what ended processes have left there (ls -l {SHARED_MEMORY}), {without}")]
    return []
