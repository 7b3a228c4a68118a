"""Which GPU of the driver's list is MXNet's gpu(i), from CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER, or CUDA itself."""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from .driver import Driver, Gpu, GpuProcess, MigDevice


@dataclass(frozen=True)
class CudaDevice:
    """A device as CUDA, and so MXNet, numbers it: `gpu(number)`.

    Attributes
    ----------
    number : int
    gpu : Gpu
    mig : MigDevice or None
        Its part of the GPU, in MIG mode.
    """

    number: int
    gpu: Gpu
    mig: Optional[MigDevice] = None

    @property
    def uuid(self) -> str:
        """`GPU-...` or `MIG-...`, by which `CUDA_VISIBLE_DEVICES` can name it."""
        return self.mig.uuid if self.mig else self.gpu.uuid

    @property
    def name(self) -> str:
        """The manufacturer's name."""
        return self.mig.name if self.mig else self.gpu.name

    @property
    def total_bytes(self) -> Optional[int]:
        """Its memory."""
        return self.mig.total_bytes if self.mig else self.gpu.total_bytes

    @property
    def free_bytes(self) -> Optional[int]:
        """Its free memory."""
        return self.mig.free_bytes if self.mig else self.gpu.free_bytes

    @property
    def utilization(self) -> Optional[int]:
        """Percent of the last sampling period in which a kernel ran; None for a part of a GPU."""
        return None if self.mig else self.gpu.utilization

    @property
    def processes(self) -> Optional[Tuple[GpuProcess, ...]]:
        """The processes that compute on it, None if the driver does not report them."""
        return self.mig.processes if self.mig else self.gpu.processes


@dataclass(frozen=True)
class Visible:
    """The driver's GPUs that CUDA sees.

    Attributes
    ----------
    devices : tuple of CudaDevice
        In the order of their numbers.
    doubt : str
        Why the numbers may differ, and what to do; "" if they are certain.
    """

    devices: Tuple[CudaDevice, ...]
    doubt: str = ""


def visible_gpus(
    driver: Driver, environ: Optional[Mapping[str, str]] = None, *, cuda_uuids: Optional[Sequence[str]] = None
) -> Visible:
    """Return the devices that CUDA sees, with its numbers.

    ```
    driver, by PCI address    CUDA_VISIBLE_DEVICES=3,GPU-.. or 3,1    MXNet
    0  1  2  3            ──►  chosen, in the order of the list   ──►  gpu(0) is 3, gpu(1) is 1
    ```

    Parameters
    ----------
    driver : Driver
    environ : mapping of str to str, optional
        The source of `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`; this process's environment by default.
    cuda_uuids : sequence of str, optional
        The result of `ask_cuda`; the environment is then not used.

    Source: CUDA Programming Guide, "CUDA Environment Variables".
    """
    environ = os.environ if environ is None else environ
    by_cuda = None if cuda_uuids is None else _by_uuid(driver, cuda_uuids)
    if by_cuda is not None:
        return Visible(tuple(CudaDevice(i, gpu, mig) for i, (gpu, mig) in enumerate(by_cuda)))
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    pairs = _only_one_mig(parse_visible(variable, driver.gpus))
    by_number = variable is None or not variable.lstrip().startswith(("GPU-", "MIG-"))
    return Visible(
        tuple(CudaDevice(i, gpu, mig) for i, (gpu, mig) in enumerate(pairs)),
        _doubt(driver.gpus, environ) if by_number and pairs else "",
    )


def parse_visible(variable: Optional[str], gpus: Sequence[Gpu]) -> List[Tuple[Gpu, Optional[MigDevice]]]:
    """Return the devices that `CUDA_VISIBLE_DEVICES` names among GPUs in CUDA's order.

    The first entry decides whether all are numbers, or names that begin with `GPU-` or `MIG-`. An entry of another kind, or
    without a device, ends the list: usually -1. Characters after a number's digits are ignored. A UUID may be abbreviated if only
    one GPU begins with it. CUDA sees no device at all if one is named twice, and at most one MIG device.

    Parameters
    ----------
    variable : str or None
        Its value; None if it is not set, which shows all devices.
    gpus : sequence of Gpu

    Examples
    --------
    >>> gpus = [Gpu(i, uuid=f"GPU-{i}f{i}") for i in range(4)]
    >>> named = lambda variable: [gpu.index for gpu, _ in parse_visible(variable, gpus)]
    >>> named(None), named(""), named("2,1"), named("0,2,-1,1"), named("3,9,0"), named("1,1")
    ([0, 1, 2, 3], [], [2, 1], [0, 2], [3], [])
    >>> named("GPU-3,GPU-0f0"), named("GPU-"), named("GPU-3,0")
    ([3, 0], [], [3])
    """
    if variable is None:
        return [(gpu, None) for gpu in gpus]
    entries = variable.split(",")
    find = _find_by_number
    for prefix, by_name in (("GPU-", _find_gpu), ("MIG-", _find_mig)):
        if entries[0].lstrip().startswith(prefix):
            find = by_name
    found: List[Tuple[Gpu, Optional[MigDevice]]] = []
    for entry in entries:
        one = find(entry.strip(), gpus)
        if one is None:
            break
        if one in found:
            return []
        found.append(one)
    return found


