"""Tables and files that several subcommands write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..distributed.process import this_process
from ..plots import save


def tell(text: str) -> None:
    """Print a line; in a job of several processes, only the first does."""
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
    console = Console()
    console.print(title, highlight=False)  # a table's own title is wrapped to the table's width
    console.print(table, width=None if console.is_terminal else 120)


def write_results(folder: Path, name: str, results: Any, figure: Any) -> None:
    """Write `name.json` and `name.png` into a folder, and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    save(figure, folder / f"{name}.png")
    print(f"saved {folder / name}.json and {folder / name}.png")


def _is_number(cell: str) -> bool:
    return bool(cell) and cell.split()[0].replace(".", "").replace("-", "").isdigit()
