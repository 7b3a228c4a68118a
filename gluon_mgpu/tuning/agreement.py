"""Whether training on several devices agrees with training on one: both run, and their difference is compared with rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..data import ArrayLoader, ImageData
from ..data_parallel.sharding import plan_shards
from ..data_parallel.step import train_batch
from ..devices.select import check_contexts
from ..errors import TrainerError
from ..loop.evaluate import evaluate_accuracy_gpus
from ..pipeline.network import Pipeline
from ..pipeline.split import split_stages
from ..plots import figure
from ..runtime.environment import require
from ..trainer.schedules import scaled_params
from ..trainer.trainer import Trainer

TrainStep = Callable[[gluon.Block, Any, Trainer, Any, Any], Any]  # as train_batch: its result has `losses`

LEAST_TOLERANCE = 1e-5  # float32 resolves 1e-7; sums in another order reach this after some steps
MOST_TOLERANCE = 1e-3
TIMES_ROUNDING = 10.0
LEAST_STEPS = 10
_DRAWN_LEAST = 1e-9  # of a logarithmic axis
AGREE, DIFFER, UNKNOWN = "agree", "do not agree", "inconclusive: neither agreement nor a difference is shown"


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
    epochs : int
    learning_rate : float
        For `batch_size`.
    optimizer : str
    optimizer_params : dict
        Its other options: `{"momentum": 0.9}`.
    warmup_epochs : float
        Warm-up of the larger batch.
    rule : "linear", "sqrt" or "none"
        The rule that scales the larger batch's learning rate; `none` keeps it, without a warm-up.
    num_stages, micro_batches : int
        If not 0, several devices hold pipelines of so many stages.
    """

    build: Callable[[int], gluon.Block]
    data: ImageData
    batch_size: int = 32
    epochs: int = 10
    learning_rate: float = 0.05
    optimizer: str = "sgd"
    optimizer_params: Dict[str, Any] = field(default_factory=lambda: {"momentum": 0.9})
    warmup_epochs: float = 2
    rule: str = "linear"
    num_stages: int = 0
    micro_batches: int = 1

    def shard_sizes(self, num_examples: int, num_devices: int) -> List[int]:
        """Return the examples of each part of a batch that passes through the network by itself."""
        num_replicas = num_devices // max(1, self.num_stages)
        return [n for part in plan_shards(num_examples, num_replicas) for n in plan_shards(part, self.micro_batches)]

    def batches(self, batch_size: int, seed: int) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        """Yield the training batches of all epochs, in the same order for the same seed.

        The short batch comes first in each epoch, so that a wrong divisor shows from the first step on.
        """
        loader = self._loader(batch_size, seed)
        for _ in range(self.epochs):
            *most, last = loader
            yield last
            yield from most

    def _loader(self, batch_size: int, seed: int) -> ArrayLoader:
        return ArrayLoader(self.data.train_images, self.data.train_labels, batch_size, shuffle=True, seed=seed)

    def params(self, times: int = 1) -> Dict[str, Any]:
        """Return the optimizer's parameters for `times` the batch size: a scaled rate warms up, and every rate decays."""
        size = self.batch_size * times
        unscaled = self.rule == "none"
        scaled = scaled_params(
            self.learning_rate,
            base_batch_size=size if unscaled else self.batch_size,
            batch_size=size,
            steps_per_epoch=len(self._loader(size, 0)),
            warmup_epochs=min(self.warmup_epochs, self.epochs / 4),
            epochs=self.epochs,
            rule="linear" if unscaled else self.rule,
        )
        return {**self.optimizer_params, **scaled}


@dataclass(frozen=True)
class TrialRun:
    """One training run.

    Attributes
    ----------
    losses : list of float
        The mean loss of each step.
    accuracy : float
        On the test images, at the end.
    weights : list of numpy.ndarray
        The final weights of the first device.
    """

    losses: List[float]
    accuracy: float
    weights: List[np.ndarray]


