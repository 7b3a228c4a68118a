"""Lines, tables and files that several subcommands write."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..distributed.process import this_process
from ..runtime.new_files import new_file


def print_once(text: str) -> None:
    """Print a line; in a job of several processes, only the first one prints."""
    if not this_process().rank:
        print(text, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; every column but the first is aligned to the right where all its cells are numbers."""
    table = Table()
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[i]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))  # rich takes [train] for markup
    console = Console(emoji=False)  # :free: is no picture
    console.print(title, highlight=False)  # a table's own title is wrapped to the table's width
    console.print(table, width=None if console.is_terminal else 120)


def _is_number(cell: str) -> bool:
    return bool(cell) and cell.split()[0].replace(".", "").replace("-", "").isdigit()


def write_results(folder: Path, name: str, results: Any) -> None:
    """Write `name.json` into a folder, and print where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    with new_file(folder / f"{name}.json", follow=False) as new:
        new.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"saved {folder / name}.json")


@contextmanager
def showing(first: str) -> Iterator[Callable[[str], None]]:
    """Show on standard error what a command is doing: one line that changes on a terminal, otherwise one line per message.

    In a job of several processes, only the first one shows it.
    """
    console = Console(stderr=True)
    if this_process().rank:
        yield lambda text: None
    elif console.is_terminal:
        with console.status(first) as status:
            yield status.update
    else:
        click.echo(first, err=True)
        yield lambda text: click.echo(text, err=True)
