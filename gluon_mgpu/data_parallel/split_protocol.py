"""What divides a batch over devices: `split_batch` with its options, a function of the user, or an object of this interface."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Callable, List, Optional, Sequence, Tuple

from mxnet import Context

from ..checks import check_function, short
from ..errors import ShardError, TrainerError
from ..nested import Fields
from .sharding import SplitOptions, SplitPlan, part_of_process, split_batch

Shards = Tuple[List[Any], List[Any]]
SplitFunction = Callable[[Any, Any, Sequence[Context]], Shards]


class Split:
    """Divides batches over devices. `train_batch` and its relatives take it as `split_f`.

    Attributes
    ----------
    batch_axis : int, or a pair (for X, for y) of ints or nested ints
        The axis of the examples.
    knows_processes : bool
        Whether it returns the shards of this process, where several processes share a batch.
    """

    batch_axis: Any = 0
    knows_processes = False

    def __call__(self, X: Any, y: Any, devices: Sequence[Context]) -> Shards:
        """Return the shards of features and of labels, each on its device."""
        raise NotImplementedError

    def plan(self, X: Any, y: Any, devices: Sequence[Context]) -> Optional[SplitPlan]:
        """Return how it divides batches of this form; None if it may divide two of them in two ways."""
        return None

    def own_part(self, label: Any, num_devices: int) -> Any:
        """Return this process's part of a batch's label; None if it has none."""
        return label

    @property
    def label_axis(self) -> Any:
        """That of the labels."""
        return self.batch_axis[1] if isinstance(self.batch_axis, (list, tuple)) else self.batch_axis


class BatchSplit(Split):
    """`split_batch` with these options."""

    knows_processes = True

    def __init__(self, options: SplitOptions) -> None:
        self.options, self.batch_axis = options, options.batch_axis

    def plan(self, X: Any, y: Any, devices: Sequence[Context]) -> SplitPlan:
        return SplitPlan("split_batch", Fields((X, y)), devices, self.options, is_prepared=True)

    def own_part(self, label: Any, num_devices: int) -> Any:
        return part_of_process(label, num_devices, replace(self.options, batch_axis=self.label_axis))


class FunctionSplit(Split):
    """A function of the user's, or d2l's. Its axis is the default of its parameter `batch_axis`, otherwise 0."""

    def __init__(self, function: SplitFunction, batch_axis: Any) -> None:
        self._function, self.batch_axis = function, batch_axis

    def __call__(self, X: Any, y: Any, devices: Sequence[Context]) -> Shards:
        shards = self._function(X, y, list(devices))
        pair = isinstance(shards, (list, tuple)) and len(shards) == 2 and all(isinstance(side, (list, tuple)) for side in shards)
        if not pair or len(shards[0]) != len(shards[1]) or not shards[0]:
            raise ShardError(
                f"split_f: got {short(shards)}; expected as many shards of features as of labels, 1 or more. Return (list of X "
                "shards, list of y shards)."
            )
        return list(shards[0]), list(shards[1])

    def __repr__(self) -> str:
        return repr(self._function)


def as_split(operation: str, split_f: Any) -> Split:
    """Return the object that divides batches as `split_f` does.

    Raises
    ------
    TrainerError
        It cannot be called.
    """
    if isinstance(split_f, Split):
        return split_f
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
    axis = defaults.get("batch_axis", 0)
    if is_ours:
        return BatchSplit(SplitOptions(axis, bool(defaults.get("even_split")), defaults.get("weights")))
    return FunctionSplit(split_f, axis)
