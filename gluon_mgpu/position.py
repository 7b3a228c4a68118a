"""Where a run is, and how it goes on from there: in the middle of an epoch, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Union

from mxnet import gluon

from .checkpoint import read_checkpoint
from .errors import StateError
from .processes import group
from .rng import random_state, set_random_state
from .runtime import logger
from .shelf import checkpoint_in, find_checkpoints
from .snapshot import Content
from .trainer import Trainer

Row = Dict[str, float]


@dataclass(frozen=True)
class Position:
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


def resume_run(
    resume: Union[str, Path], folder: Optional[Path], net: gluon.Block, trainer: Trainer, num_batches: int = 0
) -> Optional[Content]:
    """Let a network and its trainer go on from a checkpoint, and return what it holds; None where there is none to go on from.

    Parameters
    ----------
    resume : "auto" or folder
        Of a checkpoint; or of a run, whose latest good one is taken. `"auto"`: of the run in `folder`, if there is one.
    folder : pathlib.Path, optional
        Where this run saves.
    num_batches : int
        Of an epoch, 0 where that is not known.

    Raises
    ------
    StateError
        There are checkpoints, and none that belongs to this network and trainer and is not damaged. Nothing was changed.
    """

    def check(content: Content) -> None:
        check_batches(position_of(content), num_batches)

    where = folder if resume == "auto" else Path(resume)
    content = _latest(resume, where, net, trainer, check)
    _check_agreed(content)
    return content


def _latest(
    resume: Union[str, Path], where: Optional[Path], net: gluon.Block, trainer: Trainer, check: Callable[[Content], None]
) -> Optional[Content]:
    if where is None:
        raise StateError(
            "fit: got resume='auto' and no callback that saves; need a folder to look into. Pass callbacks=[Checkpoint(folder)], "
            "or resume=folder."
        )
    itself = checkpoint_in(where)
    if itself is not None:
        return read_checkpoint(itself, net, trainer, check=check)
    found = find_checkpoints(where)
    if not found and resume != "auto":
        raise StateError(
            f"fit: got resume={str(where)!r}, which holds no checkpoint; need a folder of Checkpoint. Check the path."
        )
    first: Optional[StateError] = None
    for path in found:
        try:
            content = read_checkpoint(path, net, trainer, check=check)
        except StateError as error:
            logger.warning("fit: cannot go on from %s: %s", path, error)
            first = first or error
            continue
        logger.info("fit: goes on from %s, epoch %s, step %s", path, content.place.get("epoch"), content.place.get("step"))
        return content
    if first is not None:
        raise first
    return None


def _check_agreed(content: Optional[Content]) -> None:
    """Raise `StateError` unless all processes of a job go on from the same step: each reads for itself."""
    processes = group()
    if processes is None:
        return
    said = [one.decode() for one in processes.say(b"none" if content is None else str(content.place["step"]).encode())]
    if len(set(said)) > 1:
        raise StateError(
            f"fit: got processes that would go on from the steps {', '.join(said)}; need the same for all. Save into a folder "
            "that every machine of the job sees."
        )


def position_of(content: Content) -> Position:
    """Return where the run was that saved a checkpoint.

    Raises
    ------
    StateError
        It was not saved by `fit`.
    """
    place = content.place
    if not {"epoch", "batches", "step"} <= place.keys() <= Position.__dataclass_fields__.keys():
        raise StateError(
            f"fit: got {content.folder}, which does not say where its run was; need a checkpoint of fit's. Load one that was "
            "saved by hand with load_checkpoint."
        )
    return Position(**place)


def check_batches(position: Position, num_batches: int) -> None:
    """Raise `StateError` if a run in the middle of an epoch would go on with batches of other numbers."""
    if position.batches and position.num_batches and num_batches and position.num_batches != num_batches:
        raise StateError(
            f"fit: got a train_iter of {num_batches} batches, and a checkpoint in the middle of an epoch of "
            f"{position.num_batches}; need the same batches. Use the batch size and the data of the run that was stopped."
        )


def rest_of(train_iter: Iterable[Any], position: Position) -> Optional[Iterator[Any]]:
    """Return an iterator over what is left of an epoch, None where nothing is. What was done is drawn, and computed no more.

    Parameters
    ----------
    train_iter : iterable of (X, y)
        Draws in the same order again, or takes it from the random numbers of Python and NumPy, which are where they were when the
        epoch began while it is drawn.
    position : Position

    Raises
    ------
    StateError
        There are fewer batches than were done.
    """
    now = random_state()
    set_random_state(position.generators)
    if isinstance(train_iter, gluon.data.DataLoader):
        train_iter.refresh()  # it may have drawn the order of the next pass already
    batches = iter(train_iter)
    for done in range(position.batches):
        if next(batches, batches) is batches:
            raise StateError(
                f"fit: got a train_iter of {done} batches, and a checkpoint after {position.batches}; need the same batches. Use "
                "the data of the run that was stopped."
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
