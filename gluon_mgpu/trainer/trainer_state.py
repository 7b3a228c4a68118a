"""The state of a trainer: taken, checked against another trainer, and restored there."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence, Tuple

from ..errors import StateError
from .optimizer_config import describe, restore_optimizer
from .states import TrainerState, check_state
from .steps import Steps


def state_of(steps: Steps) -> TrainerState:
    """Return what `restore` takes: the optimizer, its states and counts, with the arrays that training changes.

    Raises
    ------
    StateError
        The optimizer cannot be described.
    """
    steps.end_apart()
    layout, update = steps.layout, steps.update
    return TrainerState(
        layout.names,
        layout.structural,
        [param.shape for param in layout.params],
        update.order,
        update.states(),
        update.counts(),
        describe(steps.optimizer),
        None if steps.loss_scaler is None else steps.loss_scaler.state(),
        None if steps.tree is None else steps.tree.virtual.state(),
    )


def check_fits(
    steps: Steps, state: TrainerState, source: Any, operation: str, shapes: Optional[Mapping[int, Sequence[int]]] = None
) -> None:
    """Raise `StateError` unless `restore` can take a state.

    Parameters
    ----------
    source : path
        Where it was read, and the `operation` that reads it, for errors.
    shapes : mapping of int to shape, optional
        By the ids of parameters that have no values yet.
    """
    check_state(state, source, operation, steps.layout, steps.optimizer, shapes, _parts(steps, state))
    saved = None if state.virtual_shards is None else state.virtual_shards.get("number")
    number = None if steps.tree is None else steps.tree.virtual.number
    if saved != number:
        advice = "Leave virtual_shards out" if saved is None else f"Pass virtual_shards={saved}"
        raise StateError(
            f"{operation}: got {source} of a run with virtual_shards={saved} for one with {number}; expected the same number, "
            f"as others round differently. {advice}."
        )


def restore(steps: Steps, state: TrainerState, *, learning_rate: bool = True) -> None:
    """Continue from a state that `check_fits` accepts. Accumulated gradients are dropped.

    Without `learning_rate`, the optimizer keeps its own.
    """
    steps.end_apart()
    for part, saved in _parts(steps, state):
        part.restore(saved)
    restore_optimizer(state.optimizer, steps.optimizer, steps.schedule_at_first, learning_rate=learning_rate)
    steps.drop()  # statistics may have been loaded, too
    steps.running_stats.begin()
    steps.update.restore(state.states, state.counts, state.order)


def _parts(steps: Steps, state: TrainerState) -> List[Tuple[Any, Any]]:
    """Return what has a state of its own here and in the state, each with that."""
    pairs = (steps.loss_scaler, state.loss_scaler), (steps.tree and steps.tree.virtual, state.virtual_shards)
    return [pair for pair in pairs if None not in pair]
