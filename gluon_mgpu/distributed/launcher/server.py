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
    library, store = load_library(), ctypes.c_void_p()
    check(library, library.MXKVStoreCreate(b"dist", ctypes.byref(store)))
    check(library, library.MXKVStoreRunServer(store, CONTROLLER(Controller(store)), None))
    os._exit(0)


def load_library() -> ctypes.CDLL:
    """Return MXNet's library."""
    try:
        library = ctypes.CDLL(mxnet_library() or "libmxnet.so", ctypes.RTLD_LOCAL)
    except OSError:
        importlib.import_module("gluon_mgpu.runtime.loaded")  # its error names what is missing
        raise
    library.MXGetLastError.restype = ctypes.c_char_p
    return library


def num_gpus() -> int:
    """Return the number of GPUs that MXNet sees."""
    count = ctypes.c_int()
    load_library().MXGetGPUCount(ctypes.byref(count))  # an error without a driver leaves 0
    return count.value


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

    def __call__(self, *command: Any) -> None:
        if self.server is None:
            role = os.environ.get("DMLC_ROLE", "worker")
            os.environ["DMLC_ROLE"] = "worker"  # for any other role, the import would run a second server
            mxnet = importlib.import_module("mxnet")
            os.environ["DMLC_ROLE"] = role
            self.server = mxnet.kvstore.kvstore_server.KVStoreServer(mxnet.kvstore.kvstore.KVStore(self._store))
        self.server._controller()(*command)


if __name__ == "__main__":
    main()
