"""Who may join a job: proofs, authenticated messages with limits, and strangers that nodes and node 0 must withstand."""

import json
import os
import selectors
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from gluon_mgpu.distributed import LaunchError
from gluon_mgpu.distributed.launcher import handshake, messages
from gluon_mgpu.distributed.launcher.connection import Connection, LostError, wait_for_events
from gluon_mgpu.distributed.launcher.hosts import Host, SshHosts, parse_hosts
from gluon_mgpu.distributed.launcher.messages import TO_FOLLOWER, TO_LEADER
from gluon_mgpu.distributed.launcher.plan import Machine, Plan
from gluon_mgpu.distributed.launcher.printable import printable, printable_lines
from gluon_mgpu.distributed.launcher.rendezvous import Rendezvous
from gluon_mgpu.distributed.launcher.tokens import make_token_file, new_token, read_token, token_in_environment
from gluon_mgpu.distributed.launcher.wire import Wire

from .conftest import assert_house_style
from .test_launch import mark, marked, until
from .test_launch_nodes import PLACE, TOKEN, can_connect, codes, hosts, launcher_log, token

__all__ = ["hosts", "mark", "token"]  # fixtures
KEY = TOKEN.encode()
HELLO = {"num_nodes": 2, "num_processes": 1, "servers": 0, "backend": "dist_sync"}
STATE = {"restart": 0, "running": True, "workers_left": 1, "failure": None, "cpu_s": 0.0}
FAILURE = {"who": "rank 1", "what": "exited", "code": 1, "lines": ["no"], "log": "x", "slot": 0, "node_rank": 0}
PLAN = vars(Plan(0, (1, 1), (0, 0), ("127.0.0.1", 9000)))


# The proofs


def exchange(key=KEY, other=KEY, node_rank=1):
    challenge = handshake.make_challenge()
    answer, expected, keys = handshake.answer_challenge(key, challenge, node_rank)
    return challenge, answer, expected, keys, handshake.check_answer(other, challenge, answer)


def test_both_sides_prove_the_token():
    _, _, expected, keys, (node_rank, proof, same) = exchange(node_rank=7)
    assert (node_rank, proof, same) == (7, expected, keys)
    assert keys.to_leader != keys.to_follower
    assert exchange()[2] != expected  # another connection


def test_a_wrong_token_proves_nothing():
    with pytest.raises(handshake.HandshakeError, match="does not know this job's token"):
        exchange(other=b"another token, as long")
    with pytest.raises(handshake.HandshakeError, match="does not know"):
        handshake.check_proof(bytes(32), exchange()[2])


def test_an_answer_fits_its_challenge_and_nothing_in_it_can_be_changed():
    challenge, answer, expected, _, _ = exchange()
    with pytest.raises(handshake.HandshakeError):  # a replay
        handshake.check_answer(KEY, handshake.make_challenge(), answer)
    for at in range(len(answer)):
        changed = bytearray(answer)
        changed[at] ^= 1
        with pytest.raises(handshake.HandshakeError):
            handshake.check_answer(KEY, challenge, bytes(changed))
    with pytest.raises(handshake.HandshakeError):  # a reflection: node 0 sends a node's own proof back
        handshake.check_proof(answer[-32:], expected)


def test_another_version_is_named():
    challenge = bytearray(handshake.make_challenge())
    challenge[11] += 1
    with pytest.raises(handshake.HandshakeError, match=f"uses version {handshake.VERSION + 1}"):
        handshake.answer_challenge(KEY, bytes(challenge), 1)
    with pytest.raises(handshake.HandshakeError, match="is not a launcher"):
        handshake.answer_challenge(KEY, b"HTTP/1.1 400 Bad Request".ljust(handshake.CHALLENGE_BYTES), 1)


# What may be said


def without(said, name):
    return {key: value for key, value in said.items() if key != name}


