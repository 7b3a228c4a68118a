"""One sample as plain values, and as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ..errors import DataError

PLACES = ("data", "dispatch", "sync", "devices", "callbacks", "other")


@dataclass(frozen=True)
class LiveArrays:
    """Arrays that Python holds on a device.

    Attributes
    ----------
    num_bytes : int
        Of all of them, including views. Use it to compare devices.
    more : int
        How many more arrays this device has of the kind by which it exceeds the others most, in bytes.
    shape : tuple of int
    dtype : str
        Of that kind.
    """

    num_bytes: int
    more: int = 0
    shape: Tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class GpuSample:
    """A GPU. Unavailable values are None.

    Attributes
    ----------
    name : str
        `gpu(0)` as MXNet names it in the training process, else `GPU 0` by the driver's order.
    description : str
        The maker's name for it.
    total_bytes, used_bytes : int or None
    own_bytes : int or None
        The part of the used memory that belongs to the monitored processes.
    foreign : tuple of (str, int)
        Other processes on it, and their bytes.
    load : float or None
        The share of the last moments in which a kernel ran, 0 to 1.
    temperature_c, power_w, power_limit_w : float or None
    throttled : tuple of str
        Why its clocks are lowered.
    trouble : str
        Why it does not answer.
    held : LiveArrays, optional
    """

    name: str
    description: str = ""
    total_bytes: Optional[int] = None
    used_bytes: Optional[int] = None
    own_bytes: Optional[int] = None
    foreign: Tuple[Tuple[str, int], ...] = ()
    load: Optional[float] = None
    temperature_c: Optional[float] = None
    power_w: Optional[float] = None
    power_limit_w: Optional[float] = None
    throttled: Tuple[str, ...] = ()
    trouble: str = ""
    held: Optional[LiveArrays] = None


@dataclass(frozen=True)
class CpuSample:
    """A CPU context.

    Attributes
    ----------
    name : str
        `cpu(0)`; `cpu(0) of 1234` if several processes are monitored.
    cores : float
        Used by its threads since the previous sample.
    waiting : float
        The mean number of its threads that were ready but had no core.
    num_threads : int
        The number of its threads.
    held : LiveArrays, optional
    """

    name: str
    cores: float
    waiting: float
    num_threads: int
    held: Optional[LiveArrays] = None

    @property
    def load(self) -> float:
        """The share of its threads that computed, 0 to 1."""
        return min(1.0, self.cores / max(1, self.num_threads))


@dataclass(frozen=True)
class HostSample:
    """A process and its children, and the machine.

    Attributes
    ----------
    rss_bytes, children_bytes : int
        Resident memory of the process, and of its children together. Shared pages count in each.
    num_children : int
    cores : float
        Used by all of them since the previous sample.
    main_cores : float
        Used by the main thread of the process.
    machine_cores : float
        Used by all processes of the machine.
    num_cores : int
        Cores that the process may use.
    available_bytes, total_bytes : int
        Memory of the machine.
    """

    rss_bytes: int
    children_bytes: int
    num_children: int
    cores: float
    main_cores: float
    machine_cores: float
    num_cores: int
    available_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Sample:
    """All counters of one moment.

    Attributes
    ----------
    unix_s : float
        The time.
    seconds : float
        Since the first sample.
    over_s : float
        The time over which rates are means.
    step, epoch : int
        The progress of `fit`; 0 if unknown.
    steps_per_s : float
    host : HostSample
    cpus : tuple of CpuSample
    gpus : tuple of GpuSample
    spent : dict of str to float
        The shares of time that the training thread spent in `data` (the next batch), `dispatch` (queueing a step), `sync`
        (waiting for an array that the program reads), `devices` (where `fit` waits, with more queued), `callbacks` and `other`;
        empty if the stack was not sampled.
    where : dict of str to str
        For each of these, its most frequent line.
    """

    unix_s: float
    seconds: float
    over_s: float
    host: HostSample
    cpus: Tuple[CpuSample, ...] = ()
    gpus: Tuple[GpuSample, ...] = ()
    step: int = 0
    epoch: int = 0
    steps_per_s: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)


Device = Union[CpuSample, GpuSample]


def devices_of(sample: Sample) -> List[Device]:
    """Return the devices: the GPUs and the CPU contexts."""
    return [*sample.gpus, *sample.cpus]


def memory_of(device: Device) -> Optional[int]:
    """Return the bytes that a GPU uses, or that Python's arrays hold on a CPU context; None if unavailable."""
    if isinstance(device, GpuSample):
        return device.used_bytes
    return device.held.num_bytes if device.held is not None else None


