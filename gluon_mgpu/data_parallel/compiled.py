"""Passes as compiled graphs: two calls of MXNet a device, where Gluon's Python takes one for each operator or block."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context, autograd, gluon

from ..checks import one_of
from ..errors import TrainerError, last_line
from ..nested import Array, is_device_array, leaves
from ..runtime.environment import logger
from ..trainer.buckets import num_moves
from ..trainer.freshness import writing_gradients
from ..trainer.groups import spans_devices
from ..trainer.running_stats import is_running_stat, note_examples
from ..trainer.trainer import Trainer
from .executors import Executor, Executors
from .graph import Graph, NotCompilableError, inputs_of, trace, why_not_compiled
from .passes import Passes, naming
from .sharding import split_batch
from .step import SplitFunction, TrainStep, make_step

MODES = ("auto", "on", "off")


class CompiledPasses(Passes):
    """Passes through MXNet's graph executor, one graph of network and loss per device; or recorded ones, where that cannot be.

    ```
    shard ─► copied ─► executor for its shape ─► copies of outputs and losses
                          │ reads the weights, writes gradients and running statistics: the parameters' own arrays
                          └─◄── backward
    ```

    The gradients have the same bits as those of a network hybridized with `static_alloc` and `static_shape`.

    Parameters
    ----------
    net : gluon.Block
    loss : callable (output, label) -> NDArray, or None
    trains : bool
        As for `Passes`.
    mode : str
        `"on"`: raise where the passes cannot be compiled. `"auto"`: record them, and log why; networks and losses must be
        hybridized, which says that tracing their Python code once is enough.

    Attributes
    ----------
    reason : str
        Why the latest passes were recorded; "" if they were compiled.
    """

    def __init__(self, net: gluon.Block, loss: Any, *, trains: bool, mode: str) -> None:
        super().__init__(net, loss, trains=trains)
        self.reason = ""
        self._mode = mode
        self._known: Tuple[Any, ...] = ()  # what of the network the reason and the graphs depend on
        self._graphs: Dict[Hashable, Graph] = {}
        self._executors: Dict[Context, Executors] = {}
        self._arrays: List[Tuple[gluon.Parameter, Any, Any]] = []  # each with Gluon's lists of its weights and gradients
        self._params: Dict[int, gluon.Parameter] = {}  # by their ids
        self._states: Dict[Tuple[str, ...], int] = {}  # which of them are frozen: each state has a number
        self._moves = num_moves()
        self._queued: List[Executor] = []

    def is_of(self, net: gluon.Block, loss: Any, mode: str) -> bool:
        """Return whether these are the passes of this network and loss, in this mode, and could be compiled so far."""
        return not self.reason and self._net is net and self._loss is loss and self._mode == mode

    def forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any]) -> Tuple[List[Any], List[Array]]:
        """Queue the forward passes of all shards, and return their outputs and losses, which later passes leave alone.

        Raises
        ------
        StepError
            The network or the loss rejects a shard.
        TrainerError
            They cannot be compiled, and the mode is `"on"`. Nothing was changed.
        """
        self._queued, self.is_compiled, self.draws = [], False, None
        self._follow()
        reason = self.reason
        if not reason:
            try:
                return self._run(operation, Xs, ys)
            except NotCompilableError as error:
                reason = str(error)
                if self._mode == "on":  # raises StepError if the data are to blame
                    Passes(self._net, self._loss, trains=False).forward(operation, Xs, ys)
        if self._mode == "on":
            raise TrainerError(
                f"{operation}: got a network, loss or data that cannot be compiled: {reason}; expected one graph. Pass "
                "compiled='auto' to run such passes without a graph."
            )
        found = super().forward(operation, Xs, ys)
        if not self.reason:  # the data are not to blame: the recorded passes accept them
            self._give_up(reason)
        return found

    def backward(self, trainer: Trainer, losses: Sequence[Array]) -> None:
        """Queue the backward passes of the latest forward passes."""
        if not self._queued:
            super().backward(trainer, losses)
            return
        scale = 1.0 if trainer.loss_scaler is None else trainer.loss_scaler.begin()
        note_examples(losses)
        with writing_gradients(self._params, [loss.context for loss in losses]):
            for executor in self._queued:
                executor.backward(scale)
        self._queued = []

    def _run(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any]) -> Tuple[List[Any], List[Array]]:
        outputs, losses, queued = [], [], []
        with autograd.pause():
            for shard, (graph, executor, inputs) in enumerate(self._bound(Xs, ys)):
                with naming(operation, "network", shard, Xs[shard], ys[shard], self._net):
                    heads = executor.forward(inputs)
                if graph.has_loss:
                    losses.append(heads[0].as_np_ndarray() if mx.util.is_np_array() else heads[0])
                    del heads[0]
                outputs.append(graph.outputs(heads))
                queued.append(executor)
        self._queued = queued if self._trains else []
        self.is_compiled, self.draws = True, any(graph.draws for graph in self._graphs.values())
        return outputs, losses

    def _bound(self, Xs: Sequence[Any], ys: Sequence[Any]) -> List[Tuple[Graph, Executor, List[Array]]]:
        """Return each shard's graph, its executor, and the arrays that it reads."""
        labels = ys if self._loss is not None else [None] * len(Xs)
        shards = [(self._graph(X, y), inputs_of(self._net, X, y)) for X, y in zip(Xs, labels)]
        contexts = [inputs[0].context for _, inputs in shards]
        if len({(context.device_typeid, context.device_id) for context in contexts}) < len(contexts):
            raise NotCompilableError(f"several shards are on one device: {contexts}")
        reqs = tuple([param._grad_req for param in self._params.values()]) if self._trains else ()
        state = self._states.setdefault(reqs, len(self._states))  # a number compares sooner
        bound = []
        for (graph, inputs), context in zip(shards, contexts):
            executors = self._executors.get(context)
            if executors is None:
                executors = self._executors[context] = Executors(context)
            try:
                bound.append((graph, executors.get(graph, inputs, trains=self._trains, state=state), inputs))
            except (mx.MXNetError, ValueError, RuntimeError) as error:
                raise NotCompilableError(f"MXNet cannot bind the graph: {last_line(error)}") from error
        return bound

    def _graph(self, X: Any, y: Any) -> Graph:
        form = (_form(X), _form(y), mx.util.is_np_array())
        if form not in self._graphs:
            self._graphs[form] = trace(self._net, self._loss, X, y)
            self._note_arrays()
        return self._graphs[form]

    def _follow(self) -> None:
        """Trace or bind again what has changed since the latest passes."""
        net, loss = self._net, self._loss
        attributes = vars(net)
        known = (attributes.get("_active"), "forward" in attributes, len(net._forward_hooks), len(net._forward_pre_hooks))
        # hybridize(), cast(), set_precision() and new layers empty the graph; debugging replaces forward()
        if known != self._known or (self._graphs and attributes.get("_cached_graph") == ()):
            self._known = known
            self._forget_executors()
            self._graphs.clear()
            self._note_arrays()
            self.reason = ""
            reason = why_not_compiled(net, loss, traced_once=self._mode == "on")
            if reason:
                self._give_up(reason)
        if self._moves != num_moves() or self._has_new_arrays():
            self._forget_executors()
            self._note_arrays()

    def _has_new_arrays(self) -> bool:
        return any(param._data is not data or param._grad is not grad for param, data, grad in self._arrays)

    def _forget_executors(self) -> None:
        for executors in self._executors.values():
            executors.clear()

    def _note_arrays(self) -> None:
        params = {id(param): param for graph in self._graphs.values() for param in graph.params.values()}
        self._arrays = [(param, param._data, param._grad) for param in params.values()]
        self._params, self._moves = params, num_moves()
        self.running_stats = [param for param in params.values() if is_running_stat(param)]

    def _give_up(self, reason: str) -> None:
        self.reason, self.running_stats = reason, None
        if self._mode == "auto":
            logger.debug("%s: passes are recorded, not compiled: %s", self._net.name, reason)


