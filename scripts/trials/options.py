"""Wrong options: a subcommand of gluon-mgpu with values from a pool. Errors are one line, and the exit status is 1 or 2.

No long work is started: each subcommand gets an option that ends it early, such as a missing data folder.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import click
from click.testing import CliRunner
from gluon_mgpu.cli import main

LIMIT_S = 20.0
ENDS = {  # options that let a right call end soon, with an error or without
    "agree": ["--data-dir", "nowhere"],
    "find-batch-size": ["nowhere.py:make", "--timeout", "2"],
    "launch": ["-n", "1", "--", "true"],
    "monitor": ["--count", "1", "--interval", "0.1"],
    "predict resnet18": ["--checkpoint", "nowhere"],
    "train resnet18": ["--data-dir", "nowhere"],
    "train seq2seq": ["--source", "nowhere", "--target", "nowhere"],
    "translate": ["--model", "nowhere"],
}
UNTRIED = {"bench", "doctor"}  # one takes long; the other reports problems of the devices in tables
POOL = [
    *(
        "",
        "bogus",
        "-1",
        "0",
        "1.5",
        "nan",
        "inf",
        "1e400",
        "9" * 30,
        "9" * 5000,
        "²",
        "a\nb",
        "x" * 3000,
        "/",
        ".",
        "/nowhere/x",
    ),
    *(
        "/nowhere/x",
        "cpu:0",
        "gpu",
        "cpu:20000",
        "1,2",
        ",",
        "None",
        "[]",
        "true",
        "\udcff",
        "--help",
        "cpu:2,gpu:9",
        "0-5",
        "://",
        "%s",
        "~",
    ),
]


class TookTooLong(BaseException):
    """The alarm ended a call: its options were accepted."""


def commands() -> Iterator[Tuple[str, click.Command]]:
    """Yield each subcommand that is not a group, and its words."""

    def below(words: List[str], command: click.Command) -> Iterator[Tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for name, inner in sorted(command.commands.items()):
                yield from below([*words, name], inner)
        else:
            yield " ".join(words), command

    yield from below([], main)


def trial(seed: int) -> str:
    """Call a subcommand with one or two wrong options and return the errors in how it ended."""
    rng = random.Random(seed)
    known = [(words, command) for words, command in commands() if words.split()[0] not in UNTRIED]
    words, command = known[seed % len(known)]
    options = [one for one in command.params if isinstance(one, click.Option) and not one.is_flag and not one.hidden]
    if not options:
        return ""
    chosen = rng.sample(options, min(len(options), rng.choice([1, 1, 2])))
    wrong_options = [
        part for one in chosen for part in (one.opts[-1] if one.opts[-1].startswith("--") else one.opts[0], rng.choice(POOL))
    ]
    ends = ENDS.get(words, [])
    return _outcome(f"seed {seed}: gluon-mgpu {words}", [*words.split(), *wrong_options, *ends], wrong_options)


def _outcome(what: str, arguments: List[str], wrong_options: List[str]) -> str:
    folder, there = Path(tempfile.mkdtemp(prefix="options_")), Path.cwd()
    label = f"{what} {' '.join(repr(part)[:60] for part in wrong_options)}"

    def ring(number: int, frame: Any) -> None:
        raise TookTooLong

    signal.signal(signal.SIGALRM, ring)
    options: Dict[str, Any] = {"prog_name": "gluon-mgpu", "catch_exceptions": True}
    try:
        os.chdir(folder)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        result = CliRunner().invoke(main, arguments, **options)
    except TookTooLong:
        return ""
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.chdir(there)
        shutil.rmtree(folder, ignore_errors=True)
    found = []
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        found.append(f"{type(result.exception).__name__}: {str(result.exception)[:200]!r}")
    elif result.exit_code not in (0, 1, 2):
        found.append(f"exit status {result.exit_code}")
    errors = [line for line in result.output.splitlines() if line.startswith("Error:")]
    of_click = result.exit_code == 2 and len(errors) == 1  # which shows a value in full
    if result.exit_code and not found and not of_click and (len(errors) != 1 or len(errors[0]) > 700):
        found.append(f"{len(errors)} lines of errors: {result.output[-300:]!r}")
    if result.exit_code and errors and not of_click and result.output.rstrip().splitlines()[-1] != errors[-1]:
        found.append(f"more after the error: {result.output[-300:]!r}")
    if "Traceback" in result.output:
        found.append("a traceback")
    return "\n  ".join([label, *found]) if found else ""
