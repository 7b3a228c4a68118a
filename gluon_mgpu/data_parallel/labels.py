"""Class labels: which losses take them, and whether they are numbers of classes. MXNet clips those that are not, silently."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Optional, Set

import numpy as np
from mxnet import gluon

from ..errors import DataError
from ..mxnet_internals.blocks import class_axis as classes_of
from ..nested import host_array, is_device_array, leaves, map_leaves
from ..protocols import HasClassLabels, hook

lowest, highest = partial(np.minimum.reduce, axis=None), partial(np.maximum.reduce, axis=None)  # no Python call
_CLASSES = gluon.loss.SoftmaxCELoss


def class_axis(loss: Any) -> Optional[int]:
    """Return the axis of the classes in the outputs, None for a loss that takes other labels or may ignore some.

    The classes of a loss with `class_labels` are on the last axis.
    """
    if hook(loss, HasClassLabels.class_labels):
        return -1
    if not isinstance(loss, _CLASSES) or "forward" in vars(loss):
        return None
    is_other = any(getattr(type(loss), name, None) is not getattr(_CLASSES, name, None) for name in _CALLED)
    return None if is_other else classes_of(loss)


_CALLED = ("__call__", "forward", "hybrid_forward")


def device_types(y: Any) -> Set[str]:
    """Return the types of the devices of labels that are MXNet's arrays, which may still be computed."""
    return {leaf.context.device_type for _, leaf in leaves(y) if is_device_array(leaf)}


def check_labels(operation: str, labels_of: Optional[Callable[[Any], Any]], y: Any, num_classes: int) -> None:
    """Raise `DataError` if a label is not the number of a class. It reads MXNet's arrays.

    `labels_of`: the `class_labels` of a loss that has it.
    """
    host = map_leaves(lambda _, leaf: leaf.asnumpy() if is_device_array(leaf) else host_array(leaf), y)
    labels = host if labels_of is None else labels_of(host)
    if not isinstance(labels, np.ndarray) or not labels.size or (lowest(labels) >= 0 and highest(labels) < num_classes):
        return
    index = tuple(np.argwhere(~((labels >= 0) & (labels < num_classes)))[0].tolist())
    raise DataError(
        f"{operation}: got label {float(labels[index]):g} at {list(index)} of labels of shape {labels.shape}, for {num_classes} "
        f"classes; expected 0 to {num_classes - 1}, as MXNet takes the nearest class. Number the classes from 0, or let the last "
        "layer have an output for each."
    )
