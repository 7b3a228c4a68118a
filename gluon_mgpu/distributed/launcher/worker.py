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
import gc
import os
import runpy
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, Dict, List, NoReturn, Optional, Sequence

from ...runtime.wait_at_exit import finish

_program: Dict[str, Any] = {}  # its variables, kept: freeing a store waits for the other workers
_pid = os.getpid()


def main(arguments: Sequence[str]) -> None:
    """Run a script, or a module after `-m`, with its arguments."""
    try:
        _run_and_finish(list(arguments))
    except SystemExit as end:
        _end_now(_status_of(end))
    except BaseException as error:
        error.__traceback__ = _own_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        _end_now(130 if isinstance(error, KeyboardInterrupt) else 1)


def _run_and_finish(arguments: List[str]) -> None:
    try:
        _program.update(_run(arguments))
    except SystemExit as end:
        if _status_of(end, quiet=True):
            raise
        _program["end"] = end  # it holds the program's variables
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
    for store in [one for one in gc.get_objects() if type(one) is mxnet.kvstore.kvstore.KVStore]:
        # Its threads would run on at the exit, and abort the process. Freed, it would wait for workers that wait for this one.
        mxnet.base._LIB.MXKVStoreSetBarrierBeforeExit(store.handle, 0)
        store.__del__()
        store.handle.value = None  # so that a second __del__ does nothing


def _status_of(end: SystemExit, *, quiet: bool = False) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    if not quiet:
        print(end.code, file=sys.stderr)
    return 1


def _own_part(traceback: Optional[TracebackType]) -> Optional[TracebackType]:
    """Return the part of a traceback that begins with the program."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        traceback = traceback.tb_next
    return traceback


def _end_now(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no stream, a closed one, or a pipe that is not read
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
