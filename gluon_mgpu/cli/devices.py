"""gluon-mgpu devices: the devices of this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, List

import click

from ..runtime.units import format_bytes
from ._output import print_table

if TYPE_CHECKING:
    from ..devices.describe import DeviceInfo


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def devices(as_json: bool) -> None:
    """List the CPU and every GPU.

    The table shows memory, names, and why a device cannot be used.
    """
    from ..devices.describe import describe_devices

    found = describe_devices()
    if as_json:
        click.echo(json.dumps([asdict(device) for device in found], indent=1))
        return
    print_table("devices", ["device", "what it is", "memory", "free", "can train", "why not"], list(map(_row, found)))
    named = [device for device in found if device.uuid]
    if named:
        print_table("names of the GPUs", ["MXNet", "nvidia-smi", "UUID", "PCI"], list(map(_names, named)))
    for note in sorted({device.note for device in found if device.note}):
        kinds = sorted({device.description for device in found if device.note == note})
        click.echo(f"\n{', '.join(kinds)}:\n{note}")


def _row(device: DeviceInfo) -> List[str]:
    memory = [format_bytes(device.memory_bytes or None), format_bytes(device.free_bytes)]
    return [device.name, device.description, *memory, "yes" if device.usable else "no", device.reason]


def _names(device: DeviceInfo) -> List[str]:
    address = (device.pci_bus_id or "").replace("00000000:", "")  # the domain, of which few machines have several
    return [device.name, str(device.index), device.uuid or "", address]
