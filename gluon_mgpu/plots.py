"""Pictures of what was measured, drawn without a display; in a notebook they show after `%matplotlib inline`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Sequence, Union

from .runtime import require
from .transfer import Bandwidth


def figure(width: float = 10, height: float = 4) -> Any:
    """Return an empty matplotlib figure, in inches, that needs no display and no backend.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    made = require("matplotlib.figure", "train", "plot").Figure(figsize=(width, height))
    require("matplotlib.backends.backend_agg", "train", "plot").FigureCanvasAgg(made)
    return made


def save(made: Any, path: Union[str, Path]) -> None:
    """Write a figure as a PNG, 120 dots an inch."""
    made.savefig(str(path), dpi=120)


def plot_history(rows: Sequence[Dict[str, float]]) -> Any:
    """Return a figure of a training run: loss on the left, the other metrics on the right, against epochs.

    Parameters
    ----------
    rows : sequence of dict
        One an epoch, with `epoch`, and `train_...` and `test_...` columns.
    """
    made = figure()
    losses, others = made.subplots(1, 2)
    columns = [name for name in (rows[0] if rows else {}) if name.startswith(("train_", "test_"))]
    for name in columns:
        axes = losses if name.endswith("_loss") else others
        style = "--" if name.startswith("train_") else "-"
        points = [(row["epoch"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points), style, marker=".", label=name.replace("_", " "))
    for axes, title in ((losses, "loss"), (others, "metrics")):
        axes.set(xlabel="epoch", title=title)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    made.tight_layout()
    return made


def plot_bandwidth(measured: Sequence[Bandwidth]) -> Any:
    """Return a figure of copies: GB/s against size, one line for each pair of devices."""
    made = figure(7, 4)
    axes = made.subplots()
    pairs = sorted({(one.source, one.target) for one in measured})
    for pair in pairs:
        line = [(one.num_bytes, one.gb_per_s) for one in measured if (one.source, one.target) == pair]
        axes.plot(*zip(*line), marker=".", label=f"{pair[0]} to {pair[1]}")
    axes.set(xscale="log", xlabel="bytes copied", ylabel="GB/s", title="copying between devices")
    axes.grid(alpha=0.3)
    axes.legend()
    made.tight_layout()
    return made


def plot_bars(groups: Dict[str, Dict[str, float]], ylabels: Sequence[str]) -> Any:
    """Return a figure of bars, one chart a group.

    Parameters
    ----------
    groups : dict of title -> dict of label -> value
    ylabels : sequence of str
        One a group: what its values are, with their unit.
    """
    made = figure(3.4 * len(groups), 4)
    charts = zip(made.subplots(1, len(groups), squeeze=False)[0], groups.items(), ylabels)
    for axes, (title, bars), ylabel in charts:
        axes.bar(range(len(bars)), list(bars.values()), color="tab:blue")
        axes.set_xticks(range(len(bars)))
        axes.set_xticklabels(list(bars), rotation=20 if len(bars) < 4 else 60, ha="right", fontsize=8)
        axes.set_axisbelow(True)
        axes.set(title=title, ylabel=ylabel)
        axes.grid(axis="y", alpha=0.3)
    made.tight_layout()
    return made
