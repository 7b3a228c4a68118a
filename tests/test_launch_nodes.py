"""Launching on several machines: launchers that meet, miss each other, and are told nonsense; network namespaces as hosts."""

import errno
import json
import select
import selectors
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from gluon_mgpu.distributed import LaunchError
from gluon_mgpu.distributed.launcher.connection import wait_for_events
from gluon_mgpu.distributed.launcher.handshake import CHALLENGE_BYTES
from gluon_mgpu.distributed.launcher.job import Job, run_job
from gluon_mgpu.distributed.launcher.node import Failure
from gluon_mgpu.distributed.launcher.rendezvous import Member, Rendezvous
from gluon_mgpu.distributed.launcher.supervisor import Limits
from gluon_mgpu.distributed.process import exit_code_of

from .conftest import assert_house_style
from .test_launch import LAUNCHER, PYTHON, kill_when_done, mark, marked, until
from .test_processes import BACKENDS

__all__ = ["mark"]  # a fixture
TOKEN = "the-token-of-these-tests"
PLACE = """
import os, sys, time
names = ("NODE_RANK", "LOCAL_RANK", "RANK", "NUM_PROCESSES", "NUM_NODES", "RESTART")
place = [os.environ["GLUON_MGPU_" + name] for name in names]
print("place", *place, flush=True)
"""


class Hosts:
    """Launchers that are to meet, each with its own folder for logs."""

    def __init__(self, folder, port):
        self.folder, self.port = folder, port
        self.started = []

    def start(self, node_rank, program, *, name=None, prefix=(), host="127.0.0.1", num_nodes=2, limits=None, **options):
        path = self.folder / "program.py"
        path.write_text(program, encoding="utf-8")
        said = {
            "program": [*options.pop("python", PYTHON), str(path)],
            "num_processes": 1,
            "servers": 0,
            "num_nodes": num_nodes,
            "node_rank": node_rank,
            "rendezvous": [host, self.port],
            "silence_s": 60.0,
            "limits": {"grace_s": 0.5, "patience_s": 120.0, **(limits or {})},
            "log_dir": str(self.folder / (name or f"node{node_rank}")),
            **options,
        }
        command = [*prefix, sys.executable, "-c", LAUNCHER, json.dumps(said)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder)
        self.started.append(process)
        return process

    def log(self, node, rank, restart=0):
        folder = self.folder / node / (f"restart-{restart}" if restart else "")
        path = folder / f"rank-{rank}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("GLUON_MGPU_TOKEN", TOKEN)


