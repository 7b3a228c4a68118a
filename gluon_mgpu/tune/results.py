"""The results of a search: which trials ran with which hyper-parameters, what they reached, and which one is best."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ..errors import DataError
from .space import Options, arguments_of

REQUEST, RESULTS = "search.json", "results"


@dataclass(frozen=True)
class Request:
    """A search as the user asked for it.

    Attributes
    ----------
    program : str
        The training program: `resnet18`, `seq2seq`.
    arguments : list of str
        The arguments of every trial.
    trials : list of dict
        The hyper-parameters of each trial.
    space : list of str
        As in `--space`.
    metric, mode : str
        A column of the history, and "min" or "max".
    scheduler : str
        "asha", "pbt" or "none".
    devices : str
        The devices of one trial: "cpu*1", "gpu*2", with ":" in searches of earlier versions.
    epochs, seed : int
    """

    program: str
    arguments: List[str]
    trials: List[Options]
    space: List[str]
    metric: str
    mode: str
    scheduler: str
    devices: str
    epochs: int
    seed: int

    def write(self, folder: Path) -> None:
        """Write it into the folder of a search."""
        _write(folder / REQUEST, json.dumps(asdict(self), indent=1))

    def command(self, options: Options) -> str:
        """Return a command that trains with these hyper-parameters."""
        words = ["gluon-mgpu", "train", self.program, "--devices", self.device_names, *self.arguments, *arguments_of(options)]
        return " ".join(map(shlex.quote, words))

    @property
    def device_names(self) -> str:
        """The devices of a trial as `train --devices` takes them."""
        kind, number = self.kind_and_number
        if number == 1:
            return "cpu" if kind == "cpu" else "gpu:0"
        return f"cpu*{number}" if kind == "cpu" else f"gpu:0-{number - 1}"

    @property
    def kind_and_number(self) -> Tuple[str, int]:
        """The devices of a trial as "cpu" or "gpu", and how many."""
        kind, number = re.split("[*:]", self.devices)
        return kind, int(number)


def read_request(folder: Path) -> Request:
    """Return the request that a folder holds.

    Raises
    ------
    DataError
        It holds none.
    """
    try:
        return Request(**json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"search: got {folder} without a readable {REQUEST} ({type(error).__name__}); expected the folder of a search. Start "
            "one without --resume."
        ) from error


@dataclass
class Trial:
    """One trial: its number from 1, hyper-parameters, status, and one row for each epoch.

    Attributes
    ----------
    status : str
        "waiting", "running", "paused", "done", "stopped" (by the scheduler) or "failed".
    reason : str
        Why it failed.
    rows : list of dict
        The history's columns and `options`, the hyper-parameters of this epoch: population-based training changes them.
    """

    number: int
    options: Options
    status: str = "waiting"
    reason: str = ""
    rows: List[Dict[str, Any]] = field(default_factory=list)

    def add(self, row: Dict[str, Any], options: Options) -> None:
        """Add the row of an epoch, and remove rows of this epoch and later ones: a trial that resumes repeats them."""
        self.rows = [one for one in self.rows if one["epoch"] < row["epoch"]]
        self.rows.append({**row, "options": dict(options)})

    def best_row(self, metric: str, mode: str) -> Optional[Dict[str, Any]]:
        """Return the best row with the current hyper-parameters, None if there is none with a number."""
        sign = 1 if mode == "max" else -1
        rows = [row for row in self.rows if row["options"] == self.options and _is_number(row.get(metric))]
        return max(rows, key=lambda row: (sign * row[metric], -row["epoch"]), default=None)


class Results:
    """The trials of a search, by number.

    Parameters
    ----------
    request : Request
    folder : pathlib.Path
        The folder of the search; results of an earlier process are read.
    """

    def __init__(self, request: Request, folder: Path) -> None:
        self.request, self.folder = request, folder
        self.trials = {i: Trial(i, dict(options)) for i, options in enumerate(request.trials, 1)}
        path = folder / f"{RESULTS}.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))["trials"]
            self.trials.update({one["number"]: Trial(**{key: one[key] for key in _FIELDS}) for one in found})

    def value(self, trial: Trial) -> Optional[float]:
        """Return the best value of a trial, None if it has none."""
        row = trial.best_row(self.request.metric, self.request.mode)
        return None if row is None else float(row[self.request.metric])

    def best(self) -> Optional[Trial]:
        """Return the best trial that has not failed; of equal ones, the first."""
        values = {trial.number: self.value(trial) for trial in self.trials.values() if trial.status != "failed"}
        sign = 1 if self.request.mode == "max" else -1
        known = [number for number, value in values.items() if value is not None]
        return self.trials[max(known, key=lambda number: (sign * values[number], -number))] if known else None  # type: ignore[operator]

    def save(self) -> None:
        """Write `results.json` and `results.csv`."""
        best, request = self.best(), self.request
        trials = [{**asdict(trial), request.metric: self.value(trial)} for trial in self.trials.values()]
        content = {
            "metric": request.metric,
            "mode": request.mode,
            "best": None if best is None else best.number,
            "command": None if best is None else request.command(best.options),
            "trials": trials,
        }
        _write(self.folder / f"{RESULTS}.json", json.dumps(content, indent=1))
        text = io.StringIO()
        names = list(request.trials[0])
        measured = sorted({name for trial in self.trials.values() for row in trial.rows for name in row} - {"options", "epoch"})
        writer = csv.writer(text)
        writer.writerow(["trial", "status", "epochs", f"best_{request.metric}", *names, *measured, "reason"])
        for trial in self.trials.values():
            last = trial.rows[-1] if trial.rows else {}
            cells = [trial.options[name] for name in names] + [last.get(name, "") for name in measured]
            value = self.value(trial)
            writer.writerow([trial.number, trial.status, len(trial.rows), "" if value is None else value, *cells, trial.reason])
        _write(self.folder / f"{RESULTS}.csv", text.getvalue())


_FIELDS = ("number", "options", "status", "reason", "rows")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _write(path: Path, text: str) -> None:
    """Write a file that is complete at any time."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
