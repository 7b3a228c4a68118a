"""The NVIDIA driver, its GPUs and how they are linked, as plain values of one moment."""

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
        Inside a container it may be the machine's number for it, and name another process here or none.
    name : str
        Its program; empty where the process has gone, is hidden, or may not be looked at.
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
    """A GPU at one moment. What the card or the driver does not tell is None.

    Attributes
    ----------
    index : int
        Its place in the order of PCI addresses, which is that of `nvidia-smi`.
    uuid : str
        `GPU-...`; empty, as the name is, where `trouble` kept it from telling.
    name : str
    pci_bus_id : str
        `00000000:3B:00.0`
    total_bytes, used_bytes, free_bytes : int or None
        Used is what programs have taken; what the driver keeps is neither used nor free.
    utilization : int or None
        Percent of the last moments, a sixth of a second to one second, in which a kernel ran.
    temperature_c : int or None
    power_w, power_limit_w : float or None
        The limit is the one in force.
    throttle_reasons : tuple of str, or None
        Why its clocks are below what they could be, of `THROTTLE_REASONS`.
    compute_capability : tuple of (int, int), or None
    processes : tuple of GpuProcess, or None
        Those that compute. A container may hide those outside it: an empty tuple then does not say that nobody computes.
    mig : tuple of MigDevice
        Empty where MIG mode is off.
    mig_enabled : bool
    trouble : str
        NVML's words where the GPU itself failed: `GPU is lost`.
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
    """The way between two GPUs.

    Attributes
    ----------
    a, b : int
        Their indices, a < b.
    kind : str
        `NVLink` or `PCIe`.
    path : str
        What they have in common on the PCIe side: `through one PCIe switch`; empty where nobody tells.
    num_links : int or None
        NVLinks between them; where they meet in an NVSwitch, those of the GPU that has fewer.
    bytes_per_s : float or None
        What the link is made for, each way, which no transfer reaches.
    peer_access : bool or None
        Whether one can read the other's memory without a detour through the host's.
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
        One of each pair.
    """

    version: str
    cuda_version: str
    gpus: Tuple[Gpu, ...]
    links: Tuple[Link, ...]
