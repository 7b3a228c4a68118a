"""The epochs of one `fit`, and its position within them."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple

from ..checkpoint.random_state import random_state, set_random_state
from ..checkpoint.resume import FitProgress, Row, loader_epoch, num_batches_of, position_of, remaining_batches, set_loader_epoch
from ..checkpoint.snapshot import SUM, CheckpointData, ProgressRecord, reseed
from ..checks import short
from ..data.iterators import batches_of
from ..data_parallel.step import Batch
from ..distributed.process import this_process
from ..errors import TrainerError
from ..nested import Array, is_device_array
from .batch_loop import BatchLoop, EpochOptions, EpochProgress
from .callbacks import Callback, FitState
from .metric_sums import MetricSums
from .metrics import Metrics, functions_of
from .save_checkpoints import Checkpoint
from .stop_signals import raise_interrupt


@dataclass(frozen=True)
class Limits:
    """The limits that `fit` takes, with the same names; None for none."""

    max_steps: Optional[int] = None
    limit_batches: Optional[int] = None
    limit_eval_batches: Optional[int] = None
    evaluate_every: Optional[int] = None

    def num_batches(self, num_batches: int) -> int:
        """Return the batches of an epoch whose data iterator has this length, 0 for unknown."""
        return min(num_batches, self.limit_batches or num_batches)

    def num_epochs(self, epochs: int, num_batches: int) -> int:
        """Return how many epochs a run takes."""
        return min(epochs, -(-self.max_steps // num_batches)) if self.max_steps and num_batches else epochs

    def of(self, data: Iterable[Any], start: FitProgress) -> Iterable[Any]:
        """Return the batches of an epoch, or of the rest of it from this position on."""
        ends = (self.limit_batches, start.batches), (self.max_steps, start.step)
        left = [end - done for end, done in ends if end is not None]
        return islice(batches_of(data), max(0, min(left))) if left else data


@dataclass
class Run:
    """The epochs of one call of `fit`: trains and evaluates each, or the rest of it.

    Attributes
    ----------
    state : FitState
    callbacks : sequence of Callback
    train_iter, test_iter : iterable of (X, y)
    metrics : sequence, or dict name -> metric
        Functions, and objects of MXNet, which only evaluations update.
    train : callable (X, y) -> Batch
    evaluate : callable (test_iter, metrics, EpochOptions) -> EpochProgress
    options : EpochOptions
    batches_per_update : int
    limits : Limits
    start : FitProgress
        Where this process began the current epoch: at its first batch, or where it resumed.
    """

    state: FitState
    callbacks: Sequence[Callback]
    train_iter: Iterable[Any]
    test_iter: Optional[Iterable[Any]]
    metrics: Metrics
    train: Callable[[Any, Any], Batch]
    evaluate: Callable[[Iterable[Any], Metrics, EpochOptions], EpochProgress]
    options: EpochOptions
    batches_per_update: int
    limits: Limits = Limits()
    start: FitProgress = field(default_factory=FitProgress)

    def __post_init__(self) -> None:
        trainer = self.state.trainer
        self._functions = functions_of(self.metrics)
        self._sums = MetricSums(self._functions, num_shards=trainer.virtual_shards)
        self._loop: Optional[BatchLoop] = None  # of this epoch
        self._norm: Optional[Array] = trainer.grad_norm  # of the latest update
        self._learning_rate = trainer.learning_rate if trainer.optimizer.lr_scheduler is None else None
        self._row: Optional[Row] = None  # of this epoch, before it is evaluated
        self._is_in_epoch = False

    def restore(self, content: CheckpointData) -> None:
        """Continue from a checkpoint, with its history."""
        state, position = self.state, position_of(content)
        self.start, self._row, self._is_in_epoch = position, position.row, position.batches > 0
        rows = [dict(row) for row in content.progress["history"]]
        state.history.rows.extend(rows[:-1] if position.row else rows)
        state.history.evaluations.extend(position.evaluations)
        state.epoch, state.batches, state.step = position.epoch - (not self._is_in_epoch), position.batches, position.step
        sums = {key[len(SUM) :]: array for key, array in content.arrays.items() if key.startswith(SUM)}
        self._sums.restore(position.counts, sums, state.trainer.contexts)
        set_loader_epoch(self.test_iter, position.test_epoch)
        set_loader_epoch(self.train_iter, position.loader_epoch)

    def train_and_evaluate(self) -> None:
        """Train and evaluate the epoch of the state, or the rest of it, and add its row to the history.

        Raises
        ------
        KeyboardInterrupt, Terminated
            A signal asked this process to stop.
        """
        state = self.state
        if not self._is_in_epoch:
            self.start = self._epoch_start()
            self._sums = MetricSums(self._functions, num_shards=state.trainer.virtual_shards)
            state.batches, self._is_in_epoch = 0, True
        row = self._row = self._row or self._train_epoch()
        state.history.rows.append(row)
        if self.test_iter is not None:
            generators, loaders = random_state(), (self.test_iter, self.train_iter)
            epochs = list(map(loader_epoch, loaders))
            test = self._evaluate(self.test_iter, self.options)
            if test.stopped:  # a resumed run evaluates again: its data draw the same order
                set_random_state(generators)
                for loader, epoch in zip(loaders, epochs):
                    set_loader_epoch(loader, epoch)
            self.raise_if_stopped(test.stopped, f"in the evaluation after epoch {state.epoch}")
            row.update(_test_columns(test))
        self._row, self._is_in_epoch = None, False

    def _evaluate(self, test_iter: Iterable[Any], options: EpochOptions) -> EpochProgress:
        state, limit = self.state, self.limits.limit_eval_batches
        data = test_iter if limit is None else islice(batches_of(test_iter), limit)
        call_each(self.callbacks, "on_test_begin", state)
        try:
            on_report = partial(call_each, self.callbacks, "on_test_report", state)
            return self.evaluate(data, self.metrics, replace(options, operation="evaluate", on_report=on_report))
        finally:
            call_each(self.callbacks, "on_test_end", state)

    def _after_batch(self) -> None:
        """Evaluate within an epoch, if it is time to, and call the callbacks."""
        state, every = self.state, self.limits.evaluate_every
        if every is not None and self.test_iter is not None and state.step % every == 0 and state.batches != state.num_batches:
            began, epoch = time.perf_counter(), loader_epoch(self.train_iter)
            test = self._evaluate(self.test_iter, replace(self.options, stop_signal=None))  # the batch is not finished yet
            set_loader_epoch(self.train_iter, epoch)  # the same loader may have tested
            state.history.evaluations.append({"epoch": state.epoch, "step": state.step, **_test_columns(test)})
            if self._loop is not None:
                self._loop.leave_out(time.perf_counter() - began)
        call_each(self.callbacks, "on_batch_end", state)

    def is_over(self) -> bool:
        """Return whether the run has made all its steps, and is between two epochs."""
        max_steps = self.limits.max_steps
        return max_steps is not None and self.state.step >= max_steps and not self._is_in_epoch

    def raise_if_stopped(self, signum: int, where: str) -> None:
        """End the run if a signal has stopped it. All devices hold the same weights then."""
        if signum:
            self.state.interrupted = True
            saves = any(isinstance(callback, Checkpoint) for callback in self.callbacks)
            raise_interrupt(signum, f"fit: stopped {where}{'' if saves else '; nothing was saved: no Checkpoint'}")

    def position(self) -> Tuple[ProgressRecord, Dict[str, Array]]:
        """Return what a checkpoint needs to resume here: plain values, and sums on their devices. It does not wait."""
        state = self.state
        own: Dict[str, Array] = {}
        for one in self.callbacks:
            arrays = one.state_arrays(state)
            if not isinstance(arrays, dict) or not all(map(is_device_array, arrays.values())) or own.keys() & arrays:
                name = f"{type(one).__name__}.state_arrays"
                raise TrainerError(f"{name}: got {short(arrays)}; expected a dict of arrays with names of its own. Rename them.")
            own.update(arrays)
        if not self._is_in_epoch:
            return asdict(replace(self._epoch_start(), epoch=state.epoch + 1)), own
        examples, seconds = self.start.examples, self.start.seconds
        if self._loop is not None:
            examples, seconds = self._loop.add_queued()
        counts, sums = self._sums.state()
        position = replace(
            self.start,
            batches=state.batches,
            step=state.step,
            examples=examples,
            seconds=seconds,
            counts=counts,
            learning_rate=self._learning_rate,
            row=self._row,
            loader_epoch=self.start.loader_epoch if self._row is None else loader_epoch(self.train_iter),
            test_epoch=loader_epoch(self.test_iter),
            evaluations=list(state.history.evaluations),
        )
        return asdict(position), {**{SUM + key: value for key, value in sums.items()}, **own}

    def _epoch_start(self) -> FitProgress:
        """Return the position before the first batch of an epoch."""
        return FitProgress(
            self.state.epoch,
            step=self.state.step,
            num_batches=num_batches_of(self.train_iter),
            data=getattr(self.train_iter, "fingerprint", ""),
            loader_epoch=loader_epoch(self.train_iter),
            test_epoch=loader_epoch(self.test_iter),
            learning_rate=self._learning_rate,
            evaluations=list(self.state.history.evaluations),
        )

    def _train_epoch(self) -> Row:
        """Train, and return the row of the epoch without the columns of the evaluation."""
        state, trainer = self.state, self.state.trainer
        start, data = self.start, self.train_iter
        if start.batches and state.resumed is not None:
            data = remaining_batches(data, start)
            reseed(state.resumed)  # the finished batches may have drawn random numbers
        options = replace(
            self.options,
            first_step=start.step + 1,
            before=EpochProgress({}, start.batches, start.examples, start.seconds),
            on_report=partial(call_each, self.callbacks, "on_report", state),
            on_batch=self._after_batch,
        )
        self._loop = BatchLoop(self._train_batch, self._sums, options)
        progress = self._loop.run(self.limits.of(data, start))
        trainer.flush()
        state.pending = 0
        if trainer.steps.replica_check.is_on:
            trainer.check_replicas()
        if self._add_norm():  # of the batches that were left
            progress = replace(progress, means=self._sums.read_all())
        self.raise_if_stopped(progress.stopped, f"in epoch {state.epoch} after step {state.step}")
        means = {name if name == "grad_norm" else f"train_{name}": mean for name, mean in progress.means.items()}
        speed = {"seconds": progress.seconds, "examples_per_s": progress.examples_per_s}
        return {"epoch": self.state.epoch, **means, **speed, "learning_rate": self.state.trainer.learning_rate}

    def _train_batch(self, X: Any, y: Any) -> Batch:
        """Train on one batch; update the weights unless more batches belong to the update."""
        state, trainer = self.state, self.state.trainer
        state.batches += 1
        state.step += 1
        state.pending = state.batches % self.batches_per_update
        with trainer.accumulate() if state.pending else nullcontext():
            batch = self.train(X, y)
        state.batch_size = batch.num_examples
        self._add_norm()
        return batch

    def _add_norm(self) -> bool:
        """Add the gradient norm of the latest update to the sums, once; return whether there was a new one."""
        norm, before = self.state.trainer.grad_norm, self._norm
        self._norm = norm
        if norm is None or norm is before:
            return False
        if not this_process().rank:  # all processes have the same, and a resumed run may have fewer of them
            self._sums.add("grad_norm", norm.as_nd_ndarray(), 1)
        return True


def call_each(callbacks: Sequence[Callback], method: str, *arguments: Any) -> None:
    """Call a method of every callback, in their order."""
    for callback in callbacks:
        getattr(callback, method)(*arguments)


def _test_columns(test: EpochProgress) -> Row:
    return {f"test_{name}": mean for name, mean in test.means.items()}
