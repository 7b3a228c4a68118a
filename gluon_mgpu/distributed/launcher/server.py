"""A parameter server or the scheduler of MXNet's store, without MXNet's Python package, whose import takes seconds.

MXNet starts a server when it is imported with `DMLC_ROLE` in the environment. The server runs in the library, and needs Python
only for a worker's `KVStore.set_optimizer`, which sends a pickle. This program refuses it, unless it is asked to accept it: then
it imports MXNet, which unpickles. The launcher runs it:

    python -m gluon_mgpu.distributed.launcher.server [--accept-optimizers]
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import traceback
from typing import Any, NoReturn, Optional

from ...runtime.cuda_libraries import mxnet_library

CONTROLLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def main() -> None:
    """Serve until the job ends."""
    os.umask(0o077)  # only this user may connect to a Unix socket
    library, store = load_library(), ctypes.c_void_p()
    check(library, library.MXKVStoreCreate(b"dist", ctypes.byref(store)))
    controller = CONTROLLER(Controller(store) if "--accept-optimizers" in sys.argv else refuse)
    check(library, library.MXKVStoreRunServer(store, controller, None))
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


def refuse(*_command: Any) -> NoReturn:
    """End this server. If it went on without the optimizer, its store would replace weights by gradients."""
    print(
        "launch: got an optimizer for a server of MXNet's store; expected none: it is a pickle, which can run any program. If "
        "your program calls KVStore.set_optimizer, as gluon.Trainer does with dist_sync, pass --accept-optimizers, or use "
        "gluon_mgpu.Trainer. If not, another program has reached the server: see docs/distributed.md#close-the-network.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


class Controller:
    """Passes the commands of workers to MXNet's server. It ends the process if one fails.

    Parameters
    ----------
    store : ctypes.c_void_p
        The handle of the store.
    """

    def __init__(self, store: ctypes.c_void_p) -> None:
        self._store = store
        self.server: Optional[Any] = None  # MXNet's KVStoreServer, once a command has come

    def __call__(self, *command: Any) -> None:
        try:
            if self.server is None:
                role = os.environ.get("DMLC_ROLE", "worker")
                os.environ["DMLC_ROLE"] = "worker"  # for any other role, the import would run a second server
                mxnet = importlib.import_module("mxnet")
                os.environ["DMLC_ROLE"] = role
                self.server = mxnet.kvstore.kvstore_server.KVStoreServer(mxnet.kvstore.kvstore.KVStore(self._store))
            self.server._controller()(*command)
        except BaseException:  # ctypes would print it, and the store would go on without the optimizer
            traceback.print_exc()
            os._exit(1)


if __name__ == "__main__":
    main()
