"""A figure of monitored samples."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ..plots import figure
from .sample import GpuSample, Sample

_GIB = 2**30


def plot_samples(samples: Sequence[Sample]) -> Any:
    """Return a figure over time: the load of the GPUs and the cores in use, and the memory of the GPUs and the process.

    Parameters
    ----------
    samples : sequence of Sample
        In order.
    """
    made = figure(9, 6)
    loads, memory = made.subplots(2, 1, sharex=True)
    seconds = [sample.seconds for sample in samples]
    marker = "o" if len(samples) == 1 else None  # a line needs two points
    for name, points in _lines(samples, lambda gpu: gpu.load).items():
        loads.plot(*zip(*points), label=name, marker=marker)
    cores = [sample.host.cores / sample.host.num_cores for sample in samples]
    loads.plot(seconds, cores, color="gray", linestyle="--", marker=marker, label="process and children, of all cores")
    loads.set(ylabel="load", ylim=(-0.02, 1.05), title="share of the time in which a GPU computes; share of the cores in use")
    for name, points in _lines(samples, lambda gpu: None if gpu.used_bytes is None else gpu.used_bytes / _GIB).items():
        memory.plot(*zip(*points), label=name, marker=marker)
    resident = [(sample.host.rss_bytes + sample.host.children_bytes) / _GIB for sample in samples]
    memory.plot(seconds, resident, color="gray", linestyle="--", marker=marker, label="process and children, resident")
    memory.set(xlabel="seconds", ylabel="GiB", ylim=(0, None), title="memory")
    for axes in (loads, memory):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # next to the axes, where no line is
    made.tight_layout()
    return made


def _lines(samples: Sequence[Sample], value_of: Callable[[GpuSample], Optional[float]]) -> Dict[str, List[Tuple[float, float]]]:
    found: Dict[str, List[Tuple[float, float]]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            value = value_of(gpu)
            if value is not None:
                found.setdefault(gpu.name, []).append((sample.seconds, value))
    return found
