"""Load in samples: throttled GPUs, a device that the others wait for, idle devices, and the causes."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from .finding import Finding, format_number
from .sample import PLACES, Device, GpuSample, Sample, devices_of, mean

_IDLE = 0.6  # a device that computes for less than this share of the time is idle
_UNEVEN = 0.3  # between the loads of two devices
_STARVED = 0.2  # of a thread's time, ready but without a core
_HALF = 0.5  # of the samples, or of a core
# The other `nvml.THROTTLE_REASONS` come from clocks that a user has set.
_HOT = ("temperature", "temperature, by hardware", "hardware slowdown", "power brake")
_POWER = "power limit"

_USE_MONITOR = "Use the callback Monitor in the training program for details."
_WHY_IDLE = {
    "data": "the program waits for the next batch for {share} of the time{at}. Load with workers (DataLoader(num_workers=)), use "
    "prefetch(..., background=True), or make the iterator faster.",
    "dispatch": "the host takes {share} of the time to queue steps{at}, because the steps are too small. Hybridize the network "
    "(static_alloc=True, static_shape=True), and use larger batches or fewer devices.",
    "sync": "the program waits for numbers for {share} of the time{at}. Do not read them in every step: fit and DeviceSums sum "
    "them on the devices.",
    "devices": "the host waits for the devices for {share} of the time, and they wait for each other: for a copy, an all-reduce, "
    "or the slowest device. Use larger batches; gluon-mgpu bench transfer measures the copies.",
    "callbacks": "callbacks take {share} of the time{at}. Make them cheaper, or write in the background "
    "(Checkpoint(background=True)).",
    "other": "the program spends {share} of the time elsewhere{at}, outside loading, steps and waiting.",
}


def throttling(samples: Sequence[Sample]) -> List[Finding]:
    """Return the GPUs whose clocks were lowered in half of the samples or more."""
    found = []
    for name, gpus in _by_name(samples, lambda sample: sample.gpus).items():
        counts = Counter(reason for gpu in gpus for reason in gpu.throttled)
        hot = [reason for reason in _HOT if counts[reason] >= _HALF * len(gpus)]
        if hot:
            message = (
                f"{name} is slowed down by {' and '.join(hot)}, at {format_number(gpus[-1].temperature_c)} °C. Check its fan, "
                "airflow and power supply; the other devices wait for it in every step."
            )
            found.append(Finding("throttled", name, hot[0], message))
        elif counts[_POWER] >= _HALF * len(gpus):
            message = (
                f"{name} is slowed down by its power limit of {format_number(gpus[-1].power_limit_w)} W, which is usual at full "
                "load. If the limit is below the card's default, raise it with nvidia-smi -pl."
            )
            found.append(Finding("throttled", name, _POWER, message))
    return found


def uneven_load(samples: Sequence[Sample]) -> List[Finding]:
    """Return the device for which the others of its kind wait: it computes while they are idle."""
    found = []
    for devices in (_by_name(samples, lambda sample: sample.gpus), _by_name(samples, lambda sample: sample.cpus)):
        loads = {name: load for name, load in mean_loads(samples).items() if name in devices}
        if len(loads) < 2:
            continue
        busiest, idlest = max(loads, key=lambda name: loads[name]), min(loads, key=lambda name: loads[name])
        if loads[busiest] - loads[idlest] >= _UNEVEN:
            cause, why = _why_busier(devices[busiest])
            shares = f"{busiest} computes {loads[busiest]:.0%} of the time; {idlest} computes {loads[idlest]:.0%}"
            message = f"{shares} and waits for it: {why}"
            found.append(Finding("uneven load", busiest, cause, message))
    return found


def _why_busier(devices: Sequence[Device]) -> Tuple[str, str]:
    gpus = [device for device in devices if isinstance(device, GpuSample)]
    slowed = [gpu for gpu in gpus if any(reason in (*_HOT, _POWER) for reason in gpu.throttled)]
    shared = [gpu for gpu in gpus if gpu.foreign and gpu.own_bytes]
    if len(slowed) >= _HALF * len(devices):
        return "throttled", "its clocks are lowered. Cool it, or give it smaller shards: fit(weights='auto')."
    if len(shared) >= _HALF * len(devices):
        return "other process", f"{shared[-1].foreign[0][0]} also runs on it. Stop that process, or use fit(weights='auto')."
    return (
        "larger share",
        "it has more work, such as the loss of all shards, or is slower. Compute losses on their own devices, and divide the "
        "batches with fit(weights='auto').",
    )


def idling(samples: Sequence[Sample]) -> List[Finding]:
    """Return a finding if the devices are idle for a large part of the time, with what the training thread does meanwhile."""
    loads = mean_loads(samples)
    if not loads or max(loads.values()) >= _IDLE:
        return []
    cause, why = _why_idle(samples)
    if not cause:
        return []
    listed = ", ".join(f"{name} {load:.0%}" for name, load in loads.items())
    return [Finding("idle", ", ".join(loads), cause, f"the devices compute little ({listed} of the time): {why}")]


def _why_idle(samples: Sequence[Sample]) -> Tuple[str, str]:
    contexts = _by_name(samples, lambda sample: sample.cpus).values()
    waiting = max((_mean([cpu.waiting / max(1, cpu.num_threads) for cpu in cpus]) for cpus in contexts), default=0.0)
    if waiting >= _STARVED:
        return _starved(samples, waiting)
    spent, where = mean_spent(samples)
    if not spent:
        return _why_idle_from_outside(samples)
    place = max(spent, key=lambda name: spent[name])
    return place, _WHY_IDLE[place].format(share=f"{spent[place]:.0%}", at=f", at {where[place]}" if where.get(place) else "")


def _starved(samples: Sequence[Sample], waiting: float) -> Tuple[str, str]:
    """Return why threads that are ready have no core."""
    hosts = [sample.host for sample in samples]
    others = _mean([host.machine_cores - host.cores for host in hosts])
    lack = (
        f"their threads are ready and wait for a core {waiting:.0%} of the time; this process may use {hosts[-1].num_cores}, and "
    )
    if others >= _HALF:
        return (
            "other processes",
            f"{lack}other processes take {others:.1f}. Find them with top; stop them, or bind this process to its own cores.",
        )
    own = _mean([host.cores for host in hosts])
    return "too many threads", f"{lack}this process and its children take {own:.1f}. Use fewer contexts or data workers."


def _why_idle_from_outside(samples: Sequence[Sample]) -> Tuple[str, str]:
    """Return a cause from the main thread's CPU time; ("", "") if no monitored process computes."""
    if not any(sample.cpus or any(gpu.own_bytes for gpu in sample.gpus) for sample in samples):
        return "", ""
    main = _mean([sample.host.main_cores for sample in samples])
    if main >= _IDLE:
        return (
            "host",
            f"the main thread takes {main:.0%} of a core: it queues small steps, or makes batches itself. {_USE_MONITOR}",
        )
    return "unknown", f"the main thread computes {main:.0%} of the time and otherwise waits for data or a process. {_USE_MONITOR}"


