"""Servers of MXNet's store without MXNet's package: commands of workers still reach them."""

import ctypes
import logging
import pickle

import mxnet as mx
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
