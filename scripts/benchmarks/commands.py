"""The program of this folder: one command per benchmark."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import click
import exposed as waiting
import imports
import report
import scaling as processes
import seq2seq as translations
import workloads
from case import Case
from charts import plot_lines, plot_ranges
from command_options import contenders_option, numbers, progress, python_option
from compare import Row, compare
from gluon_mgpu.cli._options import all_of
from gluon_mgpu.cli._output import print_table, write_results
from gluon_mgpu.cli.main import CommandGroup
from gluon_mgpu.plots import save
from gluon_mgpu.trainer.slab import BUCKET_BYTES, CUT_BYTES

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
_output = click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/bench"),
    help="Folder for the JSON file and the plot.",
)
_hybridize = click.option("--hybridize/--no-hybridize", default=True, help="Compile the networks with static memory.")


def _num_devices(default: str) -> Callable[..., Any]:
    return click.option("--num-devices", default=default, callback=numbers, help="Numbers of contexts, separated by commas.")


def _network(purpose: str) -> Callable[..., Any]:
    return click.option("--network", type=click.Choice(["mlp", "resnet18"]), default="mlp", help=purpose)


_comparison_options = all_of(
    click.option("--rounds", type=click.IntRange(1), default=5, help="Rounds; each measures everything."),
    python_option(workloads.CONTENDERS, "d2l"),
    click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", help="Type of MXNet's contexts."),
    click.option("--timeout", type=click.FloatRange(1), default=180, help="Seconds to wait for a contender's answer."),
    click.option(
        "--quick",
        is_flag=True,
        help="Small sizes, 2 rounds, the first two of each list: shows whether it works, not what is faster.",
    ),
    _output,
)


@click.group(cls=CommandGroup, context_settings=_HELP)
def main() -> None:
    """Compare gluon_mgpu with Gluon, d2l, GluonCV and PyTorch, and measure single features.

    Each benchmark prints tables, and saves JSON and a plot. A program that is not installed is listed as not measured.
    RESULTS.md in this folder holds figures with machine and command.
    """


@main.command()
@_num_devices("1,2,4,8,16")
@contenders_option(workloads.STEP_CONTENDERS)
@_network("mlp: 62 small parameters; resnet18: batch 8.")
@_hybridize
@_comparison_options
def step(num_devices: List[int], contenders: List[str], network: str, hybridize: bool, output: Path, **options: Any) -> None:
    """Compare the host's cost of dispatching a step."""
    run = _Comparison(**options)
    case = replace(run.sized(workloads.STEPS[network]), hybridize=hybridize)
    rows = run.measure(workloads.step_rows(contenders, run.few(num_devices), case))
    tables = [report.contender_table(rows), report.parts_table(rows), report.dispatch_table(rows), report.whole_table(rows)]
    run.finish("step", rows, tables, output, lambda: plot_lines(report.step_lines(rows), "contexts", "ms"))


@main.command()
@_num_devices("1,2")
@contenders_option(workloads.TRAIN_CONTENDERS)
@_hybridize
@_comparison_options
def train(num_devices: List[int], contenders: List[str], hybridize: bool, output: Path, **options: Any) -> None:
    """Compare training ResNet-18 on 28x28 images, batch 64: images/s, and the speed-up of a second context."""
    run = _Comparison(**options)
    case = replace(run.sized(workloads.TRAIN), hybridize=hybridize)
    parts = workloads.train_rows(contenders, run.few(num_devices), case)
    rows = [row for part in parts for row in run.measure(part)]
    tables = [report.contender_table(rows), report.train_table(rows), report.scaling_table(rows)]
    run.finish("train", rows, tables, output, lambda: plot_ranges(report.bars_of(rows, "images_per_s"), "images/s"))


@main.command()
@_num_devices("1,2")
@contenders_option(workloads.EVALUATE_CONTENDERS)
@_network("Network to evaluate.")
@_hybridize
@_comparison_options
def evaluate(num_devices: List[int], contenders: List[str], network: str, hybridize: bool, output: Path, **options: Any) -> None:
    """Compare evaluation on many small batches: accuracy summed on the devices, or read after each batch."""
    run = _Comparison(**options)
    case = replace(run.sized(workloads.EVALUATE), network=network, hybridize=hybridize)
    rows = run.measure(workloads.rows_with_threads(contenders, run.few(num_devices), case))
    tables = [report.contender_table(rows), report.evaluate_table(rows)]
    run.finish("evaluate", rows, tables, output, lambda: plot_ranges(report.bars_of(rows, "evaluate_s"), "ms per pass"))


