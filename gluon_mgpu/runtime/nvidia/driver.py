"""The NVIDIA driver, its GPUs and their links, as plain values at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

# Bits of nvmlDeviceGetCurrentClocksEventReasons. An idle GPU, bit 1, is not slowed down. Source: nvml.h.
THROTTLE_REASONS = {
    0x002: "application clocks",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "temperature",
    0x040: "temperature, by hardware",
    0x080: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU.

    Attributes
    ----------
    pid : int
        Inside a container it may be the host's number, which belongs to another process or none here.
    name : str
        Its program; "" if the process has ended, is hidden, or may not be read.
    used_bytes : int or None
        Its memory on the GPU.
    """

    pid: int
    name: str
    used_bytes: Optional[int]


@dataclass(frozen=True)
class MigDevice:
    """A part of a GPU in MIG mode, which CUDA sees as a device.

    Attributes
    ----------
    uuid : str
        `MIG-...`
    name : str
        With its profile: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
    total_bytes, free_bytes : int or None
    processes : tuple of GpuProcess, or None
    instance : tuple of (int, int), or None
        Its GPU instance and compute instance.
    """

    uuid: str
    name: str
    total_bytes: Optional[int]
    free_bytes: Optional[int]
    processes: Optional[Tuple[GpuProcess, ...]] = None
    instance: Optional[Tuple[int, int]] = None


@dataclass(frozen=True)
class Gpu:
    """A GPU at one moment. Values that the card or the driver does not report are None.

    Attributes
    ----------
    index : int
        Its position in the order of PCI addresses, as in `nvidia-smi`.
    uuid : str
        `GPU-...`; "", like the name, if `trouble` prevented reading it.
    name : str
    pci_bus_id : str
        `00000000:3B:00.0`
    total_bytes, used_bytes, free_bytes : int or None
        Used memory belongs to programs; memory of the driver is neither used nor free.
    utilization : int or None
        Percent of the last sampling period, a sixth of a second to one second, in which a kernel ran.
    temperature_c : int or None
    power_w, power_limit_w : float or None
        The limit is the one in force.
    throttle_reasons : tuple of str, or None
        Why its clocks are below their maximum, from `THROTTLE_REASONS`.
    compute_capability : tuple of (int, int), or None
    processes : tuple of GpuProcess, or None
        Processes that compute. A container may hide those outside it, so an empty tuple does not mean that the GPU is idle.
    mig : tuple of MigDevice
        Empty if MIG mode is off.
    mig_enabled : bool
    trouble : str
        NVML's error if the GPU failed: `GPU is lost`.
    """

    index: int
    uuid: str = ""
    name: str = ""
    pci_bus_id: str = ""
    total_bytes: Optional[int] = None
    used_bytes: Optional[int] = None
    free_bytes: Optional[int] = None
    utilization: Optional[int] = None
    temperature_c: Optional[int] = None
    power_w: Optional[float] = None
    power_limit_w: Optional[float] = None
    throttle_reasons: Optional[Tuple[str, ...]] = None
    compute_capability: Optional[Tuple[int, int]] = None
    processes: Optional[Tuple[GpuProcess, ...]] = None
    mig: Tuple[MigDevice, ...] = ()
    mig_enabled: bool = False
    trouble: str = ""


@dataclass(frozen=True)
class Link:
    """The link between two GPUs.

    Attributes
    ----------
    a, b : int
        Their indices, a < b.
    kind : str
        `NVLink` or `PCIe`.
    path : str
        Their PCIe connection: `through one PCIe switch`; "" if unknown.
    num_links : int or None
        NVLinks between them; with an NVSwitch, those of the GPU that has fewer.
    bytes_per_s : float or None
        The nominal bandwidth per direction; transfers are slower.
    peer_access : bool or None
        Whether one can read the other's memory without copying through the host.
    """

    a: int
    b: int
    kind: str
    path: str = ""
    num_links: Optional[int] = None
    bytes_per_s: Optional[float] = None
    peer_access: Optional[bool] = None


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and its GPUs at one moment.

    Attributes
    ----------
    version : str
        `535.104.05`
    cuda_version : str
        The newest CUDA that it can run: `12.2`.
    gpus : tuple of Gpu
    links : tuple of Link
        One per pair.
    """

    version: str
    cuda_version: str
    gpus: Tuple[Gpu, ...]
    links: Tuple[Link, ...]
