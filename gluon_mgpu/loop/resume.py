"""The progress of a run, and how it resumes, also within an epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sized, Tuple, Union

from mxnet import gluon

from .. import schema
from ..checkpoint.checkpoint import ReadCheckpoint, read_checkpoint
from ..checkpoint.rng import RANDOM_STATE, random_state, set_random_state
from ..checkpoint.rotation import checkpoint_in, find_checkpoints
from ..checkpoint.snapshot import PROGRESS as PROGRESS_FILE
from ..checkpoint.snapshot import TRAINING, CheckpointData, Taken
from ..data_parallel.iterators import batches_of
from ..distributed import group
from ..distributed.process import this_process
from ..errors import StateError
from ..runtime.environment import logger
from ..trainer.trainer import Trainer

Row = Dict[str, float]


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
    examples : int
        Finished examples of this epoch.
    seconds : float
        Training time of this epoch.
    loader_epoch : int, optional
        The data iterator's epoch counter before this epoch.
    generators : dict
        The state of Python's and NumPy's random generators before this epoch.
    counts : dict of str to int
        The number of terms in each metric's sum.
    norms : int
        The number of updates in the sums of gradient norms.
    row : dict, optional
        The row of an epoch that has been trained but not evaluated.
    shares : list of float, optional
        Each device's share of a batch.
    num_examples : int
        Examples of the data set, 0 if the data iterator has no such number.
    """

    epoch: int = 1
    batches: int = 0
    step: int = 0
    num_batches: int = 0
    examples: int = 0
    seconds: float = 0.0
    loader_epoch: Optional[int] = None
    generators: Dict[str, Any] = field(default_factory=random_state)
    counts: Dict[str, int] = field(default_factory=dict)
    norms: int = 0
    row: Optional[Row] = None
    shares: Optional[List[float]] = None
    num_examples: int = 0


def find_resumable(
    resume: Union[str, Path],
    folder: Optional[Path],
    net: gluon.Block,
    trainer: Trainer,
    check: Callable[[CheckpointData], None],
    *,
    taken: Taken,
) -> Optional[ReadCheckpoint]:
    """Return the checkpoint to resume from, or None if there is none. Nothing changes yet.

    Parameters
    ----------
    resume : "auto" or folder
        The folder of a checkpoint, or of a run, whose latest good checkpoint is taken. `"auto"`: the run in `folder`, if any.
    folder : pathlib.Path, optional
        Where this run saves.
    check : callable (CheckpointData)
        Raises `StateError` if the run cannot resume from this content.
    taken : Taken
        Which hyper-parameters the trainer takes from it.

    Raises
    ------
    StateError
        There are checkpoints, but none that belongs to this network and trainer and is not damaged.
    """
    where = folder if resume == "auto" else Path(resume)
    if where is None:
        raise StateError(
            "fit: got resume='auto' and no callback that saves; expected a folder with checkpoints. Pass "
            "callbacks=[Checkpoint(folder)], or resume=folder."
        )
    read = partial(read_checkpoint, net=net, trainer=trainer, check=check, taken=taken)
    checkpoint = _latest_good(where, read, may_be_missing=resume == "auto")
    _check_same_step(None if checkpoint is None else checkpoint.content)
    if checkpoint is not None and checkpoint.content.training is not None and not this_process().rank:
        changed = taken.changed_lengths(checkpoint.content.training["optimizer"], trainer)
        if changed:
            used, other = ("trainer", "keep") if taken.schedule == "stretch" else ("checkpoint", "stretch")
            text = "fit: the checkpoint has a %s: the schedule of the %s is used. resume_schedule='%s' uses the other one"
            logger.warning(text, changed[0], used, other)
    return checkpoint


