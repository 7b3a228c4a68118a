"""ONNX files: written by MXNet's converter, with the axes that may vary left open, and run by ONNX Runtime."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from ..checks import reason_of, short
from ..errors import TrainerError
from ..runtime.environment import require
from .onnx_graph import prepared
from .onnx_operators import OPERATORS, Operator, Output
from .sampled_graph import ExportGraph, Outputs, Trial, legacy_mode, shapes_in

OPSET = 13  # the newest that MXNet's converters know
_MORE = (1, 2, 3, 5, 8)  # than the sample has, along open axes: strides and windows hide what single sizes show
IR_VERSION = 8  # of files, for ONNX Runtime 1.10 and later
_TYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")

Axes = Dict[str, Dict[int, str]]  # by input: the axes whose sizes may differ from the sample's, with their names
Group = Sequence[Tuple[str, int]]  # axes that vary together: inputs and numbers of axes


@dataclass(frozen=True)
class OpenAxes:
    """The axes of a graph's inputs whose sizes may differ from the sample's, as the network has shown.

    Attributes
    ----------
    names : dict of str to dict of int to str
        By input and axis; axes of one name have one size.
    trials : list of (inputs, outputs)
        The latest trial of the graph with more along each of these axes, and what the network computes of it.
    """

    names: Axes
    trials: List[Trial]

    def sizes(self, name: str, shape: Sequence[int]) -> Tuple[Union[int, str], ...]:
        """Return the shape of an input, with the names of its open axes."""
        return tuple(self.names.get(name, {}).get(i, size) for i, size in enumerate(shape))


@legacy_mode()
def write_onnx(graph: ExportGraph, path: Path, axes: OpenAxes) -> None:
    """Write a graph as an ONNX file.

    Raises
    ------
    TrainerError
        An operator has no counterpart.
    MissingExtraError
        onnx is not installed.
    """
    onnx = require("onnx", "onnx", "export")
    try:
        with _mapping_of(onnx):
            made = _converted(onnx, graph, axes)
        model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(model)
    except TrainerError:
        raise
    except Exception as error:  # MXNet's converters raise errors of many kinds
        raise TrainerError(
            f"export: got a network that MXNet cannot convert to ONNX: {reason_of(error)}; expected operators with a "
            "counterpart. Replace that layer, or export with a symbol prefix."
        ) from error
    path.write_bytes(model.SerializeToString())


def _converted(onnx: Any, graph: ExportGraph, axes: OpenAxes) -> Any:
    """Return a graph in ONNX, each operator by its own converter: ours, or MXNet's."""
    registry = import_module("mxnet.onnx.mx2onnx._export_onnx").MXNetGraph.registry_
    symbol, params = prepared(graph)
    described = json.loads(symbol.tojson())
    shapes = shapes_in(symbol, {**graph.inputs, **params})
    nodes, made, constants = described["nodes"], [], []  # type: ignore[var-annotated]
    known: List[List[Output]] = []  # the outputs of each node
    for index, node in enumerate(nodes):
        name = node["name"]
        if node["op"] == "null":
            value = graph.inputs[name] if name in graph.inputs else params[name]
            known.append([Output(name, value.dtype)])
            if name in params:
                constants.append(onnx.numpy_helper.from_array(np.asarray(value, order="C"), name))
            continue
        given = [(nodes[at]["op"], known[at][number], shapes[nodes[at]["name"]][number]) for at, number, *_ in node["inputs"]]
        operator = Operator(onnx, node, given, params, graph.is_np)
        ours = OPERATORS.get(node["op"])
        if ours is None or ours(operator) is NotImplemented:
            convert = registry.get(OPSET, {}).get(node["op"]) or registry.get(OPSET - 1, {}).get(node["op"])
            if convert is None:
                raise NotImplementedError(f"no converter for {node['op']}")
            asked = {"mx_graph": nodes, "initializer": constants, "outputs_lookup": known, "idx": index, "opset_version": OPSET}
            found = convert(node, **asked)
            found, operator.result = found if isinstance(found, tuple) else (found, operator.result)
            operator.nodes = [one for one in found if isinstance(one, onnx.NodeProto)]
            written = chain.from_iterable(one.output for one in found if isinstance(one, onnx.NodeProto))
            numbers = {int(one[len(name) :] or -1): one for one in written if re.fullmatch(re.escape(name) + r"\d{0,2}", one)}
            operator.outputs = [numbers[number] for number in sorted(numbers)] or [found[-1].name]
        made += operator.nodes
        constants += operator.constants
        known.append([Output(*pair) for pair in zip(operator.outputs, operator.result)])
    heads = [known[index][number].name for index, number, *_ in described["heads"]]
    read = {name for node in made for name in node.input} | set(heads)
    describe, code = onnx.helper.make_tensor_value_info, onnx.helper.np_dtype_to_tensor_dtype
    inputs = [describe(name, code(value.dtype), axes.sizes(name, value.shape)) for name, value in graph.inputs.items()]
    outputs = []
    types = symbol.infer_type(**{name: value.dtype for name, value in {**graph.inputs, **params}.items()})[1]
    for at, (name, dtype, first) in enumerate(zip(heads, types, graph.trials[0][1])):
        if np.dtype(dtype) != first.dtype:  # that of an operator for np arrays
            made.append(onnx.helper.make_node("Cast", [name], [f"{name}_cast"], to=code(first.dtype)))
            name = f"{name}_cast"
        others = [found[at].shape for _, found in axes.trials]
        sizes = [size if all(shape[i] == size for shape in others) else None for i, size in enumerate(first.shape)]
        outputs.append(describe(name, code(first.dtype), sizes))
    return onnx.helper.make_graph(made, "gluon_mgpu", inputs, outputs, [one for one in constants if one.name in read])