def ask_cuda(library: Any = None) -> Optional[List[str]]:
    """Return the UUIDs of CUDA's devices in the order of their numbers, None if CUDA does not report them.

    It starts CUDA in this process, which fixes both variables, but uses no memory on a GPU.

    Parameters
    ----------
    library : ctypes.CDLL, optional
        `libcuda.so.1` by default.

    Source: CUDA Driver API, "Device Management".
    """
    try:
        cuda = library or ctypes.CDLL("libcuda.so.1")
        uuid_of = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid  # the first distinguishes MIG devices
        count, device, found = ctypes.c_int(), ctypes.c_int(), []
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return None
        for i in range(count.value):
            number = (ctypes.c_ubyte * 16)()
            if cuda.cuDeviceGet(ctypes.byref(device), i) or uuid_of(ctypes.byref(number), device):
                return None
            found.append(str(uuid.UUID(bytes=bytes(number))))
    except (OSError, AttributeError):  # no such library, or no such function in it
        return None
    return found


def _by_uuid(driver: Driver, uuids: Sequence[str]) -> Optional[List[Tuple[Gpu, Optional[MigDevice]]]]:
    """Return the driver's devices with these UUIDs, None unless all of them exist."""
    there = {gpu.uuid.partition("-")[2]: (gpu, None) for gpu in driver.gpus if not gpu.mig_enabled}
    parts = {part.uuid.partition("-")[2]: (gpu, part) for gpu in driver.gpus for part in gpu.mig}
    known = {**there, **parts}
    if not all(one in known for one in uuids):
        return None
    return [known[one] for one in uuids]


def _find_by_number(entry: str, gpus: Sequence[Gpu]) -> Optional[Tuple[Gpu, Optional[MigDevice]]]:
    match = re.match(r"\+?([0-9]+)", entry)
    if not match or int(match.group(1)) >= len(gpus):
        return None
    return gpus[int(match.group(1))], None


def _find_gpu(entry: str, gpus: Sequence[Gpu]) -> Optional[Tuple[Gpu, Optional[MigDevice]]]:
    found = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return (found[0], None) if len(found) == 1 else None


def _find_mig(entry: str, gpus: Sequence[Gpu]) -> Optional[Tuple[Gpu, Optional[MigDevice]]]:
    """Return the device named `MIG-<uuid>`, or `MIG-GPU-<uuid>/<GPU instance>/<compute instance>` as drivers before 470 did."""
    for gpu in gpus:
        for part in gpu.mig:
            old = f"MIG-{gpu.uuid}/{part.instance[0]}/{part.instance[1]}" if part.instance else ""
            if entry in (part.uuid, old):
                return gpu, part
    return None


def _only_one_mig(pairs: Sequence[Tuple[Gpu, Optional[MigDevice]]]) -> List[Tuple[Gpu, Optional[MigDevice]]]:
    """Return the devices of these that CUDA uses: if one is in MIG mode, only its first device, and no other GPU.

    Source: NVIDIA Multi-Instance GPU User Guide, "CUDA Device Enumeration".
    """
    for gpu, part in pairs:
        if part or gpu.mig:
            return [(gpu, part or gpu.mig[0])]
    return [(gpu, None) for gpu, _ in pairs if not gpu.mig_enabled]  # in MIG mode without devices yet


def _doubt(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> str:
    """Return why numbers in this environment may mean other GPUs than in `nvidia-smi`, "" if they do not."""
    kinds = sorted({gpu.name for gpu in gpus})
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(kinds) < 2:
        return ""
    return (
        f"CUDA numbers the fastest of {', '.join(kinds)} first, nvidia-smi by PCI address: the numbers may differ. "
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID before the program starts."
    )
