"""The networks of programs that cross modes."""

import mxnet as mx
import numpy as np
from gluon_mgpu.mxnet_internals.blocks import children
from mxnet import gluon, init
from mxnet.gluon import nn

MOMENTUM = 0.9  # of BatchNorm's running statistics


class Seeded(init.Initializer):
    """Weights that depend on a parameter's name and a seed alone, whenever and wherever it is initialised."""

    def _init_weight(self, name, array):
        numbers = np.random.RandomState(sum(map(ord, name)) + 1000 * self._kwargs["seed"])
        array[:] = numbers.uniform(-0.6, 0.6, array.shape)


class Skip(gluon.HybridBlock):
    """d(c(b(f)) + f) with f = a(x)."""

    def __init__(self, dense):
        super().__init__(prefix="")
        self.a, self.b, self.c, self.d = (dense(name) for name in "abcd")

    def hybrid_forward(self, F, x):
        f = self.a(x)
        return self.d(self.c(self.b(f)) + f)


class Fork(gluon.HybridBlock):
    """The first stage of a Skip: what it adds later, and what goes on."""

    def __init__(self, net):
        super().__init__(prefix="")
        self.a, self.b = net.a, net.b

    def hybrid_forward(self, F, x):
        f = self.a(x)
        return f, self.b(f)


class Join(gluon.HybridBlock):
    """The second stage of a Skip: it adds an input to a result."""

    def __init__(self, net):
        super().__init__(prefix="")
        self.c = net.c

    def hybrid_forward(self, F, f, x):
        return self.c(x) + f


class Residual(gluon.HybridBlock):
    """An input is added to a result."""

    def __init__(self, layer):
        super().__init__(prefix="")
        self.layer = layer

    def hybrid_forward(self, F, x):
        return x + self.layer(x)


class Unused(gluon.HybridBlock):
    """A layer that no pass reaches."""

    def __init__(self, dense):
        super().__init__(prefix="")
        self.a, self.aside, self.b = dense("a"), dense("x", in_units=5), dense("b")

    def hybrid_forward(self, F, x):
        return self.b(self.a(x))


class Image(gluon.HybridBlock):
    """Rows as images of one channel."""

    def hybrid_forward(self, F, x):
        return F.np.expand_dims(F.np.expand_dims(x, 1), 1) if mx.util.is_np_array() else x.reshape((0, 1, 1, -1))


def make_net(program, contexts, seed=0):
    """Return the network, initialised; its parameters have the same names and values whenever it is made."""
    known = 0 if program.deferred else 5

    def dense(name, **options):
        return nn.Dense(5, activation="tanh", prefix=f"{name}_", **{"in_units": known, **options})

    def normal(name, **options):
        return nn.BatchNorm(epsilon=0.1, momentum=MOMENTUM, in_channels=known, prefix=f"{name}_", **options)

    def tied():
        twice = dense("t", in_units=5)
        return [dense("a"), twice, dense("b"), dense("t", in_units=5, params=twice.params)]

    def conv():
        filters = nn.Conv2D(2, (1, 2), in_channels=min(1, known), activation="tanh", prefix="f_")
        return [Image(prefix=""), filters, nn.Flatten(), dense("a", in_units=8 * bool(known))]

    layers = {
        "plain": lambda: [dense("a"), dense("b"), dense("c")],
        "residual": lambda: [dense("a"), Residual(dense("b")), Residual(dense("c")), dense("d")],
        "tied": tied,
        "conv": conv,
        "dropout": lambda: [dense("a"), nn.Dropout(0.5), dense("b")],
        "norm": lambda: [dense("a", use_bias=False), normal("n"), dense("b"), dense("c")],
        "norm_first": lambda: [normal("n", center=False, scale=False), dense("a"), dense("b")],
        "norms": lambda: [normal("n"), dense("a", use_bias=False), normal("m"), dense("b")],
    }
    if program.net in layers:
        net = nn.HybridSequential(prefix="")
        net.add(*layers[program.net]())
    else:
        net = {"skip": Skip, "unused": Unused}[program.net](dense)
    net.initialize(Seeded(seed=seed), ctx=contexts)
    return net


def shortened(net, num_layers):
    """Return the network without its last layers."""
    if not num_layers:
        return net
    part = nn.HybridSequential(prefix="")
    part.add(*children(net)[:-num_layers])
    return part


def make_generator(contexts):
    """Return a network whose output another network takes."""
    generator = nn.Dense(5, in_units=5, activation="tanh", prefix="g_")
    generator.initialize(Seeded(seed=7), ctx=contexts)
    return generator


def load(array, context):
    """Return a NumPy array on a device, as the kind of array that is on."""
    return (mx.np if mx.util.is_np_array() else mx.nd).array(array, ctx=context, dtype=array.dtype)
