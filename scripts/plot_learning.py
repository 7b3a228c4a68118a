"""Draws the validation loss and chrF of runs of `train seq2seq` over the epochs, compared with the entropy of the unigrams.

python scripts/plot_learning.py OUTPUT.png TITLE ENTROPY BEFORE AFTER   # the last two: folders of runs, or several with commas
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Dict, List

from gluon_mgpu.plots import figure, save


def draw(path: str, title: str, entropy: float, runs: Dict[str, List[str]]) -> None:
    """Save a figure of the runs of each label."""
    made = figure(9, 3.6)
    loss, chrf = made.subplots(1, 2)
    for label, folders in runs.items():
        for number, folder in enumerate(folders):
            rows = json.loads((Path(folder) / "history.json").read_text())["epochs"]
            color = {"before": "tab:gray", "after": "tab:blue"}[label]
            for axes, column in ((loss, "test_loss"), (chrf, "test_chrf")):
                axes.plot(
                    [row["epoch"] for row in rows],
                    [row[column] for row in rows],
                    ".-",
                    color=color,
                    label=None if number else label,
                )
    loss.axhline(entropy, color="black", linestyle=":", label="entropy of the unigrams")
    loss.set(xlabel="epoch", ylabel="validation loss, nats per token", title=title)
    chrf.set(xlabel="epoch", ylabel="validation chrF, greedy", ylim=(0, None))
    loss.legend()
    made.tight_layout()
    save(made, path)


if __name__ == "__main__":
    output, title, entropy, before, after = sys.argv[1:]
    draw(output, title, float(entropy), {"before": before.split(","), "after": after.split(",")})
