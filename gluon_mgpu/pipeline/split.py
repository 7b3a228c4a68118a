"""split_stages(): a network divided into stages of equal cost."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any, Dict, List, Sequence, Set, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from ..checks import explaining, instance, one_of, short, whole_number
from ..data_parallel.graph import NotCompilableError, trace
from ..data_parallel.passes import forgetting_graphs
from ..data_parallel.sharding import split_and_load
from ..distributed import group, own_batches
from ..errors import TrainerError
from ..mxnet_internals.blocks import children, has_hooks, is_hybridized, options_of, own_params
from ..mxnet_internals.versions import require_mxnet1
from ..nested import Array, is_float, num_bytes
from ..trainer.parameters import blocks_of, devices_of
from ..trainer.precision import precision_of, set_precision
from .stage import NETWORK, CutGraph, Stage, Stages

_MOST_PIECES = 48  # that are measured
_NUM_RUNS = 3  # of each, after one that is not measured


def split_stages(
    net: gluon.Block, num_stages: int, sample: Any, *, balance: str = "time", data_parallel: Sequence[gluon.Block] = ()
) -> Stages:
    """Return a network's stages for a `Pipeline`, so that the largest cost of a stage is as small as possible.

    ```
    Sequential, HybridSequential      between two of its layers; containers in it are opened
    any other HybridBlock             anywhere in its graph: skip connections may go over several stages
    ```

    Such a graph is traced once, for training, and runs in predictions, too, as that of a hybridized network.

    In a job of several processes all of them call it, and use what process 0 measures.

    Parameters
    ----------
    net : gluon.Block
        Initialised, and in its precision (`set_precision`), in front of `Pipeline`, which moves the parameters.
    num_stages : int
    sample : array, or nested data
        Features of one micro-batch, shapes (b, ...): MXNet's arrays, or NumPy's.
    balance : str
        The cost of a layer: `"time"`, which its forward and backward pass takes on the network's first device, or `"bytes"` of
        its parameters. Measuring changes no weights, running statistics or random numbers.
    data_parallel : sequence of gluon.Block
        Parts of the network that stand in the last stage and compute a shard on each device: see `Pipeline`.

    Raises
    ------
    TrainerError
        The network cannot be divided, or into so many stages.

    Examples
    --------
    >>> net = gluon.nn.HybridSequential()
    >>> net.add(gluon.nn.Dense(8), gluon.nn.Dense(8), gluon.nn.Dense(80))
    >>> net.initialize()
    >>> stages = split_stages(net, 2, mx.nd.ones((4, 8)), balance="bytes")
    >>> [len(stage.block) for stage in stages]
    [2, 1]
    """
    require_mxnet1("split_stages")
    instance("split_stages", "net", net, gluon.Block, "a gluon.Block", advice="Pass the network.")
    whole_number("split_stages", "num_stages", num_stages, advice="Pass the number of devices.")
    one_of("split_stages", "balance", balance, ("time", "bytes"), advice="'time' measures the layers.")
    names = _names_of(data_parallel, net)
    with own_batches():  # in a job too, each process has the whole sample
        (X,) = split_and_load(sample, devices_of(net)[:1])
    expected, advice = "features of one micro-batch", "Pass X of a batch."
    refused = explaining("split_stages", "a sample that the network does not accept", expected, advice=advice)
    with refused, autograd.pause(train_mode=False), forgetting_graphs(net):
        net(X)  # the first batch decides shapes
    layers = _layers(net)
    if not names and (len(layers) > 1 or type(net) in _CONTAINERS):
        _check_number(num_stages, len(layers), "layers")
        return _stages_of_layers(net, layers, num_stages, X, balance)
    try:
        with autograd.record():
            traced = trace(net, None, X, None)
    except NotCompilableError as error:
        raise TrainerError(
            f"split_stages: got a {type(net).__name__} that cannot be divided: {error}; expected a Sequential, or a HybridBlock "
            "that can be traced. Pass your own list of Blocks to Pipeline."
        ) from error
    graph = CutGraph(traced, names)
    if names and not (graph.operators and graph.last):
        raise TrainerError(
            f"split_stages: got data_parallel={short(data_parallel)}, from which all or nothing of the network follows; expected "
            "layers near its output. Pass [net.output], or leave it out."
        )
    cuts = _cuts(graph, max(num_stages, min(_MOST_PIECES, len(graph.operators))))
    _check_number(num_stages, len(cuts) + 1, "operators on its input")
    costs = _costs(graph.stages(cuts, net), X, balance)
    count = len(cuts) + 1  # without the data-parallel one
    chosen = _divide(costs[:count], num_stages, [graph.num_crossing(cut) for cut in cuts])
    stages = graph.stages([cuts[at - 1] for at in chosen], net)
    stages.costs = _sums(costs, [0, *chosen, count]) + costs[count:]
    return stages


def _names_of(blocks: Sequence[gluon.Block], net: gluon.Block) -> Set[str]:
    """Return the names of the parameters of these layers of a network, without those that other layers use, too."""
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(block, gluon.Block) for block in blocks):
        raise TrainerError(
            f"split_stages: got data_parallel={short(blocks)}; expected a list of the network's layers. Pass [net.output]."
        )
    inside = {id(one) for block in blocks for one in blocks_of(block)}
    others = {param for one in blocks_of(net) if id(one) not in inside for param in own_params(one).values()}
    names = {param.name for block in blocks for param in block.collect_params().values() if param not in others}
    if blocks and not names:
        raise TrainerError(
            f"split_stages: got data_parallel={short(blocks)} without parameters of their own; expected layers that have some. "
            "Pass the first layers of the part that all devices are to compute."
        )
    return names


def _stages_of_layers(net: gluon.Block, layers: Sequence[gluon.Block], num_stages: int, X: Any, balance: str) -> Stages:
    costs = _costs(Stages(map(Stage, layers), net), X, balance)
    bounds = [0, *_divide(costs, num_stages, [1] * (len(layers) - 1)), len(layers)]
    precision = precision_of(net)
    stages = Stages([], net, costs=_sums(costs, bounds))
    for begin, end in zip(bounds, bounds[1:]):
        chosen = layers[begin:end]
        kind = gluon.nn.HybridSequential if all(isinstance(layer, gluon.HybridBlock) for layer in chosen) else gluon.nn.Sequential
        block = kind(prefix="")
        block.add(*chosen)
        set_precision(block, precision)
        if is_hybridized(net):
            block.hybridize(**options_of(net))  # Pipeline takes the static ones away
        stages.append(Stage(block))
    return stages


def _sums(costs: Sequence[float], bounds: Sequence[int]) -> List[float]:
    return [sum(costs[begin:end]) for begin, end in zip(bounds, bounds[1:])]


_CONTAINERS = (gluon.nn.Sequential, gluon.nn.HybridSequential)


def _layers(net: gluon.Block) -> List[gluon.Block]:
    """Return the layers of nested containers, in the order in which they run."""
    if type(net) not in _CONTAINERS or has_hooks(net):
        return [net]
    return [layer for child in children(net) for layer in _layers(child)]


def _cuts(graph: CutGraph, num_pieces: int) -> List[int]:
    """Return where to cut a graph into pieces: in each of so many equal parts, where the fewest arrays cross."""
    count = len(graph.operators)
    bounds = [round(piece * count / num_pieces) for piece in range(num_pieces + 1)]
    cuts = []
    for begin, end in zip(bounds[:-1], bounds[1:-1]):
        choices = [cut for cut in range(begin + 1, end + 1) if graph.is_after_data(cut)]
        if choices:
            cuts.append(min(choices, key=lambda cut: (graph.num_crossing(cut), -cut)))
    return cuts


def _divide(costs: Sequence[float], num_stages: int, crossing: Sequence[int]) -> List[int]:
    """Return where to divide neighbours so that the largest sum is smallest, and on a tie the fewest arrays cross.

    Examples
    --------
    >>> _divide([1, 1, 1, 3], 2, [1, 1, 1])
    [3]
    >>> _divide([5, 1, 1, 1], 3, [1, 1, 1])
    [1, 2]
    """
    before = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[n]: for the first n pieces in the stages so far, the largest sum, the arrays that cross, and the cuts
    best: List[Tuple[float, int, List[int]]] = [(before[n], 0, []) for n in range(count + 1)]
    for stage in range(2, num_stages + 1):
        following = list(best)
        for n in range(stage, count + 1):
            options = []
            for m in range(stage - 1, n):
                largest, arrays, cuts = best[m]
                options.append((max(largest, before[n] - before[m]), arrays + crossing[m - 1], [*cuts, m]))
            following[n] = min(options, key=lambda option: option[:2])
        best = following
    return best[count][2]


def _costs(pieces: Stages, X: Any, balance: str) -> List[float]:
    if balance == "bytes":
        found = {param: piece for piece in reversed(pieces) for param in piece.params()}  # the first one that uses it
        return [float(sum(num_bytes(param) for param in piece.params() if found[param] is piece)) for piece in pieces]
    outputs: Dict[int, List[Array]] = {NETWORK: pieces.inputs(X)}
    costs = []
    for number, piece in enumerate(pieces):
        sources = pieces.sources(number, outputs.__getitem__)
        inputs = [outputs[producer][at].detach() for producer, at in sources]
        with forgetting_graphs(piece.block):
            outputs[number], seconds = _timed(piece, inputs, piece.gradients_for(sources))
        costs.append(seconds)
    processes = group()
    if processes is None:
        return costs
    return json.loads(processes.all_gather_bytes(json.dumps(costs).encode())[0])  # they exchange gradients of equal stages


def _timed(piece: Stage, inputs: List[Array], wanted: Sequence[bool]) -> Tuple[List[Array], float]:
    """Return a piece's outputs and the seconds of its forward and backward pass, which write no gradients.

    In prediction mode: BatchNorm's running statistics do not move, and Dropout draws no random numbers.
    """
    floats = [array for array, is_wanted in zip(inputs, wanted) if is_wanted and is_float(array)]
    for array in floats:
        array.attach_grad()
    context = inputs[0].context
    variables = floats + [param.data(context) for param in piece.params() if param.grad_req != "null"]
    seconds = []
    for _ in range(_NUM_RUNS + 1):
        mx.nd.waitall()
        begin = perf_counter()
        with autograd.record(train_mode=False):
            outputs = piece.run(inputs)
        heads = [one for one in outputs if is_float(one) and not any(one is array for array in inputs)]
        if heads and variables:
            with suppress(mx.MXNetError):  # no variable leads to these outputs, as those of an operator without a gradient
                autograd.grad(heads, variables, train_mode=False)
        mx.nd.waitall()
        seconds.append(perf_counter() - begin)
    return [output.detach() for output in outputs], median(seconds[1:])


def _check_number(num_stages: int, most: int, what: str) -> None:
    if num_stages > most:
        raise TrainerError(
            f"split_stages: got num_stages={num_stages} for a network of {most} {what}; expected no more. Ask for fewer stages."
        )
