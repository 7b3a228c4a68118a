"""What is asked of GPUs: to be free, and how much memory; and why one does not meet it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Optional, Tuple, Union

from ...checks import is_whole, real_number, short
from ...errors import DeviceError
from ..units import format_bytes
from . import locks
from .visible import CudaDevice

LEAST_UTILIZATION = 10  # percent: a desktop's windows stay below it
_IDLE_BYTES = 512 * 2**20  # a desktop's windows, and what the driver keeps; a CUDA context and its first arrays are more
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True)
class Demand:
    """What is asked of GPUs.

    Attributes
    ----------
    said : str
        How it was asked for, for messages: `'gpu:free:2'`.
    numbers : tuple of int, or None
        Those that come into question; all where None.
    count : int or None
        How many are to be taken, the most free first; None takes all that meet the demand.
    free : bool
        Whether nobody else may use them.
    min_free_bytes : int
        Of memory, on each.
    every : bool
        Whether each of `numbers` has to meet it, in the order given: they were named one by one.
    may_be_none : bool
        Whether it is met by no GPU, too.
    """

    said: str
    numbers: Optional[Tuple[int, ...]] = None
    count: Optional[int] = None
    free: bool = True
    min_free_bytes: int = 0
    every: bool = False
    may_be_none: bool = False

    @property
    def fewest(self) -> int:
        """How many GPUs must meet it."""
        if self.may_be_none:
            return 0
        return len(self.numbers or ()) if self.every else self.count or 1

    def __str__(self) -> str:
        which = f"{'free ' if self.free else ''}GPU{'s' if self.fewest > 1 else ''}"
        memory = f" with {format_bytes(self.min_free_bytes)} of free memory" if self.min_free_bytes else ""
        return f"{self.fewest if self.fewest > 1 else 'a'} {which}{memory}"


def why_not_free(device: CudaDevice, demand: Demand) -> str:
    """Return why a GPU does not meet a demand, "" where it does.

    Free is a GPU on which no other process computes, whose utilization is below 10 %, and which nobody using this package has
    taken. Some containers hide the processes of others, so that memory in use counts, too: half a GiB at most; or, where
    `min_free_bytes` says what is needed, any that leaves so much. What else the driver does not tell hinders nothing.

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
    ours = locks.is_ours(device.uuid)
    if demand.free and not ours:
        others = [one for one in device.processes or () if one.pid != os.getpid()]
        if others:
            return f"process {others[0].pid}{f' ({_program(others[0].name)})' if others[0].name else ''} computes there"
        if device.utilization is not None and device.utilization >= LEAST_UTILIZATION:
            return f"it is {device.utilization} % busy"
    total, left = device.total_bytes, device.free_bytes
    if left is None:
        return "the driver does not tell how much memory is free" if demand.min_free_bytes else ""
    told = f"{format_bytes(left)}{f' of {format_bytes(total)}' if total else ''} are free"
    if demand.min_free_bytes:
        return told if left < demand.min_free_bytes else ""
    mine = sum(one.used_bytes or 0 for one in device.processes or () if one.pid == os.getpid())
    used = device.mig is None and device.gpu.used_bytes
    if demand.free and not ours and used and used - mine > _IDLE_BYTES:
        return f"{format_bytes(used)} are in use, {told}"
    return ""


def _program(name: str) -> str:
    """Return a process's name without its folder and its arguments."""
    return os.path.basename(name.split(" ")[0]) or name


def num_bytes(size: Union[None, int, str]) -> int:
    """Return a size such as 2**33 or "8GiB" in bytes, 0 where there is none."""
    if size is None:
        return 0
    if is_whole(size) and 0 < size < 2**63:
        return int(size)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", size.strip().lower()) if isinstance(size, str) else None
    found = float(match.group(1)) * 2 ** _UNITS[match.group(2)] if match else 0.0
    if not 1 <= found < 2**63:
        raise DeviceError(
            f"use_devices: got min_free_memory={short(size)}; expected a number of bytes, or '8GiB'. Leave it out for any."
        )
    return int(found)


def seconds(wait_s: Optional[float]) -> Optional[float]:
    """Return a time to wait, checked."""
    if wait_s is None:
        return None
    return real_number("use_devices", "wait_s", wait_s, advice="Leave it out to take GPUs as they are.", error=DeviceError)
