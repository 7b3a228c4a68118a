"""The epochs of one `fit`, and where it is among their batches."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple

import mxnet as mx

from ..checkpoint.snapshot import STATES, TRAINING, Content, ProgressRecord
from ..data_parallel.balancer import Balancer
from ..data_parallel.step import Batch, checking_outputs
from ..distributed.process import this_process
from ..errors import StateError
from ..nested import Array
from .callbacks import Callback, FitState
from .epoch import EpochProgress, run_epoch
from .metrics import DeviceSums, Metrics, check_metrics
from .resume import FitProgress, Row, check_data, loader_epoch, num_examples_of, position_of, rest_of, set_loader_epoch
from .stopping import Interrupts, raise_interrupt

_NORMS = {"norm/sum", "norm/largest"}


class Run:
    """The epochs of one call of `fit`: each trained and evaluated, or what is left of it.

    Parameters
    ----------
    state : FitState
    callbacks : sequence of Callback
    train_iter, test_iter : iterable of (X, y)
    metrics : sequence of functions, or dict name -> function
    train : callable (X, y) -> Batch
    evaluate : callable (test_iter, metrics, **options of `run_epoch`) -> EpochProgress
    group : int
        Batches that make one update.
    max_inflight : int
    balancer : Balancer, optional
        What shares the batches out.

    Attributes
    ----------
    begun : FitProgress
        What was done of this epoch when it was begun here.
    interrupts : Interrupts
        The signal that asked this process to stop.
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
        evaluate: Callable[..., EpochProgress],
        group: int,
        max_inflight: int,
        balancer: Optional[Balancer],
    ) -> None:
        self.begun = FitProgress()
        self.interrupts = Interrupts()
        self._state, self._callbacks = state, callbacks
        self._train_iter, self._test_iter, self._metrics = train_iter, test_iter, metrics
        self._train, self._evaluate, self._group, self._balancer = train, evaluate, group, balancer
        self._options: Dict[str, Any] = {"max_inflight": max_inflight, "check_finite": True}
        self._options["should_stop"] = lambda: self.interrupts.first
        # in the middle of a group, half of an update would be made, or lost
        self._options["may_stop"] = lambda: not state.pending
        phased = [one for one in callbacks if type(one).on_phase is not Callback.on_phase]
        if phased:
            self._options["on_phase"] = lambda phase: each(phased, "on_phase", state, phase)
        self._sums, self._norms = DeviceSums(metrics), GradNorms()
        self._examples, self._started = 0, time.perf_counter()  # of this epoch, since it was begun here
        self._row: Optional[Row] = None  # of this epoch, before it is evaluated
        self._is_open = False  # whether an epoch is under way
        self._is_checked = False  # whether the metrics took a batch
        self._add_queued: Callable[[], None] = _nothing

    def resume(self, content: Content) -> None:
        """Be where the run was that saved a checkpoint, with its history."""
        state, position = self._state, position_of(content)
        self.begun, self._row, self._is_open = position, position.row, position.batches > 0
        rows = [dict(row) for row in content.progress["history"]]
        state.history.rows.extend(rows[:-1] if position.row else rows)
        state.epoch, state.batches, state.step = position.epoch, position.batches, position.step
        self._restore_sums(content.arrays)
        set_loader_epoch(self._train_iter, position.loader_epoch)
        if self._balancer is not None and position.shares and len(position.shares) == len(self._balancer.weights):
            self._balancer._weights = list(position.shares)

    def run_epoch(self) -> None:
        """Train and evaluate the epoch of the state, or what is left of it, and add its row to the history.

        Raises
        ------
        KeyboardInterrupt, Terminated
            A signal asked it to stop.
        """
        state = self._state
        if not self._is_open:
            self.begun = self._next()
            self._sums = DeviceSums(self._metrics)
            state.batches, self._is_open = 0, True
        row = self._row = self._row or self._trained()
        state.history.rows.append(row)
        if self._test_iter is not None:
            test = self._evaluate(self._test_iter, self._metrics, **self._options)
            self.stop_if(test.stopped, f"in the evaluation after epoch {state.epoch}")
            state.history.rows[-1] = _with_means(row, {f"test_{name}": mean for name, mean in test.means.items()})
        self._row, self._is_open = None, False

    def stop_if(self, signum: int, where: str) -> None:
        """Raise what ends the run if a signal has stopped it, all devices holding the same weights."""
        if signum:
            self._state.interrupted = True
            raise_interrupt(signum, f"fit: stopped {where}")

    def where(self) -> Tuple[ProgressRecord, Dict[str, Array]]:
        """Return what a checkpoint keeps to go on from here: plain values, and sums on their devices. It does not wait."""
        state = self._state
        if not self._is_open:
            return asdict(replace(self._next(), epoch=state.epoch + 1)), {}
        self._add_queued()
        counts, sums = self._sums.state()
        num_norms, norms = self._norms.state()
        position = replace(
            self.begun,
            batches=state.batches,
            step=state.step,
            examples=self.begun.examples + self._examples,
            seconds=self.begun.seconds + time.perf_counter() - self._started,
            counts=counts,
            norms=num_norms,
            row=self._row,
            loader_epoch=self.begun.loader_epoch if self._row is None else loader_epoch(self._train_iter),
            shares=self._balancer.weights if self._balancer else None,
        )
        return asdict(position), {**{f"sum/{context}/{name}": value for (name, context), value in sums.items()}, **norms}

    def _next(self) -> FitProgress:
        """Return the position of an epoch of which nothing is done."""
        state = self._state
        shares = self._balancer.weights if self._balancer else None
        loaded = loader_epoch(self._train_iter)
        return FitProgress(
            state.epoch,
            step=state.step,
            num_batches=state.num_batches,
            loader_epoch=loaded,
            shares=shares,
            num_examples=num_examples_of(self._train_iter),
        )

    def _trained(self) -> Row:
        """Train, and return the row of the epoch without what evaluating adds."""
        state, begun, trainer = self._state, self.begun, self._state.trainer
        self._examples, self._started = 0, time.perf_counter()
        data = rest_of(self._train_iter, begun) if begun.batches else self._train_iter
        train = EpochProgress(self._sums.read(), 0, 0, 0.0) if data is None else self._pass_over(data)
        trainer.flush()
        state.pending = 0
        self._norms.add(trainer.grad_norm)
        self.stop_if(train.stopped, f"in epoch {state.epoch} after step {state.step}")
        whole = self._whole(train)
        means = {**{f"train_{name}": mean for name, mean in whole.means.items()}, **self._norms.take()}
        rest = {"seconds": whole.seconds, "examples_per_s": whole.examples_per_s, "learning_rate": trainer.learning_rate}
        if self._balancer is not None:
            rest.update({f"share_{context}": share for context, share in zip(trainer.contexts, self._balancer.weights)})
        return {"epoch": state.epoch, **means, **rest}

    def _pass_over(self, data: Iterable[Any]) -> EpochProgress:
        state, trainer, watching = self._state, self._state.trainer, [one for one in self._callbacks if _watches(one)]

        def train_one(X: Any, y: Any) -> Batch:
            state.batches += 1
            state.step += 1
            state.pending = state.batches % self._group
            checking = nullcontext() if self._is_checked else checking_outputs(self._check)
            with checking, trainer.accumulate() if state.pending else nullcontext():
                batch = self._train(X, y)
            self._is_checked = True
            self._norms.add(trainer.grad_norm)
            self._examples += batch.num_examples
            return batch

        def tell(add_queued: Callable[[], None]) -> None:
            self._add_queued = add_queued
            each(watching, "on_batch_end", state)
            self._add_queued = _nothing

        return run_epoch(
            data,
            train_one,
            self._metrics,
            operation="fit",
            first_step=self.begun.step + 1,
            on_report=lambda progress: each(self._callbacks, "on_report", state, self._whole(progress)),
            on_batch=tell if watching else None,
            sums=self._sums,
            **self._options,
        )

    def _check(self, outputs: Sequence[Any], labels: Sequence[Any]) -> None:
        """Raise `TrainerError` if the metrics do not take what the network gives: before the first update."""
        for output, label in zip(outputs[:1], labels):
            check_metrics(self._metrics, output, label)

    def _whole(self, progress: EpochProgress) -> EpochProgress:
        """Return how far the epoch has come, with what was done of it before it was gone on with."""
        begun = self.begun
        return replace(
            progress,
            num_batches=begun.batches + progress.num_batches,
            num_examples=begun.examples + progress.num_examples,
            seconds=begun.seconds + progress.seconds,
        )

    def _restore_sums(self, arrays: Dict[str, Any]) -> None:
        contexts = self._state.trainer.contexts
        by_name = {str(context): context for context in contexts}
        sums = []
        for key, value in arrays.items():
            kind, *place = key.split("/", 2)
            if kind == "sum":
                sums.append((place[1], by_name.get(place[0], contexts[0]), value))
        # In a job of several processes, the first one has what all had added.
        if not this_process().rank:
            self._sums.restore(self.begun.counts, sums)
        self._norms.restore(self.begun.norms, arrays, contexts[0])


