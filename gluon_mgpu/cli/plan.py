"""gluon-mgpu plan: measures a training on these devices, and finds its fastest layout."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import click
from mxnet import Context, MXNetError
from rich.console import Console

from ..devices.select import resolve_devices
from ..errors import DeviceError, StepError, TrainerError, last_line
from ..runtime.units import format_bytes
from ..tuning.layouts import Costs, Layout, Prediction, choose, layouts_of, margin, predict, ranked
from ..tuning.trial import Trial
from ._options import FILE, count, devices_option, numbers, positive, size_in_bytes
from ._output import print_table
from ._plan_target import Target, target_of

_NOT_MEASURED = "not measured within --seconds"
_MOST_MEASURED = 3  # times each part is measured, if there is time: other programs only lengthen a measurement
_SHOWN = 10  # layouts, and all that were run


@dataclass
class Plan:
    """What is known of the layouts so far.

    Attributes
    ----------
    layouts : list of Layout
        The first one is the default.
    costs : dict of (kind, stages, precision) to Costs
    num_examples : dict of int to int
        Of the measured batch of each batch size.
    predictions : list of Prediction
        The fastest one first.
    rates : dict of Layout to list of float
        Examples/s, one number per round.
    left_out : dict of Layout to str
        Why a layout was neither predicted nor run.
    """

    target: Target
    contexts: Sequence[Context]
    layouts: List[Layout]
    memory_limit: Optional[int] = None
    costs: Dict[Tuple[str, int, str], Costs] = field(default_factory=dict)
    num_examples: Dict[int, int] = field(default_factory=dict)
    predictions: List[Prediction] = field(default_factory=list)
    rates: Dict[Layout, List[float]] = field(default_factory=dict)
    left_out: Dict[Layout, str] = field(default_factory=dict)

    @property
    def default(self) -> Layout:
        """What the training program does without options."""
        return self.layouts[0]

    @property
    def reference(self) -> Layout:
        """The layout that others are compared with: the default, or what is predicted to be the fastest if that cannot run."""
        return next(one for one in [self.default, *(one.layout for one in self.predictions)] if one not in self.left_out)

    def measure(self, seconds: float, on_message: Callable[[str], None]) -> None:
        """Measure the parts of all layouts, for about so long, and predict each layout's speed."""
        end = time.monotonic() + seconds

        def has_time() -> bool:
            return time.monotonic() < end

        try:
            for _ in range(_MOST_MEASURED):
                for network in dict.fromkeys(layout.network for layout in self.layouts if layout not in self.left_out):
                    if has_time() or not self.num_examples:
                        on_message(f"measuring the parts: {network}")
                        self._visit(network, partial(self._measure_parts, network, has_time))
        finally:  # also after Ctrl-C
            self._predict()
        self._check()

    def run(self, layouts: Sequence[Layout], rounds: int, on_message: Callable[[str], None]) -> None:
        """Train some batches in each layout, round by round, so that a slow moment of the machine affects all.

        A layout that fails is left out. Rounds count when they are complete.
        """
        networks = list(dict.fromkeys(layout.network for layout in layouts))
        for number in range(1, rounds + 1):
            found: Dict[Layout, float] = {}
            for network in networks[:: 1 if number % 2 else -1]:
                own = [one for one in layouts if one.network == network and one not in self.left_out]
                if own:
                    on_message(f"round {number} of {rounds}: {network}, {len(own)} layouts")
                    self._visit(network, partial(_run_all, own, found))
            for layout in found:
                if layout not in self.left_out:
                    self.rates.setdefault(layout, []).append(found[layout])
            self._check()

    def _check(self) -> None:
        """Raise if no layout can run."""
        if all(one.layout in self.left_out for one in self.predictions):
            raise TrainerError(
                f"plan: got no layout that can run: {self.default}: {self.left_out[self.default]}; expected one or more. Check "
                "the network, or raise --memory-limit."
            )

    def _visit(self, network: Layout, work: Callable[[Trial], None]) -> None:
        """Call `work` with the network on its devices. Layouts that cannot run are left out."""
        try:
            self.target.visit(network, self.contexts, work)
        except (TrainerError, StepError, DeviceError, MXNetError, click.UsageError) as error:
            reason = error.message if isinstance(error, click.UsageError) else last_line(error)
            for layout in self.layouts:
                if layout.network == network:
                    self.left_out[layout] = reason
                    self.rates.pop(layout, None)

    def _measure_parts(self, network: Layout, has_time: Callable[[], bool], trial: Trial) -> None:
        costs = self.costs.setdefault((network.kind, network.stages, network.precision), Costs())
        self.num_examples[network.batch_size] = trial.num_examples
        own = list(dict.fromkeys(layout.micro_batches for layout in self.layouts if layout.network == network))
        if network.kind == "data":
            trial.measure_batches(costs, own, has_time)
        else:
            trial.measure_tasks(costs, own, has_time)

    def _predict(self) -> None:
        size, known = next(iter(self.num_examples.items()), (1, 1))
        found = []
        for layout in self.layouts:
            if layout in self.left_out:
                continue
            costs = self.costs.get((layout.kind, layout.stages, layout.precision), Costs())
            num_examples = self.num_examples.get(layout.batch_size, round(known / size * layout.batch_size))
            one = predict(layout, costs, num_examples, len(self.contexts))
            if one is None:
                is_small = num_examples * layout.stages < len(self.contexts) * layout.micro_batches
                self.left_out[layout] = "fewer examples than micro-batches" if is_small else _NOT_MEASURED
            else:
                found.append(one)
        self.predictions = ranked(found, self.memory_limit)
        for one in found:
            if one not in self.predictions:
                self.left_out[one.layout] = f"needs {format_bytes(one.bytes_per_device)} per device, more than --memory-limit"

    def rows(self) -> List[Dict[str, Any]]:
        """Return one row per layout: as asked for, predicted, measured, or why not."""
        predicted = {one.layout: one for one in self.predictions}
        found = []
        for layout in [*predicted, *(layout for layout in self.layouts if layout not in predicted)]:
            one, rates = predicted.get(layout), self.rates.get(layout, [])
            row = {**asdict(layout), "predicted_examples_per_s": one and one.examples_per_s}
            row["predicted_bytes_per_device"] = one and one.bytes_per_device
            row["examples_per_s"], row["rounds"] = (median(rates), rates) if rates else (None, [])
            found.append({**row, "left_out": self.left_out.get(layout, "")})
        return found