def _form(data: Any) -> Any:
    """Return what two shards of the same nesting have in common."""
    return None if is_device_array(data) or data is None else tuple(path for path, _ in leaves(data))


def check_mode(operation: str, compiled: Any) -> str:
    """Return `compiled` if it is one of `MODES`."""
    one_of(operation, "compiled", compiled, MODES, advice="'auto' compiles where it can.")
    return str(compiled)


def check_one_graph(operation: str, net: Any, compiled: str) -> None:
    """Raise `TrainerError` if a network on several devices must be compiled as one graph."""
    if compiled == "on" and spans_devices(net):
        raise TrainerError(
            f"{operation}: got compiled='on' for a {type(net).__name__}, whose stages are on different devices; expected 'auto' "
            "or 'off'. Its stages run as hybridized: call net.hybridize()."
        )


def passes_of(compiled: str, trainer: Optional[Trainer] = None) -> Callable[..., Passes]:
    """Return what makes the passes of a network and its loss, for one of `MODES`.

    With a trainer, it returns the passes of the trainer's latest run, if that had the same network and loss: tracing and binding
    them again would take as long as some steps.
    """
    if compiled == "off":
        return Passes
    make = partial(CompiledPasses, mode=compiled)
    if trainer is None:
        return make
    kept = trainer._kept_passes

    def make_or_reuse(net: gluon.Block, loss: Any, *, trains: bool) -> Passes:
        if trains not in kept or not kept[trains].is_of(net, loss, compiled):
            kept[trains] = make(net, loss, trains=trains)
        found: Passes = kept[trains]
        return found

    return make_or_reuse


