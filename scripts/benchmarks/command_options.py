"""Options and progress messages that several benchmarks share."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import click
from rich.console import Console


def numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> List[int]:
    """Return whole numbers of 1 or more from a text with commas; a callback of click."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if min(found, default=0) < 1:
        raise click.BadParameter(f"got {text!r}; expected whole numbers of 1 or more, separated by commas.")
    return found


def contenders_option(among: Sequence[str]) -> Callable[..., Any]:
    """Return `--contenders`: some of these, in the given order."""

    def names(_context: click.Context, _parameter: click.Parameter, text: str) -> List[str]:
        found = [name.strip() for name in text.split(",")]
        wrong = [name for name in found if name not in among]
        if wrong:
            raise click.BadParameter(f"got {', '.join(map(repr, wrong))}; expected some of {', '.join(among)}.")
        return list(dict.fromkeys(found))

    return click.option("--contenders", default=",".join(among), callback=names, help="Programs, separated by commas.")


def python_option(among: Sequence[str], example: str) -> Callable[..., Any]:
    """Return `--python`: interpreters for some of these contenders, by name."""

    def pythons(_context: click.Context, _parameter: click.Parameter, pairs: Sequence[str]) -> Dict[str, str]:
        found = {}
        for pair in pairs:
            name, _, path = pair.partition("=")
            python = shutil.which(path) if path else None
            if name not in among or python is None:
                names = ", ".join(among)
                raise click.BadParameter(f"got {pair!r}; expected NAME=PATH, an executable Python for one of {names}.")
            found[name] = str(Path(python).absolute())  # not resolved: a virtual environment's python is a link
        return found

    return click.option(
        "--python",
        "pythons",
        multiple=True,
        metavar="NAME=PATH",
        callback=pythons,
        help=f"The Python of a contender, such as {example}={example}-env/bin/python. May be repeated.",
    )


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a message: in one place on a terminal, otherwise one line per round."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("", refresh_per_second=2) as status:
            yield status.update
        return
    shown: List[str] = []

    def show(text: str) -> None:
        stage = text.split(",")[0].split(":")[0]
        if stage not in shown:
            shown.append(stage)
            print(text, file=sys.stderr, flush=True)

    yield show
