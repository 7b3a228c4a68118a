"""gluon-mgpu agree: trains on one device and on several, and reports whether the results agree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import click
from mxnet import Context, gluon
from mxnet.gluon import nn

from ..data import load_digits
from ..devices.select import use_devices
from ..models import resnet18
from ..tuning.agreement import AGREE, LargerBatch, Recipe, SameBatch, TrialRun, larger_batch, plot_agreement, same_batch
from ._output import print_table, showing, write_results


def _mlp(num_classes: int) -> gluon.Block:
    net = nn.HybridSequential()
    net.add(nn.Flatten(), nn.Dense(64, activation="relu"), nn.Dense(num_classes))
    return net


NETWORKS: Dict[str, Callable[[int], gluon.Block]] = {"mlp": _mlp, "resnet18": resnet18}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--devices", "spec", default="cpu*2", show_default=True, help="Devices, as for use_devices; the first one also trains alone."
)
@click.option("--network", type=click.Choice(list(NETWORKS)), default="mlp", show_default=True, help="resnet18 takes minutes.")
@click.option("--stages", type=click.IntRange(1), help="Divide the network on several devices into so many stages.")
@click.option("--micro-batches", type=click.IntRange(1), default=1, show_default=True, help="With --stages: parts of a batch.")
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Passes over the digits.")
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Images per batch, over all devices.")
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), default=0.05, show_default=True, help="Learning rate for this batch."
)
@click.option("--optimizer", default="sgd", show_default=True, help="Any optimizer of MXNet; sgd gets momentum 0.9.")
@click.option(
    "--scaling",
    type=click.Choice(["linear", "sqrt", "none"]),
    default="linear",
    show_default=True,
    help="How the learning rate grows with the batch: sqrt for adam and similar optimizers.",
)
@click.option("--seeds", "num_seeds", type=click.IntRange(2), default=5, show_default=True, help="Number of runs per batch size.")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="Largest allowed difference of the mean accuracies.",
)
@click.option("--larger/--no-larger", default=True, show_default=True, help="Also train with the larger batch, over the seeds.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/agree"),
    show_default=True,
    help="Folder for agree.json and agree.png.",
)
def agree(
    spec: str,
    network: str,
    stages: Optional[int],
    micro_batches: int,
    epochs: int,
    batch_size: int,
    lr: float,
    optimizer: str,
    scaling: str,
    num_seeds: int,
    margin: float,
    larger: bool,
    output: Path,
) -> None:
    """Train on one device and on several, and report whether the results agree.

    First with the same batches: losses and weights must be equal except for rounding. Then with the batch times the number of
    devices, and a scaled learning rate: mean accuracies over the seeds must agree.

    The exit code is 1 unless all agree.
    """
    params: Dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    if micro_batches > 1 and stages is None:
        raise click.UsageError("got --micro-batches without --stages; expected both. Add --stages 2, or leave it out.")
    pipeline = {"num_stages": stages or 0, "micro_batches": micro_batches}
    recipe = Recipe(NETWORKS[network], load_digits(), batch_size, epochs, lr, optimizer, params, rule=scaling, **pipeline)
    over_seeds: Optional[LargerBatch] = None
    with use_devices(spec) as ctx, showing("loading the digits") as show:
        if stages is not None and len(ctx) % stages:
            raise click.UsageError(f"got --stages {stages} for {len(ctx)} devices; expected a multiple. Choose other --devices.")
        num_runs = 3 + (2 * num_seeds if larger else 0)
        tell = _numbered(show, num_runs)
        same = same_batch(recipe, ctx, tell=tell)
        if larger:
            over_seeds = larger_batch(recipe, ctx, seeds=range(num_seeds), margin=margin, tell=tell)
    names = (str(ctx[0]), ", ".join(map(str, ctx)))
    _print_same(same, ctx)
    verdicts = [same.verdict]
    if over_seeds is not None:
        _print_larger(over_seeds, recipe, ctx)
        verdicts.append(over_seeds.verdict)
    write_results(output, "agree", _results(same, over_seeds, names), plot_agreement(same, over_seeds, names))
    print(f"the same batches: {names[1]} and {names[0]} {same.verdict}")
    if over_seeds is not None:
        print(f"{len(ctx)} times the batch: mean accuracies {over_seeds.verdict}, within {100 * margin:g} percentage points")
    if any(verdict != AGREE for verdict in verdicts):
        sys.exit(1)


def _numbered(show: Callable[[str], None], num_runs: int) -> Callable[[str], None]:
    """Return a function that shows a message with the number of its run."""
    numbers = iter(range(1, num_runs + 1))
    return lambda text: show(f"run {next(numbers)} of {num_runs}: {text}")


def _print_same(same: SameBatch, ctx: Sequence[Context]) -> None:
    rows = []
    for name, run in ((f"{ctx[0]}, Gluon's loop", same.reference), (f"{len(ctx)} devices", same.ours)):
        rows.append([name, f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}", f"{100 * run.accuracy:.2f} %"])
    print_table(
        f"the same batches, {len(same.ours.losses)} steps", ["who", "loss of first step", "of last step", "test accuracy"], rows
    )
    compared = zip(("a loss", "a weight"), same.differences(), same.tolerances())
    rows = [[what, f"{difference:.1e}", f"{bound:.1e}"] for what, difference, bound in compared if difference == difference]
    title = f"largest differences in the first {same.num_comparable()} steps, which can be compared"
    print_table(title, ["of", "found", "allowed: 10 times rounding's, 1e-5 to 1e-3"], rows)


def _print_larger(larger: LargerBatch, recipe: Recipe, ctx: Sequence[Context]) -> None:
    pairs = list(zip(larger.reference, larger.ours))
    rows = [
        [str(seed), *(f"{100 * share:.2f} %" for share in (base.accuracy, ours.accuracy)), _points(ours.accuracy - base.accuracy)]
        for seed, (base, ours) in enumerate(pairs)
    ]
    columns = [f"batch {size} on {where}" for size, where in _sizes(recipe, ctx)]
    print_table("test accuracy", ["seed", *columns, "difference"], rows)
    low, high = larger.interval()
    print_table(
        "mean difference",
        ["between, at 90 % confidence", "allowed"],
        [[f"{_points(low)} and {_points(high)}", f"{_points(-larger.margin)} and {_points(larger.margin)}"]],
    )


def _points(difference: float) -> str:
    """Return a difference of two accuracies in percentage points."""
    return f"{100 * difference:+.2f} points"


def _sizes(recipe: Recipe, ctx: Sequence[Context]) -> List[Any]:
    return [(recipe.batch_size, str(ctx[0])), (recipe.batch_size * len(ctx), f"{len(ctx)} devices")]


def _results(same: SameBatch, larger: Optional[LargerBatch], names: Sequence[str]) -> Dict[str, Any]:
    found: Dict[str, Any] = {"devices": list(names)}
    found["same_batch"] = {
        "verdict": same.verdict,
        "num_comparable": same.num_comparable(),
        "differences": dict(zip(("loss", "weight"), same.differences())),
        "tolerances": dict(zip(("loss", "weight"), same.tolerances())),
        "runs": {name: _described(getattr(same, name)) for name in ("reference", "ours", "rounding")},
    }
    if larger is not None:
        found["larger_batch"] = {
            "verdict": larger.verdict,
            "interval": larger.interval(),
            "margin": larger.margin,
            "runs": {name: [_described(run) for run in getattr(larger, name)] for name in ("reference", "ours")},
        }
    return found


def _described(run: TrialRun) -> Dict[str, Any]:
    return {"accuracy": run.accuracy, "losses": run.losses}
