"""Files of named arrays in MXNet's own format, with NumPy: MXNet's writer ignores a full disk, its reader trusts every number."""

from __future__ import annotations

import math
import os
import struct
from typing import Any, Dict, List, Tuple, Union

import mxnet as mx
import numpy as np

from ..checks import MOST
from ..mxnet_internals.c_calls import dtype_of, fill, number_of

_LIST, _LEGACY, _NUMPY = 0x112, 0xF993FAC9, 0xF993FACA  # magic numbers of a list of arrays, and of each array in it
_CPU = 1
_MOST_AXES = 32  # NumPy's before version 2


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
        file.write(struct.pack("<Iii", _NUMPY if np_shape else _LEGACY, 0, array.ndim))  # 0: a dense array
        file.write(struct.pack(f"<{array.ndim}q", *array.shape))
        file.write(struct.pack("<iii", _CPU, 0, number_of(array.dtype)))
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.write(struct.pack("<Q", len(arrays)))
    for name in arrays:
        text = name.encode()
        file.write(struct.pack("<Q", len(text)) + text)


def read_params(source: Union[bytes, int]) -> Dict[str, np.ndarray]:
    """Return the arrays of a file of `write_params`, `mx.nd.save` or `mx.npx.save`: views of its bytes.

    Each number in the file is checked before it is used.

    Parameters
    ----------
    source : bytes or int
        The content of the file, or its descriptor: then the values are not read, and the arrays have only dtypes and shapes.

    Raises
    ------
    ValueError
        The file is anything else, holds a sparse array, or bytes that belong to no array.

    Examples
    --------
    >>> import io
    >>> file = io.BytesIO()
    >>> write_params(file, {"weight": np.array([1, 2], "float32")})
    >>> read_params(file.getvalue())["weight"].tolist()
    [1.0, 2.0]
    """
    at, end = 0, os.fstat(source).st_size if isinstance(source, int) else len(source)

    def take(size: int) -> int:
        """Return where so many bytes begin, and go on behind them."""
        nonlocal at
        if size > end - at:
            raise ValueError(f"of the arrays, {size} bytes are missing at byte {at} of {end}")
        at += size
        return at - size

    def read(size: int) -> bytes:
        begin = take(size)
        return os.pread(source, size, begin) if isinstance(source, int) else source[begin : begin + size]

    def numbers(form: str) -> Tuple[int, ...]:
        return struct.unpack(form, read(struct.calcsize(form)))

    arrays: List[np.ndarray] = []
    magic, reserved, count = numbers("<QQQ")
    if (magic, reserved) != (_LIST, 0):
        raise ValueError(f"arrays of magic number {magic:#x}")
    while len(arrays) < count:
        magic, storage, num_axes = numbers("<Iii")
        least = 0 if magic == _NUMPY else 1  # axes, and elements along each
        if magic not in (_LEGACY, _NUMPY) or storage or not least <= num_axes <= _MOST_AXES:
            raise ValueError(f"an array of magic number {magic:#x}, storage type {storage} and {num_axes} axes")
        shape = numbers(f"<{num_axes}q")
        _, _, number = numbers("<iii")  # the device is of the program that wrote it
        kind, size = dtype_of(number), math.prod(shape)
        if kind is None or min(shape, default=1) < least or max((*shape, size)) > MOST:
            raise ValueError(f"an array of shape {shape} and type {number}")
        dtype = np.dtype(kind)
        begin, is_open = take(size * dtype.itemsize), isinstance(source, int)
        arrays.append(np.broadcast_to(np.zeros((), dtype), shape) if is_open else np.ndarray(shape, dtype, source, begin))
    if numbers("<Q") != (count,):
        raise ValueError("another number of names than of arrays")
    names = []
    for _ in arrays:
        names.append(read(*numbers("<Q")).decode())
        if not names[-1].isprintable():
            raise ValueError(f"the name {names[-1]!a}")
    if len(set(names)) < len(names) or at < end:
        raise ValueError(f"names that repeat, or {end - at} bytes behind them")
    return dict(zip(names, arrays))


def mxnet_array(values: np.ndarray) -> Any:
    """Return an MXNet array of these values on the CPU, of np in np mode."""
    array = mx.nd.empty(values.shape, mx.cpu(), values.dtype)
    if values.size:
        fill(array, values)
    return array.as_np_ndarray() if mx.util.is_np_array() else array