@pytest.mark.parametrize(
    ("known", "kind", "right", "wrong"),
    [
        (
            TO_LEADER,
            "hello",
            HELLO,
            [{"num_nodes": 0}, {"num_nodes": True}, {"num_processes": 1.0}, {"servers": -1}, {"backend": 1}],
        ),
        (
            TO_LEADER,
            "state",
            {**STATE, "failure": FAILURE},
            [
                {"workers_left": -1},
                {"workers_left": 10**6},
                {"running": 1},
                {"cpu_s": -1},
                {"cpu_s": "1"},
                {"restart": None},
                {"failure": {}},
                {"failure": {**FAILURE, "code": 0}},
                {"failure": {**FAILURE, "lines": ["x"] * 101}},
                {"failure": {**FAILURE, "lines": "no"}},
                {"failure": {**FAILURE, "who": "x" * 501}},
                {"more": 1},
            ],
        ),
        (
            TO_FOLLOWER,
            "start",
            {"plan": PLAN, "node_rank": 1},
            [
                {"node_rank": 0},
                {"plan": without(PLAN, "root")},
                {"plan": {**PLAN, "command": "rm"}},
                {"plan": {**PLAN, "counts": [1, 10**9]}},
                {"plan": {**PLAN, "counts": [1]}},
                {"plan": {**PLAN, "counts": [40000, 40000]}},
                {"plan": {**PLAN, "counts": [0, 0]}},
                {"plan": {**PLAN, "root": ["node0", 9000]}},
                {"plan": {**PLAN, "root": ["127.0.0.1", 0]}},
                {"plan": {**PLAN, "root": ["\u0661.0.0.1", 9000]}},
            ],
        ),
        (TO_FOLLOWER, "stop", {"signal": 15}, [{"signal": 1}, {"signal": True}, {"signal": 15.0}, {"signal": [15]}]),
        (
            TO_FOLLOWER,
            "finish",
            {"code": 0, "cause": ""},
            [{"code": -1}, {"code": 256}, {"cause": None}, {"cause": "x" * 40_001}],
        ),
        (TO_FOLLOWER, "alive", {}, [{"x": 1}]),
    ],
)
def test_each_field_has_a_type_and_limits(known, kind, right, wrong):
    assert messages.read(messages.write(kind, right), known)[0] == kind
    for change in wrong:
        with pytest.raises(ValueError, match=r"."):
            messages.read(messages.write(kind, {**right, **change}), known)
    for name in right:
        with pytest.raises(ValueError, match=r"."):
            messages.read(messages.write(kind, without(right, name)), known)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"kind": "alive"',
        b'{"kind": "alive", "kind": "alive"}',
        b'{"kind": ["alive"]}',
        b'{"kind": "start"}',  # for the other side
        json.dumps({"kind": "state", **STATE}).replace("0.0", "1e999").encode(),
        json.dumps({"kind": "state", **STATE}).replace("0.0", "NaN").encode(),
        json.dumps({"kind": "state", **STATE}).replace('_left": 1', '_left": 1e999').encode(),
        json.dumps({"kind": "state", **STATE}).replace("0.0", "9" * 200_000).encode(),
    ],
)
def test_what_is_no_message(data, monkeypatch):
    num_digits = []
    monkeypatch.setattr(messages, "int", lambda text: num_digits.append(len(text)) or int(text), raising=False)
    with pytest.raises(ValueError, match=r"."):
        messages.read(data, TO_LEADER)
    assert max(num_digits, default=0) < 100  # converting 200,000 digits took longer than 5 s


def test_text_of_others_is_made_printable():
    text = "\x1b[31mbad\x1b[0m\x1b]0;owned\x07 \x9b2Jnode\u202e\x00\ud800\tend"
    assert printable(text) == "bad node\ufffd\ufffd\ufffd end"
    assert printable_lines("one\x1b[2J\n  two\x85\u2028") == "one\n  two\ufffd\ufffd"
    assert printable("한국어 ñ 漢字 🙂") == "한국어 ñ 漢字 🙂"
    failure = {**FAILURE, "who": text, "lines": [text, "a\nb"], "log": "\x1b[2J"}
    _, state = messages.read(json.dumps({"kind": "state", **STATE, "failure": failure}).encode(), TO_LEADER)
    assert state["failure"]["lines"] == (printable(text), "a\ufffdb")
    assert (state["failure"]["who"], state["failure"]["log"]) == (printable(text), "")
    _, end = messages.read(json.dumps({"kind": "finish", "code": 1, "cause": f"{text}\nx"}).encode(), TO_FOLLOWER)
    assert end["cause"] == printable(text) + "\nx"


