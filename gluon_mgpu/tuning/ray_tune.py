"""ReportToTune and trial_folder(): how a trial of Ray Tune reports, stops and resumes."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, Union

from ..checks import instance, path_of
from ..distributed.process import this_process
from ..errors import TrainerError
from ..loop.callbacks import Callback, FitState
from ..loop.save_checkpoints import Checkpoint
from ..runtime.environment import require


def trial_folder(parent: Union[str, Path] = ".") -> Path:
    """Return a new folder for the checkpoints of this trial, with those from which Ray Tune resumes it.

    Call it in the function that Ray Tune runs, and pass it to `Checkpoint`. If the trial starts for the first time, the folder is
    empty. After a stop or a failure it holds the trial's own checkpoints, and with population-based training those of the trial
    that this one copies.

    Parameters
    ----------
    parent : str or pathlib.Path
        Where to create it. The default is the working directory, which Ray Tune makes for each trial.

    Raises
    ------
    MissingExtraError
        Ray is not installed.
    TrainerError
        This function was not called by Ray Tune.
    """
    parent = path_of("trial_folder", "parent", parent)
    tune, trial = _running_trial("trial_folder")
    folder = parent.absolute() / f"trial-{trial}"
    shutil.rmtree(folder, ignore_errors=True)  # of this trial's previous process
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        folder.mkdir(parents=True)
        return folder
    with checkpoint.as_directory() as saved:
        shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("*.lock"))
    return folder


class ReportToTune(Callback):
    """Reports each epoch to Ray Tune: its row of the history, and the folder of a `Checkpoint`.

    Place it last: it reports the columns that other callbacks have added. `fit(resume="auto")` then
    resumes a trial that was paused or killed. With population-based training it continues with the weights and the optimizer's
    states of another trial, and with the hyper-parameters of its own trainer.

    Parameters
    ----------
    saves : Checkpoint
        A callback before this one, whose folder is `trial_folder()`.

    Examples
    --------
    A function for `ray.tune.Tuner`:

    >>> def trainable(config):
    ...     net, loss, trainer, train_iter, test_iter = build(config)
    ...     saves = Checkpoint(trial_folder())
    ...     options = {"callbacks": [saves, ReportToTune(saves)], "resume": "auto"}
    ...     fit(net, loss, trainer, train_iter, test_iter, epochs=8, **options)
    """

    def __init__(self, saves: Checkpoint) -> None:
        advice = "Pass the Checkpoint that stands before it, whose folder is trial_folder()."
        instance("ReportToTune", "saves", saves, Checkpoint, "a Checkpoint", advice=advice)
        self._saves = saves
        self._tune, _ = _running_trial("ReportToTune")

    def on_epoch_end(self, state: FitState) -> None:
        if this_process().rank:
            return
        self._saves.wait()
        checkpoint = self._tune.Checkpoint.from_directory(str(self._saves.folder))
        self._tune.report(dict(state.history.rows[-1]), checkpoint=checkpoint)


def _running_trial(operation: str) -> Any:
    """Return the module `ray.tune`, and the identifier of the trial that runs in this process."""
    tune = require("ray.tune", "ray", operation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns where it returns None
        trial = tune.get_context().get_trial_id()
    if not trial:
        raise TrainerError(
            f"{operation}: got a program that Ray Tune does not run; expected a function that was passed to ray.tune.Tuner. Call "
            "it there, or leave it out."
        )
    return tune, str(trial)