@dataclass(frozen=True)
class SameBatch:
    """One device and several with the same batches: except for rounding, their results must be equal.

    Attributes
    ----------
    reference, ours : TrialRun
        Gluon's own loop on one device, and the toolkit's on all.
    rounding : TrialRun
        Gluon's own loop again, with the examples of each shard in another order: equal except for rounding.
    """

    reference: TrialRun
    ours: TrialRun
    rounding: TrialRun

    def num_comparable(self) -> int:
        """Return how many steps, from the first, can be compared: a deep network amplifies 1e-7 to 1 in a few dozen steps.

        The comparison ends when ten times the effect of rounding on the loss exceeds 1e-3, unless the runs themselves are
        that close.
        """
        rounding = TIMES_ROUNDING * _loss_gaps(self.reference, self.rounding)
        nearer = np.fmin(np.maximum.accumulate(rounding), np.maximum.accumulate(_loss_gaps(self.reference, self.ours)))
        return int((nearer <= MOST_TOLERANCE).sum())

    def differences(self) -> Tuple[float, float]:
        """Return the largest difference of a loss in the comparable steps, and of a weight (NaN unless all are comparable)."""
        return self._compared(self.ours)

    def tolerances(self) -> Tuple[float, float]:
        """Return the allowed differences: ten times the effect of another order of summation, from 1e-5 to 1e-3."""
        allowed = (max(LEAST_TOLERANCE, TIMES_ROUNDING * one) for one in self._compared(self.rounding))
        loss, weight = (min(MOST_TOLERANCE, one) for one in allowed)
        return loss, weight

    @property
    def verdict(self) -> str:
        """`agree` or `do not agree`; inconclusive if fewer than ten steps can be compared."""
        num_steps = self.num_comparable()
        pairs = list(zip(self.differences(), self.tolerances()))
        pairs = pairs if num_steps == len(self.reference.losses) else pairs[:1]
        if not all(difference <= bound for difference, bound in pairs):  # NaN is within nothing
            return DIFFER
        return AGREE if num_steps >= min(LEAST_STEPS, len(self.reference.losses)) else UNKNOWN

    def _compared(self, run: TrialRun) -> Tuple[float, float]:
        num_steps = self.num_comparable()
        loss = float(_loss_gaps(self.reference, run)[:num_steps].max()) if num_steps else math.nan
        at_end = num_steps == len(self.reference.losses)
        return loss, _weight_difference(self.reference, run) if at_end else math.nan


@dataclass(frozen=True)
class LargerBatch:
    """One device, and k devices with a batch that is k times as large: their accuracies over the same seeds.

    Attributes
    ----------
    reference, ours : list of TrialRun
        One per seed.
    margin : float
        The largest allowed difference of mean accuracies.
    """

    reference: List[TrialRun]
    ours: List[TrialRun]
    margin: float

    def interval(self) -> Tuple[float, float]:
        """Return the 90 % confidence interval of the difference of the mean accuracies (larger minus base batch).

        Runs of one seed form a pair: both begin with the same weights.

        Source: Student's t for paired samples; two one-sided tests at 5 % are this interval: Schuirmann, "A comparison of the
        two one-sided tests procedure and the power approach", 1987.
        """
        gaps = [ours.accuracy - base.accuracy for base, ours in zip(self.reference, self.ours)]
        quantile = float(require("scipy.stats", "train", "agreement").t.ppf(0.95, len(gaps) - 1))
        half = quantile * stdev(gaps) / math.sqrt(len(gaps))
        return mean(gaps) - half, mean(gaps) + half

    @property
    def verdict(self) -> str:
        """`agree` if the interval is within the margin, `do not agree` if it is outside, otherwise inconclusive.

        A difference that is not found may still exist: few seeds or a wide spread cannot show it.
        """
        low, high = self.interval()
        if -self.margin <= low and high <= self.margin:
            return AGREE
        return UNKNOWN if low <= self.margin and high >= -self.margin else DIFFER


