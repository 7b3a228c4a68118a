"""The program of this folder: one command per benchmark."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import balance as balances
import checkpoint_command
import click
import hybrids
import pipelines
import precision as precisions
import report
import scaling_command
import seq2seq as translations
import tracing
import workloads
from case import Case
from charts import plot_lines, plot_ranges
from command_options import contenders_option, progress, python_option
from compare import Row, compare
from gluon_mgpu.cli._options import numbers
from gluon_mgpu.cli._output import print_table, write_results
from gluon_mgpu.cli.main import CommandGroup
from gluon_mgpu.devices.select import use_devices
from result_files import json_option, save_json

_output = click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/bench"),
    show_default=True,
    help="Folder for the JSON file and the plot.",
)
_hybridize = click.option(
    "--hybridize/--no-hybridize", default=True, show_default=True, help="Compile the networks with static memory."
)


def _num_devices(default: str) -> Callable[..., Any]:
    return click.option(
        "--num-devices", default=default, show_default=True, callback=numbers, help="Numbers of contexts, separated by commas."
    )


def _network(purpose: str) -> Callable[..., Any]:
    return click.option("--network", type=click.Choice(["mlp", "resnet18"]), default="mlp", show_default=True, help=purpose)


def _comparison_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that all comparisons have."""
    options = [
        click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds; each measures everything."),
        python_option(workloads.CONTENDERS, "d2l"),
        click.option(
            "--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="Type of MXNet's contexts."
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
            help="Small sizes, 2 rounds, the first two of each list: shows whether it works, not what is faster.",
        ),
        _output,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Compare gluon_mgpu with Gluon, d2l, GluonCV and PyTorch, and measure single features.

    Each benchmark prints tables, and saves JSON and a plot. A program that is not installed is listed as not measured.
    RESULTS.md in this folder holds figures with machine and command.
    """


@main.command()
@_num_devices("1,2,4,8,16")
@contenders_option(workloads.STEP_CONTENDERS)
@_network("mlp: 62 small parameters; resnet18: batch 8, without the figures of memory.")
@_hybridize
@click.option("--memory/--no-memory", default=True, show_default=True, help="Also measure memory after many steps.")
@_comparison_options
def step(
    num_devices: List[int], contenders: List[str], network: str, hybridize: bool, memory: bool, output: Path, **options: Any
) -> None:
    """Compare the host's cost of dispatching a step."""
    run = _Comparison(**options)
    case = replace(run.sized(workloads.STEPS[network]), hybridize=hybridize)
    rows = run.measure(workloads.step_rows(contenders, run.few(num_devices), case))
    tables = [report.contender_table(rows), report.parts_table(rows), report.dispatch_table(rows), report.whole_table(rows)]
    memory_rows: List[Row] = []
    if memory and network == "mlp":
        case = replace(run.sized(workloads.MEMORY), hybridize=hybridize)
        memory_rows = run.measure(workloads.memory_rows(contenders, min(2, max(num_devices)), case), rounds=1)
        tables += [report.memory_table(memory_rows)] if memory_rows else []
    run.finish("step", rows + memory_rows, tables, output, plot_lines(report.step_lines(rows), "contexts", "ms"))


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
    run.finish("train", rows, tables, output, plot_ranges(report.bars_of(rows, "images_per_s"), "images/s"))


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
    rows = run.measure(workloads.evaluate_rows(contenders, run.few(num_devices), case))
    tables = [report.contender_table(rows), report.evaluate_table(rows)]
    run.finish("evaluate", rows, tables, output, plot_ranges(report.bars_of(rows, "evaluate_s"), "ms per pass"))


@main.command()
@_num_devices("1,2,4")
@contenders_option(workloads.SIZE_CONTENDERS)
@click.option(
    "--num-params",
    default="10,30,100,300,1000",
    show_default=True,
    callback=numbers,
    help="Numbers of parameters, separated by commas.",
)
@_comparison_options
def size(num_devices: List[int], contenders: List[str], num_params: List[int], output: Path, **options: Any) -> None:
    """Compare the update of few large parameters and of many small ones, of the same total size."""
    run = _Comparison(**options)
    case = run.sized(workloads.SIZE)
    rows = run.measure(workloads.size_rows(contenders, run.few(num_devices), run.few(num_params), case))
    tables = [report.contender_table(rows), report.size_table(rows)]
    run.finish("size", rows, tables, output, plot_lines(report.size_lines(rows), "parameters", "ms"))


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
    show_default=True,
    help="large: 300 units, 8,000 words, sentences of 30 tokens; korean-numbers: as in train seq2seq. May be repeated.",
)
@_comparison_options
def seq2seq(
    num_devices: List[int], contenders: List[str], hybridize: bool, sizes: Sequence[str], output: Path, **options: Any
) -> None:
    """Compare training translators with attention: sentences/s, cost of padding, speed-up of a second context."""
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
    run.finish("seq2seq", rows, tables, output, plot_ranges(translations.bars(rows), "sentences/s, relative to ours"))


@main.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds; each measures both splits.")
@click.option("--num-steps", type=click.IntRange(1), default=10, show_default=True, help="Steps of each split in a round.")
@click.option("--batch-size", type=click.IntRange(2), default=4096, show_default=True, help="Examples per step.")
@_output
def balance(rounds: int, num_steps: int, batch_size: int, output: Path) -> None:
    """Compare an even split with measured shares, on two CPU contexts, one of which shares its core."""
    found: List[balances.Round] = []
    with use_devices("cpu:2") as ctx, progress() as show:
        for shared in (True, False):
            options = {"rounds": rounds, "num_steps": num_steps, "batch_size": batch_size}
            found += balances.measure(ctx, shared=shared, on_message=show, **options)
    print_table(*balances.table(found))
    results = [{**asdict(one), "gain": one.gain} for one in found]
    write_results(output, "balance", results, plot_ranges(balances.ranges(found), "ms per step"))


