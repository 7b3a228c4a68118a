"""gluon-mgpu doctor: versions, GPUs, libraries, threads, a gradient on each device, and problems."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap

import click

from ..doctor import Problem, examine

_LABEL = 17  # columns
_WIDEST = 120


@click.command()
@click.option("--devices", "spec", default="auto", help="Devices to check, as for use_devices: auto, gpu, gpu*2, cpu*2, 2.")
@click.option("--verbose", is_flag=True, help="Also show every setting with its reason, features, libraries and packages.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def doctor(spec: str, verbose: bool, as_json: bool) -> None:
    """Check this machine, and say what to fix.

    It shows versions, GPUs and threads, and computes a small gradient on each device. The exit code is 1 if a problem
    prevents training on the devices.
    """
    report = examine(spec)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        for label, text in report.rows(verbose=verbose):
            click.echo(_indented(f"{label:<{_LABEL}}  ", text))
        click.echo("problems:" if report.findings else "no problems")
        for number, problem in enumerate(report.findings, 1):
            click.echo(_as_text(number, problem))
    if report.stops_training:
        sys.exit(1)


def _as_text(number: int, problem: Problem) -> str:
    kind = "stops training" if problem.stops_training else "warning"
    first, *commands = problem.to_do.splitlines()  # which no margin may break
    what = _indented(f"{number}. ", f"{problem.check}: {problem.what} ({kind})")
    return "\n".join([what, _indented("   -> ", first), *(f"      {line}".rstrip() for line in commands)])


def _indented(label: str, text: str) -> str:
    width = min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)
    width, indent = max(40 + len(label), width), " " * len(label)
    return textwrap.TextWrapper(width, label, indent, break_long_words=False, break_on_hyphens=False).fill(text) or label
