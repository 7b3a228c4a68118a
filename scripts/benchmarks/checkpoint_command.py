"""The benchmark of checkpoints: the time they add to training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Optional

import checkpointing
import click
import workloads
from charts import plot_ranges
from command_options import progress
from gluon_mgpu.cli._output import print_table
from gluon_mgpu.devices.select import use_devices
from result_files import json_option, plot_option, save_json, save_plot
from scaling import TRAIN


@click.command("checkpoint")
@click.option(
    "--devices",
    "spec",
    default="cpu:2",
    show_default=True,
    help="Devices, as use_devices takes them. Measures on the first one alone, then on all.",
)
@click.option("--rounds", type=click.IntRange(1), default=25, show_default=True, help="Laps of each way, in turns.")
@click.option(
    "--every",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Steps of a lap, with a checkpoint or without. A lap must take longer than writing.",
)
@click.option("--batch-size", type=click.IntRange(1), default=4, show_default=True, help="Examples per step.")
@click.option("--shape", type=click.IntRange(8), default=28, show_default=True, help="Side length of the images in pixels.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder on the disk to write to. Default: the folder of temporary files. The checkpoints are removed.",
)
@click.option("--quick", is_flag=True, help="Small sizes, 2 rounds: shows whether it works, not what a checkpoint costs.")
@json_option
@plot_option
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
    """Measure the time a checkpoint adds to training ResNet-18, written in the background or in the loop.

    Training is divided into laps of a few steps. Every other lap begins with a checkpoint, and is compared with its neighbours:
    on the first device, which leaves a CPU's other cores to the writer, and on all devices.
    """
    case = replace(TRAIN, batch_size=batch_size, image_size=shape)
    if quick:
        case, rounds, every = workloads.quick(case), 2, 1
    found: List[checkpointing.Cost] = []
    with use_devices(spec) as ctx, progress() as show:
        for contexts in [ctx[:1], ctx][: len(ctx)]:
            found += checkpointing.measure(contexts, rounds=rounds, every=every, case=case, folder=folder, on_message=show)
    tables = checkpointing.tables(found)
    for table in tables:
        print_table(*table)
    save_json(json_path, checkpointing.results(found, tables, rounds=rounds, every=every))
    save_plot(plot_path, lambda: plot_ranges(checkpointing.ranges(found), "ms added"))