def evaluating_passes(make_passes: Callable[..., Passes], net: Any, loss: Any) -> Passes:
    """Return the forward passes of a network: its own, if it spans devices."""
    found: Passes = net.make_passes(loss) if spans_devices(net) else make_passes(net, loss, trains=False)
    return found


def compile_step(
    net: gluon.Block,
    loss: Callable[[Any, Any], Array],
    trainer: Trainer,
    *,
    split_f: SplitFunction = split_batch,
    ignore_stale_grad: bool = False,
    micro_steps: int = 1,
    compiled: str = "on",
) -> TrainStep:
    """Return a function `step(X, y)` that does what `train_batch` does, with compiled passes.

    A compiled pass takes two calls of MXNet's C interface for each device, whatever the number of layers. So the host can keep
    more devices busy. Weights, running statistics and random numbers are those of `train_batch` with a network hybridized with
    `static_alloc=True, static_shape=True`, bit for bit. Weights may be set, loaded, frozen and thawed between steps.

    Parameters
    ----------
    net : gluon.HybridBlock
        Hybridized or not. Its Python code runs once for each form of data, as with `hybridize()`.
    loss : gluon.HybridBlock
        A loss of `gluon.loss`, for example.
    trainer, split_f, ignore_stale_grad, micro_steps
        As for `train_batch`.
    compiled : str
        `"on"` raises at the first batch if the passes cannot be compiled. `"auto"` records such passes as `train_batch` does, and
        logs the reason at level DEBUG; it compiles only a network and a loss that are hybridized, or a loss of `gluon.loss`.
        `"off"` records all.

    Returns
    -------
    callable (X, y) -> Batch

    Raises
    ------
    TrainerError
        An argument is invalid; or, in a step, the passes cannot be compiled. Nothing was changed.

    Examples
    --------
    >>> net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> step = compile_step(net, gluon.loss.L2Loss(), Trainer(net, "sgd", {"learning_rate": 0.5}))
    >>> batch = step(mx.nd.array([[1, 0], [0, 1]]), mx.nd.zeros(2))
    >>> net.weight.data(mx.cpu(1)).asnumpy().tolist()
    [[0.75, 0.75]]
    """
    make = passes_of(check_mode("compile_step", compiled))
    check_one_graph("compile_step", net, compiled)
    return make_step("compile_step", net, loss, trainer, split_f, ignore_stale_grad, micro_steps, make)
