"""MXNet's own files of a graph and its parameters, which plain MXNet loads."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import List, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from ..checkpoint.params_file import write_params
from ..checks import explaining
from ..mxnet_internals.blocks import flatten
from .sampled_graph import ExportGraph, Outputs, array_on


def files_of(prefix: Path) -> Tuple[Path, Path]:
    """Return the two files that `HybridBlock.export` writes for this prefix."""
    return prefix.with_name(f"{prefix.name}-symbol.json"), prefix.with_name(f"{prefix.name}-0000.params")


def write_symbol(graph: ExportGraph, symbol_file: Path, params_file: Path) -> None:
    """Write a graph as `HybridBlock.export` does."""
    described = json.loads(graph.symbol.tojson())
    for node in described["nodes"]:
        if graph.is_np and node["op"] == "_zeros":  # a recurrent layer's first state: 0 is unknown for legacy arrays, -1 for np
            node["attrs"]["shape"] = re.sub(r"\b0\b", "-1", node["attrs"]["shape"])
    symbol_file.write_text(json.dumps(described, ensure_ascii=False, indent=2), encoding="utf-8")
    running = set(graph.symbol.list_auxiliary_states())
    named = {f"{'aux' if name in running else 'arg'}:{name}": value for name, value in graph.params.items()}
    with open(params_file, "wb") as file:
        write_params(file, named, np_shape=graph.is_np)


def run_symbol(graph: ExportGraph, symbol_file: Path, params_file: Path) -> List[Outputs]:
    """Return the outputs of the files for each trial of the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it cannot tell the dtype of the data, which is known when the block is called
        block = gluon.SymbolBlock.imports(
            str(symbol_file), list(graph.inputs), str(params_file) if graph.params else None, ctx=mx.cpu()
        )
    with autograd.pause(train_mode=False), explaining("export", "symbol files", "a graph that runs", advice="Export to ONNX."):
        given = [[array_on(mx.cpu(), value) for value in inputs.values()] for inputs, _ in graph.trials]
        return [[one.asnumpy() for one in flatten(block(*arrays), "output")[0]] for arrays in given]
