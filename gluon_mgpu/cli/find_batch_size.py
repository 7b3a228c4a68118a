"""gluon-mgpu find-batch-size: the largest batch that fits, and the one to take."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional

import click

from ..plots import figure, plot_batch_sizes
from ..runtime.units import format_bytes
from ..tuning.batch_size import BatchSizes, Probe, find_batch_size
from ..tuning.batch_size.find import resnet18_workload
from ._output import print_table, write_results

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def _bytes(_context: click.Context, _parameter: click.Parameter, text: Optional[str]) -> Optional[int]:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    if not found:
        raise click.BadParameter(f"got {text!r}; expected a size such as 4GiB, 1.5G or 800MiB.")
    return int(float(found.group(1)) * 2 ** _UNITS[found.group(2).lower()])


@click.command("find-batch-size", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--workload",
    metavar="FILE.py:FUNCTION",
    help="What is trained, FILE.py:FUNCTION or MODULE:FUNCTION: takes batch_size and ctx, and returns a step without "
    "arguments, or (net, loss, trainer, X, y). By default ResNet-18.",
)
@click.option("--image-size", type=click.IntRange(8), help="Of ResNet-18's images: 28 where not given.")
@click.option("--optimizer", help="Of ResNet-18: sgd where not given. adam takes more memory.")
@click.option(
    "--devices", default="auto", show_default=True, help="auto, gpu, gpu:0,2, gpu:4-7, cpu:2 (two CPU contexts), or a count."
)
@click.option(
    "--memory-limit", callback=_bytes, metavar="SIZE", help="4GiB, for one. By default a GPU's memory, or 90% of what is free."
)
@click.option("--first", type=click.IntRange(1), default=16, show_default=True, help="The first batch size.")
@click.option("--max-batch-size", type=click.IntRange(1), default=65536, show_default=True, help="Try none that is larger.")
@click.option("--multiple-of", type=click.IntRange(1), help="Try only multiples of it; by default of the number of devices.")
@click.option("--timeout", type=click.FloatRange(1), default=300, show_default=True, help="Seconds for each batch size.")
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

    Every size is trained for some steps in a process of its own. What is larger than a batch that does not fit is not tried.
    """
    given: Dict[str, Any] = {"image_size": image_size, "optimizer": optimizer}
    options = {name: value for name, value in given.items() if value is not None}
    if workload and options:
        raise click.UsageError("--image-size and --optimizer are ResNet-18's; got them with --workload.")
    figure()  # if matplotlib is missing, it is told now, and not when all is done
    found = find_batch_size(
        workload or resnet18_workload,
        devices=devices,
        options=options,
        memory_limit_bytes=memory_limit,
        first=first,
        max_batch_size=max_batch_size,
        multiple_of=multiple_of,
        timeout_s=timeout,
        tell=lambda probe: click.echo(str(probe)),
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
