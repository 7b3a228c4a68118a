"""Which GPUs to take of those that are free, and waiting until there are enough."""

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
    """Return the GPUs of this machine that meet a demand, none only if it allows that.

    Parameters
    ----------
    demand : Demand
    wait_s : float, seconds
    tell : callable, optional
        Gets lines about what is waited for and what was taken; by default they are logged.

    Raises
    ------
    DeviceError
        There are too few, or the driver does not say.
    """
    try:
        with Nvml() as nvml:

            def look() -> Sequence[CudaDevice]:
                return mxnet_gpus.seen_by_cuda(nvml.read(links=False))

            return wait_for(look, demand, runs=mxnet_gpus.why_not, wait_s=wait_s, tell=tell or _log)
    except (MissingExtraError, DriverError) as error:
        raise DeviceError(
            f"use_devices: got {demand.spec!r}; expected the driver's word on its GPUs, which it does not give: {error}"
        ) from error


def _log(line: str) -> None:
    """Log that somebody waits, or gets no GPU, so that it is seen, and what was taken for those who look."""
    level = logging.INFO if " takes gpu" in line else logging.WARNING
    environment.logger.log(level, "use_devices: %s", line)


def most_free_first(devices: Sequence[CudaDevice]) -> List[CudaDevice]:
    """Return devices by the memory that is free on them, the largest first, and by number where it is the same."""
    return sorted(devices, key=lambda device: (-(device.free_bytes or 0), device.number))


def select(
    devices: Sequence[CudaDevice], demand: Demand, *, runs: Callable[[int], str]
) -> Tuple[List[CudaDevice], Dict[int, str]]:
    """Return the GPUs that meet a demand, taken for this process if they are to be free, and why the others do not.

    Parameters
    ----------
    devices : sequence of CudaDevice
        What CUDA sees, as the driver has just described it.
    demand : Demand
    runs : callable
        Takes a GPU's number, and returns why MXNet cannot run there, "" where it can. Asking takes memory there that a process
        never gives back: so it is called only when there are enough GPUs, and only for these.

    Returns
    -------
    list of CudaDevice
        As many as the demand says; none, and none is taken, where there are fewer.
    dict of int to str
        The reason of each that was looked at and left.
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
    """Return the GPUs that meet a demand, why the others do not, and the UUIDs that were claimed here."""
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
    for uuid in fresh:  # somebody else may want it while this process waits
        locks.release(uuid)
    return [], {**reasons, **{device.number: "it would do" for device in found}}, []


def wait_for(
    look: Callable[[], Sequence[CudaDevice]],
    demand: Demand,
    *,
    runs: Callable[[int], str],
    wait_s: float,
    tell: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> List[CudaDevice]:
    """Return the GPUs that meet a demand, which this process has taken; wait for them, asking every few seconds.

    Parameters
    ----------
    look : callable
        Returns what CUDA sees, as the driver describes it now.
    demand : Demand
    runs : callable
        As for `select`.
    wait_s : float, seconds
        0 asks once.
    tell : callable
        Gets a line when the waiting begins and when what it waits for changes, each minute at most, and one about what was taken.

    Raises
    ------
    DeviceError
        They did not come in time. It says what each GPU lacks.
    """
    begin, told_at, told = now(), -_TELL_EVERY_S, ""
    while True:
        devices = look()
        found, reasons = select(devices, demand, runs=runs)
        if found or demand.may_be_none:
            tell(_taken(found, reasons, demand))
            return found
        waited = now() - begin
        lacks = describe(reasons)
        if waited >= wait_s or not devices:
            raise DeviceError(_too_few(demand, reasons, waited, wait_s))
        if lacks != told and waited - told_at >= _TELL_EVERY_S:
            tell(f"waiting for {demand}, {waited:.0f} s of {wait_s:g}: {lacks}. Ctrl-C ends it.")
            told_at, told = waited, lacks
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
    advice = f"{to_do} or name GPUs that you may use all the same"
    return f"use_devices: got {demand.spec!r}{after}; expected {demand}: {lacks}. {advice}."
