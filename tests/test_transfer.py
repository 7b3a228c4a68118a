import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import DeviceError

from .versions import nd


def test_copyto_always_copies(arrays):
    x = arrays.array([1.0, 2.0], ctx=mx.cpu(0))
    for context in (mx.cpu(0), mx.cpu(1)):
        copied = mgpu.copyto({"x": [x, None]}, context)["x"][0]
        assert (copied.context, type(copied)) == (context, type(x))
        copied[:] = 7
        assert x.asnumpy().tolist() == [1.0, 2.0]


def test_as_in_context_shares_where_it_can(arrays):
    x = arrays.array([1.0, 2.0], ctx=mx.cpu(0))
    assert mgpu.devices.as_in_context((x,), mx.cpu(0))[0] is x
    moved = mgpu.devices.as_in_context((x,), mx.cpu(1))[0]
    moved[:] = 7
    assert (moved.context, x.asnumpy().tolist()) == (mx.cpu(1), [1.0, 2.0])


def test_host_arrays_keep_their_dtype(arrays):
    for move in (mgpu.copyto, mgpu.devices.as_in_context):
        moved = move([np.arange(3), np.zeros(2, "float16")], mx.cpu(1))
        assert [np.dtype(array.dtype).name for array in moved] == ["int64", "float16"]
        assert {array.context for array in moved} == {mx.cpu(1)}


def test_copyto_writes_into_arrays():
    targets = (nd.zeros((2,), ctx=mx.cpu(1)), [nd.zeros((1, 3))])
    returned = mgpu.copyto((nd.ones((2,)), [np.full((1, 3), 5.0)]), targets)
    assert returned is targets
    assert targets[0].asnumpy().tolist() == [1, 1]
    assert targets[1][0].asnumpy().tolist() == [[5, 5, 5]]


def test_nothing_is_written_when_one_target_does_not_fit():
    targets = [mx.nd.zeros((2,)), mx.nd.zeros((3,))]
    with pytest.raises(DeviceError, match=r"target of data\[1\]"):
        mgpu.copyto([mx.nd.ones((2,)), mx.nd.ones((2,))], targets)
    assert targets[0].asnumpy().tolist() == [0, 0]