def _run_all(layouts: Sequence[Layout], found: Dict[Layout, float], trial: Trial) -> None:
    for layout in layouts:
        found[layout] = trial.rate(layout)


@click.command()
@click.argument("network")
@devices_option
@click.option(
    "--batch-size",
    "batch_sizes",
    callback=lambda context, parameter, text: text and numbers(context, parameter, text),
    metavar="N[,N...]",
    help="Examples per batch, over all devices; for seq2seq, tokens. Several are compared: another batch size changes what is "
    "learned. By default the training program's, and 64 for a file.",
)
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    multiple=True,
    default=["fp32"],
    show_default=True,
    help="Number format. Give it several times to compare: --precision fp32 --precision bf16.",
)
@positive("--seconds", default=60.0, show_default=True, help="Time to measure parts; what is left over is estimated or left out.")
@count("--top", default=3, help="How many of the layouts that are predicted to be the fastest it runs.")
@count("--rounds", default=5, help="How often to run each of them, and the default.")
@click.option(
    "--memory-limit",
    callback=size_in_bytes,
    metavar="SIZE",
    help="Leave out layouts that need more bytes per device, such as 4GiB. By default there is no limit.",
)
@click.option("--exhaustive", is_flag=True, help="Run every layout, and report how far the choice is from the fastest one.")
@click.option("--output", type=FILE, metavar="FILE.json|FILE.csv", help="Write all layouts to this file.")
@click.argument("arguments", metavar="[ARGUMENTS...]", nargs=-1)
def plan(
    network: str,
    arguments: Sequence[str],
    devices: str,
    choice: Dict[str, Any],
    batch_sizes: Optional[List[int]],
    precisions: Sequence[str],
    seconds: float,
    top: int,
    rounds: int,
    memory_limit: Optional[int],
    exhaustive: bool,
    output: Optional[Path],
) -> None:
    """Find the fastest way to train on these devices, and print its command.

    NETWORK is resnet18 or seq2seq, for gluon-mgpu train, or FILE.py:FUNCTION. It measures one batch, data parallel and stage by
    stage, and predicts examples/s and bytes per device of each layout: data parallelism, pipelines, hybrids, their micro-batches,
    schedules and recomputation. Then it runs the best ones and the default, data parallelism, in turns.

    FUNCTION takes batch_size and ctx, and returns (net, loss, trainer, X, y), as for find-batch-size. Arguments after -- go to
    the training program: gluon-mgpu plan seq2seq --devices "cpu*2" -- --hidden-size 300. Ctrl-C keeps what was measured.
    """
    if output is not None and output.suffix not in (".json", ".csv"):
        raise click.BadParameter(f"got {output.name}; expected a name that ends in .json or .csv.", param_hint="--output")
    target = target_of(network, arguments)
    contexts = resolve_devices(devices, **choice)
    sizes = list(dict.fromkeys(batch_sizes or [target.batch_size]))
    layouts = layouts_of(len(contexts), sizes, list(dict.fromkeys(precisions)), target.kinds)
    made = Plan(target, contexts, layouts, memory_limit)
    try:
        with Console(stderr=True).status("measuring the parts") as status:
            made.measure(seconds, status.update)
            predicted = [one.layout for one in made.predictions]
            chosen = predicted if exhaustive else predicted[:top]
            made.run(list(dict.fromkeys([made.reference, *chosen])), rounds, status.update)
    finally:  # also after Ctrl-C
        _show(made)
        if output is not None:
            _write(made, output)
        if made.rates:
            _print_choice(made, devices, top, exhaustive)


