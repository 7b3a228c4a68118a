import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel.transfer import measure_bandwidth
from gluon_mgpu.errors import DeviceError

from .conftest import assert_house_style


def test_copyto_always_copies(arrays):
    x = arrays.array([1.0, 2.0], ctx=mx.cpu(0))
    for context in (mx.cpu(0), mx.cpu(1)):
        copied = mgpu.copyto({"x": [x, None]}, context)["x"][0]
        assert (copied.context, type(copied)) == (context, type(x))
        copied[:] = 7
        assert x.asnumpy().tolist() == [1.0, 2.0]


def test_as_in_context_shares_where_it_can(arrays):
    x = arrays.array([1.0, 2.0], ctx=mx.cpu(0))
    assert mgpu.as_in_context((x,), mx.cpu(0))[0] is x
    moved = mgpu.as_in_context((x,), mx.cpu(1))[0]
    moved[:] = 7
    assert (moved.context, x.asnumpy().tolist()) == (mx.cpu(1), [1.0, 2.0])


def test_host_arrays_keep_their_dtype(arrays):
    for move in (mgpu.copyto, mgpu.as_in_context):
        moved = move([np.arange(3), np.zeros(2, "float16")], mx.cpu(1))
        assert [np.dtype(array.dtype).name for array in moved] == ["int64", "float16"]
        assert {array.context for array in moved} == {mx.cpu(1)}


def test_copyto_writes_into_arrays():
    targets = (mx.nd.zeros((2,), ctx=mx.cpu(1)), [mx.nd.zeros((1, 3))])
    returned = mgpu.copyto((mx.nd.ones((2,)), [np.full((1, 3), 5.0)]), targets)
    assert returned[0] is targets[0]
    assert targets[0].asnumpy().tolist() == [1, 1]
    assert targets[1][0].asnumpy().tolist() == [[5, 5, 5]]


def test_nothing_is_written_when_one_target_does_not_fit():
    targets = [mx.nd.zeros((2,)), mx.nd.zeros((3,))]
    with pytest.raises(DeviceError, match=r"target of shape \(3,\) for data\[1\]") as caught:
        mgpu.copyto([mx.nd.ones((2,)), mx.nd.ones((2,))], targets)
    assert_house_style(caught.value)
    assert targets[0].asnumpy().tolist() == [0, 0]


@pytest.mark.parametrize("call", [lambda: mgpu.copyto(mx.nd.ones(2), "gpu"), lambda: mgpu.as_in_context(mx.nd.ones(2), None)])
def test_a_target_must_be_a_context(call):
    with pytest.raises(DeviceError) as caught:
        call()
    assert_house_style(caught.value)


def test_bandwidth_is_measured_for_each_pair_and_size():
    contexts = [mx.cpu(0), mx.cpu(1)]
    measured = measure_bandwidth(contexts, [4096, 65536], repeats=2)
    assert len(measured) == 8
    assert {(one.source, one.target) for one in measured} == {(str(a), str(b)) for a in contexts for b in contexts}
    for one in measured:
        assert one.gb_per_s == pytest.approx(one.num_bytes / one.seconds / 1e9)
        assert one.num_bytes in (4096, 65536)
