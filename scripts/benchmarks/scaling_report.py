"""Tables, JSON and plot of sums over processes, of training with them, and of the projection."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Dict, List, Optional, Sequence, Tuple

import report
from compare import Row
from gluon_mgpu.plots import figure
from report import Spread, Table, ranged, ratio, spread, values
from scaling import OTHER, SINGLE, Job
from scaling_model import Fit, Projection

Fits = Dict[Tuple[str, int], Fit]
Projections = Dict[str, List[Projection]]
PROJECTION = "PROJECTION, computed and not measured"


def sum_table(rows: Sequence[Row]) -> Table:
    """Return the table of milliseconds per sum, for each size, and its ratio to PyTorch with as many processes."""
    lines = [
        [
            str(row.case.num_devices),
            f"{4 * row.case.total_size:,}",
            row.contender,
            ranged(values(row, "sum_s"), 1e3),
            ranged(ratio(row, other, "sum_s")) if other else "-",
        ]
        for row in report.measured(rows)
        for other in [_other_of(row, rows)]
    ]
    columns = ["n", "bytes", "contender", "ms", "time / torch"]
    return "a sum over n processes, waiting for each: median (range)", columns, lines


def fit_table(fits: Fits) -> Table:
    """Return the table of the link fitted to each contender's sums, and of the wait before each sum."""
    lines = [
        [
            contender,
            str(n),
            f"{one.traffic.wait_s * 1e3:g}",
            f"{one.link.latency_s * 1e6:.0f}",
            f"{one.link.bytes_per_s / 1e9:.2f}",
            f"{one.error:.0%}",
        ]
        for (contender, n), one in fits.items()
    ]
    columns = ["contender", "n", "ms per sum", "µs per message", "GB/s", "largest error"]
    title = "the link fitted to these sums: least squares of the relative errors; ms per sum: Horovod's cycle, which is known"
    return title, columns, lines


def train_table(rows: Sequence[Row], fits: Fits, num_bytes: int) -> Table:
    """Return the table of images per second, the ratios to one process and to PyTorch, and the fitted step time."""
    lines = [
        [
            str(row.case.num_devices),
            row.contender,
            ranged(_images_per_s(row)),
            ranged(_gain(row, rows)),
            ranged(_images_ratio(row, rows)),
            _median_ms(values(row, "whole_s")),
            _explained(row, rows, fits, num_bytes),
        ]
        for row in report.measured(rows)
    ]
    columns = ["n", "contender", "images/s", "speed / 1 process", "speed / torch", "ms", "fitted"]
    return "training ResNet-18 in n processes of one thread each: median (range)", columns, lines


def projection_table(projections: Projections, job: Job) -> Table:
    """Return the table of projected step times, and of the part that dominates each."""
    lines = [
        [
            label,
            f"{one.traffic.num_processes:,}",
            *[_milliseconds(seconds) for seconds in (one.latency_s, one.transfer_s, one.step_s)],
            f"{one.efficiency:.1%}",
            one.bound,
        ]
        for label, those in projections.items()
        for one in those
    ]
    title = (
        f"{PROJECTION}: ms of a step, one process a machine,\n{_milliseconds(job.compute_s)} ms to compute, then "
        f"{job.num_bytes:,} bytes to sum, links of {job.wire.bytes_per_s * 8e-9:g} Gbit/s and {job.wire.latency_s * 1e6:g} µs"
    )
    return title, ["sum by", "n", "latency", "transfer", "step", "efficiency", "bound by"], lines


def results(
    rows: Sequence[Row], tables: Sequence[Table], *, rounds: int, fits: Fits, projections: Projections, job: Job
) -> Dict[str, Any]:
    """Return the content of the JSON file: every round, the fits, and the projection, marked as not measured."""
    return {
        **report.results("scaling", rows, rounds=rounds, tables=tables),
        "reference": OTHER,
        "fits": [{"contender": contender, **asdict(one)} for (contender, _), one in fits.items()],
        "projection": {
            "is_measured": False,
            "assumptions": asdict(job),
            "steps": [
                {"how": label, **asdict(one), "efficiency": one.efficiency, "bound": one.bound}
                for label, those in projections.items()
                for one in those
            ],
        },
    }


