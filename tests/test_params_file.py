"""MXNet's own format: byte by byte what MXNet writes, read by it, and by a reader that trusts no number in it."""

import io
import struct

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint.params_file import mxnet_array, read_params, write_params
from gluon_mgpu.mxnet_internals.versions import is_mxnet2

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


def assert_read(content, arrays):
    found = read_params(content)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        for one in (found[name], mxnet_array(found[name]).asnumpy()):
            assert (one.shape, one.dtype) == (array.shape, array.dtype)
            assert one.tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("names", [[name] for name in ARRAYS] + [list(ARRAYS)], ids=str)
def test_it_is_what_mxnet_writes(names, tmp_path):
    chosen = {name: ARRAYS[name] for name in names}
    with mx.util.np_array(False), mx.util.np_shape(False):
        mx.nd.save(str(tmp_path / "theirs"), {name: mx.nd.array(array, dtype=array.dtype) for name, array in chosen.items()})
    assert written(chosen) == (tmp_path / "theirs").read_bytes()
    assert_read(written(chosen), chosen)


def test_bfloat16_is_read(tmp_path):
    array = mx.nd.array([[1.5, -2.0]]).astype(np.dtype([("bfloat16", np.uint16)]))
    mx.nd.save(str(tmp_path / "theirs"), {"weight": array})
    assert_read((tmp_path / "theirs").read_bytes(), {"weight": array.asnumpy()})


def test_it_is_what_mxnet_writes_in_np_mode(tmp_path):
    chosen = {**ARRAYS, "number": np.float32(4.5).reshape(()), "nothing": np.zeros((0, 3), "float32")}
    mx.npx.set_np()
    try:
        files = mx.nd if is_mxnet2() else mx.npx
        arrays = {name: mx.np.array(array, dtype=array.dtype) for name, array in chosen.items()}
        files.save(str(tmp_path / "theirs"), {name: one.as_nd_ndarray() if is_mxnet2() else one for name, one in arrays.items()})
        (tmp_path / "ours").write_bytes(written(chosen, np_shape=True))
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
        read = files.load(str(tmp_path / "ours"))
        for name, array in chosen.items():
            np.testing.assert_array_equal(read[name].asnumpy(), array)
        assert_read(written(chosen, np_shape=True), chosen)
    finally:
        mx.npx.reset_np()


NUMBERS = [0, 1, 2, 0x7F, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


@pytest.mark.parametrize("np_shape", [False, True])
def test_no_number_in_a_file_is_trusted(np_shape):
    """Each place of the file holds each of these numbers, in 4 and in 8 bytes: the arrays never hold more than the file.

    MXNet's reader wrote past its arrays, took 12 GB for 2 kB, or did not return.
    """
    content = written({"w": np.ones((2, 3), "float32"), "b": np.ones(3, "float32")}, np_shape=np_shape)
    right = num_refused = 0
    for at in range(len(content)):
        for altered in [content[:at], *(content[:at] + packed + content[at + len(packed) :] for packed in packings())]:
            try:
                found = read_params(altered)
            except ValueError:
                num_refused += 1
            else:
                right += 1
                assert len(found) == 2 and sum(array.nbytes for array in found.values()) == 36
    assert num_refused > right > 0


def packings():
    return [struct.pack(f"<{kind}", number) for kind, most in (("I", 2**32), ("Q", 2**64)) for number in NUMBERS if number < most]


@pytest.mark.parametrize("storage", [1, 2])
def test_a_sparse_array_is_refused(storage, tmp_path):
    """A row number that is out of range let MXNet write there."""
    sparse = mx.nd.array(np.eye(3)).tostype(["row_sparse", "csr"][storage - 1])
    with mx.util.np_array(False), mx.util.np_shape(False):
        mx.nd.save(str(tmp_path / "sparse"), {"weight": sparse})
    with pytest.raises(ValueError, match=f"storage type {storage}"):
        read_params((tmp_path / "sparse").read_bytes())


@pytest.mark.parametrize("name", [b"\xff", b"a\n", b"\x1b[1m", b"b"])
def test_names_are_texts_and_differ(name):
    content = written({"b": np.ones(1, "float32"), "?": np.ones(1, "float32")})
    with pytest.raises(ValueError):
        read_params(content[:-9] + struct.pack("<Q", len(name)) + name)
