"""gluon-mgpu bench: what copying and computing cost on the devices here, and what a step costs, ours and others'."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import click
from rich.console import Console

from ..benchmark import balance as balancing
from ..benchmark import precision as precisions
from ..benchmark import report, workloads
from ..benchmark import seq2seq as translations
from ..benchmark.case import Case
from ..benchmark.compare import Row, compare
from ..data_parallel.transfer import Bandwidth, measure_bandwidth
from ..devices.select import use_devices
from ..plots import plot_bars, plot_lines, plot_ranges
from ..tuning.plots import plot_bandwidth
from ..tuning.profiling import measure_logging, measure_overlap, measure_products
from ._options import contenders_option, numbers, python_option, telling
from ._output import print_table, write_results
from .bench_scaling import checkpoint, scaling_

_devices = click.option(
    "--devices", "spec", default="2", show_default=True, help="Devices, as use_devices takes them: auto, gpu, cpu:2, 2."
)
_output = click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/bench"),
    show_default=True,
    help="Folder for the JSON and the plot.",
)
_repeats = click.option(
    "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Measurements of which the median is taken."
)


def _num_devices(default: str) -> Callable[..., Any]:
    return click.option(
        "--num-devices", default=default, show_default=True, callback=numbers, help="Numbers of contexts, separated by commas."
    )


def _compared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that all comparisons have."""
    options = [
        click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Every contender, so many times."),
        python_option(workloads.CONTENDERS, "d2l"),
        click.option(
            "--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="What MXNet's contexts are."
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(1),
            default=180,
            show_default=True,
            help="Seconds to wait for a contender's answer.",
        ),
        click.option(
            "--quick",
            is_flag=True,
            help="Small sizes, 2 rounds, two of each list of numbers: whether it runs, not what is faster.",
        ),
        _output,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def bench() -> None:
    """Measure what copying, computing and training cost, as tables and a plot."""


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


@bench.command()
@_num_devices("1,2,4,8,16")
@contenders_option(workloads.STEP_CONTENDERS)
@click.option("--hybridize/--no-hybridize", default=True, show_default=True, help="Compile the networks, memory kept, or not.")
@click.option("--memory/--no-memory", default=True, show_default=True, help="Also train for long, and see what memory grows.")
@_compared_options
def step(num_devices: List[int], contenders: List[str], hybridize: bool, memory: bool, output: Path, **options: Any) -> None:
    """Compare what a step costs the host: a network of 62 small parameters."""
    run = _Comparison(**options)
    case = replace(run.sized(workloads.STEP), hybridize=hybridize)
    rows = run.measure(workloads.step_rows(contenders, run.few(num_devices), case))
    tables = [report.contender_table(rows), report.parts_table(rows), report.whole_table(rows)]
    kept: List[Row] = []
    if memory:
        case = replace(run.sized(workloads.MEMORY), hybridize=hybridize)
        kept = run.measure(workloads.memory_rows(contenders, min(2, max(num_devices)), case), rounds=1)
        tables += [report.memory_table(kept)] if kept else []
    run.finish("step", rows + kept, tables, output, plot_lines(report.step_lines(rows), "contexts", "ms"))


@bench.command("train")
@_num_devices("1,2")
@contenders_option(workloads.TRAIN_CONTENDERS)
@click.option("--hybridize/--no-hybridize", default=True, show_default=True, help="Compile the networks, memory kept, or not.")
@_compared_options
def train_(num_devices: List[int], contenders: List[str], hybridize: bool, output: Path, **options: Any) -> None:
    """Compare training ResNet-18 on 28x28 images, batch 64: images/s, and what a second context brings."""
    run = _Comparison(**options)
    case = replace(run.sized(workloads.TRAIN), hybridize=hybridize)
    parts = workloads.train_rows(contenders, run.few(num_devices), case)
    rows = [row for part in parts for row in run.measure(part)]
    tables = [report.contender_table(rows), report.train_table(rows), report.scaling_table(rows)]
    run.finish("train", rows, tables, output, plot_ranges(report.bars_of(rows, "images_per_s"), "images/s"))


@bench.command()
@_num_devices("1,2")
@contenders_option(workloads.EVALUATE_CONTENDERS)
@click.option("--network", type=click.Choice(["mlp", "resnet18"]), default="mlp", show_default=True, help="What is evaluated.")
@click.option("--hybridize/--no-hybridize", default=True, show_default=True, help="Compile the networks, memory kept, or not.")
@_compared_options
def evaluate(num_devices: List[int], contenders: List[str], network: str, hybridize: bool, output: Path, **options: Any) -> None:
    """Compare the accuracy on many small batches: added up on the devices, or read from each batch."""
    run = _Comparison(**options)
    case = replace(run.sized(workloads.EVALUATE), network=network, hybridize=hybridize)
    rows = run.measure(workloads.evaluate_rows(contenders, run.few(num_devices), case))
    tables = [report.contender_table(rows), report.evaluate_table(rows)]
    run.finish("evaluate", rows, tables, output, plot_ranges(report.bars_of(rows, "evaluate_s"), "ms a pass"))


@bench.command()
@_num_devices("1,2,4")
@contenders_option(workloads.SIZE_CONTENDERS)
@click.option(
    "--num-params", default="10,30,100,300,1000", show_default=True, callback=numbers, help="Numbers of parameters, by commas."
)
@_compared_options
def size(num_devices: List[int], contenders: List[str], num_params: List[int], output: Path, **options: Any) -> None:
    """Compare the update of few large parameters and of many small ones, of one total size."""
    run = _Comparison(**options)
    case = run.sized(workloads.SIZE)
    rows = run.measure(workloads.size_rows(contenders, run.few(num_devices), run.few(num_params), case))
    tables = [report.contender_table(rows), report.size_table(rows)]
    run.finish("size", rows, tables, output, plot_lines(report.size_lines(rows), "parameters", "ms"))


@bench.command()
@_num_devices("1,2")
@contenders_option(workloads.SEQ2SEQ_CONTENDERS)
@click.option("--hybridize/--no-hybridize", default=True, show_default=True, help="Compile the networks, or not.")
@click.option(
    "--size",
    "sizes",
    type=click.Choice(translations.SIZES),
    multiple=True,
    default=translations.SIZES,
    show_default=True,
    help="300 units, 8,000 words and sentences of 30; or what train seq2seq trains. May be repeated.",
)
@_compared_options
def seq2seq(
    num_devices: List[int], contenders: List[str], hybridize: bool, sizes: Sequence[str], output: Path, **options: Any
) -> None:
    """Compare training translators with attention: sentences/s, what padding costs, and what a second context brings."""
    run = _Comparison(**options)
    rows: List[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        texts = [translations.make_text(size, Path(folder), quick=run.quick) for size in dict.fromkeys(sizes)]
        for text in texts:
            text = replace(text, case=replace(text.case, device=run.device, hybridize=hybridize))
            for part in translations.seq2seq_rows(contenders, run.few(num_devices), text):
                rows += run.measure(part)
    scaling = report.scaling_table(rows, "pass_s")
    tables = [report.contender_table(rows), translations.speed_table(rows), translations.padding_table(rows, texts), scaling]
    run.finish("seq2seq", rows, tables, output, plot_ranges(translations.bars(rows), "sentences/s, of ours'"))


@bench.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Of each split, in turns.")
@click.option("--num-steps", type=click.IntRange(1), default=10, show_default=True, help="Steps of each split in a round.")
@click.option("--batch-size", type=click.IntRange(2), default=4096, show_default=True, help="Examples of a step.")
@_output
def balance(rounds: int, num_steps: int, batch_size: int, output: Path) -> None:
    """Compare an even split with one by measured speed, on two CPU contexts of which one shares its core."""
    found: List[balancing.Round] = []
    with use_devices("cpu:2") as ctx, telling() as tell:
        for shared in (True, False):
            options = {"rounds": rounds, "num_steps": num_steps, "batch_size": batch_size}
            found += balancing.measure(ctx, shared=shared, tell=tell, **options)
    print_table(*balancing.table(found))
    results = [{**asdict(one), "gain": one.gain} for one in found]
    write_results(output, "balance", results, plot_ranges(balancing.ranges(found), "ms a step"))


@bench.command()
@click.option("--devices", "specs", default="cpu,cpu:2", show_default=True, help="Choices of devices, separated by commas.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Of each precision, in turns.")
@click.option("--accuracy/--no-accuracy", default=True, show_default=True, help="Also learn the digits in each.")
@_output
def precision(specs: str, rounds: int, accuracy: bool, output: Path) -> None:
    """Compare training in low precision with float32: examples/s, and accuracy on the digits."""
    listed = specs.split(",")
    with telling() as tell:
        found = precisions.measure(listed, rounds=rounds, tell=tell)
        learned = precisions.learn(listed[-1], tell=tell) if accuracy else []
    print_table(*precisions.speed_table(found))
    if learned:
        print_table(*precisions.accuracy_table(learned))
    results = {"rounds": [asdict(one) for one in found], "learned": [asdict(one) for one in learned]}
    write_results(output, "precision", results, plot_ranges(precisions.ranges(found), "times as fast as fp32"))


class _Comparison:
    """The options that all comparisons have, and what they do with them."""

    def __init__(self, *, rounds: int, pythons: Dict[str, str], device: str, timeout: float, quick: bool) -> None:
        self.rounds = 2 if quick else rounds
        self.pythons, self.device, self.timeout, self.quick = pythons, device, timeout, quick

    def sized(self, case: Case) -> Case:
        return replace(workloads.quick(case) if self.quick else case, device=self.device)

    def few(self, numbers: List[int]) -> List[int]:
        return numbers[:2] if self.quick else numbers

    def measure(self, rows: List[Row], rounds: int = 0) -> List[Row]:
        if not rows:
            return rows
        with telling() as tell:
            compare(rows, rounds=rounds or self.rounds, pythons=self.pythons, timeout_s=self.timeout, tell=tell)
        return rows

    def finish(self, name: str, rows: List[Row], tables: List[report.Table], output: Path, figure: Any) -> None:
        for table in tables:
            if table[2]:
                print_table(*table)
        write_results(output, name, report.results(name, rows, rounds=self.rounds, tables=tables), figure)


bench.add_command(scaling_)
bench.add_command(checkpoint)
