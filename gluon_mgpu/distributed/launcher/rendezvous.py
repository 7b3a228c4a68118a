"""Node 0 listens for the launchers of the other nodes, which prove that they know the token, and directs those that join."""

from __future__ import annotations

import errno
import resource
import selectors
import signal
import socket
import time
from collections import Counter
from dataclasses import replace
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple

from ..process import LaunchError
from .connection import Connection, LostError, wait_for_events
from .handshake import ANSWER_BYTES, HandshakeError, check_answer, make_challenge
from .messages import LONGEST_CAUSE, Message
from .node import Failure
from .plan import Plan
from .printable import printable_lines
from .wire import Wire

HELLO_S = 5.0  # for the proof and the first message
_FAREWELL_S = 3.0  # for the other launchers to read the end of the job
_MOST_CALLERS = 512  # connections that have not joined
_EACH_CALLERS = 128  # of one address
_ACCEPTED = 64  # connections accepted in one turn
_MAX_REPORTS = 20  # lines about rejected launchers


def parse_rendezvous(text: str) -> Tuple[str, int]:
    """Return host and port of `host:port`.

    Raises
    ------
    LaunchError
        The text has another form.

    Examples
    --------
    >>> parse_rendezvous("node0:29400")
    ('node0', 29400)
    """
    host, _, port = text.rpartition(":")
    if not host or not host.isprintable() or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise LaunchError(f"launch: got --rendezvous {text!r}; expected HOST:PORT. Name node 0 and a port that is free there.")
    return host, int(port)


def reserve_port(host: str) -> socket.socket:
    """Return a socket that holds a free port of an address until it is closed.

    The socket does not listen. So ps-lite, which shares its port with sockets that do not listen, can bind to the port, and the
    kernel gives the port to no other process.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, 0))
    except OSError as error:
        held.close()
        raise LaunchError(
            f"launch: got {host}: {error.strerror}; expected an address of this machine. Pass another --interface."
        ) from None
    return held


class Member:
    """Another machine's part of a job, on node 0: the same methods and attributes as `Node`, over a connection."""

    def __init__(self, wire: Wire, node_rank: int, num_processes: int) -> None:
        self.node_rank, self.num_processes = node_rank, num_processes
        self.failure: Optional[Failure] = None
        self.running = False
        self.workers_left = 0
        self.cpu_s = 0.0
        self.lost = False
        self.wire = wire
        self._restart = -1

    def start(self, plan: Plan, node_rank: int) -> None:
        """Order the node to start its processes of the plan."""
        self.failure, self._restart = None, plan.restart
        self.running, self.workers_left = True, plan.counts[node_rank]
        self.wire.send("start", plan=vars(plan), node_rank=node_rank)

    def poll(self) -> None:
        """Read the node's reports."""
        try:
            message = self.wire.receive()
            while message is not None:
                self._take(*message)
                message = self.wire.receive()
        except LostError as lost:
            self._give_up(str(lost))
        if not self.lost:
            self.wire.beat()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Order the node to pass a signal to its workers, and to stop everything."""
        self.wire.send("stop", signal=int(signum))

    def kill(self) -> None:
        """Order SIGKILL, and give up a machine whose processes still run; it kills them when it loses the connection."""
        if self.running:
            self.stop(signal.SIGKILL)
            self._give_up("does not end")

    def finish(self, code: int, cause: str) -> None:
        """Send the node's launcher the exit code and cause, and close the connection."""
        self.wire.send("finish", code=code, cause=printable_lines(cause, LONGEST_CAUSE))
        self.wire.close_gently()

    def _take(self, kind: str, state: Message) -> None:
        if kind != "state" or state["workers_left"] > self.num_processes or state["running"] < bool(state["workers_left"]):
            raise LostError("sent an invalid message")
        if state["restart"] != self._restart:
            return  # a state of the previous attempt
        self.running, self.workers_left, self.cpu_s = state["running"], state["workers_left"], state["cpu_s"]
        if state["failure"] is not None and self.failure is None:
            failure = Failure.from_json(state["failure"])
            slot = failure.slot if failure.slot < self.num_processes else -1
            self.failure = replace(failure, who=f"{failure.who} on node {self.node_rank}", slot=slot)

    def _give_up(self, why: str) -> None:
        if not self.lost:
            self.lost, self.running, self.workers_left = True, False, 0
            self.failure = self.failure or Failure(f"node {self.node_rank}", why, 1)
            self.wire.close()


