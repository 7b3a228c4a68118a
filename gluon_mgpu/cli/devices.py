"""gluon-mgpu devices: the devices of this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Dict, List, Optional

import click

from ..devices.describe import DeviceInfo, describe_devices
from ..devices.free_gpus import describe, select
from ..errors import DeviceError
from ..runtime.nvidia.nvml import try_driver
from ..runtime.nvidia.request import Demand, num_bytes
from ..runtime.nvidia.visible import visible_gpus
from ..runtime.units import format_bytes
from ._output import print_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--free",
    type=click.IntRange(0),
    is_flag=False,
    flag_value=0,
    metavar="[COUNT]",
    help="Print only the names of the free GPUs, or of the COUNT most free, as CUDA_VISIBLE_DEVICES takes them.",
)
@click.option("--min-free-memory", metavar="SIZE", help="With --free: memory that must be free on each, such as 8GiB.")
def devices(as_json: bool, free: Optional[int], min_free_memory: Optional[str]) -> None:
    """Show the CPU and every GPU: memory, names, and why one cannot be used."""
    if min_free_memory is not None and free is None:
        raise click.UsageError("got --min-free-memory without --free; expected both, as the table shows all devices. Add --free.")
    if free is not None:
        click.echo(",".join(free_gpus(free, num_bytes(min_free_memory))))
        return
    found = describe_devices()
    if as_json:
        click.echo(json.dumps([asdict(device) for device in found], indent=1))
        return
    print_table(
        "devices",
        ["device", "what it is", "memory", "free", "can train", "why not"],
        [
            [
                device.name,
                device.description,
                format_bytes(device.memory_bytes or None),
                format_bytes(device.free_bytes),
                "yes" if device.usable else "no",
                device.reason,
            ]
            for device in found
        ],
    )
    named = [device for device in found if device.uuid]
    if named:
        columns = ["MXNet", "nvidia-smi", "UUID", "PCI"]
        print_table("names of the GPUs", columns, [_names(device) for device in named])
    notes: Dict[str, List[str]] = {}
    for device in found:
        if device.note and device.description not in notes.setdefault(device.note, []):
            notes[device.note].append(device.description)
    for note in sorted(notes):
        of = f"{', '.join(notes[note])}:\n" if len(notes) > 1 else ""
        click.echo(f"\n{of}{note}")


def free_gpus(count: int, min_free_bytes: int) -> List[str]:
    """Return the UUIDs of the free GPUs among those that CUDA may see, the most free first: all of them where `count` is 0.

    Raises
    ------
    DeviceError
        There are fewer, or none, or the driver does not report them.
    """
    demand = Demand("--free", None, count or None, True, min_free_bytes)
    driver, why = try_driver(links=False)
    if driver is None:
        raise DeviceError(f"devices: got --free; expected a driver that reports its GPUs: {why}")
    visible = visible_gpus(driver)
    if visible.doubt and "CUDA_VISIBLE_DEVICES" in os.environ:
        raise DeviceError(f"devices: got numbers in CUDA_VISIBLE_DEVICES; expected to know which GPUs they are. {visible.doubt}")
    found, reasons = select(visible.devices, demand, runs=lambda number: "")
    if not found:
        lacks = describe(reasons) or "CUDA may see none"
        raise DeviceError(f"devices: got --free; expected {demand}: {lacks}. Try again later, or ask for less.")
    return [device.uuid for device in found]


def _names(device: DeviceInfo) -> List[str]:
    address = (device.pci_bus_id or "").replace("00000000:", "")  # the domain, of which few machines have several
    return [device.name, str(device.index), device.uuid or "", address]
