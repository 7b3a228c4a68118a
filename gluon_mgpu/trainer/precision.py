"""Mixed precision: convolutions and fully connected layers in bfloat16 or float16, weights and gradients in float32."""

from __future__ import annotations

import ctypes
import json
from array import array
from functools import lru_cache, partial
from typing import Any, Dict, List, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.base import _LIB, SymbolHandle, c_array_buf, c_str_array, check_call, mx_uint, py_str
from mxnet.contrib.amp import amp
from mxnet.gluon.block import _flatten
from mxnet.ndarray.ndarray import _DTYPE_NP_TO_MX

from ..checks import one_of
from ..errors import DeviceError, TrainerError
from .parameters import blocks_of

PRECISIONS = ("fp32", "bf16", "fp16")

_DTYPES = {"bf16": amp.bfloat16, "fp16": np.float16}
_DEVICES = {"bf16": "cpu", "fp16": "gpu"}
_WHY = {
    "bf16": "MXNet 1.9.1 computes in bfloat16 on CPUs only",
    "fp16": "MXNet 1.9.1 on a CPU says 'FP16 gemm on cpu not implemented!'",
}
_OTHER = {"bf16": "fp16", "fp16": "bf16"}

# What MXNet's lists leave out, or get wrong. Its lists were made before np arrays.
_NP_EITHER = ("_npx_relu",)
_NP_WIDEST = ("_npi_add", "_npi_subtract", "_npi_multiply", "_npi_concatenate", "_npi_stack")
_JOINING = ("Concat", "concat")  # among those that take either type for bfloat16: of two types, they fail
# For bfloat16, those of MXNet's widest list that a CPU can compute in it, and that it pays for; `dot`, say, fails.
_SIGNS = ("add", "plus", "sub", "minus", "mul")
_ARITHMETIC = {f"{kind}_{sign}" for kind in ("", "elemwise", "broadcast") for sign in _SIGNS} | {"add_n", "stack"}
# Activations that MXNet's conditions do not name: softsign knows no bfloat16, and prelu's slope is a float32 parameter.
_MORE_VALUES = {"Activation": ["softsign"], "LeakyReLU": ["prelu", "rrelu"]}


def set_precision(net: gluon.Block, precision: str) -> None:
    """Let a network compute in another precision from now on, be it training, evaluating or predicting.

    ```
    float32 ─► cast │ convolution ─► BatchNorm ─► relu ─► add │ cast ─► mean, softmax, loss ...    each graph of the network
    weights ─► cast │         bfloat16 or float16             │                 float32
    ```

    Parameters, gradients, BatchNorm's statistics and the network's output stay float32: what is reduced, clipped, updated and
    saved is what it was. Which operators take part is decided by the lists of `mxnet.contrib.amp`; an operator that they do not
    know computes in float32, as do those of bfloat16 that a CPU cannot compute. Nothing is changed in MXNet itself: another
    network keeps its precision.

    Each hybridized part of the network is such a graph. In what is not hybridized, each layer with parameters of its own is one,
    and what lies between layers is float32.

    Parameters
    ----------
    net : gluon.Block
        The whole network, initialised; hybridized or not, now or later. Blocks that are added later need another call. What a
        plain `Block.forward` computes itself is float32.
    precision : str
        `"fp32"`, `"bf16"` on CPUs, `"fp16"` on GPUs. fp16 needs a `LossScaler`, which a `Trainer` brings.

    Raises
    ------
    DeviceError
        The network's devices cannot compute in it.
    TrainerError
        The precision is unknown, or the network is not one of initialised float32 parameters. Nothing was changed.

    Examples
    --------
    >>> net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    >>> net.initialize(mx.init.One(), ctx=mx.cpu())
    >>> x = mx.nd.array([[1.0, 1.00390625]])  # 1 + 2**-8, of which bfloat16 drops the last bit
    >>> net(x).asnumpy().tolist()
    [[2.00390625]]
    >>> set_precision(net, "bf16")
    >>> net(x).asnumpy().tolist(), net.weight.data().dtype.__name__
    ([[2.0]], 'float32')

    Source: Micikevicius et al., "Mixed precision training", 2018; MXNet 1.9.1, src/nnvm/low_precision_pass.cc.
    """
    _check(net, precision)
    changing = [block for block in _compiled_of(net) if vars(block).get("_precision", "fp32") != precision]
    if changing:
        mx.nd.waitall()  # what runs in a graph is not to be deleted with it
    for block in changing:
        _set(block, precision)


