"""Where a run is, and how it goes on from there: in the middle of an epoch, too."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sized, Union

from mxnet import gluon

from .. import schema
from ..checkpoint.checkpoint import ReadCheckpoint, read_checkpoint
from ..checkpoint.rng import RANDOM_STATE, random_state, set_random_state
from ..checkpoint.rotation import checkpoint_in, find_checkpoints
from ..checkpoint.snapshot import PROGRESS as PROGRESS_FILE
from ..checkpoint.snapshot import TRAINING, Content
from ..data_parallel.iterators import batches_of
from ..distributed import group
from ..distributed.process import this_process
from ..errors import StateError
from ..runtime.environment import logger
from ..trainer.trainer import Trainer

Row = Dict[str, float]


@dataclass(frozen=True)
class FitProgress:
    """What was done of an epoch when it is begun, or gone on with.

    Attributes
    ----------
    epoch : int
        From 1.
    batches : int
        Of this epoch.
    step : int
        Batches since the run began.
    num_batches : int
        Of an epoch, 0 where the data iterator does not tell.
    examples : int
        Of this epoch.
    seconds : float
        Of this epoch's training.
    loader_epoch : int, optional
        What the data iterator counted before this epoch.
    generators : dict
        Where the random numbers of Python and NumPy were before this epoch.
    counts : dict of str to int
        How many things are in the sums of the metrics.
    norms : int
        Updates that are in the sums of the gradient's norms.
    row : dict, optional
        Of an epoch that only wants to be evaluated.
    shares : list of float, optional
        Of the devices in a batch.
    num_examples : int
        Of the data set, 0 where the data iterator does not tell.
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


def resume_run(
    resume: Union[str, Path], folder: Optional[Path], net: gluon.Block, trainer: Trainer, check: Callable[[Content], None]
) -> Optional[ReadCheckpoint]:
    """Return the checkpoint that a run continues from, which changes nothing yet; None where there is none.

    Parameters
    ----------
    resume : "auto" or folder
        Of a checkpoint; or of a run, whose latest good one is taken. `"auto"`: of the run in `folder`, if there is one.
    folder : pathlib.Path, optional
        Where this run saves.
    check : callable (Content)
        Raises `StateError` where the run cannot continue from this content.

    Raises
    ------
    StateError
        There are checkpoints, and none that belongs to this network and trainer and is not damaged.
    """
    where = folder if resume == "auto" else Path(resume)
    found = _latest(resume, where, net, trainer, check)
    _check_agreed(None if found is None else found.content)
    return found


def _latest(
    resume: Union[str, Path], where: Optional[Path], net: gluon.Block, trainer: Trainer, check: Callable[[Content], None]
) -> Optional[ReadCheckpoint]:
    if where is None:
        raise StateError(
            "fit: got resume='auto' and no callback that saves; expected a folder to look into. Pass "
            "callbacks=[Checkpoint(folder)], or resume=folder."
        )
    itself = checkpoint_in(where)
    if itself is not None:
        return read_checkpoint(itself, net, trainer, check=check)
    found = find_checkpoints(where)
    if not found and resume != "auto":
        raise StateError(
            f"fit: got resume={str(where)!r}, which holds no checkpoint; expected a folder of Checkpoint. Check the path."
        )
    first: Optional[StateError] = None
    for path in found:
        try:
            read = read_checkpoint(path, net, trainer, check=check)
        except StateError as error:
            logger.warning("fit: cannot go on from %s: %s", path, error)
            first = first or error
            continue
        place = read.content.place
        logger.info("fit: goes on from %s, epoch %s, step %s", path, place.get("epoch"), place.get("step"))
        return read
    if first is not None:
        raise first
    return None


def _check_agreed(content: Optional[Content]) -> None:
    """Raise `StateError` unless all processes of a job go on from the same step: each reads for itself."""
    processes = group()
    if processes is None:
        return
    said = [
        one.decode() for one in processes.all_gather_bytes(b"none" if content is None else str(content.place["step"]).encode())
    ]
    if len(set(said)) > 1:
        raise StateError(
            f"fit: got processes that would go on from the steps {', '.join(said)}; expected the same for all. Save into a "
            "folder that every machine of the job sees."
        )


def progress_of(rows: List[Row], epoch: int) -> Dict[str, Any]:
    """Return the `progress` of a checkpoint: the history of the run, and the epoch that it is in or has done."""
    return {"epoch": epoch, "epochs_completed": len(rows), "history": rows}


