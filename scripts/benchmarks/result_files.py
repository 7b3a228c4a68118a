"""Options for the JSON file and the plot of a benchmark, and functions that write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Optional

import click
from gluon_mgpu.plots import save

_file = click.Path(dir_okay=False, path_type=Path)
json_option = click.option("--json", "json_path", type=_file, help="JSON file for every round, the tables and computed values.")
plot_option = click.option("--plot", "plot_path", type=_file, help="PNG file for a plot.")


def save_json(path: Optional[Path], content: Any) -> None:
    """Write a JSON file, and its folder, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        print(f"saved {path}")


def save_plot(path: Optional[Path], draw: Callable[[], Any]) -> None:
    """Draw a figure and write it, and its folder, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(draw(), path)
        print(f"saved {path}")
