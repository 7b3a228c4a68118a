"""The end of a process: devices finish their queues, and a failed operation makes the process fail.

    end of the program ──► exit handlers registered later ──► ours: wait ──► MXNet's own, which drops queued operations
                                                                           └── an operation failed: report it, exit with 1

By default, MXNet drops queued operations when a process ends, and with them their errors: a program whose last operation failed
would exit with 0.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any, Callable


def wait_at_exit(mxnet: Any) -> None:
    """Let this process wait for its devices when it ends, unless an exception ends it.

    A process of horovodrun does not wait: it would not know that it has failed, and could deadlock with the others.
    """
    if "HOROVOD_RANK" not in os.environ or "GLUON_MGPU_RANK" in os.environ:  # the launcher's workers see how they end
        atexit.register(_wait_unless_failed, mxnet, os.getpid())


def _wait_unless_failed(mxnet: Any, pid: int) -> None:
    if os.getpid() != pid or hasattr(sys, "last_type"):  # a forked child, or a program that an exception has ended
        return
    if not finish(mxnet):
        sys.gluon_mgpu_fails = _Fail()  # type: ignore[attr-defined]


class _Fail:
    """Ends the process with status 1 when the interpreter clears `sys`: after all exit handlers, with all output written."""

    # Tried in a handler: sys.exit leaves the status 0, os._exit skips later handlers and open files, a broken stdout gives 120.
    def __del__(self, end: Callable[[int], Any] = os._exit, num: Callable[[], int] = os.getpid, pid: int = os.getpid()) -> None:
        if num() == pid:
            end(1)


def finish(mxnet: Any) -> bool:
    """Wait until all queued operations are done; return whether none failed without the program noticing, else report it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would run only after the wait
    try:
        mxnet.nd.waitall()
    except mxnet.MXNetError:
        with suppress(AttributeError, OSError, ValueError):  # no standard error
            print("An operation failed after the program had last waited for its devices:", file=sys.stderr)
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return False
    return True
