"""Locks on files. The kernel releases them when the process that holds them ends, also after a crash."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
import time
import weakref
from pathlib import Path
from typing import Optional

from ..errors import SaveError
from .environment import logger

LOCK = ".gluon_mgpu.lock"  # in the folder of a run
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_POLL_S = 0.05


def open_lock(path: Path) -> int:
    """Open a lock file and return it; create it if it does not exist. Its content is not changed.

    It may belong to another user; Linux forbids O_CREAT for such files in a shared folder (protected_regular).

    Raises
    ------
    OSError
        It cannot be opened; or it is a link, not a file, or has a second name (hard link).
    """
    for _ in range(2):
        try:
            return _checked(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), path)
        except FileNotFoundError:
            pass
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:  # another process has created it
            continue
    raise FileNotFoundError(errno.ENOENT, "is created and removed repeatedly", str(path))


def _checked(file: int, path: Path) -> int:
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return file
    os.close(file)
    raise FileExistsError(errno.EEXIST, "not a lock file, or a hard link", str(path))


def take(file: int) -> bool:
    """Lock an open file for this process, and return whether it worked: False if another process holds the lock.

    Raises
    ------
    OSError
        The file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def sign(file: int, text: str) -> None:
    """Write the holder of a lock into its file."""
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(errors="replace"), 0)
    except OSError as error:  # a full disk: the lock holds without the name
        logger.debug("lock_files: %s", error)


def signature(file: int) -> str:
    """Return the holder of a lock, as written by `sign`; "" if it cannot be read."""
    try:
        text = os.pread(file, 400, 0).decode(errors="replace")
    except OSError:
        return ""
    return "".join(letter for letter in text if letter.isprintable())


class FolderLock:
    """Lets one process use a folder at a time. A process that was forked from the holder does not hold it.

    Parameters
    ----------
    folder : pathlib.Path
        An existing folder.
    operation : str
        Its name in errors.
    """

    def __init__(self, folder: Path, operation: str) -> None:
        self._path, self._operation = folder / LOCK, operation
        self._file: Optional[int] = None
        _locks.add(self)

    def acquire(self, patience_s: float = 0.0) -> None:
        """Lock the folder. If its file system has no locks, log a warning and continue without.

        Parameters
        ----------
        patience_s : float, seconds
            The time to wait for another process to end.

        Raises
        ------
        SaveError
            Another process uses it; the message names it. Or the folder's lock file is not a plain file.
        OSError
            The folder cannot be written to.
        """
        end = time.monotonic() + patience_s
        while self._file is None and not self._try(is_last=time.monotonic() >= end):
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Release the folder, and remove the lock file. It does nothing if the lock is not held."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if _is_at(self._path, file):
                self._path.unlink()
        except OSError as error:
            logger.debug("%s: %s", self._operation, error)
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough if a child process has the file as well
        os.close(file)

    def _try(self, *, is_last: bool) -> bool:
        """Return whether the folder is locked, or cannot be locked."""
        file = self._opened()
        try:
            if take(file):
                if _is_at(self._path, file):  # the holder before may have removed it
                    sign(file, _this_process())
                    self._file, file = file, -1
                    return True
            elif is_last:
                raise SaveError(
                    f"{self._operation}: got {self._path.parent}, which {signature(file) or 'another process'} has locked; "
                    "expected a folder that no other run uses. Wait until it ends, or pass another folder.",
                    errno.EBUSY,
                )
            return False
        except SaveError:
            raise
        except OSError as error:
            logger.warning(
                "%s: cannot lock %s (%s): two runs there would damage each other's files. Use a separate folder for each run.",
                self._operation,
                self._path.parent,
                error.strerror,
            )
            if _is_at(self._path, file):
                self._path.unlink()
            return True
        finally:
            if file >= 0:
                os.close(file)

    def _opened(self) -> int:
        try:
            return open_lock(self._path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EEXIST, errno.EISDIR, errno.ENXIO):
                raise SaveError(
                    f"{self._operation}: got {self._path}, which is not a plain file; expected one that this program "
                    "may lock. Remove it: it may be a link.",
                    error.errno,
                ) from error
            raise

    def _forget(self) -> None:
        """Drop the lock in a forked process, which would otherwise keep it after the holder has ended."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_locks):
        lock._forget()


os.register_at_fork(after_in_child=_forget_all)


def _is_at(path: Path, file: int) -> bool:
    """Return whether an open file still has its name."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except OSError:
        return False


def _this_process() -> str:
    begun = time.strftime("since %Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} ({' '.join(sys.argv)[:200] or 'python'}; {begun})"