def position_of(content: Content) -> FitProgress:
    """Return where the run was that saved a checkpoint.

    Raises
    ------
    StateError
        It was not saved by `fit`, or its place and its history are not as `fit` saves them.
    """
    place = content.place
    if not place:
        raise StateError(
            f"fit: got {content.folder}, which does not say where its run was; expected a checkpoint of fit's. Load one that was "
            "saved by hand with load_checkpoint."
        )
    schema.check(PLACE, {"place": place}, operation="fit", file=content.folder / TRAINING)
    schema.check(PROGRESS, content.progress, operation="fit", file=content.folder / PROGRESS_FILE)
    position = FitProgress(**place)
    num_rows, done = len(content.progress["history"]), position.epoch - (position.row is None)
    told = content.progress["epochs_completed"]
    if not num_rows == done == told or content.progress["epoch"] not in (position.epoch - 1, position.epoch):
        raise StateError(
            f"fit: got {content.folder} with {num_rows} epochs in its history, {told} completed, and in its place epoch "
            f"{position.epoch}, which follows {done}; expected the same in each. Use another checkpoint."
        )
    return position


def check_data(position: FitProgress, train_iter: Iterable[Any]) -> None:
    """Raise `StateError` if a run in the middle of an epoch would continue with other data; at its end, log a warning.

    What is compared is the number of batches and the number of examples, where data iterators have them. In a job, the examples
    are those of process 0, which saves: others may read other parts.
    """
    num_batches = num_batches_of(train_iter)
    num_examples = 0 if this_process().rank else num_examples_of(train_iter)
    compared = (("batches", position.num_batches, num_batches), ("examples", position.num_examples, num_examples))
    if num_batches and position.batches > num_batches and position.row is None:
        raise StateError(
            f"fit: got a train_iter of {num_batches} batches, and a checkpoint after {position.batches}; expected the same "
            "batches. Use the data of the run that was stopped."
        )
    for what, then, now in compared:
        if then and now and then != now:
            if position.batches and position.row is None:
                raise StateError(
                    f"fit: got a train_iter of {now} {what}, and a checkpoint in the middle of an epoch of {then}; expected the "
                    f"same {what}. Use the batch size and the data of the run that was stopped."
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
    """Return the number of batches of an epoch, 0 where a data iterator does not tell."""
    return len(train_iter) if isinstance(train_iter, Sized) else 0


def num_examples_of(train_iter: Any) -> int:
    """Return the number of examples of a data set: a loader's `num_examples`, or the data set's length; 0 where none tells.

    Examples
    --------
    >>> num_examples_of(gluon.data.DataLoader(gluon.data.SimpleDataset([1, 2, 3]), 2)), num_examples_of([])
    (3, 0)
    """
    found: Any = getattr(train_iter, "num_examples", None)
    if found is None and isinstance(train_iter, gluon.data.DataLoader):
        found = getattr(train_iter._batch_sampler, "num_examples", len(train_iter._dataset))
    return int(found) if schema.is_whole(found) and 0 <= found <= schema.MOST else 0


def rest_of(train_iter: Iterable[Any], position: FitProgress) -> Optional[Iterator[Any]]:
    """Return an iterator over what is left of an epoch, None where nothing is. What was done is drawn, and computed no more.

    Parameters
    ----------
    train_iter : iterable of (X, y)
        Draws in the same order again, or takes it from the random numbers of Python and NumPy, which are where they were when the
        epoch began while it is drawn.
    position : FitProgress

    Raises
    ------
    StateError
        There are fewer batches than were done.
    """
    now = random_state()
    set_random_state(position.generators)
    if isinstance(train_iter, gluon.data.DataLoader):
        train_iter.refresh()  # it may have drawn the order of the next pass already
    batches = batches_of(train_iter)
    for done in range(position.batches):
        if next(batches, batches) is batches:
            raise StateError(
                f"fit: got a train_iter of {done} batches, and a checkpoint after {position.batches}; expected the same "
                "batches. Use the data of the run that was stopped."
            )
    set_random_state(now)
    following = next(batches, batches)
    return None if following is batches else chain([following], batches)


def loader_epoch(train_iter: Any) -> Optional[int]:
    """Return how many epochs have begun, where a data iterator, or the sampler of a DataLoader, counts them in `epoch`."""
    counter = _epoch_counter(train_iter)
    return None if counter is None else int(counter.epoch)


def set_loader_epoch(train_iter: Any, epoch: Optional[int]) -> None:
    """Let a data iterator go on from where `loader_epoch` was so much."""
    counter = _epoch_counter(train_iter)
    if counter is not None and epoch is not None:
        counter.epoch = epoch


def _epoch_counter(train_iter: Any) -> Any:
    sampler = getattr(train_iter, "_batch_sampler", None)  # of Gluon's DataLoader, and in it the sampler of single examples
    for one in (train_iter, sampler, getattr(sampler, "_sampler", None)):
        epoch = getattr(one, "epoch", None)
        if isinstance(epoch, int) and not isinstance(epoch, bool):
            return one
    return None


def _in_doubt(found: Dict[str, Any]) -> Optional[schema.Wrong]:
    """Return what contradicts itself in a place."""
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
    """Return what is no number among the columns that this package writes. Callbacks may add what they like."""
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
    _in_doubt,
)
