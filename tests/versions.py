"""What tests write differently for MXNet 1.9 and 2."""

import re

import mxnet as mx
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet.gluon import nn


class _NumPyArrays:
    """np arrays under the names of legacy ones."""

    np, npx = mx.np, mx.npx

    def __getattr__(self, name):
        return getattr(next((module for module in (mx.np, mx.npx) if hasattr(module, name)), mx.nd), name)

    def array(self, values, ctx=None, dtype=None):
        """An array of float32, unless the values are on a device."""
        return mx.np.array(values, ctx=ctx, dtype=dtype or (values.dtype if isinstance(values, mx.nd.NDArray) else "float32"))


nd = _NumPyArrays() if is_mxnet2() else mx.nd  # what the layers of MXNet take when np arrays are not asked for
COMPILED = "auto" if is_mxnet2() else "on"  # MXNet 2 compiles no passes


class HybridBlock(nn.HybridBlock):
    """A block whose subclasses define `compute(F, *arrays, **params)`."""

    def __init__(self, **kwargs):
        super().__init__(**({} if is_mxnet2() else kwargs))

    if is_mxnet2():

        def forward(self, *args):
            params = {name: param.data(args[0].ctx) for name, param in self._reg_params.items()}
            return self.compute(nd, *args, **params)
    else:

        def hybrid_forward(self, F, *args, **params):
            return self.compute(F, *args, **params)


def begin_thread():
    """Switch np arrays on in this thread if MXNet's layers take no others."""
    if is_mxnet2():
        mx.npx.set_np()


def without_log(text):
    """What a process printed, without what MXNet 2 logs of its memory."""
    return re.sub(r"^\[[\d:]+\] \S*storage\.cc:\d+: .*\n", "", text, flags=re.MULTILINE)


def with_prefix(layer, prefix, **options):
    """A layer with a name of its own; MXNet 2 names parameters by where they are."""
    return layer(**options, **({} if is_mxnet2() else {"prefix": prefix}))


def sharing(other, layer, *args, **options):
    """A layer with the parameters of another."""
    if not is_mxnet2():
        return layer(*args, params=other.params, **options)
    made = layer(*args, **options)
    made.share_parameters(other.collect_params())
    return made


def set_params(block, name, value):
    """Set an attribute of all parameters."""
    for param in block.collect_params().values():
        setattr(param, name, value)


def reset_ctx(block, contexts):
    """Move all parameters to other devices."""
    for param in block.collect_params().values():
        (param.reset_device if is_mxnet2() else param.reset_ctx)(contexts)
