"""MXNet's own converter to ONNX, repaired while it runs: for today's `onnx`, for np arrays, for recurrent layers.

MXNet 1.9.1 imports `onnx.mapping`, which onnx 1.19 removed, and then reports that onnx is not installed. Its converters write
opset 13 at most, but it declares and checks the newest opset that `onnx` knows.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, count
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Tuple

import mxnet as mx
import numpy as np

from ..errors import MissingExtraError, TrainerError
from .graph import ExportGraph, evaluate, in_legacy_mode
from .onnx_boxes import convert_box_nms
from .onnx_operators import operators
from .recurrent import cells_of

OPSET = 13  # the newest that MXNet's converters know
IR_VERSION = 8  # of files, for ONNX Runtime 1.10 and later

Node = Dict[str, Any]
_TYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")


@contextmanager
def repaired(onnx: Any, shapes: Dict[str, List[Tuple[int, ...]]], *, is_np: bool) -> Iterator[Any]:
    """Yield MXNet's `MXNetGraph` with what it misses; `onnx` and MXNet are as before afterwards.

    Parameters
    ----------
    onnx : module
    shapes : dict of str to list of tuple of int
        Of each node's outputs, by its name.
    is_np : bool
        Whether the network takes np arrays.

    Raises
    ------
    MissingExtraError
        onnx was installed after MXNet was imported.
    """
    MXNetGraph = import_module("mxnet.onnx.mx2onnx._export_onnx").MXNetGraph
    if OPSET not in MXNetGraph.registry_:
        raise MissingExtraError(
            "export: got an MXNet that was imported before onnx was installed; expected onnx first, when MXNet registers its "
            "converters. Start Python again."
        )
    codes = {np.dtype(name): onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in _TYPES}
    mapping = ModuleType("onnx.mapping")
    mapping.NP_TYPE_TO_TENSOR_TYPE = codes  # type: ignore[attr-defined]
    mapping.TENSOR_TYPE_TO_NP_TYPE = {code: dtype for dtype, code in codes.items()}  # type: ignore[attr-defined]
    context = onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = IR_VERSION, {"": OPSET}
    check = onnx.checker.check_graph
    registry = MXNetGraph.registry_
    converters = {**registry[OPSET], **_converters(onnx, {**registry[OPSET - 1], **registry[OPSET]}, shapes, is_np)}
    changes: List[Tuple[Any, str, Any]] = [
        (onnx, "mapping", mapping),
        (onnx.checker, "check_graph", lambda graph: check(graph, context)),
        (MXNetGraph, "registry_", {**registry, OPSET: converters}),
    ]
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield MXNetGraph
    finally:
        for owner, name, value in before:
            delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)


_ABSENT = object()

# Operators for np arrays, and those for legacy arrays that compute the same.
_BINARY = {"add": "add", "subtract": "sub", "multiply": "mul", "true_divide": "div", "power": "power", "maximum": "maximum"}
_SCALAR = {"add": "plus", "subtract": "minus", "rsubtract": "rminus", "multiply": "mul", "true_divide": "div"}
_SCALAR.update({"rtrue_divide": "rdiv", "power": "power", "rpower": "rpower", "maximum": "maximum", "minimum": "minimum"})
_UNARY = ("exp", "log", "sqrt", "square", "tanh", "sin", "cos", "tan", "negative", "reciprocal", "ceil", "floor", "log2")
_COMPARISON = {"equal": "equal", "not_equal": "not_equal", "greater": "greater", "greater_equal": "greater_equal"}
_COMPARISON.update({"less": "lesser", "less_equal": "lesser_equal"})
_LEGACY = {
    **{f"_npi_{name}": f"broadcast_{legacy}" for name, legacy in _BINARY.items()},
    **{f"_npi_{name}_scalar": f"_{legacy}_scalar" for name, legacy in _SCALAR.items()},
    **{f"_npi_{name}": name for name in (*_UNARY, "mean", "stack")},
    **{f"_np_{name}": name for name in ("max", "min", "sum", "prod", "squeeze", "transpose")},
    **{f"_npx_{name}": name for name in ("relu", "sigmoid")},
    **{"_npi_absolute": "abs", "_npi_concatenate": "Concat", "_np_reshape": "Reshape", "_npx_reshape": "Reshape"},
    **{"_npi_minimum": "broadcast_minimum", "_np_copy": "_copy", "_npi_arange": "_arange"},
    **{f"_npi_{name}": name for name in ("argmax", "argmin", "expm1", "log1p")},
    **{f"_npi_{name}": f"broadcast_{legacy}" for name, legacy in _COMPARISON.items()},
    **{f"_npi_{name}_scalar": f"_{legacy}_scalar" for name, legacy in _COMPARISON.items()},
    **{f"_{legacy}": f"broadcast_{legacy}" for legacy in _COMPARISON.values()},
}
_ATTRIBUTES = {"_npi_concatenate": ("axis", "dim"), "_np_reshape": ("newshape", "shape"), "_npx_reshape": ("newshape", "shape")}
_SHAPE_CODES = {-2: 0, -4: -2, -5: -3, -6: -4}  # of npx.reshape, and of Reshape


@in_legacy_mode
def prepared(traced: ExportGraph) -> Tuple[Any, Dict[str, np.ndarray]]:
    """Return a graph of legacy operators, where each recurrent one reads its parameters as one array, and its values.

    Raises
    ------
    TrainerError
        The parameters of a recurrent layer depend on the data.
    """
    graph = legacy_graph(traced.symbol)
    values = dict(traced.params)
    for node in [node for node in graph["nodes"] if node["op"] == "RNN"]:
        index = node["inputs"][1][0]
        source = graph["nodes"][index]
        if source["op"] == "null" and source["name"] in values:
            continue
        name = f"{node['name']}_parameters"
        values[name] = _value(graph, index, traced.params)
        graph["nodes"][index] = {"op": "null", "name": name, "inputs": []}
    symbol = mx.sym.load_json(json.dumps(_with_arguments(graph)))
    return symbol, {name: value for name, value in values.items() if name in symbol.list_inputs()}


def _name_apart(graph: Dict[str, Any]) -> None:
    """Give each node and each output of a graph its own name. Outputs that repeat, or are inputs, are copied."""
    nodes, heads = graph["nodes"], graph["heads"]
    taken = {node["name"] for node in nodes}
    seen = {node["name"] for node in nodes if node["op"] == "null"}

    def free(name: str) -> str:
        found = next(one for one in chain([name], (f"{name}_use{i}" for i in count(2))) if one not in taken)
        taken.add(found)
        return found

    for node in nodes:
        if node["op"] != "null":
            node["name"] = free(node["name"]) if node["name"] in seen else node["name"]
            seen.add(node["name"])
    for i, head in enumerate(heads):
        source = nodes[head[0]]
        if source["op"] == "null" or source["op"].startswith("_np") or head in heads[:i]:  # or whose output has a name of its own
            nodes.append({"op": "_copy", "name": free(f"{source['name']}_output"), "inputs": [head]})
            heads[i] = [len(nodes) - 1, 0, 0]


def legacy_graph(symbol: Any) -> Dict[str, Any]:
    """Return a graph as MXNet writes it to a file, with operators for legacy arrays, each with its own name.

    A layer that is called twice gives its nodes the same names, and MXNet's converter finds outputs by their names.
    """
    graph: Dict[str, Any] = json.loads(symbol.tojson())
    graph.get("attrs", {}).pop("is_np_shape", None)
    for node in graph["nodes"]:
        _rename(node)
    _name_apart(graph)
    return graph


def _rename(node: Node) -> None:
    old = node["op"]
    if old not in _LEGACY:
        return
    attributes = node.setdefault("attrs", {})
    node["op"] = _LEGACY[old]
    if old in _ATTRIBUTES:
        theirs, ours = _ATTRIBUTES[old]
        attributes[ours] = attributes.pop(theirs)
    if old == "_npx_reshape":
        codes = [int(part) for part in attributes["shape"].strip("()").split(",") if part.strip()]
        attributes["shape"] = str(tuple(_SHAPE_CODES.get(code, code) for code in codes))
    if node["op"] == "Concat":
        attributes["num_args"] = str(len(node["inputs"]))
    for name in [name for name in attributes if name in ("initial", "dtype", "order", "a_min", "axes")]:
        if attributes[name] in ("None", "C"):
            del attributes[name]


def _with_arguments(graph: Dict[str, Any]) -> Dict[str, Any]:
    variables = [i for i, node in enumerate(graph["nodes"]) if node["op"] == "null"]
    return {"nodes": graph["nodes"], "arg_nodes": variables, "heads": graph["heads"], "attrs": graph.get("attrs", {})}


def _value(graph: Dict[str, Any], index: int, params: Dict[str, np.ndarray]) -> np.ndarray:
    """Return the value of a node that depends on parameters alone."""
    symbol = mx.sym.load_json(json.dumps({**_with_arguments(graph), "heads": [[index, 0, 0]]}))
    missing = [name for name in symbol.list_inputs() if name not in params]
    if missing:
        raise TrainerError(
            f"export: got a recurrent layer whose weights depend on {', '.join(missing[:3])}; expected parameters. Replace that "
            "layer, or export with a symbol prefix."
        )
    return evaluate(symbol, {name: mx.nd.array(params[name]) for name in symbol.list_inputs()})[0]


def _means(size: int, parts: int) -> np.ndarray:
    """Return the matrix, shape (parts, size), of the means over parts of about one size; neighbours may overlap by one."""
    first, places = np.arange(parts), np.arange(size)
    begin, end = first * size // parts, -((first + 1) * size // -parts)
    inside = (begin[:, None] <= places) & (places < end[:, None])
    return inside / (end - begin)[:, None]


def _converters(
    onnx: Any, older: Dict[str, Callable[..., Any]], shapes: Dict[str, List[Tuple[int, ...]]], is_np: bool
) -> Dict[str, Callable[..., Any]]:
    """Return functions for operators that MXNet's own functions cannot convert, or convert for some sizes only."""
    make = onnx.helper.make_node
    mxnet13 = import_module("mxnet.onnx.mx2onnx._op_translations._op_translations_opset13")

    def constant(graph: Dict[str, Any], name: str, value: np.ndarray) -> str:
        graph["initializer"].append(onnx.numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def variable(node: Node, **graph: Any) -> Any:
        if graph["is_input"]:
            return older["null"](node, **graph)
        value = graph["weights"][node["name"]]  # MXNet makes a Python number of each element, which takes minutes
        constant(graph, node["name"], value)
        code = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        return [onnx.helper.make_tensor_value_info(node["name"], code, value.shape)], (value.dtype,)

    def recurrent(node: Node, **graph: Any) -> Tuple[List[Any], List[Any]]:
        name, inputs, attrs = mxnet13.get_inputs(node, graph)
        dtype = mxnet13.get_input_dtypes(node, graph)[0]
        cells = cells_of(attrs, graph["weights"][inputs[1]])
        sources = [graph["mx_graph"][index]["op"] for index, *_ in node["inputs"]]
        num_states = 2 if attrs["mode"] == "lstm" else 1
        begins = [inputs[i] if sources[i] != "_zeros" else None for i in range(2, 2 + num_states)]  # ONNX begins with zeros
        found, nodes, lasts = inputs[0], [], [[] for _ in begins]  # type: ignore[var-annotated]
        layers = [[cell for cell in cells if cell.layer == i] for i in range(int(attrs.get("num_layers", 1)))]
        for i, layer in enumerate(layers):
            at = f"{name}_layer{i}"
            arrays = [np.stack(parts) for parts in zip(*(cell.for_onnx() for cell in layer))]
            read = [found, *(constant(graph, f"{at}_{part}", array) for part, array in zip("WRB", arrays)), ""]
            for j, begin in enumerate(begins):
                read.append(f"{at}_first{j}" if begin is not None else "")
                if begin is not None:
                    rows = constant(graph, f"{at}_rows{j}", np.arange(i * len(layer), (i + 1) * len(layer)))
                    nodes.append(make("Gather", [begin, rows], [read[-1]], axis=0))
            while not read[-1]:
                read.pop()
            outs = [f"{at}_all", *(f"{at}_last{j}" for j in range(len(begins)))]
            kind, options = layer[0].onnx_operator(len(layer))
            nodes.append(make(kind, read, outs, hidden_size=layer[0].hidden_size, **options))
            shape = constant(graph, f"{at}_shape", np.array([0, 0, -1]))
            nodes.append(make("Transpose", [outs[0]], [f"{at}_steps"], perm=[0, 2, 1, 3]))
            found = name if layer is layers[-1] else f"{at}_out"
            nodes.append(make("Reshape", [f"{at}_steps", shape], [found], name=found))
            for j, last in enumerate(outs[1:]):
                lasts[j].append(last)
        if attrs.get("state_outputs") not in ("True", "1"):
            return nodes, [dtype]
        for j, parts in enumerate(lasts):
            nodes.append(make("Concat", parts, [f"{name}{j + 1}"], name=f"{name}{j + 1}", axis=0))
        return nodes, [dtype] * (1 + len(begins))

    def last(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = mxnet13.get_inputs(node, graph)
        axis, reverse = int(attrs.get("axis", 0)), attrs.get("use_sequence_length", "False") in ("True", "1")
        number = constant(graph, f"{name}_number", np.array(0 if reverse else -1))
        read = f"{name}_reversed" if reverse else inputs[0]
        nodes = [make("Gather", [read, number], [name], name=name, axis=axis)]
        if reverse:  # what is last within its length comes first
            lengths = f"{name}_lengths"
            nodes.insert(0, make("ReverseSequence", [inputs[0], lengths], [read], time_axis=axis, batch_axis=1 - axis))
            nodes.insert(0, make("Cast", [inputs[1]], [lengths], to=onnx.TensorProto.INT64))
        return nodes

    def reshape(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = mxnet13.get_inputs(node, graph)
        codes = [int(part) for part in attrs["shape"].strip("([])").split(",") if part.strip()]
        if attrs.get("reverse") in ("True", "1") or not min(codes, default=0) < -1:
            return list(older["Reshape"](node, **graph))
        nodes, parts = [make("Shape", inputs[:1], [f"{name}_sizes"])], []  # type: ignore[var-annotated]

        def size(axis: int) -> str:
            nodes.append(
                make("Gather", [f"{name}_sizes", constant(graph, f"{name}_{axis}", np.array([axis]))], [f"{name}_size{axis}"])
            )
            return f"{name}_size{axis}"

        def fixed(number: int) -> str:
            return constant(graph, f"{name}_part{len(parts)}", np.array([number]))

        axis, rest = 0, iter(codes)  # the axis of the input that comes next
        for code in rest:
            if code == -2:  # all others
                ends = [constant(graph, f"{name}_{end}", np.array([at])) for end, at in (("from", axis), ("to", 2**31))]
                nodes.append(make("Slice", [f"{name}_sizes", *ends], [f"{name}_others"]))
                parts.append(f"{name}_others")
            elif code == -3:  # two become one
                nodes.append(make("Mul", [size(axis), size(axis + 1)], [f"{name}_product{axis}"]))
                parts.append(f"{name}_product{axis}")
                axis += 1
            elif code == -4:  # one becomes two
                parts += [fixed(next(rest)), f"{name}_second"]
                constant(graph, f"{name}_second", np.array([next(rest)]))
            else:
                parts.append(size(axis) if code == 0 else fixed(code))
            axis += 1
        nodes.append(make("Concat", parts, [f"{name}_wanted"], axis=0))
        return [*nodes, make("Reshape", [inputs[0], f"{name}_wanted"], [name], name=name)]

    def group_norm(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = mxnet13.get_inputs(node, graph)
        grouped = constant(graph, f"{name}_groups", np.array([0, int(attrs.get("num_groups", 1)), -1]))
        options = {"epsilon": float(attrs.get("eps", 1e-5))}
        return [  # MXNet has one gamma and beta for each group, not for each channel
            make("Shape", inputs[:1], [f"{name}_shape"]),
            make("Reshape", [inputs[0], grouped], [f"{name}_grouped"]),
            make("InstanceNormalization", [f"{name}_grouped", *inputs[1:]], [f"{name}_normal"], **options),
            make("Reshape", [f"{name}_normal", f"{name}_shape"], [name], name=name),
        ]

    def input_shape(node: Node, graph: Dict[str, Any], which: int = 0) -> Tuple[int, ...]:
        index, number, *_ = node["inputs"][which]
        return shapes[graph["mx_graph"][index]["name"]][number]

    def adaptive_pooling(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = mxnet13.get_inputs(node, graph)
        height, width = input_shape(node, graph)[2:]
        wanted = [int(part) for part in attrs.get("output_size", "").strip("()[]").split(",") if part.strip()] or [1]
        dtype = mxnet13.get_input_dtypes(node, graph)[0]
        rows = constant(graph, f"{name}_rows", _means(height, wanted[0]).astype(dtype))
        columns = constant(graph, f"{name}_columns", _means(width, wanted[-1]).T.astype(dtype))
        return [make("MatMul", [inputs[0], columns], [f"{name}_part"]), make("MatMul", [rows, f"{name}_part"], [name], name=name)]

    def box_nms(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = mxnet13.get_inputs(node, graph)
        return convert_box_nms(onnx, name, inputs[0], attrs, input_shape(node, graph), graph["initializer"])

    def without_layout(convert: Callable[..., Any]) -> Callable[..., Any]:
        def converted(node: Node, **graph: Any) -> Any:
            attrs = {key: value for key, value in node["attrs"].items() if (key, value) != ("layout", "NCW")}
            return convert({**node, "attrs": attrs}, **graph)

        return converted

    def same(kind: str) -> Callable[..., List[Any]]:
        def converted(node: Node, **graph: Any) -> List[Any]:
            name, inputs, _ = mxnet13.get_inputs(node, graph)
            return [make(kind, inputs, [name], name=name)]

        return converted

    # MXNet's converters accept 2-D and 3-D layouts by name, and compute any.
    layers = {kind: without_layout(older[kind]) for kind in ("Convolution", "Deconvolution", "Pooling")}
    simple = {"erf": "Erf", "sign": "Sign", "broadcast_maximum": "Max", "sinh": "Sinh", "cosh": "Cosh"}
    return {
        **operators(onnx, mxnet13, older, constant=constant, shape_of=input_shape, is_np=is_np),
        "null": variable,
        "Reshape": reshape,
        "RNN": recurrent,
        "GroupNorm": group_norm,
        "SequenceLast": last,
        "_contrib_box_nms": box_nms,
        "_contrib_AdaptiveAvgPooling2D": adaptive_pooling,
        **layers,
        **{name: same(kind) for name, kind in simple.items()},
    }