# The token


def test_token_files(tmp_path):
    path = tmp_path / "token"
    assert make_token_file(path)
    assert not make_token_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_token(path)) >= 43  # 256 bits
    assert read_token(path) != new_token()
    (tmp_path / "short").write_text("secret\n")
    (tmp_path / "blank").write_text("a token with blanks in it\n")
    (tmp_path / "open").write_text(new_token())
    os.mkfifo(tmp_path / "pipe")
    for name, mode in {"short": 0o600, "blank": 0o600, "open": 0o640, "missing": None, "pipe": 0o600, ".": None}.items():
        if mode:
            (tmp_path / name).chmod(mode)
        with pytest.raises(LaunchError, match=r"token") as raised:
            read_token(tmp_path / name)
        assert_house_style(raised.value)
        assert "secret" not in str(raised.value)
    with pytest.raises(LaunchError) as raised:
        make_token_file(tmp_path / "missing" / "token")
    assert_house_style(raised.value)
    with pytest.raises(LaunchError, match="GLUON_MGPU_TOKEN") as raised:
        token_in_environment({"GLUON_MGPU_TOKEN": "short"})
    assert token_in_environment({}) == ""


def test_workers_do_not_get_the_token():
    assert os.environ["GLUON_MGPU_TOKEN"] == TOKEN
    for plan in (Plan(0, (2, 1), (1, 1), ("127.0.0.1", 9000)), Plan(0, (2, 1), (0, 0), ("127.0.0.1", 9000), "horovod")):
        for task in Machine(("train.py",)).tasks(plan, 0):
            assert "GLUON_MGPU_TOKEN" not in task.environ
            assert TOKEN not in str((task.command, *task.environ.values()))


def test_ssh_gets_the_environment_and_the_token_through_its_input(monkeypatch):
    monkeypatch.setenv("PS_VERBOSE", "a secret of mine")
    ssh = SshHosts((Host("one", 1), Host("two", 2)), ("one", 29400), ("train.py",), TOKEN)
    tasks = ssh.tasks(Plan(0, (2,), (0,), ("127.0.0.1", 9000)), 0)
    assert [task.name for task in tasks] == ["node one", "node two"]
    for task in tasks:
        assert "secret" not in str(task.command)
        assert TOKEN not in str((task.command, task.environ, task, ssh))
        passed = json.loads(task.stdin)
        assert (passed["PS_VERBOSE"], passed["GLUON_MGPU_TOKEN"]) == ("a secret of mine", TOKEN)
    monkeypatch.setenv("MXNET_LONG", "x" * 60_000)
    with pytest.raises(LaunchError, match="bytes of MXNET_") as raised:
        replace(ssh)
    assert_house_style(raised.value)
    with pytest.raises(LaunchError):
        parse_hosts("node\x1b[2J", slots=1)


# The messages of a connection


class Ends:
    """Two ends of a connection in one process: the wire of a node, and a socket that plays node 0."""

    def __init__(self, silence_s=60.0):
        self.selector = selectors.DefaultSelector()
        near, self.far = socket.socketpair()
        self.keys = handshake.Keys(b"to leader", b"to follower")
        self.connection = Connection(near, self.selector)
        self.wire = Wire(self.connection, self.keys, silence_s, leads=False)
        self.count = 0

    def frame(self, data, count=None, key=None):
        count = self.count if count is None else count
        self.count += 1
        proof = handshake.mac(key or self.keys.to_follower, "message", struct.pack("!QI", count, len(data)) + data)
        return struct.pack("!I", len(data)) + proof + data

    def receive(self, seconds=60.0):
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            wait_for_events(self.selector)
            said = self.wire.receive()
            if said is not None:
                return said
        return None

    def close(self):
        self.wire.close()
        self.far.close()
        self.selector.close()


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


STOP = b'{"kind": "stop", "signal": 15}'


def test_messages_come_in_pieces_and_in_order(ends):
    data = ends.frame(STOP) + ends.frame(b'{"kind": "alive"}') + ends.frame(b'{"kind": "wait", "why": "no"}')
    for byte in data[:-1]:
        ends.far.send(bytes([byte]))
        wait_for_events(ends.selector)
    assert ends.receive() == ("stop", {"signal": 15})
    ends.far.send(data[-1:])
    assert ends.receive() == ("wait", {"why": "no"})