def lost(sample: Sample) -> List[Finding]:
    """Return the GPUs that do not answer."""
    return [
        Finding("lost", gpu.name, "driver", f"{gpu.name} does not answer: {gpu.trouble} Check dmesg and nvidia-smi.")
        for gpu in sample.gpus
        if gpu.trouble
    ]


def mean_loads(samples: Sequence[Sample]) -> Dict[str, float]:
    """Return the mean load, 0 to 1, of each device that reports one."""
    found: Dict[str, List[Tuple[float, float]]] = {}
    for sample in samples:
        for device in devices_of(sample):
            if device.load is not None:
                found.setdefault(device.name, []).append((device.load, sample.over_s))
    return {name: mean([load for load, _ in pairs], [over_s for _, over_s in pairs]) for name, pairs in found.items()}


def mean_spent(samples: Sequence[Sample]) -> Tuple[Dict[str, float], Dict[str, str]]:
    """Return the mean share of each place, and its most frequent line."""
    observed = [sample for sample in samples if sample.spent]
    weights = [sample.over_s for sample in observed]
    places = [place for place in PLACES if any(place in sample.spent for sample in observed)]
    shares = {place: mean([sample.spent.get(place, 0.0) for sample in observed], weights) for place in places}
    return shares, {place: _commonest(observed, place) for place in places}


def _commonest(samples: Sequence[Sample], place: str) -> str:
    seconds: Dict[str, float] = {}
    for sample in samples:
        line = sample.where.get(place, "")
        seconds[line] = seconds.get(line, 0.0) + sample.spent.get(place, 0.0) * sample.over_s
    return max(seconds, key=lambda line: (bool(line), seconds[line]))


def _by_name(samples: Sequence[Sample], devices: Callable[[Sample], Sequence[Any]]) -> Mapping[str, List[Any]]:
    found: Dict[str, List[Any]] = {}
    for sample in samples:
        for device in devices(sample):
            found.setdefault(device.name, []).append(device)
    return found


def _mean(values: Sequence[float]) -> float:
    return mean(values, [1.0] * len(values))
