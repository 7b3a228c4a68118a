"""Figures of measurements with their ranges."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from gluon_mgpu.plots import figure


def plot_lines(panels: Dict[str, Dict[str, List[Tuple[float, float, float, float]]]], xlabel: str, ylabel: str) -> Any:
    """Return a figure of medians with their ranges, on logarithmic axes, one chart per panel.

    Parameters
    ----------
    panels : dict of title -> dict of label -> points (x, median, low, high)
    xlabel, ylabel : str
    """
    made = figure(5 * len(panels), 4.6)
    drawn: Dict[str, Any] = {}
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    places = sorted({point[0] for lines in panels.values() for points in lines.values() for point in points})
    for axes, (title, lines) in zip(made.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for label, points in lines.items():
            xs, medians, lows, highs = zip(*points)
            below_above = [[m - low for m, low in zip(medians, lows)], [high - m for m, high in zip(medians, highs)]]
            drawn[label] = axes.errorbar(xs, medians, below_above, marker=".", capsize=3, color=f"C{labels.index(label)}")
        axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
        axes.set_xticks(places)
        axes.set_xticks([], minor=True)
        axes.set_xticklabels([f"{place:g}" for place in places])
        axes.grid(alpha=0.3)
    made.tight_layout(rect=(0, 0.1, 1, 1))
    made.legend(list(drawn.values()), list(drawn), loc="lower center", ncol=5, fontsize=8)
    return made


def plot_ranges(groups: Dict[str, Dict[str, Tuple[float, float, float]]], ylabel: str) -> Any:
    """Return a figure of bars with their ranges, one chart per group, all on one scale.

    Parameters
    ----------
    groups : dict of title -> dict of label -> (median, low, high)
    ylabel : str
    """
    made = figure(max(4.0, 3.6 * len(groups)), 4.2)
    labels = list(dict.fromkeys(label for bars in groups.values() for label in bars))
    subplots = made.subplots(1, max(1, len(groups)), squeeze=False, sharey=True)[0]
    for axes, (title, bars) in zip(subplots, groups.items()):
        medians = [median for median, _, _ in bars.values()]
        below_above = [[m - low for m, low, _ in bars.values()], [high - m for m, _, high in bars.values()]]
        colors = [f"C{labels.index(label)}" for label in bars]
        axes.bar(range(len(bars)), medians, yerr=below_above, capsize=4, color=colors)
        axes.set_xticks(range(len(bars)))
        axes.set_xticklabels(list(bars), rotation=45, ha="right", fontsize=8)
        axes.set_axisbelow(True)
        axes.set_title(title, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.yaxis.set_tick_params(labelleft=True)
    subplots[0].set_ylabel(ylabel)
    made.tight_layout()
    return made
