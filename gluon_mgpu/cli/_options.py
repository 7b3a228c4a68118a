"""Options that several subcommands share."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

import click

from ..checkpoint.atomic_folder import recover_path


def numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> List[int]:
    """Return whole numbers of 1 or more from a text with commas, as click calls it back."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise click.BadParameter(f"got {text!r}; expected whole numbers of 1 or more, separated by commas.")
    return found


def best_of(folder: Path, holds: Sequence[str]) -> Path:
    """Return the folder to read: this one where it holds one of these files, else its `best`, else its `last`.

    Which one it took of a run's folder is printed to standard error.
    """
    if any((folder / name).exists() for name in holds):
        return folder
    for name in ("best", "last"):
        if any((recover_path(folder / name) / file).exists() for file in holds):
            click.echo(f"{folder} is the folder of a run: {folder / name} is read.", err=True)
            return folder / name
    return folder
