"""How a worker ends: when it has failed, without MXNet's store, which would wait for the other workers for ever; else with it.

Python imports `sitecustomize` when it starts. The launcher puts this folder in front of the workers' `PYTHONPATH`; a
`sitecustomize` that stands behind it is run as if this one were not there.

    exception, sys.exit(3), raise SystemExit(3) ──► exit handlers of the program ──► ours, the last: flush, _exit
    all well ─────────────────────────────────────► exit handlers of the program ──► ours, the last: free the store, end

A process that goes on without the others, or that they wait for, is the launcher's to see: no store waits at the exit for them.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import os
import sys
import threading
from contextlib import suppress
from typing import Any, List

_codes: List[int] = []  # what a SystemExit has ended the program with
_code_of = vars(SystemExit)["code"].__get__
_excepthook = threading.excepthook


class _Exit(SystemExit):
    """What is called `SystemExit` here, and raised by `sys.exit`; it remembers its code when nobody has caught it.

    The interpreter has dropped the exception when exit handlers run, and tells them nothing of it.
    """

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = _code_of(self)
        try:
            sys._getframe(1)
        except ValueError:  # no Python function asks: it is the interpreter, which ends
            _codes.append(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
        return code


def _exit(status: Any = None, /) -> None:
    raise _Exit(status)


def _hook(arguments: Any, /) -> None:
    """Do what `threading.excepthook` does, which knows the other `SystemExit` alone: a thread may end so without a word."""
    if arguments.exc_type is not _Exit:
        _excepthook(arguments)


def _end() -> None:
    """Leave MXNet's stores in order; or at once, when the program has failed and there may be a store."""
    uncaught = getattr(sys, "last_type", None)  # the interpreter sets it when it prints an exception that nobody caught
    if uncaught is not None:
        _codes.append(130 if issubclass(uncaught, KeyboardInterrupt) else 1)
    if "mxnet" not in sys.modules:
        return
    if any(_codes):
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # none, closed, or nobody reads
                stream.flush()
        os._exit(_codes[-1])
    _free_stores()
    _leave_horovod()


def _free_stores() -> None:
    """Free stores that the interpreter would not: one that is left when the process ends aborts it, its threads being alive."""
    kind = getattr(sys.modules.get("mxnet.kvstore.kvstore"), "KVStore", None)
    for store in [one for one in gc.get_objects() if kind is not None and type(one) is kind]:
        # Else it would wait for the other workers, also for those that wait in a sum for this one.
        sys.modules["mxnet.base"]._LIB.MXKVStoreSetBarrierBeforeExit(store.handle, 0)
        store.__del__()
        store.handle.value = None  # what freeing it again does nothing with


def _leave_horovod() -> None:
    """Shut Horovod down, which `processes/horovod.py` keeps from doing so by itself."""
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
        atexit.register(_end)  # the first to be registered is the last to run
    _run_the_next()
