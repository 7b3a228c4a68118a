"""gluon-mgpu agree: trains on one device and on several, and reports whether the results agree."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import click
from click.core import ParameterSource
from mxnet import Context
from rich.console import Console

from ..data import load_digits
from ..devices.select import resolve_devices, use_devices
from ..errors import TrainerError
from ..tuning.agreement import AGREE, LargerBatch, Recipe, SameBatch, TrialRun, larger_batch, plot_agreement, same_batch
from ..tuning.batch_size.workload import reference_of
from ..tuning.bits import KINDS, NETWORKS, Bits, Difference, Place, Training, bisect, compare, train_at
from ._output import print_table, showing, write_results

_OF_BITS = ("steps", "virtual_shards", "processes")
_NOT_OF_BITS = ("stages", "micro_batches", "epochs", "scaling", "num_seeds", "margin", "larger")
_SHOWN = 12  # digits of a hash


def _network(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """Return the name of a network of ours, or under which another process finds a function of the user's."""
    try:
        return text if text in NETWORKS else reference_of(text)
    except TrainerError:
        raise click.BadParameter(f"got {text!r}; expected {', '.join(NETWORKS)} or FILE.py:FUNCTION.") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--devices",
    "spec",
    default="cpu*2",
    show_default="cpu*2, or cpu*4 with --bits",
    help="Devices, as for use_devices; the first one also trains alone.",
)
@click.option(
    "--network",
    callback=_network,
    metavar="mlp|resnet18|FILE.py:FUNCTION",
    default="mlp",
    show_default=True,
    help="resnet18 takes minutes. With --bits also a function of yours, as for gluon-mgpu plan: it takes batch_size and ctx, and "
    "returns (net, loss, trainer, X, y).",
)
@click.option(
    "--bits",
    is_flag=True,
    help="Compare bits instead: train with --virtual-shards on the first 1, 2, 4, ... devices and in --processes, and name the "
    "first step, layer and tensor that differ.",
)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="With --bits: steps to train.")
@click.option("--virtual-shards", type=click.IntRange(1), default=8, show_default=True, help="With --bits: parts of each batch.")
@click.option(
    "--processes", type=click.IntRange(1), default=2, show_default=True, help="With --bits: also in so many; 1 leaves them out."
)
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
    help="Folder for agree.json and agree.png; with --bits, for bits.json.",
)
@click.pass_context
def agree(
    context: click.Context,
    /,
    spec: str,
    network: str,
    bits: bool,
    steps: int,
    virtual_shards: int,
    processes: int,
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

    With --bits, weights, optimizer states and losses must have the same bits on any number of devices and processes.

    The exit code is 1 unless all agree.
    """
    for name in _NOT_OF_BITS if bits else _OF_BITS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "--seeds" if name == "num_seeds" else f"--{name.replace('_', '-')}"
            wrong = f"with --bits; expected {_listed(_OF_BITS)}" if bits else "without --bits; expected both"
            raise click.UsageError(f"got {option} {wrong}. Leave {option} out.")
    if bits:
        training = Training(network, steps, virtual_shards, batch_size, optimizer, lr)
        is_default = context.get_parameter_source("spec") is ParameterSource.DEFAULT
        _compare_bits(training, resolve_devices("cpu*4" if is_default else spec), processes, output)
        return
    if network not in NETWORKS:
        raise click.UsageError(f"got {network} without --bits; expected {' or '.join(NETWORKS)}. Add --bits.")
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


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _compare_bits(training: Training, contexts: Sequence[Context], num_processes: int, output: Path) -> None:
    """Train on one device, on several and in processes, and report whether all bits are the same."""
    places = [Place(tuple(contexts[: 2**i])) for i in range(len(contexts).bit_length())]
    if num_processes > 1 and (contexts[0].device_type == "cpu" or len(contexts) >= num_processes):  # each needs a GPU
        places.append(Place(tuple(contexts[:1]), num_processes))
    found: Dict[str, Bits] = {}
    differences: Dict[str, Difference] = {}
    with Console(stderr=True).status("") as status:
        for place in places:
            status.update(f"{training.num_steps} steps on {place}")
            found[str(place)] = train_at(place, training)
            difference = compare(found[str(places[0])], found[str(place)])
            if difference is not None and not differences:
                difference = bisect(training, places[0], place, difference, status.update)
            differences.update({str(place): difference} if difference is not None else {})
    rows = [[name, *(bits.hashes()[kind][:_SHOWN] for kind in KINDS)] for name, bits in found.items()]
    print_table(f"SHA-256 after {training.num_steps} steps with {training.num_shards} virtual shards", ["where", *KINDS], rows)
    output.mkdir(parents=True, exist_ok=True)
    hashes = {name: {"at_end": bits.hashes(), "steps": bits.steps} for name, bits in found.items()}
    results = {"training": asdict(training), "hashes": hashes, "differences": {k: asdict(v) for k, v in differences.items()}}
    (output / "bits.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"saved {output / 'bits.json'}")
    counts = ", ".join(str(len(place.contexts)) for place in places if place.num_processes == 1)
    if not differences:
        everywhere = [f"{counts} device{'s' if counts != '1' else ''}", *(str(one) for one in places if one.num_processes > 1)]
        print(f"the same bits on {', and in '.join(everywhere)}")
        return
    for name, difference in differences.items():
        print(f"{name}: other {', '.join(difference.kinds)} than {places[0]} from step {difference.step} on")
    print(_found(next(iter(differences.values()))))
    sys.exit(1)


def _found(difference: Difference) -> str:
    """Return the first tensor that differs, as a text."""
    if not difference.tensor:
        return (
            f"step {difference.step} has the same bits when it is computed again layer by layer. Train without hybridize(), and "
            "check that the network reads no clock, and no random generator that random, np.random and mx.random do not seed."
        )
    shards = ", ".join(map(str, difference.shards))
    where = f" Virtual shards: {shards}; the first one on {difference.device}." if shards else ""
    return f"the first tensor of step {difference.step} that differs: {difference.tensor}.{where}"
