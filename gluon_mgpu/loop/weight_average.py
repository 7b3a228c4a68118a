"""WeightAverage: exponential (EMA) and stochastic (SWA) averages of the weights while `fit` runs."""

from __future__ import annotations

from typing import Dict, Optional

import mxnet as mx

from ..checkpoint.snapshot import AVERAGE
from ..checks import one_of, real_number, whole_number
from ..errors import TrainerError
from ..nested import Array
from ..runtime.environment import logger
from ..trainer.local_sgd import LocalSGD
from ..trainer.running_stats import running_stats
from .averaged_weights import AveragedWeights
from .callbacks import Callback, FitState


class WeightAverage(Callback):
    """Averages the weights during training; evaluation uses the average, and so does the network after `fit`.

    Each epoch is evaluated with the average: the columns `test_...` are its results, by which `Checkpoint` chooses `best` and
    `EarlyStopping` stops. Training and checkpoints keep the trained weights. Checkpoints also hold the average: a resumed run has
    the same bits, and `load_checkpoint(net, folder, averaged=True)` reads it. It needs the memory of the weights once more on
    each device, twice while it evaluates.

    Parameters
    ----------
    method : "ema" or "swa"
        "ema": the weights of update n count `decay` times as much as those of update n + 1. The first updates use the smaller
        decay (1 + n) / (10 + n). "swa": the mean of the weights at the end of each epoch.
    decay : float
        Of "ema".
    start_epoch : int
        The first epoch that is averaged, from 1. SWA usually starts in the last quarter.

    Raises
    ------
    TrainerError
        An option is invalid, or the trainer is a `LocalSGD`, whose devices differ.

    Examples
    --------
    >>> import mxnet as mx
    >>> from mxnet import gluon
    >>> from gluon_mgpu import Trainer, fit
    >>> net = gluon.nn.Dense(1, in_units=1)
    >>> net.initialize()
    >>> data = [(mx.nd.ones((4, 1)), mx.nd.ones(4))] * 3
    >>> average = WeightAverage("ema", decay=0.99)
    >>> history = fit(net, gluon.loss.L2Loss(), Trainer(net, "sgd"), data, epochs=2, metrics=(), callbacks=[average])
    >>> average.num_updates
    6

    Source: EMA: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992, with TensorFlow's
    ExponentialMovingAverage for the first updates. SWA: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
    Generalization", 2018.
    """

    def __init__(self, method: str = "ema", *, decay: float = 0.999, start_epoch: int = 1) -> None:
        one_of("WeightAverage", "method", method, ("ema", "swa"), advice="'ema' is usual.")
        real_number("WeightAverage", "decay", decay, high=1, below=True, advice="0.999 is usual.")
        whole_number("WeightAverage", "start_epoch", start_epoch, advice="1 is usual.")
        self._method, self._decay, self._start_epoch = method, decay, start_epoch
        self.num_updates = 0
        self._weights: Optional[AveragedWeights] = None

    def on_fit_begin(self, state: FitState) -> None:
        if isinstance(state.trainer, LocalSGD):
            raise TrainerError(
                "WeightAverage: got a LocalSGD, whose devices have different weights; expected a Trainer. Use a Trainer."
            )
        if self._method == "swa" and running_stats(state.net):
            logger.warning(
                "WeightAverage: got a network with BatchNorm; its running statistics are those of the trained weights, not of "
                "their mean. Call update_bn(net, train_iter) after fit."
            )
        self.num_updates, self._weights = 0, None
        self._step, self._epoch = state.step, len(state.history.rows)
        arrays = {} if state.resumed is None else state.resumed.arrays
        found = {key[len(AVERAGE) :]: value for key, value in arrays.items() if key.startswith(AVERAGE)}
        if "progress" in found:
            self.num_updates, self._step, self._epoch = map(int, found.pop("progress"))
            self._weights = AveragedWeights(state.net)
            self._weights.restore(found)

    def on_batch_end(self, state: FitState) -> None:
        self._follow(state)

    def on_test_begin(self, state: FitState) -> None:
        self._follow(state)
        if self._weights is not None:
            self._weights.put()

    def on_test_end(self, state: FitState) -> None:
        if self._weights is not None:
            self._weights.take_back()

    def on_epoch_end(self, state: FitState) -> None:
        self._follow(state)

    def on_fit_end(self, state: FitState) -> None:
        if self._weights is not None:
            self._weights.take_back()
            if state.error is None:
                self._weights.put()
                self._weights = None
        elif state.error is None and state.epoch < self._start_epoch:
            logger.warning("WeightAverage: the run ended before start_epoch=%d: nothing was averaged", self._start_epoch)

    def state_arrays(self, state: FitState) -> Dict[str, Array]:
        self._follow(state)  # it may come after this callback's turn, or before it
        if self._weights is None:
            return {}
        progress = mx.nd.array([self.num_updates, self._step, self._epoch], dtype="float64")
        return {**{AVERAGE + name: array for name, array in self._weights.arrays().items()}, AVERAGE + "progress": progress}

    def _follow(self, state: FitState) -> None:
        """Update the average if the weights of this step belong to it and are not in it yet."""
        if state.pending:
            return
        step, epoch = state.step, len(state.history.rows)
        is_due = epoch > self._epoch if self._method == "swa" else step > self._step
        self._step, self._epoch = step, epoch
        if not is_due or state.epoch < self._start_epoch:
            return
        n = self.num_updates
        if self._weights is None:
            self._weights = AveragedWeights(state.net)
        self._weights.update(1 / (n + 1) if self._method == "swa" or not n else 1 - min(self._decay, (1 + n) / (10 + n)))
        self.num_updates += 1
