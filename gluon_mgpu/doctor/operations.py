"""What training needs of a GPU's libraries: small operations with known results, in a process of their own for each device.

`python -m gluon_mgpu.doctor.operations 'gpu(0)' 'gpu(1)'` runs them on gpu(0), which also copies to gpu(1). It prints one JSON
object per line: each operation when it begins, and what was wrong with it; `check_operations` reads that.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from ..errors import last_line
from ..runtime.loaded import mxnet as mx

_PATTERN = 2**22  # elements of a copy between GPUs: 16 MB


class Operation(NamedTuple):
    """An operation, the library that computes it on a GPU, and a function that returns what was wrong, "" if nothing."""

    name: str
    library: str
    run: Callable[[Any], str]


def _differs(found: Any, expected: Any) -> str:
    values = found.asnumpy()
    if np.allclose(values, expected, rtol=1e-3, atol=1e-3):  # TF32 has 10 bits
        return ""
    return f"it gave {values.ravel()[:4].tolist()}, not {np.ravel(expected)[:4].tolist()}"


def _convolution(context: Any) -> str:
    x, weight = mx.nd.ones((1, 2, 5, 5), ctx=context), mx.nd.ones((3, 2, 3, 3), ctx=context)
    return _differs(mx.nd.Convolution(x, weight, no_bias=True, kernel=(3, 3), num_filter=3), np.full((1, 3, 3, 3), 18.0))


def _product(context: Any) -> str:
    return _differs(mx.nd.dot(mx.nd.ones((64, 64), ctx=context), mx.nd.ones((64, 64), ctx=context)), np.full((64, 64), 64.0))


def _batch_norm(context: Any) -> str:
    one, zero = mx.nd.ones((1,), ctx=context), mx.nd.zeros((1,), ctx=context)
    with mx.autograd.record():
        y = mx.nd.BatchNorm(mx.nd.array([[1.0], [3.0]], ctx=context), one, zero, zero.copy(), one.copy(), fix_gamma=False)
    return _differs(y, [[-1.0], [1.0]])


def _dropout(context: Any) -> str:
    masks = []
    for seed in (1, 1, 2):
        mx.random.seed(seed, ctx=context)
        with mx.autograd.record():
            masks.append(mx.nd.Dropout(mx.nd.ones((256,), ctx=context), p=0.5, cudnn_off=True).asnumpy().tolist())
    if masks[0] != masks[1]:
        return "two masks of one seed differ"
    return "" if masks[0] != masks[2] else "masks of two seeds are equal"


def _fused(context: Any) -> str:
    net = mx.gluon.nn.HybridLambda(lambda F, x: F.relu(F.sigmoid(x) * 4 - 1) + 1)
    net.hybridize()
    return _differs(net(mx.nd.zeros((8,), ctx=context)), np.full(8, 2.0))


def _copy(to: Any, context: Any) -> str:
    pattern = np.random.RandomState(0).randint(0, 2**31 - 1, _PATTERN).astype("int32")
    found = mx.nd.array(pattern, ctx=context, dtype="int32").copyto(to).asnumpy()
    wrong = int((found != pattern).sum())
    return f"{wrong} of {pattern.size} numbers arrived changed" if wrong else ""


OPERATIONS = (
    Operation("a convolution", "cuDNN", _convolution),
    Operation("a product of matrices", "cuBLAS", _product),
    Operation("BatchNorm", "cuDNN", _batch_norm),
    Operation("Dropout with a seed", "cuRAND", _dropout),
    Operation("a hybridized block", "NVRTC", _fused),
)


def run_operations(context: Any, others: Sequence[Any]) -> None:
    """Run the operations on a device, and copies to others; print each when it begins, and what is wrong."""
    copies = [Operation(f"a copy to {other}", "peer access", partial(_copy, other)) for other in others]
    for operation in (*OPERATIONS, *copies):
        print(json.dumps({"begins": operation.name, "library": operation.library}), flush=True)
        try:
            error = operation.run(context)
        except mx.MXNetError as failed:
            error = last_line(failed)
        if error:
            print(json.dumps({"error": error}), flush=True)


def _context(name: str) -> Any:
    kind, _, number = name.rstrip(")").partition("(")
    return mx.Context(kind, int(number))


if __name__ == "__main__":
    run_operations(_context(sys.argv[1]), [_context(name) for name in sys.argv[2:]])
