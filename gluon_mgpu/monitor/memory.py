"""Memory in samples: a device that is fuller than the others, and why; one that has hardly any left."""

from __future__ import annotations

from statistics import median
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

from ..runtime.units import format_bytes
from .finding import Finding
from .sample import Device, GpuSample, LiveArrays, Sample, memory_of

Kind = Tuple[str, str, Tuple[int, ...]]  # context, dtype, shape: as `leaks.live_arrays` counts

LEAST_BYTES = 2**28  # of difference that is worth a word: libraries take as much on one device and not on another
_LEAST_SHARE = 0.1  # of the memory of the others
_EXPLAINS = 0.5  # of a difference
_MANY = 8  # arrays of one kind: a list, rather than a batch that was put together
_FULL = 0.95

_OTHER_PROCESS = "{name} takes {size} there. End it, or leave the device out (gpu:1-3, say)."
_IN_LIST = (
    "Python holds {more} more arrays {kind} there than elsewhere. Something keeps them, such as a list of outputs or losses: "
    "keep numbers, read now and then (asscalar), or use DeviceSums."
)
_GATHERED = (
    "Python holds arrays {kind} there and not elsewhere: what was put together from all devices. Compute the loss and the "
    "metrics of each shard on its own device: train_batch, or DataParallelModel with DataParallelCriterion."
)
_IN_STEP = (
    "nothing that Python keeps explains it, so MXNet took it in a step: outputs or losses of all devices that are put together "
    "there. Compute them on their own devices: train_batch, or DataParallelModel with DataParallelCriterion."
)
_OUTSIDE = (
    "from outside nobody sees why: outputs or losses that are put together there, arrays that are kept there, or a process that "
    "the driver does not show. The callback Monitor, in the training program, tells them apart."
)


def memory_imbalance(sample: Sample, *, least_bytes: int = LEAST_BYTES) -> List[Finding]:
    """Return the device of each kind that is fuller than the others.

    The cause is whatever explains half of the difference: another process's memory there; arrays that Python holds there, many of
    one shape (a list) or few (a batch put together); else memory that MXNet has taken there in a step and keeps, as it does
    where all outputs or losses are computed on one device.

    Parameters
    ----------
    sample : Sample
    least_bytes : int
        A difference that is worth a word.
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
    """Return whether the driver's process ids are those that we know: in a container they may be the machine's."""
    return any(device.own_bytes for device in devices if isinstance(device, GpuSample))


def _foreign_bytes(device: Device) -> float:
    return float(sum(num_bytes for _, num_bytes in device.foreign)) if isinstance(device, GpuSample) else 0.0


def _held_bytes(device: Device) -> float:
    return float(device.held.num_bytes) if device.held is not None else 0.0


def _more(device: Device, others: Sequence[Device], count: Callable[[Device], float]) -> float:
    return count(device) - median(map(count, others))


def memory_full(sample: Sample) -> List[Finding]:
    """Return what has hardly any memory left: GPUs, and the machine."""
    found = []
    for gpu in sample.gpus:
        if gpu.used_bytes is not None and gpu.total_bytes and gpu.used_bytes > _FULL * gpu.total_bytes:
            message = (
                f"{gpu.name} has {format_bytes(gpu.total_bytes - gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} left. "
                "MXNet's pool keeps what it has freed, so that more may fit; else take smaller batches, or micro_steps."
            )
            found.append(Finding("memory full", gpu.name, "device memory", message))
    host = sample.host
    if host.available_bytes < (1 - _FULL) * host.total_bytes:
        message = (
            f"The machine has {format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} left; this process takes "
            f"{format_bytes(host.rss_bytes)}, its {host.num_children} children {format_bytes(host.children_bytes)}. "
            "LeakCheck tells whether it grows."
        )
        found.append(Finding("memory full", "host", "host memory", message))
    return found


def held_by(counts: Mapping[Kind, int], num_bytes_of: Callable[[Kind], int]) -> Dict[str, LiveArrays]:
    """Return what Python holds on each device, and of which kind it holds most more than the others.

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
