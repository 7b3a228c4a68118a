"""One process uses a folder at a time. The kernel releases the lock when the process that holds it ends, also after a crash."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import SaveError
from .environment import logger

LOCK = ".gluon_mgpu.lock"  # in the folder of a run
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class FolderLock:
    """Lets one process use a folder at a time.

    Parameters
    ----------
    folder : pathlib.Path
        An existing folder.
    operation : str
        Its name in errors.
    """

    def __init__(self, folder: Path, operation: str) -> None:
        self._path, self._operation = folder / LOCK, operation
        self._lock = FileLock(str(self._path), thread_local=False)

    def acquire(self, patience_s: float = 0.0) -> None:
        """Lock the folder, unless it is locked here already. If its file system has no locks, log a warning and continue without.

        Parameters
        ----------
        patience_s : float, seconds
            The time to wait for another process to end.

        Raises
        ------
        SaveError
            Another process uses it.
        OSError
            The folder cannot be written to, or its lock file is a link.
        """
        try:
            with suppress(FileNotFoundError):  # filelock before 3.20.1, all that Python 3.9 has, empties what a link points to
                status = os.lstat(self._path)
                if stat.S_ISLNK(status.st_mode) or status.st_nlink != 1:
                    raise OSError(errno.ELOOP, "Is a link", str(self._path))
            if not self._lock.is_locked:
                self._lock.acquire(timeout=patience_s)
        except (OSError, RuntimeError) as error:
            # filelock: NotImplementedError without locks of the file system, another RuntimeError for a lock of this process
            if isinstance(error, NotImplementedError) or getattr(error, "errno", None) in _NO_LOCKS:
                with suppress(OSError):
                    self._path.unlink()
                what = "two runs there would damage each other's files. Use a separate folder for each run."
                logger.warning("%s: cannot lock %s (%s): %s", self._operation, self._path.parent, error, what)
            elif isinstance(error, (Timeout, RuntimeError)):
                raise SaveError(
                    f"{self._operation}: got {self._path.parent}, which another run has locked; expected a folder that no other "
                    "run uses. Wait until it ends, or pass another folder.",
                    errno.EBUSY,
                ) from error
            else:
                raise

    def release(self) -> None:
        """Release the folder, and remove the lock file. It does nothing if the lock is not held."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._path.unlink()  # still locked: a process that waits for this file makes a new one
            self._lock.release()
