"""Hostile trials: random programs, damaged folders, signals and strangers, each replayable by its seed.

    python scripts/trials programs --seed 0 --seconds 600

They take hours where the tests take minutes, and look for what no test knows yet. Each kind is a module of this folder with a
function `trial(seed) -> str`, which returns what went wrong, or nothing. A finding prints the command that repeats it. A module
may have a function `summary() -> str`, printed at the end. Modules whose names begin with `_` are parts of others.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click
from runner import search

KINDS = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py") if path.stem != "runner")


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--seed", default=0, show_default=True, help="Seed of the first trial; each later one adds 1.")
@click.option("--count", default=0, help="Stop after this number of trials. 0: no limit.")
@click.option("--seconds", default=600.0, show_default=True, help="Start no trial after this time.")
@click.option("--keep-going/--stop-at-first", default=True, help="Whether to continue after a finding.")
def main(kind: str, seed: int, count: int, seconds: float, keep_going: bool) -> None:
    """Run trials of one kind and exit with 1 if any of them found something."""
    module = importlib.import_module(kind)
    code = search(kind, module.trial, seed=seed, count=count, seconds=seconds, keep_going=keep_going)
    if hasattr(module, "summary"):
        print(module.summary())
    sys.exit(code)


if __name__ == "__main__":
    main(prog_name="python scripts/trials")
