"""LearningRateFinder: a sweep over learning rates, and the rate at which the loss falls fastest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Optional, Tuple, Union

import numpy as np
from mxnet import gluon

from ..checkpoint.resume import loader_epoch, set_loader_epoch
from ..checkpoint.save_and_load import remember
from ..checks import real_number, whole_number
from ..data.iterators import as_pair, batches_of, check_iterable, no_batch
from ..data_parallel.passes import decide_shapes
from ..data_parallel.sharding import SplitFunction, split_batch
from ..data_parallel.step import Batch, check_trainer, train_batch
from ..distributed import group
from ..plots import figure, save
from ..refusals import refusal
from ..trainer.parameters import devices_of, has_values
from ..trainer.trainer import Trainer

_SMOOTHING = 0.98  # how much the former losses count in the smoothed loss
_DIVERGENCE = 4.0  # the sweep ends when the smoothed loss exceeds its minimum by this factor
_FIRST, _LAST = 0.1, 5  # left out of the suggestion: the part of the losses that still settle, and the steps that diverge


class LearningRateFinder:
    """Trains with growing learning rates, and suggests one: where the smoothed loss falls fastest.

    ```
    loss ──────╮
               ╰──╮ steepest: the suggestion     ╱ diverges: the sweep ends
                  ╰──────────────╮            ╱
                                 ╰──────────╯
         1e-7 ─────────────────────────────────► 10   learning rate, growing exponentially
    ```

    The sweep changes nothing: weights, optimizer, schedule, running statistics and random generators are restored. MXNet's random
    numbers continue from another seed, because their state cannot be read; a `LocalSGD` is averaged. In a job, all processes
    call it, with the same result.

    Parameters
    ----------
    net : gluon.Block
    loss : callable (output, label) -> NDArray, shape (shard size,)
    trainer : Trainer
        Its optimizer and options are used, its learning rate and schedule are not.
    split_f : callable (X, y, devices) -> (list of shards, list of shards)

    Attributes
    ----------
    rates, losses, smoothed : list of float
        One per step of the latest sweep. Smoothed: an exponential average with bias correction.
    suggestion : float or None
        None if the loss did not fall.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(1, in_units=1)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> trainer = Trainer(net, "sgd", {"learning_rate": 0.5})
    >>> finder = LearningRateFinder(net, gluon.loss.L2Loss(), trainer)
    >>> rate = finder.sweep([(mx.nd.array([[1.0], [2.0]]), mx.nd.array([3.0, 6.0]))], num_steps=60)
    >>> 0.001 < rate < 1, trainer.learning_rate, net.weight.data(mx.cpu(0)).asnumpy().item()
    (True, 0.5, 1.0)

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3; smoothing and the end of the sweep
    are fastai's.
    """

    def __init__(self, net: gluon.Block, loss: Any, trainer: Trainer, *, split_f: SplitFunction = split_batch) -> None:
        check_trainer("LearningRateFinder", trainer, net, loss)
        self._net, self._loss, self._trainer, self._split_f = net, loss, trainer, split_f
        self.rates: List[float] = []
        self.losses: List[float] = []
        self.smoothed: List[float] = []

    def sweep(
        self, train_iter: Iterable[Any], *, start: float = 1e-7, end: float = 10.0, num_steps: int = 100
    ) -> Optional[float]:
        """Train one batch with each rate, from `start` to `end`, restore everything, and return the suggestion.

        Parameters
        ----------
        train_iter : iterable of (X, y)
            Read again if it is shorter than the sweep.
        start, end : float
        num_steps : int
            100 are usual.

        Raises
        ------
        TrainerError
            An argument is out of range, there is no batch, or gradients were accumulated and not applied.
        """
        name = "LearningRateFinder.sweep"
        check_iterable(name, "train_iter", train_iter)
        whole_number(name, "num_steps", num_steps, low=2, advice="100 are usual.")
        real_number(name, "start", start, above=True, advice="1e-7 is usual.")
        real_number(name, "end", end, low=start, above=True, advice="From 1e-7 to 10 is usual.")
        self.rates, self.losses, self.smoothed = [], [], []
        self._resolve_shapes(train_iter)
        if any(param.grad_req == "add" for param in self._trainer.params):
            raise refusal(name, "LearningRateFinder", "grad_req='add'")
        before, epoch = remember(self._net, self._trainer), loader_epoch(train_iter)
        optimizer = self._trainer.optimizer
        schedule, rate = optimizer.lr_scheduler, optimizer.lr
        try:
            optimizer.lr_scheduler = None
            average = 0.0
            for step, pair in zip(range(num_steps), _endless(train_iter)):
                optimizer.lr = start * (end / start) ** (step / (num_steps - 1))
                found = _mean(train_batch(self._net, self._loss, self._trainer, *pair, split_f=self._split_f))
                average = _SMOOTHING * average + (1 - _SMOOTHING) * found
                self.rates.append(optimizer.lr)
                self.losses.append(found)
                self.smoothed.append(average / (1 - _SMOOTHING ** (step + 1)))
                if not self.smoothed[-1] <= _DIVERGENCE * min(self.smoothed):
                    break
        finally:
            optimizer.lr_scheduler, optimizer.lr = schedule, rate
            before.restore()
            set_loader_epoch(train_iter, epoch)
        return self.suggestion

    @property
    def suggestion(self) -> Optional[float]:
        first = int(_FIRST * len(self.rates))
        losses = self.smoothed[first : len(self.rates) - _LAST]
        if len(losses) < 3:
            return None
        slopes = np.gradient(losses, np.log(self.rates[first : first + len(losses)]))
        return self.rates[first + int(slopes.argmin())] if slopes.min() < 0 else None

    def plot(self, path: Union[str, Path]) -> None:
        """Write a figure of the latest sweep, with the suggestion, as a PNG."""
        made = figure(7, 4)
        axes = made.subplots()
        axes.plot(self.rates, self.losses, color="0.8", label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=f"suggestion: {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        if self.smoothed:  # the last losses diverge
            axes.set_ylim(min(self.losses) - 0.1 * abs(self.smoothed[0]), self.smoothed[0] + 0.5 * abs(self.smoothed[0]))
        axes.legend()
        made.tight_layout()
        save(made, path)

    def _resolve_shapes(self, train_iter: Iterable[Any]) -> None:
        """Let the first batch decide shapes that layers do not specify, so that the weights can be remembered."""
        if not has_values(self._net):
            epoch = loader_epoch(train_iter)
            shards = self._split_f(*next(_endless(train_iter)), devices_of(self._net))
            decide_shapes("LearningRateFinder", self._net, *shards)
            set_loader_epoch(train_iter, epoch)
        self._trainer.steps.resolve_shapes()


def _endless(train_iter: Iterable[Any]) -> Iterator[Tuple[Any, Any]]:
    while True:
        item: Any = None
        for item in batches_of(train_iter):
            yield as_pair(item, "LearningRateFinder.sweep")
        if item is None:
            raise no_batch("LearningRateFinder.sweep")


def _mean(batch: Batch) -> float:
    """Return the mean loss of a batch over all devices and processes. It waits."""
    total = sum(float(loss.as_nd_ndarray().sum().asscalar()) for loss in batch.losses)
    count = float(batch.num_units or sum(loss.shape[0] for loss in batch.losses))
    processes = group()
    if processes is not None:
        total, count = map(float, processes.all_gather(np.array([total, count], np.float32)).sum(axis=0))
    return total / count if count else math.nan
