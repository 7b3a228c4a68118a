"""Mixed precision: convolutions and fully connected layers in bfloat16 or float16, weights and gradients in float32."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import Any, Dict, List, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.operator import get_all_registered_operators

from ..checks import instance, one_of
from ..errors import DeviceError, TrainerError
from ..mxnet_internals.blocks import NpSymbol, flatten, forget_graph, own_params, replace_tracing, run_graph, traced
from ..mxnet_internals.low_precision import with_casts
from ..mxnet_internals.versions import load_amp, require_mxnet1
from ..refusals import refusal
from .parameters import blocks_of, check_initialised

amp = load_amp()
_PRECISION = "precision"  # the attribute of a block that computes in another one
_DTYPES = {"bf16": amp.bfloat16, "fp16": np.float16}
# the device that a precision needs, why, and the precision for another one
_WHERE = {
    "bf16": ("cpu", "MXNet 1.9.1 computes in bfloat16 on CPUs only", "fp16"),
    "fp16": ("gpu", "MXNet 1.9.1 on a CPU says 'FP16 gemm on cpu not implemented!'", "bf16"),
}

# Operators that MXNet's lists miss or get wrong. The lists are older than np arrays.
_NP_EITHER = ("_npx_relu",)
_NP_WIDEST = ("_npi_add", "_npi_subtract", "_npi_multiply", "_npi_concatenate", "_npi_stack")
_JOINING = ("Concat", "concat")  # MXNet lists them as taking either type with bfloat16, but they fail on mixed types
# For bfloat16: operators of MXNet's widest list that a CPU can compute in it, with a gain. `dot`, for example, fails.
_SIGNS = ("add", "plus", "sub", "minus", "mul")
_ARITHMETIC = {f"{kind}_{sign}" for kind in ("", "elemwise", "broadcast") for sign in _SIGNS} | {"add_n", "stack"}
# Activations missing in MXNet's conditions: softsign does not support bfloat16, and prelu's slope is a float32 parameter.
_MORE_VALUES = {"Activation": ["softsign"], "LeakyReLU": ["prelu", "rrelu"]}


def set_precision(net: gluon.Block, precision: str) -> None:
    """Let a network compute in another precision from now on, in training, evaluation and prediction.

    ```
    float32 ─► cast │ convolution ─► BatchNorm ─► relu ─► add │ cast ─► mean, softmax, loss ...    each graph of the network
    weights ─► cast │         bfloat16 or float16             │                 float32
    ```

    Parameters, gradients, BatchNorm's statistics and the network's output stay float32, so reducing, clipping, updating and
    saving do not change. The lists of `mxnet.contrib.amp` choose the operators in low precision. Operators that the lists do not
    contain, or that a CPU cannot compute in bfloat16, compute in float32. MXNet itself is not changed: other networks keep their
    precision.

    Each hybridized part of the network is such a graph. In other parts, each layer with its own parameters is one, and values
    between layers are float32.

    Parameters
    ----------
    net : gluon.Block
        The complete network, initialised; hybridized or not, now or later. Call this again after adding blocks. Operations in the
        `forward` of a plain `Block` compute in float32.
    precision : str
        `"fp32"`, `"bf16"` on CPUs, `"fp16"` on GPUs. fp16 needs a `LossScaler`, which a `Trainer` brings.

    Raises
    ------
    DeviceError
        The network's devices cannot compute in it.
    TrainerError
        The precision is unknown, or the network has no initialised float32 parameters. Nothing was changed.

    Examples
    --------
    >>> net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    >>> net.initialize(mx.init.One(), ctx=mx.cpu())
    >>> x = mx.nd.array([[1.0, 1.00390625]])  # 1 + 2**-8: bfloat16 drops the last bit
    >>> net(x).asnumpy().tolist()
    [[2.00390625]]
    >>> set_precision(net, "bf16")
    >>> net(x).asnumpy().tolist(), net.weight.data().dtype.__name__
    ([[2.0]], 'float32')

    Source: Micikevicius et al., "Mixed precision training", 2018; MXNet 1.9.1, src/nnvm/low_precision_pass.cc.
    """
    check_precision(net, precision)
    compiled = [block for block in blocks_of(net) if isinstance(block, gluon.HybridBlock)]
    changing = [block for block in compiled if vars(block).get(_PRECISION, "fp32") != precision]
    if changing:
        mx.nd.waitall()  # a graph must not be deleted while it runs
    for block in changing:
        for name in (_PRECISION, "hybrid_forward"):
            vars(block).pop(name, None)  # the class's own applies again
        replace_tracing(block, None)
        forget_graph(block)
        if precision != "fp32":
            vars(block)[_PRECISION] = precision
            replace_tracing(block, partial(_graph_of, block))
            if own_params(block):
                block.hybrid_forward = partial(_run, block)


def precision_of(net: Any) -> str:
    """Return the precision that a network computes in: `"fp32"`, `"bf16"` or `"fp16"`.

    Parameters
    ----------
    net : gluon.Block
        For other values, such as a dict of parameters, the result is `"fp32"`.

    Examples
    --------
    >>> precision_of(gluon.nn.Dense(1))
    'fp32'
    """
    blocks = blocks_of(net) if isinstance(net, gluon.Block) else []
    return next((vars(block)[_PRECISION] for block in blocks if _PRECISION in vars(block)), "fp32")


def check_precision(net: Any, precision: Any) -> None:
    """Raise `TrainerError` or `DeviceError` unless `set_precision` can let the network compute in it."""
    one_of("set_precision", "precision", precision, ["fp32", *_DTYPES], advice="fp32 is MXNet's own.")
    if precision != precision_of(net) and hasattr(net, "replica_contexts"):
        raise refusal("set_precision", "Pipeline", "set_precision()")
    what = "the network, whose operators have the precision"
    instance("set_precision", "net", net, gluon.Block, what, advice="Pass the Block, not its parameters.")
    if precision == "fp32":
        return
    require_mxnet1("set_precision")
    params, (device, why, other) = net.collect_params(), _WHERE[precision]
    check_initialised("set_precision", params)
    for name, param in params.items():
        if np.dtype(param.dtype) in (np.float16, np.float64):
            raise TrainerError(
                f"set_precision: got {name} of {np.dtype(param.dtype).name}; expected float32. Call net.cast('float32')."
            )
        unfit = [str(context) for context in param.list_ctx() if context.device_type != device]
        if unfit:
            raise DeviceError(
                f"set_precision: got {precision} for a network on {', '.join(unfit)}; expected a {device.upper()}: {why}. "
                f"Pass {other!r} or 'fp32' there."
            )
    if precision == "bf16" and not can_compute_bf16():
        raise DeviceError(
            "set_precision: got bf16 for a processor on which MXNet's oneDNN does not support it; expected one with AVX-512, or "
            "DNNL_MAX_CPU_ISA left alone. Pass 'fp32'."
        )


@lru_cache(maxsize=None)
def can_compute_bf16() -> bool:
    """Return whether MXNet can compute in bfloat16 on this machine's CPU. The first call tries it and waits."""
    with autograd.pause():
        one = mx.nd.amp_cast(mx.nd.ones((1, 1), ctx=mx.cpu()), dtype=amp.bfloat16)
        try:
            mx.nd.FullyConnected(one, one, num_hidden=1, no_bias=True).wait_to_read()
        except mx.MXNetError:
            return False
    return True


