"""Servers of MXNet's store without MXNet's package: commands of workers still reach them."""

import ctypes
import logging
import pickle
import subprocess
import sys

import mxnet as mx
import pytest
from gluon_mgpu.distributed.launcher.server import Controller
from mxnet.base import _LIB, check_call


def test_an_optimizer_that_a_worker_sends_updates_the_weights(monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)  # MXNet's server sets up logging
    handle = ctypes.c_void_p()
    check_call(_LIB.MXKVStoreCreate(b"local", ctypes.byref(handle)))
    controller = Controller(handle)
    assert controller.server is None
    controller(0, pickle.dumps(mx.optimizer.SGD(learning_rate=0.5), 0), None)
    store = controller.server.kvstore
    weight = mx.nd.zeros((2,))
    store.init(0, weight)
    store.push(0, mx.nd.ones((2,)))
    store.pull(0, out=weight)
    assert weight.asnumpy().tolist() == [-0.5, -0.5]


@pytest.mark.exhaustive
def test_an_optimizer_on_the_servers_of_a_job(tmp_path):
    (tmp_path / "job.py").write_text(
        "import mxnet as mx\n"
        "store, value = mx.kv.create('dist_sync'), mx.nd.zeros((2,))\n"
        "store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))\n"
        "store.init(0, value)\n"
        "store.push(0, mx.nd.ones((2,)))\n"
        "store.pull(0, out=value)\n"
        "print(value.asnumpy().tolist())\n"
    )
    command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", "2", "job.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] [-1.0, -1.0]", "[1] [-1.0, -1.0]"]
