"""Free GPUs: choose, and wait until there are enough. Nothing is reserved: two jobs that start at once may choose the same."""

from __future__ import annotations

import logging
import time
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from ..errors import DeviceError, MissingExtraError
from ..runtime import environment
from ..runtime.nvidia.nvml import DriverError, Nvml
from ..runtime.nvidia.request import Demand, why_not_free
from ..runtime.nvidia.visible import CudaDevice
from ..runtime.units import format_bytes
from . import mxnet_gpus

_EVERY_S = 5.0


def acquire(demand: Demand, wait_s: float = 0.0, tell: Optional[Callable[[str], None]] = None) -> List[CudaDevice]:
    """Return the GPUs of this machine that satisfy a demand; [] only if the demand allows it.

    Parameters
    ----------
    demand : Demand
    wait_s : float, seconds
    tell : callable, optional
        Gets messages about waiting and about the chosen GPUs; by default they are logged.

    Raises
    ------
    DeviceError
        Too few GPUs satisfy it, or the driver cannot be read.
    """
    try:
        with Nvml() as nvml:
            return wait_for(
                lambda: mxnet_gpus.seen_by_cuda(nvml.read()), demand, runs=mxnet_gpus.why_not, wait_s=wait_s, tell=tell or _log
            )
    except (MissingExtraError, DriverError) as error:
        raise DeviceError(f"use_devices: got {demand.spec!r}; expected a driver that reports its GPUs: {error}") from error


def _log(line: str) -> None:
    """Log waiting, or a lack of GPUs, as a warning, and the chosen GPUs as information."""
    level = logging.INFO if " takes gpu" in line else logging.WARNING
    environment.logger.log(level, "use_devices: %s", line)


def most_free_first(devices: Sequence[CudaDevice]) -> List[CudaDevice]:
    """Return devices sorted by free memory, the largest first, then by number."""
    return sorted(devices, key=lambda device: (-(device.gpu.free_bytes or 0), device.number))


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
    found: List[CudaDevice] = []
    for device in among if demand.every else most_free_first(among):
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


def wait_for(
    read: Callable[[], Sequence[CudaDevice]],
    demand: Demand,
    *,
    runs: Callable[[int], str],
    wait_s: float,
    tell: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> List[CudaDevice]:
    """Return the GPUs that satisfy a demand; wait for them, and check every few seconds.

    Parameters
    ----------
    read : callable
        Returns the GPUs that CUDA sees, with the driver's current description.
    demand : Demand
    runs : callable
        As for `select`.
    wait_s : float, seconds
        0 checks once.
    tell : callable
        Gets a message when waiting begins, and when GPUs are chosen.

    Raises
    ------
    DeviceError
        Too few GPUs became free in time. The error names the reason for each GPU.
    """
    begin, reported = now(), False
    while True:
        devices = read()
        found, reasons = select(devices, demand, runs=runs)
        if found or demand.may_be_none:
            tell(_taken(found, reasons, demand))
            return found
        waited = now() - begin
        if waited >= wait_s or not devices:
            raise DeviceError(_too_few(demand, reasons, waited, wait_s))
        if not reported:
            tell(f"waiting for {demand} for at most {wait_s:g} s: {describe(reasons)}. Ctrl-C ends it.")
            reported = True
        sleep(min(_EVERY_S, max(0.0, wait_s - waited)))


def describe(reasons: Dict[int, str]) -> str:
    """Return reasons as a phrase.

    Examples
    --------
    >>> describe({1: "it is 97 % busy", 0: "process 17 computes there"})
    'gpu(0): process 17 computes there; gpu(1): it is 97 % busy'
    """
    return "; ".join(f"gpu({number}): {reasons[number]}" for number in sorted(reasons))


def _taken(found: Sequence[CudaDevice], reasons: Dict[int, str], demand: Demand) -> str:
    each = [
        f"gpu({device.number}) ({device.gpu.name}, {device.gpu.uuid}, {format_bytes(device.gpu.free_bytes)} free)"
        for device in found
    ]
    rest = f"; not {describe(reasons)}" if reasons else ""
    return f"{demand.spec} takes {', '.join(each) or 'the CPU'}{rest}"


def _too_few(demand: Demand, reasons: Dict[int, str], waited: float, wait_s: float) -> str:
    after = f" after {waited:.0f} s" if wait_s else ""
    lacks = describe(reasons) or "MXNet sees none"
    advice = "Wait for it with wait_s=600 (--wait-for-gpu 600), or name GPUs to use them even if they are not free"
    return f"use_devices: got {demand.spec!r}{after}; expected {demand}: {lacks}. {advice}."
