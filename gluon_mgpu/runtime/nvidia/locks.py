"""Which GPUs the processes of this machine have taken for themselves: a lock on a file a GPU, until the process ends."""

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
    """Take a GPU for this process, and return "", or who has taken it before.

    A GPU that was chosen is seen as busy by the driver only when MXNet first computes there: until then, two jobs that choose at
    the same time would choose the same. The kernel lets go of the lock when the process ends, however it ends. It binds programs
    that ask for it alone, on machines and in containers that share the folder of `folder()`. Where no file can be made, nothing
    is claimed, and a debug log line says so.

    Parameters
    ----------
    uuid : str
        As the driver names it.
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
    """Let go of a GPU. One that this process has not taken is left alone."""
    file = _held.pop(uuid, None)
    if file is not None:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a child process has the file, too
        os.close(file)


@contextmanager
def choosing() -> Iterator[None]:
    """Let one process after the other choose inside, so that two do not take half each of what one of them needs.

    Choosing takes milliseconds: after some seconds the other is taken to be stopped, and is not waited for.
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
    """Return whether this process has taken a GPU."""
    return uuid in _held


def folder() -> Path:
    """Return where the locks are: a folder of the machine's temporary one, which all users may write to."""
    path = Path(tempfile.gettempdir()) / "gluon_mgpu_gpus"
    try:
        path.mkdir()
        path.chmod(0o1777)
    except FileExistsError:
        if path.is_symlink():  # somebody else's, to have files written elsewhere
            raise
    return path


def _open(path: Path) -> int:
    """Open a lock file, which all users may lock."""
    file = open_lock(path)
    if os.fstat(file).st_uid == os.getuid():
        os.fchmod(file, 0o666)  # whatever the umask says
    return file


def _lock(file: int) -> bool:
    try:
        return take(file)
    except OSError:
        return False
