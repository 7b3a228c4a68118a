"""The graph of a network and its loss, traced once for all devices; what cannot be traced."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from ..checks import OF_WRONG_DATA, reason_of, short
from ..errors import TrainerError
from ..mxnet_internals import blocks
from ..mxnet_internals.parameters import has_dense_gradient, is_dense
from ..mxnet_internals.versions import SyncBatchNorm as GluonSyncBatchNorm
from ..mxnet_internals.versions import is_mxnet2
from ..nested import Array, is_device_array, leaves, map_leaves
from ..protocols import HasGraph, PreparesInputs
from ..refusals import FOREACH
from ..trainer.parameters import blocks_of
from ..trainer.seeded_dropout import turn_cudnn_off
from ..trainer.wrong_graphs import wrong_operators
from .batchnorm import SyncBatchNorm

Preparation = Callable[[Any], Tuple[Any, ...]]


class NotCompilableError(TrainerError):
    """A network, a loss or data that cannot be one compiled graph. The message says why."""


@dataclass(frozen=True, eq=False)
class Graph:
    """A network, with its loss or without, as one of MXNet's graphs.

    Attributes
    ----------
    symbol : mxnet.symbol.Symbol
        Its heads: the loss, if there is one, and the network's outputs, which pass no gradient back.
    inputs : list of str
        The name of each array of `inputs_of`, in its order.
    params : dict of str to gluon.Parameter
        The parameters and running statistics that it uses.
    is_recurrent : bool
        Whether it has one of MXNet's recurrent operators.
    draws : bool
        Whether an operator may draw random numbers, as Dropout does.
    bulk_sizes : dict
        The options of the network's `hybridize` that say how many operators become one operation of the engine.
    is_plain : bool
        Whether its inputs are the features and the label as they come, one array each, and its output is one array.
    """

    symbol: mx.sym.Symbol
    inputs: List[str]
    params: Dict[str, gluon.Parameter]
    is_recurrent: bool
    draws: bool
    bulk_sizes: Dict[str, Any]
    is_plain: bool
    _form: Any

    def outputs(self, arrays: Sequence[Array]) -> Any:
        """Return the network's output, in its own form and as arrays of the current mode, from the arrays of its heads."""
        if mx.util.is_np_array():
            arrays = [array.as_np_ndarray() for array in arrays]
        return blocks.regroup(list(arrays), self._form)


def inputs_of(prepare: Preparation, X: Any, y: Any = None) -> List[Array]:
    """Return the arrays of a shard that its graph reads: of the features as the network prepares them, and of the label.

    Parameters
    ----------
    prepare : callable (X) -> tuple
        The network's `preparation`.

    Raises
    ------
    NotCompilableError
        An array is sparse, or not on a device; or the network asks for Python.
    """
    try:
        arrays: List[Array] = [*blocks.flatten(prepare(X), "input")[0], *(leaf for _, leaf in leaves(y))]
    except ValueError as error:  # a dict, for example
        raise NotCompilableError(f"the data have another form: {reason_of(error)}") from error
    for array in arrays:
        if not is_device_array(array) or array.stype != "default":
            raise NotCompilableError(f"the data hold {short(array)}; expected dense MXNet arrays")
    return arrays


def nesting_of(data: Any) -> Any:
    """Return what two shards of the same nesting have in common."""
    return None if is_device_array(data) else tuple(path for path, _ in leaves(data))


def trace(net: gluon.Block, loss: Any, X: Any, y: Any) -> Graph:
    """Return the graph of a network and its loss for data of this form. The network's parameters have their shapes.

    Call it in the mode of autograd in which the graph will run: Python code may ask for it, and Gluon keeps the graph.

    Parameters
    ----------
    net : gluon.HybridBlock
    loss : gluon.HybridBlock, HasGraph or None
    X, y : array, or nested data
        One shard, on its device.

    Raises
    ------
    NotCompilableError
        Tracing failed.
    """
    is_legacy = isinstance(net, PreparesInputs)
    method = own_method(net)
    if method and not (is_legacy or isinstance(net, gluon.SymbolBlock)):
        raise NotCompilableError(f"it has a {method}() of its own, in Python")
    with mx.util.np_array(mx.util.is_np_array() and not is_legacy):
        try:
            return _traced(net, loss, preparation(net)(X), y, is_legacy)
        except NotCompilableError:
            raise
        except (mx.MXNetError, AssertionError, NotImplementedError, *OF_WRONG_DATA) as error:
            raise NotCompilableError(f"tracing failed: {reason_of(error)}") from error


def own_method(block: gluon.Block) -> str:
    """Return the name of a method that a block has in the place of Gluon's, which runs its graph, "" if there is none."""
    names = ("__call__", "forward")
    return next((name for name in names if getattr(type(block), name) is not getattr(gluon.HybridBlock, name)), "")


