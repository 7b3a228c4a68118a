"""The epoch loop."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Sized, Union

import mxnet as mx
import numpy as np
from mxnet import gluon

from .balance import Balancer
from .batchnorm import set_batch_norm
from .callbacks import Callback, FitState, History, Progress
from .debug import debugging_if_asked
from .epoch import run_epoch
from .errors import TrainerError
from .evaluation import run_evaluation
from .metrics import Metrics, accuracy
from .nested import Leaf
from .runtime import logger
from .sharding import plan_shards, split_batch
from .step import Batch, SplitFunction, train_batch
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
    state = FitState(net, trainer, epochs, num_batches, tests=test_iter is not None)
    step, num_seen = 1, 0  # the next batch; batches of this epoch
    norms = GradNorms()

    def train_one(X: Any, y: Any) -> Batch:
        nonlocal num_seen
        num_seen += 1
        with trainer.accumulate() if num_seen % accumulate_grad_batches else nullcontext():
            batch = train_batch(net, loss, trainer, X, y, split_f=split_f, micro_steps=micro_steps)
        norms.add(trainer.grad_norm)
        return batch

    def stop_if(stopped: bool, where: str) -> None:
        if stopped:
            state.interrupted = True
            raise KeyboardInterrupt(f"fit: stopped {where}")

    def run_one(interrupts: List[int]) -> None:
        nonlocal step, num_seen
        num_seen = 0
        options: Dict[str, Any] = {
            "operation": "fit",
            "first_step": step,
            "max_inflight": max_inflight,
            "check_finite": True,
            "should_stop": lambda: bool(interrupts),
        }
        train = run_epoch(
            train_iter,
            train_one,
            metrics,
            on_report=lambda progress: _each(listed, "on_report", state, progress),
            **options,
        )
        step += train.num_batches
        trainer.flush()
        norms.add(trainer.grad_norm)
        stop_if(train.stopped, f"in epoch {state.epoch} after step {step - 1}")
        means = {**{f"train_{name}": mean for name, mean in train.means.items()}, **norms.take()}
        rest = {"seconds": train.seconds, "examples_per_s": train.examples_per_s, "learning_rate": trainer.learning_rate}
        if isinstance(split_f, Balancer):
            rest.update({f"share_{context}": share for context, share in zip(trainer.contexts, split_f.weights)})
        state.history.rows.append({"epoch": state.epoch, **means, **rest})
        if test_iter is not None:
            options.update(operation="evaluate", first_step=1)
            test = run_evaluation(net, test_iter, metrics, loss=loss, split_f=split_f, **options)
            stop_if(test.stopped, f"in the evaluation after epoch {state.epoch}")
            means.update({f"test_{name}": mean for name, mean in test.means.items()})
            state.history.rows[-1] = {"epoch": state.epoch, **means, **rest}

    with debugging_if_asked(net, loss), _interruptible() as interrupts:
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
            trainer.discard()
            state.stop = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            raise
        finally:
            state.history.stopped = state.stop
            _end(listed, state)
    return state.history


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


class GradNorms:
    """The mean and the largest of the gradient's norms since the last report, added up on their device."""

    def __init__(self) -> None:
        self._latest: Optional[Leaf] = None
        self._num = 0
        self._sum: Optional[Leaf] = None
        self._largest: Optional[Leaf] = None

    def add(self, norm: Optional[Leaf]) -> None:
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