def to_json(sample: Sample) -> str:
    """Return a sample as one line of JSON."""
    return json.dumps(asdict(sample))


def from_json(line: str) -> Sample:
    """Return the sample of a line.

    Raises
    ------
    DataError
        The line is not a sample.
    """
    try:
        found = json.loads(line)
        return Sample(
            **{
                **found,
                "host": HostSample(**found["host"]),
                "cpus": tuple(CpuSample(**{**one, "held": _held(one)}) for one in found["cpus"]),
                "gpus": tuple(_gpu(one) for one in found["gpus"]),
            }
        )
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"monitor: got the line {line[:60]!r} ({error!r}); expected a line of JSON that gluon-mgpu monitor wrote. "
            "Remove lines that are cut off."
        ) from error


def read_samples(path: Union[str, Path]) -> List[Sample]:
    """Return the samples of a file of lines, such as `monitor.jsonl`.

    Raises
    ------
    DataError
        A line is not a sample.
    OSError
        There is no such file.
    """
    return [from_json(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def joined(first: Sample, second: Sample) -> Sample:
    """Merge two successive samples: memory and temperature are the larger values, rates the means over both times."""
    parts = first.over_s, second.over_s
    spent = {
        place: mean([first.spent.get(place, 0.0), second.spent.get(place, 0.0)], parts)
        for place in dict.fromkeys([*first.spent, *second.spent])
    }
    return replace(
        second,
        over_s=sum(parts),
        steps_per_s=mean([first.steps_per_s, second.steps_per_s], parts),
        host=_joined(first.host, second.host, parts),
        cpus=_paired(first.cpus, second.cpus, parts),
        gpus=_paired(first.gpus, second.gpus, parts),
        spent=spent,
        where={**first.where, **second.where},
    )


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean; 0.0 without values."""
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights)) / total if total else 0.0


_RATES = ("cores", "main_cores", "machine_cores", "waiting", "load", "power_w")
_PEAKS = ("rss_bytes", "children_bytes", "num_children", "used_bytes", "own_bytes", "temperature_c")


def _joined(first: Any, second: Any, parts: Tuple[float, float]) -> Any:
    changed: Dict[str, Any] = {}
    for name in vars(second):
        pair = getattr(first, name), getattr(second, name)
        if None in pair:
            continue
        if name in _RATES:
            changed[name] = mean(pair, parts)
        elif name in _PEAKS:
            changed[name] = max(pair)
    if getattr(first, "held", None) is not None and (second.held is None or first.held.num_bytes > second.held.num_bytes):
        changed["held"] = first.held
    if hasattr(first, "throttled"):
        changed["throttled"] = tuple(dict.fromkeys([*first.throttled, *second.throttled]))
    return replace(second, **changed)


def _paired(firsts: Sequence[Any], seconds: Sequence[Any], parts: Tuple[float, float]) -> Tuple[Any, ...]:
    before = {one.name: one for one in firsts}
    return tuple(_joined(before[one.name], one, parts) if one.name in before else one for one in seconds)


def _held(device: Mapping[str, Any]) -> Optional[LiveArrays]:
    held = device["held"]
    return None if held is None else LiveArrays(**{**held, "shape": tuple(held["shape"])})


def _gpu(found: Mapping[str, Any]) -> GpuSample:
    foreign = tuple((name, num_bytes) for name, num_bytes in found["foreign"])
    return GpuSample(**{**found, "foreign": foreign, "throttled": tuple(found["throttled"]), "held": _held(found)})
