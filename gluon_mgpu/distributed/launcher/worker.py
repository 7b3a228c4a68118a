"""Runs a Python program as a worker of a job, sees how it ends, and ends the process accordingly.

    python -m gluon_mgpu.distributed.launcher.worker script.py --its arguments
    python -m gluon_mgpu.distributed.launcher.worker -m module --its arguments

    an exception, sys.exit(3) ──► its traceback ──► end at once, also if threads of the program still run
    no error ──► its threads end ──► wait for the devices ──► free the stores ──► exit handlers, end
                                       └── an operation failed: report it, end at once with status 1

Sums over processes are queued like other operations. A worker that drops them at its exit leaves the others waiting. A worker
that has failed must not wait for them: the launcher would find out late, and name another one as the cause. Stores do not wait
for other processes at the exit: the launcher detects a process that is missing.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from contextlib import suppress
from typing import Any, Dict, List, NoReturn

from ...mxnet_internals.living import free_stores
from ...runtime.wait_at_exit import finish
from .guard import PASSED_ON

_program: Dict[str, Any] = {}  # its variables, kept: freeing a store waits for the other workers
_pid = os.getpid()
_OURS = (__file__, runpy.__file__, "<frozen runpy>")  # the frames around the program


def main(arguments: List[str]) -> None:
    """Run a script, or a module after `-m`, with its arguments."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    except KeyboardInterrupt:  # while Python started
        _end_now(130)
    try:
        _program.update(_run(arguments))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        status = status if abs(status) < 2**31 else -1  # as Python does
        if status & 0xFF:
            if not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            _end_now(status & 0xFF)
        _program["end"] = end  # it holds the program's variables
    except BaseException as error:
        traceback = error.__traceback__  # tried: with runpy, exec and sys.excepthook, it begins with the frames of their callers
        while traceback is not None and traceback.tb_frame.f_code.co_filename in _OURS:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        _end_now(130 if isinstance(error, KeyboardInterrupt) else 1)
    atexit.register(_finish)  # the first exit handler to run, after the interpreter has waited for the program's threads


def _run(arguments: List[str]) -> Dict[str, Any]:
    """Run the program as Python would; return its variables."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
    return runpy.run_path(arguments[0], run_name="__main__")


def _finish() -> None:
    """Wait for the devices, and free MXNet's stores."""
    mxnet = sys.modules.get("mxnet")
    if mxnet is None:
        return
    if os.getpid() != _pid:  # a forked child leaves the parent's store alone
        _end_now(0)
    if not finish(mxnet):
        _end_now(1)
    free_stores(mxnet)


def _end_now(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no stream, a closed one, or a pipe that is not read
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
