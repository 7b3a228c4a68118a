"""The stages of a network: blocks one after the other, or the parts of its graph."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import AbstractSet, Any, Callable, Collection, Dict, FrozenSet, Iterable, List, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon

from ..data_parallel.graph import Graph, inputs_of, may_draw
from ..errors import TrainerError
from ..nested import Array, is_device_array, leaves, map_leaves
from ..trainer.precision import precision_of, reduce_precision

NETWORK = -1  # as a producer: the network's own inputs
Source = Tuple[int, int]  # a producer, and the number of its output


@dataclass(eq=False)
class Stage:
    """A part of a network that one device computes.

    Attributes
    ----------
    block : gluon.Block
    run : callable (list of NDArray) -> list of NDArray
        From the arrays of `sources` to the stage's outputs.
    sources : list of (int, int), optional
        Where its inputs come from: the number of an earlier stage, or `NETWORK`, and the number of the output. None for all
        outputs of the stage before; of the first stage, all inputs of the network.
    draws : bool, optional
        Whether it may draw random numbers, as Dropout does; None if that is not known.
    depends : list of lists of gluon.Parameter, optional
        The parameters that each of its inputs depends on; None: all that come from other stages depend on some.
    is_data_parallel : bool
        Whether all devices compute it, each for its part of a micro-batch: only the last stage.
    """

    block: gluon.Block
    run: Callable[[List[Array]], List[Array]]
    sources: Optional[List[Source]] = None
    draws: Optional[bool] = None
    depends: Optional[List[List[gluon.Parameter]]] = None
    is_data_parallel: bool = False

    def gradients_for(self, count: int, *, is_first: bool) -> List[bool]:
        """Return which of so many inputs get gradients, if they hold floats."""
        if self.depends is None:
            return [not is_first] * count
        return [any(param.grad_req != "null" for param in params) for params in self.depends]

    def params(self) -> List[gluon.Parameter]:
        """Return its parameters and running statistics."""
        return list(self.block.collect_params().values())


class Stages(List[Stage]):
    """The stages of a network: what `split_stages` returns.

    Attributes
    ----------
    net : gluon.Block
        The network, whose structural names the parameters keep.
    graph : Graph, optional
        The network's graph, if the stages are parts of it.
    costs : list of float
        The cost of each stage, as `split_stages` found it: seconds, or bytes. Empty for your own blocks. That of a data-parallel
        stage is for a whole micro-batch on one device.
    """

    def __init__(self, stages: Iterable[Stage], net: gluon.Block, graph: Optional[Graph] = None) -> None:
        super().__init__(stages)
        self.net, self.graph = net, graph
        self.costs: List[float] = []
        self._form: Any = None  # of the latest inputs

    def repeating_last(self, count: int) -> Stages:
        """Return these stages with the last one so many times, once for each device that computes a part of it."""
        if count == 1:
            return self
        stages = Stages([*self, *[self[-1]] * (count - 1)], self.net, self.graph)
        stages.costs = self.costs
        return stages

    def inputs(self, X: Any) -> List[Array]:
        """Return the arrays of a shard that the first stages read."""
        if self.graph is not None:
            return inputs_of(self.net, X)
        self._form = X
        return [leaf for _, leaf in leaves(X)]

    def read(self, number: int, arrays: Sequence[Array], found: Sequence[Sequence[Array]]) -> List[Array]:
        """Return the arrays that a stage reads, of the network's inputs and the outputs of earlier stages, on their devices."""
        sources = self[number].sources
        if sources is None:
            return list(found[number - 1] if number else arrays)
        return [arrays[at] if producer == NETWORK else found[producer][at] for producer, at in sources]

    def output(self, arrays: Sequence[Array]) -> Any:
        """Return the network's output in its own form, from the outputs of the last stage."""
        if self.graph is not None:
            return self.graph.outputs(arrays)
        return arrays[0] if len(arrays) == 1 else tuple(arrays)


def of_blocks(blocks: Sequence[gluon.Block], net: gluon.Block) -> Stages:
    """Return stages of blocks. The first one is called with the network's input, each other one with the outputs before it."""
    stages = Stages([], net)

    def runner(number: int, block: gluon.Block) -> Callable[[List[Array]], List[Array]]:
        def run(arrays: List[Array]) -> List[Array]:
            if number == 0:
                rest = iter(arrays)
                arrays = [map_leaves(lambda _, leaf: next(rest), stages._form)]
            found = block(*arrays)
            return list(found) if isinstance(found, (list, tuple)) else [found]

        return run

    for number, block in enumerate(blocks):
        stages.append(Stage(block, runner(number, block)))
    return stages


