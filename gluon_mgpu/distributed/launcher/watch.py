"""One machine's place in a group of ps-lite, MXNet's transport, whose heartbeats show which machine is lost. Run as a program.

    python -m gluon_mgpu.distributed.launcher.watch LIMIT_S      DMLC_ROLE=scheduler on node 0, DMLC_ROLE=worker on every machine

A watch writes "ready" when all machines are there, and "ended" when all have read a line: the workers of each have ended. The
scheduler begins to watch when it reads a line. Both write "lost 9" when ps-lite's node 9 has sent no heartbeat for the limit, and
leave at the end of their input, the launcher's own end.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Callable, NoReturn, Sequence

from .server import CONTROLLER, check, load_library

_SCHEDULER = 1  # its number in ps-lite; workers have 9, 11, 13 and so on
_FIRST_WORKER, _STEP = 9, 2


def main(limit_s: int) -> None:
    """Join the group, and report lost machines."""
    library, store = load_library(), ctypes.c_void_p()
    if os.environ["DMLC_ROLE"] == "scheduler":
        check(library, library.MXKVStoreCreate(b"dist_async", ctypes.byref(store)))
        last = _FIRST_WORKER + _STEP * int(os.environ["DMLC_NUM_WORKER"])
        _follow_input(lambda: _watch(library, store, range(_FIRST_WORKER, last, _STEP), limit_s))
        check(library, library.MXKVStoreRunServer(store, CONTROLLER(_ignore), None))
    else:
        _follow_input(lambda: _end(library, store))
        check(library, library.MXKVStoreCreate(b"dist_async", ctypes.byref(store)))  # it waits here for all the others
        _say("ready")
        time.sleep(limit_s)  # the first answers may be late
        _watch(library, store, [_SCHEDULER], limit_s)


def _follow_input(take_line: Callable[[], None]) -> None:
    """Call a function at the first line of input, and leave at its end, both in threads of their own."""

    def follow() -> None:
        if sys.stdin.readline():
            threading.Thread(target=take_line, daemon=True).start()
            sys.stdin.read()
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()


def _end(library: ctypes.CDLL, store: ctypes.c_void_p) -> None:
    check(library, library.MXKVStoreBarrier(store))
    _say("ended")


def _watch(library: ctypes.CDLL, store: ctypes.c_void_p, nodes: Sequence[int], limit_s: int) -> NoReturn:
    num_lost = ctypes.c_int()
    while True:
        for node in nodes:
            check(library, library.MXKVStoreGetNumDeadNode(store, node, ctypes.byref(num_lost), limit_s))
            if num_lost.value:
                _say(f"lost {node}")
        time.sleep(0.5)


def _say(text: str) -> None:
    print(text, flush=True)


def _ignore(command: int, body: bytes, unused: object) -> None:
    """Ignore a command of a worker."""


if __name__ == "__main__":
    main(int(sys.argv[1]))
