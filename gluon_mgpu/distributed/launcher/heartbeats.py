"""Connects the machines of a job, and shows which one is lost. It is a script, run by its path next to a machine's workers.

    node 0   launcher ──► watch ◄─┬─ a connection from each machine, with a byte a second in both directions
    node 1   launcher ──► watch ──┘

    heartbeats.py NODE_0 PORT OWN_ADDRESS NODE_RANK NUM_NODES NUM_LOCAL

A watch prints `JOINED` when all are there. One that reads a line, because the workers of its machine have ended, waits for the
others, and ends with 0 when those of all machines have. It names a machine that sends no heartbeat, and ends with 1.
It imports nothing of this package, so that it starts in milliseconds and holds few bytes.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Dict, List, NoReturn, Set, Tuple

JOINED = "all machines have joined"
LIMIT_S = 8.0  # without a heartbeat
_EVERY_S = 1.0
_STDIN = 0
# What machines send: "my workers run", "they have ended" (of node 0: those of all machines), and "this machine is lost", its name
_RUNNING, _ENDED, _LOST = b".", b"e", b"!"


class Watch:
    """Watches the machines at the other ends of its connections.

    Parameters
    ----------
    names : dict of socket to str
        On node 0 all other machines, on the others node 0.
    is_first : bool
        Whether this is node 0.
    """

    def __init__(self, names: Dict[socket.socket, str], *, is_first: bool) -> None:
        self._names, self._is_first = names, is_first
        self._running: Set[Any] = {_STDIN, *(names if is_first else ())}  # what has not ended yet
        self._now = self._sent_at = time.monotonic()
        self._heard_at = dict.fromkeys(names, self._now)
        self._sent, self._paused_s = b"", 0.0

    def watch(self) -> None:
        """Exchange heartbeats until the workers of all machines have ended. Exit with 1 if a machine is lost."""
        while self._heard_at:
            self._send()
            inputs: List[Any] = [*self._heard_at, *({_STDIN} & self._running)]
            ready = select.select(inputs, [], [], _EVERY_S)[0]
            self._now, before = time.monotonic(), self._now
            self._paused_s = max(self._paused_s, self._now - before)
            for one in ready:
                if one == _STDIN:
                    os.read(_STDIN, 1)
                    self._running.discard(_STDIN)
                else:
                    self._receive(one)
            for peer, at in self._heard_at.items():
                if self._now - at > LIMIT_S:
                    self._lose(peer)

    def _send(self) -> None:
        state = _RUNNING if self._running else _ENDED
        if state != self._sent or self._now - self._sent_at >= _EVERY_S:
            self._sent, self._sent_at = state, self._now
            for peer in self._heard_at:
                with suppress(OSError):  # it is lost: reading from it says so
                    peer.send(state)

    def _receive(self, peer: socket.socket) -> None:
        text = b""
        with suppress(OSError):
            text = peer.recv(4096)
        self._heard_at[peer] = self._now
        states, is_lost, name = text.partition(_LOST)
        if is_lost and not self._is_first:
            self._end(name.decode(errors="replace"))
        elif not text and (self._running or not self._is_first):
            self._lose(peer)
        elif not text or (_ENDED in states and not self._is_first):  # node 0 ends last
            del self._heard_at[peer]
        elif _ENDED in states:
            self._running.discard(peer)

    def _lose(self, lost: socket.socket) -> NoReturn:
        name = self._names.pop(lost)
        for peer in self._names:
            with suppress(OSError):
                peer.send(_LOST + name.encode())
        self._end(name)

    def _end(self, name: str) -> NoReturn:
        told = f"{name} sends no heartbeat: it has failed, or cannot be reached. See its output."
        if self._paused_s > LIMIT_S:
            told = f"this machine stood still for {self._paused_s:.0f} s; the others have ended without it."
        sys.exit(told)


def accept(address: str, port: int, num_nodes: int) -> Dict[int, Tuple[socket.socket, str]]:
    """Return a connection from each other machine, and its address, by its number."""
    found: Dict[int, Tuple[socket.socket, str]] = {}
    with socket.create_server((address, port), backlog=num_nodes) as server:
        while len(found) < num_nodes - 1:
            peer, (other, _) = server.accept()
            peer.settimeout(1.0)
            try:
                rank = int(peer.recv(16))
            except (OSError, ValueError):  # another program
                rank = 0
            if 0 < rank < num_nodes:
                found[rank] = peer, other
    return found


def connect(root: str, port: int, address: str, node_rank: int) -> socket.socket:
    """Return a connection to node 0 from this address, once all other machines have one."""
    while True:
        with suppress(OSError):  # node 0 is not there yet
            peer = socket.create_connection((root, port), 1.0, (address, 0))
            break
        time.sleep(0.2)
    peer.send(b"%d" % node_rank)
    select.select([peer], [], [])  # until its first heartbeat
    return peer


def main(root: str, port: int, address: str, *numbers: int) -> None:
    """Join the other machines, and watch them."""
    node_rank, num_nodes, num_local = numbers
    found = {0: (connect(root, port, address, node_rank), root)} if node_rank else accept(address, port, num_nodes)
    print(JOINED, file=sys.stderr, flush=True)
    names = {}
    for rank, (peer, where) in found.items():
        names[peer] = f"node {rank} ({where}, ranks {rank * num_local} to {(rank + 1) * num_local - 1})"
    Watch(names, is_first=not node_rank).watch()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
