"""Launching on several machines: launchers on loopback, and network namespaces as machines."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import replace

import numpy as np
import pytest
from gluon_mgpu.distributed import LaunchError
from gluon_mgpu.distributed.launcher import guard, heartbeats
from gluon_mgpu.distributed.launcher.job import Job
from gluon_mgpu.distributed.launcher.supervisor import run_job

from .conftest import assert_house_style
from .test_launch import LAUNCHER, PYTHON, mark, marked, quiet_port, reap, until
from .test_processes import BACKENDS
from .versions import without_log

__all__ = ["mark"]  # a fixture
RARE = pytest.mark.exhaustive
WORKER = (sys.executable, "-m", "gluon_mgpu.distributed.launcher.worker")
PLACE = """
import os, sys, time
names = ("NODE_RANK", "LOCAL_RANK", "RANK", "NUM_PROCESSES", "NUM_NODES", "RESTART")
place = [os.environ["GLUON_MGPU_" + name] for name in names]
print("place", *place, flush=True)
"""


class Hosts:
    """Launchers of one job, each with its own folder for logs."""

    def __init__(self, folder, port):
        self.folder, self.port = folder, port
        self.started = []

    def start(self, node_rank, program, *, prefix=(), host="127.0.0.1", num_nodes=2, **options):
        path = self.folder / "program.py"
        path.write_text(program, encoding="utf-8")
        said = {"program": [*options.pop("python", PYTHON), str(path)], "servers": 0, "grace_s": 0.5, "join_s": 120.0}
        said.update(num_nodes=num_nodes, node_rank=node_rank, master=[host, self.port])
        said.update({"log_dir": str(self.folder / f"node{node_rank}"), **options})
        command = [*prefix, sys.executable, "-c", LAUNCHER, json.dumps(said)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder)
        self.started.append(process)
        return process

    def log(self, node_rank, rank, restart=0):
        path = self.folder / f"node{node_rank}" / (f"restart-{restart}" if restart else "") / f"rank-{rank}.log"
        return without_log(path.read_text("utf-8", "replace")) if path.exists() else ""


@pytest.fixture
def hosts(tmp_path):
    hosts = Hosts(tmp_path, quiet_port())
    yield hosts
    reap(hosts.started)


def codes(*launchers):
    return [launcher.wait(timeout=240) for launcher in launchers]


@RARE
def test_three_machines(hosts, mark):
    """The first one ends last; no other is gone before."""
    program = PLACE + "time.sleep(6 if place[0] == '0' else 0)"
    launchers = [hosts.start(rank, program, num_nodes=3, num_processes=2) for rank in range(3)][::-1]
    assert codes(*launchers) == [0, 0, 0]
    for rank in range(6):
        assert hosts.log(rank // 2, rank) == f"place {rank // 2} {rank % 2} {rank} 6 3 0\n"
    assert marked(mark) == []


@pytest.mark.parametrize("failing", [pytest.param(0, marks=RARE), 1])
def test_a_failure_anywhere_ends_all(hosts, mark, failing):
    program = PLACE + f"if place[0] == '{failing}':\n    raise KeyError('bad node')\ntime.sleep(10_000)"
    launchers = [hosts.start(rank, program) for rank in range(2)]
    assert codes(*launchers) == [1, 1]
    outputs = [launcher.stdout.read().decode() for launcher in launchers]
    assert "KeyError: 'bad node'" in outputs[failing]
    assert f"rank {failing} on node {failing} ({socket.gethostname()}) exited with status 1" in outputs[failing]
    assert f"node {failing} (127.0.0.1, ranks {failing} to {failing}) sends no heartbeat" in outputs[1 - failing], outputs
    assert marked(mark) == []


def test_all_start_again(hosts, mark):
    program = PLACE + "sys.exit(5 if place[2] == '1' and place[5] == '0' else 0)"
    launchers = [hosts.start(rank, program, max_restarts=1) for rank in range(2)]
    assert codes(*launchers) == [0, 0]
    assert [hosts.log(rank, rank, 1) for rank in range(2)] == ["place 0 0 0 2 2 1\n", "place 1 0 1 2 2 1\n"]


@pytest.mark.parametrize(("lost", "signum"), [(0, "SIGKILL"), pytest.param(1, "SIGKILL", marks=RARE), (1, "SIGSTOP")])
def test_a_lost_machine_ends_the_others(hosts, mark, lost, signum):
    launchers = [hosts.start(rank, PLACE + "time.sleep(10_000)") for rank in range(2)]
    assert until(lambda: hosts.log(0, 0) and hosts.log(1, 1))
    frozen = [launchers[lost].pid, *(guard.descendants(launchers[lost].pid, guard.processes()) if signum == "SIGSTOP" else ())]
    for pid in frozen:
        os.kill(pid, getattr(signal, signum))
    assert launchers[1 - lost].wait(timeout=240) == 1
    assert f"node {lost} (127.0.0.1, ranks {lost} to {lost}) sends no heartbeat" in launchers[1 - lost].stdout.read().decode()
    for pid in frozen if signum == "SIGSTOP" else ():
        os.kill(pid, signal.SIGCONT)
    assert (b"this machine stood still" in launchers[lost].communicate(timeout=240)[0]) == (signum == "SIGSTOP")
    assert until(lambda: marked(mark) == [])


BITS = """
import os, sys
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import gluon, init
ctx = [mx.cpu(i) for i in range(int(os.environ["NUM_DEVICES"]))]
mx.random.seed(3)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(8, activation="tanh", in_units=5), gluon.nn.Dense(4, in_units=8))
net.initialize(init.Xavier(), ctx=ctx)
rng = np.random.RandomState(0)
batches = mgpu.data.ArrayLoader(rng.normal(size=(47, 5)).astype("float32"), rng.randint(0, 4, 47), 10, shuffle=True, seed=2)
trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=0.5)
mgpu.fit(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, batches, epochs=2, callbacks=[])
print(*[param.data(ctx[0]).asnumpy().tobytes().hex() for param in net.collect_params().values()])
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_machines_train_the_bits_of_two_devices(hosts, mark, monkeypatch, backend):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NUM_DEVICES", "1")
    options = {"python": WORKER, "backend": backend, "servers": 2 if backend == "dist_sync" else None}
    launchers = [hosts.start(rank, BITS, **options) for rank in range(2)]
    assert codes(*launchers) == [0, 0], [launcher.stdout.read().decode()[-2000:] for launcher in launchers]
    monkeypatch.setenv("NUM_DEVICES", "2")
    with contextlib.redirect_stdout(io.StringIO()) as expected:
        exec(BITS, {})
    assert len(expected.getvalue()) > 600
    assert hosts.log(0, 0) == hosts.log(1, 1) == expected.getvalue()
    assert marked(mark) == []


