"""Free GPUs: choose, reserve, and wait until there are enough."""

from __future__ import annotations

import logging
import time
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from ..errors import DeviceError, MissingExtraError
from ..runtime import environment
from ..runtime.nvidia import locks
from ..runtime.nvidia.nvml import DriverError, Nvml
from ..runtime.nvidia.request import Demand, why_not_free
from ..runtime.nvidia.visible import CudaDevice
from ..runtime.units import format_bytes
from . import mxnet_gpus

_EVERY_S = 5.0
_TELL_EVERY_S = 60.0


def acquire(demand: Demand, wait_s: float = 0.0, tell: Optional[Callable[[str], None]] = None) -> List[CudaDevice]:
    """Return the GPUs of this machine that satisfy a demand; [] only if the demand allows it.

    Parameters
    ----------
    demand : Demand
    wait_s : float, seconds
    tell : callable, optional
        Gets messages about waiting and about the reserved GPUs; by default they are logged.

    Raises
    ------
    DeviceError
        Too few GPUs satisfy it, or the driver cannot be read.
    """
    try:
        with Nvml() as nvml:

            def read() -> Sequence[CudaDevice]:
                return mxnet_gpus.seen_by_cuda(nvml.read(links=False))

            return wait_for(read, demand, runs=mxnet_gpus.why_not, wait_s=wait_s, tell=tell or _log)
    except (MissingExtraError, DriverError) as error:
        raise DeviceError(
            f"use_devices: got {demand.spec!r}; expected an NVIDIA driver that reports its GPUs: {error}"
        ) from error


def _log(line: str) -> None:
    """Log waiting, or a lack of GPUs, as a warning, and reserved GPUs as information."""
    level = logging.INFO if " takes gpu" in line else logging.WARNING
    environment.logger.log(level, "use_devices: %s", line)


def most_free_first(devices: Sequence[CudaDevice]) -> List[CudaDevice]:
    """Return devices sorted by free memory, the largest first, then by number."""
    return sorted(devices, key=lambda device: (-(device.free_bytes or 0), device.number))


def select(
    devices: Sequence[CudaDevice], demand: Demand, *, runs: Callable[[int], str]
) -> Tuple[List[CudaDevice], Dict[int, str]]:
    """Return the GPUs that satisfy a demand, reserved for this process if they must be free, and why the others do not.

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
        The requested number of GPUs; [], without reservations, if there are fewer.
    dict of int to str
        The reason for each GPU that was checked and rejected.
    """
    broken: Dict[int, str] = {}
    while True:
        with locks.choosing():
            found, reasons, fresh = _take_enough([device for device in devices if device.number not in broken], demand)
        failed = {device.number: reason for device in found for reason in [runs(device.number)] if reason}
        broken.update(failed)
        if not failed:
            return found, {**reasons, **broken}
        for uuid in fresh:
            locks.release(uuid)


def _take_enough(devices: Sequence[CudaDevice], demand: Demand) -> Tuple[List[CudaDevice], Dict[int, str], List[str]]:
    """Return the GPUs that satisfy a demand, why the others do not, and the UUIDs that were claimed here."""
    known = {device.number: device for device in devices}
    numbers = tuple(known) if demand.numbers is None else demand.numbers
    reasons = {number: "CUDA does not see it" for number in numbers if number not in known}
    among = [known[number] for number in numbers if number in known]
    found: List[CudaDevice] = []
    fresh: List[str] = []
    for device in among if demand.every else most_free_first(among):
        if len(found) == (demand.count or len(numbers)):
            break
        ours = locks.is_ours(device.uuid)
        reason = why_not_free(device, demand)
        if not reason and demand.free and not ours:
            reason = locks.claim(device.uuid)
            fresh += [] if reason else [device.uuid]
        if reason:
            reasons[device.number] = reason
        else:
            found.append(device)
    if len(found) >= demand.fewest:
        return found, reasons, fresh
    for uuid in fresh:  # another process may want it while this one waits
        locks.release(uuid)
    return [], {**reasons, **{device.number: "it would do" for device in found}}, []


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
    """Return the GPUs that satisfy a demand, reserved for this process; wait for them, and check every few seconds.

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
        Gets a message when waiting begins, when its reason changes (at most once a minute), and when GPUs are reserved.

    Raises
    ------
    DeviceError
        Too few GPUs became free in time. The error names the reason for each GPU.
    """
    begin, reported_at, reported = now(), -_TELL_EVERY_S, ""
    while True:
        devices = read()
        found, reasons = select(devices, demand, runs=runs)
        if found or demand.may_be_none:
            tell(_taken(found, reasons, demand))
            return found
        waited = now() - begin
        lacks = describe(reasons)
        if waited >= wait_s or not devices:
            raise DeviceError(_too_few(demand, reasons, waited, wait_s))
        if lacks != reported and waited - reported_at >= _TELL_EVERY_S:
            tell(f"waiting for {demand}, {waited:.0f} s of {wait_s:g}: {lacks}. Ctrl-C ends it.")
            reported_at, reported = waited, lacks
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
    each = []
    for device in found:
        memory = f", {format_bytes(device.free_bytes)} free" if device.free_bytes is not None else ""
        each.append(f"gpu({device.number}) ({device.name}, {device.uuid}, {device.gpu.pci_bus_id}{memory})")
    rest = f"; not {describe(reasons)}" if reasons else ""
    return f"{demand.spec} takes {', '.join(each) or 'the CPU'}{rest}"


def _too_few(demand: Demand, reasons: Dict[int, str], waited: float, wait_s: float) -> str:
    after = f" after {waited:.0f} s" if wait_s else ""
    to_do = "Wait longer," if wait_s else "Wait for it with wait_s=600 (--wait-for-gpu 600),"
    lacks = describe(reasons) or "MXNet sees none"
    advice = f"{to_do} or name GPUs to use them even if they are not free"
    return f"use_devices: got {demand.spec!r}{after}; expected {demand}: {lacks}. {advice}."
