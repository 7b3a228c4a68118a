"""gluon-mgpu replay: computes a step of a run again, and compares it with the run's checkpoint."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import click
import numpy as np

from ..checkpoint.rotation import find_checkpoints, step_of
from ..checkpoint.snapshot import CheckpointData, read_content, take_snapshot
from ..errors import StateError
from ..loop.callbacks import Callback, FitState
from ..loop.resume import FitProgress, position_of, progress_of
from ..loop.stopping import Terminated
from ..runtime.c_api import values_of
from ._command import TrainingCommand, read_command
from ._options import FOLDER
from ._output import print_table
from ._training import FitExtras
from .train import train_resnet18
from .train_seq2seq import train_seq2seq

PROGRAMS: Dict[str, click.Command] = {"resnet18": train_resnet18, "seq2seq": train_seq2seq}
MOST_DIFFERENCE = 1e-5  # as the contract of resuming on other devices
WEIGHTS, STATES, SUMS, HISTORY = "weights", "optimizer states", "sums of the epoch", "history"
_MEASURED = ("seconds", "examples_per_s", "tokens_per_s")
_LEFT_OUT = {"trace": None, "watchdog": None, "leak_check": False, "debug": False, "tensorboard": False, "keep": 1}
_KEEP_MORE = "train with --checkpoint-every 1 --keep 100"


@click.command()
@click.argument("run", metavar="RUN", type=FOLDER)
@click.option("--step", type=click.IntRange(1), required=True, help="Compute up to this step; the run has a checkpoint there.")
@click.option("--devices", help="Other devices than the run's, as for gluon-mgpu train.")
def replay(run: Path, step: int, devices: Optional[str]) -> None:
    """Compute a step of a run of gluon-mgpu train again, and compare it with the run's checkpoint at that step.

    It resumes from the latest checkpoint before the step, with the options in RUN/command.json, and writes nothing into RUN.
    Weights, optimizer states, the sums of the epoch and the history must have the same bits if the run used --virtual-shards.
    Otherwise weights and states may differ by 1e-5 at most.

    The exit code is 1 if they differ.
    """
    command = read_command(run, "replay")
    before, target = _checkpoints(run, step)
    saved = read_content(target, with_training=True)
    with tempfile.TemporaryDirectory() as made:
        end = End(step, position_of(saved), Path(made) / "replayed")
        try:
            _train(command, before, devices, Path(made) / "run", end)
        except Reached:
            again = read_content(end.folder, with_training=True)
        except (KeyboardInterrupt, Terminated) as interrupt:
            raise type(interrupt)(f"replay: stopped before step {step}; {run} was not changed") from None
        else:
            raise StateError(
                f"replay: got a run that ended after step {end.latest}; expected one that reaches step {step}. Check that "
                f"{run / 'command.json'} is of the run that saved {target.name}."
            )
        rows = compare(again, saved)
    print_table(f"step {step} again, from {before}", ["what", "numbers", "other bits", "largest difference", "in"], rows)
    sys.exit(_verdict(rows, step, target, must_be_same=(saved.training or {}).get("virtual_shards") is not None))


class Reached(Exception):  # noqa: N818  it is not an error
    """Ends a training program at the step."""


class End(Callback):
    """Saves the state of a run at a step, where a checkpoint of it was saved, and ends the run.

    Parameters
    ----------
    step : int
    position : FitProgress
        Of the checkpoint.
    folder : pathlib.Path
        For the new checkpoint.

    Attributes
    ----------
    latest : int
        The latest step.
    """

    def __init__(self, step: int, position: FitProgress, folder: Path) -> None:
        self.latest, self.folder = 0, folder
        self._step, self._is_within = step, position.batches > 0

    def on_batch_end(self, state: FitState) -> None:
        self.latest = state.step
        if self._is_within:
            self._end(state)

    def on_epoch_end(self, state: FitState) -> None:
        if not self._is_within:
            self._end(state)

    def _end(self, state: FitState) -> None:
        if state.step == self._step and state.where is not None:
            place, arrays = state.where()
            progress = progress_of(state.history.rows, state.epoch)
            self.folder.mkdir()
            take_snapshot(state.net, state.trainer, progress, place=place, arrays=arrays).write(self.folder)
            raise Reached


def _checkpoints(run: Path, step: int) -> Tuple[Path, Path]:
    """Return the latest checkpoint before a step, and the one at the step."""
    found: Dict[int, Path] = {}
    for path in find_checkpoints(run):
        number = step_of(path)
        if number is not None:
            found.setdefault(number, path)
    steps = sorted(found)
    if step not in found or step == steps[0]:
        there = f"checkpoints at the steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
        wanted = f"one of {', '.join(map(str, steps[1:]))}" if steps[1:] else "two checkpoints or more"
        raise StateError(
            f"replay: got --step {step} of {run}, which has {there}; expected {wanted}, as a replay resumes from one checkpoint "
            f"and ends at a later one. To keep more of them, {_KEEP_MORE}."
        )
    return max((number, path) for number, path in found.items() if number < step)[1], found[step]


def _train(command: TrainingCommand, before: Path, devices: Optional[str], output: Path, end: End) -> None:
    """Run the training program from a checkpoint on, with its own callbacks: saving draws random numbers."""
    extras = FitExtras(callbacks=lambda callbacks: [*callbacks, end])
    program, name = PROGRAMS[command.program], f"gluon-mgpu train {command.program}"
    with program.make_context(name, list(command.arguments), obj=extras) as context:
        params = context.params
        params.update({option: Path(command.folder) / path for option, path in params.items() if isinstance(path, Path)})
        params.update(_LEFT_OUT, output=output, resume=str(before.absolute()))
        if devices is not None or command.num_processes > 1:
            params["devices"] = devices or _of_one_process(command)
        program.invoke(context)


def _of_one_process(command: TrainingCommand) -> str:
    """Return as many devices as all processes of the run had."""
    total = len(command.devices) * command.num_processes
    return f"cpu*{total}" if command.devices[0].startswith("cpu") else f"gpu:0-{total - 1}"


def compare(again: CheckpointData, saved: CheckpointData) -> List[List[str]]:
    """Return a row for each kind of values: their number, how many have other bits, the largest difference, and where it is."""
    rows = []
    mine, theirs = _values(again), _values(saved)
    for kind in (WEIGHTS, STATES, SUMS, HISTORY):
        gaps = [(_gap(mine.get(key), theirs.get(key)), key[1]) for key in dict.fromkeys([*theirs, *mine]) if key[0] == kind]
        total, num_other = (sum(gap[i] for gap, _ in gaps) for i in (0, 1))
        (_, _, worst), name = max(gaps, key=lambda one: (one[0][2], one[0][1]), default=((0, 0, 0.0), ""))
        rows.append([kind, str(total), str(num_other), f"{worst:.1e}", name if num_other else ""])
    return rows


def _values(content: CheckpointData) -> Dict[Tuple[str, str], np.ndarray]:
    """Return the values that a replay must reproduce, by kind and name."""
    return {(kind, name): np.atleast_1d(np.asarray(value)) for kind, name, value in _named_values(content)}


def _named_values(content: CheckpointData) -> Iterator[Tuple[str, str, Any]]:
    training: Dict[str, Any] = content.training or {}
    for name, array in content.params.items():
        yield WEIGHTS, name, values_of(array)
    for index, state in training["counts"].items():
        yield STATES, f"updates of {training['names'][int(index)]}", state
    sums: Dict[str, Any] = {}
    for name, array in sorted(content.arrays.items()):
        kind, _, rest = name.partition("/")
        if kind == "state":
            yield STATES, f"{training['names'][int(rest.split('/')[0])]} {rest}", array
        elif kind in ("sum", "norm"):  # one sum per device: their total does not depend on the number of devices
            metric = name if kind == "norm" else rest.split("/", 1)[1]
            sums[metric] = sums.get(metric, 0) + array
    for metric, total in sums.items():
        yield SUMS, metric, total
    position = position_of(content)
    rows = content.progress["history"]
    for row in rows[: len(rows) - (position.row is not None)]:  # without that of an epoch that was not evaluated
        for column, value in row.items():
            if column not in _MEASURED and not column.startswith("share_"):
                yield HISTORY, f"{column} of epoch {row['epoch']}", value


def _gap(mine: Optional[np.ndarray], theirs: Optional[np.ndarray]) -> Tuple[int, int, float]:
    """Return the number of values, of those with other bits, and their largest difference."""
    if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        size = max(0 if one is None else one.size for one in (mine, theirs))
        return size, size, float("inf")
    as_bytes = [np.ascontiguousarray(one).view(np.uint8).reshape(one.size, -1) for one in (mine, theirs)]
    num_other = int((as_bytes[0] != as_bytes[1]).any(axis=1).sum())
    with np.errstate(invalid="ignore"):
        gap = float(np.abs(mine.astype(np.float64) - theirs).max()) if num_other else 0.0
    return mine.size, num_other, float("inf") if np.isnan(gap) else gap


def _verdict(rows: List[List[str]], step: int, target: Path, *, must_be_same: bool) -> int:
    """Print whether the step agrees with the checkpoint, and return the exit code."""
    if all(row[2] == "0" for row in rows):
        print(f"step {step} has the same bits as {target}")
        return 0
    if must_be_same:
        print(f"step {step} has other bits than {target}: {', '.join(row[0] for row in rows if row[2] != '0')}")
        return 1
    worst = max(float(row[3]) for row in rows if row[0] in (WEIGHTS, STATES))
    agrees = worst <= MOST_DIFFERENCE
    print(f"step {step} {'agrees' if agrees else 'does not agree'} with {target}: {worst:.1e}, allowed {MOST_DIFFERENCE:g}")
    return 0 if agrees else 1
