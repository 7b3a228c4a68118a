"""The epochs of one `fit`, and its position within them."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple

import mxnet as mx

from ..checkpoint.snapshot import STATES, TRAINING, CheckpointData, ProgressRecord
from ..data_parallel.balancer import Balancer
from ..data_parallel.step import Batch, checking_outputs
from ..distributed.process import this_process
from ..errors import StateError
from ..nested import Array
from .callbacks import Callback, Checkpoint, FitState
from .epoch import EpochOptions, EpochProgress, run_epoch
from .metrics import Metrics, check_metrics, sums_of
from .resume import FitProgress, Row, check_data, loader_epoch, num_examples_of, position_of, remaining_batches, set_loader_epoch
from .stopping import CaughtSignal, raise_interrupt

_NORMS = {"norm/sum", "norm/largest"}


class Run:
    """The epochs of one call of `fit`: trains and evaluates each, or the rest of it.

    Parameters
    ----------
    state : FitState
    callbacks : sequence of Callback
    train_iter, test_iter : iterable of (X, y)
    metrics : sequence of functions, or dict name -> function
    train : callable (X, y) -> Batch
    evaluate : callable (test_iter, metrics, EpochOptions) -> EpochProgress
    batches_per_update : int
    max_inflight : int
    balancer : Balancer, optional
        It splits the batches.
    caught : CaughtSignal
        The signal that asked this process to stop.
    on_phase : callable (str)
        See `EpochOptions`.

    Attributes
    ----------
    start : FitProgress
        Where this process began the current epoch: at its first batch, or where it resumed.
    """

    def __init__(
        self,
        state: FitState,
        callbacks: Sequence[Callback],
        train_iter: Iterable[Any],
        test_iter: Optional[Iterable[Any]],
        *,
        metrics: Metrics,
        train: Callable[[Any, Any], Batch],
        evaluate: Callable[[Iterable[Any], Metrics, EpochOptions], EpochProgress],
        batches_per_update: int,
        max_inflight: int,
        balancer: Optional[Balancer],
        caught: CaughtSignal,
        on_phase: Callable[[str], None],
    ) -> None:
        self.start = FitProgress()
        self._state, self._callbacks = state, callbacks
        self._train_iter, self._test_iter, self._metrics = train_iter, test_iter, metrics
        self._train, self._evaluate = train, evaluate
        self._batches_per_update, self._balancer = batches_per_update, balancer
        self._options = EpochOptions(
            "fit",
            max_inflight=max_inflight,
            check_finite=True,
            stop_signal=lambda: caught.signum,
            may_stop=lambda: not state.pending,  # between two updates: a stop before that would make half of one, or lose it
            on_phase=on_phase,
        )
        self._sums, self._norms = sums_of(metrics, state.trainer.virtual_shards), GradNorms()
        self._num_examples, self._started = 0, time.perf_counter()  # of this epoch, in this process
        self._row: Optional[Row] = None  # of this epoch, before it is evaluated
        self._is_in_epoch = False
        self._are_metrics_checked = False
        self._add_queued: Callable[[], None] = _do_nothing

    def restore(self, content: CheckpointData) -> None:
        """Continue from a checkpoint, with its history."""
        state, position = self._state, position_of(content)
        self.start, self._row, self._is_in_epoch = position, position.row, position.batches > 0
        rows = [dict(row) for row in content.progress["history"]]
        state.history.rows.extend(rows[:-1] if position.row else rows)
        state.epoch, state.batches, state.step = position.epoch, position.batches, position.step
        self._restore_sums(content.arrays)
        set_loader_epoch(self._train_iter, position.loader_epoch)
        if self._balancer is not None and position.shares and len(position.shares) == len(self._balancer.weights):
            self._balancer._weights = list(position.shares)

    def train_and_evaluate(self) -> None:
        """Train and evaluate the epoch of the state, or the rest of it, and add its row to the history.

        Raises
        ------
        KeyboardInterrupt, Terminated
            A signal asked this process to stop.
        """
        state = self._state
        if not self._is_in_epoch:
            self.start = self._epoch_start()
            self._sums = sums_of(self._metrics, state.trainer.virtual_shards)
            state.batches, self._is_in_epoch = 0, True
        row = self._row = self._row or self._train_epoch()
        state.history.rows.append(row)
        if self._test_iter is not None:
            call_each(self._callbacks, "on_test_begin", state)
            try:
                test = self._evaluate(self._test_iter, self._metrics, replace(self._options, operation="evaluate"))
            finally:
                call_each(self._callbacks, "on_test_end", state)
            self.raise_if_stopped(test.stopped, f"in the evaluation after epoch {state.epoch}")
            state.history.rows[-1] = _insert_means(row, {f"test_{name}": mean for name, mean in test.means.items()})
        self._row, self._is_in_epoch = None, False

    def raise_if_stopped(self, signum: int, where: str) -> None:
        """End the run if a signal has stopped it. All devices hold the same weights then."""
        if signum:
            self._state.interrupted = True
            saves = any(isinstance(callback, Checkpoint) for callback in self._callbacks)
            raise_interrupt(signum, f"fit: stopped {where}{'' if saves else '; nothing was saved: no Checkpoint'}")

    def position(self) -> Tuple[ProgressRecord, Dict[str, Array]]:
        """Return what a checkpoint needs to resume here: plain values, and sums on their devices. It does not wait."""
        state = self._state
        own = {name: array for one in self._callbacks for name, array in one.state_arrays(state).items()}
        if not self._is_in_epoch:
            return asdict(replace(self._epoch_start(), epoch=state.epoch + 1)), own
        self._add_queued()
        counts, sums = self._sums.state()
        num_norms, norms = self._norms.state()
        position = replace(
            self.start,
            batches=state.batches,
            step=state.step,
            examples=self.start.examples + self._num_examples,
            seconds=self.start.seconds + time.perf_counter() - self._started,
            counts=counts,
            norms=num_norms,
            row=self._row,
            loader_epoch=self.start.loader_epoch if self._row is None else loader_epoch(self._train_iter),
            shares=self._balancer.weights if self._balancer else None,
        )
        return asdict(position), {**{f"sum/{context}/{name}": value for (name, context), value in sums.items()}, **norms, **own}

    def _epoch_start(self) -> FitProgress:
        """Return the position before the first batch of an epoch."""
        state = self._state
        return FitProgress(
            state.epoch,
            step=state.step,
            num_batches=state.num_batches,
            loader_epoch=loader_epoch(self._train_iter),
            shares=self._balancer.weights if self._balancer else None,
            num_examples=num_examples_of(self._train_iter),
        )

    def _train_epoch(self) -> Row:
        """Train, and return the row of the epoch without the columns of the evaluation."""
        state, trainer = self._state, self._state.trainer
        self._num_examples, self._started = 0, time.perf_counter()
        data = remaining_batches(self._train_iter, self.start) if self.start.batches else self._train_iter
        progress = EpochProgress(self._sums.read(), 0, 0, 0.0) if data is None else self._train_on(data)
        trainer.flush()
        state.pending = 0
        self._norms.add(trainer.grad_norm)
        self.raise_if_stopped(progress.stopped, f"in epoch {state.epoch} after step {state.step}")
        return self._row_of(self._since_epoch_start(progress))

    def _row_of(self, progress: EpochProgress) -> Row:
        """Return the row of an epoch that has been trained."""
        trainer = self._state.trainer
        row = {"epoch": self._state.epoch, **{f"train_{name}": mean for name, mean in progress.means.items()}}
        row.update(self._norms.take())
        row["seconds"], row["examples_per_s"] = progress.seconds, progress.examples_per_s
        row["learning_rate"] = trainer.learning_rate
        if self._balancer is not None:
            row.update({f"share_{context}": share for context, share in zip(trainer.contexts, self._balancer.weights)})
        return row

    def _train_on(self, data: Iterable[Any]) -> EpochProgress:
        """Train on these batches, and return the progress since the first of them."""
        state = self._state
        options = replace(
            self._options,
            first_step=self.start.step + 1,
            on_report=lambda progress: call_each(self._callbacks, "on_report", state, self._since_epoch_start(progress)),
            on_batch=self._batch_reporter(),
        )
        return run_epoch(data, self._train_batch, self._sums, options)

    def _train_batch(self, X: Any, y: Any) -> Batch:
        """Train on one batch; update the weights unless more batches belong to the update."""
        state, trainer = self._state, self._state.trainer
        state.batches += 1
        state.step += 1
        state.pending = state.batches % self._batches_per_update
        checking = nullcontext() if self._are_metrics_checked else checking_outputs(self._check_metrics)
        with checking, trainer.accumulate() if state.pending else nullcontext():
            batch = self._train(X, y)
        self._are_metrics_checked = True
        self._norms.add(trainer.grad_norm)
        self._num_examples += batch.num_examples
        return batch

    def _batch_reporter(self) -> Optional[Callable[[Callable[[], None]], None]]:
        """Return a function that calls `on_batch_end`, None where no callback overrides it."""
        callbacks = [callback for callback in self._callbacks if _overrides(callback, "on_batch_end")]

        def report(add_queued: Callable[[], None]) -> None:
            self._add_queued = add_queued
            call_each(callbacks, "on_batch_end", self._state)
            self._add_queued = _do_nothing

        return report if callbacks else None

    def _check_metrics(self, outputs: Sequence[Any], labels: Sequence[Any]) -> None:
        """Raise `TrainerError` if the metrics do not accept the network's output: before the first update."""
        for output, label in zip(outputs[:1], labels):
            check_metrics(self._metrics, output, label)

    def _since_epoch_start(self, progress: EpochProgress) -> EpochProgress:
        """Return the progress of the epoch, including the part before it was resumed."""
        start = self.start
        return replace(
            progress,
            num_batches=start.batches + progress.num_batches,
            num_examples=start.examples + progress.num_examples,
            seconds=start.seconds + progress.seconds,
        )

    def _restore_sums(self, arrays: Dict[str, Any]) -> None:
        contexts = self._state.trainer.contexts
        by_name = {str(context): context for context in contexts}
        sums = []
        for key, value in arrays.items():
            kind, *place = key.split("/", 2)
            if kind == "sum":
                sums.append((place[1], by_name.get(place[0], contexts[0]), value))
        # In a job of several processes, the first one holds the sums of all.
        if not this_process().rank or self._state.trainer.virtual_shards:
            self._sums.restore(self.start.counts, sums)
        self._norms.restore(self.start.norms, arrays, contexts[0])


