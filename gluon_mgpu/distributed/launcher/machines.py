"""The machines of a job: ps-lite's scheduler joins one watch of each, its heartbeats show a lost one, its barrier ends the job.

    node 0   launcher ──► scheduler ◄─ heartbeats ─┐
                 └──────► watch ───────────────────┤
    node 1   launcher ──► watch ───────────────────┘

The training has a store, or Horovod, of its own: it may join late, or never.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Dict, List, NamedTuple, Optional

from .node import Failure
from .plan import Plan, store_environ

_LIMIT_S = 8  # without a heartbeat; they come once a second
_LINGER_S = 1.0  # for the scheduler to let the other machines know that all have ended
_WATCH = (sys.executable, "-m", "gluon_mgpu.distributed.launcher.watch")
_JOINED = re.compile(r"assign rank=(\d+) to node .* ip=([\d.]+), port=(\d+)")  # ps-lite's scheduler with PS_VERBOSE=1


class _Watch(NamedTuple):
    process: subprocess.Popen
    stdin: IO[bytes]
    reader: threading.Thread


class Machines:
    """The machines of one attempt; nothing is started for a single one.

    Parameters
    ----------
    plan : Plan
    node_rank : int
        This machine.
    host : str
        Its address.
    log : pathlib.Path
        Gets what ps-lite prints.

    Attributes
    ----------
    failure : Failure, optional
        The machine that was lost.
    ready : bool
        Whether all machines are there.
    all_ended : bool
        Whether every machine has called `end`.
    """

    def __init__(self, plan: Plan, node_rank: int, host: str, *, log: Path) -> None:
        self.failure: Optional[Failure] = None
        self.all_ended = plan.num_nodes == 1
        self._plan, self._log = plan, log
        self.ready = self.all_ended
        self._ended_here = False
        self._joined: Dict[int, str] = {}  # ps-lite's number of a watch -> its machine
        self._watches: List[_Watch] = []  # the scheduler, on node 0, and the watch of this machine
        if not self.all_ended:
            log.parent.mkdir(parents=True, exist_ok=True)
            own = {"DMLC_NODE_HOST": host, "PORT": str(self._port(node_rank)), "PS_HEARTBEAT_INTERVAL": "1"}
            environ = {**os.environ, **store_environ((plan.root[0], plan.root[1] + 1), plan.num_nodes, 0), **own}
            if not node_rank:
                self._start({**environ, "DMLC_ROLE": "scheduler", "PS_VERBOSE": "1"})
            self._start({**environ, "DMLC_ROLE": "worker"})

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._watches) > 1 and self.all_ended:
            time.sleep(_LINGER_S)
        self.leave()

    def leave(self) -> None:
        """End the heartbeats: the other machines notice."""
        while self._watches:
            process, stdin, reader = self._watches.pop()
            process.kill()
            process.wait()
            reader.join()
            stdin.close()

    def end(self) -> None:
        """Note that the workers of this machine have ended; `all_ended` once those of all machines have."""
        if not self._ended_here and self._watches:
            self._ended_here = True
            self._tell(self._watches[-1])

    def _start(self, environ: Dict[str, str]) -> None:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*_WATCH, str(_LIMIT_S)], env=environ, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._watches.append(_Watch(process, process.stdin, reader))
        reader.start()

    @staticmethod
    def _tell(watch: _Watch) -> None:
        with suppress(OSError):  # its end is noticed anyway
            watch.stdin.write(b"\n")
            watch.stdin.flush()

    def _read(self, stdout: IO[bytes]) -> None:
        with stdout, open(self._log, "ab") as file:
            for line in stdout:
                file.write(line)
                file.flush()
                self._take(line.decode("utf-8", "replace").rstrip())
        self._fail("the watch of this machine", "has ended")

    def _take(self, line: str) -> None:
        word, _, number = line.partition(" ")
        joined = _JOINED.search(line)
        if joined:
            self._joined[int(joined.group(1))] = self._machine(int(joined.group(3)), joined.group(2))
        elif word == "ready":
            self.ready = True
            for scheduler in self._watches[:-1]:
                self._tell(scheduler)
        elif word == "ended":
            self.all_ended = True
        elif word == "lost":
            lost = self._joined.get(int(number), self._name(0, self._plan.root[0]))
            what = f"has sent no heartbeat for {_LIMIT_S} s: it has failed, or cannot be reached. See its launcher's output"
            self._fail(lost, what)

    def _port(self, node_rank: int) -> int:
        """Return the port of a machine's watch, by which node 0 knows it."""
        return self._plan.root[1] + 2 + node_rank

    def _machine(self, port: int, address: str) -> str:
        node_rank = port - self._port(0)
        return self._name(node_rank, address) if 0 <= node_rank < self._plan.num_nodes else f"the machine {address}"

    def _name(self, node_rank: int, address: str) -> str:
        first = self._plan.process(node_rank, 0).rank
        return f"node {node_rank} ({address}, ranks {first} to {first + self._plan.num_local - 1})"

    def _fail(self, who: str, what: str) -> None:
        if self.failure is None and not self.all_ended:
            self.failure = Failure(who, what, 1)
