"""Storage for checkpoints, temporary files, and the shared memory of DataLoader workers."""

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
    """A folder and the free space of its file system.

    Attributes
    ----------
    use : str
        Its use: `checkpoints`, `temporary files`, `shared memory`.
    folder : str
        The requested folder.
    exists_at : str
        The folder, or its nearest existing parent.
    total_bytes, free_bytes : int
        Of the file system, free for this user. A quota may leave less.
    free_files : int or None
        The number of files that still fit; None if the file system has no such limit.
    writable : bool
    """

    use: str
    folder: str
    exists_at: str
    total_bytes: int
    free_bytes: int
    free_files: Optional[int]
    writable: bool


def inspect_place(use: str, folder: str) -> StorageLocation:
    """Return the free space at a folder that exists or will be created."""
    there = os.path.abspath(folder)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    system = os.statvfs(there)
    writable = os.access(there, os.W_OK | os.X_OK) and not system.f_flag & os.ST_RDONLY
    free_files = system.f_favail if system.f_files else None
    return StorageLocation(
        use, folder, there, system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize, free_files, writable
    )


def inspect_checkpoints(folder: str) -> StorageLocation:
    """Return the free space for checkpoints."""
    return inspect_place("checkpoints", folder)


def inspect_temporary() -> Optional[StorageLocation]:
    """Return the free space for temporary files; None if no folder for them is writable."""
    try:
        return inspect_place("temporary files", tempfile.gettempdir())
    except FileNotFoundError:  # none of the candidates is writable
        return None


def inspect_shared_memory() -> Optional[StorageLocation]:
    """Return the free space in shared memory; None if there is no shared memory."""
    return inspect_place("shared memory", SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None


def check_checkpoints(place: StorageLocation) -> List[Problem]:
    """Return a problem if checkpoints cannot be written: a run ends when the first one fails."""
    choose = "choose another folder with --output"
    if not os.path.isdir(place.exists_at):
        what = f"{place.exists_at} is not a folder, but checkpoints go below it."
        return [Problem("disk space", what, f"Please {choose}.", True)]
    if not place.writable:
        what = f"Checkpoints cannot be written to {place.folder}: {place.exists_at} is read-only for this user."
        return [Problem("disk space", what, f"Get write permission there, or {choose}.", True)]
    if place.free_files == 0:
        what = f"The file system of {place.exists_at} holds no more files: it has no free inode."
        return [Problem("disk space", what, f"Delete small files there, or {choose}.", True)]
    if place.free_bytes < _LITTLE_BYTES:
        free = f"{format_bytes(place.free_bytes)} of {format_bytes(place.total_bytes)}"
        what = f"{free} are free for checkpoints, in {place.exists_at}."
        to_do = f"Delete old runs, keep fewer checkpoints, or {choose}."
        return [Problem("disk space", what, to_do, place.free_bytes < _FULL_BYTES)]
    return []


def check_temporary(place: Optional[StorageLocation]) -> List[Problem]:
    """Return a problem if temporary files cannot be written."""
    if place is None:
        what = "No folder for temporary files is writable."
        return [Problem("disk space", what, "Free disk space in /tmp, or set TMPDIR to a writable folder.")]
    if place.free_bytes < _FULL_BYTES or place.free_files == 0:
        what = f"The file system of temporary files, {place.folder}, is full: {format_bytes(place.free_bytes)} are free."
        return [Problem("disk space", what, f"Delete old files in {place.folder}, or set TMPDIR to another folder.")]
    return []


def check_shared_memory(place: Optional[StorageLocation]) -> List[Problem]:
    """Return a problem if DataLoader workers cannot pass on their batches."""
    without = "or use DataLoader(num_workers=0) or ArrayLoader, which use no shared memory."
    if place is None:
        what = f"{SHARED_MEMORY} does not exist: DataLoader workers cannot pass on batches."
        return [Problem("shared memory", what, f"Mount it: sudo mount -t tmpfs shm {SHARED_MEMORY}; {without}")]
    if not place.writable:
        what = f"{SHARED_MEMORY} is not writable: DataLoader workers cannot pass on batches."
        return [Problem("shared memory", what, f"Run sudo chmod 1777 {SHARED_MEMORY}, {without}")]
    if place.total_bytes < _LITTLE_SHARED_BYTES:
        what = (
            f"{SHARED_MEMORY} holds {format_bytes(place.total_bytes)}: a DataLoader worker whose batch does not fit ends with a "
            "bus error, and the loader waits for it until its timeout."
        )
        return [Problem("shared memory", what, f"Start the container with --shm-size=8g or --ipc=host, {without}")]
    if place.free_bytes < _LITTLE_SHARED_BYTES / 4:
        what = f"{SHARED_MEMORY} has {format_bytes(place.free_bytes)} of {format_bytes(place.total_bytes)} free."
        return [Problem("shared memory", what, f"Delete files of ended processes (ls -l {SHARED_MEMORY}), {without}")]
    return []