def check_resumable(content: CheckpointData, train_iter: Iterable[Any]) -> None:
    """Raise `StateError` unless a run over this data can continue from a checkpoint: see `Run.position` and `Run.restore`."""
    position = position_of(content)
    check_data(position, train_iter)
    sums = {tuple(key.split("/", 2)[1:]): array for key, array in content.arrays.items() if key.startswith("sum/")}
    norms = {key: array for key, array in content.arrays.items() if key.startswith("norm/")}
    named = all(len(key) == 2 for key in sums) and {key[-1] for key in sums} == set(position.counts)
    sized = all(array.shape == (1,) and array.dtype.kind == "f" for array in (*sums.values(), *norms.values()))
    if not named or not sized or set(norms) != (_NORMS if position.norms else set()):
        raise StateError(
            f"fit: got {content.folder / STATES} with {len(sums)} sums of metrics and {len(norms)} of norms, which do not "
            f"match {TRAINING}; expected one number for each device and metric. Use another checkpoint."
        )


class GradNorms:
    """The mean and the largest gradient norm of an epoch, accumulated on their device."""

    def __init__(self) -> None:
        self._latest: Optional[Array] = None
        self._num = 0
        self._sum: Optional[Array] = None
        self._largest: Optional[Array] = None

    def add(self, norm: Optional[Array]) -> None:
        """Add the norm of an update. The same array belongs to the same update and counts once."""
        if norm is None or norm is self._latest:
            return
        self._latest, norm = norm, norm.as_nd_ndarray()
        self._num += 1
        self._sum = norm if self._sum is None else self._sum + norm
        self._largest = norm if self._largest is None else mx.nd.maximum(self._largest, norm)

    def take(self) -> Dict[str, float]:
        """Return `grad_norm` and `grad_norm_max`, waiting for the device, and reset them; an empty dict if there was no norm."""
        if self._sum is None or self._largest is None:
            return {}
        norms = {"grad_norm": float(self._sum.asscalar()) / self._num, "grad_norm_max": float(self._largest.asscalar())}
        self._num, self._sum, self._largest = 0, None, None
        return norms

    def state(self) -> Tuple[int, Dict[str, Array]]:
        """Return the number of norms, and the arrays that `restore` takes, on their device."""
        arrays = {"norm/sum": self._sum, "norm/largest": self._largest}
        return self._num, {name: array for name, array in arrays.items() if array is not None}

    def restore(self, num: int, arrays: Dict[str, Any], context: mx.Context) -> None:
        """Continue from the return value of `state`."""
        if num:
            self._num = num
            self._sum, self._largest = (mx.nd.array(arrays[f"norm/{name}"], ctx=context) for name in ("sum", "largest"))


def call_each(callbacks: Sequence[Callback], method: str, *arguments: Any) -> None:
    """Call a method of every callback, in their order."""
    for callback in callbacks:
        getattr(callback, method)(*arguments)


def phase_reporter(callbacks: Sequence[Callback], state: FitState) -> Callable[[str], None]:
    """Return a function that calls `on_phase`; it does nothing where no callback overrides it."""
    callbacks = [callback for callback in callbacks if _overrides(callback, "on_phase")]
    if len(callbacks) == 1:
        return partial(callbacks[0].on_phase, state)  # called several times per step
    return (lambda phase: call_each(callbacks, "on_phase", state, phase)) if callbacks else (lambda phase: None)


def _overrides(callback: Callback, method: str) -> bool:
    return getattr(type(callback), method) is not getattr(Callback, method)


def _insert_means(row: Row, means: Dict[str, float]) -> Row:
    """Return a row with more means, before the columns that are not means."""
    at = list(row).index("seconds")
    items = list(row.items())
    return dict([*items[:at], *means.items(), *items[at:]])


def _do_nothing() -> None:
    pass
