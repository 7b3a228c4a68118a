"""Graphs bound to the arrays of one device: their passes are calls that are prepared once."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, Dict, List, Optional, Sequence

import mxnet as mx
from mxnet.base import _LIB, NDArrayHandle, check_call

from ..nested import Array
from ..runtime.c_api import Copy, creation
from ..runtime.device_threads import environment_with, in_own_thread
from .graph import Graph

_FORWARD: Any = getattr(_LIB, "MXExecutorForward", None)  # which MXNet 2 lacks
_BACKWARD: Any = getattr(_LIB, "MXExecutorBackwardEx", None)
_BULK_SIZES = {  # options of `hybridize`, and what MXNet reads in the environment when it binds a graph
    "forward_bulk_size": "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD",
    "backward_bulk_size": "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD",
}


class Executor:
    """A graph bound to the parameters of one device, for inputs of one shape.

    Its passes read and write the parameters' own arrays. A pass overwrites the arrays of the one before, also those of other
    executors in the same memory.

    Parameters
    ----------
    graph : Graph
    inputs : sequence of NDArray
        Arrays of the shapes and dtypes to bind for, on the device.
    trains : bool
        Whether a backward pass will follow.
    shared : Executor, optional
        Use its memory, and add to it what this one needs more.

    Attributes
    ----------
    size : int
        Elements of its inputs: other arrays grow with them.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Array], *, trains: bool, shared: Optional[Executor] = None) -> None:
        self.graph, self.size = graph, sum(one.size for one in inputs)
        context = self.context = inputs[0].context
        self.inputs = [mx.nd.empty(one.shape, ctx=context, dtype=one.dtype) for one in inputs]
        arrays: Dict[str, Any] = dict(zip(graph.inputs, self.inputs))
        gradients, reqs = {}, {}
        for name, param in graph.params.items():
            arrays[name] = param.data(context).as_nd_ndarray()
            if trains and param.grad_req != "null":
                gradients[name], reqs[name] = param.grad(context).as_nd_ndarray(), param.grad_req
        memory = None if shared is None else shared._bound
        # it takes from `arrays` by name those that it needs
        bind = partial(graph.symbol.bind, context, arrays, gradients, reqs, aux_states=arrays, shared_exec=memory)
        # MXNet would join convolutions with the layers after them in graphs that predict: in other roundings than Gluon's
        settings = {"MXNET_SUBGRAPH_BACKEND": "default", "MXNET_SUBGRAPH_VERBOSE": "0"}  # the default backend changes nothing
        settings.update((_BULK_SIZES[name], str(size)) for name, size in graph.bulk_sizes.items() if name in _BULK_SIZES)
        with environment_with(settings):
            self._bound: mx.executor.Executor = bind() if graph.draws else in_own_thread(context, bind)
        self._handle, self._trains = self._bound.handle, ctypes.c_int(int(trains))
        self._targets = [one.handle for one in self.inputs]
        self._kind = mx.np.ndarray if mx.util.is_np_array() else mx.nd.NDArray
        outputs = self._bound.outputs
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
