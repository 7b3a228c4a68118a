"""The epoch loop."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Sized, Union

import numpy as np
from mxnet import gluon

from .balance import Balancer
from .batchnorm import set_batch_norm
from .callbacks import Callback, Checkpoint, FitState, History, Progress
from .debug import debugging_if_asked
from .errors import TrainerError
from .evaluation import average_over_processes, run_evaluation
from .metrics import Metrics, accuracy
from .position import resume_run
from .processes import any_says
from .run import Run, each
from .runtime import logger
from .sharding import plan_shards, split_batch
from .snapshot import Content
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
    weights: Union[None, str, Sequence[float]] = None,
    max_inflight: int = 2,
    bn: Optional[str] = None,
    micro_steps: int = 1,
    accumulate_grad_batches: int = 1,
    resume: Union[None, str, Path] = None,
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
    weights : "auto" or sequence of float, optional
        How batches are shared out among devices that are not equally fast: in these proportions, or as measured while training;
        see `Balancer`. The shares at the end of an epoch are in the history then.
    max_inflight : int
        Batches that may be queued on the devices; reports and errors come later by as many.
    bn : "local", "average" or "sync", optional
        Whose statistics BatchNorm takes on several devices: `set_batch_norm(net, bn)`, which stays.
    micro_steps : int
        Do each batch in so many parts, for less memory; see `train_batch`.
    accumulate_grad_batches : int
        Update once after so many batches, as if they were one; the last update of an epoch takes what is left.
    resume : "auto" or folder, optional
        Go on from a checkpoint that `Checkpoint` has saved, in the middle of an epoch, too: `epochs` and the history count from
        the beginning of the run. `"auto"`: from the latest good one of the callback among these, and from the beginning where
        there is none yet. Else from a folder: of a checkpoint, or of a run.

    Returns
    -------
    History

    Raises
    ------
    StateError
        There are checkpoints to go on from, and none of them belongs to this network, trainer and data, or all are damaged.
        Nothing was changed.
    NonFiniteLossError
        The loss became NaN or infinite; the message names the step and the device.
    StepError
        A device failed; the message names the step.
    KeyboardInterrupt
        Ctrl-C, after saving.
    """
    counts = {
        "epochs": epochs,
        "max_inflight": max_inflight,
        "micro_steps": micro_steps,
        "accumulate_grad_batches": accumulate_grad_batches,
    }
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise TrainerError(
                f"fit: got {name}={value!r}; need a whole number of 1 or more. 10 epochs, 2 in flight and 1 are usual."
            )
    if not isinstance(trainer, Trainer):
        raise TrainerError(
            f"fit: got {type(trainer).__name__} as the trainer; need a gluon_mgpu.Trainer. Pass Trainer(net, 'sgd')."
        )
    listed: List[Callback] = [Progress()] if callbacks is None else list(callbacks)
    if not isinstance(train_iter, Iterable) or any(not isinstance(callback, Callback) for callback in listed):
        raise TrainerError(
            f"fit: got {type(train_iter).__name__} as train_iter and callbacks {listed}; need an iterable of pairs (X, y), and "
            "objects of subclasses of Callback. Pass a DataLoader, and Checkpoint(...), say."
        )
    split_f = _weighted(weights, split_f, trainer)
    if bn is not None:
        set_batch_norm(net, bn)
    num_batches = len(train_iter) if isinstance(train_iter, Sized) else 0
    content = None if resume is None else _resumed(resume, listed, net, trainer, num_batches)
    state = FitState(net, trainer, epochs, num_batches, tests=test_iter is not None, resumed=content)
    run = Run(
        state,
        listed,
        train_iter,
        test_iter,
        metrics=metrics,
        train=partial(train_batch, net, loss, trainer, split_f=split_f, micro_steps=micro_steps),
        evaluate=partial(run_evaluation, net, loss=loss, split_f=split_f),
        group=accumulate_grad_batches,
        max_inflight=max_inflight,
        balancer=split_f if isinstance(split_f, Balancer) else None,
    )
    if content is not None:
        run.go_on(content)
    state.where = run.where
    with debugging_if_asked(net, loss), _interruptible() as run.interrupts:
        try:
            each(listed, "on_fit_begin", state)
            epochs_left = () if state.stop else range(run.begun.epoch, epochs + 1)
            for state.epoch in epochs_left:
                each(listed, "on_epoch_begin", state)
                run.do_epoch()
                if test_iter is None:
                    average_over_processes(net)  # an evaluation would have done it
                each(listed, "on_epoch_end", state)
                run.stop_if(any_says(bool(run.interrupts)), f"after epoch {state.epoch}")
                if state.stop:
                    break
        except BaseException as error:
            state.error = error
            trainer.discard()
            state.stop = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            raise
        finally:
            state.history.stopped = state.stop
            _end(listed, state)
    any_says(False)  # all see the files that the first process has written
    return state.history


def _resumed(
    resume: Union[str, Path], callbacks: Sequence[Callback], net: gluon.Block, trainer: Trainer, num_batches: int
) -> Optional[Content]:
    """Let the network and its trainer go on from a checkpoint; None where there is none yet."""
    if not isinstance(resume, (str, Path)):
        raise TrainerError(f"fit: got resume={resume!r}; need 'auto' or a folder. None begins anew.")
    folders = [callback.folder for callback in callbacks if isinstance(callback, Checkpoint)]
    return resume_run(resume, folders[0] if folders else None, net, trainer, num_batches)


def _weighted(weights: Union[None, str, Sequence[float]], split_f: SplitFunction, trainer: Trainer) -> SplitFunction:
    """Return the function that shares batches out so."""
    if weights is None:
        return split_f
    if split_f is not split_batch or (isinstance(weights, str) and weights != "auto"):
        raise TrainerError(
            f"fit: got weights={weights!r} and split_f={split_f!r}; need 'auto' or a number for each device, and no other way to "
            "split. Pass split_f=Balancer(trainer, batch_axis=1), or a functools.partial of split_batch."
        )
    if isinstance(weights, str):
        return Balancer(trainer)
    plan_shards(1, len(trainer.contexts), weights)  # what makes no sense is refused now
    return partial(split_batch, weights=weights)


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
