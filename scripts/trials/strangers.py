"""Strangers at the rendezvous of a real job: what they send must not end it, hang it, or give them a place in it.

Each trial starts launchers as processes on loopback, with workers that wait for a file, and sends them fuzzed bytes and
messages at every stage: before the nodes have joined, while they work, after the end. Strangers without the token play nodes
and node 0. Peers with the token send wrong fields. The genuine launchers must end with status 0, each having started its own
workers once, with bounded memory and file descriptors, and no escape sequence and no token in what they print and log.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = f"""
import sys, types
for name in ("gluon_mgpu", "gluon_mgpu.distributed"):  # without MXNet, so that it starts at once
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [{str(ROOT)!r} + "/" + name.replace(".", "/")]
"""
exec(_PACKAGE)
from gluon_mgpu.distributed.launcher import handshake, messages  # noqa: E402
from gluon_mgpu.distributed.launcher.plan import Plan  # noqa: E402

_LAUNCHER = (
    _PACKAGE
    + """
import json
from pathlib import Path
from gluon_mgpu.distributed import follow
from gluon_mgpu.distributed.launcher.job import Job, run_job
from gluon_mgpu.distributed.launcher.supervisor import Limits
follow._RETRY_S = 0.02  # more strangers to meet
options = json.loads(sys.argv[1])
options["limits"] = Limits(**options["limits"])
for name in ("program", "rendezvous"):
    options[name] = tuple(options[name])
sys.exit(run_job(Job(**{**options, "log_dir": Path(options["log_dir"])})))
"""
)
_WORKER = """
import os, sys, time
print("place", os.environ["GLUON_MGPU_RANK"], "GLUON_MGPU_TOKEN" in os.environ, flush=True)
end = time.monotonic() + 60
while not os.path.exists(sys.argv[1]) and time.monotonic() < end:
    time.sleep(0.02)
"""
_TOKEN = "the-token-of-this-trial-0123456789"
_MOST_KB = 150_000
_ENDS_S = 30.0
_HEADER = struct.Struct("!I32s")
_ESCAPES = ["\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\u202e", "\r", "\x00", "\ud800", "\n", "\x1b"]
_num_sent = 0
atexit.register(lambda: print(f"strangers: {_num_sent} fuzzed messages sent", file=sys.stderr))


def trial(seed: int) -> str:
    """Return the errors of one job among strangers, "" if there are none."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        stage = _Stage(rng, Path(folder))
        try:
            story = [_before_and_while, _false_node_0, _third_seat, _after_the_end, _in_a_flood][seed % 5]
            story(stage)
            return "\n  ".join([f"seed {seed}: {story.__name__}", *stage.wrong]) if stage.wrong else ""
        finally:
            stage.end()