def test_messages_that_are_not_the_peers_are_noticed(ends):
    first, second = ends.frame(STOP), ends.frame(STOP)
    for wrong in [
        second,  # the first was left out
        first[:10] + bytes([first[10] ^ 1]) + first[11:],
        first[:-2] + b"4}",
        ends.frame(STOP, 0, ends.keys.to_leader),  # the peer's own, sent back
    ]:
        again = Ends()
        again.far.sendall(wrong)
        with pytest.raises(LostError, match="failed authentication"):
            again.receive()
        again.close()
    ends.far.sendall(first + first)
    assert ends.receive()[0] == "stop"
    with pytest.raises(LostError, match="failed authentication"):  # repeated
        ends.receive()


@pytest.mark.parametrize("length", [0, 2**18 + 1, 2**32 - 1])
def test_a_message_has_a_limit(ends, length):
    ends.far.sendall(struct.pack("!I", length) + bytes(100))
    with pytest.raises(LostError, match="sent an invalid message"):
        ends.receive()


def test_a_flood_of_messages_ends_the_connection(ends):
    def flood():
        with suppress(OSError):
            for _ in range(100_000):
                ends.far.sendall(ends.frame(STOP))

    thread = threading.Thread(target=flood)
    thread.start()
    while not ends.connection.lost:
        wait_for_events(ends.selector)  # and receive nothing, as a node that ends its processes
    thread.join()
    assert ends.connection.lost == "sent too many bytes"


def test_a_drip_is_no_sign_of_life():
    ends = Ends(silence_s=0.3)
    with pytest.raises(LostError, match="was silent for"):
        for byte in ends.frame(STOP):
            ends.far.send(bytes([byte]))
            time.sleep(0.05)
            wait_for_events(ends.selector)
            ends.wire.receive()
    ends.close()


def test_one_that_does_not_read_is_left():
    ends = Ends()
    for _ in range(3000):
        ends.wire.send("finish", code=1, cause="x" * 1000)
    assert ends.connection.lost == "does not read its messages"
    ends.close()


# Strangers and node 0


class Leader:
    """A rendezvous of three nodes that runs in a thread."""

    def __init__(self, port):
        self.port, self.told, self.ended = port, [], threading.Event()
        self.selector = selectors.DefaultSelector()
        asked = {"servers": 0, "backend": "dist_sync", "token": TOKEN}
        self.rendezvous = Rendezvous(
            "127.0.0.1", port, 2, **asked, selector=self.selector, silence_s=60.0, report=self.told.append
        )
        self.over = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.over:
            wait_for_events(self.selector)
            self.rendezvous.poll()
        self.rendezvous.finish(0, "all \x1b[2Jwell")

    def end(self):
        self.over = True
        self.thread.join()
        self.selector.close()


@pytest.fixture
def leader(hosts, monkeypatch):
    monkeypatch.setattr("gluon_mgpu.distributed.launcher.rendezvous._FAREWELL_S", 0.5)
    leader = Leader(hosts.port)
    yield leader
    leader.end()


def exactly(plug, count):
    data = b""
    while len(data) < count:
        more = plug.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


class Peer:
    """A node that is played by hand."""

    opened = []  # for `plugs` to close

    def __init__(self, port, node_rank=1, key=KEY, address="127.0.0.1"):
        self.plug = socket.create_connection(("127.0.0.1", port), timeout=240, source_address=(address, 0))
        self.opened.append(self.plug)
        answer, proof, keys = handshake.answer_challenge(key, exactly(self.plug, handshake.CHALLENGE_BYTES), node_rank)
        self.plug.sendall(answer)
        handshake.check_proof(exactly(self.plug, handshake.PROOF_BYTES), proof)
        self.key, self.count = keys.to_leader, 0

    def send(self, kind, **fields):
        self.send_data(messages.write(kind, fields))

    def send_data(self, data):
        proof = handshake.mac(self.key, "message", struct.pack("!QI", self.count, len(data)) + data)
        self.count += 1
        self.plug.sendall(struct.pack("!I", len(data)) + proof + data)

    def receive(self):
        (length,) = struct.unpack("!I32x", exactly(self.plug, 36))
        said = json.loads(exactly(self.plug, length))
        return said if said["kind"] != "alive" else self.receive()

    def join(self, **changed):
        self.send("hello", **{**HELLO, **changed})
        return self.receive()

    def close(self):
        self.plug.close()


