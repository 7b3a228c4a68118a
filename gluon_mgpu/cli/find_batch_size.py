"""gluon-mgpu find-batch-size: the largest batch that fits, and the recommended one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Optional

import click

from ..errors import DeviceError
from ..runtime.nvidia.demand import num_bytes
from ..runtime.units import format_bytes
from ._options import Real, count, output_option
from ._output import print_table, showing, write_results

if TYPE_CHECKING:
    from ..tuning.batch_size_search import BatchSizes, Probe


def _size(_context: click.Context, _parameter: click.Parameter, text: Optional[str]) -> int:
    try:
        return num_bytes(text)
    except DeviceError:
        raise click.BadParameter(f"got {text!r}; expected a size such as 4GiB, 1.5G or 800MiB.") from None


@click.command("find-batch-size")
@click.option(
    "--workload",
    metavar="FILE.py:FUNCTION",
    help="What to train, FILE.py:FUNCTION or MODULE:FUNCTION: takes batch_size and ctx, and returns a step without "
    "arguments, or (net, loss, trainer, X, y). By default ResNet-18 on images of 28x28.",
)
@click.option("--devices", "ctx", default="auto", help="auto, gpu, gpu*2, gpu:0,2, gpu:4-7, cpu*2, or a count.")
@click.option(
    "--memory-limit",
    "memory_limit_bytes",
    callback=_size,
    metavar="SIZE",
    help="Memory limit, such as 4GiB. By default a GPU's memory, or 90% of the free host memory.",
)
@count("--first", default=16, help="The first batch size.")
@count("--max-batch-size", default=65536, help="Largest batch size to try.")
@click.option("--timeout", "timeout_s", type=Real(1), default=300, help="Seconds per batch size.")
@output_option("runs/batch_size", "batch_size.json")
def find_batch_size(workload: Optional[str], output: Path, **options: Any) -> None:
    """Find the largest batch that fits in memory.

    It also recommends the smallest batch within 5 % of the best speed. Each size trains for some steps in its own process.
    Sizes above one that does not fit are not tried. Ctrl-C ends the search and saves what it has found.
    """
    from ..loop.stop_signals import raise_on_sigterm
    from ..tuning.batch_size_search import find_batch_size as search
    from ..tuning.batch_size_search import resnet18_workload

    results: List[BatchSizes] = []

    def show(found: BatchSizes) -> None:
        click.echo(str(found.probes[-1]))
        results.append(found)

    with raise_on_sigterm("find_batch_size: stopped"):
        try:
            with showing("training a few steps with each batch size, in a process of its own"):
                results.append(search(workload or resnet18_workload, on_result=show, **options))
        finally:  # also when a signal ends the search
            if results and results[-1].largest:
                _show(results[-1])
                write_results(output, "batch_size", asdict(results[-1]))


def _show(found: BatchSizes) -> None:
    title = f"batch sizes on {', '.join(found.devices)}, limit {format_bytes(found.memory_limit_bytes, digits=2)}"
    rows = [_row(probe) for probe in sorted(found.probes, key=lambda probe: probe.batch_size)]
    print_table(title, ["batch size", "GiB", "examples/s", "lowest", "highest", "fits"], rows)
    click.echo(f"largest batch that fits: {found.largest}")
    click.echo(f"recommended: {found.recommended}, the smallest within 5 % of the best speed")
    click.echo("The batch size is a hyper-parameter: with another one, choose the learning rate again.")


def _row(probe: Probe) -> List[str]:
    rates = probe.examples_per_s
    speeds = [f"{number:.1f}" for number in (probe.rate, min(rates), max(rates))] if rates else ["-"] * 3
    return [str(probe.batch_size), f"{probe.memory_bytes / 2**30:.2f}", *speeds, "yes" if probe.fits else f"no: {probe.reason}"]
