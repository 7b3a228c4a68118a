"""A graph for conversion to ONNX: legacy operators, each with its own name, and recurrent parameters as one array."""

from __future__ import annotations

import json
from itertools import chain, count
from typing import Any, Dict, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import CachedOp

from ..errors import TrainerError
from .sampled_graph import ExportGraph, legacy_mode

Node = Dict[str, Any]

# Operators for np arrays, and those for legacy arrays that compute the same.
_BINARY = {"add": "add", "subtract": "sub", "multiply": "mul", "true_divide": "div", "power": "power"}
_SCALAR = {"add": "plus", "subtract": "minus", "rsubtract": "rminus", "multiply": "mul", "true_divide": "div"}
_SCALAR.update({"rtrue_divide": "rdiv", "power": "power", "rpower": "rpower"})
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
    **{"_np_copy": "_copy", "_npi_arange": "_arange"},
    **{f"_npi_{name}": name for name in ("argmax", "argmin", "expm1", "log1p")},
    **{f"_npi_{name}": f"broadcast_{legacy}" for name, legacy in _COMPARISON.items()},
    **{f"_npi_{name}_scalar": f"_{legacy}_scalar" for name, legacy in _COMPARISON.items()},
    **{f"_{legacy}": f"broadcast_{legacy}" for legacy in _COMPARISON.values()},
}
_ATTRIBUTES = {"_npi_concatenate": ("axis", "dim"), "_np_reshape": ("newshape", "shape"), "_npx_reshape": ("newshape", "shape")}
_UNSET = ("", "None", "[]", "C", "NCW")  # what converters do by themselves; of layouts, they know the names of longer ones
_OTHERWISE = (("_linalg_gemm2", "axis", "-2"), ("_contrib_ROIAlign", "sample_ratio", "-1"))  # and of these, the default
_SHAPE_CODES = {-2: 0, -4: -2, -5: -3, -6: -4}  # of npx.reshape, and of Reshape


@legacy_mode()
def prepared(traced: ExportGraph) -> Tuple[Any, Dict[str, np.ndarray]]:
    """Return a graph of legacy operators, where each recurrent one reads its parameters as one array, and its values.

    Raises
    ------
    TrainerError
        The parameters of a recurrent layer depend on the data.
    """
    graph = json.loads(traced.symbol.tojson())
    graph.get("attrs", {}).pop("is_np_shape", None)
    for node in graph["nodes"]:
        _rename(node)
        if node["op"] != "null":
            _complete(node)
    _name_apart(graph)
    values = dict(traced.params)
    for node in [node for node in graph["nodes"] if node["op"] == "RNN"]:
        index, name = node["inputs"][1][0], f"{node['name']}_parameters"
        values[name] = _value(graph, index, values)
        graph["nodes"][index] = {"op": "null", "name": name, "inputs": []}
    symbol = mx.sym.load_json(json.dumps(_with_arguments(graph), ensure_ascii=False))
    return symbol, {name: value for name, value in values.items() if name in symbol.list_inputs()}


def _name_apart(graph: Dict[str, Any]) -> None:
    """Give each node and each output of a graph its own name. Outputs that repeat, or are inputs, are copied.

    A layer that is called twice gives its nodes the same names, and MXNet's converter finds outputs by their names.
    """
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


def _rename(node: Node) -> None:
    """Make a node an operator for legacy arrays."""
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


def _complete(node: Node) -> None:
    """Write all attributes of a node, and yes and no as True and False: MXNet's converters assume other defaults and forms."""
    found = mx.operator.get_operator_arguments(node["op"])
    kinds = dict(zip(found.names, found.types))
    values = {name: kind.rpartition("default=")[2].strip("'") for name, kind in kinds.items() if "default=" in kind}
    values.update(node.get("attrs", {}))
    node["attrs"] = {
        name: str(value in ("1", "True", "true")) if kinds.get(name, "").startswith("boolean") else value
        for name, value in values.items()
        if value not in _UNSET and (node["op"], name, value) not in _OTHERWISE
    }


def _with_arguments(graph: Dict[str, Any]) -> Dict[str, Any]:
    variables = [i for i, node in enumerate(graph["nodes"]) if node["op"] == "null"]
    return {"nodes": graph["nodes"], "arg_nodes": variables, "heads": graph["heads"], "attrs": graph.get("attrs", {})}


def _value(graph: Dict[str, Any], index: int, params: Dict[str, np.ndarray]) -> np.ndarray:
    """Return the value of a node that depends on parameters alone."""
    symbol = mx.sym.load_json(json.dumps({**_with_arguments(graph), "heads": [[index, 0, 0]]}, ensure_ascii=False))
    missing = [name for name in symbol.list_inputs() if name not in params]
    if missing:
        raise TrainerError(
            f"export: got a recurrent layer whose weights depend on {', '.join(missing[:3])}; expected parameters. Replace that "
            "layer, or export with a symbol prefix."
        )
    with autograd.pause(train_mode=False):
        return CachedOp(symbol)(*(mx.nd.array(params[name]) for name in symbol.list_inputs())).asnumpy()
