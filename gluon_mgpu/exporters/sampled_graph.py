"""The graph of a network in prediction, with its inputs, its values and the output for a sample."""

from __future__ import annotations

import json
from ast import literal_eval
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..checks import OF_WRONG_DATA, explaining, instance, reason_of, short
from ..data_parallel.batchnorm import SyncBatchNorm
from ..errors import NestedError, TrainerError
from ..mxnet_internals.blocks import flatten, forget_graph, regroup, traced
from ..mxnet_internals.parameters import has_values, is_open, structural_params
from ..nested import Array, is_device_array, map_leaves
from ..runtime.environment import logger
from ..trainer.parameters import average_replicas, blocks_of, devices_of, spans_devices
from ..trainer.precision import precision_of, set_precision
from ..trainer.replica_check import ReplicaComparison

_FLOATS = ("float16", "bfloat16", "float64")
_COUNTED = ("index", "indices", "length", "rois", "sequence_length")  # arguments of which MXNet may read beyond its memory
Inputs = Dict[str, np.ndarray]
Outputs = List[np.ndarray]
Trial = Tuple[Inputs, Outputs]


@dataclass(frozen=True, eq=False)
class ExportGraph:
    """A network as one of MXNet's graphs, with what it computes for a sample.

    Attributes
    ----------
    symbol : mxnet.symbol.Symbol
        A classic one, also of a network for np arrays.
    inputs : dict of str to numpy.ndarray
        The sample, by the names of the graph's inputs.
    params : dict of str to numpy.ndarray
        Weights and running statistics by the names in the graph.
    run : callable (inputs) -> outputs
        The network itself, for other inputs.
    trials : list of (inputs, outputs)
        What a file must compute: the network's outputs for the sample, and for random values of its shapes.
    is_np : bool
        Whether the network takes np arrays.
    """

    symbol: Any
    inputs: Inputs
    params: Inputs
    run: Callable[[Inputs], Outputs]
    trials: List[Trial]
    is_np: bool = False

    def nodes(self) -> List[Dict[str, Any]]:
        """Return the nodes of the graph, each after those that it reads."""
        return json.loads(self.symbol.tojson())["nodes"]


@contextmanager
def legacy_mode() -> Iterator[None]:
    """Use MXNet's rules for legacy arrays, where a size of 0 is unknown, within a block or a function."""
    with mx.util.np_array(False), mx.util.np_shape(False):
        yield


def parsed(text: Any) -> Any:
    """Return the value of an attribute, which graphs hold as text."""
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def shapes_in(symbol: Any, known: Dict[str, np.ndarray]) -> Dict[str, List[Tuple[int, ...]]]:
    """Return the shapes of each node's outputs by its name, for arrays by the names of the graph's inputs; () if unknown."""
    every = symbol.get_internals()
    found: Dict[str, List[Tuple[int, ...]]] = {}
    for one, shape in zip(every, every.infer_shape_partial(**{name: value.shape for name, value in known.items()})[1]):
        found.setdefault(one.name, []).append(shape)
    return found


class _Whole(gluon.HybridBlock):  # type: ignore[misc]
    """Calls a network as a user does. Tracing this block leaves no graph in the network."""

    def __init__(self, net: gluon.Block) -> None:
        super().__init__(prefix="")
        self._net = [net]  # in a list: Gluon would register it as a child, and accepts HybridBlocks only

    def hybrid_forward(self, F: Any, *args: Any) -> Any:
        return self._net[0](*args)


def arguments_of(net: gluon.Block, sample: Any) -> Tuple[Any, ...]:
    """Return the network's arguments for a sample, as arrays of the current mode on the network's first device.

    A tuple or list holds one argument each, which may itself be nested. NumPy's float64 becomes float32.
    """
    arguments = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    context = devices_of(net)[0] if list(net.collect_params()) else mx.current_context()

    def moved(_: str, leaf: Any) -> Array:
        if is_device_array(leaf):
            one = leaf.as_in_context(context)
            return one.as_np_ndarray() if mx.util.is_np_array() else one.as_nd_ndarray()
        value = np.asarray(leaf)
        return array_on(context, value.astype(np.float32) if value.dtype == np.float64 else value)

    expected = "arrays that the network accepts"
    advice = "Pass one batch as the network takes it."
    try:
        with explaining("export", f"the sample {short(sample)}", expected, advice=advice):
            return tuple(map_leaves(moved, argument) for argument in arguments)
    except NestedError as error:
        raise TrainerError(f"export: got the sample {short(sample)} ({error}); expected {expected}. {advice}") from error


def check_exportable(net: Any) -> None:
    """Raise `TrainerError` unless a network has float32 values on one device or equal ones on several."""
    instance("export", "net", net, gluon.Block, "a gluon.Block", advice="Pass the network.")
    if spans_devices(net):
        raise TrainerError(
            f"export: got a {type(net).__name__}, whose stages are on different devices; expected a whole network on each "
            "device. Load its checkpoint into the network that was divided, and export that."
        )
    for name, param in structural_params(net).items():
        if not (has_values(param) or is_open(param)):
            raise TrainerError(
                f"export: got {name} without values; expected an initialised network. Call net.initialize(), or load_checkpoint."
            )
        if np.dtype(param.dtype).name in _FLOATS:
            raise TrainerError(
                f"export: got {name} of {np.dtype(param.dtype).name}; expected float32 parameters, with which the file can "
                "be checked on any machine. Call net.cast('float32') before; it changes the network."
            )