@pytest.fixture(autouse=True)
def plugs():
    yield
    while Peer.opened:
        Peer.opened.pop().close()


def closed(plug):
    """Whether the other side closes the connection whatever it sends before."""
    plug.settimeout(240)
    try:
        while plug.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_a_seat_is_for_those_that_know_the_token(leader):
    with pytest.raises(ConnectionError):
        Peer(leader.port, key=b"another token, as long")
    assert until(lambda: leader.told == ["rejected 127.0.0.1, which does not know this job's token"])
    for wrong, told in [
        ({"num_nodes": 3}, "got --nodes 3; expected 2, as on node 0"),
        ({"backend": "horovod"}, "got --backend horovod; expected dist_sync, as on node 0"),
        ({"servers": None}, "got no --servers; expected --servers 0, as on node 0"),
    ]:
        assert Peer(leader.port).join(**wrong) == {"kind": "refuse", "why": told}
    for node_rank in (0, 2, 2**32 - 1):
        assert Peer(leader.port, node_rank).join()["kind"] == "refuse"
    first = Peer(leader.port)
    assert first.join() == {"kind": "welcome"}
    assert Peer(leader.port).join() == {"kind": "wait", "why": "node 1 has already joined"}
    first.close()
    assert until(lambda: not leader.rendezvous.members)
    assert Peer(leader.port).join() == {"kind": "welcome"}  # it has come again


@pytest.mark.parametrize(
    "data", [b"{}", b"[" * 1000, b'{"kind": "state"}', json.dumps({"kind": "hello", **HELLO, "x": 1}).encode()]
)
def test_a_first_message_that_is_no_hello(leader, data):
    peer = Peer(leader.port)
    peer.send_data(data)
    assert closed(peer.plug)
    assert leader.rendezvous.members == []


@pytest.mark.parametrize(
    "wrong",
    [{"workers_left": 2}, {"running": False}, {"cpu_s": float("1e300")}, {"restart": -2}, {"failure": {**FAILURE, "code": 0}}],
)
def test_a_node_that_reports_what_cannot_be_is_lost(leader, wrong):
    peer = Peer(leader.port)
    assert peer.join()["kind"] == "welcome"
    assert until(lambda: leader.rendezvous.members)
    (member,) = leader.rendezvous.members
    peer.send("state", **{**STATE, **wrong})
    assert closed(peer.plug)
    assert until(lambda: member.lost)
    assert member.failure.what == "sent an invalid message"


def test_idle_connections_keep_no_node_out(leader):
    idle = []
    for i in range(700):  # of five addresses
        idle.append(socket.create_connection(("127.0.0.1", leader.port), timeout=240, source_address=(f"127.0.0.{i % 5 + 1}", 0)))
    for address in ("127.0.0.1", "127.0.0.9"):
        peer = Peer(leader.port, address=address)
        assert peer.join()["kind"] == "welcome"
        peer.close()
        assert until(lambda: not leader.rendezvous.members)
    assert len(os.listdir("/proc/self/fd")) < 2 * len(idle)
    assert closed(idle[0])
    for plug in idle:
        plug.close()


def test_one_that_goes_on_sending_after_the_end_is_cut_off(leader):
    peer = Peer(leader.port)
    assert peer.join()["kind"] == "welcome"
    leader.over = True
    assert peer.receive() == {"kind": "finish", "code": 0, "cause": "all well"}
    with suppress(OSError):
        while leader.thread.is_alive():
            peer.send("state", **STATE)
            peer.plug.sendall(bytes(10_000))
    leader.thread.join(timeout=240)
    assert not leader.thread.is_alive()