class _Stage:
    """A job's launchers, and their errors."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.folder = rng, folder
        self.port = _free_port()
        self.wrong: List[str] = []
        self.launchers: Dict[int, subprocess.Popen] = {}
        self.outputs: Dict[int, Path] = {}
        self.mark = f"strangers-{os.getpid()}-{rng.random()}"

    def launch(self, node_rank: int, num_nodes: int = 2, *, port: int = 0) -> subprocess.Popen:
        (self.folder / "worker.py").write_text(_WORKER)
        options = {
            "program": [sys.executable, "-S", str(self.folder / "worker.py"), str(self.folder / "done")],
            "num_processes": 1,
            "servers": 0,
            "num_nodes": num_nodes,
            "node_rank": node_rank,
            "rendezvous": ["127.0.0.1", port or self.port],
            "silence_s": 4.0,
            "limits": {"grace_s": 1.0, "patience_s": 60.0},
            "log_dir": str(self.folder / f"node{node_rank}"),
        }
        self.outputs[node_rank] = self.folder / f"output{node_rank}"
        with open(self.outputs[node_rank], "wb") as file:
            self.launchers[node_rank] = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, json.dumps(options)],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "GLUON_MGPU_TOKEN": _TOKEN, "STRANGERS_MARK": self.mark},
            )
        return self.launchers[node_rank]

    def listening(self) -> None:
        """Wait for node 0."""
        self.until(lambda: _can_connect(self.port), "node 0 listens")

    def started(self, *ranks: int) -> None:
        """Wait for workers."""
        for rank in ranks:
            log = self.folder / f"node{rank}" / f"rank-{rank}.log"
            self.until(lambda: log.exists() and log.stat().st_size > 0, f"rank {rank} has started")  # noqa: B023

    def until(self, done: Callable[[], bool], what: str, longest_s: float = _ENDS_S) -> bool:
        until = time.monotonic() + longest_s
        while not done():
            if time.monotonic() > until:
                self.wrong.append(f"not within {longest_s:.0f} s: {what}")
                return False
            time.sleep(0.01)
        return True

    def check_size(self) -> None:
        """See that strangers have not made a launcher large."""
        for node_rank, launcher in self.launchers.items():
            with suppress(OSError):
                status = Path(f"/proc/{launcher.pid}/status").read_text()
                size_kb = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
                num_open = len(os.listdir(f"/proc/{launcher.pid}/fd"))
                if size_kb > _MOST_KB or num_open > 700:
                    self.wrong.append(f"node {node_rank} holds {size_kb} KB and {num_open} file descriptors")

    def finish(self) -> None:
        """Let the workers end, and check how everything has ended."""
        self.check_size()
        (self.folder / "done").touch()
        for node_rank, launcher in self.launchers.items():
            self.until(lambda: launcher.poll() is not None, f"node {node_rank} ends")  # noqa: B023
            if launcher.returncode:
                self.wrong.append(f"node {node_rank} ended with {launcher.returncode}: {self.output(node_rank)[-1500:]}")
        logs = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("rank-*.log"))
        if logs != [f"node{rank}/rank-{rank}.log" for rank in sorted(self.launchers)]:
            self.wrong.append(f"workers ran in {logs}")
        for path in [*self.outputs.values(), *self.folder.rglob("*.log")]:
            data = path.read_bytes()
            if _TOKEN.encode() in data or any(
                sign.encode("utf-8", "ignore") in data for sign in ("\x1b", "\x9b", "\u202e", "\x00")
            ):
                self.wrong.append(f"{path.name} holds a token or an escape sequence: {data[-500:]!r}")
            if data[:5] == b"place" and b"False" not in data:
                self.wrong.append(f"a worker has the token: {data[:100]!r}")

    def output(self, node_rank: int) -> str:
        return self.outputs[node_rank].read_text("utf-8", "replace")

    def end(self) -> None:
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait()
        time.sleep(0.05)
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (path / "environ").read_bytes() and int(path.name) != os.getpid():
                    os.kill(int(path.name), signal.SIGKILL)


def _before_and_while(stage: _Stage) -> None:
    """Strangers come to node 0 before the other node has, and while both work."""
    recorded: List[bytes] = []
    stage.launch(0)
    stage.listening()
    crowd = _Crowd(stage.port, stage.rng, recorded)
    crowd.attack(60)
    relay = _Relay(stage.port, recorded)
    stage.launch(1, port=relay.port)
    crowd.attack(20)
    stage.started(0, 1)
    crowd.attack(60)
    stage.check_size()
    crowd.leave()
    stage.finish()
    relay.close()


def _false_node_0(stage: _Stage) -> None:
    """A stranger, or one with the token and wrong orders, listens where node 0 will."""
    stage.launch(1)
    false = _FalseNode0(stage.port, stage.rng)
    stage.until(lambda: false.num_met >= 60, "the node connects to a false node 0")
    false.close()
    if (stage.folder / "node1").exists() and list((stage.folder / "node1").glob("rank-*")):
        stage.wrong.append("a false node 0 has started a worker")
    stage.launch(0)
    stage.started(0, 1)
    stage.finish()


def _third_seat(stage: _Stage) -> None:
    """A peer with the token takes the third seat, sends wrong messages, and is put out; then the genuine nodes come."""
    stage.launch(0, 3)
    stage.listening()
    for _ in range(25):
        peer = _Peer(stage.port, 2)
        if not peer.join({"num_nodes": 3, "num_processes": 1, "servers": 0, "backend": "dist_sync"}):
            time.sleep(0.05)  # the one before is not gone
            continue
        for _ in range(stage.rng.randint(1, 3)):
            peer.send_data(_wrong_message(stage.rng, _STATES))
        if stage.rng.random() < 0.5:
            peer.close()
        else:  # node 0 closes it
            stage.until(lambda: peer.ended(), "node 0 ends a peer that sends wrong messages")  # noqa: B023
            peer.close()
    stage.launch(1, 3)
    stage.launch(2, 3)
    stage.started(0, 1, 2)
    stage.finish()


def _after_the_end(stage: _Stage) -> None:
    """A peer with a correct handshake continues to send after node 0 has ended the job."""
    leader = stage.launch(0)
    stage.listening()
    peer = _Peer(stage.port, 1)
    peer.join({"num_nodes": 2, "num_processes": 1, "servers": 0, "backend": "dist_sync"})
    kind, _ = peer.receive_until("start")
    if kind != "start":
        stage.wrong.append(f"got {kind}, not start")
    stage.started(0)
    state = {"restart": 0, "running": True, "workers_left": 1, "failure": None, "cpu_s": 0.0}
    peer.send("state", state)
    signalled = stage.rng.random() < 0.5
    if signalled:
        leader.send_signal(stage.rng.choice([signal.SIGTERM, signal.SIGINT]))
        peer.receive_until("stop")
    else:
        (stage.folder / "done").touch()
    peer.send("state", {**state, "running": False, "workers_left": 0})
    kind, end = peer.receive_until("finish")
    until = time.monotonic() + _ENDS_S
    while leader.poll() is None and time.monotonic() < until:
        with suppress(OSError):
            if stage.rng.random() < 0.5:
                peer.send_data(_wrong_message(stage.rng, _STATES))
            else:
                peer.plug.sendall(_noise(stage.rng))
                _count()
    if leader.poll() is None:
        stage.wrong.append("node 0 does not end while a peer continues to send")
    elif leader.returncode not in ((130, 143) if signalled else (0,)) or "\nTraceback" in stage.output(0):
        stage.wrong.append(f"node 0 ended with {leader.returncode}: {stage.output(0)[-1500:]}")
    peer.close()


def _in_a_flood(stage: _Stage) -> None:
    """Strangers of many addresses connect as fast as they can, from before the node joins until after the end or a signal."""
    leader = stage.launch(0)
    stage.listening()
    over = threading.Event()
    num_addresses = stage.rng.choice([1, 1, 5, 200])

    def flood(seed: int) -> None:
        rng, held = random.Random(seed), []
        while not over.is_set():
            with suppress(OSError):
                address = f"127.0.0.{rng.randint(1, num_addresses)}"
                held.append(socket.create_connection(("127.0.0.1", stage.port), timeout=5, source_address=(address, 0)))
                if rng.random() < 0.2:
                    _count()
                    held[-1].sendall(_noise(rng)[:500])
            if len(held) > 1500:
                for plug in held[:1000]:
                    plug.close()
                del held[:1000]
        for plug in held:
            plug.close()

    threads = [threading.Thread(target=flood, args=(stage.rng.random(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        stage.launch(1)
        stage.started(0, 1)
        stage.check_size()
        if stage.rng.random() < 0.5:
            stage.finish()
        else:
            leader.send_signal(stage.rng.choice([signal.SIGTERM, signal.SIGINT]))
            for node_rank, launcher in stage.launchers.items():
                stage.until(lambda: launcher.poll() is not None, f"node {node_rank} ends with a signal")  # noqa: B023
                if launcher.returncode not in (130, 143) or "\nTraceback" in stage.output(node_rank):
                    stage.wrong.append(f"node {node_rank} ended with {launcher.returncode}: {stage.output(node_rank)[-1500:]}")
    finally:
        over.set()
        for thread in threads:
            thread.join()


class _Crowd:
    """Strangers that come to node 0: each attack opens a connection, sends something, and leaves it open or not."""

    def __init__(self, port: int, rng: random.Random, recorded: List[bytes]) -> None:
        self.port, self.rng, self.recorded = port, rng, recorded
        self.open: List[socket.socket] = []

    def attack(self, count: int) -> None:
        kinds = [
            self.noise,
            self.json,
            self.wrong_proof,
            self.replay,
            self.half,
            self.reset,
            self.drip,
            self.crowd,
            self.wrong_hello,
        ]
        for _ in range(count):
            with suppress(OSError):
                self.rng.choice(kinds)()

    def leave(self) -> None:
        for plug in self.open:
            plug.close()

    def connect(self) -> socket.socket:
        plug = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        self.open.append(plug)
        if len(self.open) > 300:
            self.open.pop(0).close()
        return plug

    def noise(self) -> None:
        plug = self.connect()
        for _ in range(self.rng.randint(1, 4)):
            _count()
            plug.sendall(_noise(self.rng))

    def json(self) -> None:
        plug = self.connect()
        kinds = {"hello": {"version": 2, "node_rank": 1, "num_nodes": 2, "num_processes": 1}, **_STATES}
        for _ in range(self.rng.randint(1, 4)):
            _count()
            plug.sendall(_wrong_message(self.rng, kinds) + b"\n")

    def wrong_proof(self) -> None:
        plug = self.connect()
        challenge = _exactly(plug, handshake.CHALLENGE_BYTES)
        token = self.rng.choice([b"another token of this length", _TOKEN[:-1].encode(), _TOKEN.encode()])
        unsigned, _, _ = handshake.answer_challenge(token, challenge, self.rng.choice([0, 1, 2, 2**32 - 1]))
        answer = bytearray(unsigned)
        if token == _TOKEN.encode() or self.rng.random() < 0.5:
            answer[self.rng.randrange(len(answer))] ^= 1 << self.rng.randrange(8)
        _count()
        plug.sendall(bytes(answer) + _noise(self.rng))

    def replay(self) -> None:
        if self.recorded:
            plug = self.connect()
            _count()
            plug.sendall(self.rng.choice([b"".join(self.recorded), self.recorded[0], b"".join(self.recorded[:2])]))

    def half(self) -> None:
        plug = self.connect()
        challenge = _exactly(plug, handshake.CHALLENGE_BYTES)
        answer, _, _ = handshake.answer_challenge(_TOKEN.encode(), challenge, 1)
        _count()
        plug.sendall(answer[: self.rng.randrange(len(answer))])
        if self.rng.random() < 0.5:
            plug.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        plug = self.connect()
        _count()
        plug.sendall(_noise(self.rng)[:50])
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.open.remove(plug)
        plug.close()

    def drip(self) -> None:
        plug = self.connect()
        for byte in _noise(self.rng)[: self.rng.randint(1, 30)]:
            _count()
            plug.sendall(bytes([byte]))

    def crowd(self) -> None:
        for _ in range(self.rng.randint(10, 60)):
            self.connect()
        _count()

    def wrong_hello(self) -> None:
        """With the token, but a first message that is none."""
        peer = _Peer(self.port, self.rng.choice([0, 1, 1, 2, 2**31]))
        self.open.append(peer.plug)
        hello = {"num_nodes": 2, "num_processes": 1, "servers": 0, "backend": "dist_sync"}
        if self.rng.random() < 0.3:
            peer.send("hello", {**hello, "num_nodes": 3})  # one of another job, which is rejected
            _count()
        else:
            peer.send_data(_wrong_message(self.rng, {"hello": hello}))


class _Peer:
    """One that knows the token, and plays a node by hand."""

    def __init__(self, port: int, node_rank: int) -> None:
        self.plug = socket.create_connection(("127.0.0.1", port), timeout=_ENDS_S)
        challenge = _exactly(self.plug, handshake.CHALLENGE_BYTES)
        answer, proof, keys = handshake.answer_challenge(_TOKEN.encode(), challenge, node_rank)
        self.plug.sendall(answer)
        handshake.check_proof(_exactly(self.plug, handshake.PROOF_BYTES), proof)
        self.end = _End(self.plug, keys.to_leader)

    def join(self, hello: Dict[str, Any]) -> bool:
        """Say hello; return whether node 0 takes it."""
        self.send("hello", hello)
        return self.receive_until("welcome", "wait", "refuse")[0] == "welcome"

    def receive_until(self, *kinds: str) -> Tuple[str, Dict[str, Any]]:
        while True:
            message = self.end.receive()
            if message["kind"] in kinds:
                return message["kind"], message

    def send(self, kind: str, fields: Dict[str, Any]) -> None:
        self.end.send(messages.write(kind, fields))

    def send_data(self, data: bytes) -> None:
        _count()
        with suppress(OSError):
            self.end.send(data)

    def ended(self) -> bool:
        """Whether node 0 has closed the connection; what it has sent before is thrown away."""
        self.plug.setblocking(False)
        try:
            return not self.plug.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.plug.close()


class _End:
    """Messages over a connection with keys, whatever they hold."""

    def __init__(self, plug: socket.socket, key: bytes) -> None:
        self.plug, self.key, self.count = plug, key, 0

    def send(self, data: bytes) -> None:
        proof = handshake.mac(self.key, "message", struct.pack("!QI", self.count, len(data)) + data)
        self.count += 1
        self.plug.sendall(_HEADER.pack(len(data), proof) + data)

    def receive(self) -> Dict[str, Any]:
        length, _ = _HEADER.unpack(_exactly(self.plug, _HEADER.size))
        message: Dict[str, Any] = json.loads(_exactly(self.plug, length))
        return message


class _FalseNode0:
    """Listens in place of node 0: strangers, and one that knows the token and sends wrong orders."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.rng, self.num_met = rng, 0
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen()
        self.closing = False
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        kinds = [self.noise, self.silence, self.no_token, self.reflect, self.wrong_orders, self.wrong_orders]
        while not self.closing:
            with suppress(OSError), self.listener.accept()[0] as plug:
                plug.settimeout(5)
                self.rng.choice(kinds)(plug)
                self.num_met += 1

    def close(self) -> None:
        self.closing = True
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()

    def noise(self, plug: socket.socket) -> None:
        _count()
        plug.sendall(_noise(self.rng))

    def silence(self, plug: socket.socket) -> None:
        _count()
        plug.sendall(handshake.make_challenge()[: self.rng.randrange(handshake.CHALLENGE_BYTES)])

    def no_token(self, plug: socket.socket) -> None:
        plug.sendall(handshake.make_challenge())
        _exactly(plug, handshake.ANSWER_BYTES)
        _count()
        plug.sendall(os.urandom(handshake.PROOF_BYTES) + _wrong_message(self.rng, _ORDERS))

    def reflect(self, plug: socket.socket) -> None:
        plug.sendall(handshake.make_challenge())
        answer = _exactly(plug, handshake.ANSWER_BYTES)
        _count()
        plug.sendall(answer[-handshake.PROOF_BYTES :])

    def wrong_orders(self, plug: socket.socket) -> None:
        challenge = handshake.make_challenge()
        plug.sendall(challenge)
        _, proof, keys = handshake.check_answer(_TOKEN.encode(), challenge, _exactly(plug, handshake.ANSWER_BYTES))
        plug.sendall(proof)
        end = _End(plug, keys.to_follower)
        if self.rng.random() < 0.8:
            end.send(messages.write("welcome", {}))
        for _ in range(self.rng.randint(1, 3)):
            _count()
            end.send(_wrong_message(self.rng, _ORDERS) if self.rng.random() < 0.6 else self.greedy_order())
        while plug.recv(1 << 16):  # until the node has had enough
            pass

    def greedy_order(self) -> bytes:
        """A well-formed message that does not match the node's options."""
        counts: Tuple[int, ...] = (1, 1)
        servers: Tuple[int, ...] = (0, 0)
        rank, backend = 1, "dist_sync"
        which = self.rng.randrange(6)
        if which == 0:
            counts = (1, self.rng.choice([2, 200, 60000]))
        elif which == 1:
            servers = (0, self.rng.choice([1, 200]))
        elif which == 2:
            rank = self.rng.choice([2, 60000])
        elif which == 3:
            counts, servers = (1, 1, 1), (0, 0, 0)
        elif which == 4:
            backend = "horovod"
        else:
            counts = (1, 0)
        return messages.write("start", {"plan": vars(Plan(0, counts, servers, ("127.0.0.1", 9), backend)), "node_rank": rank})


