"""GPU counters, read through the NVIDIA driver."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ..errors import MissingExtraError
from ..runtime.nvidia.nvml import DriverError, Gpu, Nvml
from .sample import GpuSample

_OF_WINDOWS = Path("/dev/dxg")  # Windows' subsystem for Linux passes GPUs without a PCI device


class GpuReader:
    """Reads the GPUs. Without a driver it reads none, and `why_not` holds the reason.

    Parameters
    ----------
    device_ids : sequence of int, optional
        Numbers of MXNet's GPU contexts in this process, named `gpu(0)`. None reads all GPUs of the machine, named `GPU 0`.

    Attributes
    ----------
    why_not : str
        Why no GPU can be read, and what to do; "" otherwise.
    """

    def __init__(self, device_ids: Optional[Sequence[int]] = None) -> None:
        self.why_not = ""
        self._device_ids = device_ids
        self._nvml: Optional[Nvml] = None
        if device_ids is not None and not device_ids:
            return
        try:
            self._nvml = Nvml()
        except (MissingExtraError, DriverError) as error:
            self.why_not = str(error) if may_have_gpus() else "this machine has no NVIDIA GPU; the host is shown."

    def read(self, pids: Iterable[int]) -> Tuple[GpuSample, ...]:
        """Return the GPUs; memory of these processes counts as own memory."""
        if self._nvml is None:
            return ()
        own = set(pids)
        gpus = self._nvml.read(links=False).gpus
        if self._device_ids is None:
            return tuple(gpu_sample(gpu, own, f"GPU {gpu.index}") for gpu in gpus)
        seen = visible(gpus, os.environ)
        return tuple(gpu_sample(seen[i], own, f"gpu({i})") for i in self._device_ids if i < len(seen))

    def close(self) -> None:
        """Close the connection to the driver."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None


def may_have_gpus(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether this machine has an NVIDIA GPU on its PCI bus, also without a driver; True if that cannot be read."""
    try:
        vendors = [(device / "vendor").read_text().strip() for device in devices.iterdir()]
        kinds = [(device / "class").read_text().strip() for device in devices.iterdir()]
    except OSError:
        return True
    if _OF_WINDOWS.exists():
        return True
    return any(vendor == "0x10de" and kind.startswith("0x03") for vendor, kind in zip(vendors, kinds)) or not vendors


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> List[Gpu]:
    """Return the GPUs that CUDA shows a process with this environment, in CUDA's order if all are of the same model.

    Source: NVIDIA's CUDA C++ Programming Guide, "CUDA Environment Variables". CUDA stops at the first unknown name.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(gpus)
    by_index: Dict[str, Gpu] = {str(gpu.index): gpu for gpu in gpus}
    found = []
    for name in (word.strip() for word in named.split(",")):
        gpu = by_index.get(name) or next((one for one in gpus if name.startswith("GPU-") and one.uuid.startswith(name)), None)
        if gpu is None:
            break
        found.append(gpu)
    return found


def gpu_sample(gpu: Gpu, own: Iterable[int], name: str) -> GpuSample:
    """Return a GPU's counters; `own` are the monitored processes."""
    own = set(own)
    sample = GpuSample(
        name,
        gpu.name,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.used_bytes,
        load=None if gpu.utilization is None else gpu.utilization / 100,
        temperature_c=gpu.temperature_c,
        power_w=gpu.power_w,
        power_limit_w=gpu.power_limit_w,
        throttled=gpu.throttle_reasons or (),
        trouble=gpu.trouble,
    )
    processes = [one for one in gpu.processes or () if one.used_bytes is not None]
    foreign = tuple((f"{one.name or 'process'} ({one.pid})", one.used_bytes or 0) for one in processes if one.pid not in own)
    own_bytes = sum(one.used_bytes or 0 for one in processes if one.pid in own) if own and processes else None
    return replace(sample, own_bytes=own_bytes, foreign=foreign)
