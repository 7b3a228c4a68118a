"""TensorBoard: the callback that writes the results of a run as event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Union

from ..checks import is_number, path_of
from ..distributed.process import this_process
from ..runtime.environment import require
from .batch_loop import EpochProgress
from .callbacks import Callback, FitState


class TensorBoard(Callback):
    """Writes event files for TensorBoard: running means while an epoch trains, and its results at its end.

    `train_loss` becomes `loss/train`, and `test_loss` becomes `loss/test`. The means since the beginning of the epoch are
    `loss/running`, about twice a second. The x axis is the number of batches since the run began. A resumed run continues the
    curves and hides the events after its checkpoint. In a job, process 0 writes. Place it after callbacks that add columns.

    Parameters
    ----------
    log_dir : str or pathlib.Path
        Show it with `tensorboard --logdir LOG_DIR`. Give each run a folder of its own.

    Raises
    ------
    MissingExtraError
        tensorboardX is not installed: the extra `tensorboard`.
    """

    def __init__(self, log_dir: Union[str, Path]) -> None:
        self.log_dir = path_of("TensorBoard", "log_dir", log_dir)
        self._library = require("tensorboardX", "tensorboard", "TensorBoard")
        self._writer: Any = None

    def on_fit_begin(self, state: FitState) -> None:
        if not this_process().rank:
            purge = None if state.resumed is None else state.step + 1
            self._writer = self._library.SummaryWriter(str(self.log_dir), purge_step=purge)

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        if self._writer is not None:
            step = state.step - state.batches + progress.num_batches
            self._add({f"{name}/running": mean for name, mean in progress.means.items()}, step)

    def on_epoch_end(self, state: FitState) -> None:
        if self._writer is not None:
            row = state.history.rows[-1]
            self._add({_tag(name): value for name, value in row.items() if is_number(value)}, state.step)
            self._writer.flush()

    def on_fit_end(self, state: FitState) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, values: Dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)


def _tag(column: str) -> str:
    """Return the tag of a column: TensorBoard shows tags with the same beginning together.

    Examples
    --------
    >>> _tag("test_loss"), _tag("learning_rate")
    ('loss/test', 'learning_rate')
    """
    kind, _, name = column.partition("_")
    return f"{name}/{kind}" if kind in ("train", "test", "valid") else column
