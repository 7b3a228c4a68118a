"""Options and progress that several comparisons share."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import click
from rich.console import Console

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


def contenders_option(among: Sequence[str]) -> Callable[..., Any]:
    """Return `--contenders`: some of these, in the order that is asked for."""

    def names(_context: click.Context, _parameter: click.Parameter, text: str) -> List[str]:
        found = [name.strip() for name in text.split(",")]
        wrong = [name for name in found if name not in among]
        if wrong:
            raise click.BadParameter(f"got {', '.join(map(repr, wrong))}; expected some of {', '.join(among)}.")
        return list(dict.fromkeys(found))

    return click.option(
        "--contenders", default=",".join(among), show_default=True, callback=names, help="Who is compared, separated by commas."
    )


def python_option(among: Sequence[str], example: str) -> Callable[..., Any]:
    """Return `--python`: interpreters of some of these contenders, by name."""

    def pythons(_context: click.Context, _parameter: click.Parameter, pairs: Sequence[str]) -> Dict[str, str]:
        found = {}
        for pair in pairs:
            name, _, path = pair.partition("=")
            python = shutil.which(path) if path else None
            if name not in among or python is None:
                names = ", ".join(among)
                raise click.BadParameter(f"got {pair!r}; expected NAME=PATH, a Python that can be run for one of {names}.")
            found[name] = str(Path(python).absolute())  # not resolved: a virtual environment's python is a link
        return found

    return click.option(
        "--python",
        "pythons",
        multiple=True,
        metavar="NAME=PATH",
        callback=pythons,
        help=f"Another Python for a contender, such as {example}={example}-env/bin/python. May be repeated.",
    )


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is under way: in one place on a terminal, else a line a round."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("", refresh_per_second=2) as status:
            yield status.update
        return
    told: List[str] = []

    def tell(text: str) -> None:
        stage = text.split(",")[0].split(":")[0]
        if stage not in told:
            told.append(stage)
            print(text, file=sys.stderr, flush=True)

    yield tell
