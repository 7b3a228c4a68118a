"""The stages of a network: blocks one after the other, or the parts of its graph."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import AbstractSet, Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon

from ..data_parallel.graph import Graph, inputs_of, may_draw, preparation, symbols_of
from ..errors import TrainerError
from ..mxnet_internals.blocks import is_hybridized
from ..nested import Array, leaves, with_leaves
from ..trainer.precision import precision_of, reduce_precision

NETWORK = -1  # as a producer: the network's own inputs
Source = Tuple[int, int]  # a producer, and the number of its output


@dataclass(eq=False)
class Stage:
    """A part of a network that one device computes.

    Attributes
    ----------
    block : gluon.Block
    sources : list of (int, int), optional
        Where its inputs come from: the number of an earlier stage, or `NETWORK`, and the number of the output. None for all
        outputs of the stage before; of the first stage, all inputs of the network.
    draws : bool, optional
        Whether it may draw random numbers, as Dropout does; None if that is not known.
    depends : list of lists of gluon.Parameter, optional
        The parameters that each of its inputs depends on; None: all that come from other stages depend on some.
    is_data_parallel : bool
        Whether all devices compute it, each for its part of a micro-batch: only the last stage.
    form : nested data, optional
        In which the block takes its inputs, the network's latest ones; None if they are its arguments.
    """

    block: gluon.Block
    sources: Optional[List[Source]] = None
    draws: Optional[bool] = None
    depends: Optional[List[List[gluon.Parameter]]] = None
    is_data_parallel: bool = False
    form: Any = None

    def arguments(self, arrays: Sequence[Array]) -> List[Any]:
        """Return what the block is called with, for the arrays of the stage's sources."""
        return list(arrays) if self.form is None else [with_leaves(self.form, arrays)]

    def run(self, arrays: Sequence[Array]) -> List[Array]:
        """Return the stage's outputs, from the arrays of its sources."""
        found = self.block(*self.arguments(arrays))
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def gradients_for(self, sources: Sequence[Source]) -> List[bool]:
        """Return which of the inputs from these sources get gradients, if they hold floats."""
        if self.depends is None:
            return [producer != NETWORK for producer, _ in sources]
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
        The network's graph, if the stages are parts of it. Otherwise the first one is called with the network's input, each other
        one with the outputs before it.
    costs : list of float
        The cost of each stage, as `split_stages` found it: seconds, or bytes. Empty for your own blocks. That of a data-parallel
        stage is for a whole micro-batch on one device.
    """

    def __init__(
        self, stages: Iterable[Stage], net: gluon.Block, graph: Optional[Graph] = None, costs: Sequence[float] = ()
    ) -> None:
        super().__init__(stages)
        self.net, self.graph, self.costs = net, graph, list(costs)
        self._prepare = preparation(net)

    def inputs(self, X: Any) -> List[Array]:
        """Return the arrays of a shard that the first stages read."""
        if self.graph is not None:
            return inputs_of(self._prepare, X)
        self[0].form = X
        return [leaf for _, leaf in leaves(X)]

    def sources(self, number: int, outputs_of: Callable[[int], Sequence[Array]]) -> List[Source]:
        """Return where a stage's inputs come from: of the outputs of the stages before it, and of `NETWORK`, its inputs."""
        before = number - 1  # of the first stage, NETWORK
        return self[number].sources or [(before, at) for at in range(len(outputs_of(before)))]

    def producers(self, number: int) -> List[int]:
        """Return the stages whose outputs a stage reads."""
        sources = self[number].sources or [(number - 1, 0)]
        return sorted({producer for producer, _ in sources if producer != NETWORK})

    def output(self, arrays: Sequence[Array]) -> Any:
        """Return the network's output in its own form, from the outputs of the last stage."""
        if self.graph is not None:
            return self.graph.outputs(arrays)
        return arrays[0] if len(arrays) == 1 else tuple(arrays)