@main.command()
@click.option("--devices", "specs", default="cpu,cpu:2", show_default=True, help="Choices of devices, separated by commas.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds; each measures both precisions.")
@click.option("--accuracy/--no-accuracy", default=True, show_default=True, help="Also compare accuracy on the digits.")
@_output
def precision(specs: str, rounds: int, accuracy: bool, output: Path) -> None:
    """Compare training in low precision with float32: examples/s, and accuracy on the digits."""
    choices = specs.split(",")
    with progress() as show:
        found = precisions.measure(choices, rounds=rounds, on_message=show)
        learned = precisions.learn(choices[-1], on_message=show) if accuracy else []
    print_table(*precisions.speed_table(found))
    if learned:
        print_table(*precisions.accuracy_table(learned))
    results = {"rounds": [asdict(one) for one in found], "learned": [asdict(one) for one in learned]}
    write_results(output, "precision", results, plot_ranges(precisions.ranges(found), "speed relative to fp32"))


@main.command()
@click.option("--rounds", type=click.IntRange(2), default=60, show_default=True, help="Rounds; each with a trace and without.")
@click.option("--num-steps", type=click.IntRange(20), default=20, show_default=True, help="Steps of each part of a run.")
@json_option
def trace(rounds: int, num_steps: int, json_path: Optional[Path]) -> None:
    """Measure what a trace of some steps costs a run on two CPU contexts: in these steps, before and after them."""
    with use_devices("cpu:2") as ctx, progress() as show:
        found = tracing.measure(ctx, rounds=rounds, num_steps=num_steps, on_message=show)
    print_table(*tracing.table(found))
    save_json(json_path, tracing.results(found, rounds=rounds, num_steps=num_steps))


@main.command()
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Rounds; each measures everything.")
@click.option("--micro-batches", type=click.IntRange(1), default=8, show_default=True, help="Parts of a batch.")
@json_option
def pipeline(rounds: int, micro_batches: int, json_path: Optional[Path]) -> None:
    """Compare two stages on two CPU contexts with one context: time and memory of a step, by schedule."""
    with use_devices("cpu:2") as ctx, progress() as show:
        found = pipelines.measure(ctx, rounds=rounds, micro_batches=micro_batches, on_message=show)
        memory = pipelines.peaks(micro_batches, on_message=show)
    print_table(*pipelines.table(found, memory, micro_batches))
    save_json(json_path, pipelines.results(found, memory, rounds=rounds, micro_batches=micro_batches))


@main.command()
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Rounds; each measures everything.")
@click.option("--layers", default="1,4", show_default=True, callback=numbers, help="Numbers of layers, separated by commas.")
@click.option("--batches", default="60,128", show_default=True, callback=numbers, help="Batch sizes, separated by commas.")
@click.option("--hidden", type=click.IntRange(1), default=300, show_default=True, help="Size of embeddings and layers.")
@click.option("--cell", type=click.Choice(["gru", "lstm"]), default="gru", show_default=True, help="Cell of the layers.")
@click.option("--project", type=click.IntRange(2), help="Project a step to so many devices instead, from tasks measured on one.")
@click.option("--slower", default="1", show_default=True, callback=numbers, help="With --project: copies so many times as slow.")
@json_option
def hybrid(
    rounds: int,
    layers: List[int],
    batches: List[int],
    hidden: int,
    cell: str,
    project: Optional[int],
    slower: List[int],
    json_path: Optional[Path],
) -> None:
    """Compare data, model and hybrid parallelism of a translator on two CPU contexts: time, bytes moved and bytes held.

    "hybrid, 4 x 2" has 4 stages, on the contexts in turn, and 2 micro-batches. With --project, the copies are as fast as those
    between two contexts here, which are slow next to GPUs' arithmetic: --slower 1,30 also shows devices that compute 30 times as
    fast, and copy as fast as these.
    """
    sizes = [hybrids.Size(number, batch, hidden, cell=cell) for number in layers for batch in batches]
    with use_devices("cpu:2") as ctx:
        if project is not None:
            copies = [hybrids.bandwidth(ctx) / times for times in slower]
            for size in sizes:
                with progress() as show:
                    found = hybrids.project(size, project, copies, ctx[0], rounds=rounds, on_message=show)
                print_table(*found)
            return
        with progress() as show:
            measured = hybrids.measure(sizes, ctx, rounds=rounds, on_message=show)
    print_table(*hybrids.table(measured))
    save_json(json_path, hybrids.results(measured, rounds))


class _Comparison:
    """The options that all comparisons have, and the steps that all take."""

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
        with progress() as show:
            compare(rows, rounds=rounds or self.rounds, pythons=self.pythons, timeout_s=self.timeout, on_message=show)
        return rows

    def finish(self, name: str, rows: List[Row], tables: List[report.Table], output: Path, figure: Any) -> None:
        for table in tables:
            if table[2]:
                print_table(*table)
        write_results(output, name, report.results(name, rows, rounds=self.rounds, tables=tables), figure)


main.add_command(scaling_command.scaling_)
main.add_command(checkpoint_command.checkpoint)
