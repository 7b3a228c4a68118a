"""The other nodes: come to node 0, do what its plan says, tell how it goes, and end when it is silent."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Optional, Tuple

from .node import Failure, Node
from .plan import Machine, Plan
from .process import LaunchError
from .rendezvous import VERSION
from .supervise import Limits, Signals, wait_for_news
from .wire import LostError, Wire

_RETRY_S = 0.25
_CONNECT_S = 3.0
_ORDERS = {int(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)}


@dataclass(frozen=True)
class Seat:
    """A node's place among the nodes.

    Attributes
    ----------
    node_rank : int
    num_nodes : int
    num_processes : int
        Those of this machine.
    """

    node_rank: int
    num_nodes: int
    num_processes: int


class Follower:
    """Runs this machine's part of a job whose node 0 is elsewhere.

    Parameters
    ----------
    node : Node
    machine : Machine
        Whose address is found out anew with every connection.
    seat : Seat
    rendezvous : tuple of (str, int)
        Where node 0 listens.
    source : str, optional
        The address of this machine from which to connect; the kernel's choice by default.
    limits : Limits
    silence_s : float, seconds
        After which node 0 is lost.
    selector : selectors.BaseSelector
    signals : Signals
    tell : callable (str) -> None
    """

    def __init__(
        self,
        node: Node,
        machine: Machine,
        seat: Seat,
        *,
        rendezvous: Tuple[str, int],
        source: Optional[str],
        limits: Limits,
        silence_s: float,
        selector: selectors.BaseSelector,
        signals: Signals,
        tell: Callable[[str], None],
    ) -> None:
        self._node, self._machine, self._seat, self._rendezvous, self._source = node, machine, seat, rendezvous, source
        self._limits, self._silence_s, self._selector, self._signals, self._tell = limits, silence_s, selector, signals, tell
        self._plan: Optional[Plan] = None
        self._told: Dict[str, Any] = {}

    def run(self) -> Tuple[int, str]:
        """Take part until node 0 says that it is over; return its exit code and the cause."""
        since, why = time.monotonic(), "nobody there"
        while not self._signals.first:
            waited_s = time.monotonic() - since
            if waited_s > self._limits.patience_s:
                where = ":".join(map(str, self._rendezvous))
                raise LaunchError(
                    f"launch: got no node 0 at {where} for {waited_s:.0f} s ({why}); need the same command there, with "
                    "--node-rank 0. See that no firewall stands between, and --rendezvous."
                )
            try:
                wire = self._connect()
            except OSError as error:
                why = error.strerror or str(error)
                self._pause()
                continue
            try:
                return self._serve(wire)
            except LostError as lost:
                why = str(lost)
                if self._plan is not None:
                    self._tell(f"node 0 {why}; ended this node's processes, and wait for it")
                    since, self._plan = time.monotonic(), None
                self._pause()
            finally:
                self._end()
                wire.close()
        return 128 + self._signals.first, f"ended by {signal.Signals(self._signals.first).name}"

    def _pause(self) -> None:
        until = time.monotonic() + _RETRY_S
        while time.monotonic() < until and not self._signals.first:
            wait_for_news(self._selector)

    def _connect(self) -> Wire:
        source = (self._source, 0) if self._source else None
        connection = socket.create_connection(self._rendezvous, timeout=_CONNECT_S, source_address=source)
        self._node.machine = replace(self._machine, host=connection.getsockname()[0])
        return Wire(connection, self._selector, self._silence_s)

    def _serve(self, wire: Wire) -> Tuple[int, str]:
        wire.send("hello", version=VERSION, **vars(self._seat))
        while True:
            wait_for_news(self._selector)
            self._node.look()
            for message in wire.receive():
                ended = self._obey(message)
                if ended is not None:
                    return ended
            self._tell_state(wire)
            if self._signals.first:
                return self._leave(wire)

    def _obey(self, message: Dict[str, Any]) -> Optional[Tuple[int, str]]:
        """Do what node 0 says; return exit code and cause when it is over."""
        kind = message["kind"]
        try:
            if kind == "start":
                plan, node_rank = Plan.from_json(message["plan"]), int(message["node_rank"])
                self._end()
                self._node.start(plan, node_rank)
                self._plan = plan
            elif kind == "stop" and message["signal"] in _ORDERS:
                self._node.stop(message["signal"])
            elif kind == "finish":
                return int(message["code"]), str(message["cause"])
            elif kind == "refuse":
                raise LaunchError(f"launch: {message['why']}. Node 0 refused this one.")
            elif kind == "wait":
                raise LostError(str(message["why"]))
        except (KeyError, TypeError, IndexError) as error:
            raise LostError("sends what no launcher sends") from error
        return None

    def _tell_state(self, wire: Wire, failure: Optional[Failure] = None) -> None:
        """Tell node 0 what has changed, or that this node is alive."""
        failure = failure or self._node.failure
        state = {
            "restart": self._plan.restart if self._plan else -1,
            "running": self._node.running,
            "workers_left": self._node.workers_left,
            "failure": vars(failure) if failure else None,
            "cpu_s": round(self._node.cpu_s, 2),
        }
        if state != self._told:
            self._told = state
            wire.send("state", **state)
        wire.beat()

    def _leave(self, wire: Wire) -> Tuple[int, str]:
        """End this node's part because its launcher was told to end, and say so."""
        code, name = 128 + self._signals.first, signal.Signals(self._signals.first).name
        self._tell_state(wire, Failure("the launcher", f"got {name}", code))
        self._end(wire)
        return code, f"ended by {name}"

    def _end(self, wire: Optional[Wire] = None) -> None:
        """End this node's processes, with the signals that have come, and stay alive for node 0 meanwhile."""
        for signum in self._signals.take() or [signal.SIGTERM]:
            self._node.stop(signum)
        while self._node.running:
            wait_for_news(self._selector)
            self._node.look()
            if wire is not None:
                wire.beat()
            for signum in self._signals.take():
                self._node.stop(signum)