def check_resumable(content: Content, train_iter: Iterable[Any]) -> None:
    """Raise `StateError` unless a run over this data can continue from a checkpoint: see `Run.where` and `Run.resume`."""
    position = position_of(content)
    check_data(position, train_iter)
    sums = {tuple(key.split("/", 2)[1:]): array for key, array in content.arrays.items() if key.startswith("sum/")}
    norms = {key: array for key, array in content.arrays.items() if key.startswith("norm/")}
    named = all(len(key) == 2 for key in sums) and {key[-1] for key in sums} == set(position.counts)
    sized = all(array.shape == (1,) and array.dtype.kind == "f" for array in (*sums.values(), *norms.values()))
    if not named or not sized or set(norms) != (_NORMS if position.norms else set()):
        raise StateError(
            f"fit: got {content.folder / STATES} with {len(sums)} sums of metrics and {len(norms)} of norms, which are "
            f"not those of {TRAINING}; expected one number for each device and metric. Use another checkpoint."
        )


class GradNorms:
    """The mean and the largest of the gradient's norms since the last report, added up on their device."""

    def __init__(self) -> None:
        self._latest: Optional[Array] = None
        self._num = 0
        self._sum: Optional[Array] = None
        self._largest: Optional[Array] = None

    def add(self, norm: Optional[Array]) -> None:
        """Add the norm of an update. The same array again is of the same update."""
        if norm is None or norm is self._latest:
            return
        self._latest, norm = norm, norm.as_nd_ndarray()
        self._num += 1
        self._sum = norm if self._sum is None else self._sum + norm
        self._largest = norm if self._largest is None else mx.nd.maximum(self._largest, norm)

    def take(self) -> Dict[str, float]:
        """Return `grad_norm` and `grad_norm_max`, waiting for the device, and begin anew; nothing where there was none."""
        if self._sum is None or self._largest is None:
            return {}
        read = {"grad_norm": float(self._sum.asscalar()) / self._num, "grad_norm_max": float(self._largest.asscalar())}
        self._num, self._sum, self._largest = 0, None, None
        return read

    def state(self) -> Tuple[int, Dict[str, Array]]:
        """Return how many norms were added, and what `restore` goes on from, on its device."""
        found = {"norm/sum": self._sum, "norm/largest": self._largest}
        return self._num, {name: array for name, array in found.items() if array is not None}

    def restore(self, num: int, arrays: Dict[str, Any], context: mx.Context) -> None:
        """Go on from what `state` returned."""
        if num:
            self._num = num
            self._sum, self._largest = (mx.nd.array(arrays[f"norm/{name}"], ctx=context) for name in ("sum", "largest"))


def each(callbacks: Sequence[Callback], method: str, *arguments: Any) -> None:
    """Call a method of every callback, in their order."""
    for callback in callbacks:
        getattr(callback, method)(*arguments)


def _watches(callback: Callback) -> bool:
    return type(callback).on_batch_end is not Callback.on_batch_end


def _with_means(row: Row, means: Dict[str, float]) -> Row:
    """Return a row with more means, before the columns that are none."""
    at = list(row).index("seconds")
    items = list(row.items())
    return dict([*items[:at], *means.items(), *items[at:]])


def _nothing() -> None:
    pass
