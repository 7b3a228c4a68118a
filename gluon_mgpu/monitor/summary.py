"""A run in a few numbers: peak memory, mean load, where the time went, and problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from ..runtime.units import format_bytes
from .diagnosis import diagnose
from .finding import Finding
from .load import mean_loads, mean_spent
from .sample import Sample, mean, memory_of


@dataclass(frozen=True)
class Summary:
    """A monitored run in a few numbers.

    Attributes
    ----------
    seconds : float
    peak_bytes : dict of str to int
        The peak memory of each device that reports it: a GPU's, or of the arrays that Python holds on a CPU context.
    load : dict of str to float
        The mean share of the time in which each device computed.
    imbalance : float
        The largest ratio of memory between two devices; 1.0 for one device.
    host_peak_bytes : int
        Resident memory of the process and its children.
    host_cores : float
        Used on average.
    spent : dict of str to float
        Shares of the training thread's time, as in `Sample`.
    findings : tuple of Finding
    """

    seconds: float
    peak_bytes: Dict[str, int]
    load: Dict[str, float]
    imbalance: float
    host_peak_bytes: int
    host_cores: float
    spent: Dict[str, float]
    findings: Tuple[Finding, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.seconds:.0f} s; the process and its children: {format_bytes(self.host_peak_bytes, digits=2)} at most, "
            f"{self.host_cores:.1f} cores"
        ]
        for name in dict.fromkeys([*self.load, *self.peak_bytes]):
            parts = [f"computes {self.load[name]:.0%} of the time"] if name in self.load else []
            parts += [f"{format_bytes(self.peak_bytes[name], digits=2)} at most"] if name in self.peak_bytes else []
            lines.append(f"{name}: {', '.join(parts)}")
        if len(self.peak_bytes) > 1:
            lines.append(f"the device with most memory in use holds {self.imbalance:.2f} times as much as the one with least")
        if self.spent:
            lines.append("the training thread: " + ", ".join(f"{place} {share:.0%}" for place, share in self.spent.items()))
        return "\n".join([*lines, *(f"{one.what}: {one.message}" for one in self.findings)])


def summarise(samples: Sequence[Sample], findings: Sequence[Finding] = ()) -> Summary:
    """Return the summary of samples, with the problems in all of them and earlier findings.

    Parameters
    ----------
    samples : sequence of Sample
    findings : sequence of Finding
        From parts of the run. Each counts once.
    """
    peaks: Dict[str, int] = {}
    ratios: List[float] = [1.0]
    for sample in samples:
        for devices in (sample.gpus, sample.cpus):
            memory = {device.name: memory_of(device) for device in devices}
            known = {name: num_bytes for name, num_bytes in memory.items() if num_bytes is not None}
            peaks.update({name: max(num_bytes, peaks.get(name, 0)) for name, num_bytes in known.items()})
            ratios += [max(known.values()) / min(known.values())] if known and min(known.values()) > 0 else []
    weights = [sample.over_s for sample in samples]
    return Summary(
        seconds=sum(weights),
        peak_bytes=peaks,
        load=mean_loads(samples),
        imbalance=max(ratios),
        host_peak_bytes=max((sample.host.rss_bytes + sample.host.children_bytes for sample in samples), default=0),
        host_cores=mean([sample.host.cores for sample in samples], weights),
        spent=mean_spent(samples)[0],
        findings=distinct([*findings, *diagnose(samples)]),
    )


def distinct(findings: Sequence[Finding]) -> Tuple[Finding, ...]:
    """Return the last finding of each kind, device and cause."""
    return tuple({(one.what, one.device, one.cause): one for one in findings}.values())
