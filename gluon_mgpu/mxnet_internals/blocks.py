"""What `gluon.Block` knows and does not offer: its children and graphs, and how it was hybridized.

Source: MXNet 1.9.1, python/mxnet/gluon/block.py.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Dict, List, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.nn.basic_layers import _BatchNorm

from .living import living
from .versions import is_mxnet2

BaseBatchNorm = _BatchNorm  # of BatchNorm and SyncBatchNorm
flatten, regroup = _flatten, _regroup  # nested arguments to a list of arrays and their form, and back
compiled_graph = attrgetter("_cached_op")  # what runs a hybridized block: another object whenever it was traced anew
# What decides how a block is traced, other objects after a change: each step asks
trace_state = attrgetter("_cached_graph", "_active", "_forward_hooks", "_forward_pre_hooks")
hooks_of = attrgetter("_forward_hooks", "_forward_pre_hooks")  # the same of a plain Block
flags_of = attrgetter("_flags")  # the options of `hybridize`: each call makes another list
batch_norm_options = attrgetter("_kwargs")  # axis, eps, momentum, fix_gamma, use_global_stats; ndev of a SyncBatchNorm
NpSymbol: Any = mx.sym.np._Symbol  # the class of symbols that np networks return


def children(block: gluon.Block) -> List[gluon.Block]:
    """Return the blocks directly in a block."""
    found = list(block._children.values())
    return [child() for child in found] if is_mxnet2() else found


def own_params(block: gluon.Block) -> Dict[str, gluon.Parameter]:
    """Return the parameters that are attributes of a block, by attribute."""
    return block._reg_params  # type: ignore[no-any-return]


def has_hooks(block: gluon.Block) -> bool:
    """Return whether Python runs before or after the block's computation, or sees each operator's output."""
    return bool(block._forward_hooks or block._forward_pre_hooks or getattr(block, "_callback", None))


def is_hybridized(block: gluon.Block) -> bool:
    """Return whether a block runs as a graph. A plain Block never does."""
    return bool(getattr(block, "_active", False))


def set_hybridized(block: gluon.HybridBlock, active: bool) -> None:
    """Let one block run as a graph or not, without its children, whose graphs `hybridize()` would forget."""
    block._active = active
    block._clear_cached_op()


def options_of(block: gluon.HybridBlock) -> Dict[str, Any]:
    """Return the options of `hybridize`."""
    return dict(block._flags)


def set_options(block: gluon.HybridBlock, options: Dict[str, Any]) -> None:
    """Set the options of `hybridize` of one block, without its children."""
    block._flags = list(options.items())
    block._clear_cached_op()


def graph_of(block: gluon.HybridBlock) -> Any:
    """Return the symbol of a block that was traced, or None."""
    return block._cached_graph[1] if block._cached_graph else None


def set_graph(block: gluon.SymbolBlock, symbol: Any) -> None:
    """Give another graph with the same inputs to a SymbolBlock, which keeps it."""
    block._cached_graph = block._cached_graph[0], symbol
    block._clear_cached_op()


def forget_graph(block: gluon.HybridBlock) -> None:
    """Let the next call trace the block anew. Nothing of its former graph may run."""
    block._clear_cached_op()


def traced(block: gluon.HybridBlock, *arguments: Any, own: bool = False) -> Tuple[List[Any], Any]:
    """Return the symbols of a block's inputs and its output, which Gluon keeps; `own`: not by what has replaced tracing."""
    return type(block)._get_graph(block, *arguments) if own else block._get_graph(*arguments)  # type: ignore[no-any-return]


def replace_tracing(block: gluon.HybridBlock, trace: Any) -> None:
    """Let a block, and Gluon when it compiles it, use `trace(*arguments)` in the place of `traced`; None: no longer."""
    if trace is None:
        vars(block).pop("_get_graph", None)
    else:
        block._get_graph = trace


def run_graph(block: gluon.HybridBlock, *arguments: Any) -> Any:
    """Return the output of a block's graph, also if the block is not hybridized."""
    return block._call_cached_op(*arguments)


def forms_of(block: gluon.HybridBlock) -> Tuple[Any, Any]:
    """Return the nesting of a traced block's arguments and of its output: see `flatten`."""
    return block._in_format, block._out_format


def has_backend(block: gluon.Block) -> bool:
    """Return whether `optimize_for` has given a block to a backend."""
    return bool(getattr(block, "_backend", None))


def close_shapes(layer: gluon.HybridBlock, x: Any) -> None:
    """Let the input of a layer decide the shapes of its parameters, and give them values."""
    layer._deferred_infer_shape(x)
    for param in layer.params.values():
        param._finish_deferred_init()


def name_params_as(block: gluon.Block, net: gluon.Block) -> None:
    """Let a block's parameters have the structural names of a network in it, in files too."""
    block._collect_params_with_prefix = net._collect_params_with_prefix


def class_axis(loss: Any) -> Any:
    """Return the axis of the classes of a softmax loss with class labels; None if its labels are probabilities."""
    return loss._axis if loss._sparse_label else None


def batch_axis_of(loss: Any) -> Any:
    """Return the axis of the examples of one of Gluon's losses, None if it has none."""
    return getattr(loss, "_batch_axis", None)


def compiled_with(params: Set[int]) -> List[gluon.HybridBlock]:
    """Return the blocks of this process whose graphs read one of these parameters, by their ids.

    A graph may belong to another block than its parameters, such as one that wraps theirs, and a trainer of a list of parameters
    knows no block. So all objects are searched, at the few times when parameters move.
    """
    compiled = [block for block in living(gluon.HybridBlock) if getattr(block, "_cached_op", None) is not None]
    # entries are (is input, value), and in MXNet 2 (is input, name, value)
    return [one for one in compiled if any(not entry[0] and id(entry[-1]) in params for entry in one._cached_op_args)]


def rebind_graphs(params: Set[int]) -> bool:
    """Bind the graphs that read these parameters, by their ids, to their new arrays; return whether any was static.

    A graph with `static_alloc` and `static_shape` would still write gradients into the former arrays.
    """
    stale = compiled_with(params)
    if stale:
        mx.nd.waitall()  # once: their operations must not be deleted while they run
    for block in stale:
        # a graph that is cut, or that MXNet 2 has divided, needs the arguments of the next call
        if "_get_graph" in vars(block) or not block._cached_graph or has_backend(block):
            block._clear_cached_op()
            continue
        # threads that call the block at once would each trace it, and fail in its name scope
        inputs = np.array([argument[0] for argument in block._cached_op_args], dtype=bool)
        indices = [("data_indices", np.flatnonzero(inputs).tolist()), ("param_indices", np.flatnonzero(~inputs).tolist())]
        flags = [flag for flag in block._flags if flag[0] not in dict(indices)]  # MXNet 2 has added them
        block._cached_op = mx.nd.CachedOp(block._cached_graph[1], indices + flags)
    return any(options_of(block).get("static_shape") for block in stale)
