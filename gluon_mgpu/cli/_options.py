"""Options that several subcommands share."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import click

from ..distributed.process import this_process


class Real(click.FloatRange):
    """Finite numbers in a range, in ASCII: click also takes other digits, and inf and nan, which no comparison refuses."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number) or isinstance(value, str) and not value.isascii():
            self.fail(f"got {value!r}; expected a finite number.", param, ctx)
        return number


class Whole(click.IntRange):
    """Whole numbers in a range, in ASCII digits: click also takes others, and underscores."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> int:
        if isinstance(value, str) and not (value.isascii() and value.lstrip("-+").isdigit()):
            self.fail(f"got {value!r}; expected a whole number in digits.", param, ctx)
        return super().convert(value, param, ctx)


FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)

count = partial(click.option, type=Whole(1))
positive = partial(click.option, type=Real(0, min_open=True))
seed_option = partial(click.option, "--seed", type=Whole(0, 2**31 - 1), default=0)


def all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that applies all of these; `--help` shows them in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


devices_option = all_of(
    click.option(
        "--devices",
        "spec",
        default="auto",
        help="auto, gpu (all), gpu*2 (two GPUs), gpu:0,2 and gpu:4-7 (GPUs with these numbers), gpu:free (unused GPUs), "
        "gpu:free*2, cpu*2 (two CPU contexts), or a count. Quote *, as in 'gpu*2'.",
    ),
    click.option(
        "--min-free-memory",
        metavar="SIZE",
        help="Memory that must be free on each GPU, such as 8GiB. auto and a count choose among GPUs that have it.",
    ),
)


image_options = all_of(
    click.option(
        "--data",
        type=click.Choice(["digits", "mnist", "fashion-mnist"]),
        default="digits",
        help="digits needs no network; Gluon downloads the others.",
    ),
    click.option(
        "--data-dir",
        type=FOLDER,
        help="Folder with idx files (MNIST's format) instead. With one pair of files, 80% train and 20% test.",
    ),
)


def output_option(default: str, content: str) -> Callable[[Any], Any]:
    """Return `--output`, the folder of a command's files."""
    return click.option("--output", type=FOLDER, default=Path(default), callback=_writable, help=f"Folder for {content}.")


def _writable(_context: click.Context, _parameter: click.Parameter, path: Path) -> Path:
    """Raise before the work if its results could not be saved after it."""
    there = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    if not (this_process().rank or (there.is_dir() and os.access(there, os.W_OK | os.X_OK))):  # only process 0 saves
        raise click.BadParameter(f"got {path}; expected a writable folder. Pass another --output.")
    return path


def best_of(folder: Path) -> Path:
    """Return the folder to read: this one if it holds a checkpoint, else its `best`, else its `last`.

    It prints to standard error which folder of a run it took.
    """
    from ..checkpoint.replace_folder import recover_path
    from ..checkpoint.rotation import checkpoint_in

    for path in (folder, folder / "best", folder / "last"):
        if checkpoint_in(recover_path(path)) is not None:
            if path != folder:
                click.echo(f"{folder} is the folder of a run: reading {path}.", err=True)
            return path
    return folder
