"""PyTorch: a network's values under the names of PyTorch's layers, and its graph run by PyTorch with them."""

from __future__ import annotations

import re
from ast import literal_eval
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
from mxnet import gluon
from mxnet.gluon import nn, rnn
from mxnet.gluon.nn.basic_layers import _BatchNorm
from mxnet.gluon.rnn.rnn_layer import _RNNLayer

from ..errors import first_line
from ..models.seq2seq.recurrence import Recurrence
from .graph import ExportGraph, in_legacy_mode
from .mx2onnx_repair import legacy_graph

_NORMS = (_BatchNorm, nn.LayerNorm, nn.InstanceNorm)  # MXNet's GroupNorm has values for groups, PyTorch's for channels
_CELLS = (rnn.RNNCell, rnn.LSTMCell, rnn.GRUCell)
_OF_NORM = {"gamma": "weight", "beta": "bias"}
_GATES = {"i2h": "ih", "h2h": "hh", "h2r": "hr"}


class UnknownLayerError(Exception):
    """A layer whose counterpart in PyTorch is not known here."""


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
    operators = _operators(torch)
    results: List[List[Any]] = []
    with torch.no_grad():
        for node in nodes:
            name, kind, attrs = node["name"], node["op"], node.get("attrs", {})
            if kind == "null":
                value = state[keys[name]] if name in keys else torch.from_numpy(graph.inputs[name].copy())
                results.append([value])
            elif kind == "RNN":
                results.append(_run_recurrent(torch, nodes, node, results, state, keys))
            elif kind in ("_zeros", "_rnn_param_concat"):
                results.append([None])  # the recurrent layer has its own
            elif kind in operators:
                inputs = [results[index][output] for index, output, *_ in node["inputs"]]
                if any(value is None for value in inputs):
                    raise UnknownLayerError(f"{kind} of a constant")
                try:
                    found = operators[kind]({key: _parsed(value) for key, value in attrs.items()}, *inputs)
                except (RuntimeError, TypeError, ValueError) as error:
                    raise UnknownLayerError(f"{kind}, which PyTorch rejects: {first_line(error)}") from error
                results.append(list(found) if isinstance(found, (list, tuple)) else [found])
            else:
                raise UnknownLayerError(f"the operator {kind}")
        return [results[index][output].numpy() for index, output, *_ in described["heads"]]


def _run_recurrent(
    torch: Any, nodes: List[Dict[str, Any]], node: Dict[str, Any], results: List[Any], state: Dict[str, Any], keys: Dict[str, str]
) -> List[Any]:
    """Return the outputs of PyTorch's layer that has these parameters."""
    attrs = {key: _parsed(value) for key, value in node["attrs"].items()}
    if attrs.get("use_sequence_length") or attrs.get("projection_size") or attrs.get("lstm_state_clip_min") is not None:
        raise UnknownLayerError("a recurrent layer with lengths, projection or clipping")
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
    options = {"nonlinearity": mode[len("rnn_") :]} if kind is torch.nn.RNN else {}
    made = kind(
        data.shape[2], attrs["state_size"], attrs.get("num_layers", 1), bidirectional=bool(attrs.get("bidirectional")), **options
    )
    made.load_state_dict(own)  # raises for other names or shapes
    first = None if any(value is None for value in begins) else tuple(begins) if mode == "lstm" else begins[0]
    output, last = made.eval()(data, first)
    return [output, *(last if mode == "lstm" else (last,))]


def _parsed(text: Any) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _pooling(torch: Any, attrs: Dict[str, Any], x: Any) -> Any:
    F, axes = torch.nn.functional, x.dim() - 2
    kind = attrs.get("pool_type", "max")
    if kind not in ("max", "avg"):
        raise UnknownLayerError(f"pooling of type {kind}")
    if attrs.get("global_pool"):
        dims = tuple(range(2, x.dim()))
        return x.amax(dims, keepdim=True) if kind == "max" else x.mean(dims, keepdim=True)
    _check_layout(attrs)
    options = {
        "stride": attrs.get("stride", 1),
        "padding": attrs.get("pad", 0),
        "ceil_mode": attrs.get("pooling_convention") == "full",
    }
    if kind == "avg":
        options["count_include_pad"] = attrs.get("count_include_pad", True) is not False
    return getattr(F, f"{kind}_pool{axes}d")(x, attrs["kernel"], **options)


def _check_layout(attrs: Dict[str, Any]) -> None:
    if attrs.get("layout") not in (None, "None", "NCW", "NCHW", "NCDHW"):
        raise UnknownLayerError(f"a layer with the layout {attrs['layout']}")


def _flipped(x: Any, transposed: Any) -> Any:
    return x.transpose(1, 2) if transposed else x


