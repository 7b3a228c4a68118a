"""PyTorch: a network's values under the names of PyTorch's layers, and its graph run by PyTorch with them."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn, rnn
from mxnet.gluon.nn.basic_layers import _BatchNorm
from mxnet.gluon.rnn.rnn_layer import _RNNLayer

from ..errors import first_line
from ..models.seq2seq.recurrence import Recurrence
from .graph import ExportGraph, in_legacy_mode, parsed, shapes_in
from .mx2onnx_repair import legacy_graph
from .torch_operators import UnknownLayerError, operators_of

_NORMS = (_BatchNorm, nn.LayerNorm, nn.InstanceNorm)  # MXNet's GroupNorm has values for groups, PyTorch's for channels
_CELLS = (rnn.RNNCell, rnn.LSTMCell, rnn.GRUCell)
_OF_NORM = {"gamma": "weight", "beta": "bias"}
_GATES = {"i2h": "ih", "h2h": "hh", "h2r": "hr"}


def torch_name(block: gluon.Block, name: str) -> str:
    """Return PyTorch's name of a layer's parameter; its own where PyTorch has no such layer.

    Gates and axes have the same order in both.

    Examples
    --------
    >>> torch_name(gluon.nn.BatchNorm(), "gamma"), torch_name(gluon.rnn.GRU(4), "r1_h2h_bias")
    ('weight', 'bias_hh_l1_reverse')
    """
    if isinstance(block, _NORMS):
        return _OF_NORM.get(name, name)
    if isinstance(block, nn.PReLU):
        return "weight"
    layered = re.fullmatch(r"(?:([lr])(\d+)_)?(i2h|h2h|h2r)_(weight|bias)", name)
    if layered and isinstance(block, (_RNNLayer, Recurrence, *_CELLS)):
        direction, layer, gates, kind = layered.groups()
        found = f"{kind}_{_GATES[gates]}"
        if not isinstance(block, _CELLS):
            found += f"_l{layer or 0}" + ("_reverse" if direction == "r" else "")
        return found
    return name


def state_of(net: gluon.Block, prefix: str = "") -> Dict[str, Tuple[str, np.ndarray]]:
    """Return each value of a network by its name in PyTorch, with the name of the parameter in MXNet's graphs."""
    state: Dict[str, Tuple[str, np.ndarray]] = {}
    for name, param in net._reg_params.items():
        value = param.list_data()[0].asnumpy()
        if isinstance(net, _BatchNorm) and name == "gamma" and net._kwargs["fix_gamma"]:
            value = np.ones_like(value)  # the layer ignores it
        state[prefix + torch_name(net, name)] = (param.name, value)
    if isinstance(net, _BatchNorm):
        state[f"{prefix}num_batches_tracked"] = ("", np.array(0, "int64"))
    for name, child in net._children.items():
        state.update(state_of(child, f"{prefix}{name}."))
    return state


@in_legacy_mode
def run_torch(torch: Any, graph: ExportGraph, state: Dict[str, Any], keys: Dict[str, str]) -> List[np.ndarray]:
    """Return what PyTorch computes for the graph's sample, with the values of a state dict.

    Parameters
    ----------
    torch : module
    graph : ExportGraph
    state : dict of str to torch.Tensor
    keys : dict of str to str
        The key of each parameter of the graph.

    Raises
    ------
    UnknownLayerError
        An operator has no counterpart here.
    """
    described = legacy_graph(graph.symbol)
    nodes = described["nodes"]
    operators = operators_of(torch)
    zeros = _zeros_of(described, graph)
    results: List[List[Any]] = []
    with torch.no_grad():
        for node in nodes:
            name, kind, attrs = node["name"], node["op"], node.get("attrs", {})
            if kind == "null":
                value = state[keys[name]] if name in keys else torch.from_numpy(graph.inputs[name].copy())
                results.append([value])
            elif kind == "RNN":
                results.append(_run_recurrent(torch, nodes, node, results, state, keys))
            elif kind == "_zeros":
                results.append([torch.from_numpy(zeros[name]) if name in zeros else None])
            elif kind == "_rnn_param_concat":
                results.append([None])  # the recurrent layer has its own
            elif kind in operators:
                inputs = [results[index][output] for index, output, *_ in node["inputs"]]
                if any(value is None for value in inputs):
                    raise UnknownLayerError(f"{kind} of a constant")
                try:
                    found = operators[kind]({key: parsed(value) for key, value in attrs.items()}, *inputs)
                except (RuntimeError, TypeError, ValueError) as error:
                    raise UnknownLayerError(f"{kind}, which PyTorch rejects: {first_line(error)}") from error
                results.append(list(found) if isinstance(found, (list, tuple)) else [found])
            else:
                raise UnknownLayerError(f"the operator {kind}")
        return [results[index][output].numpy() for index, output, *_ in described["heads"]]


def _zeros_of(described: Dict[str, Any], graph: ExportGraph) -> Dict[str, np.ndarray]:
    """Return the arrays of zeros of a graph, whose sizes may depend on the batch, by the names of their nodes."""
    names = [node["name"] for node in described["nodes"] if node["op"] == "_zeros"]
    shapes = shapes_in(mx.sym.load_json(json.dumps(described)), {**graph.inputs, **graph.params}) if names else {}
    return {name: np.zeros(shapes[name][0], "float32") for name in names if name in shapes}


def _run_recurrent(
    torch: Any, nodes: List[Dict[str, Any]], node: Dict[str, Any], results: List[Any], state: Dict[str, Any], keys: Dict[str, str]
) -> List[Any]:
    """Return the outputs of PyTorch's layer that has these parameters."""
    attrs = {key: parsed(value) for key, value in node["attrs"].items()}
    if attrs.get("use_sequence_length") or attrs.get("lstm_state_clip_min") is not None:
        raise UnknownLayerError("a recurrent layer with lengths or clipping")
    names, rest = [], [node["inputs"][1][0]]
    while rest:
        index = rest.pop()
        names += [nodes[index]["name"]] if nodes[index]["op"] == "null" else []
        rest += [one for one, *_ in nodes[index]["inputs"]]
    layers = {keys[name].rpartition(".")[0] for name in names if name in keys}
    if len(layers) != 1:
        raise UnknownLayerError("a recurrent operator with the parameters of several layers")
    (layer,) = layers
    own = {keys[name].rpartition(".")[2]: state[keys[name]] for name in names}
    data, *begins = (results[index][output] for index, output, *_ in (node["inputs"][0], *node["inputs"][2:]))
    mode = attrs["mode"]
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(mode, torch.nn.RNN)
    options: Dict[str, Any] = {"nonlinearity": mode[len("rnn_") :]} if kind is torch.nn.RNN else {}
    if attrs.get("projection_size"):
        options["proj_size"] = attrs["projection_size"]
    made = kind(
        data.shape[2], attrs["state_size"], attrs.get("num_layers", 1), bidirectional=bool(attrs.get("bidirectional")), **options
    )
    made.load_state_dict(own)  # raises for other names or shapes
    first = None if any(value is None for value in begins) else tuple(begins) if mode == "lstm" else begins[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that projections do not run in oneDNN
        output, last = made.eval()(data, first)
    return [output, *(last if mode == "lstm" else (last,))]
