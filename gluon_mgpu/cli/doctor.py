"""gluon-mgpu doctor: what is here, which runtime settings are in effect and why, and what is wrong."""

from __future__ import annotations

import json
import sys

import click

from ..doctor import examine, tables_of
from ._table import print_table


@click.command()
@click.option(
    "--devices",
    "spec",
    default="auto",
    show_default=True,
    help="Devices to look at, as use_devices takes them: auto, gpu, cpu:2, 2.",
)
@click.option("--output", default="runs", show_default=True, help="Folder that checkpoints will go to.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def doctor(spec: str, output: str, as_json: bool) -> None:
    """Show the machine, GPUs, libraries and settings, and what is wrong, with what to do.

    Exits with 1 if something is wrong that stops training on the devices.
    """
    report = examine(spec, output=output)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        for table in tables_of(report):
            print_table(table.title, table.columns, table.rows)
    if report.stops_training:
        sys.exit(1)