SAVE = """
import os, sys
import gluon_mgpu as mgpu
import numpy as np
from mxnet import gluon, init
rank = os.environ["GLUON_MGPU_RANK"]
class Say(mgpu.Callback):
    def on_batch_end(self, state):
        print("step", state.step, flush=True)
net = gluon.nn.Dense(2, in_units=3)
net.initialize(init.Constant(0.1))
batches = [(np.ones((4, 3), "float32"), np.ones((4, 2), "float32"))] * 1000
trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
saves = mgpu.Checkpoint(os.environ["SAVED"], monitor=None)
mgpu.fit(net, gluon.loss.L2Loss(), trainer, batches, epochs=1000, metrics=(), callbacks=[saves, Say()])
"""


@pytest.mark.parametrize(("at", "signum", "code"), [(1, "SIGTERM", 143), pytest.param(0, "SIGUSR1", 85, marks=RARE)])
def test_a_signal_to_one_machine_stops_all_after_the_batch_and_saves(hosts, mark, monkeypatch, at, signum, code):
    monkeypatch.setenv("SAVED", str(hosts.folder / "saved"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"python": WORKER, "servers": 1, "grace_s": 60.0, "max_restarts": 1}
    launchers = [hosts.start(rank, SAVE, **options) for rank in range(2)]
    assert until(lambda: all("step 3\n" in hosts.log(rank, rank) for rank in range(2)))
    launchers[at].send_signal(getattr(signal, signum))
    assert codes(*launchers) == [code, code], [launcher.stdout.read().decode()[-2000:] for launcher in launchers]
    steps = [[line for line in hosts.log(rank, rank).splitlines() if line.startswith("step")][-1] for rank in range(2)]
    assert steps[0] == steps[1]
    place = json.loads((hosts.folder / "saved" / "last" / "training.json").read_text())["place"]
    assert f"step {place['step']}" == steps[0]
    assert marked(mark) == []


def test_machines_that_never_come(tmp_path, hosts, capfd):
    options = {"num_nodes": 2, "master": ("127.0.0.1", hosts.port), "join_s": 0.5, "log_dir": tmp_path, "max_restarts": 3}
    for node_rank in range(2):
        assert run_job(Job((*PYTHON, "-c", "input()"), node_rank=node_rank, servers=0, **options)) == 1
        told = capfd.readouterr().err
        expected = f"got no connection of all 2 machines for 0 s; expected each to join node 0 at 127.0.0.1:{hosts.port}."
        assert expected in told and "restart 1" not in told


@pytest.mark.parametrize("number", [0, 1])
def test_a_port_in_use_is_named(tmp_path, hosts, number):
    """Node 0 printed a stack of MXNet, which does not name it."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", hosts.port + number))
        taken.listen()
        job = Job(("true",), num_nodes=2, master=("127.0.0.1", hosts.port), log_dir=tmp_path / "logs")
        with pytest.raises(LaunchError, match=f"got 127.0.0.1:{hosts.port + number} .Address already in use.;") as raised:
            run_job(job)
        assert_house_style(raised.value)
        assert not (tmp_path / "logs").exists()
        assert run_job(replace(job, num_nodes=1)) == 0  # which does not use it


@pytest.fixture
def watches():
    """Three watches that have joined, although another program was there first."""
    port, pipes = quiet_port(), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with contextlib.ExitStack() as stack:
        started = []
        other = stack.enter_context(socket.socket())
        for rank in range(3):
            place = map(str, ("127.0.0.1", port, "127.0.0.1", rank, 3, 2))
            command = [sys.executable, "-I", "-S", heartbeats.__file__, *place]
            started.append(stack.enter_context(subprocess.Popen(command, text=True, **pipes)))
            stack.callback(started[-1].kill)
            if not rank:
                assert until(lambda: not other.connect_ex(("127.0.0.1", port)))
        assert [watch.stdout.readline() for watch in started] == ["all machines have joined\n"] * 3
        yield started


@pytest.mark.parametrize("lost", range(3))
def test_all_machines_name_the_one_that_is_lost(watches, lost):
    """The others named node 0, which has ended because of it, after eight seconds more."""
    watches[lost].kill()
    others = [watch for watch in watches if watch != watches[lost]]
    assert codes(*others) == [1, 1]
    told = f"node {lost} (127.0.0.1, ranks {2 * lost} to {2 * lost + 1}) sends no heartbeat: it has failed"
    assert all(watch.stdout.read().startswith(told) for watch in others)


def test_no_watch_ends_before_the_workers_of_all_machines(watches):
    for rank in (1, 0, 2):
        time.sleep(0.2)
        assert [watch.poll() for watch in watches] == [None] * 3
        print(file=watches[rank].stdin, flush=True)
    assert codes(*watches) == [0, 0, 0]


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
    options = {"host": network.addresses[0], "python": [sys.executable], "max_restarts": 1}
    options.update({"servers": 1} if backend == "dist_sync" else {"backend": backend})
    enter = [["ip", "netns", "exec", name] for name in network.names]
    launchers = [hosts.start(rank, DESCEND, prefix=enter[rank], **options) for rank in range(2)]
    assert until(lambda: checkpoint.exists() and json.loads(checkpoint.read_text())[0] >= 10)
    network.plug(1, "down")
    assert until(lambda: b"node 1 (10.213.0.2, ranks 1 to 1) sends no heartbeat" in launcher_log(hosts, 0))
    assert until(lambda: b"node 0 (10.213.0.1, ranks 0 to 0) sends no heartbeat" in launcher_log(hosts, 1))
    network.plug(1, "up")
    assert [launcher.wait(timeout=240) for launcher in launchers] == [0, 0]
    resumed = int(hosts.log(0, 0, 1).split()[2])
    assert 10 <= resumed < 60
    weight = np.float32(0)
    for _ in range(60):  # as one process would
        weight = float(weight) - 0.125 * np.float32(np.float32(float(weight) - 3.0) + np.float32(float(weight) - 5.0))
    for rank in range(2):
        assert float(hosts.log(rank, rank, 1).split()[-1]) == float(weight)
    assert marked(mark) == []


def launcher_log(hosts, node_rank):
    path = hosts.folder / f"node{node_rank}" / "launcher.log"
    return path.read_bytes() if path.exists() else b""