def _graph_of(block: gluon.HybridBlock, *args: Any) -> Tuple[Any, Any]:
    """Return the graph that Gluon compiles. The exported graph does not change."""
    inputs, graph = traced(block, *args, own=True)
    arrays = [one.as_nd_ndarray() for one in flatten(args, "input")[0] if one is not None]
    types = {symbol.name: one.dtype for symbol, one in zip(inputs, arrays)}
    return inputs, reduce_precision(graph, vars(block)[_PRECISION], types)


def reduce_precision(graph: Any, precision: str, types: Dict[str, Any]) -> Any:
    """Return a graph of MXNet's that computes in `"bf16"` or `"fp16"`: with casts; its outputs keep their types.

    Parameters
    ----------
    types : dict of str to dtype
        The types of its inputs that are no parameters; those are float32.

    Source: the call is that of MXNet 1.9.1, python/mxnet/contrib/amp/amp.py, convert_symbol, which accepts only the operators of
    its lists.
    """
    low, full, widest, conditions = _operators(precision)
    all_types = {**dict.fromkeys(graph.list_inputs(), np.float32), **types}  # of parameters, too
    reduced = _addable(with_casts(graph, all_types, _DTYPES[precision], (low, full, widest), conditions), set(types))
    return reduced.as_np_ndarray() if isinstance(graph, NpSymbol) else reduced


def _run(block: gluon.HybridBlock, F: Any, *args: Any, **params: Any) -> Any:
    """Replace `hybrid_forward`: run a layer that is called with arrays as a graph, because only graphs are reduced."""
    if F is mx.nd:
        return run_graph(block, *args)
    return type(block).hybrid_forward(block, F, *args, **params)


def _addable(graph: Any, data: Set[str]) -> Any:
    """Return a legacy graph with a copy between each parameter and its cast, so that gradients can add up (`grad_req="add"`).

    In oneDNN, the backward pass of a cast ignores "add", and the gradient stays 0. The backward pass of a copy adds.
    """
    nodes = json.loads(graph.tojson(remove_amp_cast=False))["nodes"]
    sources = [nodes[node["inputs"][0][0]] for node in nodes if node["op"] == "amp_cast"]
    variables = {source["name"] for source in sources if source["op"] == "null"}.difference(data)
    inner = graph.get_internals()
    copies = {name: mx.sym.identity(inner[name], name=f"{name}_copy") for name in variables}
    return graph(**copies) if copies else graph


@lru_cache(maxsize=None)
def _operators(precision: str) -> Tuple[List[str], List[str], List[str], List[Tuple[str, str, List[str]]]]:
    """Return the operators in low precision, in float32, and in the widest type of their arguments; and conditions.

    A condition is (operator, attribute, values for which it computes in float32). Other operators keep the types of their inputs.
    """
    dtype = _DTYPES[precision]
    low, widest = amp.list_lp16_ops(dtype), amp.list_widest_type_cast(dtype)
    if precision == "bf16":
        widest = [name for name in widest if name.lower() in _ARITHMETIC]
    widest = list(dict.fromkeys([*widest, *_JOINING, *_NP_WIDEST]))
    conditions = [(name, key, values + _MORE_VALUES.get(name, [])) for name, key, values in amp.list_conditional_fp32_ops(dtype)]
    either = {*amp.list_lp16_fp32_ops(dtype), *_NP_EITHER, "amp_cast", "amp_multicast"}
    others = either.union(low, widest, [name for name, _, _ in conditions])
    return low, [name for name in get_all_registered_operators() if name not in others], widest, conditions
