"""Blocks with one definition for both versions of MXNet: `hybrid_forward(F, ...)` of 1.9, and `forward(...)` of 2."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ContextManager, Iterable

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

from ..mxnet_internals.blocks import is_hybridized, own_params, run_graph
from ..mxnet_internals.versions import is_mxnet2

if is_mxnet2():
    from ..mxnet_internals.versions import is_deferred_compute


class HybridBlock(nn.HybridBlock):  # type: ignore[misc]
    """A HybridBlock whose subclasses define `compute(F, *arrays, **params)`, as `hybrid_forward` of MXNet 1.9.

    `F` is `mx.nd`, or `mx.sym` where MXNet 1.9 makes a graph; both versions have the legacy operators. MXNet 2 makes graphs from
    arrays, and its blocks have `forward(*arrays)` in the place of `hybrid_forward`.
    """

    def compute(self, F: Any, *args: Any, **params: Any) -> Any:
        """Return the output."""
        raise NotImplementedError

    if is_mxnet2():
        __call__ = gluon.Block.__call__  # without the check of HybridBlock's that all arrays are np arrays

        def forward(self, *args: Any) -> Any:
            """Run the graph if the block is hybridized, or `compute`."""
            with args[0].context as context:
                if is_hybridized(self) and not is_deferred_compute():  # else the first call makes the graph
                    return run_graph(self, *args)
                return self.compute(mx.nd, *args, **{name: param.data(context) for name, param in own_params(self).items()})

    else:

        def hybrid_forward(self, F: Any, *args: Any, **params: Any) -> Any:
            """Return the output."""
            return self.compute(F, *args, **params)


def named(block: gluon.Block) -> ContextManager[Any]:
    """Return a context in which the names of new layers begin with that of a block. MXNet 2 names them by where they are."""
    return nullcontext() if is_mxnet2() else block.name_scope()


def stacked(name: str, layers: Iterable[nn.HybridBlock]) -> nn.HybridSequential:
    """Return layers, which are made here, one after the other, with names that begin with this one."""
    made = nn.HybridSequential(**({} if is_mxnet2() else {"prefix": f"{name}_"}))
    with named(made):
        made.add(*layers)
    return made


def new_parameter(block: gluon.Block, name: str, **options: Any) -> gluon.Parameter:
    """Return a new parameter of a block."""
    return gluon.Parameter(name, **options) if is_mxnet2() else block.params.get(name, **options)
