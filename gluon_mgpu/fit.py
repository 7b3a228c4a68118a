"""The epoch loop."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from types import FrameType
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Sized

from mxnet import gluon

from .callbacks import Callback, FitState, History, Progress
from .epoch import run_epoch
from .errors import TrainerError
from .evaluation import evaluate
from .metrics import Metrics, accuracy
from .sharding import split_batch
from .step import SplitFunction, train_batch
from .trainer import Trainer


def fit(
    net: gluon.Block,
    loss: Callable[[Any, Any], Any],
    trainer: Trainer,
    train_iter: Iterable[Any],
    test_iter: Optional[Iterable[Any]] = None,
    *,
    epochs: int,
    metrics: Metrics = (accuracy,),
    callbacks: Optional[Sequence[Callback]] = None,
    split_f: SplitFunction = split_batch,
    max_inflight: int = 2,
) -> History:
    """Train a network for some epochs, evaluate it after each, and return what each epoch gave.

    Ctrl-C ends it after the batch under way: callbacks save what there is, then KeyboardInterrupt goes on. A second Ctrl-C does
    not wait.

    Parameters
    ----------
    net : gluon.Block
        Initialised on the trainer's devices.
    loss : callable (output, label) -> NDArray, shape (shard size,)
        One number an example.
    trainer : Trainer
    train_iter, test_iter : iterable of (X, y)
        Shapes (B, ...); read once an epoch.
    epochs : int
    metrics : sequence of functions, or dict name -> function
        See `gluon_mgpu.metrics`.
    callbacks : sequence of Callback, optional
        `[Progress()]` by default; `[]` for none.
    split_f : callable (X, y, devices) -> (list of shards, list of shards)
    max_inflight : int
        Batches that may be queued on the devices.

    Returns
    -------
    History

    Raises
    ------
    NonFiniteLossError
        The loss became NaN or infinite; the message names the step and the device.
    StepError
        A device failed; the message names the step.
    KeyboardInterrupt
        Ctrl-C, after saving.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1 or max_inflight < 1:
        raise TrainerError(
            f"fit: got epochs={epochs!r}, max_inflight={max_inflight!r}; need integers of 1 or more. epochs=10, say."
        )
    listed = [Progress()] if callbacks is None else list(callbacks)
    num_batches = len(train_iter) if isinstance(train_iter, Sized) else 0
    state = FitState(net, trainer, epochs, num_batches)
    with _interruptible() as interrupts:
        try:
            _each(listed, "on_fit_begin", state)
            step = 1
            for state.epoch in range(1, epochs + 1):
                _each(listed, "on_epoch_begin", state)
                learning_rate = trainer.learning_rate
                train = run_epoch(
                    train_iter,
                    lambda X, y: train_batch(net, loss, trainer, X, y, split_f=split_f),
                    metrics,
                    operation="fit",
                    first_step=step,
                    max_inflight=max_inflight,
                    check_finite=True,
                    on_report=lambda progress: _each(listed, "on_report", state, progress),
                    should_stop=lambda: bool(interrupts),
                )
                step += train.num_batches
                if train.stopped:
                    raise KeyboardInterrupt(f"fit: stopped in epoch {state.epoch} after step {step - 1}")
                row = {"epoch": float(state.epoch), **{f"train_{name}": mean for name, mean in train.means.items()}}
                if test_iter is not None:
                    test = evaluate(net, test_iter, metrics, loss=loss, split_f=split_f)
                    row.update({f"test_{name}": mean for name, mean in test.items()})
                row.update(seconds=train.seconds, examples_per_s=train.examples_per_s, learning_rate=learning_rate)
                state.history.rows.append(row)
                _each(listed, "on_epoch_end", state)
                if interrupts:
                    raise KeyboardInterrupt(f"fit: stopped after epoch {state.epoch}")
                if state.stop:
                    break
        except BaseException as error:
            state.error = error
            state.stop = state.stop or "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            raise
        finally:
            state.history.stopped = state.stop
            _each(listed, "on_fit_end", state)
    return state.history


def _each(callbacks: Sequence[Callback], method: str, *arguments: Any) -> None:
    for callback in callbacks:
        getattr(callback, method)(*arguments)


@contextmanager
def _interruptible() -> Iterator[List[int]]:
    """Yield a list that Ctrl-C adds to: it must not cut an update in two. A second Ctrl-C raises at once."""
    interrupts: List[int] = []

    def note(number: int, frame: Optional[FrameType]) -> None:
        if interrupts:
            signal.default_int_handler(number, frame)
        interrupts.append(number)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
