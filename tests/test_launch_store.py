"""Launching with MXNet's own store: it works, it ends when something fails, and no other user can connect to it."""

import os
import signal
import sys
from pathlib import Path

import pytest
from gluon_mgpu.distributed import LaunchError
from gluon_mgpu.distributed.launcher import network

from .conftest import assert_house_style
from .test_launch import PYTHON, Runner, mark, marked, reap, until
from .versions import without_log

__all__ = ["mark"]  # a fixture
RARE = pytest.mark.exhaustive
PUSH_AND_PULL = """
import os, sys, time
import mxnet as mx
store = mx.kv.create("dist_sync")
rank = int(os.environ["GLUON_MGPU_RANK"])
value = mx.nd.zeros((2,))
store.init(3, value)
def step(number):
    store.push(3, mx.nd.ones((2,)) * number * 10 ** rank)
    store.pull(3, out=value)
    return value.asnumpy().tolist()
print("pulled", step(1), step(2), flush=True)
"""
PULLED = "pulled [11.0, 11.0] [22.0, 22.0]\n"


@pytest.fixture
def run(tmp_path, capfdbinary, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runner = Runner(tmp_path, capfdbinary, (sys.executable, "-m", "gluon_mgpu.distributed.launcher.worker"))
    yield runner
    reap(runner.started)


def listening(pids):
    """The addresses at which these processes listen, as the kernel lists them: network byte order read as a hex number."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def sockets(name):
    """The Unix sockets that processes with this mark may open."""
    environs = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in marked(name)]
    return {Path("/tmp", word[5:].decode()) for environ in environs for word in environ if word.startswith(b"PORT=")}


@pytest.fixture
def umask():
    """Let all users write to new files."""
    before = os.umask(0)
    yield
    os.umask(before)


GROUP = """
import os, sys, time
import numpy as np
from gluon_mgpu.distributed import group
print(group().all_gather(np.ones(1, np.float32)).tolist(), flush=True)
open(os.environ["GLUON_MGPU_RANK"], "w").close()
time.sleep(10_000)
"""


def test_other_users_cannot_connect(run, mark, umask):
    """Any user of the machine could: everything listened on ports of 127.0.0.1."""
    launcher = run.start(GROUP, servers=1)
    assert until(lambda: all((run.folder / rank).exists() for rank in "01")), launcher.stdout.read()
    opened = sockets(mark)
    assert [path.stat().st_mode & 0o777 for path in opened] == 4 * [0o700]  # the scheduler, a server, and the workers
    assert listening(marked(mark)) == []
    assert [(run.folder / rank).stat().st_mode & 0o777 for rank in "01"] == 2 * [0o666]  # the program's own files
    (server,) = [pid for pid in marked(mark) if is_server(pid)]
    os.kill(server, signal.SIGKILL)
    assert launcher.wait(timeout=240) == 137
    told = "gluon-mgpu launch: server 0 was killed by SIGKILL, the first of 2 processes to fail"
    assert told in launcher.stdout.read().decode()
    assert marked(mark) == [] and not any(path.exists() for path in opened)


BIND = """
import os, signal, socket, sys, time
socket.socket(socket.AF_UNIX).bind("/tmp/" + os.environ["PORT"])
while not os.path.exists("go"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "end", [*(pytest.param(end, marks=RARE) for end in ("", "a guard")), "sys.exit(3)", "a worker", "a launcher"]
)
def test_no_socket_is_left(run, mark, end):
    run.python = PYTHON
    launcher = run.start(BIND + ("" if end.startswith("a ") else end), servers=1)
    assert until(lambda: len(sockets(mark)) == 4 and all(path.exists() for path in sockets(mark)))
    opened = sockets(mark)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(mark)}
    del commands[launcher.pid]
    is_guard = {b"guard.py" in command: pid for pid, command in commands.items() if b"program.py" in command}
    killed = {"a launcher": launcher.pid, "a guard": is_guard[True], "a worker": is_guard[False]}.get(end)
    if killed:
        os.kill(killed, signal.SIGKILL)
    else:
        (run.folder / "go").touch()
    assert launcher.wait(timeout=240) == {"": 0, "sys.exit(3)": 3, "a launcher": -9}.get(end, 137)
    assert until(lambda: not any(path.exists() for path in opened)), end


def test_numbers_of_sockets(monkeypatch):
    drawn = [[11, 12], [13, 14], [15, 16]]
    monkeypatch.setattr(network.secrets, "SystemRandom", lambda: type("", (), {"sample": lambda self, *_: drawn.pop(0)})())
    monkeypatch.setattr(os.path, "lexists", lambda path: path in ("/tmp/11", "/tmp/14"))  # such as another job's
    assert network.unused_numbers(2) == [15, 16]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(LaunchError, match="got /tmp, which cannot be written") as raised:
        network.unused_numbers(2)
    assert_house_style(raised.value)


OPTIMIZER = PUSH_AND_PULL.replace("def step", "store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))\ndef step")


@pytest.mark.parametrize("accepts", [False, pytest.param(True, marks=RARE)])
def test_servers_take_an_optimizer_only_if_asked(run, accepts):
    """Without it they would go on, and replace weights by gradients."""
    assert run(OPTIMIZER, servers=1, accept_optimizers=accepts) == (0 if accepts else 1)
    if accepts:
        assert run.log(0) == run.log(1) == "pulled [-5.5, -5.5] [-16.5, -16.5]\n"
    else:
        assert "server 0 exited with status 1" in run.err and "pass --accept-optimizers" in run.err
        assert without_log(run.log(0) + run.log(1)) == ""


@RARE
def test_two_workers_with_a_store_of_their_own(run):
    assert run(PUSH_AND_PULL, servers=1) == 0
    assert run.log(0) == run.log(1) == PULLED


def is_server(pid):
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    return b"DMLC_ROLE=server" in environ and b"guard.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()
