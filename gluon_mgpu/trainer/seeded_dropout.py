"""Dropout whose masks follow `mx.random.seed` also on GPUs, where cuDNN's do not.

MXNet 1.9.1 seeds cuDNN's dropout once per device, with C's `rand()` (src/resource.cc:173-199; src/operator/nn/dropout-inl.h:257
and 494).
`cudnn_off=True` chooses MXNet's own operator, which draws from the generator that `mx.random.seed` sets.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable

import mxnet as mx
from mxnet import Context, gluon

from ..mxnet_internals.blocks import NpSymbol, forget_graph, graph_of, set_graph
from ..mxnet_internals.dropout import Dropout, drops_inside
from ..mxnet_internals.versions import is_mxnet2
from ..refusals import RNN_DROPOUT, refusal
from .parameters import blocks_of
from .wrong_graphs import hybrid_blocks

_OF_CUDNN = "gpu"  # the devices whose dropout cuDNN may compute


def seed_dropout(contexts: Iterable[Context], *roots: Any) -> None:
    """Let networks' `nn.Dropout` layers, and Dropout in the graph of a `SymbolBlock`, draw what `mx.random.seed` decides.

    On CPUs they do so already, and nothing changes.
    """
    if is_mxnet2() or all(context.device_type != _OF_CUDNN for context in contexts):
        return
    blocks = [block for root in roots if isinstance(root, gluon.Block) for block in blocks_of(root)]
    plain = [block for block in blocks if type(block) is gluon.nn.Dropout]
    graphs = {block: with_seeds(graph_of(block)) for block in blocks if isinstance(block, gluon.SymbolBlock)}
    changed = {block: graph for block, graph in graphs.items() if graph is not graph_of(block)}
    if not (plain or changed):
        return
    mx.nd.waitall()  # a graph must not be deleted while it runs
    for block in plain:
        block.__class__ = Dropout
    for block, graph in changed.items():
        set_graph(block, graph)
    for block in hybrid_blocks(roots):
        forget_graph(block)  # a SymbolBlock keeps its graph


def with_seeds(symbol: Any) -> Any:
    """Return a graph whose Dropout draws what `mx.random.seed` decides: the same one if it does already."""
    document = json.loads(symbol.tojson())
    if not turn_cudnn_off(document):
        return symbol
    changed = mx.sym.load_json(json.dumps(document))
    return changed.as_np_ndarray() if isinstance(symbol, NpSymbol) else changed


def turn_cudnn_off(graph: Dict[str, Any]) -> bool:
    """Set the attribute in a graph and in the graphs within it, and return whether there was something to set."""
    nodes = [node for node in graph["nodes"] if node["op"] in ("Dropout", "_npx_dropout")]
    changed = [node for node in nodes if node.get("attrs", {}).get("cudnn_off") not in ("True", "1")]
    for node in changed:
        node["attrs"] = {**node.get("attrs", {}), "cudnn_off": "True"}
    inner = [turn_cudnn_off(part) for node in graph["nodes"] for part in node.get("subgraphs", ())]
    return bool(changed) or any(inner)


def check_seeds(operation: str, mode: str, net: gluon.Block, contexts: Iterable[Context]) -> None:
    """Raise `ModesError` for a mode that seeds its passes if a fused recurrent layer on a GPU has dropout, which is cuDNN's."""
    if all(context.device_type != _OF_CUDNN for context in contexts):
        return
    for block in blocks_of(net):
        if drops_inside(block):
            raise refusal(operation, mode, RNN_DROPOUT, f"{block.name}, {RNN_DROPOUT}")
