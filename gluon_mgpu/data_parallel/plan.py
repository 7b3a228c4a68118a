"""What a step does with batches of one form, decided when the first of them comes: the split, the divisor, and the checks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from ..checks import short, whole_number
from ..distributed import process_shard
from ..errors import NestedError, ShardError, TrainerError
from ..nested import Array, is_device_array, leaves
from ..refusals import refusal
from .sharding import SplitPlan, count_examples
from .split_protocol import Shards, Split

MOST = 64  # plans of a step: the least recently used one leaves


def form_of(data: Any) -> Optional[Hashable]:
    """Return what batches have in common that are computed alike: types, dtypes, shapes and devices; None for plain numbers."""
    if isinstance(data, np.ndarray):
        return data.shape, data.dtype
    if is_device_array(data):
        context = data.context
        return type(data), data.shape, data.dtype, data.stype, context.device_typeid, context.device_id
    if data is None:
        return ()
    parts = []
    for path, leaf in leaves(data):
        form = form_of(leaf) if isinstance(leaf, (np.ndarray, mx.nd.NDArray)) else None
        if form is None:
            return None
        parts.append((path, form))
    return tuple(parts)


class Plan:
    """The plan for batches of one form.

    Attributes
    ----------
    parts : SplitPlan, optional
        How such batches are divided; None if that varies.
    num_examples : int
        Over all processes that share the batch; of the latest batch, where the split varies.
    examples : dict of Context to int
        Those of each device of this process.
    is_new : bool
        No batch was counted yet.
    shapes : list of tuple
        Those of the losses that were counted.
    casts_labels : bool
        Whether labels may be bool, for a loss that does not take them.
    shards : hashable, optional
        The forms of the shards, noted by the first compiled passes.
    """

    def __init__(self, parts: Optional[SplitPlan], *, casts_labels: bool) -> None:
        self.parts, self.casts_labels, self.is_new = parts, casts_labels, True
        self.num_examples = 0 if parts is None else parts.num_examples
        self.examples: Dict[Context, int] = {}
        self.shapes: List[Tuple[int, ...]] = []
        self.shards: Optional[Hashable] = None

    def is_counted(self, losses: Sequence[Array], *, is_compiled: bool) -> bool:
        """Return whether a batch with these losses has the numbers of the batch that was counted: always with one graph."""
        if self.parts is None or self.is_new:
            return False
        return is_compiled or self.shapes == [loss.shape for loss in losses]


class Planner:
    """Makes the plans of a step, and keeps them.

    Parameters
    ----------
    operation : str
        The caller's name, for errors.
    loss : callable (output, label) -> NDArray, or None
    split : Split
    devices : list of mxnet.Context
    """

    def __init__(self, operation: str, loss: Any, split: Split, devices: Sequence[Context]) -> None:
        self._operation, self._loss, self._split, self._devices = operation, loss, split, list(devices)
        self._num_units: Optional[Callable[[Any], int]] = getattr(loss, "num_units", None)
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def plan(self, X: Any, y: Any) -> Plan:
        """Return the plan for batches like this one."""
        forms = form_of(X), form_of(y)
        key = (*forms, mx.util.is_np_array(), process_shard())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(X, y)
            if None not in forms:
                self._plans[key] = plan
                if len(self._plans) > MOST:
                    self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def split(self, plan: Plan, X: Any, y: Any) -> Shards:
        """Return the shards of a batch; bool labels become float32 for Gluon's losses."""
        parts = plan.parts
        Xs, ys = self._split(X, y, self._devices) if parts is None else parts.pair(X, y)
        if plan.casts_labels:
            ys = [label.astype("float32") if is_device_array(label) and label.dtype == np.bool_ else label for label in ys]
        return Xs, ys

    def count(self, plan: Plan, losses: Sequence[Array], y: Any, ys: Sequence[Any]) -> None:
        """Count the examples of a batch; check that each loss holds one number per example of its shard."""
        several = process_shard()[1] > 1
        if losses:
            counted = [self._count(shard, *pair) for shard, pair in enumerate(zip(losses, ys))]
            most = None if several else self._size(y)
            if most is not None and sum(counted) > most:
                raise TrainerError(
                    f"{self._operation}: got losses of {counted} examples for a batch of {most} along axis "
                    f"{self._split.label_axis}; expected no more. Give split_f a parameter batch_axis, whose default is the axis "
                    "of the examples."
                )
            plan.examples, plan.shapes = {}, [loss.shape for loss in losses]
            for loss, number in zip(losses, counted):
                plan.examples[loss.context] = plan.examples.get(loss.context, 0) + number
            plan.num_examples = sum(counted)
        else:
            plan.num_examples = sum(int(label.shape[0]) for label in ys if is_device_array(label) and label.shape)
        if several:
            plan.num_examples = count_examples(self._operation, y, self._split.label_axis)
        plan.is_new = False

    def units(self, y: Any) -> Tuple[Optional[int], Optional[int]]:
        """Return the units that a loss with `num_units` counts in a batch and in this process's part; None for other losses."""
        if self._num_units is None:
            return None, None
        total = self._units(y, 1)
        if process_shard()[1] == 1:
            return total, total
        part = self._split.own_part(y, len(self._devices))
        return total, 0 if part is None else self._units(part, 0)

    def _units(self, label: Any, low: int) -> int:
        assert self._num_units is not None, "it was asked before"
        name, advice = "num_units(y) of the loss", "Leave out the batch."
        return whole_number(self._operation, name, self._num_units(label), low=low, advice=advice)

    def _make(self, X: Any, y: Any) -> Plan:
        if process_shard()[1] > 1 and not self._split.knows_processes:
            raise refusal(self._operation, "several processes", "a split of your own", f"split_f={self._split!r}")
        self._check_axis(y)
        casts = isinstance(self._loss, gluon.loss.Loss) and getattr(y, "dtype", np.bool_) == np.bool_
        return Plan(self._split.plan(X, y, self._devices), casts_labels=casts)

    def _check_axis(self, label: Any) -> None:
        """Raise `TrainerError` if one of MXNet's losses would average over other axes than those of one example.

        If a shard has as many examples as time steps, the shape of the result does not show it.
        """
        loss = self._loss
        if type(loss).__module__ != gluon.loss.__name__:
            return
        axis, wanted, name = loss._batch_axis, self._split.label_axis, type(loss).__name__
        if axis and mx.util.is_np_array():
            raise TrainerError(
                f"{self._operation}: got {name} with batch_axis={axis} and np arrays, of which MXNet then averages all axes but "
                f"0; expected examples on axis 0. Pass lambda output, label: loss(output.swapaxes(0, {axis}), "
                f"label.swapaxes(0, {axis})) with a loss of batch_axis=0."
            )
        ndim = label.ndim if is_device_array(label) or isinstance(label, np.ndarray) else 0
        if isinstance(wanted, int) and ndim and axis % ndim != wanted % ndim:
            raise TrainerError(
                f"{self._operation}: got {name} with batch_axis={axis} and labels that are split along axis {wanted}; expected "
                f"the axis of the examples for both. Pass batch_axis={wanted} to the loss, or to the split."
            )

    def _count(self, shard: int, loss: Any, label: Any) -> int:
        """Return the number of examples of a shard: that of its loss, which must be that of its label."""
        wanted = self._size(label)
        if not is_device_array(loss) or not loss.shape or wanted not in (None, loss.shape[0]):
            raise TrainerError(
                f"{self._operation}: got a loss {short(loss)} for shard {shard}, which holds {wanted} examples; expected one "
                "number for each example, so that uneven shards count correctly. Leave the mean out of the loss, pass it the "
                "axis of the examples (batch_axis), and add several losses up."
            )
        return int(loss.shape[0])

    def _size(self, label: Any) -> Optional[int]:
        """Return the number of examples of a batch or shard, None if its labels do not show it."""
        try:
            return count_examples(self._operation, label, self._split.label_axis)
        except (ShardError, NestedError):
            return None
