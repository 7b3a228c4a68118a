"""A parameter server or the scheduler of MXNet's store, without MXNet's Python package, whose import takes seconds.

MXNet starts a server when it is imported with `DMLC_ROLE` in the environment. The server runs in the library, and needs Python
only for a worker's `KVStore.set_optimizer`. This program loads the library, and imports MXNet when a worker sends an optimizer.
The launcher runs it:

    python -c "from gluon_mgpu_startup.server import main; main()"
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from typing import Any, Optional

_CONTROLLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def main() -> None:
    """Serve until the job ends. The settings of gluon_mgpu apply: malloc keeps the memory of messages."""
    for name in ("gluon_mgpu", "gluon_mgpu.runtime"):  # created, but not run: they would import MXNet
        spec = importlib.util.find_spec(name)
        assert spec is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
    importlib.import_module("gluon_mgpu.runtime.environment").apply_settings()
    path = importlib.import_module("gluon_mgpu.runtime.cuda_libraries").mxnet_library()
    library = ctypes.CDLL(path, ctypes.RTLD_LOCAL)
    library.MXGetLastError.restype = ctypes.c_char_p
    store = ctypes.c_void_p()
    _check(library, library.MXKVStoreCreate(b"dist", ctypes.byref(store)))
    controller = Controller(store)
    _check(library, library.MXKVStoreRunServer(store, _CONTROLLER(controller), None))
    if controller.server is None:  # MXNet's package frees the store otherwise
        _check(library, library.MXKVStoreFree(store))
        library.MXNotifyShutdown()


class Controller:
    """Passes the commands of workers to MXNet's server.

    Parameters
    ----------
    store : ctypes.c_void_p
        The handle of the store.
    """

    def __init__(self, store: ctypes.c_void_p) -> None:
        self._store = store
        self.server: Optional[Any] = None  # MXNet's KVStoreServer, once a command has come

    def __call__(self, command: int, body: bytes, unused: Any) -> None:
        if self.server is None:
            self.server = self._import()
        self.server._controller()(command, body, unused)

    def _import(self) -> Any:
        if not hasattr(sys.modules.get("gluon_mgpu"), "Trainer"):  # those of `main`
            for name in [name for name in sys.modules if name.split(".")[0] == "gluon_mgpu"]:
                del sys.modules[name]
        role = os.environ.get("DMLC_ROLE", "worker")
        os.environ["DMLC_ROLE"] = "worker"  # for any other role, the import would run a second server
        try:
            mxnet = importlib.import_module("gluon_mgpu").runtime.load_mxnet()
        finally:
            os.environ["DMLC_ROLE"] = role
        store = mxnet.kvstore.kvstore.KVStore(self._store)
        mxnet.profiler.set_kvstore_handle(store.handle)
        return mxnet.kvstore.kvstore_server.KVStoreServer(store)


def _check(library: Any, status: int) -> None:
    if status:
        raise RuntimeError(library.MXGetLastError().decode(errors="replace"))
