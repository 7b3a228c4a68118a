"""The launchers of the other nodes: connect to node 0, follow its plan, report their state, and stop when node 0 is silent.

Node 0 must prove that it knows the token. It then sends when to start, stop and end, but not what to run: the program, and the
largest number of processes and servers, come from this machine's command.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ..process import LaunchError, exit_code_of
from .connection import Connection, LostError, wait_for_events
from .handshake import CHALLENGE_BYTES, PROOF_BYTES, HandshakeError, answer_challenge, check_proof
from .messages import Message, failure_fields
from .node import Failure, Node
from .plan import Machine, Plan, spread_servers
from .rendezvous import HELLO_S
from .supervisor import Grace, Limits, Signals
from .wire import Wire

_RETRY_S = 0.25
_CONNECT_S = 3.0
_MAX_REPORTS = 5


@dataclass(frozen=True)
class Seat:
    """A node's place among the nodes.

    Attributes
    ----------
    node_rank : int
    num_nodes : int
    num_processes : int
        The most that this machine runs.
    servers : int, optional
        Parameter servers of the whole job.
    backend : str
    """

    node_rank: int
    num_nodes: int
    num_processes: int
    servers: Optional[int] = None
    backend: str = "dist_sync"


class Follower:
    """Runs this machine's part of a job whose node 0 is another machine.

    Parameters
    ----------
    node : Node
    machine : Machine
        Its address is found again with every connection.
    seat : Seat
    rendezvous : tuple of (str, int)
        Where node 0 listens.
    token : str
        The secret that node 0 must know.
    source : str, optional
        The address of this machine from which to connect; the kernel's choice by default.
    limits : Limits
    silence_s : float, seconds
        Node 0 is lost when it is silent for longer.
    selector : selectors.BaseSelector
    signals : Signals
    report : callable (str) -> None
        Shows the user a message.
    """

    def __init__(
        self,
        node: Node,
        machine: Machine,
        seat: Seat,
        *,
        rendezvous: Tuple[str, int],
        token: str,
        source: Optional[str],
        limits: Limits,
        silence_s: float,
        selector: selectors.BaseSelector,
        signals: Signals,
        report: Callable[[str], None],
    ) -> None:
        self._node, self._machine, self._seat, self._rendezvous, self._source = node, machine, seat, rendezvous, source
        self._limits, self._silence_s, self._selector, self._signals, self._report = limits, silence_s, selector, signals, report
        self._token = token.encode("ascii")
        self._plan: Optional[Plan] = None
        self._restart = -1  # of the last plan on this connection
        self._welcome = False  # whether node 0 has accepted this node on this connection
        self._sent_state: Dict[str, Any] = {}
        self._reported: Set[str] = set()

    def run(self) -> Tuple[int, str]:
        """Take part until node 0 ends the job; return its exit code and the cause."""
        since, why = time.monotonic(), "no process listens there"
        while not self._signals.first:
            waited_s = time.monotonic() - since
            if waited_s > self._limits.patience_s:
                where = ":".join(map(str, self._rendezvous))
                raise LaunchError(
                    f"launch: got no node 0 at {where} for {waited_s:.0f} s ({why}); expected the same command there, with "
                    "--node-rank 0. Check --rendezvous, and that no firewall blocks the connection."
                )
            try:
                return self._take_part()
            except HandshakeError as error:
                why = str(error)
                where = ":".join(map(str, self._rendezvous))
                self._report_once(f"the process that listens at {where} {why}; still waiting for node 0")
            except LostError as lost:
                why = str(lost)
            if self._plan is not None:
                self._report(f"node 0 {why}; stopped this node's processes, and waiting for node 0")
                since, self._plan = time.monotonic(), None
            self._pause()
        return exit_code_of(self._signals.first), f"ended by {signal.Signals(self._signals.first).name}"

    def _take_part(self) -> Tuple[int, str]:
        """Connect to node 0 and follow it; return the job's exit code and cause, or raise LostError when node 0 is lost."""
        try:
            connection = Connection(self._dial(), self._selector)
        except OSError as error:
            raise LostError(error.strerror or str(error)) from error
        try:
            return self._serve(self._prove(connection))
        finally:
            self._end()
            connection.close()

    def _pause(self) -> None:
        until = time.monotonic() + _RETRY_S
        while time.monotonic() < until and not self._signals.first:
            wait_for_events(self._selector)

    def _wait_until(self, done: Callable[[], bool], longest_s: float) -> None:
        """Wait for a condition; raise LostError after `longest_s`, or when this launcher must end."""
        until = time.monotonic() + longest_s
        while not done():
            if self._signals.first:
                raise LostError("is not waited for any more")
            if time.monotonic() > until:
                raise LostError("does not answer")
            wait_for_events(self._selector)

    def _dial(self) -> socket.socket:
        """Return a connection to the rendezvous; signals are still handled meanwhile."""
        host, port = self._rendezvous
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        plug = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            plug.setblocking(False)
            if self._source:
                plug.bind((self._source, 0))
            code = plug.connect_ex(address)
            if code == errno.EINPROGRESS:
                writable: List[bool] = []
                self._selector.register(plug, selectors.EVENT_WRITE, lambda: writable.append(True))
                try:
                    self._wait_until(lambda: bool(writable), _CONNECT_S)
                finally:
                    self._selector.unregister(plug)
                code = plug.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if plug.getsockname() == plug.getpeername():  # the kernel chose the target port: the socket connected to itself
                raise LostError("does not listen")
            self._node.machine = replace(self._machine, host=plug.getsockname()[0])
        except BaseException:
            plug.close()
            raise
        return plug

    def _prove(self, connection: Connection) -> Wire:
        """Return the wire to node 0 after both sides have proved that they know the token."""
        challenge = self._get(connection, CHALLENGE_BYTES)
        answer, expected, keys = answer_challenge(self._token, challenge, self._seat.node_rank)
        connection.send(answer)
        try:
            proof = self._get(connection, PROOF_BYTES)
        except LostError as lost:
            if self._signals.first:
                raise
            raise HandshakeError(f"{lost} instead of accepting the token. Check that it is the token of node 0") from None
        check_proof(proof, expected)
        return Wire(connection, keys, self._silence_s, leads=False)

    def _get(self, connection: Connection, count: int) -> bytes:
        got: List[bytes] = []
        connection.expect(count, got.append)
        self._wait_until(lambda: bool(got or connection.lost), HELLO_S)
        if not got:
            raise LostError(connection.lost)
        return got[0]

    def _serve(self, wire: Wire) -> Tuple[int, str]:
        self._sent_state, self._welcome, self._restart = {}, False, -1
        wire.send(
            "hello",
            num_nodes=self._seat.num_nodes,
            num_processes=self._seat.num_processes,
            servers=self._seat.servers,
            backend=self._seat.backend,
        )
        while True:
            wait_for_events(self._selector)
            self._node.poll()
            message = wire.receive()
            while message is not None:
                ended = self._handle(*message)
                if ended is not None:
                    wire.close()  # node 0 waits for this
                    return ended
                message = wire.receive()
            if self._welcome:
                self._send_state(wire)
            wire.beat()
            if self._signals.first:
                return self._leave(wire)

    def _handle(self, kind: str, order: Message) -> Optional[Tuple[int, str]]:
        """Handle a message of node 0; return exit code and cause when the job has ended."""
        if kind == "refuse" and not self._welcome:
            raise LaunchError(f"launch: {order['why']}. Node 0 rejected this node.")
        if kind == "wait" and not self._welcome:
            raise LostError(order["why"])
        if kind == "welcome" and not self._welcome:
            self._welcome = True
        elif kind == "start" and self._welcome:
            self._start(order["plan"], order["node_rank"])
        elif kind == "stop" and self._plan is not None:
            self._node.stop(order["signal"])
        elif kind == "finish" and self._welcome:
            return order["code"], order["cause"]
        else:
            raise LostError(f"sent {kind!r} at the wrong time")
        return None

    def _start(self, plan: Plan, node_rank: int) -> None:
        """Start the plan of node 0, unless it exceeds the options of this machine's command."""
        wrong = self._why_not(plan, node_rank)
        if wrong:
            raise LostError(f"requested {wrong}")
        self._end()
        self._node.start(plan, node_rank)
        self._plan, self._restart = plan, plan.restart

    def _why_not(self, plan: Plan, node_rank: int) -> str:
        """Return why a plan does not fit this node, "" if it does."""
        seat = self._seat
        if len(plan.counts) > seat.num_nodes or not node_rank <= min(seat.node_rank, len(plan.counts) - 1):
            return f"node {node_rank} of {len(plan.counts)}, but this is node {seat.node_rank} of {seat.num_nodes}"
        if not 0 < plan.counts[node_rank] <= seat.num_processes:
            return f"{plan.counts[node_rank]} processes, but -n allows {seat.num_processes} here"
        if plan.backend != seat.backend:
            return f"--backend {plan.backend}, but it is {seat.backend} here"
        if plan.servers != spread_servers(0 if seat.backend == "horovod" else seat.servers, plan.counts):
            return f"{sum(plan.servers)} servers, which --servers does not allow here"
        if plan.restart <= self._restart:
            return f"restart {plan.restart} after {self._restart}"
        return ""

    def _send_state(self, wire: Wire, failure: Optional[Failure] = None) -> None:
        """Report this node's state to node 0 if it has changed."""
        failure = failure or self._node.failure
        state = {
            "restart": self._plan.restart if self._plan else -1,
            "running": self._node.running,
            "workers_left": self._node.workers_left,
            "failure": failure_fields(failure) if failure else None,
            "cpu_s": round(self._node.cpu_s, 2),
        }
        if state != self._sent_state:
            self._sent_state = state
            wire.send("state", **state)

    def _report_once(self, text: str) -> None:
        if text not in self._reported and len(self._reported) < _MAX_REPORTS:
            self._reported.add(text)
            self._report(text)

    def _leave(self, wire: Wire) -> Tuple[int, str]:
        """Stop this node's part after a signal to its launcher, and report the signal to node 0."""
        code, name = exit_code_of(self._signals.first), signal.Signals(self._signals.first).name
        self._send_state(wire, Failure("the launcher", f"got {name}", code))
        self._end(wire)
        return code, f"ended by {name}"

    def _end(self, wire: Optional[Wire] = None) -> None:
        """Stop this node's processes with the signals received, and keep reporting to node 0 meanwhile."""
        grace = Grace(self._limits, failed=not self._signals.first)
        for signum in self._signals.take() or [signal.SIGTERM]:
            self._node.stop(signum)
        num_processes = self._node.workers_left
        while self._node.running:
            wait_for_events(self._selector)
            self._node.poll()
            if wire is not None and self._node.running:  # the closed connection reports the end; later plans are ignored
                self._send_state(wire)
            for signum in self._signals.take():
                self._node.stop(signum)
            num_left = self._node.workers_left
            if grace.is_over(self._node.cpu_s, num_processes - num_left, num_left):
                self._node.kill()
