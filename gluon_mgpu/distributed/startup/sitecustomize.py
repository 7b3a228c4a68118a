"""How a worker ends: when it has failed, without MXNet's store, which would wait for the other workers for ever; else with it.

Python imports `sitecustomize` when it starts. The launcher puts this folder in front of the workers' `PYTHONPATH`; a
`sitecustomize` that stands behind it is run as if this one were not there.

    exception or sys.exit(3) ──► exit handlers of the program ──► ours, the last: flush, _exit ──✗──► the store's exit barrier
    all well ──────────────────► exit handlers of the program ──► ours, the last: free the store ───► its exit barrier, end
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from contextlib import suppress
from typing import Any, List

_codes: List[int] = []  # what sys.exit ended the program with


class _Exit(SystemExit):
    """What `sys.exit` raises here; it remembers its code when nobody has caught it."""

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = vars(SystemExit)["code"].__get__(self)
        try:
            sys._getframe(1)
        except ValueError:  # no Python function asks: it is the interpreter, which ends
            _codes.append(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
        return code


def _exit(status: Any = None, /) -> None:
    raise _Exit(status)


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


def _free_stores() -> None:
    """Free stores that the interpreter would not: one that is left when the process ends aborts it, its threads being alive."""
    kind = getattr(sys.modules.get("mxnet.kvstore.kvstore"), "KVStore", None)
    for store in [one for one in gc.get_objects() if kind is not None and type(one) is kind]:
        store.__del__()
        store.handle.value = None  # what freeing it again does nothing with


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
    if os.environ.get("DMLC_ROLE") == "worker":
        setattr(sys, "exit", _exit)  # noqa: B010  (to mypy it is another type)
        atexit.register(_end)  # the first to be registered is the last to run
    _run_the_next()