def _traced(net: Any, loss: Any, arguments: Tuple[Any, ...], y: Any, is_legacy: bool) -> Graph:
    data, out = blocks.traced(net, *arguments)
    in_form, out_form = blocks.forms_of(net)
    if not is_legacy and blocks.flatten(arguments, "input")[1] != in_form:  # the graph is Gluon's, kept from another call
        raise NotCompilableError("it was called with arguments of another nesting before")
    heads = list(out.as_nd_ndarray())  # MXNet cannot iterate over np symbols
    names = [symbol.name for symbol in data]
    symbol = heads
    if loss is not None:
        if y is None:
            raise NotCompilableError("the batch has no labels")
        labels: List[str] = []

        def variable(_: str, leaf: Array) -> Any:
            labels.append(f"{net.name}_label{len(labels)}")
            one = mx.sym.var(labels[-1])
            return one.as_np_ndarray() if isinstance(leaf, mx.np.ndarray) and not is_legacy else one

        label = map_leaves(variable, y)
        is_np = isinstance(out, blocks.NpSymbol)
        output = blocks.regroup([head.as_np_ndarray() for head in heads] if is_np else heads, out_form)
        losses = loss.graph(output, label) if isinstance(loss, HasGraph) else loss(output, label)
        if not isinstance(losses, mx.sym.Symbol) or len(losses.list_outputs()) != 1:
            raise NotCompilableError(f"the loss returns {short(losses)}; expected one array")
        names += labels
        symbol = [losses.as_nd_ndarray(), *map(mx.sym.BlockGrad, heads)]
    joined = mx.sym.Group(symbol)
    document = json.loads(joined.tojson())
    if turn_cudnn_off(document):
        joined = mx.sym.load_json(json.dumps(document))
    nodes = document["nodes"]
    operators = {node["op"] for node in nodes}
    if "Custom" in operators:
        raise NotCompilableError("an operator is written in Python (mx.operator.CustomOp)")
    for mode, name, _ in wrong_operators(document) if autograd.is_recording() else ():
        if mode != FOREACH:
            raise NotCompilableError(f"MXNet computes wrong gradients of {name} ({mode}) in a graph, also after hybridize()")
    params = {**net.collect_params(), **(loss.collect_params() if loss is not None else {})}
    used = {name: params[name] for name in joined.list_inputs() if name in params}
    unknown = set(joined.list_inputs()).difference(names, used)
    if unknown:
        raise NotCompilableError(f"the graph reads {', '.join(sorted(unknown))}, which no layer holds")
    bulk_sizes = {name: size for name, size in blocks.options_of(net).items() if name.endswith("_bulk_size")}
    draws, is_recurrent = any(map(may_draw, nodes)), "RNN" in operators
    is_plain = not is_legacy and all(map(is_device_array, arguments)) and out_form == 0
    is_plain = is_plain and (loss is None or is_device_array(y))
    return Graph(joined, names, used, is_recurrent, draws, bulk_sizes, is_plain, out_form)


_RANDOM = re.compile(
    "random|sample|dropout|shuffle|choice|normal|uniform|gamma|poisson|bernoulli|binomial|multinomial|exponential|gumbel|laplace|"
    "logistic$|pareto|rayleigh|weibull|power|leakyrelu|leaky_relu|generate"
)


def may_draw(node: Dict[str, Any]) -> bool:
    """Return whether an operator may ask MXNet for random numbers. More names than necessary do no harm."""
    if node["op"] == "RNN":
        return float(node.get("attrs", {}).get("p", 0)) > 0
    return _RANDOM.search(node["op"].lower()) is not None


def draws_numbers(block: gluon.Block, inputs: Sequence[Any]) -> bool:
    """Return whether a block may draw random numbers: true if its Python code cannot be traced."""
    if not isinstance(block, gluon.HybridBlock):
        return type(block) is not gluon.nn.Sequential or any(draws_numbers(one, inputs) for one in blocks.children(block))
    graph = symbols_of(block, inputs)
    return graph is None or any(map(may_draw, json.loads(graph[1].tojson())["nodes"]))


def symbols_of(block: gluon.HybridBlock, inputs: Sequence[Any]) -> Any:
    """Return a block's inputs and its output as symbols, for training; None if its Python code cannot be traced."""
    with suppress(Exception), autograd.record():  # whatever a user's code raises for symbols
        return blocks.traced(block, *inputs)
    return None


def preparation(net: Any) -> Preparation:
    """Return a function that returns the arguments of `hybrid_forward` for one shard of features."""

    def prepared(X: Any) -> Tuple[Any, ...]:
        inputs = net.graph_inputs(X)
        if inputs is None:
            raise NotCompilableError("the network runs these steps in Python")
        return inputs

    return prepared if isinstance(net, PreparesInputs) else lambda X: (X,)


def reasons_against(net: Any, loss: Any, *, traced_once: bool) -> Iterator[str]:
    """Yield what is known against making a network and its loss one compiled graph.

    Parameters
    ----------
    traced_once : bool
        Whether the caller may be sure that tracing them once is enough. Otherwise, they must be hybridized, which says so:
        Python code that does something else in each call would do the same from then on.
    """
    if is_mxnet2():
        yield "MXNet 2 has no executors"
        return
    both = [("the network", net)] + [("the loss", loss)] * (loss is not None)
    for what, block in both:
        makes_graph = isinstance(block, (PreparesInputs, HasGraph))
        if not makes_graph and not isinstance(block, gluon.HybridBlock):
            yield f"{what} is a {type(block).__name__}, not a HybridBlock"
        is_known = what == "the loss" and (isinstance(block, HasGraph) or type(block).__module__ == gluon.loss.__name__)
        if not (makes_graph or is_known) and own_method(block):
            yield f"{what} has a {own_method(block)}() of its own, in Python"
        if not (traced_once or blocks.is_hybridized(block) or is_known):
            yield f"{what} is not hybridized"
    for block in [one for _, root in both for one in blocks_of(root)]:  # what of one block needs Python in each call
        named = f"{block.name} ({type(block).__name__})"
        if blocks.has_hooks(block):
            yield f"{named} has hooks"
        if isinstance(block, (SyncBatchNorm, GluonSyncBatchNorm)):
            yield f"{named} is synchronised over the devices"
        if "forward" in vars(block):
            yield f"{named} has a forward() that was replaced"
        if blocks.has_backend(block):
            yield f"{named} is compiled by a backend"
    for param in net.collect_params().values():
        if not (is_dense(param) and has_dense_gradient(param)):
            yield f"{param.name} is sparse, or has sparse gradients"
        if type(param).data is not gluon.Parameter.data:
            yield f"{param.name} has a data() of its own, in Python"
