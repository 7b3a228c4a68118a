"""MXNet's own format: byte by byte what MXNet writes, and read by it."""

import io
import struct

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint.params_file import check_params, write_params

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


def test_mxnet_reads_it(tmp_path):
    (tmp_path / "ours").write_bytes(written(ARRAYS))
    read = mx.nd.load(str(tmp_path / "ours"))
    assert list(read) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name].asnumpy(), array)


def test_a_dtype_that_mxnet_has_not_is_an_error():
    with pytest.raises(KeyError):
        written({"x": np.zeros(1, "complex64")})


def test_what_it_writes_passes_the_check():
    for options in ({}, {"np_shape": True}):
        check_params(io.BytesIO(written(ARRAYS, **options)))


@pytest.mark.parametrize(
    ("at", "form", "value", "told"),
    [
        (0, "<Q", 1, "does not begin as a list of arrays does"),
        (16, "<Q", 2**60, "array 1 has an unknown format"),
        (24, "<I", 1, "array 0 has an unknown format"),  # an older version of the format
        (28, "<i", 1, "array 0 has an unknown format"),  # a sparse array
        (32, "<i", -1, "array 0 has an unknown format"),
        (32, "<i", 10**6, "array 0 has an unknown format"),
        (36, "<q", -2, "array 0 has an invalid shape, device or dtype"),
        (36, "<q", 2**40, "array 0 extends beyond the end of the file"),
        (52, "<i", 99, "array 0 has an invalid shape, device or dtype"),
        (56, "<i", -1, "array 0 has an invalid shape, device or dtype"),
        (60, "<i", 77, "array 0 has an invalid shape, device or dtype"),
        (88, "<Q", 2, "the number of names differs from the number of arrays"),
        (96, "<Q", 4, "bytes follow the last name"),
    ],
)
def test_a_wrong_number_is_found_before_mxnet_trusts_it(at, form, value, told):
    """An array of 2 x 3 numbers begins at byte 24, its shape at 36, its device at 52, its numbers at 64, its name at 96."""
    content = bytearray(written({"weight": ARRAYS["0.weight"]}))
    struct.pack_into(form, content, at, value)
    with pytest.raises(ValueError, match=told):
        check_params(io.BytesIO(bytes(content)))


@pytest.mark.parametrize("length", [0, 23, 30, 40, 55, 63, 80, 90, 100])
def test_a_file_that_was_cut_is_found(length):
    content = written({"weight": ARRAYS["0.weight"]})
    with pytest.raises(ValueError, match="cut off|beyond the end|twice"):
        check_params(io.BytesIO(content[:length]))
