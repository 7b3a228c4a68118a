"""Dropout of MXNet: its options, those of recurrent layers, and a layer that leaves it to MXNet's own operator.

Source: MXNet 1.9.1, python/mxnet/gluon/nn/basic_layers.py, rnn/rnn_layer.py.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon.rnn.rnn_layer import _RNNLayer

from .versions import is_mxnet2

dropout_rate = attrgetter("_rate")


class Dropout(gluon.nn.Dropout):  # type: ignore[misc]
    """Gluon's layer, which passes `cudnn_off=False`, with MXNet's own operator."""

    if not is_mxnet2():

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            """Return the output."""
            if not self._rate:
                return super().hybrid_forward(F, x)
            dropout = F.npx.dropout if mx.util.is_np_array() else F.Dropout
            return dropout(x, p=self._rate, axes=self._axes, name="fwd", cudnn_off=True)


def drops_inside(block: gluon.Block) -> bool:
    """Return whether this is a fused recurrent layer with dropout between its layers."""
    return isinstance(block, _RNNLayer) and bool(block._dropout) and block._num_layers > 1
