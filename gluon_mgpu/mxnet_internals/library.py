"""MXNet's library without its Python package, whose import takes seconds: where it is, and its store for several processes.

Source: MXNet 1.9.1, include/mxnet/c_api.h.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from typing import Any, Callable

_CONTROLLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def mxnet_library() -> str:
    """Return the file that `import mxnet` will load, "" if there is none."""
    spec = importlib.util.find_spec("mxnet")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [os.environ.get("MXNET_LIBRARY_PATH", ""), *(os.path.join(folder, "libmxnet.so") for folder in folders)]
    return next((file for file in files if os.path.isfile(file)), "")


def load_library() -> ctypes.CDLL:
    """Return the library."""
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


class Store:
    """A node of MXNet's store for several processes: a server, a worker, or the scheduler, as `DMLC_ROLE` says.

    Parameters
    ----------
    kind : str
        `dist_sync`, for example. A worker waits for all the others.
    """

    def __init__(self, kind: str) -> None:
        self._library, self.handle = load_library(), ctypes.c_void_p()
        self._check(self._library.MXKVStoreCreate(kind.encode(), ctypes.byref(self.handle)))

    def run_server(self, controller: Callable[..., object]) -> None:
        """Serve, or schedule, until the job ends. `controller(number, text, pointer)` gets the commands of the workers."""
        self._check(self._library.MXKVStoreRunServer(self.handle, _CONTROLLER(controller), None))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._library.MXGetLastError().decode(errors="replace"))


def command_of(handle: ctypes.c_void_p) -> Callable[..., Any]:
    """Return the function with which MXNet's Python package carries out the commands of workers, for this store."""
    mxnet = importlib.import_module("mxnet")
    return mxnet.kvstore.kvstore_server.KVStoreServer(mxnet.kvstore.kvstore.KVStore(handle))._controller()  # type: ignore[no-any-return]
