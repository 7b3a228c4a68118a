"""MXNet's own format: byte by byte what MXNet writes, and read by it."""

import io

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint.params_file import write_params

ARRAYS = {
    "0.weight": np.arange(6, dtype="float32").reshape(2, 3),
    "0.bias": np.zeros((3,), "float64"),
    "half": np.ones((1, 2, 1, 2), "float16"),
    "counts": np.array([2**40, -1]),
    "bytes": np.array([[1, 255]], "uint8"),
    "small": np.array([-3], "int8"),
    "right": np.array([True, False]),
    "whole": np.array([7], "int32"),
    "이름": np.asfortranarray(np.arange(6, dtype="float32").reshape(2, 3)),
}


def written(arrays, **options):
    file = io.BytesIO()
    write_params(file, arrays, **options)
    return file.getvalue()


@pytest.mark.parametrize("names", [[name] for name in ARRAYS] + [list(ARRAYS)], ids=str)
def test_it_is_what_mxnet_writes(names, tmp_path):
    chosen = {name: ARRAYS[name] for name in names}
    mx.nd.save(str(tmp_path / "theirs"), {name: mx.nd.array(array, dtype=array.dtype) for name, array in chosen.items()})
    assert written(chosen) == (tmp_path / "theirs").read_bytes()


def test_it_is_what_mxnet_writes_in_np_mode(tmp_path):
    chosen = {**ARRAYS, "number": np.float32(4.5).reshape(()), "nothing": np.zeros((0, 3), "float32")}
    mx.npx.set_np()
    try:
        mx.npx.save(str(tmp_path / "theirs"), {name: mx.np.array(array, dtype=array.dtype) for name, array in chosen.items()})
        (tmp_path / "ours").write_bytes(written(chosen, np_shape=True))
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
        read = mx.npx.load(str(tmp_path / "ours"))
        for name, array in chosen.items():
            np.testing.assert_array_equal(read[name].asnumpy(), array)
    finally:
        mx.npx.reset_np()
