"""gluon-mgpu bench scaling and checkpoint: what sums over processes cost, what follows for many, and what saving costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional

import click

from ..benchmark import checkpointing, report, scaling, scaling_report, workloads
from ..benchmark.compare import Row
from ..benchmark.scaling_model import Link
from ..devices.select import use_devices
from ..plots import plot_ranges, save
from ._options import contenders_option, numbers, python_option, telling
from ._output import print_table

_RESNET18_BYTES = 44_696_104  # of the gradients that training measures
_file = click.Path(dir_okay=False, path_type=Path)
_json = click.option("--json", "json_path", type=_file, help="File for every round, the tables, and what was computed from them.")
_plot = click.option("--plot", "plot_path", type=_file, help="File for a picture, a PNG.")
_shape = click.option("--shape", type=click.IntRange(8), default=28, show_default=True, help="Pixels of a side of the images.")


@click.command("scaling")
@click.option("--processes", default="2", show_default=True, callback=numbers, help="Numbers of processes, separated by commas.")
@click.option(
    "--sizes",
    default="4096,65536,262144,1048576,4194304,16777216,44000000",
    show_default=True,
    callback=numbers,
    help="Bytes of the sums, separated by commas.",
)
@contenders_option(scaling.CONTENDERS)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Of sums: every contender, so many times.")
@click.option("--train-rounds", type=click.IntRange(0), default=3, show_default=True, help="Of training. 0: none.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Examples of a step of each process.")
@_shape
@python_option(scaling.CONTENDERS, "torch")
@click.option("--timeout", type=click.FloatRange(1), default=120, show_default=True, help="Seconds to wait for an answer.")
@click.option(
    "--project", default="8,64,1024", show_default=True, callback=numbers, help="Numbers of processes to compute a step for."
)
@click.option("--link-gbps", type=click.FloatRange(0, min_open=True), default=10, show_default=True, help="Gbit/s of a machine.")
@click.option(
    "--link-latency-us", type=click.FloatRange(0), default=50, show_default=True, help="Microseconds of a message between them."
)
@click.option(
    "--step-ms",
    type=click.FloatRange(0, min_open=True),
    help="Milliseconds to compute the projected step; as measured, with one process, by default.",
)
@click.option(
    "--gradient-bytes",
    type=click.IntRange(1),
    default=_RESNET18_BYTES,
    show_default=True,
    help="Of the projected step; those of ResNet-18 by default.",
)
@_json
@_plot
def scaling_(
    processes: List[int],
    sizes: List[int],
    contenders: List[str],
    rounds: int,
    train_rounds: int,
    batch_size: int,
    shape: int,
    pythons: Dict[str, str],
    timeout: float,
    project: List[int],
    link_gbps: float,
    link_latency_us: float,
    step_ms: Optional[float],
    gradient_bytes: int,
    json_path: Optional[Path],
    plot_path: Optional[Path],
) -> None:
    """Measure sums over processes and training with them, and compute from that what many would give.

    Processes with one thread each, on this machine, by way of the launcher: MXNet's store with two servers and with one,
    Horovod, and PyTorch's all_reduce and DistributedDataParallel with gloo. What is said of more machines is computed, and says
    so.
    """
    if min(processes) < 2:
        raise click.UsageError(
            f"got --processes {min(processes)}; expected 2 or more. One process is measured beside them anyway."
        )
    rows = scaling.sum_rows(contenders, processes, sizes)
    case = replace(scaling.TRAIN, batch_size=batch_size, image_size=shape)
    trained = scaling.train_rows(contenders, processes, case) if train_rounds else []
    with telling() as tell:
        for those, count in ((rows, rounds), (trained, train_rounds)):
            scaling.measure(those, rounds=count, pythons=pythons, timeout_s=timeout, tell=tell)
    fits = scaling.sum_fits(rows)
    compute_s = step_ms / 1e3 if step_ms else scaling.compute_s_of(trained)
    job = scaling.Job(compute_s, gradient_bytes, Link(link_latency_us / 1e6, link_gbps * 1e9 / 8))
    projections = scaling.projections(fits, project, job) if compute_s else {}
    tables = _tables(rows, trained, fits, projections, job)
    for table in tables:
        if table[2]:
            print_table(*table)
    if not projections:
        print("No projection: it needs sums of two sizes, and training or --step-ms.")
    told = scaling_report.results(rows + trained, tables, rounds=rounds, fits=fits, projections=projections, job=job)
    _write(json_path, told)
    _draw(plot_path, scaling_report.plot(rows, fits, projections) if plot_path else None)


@click.command("checkpoint")
@click.option(
    "--devices",
    "spec",
    default="cpu:2",
    show_default=True,
    help="Devices, as use_devices takes them: measured on the first one alone, then on all.",
)
@click.option("--rounds", type=click.IntRange(1), default=25, show_default=True, help="Laps of each way, in turns.")
@click.option(
    "--every",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Steps of a lap, with a checkpoint or without; they must take longer than writing.",
)
@click.option("--batch-size", type=click.IntRange(1), default=4, show_default=True, help="Examples of a step.")
@_shape
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="On the disk to write to; by default where temporary files go. What is written is removed.",
)
@click.option("--quick", is_flag=True, help="Small sizes, 2 rounds: whether it runs, not what it costs.")
@_json
@_plot
def checkpoint(
    spec: str,
    rounds: int,
    every: int,
    batch_size: int,
    shape: int,
    folder: Optional[Path],
    quick: bool,
    json_path: Optional[Path],
    plot_path: Optional[Path],
) -> None:
    """Measure what a checkpoint adds to training ResNet-18, written in the background or in the loop.

    Laps of a few steps, of which every other one begins with a checkpoint, are compared with their neighbours: on the first
    device, which leaves a CPU's other cores to the writer, and on all.
    """
    case = replace(scaling.TRAIN, batch_size=batch_size, image_size=shape)
    if quick:
        case, rounds, every = workloads.quick(case), 2, 1
    found: List[checkpointing.Cost] = []
    with use_devices(spec) as ctx, telling() as tell:
        for contexts in [ctx[:1], ctx][: len(ctx)]:
            found += checkpointing.measure(contexts, rounds=rounds, every=every, case=case, folder=folder, tell=tell)
    tables = checkpointing.tables(found)
    for table in tables:
        print_table(*table)
    _write(json_path, checkpointing.results(found, tables, rounds=rounds, every=every))
    _draw(plot_path, plot_ranges(checkpointing.ranges(found), "ms that it adds") if plot_path else None)


def _tables(rows: List[Row], trained: List[Row], fits: Any, projections: Any, job: scaling.Job) -> List[report.Table]:
    return [
        report.contender_table(rows + trained),
        scaling_report.sum_table(rows),
        scaling_report.fit_table(fits),
        scaling_report.train_table(trained, fits, job.num_bytes),
        scaling_report.projection_table(projections, job),
    ]


def _write(path: Optional[Path], told: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, indent=1), encoding="utf-8")
        print(f"saved {path}")


def _draw(path: Optional[Path], made: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(made, path)
        print(f"saved {path}")