class Caller:
    """A connection whose other side has not joined: it gets a challenge, and its messages are not parsed before its proof.

    Attributes
    ----------
    address : str
    node_rank : int
        The rank in its valid answer, -1 before.
    wire : Wire, optional
        Set when the caller has proved that it knows the token.
    refused : str
        Why its answer or proof was invalid.
    """

    def __init__(self, connection: Connection, address: str, token: bytes, silence_s: float) -> None:
        self.address, self.node_rank, self.refused = address, -1, ""
        self.wire: Optional[Wire] = None
        self.connection, self._token, self._silence_s = connection, token, silence_s
        self._until = time.monotonic() + HELLO_S
        self._challenge = make_challenge()
        connection.expect(ANSWER_BYTES, self._check)
        connection.send(self._challenge)

    def hello(self) -> Optional[Message]:
        """Return its first message; None if it has not arrived.

        Raises
        ------
        LostError
            The message is late or of another kind, or the connection is lost.
        """
        if self.connection.lost or time.monotonic() > self._until:
            raise LostError(self.connection.lost or "sends nothing")
        message = self.wire.receive() if self.wire else None
        if message is not None and message[0] != "hello":
            raise LostError("sent an invalid message")
        return message[1] if message else None

    def _check(self, answer: bytes) -> None:
        try:
            self.node_rank, proof, keys = check_answer(self._token, self._challenge, answer)
        except HandshakeError as error:
            self.refused = str(error)
            self.connection.lose(self.refused)
        else:
            self.connection.send(proof)
            self.wire = Wire(self.connection, keys, self._silence_s, leads=True)


