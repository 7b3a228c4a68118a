"""Graphs bound to the arrays of one device: one executor for each shape, all in the same memory."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from contextlib import contextmanager
from functools import partial, reduce
from operator import mul
from typing import Any, Dict, Hashable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context
from mxnet.base import _LIB, check_call

from ..nested import Array
from ..runtime.c_api import Copy
from ..runtime.context_threads import environment_with, in_own_thread
from ..runtime.engine_push import EngineContext, WrittenWith
from ..trainer.buckets import place_of
from .graph import Graph

MOST = 64  # executors of one device
MOST_OWN_BYTES = 2**27  # of the recurrent operators of all executors of one device; beyond it, only one is kept

_FORWARD, _BACKWARD = _LIB.MXExecutorForward, _LIB.MXExecutorBackwardEx


class Executor:
    """A graph bound to the parameters of one device, for inputs of one shape.

    Its passes read and write the parameters' own arrays. A pass overwrites the arrays of the one before, also those of other
    executors in the same memory.

    Parameters
    ----------
    graph : Graph
    context : mxnet.Context
    inputs : sequence of NDArray
        Arrays of the shapes and dtypes to bind for.
    trains : bool
        Whether a backward pass will follow.
    size : int
        Elements of all its arrays, about.
    own_bytes : int
        Memory of its recurrent operators, about.
    shared : Executor, optional
        Use its memory, and add to it what this one needs more.
    """

    def __init__(
        self,
        graph: Graph,
        context: Context,
        inputs: Sequence[Array],
        *,
        trains: bool,
        size: int,
        own_bytes: int,
        shared: Optional[Executor] = None,
    ) -> None:
        self.size, self.own_bytes = size, own_bytes
        symbol = graph.symbol
        self._inputs = [mx.nd.empty(one.shape, ctx=context, dtype=one.dtype) for one in inputs]
        by_name: Dict[str, Any] = dict(zip(graph.inputs, self._inputs))
        arguments = symbol.list_arguments()
        used = [(i, Copy(own)) for i, (name, own) in enumerate(zip(graph.inputs, self._inputs)) if name in arguments]
        self._used: List[Tuple[int, Copy]] = used
        gradients, reqs = {}, {}
        for name, param in graph.params.items():
            by_name[name] = param.data(context).as_nd_ndarray()
            if trains and param.grad_req != "null":
                gradients[name], reqs[name] = param.grad(context).as_nd_ndarray(), param.grad_req
        bind = partial(
            symbol.bind,
            context,
            {name: by_name[name] for name in arguments},
            args_grad=gradients,
            grad_req=reqs,
            aux_states={name: by_name[name] for name in symbol.list_auxiliary_states()},
            shared_exec=None if shared is None else shared._bound,
        )
        with _settings(graph.bulk_sizes):
            self._bound: Any = bind() if graph.draws else in_own_thread(context, bind)
        self._handle, self._trains = self._bound.handle, ctypes.c_int(int(trains))
        self._outputs = [Copy(output) for output in self._bound.outputs]
        self._scale = 1.0
        self._head: Any = mx.nd.ones_like(self._bound.outputs[0])  # the gradient of the loss
        self._heads = (ctypes.c_void_p * 1)(self._head.handle)

        self._statistics = _written_with_gradients(graph, context) if trains else None

    def forward(self, inputs: Sequence[Array]) -> List[Array]:
        """Queue a forward pass, and return copies of the values of the graph's heads."""
        for i, own in self._used:
            own.fill_from(inputs[i])
        check_call(_FORWARD(self._handle, self._trains))
        return [output.new() for output in self._outputs]

    def backward(self, scale: float) -> None:
        """Queue the backward pass of the latest forward pass: the gradients of the loss times a scale."""
        if scale != self._scale:
            self._head[:] = scale
            self._scale = scale
        check_call(_BACKWARD(self._handle, 1, self._heads, 1))
        if self._statistics is not None:
            self._statistics.push()


