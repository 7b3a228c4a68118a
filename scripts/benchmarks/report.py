"""Medians and ratios of the rounds, with their spread, as tables, JSON and the data of plots."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from compare import Row
from gluon_mgpu.devices import describe_devices
from gluon_mgpu.runtime import environment
from gluon_mgpu.version import __version__

REFERENCE = "ours"
_NOTHING = "-"

Table = Tuple[str, List[str], List[List[str]]]
Point = Tuple[float, float, float, float]  # x, median, low, high
Panels = Dict[str, Dict[str, List[Point]]]
Ranges = Dict[str, Dict[str, Tuple[float, float, float]]]  # group -> contender -> median, low, high


@dataclass(frozen=True)
class Spread:
    """The median, the lowest and the highest value over the rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Optional[Spread]:
    """Return the median and the range of values; None without values.

    Examples
    --------
    >>> spread([3.0, 1.0, 2.5])
    Spread(median=2.5, low=1.0, high=3.0)
    """
    return Spread(median(values), min(values), max(values)) if values else None


def values(row: Row, name: str) -> Optional[Spread]:
    """Return the spread of one measurement over a row's rounds; None if there is none or the row failed."""
    return None if row.reason else spread([found[name] for found in row.rounds if name in found])


def ratio(row: Row, other: Row, name: str) -> Optional[Spread]:
    """Return the ratio of a row's value to another row's: the median of the rounds' ratios, and their range."""
    if row.reason or other.reason:
        return None
    pairs = [(mine[name], theirs[name]) for mine, theirs in zip(row.rounds, other.rounds) if name in mine and name in theirs]
    return spread([mine / theirs for mine, theirs in pairs])


def reference_of(row: Row, rows: Sequence[Row]) -> Optional[Row]:
    """Return the row of `ours` in the same group."""
    return next((other for other in rows if other.group == row.group and other.contender == REFERENCE), None)


def ratio_to_ours(row: Row, rows: Sequence[Row], name: str) -> Optional[Spread]:
    """Return the ratio to the row of `ours` in the same group; None if there is no such row."""
    other = reference_of(row, rows)
    return ratio(row, other, name) if other else None


def contender_table(rows: Sequence[Row]) -> Table:
    """Return the table of contenders: the environment and versions of each, or why it was not measured."""
    lines = []
    for contender in dict.fromkeys(row.contender for row in rows):
        mine = [row for row in rows if row.contender == contender]
        names = dict.fromkeys(name for row in mine for name in row.environment)
        found = {name: dict.fromkeys(row.environment[name] for row in mine if name in row.environment) for name in names}
        settings = "\n".join(f"{name}={' or '.join(values)}" for name, values in found.items())
        versions = next((row.versions for row in mine if row.versions), {})
        there = [f"{name} {version}" for name, version in versions.items()]
        lines.append([contender, settings or "unchanged", "\n".join([", ".join(there)] * bool(there) + _reasons(mine))])
    return "contenders", ["contender", "environment", "versions, or why not measured"], lines


def _reasons(rows: Sequence[Row]) -> List[str]:
    """Return why these rows of a contender were not measured: each reason once, with its groups unless it is that of all rows."""
    groups: Dict[str, List[str]] = {}
    for row in rows:
        if row.reason:
            groups.setdefault(row.reason, []).append(row.group)
    return [
        f"not measured{'' if len(those) == len(rows) else ' with ' + '; '.join(those)}: {reason}"
        for reason, those in groups.items()
    ]


def measured(rows: Sequence[Row]) -> List[Row]:
    """Return the rows of contenders with at least one measured row. The table of contenders lists the others."""
    there = {row.contender for row in rows if not row.reason}
    return [row for row in rows if row.contender in there]


def parts_table(rows: Sequence[Row]) -> Table:
    """Return the table of milliseconds of each part of a step, with the update divided by ours."""
    parts = ["split", "forward", "backward", "update"]
    lines = [
        [
            str(row.case.num_devices),
            row.contender,
            *[_number(values(row, f"{part}_s"), 1e3) for part in parts],
            ranged(ratio_to_ours(row, rows, "update_s")),
        ]
        for row in measured(rows)
        if any(f"{part}_s" in found for part in parts for found in row.rounds)
    ]
    columns = ["contexts", "contender", *parts, "update / ours"]
    return "ms to dispatch each part of a step, with the devices idle before it: medians", columns, lines


def dispatch_table(rows: Sequence[Row]) -> Table:
    """Return the table of milliseconds to dispatch a whole step, with its ratio to ours."""
    return _times_table(rows, "dispatch_s", "ms to dispatch a whole step, with the devices idle before it: median (range)")


def whole_table(rows: Sequence[Row]) -> Table:
    """Return the table of milliseconds of a whole step, with its ratio to ours."""
    return _times_table(rows, "whole_s", f"ms of a whole step, {_common(rows, 'num_steps')} before each wait: median (range)")


def _times_table(rows: Sequence[Row], name: str, title: str) -> Table:
    """Return the table of one measurement in milliseconds, with its ratio to ours."""
    lines = [
        [str(row.case.num_devices), row.contender, ranged(values(row, name), 1e3), ranged(ratio_to_ours(row, rows, name))]
        for row in measured(rows)
    ]
    return title, ["contexts", "contender", "ms", "time / ours"], lines


def _common(rows: Sequence[Row], name: str) -> str:
    """Return the values of a field of the rows' cases, each once."""
    return " or ".join(dict.fromkeys(f"{getattr(row.case, name):,}" for row in rows))