def same_batch(
    recipe: Recipe,
    contexts: Sequence[Context],
    *,
    seed: int = 0,
    step: TrainStep = train_batch,
    tell: Callable[[str], None] = lambda text: None,
) -> SameBatch:
    """Train on one device and on all with the same batches, and return both runs.

    The single device computes the same shards one after another and sums their gradients, so that BatchNorm uses the same
    statistics per shard. It uses Gluon's own Trainer, independent of the toolkit. Its running statistics are updated by each
    shard in turn, unlike those of several devices, so accuracies may differ with BatchNorm.

    Parameters
    ----------
    recipe : Recipe
    contexts : list of mxnet.Context
    seed : int
        Determines the weights and the order of the examples.
    step : callable (net, loss, trainer, X, y) -> Batch
        The step to test.
    tell : callable (str)
        Gets a message before each of three runs.
    """
    check_contexts(contexts, "same_batch")
    order = np.random.default_rng(seed)
    tell(f"the same batches on {contexts[0]}, with Gluon's own loop")
    reference = _train_by_gluon(recipe, contexts, seed, lambda num: np.arange(num))
    tell(f"the same again, with the examples in another order: the size of rounding errors on {contexts[0]}")
    rounding = _train_by_gluon(recipe, contexts, seed, order.permutation)
    tell(f"the same batches on {', '.join(map(str, contexts))}")
    return SameBatch(reference, train_run(recipe, contexts, seed=seed, step=step), rounding)


def larger_batch(
    recipe: Recipe,
    contexts: Sequence[Context],
    *,
    seeds: Sequence[int] = range(5),
    margin: float = 0.01,
    step: TrainStep = train_batch,
    tell: Callable[[str], None] = lambda text: None,
) -> LargerBatch:
    """For each seed, train with the recipe's batch on one device, and with that batch per device on all devices.

    Parameters
    ----------
    recipe : Recipe
    contexts : list of mxnet.Context
    seeds : sequence of int
        Two or more. More seeds give a narrower interval.
    margin : float
        The largest allowed difference of mean accuracies.
    step : callable (net, loss, trainer, X, y) -> Batch
    tell : callable (str)
        Gets a message before each run.

    Raises
    ------
    TrainerError
        Fewer than two different seeds, or a margin that is not between 0 and 1.
    """
    check_contexts(contexts, "larger_batch")
    if len(set(seeds)) < max(2, len(seeds)) or not 0 < margin < 1:
        raise TrainerError(
            f"larger_batch: got seeds {list(seeds)} and margin {margin!r}; expected two or more different seeds, to "
            "measure their spread, and a margin between 0 and 1. Five seeds and 0.01 are usual."
        )
    base, larger = [], []
    for seed in seeds:
        tell(f"seed {seed}: batch {recipe.batch_size} on {contexts[0]}")
        base.append(train_run(recipe, contexts[:1], seed=seed, step=step))
        tell(f"seed {seed}: batch {recipe.batch_size * len(contexts)} on {len(contexts)} devices")
        larger.append(train_run(recipe, contexts, seed=seed, step=step, times=len(contexts)))
    return LargerBatch(base, larger, margin)


def train_run(
    recipe: Recipe, contexts: Sequence[Context], *, seed: int, step: TrainStep = train_batch, times: int = 1
) -> TrialRun:
    """Train with the toolkit, with `times` the batch size and its learning rate; return the run."""
    net = _initialised(recipe, contexts, seed)
    trainer = Trainer(net, recipe.optimizer, recipe.params(times))
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    losses = [_mean(step(net, loss, trainer, X, y).losses) for X, y in recipe.batches(recipe.batch_size * times, seed)]
    return _finished(recipe, net, losses)


def _train_by_gluon(recipe: Recipe, contexts: Sequence[Context], seed: int, order: Callable[[int], np.ndarray]) -> TrialRun:
    """Train on the first device with Gluon's own Trainer: one shard per device, with its examples in the order of `order`."""
    net = _initialised(recipe, contexts[:1], seed)
    trainer = gluon.Trainer(net.collect_params(), recipe.optimizer, recipe.params())
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    losses: List[float] = []
    for X, y in recipe.batches(recipe.batch_size, seed):
        ends = np.cumsum(recipe.shard_sizes(len(X), len(contexts)))[:-1]
        shards = [(x[chosen], t[chosen]) for x, t in zip(np.split(X, ends), np.split(y, ends)) for chosen in [order(len(x))]]
        with autograd.record():
            shard_losses = [
                loss(net(array(x, ctx=contexts[0], dtype=x.dtype)), array(t, ctx=contexts[0], dtype=t.dtype))
                for x, t in shards
                if len(x)
            ]
        autograd.backward(shard_losses)
        trainer.step(len(X))
        losses.append(_mean(shard_losses))
    return _finished(recipe, net, losses)