def check_outputs(operation: str, block: gluon.Block, inputs: Sequence[Any]) -> None:
    """Raise `TrainerError` if a hybridized block returns an input itself: MXNet loses its gradient."""
    graph = symbols_of(block, inputs) if is_hybridized(block) else None
    if graph is not None and {one.name for one in graph[0]}.intersection(graph[1].list_outputs()):
        raise TrainerError(
            f"{operation}: got {block.name}, a hybridized stage that returns an input; expected new arrays, as MXNet loses the "
            "gradient otherwise. Return x * 1, or leave this stage without hybridize()."
        )


class GraphStage(gluon.Block):  # type: ignore[misc]
    """A part of a network's graph. It takes what its symbol reads besides parameters, and returns legacy arrays.

    Parameters
    ----------
    symbol : mxnet.symbol.Symbol
    params : dict of str to gluon.Parameter
    bulk_sizes : dict
        Options of `hybridize`.
    """

    def __init__(self, symbol: Any, params: Dict[str, gluon.Parameter], bulk_sizes: Dict[str, Any]) -> None:
        super().__init__(prefix="")
        self._read = [params.get(name) for name in symbol.list_inputs()]
        self._operator = mx.nd.CachedOp(symbol, [*bulk_sizes.items(), ("inline_limit", 0)])

    def collect_params(self, select: Optional[str] = None) -> Dict[str, gluon.Parameter]:
        """Return the parameters that this part uses."""
        return {param.name: param for param in self._read if param is not None}

    def __call__(self, *arrays: Array) -> Any:
        """Return the outputs. Gluon's own `__call__` would expect arrays of the current mode."""
        context, rest = arrays[0].context, iter(arrays)
        given = [(next(rest) if param is None else param.data(context)).as_nd_ndarray() for param in self._read]
        with mx.util.np_array(False):
            return self._operator(*given)


Entry = Tuple[int, int]  # a node's number, and its output's