def draws_numbers(block: gluon.Block, inputs: Sequence[Array]) -> bool:
    """Return whether a block may draw random numbers: true if its Python code cannot be traced."""
    if not isinstance(block, gluon.HybridBlock):
        return type(block) is not gluon.nn.Sequential or any(draws_numbers(one, inputs) for one in block._children.values())
    try:
        _, symbol = block._get_graph(*inputs)
        nodes = json.loads(symbol.tojson())["nodes"]
    except Exception:  # whatever a user's code raises for symbols
        return True
    return any(map(may_draw, nodes))


def check_outputs(operation: str, block: gluon.Block, inputs: Sequence[Array]) -> None:
    """Raise `TrainerError` if a hybridized block returns an input itself: MXNet loses its gradient."""
    if isinstance(block, gluon.HybridBlock) and block._active:
        try:
            names, symbol = block._get_graph(*inputs)
        except Exception:  # whatever a user's code raises for symbols: its call will
            return
        if {one.name for one in names}.intersection(symbol.list_outputs()):
            raise TrainerError(
                f"{operation}: got {block.name}, a hybridized stage that returns an input; expected new arrays, as MXNet loses "
                "the gradient otherwise. Return F.identity(x), or leave this stage without hybridize()."
            )


class GraphStage(gluon.Block):  # type: ignore[misc]
    """A part of a network's graph.

    Parameters
    ----------
    symbol : mxnet.symbol.Symbol
    inputs : list of str
    params : dict of str to gluon.Parameter
    bulk_sizes : dict
        Options of `hybridize`.
    """

    def __init__(
        self, symbol: Any, inputs: Sequence[str], params: Dict[str, gluon.Parameter], bulk_sizes: Dict[str, Any]
    ) -> None:
        super().__init__(prefix="")
        self._inputs = {name: at for at, name in enumerate(inputs)}
        self._names = symbol.list_inputs()
        self._own = {name: params[name] for name in self._names if name in params}
        self._operator = mx.nd.CachedOp(symbol, [*bulk_sizes.items(), ("inline_limit", 0)])

    def collect_params(self, select: Optional[str] = None) -> Dict[str, gluon.Parameter]:
        """Return the parameters that this part uses."""
        return dict(self._own)

    def forward(self, *arrays: Array) -> List[Array]:
        """Return the outputs, as legacy arrays, from arrays in the order of `inputs`."""
        context = arrays[0].context
        given = [
            arrays[self._inputs[name]].as_nd_ndarray() if name in self._inputs else self._own[name].data(context).as_nd_ndarray()
            for name in self._names
        ]
        with mx.util.np_array(False):
            found = self._operator(*given)
        return [found] if is_device_array(found) else list(found)


Entry = Tuple[int, int]  # a node's number, and its output's


