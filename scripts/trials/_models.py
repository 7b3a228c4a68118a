"""Small networks, the batches that train them, and the losses that programs take of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

Nets = Dict[str, gluon.Block]
Losses = Callable[[Nets, Any, Any], List[Any]]  # of one shard: one number an example each

_NUM_CLASSES, _NUM_WORDS, _NUM_INPUTS = 3, 9, 4


@dataclass(frozen=True)
class Model:
    """What a program trains.

    Attributes
    ----------
    build : callable () -> dict of Block
        Makes the networks, not initialised.
    batch : callable (rng, number of examples) -> (X, y)
        NumPy arrays; X may be a tuple of them.
    losses : dict of callable
        By the name of the pass.
    trained_by : dict
        Pass -> trainer that steps after it.
    nets_of : dict
        Trainer -> names of its networks. A trainer of part of a network has the places of its parameters in `parts`.
    whole : dict
        Pass -> (network, loss) where `train_batch` and `fit` can make it.
    batch_axis : int or nested ints
    unreached : set of passes
        Those that leave parameters of their trainer without a gradient.
    by_shard : bool
        Whether the result depends on how a batch is split.
    scores : bool
        Whether the network's output has one number a class.
    """

    build: Callable[[], Nets]
    batch: Callable[[np.random.RandomState, int], Tuple[Any, Any]]
    losses: Dict[str, Losses]
    trained_by: Dict[str, str]
    nets_of: Dict[str, List[str]] = field(default_factory=lambda: {"trainer": ["net"]})
    parts: Dict[str, Tuple[float, float]] = field(default_factory=dict)
    whole: Dict[str, Tuple[str, Any]] = field(default_factory=dict)
    batch_axis: Any = 0
    unreached: Sequence[str] = ()
    by_shard: bool = False
    normalizes: bool = False
    hybrid: bool = True
    scores: bool = True


def _simple(build: Callable[[], gluon.Block], batch: Any = None, loss: Any = None, **options: Any) -> Model:
    """Return a model of one network with one loss."""
    loss = loss or gluon.loss.SoftmaxCrossEntropyLoss()
    return Model(
        lambda: {"net": build()},
        batch or _vectors,
        {"all": lambda nets, X, y: [loss(nets["net"](X), y)]},
        {"all": "trainer"},
        whole={"all": ("net", loss)},
        **options,
    )


def _vectors(rng: np.random.RandomState, num: int) -> Tuple[Any, Any]:
    return rng.uniform(-1, 1, (num, _NUM_INPUTS)).astype("float32"), rng.randint(0, _NUM_CLASSES, num).astype("int32")


def _reals(rng: np.random.RandomState, num: int) -> Tuple[Any, Any]:
    return _vectors(rng, num)[0], rng.uniform(-1, 1, (num, _NUM_CLASSES)).astype("float32")


def _images(rng: np.random.RandomState, num: int) -> Tuple[Any, Any]:
    return rng.uniform(-1, 1, (num, 1, 4, 4)).astype("float32"), rng.randint(0, _NUM_CLASSES, num).astype("int32")


def _words(rng: np.random.RandomState, num: int) -> Tuple[Any, Any]:
    return rng.randint(0, _NUM_WORDS, (num, 2)).astype("int32"), rng.randint(0, _NUM_CLASSES, num).astype("int32")


def _next_words(rng: np.random.RandomState, num: int) -> Tuple[Any, Any]:
    return rng.randint(0, _NUM_WORDS, (num, 2)).astype("int32"), rng.randint(0, _NUM_WORDS, num).astype("int32")


def _two(rng: np.random.RandomState, num: int) -> Tuple[Any, Any]:
    left, y = _vectors(rng, num)
    return (left, _vectors(rng, num)[0]), y


def _series(rng: np.random.RandomState, num: int) -> Tuple[Any, Any]:
    return rng.uniform(-1, 1, (3, num, 2)).astype("float32"), rng.randint(0, _NUM_CLASSES, (3, num)).astype("int32")


def _dense(units: int, inputs: int, **options: Any) -> nn.Dense:
    return nn.Dense(units, in_units=inputs, **options)


def mlp() -> Model:
    """Return two layers."""
    return _simple(lambda: _sequential(_dense(5, 4, activation="tanh"), _dense(3, 5)))


def regression() -> Model:
    """Return three layers with a loss of three numbers an example."""

    def layers() -> gluon.Block:
        return _sequential(_dense(3, 4, activation="sigmoid"), _dense(3, 3, use_bias=False), _dense(3, 3))

    return _simple(layers, _reals, gluon.loss.L2Loss(), scores=False)


def deep() -> Model:
    """Return twelve layers, of which `dense10_` sorts before `dense9_`."""
    return _simple(lambda: _sequential(_dense(4, 4), *(_dense(4, 4, activation="tanh") for _ in range(10)), _dense(3, 4)))


def shapeless() -> Model:
    """Return layers that learn their input sizes from the first batch."""
    return _simple(lambda: _sequential(nn.Dense(5, activation="tanh"), nn.LayerNorm(), nn.Dense(3)))


def conv() -> Model:
    """Return a convolution."""

    def layers() -> gluon.Block:
        convolution = nn.Conv2D(2, 3, padding=1, in_channels=1)
        return _sequential(convolution, nn.Activation("tanh"), nn.AvgPool2D(2), nn.Flatten(), _dense(3, 8))

    return _simple(layers, _images)


def batchnorm() -> Model:
    """Return a convolution with BatchNorm, whose figures are one device's only where one device gets all."""

    def layers() -> gluon.Block:
        convolution = nn.Conv2D(2, 3, padding=1, in_channels=1, use_bias=False)  # its gradient would be rounding alone
        return _sequential(convolution, nn.BatchNorm(in_channels=2), nn.Activation("tanh"), nn.Flatten(), _dense(3, 32))

    return _simple(layers, _images, normalizes=True)


