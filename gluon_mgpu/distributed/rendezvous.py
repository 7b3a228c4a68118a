"""Node 0 listens, the others come: who takes part, and what each of them does."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Tuple

from .node import Failure
from .plan import Plan
from .process import LaunchError
from .wire import LostError, Wire

VERSION = 1
_HELLO_S = 5.0
_LONGEST_CAUSE = 40_000
_STRANGERS = 16  # connections that have not said hello, beside the nodes'


def parse_rendezvous(text: str) -> Tuple[str, int]:
    """Return host and port of `host:port`.

    Raises
    ------
    LaunchError
        It is something else.

    Examples
    --------
    >>> parse_rendezvous("node0:29400")
    ('node0', 29400)
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise LaunchError(f"launch: got --rendezvous {text!r}; need HOST:PORT. Name node 0 and a port that is free there.")
    return host, int(port)


def reserve_port(host: str) -> socket.socket:
    """Return a socket that holds a free port of an address until it is closed.

    It does not listen, so that ps-lite, which lets others share its port as long as they do not listen, can bind to it, while
    nobody is given it by chance.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, 0))
    except OSError as error:
        held.close()
        raise LaunchError(f"launch: got {host}: {error.strerror}; need an address of this machine. See --interface.") from None
    return held


class Member:
    """Another machine's part of a job, as node 0 sees it: the same questions and orders as `Node`, over a connection."""

    def __init__(self, wire: Wire, hello: Dict[str, Any]) -> None:
        self.node_rank: int = hello["node_rank"]
        self.num_processes: int = hello["num_processes"]
        self.failure: Optional[Failure] = None
        self.running = False
        self.workers_left = 0
        self.cpu_s = 0.0
        self.lost = False
        self._wire = wire
        self._restart = -1

    def start(self, plan: Plan, node_rank: int) -> None:
        """Have it start what the plan says for this node."""
        self.failure, self._restart = None, plan.restart
        self.running, self.workers_left = True, plan.counts[node_rank]
        self._wire.send("start", plan=vars(plan), node_rank=node_rank)

    def look(self) -> None:
        """Take what it has told."""
        try:
            for message in self._wire.receive():
                if message["kind"] == "state" and message.get("restart") == self._restart:
                    self._take(message)
        except LostError as lost:
            self._give_up(str(lost))
        except (KeyError, TypeError, ValueError):
            self._give_up("sends what no launcher sends")
        if not self.lost:
            self._wire.beat()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Have it pass a signal to its workers, and end everything."""
        self._wire.send("stop", signal=int(signum))

    def kill(self) -> None:
        """Do without a machine that has not ended everything by now; it ends it when it misses this one."""
        if self.running:
            self.stop(signal.SIGKILL)
            self._give_up("does not end")

    def finish(self, code: int, cause: str) -> None:
        """Have its launcher end as this one does."""
        self._wire.send("finish", code=code, cause=cause[:_LONGEST_CAUSE])
        self._wire.close_when_read()

    def _take(self, state: Dict[str, Any]) -> None:
        self.running, self.workers_left = bool(state["running"]), int(state["workers_left"])
        self.cpu_s = float(state["cpu_s"])
        if state["failure"] is not None and self.failure is None:
            failure = Failure.from_json(state["failure"])
            self.failure = replace(failure, who=f"{failure.who} on node {self.node_rank}")

    def _give_up(self, why: str) -> None:
        if not self.lost:
            self.lost, self.running, self.workers_left = True, False, 0
            self.failure = self.failure or Failure(f"node {self.node_rank}", why, 1)
            self._wire.close()


class Rendezvous:
    """Where the launchers of the other nodes come to.

    Parameters
    ----------
    host, port : str, int
        What it listens at; nothing else of this machine can be reached through it.
    num_nodes : int
        With this one.
    selector : selectors.BaseSelector
    silence_s : float, seconds
        After which a node that says nothing is lost.
    tell : callable (str) -> None
        For what a person should know.
    """

    def __init__(
        self,
        host: str,
        port: int,
        num_nodes: int,
        *,
        selector: selectors.BaseSelector,
        silence_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.num_nodes, self._selector, self._silence_s, self._tell = num_nodes, selector, silence_s, tell
        self._members: Dict[int, Member] = {}
        self._callers: List[Tuple[Wire, float, str]] = []
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, port))
        except OSError as error:
            self._listener.close()
            raise LaunchError(
                f"launch: got {host}:{port} for node 0: {error.strerror}; need an address of this machine and a free port. "
                "See --rendezvous and --interface."
            ) from None
        self._listener.listen(self.num_nodes + _STRANGERS)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def members(self) -> List[Member]:
        """The nodes that are here, in their order."""
        return [self._members[rank] for rank in sorted(self._members)]

    def look(self) -> None:
        """See who has said hello, and who is gone."""
        for member in self.members:
            member.look()
            if member.lost:
                del self._members[member.node_rank]
        callers, self._callers = self._callers, []
        for wire, since, address in callers:
            try:
                hello = wire.receive()
            except LostError:
                wire.close()
                continue
            if hello:
                self._welcome(wire, hello[0], address)
            elif time.monotonic() - since > _HELLO_S:
                wire.close()
            else:
                self._callers.append((wire, since, address))

    def finish(self, code: int, cause: str) -> None:
        """Let all launchers end as this one does, and listen no longer."""
        for member in self._members.values():
            member.finish(code, cause)
        for wire, _, _ in self._callers:
            wire.close()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, (host, *_) = self._listener.accept()
        except OSError:  # it has gone already
            return
        if len(self._callers) >= self.num_nodes + _STRANGERS:
            connection.close()
            return
        self._callers.append((Wire(connection, self._selector, self._silence_s), time.monotonic(), host))

    def _welcome(self, wire: Wire, hello: Dict[str, Any], address: str) -> None:
        why = self._why_not(hello)
        if not why and any(member.node_rank == hello["node_rank"] for member in self.members):
            wire.send("wait", why=f"node {hello['node_rank']} is here already")  # or is not known yet to be gone
            wire.close()
            return
        if why:
            self._tell(f"refused a launcher at {address}: {why}")
            wire.send("refuse", why=why)
            wire.close()
            return
        member = Member(wire, hello)
        self._members[member.node_rank] = member
        self._tell(f"node {member.node_rank} is here, from {address}")
        wire.send("welcome")

    def _why_not(self, hello: Dict[str, Any]) -> str:
        """Return why a node cannot take part, "" where it can."""
        numbers = [hello.get(name) for name in ("version", "num_nodes", "node_rank", "num_processes")]
        if hello["kind"] != "hello" or not all(type(number) is int for number in numbers):
            return "got no hello; need a launcher"
        version, num_nodes, node_rank, num_processes = map(int, map(str, numbers))
        if version != VERSION:
            return f"got version {version}; need {VERSION}. Install the same gluon_mgpu on every node"
        if num_nodes != self.num_nodes:
            return f"got --nodes {num_nodes}; need {self.num_nodes}, as on node 0"
        if not 0 < node_rank < num_nodes:
            return f"got --node-rank {node_rank}; need 1 to {num_nodes - 1}"
        if not 0 < num_processes < 2**16:
            return f"got {num_processes} processes; need 1 or more"
        return ""