def test_a_leader_ends_with_a_signal_while_a_peer_sends(hosts, mark):
    first = hosts.start(0, PLACE + "time.sleep(10_000)")
    assert until(lambda: can_connect(hosts.port))
    peer = Peer(hosts.port)
    assert peer.join()["kind"] == "welcome"
    assert peer.receive()["kind"] == "start"
    first.send_signal(signal.SIGTERM)
    with suppress(OSError):
        while first.poll() is None:
            peer.send("state", **STATE)
    assert first.wait(timeout=240) == 143
    assert b"Traceback" not in launcher_log(hosts, 0)
    assert marked(mark) == []


# A false node 0, and a node


class FalseLeader:
    """Listens where node 0 should, and treats each node that comes as it is told."""

    def __init__(self, port, *treats):
        self.listener = socket.create_server(("127.0.0.1", port), reuse_port=False)
        self.treats, self.errors = list(treats), []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        for treat in self.treats:
            with self.listener.accept()[0] as plug:
                plug.settimeout(240)
                try:
                    treat(plug)
                except ConnectionError:
                    pass
                except Exception as error:
                    self.errors.append(error)
        self.listener.close()


def with_token(*orders):
    """Return one that proves the token, and then sends orders until the node leaves."""

    def treat(plug):
        challenge = handshake.make_challenge()
        plug.sendall(challenge)
        _, proof, keys = handshake.check_answer(KEY, challenge, exactly(plug, handshake.ANSWER_BYTES))
        plug.sendall(proof)
        for count, order in enumerate(orders):
            data = order if isinstance(order, bytes) else json.dumps(order).encode()
            number = struct.pack("!QI", count, len(data))
            plug.sendall(struct.pack("!I", len(data)) + handshake.mac(keys.to_follower, "message", number + data) + data)
        closed(plug)

    return treat


def start_order(**changed):
    return {"kind": "start", "plan": {**PLAN, **changed}, "node_rank": 1}


def reflect(plug):
    plug.sendall(handshake.make_challenge())
    plug.sendall(exactly(plug, handshake.ANSWER_BYTES)[-32:])
    closed(plug)


def unproved(plug):
    plug.sendall(handshake.make_challenge())
    exactly(plug, handshake.ANSWER_BYTES)
    plug.sendall(bytes(32) + json.dumps(start_order(counts=[1, 200])).encode())
    closed(plug)


WELCOME = {"kind": "welcome"}


def test_a_node_obeys_only_node_0_and_only_as_its_own_command_allows(hosts, mark):
    false = FalseLeader(
        hosts.port,
        lambda plug: plug.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9),
        unproved,
        reflect,
        with_token({"kind": "finish", "code": 0, "cause": ""}),  # before it is welcome
        with_token(start_order()),
        with_token(WELCOME, start_order(counts=[1, 200])),
        with_token(WELCOME, start_order(servers=[0, 200])),
        with_token(WELCOME, start_order(backend="horovod")),
        with_token(WELCOME, {**start_order(), "node_rank": 7}),
        with_token(WELCOME, {"kind": "stop", "signal": 9}),  # nothing runs
        with_token(WELCOME, {"kind": "finish", "code": 1e999, "cause": "\x1b[2J"}),
        with_token(WELCOME, WELCOME),
        with_token(WELCOME, b"[" * 100_000),
    )
    node = hosts.start(1, PLACE)
    false.thread.join(timeout=240)
    assert not false.thread.is_alive()
    assert false.errors == []
    assert not list((hosts.folder / "node1").glob("rank-*"))
    assert codes(node, hosts.start(0, PLACE)) == [0, 0]
    assert hosts.log("node1", 1) == "place 1 0 1 2 2 0\n"
    told = launcher_log(hosts, 1).decode()
    assert "does not know this job's token; still waiting for node 0" in told
    assert "\x1b" not in told
    assert marked(mark) == []


def test_what_node_0_says_at_the_end_cannot_write_to_a_terminal(hosts):
    node = hosts.start(1, PLACE)
    cause = "it \x1b]0;owned\x07failed\n  \x9b31mValueError\u202e"
    FalseLeader(hosts.port, with_token(WELCOME, {"kind": "finish", "code": 3, "cause": cause})).thread.join(timeout=240)
    assert node.wait(timeout=240) == 3
    assert "launch: it failed\n  ValueError\ufffd\n" in node.stdout.read().decode()