def tied() -> Model:
    """Return a layer that is used twice, and one that shares its parameters."""

    def layers() -> gluon.Block:
        shared = _dense(4, 4, activation="tanh")
        return _sequential(_dense(4, 4), shared, _dense(4, 4, params=shared.params), shared, _dense(3, 4))

    return _simple(layers)


def embedding() -> Model:
    """Return words that are embedded and averaged."""
    return _simple(lambda: _sequential(nn.Embedding(_NUM_WORDS, 4), nn.Flatten(), _dense(3, 8)), _words)


def sparse() -> Model:
    """Return the same with row_sparse gradients."""

    def layers() -> gluon.Block:
        return _sequential(nn.Embedding(_NUM_WORDS, 4, sparse_grad=True), nn.Flatten(), _dense(3, 8))

    return _simple(layers, _words)


class _Tongue(gluon.HybridBlock):
    """A language model whose output layer has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(_NUM_WORDS, 4)
            self.mix = _dense(4, 8, activation="tanh")
            self.out = nn.Dense(_NUM_WORDS, in_units=4, use_bias=False, params=self.embed.params)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return self.out(self.mix(self.embed(x)))


def tied_embedding() -> Model:
    """Return a language model with one weight at both ends."""
    return _simple(_Tongue, _next_words)


class _Branches(gluon.Block):
    """A layer for shards whose first number is positive, another for the rest, one for batches that begin high."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.first = _dense(4, 4, activation="tanh")
            self.up, self.down, self.rare, self.out = _dense(4, 4), _dense(4, 4), _dense(4, 4), _dense(3, 4)

    def forward(self, x: Any) -> Any:
        begin = float(x.asnumpy().ravel()[0])
        hidden = self.first(x)
        hidden = self.up(hidden) if begin > 0 else self.down(hidden)
        if begin > 0.6:
            hidden = self.rare(hidden)
        return self.out(hidden)


def branches() -> Model:
    """Return layers that only some devices, and only some batches, use."""
    return _simple(_Branches, by_shard=True, hybrid=False, unreached=("all",))


class _Heads(gluon.HybridBlock):
    """A trunk with two heads, and one from its middle."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.low, self.high = _dense(4, 4, activation="tanh"), _dense(4, 4, activation="tanh")
            self.left, self.right, self.aside = _dense(3, 4), _dense(3, 4), _dense(3, 4)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        low = self.low(x)
        high = self.high(low)
        return self.left(high), self.right(high), self.aside(low)


def heads() -> Model:
    """Return two heads and an auxiliary one: trained together, by a list of losses, or apart."""
    each = gluon.loss.SoftmaxCrossEntropyLoss()

    def weighted(output: Any, y: Any) -> Any:
        return each(output[0], y) + each(output[1], y) * 0.5 + each(output[2], y) * 0.3

    return Model(
        lambda: {"net": _Heads()},
        _vectors,
        {
            "all": lambda nets, X, y: [weighted(nets["net"](X), y)],
            "list": lambda nets, X, y: [each(output, y) for output in nets["net"](X)],
            "left": lambda nets, X, y: [each(nets["net"](X)[0], y)],
            "aside": lambda nets, X, y: [each(nets["net"](X)[2], y)],
        },
        dict.fromkeys(("all", "list", "left", "aside"), "trainer"),
        whole={"all": ("net", weighted)},
        unreached=("left", "aside"),
        scores=False,
    )


class _Pair(gluon.HybridBlock):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.left, self.right, self.out = _dense(4, 4), _dense(4, 4, activation="tanh"), _dense(3, 4)

    def forward(self, x: Any, *rest: Any) -> Any:
        return super().forward(*x) if isinstance(x, (tuple, list)) else super().forward(x, *rest)

    def hybrid_forward(self, F: Any, x: Any, z: Any) -> Any:
        return self.out(self.left(x) * self.right(z))


class _Unpacked(gluon.Block):
    """Calls its network with a tuple's items."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.inner = _Pair()

    def forward(self, x: Any) -> Any:
        return self.inner(*x)


