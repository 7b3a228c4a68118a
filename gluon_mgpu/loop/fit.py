"""fit(): checks its arguments, and puts a run together."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, List, Optional, Sequence, Union

from mxnet import gluon
from mxnet.io import DataIter

from ..checkpoint.resume import find_resumable, has_changed_rate, num_batches_of
from ..checkpoint.save_and_load import ReadCheckpoint
from ..checks import instance, one_of, short, whole_number
from ..data.iterators import check_iterable
from ..data_parallel.batchnorm import set_batch_norm
from ..data_parallel.compiled import make_passes
from ..data_parallel.sharding import SplitFunction, split_batch
from ..data_parallel.step import TrainStep, check_trainer
from ..distributed import any_process, group
from ..errors import TrainerError
from ..protocols import HasEvaluation
from ..refusals import refusal
from ..runtime.environment import logger
from ..trainer.options import check_not_recording
from ..trainer.parameters import average_replicas
from ..trainer.trainer import Trainer
from .batch_loop import EpochOptions
from .callbacks import Callback, FitState, Progress
from .epoch_loop import Limits, Run, call_each
from .evaluate import run_evaluation
from .history import History
from .metrics import Metrics, check_metrics, metrics_for, objects_of
from .save_checkpoints import Checkpoint
from .stop_signals import CaughtSignal, StopVote, Terminated, catch_signals
from .trace import Trace
from .weight_average import WeightAverage


def fit(
    net: gluon.Block,
    loss: Callable[[Any, Any], Any],
    trainer: Trainer,
    train_iter: Iterable[Any],
    test_iter: Optional[Iterable[Any]] = None,
    *,
    epochs: int,
    metrics: Union[str, Metrics] = "auto",
    callbacks: Optional[Sequence[Callback]] = None,
    split_f: SplitFunction = split_batch,
    max_inflight: int = 2,
    bn: Optional[str] = None,
    micro_steps: int = 1,
    accumulate_grad_batches: int = 1,
    compiled: str = "auto",
    trace: Union[None, str, Path, Trace] = None,
    resume: Union[None, str, Path] = None,
    max_steps: Optional[int] = None,
    limit_batches: Optional[int] = None,
    limit_eval_batches: Optional[int] = None,
    evaluate_every: Optional[int] = None,
) -> History:
    """Train a network for some epochs, evaluate it after each, and return one row of results per epoch.

    Ctrl-C, SIGTERM and SIGUSR1 stop it after the current batch: callbacks save, then it raises KeyboardInterrupt, SystemExit(143)
    after SIGTERM, or SystemExit(85) after SIGUSR1, which asks to be started again. A second Ctrl-C or SIGTERM ends the process
    immediately. A program's own signal handlers stay.

    Parameters
    ----------
    net : gluon.Block
        Initialised on the trainer's devices.
    loss : callable (output, label) -> NDArray, shape (shard size,)
        One number per example. If it has an attribute `evaluation`, `test_iter` is evaluated with that loss.
    trainer : Trainer
    train_iter, test_iter : iterable of (X, y)
        Shapes (B, ...); read once per epoch.
    epochs : int
    metrics : "auto", sequence, or dict name -> metric
        See `gluon_mgpu.accuracy`. "auto": accuracy, unless `loss` is a regression loss of Gluon. Objects such as
        `mx.metric.F1()` have columns `test_...` alone, as training would wait for each batch: see `evaluate`.
    callbacks : sequence of Callback, optional
        `[Progress()]` by default; `[]` for none.
    split_f : callable (X, y, devices) -> (list of shards, list of shards)
        For devices of different speed `functools.partial(split_batch, weights=[3, 1])`.
    max_inflight : int
        Batches that may be queued on the devices. A larger number delays reports and errors.
    bn : "local" or "sync", optional
        Which statistics BatchNorm uses on several devices: `set_batch_norm(net, bn)`, which remains set.
    micro_steps : int
        Compute each batch in this many parts, which takes less memory; see `train_batch`.
    accumulate_grad_batches : int
        Update once per this many batches, as if they were one. The last update of an epoch takes the batches that are left.
    compiled : "auto", "on" or "off"
        Whether the passes of training and evaluation run as compiled graphs, which needs less time of the host: see
        `compile_step`. "auto" does so where it can.
    trace : str, pathlib.Path or Trace, optional
        Write to this file where the time of steps 11 to 20 goes, for https://ui.perfetto.dev: see `Trace`, which sets other
        steps.
    resume : "auto" or folder, optional
        Resume from a checkpoint that `Checkpoint` has saved, also within an epoch. `epochs` and the history count from the
        beginning of the run. `"auto"` takes the latest good checkpoint of the `Checkpoint` among the callbacks. If there is none,
        the run starts from the beginning. A folder is that of a checkpoint, or of a run. A resumed run uses this trainer's
        options and schedule, which continues at the updates so far. A learning rate that was set while the stopped run trained
        stays.
    max_steps : int, optional
        End the run after so many batches, counted from its beginning, and evaluate once more. A run that is resumed after
        that begins with the next epoch.
    limit_batches, limit_eval_batches : int, optional
        Train on and evaluate only the first so many batches of each epoch, for a quick try.
    evaluate_every : int, optional
        Also evaluate within an epoch, every so many batches; the results are in `history.evaluations`. Callbacks compare epochs.

    Returns
    -------
    History

    Raises
    ------
    StateError
        There are checkpoints, but none that belongs to this network, trainer and data and is not damaged. Nothing was changed.
    NonFiniteLossError
        The loss became NaN or infinite; the message names the step and the device.
    SaveError
        A checkpoint could not be written, or another run uses its folder. Earlier checkpoints stay.
    StepError
        A device failed; the message names the step.
    KeyboardInterrupt
        Ctrl-C, after saving.
    SystemExit
        SIGTERM or SIGUSR1, after saving; its code is 143 or 85.
    """
    counts = {"epochs": epochs, "max_inflight": max_inflight, "accumulate_grad_batches": accumulate_grad_batches}
    limits = Limits(max_steps, limit_batches, limit_eval_batches, evaluate_every)
    counts.update((name, value) for name, value in vars(limits).items() if value is not None)
    for name, value in counts.items():
        whole_number("fit", name, value, advice="Pass 1 or more.")
    check_not_recording("fit")
    check_trainer("fit", trainer, net, loss)
    check_iterable("fit", "train_iter", train_iter, reader="fit")
    if test_iter is not None:
        check_iterable("fit", "test_iter", test_iter, reader="evaluate", each_once=True)
    is_shared = test_iter is train_iter and isinstance(test_iter, DataIter)  # an evaluation would end the epoch
    if evaluate_every is not None and (test_iter is None or is_shared):
        raise TrainerError(
            f"fit: got evaluate_every={evaluate_every} without a test_iter; expected one to evaluate. Pass fit(..., test_iter)."
        )
    measured = metrics_for(metrics, loss)
    if test_iter is None and objects_of(measured):
        raise TrainerError(
            f"fit: got {', '.join(objects_of(measured))} of MXNet without a test_iter; expected one, as only evaluations update "
            "these metrics. Pass fit(..., test_iter), or functions."
        )
    callbacks = _checked_callbacks(callbacks)
    if trace is not None:
        callbacks.append(trace if isinstance(trace, Trace) else Trace(trace))
    one_of("fit", "bn", bn, (None, "local", "sync"), advice="None keeps the network's layers.")
    if bn == "sync" and compiled == "on":
        raise refusal("fit", "compiled='on'", "synchronised BatchNorm")
    test_loss = loss.evaluation if isinstance(loss, HasEvaluation) else loss
    passes = make_passes("fit", net, test_loss, compiled, kept=trainer.kept)
    checkpoint = None if resume is None else _read_checkpoint(resume, callbacks, net, trainer, (train_iter, test_iter))
    num_batches = limits.num_batches(num_batches_of(train_iter))
    processes, steps = group(), min(num_batches, max_steps or num_batches)
    if processes is not None and len(set(processes.all_gather_bytes(str(steps).encode())).difference([b"0"])) > 1:
        raise TrainerError(
            f"fit: got {num_batches} batches an epoch in process {processes.process.rank}, and others in other processes; "
            "expected the same number in all, as each step waits for all. Use a ShardedSampler, or limit_batches."
        )
    state = FitState(net, trainer, limits.num_epochs(epochs, num_batches), num_batches, tests=test_iter is not None)
    caught = CaughtSignal()
    on_phase = partial(call_each, callbacks, "on_phase", state)
    check = partial(check_metrics, measured)
    train = TrainStep("fit", net, loss, trainer, split_f, False, micro_steps, compiled=compiled, on_phase=on_phase, check=check)
    shards = trainer.virtual_shards
    evaluate = partial(run_evaluation, net, loss=test_loss, split_f=split_f, passes=passes, virtual_shards=shards)
    run = Run(
        state,
        callbacks,
        train_iter,
        test_iter,
        metrics=measured,
        train=train,
        evaluate=evaluate,
        options=EpochOptions(
            "fit",
            max_inflight=max_inflight,
            check_finite=True,
            stop_signal=lambda: caught.signum,
            may_stop=lambda: not state.pending,  # between two updates: a stop before that would make half of one, or lose it
            on_phase=on_phase,
        ),
        batches_per_update=accumulate_grad_batches,
        limits=limits,
    )
    if bn is not None:
        set_batch_norm(net, bn)
    if checkpoint is not None:  # everything has been checked: from here on, state changes
        state.resumed = checkpoint.restore(learning_rate=has_changed_rate(checkpoint.content))
        run.restore(state.resumed)
    state.where = run.position
    with catch_signals(caught):
        begun: List[Callback] = []
        try:
            for callback in callbacks:
                begun.append(callback)
                callback.on_fit_begin(state)
            _run_epochs(run, state, callbacks, caught, epochs)
        except BaseException as error:
            state.error = error
            trainer.discard()
            state.stop = "interrupted" if isinstance(error, (KeyboardInterrupt, Terminated)) else type(error).__name__
            raise
        finally:
            state.history.stopped = state.stop
            _end_callbacks(begun, state)
            if state.error is None or state.interrupted:
                any_process(False)  # a barrier: all see the files that the first process has written, and none ends before it
    trainer.steps.fresh.drop_unused()  # a loop by hand may follow
    return state.history


def _run_epochs(run: Run, state: FitState, callbacks: Sequence[Callback], caught: CaughtSignal, epochs: int) -> None:
    """Train and evaluate the remaining epochs, until a callback or a signal stops them."""
    if run.start.epoch > epochs:
        logger.warning("fit: the run has ended before: nothing is left of epochs=%d", epochs)
    for epoch in range(run.start.epoch, epochs + 1):  # an epoch may have fewer batches than the iterator's length
        if any_process(bool(state.stop)):
            state.stop = state.stop or "another process has stopped"
        if state.stop or run.is_over():
            break
        state.epoch = epoch
        call_each(callbacks, "on_epoch_begin", state)
        run.train_and_evaluate()
        if not state.tests:  # an evaluation averages them
            average_replicas(state.net)
        call_each(callbacks, "on_epoch_end", state)
        run.raise_if_stopped(StopVote().after_step(caught.signum), f"after epoch {epoch}")
    else:  # a callback may have asked to stop after the last one
        state.stop = ""
    if run.is_over() and not state.stop:
        state.stop = f"max_steps={run.limits.max_steps}"


def _checked_callbacks(callbacks: Optional[Sequence[Callback]]) -> List[Callback]:
    if callbacks is None:
        return [Progress()]
    if not isinstance(callbacks, (list, tuple)) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise TrainerError(
            f"fit: got callbacks={short(callbacks)}; expected a list of Callback objects. For example, pass [Checkpoint(folder)]."
        )
    for kind, why in ((WeightAverage, "whose weights are evaluated"), (Checkpoint, "from which a run resumes")):
        names = [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]
        if len(names) > 1:
            raise TrainerError(f"fit: got {' and '.join(names)}; expected one {kind.__name__}, {why}. Leave the others out.")
    return list(callbacks)


def _read_checkpoint(
    resume: Union[str, Path], callbacks: Sequence[Callback], net: gluon.Block, trainer: Trainer, data: Sequence[Any]
) -> Optional[ReadCheckpoint]:
    """Return the checkpoint to resume from, fully checked; None if there is none yet."""
    instance("fit", "resume", resume, (str, Path), "'auto' or a folder", advice="Pass None to start from the beginning.")
    saving = next((callback for callback in callbacks if isinstance(callback, Checkpoint)), None)
    any_process(False)  # a barrier: the first process may still write, after an error that ended the run before
    with ExitStack() as held:  # another run that uses the folder is an error before any state changes
        if saving is not None and os.path.isdir(saving.folder):
            held.callback(saving.release)
            saving.hold()
        found = find_resumable(resume, None if saving is None else saving.folder, net, trainer, *data)
        if found is not None and saving is not None:
            saving.check_resumable(found.content.folder)
        return found


def _end_callbacks(callbacks: Sequence[Callback], state: FitState) -> None:
    """Call `on_fit_end` of each of these callbacks, even after one raised: another may save. Then raise the first error.

    An error that already ends the run takes precedence, except over a KeyboardInterrupt or SystemExit of a callback.
    """
    errors: List[BaseException] = []
    for callback in callbacks:
        try:
            callback.on_fit_end(state)
        except BaseException as error:
            logger.warning("fit: %s failed at the end: %s", type(callback).__name__, error or type(error).__name__)
            errors.append(error)
    for first in [*(error for error in errors if not isinstance(error, Exception)), *errors]:
        if state.error is None or not isinstance(first, Exception):
            raise first
