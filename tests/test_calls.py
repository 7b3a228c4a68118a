"""calls.py: the flags of fresh gradients, read where they stand and by the C interface."""

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.runtime import c_api
from gluon_mgpu.runtime.c_api import Flags


def variables(num_params, num_replicas):
    found = [[mx.nd.ones((3,), ctx=mx.cpu(replica)) for replica in range(num_replicas)] for _ in range(num_params)]
    for replicas in found:
        mx.autograd.mark_variables(replicas, [weight.copy() for weight in replicas])
    return found


@pytest.fixture(params=["where they stand", "by the C interface", "in an MXNet laid out otherwise"])
def way(request, monkeypatch):
    if request.param == "by the C interface":
        monkeypatch.setattr(c_api.platform, "machine", lambda: "aarch64")
    if request.param == "in an MXNet laid out otherwise":
        monkeypatch.setattr(c_api, "_INFO_IN_NODE", 8)  # leads to some other pointer, or to none
    return request.param


def fresh(weights):
    return [[bool(weight._fresh_grad) for weight in replicas] for replicas in weights]


def test_flags_are_those_of_mxnet(way):
    weights = variables(3, 2)
    flags = Flags(weights)
    assert (flags._memory is not None) == (way == "where they stand")
    assert not flags.all() and not flags.read().any()
    weights[2][1]._fresh_grad = True
    assert flags.read().tolist() == [[False, False], [False, False], [False, True]] == fresh(weights)
    with mx.autograd.record():
        losses = [sum((weight * 2).sum() for weight in column) for column in zip(*weights)]
    mx.autograd.backward(losses)
    assert flags.all() and all(map(all, fresh(weights)))
    flags.clear([True, False, True])
    assert flags.read().tolist() == [[False, False], [True, True], [False, False]] == fresh(weights)
    flags.clear()
    assert not flags.read().any() and fresh(weights) == [[False, False]] * 3


def test_making_flags_leaves_them_as_they_are(way):
    weights = variables(2, 2)
    weights[0][1]._fresh_grad = True
    assert Flags(weights).read().tolist() == [[False, True], [False, False]] == fresh(weights)


def test_no_parameter_is_fresh_as_a_whole(way):
    flags = Flags([])
    assert flags.all() and flags.read().size == 0
    flags.clear()


def test_what_was_marked_lives_as_long_as_its_flags(way):
    """The memory that is written must not have been given to somebody else."""
    weights = variables(1, 2)
    flags = Flags(weights)
    for replica, weight in enumerate(weights[0]):
        mx.autograd.mark_variables([weight], [mx.nd.zeros((3,), ctx=mx.cpu(replica))])
    others = variables(50, 2)
    for replicas in others:
        for weight in replicas:
            weight._fresh_grad = True
    flags.clear()
    assert all(map(all, fresh(others)))
    weights[0][0]._fresh_grad = True
    assert Flags(weights).read().tolist() == [[True, False]]


def test_values_are_where_they_are():
    """Nothing is copied, nobody writes to them, and the array's memory lives as long as they do."""
    array = mx.nd.arange(1000)
    values = c_api.values_of(array)
    array[:] = 7  # which is not to be done
    array.wait_to_read()
    assert values.tolist() == [7.0] * 1000
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1
    del array
    for other in [mx.nd.zeros((1000,)) for _ in range(20)]:
        other.wait_to_read()
    assert values.tolist() == [7.0] * 1000


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "int32", "int64", "uint8"])
def test_values_are_those_that_mxnet_copies(dtype):
    """Also while they are still being computed."""
    for shape in ((3, 4, 5), (1,), (512, 512)):
        array = mx.nd.ones(shape, dtype=dtype) + mx.nd.ones(shape, dtype=dtype)
        values = c_api.values_of(array)
        assert (values.dtype, values.shape) == (np.dtype(dtype), shape)
        assert (values == 2).all()


def test_values_of_bfloat16_are_its_bits():
    bfloat16 = np.dtype([("bfloat16", np.uint16)])
    array = mx.nd.array([1, -2]).astype(bfloat16)
    assert c_api.values_of(array).tolist() == array.asnumpy().tolist() == [(0x3F80,), (0xC000,)]


def test_values_of_what_has_no_memory_of_its_own_are_copied():
    sparse = mx.nd.array([[0, 0], [1, 2]]).tostype("row_sparse")
    assert c_api.values_of(sparse).tolist() == [[0, 0], [1, 2]]
    with mx.util.np_shape(True):
        assert c_api.values_of(mx.nd.zeros((0, 3))).shape == (0, 3)
        assert c_api.values_of(mx.nd.ones(())).tolist() == 1.0
