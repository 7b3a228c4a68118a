"""gluon-mgpu agree: trains on one device and on several, and reports whether the results agree."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

import click
from click.core import ParameterSource

from ._options import Whole, count, output_option, positive
from ._output import showing, write_results

if TYPE_CHECKING:
    from mxnet import Context

    from ..tuning.same_bits import Hashes, Training

_NETWORKS = ("mlp", "resnet18")
_SHOWN = 6  # tensors of a difference


@click.command()
@click.option(
    "--devices",
    "spec",
    show_default="cpu*2, or cpu*4 with --bits",
    help="Devices, as for use_devices; the first one also trains alone.",
)
@click.option(
    "--network",
    metavar="mlp|resnet18|FILE.py:FUNCTION",
    default="mlp",
    help="resnet18 takes minutes. With --bits also a function of yours, as for gluon-mgpu find-batch-size: it takes batch_size "
    "and ctx, and returns (net, loss, trainer, X, y).",
)
@click.option(
    "--bits",
    is_flag=True,
    help="Compare bits instead: train with --virtual-shards on the first 1, 2, 4, ... devices and in --processes, and name the "
    "first step and the tensors that differ.",
)
@count("--virtual-shards", default=8, help="With --bits: parts of each batch.")
@count("--processes", default=2, help="With --bits: also in so many; 1 leaves them out.")
@click.option("--steps", type=Whole(2), default=50, help="Steps to train, on the digits.")
@count("--batch-size", default=32, help="Images per batch, over all devices.")
@positive("--lr", default=0.05, help="Learning rate.")
@click.option("--optimizer", default="sgd", help="Any optimizer of MXNet; sgd gets momentum 0.9.")
@output_option("runs/agree", "agree.json; with --bits, bits.json")
@click.pass_context
def agree(context: click.Context, /, spec: Optional[str], network: str, bits: bool, output: Path, **options: Any) -> None:
    """Check that several devices train like one.

    One device and several train with the same batches. The losses of all steps must be equal except for rounding. With
    --bits, weights and gradients must have the same bits on any number of devices and processes. The exit code is 1 unless
    all agree.
    """
    for name in ("virtual_shards", "processes"):
        if not bits and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"got --{name.replace('_', '-')} without --bits; expected both. Add --bits, or leave it out.")
    if not bits and network not in _NETWORKS:
        raise click.UsageError(f"got {network} without --bits; expected {' or '.join(_NETWORKS)}. Add --bits.")
    from ..data import load_digits
    from ..devices.select import resolve_devices, use_devices
    from ..loop.stop_signals import raise_on_sigterm
    from ..trainer.options import made_optimizer
    from ..tuning.agreement import AGREE, NETWORKS, Recipe, same_batch
    from ..tuning.same_bits import Training
    from ..tuning.workload import reference_of

    made_optimizer(options["optimizer"], None, {})
    steps, batch_size, optimizer, lr = (options[name] for name in ("steps", "batch_size", "optimizer", "lr"))
    if bits:
        workload = network if network in _NETWORKS else reference_of("agree", network)
        training = Training(workload, steps, options["virtual_shards"], batch_size, optimizer, lr)
        with raise_on_sigterm("agree: stopped"):  # the job ends, too
            sys.exit(_compare_bits(training, resolve_devices(spec or "cpu*4"), options["processes"], output))
    recipe = Recipe(NETWORKS[network], load_digits(), batch_size, steps, lr, optimizer)
    with use_devices(spec or "cpu*2") as ctx, showing("loading the digits") as show:
        if len(ctx) == 1:
            raise click.UsageError(f"got {ctx[0]} alone; expected two devices or more. Pass --devices 'cpu*2'.")
        same = same_batch(recipe, ctx, on_message=show)
    names = ", ".join(map(str, ctx))
    num_steps, found, allowed = len(same.allowed()), max(same.differences(), default=0.0), max(same.allowed(), default=0.0)
    print(f"in {num_steps} comparable steps, the losses differ by at most {found:.1e}; rounding may explain {allowed:.1e}")
    print(f"the same batches: {names} and {ctx[0]} {same.verdict}")
    write_results(output, "agree", {"devices": names, "verdict": same.verdict, "losses": asdict(same)})
    sys.exit(int(same.verdict != AGREE))


def _compare_bits(training: Training, contexts: Sequence[Context], num_processes: int, output: Path) -> int:
    """Train on one device, on several and in processes; report whether all bits are the same, and return the exit code."""
    from ..tuning.same_bits import compare, train_bits, train_in_processes

    found: Dict[str, Hashes] = {}
    with showing("training") as show:
        for power in range(len(contexts).bit_length()):
            own = list(contexts[: 2**power])
            place = ", ".join(map(str, own))
            show(f"{training.num_steps} steps on {place}")
            found[place] = train_bits(training, own)
        kind = contexts[0].device_type
        if num_processes > 1 and (kind == "cpu" or len(contexts) >= num_processes):  # each needs a GPU
            place = f"{num_processes} processes"
            show(f"{training.num_steps} steps in {place}")
            found[place] = train_in_processes(training, num_processes, kind)
    first, *others = found
    lines: List[str] = []
    results: Dict[str, Any] = {}
    for place in others:
        difference = compare(found[first], found[place])
        if difference is not None:
            step, tensors = difference
            results[place] = {"step": step, "tensors": tensors}
            names = ", ".join(tensors[:_SHOWN]) + (", ..." if len(tensors) > _SHOWN else "")
            lines.append(f"{place}: other bits than {first} from step {step} on: {names}")
    write_results(output, "bits", {"training": asdict(training), "hashes": found, "differences": results})
    print("\n".join(lines) or f"the same bits on {'; '.join(found)}")
    return int(bool(lines))
