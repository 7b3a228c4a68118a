"""Plots of what the tuning commands measure."""

from __future__ import annotations

from typing import Any, Sequence

from ..data_parallel.transfer import Bandwidth
from ..plots import figure


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
