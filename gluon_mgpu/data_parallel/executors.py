"""Graphs bound to the parameters of one device."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, Optional, Sequence

import mxnet as mx

from ..mxnet_internals.bound_graph import BoundGraph
from ..nested import Array
from ..runtime.device_threads import environment_with, in_own_thread
from .graph import Graph

_BULK_SIZES = {  # options of `hybridize`, and what MXNet reads in the environment when it binds a graph
    "forward_bulk_size": "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD",
    "backward_bulk_size": "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD",
}

# Contexts of this kind share temporary arrays and random numbers within a thread. A GPU has its own in each thread that binds or
# calls an operator (MXNet 1.9.1, src/resource.cc:145,456): bound in another thread, graphs would take a second workspace.
_SHARING = "cpu"


class Executor(BoundGraph):
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
        context = inputs[0].context
        data = [mx.nd.empty(one.shape, ctx=context, dtype=one.dtype) for one in inputs]
        arrays: Dict[str, Any] = dict(zip(graph.inputs, data))
        gradients, reqs = {}, {}
        for name, param in graph.params.items():
            arrays[name] = param.data(context).as_nd_ndarray()
            if trains and param.grad_req != "null":
                gradients[name], reqs[name] = param.grad(context).as_nd_ndarray(), param.grad_req
        memory = None if shared is None else shared.executor
        # it takes from `arrays` by name those that it needs
        bind = partial(graph.symbol.bind, context, arrays, gradients, reqs, aux_states=arrays, shared_exec=memory)
        # MXNet would join convolutions with the layers after them in graphs that predict: in other roundings than Gluon's
        settings = {"MXNET_SUBGRAPH_BACKEND": "default", "MXNET_SUBGRAPH_VERBOSE": "0"}  # the default backend changes nothing
        settings.update((_BULK_SIZES[name], str(size)) for name, size in graph.bulk_sizes.items() if name in _BULK_SIZES)
        with environment_with(settings):
            binds_here = graph.draws or context.device_type != _SHARING
            bound = bind() if binds_here else in_own_thread(context, bind)
        super().__init__(bound, data, trains=trains)