def _latest_good(folder: Path, read: Callable[[Path], ReadCheckpoint], *, may_be_missing: bool) -> Optional[ReadCheckpoint]:
    """Return the checkpoint in a folder, or the latest good one of the run in it."""
    single = checkpoint_in(folder)
    if single is not None:
        return read(single)
    paths = find_checkpoints(folder)
    if not paths and not may_be_missing:
        raise StateError(
            f"fit: got resume={str(folder)!r}, which holds no checkpoint; expected a folder of Checkpoint. Check the path."
        )
    errors: Dict[str, Tuple[Path, StateError]] = {}  # by the reason: all checkpoints of a run often have the same
    for path in paths:
        try:
            checkpoint = read(path)
        except StateError as error:
            errors.setdefault(str(error).replace(str(path), ""), (path, error))
            continue
        _log_unusable(errors.values())
        place = checkpoint.content.place
        logger.info("fit: resumes from %s, epoch %s, step %s", path, place.get("epoch"), place.get("step"))
        return checkpoint
    if errors:
        (_, first), *others = errors.values()
        _log_unusable(others)
        raise first
    return None


def _log_unusable(errors: Iterable[Tuple[Path, StateError]]) -> None:
    for path, error in errors:
        logger.warning("fit: cannot resume from %s: %s", path, error)


def _check_same_step(content: Optional[CheckpointData]) -> None:
    """Raise `StateError` unless all processes of a job resume from the same step: each reads its own checkpoint."""
    processes = group()
    if processes is None:
        return
    own_step = "none" if content is None else str(content.place["step"])
    steps = [step.decode() for step in processes.all_gather_bytes(own_step.encode())]
    if len(set(steps)) > 1:
        raise StateError(
            f"fit: got processes that would resume from the steps {', '.join(steps)}; expected the same for all. Save into a "
            "folder that every machine of the job can read."
        )


def progress_of(rows: List[Row], epoch: int) -> Dict[str, Any]:
    """Return the `progress` of a checkpoint: the run's history, and its current or last epoch."""
    return {"epoch": epoch, "epochs_completed": len(rows), "history": rows}


def position_of(content: CheckpointData) -> FitProgress:
    """Return the position of the run that saved a checkpoint.

    Raises
    ------
    StateError
        `fit` did not save it, or its position and its history are not valid.
    """
    place = content.place
    if not place:
        raise StateError(
            f"fit: got {content.folder}, which holds no position of a run; expected a checkpoint that fit saved. Load other "
            "checkpoints with load_checkpoint(folder, net, trainer, states_only=True), and call fit without resume."
        )
    schema.check(PLACE, {"place": place}, operation="fit", file=content.folder / TRAINING)
    schema.check(PROGRESS, content.progress, operation="fit", file=content.folder / PROGRESS_FILE)
    position = FitProgress(**place)
    num_rows, done = len(content.progress["history"]), position.epoch - (position.row is None)
    num_completed = content.progress["epochs_completed"]
    if not num_rows == done == num_completed or content.progress["epoch"] not in (position.epoch - 1, position.epoch):
        raise StateError(
            f"fit: got {content.folder} with {num_rows} epochs in its history, {num_completed} completed, and in its place epoch "
            f"{position.epoch}, which follows {done}; expected the same in each. Use another checkpoint."
        )
    return position


def check_data(position: FitProgress, train_iter: Iterable[Any]) -> None:
    """Raise `StateError` if a run would resume within an epoch with other data; between epochs, log a warning.

    It compares the number of batches and the number of examples, where data iterators have them. In a job, the examples
    are those of process 0, which saves: other processes may read other parts.
    """
    num_batches = num_batches_of(train_iter)
    num_examples = 0 if this_process().rank else num_examples_of(train_iter)
    compared = (("batches", position.num_batches, num_batches), ("examples", position.num_examples, num_examples))
    if num_batches and position.batches > num_batches and position.row is None:
        raise StateError(
            f"fit: got a train_iter of {num_batches} batches, and a checkpoint after {position.batches}; expected the same "
            "batches. Use the data of the stopped run."
        )
    for what, then, now in compared:
        if then and now and then != now:
            if position.batches and position.row is None:
                raise StateError(
                    f"fit: got a train_iter of {now} {what}, and a checkpoint in the middle of an epoch of {then}; expected the "
                    f"same {what}. Use the batch size and the data of the stopped run."
                )
            logger.warning(
                "fit: got a train_iter of %d %s, and a checkpoint of a run with %d; expected the same data for the same result. "
                "Training continues with the new data: use the old data and batch size if that is not what you want.",
                now,
                what,
                then,
            )
            return


