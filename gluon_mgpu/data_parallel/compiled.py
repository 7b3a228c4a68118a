"""Passes as compiled graphs: two calls of MXNet a device, where Gluon's Python takes one for each operator or block."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_not
from typing import Any, Dict, Hashable, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context, MXNetError, autograd, gluon

from ..checks import OF_WRONG_DATA, one_of
from ..errors import TrainerError, last_line
from ..mxnet_internals.blocks import flags_of, hooks_of, trace_state
from ..mxnet_internals.c_calls import Flags
from ..mxnet_internals.parameters import binding_of, gradients_of
from ..nested import Array
from ..refusals import refusal
from ..runtime.environment import logger
from ..trainer.fresh import Pass
from ..trainer.parameters import has_values, spans_devices
from ..trainer.recorder import examples_of
from ..trainer.trainer import Trainer
from .batchnorm import is_synchronised
from .executors import Executor
from .graph import Graph, NotCompilableError, inputs_of, nesting_of, preparation, reasons_against, trace
from .passes import Outputs, Passes, decide_shapes, forgetting_graphs, raise_named
from .plan import Plan, form_of

MOST = 64  # bound batches of a network


@dataclass(eq=False)
class _Bound:
    """The executors for batches of one form, and what their passes leave.

    Attributes
    ----------
    found : Pass, optional
    others : Flags
        Of parameters that other trainers have: set, as autograd would.
    """

    executors: List[Executor]
    found: Optional[Pass] = None
    others: Flags = field(default_factory=partial(Flags, ()))


class CompiledPasses(Passes):
    """Passes through MXNet's graph executor, one graph of network and loss per device; or recorded ones, where that cannot be.

    ```
    shard ─► copied ─► executor for its shape ─► copies of outputs and losses
                          │ reads the weights, writes gradients and running statistics: the parameters' own arrays
                          └─◄── backward
    ```

    The gradients have the same bits as those of a network hybridized with `static_alloc` and `static_shape`. The executors of a
    device share the memory of the largest one. MXNet's recurrent operator keeps memory of its own in each, which nothing can
    share. On CPUs, graphs gain time for it if several contexts run it at once, which it does only without Dropout.

    Parameters
    ----------
    net : gluon.Block
    loss : callable (output, label) -> NDArray, or None
    trainer : Trainer, optional
        It looks at its parameters before each forward pass. None: no backward pass follows; layers such as Dropout predict.
    mode : str
        `"on"`: raise where the passes cannot be compiled. `"auto"`: record them, and log why; networks and losses must be
        hybridized, which says that tracing their Python code once is enough.

    Attributes
    ----------
    reason : str
        Why the latest passes were recorded; "" if they were compiled.
    """

    def __init__(self, net: gluon.Block, loss: Any, trainer: Optional[Trainer], mode: str) -> None:
        super().__init__(net, loss, trains=trainer is not None)
        self.reason = ""
        self._trainer, self._mode = trainer, mode
        self._prepare = preparation(net)
        self._state_of = trace_state if isinstance(net, gluon.HybridBlock) else hooks_of
        self._flags_of = flags_of if isinstance(loss, gluon.HybridBlock) else type  # which stays
        self._graphs: Dict[Hashable, Graph] = {}
        self._params: Dict[int, gluon.Parameter] = {}  # of the graphs, by their ids
        self._others: List[gluon.Parameter] = []  # of these: frozen ones, and those that the trainer does not look at
        self._seen: Tuple[List[Any], List[Any]] = [self], []  # what graphs and executors depend on, when they were made
        self._bound: OrderedDict[Hashable, _Bound] = OrderedDict()  # by the forms of the shards
        self._owners: Dict[Context, Executor] = {}  # bound for the largest shape: the others use its memory
        self._queued: Optional[_Bound] = None  # whose backward passes follow

    def is_of(self, net: gluon.Block, loss: Any, mode: str) -> bool:
        """Return whether these are the passes of this network and loss, in this mode."""
        return self._net is net and self._loss is loss and self._mode == mode

    def forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], plan: Optional[Plan] = None) -> Outputs:
        """Queue the forward passes of all shards, and return their outputs and losses, which later passes leave alone.

        Raises
        ------
        StepError
            The network or the loss rejects a shard.
        TrainerError
            They cannot be compiled, and the mode is `"on"`. Nothing was changed.
        """
        self._queued, self.is_compiled = None, False
        self._follow()
        reason = self.reason
        if not reason:
            try:
                return self._run_graphs(operation, Xs, ys, plan)
            except NotCompilableError as error:
                reason = str(error)
                if self._mode == "on":  # raises StepError if the data are to blame
                    with forgetting_graphs(self._net):
                        Passes(self._net, self._loss, trains=False).forward(operation, Xs, ys)
        if self._mode == "on" and is_synchronised(self._net):
            raise refusal(operation, "compiled='on'", "synchronised BatchNorm")
        if self._mode == "on":
            raise TrainerError(
                f"{operation}: got a network, loss or data that cannot be compiled: {reason}; expected one graph. Pass "
                "compiled='auto' to run such passes without a graph."
            )
        found = super().forward(operation, Xs, ys)
        self.draws = None
        if not self.reason:  # the data are not to blame: the recorded passes accept them
            self._set_reason(reason)
        return found

    def _go_back(self, trainer: Trainer, losses: Sequence[Array], plan: Optional[Plan]) -> Pass:
        queued, self._queued = self._queued, None
        if queued is None:
            return super()._go_back(trainer, losses, plan)
        scale = 1.0 if trainer.steps.loss_scaler is None else trainer.steps.loss_scaler.begin()
        trainer.steps.fresh.begin_graphs()
        for executor in queued.executors:
            executor.backward(scale)
        if queued.found is None:  # until the parameters change, it is the same for each batch of this form
            queued.found = trainer.steps.recorder.by_graphs(self._params, examples_of(losses, {}))
            trained, contexts = set(map(id, trainer.params)), [executor.context for executor in queued.executors]
            others = [param for key, param in self._params.items() if key not in trained and param.grad_req != "null"]
            queued.others = Flags([param.data(context) for param in others for context in contexts])
        queued.others.set()
        return queued.found

    def _run_graphs(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], plan: Optional[Plan]) -> Outputs:
        if self._loss is None:
            ys = [None] * len(Xs)
        key = None if plan is None else plan.shard_forms
        if key is None:
            key = (mx.util.is_np_array(), *map(form_of, Xs), *map(form_of, ys))
            if plan is not None and plan.slices is not None:
                plan.shard_forms = key
        if not (self._graphs or has_values(self._net)):
            decide_shapes(operation, self._net, Xs, ys)
        bound = self._bound.pop(key, None) or _Bound(self._bind(Xs, ys))
        self._bound[key] = bound  # the latest one at the end
        if len(self._bound) > MOST:
            self._bound.popitem(last=False)
        outputs, losses, at = [], [], 0
        try:
            for at, executor in enumerate(bound.executors):
                graph, X, y = executor.graph, Xs[at], ys[at]
                heads = executor.forward((X, y) if graph.is_plain else inputs_of(self._prepare, X, y))
                if self._loss is not None:
                    losses.append(heads.pop(0))
                outputs.append(heads[0] if graph.is_plain else graph.outputs(heads))
        except (MXNetError, *OF_WRONG_DATA) as error:
            raise_named(error, operation, "network", at, Xs[at], ys[at])
        self._queued = bound if self._trains else None
        self.is_compiled = True
        return outputs, losses

    def _bind(self, Xs: Sequence[Any], ys: Sequence[Any]) -> List[Executor]:
        """Return an executor for each shard."""
        shards = [(self._graph(X, y), inputs_of(self._prepare, X, y)) for X, y in zip(Xs, ys)]
        contexts = [inputs[0].context for _, inputs in shards]
        if len(set(contexts)) < len(contexts):
            raise NotCompilableError(f"several shards are on one device: {contexts}")
        if self._mode == "auto" and any(_gains_nothing(graph, inputs[0].context) for graph, inputs in shards):
            raise NotCompilableError("its recurrent operators would run one after the other, and keep memory in each graph")
        mx.nd.waitall()  # as binding does: an error of an earlier operation is no reason not to compile
        try:
            return [self._executor(graph, inputs) for graph, inputs in shards]
        except (MXNetError, ValueError, RuntimeError) as error:
            raise NotCompilableError(f"MXNet cannot bind the graph: {last_line(error)}") from error

    def _executor(self, graph: Graph, inputs: List[Array]) -> Executor:
        context = inputs[0].context
        made = partial(Executor, graph, inputs, trains=self._trains)
        if context in self._owners and self._owners[context].size >= sum(one.size for one in inputs):
            return made(shared=self._owners[context])
        self._forget()
        self._owners.pop(context, None)  # the new one gets its memory
        self._owners[context] = made()
        return self._owners[context]

    def _graph(self, X: Any, y: Any) -> Graph:
        form = (nesting_of(X), nesting_of(y), mx.util.is_np_array())
        if form not in self._graphs:
            with autograd.record() if self._trains else autograd.predict_mode():
                self._graphs[form] = trace(self._net, self._loss, X, y)
            self._note()
        return self._graphs[form]

    def _follow(self) -> None:
        """Trace, or only bind again, what has changed since the latest passes."""
        (traced, bound), (former_traced, former_bound) = self._look(), self._seen
        is_other = any(map(is_not, traced, former_traced))
        if not is_other and not any(map(is_not, bound, former_bound)):
            return
        if is_other:  # not at each change of the arrays: MXNet's text of a graph leaks memory
            self._graphs.clear()
            self._set_reason(next(reasons_against(self._net, self._loss, traced_once=self._mode == "on"), ""))
        self._forget()
        self._owners.clear()
        self._note()

    def _look(self) -> Tuple[List[Any], List[Any]]:
        """Return what graphs and what executors depend on: the same things while they stay."""
        net = self._net
        looked_at = None if self._trainer is None else self._trainer.steps.layout.version
        # hybridize(), cast(), set_precision() and new layers empty the network's graph, and any call makes another one
        *made, hooks, pre_hooks = self._state_of(net)
        traced = [*made, len(hooks), len(pre_hooks), self._flags_of(self._loss), "forward" in vars(net), is_synchronised(net)]
        return traced, [looked_at, *chain.from_iterable(map(binding_of, self._others))]

    def _note(self) -> None:
        self.draws = any(graph.draws for graph in self._graphs.values()) if self._graphs else None
        self._params = {id(param): param for graph in self._graphs.values() for param in graph.params.values()}
        looked_at = set() if self._trainer is None else set(map(id, self._trainer.params))
        self._others = [param for key, param in self._params.items() if key not in looked_at or gradients_of(param) is None]
        self._seen = self._look()

    def _forget(self) -> None:
        """Forget all executors that have run: their arrays have changed, or need more memory."""
        if self._bound:
            mx.nd.waitall()  # their operations must not be deleted while they run
        self._bound.clear()

    def _set_reason(self, reason: str) -> None:
        if reason not in ("", self.reason) and self._mode == "auto":
            logger.debug("%s: passes are recorded, not compiled: %s", type(self._net).__name__, reason)
        self.reason = reason


def _gains_nothing(graph: Graph, context: Context) -> bool:
    """Return whether it has recurrent operators that never run at once on CPUs: those of one context, or with Dropout."""
    is_alone = all(len(param.list_ctx()) == 1 for param in graph.params.values())
    return graph.is_recurrent and context.device_type == "cpu" and (graph.draws or is_alone)


def make_passes(
    operation: str, net: Any, loss: Any, compiled: Any, *, trainer: Optional[Trainer] = None, kept: Dict[str, object]
) -> Passes:
    """Return the passes of a network: its own if it spans devices, otherwise recorded or compiled ones.

    Parameters
    ----------
    compiled : str
        `"auto"`, `"on"` or `"off"`.
    trainer : Trainer, optional
        None for forward passes that no backward pass follows.
    kept : dict, optional
        The passes of earlier calls, which serve again if they have the same network and loss: tracing and binding them again
        would take as long as some steps.

    Raises
    ------
    TrainerError
        The mode is none of these, or a network on several devices must be compiled as one graph.
    """
    one_of(operation, "compiled", compiled, ("auto", "on", "off"), advice="'auto' compiles where it can.")
    if spans_devices(net):
        if compiled == "on":
            raise refusal(operation, "Pipeline", "compiled='on'")
        return net.make_passes(loss, trainer=trainer)
    if compiled == "off":
        return Passes(net, loss, trains=trainer is not None)
    name = "passes" if trainer is None else "training passes"
    known = kept.get(name)
    if not isinstance(known, CompiledPasses) or not known.is_of(net, loss, compiled):
        known = kept[name] = CompiledPasses(net, loss, trainer, compiled)
    return known
