"""A parameter server or the scheduler of MXNet's store, without MXNet's Python package, whose import takes seconds.

MXNet starts a server when it is imported with `DMLC_ROLE` in the environment. The server runs in the library, and needs Python
only for a worker's `KVStore.set_optimizer`. This program loads the library, and imports MXNet when a worker sends an optimizer.
The launcher runs it:

    python -m gluon_mgpu.distributed.launcher.server
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any, Optional

from ...runtime.cuda_libraries import mxnet_library

CONTROLLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def main() -> None:
    """Serve until the job ends."""
    library = load_library()
    store = ctypes.c_void_p()
    check(library, library.MXKVStoreCreate(b"dist", ctypes.byref(store)))
    controller = Controller(store)
    check(library, library.MXKVStoreRunServer(store, CONTROLLER(controller), None))
    if controller.server is None:  # MXNet's package frees the store otherwise
        check(library, library.MXKVStoreFree(store))
        library.MXNotifyShutdown()


def load_library() -> ctypes.CDLL:
    """Return MXNet's library."""
    library = ctypes.CDLL(mxnet_library(), ctypes.RTLD_LOCAL)
    library.MXGetLastError.restype = ctypes.c_char_p
    return library


def check(library: ctypes.CDLL, status: int) -> None:
    """Raise MXNet's error if a call has failed."""
    if status:
        raise RuntimeError(library.MXGetLastError().decode(errors="replace"))


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
        role = os.environ.get("DMLC_ROLE", "worker")
        os.environ["DMLC_ROLE"] = "worker"  # for any other role, the import would run a second server
        try:
            mxnet = importlib.import_module("mxnet")
        finally:
            os.environ["DMLC_ROLE"] = role
        store = mxnet.kvstore.kvstore.KVStore(self._store)
        mxnet.profiler.set_kvstore_handle(store.handle)
        return mxnet.kvstore.kvstore_server.KVStoreServer(store)


if __name__ == "__main__":
    main()
