"""What a step does with batches of one form, decided when the first of them comes: the split, the divisor, and the checks."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from inspect import signature
from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from ..checks import check_function, short, whole_number
from ..distributed import process_shard
from ..errors import NestedError, ShardError, TrainerError
from ..mxnet_internals.blocks import batch_axis_of
from ..nested import Array, Fields, is_device_array, leaves
from ..protocols import CountsUnits, HasClassLabels, hook
from ..refusals import refusal
from .labels import check_labels, class_axis, device_types, highest, lowest
from .sharding import Shards, Split, SplitPlan, count_examples, split_batch

MOST = 64  # plans of a step: the least recently used one leaves


def as_split(operation: str, split_f: Any, virtual: int = 0) -> Split:
    """Return how `split_f` divides batches. The axis of a function is the default of its parameter `batch_axis`, otherwise 0.

    Parameters
    ----------
    virtual : int
        So many virtual shards over all devices and processes, which `split_batch` makes; 0 for one on each device.

    Raises
    ------
    TrainerError
        It cannot be called, or not make virtual shards.
    """
    check_function(operation, "split_f", split_f, advice="Pass split_batch, which takes (X, y, devices).")
    is_ours = (split_f.func if isinstance(split_f, partial) else split_f) is split_batch
    try:
        defaults = {name: one.default for name, one in signature(split_f).parameters.items() if one.default is not one.empty}
    except (TypeError, ValueError) as error:  # a function of C has none
        if is_ours:
            raise TrainerError(
                f"{operation}: got split_f={short(split_f)} ({error}); expected options of split_batch. Its help lists them."
            ) from error
        defaults = {}
    axis, weights = defaults.get("batch_axis", 0), defaults.get("weights")
    if virtual and (not is_ours or weights is not None):
        raise refusal(operation, "virtual_shards", "a split of your own", f"split_f={short(split_f)}")
    return Split(axis, weights=weights, virtual=virtual) if is_ours else Split(axis, function=split_f)


def form_of(data: Any) -> Optional[Hashable]:
    """Return what batches have in common that are computed alike: types, dtypes, shapes and devices; None for plain numbers."""
    if isinstance(data, np.ndarray):
        return data.shape, data.dtype
    if is_device_array(data):
        context = data.context
        return type(data), data.shape, data.dtype, context.device_typeid, context.device_id  # the type tells of sparse ones
    forms = []
    for path, leaf in leaves(data):
        form = form_of(leaf) if isinstance(leaf, (np.ndarray, mx.nd.NDArray)) else None
        if form is None:
            return None
        forms.append((path, form))
    return tuple(forms)


class Plan:
    """The plan for batches of one form.

    Attributes
    ----------
    slices : SplitPlan, optional
        Where such batches are cut; None if that varies.
    num_examples : int
        Over all processes that share the batch; of the latest batch, where the split varies.
    examples : dict of Context to int
        Those of each device, of the losses that were counted.
    is_new : bool
        No batch was counted yet.
    shapes : list of tuple
        Those of the losses that were counted.
    casts_labels : bool
        Whether labels may be bool, for a loss that does not take them.
    num_classes : int
        0 for losses that do not take class labels.
    shard_forms : hashable, optional
        Noted by the first compiled passes.
    """

    def __init__(self, slices: Optional[SplitPlan], *, casts_labels: bool) -> None:
        self.slices, self.casts_labels, self.is_new = slices, casts_labels, True
        self.num_classes, self.num_examples = 0, 0 if slices is None else slices.num_examples
        self.examples: Dict[Context, int] = {}
        self.shapes: List[Tuple[int, ...]] = []
        self.shard_forms: Optional[Hashable] = None


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
        self._class_axis, self._has_read = class_axis(loss), False
        self._num_units = hook(loss, CountsUnits.num_units)
        self._labels_of = hook(loss, HasClassLabels.class_labels)
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def split(self, X: Any, y: Any) -> Tuple[Plan, List[Any], List[Any]]:
        """Return the plan for batches like this one, and its shards; bool labels become float32 for Gluon's losses."""
        forms = form_of(X), form_of(y)
        key = (*forms, mx.util.is_np_array(), process_shard())
        plan = self._plans.pop(key, None) or self._make(X, y)
        if None not in forms:
            self._plans[key] = plan  # the latest one at the end
            if len(self._plans) > MOST:
                self._plans.popitem(last=False)
        Xs, ys = self._by_function(X, y) if plan.slices is None else plan.slices.pair(X, y)
        if plan.casts_labels:
            ys = [label.astype("float32") if is_device_array(label) and label.dtype == np.bool_ else label for label in ys]
        return plan, Xs, ys

    def check_labels(self, plan: Plan, outputs: Sequence[Any], y: Any) -> List[Callable[[], None]]:
        """Raise `DataError` if a class label is out of range. Labels in MXNet's arrays may still be computed.

        Returns
        -------
        list of callable ()
            The checks of those on CPUs: run them when the losses are computed, and they do not wait. The first ones are read now.
        """
        if self._class_axis is None or not outputs:
            return []
        if plan.is_new:
            shape = getattr(outputs[0], "shape", ())
            plan.num_classes = shape[self._class_axis] if -len(shape) <= self._class_axis < len(shape) else 0
        num = plan.num_classes
        if not num or (type(y) is np.ndarray and y.size and lowest(y) >= 0 and highest(y) < num):
            return []
        check, found = partial(check_labels, self._operation, self._labels_of, y, num), device_types(y)
        if found and (self._has_read or "gpu" in found):
            return [] if "gpu" in found else [check]
        self._has_read = True
        check()
        return []

    def count(
        self, plan: Plan, losses: Sequence[Array], y: Any, ys: Sequence[Any], *, is_compiled: bool
    ) -> Tuple[int, Optional[int]]:
        """Count what the gradient of a batch is divided by; check that each loss holds one number per example of its shard.

        Parameters
        ----------
        is_compiled : bool
            Whether one graph has computed the losses: then all batches of a plan have the same numbers.

        Returns
        -------
        (int, int or None)
            The divisor; and with a loss that has `num_units`, its units in this process's part of the batch.
        """
        if plan.slices is None or plan.is_new or not (is_compiled or plan.shapes == [loss.shape for loss in losses]):
            self._count_examples(plan, losses, y, ys)
        if self._num_units is None or not plan.num_examples:
            return plan.num_examples, None
        checked = partial(whole_number, self._operation, "num_units(y) of the loss", advice="Leave out the batch.")
        total = here = checked(self._num_units(y))
        if process_shard()[1] > 1:
            assert plan.slices is not None, "a function cannot divide a batch of several processes"
            labels = plan.slices.shard_of_process(y, self._split.label_axis)
            here = 0 if labels is None else checked(self._num_units(labels), low=0)
        return total, here

    def _make(self, X: Any, y: Any) -> Plan:
        split, slices = self._split, None
        if split.function is not None and process_shard()[1] > 1:
            raise refusal(self._operation, "several processes", "a split of your own", f"split_f={short(split.function)}")
        self._check_axis(y)
        casts = isinstance(self._loss, gluon.loss.Loss) and getattr(y, "dtype", np.bool_) == np.bool_
        if split.function is None:
            slices = SplitPlan("split_batch", Fields((X, y)), self._devices, split, is_prepared=True)
        return Plan(slices, casts_labels=casts)

    def _by_function(self, X: Any, y: Any) -> Shards:
        assert self._split.function is not None, "otherwise the plan divides"
        shards = self._split.function(X, y, list(self._devices))
        pair = isinstance(shards, (list, tuple)) and len(shards) == 2 and all(isinstance(side, (list, tuple)) for side in shards)
        if not pair or len(shards[0]) != len(shards[1]) or not shards[0]:
            raise ShardError(
                f"split_f: got {short(shards)}; expected as many feature shards as label shards, 1 or more. Return (Xs, ys)."
            )
        return list(shards[0]), list(shards[1])

    def _count_examples(self, plan: Plan, losses: Sequence[Array], y: Any, ys: Sequence[Any]) -> None:
        counted = [self._count(shard, *pair) for shard, pair in enumerate(zip(losses, ys))]
        if losses and process_shard()[1] == 1:  # otherwise the split has counted them
            most = self._size(y)
            if most is not None and sum(counted) > most:
                raise TrainerError(
                    f"{self._operation}: got losses of {counted} examples for a batch of {most} along axis "
                    f"{self._split.label_axis}; expected no more. Give split_f a parameter batch_axis, whose default is the axis "
                    "of the examples."
                )
            plan.num_examples = sum(counted)
        elif plan.slices is None:
            plan.num_examples = sum(self._size(label) or 0 for label in ys)
        plan.examples = {loss.context: number for loss, number in zip(losses, counted)}
        plan.is_new, plan.shapes = False, [loss.shape for loss in losses]

    def _check_axis(self, label: Any) -> None:
        """Raise `TrainerError` if one of MXNet's losses would average over other axes than those of one example.

        If a shard has as many examples as time steps, the shape of the result does not show it.
        """
        loss = self._loss
        if type(loss).__module__ != gluon.loss.__name__:
            return
        axis, wanted, name = batch_axis_of(loss), self._split.label_axis, type(loss).__name__
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
                "number for each example, so that uneven shards count correctly. Leave the mean out of the loss, reshape one of "
                "all tokens, pass it the axis of the examples (batch_axis), and add several losses up."
            )
        return int(loss.shape[0])

    def _size(self, label: Any) -> Optional[int]:
        """Return the number of examples of a batch or shard, None if its labels do not show it."""
        try:
            return count_examples(self._operation, label, self._split.label_axis)
        except (ShardError, NestedError):
            return None
