"""Tables on a terminal and in a pipe."""

from __future__ import annotations

from typing import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; every column but the first is aligned to the right where all its cells are numbers."""
    table = Table()
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[i]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))  # rich takes [train] for markup
    console = Console(emoji=False)  # gpu:free:2 is no picture
    console.print(title, highlight=False)  # a table's own title is wrapped to the table's width
    console.print(table, width=None if console.is_terminal else 120)


def _is_number(cell: str) -> bool:
    return bool(cell) and cell.split()[0].replace(".", "").replace("-", "").isdigit()
