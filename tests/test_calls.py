"""runtime/c_api.py: values of arrays, without a copy where they lie in the CPU's memory."""

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.runtime import c_api


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
