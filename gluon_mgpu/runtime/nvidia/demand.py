"""A request for GPUs (free, with a minimum of memory), and why a GPU does not satisfy it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Optional, Tuple, Union

from ...checks import is_whole, short
from ...errors import DeviceError
from ..units import format_bytes
from .visible import CudaDevice

LEAST_UTILIZATION = 10  # percent: a desktop's windows stay below it
_IDLE_BYTES = 512 * 2**20  # a desktop's windows and the driver use less; a CUDA context with its first arrays uses more
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True)
class Demand:
    """A request for GPUs.

    Attributes
    ----------
    spec : str
        The specification, for messages: `'gpu:free*2'`.
    numbers : tuple of int, or None
        GPUs that must all satisfy it, in this order: they were listed one by one. None for any.
    count : int or None
        The number of GPUs, the most free first; None takes all that satisfy the request.
    free : bool
        Whether no other process may use them.
    min_free_bytes : int
        The least free memory on each.
    may_be_none : bool
        Whether no GPU also satisfies it.
    """

    spec: str
    numbers: Optional[Tuple[int, ...]] = None
    count: Optional[int] = None
    free: bool = True
    min_free_bytes: int = 0
    may_be_none: bool = False

    @property
    def fewest(self) -> int:
        """The least number of GPUs that must satisfy it."""
        if self.may_be_none:
            return 0
        return self.count or 1 if self.numbers is None else len(self.numbers)

    def __str__(self) -> str:
        which = f"{'free ' if self.free else ''}GPU{'s' if self.fewest > 1 else ''}"
        memory = f" with {format_bytes(self.min_free_bytes)} of free memory" if self.min_free_bytes else ""
        return f"{self.fewest if self.fewest > 1 else 'a'} {which}{memory}"


def why_not_free(device: CudaDevice, demand: Demand) -> str:
    """Return why a GPU does not satisfy a request, "" if it does.

    A GPU is free if no other process computes on it and its utilization is below 10 %. Some containers hide processes of others,
    so used memory counts as well: at most half a GiB, or, with `min_free_bytes`, any amount that leaves this much free. Other
    values that the driver does not report are ignored.

    Examples
    --------
    >>> from gluon_mgpu.runtime.nvidia.nvml import Gpu, GpuProcess
    >>> busy = Gpu(0, free_bytes=3 * 2**30, total_bytes=16 * 2**30, processes=(GpuProcess(17, "python", None),))
    >>> why_not_free(CudaDevice(0, busy), Demand("gpu:free"))
    'process 17 (python) computes there'
    >>> why_not_free(CudaDevice(0, busy), Demand("gpu:0", free=False, min_free_bytes=4 * 2**30))
    '3.0 GiB of 16.0 GiB are free'
    """
    if device.gpu.trouble:
        return device.gpu.trouble
    if demand.free:
        others = [one for one in device.gpu.processes or () if one.pid != os.getpid()]
        if others:
            program = os.path.basename(others[0].name.split(" ")[0])  # without its folder and its arguments
            return f"process {others[0].pid}{f' ({program})' if program else ''} computes there"
        if device.gpu.utilization is not None and device.gpu.utilization >= LEAST_UTILIZATION:
            return f"it is {device.gpu.utilization} % busy"
    total, left = device.gpu.total_bytes, device.gpu.free_bytes
    if left is None:
        return "the driver does not report its free memory" if demand.min_free_bytes else ""
    memory = f"{format_bytes(left)}{f' of {format_bytes(total)}' if total else ''} are free"
    if demand.min_free_bytes:
        return memory if left < demand.min_free_bytes else ""
    mine = sum(one.used_bytes or 0 for one in device.gpu.processes or () if one.pid == os.getpid())
    used = device.gpu.used_bytes
    if demand.free and used and used - mine > _IDLE_BYTES:
        return f"{format_bytes(used)} are in use, {memory}"
    return ""


def num_bytes(size: Union[None, int, str]) -> int:
    """Return a size such as 2**33 or "8GiB" in bytes, 0 for None."""
    if size is None:
        return 0
    if is_whole(size) and 0 < size < 2**63:
        return int(size)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", size.strip().lower()) if isinstance(size, str) else None
    found = float(match.group(1)) * 2 ** _UNITS[match.group(2)] if match else 0.0
    if not 1 <= found < 2**63:
        raise DeviceError(
            f"use_devices: got min_free_memory={short(size)}; expected a number of bytes, or '8GiB'. Leave it out for any."
        )
    return int(found)
