"""Samples: the counters of the GPUs and of the host at one moment, as lines of JSON, and their summary."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from ..errors import DataError
from ..runtime.units import format_bytes


@dataclass(frozen=True)
class GpuSample:
    """A GPU. What the driver does not report is None.

    Attributes
    ----------
    name : str
        `gpu(0)` in a training program; `GPU 0`, the driver's number, from outside.
    description : str
    used_bytes, total_bytes : int, optional
    load : float, optional
        The share of time in which a kernel ran, 0 to 1.
    temperature_c : int, optional
    power_w : float, optional
    throttled : tuple of str
        Why its clocks are lowered.
    trouble : str
        Why it does not answer; "" if it does.
    """

    name: str
    description: str = ""
    used_bytes: Optional[int] = None
    total_bytes: Optional[int] = None
    load: Optional[float] = None
    temperature_c: Optional[int] = None
    power_w: Optional[float] = None
    throttled: Tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True)
class HostSample:
    """A process and its children, and the machine.

    Attributes
    ----------
    rss_bytes, children_bytes : int
        Resident memory of the process, and of its children together; 0 without a process. Shared pages count in each.
    num_children : int
    cores, machine_cores : float
        Used since the previous sample by the process and its children, and by all processes.
    num_cores : int
        Cores of the machine.
    available_bytes, total_bytes : int
        Memory of the machine.
    """

    rss_bytes: int
    children_bytes: int
    num_children: int
    cores: float
    machine_cores: float
    num_cores: int
    available_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Sample:
    """All counters of one moment.

    Attributes
    ----------
    unix_s, seconds : float
        The time, and the time since monitoring began.
    step, epoch : int
        The progress of `fit`; 0 if unknown.
    host : HostSample
    gpus : tuple of GpuSample
    """

    unix_s: float
    seconds: float
    step: int
    epoch: int
    host: HostSample
    gpus: Tuple[GpuSample, ...] = ()


def to_json(sample: Sample) -> str:
    """Return a sample as one line of JSON."""
    return json.dumps(asdict(sample))


def read_samples(path: Union[str, Path]) -> List[Sample]:
    """Return the samples of a file of lines, such as `monitor.jsonl`.

    Raises
    ------
    DataError
        A line is not a sample.
    OSError
        The file does not exist.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [_from_json(line) for line in lines if line.strip()]


def _from_json(line: str) -> Sample:
    try:
        found: Dict[str, Any] = json.loads(line)
        gpus = tuple(GpuSample(**{**one, "throttled": tuple(one["throttled"])}) for one in found["gpus"])
        return Sample(**{**found, "host": HostSample(**found["host"]), "gpus": gpus})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"monitor: got the line {line[:60]!r} ({error!r}); expected a line of JSON that gluon-mgpu monitor wrote. "
            "Remove lines that are cut off."
        ) from error


@dataclass(frozen=True)
class Summary:
    """A monitored run in a few numbers.

    Attributes
    ----------
    seconds : float
    load : dict of str to float
        The mean load of each GPU that reports it.
    peak_bytes : dict of str to int
        The peak memory of each GPU that reports it.
    host_peak_bytes : int
        Resident memory of the process and its children.
    host_cores : float
        Used on average.
    """

    seconds: float
    load: Dict[str, float]
    peak_bytes: Dict[str, int]
    host_peak_bytes: int
    host_cores: float

    def __str__(self) -> str:
        host = format_bytes(self.host_peak_bytes, digits=2)
        lines = [f"{self.seconds:.0f} s; the process and its children: {host} at most, {self.host_cores:.1f} cores"]
        for name in self.peak_bytes:
            load = f"computes {self.load[name]:.0%} of the time, " if name in self.load else ""
            lines.append(f"{name}: {load}{format_bytes(self.peak_bytes[name], digits=2)} at most")
        return "\n".join(lines)


def summarise(samples: Sequence[Sample]) -> Summary:
    """Return the summary of samples, which are in order and at equal intervals."""
    loads: Dict[str, List[float]] = {}
    peaks: Dict[str, int] = {}
    for gpu in (gpu for sample in samples for gpu in sample.gpus):
        if gpu.load is not None:
            loads.setdefault(gpu.name, []).append(gpu.load)
        if gpu.used_bytes is not None:
            peaks[gpu.name] = max(gpu.used_bytes, peaks.get(gpu.name, 0))
    return Summary(
        seconds=samples[-1].seconds if samples else 0.0,
        load={name: mean(values) for name, values in loads.items()},
        peak_bytes=peaks,
        host_peak_bytes=max((sample.host.rss_bytes + sample.host.children_bytes for sample in samples), default=0),
        host_cores=mean(sample.host.cores for sample in samples) if samples else 0.0,
    )
