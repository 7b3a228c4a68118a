"""Memory in samples: a device that uses more than the others, and why; a device with hardly any memory left."""

from __future__ import annotations

from statistics import median
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

from ..runtime.units import format_bytes
from .finding import Finding
from .sample import Device, GpuSample, LiveArrays, Sample, memory_of

Kind = Tuple[str, str, Tuple[int, ...]]  # context, dtype, shape: as `leaks.live_arrays` counts

LEAST_BYTES = 2**28  # the smallest difference that counts: libraries can take less than this on one device only
_LEAST_SHARE = 0.1  # of the memory of the others
_EXPLAINS = 0.5  # of a difference
_MANY = 8  # arrays of one kind that indicate a list rather than a gathered batch
_FULL = 0.95

_OTHER_PROCESS = "{name} takes {size} there. Stop that process, or leave the device out, for example with gpu:1-3."
_IN_LIST = (
    "Python holds {more} more arrays {kind} there than on the other devices. Something keeps them, such as a list of outputs or "
    "losses. Keep numbers instead, read only occasionally (asscalar), or use DeviceSums."
)
_GATHERED = (
    "Python holds arrays {kind} there and not on the other devices: a batch gathered from all devices. Compute the loss and the "
    "metrics of each shard on its own device: train_batch, or DataParallelModel with DataParallelCriterion."
)
_IN_STEP = (
    "Python's arrays do not explain it, so MXNet allocated it in a step: outputs or losses of all devices that are gathered "
    "there. Compute them on their own devices: train_batch, or DataParallelModel with DataParallelCriterion."
)
_OUTSIDE = (
    "the cause is not visible from another process. It may be outputs or losses that are gathered there, arrays that are kept "
    "there, or a process that the driver does not show. Use the callback Monitor in the training program for the cause."
)


def memory_imbalance(sample: Sample, *, least_bytes: int = LEAST_BYTES) -> List[Finding]:
    """Return the device of each kind that uses more memory than the others.

    The reported cause explains at least half of the difference: another process's memory on the device, or arrays that Python
    holds there, many of one shape (a list) or few (a gathered batch). Otherwise MXNet has allocated the memory in a step and
    keeps it, for example because one device computes all outputs or losses.

    Parameters
    ----------
    sample : Sample
    least_bytes : int
        The smallest difference that counts.
    """
    found = []
    kinds: Tuple[Sequence[Device], ...] = sample.gpus, sample.cpus
    for devices in kinds:
        known = {device: num_bytes for device in devices for num_bytes in [memory_of(device)] if num_bytes is not None}
        if len(known) < 2:
            continue
        device = max(known, key=lambda one: known[one])
        others = [one for one in known if one is not device]
        usual = median(known[one] for one in others)
        excess = known[device] - usual
        if excess >= max(least_bytes, _LEAST_SHARE * usual):
            cause, why = _why_fuller(device, others, excess)
            size, more = format_bytes(known[device]), format_bytes(excess)
            message = f"{device.name} holds {size}, {more} more than the others: {why}"
            found.append(Finding("memory imbalance", device.name, cause, message))
    return found


def _why_fuller(device: Device, others: Sequence[Device], excess: float) -> Tuple[str, str]:
    enough = _EXPLAINS * excess
    if isinstance(device, GpuSample) and _knows_own([device, *others]) and _more(device, others, _foreign_bytes) >= enough:
        name, num_bytes = max(device.foreign, key=lambda pair: pair[1])
        return "other process", _OTHER_PROCESS.format(name=name, size=format_bytes(num_bytes))
    held = device.held
    if held is None:
        return "unknown", _OUTSIDE
    if _more(device, others, _held_bytes) < enough:
        return "gathered in a step", _IN_STEP
    kind = f"{held.dtype} {held.shape}"
    if held.more >= _MANY:
        return "kept in a list", _IN_LIST.format(more=held.more, kind=kind)
    return "gathered", _GATHERED.format(kind=kind)


def _knows_own(devices: Sequence[Device]) -> bool:
    """Return whether the driver knows our process ids: in a container it may use the machine's ids."""
    return any(device.own_bytes for device in devices if isinstance(device, GpuSample))


def _foreign_bytes(device: Device) -> float:
    return float(sum(num_bytes for _, num_bytes in device.foreign)) if isinstance(device, GpuSample) else 0.0


def _held_bytes(device: Device) -> float:
    return float(device.held.num_bytes) if device.held is not None else 0.0


def _more(device: Device, others: Sequence[Device], count: Callable[[Device], float]) -> float:
    return count(device) - median(map(count, others))


def memory_full(sample: Sample) -> List[Finding]:
    """Return the GPUs with hardly any memory left, and the machine if it has hardly any."""
    found = []
    for gpu in sample.gpus:
        if gpu.used_bytes is not None and gpu.total_bytes and gpu.used_bytes > _FULL * gpu.total_bytes:
            message = (
                f"{gpu.name} has {format_bytes(gpu.total_bytes - gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} left. "
                "MXNet's pool keeps freed memory, so more may fit. Otherwise use smaller batches, or micro_steps."
            )
            found.append(Finding("memory full", gpu.name, "device memory", message))
    host = sample.host
    if host.available_bytes < (1 - _FULL) * host.total_bytes:
        message = (
            f"The machine has {format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} left; this process takes "
            f"{format_bytes(host.rss_bytes)}, its {host.num_children} children {format_bytes(host.children_bytes)}. "
            "Check with LeakCheck whether it grows."
        )
        found.append(Finding("memory full", "host", "host memory", message))
    return found


def held_by(counts: Mapping[Kind, int], num_bytes_of: Callable[[Kind], int]) -> Dict[str, LiveArrays]:
    """Return the arrays that Python holds on each device, and the kind by which the device exceeds the others most.

    Parameters
    ----------
    counts : mapping of (context, dtype, shape) to int
        As `leaks.live_arrays` returns.
    num_bytes_of : callable ((context, dtype, shape)) -> int
        Bytes of one such array.
    """
    contexts = list(dict.fromkeys(context for context, _, _ in counts))
    found = {}
    for context in contexts:
        own = {kind: number for kind, number in counts.items() if kind[0] == context}
        others = [other for other in contexts if other != context]
        more = {kind: number - _usual(counts, kind, others) for kind, number in own.items()}
        _, dtype, shape = most = max(more, key=lambda kind: more[kind] * num_bytes_of(kind))
        found[context] = LiveArrays(sum(number * num_bytes_of(kind) for kind, number in own.items()), more[most], shape, dtype)
    return found


def _usual(counts: Mapping[Kind, int], kind: Kind, others: Sequence[str]) -> int:
    _, dtype, shape = kind
    return int(median([counts.get((other, dtype, shape), 0) for other in others])) if others else 0
