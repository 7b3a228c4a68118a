"""Which GPU of the driver's list is MXNet's gpu(i), from CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Tuple

from .nvml import Driver, Gpu


@dataclass(frozen=True)
class CudaDevice:
    """A GPU as CUDA, and so MXNet, numbers it: `gpu(number)`. In MIG mode, CUDA shows a part of it."""

    number: int
    gpu: Gpu


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


def visible_gpus(driver: Driver, environ: Optional[Mapping[str, str]] = None) -> Visible:
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

    Source: CUDA Programming Guide, "CUDA Environment Variables".
    """
    environ = os.environ if environ is None else environ
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    found = parse_visible(variable, driver.gpus)
    by_number = variable is None or not variable.startswith("GPU-")
    doubt = _doubt(driver.gpus, environ) if by_number and found else ""
    return Visible(tuple(CudaDevice(i, gpu) for i, gpu in enumerate(found)), doubt)


def parse_visible(variable: Optional[str], gpus: Sequence[Gpu]) -> List[Gpu]:
    """Return the devices that `CUDA_VISIBLE_DEVICES` names among GPUs in CUDA's order.

    The first entry decides whether all are numbers, or names that begin with `GPU-`. An entry of another kind, or without a
    device, ends the list: usually -1. Characters after a number's digits or a whole UUID are ignored. A UUID may be abbreviated
    if only one GPU begins with it. CUDA sees no device at all if one is named twice. Compared with driver 580 on an H100.

    Parameters
    ----------
    variable : str or None
        Its value; None if it is not set, which shows all devices.
    gpus : sequence of Gpu

    Examples
    --------
    >>> gpus = [Gpu(i, uuid=f"GPU-{i}f{i}") for i in range(4)]
    >>> named = lambda variable: [gpu.index for gpu in parse_visible(variable, gpus)]
    >>> named(None), named(""), named("2,1"), named("0,2,-1,1"), named("3,9,0"), named("1,1")
    ([0, 1, 2, 3], [], [2, 1], [0, 2], [3], [])
    >>> named("GPU-3,GPU-0F0"), named("GPU-"), named("GPU-3,0")
    ([3, 0], [], [3])
    """
    if variable is None:
        return list(gpus)
    entries = variable.split(",")
    find = _find_by_name if entries[0].startswith("GPU-") else _find_by_number
    found: List[Gpu] = []
    for entry in entries:
        one = find(entry, gpus)
        if one is None:
            break
        if one in found:
            return []
        found.append(one)
    return found


def _find_by_number(entry: str, gpus: Sequence[Gpu]) -> Optional[Gpu]:
    match = re.match(r"\s*\+?([0-9]+)", entry)
    return gpus[int(match.group(1))] if match and int(match.group(1)) < len(gpus) else None


def _find_by_name(entry: str, gpus: Sequence[Gpu]) -> Optional[Gpu]:
    if not re.match("GPU-.", entry):
        return None
    found = [gpu for gpu in gpus if gpu.uuid and gpu.uuid.lower().startswith(entry.lower()[: len(gpu.uuid)])]
    return found[0] if len(found) == 1 else None


def _doubt(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> str:
    """Return why numbers in this environment may mean other GPUs than in `nvidia-smi`, "" if they do not."""
    kinds = sorted({gpu.name for gpu in gpus})
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(kinds) < 2:
        return ""
    return (
        f"CUDA numbers the fastest of {', '.join(kinds)} first, nvidia-smi by PCI address: the numbers may differ. "
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID before the program starts."
    )
