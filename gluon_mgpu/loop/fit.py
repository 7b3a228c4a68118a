"""The epoch loop."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, List, Optional, Sequence, Union

from mxnet import gluon

from ..checkpoint.checkpoint import ReadCheckpoint
from ..checks import check_function, short, whole_number
from ..data_parallel.balancer import Balancer
from ..data_parallel.batchnorm import average_over_processes, set_batch_norm, sync_running_stats
from ..data_parallel.debug import debugging_if_asked
from ..data_parallel.iterators import check_iterable
from ..data_parallel.sharding import plan_shards, split_batch
from ..data_parallel.step import SplitFunction, check_network, train_batch
from ..distributed import any_process
from ..errors import TrainerError
from ..runtime.environment import logger
from ..trainer.running_stats import remember_equal
from ..trainer.trainer import Trainer
from .callbacks import Callback, Checkpoint, FitState, Progress
from .evaluate import run_evaluation
from .history import History
from .metrics import Metrics, accuracy, named_metrics
from .resume import num_batches_of, resume_run
from .run import Run, check_resumable, each
from .stopping import Terminated, any_asks, interruptible


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

    Ctrl-C and SIGTERM end it after the batch under way: callbacks save what there is. Then it raises KeyboardInterrupt, or after
    SIGTERM SystemExit(143). A second signal ends it at once. A program's own signal handlers stay.

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
        See `gluon_mgpu.loop.metrics`.
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
    SaveError
        A checkpoint could not be written, or another run uses its folder. The checkpoints before stay.
    StepError
        A device failed; the message names the step.
    KeyboardInterrupt
        Ctrl-C, after saving.
    SystemExit
        SIGTERM, after saving; its code is 143.
    """
    counts = {
        "epochs": epochs,
        "max_inflight": max_inflight,
        "micro_steps": micro_steps,
        "accumulate_grad_batches": accumulate_grad_batches,
    }
    for name, value in counts.items():
        whole_number("fit", name, value, advice="10 epochs, 2 in flight and 1 are usual.")
    if not isinstance(trainer, Trainer):
        raise TrainerError(
            f"fit: got {type(trainer).__name__} as the trainer; expected a gluon_mgpu.Trainer. Pass Trainer(net, 'sgd')."
        )
    check_network("fit", net)
    check_function("fit", "loss", loss, advice="Pass a loss of gluon.loss, such as SoftmaxCrossEntropyLoss().")
    check_function("fit", "split_f", split_f, advice="Pass split_batch, which takes (X, y, devices).")
    check_iterable("fit", "train_iter", train_iter, reader="fit")
    if test_iter is not None:
        check_iterable("fit", "test_iter", test_iter, reader="evaluate")
    named_metrics(metrics)
    listed = _checked_callbacks(callbacks)
    split_f = _weighted(weights, split_f, trainer)
    remember_equal(net)  # values may have been loaded since the trainer was made
    read = None if resume is None else _read(resume, listed, net, trainer, train_iter)
    state = FitState(net, trainer, epochs, num_batches_of(train_iter), tests=test_iter is not None)
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
    if bn is not None:
        set_batch_norm(net, bn)
    if read is not None:  # from here on, nothing is refused
        state.resumed = read.restore()
        run.resume(state.resumed)
    state.where = run.where
    with debugging_if_asked(net, loss), interruptible() as run.interrupts:
        try:
            each(listed, "on_fit_begin", state)
            epochs_left = () if state.stop else range(run.begun.epoch, epochs + 1)
            for state.epoch in epochs_left:
                each(listed, "on_epoch_begin", state)
                run.run_epoch()
                if test_iter is None:  # an evaluation would have done it
                    sync_running_stats(net)
                    average_over_processes(net)
                each(listed, "on_epoch_end", state)
                run.stop_if(any_asks(run.interrupts.first), f"after epoch {state.epoch}")
                if state.stop:
                    break
        except BaseException as error:
            state.error = error
            trainer.discard()
            state.stop = "interrupted" if isinstance(error, (KeyboardInterrupt, Terminated)) else type(error).__name__
            raise
        finally:
            state.history.stopped = state.stop
            _end(listed, state)
            if state.error is None or state.interrupted:
                any_process(False)  # all see the files that the first process has written, and none ends before it
    return state.history


def _checked_callbacks(callbacks: Optional[Sequence[Callback]]) -> List[Callback]:
    if callbacks is None:
        return [Progress()]
    if not isinstance(callbacks, (list, tuple)) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise TrainerError(
            f"fit: got callbacks={short(callbacks)}; expected a list of Callback objects. Pass [Checkpoint(...)], say."
        )
    return list(callbacks)


def _read(
    resume: Union[str, Path], callbacks: Sequence[Callback], net: gluon.Block, trainer: Trainer, train_iter: Iterable[Any]
) -> Optional[ReadCheckpoint]:
    """Return the checkpoint to continue from, having checked all that it holds; None where there is none yet."""
    if not isinstance(resume, (str, Path)):
        raise TrainerError(f"fit: got resume={short(resume)}; expected 'auto' or a folder. None begins anew.")
    saving = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    check = partial(check_resumable, train_iter=train_iter)
    with ExitStack() as held:  # another run in the folder is an error before anything is changed
        for callback in saving:
            if callback.folder.is_dir():
                held.callback(callback.release)
                callback.hold()
        return resume_run(resume, saving[0].folder if saving else None, net, trainer, check)


def _weighted(weights: Union[None, str, Sequence[float]], split_f: SplitFunction, trainer: Trainer) -> SplitFunction:
    """Return the function that shares batches out so."""
    if weights is None:
        return split_f
    if split_f is not split_batch or (isinstance(weights, str) and weights != "auto"):
        raise TrainerError(
            f"fit: got weights={short(weights)} and split_f={short(split_f)}; expected 'auto' or a number for each device, "
            "and no other way to split. Pass split_f=Balancer(trainer, batch_axis=1), or a functools.partial of split_batch."
        )
    if isinstance(weights, str):
        return Balancer(trainer)
    plan_shards(1, len(trainer.contexts), weights)  # what makes no sense is refused now
    return partial(split_batch, weights=weights)


def _end(callbacks: Sequence[Callback], state: FitState) -> None:
    """Let every callback end, whatever the others raise: one of them saves. Then raise the first error, unless one is under way.

    A KeyboardInterrupt or SystemExit of a callback is raised in any case.
    """
    errors: List[BaseException] = []
    for callback in callbacks:
        try:
            callback.on_fit_end(state)
        except BaseException as error:
            logger.warning("fit: %s failed at the end: %s", type(callback).__name__, error or type(error).__name__)
            errors.append(error)
    for first in [*(one for one in errors if not isinstance(one, Exception)), *errors]:
        if state.error is None or not isinstance(first, Exception):
            raise first
