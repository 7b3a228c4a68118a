"""Free GPUs: which to take. Nothing is reserved: two jobs that start at once may choose the same."""

from __future__ import annotations

import logging
from typing import Callable, Dict, List, Sequence, Tuple

from ..errors import DeviceError, MissingExtraError
from ..runtime.environment import logger
from ..runtime.nvidia.demand import Demand, why_not_free
from ..runtime.nvidia.nvml import DriverError, Nvml
from ..runtime.nvidia.visible import CudaDevice
from ..runtime.units import format_bytes
from . import mxnet_gpus


def acquire(demand: Demand) -> List[CudaDevice]:
    """Return the GPUs of this machine that satisfy a demand; [] only if the demand allows it.

    Raises
    ------
    DeviceError
        Too few GPUs satisfy it, or the driver cannot be read.
    """
    try:
        with Nvml() as nvml:
            found, reasons = select(mxnet_gpus.seen_by_cuda(nvml.read()), demand, runs=mxnet_gpus.why_not)
    except (MissingExtraError, DriverError) as error:
        raise DeviceError(f"use_devices: got {demand.spec!r}; expected a driver that reports its GPUs: {error}") from error
    if not found and not demand.may_be_none:
        lacks = describe(reasons) or "MXNet sees none"
        advice = "Try again later, or name GPUs to use them even if they are not free"
        raise DeviceError(f"use_devices: got {demand.spec!r}; expected {demand}: {lacks}. {advice}.")
    rest = f"; not {describe(reasons)}" if reasons else ""
    level = logging.INFO if found else logging.WARNING
    logger.log(level, "use_devices: %s takes %s%s", demand.spec, ", ".join(map(_described, found)) or "the CPU", rest)
    return found


def select(
    devices: Sequence[CudaDevice], demand: Demand, *, runs: Callable[[int], str]
) -> Tuple[List[CudaDevice], Dict[int, str]]:
    """Return the GPUs that satisfy a demand, and why the others do not.

    Parameters
    ----------
    devices : sequence of CudaDevice
        The GPUs that CUDA sees, as the driver has just described them.
    demand : Demand
    runs : callable
        Takes a GPU's number, and returns why MXNet cannot run there, "" if it can. The call takes GPU memory that the process
        never releases. So it is made only when there are enough GPUs, and only for these.

    Returns
    -------
    list of CudaDevice
        The requested number of GPUs; [] if there are fewer.
    dict of int to str
        The reason for each GPU that was checked and rejected.
    """
    broken: Dict[int, str] = {}
    while True:
        found, reasons = _enough([device for device in devices if device.number not in broken], demand)
        failed = {device.number: reason for device in found for reason in [runs(device.number)] if reason}
        broken.update(failed)
        if not failed:
            return found, {**reasons, **broken}


def _enough(devices: Sequence[CudaDevice], demand: Demand) -> Tuple[List[CudaDevice], Dict[int, str]]:
    """Return the GPUs that satisfy a demand, [] if there are too few, and why the others do not."""
    known = {device.number: device for device in devices}
    numbers = tuple(known) if demand.numbers is None else demand.numbers
    reasons = {number: "CUDA does not see it" for number in numbers if number not in known}
    among = [known[number] for number in numbers if number in known]
    if demand.numbers is None:  # the most free first
        among.sort(key=lambda device: (-(device.gpu.free_bytes or 0), device.number))
    found: List[CudaDevice] = []
    for device in among:
        if len(found) == (demand.count or len(numbers)):
            break
        reason = why_not_free(device, demand)
        if reason:
            reasons[device.number] = reason
        else:
            found.append(device)
    if len(found) >= demand.fewest:
        return found, reasons
    return [], {**reasons, **{device.number: "it would do" for device in found}}


def describe(reasons: Dict[int, str]) -> str:
    """Return reasons as a phrase.

    Examples
    --------
    >>> describe({1: "it is 97 % busy", 0: "process 17 computes there"})
    'gpu(0): process 17 computes there; gpu(1): it is 97 % busy'
    """
    return "; ".join(f"gpu({number}): {reasons[number]}" for number in sorted(reasons))


def _described(device: CudaDevice) -> str:
    return f"gpu({device.number}) ({device.gpu.name}, {device.gpu.uuid}, {format_bytes(device.gpu.free_bytes)} free)"
