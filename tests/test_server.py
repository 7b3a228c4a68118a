"""Servers of MXNet's store without MXNet's package: commands of workers end them, or reach them if they are asked to accept."""

import ctypes
import os
import pickle

import mxnet as mx
import pytest
from gluon_mgpu.distributed.launcher.server import Controller, refuse
from gluon_mgpu.mxnet_internals.library import Store, mxnet_library

from .conftest import assert_house_style

GARBAGE = [b"", b"\xff\x80 no pickle", b"cos\nno_such_name\n."]


@pytest.fixture
def ended(monkeypatch):
    """The statuses with which the process would have ended."""
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def test_the_library_is_that_of_the_package():
    assert os.path.samefile(mxnet_library(), mx.libinfo.find_lib_path()[0])


@pytest.mark.parametrize("body", [pickle.dumps(mx.optimizer.SGD(), 0), *GARBAGE])
@pytest.mark.parametrize("head", [0, -1, 7])
def test_by_default_no_command_is_read(ended, calls_to, capsys, head, body):
    """Any local user could send a pickle, and with it a program that the server ran."""
    unpickled = calls_to(pickle, "loads")
    refuse(head, body, None)
    assert (ended, unpickled) == ([1], [])
    told = capsys.readouterr().err
    assert_house_style(told)
    assert "pass --accept-optimizers" in told


@pytest.mark.parametrize("body", GARBAGE)
def test_a_command_that_cannot_be_read_ends_the_server(ended, capsys, body):
    Controller(Store("local"))(0, body, None)
    assert ended == [1]
    assert "Traceback" in capsys.readouterr().err


def test_an_optimizer_that_a_worker_sends_updates_the_weights():
    made = Store("local")
    controller = Controller(made)  # it keeps the store
    controller(0, pickle.dumps(mx.optimizer.SGD(learning_rate=0.5), 0), None)
    store = mx.kvstore.kvstore.KVStore(made.handle)
    weight = mx.nd.zeros((2,))
    store.init(0, weight)
    store.push(0, mx.nd.ones((2,)))
    store.pull(0, out=weight)
    store.handle = ctypes.c_void_p()  # the controller's store frees it
    assert weight.asnumpy().tolist() == [-0.5, -0.5]
