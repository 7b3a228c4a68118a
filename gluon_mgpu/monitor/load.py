"""Work in samples: GPUs that are slowed down, a device that the others wait for, devices that do nothing, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from .finding import Finding, format_number
from .sample import PLACES, Device, GpuSample, Sample, devices_of, mean

_IDLE = 0.6  # a device that works less than that of the time is idle
_UNEVEN = 0.3  # between the loads of two devices
_STARVED = 0.2  # of a thread's time, ready and without a core
_HALF = 0.5  # of the samples, or of a core
# The others of `nvml.THROTTLE_REASONS` are how somebody has set the clocks.
_HOT = ("temperature", "temperature, by hardware", "hardware slowdown", "power brake")
_POWER = "power limit"

_TELLS = "The callback Monitor, in the training program, tells more."
_WHY_IDLE = {
    "data": "{share} of the time goes by waiting for the next batch{at}. Load with workers (DataLoader(num_workers=)), by "
    "prefetch(..., background=True), or make what the iterator does cheaper.",
    "dispatch": "the host takes {share} of the time to queue steps{at}: they are too small for it. Hybridize the network "
    "(static_alloc=True, static_shape=True), and take larger batches or fewer devices.",
    "sync": "{share} of the time the program waits for numbers{at}. Read them now and then, not in every step: fit and "
    "DeviceSums add them up on the devices.",
    "devices": "{share} of the time the host waits for them, and each of them for another: for a copy, a sum over devices or "
    "processes, or the slowest device. Take larger batches; gluon-mgpu bench transfer measures the copies.",
    "callbacks": "{share} of the time goes into callbacks{at}. Let them do less, or write in the background "
    "(Checkpoint(background=True)).",
    "other": "{share} of the time the program does something else{at}, outside of loading, steps and waiting.",
}


def throttling(samples: Sequence[Sample]) -> List[Finding]:
    """Return the GPUs whose clocks were lowered in half of the samples or more."""
    found = []
    for name, gpus in _by_name(samples, lambda sample: sample.gpus).items():
        counts = Counter(reason for gpu in gpus for reason in gpu.throttled)
        hot = [reason for reason in _HOT if counts[reason] >= _HALF * len(gpus)]
        if hot:
            message = (
                f"{name} is slowed down by {' and '.join(hot)}, at {format_number(gpus[-1].temperature_c)} °C. Look at its fan, "
                "the air around it and its power supply; the others wait for it in every step."
            )
            found.append(Finding("throttled", name, hot[0], message))
        elif counts[_POWER] >= _HALF * len(gpus):
            message = (
                f"{name} is slowed down by its power limit of {format_number(gpus[-1].power_limit_w)} W, which is usual at full "
                "load. Where the limit is lower than the card's own, nvidia-smi -pl raises it."
            )
            found.append(Finding("throttled", name, _POWER, message))
    return found


def uneven_load(samples: Sequence[Sample]) -> List[Finding]:
    """Return the device that the others of its kind wait for, where it works and they do not."""
    found = []
    for devices in (_by_name(samples, lambda sample: sample.gpus), _by_name(samples, lambda sample: sample.cpus)):
        loads = {name: load for name, load in mean_loads(samples).items() if name in devices}
        if len(loads) < 2:
            continue
        busiest, idlest = max(loads, key=lambda name: loads[name]), min(loads, key=lambda name: loads[name])
        if loads[busiest] - loads[idlest] >= _UNEVEN:
            cause, why = _why_busier(devices[busiest])
            message = (
                f"{busiest} computes {loads[busiest]:.0%} of the time, {idlest} {loads[idlest]:.0%}, and waits for it: {why}"
            )
            found.append(Finding("uneven load", busiest, cause, message))
    return found


def _why_busier(devices: Sequence[Device]) -> Tuple[str, str]:
    gpus = [device for device in devices if isinstance(device, GpuSample)]
    slowed = [gpu for gpu in gpus if any(reason in (*_HOT, _POWER) for reason in gpu.throttled)]
    shared = [gpu for gpu in gpus if gpu.foreign and gpu.own_bytes]
    if len(slowed) >= _HALF * len(devices):
        return "throttled", "its clocks are lowered. Cool it, or give it less: fit(weights='auto')."
    if len(shared) >= _HALF * len(devices):
        return "other process", f"{shared[-1].foreign[0][0]} is on it, too. End it, or use fit(weights='auto')."
    return (
        "larger share",
        "it has more to do, such as the loss of all shards, or is slower. Compute losses on their own devices, and let "
        "fit(weights='auto') share the batches out.",
    )


def idling(samples: Sequence[Sample]) -> List[Finding]:
    """Return that the devices do nothing for a good part of the time, and what the training thread does meanwhile."""
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
    """Return why threads that could compute have no core."""
    hosts = [sample.host for sample in samples]
    others = _mean([host.machine_cores - host.cores for host in hosts])
    lack = f"their threads are ready and wait for a core {waiting:.0%} of the time; there are {hosts[-1].num_cores}, and "
    if others >= _HALF:
        return (
            "other processes",
            f"{lack}other processes take {others:.1f}. See top; end them, or bind this one to its own cores.",
        )
    own = _mean([host.cores for host in hosts])
    return "too many threads", f"{lack}this process and its children take {own:.1f}. Use fewer contexts or data workers."


def _why_idle_from_outside(samples: Sequence[Sample]) -> Tuple[str, str]:
    """Return what a process's main thread tells; nothing where no process was looked at that computes."""
    if not any(sample.cpus or any(gpu.own_bytes for gpu in sample.gpus) for sample in samples):
        return "", ""
    main = _mean([sample.host.main_cores for sample in samples])
    if main >= _IDLE:
        return "host", f"the main thread takes {main:.0%} of a core: it queues small steps, or makes batches itself. {_TELLS}"
    return "unknown", f"the main thread computes {main:.0%} of the time, and else waits: for data, a disk, a process. {_TELLS}"


def lost(sample: Sample) -> List[Finding]:
    """Return the GPUs that do not answer."""
    return [
        Finding("lost", gpu.name, "driver", f"{gpu.name} does not answer: {gpu.trouble} See dmesg, and nvidia-smi.")
        for gpu in sample.gpus
        if gpu.trouble
    ]


def mean_loads(samples: Sequence[Sample]) -> Dict[str, float]:
    """Return the mean load of each device that tells one, 0 to 1."""
    found: Dict[str, List[Tuple[float, float]]] = {}
    for sample in samples:
        for device in devices_of(sample):
            if device.load is not None:
                found.setdefault(device.name, []).append((device.load, sample.over_s))
    return {name: mean([load for load, _ in pairs], [over_s for _, over_s in pairs]) for name, pairs in found.items()}


def mean_spent(samples: Sequence[Sample]) -> Tuple[Dict[str, float], Dict[str, str]]:
    """Return the mean share of each place, and the line that was commonest there."""
    looked = [sample for sample in samples if sample.spent]
    weights = [sample.over_s for sample in looked]
    places = [place for place in PLACES if any(place in sample.spent for sample in looked)]
    shares = {place: mean([sample.spent.get(place, 0.0) for sample in looked], weights) for place in places}
    return shares, {place: _commonest(looked, place) for place in places}


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
