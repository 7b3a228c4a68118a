"""Balancer: splits a batch in proportion to the speed of the devices, measured while they train."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple

from mxnet import Context

from ..checks import instance, short, whole_number
from ..errors import ShardError, TrainerError
from ..nested import Array, is_device_array
from ..runtime.engine_push import when_ready
from ..runtime.environment import logger
from ..trainer.trainer import Trainer
from .sharding import SplitOptions, SplitPlan, plan_shards
from .split_protocol import BatchSplit

NUM_KEPT = 5  # measured steps that must all favour another split: an outlier, such as the first step, changes nothing
GAIN = 1.05  # the speed-up that each must show: new shapes cost memory, and compiled networks are compiled again


class Balancer(BatchSplit):
    """Splits batches over unequal devices, such as a GPU and a CPU, so that all finish at the same time.

    ```
    weights of a device are ready ─► forward ─► backward ─► its gradients are ready ─► sum over devices ─► update
                  └──────────────── seconds of this device ────────────┘
    ```

    MXNet's engine calls a function at both ends, so nothing waits. Each device is measured while all of them work, because CPU
    contexts share cores. The weights are proportional to examples per second. They change when each of the last five measured
    steps would have been 5 % faster with other weights. The first steps are measured, then every `every`-th one. After a step
    that would have been faster, the next steps are measured.

    The result of training does not depend on the split: the gradient is divided by the number of examples. BatchNorm changes it
    slightly, because each device has the statistics of its own shard. A single device gets every batch without measurements.

    It is a `split_f` for `train_batch` and `fit`, which call `watch` after each backward pass; a loop by hand calls it itself. It
    splits for the next step. Do not pass it to `prefetch`, which splits for later ones.

    Parameters
    ----------
    trainer : Trainer
    batch_axis : int, or a pair (for X, for y) of ints or nested ints
        As for `split_batch`.
    every : int, steps
        Steps between two measurements while the speeds do not change.

    Raises
    ------
    TrainerError
        `trainer` is not a Trainer, or `every` is not a number of steps.

    Examples
    --------
    >>> import mxnet as mx
    >>> from mxnet import autograd, gluon
    >>> net = gluon.nn.Dense(1, in_units=2)
    >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> trainer = Trainer(net, "sgd", {"learning_rate": 0.5})
    >>> balance = Balancer(trainer)
    >>> import numpy as np
    >>> Xs, ys = balance(np.ones((4, 2)), np.ones(4), trainer.contexts)
    >>> with autograd.record():
    ...     losses = [gluon.loss.L2Loss()(net(X), y) for X, y in zip(Xs, ys)]
    >>> autograd.backward(losses)
    >>> balance.watch(losses)
    >>> trainer.step(4)
    >>> balance.weights
    [0.5, 0.5]
    """

    varies = True
    knows_processes = False

    def __init__(self, trainer: Trainer, *, batch_axis: Any = 0, every: int = 10) -> None:
        instance("Balancer", "trainer", trainer, Trainer, "a gluon_mgpu.Trainer", advice="Pass Trainer(net, 'sgd').")
        whole_number("Balancer", "every", every, advice="10 steps are usual.")
        self._trainer = trainer
        self._devices = trainer.contexts
        super().__init__(SplitOptions(batch_axis))
        self._every = int(every)
        self._weights = [1 / len(self._devices)] * len(self._devices)
        self._kept: Deque[List[float]] = deque(maxlen=NUM_KEPT)  # seconds per example on each device, in the last measured steps
        self._begun: Optional[_Step] = None  # split, and not watched yet
        self._queued: List[_Step] = []
        self._num_unmeasured = 0  # steps since the last measured one
        self._batch_size = 0

    @property
    def weights(self) -> List[float]:
        """Each device's part of a batch; they add up to 1."""
        return list(self._weights)

    def __call__(self, X: Any, y: Any, devices: Sequence[Context]) -> Tuple[List[Any], List[Any]]:
        """Return the shards of features and labels, each on its device: see `split_batch`.

        Raises
        ------
        ShardError
            The batch cannot be split, or the devices are not the trainer's.
        """
        return self.plan(X, y, devices).pair(X, y)

    def plan(self, X: Any, y: Any, devices: Sequence[Context]) -> SplitPlan:
        """Return how to divide this batch, which is measured if a measurement is due."""
        if not isinstance(devices, (list, tuple)) or list(devices) != self._devices:
            raise ShardError(
                f"Balancer: got devices {short(devices)}; expected {self._devices}, which it measures. Pass trainer.contexts."
            )
        if len(self._devices) > 1:
            self._read()
            is_due = self._is_due()
            self.options = replace(self.options, weights=self._all_busy() if is_due else self._weights)
            self._begun = self._begin() if is_due else None
        return super().plan(X, y, devices)

    def watch(self, losses: Sequence[Array]) -> None:
        """Note when each device has its gradients. Call it after the backward pass and before the step; it does not wait.

        Parameters
        ----------
        losses : sequence of NDArray, shapes (shard size, ...)
            One per shard of the last split.

        Raises
        ------
        TrainerError
            The losses are not a list of arrays, or not on different devices of the trainer. Nothing was noted.
        """
        are_arrays = isinstance(losses, (list, tuple)) and losses and all(is_device_array(one) and one.shape for one in losses)
        contexts = [loss.context for loss in losses] if are_arrays else []
        if not contexts or len(set(contexts)) < len(contexts) or not set(contexts) <= set(self._devices):
            raise TrainerError(
                f"Balancer.watch: got {short(losses)} on {contexts}; expected one MXNet array per device, with one number per "
                f"example, on {self._devices}. Pass the list that you passed to backward()."
            )
        step, self._begun = self._begun, None
        self._num_unmeasured += 1
        self._batch_size = sum(int(loss.shape[0]) for loss in losses)
        if step is None or len(losses) < len(self._devices):
            return
        self._num_unmeasured = 0
        for loss in losses:
            device = self._devices.index(loss.context)
            step.sizes[device] = int(loss.shape[0])
            when_ready([self._first_trained()._grad[device]], partial(step.note_end, device))
        self._queued.append(step)

    def _begin(self) -> Optional[_Step]:
        """Let the engine note when each device has its weights, if the shapes are known."""
        param = self._first_trained()
        if param is None:
            return None
        step = _Step()
        # and the gradient: if several backward passes make one update, the weights are ready long before
        for device, arrays in enumerate(zip(param._data, param._grad)):
            when_ready(arrays, partial(step.note_begin, device))
        return step

    def _first_trained(self) -> Any:
        """Return the first parameter with gradients: the last that a backward pass writes and a step updates."""
        return next((param for param in self._trainer.params if param._grad), None)

    def _read(self) -> None:
        """Read the measurements that are complete."""
        complete = [step for step in self._queued if step.is_complete()]
        self._queued = [step for step in self._queued if step not in complete]
        for step in complete:
            self._kept.append(step.costs())
            self._weigh()

    def _weigh(self) -> None:
        weights = _fastest([median(costs) for costs in zip(*self._kept)])
        if len(self._kept) < NUM_KEPT or not all(self._gain(weights, costs) > GAIN for costs in self._kept):
            return
        self._weights = weights
        self._kept.clear()
        parts = ", ".join(f"{context} {weight:.3f}" for context, weight in zip(self._devices, weights))
        logger.info("Balancer: the devices' shares of a batch are now %s", parts)

    def _gain(self, weights: Sequence[float], costs: Sequence[float]) -> float:
        """Return how many times faster a step with these costs would have been with other weights."""
        return _seconds(self._weights, costs) / _seconds(weights, costs)

    def _is_due(self) -> bool:
        if len(self._kept) < NUM_KEPT or self._num_unmeasured >= self._every:
            return True
        return self._gain(_fastest(self._kept[-1]), self._kept[-1]) > GAIN

    def _all_busy(self) -> List[float]:
        """Return weights that give every device at least one example: otherwise a faster device could not be noticed."""
        if self._batch_size < len(self._devices):
            return self._weights
        sizes = plan_shards(self._batch_size, len(self._devices), self._weights)
        while 0 in sizes:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[sizes.index(0)] += 1
        return [float(size) for size in sizes]


@dataclass(eq=False)
class _Step:
    """The times, in seconds, at which each device began and ended one step, and its number of examples."""

    begun: Dict[int, float] = field(default_factory=dict)
    ended: Dict[int, float] = field(default_factory=dict)
    sizes: Dict[int, int] = field(default_factory=dict)

    def note_begin(self, device: int) -> None:
        self.begun[device] = time.perf_counter()

    def note_end(self, device: int) -> None:
        self.ended[device] = time.perf_counter()

    def is_complete(self) -> bool:
        return self.sizes.keys() == self.ended.keys() <= self.begun.keys()

    def costs(self) -> List[float]:
        """Return the seconds per example on each device."""
        return [max(1e-9, self.ended[device] - self.begun[device]) / size for device, size in sorted(self.sizes.items())]


def _fastest(costs: Sequence[float]) -> List[float]:
    """Return the weights with which all devices finish at the same time."""
    speeds = [1 / cost for cost in costs]
    return [speed / sum(speeds) for speed in speeds]


def _seconds(weights: Sequence[float], costs: Sequence[float]) -> float:
    """Return when the last device finishes, for one example."""
    return max(weight * cost for weight, cost in zip(weights, costs))