def precision_of(net: Any) -> str:
    """Return the precision that a network computes in: `"fp32"`, `"bf16"` or `"fp16"`.

    Parameters
    ----------
    net : gluon.Block
        Anything else, such as a dict of parameters, is `"fp32"`.

    Examples
    --------
    >>> precision_of(gluon.nn.Dense(1))
    'fp32'
    """
    blocks = _compiled_of(net) if isinstance(net, gluon.Block) else []
    return next((vars(block)["_precision"] for block in blocks if "_precision" in vars(block)), "fp32")


def _compiled_of(net: gluon.Block) -> List[gluon.HybridBlock]:
    """Return every block that is compiled, alone or as part of another, each once."""
    return [block for block in blocks_of(net) if isinstance(block, gluon.HybridBlock)]


def _check(net: Any, precision: Any) -> None:
    one_of("set_precision", "precision", precision, list(PRECISIONS), advice="fp32 is MXNet's own.")
    if not isinstance(net, gluon.Block):
        raise TrainerError(
            f"set_precision: got {type(net).__name__}; expected the network itself: precision is a matter of its operators. "
            "Pass the Block, not its parameters."
        )
    if precision == "fp32":
        return
    params = net.collect_params()
    for name, param in params.items():
        if param._data is None and not param._deferred_init:
            raise TrainerError(
                f"set_precision: got {name}, which is on no device; expected initialised parameters: devices differ in what "
                "they can compute. Call net.initialize(ctx=ctx) first."
            )
        if np.dtype(param.dtype) in (np.float16, np.float64):
            raise TrainerError(
                f"set_precision: got {name} of {np.dtype(param.dtype).name}; expected float32 parameters, which are cast on "
                "their way into an operator. Call net.cast('float32')."
            )
        unfit = [str(context) for context in param.list_ctx() if context.device_type != _DEVICES[precision]]
        if unfit:
            raise DeviceError(
                f"set_precision: got {precision} for a network on {', '.join(unfit)}; expected a {_DEVICES[precision].upper()}: "
                f"{_WHY[precision]}. Pass {_OTHER[precision]!r} or 'fp32' there."
            )
    if precision == "bf16" and params and not can_compute_bf16():
        raise DeviceError(
            "set_precision: got bf16 for a processor on which MXNet's oneDNN refuses it; expected one with AVX-512, or "
            "DNNL_MAX_CPU_ISA left alone. Pass 'fp32'."
        )


@lru_cache(maxsize=None)
def can_compute_bf16() -> bool:
    """Return whether MXNet can compute in bfloat16 on this machine's CPU: it tries, and waits for it, once."""
    with autograd.pause():
        one = mx.nd.amp_cast(mx.nd.ones((1, 1), ctx=mx.cpu()), dtype=amp.bfloat16)
        try:
            mx.nd.FullyConnected(one, one, num_hidden=1, no_bias=True).wait_to_read()
        except mx.MXNetError:
            return False
    return True


def _set(block: gluon.HybridBlock, precision: str) -> None:
    for name in ("_precision", "_get_graph", "hybrid_forward"):
        vars(block).pop(name, None)  # those of the class are used again
    block._clear_cached_op()
    if precision == "fp32":
        return
    block._precision = precision
    block._get_graph = partial(_graph_of, block)
    if block._reg_params:
        block.hybrid_forward = partial(_run, block)


def _graph_of(block: gluon.HybridBlock, *args: Any) -> Tuple[Any, Any]:
    """Stand for `HybridBlock._get_graph`, which is asked for what is compiled; the graph that is exported stays as it was."""
    inputs, graph = type(block)._get_graph(block, *args)
    arrays = [one.as_nd_ndarray() for one in _flatten(args, "input")[0] if one is not None]
    codes = {symbol.name: _DTYPE_NP_TO_MX[one.dtype] for symbol, one in zip(inputs, arrays)}
    return inputs, _addable(_reduced(graph, block._precision, codes), set(codes))


def _run(block: gluon.HybridBlock, F: Any, *args: Any, **params: Any) -> Any:
    """Stand for `hybrid_forward`: a layer that is called with arrays is run as a graph, because only graphs are reduced."""
    if F is mx.nd:
        return block._call_cached_op(*args)
    return type(block).hybrid_forward(block, F, *args, **params)


