"""ReportToTune and trial_folder(): what a trial of Ray Tune needs to report, to be stopped, and to resume."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path
from typing import Any, Union

from ..checks import instance, path_of
from ..distributed.process import this_process
from ..errors import MissingExtraError, TrainerError
from ..loop.callbacks import Callback, Checkpoint, FitState
from ..runtime.environment import require
from ..runtime.file_locks import LOCK

_MACHINES = ("x86_64", "aarch64", "arm64")  # for which Ray has wheels


def require_tune(operation: str) -> Any:
    """Return the module `ray.tune`.

    Raises
    ------
    MissingExtraError
        Ray is not installed or too old; the message says so where Ray has no wheel for this Python or processor.
    """
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
    if not (3, 9) <= sys.version_info[:2] <= (3, 12) or platform.machine() not in _MACHINES:
        raise MissingExtraError(
            f"{operation}: got {here}, for which Ray 2.44 or later has no wheel; expected Python 3.9 to 3.12 on x86_64 or "
            "aarch64. Use such a Python, and run pip install 'gluon_mgpu[tune]'."
        )
    tune = require("ray.tune", "tune", operation)
    if not hasattr(tune, "RunConfig"):
        found = require("ray", "tune", operation).__version__
        raise MissingExtraError(f"{operation}: got Ray {found}; expected 2.44 or later. Run pip install 'gluon_mgpu[tune]'.")
    return tune


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
    tune = require_tune("trial_folder")
    folder = parent.absolute() / f"trial-{_trial_id(tune, 'trial_folder')}"
    shutil.rmtree(folder, ignore_errors=True)  # of this trial's previous process
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        folder.mkdir(parents=True)
        return folder
    with checkpoint.as_directory() as saved:
        shutil.copytree(saved, folder, ignore=shutil.ignore_patterns(LOCK))
    return folder


class ReportToTune(Callback):
    """Reports each epoch to Ray Tune: its row of the history, and the folder of a `Checkpoint`.

    Place it last: it reports the columns that other callbacks have added. `fit(resume="auto", hyperparameters="trainer")` then
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
    ...     options = {"callbacks": [saves, ReportToTune(saves)], "resume": "auto", "hyperparameters": "trainer"}
    ...     fit(net, loss, trainer, train_iter, test_iter, epochs=8, **options)
    """

    def __init__(self, saves: Checkpoint) -> None:
        advice = "Pass the Checkpoint that stands before it, whose folder is trial_folder()."
        instance("ReportToTune", "saves", saves, Checkpoint, "a Checkpoint", advice=advice)
        self._saves = saves
        self._tune = require_tune("ReportToTune")
        _trial_id(self._tune, "ReportToTune")

    def on_epoch_end(self, state: FitState) -> None:
        if this_process().rank:
            return
        self._saves.wait()
        checkpoint = self._tune.Checkpoint.from_directory(str(self._saves.folder))
        self._tune.report(dict(state.history.rows[-1]), checkpoint=checkpoint)


def _trial_id(tune: Any, operation: str) -> str:
    try:
        found = tune.get_context().get_trial_id()
    except (AttributeError, RuntimeError):  # there is no session
        found = None
    if not found:
        raise TrainerError(
            f"{operation}: got a program that Ray Tune does not run; expected a function that was passed to ray.tune.Tuner. Call "
            "it there, or leave it out."
        )
    return str(found)