class _Relay:
    """Stands between a node and node 0, and records what the node sends, for replays."""

    def __init__(self, port: int, recorded: List[bytes]) -> None:
        self.recorded, self.target = recorded, port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                with near, socket.create_connection(("127.0.0.1", self.target)) as far:
                    self.pass_on(near, far)

    def pass_on(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in selector.select():
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is near:
                        self.recorded.append(data)
                    key.data.sendall(data)

    def close(self) -> None:
        self.listener.close()


_FAILURE = {"who": "rank 1", "what": "exited", "code": 1, "lines": ["no"], "log": "x", "slot": 0, "node_rank": 0}
_STATES: Dict[str, Dict[str, Any]] = {
    "state": {"restart": 0, "running": True, "workers_left": 1, "failure": _FAILURE, "cpu_s": 0.5},
    "alive": {},
}
_ORDERS: Dict[str, Dict[str, Any]] = {
    "start": {
        "plan": {"restart": 0, "counts": [1, 1], "servers": [0, 0], "root": ["127.0.0.1", 9], "backend": "dist_sync"},
        "node_rank": 1,
    },
    "stop": {"signal": 15},
    "finish": {"code": 0, "cause": "all well"},
    "refuse": {"why": "no"},
    "wait": {"why": "not yet"},
}


def _wrong_message(rng: random.Random, kinds: Dict[str, Dict[str, Any]]) -> bytes:
    """Return something that resembles a message of one of these kinds, and that no launcher sends."""
    while True:
        kind = rng.choice(list(kinds))
        message = json.loads(json.dumps({"kind": kind, **kinds[kind]}))
        for _ in range(rng.randint(1, 3)):
            _spoil(rng, message)
        data = json.dumps(message).encode("utf-8", "replace") if not isinstance(message, bytes) else message
        data = _spoil_text(rng, data)
        try:
            for known in (messages.TO_LEADER, messages.TO_FOLLOWER):
                with suppress(ValueError):
                    messages.read(data, known)
                    raise LookupError  # the message is valid
        except LookupError:
            continue
        return data


def _spoil(rng: random.Random, message: Any) -> None:
    """Change a place of a message."""
    places: List[Tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, inner in list(items):
            places.append((value, name))
            walk(inner)

    walk(message)
    holder, name = rng.choice(places)
    if rng.random() < 0.15 and isinstance(holder, dict):
        del holder[name]
        if not message:
            message["kind"] = "alive "
        return
    escape = rng.choice(_ESCAPES)
    values: List[Any] = [
        None,
        True,
        -1,
        0,
        1.5,
        2**31,
        2**63,
        10**30,
        "",
        "1",
        "\u0663",
        [],
        {},
        [[]],
        {"kind": "stop"},
        escape * rng.randint(1, 50),
    ]
    holder[name] = rng.choice([*values, "x" * 5000, ["x"] * 500, [1] * 70000])


def _spoil_text(rng: random.Random, data: bytes) -> bytes:
    which = rng.randrange(12)
    if which == 0:
        return data.replace(b"1", rng.choice([b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 5000, b"1.0", b"0x1", b"1e1"]), 1)
    if which == 1:
        return data[: rng.randrange(len(data))]
    if which == 2:
        return data[:-1] + b', "kind": "alive"}'
    if which == 3:
        return b"[" * 100_000
    if which == 4:
        at = rng.randrange(len(data))
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data


def _noise(rng: random.Random) -> bytes:
    which = rng.randrange(6)
    if which == 0:
        return rng.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"SSH-2.0-x\r\n", b"\x1b[2J\x1b]0;x\x07\n"])
    if which == 1:
        return bytes(rng.randrange(256) for _ in range(rng.randint(1, 300)))
    if which == 2:
        return b"\xff" * rng.choice([1000, 300_000])
    if which == 3:
        return b"gluon-mgpu" + bytes(rng.randrange(256) for _ in range(rng.randint(0, 200)))
    if which == 4:
        return b"gluon-mgpu\x00" + bytes([handshake.VERSION]) + bytes(rng.randrange(256) for _ in range(68))
    return b"{" * 70_000


def _exactly(plug: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = plug.recv(count - len(data))
        if not more:
            raise ConnectionError("the other side has closed the connection")
        data += more
    return data


def _can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _count() -> None:
    global _num_sent
    _num_sent += 1
