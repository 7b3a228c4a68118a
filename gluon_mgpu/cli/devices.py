"""gluon-mgpu devices: what there is to train on."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ..devices import describe_devices
from ._output import print_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def devices(as_json: bool) -> None:
    """Show the CPU and every GPU: memory, and why one cannot be used."""
    found = describe_devices()
    if as_json:
        click.echo(json.dumps([asdict(device) for device in found], indent=1))
        return
    print_table(
        "devices",
        ["device", "what it is", "memory", "can train", "why not"],
        [
            [
                device.name,
                device.description,
                _gib(device.memory_bytes),
                "yes" if device.usable else "no",
                device.reason,
            ]
            for device in found
        ],
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes else "?"
