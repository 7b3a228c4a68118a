"""gluon-mgpu find-batch-size: the largest batch that fits, and the recommended one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional

import click

from ..plots import figure, plot_batch_sizes
from ..runtime.units import format_bytes
from ..tuning.batch_size import BatchSizes, Probe, find_batch_size
from ..tuning.batch_size.find import resnet18_workload
from ._options import size_in_bytes
from ._output import print_table, showing, write_results


@click.command("find-batch-size", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--workload",
    metavar="FILE.py:FUNCTION",
    help="What to train, FILE.py:FUNCTION or MODULE:FUNCTION: takes batch_size and ctx, and returns a step without "
    "arguments, or (net, loss, trainer, X, y). By default ResNet-18.",
)
@click.option("--image-size", type=click.IntRange(8), help="Size of ResNet-18's images; 28 by default.")
@click.option("--optimizer", help="Optimizer of ResNet-18; sgd by default. adam takes more memory.")
@click.option("--devices", default="auto", show_default=True, help="auto, gpu, gpu*2, gpu:0,2, gpu:4-7, cpu*2, or a count.")
@click.option(
    "--memory-limit",
    callback=size_in_bytes,
    metavar="SIZE",
    help="Memory limit, such as 4GiB. By default a GPU's memory, or 90% of the free host memory.",
)
@click.option("--first", type=click.IntRange(1), default=16, show_default=True, help="The first batch size.")
@click.option("--max-batch-size", type=click.IntRange(1), default=65536, show_default=True, help="Largest batch size to try.")
@click.option("--multiple-of", type=click.IntRange(1), help="Try only multiples of this; by default of the number of devices.")
@click.option("--timeout", type=click.FloatRange(1), default=300, show_default=True, help="Seconds per batch size.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/batch_size"),
    show_default=True,
    help="Folder for batch_size.json and batch_size.png.",
)
def find_batch_size_(
    workload: Optional[str],
    image_size: Optional[int],
    optimizer: Optional[str],
    devices: str,
    memory_limit: Optional[int],
    first: int,
    max_batch_size: int,
    multiple_of: Optional[int],
    timeout: float,
    output: Path,
) -> None:
    """Find the largest batch that fits in memory, and the fastest sensible one.

    Each size trains for some steps in its own process. Sizes above one that does not fit are not tried.
    """
    resnet18_options: Dict[str, Any] = {"image_size": image_size, "optimizer": optimizer}
    options = {name: value for name, value in resnet18_options.items() if value is not None}
    if workload and options:
        raise click.UsageError("got --workload with --image-size or --optimizer; expected these with ResNet-18 only.")
    figure()  # raises now, not at the end, if matplotlib is missing
    with showing("starting a process that checks the devices") as show:
        found = find_batch_size(
            workload or resnet18_workload,
            devices=devices,
            options=options,
            memory_limit_bytes=memory_limit,
            first=first,
            max_batch_size=max_batch_size,
            multiple_of=multiple_of,
            timeout_s=timeout,
            on_start=lambda size: show(f"training a few steps with a batch of {size}") if size else None,
            on_message=lambda probe: click.echo(str(probe)),
        )
    _show(found)
    write_results(output, "batch_size", asdict(found), _figure(found))


def _show(found: BatchSizes) -> None:
    title = f"batch sizes on {', '.join(found.devices)}, limit {format_bytes(found.memory_limit_bytes, digits=2)}"
    rows = [_row(probe) for probe in sorted(found.probes, key=lambda probe: probe.batch_size)]
    print_table(title, ["batch size", "GiB", "examples/s", "lowest", "highest", "fits"], rows)
    if found.ended_by:
        click.echo(f"No larger batch was tried: {found.ended_by}")
    click.echo(f"largest batch that fits: {found.largest}")
    click.echo(f"recommended: {found.recommended}, the smallest within 5 % of the best speed")
    click.echo("The batch size is a hyper-parameter: with another one, choose the learning rate again.")


def _row(probe: Probe) -> List[str]:
    rates = probe.examples_per_s
    speeds = [f"{number:.1f}" for number in (median(rates), min(rates), max(rates))] if rates else ["-"] * 3
    return [str(probe.batch_size), f"{probe.memory_bytes / 2**30:.2f}", *speeds, "yes" if probe.fits else f"no: {probe.reason}"]


def _figure(found: BatchSizes) -> Any:
    rates = [(p.batch_size, p.rate, min(p.examples_per_s), max(p.examples_per_s)) for p in found.probes if p.fits]
    memory = [(p.batch_size, p.memory_bytes / 2**30, p.fits) for p in found.probes]
    return plot_batch_sizes(rates, memory, limit_gib=found.memory_limit_bytes / 2**30, recommended=found.recommended)