class CutGraph:
    """A network's graph as a list of operators, which can be cut between any two.

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
        document = json.loads(graph.symbol.tojson())  # without the casts of a lower precision: parts pass on float32
        self._nodes: List[Dict[str, Any]] = document["nodes"]
        self._attributes = document.get("attrs", {})
        self._heads: List[Entry] = [(head[0], head[1]) for head in document["heads"]]
        self._reads: List[List[Entry]] = [[(one[0], one[1]) for one in node["inputs"]] for node in self._nodes]
        self._depends: List[Set[str]] = []  # the names of the parameters and inputs that each node depends on
        for node, read in zip(self._nodes, self._reads):  # in the order of computation
            itself = {node["name"]} if node["op"] == "null" else set()
            self._depends.append(itself.union(*(self._depends[number] for number, _ in read)))
        operators = [number for number, node in enumerate(self._nodes) if node["op"] != "null"]
        after = self._joined(operators, {number for number in operators if self._depends[number] & data_parallel})
        self.operators = [number for number in operators if number not in after]
        self.last = [number for number in operators if number in after]

    def is_after_data(self, cut: int) -> bool:
        """Return whether the operator before a cut depends on the network's input, so that a stage may end there.

        A stage of operators on parameters alone would have no input: no device, and no time in a schedule.
        """
        return not self._depends[self.operators[cut - 1]].isdisjoint(self.graph.inputs)

    def num_crossing(self, cut: int) -> int:
        """Return how many arrays operators from number `cut` on read, of those before."""
        before = set(self.operators[:cut])
        read = self._read_by(self.operators[cut:] + self.last) + self._heads
        return len({entry for entry in read if entry[0] in before})

    def stages(self, cuts: Sequence[int], net: gluon.Block) -> Stages:
        """Return the stages between these cuts: positions in `operators`, without the first and the last."""
        bounds = [0, *cuts, len(self.operators)]
        partitions = [self.operators[begin:end] for begin, end in zip(bounds, bounds[1:])]
        partitions += [self.last] if self.last else []
        home = {number: stage for stage, partition in enumerate(partitions) for number in partition}
        numbers = {node["name"]: number for number, node in enumerate(self._nodes) if node["op"] == "null"}
        inputs = enumerate(self.graph.inputs)
        sources: Dict[Entry, Source] = {(numbers[name], 0): (NETWORK, at) for at, name in inputs if name in numbers}
        outputs: List[List[Entry]] = [[] for _ in partitions]
        for stage, partition in enumerate(partitions):
            for entry in self._read_by(partition) + self._heads * (stage == len(partitions) - 1):
                source = home.get(entry[0], stage)
                if source != stage and entry not in sources:
                    sources[entry] = source, len(outputs[source])
                    outputs[source].append(entry)
        outputs[-1] = self._heads
        precision = precision_of(net)
        stages = [self._stage(*one, sources, precision) for one in zip(partitions, outputs)]
        stages[-1].is_data_parallel = bool(self.last)
        return Stages(stages, net, self.graph)

    def _joined(self, operators: Sequence[int], last: Set[int]) -> Set[int]:
        """Return the last stage with the operators that read only what it reads anyway, for it alone: fewer arrays cross."""
        crossing = set(self._read_by(last))
        others = {number for number, _ in self._read_by(set(operators) - last) + self._heads}
        alone = {number for number in operators if number not in others and crossing.issuperset(self._reads[number])}
        return last | alone

    def _read_by(self, numbers: Iterable[int]) -> List[Entry]:
        return [entry for number in numbers for entry in self._reads[number]]

    def _stage(self, numbers: Sequence[int], outputs: Sequence[Entry], sources: Mapping[Entry, Source], precision: str) -> Stage:
        """Return the stage that computes some operators: their graph, with a variable for each array from elsewhere."""
        # the nodes keep their numbers; MXNet leaves out those that no output depends on
        nodes = [node if node["op"] == "null" else {"op": "null", "name": "", "inputs": []} for node in self._nodes]
        entries: Dict[str, Entry] = {}  # by the names of these variables
        variables: Dict[Entry, List[int]] = {}

        def added(op: str, name: str, read: List[List[int]]) -> List[int]:
            nodes.append({"op": op, "name": name, "inputs": read})
            return [len(nodes) - 1, 0, 0]

        def copied(source: List[int]) -> List[int]:
            return added("_copy", f"copy{len(nodes)}", [source])

        for number, output in sources:
            if number not in numbers:
                name = f"from{number}_{output}"
                entries[name], variables[number, output] = (number, output), added("null", name, [])
        for number in numbers:
            read = [variables.get(entry, [*entry, 0]) for entry in self._reads[number]]
            # of two parameters with one gradient, or with an output's, MXNet would lose one
            if self._depends[number].isdisjoint(self.graph.inputs):
                read = [copied(one) if nodes[one[0]]["op"] == "null" else one for one in read]
            nodes[number] = {**self._nodes[number], "inputs": read}
        # with one gradient for an output and an input, MXNet loses it or fails
        heads = [copied(variables.get(entry, [*entry, 0])) for entry in outputs]
        document = {"nodes": nodes, "arg_nodes": [], "heads": heads, "attrs": self._attributes}
        symbol = mx.sym.load_json(json.dumps(document))
        if precision != "fp32":  # MXNet casts no integers
            types = {name: np.float32 for name in symbol.list_inputs() if name in entries}
            symbol = reduce_precision(symbol, precision, types)
        read_entries = [entries[name] for name in symbol.list_inputs() if name in entries]
        params = self.graph.params
        depends = [[params[name] for name in self._depends[number] if name in params] for number, _ in read_entries]
        block = GraphStage(symbol, params, self.graph.bulk_sizes)
        draws = any(may_draw(self._nodes[number]) for number in numbers)
        return Stage(block, [sources[entry] for entry in read_entries], draws, depends)