def _show(made: Plan) -> None:
    """Print the layouts, and those that were left out."""
    rows = []
    names = {layout: str(layout) for layout in made.layouts}
    common = f", batch {made.default.batch_size}, {made.default.precision}"
    common = common if all(common in name for name in names.values()) else ""
    names = {layout: name.replace(common, "") if common else name for layout, name in names.items()}  # networks are among them
    predicted = {one.layout: one for one in made.predictions}
    shown = dict.fromkeys([*made.rates, *list(predicted)[:_SHOWN]])
    for layout in sorted(shown, key=lambda one: -median(made.rates.get(one, [0.0]))):
        one, rates = predicted.get(layout), made.rates.get(layout)
        rows.append(
            [
                names[layout] + " (default)" * (layout == made.default),
                f"{one.examples_per_s:.1f}" if one else "-",
                f"{median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})" if rates else "-",
                str(margin(rates, made.rates[made.reference])) if rates else "-",
                format_bytes(one.bytes_per_device) if one else "-",
            ]
        )
    if rows:
        title = f"layouts on {', '.join(map(str, made.contexts))}{common}: examples/s"
        print_table(title, ["layout", "predicted", "measured", "compared", "per device"], rows)
        if len(shown) < len(predicted):
            click.echo(f"and {len(predicted) - len(shown)} layouts that are predicted to be slower: --output writes all")
    reasons: Dict[str, List[Layout]] = {}
    for layout, reason in made.left_out.items():
        reasons.setdefault(reason, []).append(layout)
    for reason, own in reasons.items():
        kept = {layout.network for layout in made.layouts if layout not in own}
        told = dict.fromkeys(names[one] if one.network in kept else f"all of {names[one.network]}" for one in own)
        click.echo(f"left out: {'; '.join(told)}: {reason}")


def _print_choice(made: Plan, devices: str, top: int, exhaustive: bool) -> None:
    """Print the command of the layout to use, and why."""
    finalists = {made.reference, *(one.layout for one in made.predictions[:top])}
    name = "the default" if made.reference == made.default else str(made.reference)
    use, fastest, found = choose({one: rates for one, rates in made.rates.items() if one in finalists}, made.reference)
    if use != made.reference:
        click.echo(f"fastest: {use}, {found} times {name}")
    elif fastest == made.reference:
        click.echo(f"fastest: {name}")
    else:
        click.echo(f"{name}: {fastest} is {found} times as fast, which is within the noise")
    if exhaustive:
        best = max(made.rates, key=lambda layout: margin(made.rates[layout], made.rates[made.reference]).times)
        share = margin(made.rates[use], made.rates[best])
        click.echo(f"the choice is {share} times as fast as the fastest of all {len(made.rates)} layouts: {best}")
    click.echo(made.target.command(use, devices))


def _write(made: Plan, path: Path) -> None:
    """Write all layouts to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = made.rows()
    if path.suffix == ".json":
        path.write_text(json.dumps({"devices": [str(one) for one in made.contexts], "layouts": rows}, indent=1), encoding="utf-8")
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows({**row, "rounds": " ".join(f"{rate:.6g}" for rate in row["rounds"])} for row in rows)
    click.echo(f"saved {path}")