def train_table(rows: Sequence[Row]) -> Table:
    """Return the table of images per second, with each step's time divided by ours."""
    lines = [
        [row.group, row.contender, ranged(_images_per_s(row)), ranged(ratio_to_ours(row, rows, "whole_s"))]
        for row in measured(rows)
    ]
    return "images/s: median (range)", ["on", "contender", "images/s", "time / ours"], lines


def scaling_table(rows: Sequence[Row], name: str = "whole_s") -> Table:
    """Return the table of the speed of several contexts divided by that of one, one thread each, if a contender has both."""
    lines = []
    for row in measured(rows):
        single = _single_thread_of(row, rows)
        if single is not None:
            lines.append([row.contender, row.group, single.group, ranged(ratio(single, row, name))])
    return "scaling: one thread per context", ["contender", "contexts", "compared with", "speed-up"], lines


def _single_thread_of(row: Row, rows: Sequence[Row]) -> Optional[Row]:
    threads = row.environment.get("OMP_NUM_THREADS")
    if row.case.num_devices == 1 or threads != "1":
        return None
    contender = row.contender if row.contender != "torch-ddp" else "torch"
    alike = replace(row.case, num_devices=1)
    singles = [other for other in rows if other.case == alike and other.contender == contender]
    return next((other for other in singles if other.environment.get("OMP_NUM_THREADS") == "1"), None)


def evaluate_table(rows: Sequence[Row]) -> Table:
    """Return the table of milliseconds per pass, with each pass's time divided by ours, and the accuracy."""
    lines = [
        [
            row.group,
            row.contender,
            ranged(values(row, "evaluate_s"), 1e3),
            ranged(ratio_to_ours(row, rows, "evaluate_s")),
            _number(values(row, "accuracy"), digits=4),
        ]
        for row in measured(rows)
    ]
    return "a pass over the batches: median (range)", ["on", "contender", "ms", "time / ours", "accuracy"], lines


def results(name: str, rows: Sequence[Row], *, rounds: int, tables: Sequence[Table]) -> Dict[str, Any]:
    """Return the content of the JSON file: machine, command, every round, and the tables as printed."""
    cpu = describe_devices()[0]
    return {
        "benchmark": name,
        "command": ["python", "scripts/benchmarks", *sys.argv[1:]],
        "finished": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "machine": {
            "processor": cpu.description,
            "cores": environment.num_cores(),
            "memory_bytes": cpu.memory_bytes,
            "system": platform.platform(),
            "load_average": list(os.getloadavg()),
        },
        "gluon_mgpu": __version__,
        "python": platform.python_version(),
        "rounds": rounds,
        "reference": REFERENCE,
        "rows": [_row(row, rows) for row in rows],
        "tables": [{"title": title, "columns": columns, "rows": lines} for title, columns, lines in tables],
    }


def _row(row: Row, rows: Sequence[Row]) -> Dict[str, Any]:
    names = list(dict.fromkeys(name for found in row.rounds for name in found))
    seconds = [name for name in names if name.endswith("_s")]
    return {
        **asdict(row),
        "medians": {name: _dict(values(row, name)) for name in names},
        "ratios": {name: _dict(ratio_to_ours(row, rows, name)) for name in seconds},
    }


def step_lines(rows: Sequence[Row]) -> Panels:
    """Return the lines of steps for `plot_lines`: milliseconds of the update and of the whole, by number of contexts."""
    panels = {"update, dispatched": "update_s", "whole step": "whole_s"}
    return {title: _lines(rows, name, lambda row: row.case.num_devices) for title, name in panels.items()}


def _lines(rows: Sequence[Row], name: str, place: Callable[[Row], float]) -> Dict[str, List[Point]]:
    lines: Dict[str, List[Point]] = {}
    for row in rows:
        one = _scaled(values(row, name), 1e3)
        if one:
            lines.setdefault(row.contender, []).append((place(row), one.median, one.low, one.high))
    return lines


def bars_of(rows: Sequence[Row], name: str) -> Ranges:
    """Return the bars for `plot_ranges`: group -> contender -> (median, low, high). `images_per_s` is derived."""
    drawn: Ranges = {}
    for row in rows:
        one = _images_per_s(row) if name == "images_per_s" else _scaled(values(row, name), 1e3)
        if one:
            drawn.setdefault(row.group, {})[row.contender] = (one.median, one.low, one.high)
    return drawn


def _images_per_s(row: Row) -> Optional[Spread]:
    return None if row.reason else spread([row.case.batch_size / found["whole_s"] for found in row.rounds])


def _scaled(one: Optional[Spread], factor: float) -> Optional[Spread]:
    return Spread(one.median * factor, one.low * factor, one.high * factor) if one else None


def _dict(one: Optional[Spread]) -> Optional[Dict[str, float]]:
    return {"median": one.median, "min": one.low, "max": one.high} if one else None


def _number(one: Optional[Spread], factor: float = 1.0, digits: int = 0) -> str:
    return _NOTHING if one is None else _short(one.median * factor, digits)


def ranged(one: Optional[Spread], factor: float = 1.0) -> str:
    """Return a median with its range, as a table shows it."""
    if one is None:
        return _NOTHING
    if one.low == one.high:
        return _short(one.median * factor)
    return f"{_short(one.median * factor)} ({_short(one.low * factor)}–{_short(one.high * factor)})"


def _short(value: float, digits: int = 0) -> str:
    """Return a number with about three significant digits."""
    return f"{value:.{digits or (0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3)}f}"
