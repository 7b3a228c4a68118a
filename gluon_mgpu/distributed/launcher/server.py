"""A parameter server or the scheduler of MXNet's store, without MXNet's Python package, whose import takes seconds.

MXNet starts a server when it is imported with `DMLC_ROLE` in the environment. The server runs in the library, and needs Python
only for a worker's `KVStore.set_optimizer`, which sends a pickle. This program refuses it, unless it is asked to accept it: then
it imports MXNet, which unpickles. The launcher runs it:

    python -m gluon_mgpu.distributed.launcher.server [--accept-optimizers]
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, Callable, NoReturn, Optional

from ...mxnet_internals.library import Store, command_of


def main() -> None:
    """Serve until the job ends."""
    os.umask(0o077)  # only this user may connect to a Unix socket
    store = Store("dist")
    store.run_server(Controller(store) if "--accept-optimizers" in sys.argv else refuse)
    os._exit(0)


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
    """Passes the commands of workers to MXNet's server. It ends the process if one fails."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run: Optional[Callable[..., Any]] = None  # MXNet's function, once a command has come

    def __call__(self, *command: Any) -> None:
        try:
            if self._run is None:
                role = os.environ.get("DMLC_ROLE", "worker")
                os.environ["DMLC_ROLE"] = "worker"  # for any other role, the import would run a second server
                self._run = command_of(self._store.handle)
                os.environ["DMLC_ROLE"] = role
            self._run(*command)
        except BaseException:  # ctypes would print it, and the store would go on without the optimizer
            traceback.print_exc()
            os._exit(1)


if __name__ == "__main__":
    main()
