"""Graphs that MXNet 1.9.1 computes wrongly: those of hybridized blocks with control flow or PReLU."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable, Iterator, List, Tuple

from mxnet import gluon

from ..mxnet_internals.blocks import compiled_graph, graph_of, is_hybridized, options_of
from ..mxnet_internals.versions import is_mxnet2, name_of, variable_name
from ..refusals import FOREACH, IN_A_GRAPH, refusal
from .parameters import blocks_of

Found = Tuple[str, str, str]
_CONTROL_FLOW = {"_while_loop": IN_A_GRAPH, "_cond": IN_A_GRAPH, "_foreach": FOREACH}


def hybrid_blocks(roots: Iterable[Any]) -> List[gluon.HybridBlock]:
    """Return the blocks of networks and losses that may have a graph, each once."""
    blocks = dict.fromkeys(block for root in roots if isinstance(root, gluon.Block) for block in blocks_of(root))
    return [block for block in blocks if isinstance(block, gluon.HybridBlock)]


def check_graphs(operation: str, blocks: Iterable[gluon.HybridBlock], *, trains: bool) -> None:
    """Raise `ModesError` if the graph of one of these blocks computes wrong outputs; or, for training, wrong gradients."""
    for block in blocks:
        is_static = bool(options_of(block).get("static_shape"))
        is_used = compiled_graph(block) is not None and (is_hybridized(block) or isinstance(block, gluon.SymbolBlock))
        if not is_used or not (trains or is_static):
            continue
        frozen = {variable_name(param) for param in block.collect_params().values() if param.grad_req == "null"}
        for mode, name, slope in _known_wrong(block):
            if slope not in frozen and (is_static if mode == FOREACH else trains):
                first = "static_shape" if mode == FOREACH else "hybridize()"
                if is_mxnet2():  # it numbers its nodes
                    name = {variable_name(param): name for name, param in block.collect_params().items()}.get(slope, name)
                raise refusal(operation, first, mode, f"{name} ({mode}) in {name_of(block)} ({type(block).__name__})")


def _known_wrong(block: gluon.HybridBlock) -> List[Found]:
    """Return the wrong operators of a block's graph. The block keeps them: MXNet never frees the text of a graph."""
    graph, (known, found) = graph_of(block), vars(block).get("wrong_operators", (None, []))
    if known is not graph:
        found = list(wrong_operators(json.loads(graph.tojson())))
        vars(block)["wrong_operators"] = graph, found
    return found  # type: ignore[no-any-return]


def wrong_operators(graph: Dict[str, Any]) -> Iterator[Found]:
    """Yield the operators that MXNet computes wrongly in a graph: the mode of `REFUSALS`, the name, and that of PReLU's slope.

    - `while_loop` and `cond`: `_backward_while_loop` passes on no gradient of a state whose first value needs none, and
      `_backward_cond` does not write those of the branch that did not run (MXNet 1.9.1, control_flow.cc, 724-735 and 947-955).
    - `foreach`: in a static graph, its outputs are wrong, and so are the gradients.
    - PReLU: its backward pass writes the gradient of its input over that of its output, from which it then computes the slope's
      (leaky_relu.cc, 231). MXNet shares the memory only between gradients that the graph alone knows.
    """
    nodes = graph["nodes"]
    read = {place[0] for node in nodes for place in node["inputs"]}
    for number, node in enumerate(nodes):
        if node["op"] in _CONTROL_FLOW:
            yield _CONTROL_FLOW[node["op"]], node["name"], ""
        elif node.get("attrs", {}).get("act_type") == "prelu":
            data, slope = (nodes[place[0]] for place in node["inputs"])
            if number in read and data["op"] != "null":
                yield IN_A_GRAPH, node["name"], slope["name"]
        for inner in node.get("subgraphs", ()):
            yield from wrong_operators(inner)
