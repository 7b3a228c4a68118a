"""gluon-mgpu devices: the devices of this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, List, Optional

import click

from ..errors import DeviceError
from ..runtime.nvidia.nvml import try_driver
from ..runtime.nvidia.request import Demand
from ..runtime.nvidia.visible import visible_gpus
from ..runtime.units import format_bytes
from ._options import Whole
from ._output import print_table

if TYPE_CHECKING:
    from ..devices.describe import DeviceInfo


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--free",
    type=Whole(0),
    is_flag=False,
    flag_value=0,
    metavar="[COUNT]",
    help="Print only the names of the free GPUs, or of the COUNT most free, as CUDA_VISIBLE_DEVICES takes them.",
)
def devices(as_json: bool, free: Optional[int]) -> None:
    """List the CPU and every GPU.

    The table shows memory, names, and why a device cannot be used.
    """
    from ..devices.describe import describe_devices

    if free is not None:
        click.echo(",".join(free_gpus(free)))
        return
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


def free_gpus(count: int) -> List[str]:
    """Return the UUIDs of the free GPUs among those that CUDA may see, the most free first: all of them where `count` is 0.

    Raises
    ------
    DeviceError
        There are fewer, or none, or the driver does not report them.
    """
    from ..devices.free_gpus import describe, select

    demand = Demand("--free", None, count or None)
    driver, why = try_driver()
    if driver is None:
        raise DeviceError(f"devices: got --free; expected a driver that reports its GPUs: {why}")
    visible = visible_gpus(driver)
    if visible.doubt and "CUDA_VISIBLE_DEVICES" in os.environ:
        raise DeviceError(f"devices: got numbers in CUDA_VISIBLE_DEVICES; expected to know which GPUs they are. {visible.doubt}")
    found, reasons = select(visible.devices, demand, runs=lambda number: "")
    if not found:
        lacks = describe(reasons) or "CUDA may see none"
        raise DeviceError(f"devices: got --free; expected {demand}: {lacks}. Try again later, or ask for less.")
    return [device.gpu.uuid for device in found]


def _row(device: DeviceInfo) -> List[str]:
    memory = [format_bytes(device.memory_bytes or None), format_bytes(device.free_bytes)]
    return [device.name, device.description, *memory, "yes" if device.usable else "no", device.reason]


def _names(device: DeviceInfo) -> List[str]:
    address = (device.pci_bus_id or "").replace("00000000:", "")  # the domain, of which few machines have several
    return [device.name, str(device.index), device.uuid or "", address]