def two_inputs() -> Model:
    """Return a network of a tuple of inputs."""
    return _simple(_Unpacked, _two)


class _Recurrent(gluon.HybridBlock):
    """One output a step, time first."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.cell = gluon.rnn.GRU(3, input_size=2)
            self.out = _dense(3, 3, flatten=False)

    def forward(self, x: Any) -> Any:
        return self.out(self.cell(x))


def recurrent() -> Model:
    """Return a recurrent network, whose batch axis is 1: in the data, and in the labels."""
    loss = _TimeFirst()
    return Model(
        lambda: {"net": _Recurrent()},
        _series,
        {"all": lambda nets, X, y: [loss(nets["net"](X), y)]},
        {"all": "trainer"},
        whole={"all": ("net", loss)},
        batch_axis=1,
        hybrid=False,
        scores=False,
    )


class _TimeFirst:
    """Cross entropy of (T, B, C) and (T, B), a mean over T for each example, in nd and np alike."""

    def __init__(self) -> None:
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def __call__(self, output: Any, label: Any) -> Any:
        swapped = (output.swapaxes(0, 1), label.swapaxes(0, 1))
        return self._loss(*swapped)


def time_first_loss() -> Model:
    """Return the same with Gluon's own `batch_axis=1`, which np mode ignores; the other loss is the reference there."""
    return replace(recurrent(), whole={"all": ("net", gluon.loss.SoftmaxCrossEntropyLoss(batch_axis=1))})


def halves() -> Model:
    """Return one network with a trainer for either half."""
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    return Model(
        lambda: {"net": _sequential(_dense(4, 4, activation="tanh"), _dense(4, 4, activation="tanh"), _dense(3, 4))},
        _vectors,
        {"all": lambda nets, X, y: [loss(nets["net"](X), y)]},
        {"all": "lower"},
        {"lower": ["net"], "upper": ["net"]},
        {"lower": (0.0, 0.4), "upper": (0.4, 1.0)},
    )


def gan() -> Model:
    """Return a generator and a discriminator, with a trainer each."""
    each = gluon.loss.SigmoidBinaryCrossEntropyLoss()

    def generated(nets: Nets, X: Any) -> Any:
        return nets["generator"](X)

    def judged(nets: Nets, X: Any, target: float) -> Any:
        score = nets["discriminator"](X)
        return each(score, score * 0 + target)

    def score(nets: Nets, X: Any) -> Any:
        return nets["discriminator"](X).reshape((-1,))

    return Model(
        lambda: {
            "generator": _sequential(_dense(3, 4, activation="tanh"), _dense(4, 3)),
            "discriminator": _sequential(_dense(3, 4, activation="tanh"), _dense(1, 3)),
        },
        _vectors,
        {
            "both": lambda nets, X, y: [judged(nets, X, 1), judged(nets, generated(nets, -X).detach(), 0)],
            "real": lambda nets, X, y: [judged(nets, X, 1)],
            "fake": lambda nets, X, y: [judged(nets, generated(nets, X).detach(), 0)],
            "generator": lambda nets, X, y: [judged(nets, generated(nets, X), 1)],
            "critic": lambda nets, X, y: [score(nets, generated(nets, -X).detach()) - score(nets, X)],
            "critic generator": lambda nets, X, y: [-score(nets, generated(nets, X))],
        },
        {
            "both": "discriminator",
            "real": "discriminator",
            "fake": "discriminator",
            "critic": "discriminator",
            "generator": "generator",
            "critic generator": "generator",
        },
        {"generator": ["generator"], "discriminator": ["discriminator"]},
        whole={"real": ("discriminator", lambda output, y: each(output, output * 0 + 1))},
        scores=False,
    )


def _sequential(*layers: gluon.Block) -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(*layers)
    return net


MODELS = {
    make.__name__: make
    for make in (
        mlp,
        regression,
        deep,
        shapeless,
        conv,
        batchnorm,
        tied,
        embedding,
        sparse,
        tied_embedding,
        branches,
        heads,
        two_inputs,
        recurrent,
        time_first_loss,
        halves,
        gan,
    )
}


def made(name: str, seed: int, contexts: Sequence[mx.Context], dtype: str) -> Tuple[Model, Nets]:
    """Return a model and its networks with the weights of a seed, under the same names each time."""
    with mx.name.NameManager():
        model = MODELS[name]()
        nets = model.build()
    mx.random.seed(seed)
    np.random.seed(seed)
    for net in nets.values():
        net.initialize(mx.init.Uniform(0.7), ctx=list(contexts))  # before the cast: MXNet draws no float64 in np mode
        if dtype != "float32":
            net.cast(dtype)
    return model, nets
