"""Graphs with casts to 16 bits, for any lists of operators.

Source: MXNet 1.9.1, python/mxnet/contrib/amp/amp.py, convert_symbol, which accepts only the operators of its own lists.
"""

from __future__ import annotations

import ctypes
from array import array
from itertools import accumulate
from typing import Any, Dict, Sequence, Tuple

import mxnet as mx
from mxnet.base import _LIB, SymbolHandle, c_array_buf, c_str_array, check_call, mx_uint
from mxnet.ndarray.ndarray import _DTYPE_NP_TO_MX

Conditions = Sequence[Tuple[str, str, Sequence[str]]]  # operator, attribute, and its values for which it computes in float32


def with_casts(
    graph: Any, types: Dict[str, Any], dtype: Any, operators: Sequence[Sequence[str]], conditions: Conditions
) -> mx.sym.Symbol:
    """Return a graph with casts. Its outputs keep their types, and its parameters stay float32.

    Parameters
    ----------
    types : dict of str to dtype
        Of all its inputs.
    dtype : numpy.dtype
        That of the operators in low precision.
    operators : sequence of list of str
        Those in low precision, in float32, and in the widest type of their arguments.
    """
    ends = list(accumulate((len(values) for _, _, values in conditions), initial=0))
    names, attributes = ([one[i] for one in conditions] for i in (0, 1))
    handle = SymbolHandle()
    check_call(
        _LIB.MXReducePrecisionSymbol(
            graph.handle,
            ctypes.byref(handle),
            mx_uint(len(types)),
            c_array_buf(ctypes.c_int, array("i", [_DTYPE_NP_TO_MX[one] for one in types.values()])),
            mx_uint(len(ends)),
            c_array_buf(ctypes.c_int, array("i", ends)),
            ctypes.byref(ctypes.c_int(_DTYPE_NP_TO_MX[dtype])),
            ctypes.c_int(0),  # parameters stay float32
            *[mx_uint(len(some)) for some in (*operators, names, [], [])],
            *[c_str_array(some) for some in (*operators, names, [])],
            c_str_array(attributes),
            c_str_array([value for _, _, values in conditions for value in values]),
            c_str_array([]),
            c_str_array(list(types)),
        )
    )
    return mx.sym.Symbol(handle)