def num_batches_of(train_iter: Any) -> int:
    """Return the number of batches of an epoch, 0 if the data iterator has no length."""
    return len(train_iter) if isinstance(train_iter, Sized) else 0


def num_examples_of(train_iter: Any) -> int:
    """Return the number of examples of a data set: a loader's `num_examples`, or the data set's length; 0 if unknown.

    Examples
    --------
    >>> num_examples_of(gluon.data.DataLoader(gluon.data.SimpleDataset([1, 2, 3]), 2)), num_examples_of([])
    (3, 0)
    """
    found: Any = getattr(train_iter, "num_examples", None)
    if found is None and isinstance(train_iter, gluon.data.DataLoader):
        found = getattr(train_iter._batch_sampler, "num_examples", len(train_iter._dataset))
    return int(found) if schema.is_whole(found) and 0 <= found <= schema.MOST else 0


def remaining_batches(train_iter: Iterable[Any], position: FitProgress) -> Optional[Iterator[Any]]:
    """Return an iterator over the remaining batches of an epoch, None if there are none. It loads and skips finished batches.

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
    following = next(batches, batches)
    return None if following is batches else chain([following], batches)


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
    sampler = getattr(train_iter, "_batch_sampler", None)  # Gluon's DataLoader, which holds the sampler of single examples
    for one in (train_iter, sampler, getattr(sampler, "_sampler", None)):
        epoch = getattr(one, "epoch", None)
        if isinstance(epoch, int) and not isinstance(epoch, bool):
            return one
    return None


def _contradiction(found: Dict[str, Any]) -> Optional[schema.Wrong]:
    """Return the first contradiction in a position."""
    place = found["place"]
    if place["batches"] > place["step"]:
        return schema.Wrong(place["batches"], f"at most as many as place.step, {place['step']}", ("place", "batches"))
    if not place["batches"] and place["examples"]:
        return schema.Wrong(place["examples"], "0 where place.batches is 0", ("place", "examples"))
    shares = place.get("shares")
    if shares and not 0.99 < sum(shares) < 1.01:
        return schema.Wrong(sum(shares), "shares that add up to 1", ("place", "shares", "sum"))
    return None


def _numbered(rows: List[Row]) -> Optional[schema.Wrong]:
    found = (i for i, row in enumerate(rows) if row["epoch"] != i + 1)
    return next((schema.Wrong(rows[i]["epoch"], f"{i + 1}", (i, "epoch")) for i in found), None)


def _is_measured(value: Any) -> bool:
    return isinstance(value, float) or schema.is_finite(value)  # a loss may be NaN


_MEASURED = schema.that("a number", _is_measured)
_COLUMNS = re.compile("train_|test_|grad_norm|share_")


def _measured(row: Row) -> Optional[schema.Wrong]:
    """Return the first value that is not a number among the columns of this package. Callbacks may add any columns."""
    found = ((name, _MEASURED(value)) for name, value in row.items() if _COLUMNS.match(name))
    return next((wrong.below(name) for name, wrong in found if wrong is not None), None)


ROW = schema.also(
    schema.record(
        {
            "epoch": schema.steps(1),
            "seconds": schema.number(0),
            "examples_per_s": _MEASURED,
            "learning_rate": _MEASURED,
        },
        closed=False,
    ),
    _measured,
)
PROGRESS = schema.record(
    {
        "epoch": schema.steps(),
        "epochs_completed": schema.steps(),
        "history": schema.also(schema.list_of(ROW), _numbered),
    },
    closed=False,
)
PLACE = schema.also(
    schema.record(
        {
            "place": schema.record(
                {
                    "epoch": schema.steps(1),
                    "batches": schema.steps(),
                    "step": schema.steps(),
                    "num_batches": schema.integer(),
                    "examples": schema.integer(),
                    "seconds": schema.number(0),
                    "loader_epoch": schema.nullable(schema.steps()),
                    "generators": RANDOM_STATE,
                    "counts": schema.mapping(schema.text(), schema.integer(-schema.MOST)),
                    "norms": schema.steps(),
                    "row": schema.nullable(ROW),
                    "shares": schema.nullable(schema.list_of(schema.number(0, 1))),
                },
                {"num_examples": schema.integer()},
            )
        }
    ),
    _contradiction,
)
