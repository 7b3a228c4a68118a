"""Describes the CPU and every GPU, and why one cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional

from ..runtime import environment
from ..runtime.nvidia.nvml import Gpu, try_driver
from ..runtime.nvidia.visible import Visible, visible_gpus
from ..runtime.openmp_threads import read_lines
from . import mxnet_gpus
from .gpu_builds import advice


@dataclass(frozen=True)
class DeviceInfo:
    """The description of a device, and whether MXNet can run on it.

    Attributes
    ----------
    name : str
        `cpu(0)`, `gpu(1)`.
    description : str
        The manufacturer's name for it.
    memory_bytes : int
        Its memory; 0 if unknown.
    usable : bool
    reason : str
        Why it cannot be used; "" if it can.
    note : str
        A caution for a usable device, or what to do about an unusable one; often the same for several devices.
    free_bytes : int or None
        Its free memory; None if unknown. For GPUs, this and all following attributes require the package nvidia-ml-py.
    index : int or None
        Its GPU's number in `nvidia-smi`, by PCI address, which need not be MXNet's.
    uuid : str or None
        Its name in `CUDA_VISIBLE_DEVICES`.
    pci_bus_id : str or None
    """

    name: str
    description: str
    memory_bytes: int
    usable: bool
    reason: str
    note: str = ""
    free_bytes: Optional[int] = None
    index: Optional[int] = None
    uuid: Optional[str] = None
    pci_bus_id: Optional[str] = None


def describe_devices() -> List[DeviceInfo]:
    """Return the devices: the CPU, then every GPU that MXNet or the NVIDIA driver lists.

    Only the package nvidia-ml-py (extra `gpu`) lists GPUs that MXNet does not see, and tells names, memory and identifiers.
    """
    driver, _ = try_driver()
    visible = visible_gpus(driver) if driver else Visible(())
    num_gpus = mxnet_gpus.num_gpus()
    agree = len(visible.devices) == num_gpus
    known: List[Optional[Gpu]] = [device.gpu for device in visible.devices] if agree else [None] * num_gpus
    name = f"{_proc_values('/proc/cpuinfo').get('model name', 'CPU')}, {environment.num_cores()} cores"
    cpu = DeviceInfo("cpu(0)", name, _memory_bytes("MemTotal"), True, "", free_bytes=_memory_bytes("MemAvailable") or None)
    found = [cpu, *(_seen(number, gpu, visible.doubt) for number, gpu in enumerate(known))]
    there, shown = driver.gpus if driver else (), {gpu.uuid for gpu in known if gpu}
    for gpu in there:
        if gpu.uuid not in shown:
            note = "" if gpu.trouble or mxnet_gpus.is_for_gpus() else advice(gpu.compute_capability)
            found.append(_info("-", gpu, gpu.trouble or mxnet_gpus.why_hidden(num_gpus, len(there)), note))
    return found


def _seen(number: int, gpu: Optional[Gpu], doubt: str) -> DeviceInfo:
    """Return a GPU of MXNet's, with the driver's description if it has one."""
    name, reason = f"gpu({number})", mxnet_gpus.why_not(number)
    to_do = mxnet_gpus.what_to_do(number) if reason else ""
    if gpu is None:
        return DeviceInfo(name, "NVIDIA GPU", 0, not reason, reason, to_do)
    return _info(name, gpu, reason, to_do if reason else doubt)


def _info(name: str, gpu: Gpu, reason: str, note: str) -> DeviceInfo:
    names = (gpu.index, gpu.uuid or None, gpu.pci_bus_id or None)
    return DeviceInfo(name, gpu.name or "NVIDIA GPU", gpu.total_bytes or 0, not reason, reason, note, gpu.free_bytes, *names)


def _memory_bytes(which: str) -> int:
    kilobytes = _proc_values("/proc/meminfo").get(which, "0 kB").split()[0]
    return int(kilobytes) * 1024


def _proc_values(path: str) -> Dict[str, str]:
    pairs = (line.partition(":") for line in read_lines(path))
    return {key.strip(): value.strip() for key, _, value in pairs}
