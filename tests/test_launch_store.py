"""Launching with MXNet's own store between two workers: it works, it ends when something fails, and it listens on loopback."""

import os
import signal
import sys
from pathlib import Path

import pytest

from . import test_launch
from .test_launch import Runner, mark, marked, reap, until

__all__ = ["mark"]  # a fixture
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
    monkeypatch.setattr(test_launch, "PYTHON", (sys.executable, "-m", "gluon_mgpu.distributed.launcher.worker"))
    runner = Runner(tmp_path, capfdbinary)
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


@pytest.mark.exhaustive
def test_two_workers_and_a_killed_server(run, mark):
    launcher = run.start(PUSH_AND_PULL + "time.sleep(10_000)", servers=1)
    assert until(lambda: run.log(0) == run.log(1) == PULLED), run.log(0)
    addresses = listening(marked(mark))
    assert len(addresses) == 4  # the scheduler, a server, and the workers
    assert {address.partition(":")[0] for address in addresses} == {"0100007F"}  # 127.0.0.1, not 0.0.0.0
    (server,) = [pid for pid in marked(mark) if is_server(pid)]
    os.kill(server, signal.SIGKILL)
    assert launcher.wait(timeout=240) == 137
    told = "gluon-mgpu launch: server 0 was killed by SIGKILL, the first of 2 processes to fail"
    assert told in launcher.stdout.read().decode()
    assert marked(mark) == []


def is_server(pid):
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    return b"DMLC_ROLE=server" in environ and b"guard.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()