@main.command()
@_num_devices("1,2")
@contenders_option(workloads.SEQ2SEQ_CONTENDERS)
@_hybridize
@click.option(
    "--size",
    "sizes",
    type=click.Choice(translations.SIZES),
    multiple=True,
    default=translations.SIZES,
    help="large: 300 units, 8,000 words, sentences of 30 tokens; korean-numbers: as in train seq2seq. May be repeated.",
)
@_comparison_options
def seq2seq(
    num_devices: List[int], contenders: List[str], hybridize: bool, sizes: Sequence[str], output: Path, **options: Any
) -> None:
    """Compare training translators with attention: sentences/s, and the speed-up of a second context."""
    run = _Comparison(**options)
    rows: List[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        texts = [translations.make_text(size, Path(folder), quick=run.quick) for size in dict.fromkeys(sizes)]
        for text in texts:
            text = replace(text, case=replace(text.case, device=run.device, hybridize=hybridize))
            for part in translations.seq2seq_rows(contenders, run.few(num_devices), text):
                rows += run.measure(part)
    scaling = report.scaling_table(rows, "pass_s")
    tables = [report.contender_table(rows), translations.speed_table(rows), scaling]
    run.finish("seq2seq", rows, tables, output, lambda: plot_ranges(translations.bars(rows), "sentences/s, relative to ours"))


@main.command()
@click.option("--num-processes", default="2", callback=numbers, help="Processes, separated by commas.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Rounds; each runs every row.")
@click.option("--steps", type=click.IntRange(1), default=8, help="Measured steps of a run.")
@click.option("--horovod/--no-horovod", default=False, help="Also sum through Horovod.")
def scaling(num_processes: List[int], rounds: int, steps: int, horovod: bool) -> None:
    """Compare training ResNet-18 on several contexts, and in several processes, with one context; one thread each."""
    rows = processes.scaling_rows(num_processes, with_horovod=horovod)
    with progress() as show:
        processes.measure(rows, rounds=rounds, steps=steps, on_message=show)
    print_table(*processes.table(rows))


@main.command("import")
@click.option("--rounds", type=click.IntRange(1), default=15, help="Rounds; each runs every program.")
def import_(rounds: int) -> None:
    """Compare the processor time of importing gluon_mgpu with MXNet's alone."""
    with progress() as show:
        found = imports.measure(rounds=rounds, on_message=show)
    print_table(*imports.table(found))


@main.command()
@click.option("--network", type=click.Choice(list(waiting.NETWORKS)), default="bert-base", help="Whose parameters.")
@click.option("--sizes", callback=lambda *all: all[2] and numbers(*all), help="Their bytes, in order of use, instead.")
@click.option("--num-gpus", default="2,4,8", callback=numbers, help="Numbers of GPUs, separated by commas.")
@click.option("--gb-per-s", type=click.FloatRange(0, min_open=True), default=12, help="Of a GPU's link, in each direction.")
@click.option("--step-ms", type=click.FloatRange(0), default=120, help="Of both passes; two thirds are backward.")
@click.option("--bucket-bytes", type=click.IntRange(1), default=BUCKET_BYTES, help="See Trainer.")
@click.option("--cut-bytes", type=click.IntRange(1), default=CUT_BYTES, help="Larger parameters are cut.")
def exposed(
    network: str, sizes: Any, num_gpus: List[int], gb_per_s: float, step_ms: float, bucket_bytes: int, cut_bytes: int
) -> None:
    """Calculate for how long a step on several GPUs waits for sums and weights after its passes: a model, no measurement."""
    found = sizes or waiting.NETWORKS[network]
    print_table(*waiting.table(found, num_gpus, gb_per_s * 1e9, step_ms / 1000, bucket_bytes, cut_bytes))


class _Comparison:
    """The options that all comparisons have, and the steps that all take."""

    def __init__(self, *, rounds: int, pythons: Dict[str, str], device: str, timeout: float, quick: bool) -> None:
        self.rounds = 2 if quick else rounds
        self.pythons, self.device, self.timeout, self.quick = pythons, device, timeout, quick

    def sized(self, case: Case) -> Case:
        return replace(workloads.quick(case) if self.quick else case, device=self.device)

    def few(self, numbers: List[int]) -> List[int]:
        return numbers[:2] if self.quick else numbers

    def measure(self, rows: List[Row]) -> List[Row]:
        if not rows:
            return rows
        with progress() as show:
            compare(rows, rounds=self.rounds, pythons=self.pythons, timeout_s=self.timeout, on_message=show)
        return rows

    def finish(self, name: str, rows: List[Row], tables: List[report.Table], output: Path, figure: Callable[[], Any]) -> None:
        for table in tables:
            if table[2]:
                print_table(*table)
        write_results(output, name, report.results(name, rows, rounds=self.rounds, tables=tables))
        save(figure(), output / f"{name}.png")
