"""Files of named arrays in MXNet's own format, written from NumPy: MXNet's writer does not notice a full disk."""

from __future__ import annotations

import math
import os
import struct
from typing import Any, BinaryIO, Dict, Tuple

import mxnet as mx
import numpy as np

_LIST, _LEGACY, _NUMPY = 0x112, 0xF993FAC9, 0xF993FACA  # magic numbers of a list of arrays, and of each array in it
_CPU = 1
_DTYPES = mx.nd.ndarray._DTYPE_MX_TO_NP
_MOST_AXES, _MOST_KINDS, _MOST_DEVICES = 32, 5, 2**16


def write_params(file: Any, arrays: Dict[str, np.ndarray], *, np_shape: bool = False) -> None:
    """Write arrays as `mx.nd.save` does, byte by byte: `mx.nd.load` and `net.load_parameters` read them.

    Parameters
    ----------
    file : binary file, or anything with `write`
        Written once, from its beginning to its end.
    arrays : dict of str to numpy.ndarray, any shapes
        With dtypes that MXNet supports.
    np_shape : bool
        Write as `mx.npx.save` does, for programs in np mode.

    Examples
    --------
    >>> import io
    >>> file = io.BytesIO()
    >>> write_params(file, {"weight": np.array([1, 2], "float32")})
    >>> mx.nd.load_frombuffer(file.getvalue())["weight"].asnumpy().tolist()
    [1.0, 2.0]

    Source: MXNet 1.9.1, src/ndarray/ndarray.cc, NDArray::Save.
    """
    file.write(struct.pack("<QQQ", _LIST, 0, len(arrays)))
    for array in arrays.values():
        dtype = mx.nd.ndarray._DTYPE_NP_TO_MX[_kind(array)]
        file.write(struct.pack("<Iii", _NUMPY if np_shape else _LEGACY, 0, array.ndim))  # 0: a dense array
        file.write(struct.pack(f"<{array.ndim}q", *array.shape))
        file.write(struct.pack("<iii", _CPU, 0, dtype))
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.write(struct.pack("<Q", len(arrays)))
    for name in arrays:
        text = name.encode()
        file.write(struct.pack("<Q", len(text)) + text)


def check_params(file: BinaryIO) -> None:
    """Check a file of `write_params` before MXNet reads it: MXNet trusts its numbers, and may crash on wrong ones.

    Raises
    ------
    ValueError
        The file has another format, or a part of it is missing.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    kind, _, num_arrays = _unpacked(file, "<QQQ")
    if kind != _LIST:
        raise ValueError("it does not begin as a list of arrays does")
    for i in range(num_arrays):  # each turn reads more bytes, so a wrong count stops at the end of the file
        kind, storage, num_axes = _unpacked(file, "<Iii")
        if kind not in (_LEGACY, _NUMPY) or storage or not (kind == _LEGACY) <= num_axes <= _MOST_AXES:
            raise ValueError(f"array {i} has an unknown format")
        shape = _unpacked(file, f"<{num_axes}q")
        device, number, dtype = _unpacked(file, "<iii")
        if min((*shape, 0)) < 0 or not 1 <= device <= _MOST_KINDS or not 0 <= number < _MOST_DEVICES or dtype not in _DTYPES:
            raise ValueError(f"array {i} has an invalid shape, device or dtype")
        if math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize > size - file.tell():
            raise ValueError(f"array {i} extends beyond the end of the file")
        file.seek(math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize, os.SEEK_CUR)
    names = set()
    if _unpacked(file, "<Q") != (num_arrays,):
        raise ValueError("the number of names differs from the number of arrays")
    for _ in range(num_arrays):
        (length,) = _unpacked(file, "<Q")
        names.add(file.read(min(length, size)).decode())
    if len(names) < num_arrays or file.tell() != size:
        raise ValueError("a name appears twice, or bytes follow the last name")


def _unpacked(file: BinaryIO, form: str) -> Tuple[int, ...]:
    content = file.read(struct.calcsize(form))
    if len(content) < struct.calcsize(form):
        raise ValueError("it is cut off")
    return struct.unpack(form, content)


def _kind(array: np.ndarray) -> Any:
    """Return the key of this array's dtype in MXNet's table."""
    return array.dtype if array.dtype.names else array.dtype.type  # bfloat16 is a dtype with a name of its own
