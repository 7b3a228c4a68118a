"""A report as text tables, narrow enough for 80 columns."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Iterator, List, Sequence, Tuple

from ..runtime.fat_binary import version_text
from ..runtime.nvidia.nvml import Gpu, Link
from ..runtime.units import format_bytes
from .gpus import code_for, names_in_mxnet, process_text
from .report import Report

Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and rows of cells."""

    title: str
    columns: Tuple[str, ...]
    rows: Tuple[Row, ...]


def tables_of(report: Report) -> List[Table]:
    """Return a report as tables, the problems last; empty tables are left out."""
    found = [Table("machine and packages", ("what", "value"), tuple(report.here().items()))]
    found += [*_driver_tables(report), *_library_tables(report), *_setting_tables(report)]
    found += [Table("storage", ("what", "folder", "free", "of"), tuple(_place_rows(report)))]
    found += [Table("gradient stores", ("store", "there", "what"), tuple(_store_rows(report)))]
    rows = [(one.what, one.to_do.splitlines()[0], _yes(one.stops_training)) for one in report.findings]
    rows = rows or [("nothing", "nothing", "no")]
    found = [table for table in found if table.rows]
    return [*found, Table("problems", ("what", "what to do", "stops training"), tuple(rows))]


def instructions(report: Report) -> List[str]:
    """Return what to do about problems where that takes several lines: commands, which a narrow column would break."""
    return list(dict.fromkeys(one.to_do for one in report.findings if "\n" in one.to_do))


def _driver_tables(report: Report) -> Iterator[Table]:
    devices = [(one.name, one.description, _yes(one.usable), one.reason or one.note) for one in report.devices]
    yield Table("devices", ("device", "what it is", "can train", "why not"), tuple(devices))
    driver = report.reading.driver
    if driver is None:
        yield Table("NVIDIA driver", ("what", "value"), (("driver", f"not read: {report.reading.why_not}"),))
        return
    yield Table("NVIDIA driver", ("what", "value"), (("version", driver.version), ("CUDA up to", driver.cuda_version or "?")))
    names = names_in_mxnet(report.reading) if report.build.is_for_gpus else {}
    heads = ("GPU", "in MXNet", "what it is", "compute capability", "code for it")
    rows = [(str(gpu.index), names.get(gpu.index, "-"), *_titles(gpu), code_for(gpu, report.build)) for gpu in driver.gpus]
    yield Table("GPUs", heads, tuple(rows))
    yield Table("now on the GPUs", ("GPU", "free", "of", "busy", "heat", "processes"), tuple(map(_load_row, driver.gpus)))
    parts = [(str(gpu.index), part.uuid, part.name, format_bytes(part.total_bytes)) for gpu in driver.gpus for part in gpu.mig]
    if parts:
        yield Table("MIG devices", ("GPU", "uuid", "what it is", "memory"), tuple(parts))
    if driver.links:
        yield Table("links", ("GPUs", "kind", "GB/s each way", "reads the other", "path"), tuple(map(_link_row, driver.links)))


def _library_tables(report: Report) -> Iterator[Table]:
    rows = [(one.name, one.soname, one.version or "?", one.source, _short(one.path)) for one in report.libraries]
    none = [("none", "this MXNet names none" if report.build.library else "MXNet is not installed", "-", "-", "-")]
    yield Table("CUDA libraries", ("what", "needed", "version", "from", "file"), tuple(rows or none))


def _setting_tables(report: Report) -> Iterator[Table]:
    rows = tuple((one.name, one.value, one.source) for one in report.settings)
    yield Table("runtime settings", ("setting", "value", "set by"), rows)
    yield Table("why", ("setting", "reason"), tuple((one.name, one.reason) for one in report.settings))  # 80 columns hold it
    pools = [(str(pool["library"]), str(pool["kind"]), str(pool["threads"])) for pool in report.pools.found]
    none = [("not checked", report.pools.why_not, "-")]
    yield Table("thread pools in this process", ("library", "kind", "threads"), tuple(pools or none))


def _place_rows(report: Report) -> Iterator[Row]:
    for place in report.places:
        yield place.use, place.exists_at, format_bytes(place.free_bytes), format_bytes(place.total_bytes)


def _store_rows(report: Report) -> Iterator[Row]:
    for store in report.stores:
        yield store.name, _yes(store.there), store.what
    horovod = report.horovod
    yield "Horovod", _yes(bool(horovod.version) and not horovod.why_not), horovod.described()


def _titles(gpu: Gpu) -> Tuple[str, str]:
    capability = "?" if gpu.compute_capability is None else version_text(gpu.compute_capability)
    return gpu.name or gpu.trouble or "?", capability


def _load_row(gpu: Gpu) -> Row:
    busy = "?" if gpu.utilization is None else f"{gpu.utilization} %"
    heat = "?" if gpu.temperature_c is None else f"{gpu.temperature_c} C"
    running = [*(gpu.processes or ()), *(process for part in gpu.mig for process in part.processes or ())]
    who = ", ".join(process_text(one.pid, one.name, one.used_bytes) for one in running)
    none = "?" if gpu.processes is None else "none seen"
    return str(gpu.index), format_bytes(gpu.free_bytes), format_bytes(gpu.total_bytes), busy, heat, who or none


def _link_row(link: Link) -> Row:
    kind = f"{link.kind} x{link.num_links}" if link.num_links else link.kind
    speed = "?" if link.bytes_per_s is None else f"{link.bytes_per_s / 1e9:.0f}"
    reads = "?" if link.peer_access is None else _yes(link.peer_access)
    return f"{link.a}-{link.b}", kind, speed, reads, link.path or "-"


def _short(path: str) -> str:
    """Return a path's last three parts, which hold the package of a wheel."""
    return "/".join(path.split(os.sep)[-3:]) or "-"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
