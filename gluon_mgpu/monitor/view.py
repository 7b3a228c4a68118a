"""A sample as tables on a terminal."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .finding import Finding, format_number
from .sample import CpuSample, GpuSample, Sample

_SHOWN = 2  # processes of a GPU


def view(sample: Sample, findings: Sequence[Finding] = (), *, pid: int = 0, why_no_gpu: str = "") -> Any:
    """Return a sample for rich to print: GPUs, CPU contexts, the host, and problems.

    Parameters
    ----------
    sample : Sample
    findings : sequence of Finding
    pid : int
        Of the monitored process; 0 for none.
    why_no_gpu : str
        Why no GPU can be read.
    """
    parts: List[Any] = [_gpus(sample.gpus)] if sample.gpus else []
    parts += [f"[dim]no GPU: {escape(why_no_gpu)}[/dim]"] if why_no_gpu else []
    parts += [_contexts(sample.cpus)] if sample.cpus else []
    parts.append(_host(sample, pid))
    parts += [f"[bold yellow]{escape(one.what)}[/]: {escape(one.message)}" for one in findings]
    return Group(*parts)


def _gpus(gpus: Sequence[GpuSample]) -> Table:
    table = _table("GPU", "memory GiB", "load", "°C", "W", "slowed down by", "processes")
    for gpu in gpus:
        power = f"{format_number(gpu.power_w)} of {format_number(gpu.power_limit_w)}"
        memory = f"{_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)}"
        name = f"{gpu.name} {gpu.description}"
        if gpu.trouble:
            table.add_row(escape(name), f"[red]{escape(gpu.trouble)}[/]")
            continue
        slowed = f"[yellow]{escape(', '.join(gpu.throttled))}[/]" if gpu.throttled else "-"
        row = [escape(name), memory, _bar(gpu.load), format_number(gpu.temperature_c), power, slowed, escape(_processes(gpu))]
        table.add_row(*row)
    return table


def _processes(gpu: GpuSample) -> str:
    parts = [f"own {_gib(gpu.own_bytes)}"] if gpu.own_bytes else []
    parts += [f"{name} {_gib(num_bytes)}" for name, num_bytes in gpu.foreign[:_SHOWN]]
    parts += [f"{len(gpu.foreign) - _SHOWN} more"] if len(gpu.foreign) > _SHOWN else []
    return ", ".join(parts) or "-"


def _contexts(cpus: Sequence[CpuSample]) -> Table:
    table = _table("context", "load", "cores", "waits for a core", "threads")
    for cpu in cpus:
        table.add_row(escape(cpu.name), _bar(cpu.load), f"{cpu.cores:.2f}", f"{cpu.waiting:.2f}", str(cpu.num_threads))
    return table


def _host(sample: Sample, pid: int) -> Table:
    host = sample.host
    table = _table("host", "memory GiB", "cores")
    memory = f"{_gib(host.total_bytes - host.available_bytes)} of {_gib(host.total_bytes)}"
    table.add_row("machine", memory, f"{host.machine_cores:.2f} of {host.num_cores}")
    if pid:
        cores = f"{host.cores:.2f}, main thread {host.main_cores:.2f}"
        children = f", {host.num_children} children {_gib(host.children_bytes)}" if host.num_children else ""
        table.add_row(f"process {pid}", f"{_gib(host.rss_bytes)}{children}", cores)
    return table


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _bar(load: Optional[float]) -> str:
    if load is None:
        return "?"
    full = round(10 * load)
    return f"[green]{'█' * full}[/][dim]{'·' * (10 - full)}[/] {load:4.0%}"


def _gib(num_bytes: Optional[int]) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**30:.1f}"
