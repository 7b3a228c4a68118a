"""The history of a run: one row per epoch, and its files."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, List, Union

from ..checkpoint.replace_folder import explained
from ..checkpoint.resume import Row
from ..checks import is_number
from ..plots import plot_history, save
from ..runtime.new_files import new_file
from ..runtime.units import column_title


@dataclass
class History:
    """The results of each epoch; `print` shows them as a table.

    Attributes
    ----------
    rows : list of dict
        One per epoch: `epoch`, `train_loss`, `train_accuracy`, `test_...`, `seconds` of training, `examples_per_s`,
        and the `learning_rate` of its last step. Accuracies are from 0 to 1; `Progress` and the figure show them in percent.
        A translator's `valid_exact_match`, `valid_bleu` and `valid_chrf` are from 0 to 100.
    stopped : str
        Why training ended before the last epoch; empty if it did not.
    evaluations : list of dict
        One per evaluation within an epoch (`fit(evaluate_every=)`): `epoch`, `step`, `test_...`.
    """

    rows: List[Row] = field(default_factory=list)
    stopped: str = ""
    evaluations: List[Row] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a table with one row per epoch."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        cells = [[column_title(name) for name in names]]
        cells += [
            [f"{row[name]:.4g}" if is_number(row.get(name)) else str(row.get(name, "")) for name in names] for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*cells)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells)

    def plot(self) -> Any:
        """Return the matplotlib figure of its curves, which a notebook shows: see `plots.plot_history`."""
        return plot_history(self.rows)

    def column(self, name: str) -> List[float]:
        """Return one value per epoch, NaN for an epoch without one."""
        return [row.get(name, math.nan) for row in self.rows]

    def save(self, folder: Union[str, Path]) -> None:
        """Write `history.csv`, `history.json` and the figure `curves.png` into a folder, replacing each file once it is complete.

        Raises
        ------
        SaveError
            The files cannot be written. Earlier files stay.
        """
        folder = Path(folder)
        with explained("History.save", folder):
            folder.mkdir(parents=True, exist_ok=True)
            with new_file(folder / "history.csv", follow=False) as path, open(path, "w", newline="", encoding="utf-8") as file:
                names = dict.fromkeys(name for row in self.rows for name in row)
                writer = csv.DictWriter(file, list(names))
                writer.writeheader()
                writer.writerows(self.rows)
            content = {"stopped": self.stopped, "epochs": self.rows, "evaluations": self.evaluations}
            with new_file(folder / "history.json", follow=False) as path:
                path.write_text(json.dumps(content, indent=1, default=float), encoding="utf-8")
            save(self.plot(), folder / "curves.png")
