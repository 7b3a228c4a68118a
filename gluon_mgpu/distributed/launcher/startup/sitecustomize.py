"""The exit of a worker: without an error, its devices first finish all queued work; after a failure, it waits for nothing.

Python imports `sitecustomize` when it starts. The launcher puts this folder first on the workers' `PYTHONPATH`. If another
folder on the path has a `sitecustomize`, this file runs it.

    exception, sys.exit(3), raise SystemExit(3) ──► exit handlers of the program ──► ours, the last: flush, _exit
    no error ─► exit handlers of the program ──► ours, the last: wait for the devices ──► free the store ──► MXNet's own, end
                                                                      └── an operation failed: report it, _exit(1)

Sums over processes are queued like other operations. A worker that drops them at its exit leaves the others waiting. MXNet's
own exit handler drops queued operations, so it runs after the wait. Stores do not wait at the exit for other processes: the
launcher detects a process that is missing.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any, Callable, List

_codes: List[int] = []  # exit codes of an uncaught SystemExit
_code_of = vars(SystemExit)["code"].__get__
_excepthook = threading.excepthook
_register = atexit.register
_mxnets: List[Callable[[], None]] = []  # MXNet's own exit handlers
_pid = os.getpid()


class _Exit(SystemExit):
    """Replaces `SystemExit`, also in `sys.exit`; records its exit code if it is not caught.

    The interpreter drops the exception before exit handlers run, so they cannot see it.
    """

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = _code_of(self)
        try:
            sys._getframe(1)
        except ValueError:  # no Python frame: the interpreter itself reads the code, because it ends
            _codes.append(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
        return code


def _exit(status: Any = None, /) -> None:
    raise _Exit(status)


def _hook(arguments: Any, /) -> None:
    """Ignore `_Exit` as `threading.excepthook` ignores the original `SystemExit`; pass other exceptions to it."""
    if arguments.exc_type is not _Exit:
        _excepthook(arguments)


def _register_later(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Callable[..., Any]:
    """Do what `atexit.register` does, but keep MXNet's own handler for `_end`: after it, the engine drops queued operations."""
    if getattr(function, "__module__", "") == "mxnet.base":
        _mxnets.append(function)
        return function
    return _register(function, *arguments, **named)


def _end() -> None:
    """Wait for the devices and free MXNet's stores; or exit at once if the program has failed."""
    uncaught = getattr(sys, "last_type", None)  # the interpreter sets it when it prints an uncaught exception
    if uncaught is not None:
        _codes.append(130 if issubclass(uncaught, KeyboardInterrupt) else 1)
    if "mxnet" not in sys.modules:
        return
    if any(_codes) or os.getpid() != _pid:  # a forked child leaves the parent's store alone
        _exit_now(_codes[-1] if _codes else 0)
    _wait_for_devices()
    _free_stores()
    _leave_horovod()
    for notify in _mxnets:
        notify()


def _exit_now(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no stream, a closed one, or a pipe that is not read
            stream.flush()
    os._exit(status)


def _wait_for_devices() -> None:
    """Wait until all queued operations are done; exit with status 1 if one failed and the program has not noticed."""
    base = sys.modules.get("mxnet.base")
    if base is None:
        return
    with suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would run only after the wait
    try:
        base.check_call(base._LIB.MXNDArrayWaitAll())
    except Exception:
        print("An operation failed after the program had last waited for its devices:", file=sys.stderr)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        _exit_now(1)


def _free_stores() -> None:
    """Free the stores that the interpreter leaves: their threads still run at the exit, and would abort the process."""
    kind = getattr(sys.modules.get("mxnet.kvstore.kvstore"), "KVStore", None)
    for store in [one for one in gc.get_objects() if kind is not None and type(one) is kind]:
        # Otherwise it would wait for the other workers, which may wait for this one in a sum.
        sys.modules["mxnet.base"]._LIB.MXKVStoreSetBarrierBeforeExit(store.handle, 0)
        store.__del__()
        store.handle.value = None  # so that a second __del__ does nothing


def _leave_horovod() -> None:
    """Shut Horovod down; `distributed/horovod.py` has removed its own exit handler."""
    horovod = sys.modules.get("horovod.mxnet")
    if horovod is not None and horovod.is_initialized():
        horovod.shutdown()


def _run_the_next() -> None:
    """Run the `sitecustomize` that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours


if __name__ == "sitecustomize":
    if os.environ.get("DMLC_ROLE") == "worker" or "HOROVOD_RANK" in os.environ:
        _Exit.__name__ = _Exit.__qualname__ = "SystemExit"
        _Exit.__module__ = "builtins"
        setattr(builtins, "SystemExit", _Exit)  # noqa: B010  (to mypy it is another type)
        setattr(sys, "exit", _exit)  # noqa: B010
        threading.excepthook = _hook
        setattr(atexit, "register", _register_later)  # noqa: B010
        setattr(sys, "gluon_mgpu_waits", True)  # noqa: B010  (gluon_mgpu/runtime/exits.py leaves it to this file)
        _register(_end)  # the first to be registered is the last to run
    _run_the_next()
