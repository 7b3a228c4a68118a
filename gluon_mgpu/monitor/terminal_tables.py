"""A sample as tables on a terminal."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .sample import GpuSample, Sample


def view(sample: Sample, *, pid: int = 0, why_no_gpu: str = "") -> Any:
    """Return a sample for rich to print: the GPUs and the host.

    Parameters
    ----------
    sample : Sample
    pid : int
        Of the monitored process; 0 for none.
    why_no_gpu : str
        Why no GPU can be read.
    """
    parts: List[Any] = [_gpus(sample.gpus)] if sample.gpus else []
    parts += [f"[dim]no GPU: {escape(why_no_gpu)}[/dim]"] if why_no_gpu else []
    return Group(*parts, _host(sample, pid))


def _gpus(gpus: Sequence[GpuSample]) -> Table:
    table = Table("GPU", "memory GiB", "load", "°C", "W", "slowed down by")
    for gpu in gpus:
        name = escape(f"{gpu.name} {gpu.description}")
        if gpu.trouble:
            table.add_row(name, f"[red]{escape(gpu.trouble)}[/]")
            continue
        memory = f"{_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)}"
        slowed = f"[yellow]{escape(', '.join(gpu.throttled))}[/]" if gpu.throttled else "-"
        table.add_row(name, memory, _bar(gpu.load), _rounded(gpu.temperature_c), _rounded(gpu.power_w), slowed)
    return table


def _host(sample: Sample, pid: int) -> Table:
    host = sample.host
    table = Table("host", "memory GiB", "cores")
    memory = f"{_gib(host.total_bytes - host.available_bytes)} of {_gib(host.total_bytes)}"
    table.add_row("machine", memory, f"{host.machine_cores:.2f} of {host.num_cores}")
    if pid:
        children = f", {host.num_children} children {_gib(host.children_bytes)}" if host.num_children else ""
        table.add_row(f"process {pid}", f"{_gib(host.rss_bytes)}{children}", f"{host.cores:.2f}")
    return table


def _bar(load: Optional[float]) -> str:
    if load is None:
        return "?"
    full = round(10 * load)
    return f"[green]{'█' * full}[/][dim]{'·' * (10 - full)}[/] {load:4.0%}"


def _gib(num_bytes: Optional[int]) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**30:.1f}"


def _rounded(value: Optional[float]) -> str:
    return "?" if value is None else f"{value:.0f}"
