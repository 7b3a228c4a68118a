"""Tables and files that several subcommands write."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

import click
from rich.console import Console

from ..distributed.process import this_process
from ..plots import save
from ._table import print_table as print_table


def print_once(text: str) -> None:
    """Print a line; in a job of several processes, only the first one prints."""
    if not this_process().rank:
        print(text, flush=True)


def write_results(folder: Path, name: str, results: Any, figure: Any) -> None:
    """Write `name.json` and `name.png` into a folder, and print their names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    save(figure, folder / f"{name}.png")
    print(f"saved {folder / name}.json and {folder / name}.png")


@contextmanager
def showing(first: str) -> Iterator[Callable[[str], None]]:
    """Show on standard error what a command is doing: one line that changes on a terminal, otherwise one line per message."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(first) as status:
            yield status.update
    else:
        click.echo(first, err=True)
        yield lambda text: click.echo(text, err=True)
