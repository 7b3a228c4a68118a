"""GPUs that processes of this machine have reserved: one locked file per GPU, until the process ends."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator

from .. import environment
from ..file_locks import open_lock, sign, signature, take

_PATIENCE_S = 3.0
_held: Dict[str, int] = {}  # uuid -> open file


def claim(uuid: str) -> str:
    """Reserve a GPU for this process, and return "", or the process that has already reserved it.

    The driver reports a GPU as busy only when MXNet first computes on it: until then, two jobs could choose the same GPU. The
    kernel releases the lock when the process ends, also after a crash. The lock only affects programs that check it, on machines
    and in containers that share `folder()`. If no file can be created, nothing is reserved, and a debug line is logged.

    Parameters
    ----------
    uuid : str
        The driver's name for it.
    """
    if uuid in _held:
        return ""
    try:
        file = _open(folder() / f"{uuid.replace(os.sep, '_')}.lock")
    except OSError as error:
        environment.logger.debug("use_devices: could not lock %s: %s", uuid, error)
        return ""
    try:
        is_taken = take(file)
    except OSError as error:
        os.close(file)
        environment.logger.debug("use_devices: could not lock %s: %s", uuid, error)
        return ""
    if not is_taken:
        holder = signature(file)
        os.close(file)
        return f"taken by {holder or 'another process'}"
    _held[uuid] = file
    sign(file, f"process {os.getpid()} ({os.path.basename(sys.argv[0]) or 'python'})")
    return ""


def release(uuid: str) -> None:
    """Release a GPU. It does nothing if this process has not reserved it."""
    file = _held.pop(uuid, None)
    if file is not None:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough if a child process has the file as well
        os.close(file)


@contextmanager
def choosing() -> Iterator[None]:
    """Let one process at a time choose GPUs, so that two processes do not each take half of the GPUs that one needs.

    Choosing takes milliseconds: after some seconds, the other process counts as stopped, and this one continues.
    """
    try:
        file = _open(folder() / "choosing.lock")
    except OSError as error:
        environment.logger.debug("use_devices: could not lock: %s", error)
        yield
        return
    try:
        end = time.monotonic() + _PATIENCE_S
        while not _lock(file) and time.monotonic() < end:
            time.sleep(0.01)
        yield
    finally:
        os.close(file)


def is_ours(uuid: str) -> bool:
    """Return whether this process has reserved a GPU."""
    return uuid in _held


def folder() -> Path:
    """Return the folder of the locks, inside the machine's temporary folder. All users may write to it."""
    path = Path(tempfile.gettempdir()) / "gluon_mgpu_gpus"
    try:
        path.mkdir()
        path.chmod(0o1777)
    except FileExistsError:
        if path.is_symlink():  # another user's link, to redirect our files
            raise
    return path


def _open(path: Path) -> int:
    """Open a lock file, which all users may lock."""
    file = open_lock(path)
    if os.fstat(file).st_uid == os.getuid():
        os.fchmod(file, 0o666)  # regardless of the umask
    return file


def _lock(file: int) -> bool:
    try:
        return take(file)
    except OSError:
        return False