@contextmanager
def in_plain_form(net: gluon.Block) -> Iterator[None]:
    """Let a network compute in float32 within this block, and make each `SyncBatchNorm` an ordinary BatchNorm."""
    precision = precision_of(net)
    layers = [block for block in blocks_of(net) if isinstance(block, SyncBatchNorm)]
    try:
        if precision != "fp32":
            set_precision(net, "fp32")
        for layer in layers:
            layer.__class__ = layer.plain
        yield
    finally:
        for layer in layers:
            layer.__class__ = SyncBatchNorm
        for block in blocks_of(net) if layers else ():
            if isinstance(block, gluon.HybridBlock):
                forget_graph(block)  # a graph with the ordinary layer
        if precision != "fp32":
            set_precision(net, precision)


def predict_sample(net: gluon.Block, arguments: Sequence[Any]) -> None:
    """Run a network for a sample, so that its shapes are known, and make its devices equal."""
    expected = "data of a shape and dtype that the network accepts"
    with explaining("export", "a sample that the network rejects", expected, advice="Pass one batch."):
        mx.nd.waitall()  # a static graph writes running statistics without telling the engine
        outputs = _predicted(net, arguments)
        if list(net.collect_params()) and len(devices_of(net)) > 1:
            average_replicas(net)
            ReplicaComparison("export", net).check()
    if any(array.dtype.names for array in outputs):  # a structure of one number of 16 bits, which NumPy cannot compute with
        raise TrainerError(
            "export: got outputs in bfloat16; expected float32, in which the file is compared. amp.init() changed MXNet's "
            "operators in this process: load the parameters in another one, and export there. set_precision needs no such step."
        )


def trace(net: gluon.Block, arguments: Sequence[Any]) -> ExportGraph:
    """Return the graph of an initialised network for data of this form.

    Raises
    ------
    TrainerError
        The network rejects the sample, or its Python code cannot be run with symbols.
    """
    predict_sample(net, arguments)
    try:
        data, symbol = traced(_Whole(net), *arguments)
    except (mx.MXNetError, AssertionError, NotImplementedError, *OF_WRONG_DATA) as error:
        raise TrainerError(
            f"export: got a {type(net).__name__} whose Python code cannot be traced as a graph ({reason_of(error)}); "
            "expected HybridBlocks that hybridize() compiles. Write its layers with hybrid_forward(F, ...)."
        ) from error
    classic = symbol.as_nd_ndarray()
    flat, form = flatten(list(arguments), "input")
    arrays = dict(zip([one.name for one in data], [array for array in flat if array is not None]))

    def run(inputs: Inputs) -> Outputs:
        others = iter([array_on(array.context, inputs[name]) if name in inputs else array for name, array in arrays.items()])
        return _predicted(net, regroup([None if array is None else next(others) for array in flat], form))

    return complete(classic, net, {name: array.asnumpy() for name, array in arrays.items()}, run)


def complete(symbol: Any, net: gluon.Block, inputs: Inputs, run: Callable[[Inputs], Outputs]) -> ExportGraph:
    """Return a graph with the values of the parameters that it reads, and what it must compute."""
    params = {param.name: param for param in net.collect_params().values()}
    read = [name for name in symbol.list_inputs() if name not in inputs]
    unknown, nodes = [name for name in read if name not in params], json.loads(symbol.tojson())["nodes"]
    if unknown or "Custom" in {node["op"] for node in nodes}:
        found = f"reads {', '.join(unknown[:3])}, which no layer holds" if unknown else "has an operator written in Python"
        raise TrainerError(
            f"export: got a {type(net).__name__} whose graph {found}; expected MXNet's own operators. Replace that layer."
        )
    values = {name: params[name].list_data()[0].asnumpy() for name in read}
    used = {name: value for name, value in inputs.items() if name in symbol.list_inputs()}
    reads = [zip(node["inputs"], mx.operator.get_operator_arguments(node["op"]).names) for node in nodes if node["op"] != "null"]
    counted = {nodes[place[0]]["name"] for pairs in reads for place, argument in pairs if argument in _COUNTED}
    rng, trials = np.random.RandomState(0), [(used, run(used))]
    for least in (0, -1):
        with suppress(Exception):  # whatever a network raises for values that do not belong together
            drawn = {name: value if name in counted else _drawn(value, rng, least) for name, value in used.items()}
            trials += [(drawn, found) for found in [run(drawn)] if all(np.isfinite(one).all() for one in found)]
    if len(trials) < 2:
        logger.warning("export: only the sample is compared: the network fails, or gives NaN, for random values of its range")
    return ExportGraph(symbol, used, values, run, trials, mx.util.is_np_array())


def _drawn(value: np.ndarray, rng: np.random.RandomState, least: int) -> np.ndarray:
    """Return random values of an array's shape, in its range; integers are some of its own.

    Floats that are all 0 become others from `least` to 1. Those that are all c become c to c + 1.
    """
    low, high = value.min(), value.max()
    if value.dtype.kind in "biu" or not np.isfinite(value).all():
        return np.asarray(rng.choice(value.ravel(), value.shape))
    low, high = (low or least, low + 1) if low == high else (low, high)
    return np.asarray(rng.uniform(low, high, value.shape), value.dtype)


def _predicted(net: gluon.Block, arguments: Sequence[Any]) -> Outputs:
    with autograd.pause(train_mode=False):
        return [array.asnumpy() for array in flatten(net(*arguments), "output")[0]]


def array_on(context: Context, value: np.ndarray) -> Array:
    """Return a device's array of a value, of the current mode."""
    made = mx.nd.array(value, ctx=context, dtype=value.dtype)
    return made.as_np_ndarray() if mx.util.is_np_array() else made
