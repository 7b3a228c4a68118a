"""The progress of a run, and how it resumes, also within an epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sized, Union

import numpy as np
from mxnet import gluon, io

from ..checks import is_number, is_whole, path_of, short
from ..data.iterators import batches_of, rolls_over
from ..distributed import group
from ..distributed.process import this_process
from ..errors import StateError
from ..mxnet_internals.loaders import samplers_of, shuffles_in_cpp
from ..runtime.environment import logger
from ..runtime.untrusted_files import COUNT, check_form
from ..trainer.trainer import Trainer
from .random_state import FORM as RANDOM
from .random_state import random_state, set_random_state
from .rotation import checkpoint_in, find_checkpoints
from .save_and_load import ReadCheckpoint, read_checkpoint
from .snapshot import PROGRESS, STATES, SUM, TRAINING, CheckpointData, refusing

Row = Dict[str, float]

_LOADER_EPOCH = (None, range(-1, COUNT.stop))
_FORM = {  # of the values of `FitProgress`
    **dict.fromkeys(("epoch", "batches", "step", "num_batches", "examples"), COUNT),
    "data": str,
    "seconds": lambda value: is_number(value) and 0 <= value < 1e9,
    "loader_epoch": _LOADER_EPOCH,
    "test_epoch": _LOADER_EPOCH,
    "generators": RANDOM,
    "counts": {"*": range(-(2**53), 2**53)},
    "learning_rate": (None, float),
    "row": (None, {"epoch": COUNT, "seconds": float, "examples_per_s": float, "*": object}),
    "evaluations": [{"epoch": COUNT, "step": COUNT, "*": object}],
}
_HISTORY = {"history": [{"epoch": COUNT, "*": object}], "*": object}
_SUM = re.compile(r"(None|all|[0-9]{1,9}|[a-z_]+\([0-9]{1,9}\))/.+", re.DOTALL)  # `place/metric`


@dataclass(frozen=True)
class FitProgress:
    """A position in a run: the finished part of an epoch, and all that resuming it takes.

    Attributes
    ----------
    epoch : int
        From 1.
    batches : int
        Finished batches of this epoch.
    step : int
        Batches since the run began.
    num_batches : int
        Batches of an epoch, 0 if the data iterator has no length.
    data : str
        What tells the data and their order from others: the `fingerprint` of the data iterator, "" if it has none.
    examples : int
        Finished examples of this epoch.
    seconds : float
        Training time of this epoch.
    loader_epoch, test_epoch : int, optional
        The data iterator's epoch counter before this epoch, and that of the test data now.
    generators : dict
        The state of Python's and NumPy's random generators before this epoch.
    counts : dict of str to int
        The number of terms in each metric's sum, by `place/metric`.
    learning_rate : float, optional
        The trainer's when `fit` was called; None with a schedule. Another rate at the checkpoint was set while it trained.
    row : dict, optional
        The row of an epoch that has been trained but not evaluated.
    evaluations : list of dict
        The results within epochs so far.
    """

    epoch: int = 1
    batches: int = 0
    step: int = 0
    num_batches: int = 0
    data: str = ""
    examples: int = 0
    seconds: float = 0.0
    loader_epoch: Optional[int] = None
    test_epoch: Optional[int] = None
    generators: Dict[str, Any] = field(default_factory=random_state)
    counts: Dict[str, int] = field(default_factory=dict)
    learning_rate: Optional[float] = None
    row: Optional[Row] = None
    evaluations: List[Row] = field(default_factory=list)


def find_resumable(
    resume: Union[str, Path], folder: Optional[Path], net: gluon.Block, trainer: Trainer, train_iter: Any, test_iter: Any = None
) -> Optional[ReadCheckpoint]:
    """Return the latest good checkpoint to resume from, or None if there is none. Nothing changes yet.

    Parameters
    ----------
    resume : "auto" or folder
        The folder of a checkpoint, or of a run. `"auto"`: the run in `folder`, if any.
    folder : pathlib.Path, optional
        Where this run saves.

    Raises
    ------
    StateError
        There are checkpoints, but none that belongs to this network, trainer and data and is not damaged.
    """
    where = folder if resume == "auto" else path_of("fit", "resume", resume, error=StateError)
    if where is None:
        raise StateError(
            "fit: got resume='auto' and no callback that saves; expected a folder with checkpoints. Pass "
            "callbacks=[Checkpoint(folder)], or resume=folder."
        )
    single = checkpoint_in(where)
    paths = find_checkpoints(where) if single is None else [single]
    if not paths and resume != "auto":
        raise StateError(
            f"fit: got resume={str(where)!r}, which holds no checkpoint; expected a folder of Checkpoint. Check the path."
        )
    errors: List[StateError] = []
    for path in paths:
        try:
            found = read_checkpoint(net, path, trainer)
            position = position_of(found.content)
            check_data(position, train_iter, test_iter)
        except StateError as error:
            logger.warning("fit: cannot resume from %s: %s", path, error)
            errors.append(error)
            continue
        step = str(position.step)
        logger.info("fit: resumes from %s, step %s", path, step)
        break
    else:
        if errors:
            raise errors[0]
        found, step = None, "none"
    processes = group()  # each reads its own checkpoint
    steps = [step] if processes is None else [one.decode() for one in processes.all_gather_bytes(step.encode())]
    if len(set(steps)) > 1:
        raise StateError(
            f"fit: got processes that would resume from the steps {', '.join(steps)}; expected the same for all. Save into a "
            "folder that every machine of the job can read."
        )
    return found


def position_of(content: CheckpointData) -> FitProgress:
    """Return the position of the run that saved a checkpoint; raise `StateError` if `fit` did not save it."""
    if not content.place:
        raise StateError(
            f"fit: got {content.folder}, which holds no position of a run; expected a checkpoint that fit saved. Load other "
            "checkpoints with load_checkpoint(net, folder, trainer, states_only=True), and call fit without resume."
        )
    with refusing(content.folder):
        check_form(content.progress, _HISTORY, PROGRESS)
        check_form(content.place, {f"{name}?": form for name, form in _FORM.items()}, f"the place in {TRAINING}")
        position = FitProgress(**content.place)
        if position.batches > position.step or not all(map(_SUM.fullmatch, position.counts)):
            raise ValueError(f"{TRAINING} has step={position.step} after {position.batches} batches, or counts of no place")
        for name, array in content.arrays.items():
            is_sum = array.shape == (1,) and array.dtype == np.float64 and name[len(SUM) :] in position.counts
            if name.startswith(SUM) and not (is_sum and (np.isfinite(array[0]) or not name.endswith("/loss"))):
                raise ValueError(f"{STATES} has {short(name)} of {short(array)}")
    return position


def has_changed_rate(content: CheckpointData) -> bool:
    """Return whether the learning rate of a checkpoint was set while its run trained."""
    training: Any = content.training
    return bool(training["optimizer"]["learning_rate"] != position_of(content).learning_rate)


def check_data(position: FitProgress, train_iter: Iterable[Any], test_iter: Optional[Iterable[Any]] = None) -> None:
    """Raise `StateError` if a run would resume with other data, or within an epoch with another number of batches.

    It compares fingerprints and numbers, where data iterators have them. Between epochs, another number is a warning.
    """
    there, here = position.data, getattr(train_iter, "fingerprint", "")
    if there and here and there != here and not this_process().rank:  # other processes may have their own data
        raise StateError(
            "fit: got a train_iter of other data or another seed than the run; expected the same. Use those of "
            "the stopped run, or load_checkpoint(net, folder, trainer, states_only=True) and fit without resume."
        )
    for one, epoch in ((train_iter, position.loader_epoch), (test_iter, position.test_epoch)):
        if epoch == -1 and hasattr(one, "fingerprint"):  # other iterators may count from there
            raise StateError("fit: got a checkpoint in epoch -1 of its data; expected 0 or more. Use another checkpoint.")
    shuffles = isinstance(train_iter, io.NDArrayIter) and train_iter.shuffle
    ahead = bool(getattr(train_iter, "auto_reload", False))  # it draws an order before the epoch begins
    ahead |= shuffles_in_cpp(train_iter)
    if ahead or (rolls_over(train_iter) or shuffles) and position.step > position.batches:
        logger.warning(
            "fit: the order cannot be restored of an NDArrayIter that shuffles, of auto_reload, of what rolls over, and, unless "
            "try_nopython=False, of MXNet 2's DataLoader with workers."
        )
    then, now = position.num_batches, num_batches_of(train_iter)
    if not then or not now or then == now >= position.batches:
        return
    if position.batches and position.row is None:
        raise StateError(
            f"fit: got a train_iter of {now} batches, and a checkpoint in the middle of an epoch of {then}; expected the same "
            "batches. Use the batch size and the data of the stopped run, and no last_batch='rollover'."
        )
    logger.warning("fit: got a train_iter of %d batches, and a checkpoint of a run with %d: other data or sizes.", now, then)


def num_batches_of(train_iter: Any) -> int:
    """Return the number of batches of an epoch, 0 if the data iterator has no length."""
    return len(train_iter) if isinstance(train_iter, Sized) else 0


def remaining_batches(train_iter: Iterable[Any], position: FitProgress) -> Iterator[Any]:
    """Return an iterator over the remaining batches of an epoch. It loads and skips finished batches.

    Parameters
    ----------
    train_iter : iterable of (X, y)
        Yields the same order again, or draws it from Python's or NumPy's random generators. These have their state of the
        epoch's beginning while finished batches are skipped.
    position : FitProgress

    Raises
    ------
    StateError
        There are fewer batches than the run had finished.
    """
    now = random_state()
    set_random_state(position.generators)
    if isinstance(train_iter, gluon.data.DataLoader) and hasattr(train_iter, "refresh"):  # MXNet 2 has none
        train_iter.refresh()  # it may have drawn the next epoch's order already
    batches = batches_of(train_iter)
    for done in range(position.batches):
        if next(batches, batches) is batches:
            raise StateError(
                f"fit: got a train_iter of {done} batches, and a checkpoint after {position.batches}; expected the same "
                "batches. Use the data of the stopped run."
            )
    set_random_state(now)
    return batches


def loader_epoch(train_iter: Any) -> Optional[int]:
    """Return the `epoch` counter of a data iterator, or of a DataLoader's sampler; None if there is none."""
    counter = _epoch_counter(train_iter)
    return None if counter is None else int(counter.epoch)


def set_loader_epoch(train_iter: Any, epoch: Optional[int]) -> None:
    """Set the counter that `loader_epoch` returns."""
    counter = _epoch_counter(train_iter)
    if counter is not None and epoch is not None:
        counter.epoch = epoch


def _epoch_counter(train_iter: Any) -> Any:
    return next((one for one in (train_iter, *samplers_of(train_iter)) if is_whole(getattr(one, "epoch", None))), None)
