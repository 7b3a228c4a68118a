"""Blocks for legacy and np arrays alike: they compute with legacy operators."""

from __future__ import annotations

from functools import wraps
from typing import Any, Callable

from mxnet.gluon import nn
from mxnet.util import is_np_array, np_array

from ...mxnet_internals import dropout
from ...mxnet_internals.versions import is_mxnet2
from ...nested import map_leaves

Method = Callable[..., Any]


def on_legacy_arrays(method: Method) -> Method:
    """Return a method that receives legacy arrays only, and returns arrays of the current mode.

    MXNet 1.9.1 has the recurrent operator for np arrays, but not all operators around it. Both kinds are views of the same
    memory, and gradients flow through the conversion.
    """

    @wraps(method)
    def computed(self: Any, *args: Any) -> Any:
        if not is_np_array():
            return method(self, *args)
        with np_array(False):
            results = method(self, *map_leaves(lambda _, leaf: leaf.as_nd_ndarray(), args))
        return map_leaves(lambda _, leaf: leaf.as_np_ndarray(), results)

    return computed


class _OnLegacyArrays:
    """A layer of Gluon's for legacy arrays, even if its parameters were initialised in np mode."""

    if is_mxnet2():

        def __call__(self, x: Any) -> Any:
            return super().__call__(x.as_np_ndarray()).as_nd_ndarray()  # type: ignore[misc]

    else:

        def hybrid_forward(self, F: Any, x: Any, **params: Any) -> Any:
            legacy = {name: param.as_nd_ndarray() for name, param in params.items() if param is not None}
            return super().hybrid_forward(F, x, **legacy)  # type: ignore[misc]


class Dense(_OnLegacyArrays, nn.Dense):  # type: ignore[misc]
    """Gluon's layer, for legacy arrays in both modes."""


class Embedding(_OnLegacyArrays, nn.Embedding):  # type: ignore[misc]
    """Gluon's layer, for legacy arrays in both modes."""


class Dropout(_OnLegacyArrays, dropout.Dropout):
    """Gluon's layer, except that it returns its input without a copy if the rate is 0."""

    def __call__(self, x: Any) -> Any:
        """Return the input with some elements set to zero."""
        return (
            super().__call__(x) if dropout.dropout_rate(self) else x
        )  # a graph of its own that returns its input would lose the gradient