def plot(rows: Sequence[Row], fits: Fits, projections: Projections) -> Any:
    """Return a figure: times of sums against bytes with their fits, and the projected efficiency against processes."""
    made = figure(11, 4.6)
    left, right = made.subplots(1, 2)
    lines: Dict[Tuple[str, int], List[Tuple[int, Spread]]] = {}
    for row in rows:
        found = values(row, "sum_s")
        if found:
            lines.setdefault((row.contender, row.case.num_devices), []).append((4 * row.case.total_size, found))
    for number, (key, points) in enumerate(lines.items()):
        _draw_sums(left, f"{key[0]}, {key[1]} processes", points, fits.get(key), f"C{number}")
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms", title="a sum over processes; lines: fit")
    for label, those in projections.items():
        right.plot([one.traffic.num_processes for one in those], [one.efficiency for one in those], "--", marker=".", label=label)
    right.set(xscale="log", ylim=(0, 1.05), xlabel="processes", ylabel="efficiency", title=PROJECTION)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    made.tight_layout()
    return made


def _draw_sums(axes: Any, label: str, points: Sequence[Tuple[int, Spread]], found: Optional[Fit], color: str) -> None:
    sizes = [size for size, _ in points]
    medians = [one.median * 1e3 for _, one in points]
    below_above = [[(one.median - one.low) * 1e3 for _, one in points], [(one.high - one.median) * 1e3 for _, one in points]]
    axes.errorbar(sizes, medians, below_above, linestyle="", marker=".", capsize=3, color=color, label=label)
    if found:
        axes.plot(sizes, [sum(found.traffic.seconds(size, found.link)) * 1e3 for size in sizes], color=color, linewidth=1)


def _other_of(row: Row, rows: Sequence[Row]) -> Optional[Row]:
    return next((other for other in rows if (other.contender, other.group) == (OTHER, row.group)), None)


def _single_of(row: Row, rows: Sequence[Row]) -> Optional[Row]:
    contender = OTHER if row.contender == OTHER else SINGLE
    return next((other for other in rows if (other.contender, other.case.num_devices) == (contender, 1)), None)


def _images_per_s(row: Row) -> Optional[Spread]:
    return None if row.reason else spread([row.case.batch_size / found["whole_s"] for found in row.rounds])


def _gain(row: Row, rows: Sequence[Row]) -> Optional[Spread]:
    single = _single_of(row, rows)
    if single is None or single is row:
        return None
    return _scaled(ratio(single, row, "whole_s"), row.case.batch_size / single.case.batch_size)


def _images_ratio(row: Row, rows: Sequence[Row]) -> Optional[Spread]:
    other = _other_of(row, rows)
    return ratio(other, row, "whole_s") if other else None


def _explained(row: Row, rows: Sequence[Row], fits: Fits, num_bytes: int) -> str:
    """Return milliseconds of a step: one process's measured step, then the sum of the gradients as fitted."""
    single, found = _single_of(row, rows), fits.get((row.contender, row.case.num_devices))
    alone = values(single, "whole_s") if single else None
    if alone is None or found is None:
        return "-"
    return _milliseconds(alone.median + sum(found.traffic.seconds(num_bytes, found.link)))


def _median_ms(one: Optional[Spread]) -> str:
    return _milliseconds(one.median) if one else "-"


def _milliseconds(seconds: float) -> str:
    """Return milliseconds as a table shows them; from 100 s on, seconds with their unit."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds * 1e3:,.{0 if seconds >= 0.1 else 1}f}"


def _scaled(one: Optional[Spread], factor: float) -> Optional[Spread]:
    return Spread(one.median * factor, one.low * factor, one.high * factor) if one else None
