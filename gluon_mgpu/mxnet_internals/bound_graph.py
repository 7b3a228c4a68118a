"""A graph that MXNet has bound to arrays: its passes are calls of the C interface that are prepared once."""

from __future__ import annotations

import ctypes
from typing import Any, List, Sequence

import mxnet as mx
from mxnet.base import _LIB, NDArrayHandle, check_call

from ..nested import Array
from .c_calls import Copy, creation

_FORWARD: Any = getattr(_LIB, "MXExecutorForward", None)  # which MXNet 2 lacks
_BACKWARD: Any = getattr(_LIB, "MXExecutorBackwardEx", None)


class BoundGraph:
    """The passes of an executor, whose first output is the loss.

    Parameters
    ----------
    executor : mxnet.executor.Executor
    inputs : list of NDArray
        Its arrays for data, all on one device.
    trains : bool
        Whether a backward pass will follow each forward pass.
    """

    def __init__(self, executor: mx.executor.Executor, inputs: List[Array], *, trains: bool) -> None:
        self.executor, self.inputs = executor, inputs
        self.context = context = inputs[0].context
        self._handle, self._trains = executor.handle, ctypes.c_int(int(trains))
        self._targets = [one.handle for one in inputs]
        self._kind = mx.np.ndarray if mx.util.is_np_array() else mx.nd.NDArray
        outputs = executor.outputs
        self._outputs = [(one, creation(one.shape, context, one.dtype, delayed=True)) for one in outputs]
        self._copy = Copy()
        self._scale = 1.0
        # the gradient of the loss; not ones_like(), as the shared memory of an output may have the layout of another shape
        self._head: Array = mx.nd.ones(outputs[0].shape, ctx=context, dtype=outputs[0].dtype)
        self._heads = (ctypes.c_void_p * 1)(self._head.handle)

    def forward(self, inputs: Sequence[Array]) -> List[Array]:
        """Queue a forward pass, and return copies of the values of the graph's heads."""
        copy, status = self._copy, 0
        for array, target in zip(inputs, self._targets):
            copy.source[0], copy.target[0] = array.handle, target
            status |= copy.queue()
        status |= _FORWARD(self._handle, self._trains)
        heads = []
        for output, create in self._outputs:
            handle = NDArrayHandle()
            status |= create(ctypes.byref(handle))
            copy.source[0], copy.target[0] = output.handle, handle
            status |= copy.queue()
            heads.append(self._kind(handle))
        if status:
            check_call(status)
        return heads

    def backward(self, scale: float) -> None:
        """Queue the backward pass of the latest forward pass: the gradients of the loss times a scale."""
        if scale != self._scale:
            self._head[:] = scale
            self._scale = scale
        if _BACKWARD(self._handle, 1, self._heads, 1):
            check_call(-1)
