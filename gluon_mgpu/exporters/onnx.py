"""ONNX files: written by MXNet's converter, with the axes that may vary left open, and run by ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from ..checks import reason_of
from ..errors import TrainerError
from ..runtime.environment import require
from .graph import ExportGraph, in_legacy_mode, shapes_in
from .mx2onnx_repair import IR_VERSION, OPSET, prepared, repaired

Axes = Dict[str, Dict[int, str]]  # by input: the axes whose sizes may differ from the sample's, with their names
Group = Sequence[Tuple[str, int]]  # axes that vary together: inputs and numbers of axes
_MOST_ALIKE = 6  # axes of one size that are tried in all combinations


@dataclass(frozen=True)
class OpenAxes:
    """The axes of a graph's inputs whose sizes may differ from the sample's, as the network has shown.

    Attributes
    ----------
    names : dict of str to dict of int to str
        By input and axis; axes of one name have one size.
    inputs : dict of str to numpy.ndarray
        The sample with one more along each of these axes.
    outputs : list of numpy.ndarray
        The network's, for these inputs.
    """

    names: Axes
    inputs: Dict[str, np.ndarray]
    outputs: List[np.ndarray]


@in_legacy_mode
def write_onnx(operation: str, graph: ExportGraph, path: Path, axes: OpenAxes) -> None:
    """Write a graph as an ONNX file.

    Raises
    ------
    TrainerError
        An operator has no counterpart.
    MissingExtraError
        onnx is not installed.
    """
    onnx = require("onnx", "onnx", operation)
    symbol, params = prepared(graph)
    names = [name for name in symbol.list_inputs() if name in graph.inputs]
    shapes = [graph.inputs[name].shape for name in names]
    sizes = [tuple(axes.names.get(name, {}).get(i, size) for i, size in enumerate(graph.inputs[name].shape)) for name in names]
    try:
        with repaired(onnx, shapes_in(symbol, {**graph.inputs, **params}), is_np=graph.is_np) as converter:
            codes = [onnx.helper.np_dtype_to_tensor_dtype(graph.inputs[name].dtype) for name in names]
            arrays = {name: mx.nd.array(value, dtype=value.dtype) for name, value in params.items()}
            heads = list(converter.get_outputs(symbol, arrays, shapes, None, codes)[1])
            options = {"opset_version": OPSET, "dynamic": True, "dynamic_input_shapes": sizes}
            made = converter().create_onnx_graph_proto(symbol, arrays, shapes, codes, **options)
    except TrainerError:
        raise
    except Exception as error:  # MXNet's converter raises errors of many kinds
        raise TrainerError(
            f"{operation}: got a network that MXNet cannot convert to ONNX: {reason_of(error)}; expected operators with a "
            "counterpart. Replace that layer, or export with a symbol prefix."
        ) from error
    _clean(onnx, made, graph, axes, heads)
    imports = [onnx.helper.make_opsetid("", OPSET)]
    model = onnx.helper.make_model(made, opset_imports=imports, ir_version=IR_VERSION, producer_name="gluon_mgpu")
    path.write_bytes(model.SerializeToString())


def run_onnx(operation: str, path: Path, inputs: Dict[str, np.ndarray]) -> List[np.ndarray]:
    """Return ONNX Runtime's outputs of a file.

    Raises
    ------
    TrainerError
        ONNX Runtime rejects the file or the inputs.
    """
    runtime = require("onnxruntime", "onnx", operation)
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found: List[np.ndarray] = session.run(None, inputs)
    except Exception as error:  # ONNX Runtime's own classes differ between versions
        raise TrainerError(
            f"{operation}: got an ONNX file that ONNX Runtime rejects: {reason_of(error)}; expected one that it runs. Export "
            "with a symbol prefix."
        ) from error
    return found


def open_axes(graph: ExportGraph, wanted: Optional[Sequence[Group]] = None) -> List[OpenAxes]:
    """Return which axes may vary, the best choice first, the last one none.

    `wanted` are groups of axes that vary together. By default they are found by MXNet's shape inference, among the first axis of
    each input; with recurrent layers, among the first two, which hold the batch and the steps.
    """
    groups = _groups(graph) if wanted is None else wanted
    tried = [groups, groups[:1], []] if len(groups) > 1 else [groups, []] if groups else [[]]
    return list(filter(None, (_shown(graph, one) for one in tried)))


@in_legacy_mode
def _groups(graph: ExportGraph) -> List[Group]:
    """Return groups of axes, each of which vary together."""
    symbol, params = prepared(graph)
    places = (0, 1) if _is_recurrent(graph) else (0,)
    rest = [(name, axis) for name, value in graph.inputs.items() for axis in places if axis < value.ndim]
    groups: List[Group] = []
    while rest:
        first = rest[0]
        alike = [one for one in rest[1:] if _size(graph, one) == _size(graph, first)][:_MOST_ALIKE]
        choices = [(first, *others) for count in range(len(alike), -1, -1) for others in combinations(alike, count)]
        found = next((group for group in choices if _infers(symbol, graph, params, group)), ())
        groups += [found] if found else []
        rest = [one for one in rest if one not in (found or (first,))]
    return groups


def _shown(graph: ExportGraph, groups: Sequence[Group]) -> Optional[OpenAxes]:
    """Return these groups of axes if the network accepts other sizes of them."""
    names: Axes = {}
    for group in groups:
        name, axis = group[0]
        called = "batch" if len(groups) == 1 and axis == 0 and not _is_recurrent(graph) else f"{name}_axis{axis}"
        for one, place in group:
            names.setdefault(one, {})[place] = called
    inputs = {}
    for name, value in graph.inputs.items():
        for axis in names.get(name, {}):
            value = np.take(value, [*range(value.shape[axis] - 1, -1, -1), 0], axis=axis)
        inputs[name] = value
    try:
        return OpenAxes(names, inputs, graph.run(inputs) if names else graph.outputs)
    except Exception:  # whatever the network raises, it does not accept these sizes
        return None


def _is_recurrent(graph: ExportGraph) -> bool:
    return any(node["op"] == "RNN" for node in graph.nodes())


def _size(graph: ExportGraph, one: Tuple[str, int]) -> int:
    return int(graph.inputs[one[0]].shape[one[1]])


def _infers(symbol: Any, graph: ExportGraph, params: Dict[str, np.ndarray], group: Group) -> bool:
    shapes = {name: list(value.shape) for name, value in {**graph.inputs, **params}.items()}
    for name, axis in group:
        shapes[name][axis] += 1
    try:
        symbol.infer_shape_partial(**{name: tuple(shape) for name, shape in shapes.items()})  # `infer_shape` prints its errors
    except mx.MXNetError:
        return False
    return True


def _clean(onnx: Any, made: Any, graph: ExportGraph, axes: OpenAxes, heads: List[str]) -> None:
    """Remove values that no node reads, list data as the only inputs, and put the outputs in order, with their fixed sizes."""
    read = {name for node in made.node for name in node.input} | set(heads)
    types = {one.name: one.type.tensor_type.elem_type for one in made.output}
    outputs = []
    for name, first, second in zip(heads, graph.outputs, axes.outputs):
        sizes = [size if size == moved else None for size, moved in zip(first.shape, second.shape)]
        outputs.append(onnx.helper.make_tensor_value_info(name, types[name], sizes))
    inputs = [one for one in made.input if one.name in graph.inputs]
    for field, kept in (
        (made.initializer, [one for one in made.initializer if one.name in read]),
        (made.input, inputs),
        (made.output, outputs),
    ):
        del field[:]
        field.extend(kept)