@pytest.fixture
def hosts(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = Hosts(tmp_path, port)
    yield hosts
    for process in hosts.started:
        kill_when_done(process)


def codes(*launchers):
    return [launcher.wait(timeout=240) for launcher in launchers]


def test_three_nodes(hosts, mark):
    counts = [2, 1, 3]
    launchers = [hosts.start(rank, PLACE, num_nodes=3, num_processes=count) for rank, count in enumerate(counts)][::-1]
    assert codes(*launchers) == [0, 0, 0]
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    for rank, (node, local) in enumerate(places):
        assert hosts.log(f"node{node}", rank) == f"place {node} {local} {rank} 6 3 0\n"
    assert marked(mark) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_anywhere_ends_all_nodes(hosts, mark, failing):
    program = PLACE + f"if place[0] == '{failing}':\n    raise KeyError('bad node')\ntime.sleep(10_000)"
    launchers = [hosts.start(rank, program, num_processes=2) for rank in range(2)]
    assert codes(*launchers) == [1, 1]
    for launcher in launchers:  # both say the cause
        output = launcher.stdout.read().decode()
        assert output.count("of 4 processes to fail") == 1
        assert "KeyError: 'bad node'" in output
        assert f"rank {2 * failing}" in output or f"rank {2 * failing + 1}" in output
    assert marked(mark) == []


def test_restart_over_nodes(hosts, mark):
    program = PLACE + "sys.exit(5 if place[2] == '1' and place[5] == '0' else 0)"
    launchers = [hosts.start(rank, program, limits={"max_restarts": 1}) for rank in range(2)]
    assert codes(*launchers) == [0, 0]
    assert [hosts.log(f"node{rank}", rank, 1) for rank in range(2)] == ["place 0 0 0 2 2 1\n", "place 1 0 1 2 2 1\n"]


WAIT = PLACE + "time.sleep(10_000 if place[5] == '0' else 0)"


@pytest.mark.parametrize("signum", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_a_lost_node_is_noticed_and_may_come_back(hosts, mark, signum):
    silence_s = 5.0 if signum == "SIGSTOP" else 60.0
    first, second = (hosts.start(rank, WAIT, limits={"max_restarts": 1}, silence_s=silence_s) for rank in range(2))
    assert until(lambda: hosts.log("node0", 0) and hosts.log("node1", 1))
    second.send_signal(getattr(signal, signum))  # SIGSTOP: the launcher is silent, as behind a cut cable
    if signum == "SIGSTOP":
        assert until(lambda: b"node 1 was silent for" in launcher_log(hosts, 0))
        second.send_signal(signal.SIGCONT)  # it comes back by itself
    else:
        again = hosts.start(1, WAIT, name="again", limits={"max_restarts": 1})
    assert first.wait(timeout=240) == 0, first.stdout.read().decode()
    assert second.wait(timeout=240) == {"SIGKILL": -9, "SIGTERM": 143, "SIGSTOP": 0}[signum]
    assert hosts.log("node0", 0, 1) == "place 0 0 0 2 2 1\n"
    if signum != "SIGSTOP":
        assert again.wait(timeout=240) == 0
        assert hosts.log("again", 1, 1) == "place 1 0 1 2 2 1\n"
    output = first.stdout.read().decode()
    assert ("node 1 closed" in output) or ("node 1 was silent for" in output) or ("on node 1 got SIGTERM" in output)
    assert marked(mark) == []


CATCH = (
    PLACE
    + """
import signal
def caught(signum, frame):
    print("caught", signal.Signals(signum).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, caught)
signal.signal(signal.SIGTERM, caught)
signal.signal(signal.SIGUSR1, caught)
print("ready", flush=True)
time.sleep(10_000)
"""
)


@pytest.mark.parametrize(("at", "signum"), [(0, "SIGINT"), (0, "SIGTERM"), (1, "SIGTERM"), (1, "SIGUSR1"), (1, "SIGHUP")])
def test_a_signal_to_one_launcher_reaches_the_workers_of_all(hosts, mark, at, signum):
    launchers = [hosts.start(rank, CATCH, limits={"grace_s": 30}) for rank in range(2)]
    assert until(lambda: all("ready" in hosts.log(f"node{rank}", rank) for rank in range(2)))
    launchers[at].send_signal(getattr(signal, signum))
    assert codes(*launchers) == [exit_code_of(getattr(signal, signum))] * 2
    for rank in range(2):
        assert hosts.log(f"node{rank}", rank).endswith(f"ready\ncaught {'SIGINT' if signum == 'SIGHUP' else signum}\n")
    assert marked(mark) == []


def test_elastic_goes_on_without_a_node(hosts, mark, monkeypatch):
    limits = {"max_restarts": 1, "fewest": 1, "most": 2}
    first, second = (hosts.start(rank, WAIT, limits=limits, return_s=0.5) for rank in range(2))
    assert until(lambda: hosts.log("node0", 0) and hosts.log("node1", 1))
    second.kill()
    assert first.wait(timeout=240) == 0, first.stdout.read().decode()
    assert hosts.log("node0", 0, 1) == "place 0 0 0 1 1 1\n"
    assert until(lambda: marked(mark) == [])


def test_without_node_0(hosts, mark):
    first = hosts.start(0, WAIT)
    assert until(lambda: can_connect(hosts.port))
    second = hosts.start(1, WAIT, limits={"patience_s": 1.5})
    assert until(lambda: hosts.log("node0", 0) and hosts.log("node1", 1))
    first.kill()
    assert second.wait(timeout=240) == 1
    output = second.stdout.read().decode()
    assert "node 0 closed the connection; stopped this node's processes" in output
    assert "launch: got no node 0 at 127.0.0.1:" in output
    assert marked(mark) == []


def test_a_launcher_that_ssh_has_started_ends_as_with_a_ctrl_c_when_ssh_does(tmp_path, mark):
    (tmp_path / "program.py").write_text(
        "import time\nprint('ready', flush=True)\ntry:\n    time.sleep(10_000)\nexcept KeyboardInterrupt:\n    print('saved')\n"
    )
    said = {"program": [*PYTHON, str(tmp_path / "program.py")], "end_with_input": True, "log_dir": str(tmp_path / "logs")}
    command = [sys.executable, "-c", LAUNCHER, json.dumps(said)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        log = tmp_path / "logs" / "rank-0.log"
        assert until(lambda: log.exists() and log.read_text() == "ready\n")
        launcher.stdin.write(b"what is sent there is not read\n")
        launcher.stdin.close()
        assert launcher.wait(timeout=240) == 128 + signal.SIGHUP
    assert log.read_text() == "ready\nsaved\n"
    assert marked(mark) == []


def test_a_node_that_cannot_write_its_logs_ends_the_job(hosts, mark):
    (hosts.folder / "file").write_text("")
    launchers = [hosts.start(0, WAIT), hosts.start(1, WAIT, log_dir=str(hosts.folder / "file" / "logs"))]
    assert codes(*launchers) == [1, 1]  # it does not take that for a lost node 0
    assert "NotADirectoryError" in launchers[1].stdout.read().decode()
    assert marked(mark) == []


def test_nodes_that_never_come(tmp_path, hosts):
    options = {"num_nodes": 2, "rendezvous": ("127.0.0.1", hosts.port), "limits": Limits(patience_s=0.5), "log_dir": tmp_path}
    with pytest.raises(LaunchError) as raised:
        run_job(Job(("true",), node_rank=1, **options))
    assert_house_style(raised.value)
    assert run_job(Job(("true",), node_rank=0, **options)) == 1
    assert "got no node 1 for" in (tmp_path / "launcher.log").read_text()
    with socket.socket() as taken, pytest.raises(LaunchError) as raised:
        taken.bind(("127.0.0.1", hosts.port))
        taken.listen()
        run_job(Job(("true",), node_rank=0, **options))
    assert_house_style(raised.value)


def say(port, data, seconds=60.0):
    """Say something at the rendezvous; return what is answered until node 0 closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=240) as connection:
        connection.settimeout(seconds)
        try:
            connection.sendall(data)
            while data:
                data = connection.recv(1000)
                answer += data
        except OSError:
            pass
    return answer


def test_nonsense_at_the_rendezvous(hosts, mark):
    first = hosts.start(0, PLACE)
    hello = {"kind": "hello", "version": 1, "node_rank": 1, "num_nodes": 2, "num_processes": 1}  # of the version before
    assert until(lambda: can_connect(hosts.port))
    for nonsense in [
        b"GET / HTTP/1.1\r\n\r\n".ljust(200),
        b"\xff" * 300_000,
        b"[" * 100_000 + b"\n",
        json.dumps(hello).encode().ljust(100) + b"\n",
        b"",
    ]:
        assert len(say(hosts.port, nonsense)) <= CHALLENGE_BYTES
    assert codes(hosts.start(1, PLACE), first) == [0, 0]
    assert marked(mark) == []


def can_connect(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture
def rendezvous():
    """A rendezvous in this process, which handles events when `turn` is called."""
    with selectors.DefaultSelector() as selector, ExitStack() as plugs:
        made = Rendezvous("127.0.0.1", 0, 2, token=TOKEN, selector=selector, silence_s=60.0, report=lambda text: None)
        made.plugs, made.port = plugs, made._listener.getsockname()[1]
        made.turn = lambda: [wait_for_events(selector), made.poll()]
        yield made
        made.finish(0, "")


def call(rendezvous):
    """Connect, and read the challenge."""
    plug = rendezvous.plugs.enter_context(socket.create_connection(("127.0.0.1", rendezvous.port), timeout=240))
    assert until(lambda: rendezvous.turn() and select.select([plug], [], [], 0)[0])
    assert len(plug.recv(CHALLENGE_BYTES)) == CHALLENGE_BYTES
    return plug


def test_callers_that_say_nothing_make_room_for_others(rendezvous, monkeypatch):
    """One address, or many, must not keep a node out, nor use up the files of this process."""
    monkeypatch.setattr("gluon_mgpu.distributed.launcher.rendezvous._EACH_CALLERS", 3)
    plugs = [call(rendezvous) for _ in range(4)]
    assert plugs[0].recv(1) == b"" and len(rendezvous._callers) == 3
    rendezvous._most = 3
    monkeypatch.setattr("gluon_mgpu.distributed.launcher.rendezvous._EACH_CALLERS", 100)
    plugs.append(call(rendezvous))
    assert plugs[1].recv(1) == b"" and len(rendezvous._callers) == 3
    plugs[2].settimeout(0.0)
    with pytest.raises(BlockingIOError):
        plugs[2].recv(1)


def test_without_a_free_file_the_oldest_caller_is_closed(rendezvous, monkeypatch):
    plugs, waits = [call(rendezvous) for _ in range(2)], []

    def exhausted():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("gluon_mgpu.distributed.launcher.rendezvous.time.sleep", waits.append)
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "_listener", SimpleNamespace(accept=exhausted))
        rendezvous._accept()
        assert plugs[0].recv(1) == b"" and len(rendezvous._callers) == 1 and waits == []
        rendezvous._accept()
        rendezvous._accept()  # no caller is left to close: it does not spin
        assert plugs[1].recv(1) == b"" and rendezvous._callers == [] and waits == [0.01]
    call(rendezvous)


def test_callers_that_have_proved_that_they_know_the_token_are_kept(rendezvous):
    call(rendezvous)
    rendezvous._most, rendezvous._callers[0].wire = 1, object()
    second = rendezvous.plugs.enter_context(socket.create_connection(("127.0.0.1", rendezvous.port), timeout=240))
    assert until(lambda: rendezvous._accept() or select.select([second], [], [], 0)[0])
    assert second.recv(1) == b""
    assert len(rendezvous._callers) == 1 and not rendezvous._callers[0].connection.closed


def test_a_node_whose_processes_do_not_end_is_given_up():
    sent = []
    wire = SimpleNamespace(send=lambda kind, **fields: sent.append((kind, fields)), close=lambda: sent.append("close"))
    member = Member(wire, 1, 2)
    member.kill()
    assert sent == [] and not member.lost  # nothing runs there
    member.running = True
    member.kill()
    member.kill()
    assert sent == [("stop", {"signal": 9}), "close"]
    assert member.lost and not member.running and member.failure == Failure("node 1", "does not end", 1)


def test_events_of_a_file_that_a_handler_has_closed_are_dropped():
    """Another file may already have its number."""
    called, (a, b), (c, d) = [], socket.socketpair(), socket.socketpair()
    with selectors.DefaultSelector() as selector, a, b, c, d:

        def closing(own, other):
            called.append(own)
            selector.unregister(other)

        selector.register(a, selectors.EVENT_READ, lambda: closing(a, c))
        selector.register(c, selectors.EVENT_READ, lambda: closing(c, a))
        for other in (b, d):
            other.send(b"x")
        wait_for_events(selector)
        assert len(called) == 1


def test_a_refused_node_says_why(hosts):
    first = hosts.start(0, PLACE)
    assert hosts.start(1, PLACE, num_nodes=3).wait(timeout=240) == 1
    output = hosts.started[1].stdout.read().decode()
    assert "launch: got --nodes 3; expected 2, as on node 0. Node 0 rejected this node." in output
    assert codes(hosts.start(1, PLACE), first) == [0, 0]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=240)


class Network:
    """Hosts that are network namespaces, behind a switch that is one, too: what happens there touches no other network."""

    def __init__(self, num_hosts):
        self.name = f"mgpu{uuid.uuid4().hex[:6]}"
        self.addresses = [f"10.213.0.{i + 1}" for i in range(num_hosts)]
        self.names = [f"{self.name}-{i}" for i in range(num_hosts)]

    def build(self):
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "add", "switch", "type", "bridge")
        ip("-n", self.name, "link", "set", "switch", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self.name, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.name, "link", "set", f"port{i}", "master", "switch", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def plug(self, i, state):
        """Pull the cable of a host ("down"), or plug it in ("up")."""
        ip("-n", self.name, "link", "set", f"port{i}", state)

    def remove(self):
        for name in [self.name, *self.names]:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, timeout=240)


@pytest.fixture
def network():
    network = Network(2)
    try:
        network.build()
    except (OSError, subprocess.CalledProcessError) as error:
        network.remove()
        told = getattr(error, "stderr", None) or str(error).encode()
        pytest.skip(f"network namespaces are not permitted here: {told.decode().strip()}")
    yield network
    network.remove()


DESCEND = """
import json, os, sys, time
import mxnet as mx
rank, path, target = int(os.environ["GLUON_MGPU_RANK"]), os.environ["CHECKPOINT"], [3.0, 5.0]
step, weight = json.load(open(path)) if os.path.exists(path) else (0, 0.0)
print("from step", step, flush=True)
total = mx.nd.zeros((1,))
if "HOROVOD_RANK" in os.environ:
    from gluon_mgpu.distributed import group
    together = group().all_reduce([total])
else:
    store = mx.kv.create("dist_sync")
    store.init(0, total)
while step < 60:
    gradient = mx.nd.array([weight - target[rank]])  # of the squared distance to this worker's target
    if "HOROVOD_RANK" in os.environ:
        gradient.copyto(total)
        together.run(0)
    else:
        store.push(0, gradient)
        store.pull(0, out=total)
    step, weight = step + 1, weight - 0.125 * total.asscalar()
    if rank == 0:
        with open(path + ".part", "w") as file:
            json.dump([step, float(weight)], file)
        os.rename(path + ".part", path)
    time.sleep(0.05)
print("weight", weight, flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_hosts_train_lose_each_other_and_recover(network, hosts, mark, monkeypatch, backend):
    checkpoint = hosts.folder / "checkpoint.json"
    monkeypatch.setenv("CHECKPOINT", str(checkpoint))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"host": network.addresses[0], "python": [sys.executable], "limits": {"max_restarts": 1}, "silence_s": 4.0}
    options.update({"servers": 1} if backend == "dist_sync" else {"backend": backend})
    enter = [["ip", "netns", "exec", name] for name in network.names]
    launchers = [hosts.start(rank, DESCEND, prefix=enter[rank], **options) for rank in range(2)]
    assert until(lambda: checkpoint.exists() and json.loads(checkpoint.read_text())[0] >= 10)
    network.plug(1, "down")
    assert until(lambda: b"node 1 was silent for" in launcher_log(hosts, 0))
    assert until(lambda: b"node 0 was silent for" in launcher_log(hosts, 1))
    assert until(lambda: len(marked(mark)) == 2)  # the launchers: both sides have ended their processes
    network.plug(1, "up")
    assert [launcher.wait(timeout=240) for launcher in launchers] == [0, 0]
    resumed = int(hosts.log("node0", 0, 1).split()[2])
    assert 10 <= resumed < 60
    weight = np.float32(0)
    for _ in range(60):  # as one process would
        weight = float(weight) - 0.125 * np.float32(np.float32(float(weight) - 3.0) + np.float32(float(weight) - 5.0))
    for rank in range(2):
        assert float(hosts.log(f"node{rank}", rank, 1).split()[-1]) == float(weight)
    assert marked(mark) == []


def launcher_log(hosts, node_rank):
    path = hosts.folder / f"node{node_rank}" / "launcher.log"
    return path.read_bytes() if path.exists() else b""