def _operators(torch: Any) -> Dict[str, Callable[..., Any]]:
    """Return functions of an operator's attributes and inputs."""
    F = torch.nn.functional

    def convolution(a: Dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
        _check_layout(a)
        run = getattr(F, f"conv{x.dim() - 2}d")
        return run(x, weight, bias, a.get("stride", 1), a.get("pad", 0), a.get("dilate", 1), a.get("num_group", 1))

    def deconvolution(a: Dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
        _check_layout(a)
        run = getattr(F, f"conv_transpose{x.dim() - 2}d")
        more = (a.get("adj", 0), a.get("num_group", 1), a.get("dilate", 1))
        return run(x, weight, bias, a.get("stride", 1), a.get("pad", 0), *more)

    def dense(a: Dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
        return F.linear(x.flatten(1) if a.get("flatten", True) else x, weight, bias)

    def batch_norm(a: Dict[str, Any], x: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
        if a.get("axis", 1) != 1:
            raise UnknownLayerError(f"BatchNorm along axis {a['axis']}")
        return F.batch_norm(x, mean, var, gamma, beta, False, 0.0, a.get("eps", 1e-3))

    def layer_norm(a: Dict[str, Any], x: Any, gamma: Any, beta: Any) -> Any:
        if a.get("axis", -1) not in (-1, x.dim() - 1):
            raise UnknownLayerError(f"LayerNorm along axis {a['axis']}")
        return F.layer_norm(x, x.shape[-1:], gamma, beta, a.get("eps", 1e-5))

    def activation(a: Dict[str, Any], x: Any) -> Any:
        named = {"relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softrelu": F.softplus, "softsign": F.softsign}
        return named[a["act_type"]](x)

    def leaky(a: Dict[str, Any], x: Any, alpha: Any = None) -> Any:
        kind, slope = a.get("act_type", "leaky"), a.get("slope", 0.25)
        if kind == "prelu":
            return F.prelu(x, alpha)
        named: Dict[str, Callable[[], Any]] = {
            "leaky": lambda: F.leaky_relu(x, slope),
            "elu": lambda: F.elu(x, slope),
            "selu": lambda: F.selu(x),
            "gelu": lambda: F.gelu(x),
        }
        if kind not in named:
            raise UnknownLayerError(f"LeakyReLU of type {kind}")
        return named[kind]()

    def reshape(a: Dict[str, Any], x: Any) -> Any:
        shape = a["shape"] if isinstance(a["shape"], tuple) else (a["shape"],)
        if min(shape) < -1 or a.get("reverse"):
            raise UnknownLayerError(f"reshape to {shape}")
        return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])

    def reduced(kind: str) -> Callable[..., Any]:
        def run(a: Dict[str, Any], x: Any) -> Any:
            axis: Optional[Any] = a.get("axis")
            if a.get("exclude"):
                raise UnknownLayerError(f"{kind} with exclude=True")
            axes = tuple(range(x.dim())) if axis in (None, (), "None") else axis
            return getattr(x, kind)(axes, keepdim=bool(a.get("keepdims", False)))

        return run

    def split(a: Dict[str, Any], x: Any) -> Any:
        parts = x.chunk(a["num_outputs"], a.get("axis", 1))
        return [part.squeeze(a.get("axis", 1)) for part in parts] if a.get("squeeze_axis") else parts

    def unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda a, x: function(x)

    def binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        return lambda a, x, y: function(x, y)

    def scalar(function: Callable[[Any, float], Any]) -> Callable[..., Any]:
        return lambda a, x: function(x, float(a["scalar"]))

    arithmetic = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}
    pairs = {f"{kind}_{name}": binary(f) for kind in ("elemwise", "broadcast") for name, f in arithmetic.items()}
    names = ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "square", "abs", "negative", "erf")
    return {
        **pairs,
        **{name: unary(getattr(torch, name)) for name in names},
        **{name: unary(lambda x: x) for name in ("Dropout", "_copy", "identity", "BlockGrad")},
        **{"mean": reduced("mean"), "sum": reduced("sum"), "max": reduced("amax"), "min": reduced("amin")},
        "Convolution": convolution,
        "Deconvolution": deconvolution,
        "FullyConnected": dense,
        "BatchNorm": batch_norm,
        "LayerNorm": layer_norm,
        "InstanceNorm": lambda a, x, g, b: F.instance_norm(x, None, None, g, b, eps=a.get("eps", 1e-3)),
        "Embedding": lambda a, x, weight: F.embedding(x.long(), weight),
        "Pooling": lambda a, x: _pooling(torch, a, x),
        "Activation": activation,
        "LeakyReLU": leaky,
        "Flatten": lambda a, x: x.flatten(1),
        "Reshape": reshape,
        "Concat": lambda a, *xs: torch.cat(xs, a.get("dim", 1)),
        "stack": lambda a, *xs: torch.stack(xs, a.get("axis", 0)),
        "SwapAxis": lambda a, x: x.swapaxes(a.get("dim1", 0), a.get("dim2", 0)),
        "transpose": lambda a, x: x.permute(a.get("axes") or tuple(range(x.dim()))[::-1]),
        "expand_dims": lambda a, x: x.unsqueeze(a["axis"]),
        "SliceChannel": split,
        "slice_axis": lambda a, x: x.movedim(a["axis"], 0)[slice(a["begin"], a["end"])].movedim(0, a["axis"]),
        "batch_dot": lambda a, x, y: torch.bmm(_flipped(x, a.get("transpose_a")), _flipped(y, a.get("transpose_b"))),
        "softmax": lambda a, x: torch.softmax(x, a.get("axis", -1)),
        "log_softmax": lambda a, x: torch.log_softmax(x, a.get("axis", -1)),
        "clip": lambda a, x: x.clamp(a["a_min"], a["a_max"]),
        "_plus_scalar": scalar(lambda x, y: x + y),
        "_minus_scalar": scalar(lambda x, y: x - y),
        "_rminus_scalar": scalar(lambda x, y: y - x),
        "_mul_scalar": scalar(lambda x, y: x * y),
        "_div_scalar": scalar(lambda x, y: x / y),
        "_rdiv_scalar": scalar(lambda x, y: y / x),
        "_power_scalar": scalar(lambda x, y: x**y),
    }
