"""Which GPUs the processes of this machine have taken for themselves: a lock on a file a GPU, until the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator

from .. import runtime

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
        runtime.logger.debug("use_devices: could not lock %s: %s", uuid, error)
        return ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read(file)
        os.close(file)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return f"taken by {holder or 'another process'}"
        runtime.logger.debug("use_devices: could not lock %s: %s", uuid, error)
        return ""
    _held[uuid] = file
    _write(file)
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
        runtime.logger.debug("use_devices: could not lock: %s", error)
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
    """Open a lock file, which may be another user's; Linux forbids O_CREAT on those in a shared folder (protected_regular)."""
    for _ in range(2):
        try:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:  # somebody was faster
            continue
        os.fchmod(file, 0o666)  # whatever the umask says
        return file
    raise FileNotFoundError(errno.ENOENT, "comes and goes", str(path))


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write(file: int) -> None:
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} ({os.path.basename(sys.argv[0]) or 'python'})".encode(), 0)
    except OSError as error:  # a full disk: the lock holds without the name
        runtime.logger.debug("use_devices: %s", error)


def _read(file: int) -> str:
    try:
        text = os.pread(file, 200, 0).decode(errors="replace")
    except OSError:
        return ""
    return "".join(letter for letter in text if letter.isprintable())