class Rendezvous:
    """Accepts the launchers of the other nodes.

    Parameters
    ----------
    host, port : str, int
        Address to listen at; it gives access to nothing else on this machine.
    num_nodes : int
        Including this one.
    token : str
        The secret that the other launchers must know.
    servers : int, optional
    backend : str
        Options of this node's command; the other nodes must have the same.
    selector : selectors.BaseSelector
    silence_s : float, seconds
        A node is lost when it is silent for longer.
    report : callable (str) -> None
        Shows the user a message.
    """

    def __init__(
        self,
        host: str,
        port: int,
        num_nodes: int,
        *,
        token: str,
        servers: Optional[int] = None,
        backend: str = "dist_sync",
        selector: selectors.BaseSelector,
        silence_s: float,
        report: Callable[[str], None],
    ) -> None:
        self.num_nodes, self._servers, self._backend = num_nodes, servers, backend
        self._token, self._selector, self._silence_s, self._report = token.encode("ascii"), selector, silence_s, report
        self._members: Dict[int, Member] = {}
        self._callers: List[Caller] = []
        self._leaving: List[Tuple[Connection, float]] = []  # rejected connections, until they have read the reason
        self._reported: Set[str] = set()
        self._most = min(_MOST_CALLERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, port))
        except OSError as error:
            self._listener.close()
            raise LaunchError(
                f"launch: got {host}:{port} for node 0: {error.strerror}; expected an address of this machine and a free port. "
                "Check --rendezvous and --interface."
            ) from None
        self._listener.listen(self._most)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def members(self) -> List[Member]:
        """The nodes that have joined, by rank."""
        return [self._members[rank] for rank in sorted(self._members)]

    def poll(self) -> None:
        """Accept callers that have sent their hello, and drop lost nodes."""
        for member in self.members:
            member.poll()
            if member.lost:
                del self._members[member.node_rank]
        callers, self._callers = self._callers, []
        for caller in callers:
            try:
                hello = caller.hello()
            except LostError:
                if caller.refused:
                    self._report_once(f"rejected {caller.address}, which {caller.refused}")
                caller.connection.close()
            else:
                if hello is None:
                    self._callers.append(caller)
                else:
                    self._welcome(caller, hello)
        now = time.monotonic()
        for connection, until in self._leaving:
            if now > until:
                connection.close()
        self._leaving = [one for one in self._leaving if not one[0].closed]

    def finish(self, code: int, cause: str) -> None:
        """Send all launchers the exit code and cause, and stop listening; do not wait for launchers that do not close."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for connection in [*(caller.connection for caller in self._callers), *(one for one, _ in self._leaving)]:
            connection.close()
        members, until = self.members, time.monotonic() + _FAREWELL_S
        for member in members:
            member.finish(code, cause)
        while not all(member.wire.closed for member in members) and time.monotonic() < until:
            wait_for_events(self._selector)
        for member in members:
            member.wire.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                plug, (address, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._evict(self._callers):
                    time.sleep(0.01)  # callers must not make this process close its other files
                return
            same = [caller for caller in self._callers if caller.address == address]
            if len(same) >= _EACH_CALLERS:
                self._evict(same)
            elif len(self._callers) >= self._most:
                most, _ = Counter(caller.address for caller in self._callers).most_common(1)[0]
                self._evict([caller for caller in self._callers if caller.address == most])
            if len(self._callers) < self._most:
                self._callers.append(Caller(Connection(plug, self._selector), address, self._token, self._silence_s))
            else:
                plug.close()

    def _evict(self, callers: Sequence[Caller]) -> bool:
        """Close the oldest of the callers that has proved nothing; return whether there was one."""
        for caller in callers:
            caller.connection.poll()  # its proof may have arrived
            if caller.wire is None:
                caller.connection.close()
                self._callers.remove(caller)
                return True
        return False

    def _welcome(self, caller: Caller, hello: Message) -> None:
        assert caller.wire is not None
        node_rank, why = caller.node_rank, self._why_not(caller.node_rank, hello)
        if why:
            self._report_once(f"rejected a launcher at {caller.address}: {why}")
            caller.wire.send("refuse", why=why)
        elif node_rank in self._members:
            caller.wire.send("wait", why=f"node {node_rank} has already joined")  # or its loss is not detected yet
        else:
            self._members[node_rank] = Member(caller.wire, node_rank, hello["num_processes"])
            self._report(f"node {node_rank} joined from {caller.address}")
            caller.wire.send("welcome")
            return
        caller.wire.close_gently()
        self._leaving.append((caller.connection, time.monotonic() + _FAREWELL_S))

    def _why_not(self, node_rank: int, hello: Message) -> str:
        """Return why a node cannot take part, "" if it can."""
        if hello["num_nodes"] != self.num_nodes:
            return f"got --nodes {hello['num_nodes']}; expected {self.num_nodes}, as on node 0"
        if not 0 < node_rank < self.num_nodes:
            return f"got --node-rank {node_rank}; expected 1 to {self.num_nodes - 1}"
        if hello["backend"] != self._backend:
            return f"got --backend {hello['backend']}; expected {self._backend}, as on node 0"
        if hello["servers"] != self._servers:
            return f"got {_servers_option(hello['servers'])}; expected {_servers_option(self._servers)}, as on node 0"
        return ""

    def _report_once(self, text: str) -> None:
        """Report a rejected launcher, up to `_MAX_REPORTS` different ones."""
        if text not in self._reported and len(self._reported) < _MAX_REPORTS:
            self._reported.add(text)
            self._report(text + ("" if len(self._reported) < _MAX_REPORTS else "; further ones are not reported"))


def _servers_option(servers: Optional[int]) -> str:
    return "no --servers" if servers is None else f"--servers {servers}"
