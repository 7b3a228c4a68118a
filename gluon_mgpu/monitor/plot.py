"""A figure of monitored samples."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ..plots import figure
from .sample import PLACES, Device, Sample, devices_of, memory_of

_COLORS = dict(zip(PLACES, ("tab:orange", "tab:blue", "tab:red", "tab:green", "tab:purple", "tab:gray")))
_LABELS = {
    "data": "next batch",
    "dispatch": "queueing steps",
    "sync": "reading numbers",
    "devices": "waiting for devices",
    "callbacks": "callbacks",
    "other": "other",
}


def plot_samples(samples: Sequence[Sample]) -> Any:
    """Return a figure over time: each device's load and memory, and how the training thread spent its time.

    Parameters
    ----------
    samples : sequence of Sample
        In order.
    """
    made = figure(9, 8)
    loads, memory, spent = made.subplots(3, 1, sharex=True)
    seconds = [sample.seconds for sample in samples]
    for name, values in _lines(samples, lambda device: device.load).items():
        loads.plot(*zip(*values), label=name)
    loads.set(ylabel="load", ylim=(-0.02, 1.05), title="share of the time in which a device computes")
    for name, values in _lines(samples, memory_of).items():
        memory.plot(*zip(*((at, value / 2**30) for at, value in values)), label=name)
    resident = [(sample.host.rss_bytes + sample.host.children_bytes) / 2**30 for sample in samples]
    memory.plot(seconds, resident, color="gray", linestyle="--", label="process and children, resident")
    memory.set(ylabel="GiB", ylim=(0, None), title="memory: of GPUs; of the arrays that Python holds on a CPU context")
    observed = [sample for sample in samples if sample.spent]
    if observed:
        places = [place for place in PLACES if any(sample.spent.get(place) for sample in observed)]
        areas = [[sample.spent.get(place, 0.0) for sample in observed] for place in places]
        colors, labels = [_COLORS[place] for place in places], [_LABELS[place] for place in places]
        spent.stackplot([sample.seconds for sample in observed], areas, labels=labels, colors=colors, alpha=0.8)
    spent.set(xlabel="seconds", ylabel="share", ylim=(0, 1), title="time of the training thread")
    for axes in (loads, memory, spent):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # next to the axes, where no line is
    made.tight_layout()
    return made


def _lines(samples: Sequence[Sample], value_of: Callable[[Device], Optional[float]]) -> Dict[str, List[Tuple[float, float]]]:
    found: Dict[str, List[Tuple[float, float]]] = {}
    for sample in samples:
        for device in devices_of(sample):
            value = value_of(device)
            if value is not None:
                found.setdefault(device.name, []).append((sample.seconds, value))
    return found