def _initialised(recipe: Recipe, contexts: Sequence[Context], seed: int) -> gluon.Block:
    """Return the network with weights that depend only on the seed, not on the devices."""
    stages = recipe.num_stages if len(contexts) > 1 else 0
    net = recipe.build(recipe.data.num_classes)
    net.initialize(mx.init.Xavier(), ctx=list(contexts[:1] if stages else contexts))
    mx.random.seed(seed)
    np.random.seed(seed)
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    sample = array(recipe.data.train_images[:1], ctx=contexts[0])
    net(sample)  # sets the shapes, and draws the weights
    if not stages:
        return net
    placed = [list(contexts[begin : begin + stages]) for begin in range(0, len(contexts), stages)]
    return Pipeline(split_stages(net, stages, sample, balance="bytes"), placed, recipe.micro_batches)


def _finished(recipe: Recipe, net: gluon.Block, losses: List[float]) -> TrialRun:
    accuracy = evaluate_accuracy_gpus(net, ArrayLoader(recipe.data.test_images, recipe.data.test_labels, 256))
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]
    return TrialRun(losses, float(accuracy), [param.list_data()[0].asnumpy() for param in params])


def _mean(losses: Sequence[Any]) -> float:
    numbers = np.concatenate([one.asnumpy().reshape(-1) for one in losses])
    return float(numbers.mean(dtype=np.float64))


def _loss_gaps(left: TrialRun, right: TrialRun) -> np.ndarray:
    return np.abs(np.subtract(left.losses, right.losses))


def _weight_difference(left: TrialRun, right: TrialRun) -> float:
    return max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(left.weights, right.weights))


def plot_agreement(same: SameBatch, larger: Optional[LargerBatch], names: Tuple[str, str]) -> Any:
    """Return a figure: both loss curves, their difference and that of rounding, and the curves of the larger batch.

    Parameters
    ----------
    same : SameBatch
    larger : LargerBatch, optional
    names : pair of str
        Labels of the single device and of all devices.
    """
    made = figure(15 if larger else 10, 4.2)
    curves, gaps, *rest = made.subplots(1, 3 if larger else 2)
    steps = range(1, len(same.reference.losses) + 1)
    curves.plot(steps, same.reference.losses, color="C0", linewidth=3, alpha=0.4, label=names[0])
    curves.plot(steps, same.ours.losses, color="C1", linewidth=1, linestyle="--", label=names[1])
    curves.set(title="the same batch", xlabel="step", ylabel="loss")
    for run, label in ((same.ours, f"{names[1]} and {names[0]}"), (same.rounding, "another order of summation")):
        distance = _loss_gaps(same.reference, run)
        gaps.plot(steps, np.maximum(distance, _DRAWN_LEAST), linewidth=1, color="C1" if run is same.ours else "C2", label=label)
    gaps.axhline(same.tolerances()[0], color="black", linestyle=":", label="tolerance")
    gaps.set(yscale="log", title="difference of their losses", xlabel="step", ylabel=f"0 is drawn as {_DRAWN_LEAST:g}")
    gaps.set_ylim(top=1e3 * max(gaps.get_ylim()[1], same.tolerances()[0]))  # room for the legend
    if larger:
        _plot_epochs(rest[0], larger, names)
    for axes in made.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    made.tight_layout()
    return made


def _plot_epochs(axes: Any, larger: LargerBatch, names: Tuple[str, str]) -> None:
    """Plot the losses against the completed share of the training: the larger batch has fewer steps per epoch."""
    for runs, color, label in ((larger.reference, "C0", names[0]), (larger.ours, "C1", f"{names[1]}, larger batch")):
        for number, run in enumerate(runs):
            done = np.arange(1, len(run.losses) + 1) / len(run.losses)
            width = max(1, len(run.losses) // 25)
            smooth = np.convolve(run.losses, np.ones(width) / width, mode="valid")
            axes.plot(done[width - 1 :], smooth, color=color, linewidth=1, alpha=0.6, label=label if number == 0 else None)
    low, high = larger.interval()
    axes.set(yscale="log", xlabel="part of the training", ylabel="loss, averaged over 1/25 of the run")
    axes.set_title(
        f"larger batch, {len(larger.ours)} seeds: accuracy differs by {100 * low:+.2f} to {100 * high:+.2f} points", fontsize=10
    )