def _reduced(graph: Any, precision: str, codes: Dict[str, int]) -> Any:
    """Return a graph with casts around its operators, whose outputs are of the types that they were.

    Parameters
    ----------
    codes : dict of str to int
        MXNet's numbers of the types of its inputs; parameters are float32.

    Source: the call is that of MXNet 1.9.1, python/mxnet/contrib/amp/amp.py, convert_symbol, which takes no other operators than
    those of its lists.
    """
    low, full, widest, conditions = _operators(precision)
    values = [value for _, _, some in conditions for value in some]
    ends = list(np.cumsum([0] + [len(some) for _, _, some in conditions]))
    told = {**dict.fromkeys(graph.list_inputs(), _DTYPE_NP_TO_MX[np.float32]), **codes}
    handle = SymbolHandle()
    check_call(
        _LIB.MXReducePrecisionSymbol(
            graph.handle,
            ctypes.byref(handle),
            mx_uint(len(told)),
            c_array_buf(ctypes.c_int, array("i", told.values())),
            mx_uint(len(ends)),
            c_array_buf(ctypes.c_int, array("i", ends)),
            ctypes.byref(ctypes.c_int(_DTYPE_NP_TO_MX[_DTYPES[precision]])),
            ctypes.c_int(0),  # parameters stay float32
            *[mx_uint(len(some)) for some in (low, full, widest, conditions, [], [])],
            *[c_str_array(some) for some in (low, full, widest, [name for name, _, _ in conditions], [])],
            c_str_array([attribute for _, attribute, _ in conditions]),
            c_str_array(values),
            c_str_array([]),
            c_str_array(list(told)),
        )
    )
    reduced = mx.sym.Symbol(handle)
    return reduced.as_np_ndarray() if isinstance(graph, mx.sym.np._Symbol) else reduced


def _addable(graph: Any, data: Set[str]) -> Any:
    """Return a graph with a copy between each parameter and its cast, whose gradients can be added up (`grad_req="add"`).

    The backward pass of a cast, where oneDNN does it, drops what it is to add: the gradient would stay 0. That of a copy adds.
    """
    nodes = json.loads(graph.tojson(remove_amp_cast=False))["nodes"]
    read = {nodes[node["inputs"][0][0]]["name"]: nodes[node["inputs"][0][0]]["op"] for node in nodes if node["op"] == "amp_cast"}
    variables = {name for name, op in read.items() if op == "null"}.difference(data)
    classic, inner = graph.as_nd_ndarray(), graph.as_nd_ndarray().get_internals()
    if variables:
        classic = classic(**{name: mx.sym.identity(inner[name], name=f"{name}_copy") for name in variables})
    return classic.as_np_ndarray() if isinstance(graph, mx.sym.np._Symbol) else classic


@lru_cache(maxsize=None)
def _operators(precision: str) -> Tuple[List[str], List[str], List[str], List[Tuple[str, str, List[str]]]]:
    """Return the operators that compute in low precision, in float32, in the widest type of their arguments; and conditions.

    A condition is (operator, attribute, values with which it computes in float32). All others take what they are given.
    """
    dtype = _DTYPES[precision]
    low, widest = amp.list_lp16_ops(dtype), amp.list_widest_type_cast(dtype)
    if precision == "bf16":
        widest = [name for name in widest if name.lower() in _ARITHMETIC]
    widest = list(dict.fromkeys([*widest, *_JOINING, *_NP_WIDEST]))
    conditions = [(name, key, values + _MORE_VALUES.get(name, [])) for name, key, values in amp.list_conditional_fp32_ops(dtype)]
    either = {*amp.list_lp16_fp32_ops(dtype), *_NP_EITHER, "amp_cast", "amp_multicast"}
    others = either.union(low, widest, [name for name, _, _ in conditions])
    return low, [name for name in _names() if name not in others], widest, conditions


def _names() -> List[str]:
    """Return the names of all operators of MXNet's."""
    names, size = ctypes.POINTER(ctypes.c_char_p)(), mx_uint()
    check_call(_LIB.MXListAllOpNames(ctypes.byref(size), ctypes.byref(names)))
    return [py_str(names[i]) for i in range(size.value)]
