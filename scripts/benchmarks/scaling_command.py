"""The benchmark of sums over processes, training with them, and the projection to more processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional

import click
import report
import scaling
import scaling_report
from command_options import contenders_option, progress, python_option
from compare import Row
from gluon_mgpu.cli._options import numbers
from gluon_mgpu.cli._output import print_table
from result_files import json_option, plot_option, save_json, save_plot
from scaling_model import Link

_RESNET18_BYTES = 44_696_104  # gradients of the measured training


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
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds of sums.")
@click.option("--train-rounds", type=click.IntRange(0), default=3, show_default=True, help="Rounds of training. 0: none.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Examples per step and process.")
@click.option("--shape", type=click.IntRange(8), default=28, show_default=True, help="Side length of the images in pixels.")
@python_option(scaling.CONTENDERS, "torch")
@click.option("--timeout", type=click.FloatRange(1), default=120, show_default=True, help="Seconds to wait for an answer.")
@click.option(
    "--project", default="8,64,1024", show_default=True, callback=numbers, help="Numbers of processes to project a step to."
)
@click.option(
    "--link-gbps",
    type=click.FloatRange(0, min_open=True),
    default=10,
    show_default=True,
    help="Bandwidth between machines, Gbit/s, for the projection.",
)
@click.option(
    "--link-latency-us",
    type=click.FloatRange(0),
    default=50,
    show_default=True,
    help="Latency between machines, microseconds per message, for the projection.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(0, min_open=True),
    help="Milliseconds to compute the projected step. Default: the measured step of one process.",
)
@click.option(
    "--gradient-bytes",
    type=click.IntRange(1),
    default=_RESNET18_BYTES,
    show_default=True,
    help="Size of the gradients of the projected step. The default is ResNet-18's.",
)
@json_option
@plot_option
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
    """Measure sums over processes and training with them, and project to more processes.

    The launcher starts processes of one thread each on this machine. The contenders are MXNet's store with two servers and with
    one, Horovod, and PyTorch's all_reduce and DistributedDataParallel over gloo. The projection is computed, not measured, and
    marked as such.
    """
    if min(processes) < 2:
        raise click.UsageError(f"got --processes {min(processes)}; expected 2 or more. One process is always measured.")
    rows = scaling.sum_rows(contenders, processes, sizes)
    case = replace(scaling.TRAIN, batch_size=batch_size, image_size=shape)
    trained = scaling.train_rows(contenders, processes, case) if train_rounds else []
    with progress() as show:
        for part, count in ((rows, rounds), (trained, train_rounds)):
            scaling.measure(part, rounds=count, pythons=pythons, timeout_s=timeout, on_message=show)
    fits = scaling.sum_fits(rows)
    compute_s = step_ms / 1e3 if step_ms else scaling.compute_s_of(trained)
    job = scaling.Job(compute_s, gradient_bytes, Link(link_latency_us / 1e6, link_gbps * 1e9 / 8))
    projections = scaling.projections(fits, project, job) if compute_s else {}
    tables = _tables(rows, trained, fits, projections, job)
    for table in tables:
        if table[2]:
            print_table(*table)
    if not projections:
        print("No projection: it requires sums of two sizes, and training or --step-ms.")
    results = scaling_report.results(rows + trained, tables, rounds=rounds, fits=fits, projections=projections, job=job)
    save_json(json_path, results)
    save_plot(plot_path, lambda: scaling_report.plot(rows, fits, projections))


def _tables(rows: List[Row], trained: List[Row], fits: Any, projections: Any, job: scaling.Job) -> List[report.Table]:
    return [
        report.contender_table(rows + trained),
        scaling_report.sum_table(rows),
        scaling_report.fit_table(fits),
        scaling_report.train_table(trained, fits, job.num_bytes),
        scaling_report.projection_table(projections, job),
    ]