@contextmanager
def _mapping_of(onnx: Any) -> Iterator[None]:
    """Provide `onnx.mapping` to MXNet's converters within this block: onnx 1.19 removed it."""
    codes = {np.dtype(name): onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in _TYPES}
    before = {name: value for name, value in vars(onnx).items() if name == "mapping"}
    types = {code: dtype for dtype, code in codes.items()}
    onnx.mapping = SimpleNamespace(NP_TYPE_TO_TENSOR_TYPE=codes, TENSOR_TYPE_TO_NP_TYPE=types)
    try:
        yield
    finally:
        del onnx.mapping
        vars(onnx).update(before)


def run_onnx(path: Path, trials: Sequence[Trial]) -> List[Outputs]:
    """Return ONNX Runtime's outputs of a file, for the inputs of each trial.

    Raises
    ------
    TrainerError
        ONNX Runtime rejects the file or the inputs.
    """
    runtime = require("onnxruntime", "onnx", "export")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return [session.run(None, inputs) for inputs, _ in trials]
    except Exception as error:  # ONNX Runtime's own classes differ between versions
        raise TrainerError(
            f"export: got an ONNX file that ONNX Runtime rejects: {reason_of(error)}; expected one that it runs. Export "
            "with a symbol prefix."
        ) from error


def open_axes(graph: ExportGraph, wanted: Optional[Sequence[Group]]) -> List[Optional[OpenAxes]]:
    """Return which axes may vary, the best choice first; None stands for one that the network does not allow.

    `wanted` are groups of axes that vary together, and the only choice. By default they are the first axis of all inputs; with
    recurrent layers, also the second one, because these two hold the batch and the steps; then some of these, and none.
    """
    tried = [wanted or []]
    if wanted is None:
        firsts = [(name, 0) for name in graph.inputs]
        seconds = [(name, 1) for name, value in graph.inputs.items() if value.ndim > 1]
        tried = [[firsts, seconds], [firsts], [seconds], []] if _is_recurrent(graph) else [[firsts], []]
    found = [_shown(graph, one) for one in tried]
    if found == [None]:
        raise TrainerError(
            f"export: got dynamic_axes={short(wanted)}, some of which the network fixes; expected axes of any size. Leave "
            "those out."
        )
    return found


def _shown(graph: ExportGraph, groups: Sequence[Group]) -> Optional[OpenAxes]:
    """Return these groups of axes if the network accepts other sizes of them."""
    names: Axes = {}
    for group in groups:
        name, axis = group[0]
        called = "batch" if len(groups) == 1 and axis == 0 and not _is_recurrent(graph) else f"{name}_axis{axis}"
        for one, place in group:
            names.setdefault(one, {})[place] = called
    trials = []
    varies = any(axis for group in groups for _, axis in group)  # not the batch alone
    for more in (_MORE if varies else _MORE[:1]) if names else ():
        inputs = {}
        for name, value in graph.trials[-1][0].items():
            for axis in names.get(name, {}):
                size = value.shape[axis]
                value = np.take(value, np.arange(size + more)[::-1] % size, axis=axis)
            inputs[name] = value
        try:
            if not (graph.is_np or _keeps_sizes(graph, inputs)):
                break
            trials.append((inputs, graph.run(inputs)))
        except Exception:  # whatever the network raises, it does not accept these sizes
            break
    return OpenAxes(names, trials) if trials or not names else None


def _keeps_sizes(graph: ExportGraph, inputs: Dict[str, np.ndarray]) -> bool:
    """Return whether each Reshape has as many values as it reads: MXNet does not check it, and would read beyond them."""
    shapes, nodes = shapes_in(graph.symbol, {**inputs, **graph.params}), graph.nodes()
    reads = [(node["name"], *node["inputs"][0][:2]) for node in nodes if node["op"] == "Reshape"]
    return all(np.prod(shapes[name][0]) == np.prod(shapes[nodes[source]["name"]][number]) for name, source, number in reads)


def _is_recurrent(graph: ExportGraph) -> bool:
    return any(node["op"] == "RNN" for node in graph.nodes())
