"""gluon-mgpu doctor: the machine, the runtime settings in effect with their reasons, and problems."""

from __future__ import annotations

import json
import sys

import click

from ..doctor import examine, instructions, tables_of
from ._table import print_table


@click.command()
@click.option(
    "--devices",
    "spec",
    default="auto",
    show_default=True,
    help="Devices to check, as for use_devices: auto, gpu, gpu*2, cpu*2, 2.",
)
@click.option("--output", default="runs", show_default=True, help="Folder for checkpoints.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def doctor(spec: str, output: str, as_json: bool) -> None:
    """Show the machine, GPUs, libraries, settings, and problems with their solutions.

    The exit code is 1 if a problem prevents training on the devices.
    """
    report = examine(spec, output=output)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        for table in tables_of(report):
            print_table(table.title, table.columns, table.rows)
        for text in instructions(report):
            click.echo(f"\n{text}")
    if report.stops_training:
        sys.exit(1)
