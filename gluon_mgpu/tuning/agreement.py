"""Whether training on several devices agrees with training on one: both run, and their difference is compared with rounding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..data import ArrayLoader, ImageData
from ..data_parallel.sharding import plan_shards
from ..data_parallel.step import train_batch
from ..devices.select import check_contexts
from ..devices.transfer import new_array
from ..models import resnet18
from ..runtime.determinism import seed_everything
from ..trainer.trainer import Trainer

LEAST_TOLERANCE = 1e-5  # float32 resolves 1e-7; sums in another order reach this after some steps
MOST_TOLERANCE = 1e-3
TIMES_ROUNDING = 10.0
LEAST_STEPS = 10
AGREE, DIFFER, UNKNOWN = "agree", "do not agree", "inconclusive: neither agreement nor a difference is shown"


def mlp(num_classes: int) -> gluon.Block:
    """Return a network of two Dense layers."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Flatten(), gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(num_classes))
    return net


NETWORKS: Dict[str, Callable[[int], gluon.Block]] = {"mlp": mlp, "resnet18": resnet18}


@dataclass(frozen=True)
class Recipe:
    """A training setup: network, data, batch size and optimizer.

    Attributes
    ----------
    build : callable (num_classes) -> gluon.Block
        Without dropout: its random numbers are different on each device.
    data : ImageData
    batch_size : int
        Over all devices.
    num_steps : int
    learning_rate : float
    optimizer : str
        `sgd` gets momentum 0.9.
    """

    build: Callable[[int], gluon.Block]
    data: ImageData
    batch_size: int = 32
    num_steps: int = 50
    learning_rate: float = 0.05
    optimizer: str = "sgd"

    def batches(self, seed: int = 0) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        """Yield the same batches for the same seed, each epoch's short one first, so that a wrong divisor shows at once."""

        def endless() -> Iterator[Any]:
            loader = ArrayLoader(self.data.train_images, self.data.train_labels, self.batch_size, shuffle=True, seed=seed)
            while True:
                *most, last = loader
                yield last
                yield from most

        return islice(endless(), self.num_steps)

    def network(self, contexts: Sequence[Context], seed: int = 0) -> gluon.Block:
        """Return the network with weights that depend only on the seed, not on the devices."""
        net = self.build(self.data.num_classes)
        net.initialize(mx.init.Xavier(), ctx=list(contexts))
        seed_everything(seed)
        net(new_array(self.data.train_images[:1], contexts[0], "float32"))  # sets the shapes, and draws the weights
        return net

    def params(self) -> Dict[str, Any]:
        """Return the optimizer's parameters."""
        momentum = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        return {"learning_rate": self.learning_rate, **momentum}


@dataclass(frozen=True)
class SameBatch:
    """One device and several with the same batches: except for rounding, the losses of their steps must be equal.

    Attributes
    ----------
    reference, ours : list of float
        The mean loss of each step: Gluon's own loop on one device, and the toolkit's on all.
    rounding : list of float
        Gluon's own loop again, with the examples of each shard in another order: equal except for rounding.
    """

    reference: List[float]
    ours: List[float]
    rounding: List[float]

    def allowed(self) -> np.ndarray:
        """Return the allowed difference of each step that can be compared: ten times the effect of rounding so far, or 1e-5.

        A deep network amplifies 1e-7 to 1 in a few dozen steps. Steps from where ten times rounding exceeds 1e-3 do not count.
        """
        bounds = TIMES_ROUNDING * np.maximum.accumulate(np.abs(np.subtract(self.reference, self.rounding)))
        return np.maximum(LEAST_TOLERANCE, bounds[bounds <= MOST_TOLERANCE])

    def differences(self) -> np.ndarray:
        """Return the difference of each step that can be compared."""
        return np.abs(np.subtract(self.reference, self.ours))[: len(self.allowed())]

    @property
    def verdict(self) -> str:
        """`agree` or `do not agree`; inconclusive if fewer than ten steps can be compared."""
        if not (self.differences() <= self.allowed()).all():  # NaN is within nothing
            return DIFFER
        return AGREE if len(self.allowed()) >= min(LEAST_STEPS, len(self.reference)) else UNKNOWN


def same_batch(
    recipe: Recipe, contexts: Sequence[Context], *, seed: int = 0, on_message: Callable[[str], None] = lambda text: None
) -> SameBatch:
    """Train on one device and on all with the same batches, and return the losses of both.

    The single device computes the same shards one after another and sums their gradients, so that BatchNorm uses the same
    statistics per shard. It uses Gluon's own Trainer, independent of the toolkit. Its running statistics are updated by each
    shard in turn, unlike those of several devices.

    Parameters
    ----------
    recipe : Recipe
    contexts : list of mxnet.Context
    seed : int
        Determines the weights and the order of the examples.
    on_message : callable (str)
        Gets a message before each of three runs.
    """
    check_contexts(contexts, "same_batch")
    order = np.random.default_rng(seed)
    on_message(f"the same batches on {contexts[0]}, with Gluon's own loop")
    reference = _train_by_gluon(recipe, contexts, seed, lambda num: np.arange(num))
    on_message(f"the same again, with the examples in another order: the size of rounding errors on {contexts[0]}")
    rounding = _train_by_gluon(recipe, contexts, seed, order.permutation)
    on_message(f"the same batches on {', '.join(map(str, contexts))}")
    net, loss = recipe.network(contexts, seed), gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = Trainer(net, recipe.optimizer, recipe.params())
    losses = [_mean(train_batch(net, loss, trainer, X, y).losses) for X, y in recipe.batches(seed)]
    return SameBatch(reference, losses, rounding)


def _train_by_gluon(recipe: Recipe, contexts: Sequence[Context], seed: int, order: Callable[[int], np.ndarray]) -> List[float]:
    """Train on the first device with Gluon's own Trainer: one shard per device, with its examples in the order of `order`."""
    net, loss = recipe.network(contexts[:1], seed), gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), recipe.optimizer, recipe.params())
    losses: List[float] = []
    for X, y in recipe.batches(seed):
        shard_losses, end = [], 0
        with autograd.record():
            for size in filter(None, plan_shards(len(X), len(contexts))):
                chosen, end = end + order(size), end + size
                data, label = (new_array(one[chosen], contexts[0], one.dtype) for one in (X, y))
                shard_losses.append(loss(net(data), label))
        autograd.backward(shard_losses)
        trainer.step(len(X))
        losses.append(_mean(shard_losses))
    return losses


def _mean(losses: Sequence[Any]) -> float:
    numbers = np.concatenate([one.asnumpy().reshape(-1) for one in losses])
    return float(numbers.mean(dtype=np.float64))
