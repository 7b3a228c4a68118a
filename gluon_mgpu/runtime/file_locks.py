"""Locks on files, which the kernel releases when the process that holds them ends, however it ends."""

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
    """Return a lock file that is open, and made if it is not there. Nothing in it is changed.

    It may be another user's; Linux forbids O_CREAT on those in a shared folder (protected_regular).

    Raises
    ------
    OSError
        It cannot be opened; or it is a link, no file, or has another name, too, under which it may be anything.
    """
    for _ in range(2):
        try:
            return _checked(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), path)
        except FileNotFoundError:
            pass
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:  # another process was faster
            continue
    raise FileNotFoundError(errno.ENOENT, "comes and goes", str(path))


def _checked(file: int, path: Path) -> int:
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return file
    os.close(file)
    raise FileExistsError(errno.EEXIST, "not a lock file, or one with another name", str(path))


def take(file: int) -> bool:
    """Lock an open file for this process, and return whether that was possible: False if another process holds it.

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
    """Write who holds a lock into its file."""
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(errors="replace"), 0)
    except OSError as error:  # a full disk: the lock holds without the name
        logger.debug("lock_files: %s", error)


def signature(file: int) -> str:
    """Return who holds a lock, as `sign` wrote it; nothing where it cannot be read."""
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
        There.
    operation : str
        What errors call it.
    """

    def __init__(self, folder: Path, operation: str) -> None:
        self._path, self._operation = folder / LOCK, operation
        self._file: Optional[int] = None
        _locks.add(self)

    def acquire(self, patience_s: float = 0.0) -> None:
        """Take the folder; where its file system has no locks, log a warning and go on without.

        Parameters
        ----------
        patience_s : float, seconds
            How long to wait for another process to end.

        Raises
        ------
        SaveError
            Another process uses it; the message says which. Or the folder's lock file is something else.
        OSError
            The folder cannot be written to.
        """
        end = time.monotonic() + patience_s
        while self._file is None and not self._try(is_last=time.monotonic() >= end):
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Let go of the folder, and remove the lock file. One that is not held is left alone."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if _is_at(self._path, file):
                self._path.unlink()
        except OSError as error:
            logger.debug("%s: %s", self._operation, error)
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a child process has the file, too
        os.close(file)

    def _try(self, *, is_last: bool) -> bool:
        """Return whether the folder is taken, or can have no lock."""
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
                "%s: cannot lock %s (%s): two runs there would damage each other's files. Give each a folder of its own.",
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
                    f"{self._operation}: got {self._path}, which is not a file of this program's alone; expected one that it may "
                    "lock. Remove it: it may be a link.",
                    error.errno,
                ) from error
            raise

    def _forget(self) -> None:
        """Let a forked process have no part in the lock, which would outlive the holder in it."""
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
