"""Evaluate a network on all its devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Iterable, List, Optional, Sequence, Union

from mxnet import Context, autograd, gluon

from ..checks import check_function
from ..data.iterators import check_iterable
from ..data_parallel.compiled import make_passes
from ..data_parallel.passes import Passes
from ..data_parallel.plan import Planner, as_split
from ..data_parallel.sharding import Split, SplitFunction, split_batch
from ..data_parallel.step import Batch, check_network
from ..data_parallel.virtual_passes import VirtualPasses
from ..devices.select import check_contexts
from ..mxnet_internals.array_parts import ShardRange
from ..protocols import HasEvaluation
from ..trainer.parameters import average_replicas, devices_of
from ..trainer.replica_check import ReplicaComparison
from ..trainer.tree_sum import VirtualShards
from .batch_loop import BatchLoop, EpochOptions, EpochProgress
from .evaluation_sums import EvaluationSums
from .metrics import Metrics, accuracy, metrics_for

# batches queued on the devices: without a backward pass they take little memory, and small ones are short
_OPTIONS = EpochOptions("evaluate", max_inflight=8)


def evaluate_accuracy_gpus(net: gluon.Block, data_iter: Iterable[Any], split_f: SplitFunction = split_batch) -> float:
    """Return the accuracy of a network on a data set, computed on all its devices.

    d2l's function, with the same result. It adds up on the devices and reads every 256 batches; d2l's reads every shard of each.
    Running statistics that a pass without a step has moved, and the weights of a `LocalSGD`, are first made equal on all devices.

    Parameters
    ----------
    net : gluon.Block
        Initialised on one or more devices.
    data_iter : iterable of (features, labels)
        Shapes (B, ...); a batch may have fewer examples than there are devices.
    split_f : callable (features, labels, devices) -> (list of shards, list of shards)

    Returns
    -------
    float, 0 to 1

    Raises
    ------
    TrainerError
        There is no batch, or one is not a pair.

    Source: the signature is that of d2l, chapter "Concise Implementation for Multiple GPUs".
    """
    return evaluate(net, data_iter, [accuracy], split_f=split_f)["accuracy"]


def evaluate(
    net: gluon.Block,
    data_iter: Iterable[Any],
    metrics: Union[str, Metrics] = "auto",
    *,
    loss: Optional[Any] = None,
    split_f: SplitFunction = split_batch,
    compiled: str = "auto",
    virtual_shards: Optional[int] = None,
) -> Dict[str, float]:
    """Return the value of each metric over a data set, computed on all devices of the network.

    Parameters
    ----------
    net : gluon.Block
        Initialised on one or more devices.
    data_iter : iterable of (features, labels)
        Shapes (B, ...).
    metrics : "auto", sequence, or dict name -> metric
        Functions `(output, label)` of a shard -> (sum, count): see `gluon_mgpu.accuracy`. "auto": as in `fit`. Objects such as
        `mx.metric.F1()` are copied, reset, and updated once per batch with the labels and outputs of all devices and processes,
        as legacy arrays. They compute with NumPy, so the host waits for each batch. A composite gives one value for each of its
        metrics; another object of several values names them `name_value`.
    loss : callable (output, label) -> NDArray, optional
        Its mean is returned as `loss`: that of its attribute `evaluation`, if it has one.
    split_f : callable (features, labels, devices) -> (list of shards, list of shards)
    compiled : "auto", "on" or "off"
        Whether the passes run as compiled graphs; see `fit`.
    virtual_shards : int, optional
        Cut batches into so many parts, so that the result has the same bits on any number of devices that divides it.

    Returns
    -------
    dict of str to float

    Raises
    ------
    TrainerError
        There is no batch, or one is not a pair.
    """
    check_network("evaluate", net)
    loss = loss.evaluation if isinstance(loss, HasEvaluation) else loss
    if virtual_shards is not None:
        virtual_shards = VirtualShards(virtual_shards, devices_of(net)).number
    passes = make_passes("evaluate", net, loss, compiled, kept={})
    return run_evaluation(
        net, data_iter, metrics_for(metrics, loss), loss=loss, split_f=split_f, passes=passes, virtual_shards=virtual_shards
    ).means


def eval_batch(
    net: gluon.Block, X: Any, y: Any, *, ctx: Sequence[Context], loss: Any = None, split_f: SplitFunction = split_batch
) -> Batch:
    """Run one batch forward over the devices, in prediction mode, and return its outputs. It does not wait.

    Each device predicts with its own weights and running statistics. They differ after a pass that no step has used, and between
    the averages of `LocalSGD`: `trainer.average_replicas()` makes them equal, as `evaluate` and `predict` do.

    Parameters
    ----------
    net : gluon.Block
    X, y : array, or nested data
        A batch, shapes (B, ...).
    ctx : list of mxnet.Context
    loss : callable (output, label) -> NDArray, optional
    split_f : callable (X, y, devices) -> (list of X shards, list of y shards)
    """
    check_network("eval_batch", net)
    check_contexts(ctx, "eval_batch")
    passes = make_passes("eval_batch", net, loss, "off", kept={})
    return EvalStep("eval_batch", loss, ctx, as_split("eval_batch", split_f), passes)(X, y)


class EvalStep:
    """What `eval_batch` does with each batch."""

    def __init__(self, operation: str, loss: Any, devices: Sequence[Context], split: Split, passes: Passes) -> None:
        if loss is not None:
            check_function(operation, "loss", loss, advice="Pass a loss of gluon.loss, or None.")
        self.ranges: List[ShardRange] = []  # the shards of the latest batch, if its plan tells
        self._operation, self._passes, self._split = operation, passes, split
        self._planner = Planner(operation, loss, replace(split, trains=False), devices)

    def __call__(self, X: Any, y: Any) -> Batch:
        """Evaluate one batch. It records nothing, even inside `autograd.record`."""
        with autograd.pause():
            return self._evaluate(X, y)

    def _evaluate(self, X: Any, y: Any) -> Batch:
        planner, passes = self._planner, self._passes
        plan, Xs, ys = planner.split(X, y)
        Xs, ys = passes.arrange(self._operation, Xs, ys, self._split)
        outputs, losses = passes.forward(self._operation, Xs, ys, plan)
        checks = planner.check_labels(plan, outputs, y)
        _, own_units = planner.count(plan, losses, y, ys, is_compiled=passes.is_compiled)
        self.ranges = plan.slices.ranges if plan.slices is not None else []
        known = plan if passes.is_compiled and plan.slices else None
        return Batch(outputs, ys, losses, plan.num_examples, own_units, passes.shard_numbers, known, checks)


def run_evaluation(
    net: gluon.Block,
    data_iter: Iterable[Any],
    metrics: Metrics,
    options: EpochOptions = _OPTIONS,
    *,
    loss: Optional[Any],
    split_f: SplitFunction,
    passes: Passes,
    virtual_shards: Optional[int] = None,
) -> EpochProgress:
    """Evaluate a network. `evaluate` calls it with these options, `fit` with its own, which can stop it."""
    split = as_split("evaluate", split_f, virtual_shards or 0)
    check_iterable("evaluate", "data_iter", data_iter, reader="evaluate", each_once=True)
    parts = passes if virtual_shards is None else VirtualPasses(passes, virtual_shards)
    step = EvalStep("evaluate", loss, devices_of(net), split, parts)
    with autograd.pause():  # a program may evaluate inside autograd.record
        average_replicas(net)
        comparison = ReplicaComparison("evaluate", net)
        progress = BatchLoop(step, EvaluationSums(metrics, split, num_shards=virtual_shards), options).run(data_iter)
    comparison.check()
    return progress
