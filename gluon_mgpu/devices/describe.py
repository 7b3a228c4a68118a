"""Describes the CPU and every GPU, and why one cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional

from ..runtime import environment
from ..runtime.gpu_builds import advice
from ..runtime.nvidia.driver import Driver
from ..runtime.nvidia.nvml import try_driver
from ..runtime.nvidia.visible import CudaDevice, visible_gpus
from . import mxnet_gpus

_ONE_MIG = "In MIG mode, CUDA shows a process one part of a GPU and no other GPU. Choose another with CUDA_VISIBLE_DEVICES."


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

    With the package nvidia-ml-py (extra `gpu`), each GPU also has its free memory and its identifiers.
    """
    driver, _ = try_driver(links=False)
    gpus = _listed_by_program() if driver is None else _listed_by_driver(driver)
    cpu = DeviceInfo("cpu(0)", _cpu_name(), _memory_bytes("MemTotal"), True, "", free_bytes=_memory_bytes("MemAvailable") or None)
    return [cpu, *gpus]


def _listed_by_program() -> List[DeviceInfo]:
    """Return the GPUs of MXNet, and of nvidia-smi if it is installed."""
    by_driver = mxnet_gpus.nvidia_smi()
    num_gpus = mxnet_gpus.num_gpus()
    found: List[DeviceInfo] = []
    if num_gpus:
        names = by_driver if len(by_driver) == num_gpus else [("NVIDIA GPU", 0)] * num_gpus
        found += [_seen(i, name, memory) for i, (name, memory) in enumerate(names)]
        hidden = by_driver if len(by_driver) > num_gpus else []
    else:
        hidden = by_driver
    if hidden:
        reason = mxnet_gpus.why_hidden(num_gpus, len(by_driver))
        note = "" if mxnet_gpus.is_for_gpus() else advice(None)
        listed = hidden if not num_gpus else [(f"{len(hidden)} GPUs in the driver's list", 0)]
        found += [DeviceInfo("-", name, memory, False, reason, note) for name, memory in listed]
    return found


def _seen(number: int, name: str, memory_bytes: int) -> DeviceInfo:
    """Return a GPU of MXNet's that the driver does not describe."""
    reason = mxnet_gpus.why_not(number)
    note = mxnet_gpus.what_to_do(number) if reason else ""
    return DeviceInfo(f"gpu({number})", name, memory_bytes, not reason, reason, note)


def _listed_by_driver(driver: Driver) -> List[DeviceInfo]:
    """Return the GPUs of MXNet with the driver's descriptions, then the GPUs that MXNet does not see."""
    visible = visible_gpus(driver, cuda_uuids=mxnet_gpus.cuda_uuids())
    num_gpus = mxnet_gpus.num_gpus()
    found: List[DeviceInfo] = []
    shown = visible.devices if len(visible.devices) == num_gpus else ()
    if num_gpus and not shown:
        found = [_seen(i, "NVIDIA GPU", 0) for i in range(num_gpus)]
    for device in shown:
        reason = mxnet_gpus.why_not(device.number)
        note = mxnet_gpus.what_to_do(device.number) if reason else visible.doubt
        found.append(_info(f"gpu({device.number})", device, reason, note))
    seen = {device.uuid for device in shown}
    hidden = mxnet_gpus.why_hidden(num_gpus, len(driver.gpus))
    for gpu in driver.gpus:
        note = "" if gpu.trouble or mxnet_gpus.is_for_gpus() else advice(gpu.compute_capability, driver.version)
        for part in gpu.mig or (None,):
            device = CudaDevice(-1, gpu, part)
            if device.uuid not in seen:
                found.append(_info("-", device, gpu.trouble or (_ONE_MIG if part and num_gpus else hidden), note))
    return found


def _info(name: str, device: CudaDevice, reason: str, note: str = "") -> DeviceInfo:
    return DeviceInfo(
        name,
        device.name or "NVIDIA GPU",
        device.total_bytes or 0,
        not reason,
        reason,
        note,
        device.free_bytes,
        device.gpu.index,
        device.uuid or None,
        device.gpu.pci_bus_id or None,
    )


def _cpu_name() -> str:
    name = _proc_values("/proc/cpuinfo").get("model name", "CPU")
    return f"{name}, {environment.num_cores()} cores"


def _memory_bytes(which: str) -> int:
    kilobytes = _proc_values("/proc/meminfo").get(which, "0 kB").split()[0]
    return int(kilobytes) * 1024


def _proc_values(path: str) -> Dict[str, str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            pairs = (line.partition(":") for line in file)
            return {key.strip(): value.strip() for key, _, value in pairs}
    except OSError:
        return {}
