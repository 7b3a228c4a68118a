"""What a network or a loss may offer in addition to Gluon's methods. All of it is optional."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Protocol, Sequence, Tuple, runtime_checkable

import numpy as np


def hook(thing: Any, method: Callable[..., Any]) -> Any:
    """Return the method that a thing offers, such as `CountsUnits.num_units`, or None.

    `isinstance` of these classes takes tens of microseconds on Python 3.11: do not ask it for each batch.
    """
    return getattr(thing, method.__name__, None)


@runtime_checkable
class PreparesInputs(Protocol):
    """A network whose `forward` prepares its inputs in Python: `Seq2Seq`. Compiled passes call this instead."""

    def graph_inputs(self, X: Any) -> Optional[Tuple[Any, ...]]:
        """Return the arguments of `hybrid_forward`, legacy arrays, for a shard; None where Python must run the network."""


@runtime_checkable
class SpansDevices(Protocol):
    """A network that keeps its parameters on different devices: `Pipeline`, which explains the attributes."""

    stages: Sequence[Any]
    replica_contexts: List[Any]
    all_contexts: List[Any]

    def make_passes(self, loss: Any, *, trainer: Any = None) -> Any:
        """Return the `Passes` of a batch."""


@runtime_checkable
class HasGraph(Protocol):
    """A loss that is not a HybridBlock, and can be part of a compiled graph: `SequenceLoss`."""

    def graph(self, output: Any, label: Any) -> Any:
        """Return the symbol of the loss, from symbols in the form of the network's output and of the label."""


@runtime_checkable
class CountsUnits(Protocol):
    """A loss of which the gradient is divided by other units than examples, such as target tokens: `SequenceLoss`."""

    def num_units(self, y: Any) -> int:
        """Return the number of units in the labels of a complete batch, or of a process's part of it."""


@runtime_checkable
class HasClassLabels(Protocol):
    """A loss of its own kind whose labels are checked to be numbers of classes, which are on the last axis: `SequenceLoss`."""

    def class_labels(self, y: Any) -> np.ndarray:
        """Return the labels, with 0 in the place of those that the loss ignores. Arguments are NumPy's."""


@runtime_checkable
class HasEvaluation(Protocol):
    """A loss that `fit` and `evaluate` report by another one, `evaluation`: without label smoothing, for example."""

    evaluation: Any
