"""Files of named arrays in MXNet's own format, written from NumPy: MXNet's writer does not notice a full disk."""

from __future__ import annotations

import struct
from typing import Any, Dict

import mxnet as mx
import numpy as np

_LIST, _LEGACY, _NUMPY = 0x112, 0xF993FAC9, 0xF993FACA  # magic numbers of a list of arrays, and of each array in it
_CPU = 1


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
        kind = array.dtype if array.dtype.names else array.dtype.type  # bfloat16 is a dtype with a name of its own
        dtype = mx.nd.ndarray._DTYPE_NP_TO_MX[kind]
        file.write(struct.pack("<Iii", _NUMPY if np_shape else _LEGACY, 0, array.ndim))  # 0: a dense array
        file.write(struct.pack(f"<{array.ndim}q", *array.shape))
        file.write(struct.pack("<iii", _CPU, 0, dtype))
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.write(struct.pack("<Q", len(arrays)))
    for name in arrays:
        text = name.encode()
        file.write(struct.pack("<Q", len(text)) + text)