class Executors:
    """The executors of a network's graphs on one device, by shape, all in the memory that the largest shape needs.

    ```
    owner: bound for the largest shape, never run    ◄── use its memory ──  executors of the shapes that came last
    ```

    A larger shape replaces them all. The least recently used shapes leave beyond 64, and are bound again when they come back.

    MXNet's recurrent operator keeps memory of its own in each executor, which nothing can share. If that of all executors exceeds
    `MOST_OWN_BYTES`, only one executor is kept from then on. To keep as many as fit would save neither: shapes come in random
    order, so most are bound again, and executors of several sizes leave malloc's memory in pieces.

    Parameters
    ----------
    context : mxnet.Context
    """

    def __init__(self, context: Context) -> None:
        self._context, self._most = context, MOST
        self._by_key: OrderedDict[Hashable, Executor] = OrderedDict()
        self._owner: Optional[Executor] = None

    def get(self, graph: Graph, inputs: Sequence[Array], *, trains: bool, state: Hashable) -> Executor:
        """Return the executor for inputs of these shapes and dtypes, bound for this state of the parameters."""
        key = (id(graph), state, *[(one.shape, one.dtype) for one in inputs])
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = self._bind(graph, inputs, trains)
            self._drop()
        self._by_key.move_to_end(key)
        return found

    def clear(self) -> None:
        """Forget all executors: the parameters have other arrays."""
        if self._owner is not None:
            mx.nd.waitall()  # their operations must not be deleted while they run
        self._by_key.clear()
        self._owner = None

    def _bind(self, graph: Graph, inputs: Sequence[Array], trains: bool) -> Executor:
        size, own_bytes = _sizes(graph, inputs, trains)
        bind = partial(Executor, graph, self._context, inputs, trains=trains, size=size, own_bytes=own_bytes)
        if self._owner is None or size > self._owner.size:
            self.clear()
            self._owner = bind()
        return bind(shared=self._owner)

    def _drop(self) -> None:
        """Drop the least recently used executors beyond the limits."""
        if sum(one.own_bytes for one in self._by_key.values()) > MOST_OWN_BYTES:
            self._most = 1
        while len(self._by_key) > self._most:
            self._by_key.popitem(last=False)


def _written_with_gradients(graph: Graph, context: Context) -> Optional[WrittenWith]:
    """Return what lets running statistics count as written when a backward pass has written all gradients, if there are any.

    MXNet's operator writes them in the backward pass. Within a bulk of operators, the engine is not told.
    """
    statistics = [graph.params[name].data(context) for name in graph.symbol.list_auxiliary_states()]
    gradients: Dict[int, Array] = {}  # one of each bucket, as its parameters share memory
    for param in graph.params.values():
        place = place_of(param)
        if param._grad:
            gradients.setdefault(id(param if place is None else place.bucket), param.grad(context))
    if not statistics or not gradients:
        return None
    return WrittenWith(statistics, list(gradients.values()), EngineContext(context.device_typeid, context.device_id))


@contextmanager
def _settings(bulk_sizes: Dict[str, Any]) -> Iterator[None]:
    """Set what MXNet reads in the environment when it binds a graph.

    MXNet would join convolutions with the layers after them in graphs that predict: in other roundings than Gluon's.

    Parameters
    ----------
    bulk_sizes : dict
        Options of `hybridize`: how many operators become one operation of the engine.
    """
    wanted = {"MXNET_SUBGRAPH_BACKEND": "default", "MXNET_SUBGRAPH_VERBOSE": "0"}  # the default backend changes nothing
    wanted.update({_BULK_SIZES[name]: str(size) for name, size in bulk_sizes.items() if name in _BULK_SIZES})
    with environment_with(wanted):
        yield


_BULK_SIZES = {
    "forward_bulk_size": "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD",
    "backward_bulk_size": "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD",
}


def _sizes(graph: Graph, inputs: Sequence[Array], trains: bool) -> Tuple[int, int]:
    """Return about how many elements a graph's arrays have, and how many bytes its recurrent operators write and keep.

    These are weights in other orders, their gradients, a workspace and scratchpads. The factors were measured for GRUs that
    train with 128 and 300 units.

    Source: MXNet 1.9.1, src/operator/nn/mkldnn/mkldnn_rnn.cc. In its wheel, each primitive of oneDNN has a scratchpad.
    """
    inner = graph.symbol.get_internals()
    known = set(inner.list_inputs())
    shapes = {name: one.shape for name, one in zip(graph.inputs, inputs) if name in known}
    _, found, _ = inner.infer_shape_partial(**shapes)
    sizes = {name: reduce(mul, shape) for name, shape in zip(inner.list_outputs(), found) if shape}
    own = sum(16 * sizes.get(output, 0) + 5 * sizes.get(params, 0) for output, params in graph.recurrent)
    return (1 + trains) * sum(sizes.values()), 4 * own