class CutGraph:
    """A network's graph as a list of operators, which can be divided at any place.

    Parameters
    ----------
    graph : Graph
        Without a loss.
    data_parallel : set of str
        Names of parameters. The operators that read them, and all that follow from these, are a last stage of their own.

    Attributes
    ----------
    operators : list of int
        Those before the data-parallel ones, in the order of computation.
    last : list of int
        The data-parallel ones.
    """

    def __init__(self, graph: Graph, data_parallel: AbstractSet[str] = frozenset()) -> None:
        self.graph = graph
        self._document = json.loads(graph.symbol.tojson())  # without the casts of a lower precision: parts pass on float32
        self._nodes: List[Dict[str, Any]] = self._document["nodes"]
        self._heads: List[Entry] = [(head[0], head[1]) for head in self._document["heads"]]
        operators = [number for number, node in enumerate(self._nodes) if node["op"] != "null"]
        self._reads_data = self._after(operators, graph.inputs)
        self._reads_params: Dict[int, FrozenSet[str]] = {}
        for number, node in enumerate(self._nodes):
            own = {node["name"]} if node["name"] in graph.params else set()
            self._reads_params[number] = frozenset(own).union(*(self._reads_params[one] for one, _ in self._reads(number)))
        after = self._joined(operators, self._after(operators, data_parallel))
        self.operators = [number for number in operators if number not in after]
        self.last = [number for number in operators if number in after]

    def is_after_data(self, place: int) -> bool:
        """Return whether the operator before a place depends on the network's input, so that a part may end there.

        A part of operators on parameters alone would have no input: no device, and no place in a schedule.
        """
        return self.operators[place - 1] in self._reads_data

    def crossing(self, place: int) -> List[Entry]:
        """Return the arrays that operators from number `place` on read, of those before."""
        before = set(self.operators[:place])
        read = [entry for number in self.operators[place:] + self.last for entry in self._reads(number)] + self._heads
        return sorted({entry for entry in read if entry[0] in before})

    def stages(self, places: Sequence[int], net: gluon.Block) -> Stages:
        """Return the stages between these places: positions in `operators`, without the first and the last."""
        bounds = [0, *places, len(self.operators)]
        parts = [self.operators[begin:end] for begin, end in zip(bounds, bounds[1:])]
        parts += [self.last] if self.last else []
        home = {number: stage for stage, part in enumerate(parts) for number in part}
        wanted: List[List[Entry]] = [[] for _ in parts]  # the outputs of each stage that others read
        for stage, part in enumerate(parts):
            for entry in [entry for number in part for entry in self._reads(number)] + self._heads * (stage == len(parts) - 1):
                source = home.get(entry[0])
                if source is not None and source != stage and entry not in wanted[source]:
                    wanted[source].append(entry)
        precision = precision_of(net)
        stages = [
            self._stage(stage, part, home, wanted, precision, is_last=stage == len(parts) - 1) for stage, part in enumerate(parts)
        ]
        stages[-1].is_data_parallel = bool(self.last)
        return Stages(stages, net, self.graph)

    def _after(self, operators: Sequence[int], names: Collection[str]) -> Set[int]:
        """Return the variables of these names, and the operators that depend on them."""
        found = {number for number, node in enumerate(self._nodes) if node["name"] in names}
        for number in operators:  # in the order of computation
            if any(source in found for source, _ in self._reads(number)):
                found.add(number)
        return found

    def _joined(self, operators: Sequence[int], last: Set[int]) -> Set[int]:
        """Return the last stage with the operators that read only what it reads anyway, for it alone: fewer arrays cross."""
        crossing = {entry for number in last for entry in self._reads(number)}
        others = {entry[0] for number in set(operators) - last for entry in self._reads(number)}.union(
            head[0] for head in self._heads
        )
        alone = {number for number in operators if number not in others and crossing.issuperset(self._reads(number))}
        return last | (alone if last else set())

    def _reads(self, number: int) -> List[Entry]:
        return [(one[0], one[1]) for one in self._nodes[number]["inputs"]]

    def _stage(
        self,
        stage: int,
        part: Sequence[int],
        home: Dict[int, int],
        wanted: List[List[Entry]],
        precision: str,
        *,
        is_last: bool,
    ) -> Stage:
        nodes: List[Dict[str, Any]] = []
        places: Dict[Entry, Entry] = {}  # of what has been added
        inputs: List[str] = []
        sources: List[Source] = []
        depends: List[List[gluon.Parameter]] = []

        def found(entry: Entry) -> List[int]:
            number, output = entry
            if entry not in places:
                node = self._nodes[number]
                if node["op"] == "null":
                    nodes.append(dict(node))
                    name = node["name"]
                    if name in self.graph.inputs:
                        inputs.append(name)
                        sources.append((NETWORK, self.graph.inputs.index(name)))
                        depends.append([])
                else:  # of an earlier stage
                    name = f"from{number}_{output}"
                    nodes.append({"op": "null", "name": name, "inputs": []})
                    inputs.append(name)
                    sources.append((home[number], wanted[home[number]].index(entry)))
                    depends.append([self.graph.params[name] for name in self._reads_params[number]])
                places[entry] = (len(nodes) - 1, 0)
            return [*places[entry], 0]

        def copied(place: List[int]) -> List[int]:
            nodes.append({"op": "_copy", "name": f"copy{len(nodes)}", "inputs": [place]})
            return [len(nodes) - 1, 0, 0]

        for number in part:
            read = [found(entry) for entry in self._reads(number)]
            if number not in self._reads_data:  # of two parameters with one gradient, or with an output's, MXNet would lose one
                read = [copied(place) if nodes[place[0]]["op"] == "null" else place for place in read]
            nodes.append({**self._nodes[number], "inputs": read})
            for output in range(_MOST_OUTPUTS):
                places[number, output] = (len(nodes) - 1, output)

        # with one gradient for an output and an input, MXNet loses it or fails
        heads = [copied(found(entry)) for entry in (self._heads if is_last else wanted[stage])]
        document = {
            "nodes": nodes,
            "arg_nodes": [at for at, node in enumerate(nodes) if node["op"] == "null"],
            "heads": heads,
            "attrs": self._document.get("attrs", {}),
        }
        symbol = mx.sym.load_json(json.dumps(document))
        if precision != "fp32":
            symbol = reduce_precision(symbol, precision, dict.fromkeys(inputs, np.float32))  # MXNet casts no integers
        block = GraphStage(symbol, inputs, self.graph.params, self.graph.bulk_sizes)
        draws = any(may_draw(self._nodes[number]) for number in part)
        return Stage(block, lambda arrays: block.forward(*arrays), sources, draws, depends)


_MOST_OUTPUTS = 64  # of one operator
