"""One machine's place in a group of ps-lite, MXNet's transport, whose heartbeats show which machine is lost. Run as a program.

    node 0   launcher ──► scheduler ◄─ heartbeats ─┐
                 └──────► watch ───────────────────┤
    node 1   launcher ──► watch ───────────────────┘

    python -m gluon_mgpu.distributed.launcher.heartbeats PROCESSES      DMLC_ROLE=scheduler or worker, PORT above the root's

The training has a store, or Horovod, of its own: it may join late, or never. A watch prints `JOINED` when all are there. One
that reads a line, because the workers of its machine have ended, waits for the others, and ends with 0 when those of all machines
have. It names a machine that has sent no heartbeat, and ends with 1.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import Dict, NoReturn

from ...mxnet_internals.library import Store

JOINED = "all machines have joined"
LIMIT_S = 8  # without a heartbeat; they come once a second
_SCHEDULER = 1  # its number in ps-lite
# printed by the scheduler with PS_VERBOSE=1
_JOINED = re.compile(r"assign rank=(\d+) to node role=worker, ip=([\d.]+), port=(\d+)")


class Watch:
    """Watches machines by their heartbeats.

    Parameters
    ----------
    num_local : int
        Workers of each machine.
    """

    def __init__(self, num_local: int) -> None:
        self._num_nodes, self._num_local = int(os.environ["DMLC_NUM_WORKER"]), num_local
        self._names: Dict[int, str] = {}  # of machines, by their numbers in ps-lite
        self._has_joined = threading.Event()

    def schedule(self) -> None:
        """Join the machines, and watch them."""
        reader, writer = os.pipe()
        sys.stderr = os.fdopen(os.dup(2), "w")
        os.dup2(writer, 2)
        threading.Thread(target=self._read_joined, args=(reader,), daemon=True).start()
        self._store = Store("dist_async")
        self._store.run_server(lambda *_: None)

    def join(self) -> None:
        """Join the other machines, and watch the scheduler."""
        threading.Thread(target=self._end, daemon=True).start()
        self._store = Store("dist_async")  # waits for the others
        self._has_joined.set()
        print(JOINED, file=sys.stderr, flush=True)
        self._names[_SCHEDULER] = self._name(0, os.environ["DMLC_PS_ROOT_URI"])
        self._watch()

    def _read_joined(self, reader: int) -> None:
        with open(reader, errors="replace") as lines:
            for line in lines:
                joined = _JOINED.search(line)
                if joined:
                    node_rank = int(joined.group(3)) - int(os.environ["DMLC_PS_ROOT_PORT"]) - 1
                    self._names[int(joined.group(1))] = self._name(node_rank, joined.group(2))
                    if len(self._names) == self._num_nodes:
                        threading.Thread(target=self._watch, daemon=True).start()

    def _name(self, node_rank: int, address: str) -> str:
        if node_rank not in range(self._num_nodes):  # its port was taken, and ps-lite has chosen another one
            return f"the machine at {address}"
        first = node_rank * self._num_local
        return f"node {node_rank} ({address}, ranks {first} to {first + self._num_local - 1})"

    def _watch(self) -> NoReturn:
        paused_s = 0.0
        begun = looked = time.monotonic()
        while True:
            time.sleep(0.5)
            looked, before = time.monotonic(), looked
            paused_s = max(paused_s, looked - before)
            for number, name in self._names.items() if looked - begun > LIMIT_S else ():  # the first heartbeats may be late
                if self._store.num_lost(number, LIMIT_S):
                    told = f"{name} has sent no heartbeat for {LIMIT_S} s: it has failed, or cannot be reached. See its output."
                    if paused_s > LIMIT_S:  # its heartbeats are older than that because nobody has read them
                        told = f"this machine stood still for {paused_s:.0f} s; the others have ended without it."
                    print(told, file=sys.stderr, flush=True)
                    os._exit(1)

    def _end(self) -> NoReturn:
        """Wait for the workers of this machine, then for those of the others."""
        if sys.stdin.readline():
            self._has_joined.wait()
            self._store.barrier()
        os._exit(0)


if __name__ == "__main__":
    watch = Watch(int(sys.argv[1]))
    watch.schedule() if os.environ["DMLC_ROLE"] == "scheduler" else watch.join()
