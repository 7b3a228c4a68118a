"""The epoch loop."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from types import FrameType
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Sized

import numpy as np
from mxnet import gluon

from .callbacks import Callback, FitState, History, Progress
from .epoch import run_epoch
from .errors import TrainerError
from .evaluation import run_evaluation
from .metrics import Metrics, accuracy
from .runtime import logger
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
        Batches that may be queued on the devices; reports and errors come later by as many.

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
    for name, value in (("epochs", epochs), ("max_inflight", max_inflight)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise TrainerError(
                f"fit: got {name}={value!r}; need a whole number of 1 or more. 10 epochs and 2 in flight are usual."
            )
    listed: List[Callback] = [Progress()] if callbacks is None else list(callbacks)
    if not isinstance(train_iter, Iterable) or any(not isinstance(callback, Callback) for callback in listed):
        raise TrainerError(
            f"fit: got {type(train_iter).__name__} as train_iter and callbacks {listed}; need an iterable of pairs (X, y), and "
            "objects of subclasses of Callback. Pass a DataLoader, and Checkpoint(...), say."
        )
    num_batches = len(train_iter) if isinstance(train_iter, Sized) else 0
    state = FitState(net, trainer, epochs, num_batches, tests=test_iter is not None)
    step = 1

    def stop_if(stopped: bool, where: str) -> None:
        if stopped:
            state.interrupted = True
            raise KeyboardInterrupt(f"fit: stopped {where}")

    def run_one(interrupts: List[int]) -> None:
        nonlocal step
        options: Dict[str, Any] = {
            "operation": "fit",
            "first_step": step,
            "max_inflight": max_inflight,
            "check_finite": True,
            "should_stop": lambda: bool(interrupts),
        }
        train = run_epoch(
            train_iter,
            lambda X, y: train_batch(net, loss, trainer, X, y, split_f=split_f),
            metrics,
            on_report=lambda progress: _each(listed, "on_report", state, progress),
            **options,
        )
        step += train.num_batches
        stop_if(train.stopped, f"in epoch {state.epoch} after step {step - 1}")
        means = {f"train_{name}": mean for name, mean in train.means.items()}
        rest = {"seconds": train.seconds, "examples_per_s": train.examples_per_s, "learning_rate": trainer.learning_rate}
        state.history.rows.append({"epoch": state.epoch, **means, **rest})
        if test_iter is not None:
            options.update(operation="evaluate", first_step=1)
            test = run_evaluation(net, test_iter, metrics, loss=loss, split_f=split_f, **options)
            stop_if(test.stopped, f"in the evaluation after epoch {state.epoch}")
            means.update({f"test_{name}": mean for name, mean in test.means.items()})
            state.history.rows[-1] = {"epoch": state.epoch, **means, **rest}

    with _interruptible() as interrupts:
        try:
            _each(listed, "on_fit_begin", state)
            for state.epoch in range(1, epochs + 1):
                _each(listed, "on_epoch_begin", state)
                run_one(interrupts)
                _each(listed, "on_epoch_end", state)
                stop_if(bool(interrupts), f"after epoch {state.epoch}")
                if state.stop:
                    break
        except BaseException as error:
            state.error = error
            state.stop = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            raise
        finally:
            state.history.stopped = state.stop
            _end(listed, state)
    return state.history


def _each(callbacks: Sequence[Callback], method: str, *arguments: Any) -> None:
    for callback in callbacks:
        getattr(callback, method)(*arguments)


def _end(callbacks: Sequence[Callback], state: FitState) -> None:
    """Let every callback end, whatever the others do: one of them saves. The first error is raised if none is under way."""
    first: Optional[Exception] = None
    for callback in callbacks:
        try:
            callback.on_fit_end(state)
        except Exception as error:
            logger.warning("fit: %s failed at the end: %s", type(callback).__name__, error)
            first = first or error
    if first is not None and state.error is None:
        raise first


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
