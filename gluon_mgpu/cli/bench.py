"""gluon-mgpu bench: the cost of copying and computing on the devices of this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import click
from rich.console import Console

from ..data_parallel.transfer import Bandwidth, measure_bandwidth
from ..devices.select import use_devices
from ..plots import plot_bars
from ..tuning.plots import plot_bandwidth
from ..tuning.profiling import measure_logging, measure_overlap, measure_products
from ._options import numbers
from ._output import print_table, write_results

_devices = click.option(
    "--devices", "spec", default="2", show_default=True, help="Devices, as use_devices takes them: auto, gpu, gpu*2, cpu*2, 2."
)
_output = click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/bench"),
    show_default=True,
    help="Folder for the JSON file and the plot.",
)
_repeats = click.option(
    "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Number of measurements; the median counts."
)


@click.group()
def bench() -> None:
    """Measure copying and computing on this machine, as tables and a plot.

    Comparisons with Gluon, d2l, GluonCV and PyTorch are in a checkout of gluon_mgpu: python scripts/benchmarks --help
    """


@bench.command()
@_devices
@click.option(
    "--sizes",
    default="4096,65536,1048576,16777216,67108864",
    show_default=True,
    callback=numbers,
    help="Bytes of each copy, separated by commas.",
)
@_repeats
@_output
def transfer(spec: str, sizes: List[int], repeats: int, output: Path) -> None:
    """Copy arrays between every pair of devices: GB/s for each size."""
    measured: List[Bandwidth] = []
    with use_devices(spec) as ctx, Console().status("") as status:
        for num_bytes in sizes:
            status.update(f"copying {num_bytes} bytes between {len(ctx)} devices")
            measured += measure_bandwidth(ctx, [num_bytes], repeats=repeats)
    names = [str(context) for context in ctx]
    for num_bytes in sorted({one.num_bytes for one in measured}):
        rate = {(one.source, one.target): one.gb_per_s for one in measured if one.num_bytes == num_bytes}
        rows = [[source] + [f"{rate[source, target]:.2f}" for target in names] for source in names]
        print_table(f"GB/s, {num_bytes:,} bytes", ["from \\ to", *names], rows)
    write_results(output, "transfer", [asdict(one) for one in measured], plot_bandwidth(measured))


@bench.command()
@_devices
@click.option(
    "--sizes",
    default="64,256,1024,2048",
    show_default=True,
    callback=numbers,
    help="Sides of the square matrices, separated by commas.",
)
@click.option(
    "--num-products",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Products of 100 x 100 whose norms are logged.",
)
@_repeats
@_output
def compute(spec: str, sizes: List[int], num_products: int, repeats: int, output: Path) -> None:
    """Multiply matrices: small and large, logged each time or once, on all devices at once or in turn."""
    with use_devices(spec) as ctx, Console().status("multiplying matrices") as status:
        products = measure_products(ctx, sizes, repeats=repeats)
        status.update(f"logging {num_products} norms")
        logging = measure_logging(ctx[0], num_products=num_products, repeats=repeats)
        status.update("one device after another, and all at once")
        overlap = measure_overlap(ctx, repeats=repeats)
    rows = [[one.device, str(one.size), f"{one.seconds * 1e3:.4f}", f"{one.gflop_per_s:.1f}"] for one in products]
    print_table("matrix products", ["device", "size", "ms", "GFLOP/s"], rows)
    print_table(*_rated(f"{num_products} products of 100 x 100 on {ctx[0]}, norms logged", logging))
    print_table(*_rated(f"40 products of 512 x 512 on each of {', '.join(map(str, ctx))}", overlap))
    speeds: Dict[str, float] = {f"{one.device} {one.size}": one.gflop_per_s for one in products}
    charts = {"matrix products": speeds, "logging": _rates(logging), "devices": _rates(overlap)}
    results = {"products": [asdict(one) for one in products], "logging_s": logging, "overlap_s": overlap}
    write_results(output, "compute", results, plot_bars(charts, ["GFLOP/s", "times as fast", "times as fast"]))


def _rated(title: str, seconds: Dict[str, float]) -> Tuple[str, List[str], List[List[str]]]:
    rows = [[name, f"{value * 1e3:.1f}", f"{rate:.2f}"] for (name, value), rate in zip(seconds.items(), _rates(seconds).values())]
    return title, ["way", "ms", "times as fast"], rows


def _rates(seconds: Dict[str, float]) -> Dict[str, float]:
    """Return how many times as fast as the first each one is."""
    first: Optional[float] = next(iter(seconds.values()))
    return {name: (first or 0.0) / value for name, value in seconds.items()}
