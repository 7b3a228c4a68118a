"""What gluon-mgpu plan arranges: a training program, or a network of the user's own file."""

from __future__ import annotations

import os
import shlex
from contextlib import redirect_stdout
from typing import Any, Callable, Dict, List, NoReturn, Sequence, Union

import click
from click.core import ParameterSource
from mxnet import Context

from ..data_parallel.sharding import split_data
from ..devices.select import use_devices
from ..errors import TrainerError
from ..pipeline.network import Pipeline
from ..pipeline.schedule import SCHEDULES
from ..pipeline.split import split_stages
from ..trainer.precision import set_precision
from ..trainer.trainer import Trainer
from ..tuning.batch_size.workload import Question, load_workload, reference_of
from ..tuning.layouts import Layout
from ..tuning.trial import Trial
from ._training import FitExtras
from .train import train_resnet18
from .train_seq2seq import BATCH_TOKENS, train_seq2seq

PROGRAMS: Dict[str, click.Command] = {"resnet18": train_resnet18, "seq2seq": train_seq2seq}
_BATCH = {"resnet18": "batch_size", "seq2seq": "batch_tokens"}
_KINDS = {"resnet18": ("data", "model"), "seq2seq": ("data", "model", "hybrid")}
_OURS = (
    "devices",
    "precision",
    "micro_steps",
    "parallel",
    "stages",
    "micro_batches",
    "pipeline_schedule",
    "recompute",
    "weights",
    "debug",
)
_FILE_BATCH_SIZE = 64


class _Measured(Exception):  # noqa: N818  it is not an error
    """Ends a training program before it trains."""


class Program:
    """A training program of `gluon-mgpu train`.

    Parameters
    ----------
    name : str
    arguments : sequence of str
        Further ones, for every layout.

    Attributes
    ----------
    batch_size : int
        The default.
    kinds : sequence of str
        The kinds of layouts that it has.
    """

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self._name, self._arguments, self._batch_option = name, list(arguments), _BATCH[name]
        parsed = self._context(arguments)
        for option in (*_OURS, self._batch_option):
            if parsed.get_parameter_source(option) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"got --{option.replace('_', '-')} after --; expected only options that plan does not set. See gluon-mgpu "
                    "plan --help."
                )
        self._usual_size = parsed.params[self._batch_option]  # None: by the data
        self.batch_size = self._usual_size or BATCH_TOKENS
        self.kinds: Sequence[str] = _KINDS[name]

    def visit(self, layout: Layout, contexts: Sequence[Context], work: Callable[[Trial], None]) -> None:
        """Put the network on the devices as a layout says, and call `work` with it. The network is gone afterwards."""

        def instead(net: Any, loss: Any, trainer: Any, train_iter: Any, **options: Any) -> NoReturn:
            used = {name: options[name] for name in ("split_f", "compiled", "bn") if name in options}
            work(Trial(net, loss, trainer, train_iter, **used))
            raise _Measured

        words = ["--devices", names_of(contexts), *self._options(layout), *self._arguments]
        with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing):
            try:
                with self._context(words, obj=FitExtras(instead=instead)) as context:
                    context.command.invoke(context)
            except _Measured:
                pass

    def command(self, layout: Layout, devices: str) -> str:
        """Return the command that trains in a layout."""
        words = ["gluon-mgpu", "train", self._name, "--devices", devices, *self._options(layout), *self._arguments]
        return " ".join(map(shlex.quote, words))

    def _context(self, words: Sequence[str], **more: Any) -> click.Context:
        """Return the context of the program with these arguments, checked."""
        more["help_option_names"] = ["-h", "--help"]  # as of gluon-mgpu: a command keeps those of its first context
        return PROGRAMS[self._name].make_context(f"gluon-mgpu train {self._name}", list(words), **more)

    def _options(self, layout: Layout) -> List[str]:
        """Return the options of a layout that are not the program's defaults."""
        words = []
        if layout.batch_size != self._usual_size:
            words += [f"--{self._batch_option.replace('_', '-')}", str(layout.batch_size)]
        if layout.precision != "fp32":
            words += ["--precision", layout.precision]
        if layout.kind == "data":
            return words + (["--micro-steps", str(layout.micro_batches)] if layout.micro_batches > 1 else [])
        words += ["--parallel", layout.kind] if layout.kind != "model" else []
        words += ["--stages", str(layout.stages), "--micro-batches", str(layout.micro_batches)]
        words += ["--pipeline-schedule", layout.schedule] if layout.schedule != SCHEDULES[0] else []
        return words + ["--recompute"] * layout.recompute


class File:
    """A function of the user's, with the methods of `Program`: the same as `gluon-mgpu find-batch-size --workload` takes.

    Parameters
    ----------
    reference : str
        `FILE.py:FUNCTION`. The function takes batch_size and ctx, and returns (net, loss, trainer, X, y).
    """

    batch_size = _FILE_BATCH_SIZE
    kinds: Sequence[str] = ("data", "model")

    def __init__(self, reference: str) -> None:
        try:
            self._make = load_workload(Question(reference_of(reference), {}, ""))
        except TrainerError as error:
            raise TrainerError(str(error).replace("find_batch_size:", "plan:", 1)) from error
        self._reference = reference

    def visit(self, layout: Layout, contexts: Sequence[Context], work: Callable[[Trial], None]) -> None:
        """Do what `Program.visit` does."""
        with use_devices(list(contexts)) as ctx:
            made = self._make(layout.batch_size, ctx if layout.kind == "data" else ctx[:1])
            if not isinstance(made, tuple) or len(made) != 5:
                raise TrainerError(
                    f"plan: got {type(made).__name__} from {self._reference}; expected the arguments of train_batch. Return "
                    "(net, loss, trainer, X, y)."
                )
            net, loss, trainer, X, y = made
            if layout.precision != "fp32":
                set_precision(net, layout.precision)
            if layout.kind == "model":
                replicas = [ctx[begin : begin + layout.stages] for begin in range(0, len(ctx), layout.stages)]
                sample = split_data(X, len(ctx), even_split=False)[0]
                net = Pipeline(split_stages(net, layout.stages, sample), replicas)
            if layout.kind == "model" or layout.precision != "fp32":
                trainer = Trainer(net, trainer.optimizer)
            work(Trial(net, loss, trainer, [(X, y)]))

    def command(self, layout: Layout, devices: str) -> str:
        """Return the lines of Python that make a layout."""
        lines = [f"ctx = mgpu.resolve_devices({devices!r})"]
        if layout.precision != "fp32":
            lines.append(f"mgpu.set_precision(net, {layout.precision!r})  # before the Trainer")
        if layout.kind == "data":
            if layout.micro_batches > 1:
                lines.append(f"mgpu.fit(net, loss, trainer, train_iter, epochs=epochs, micro_steps={layout.micro_batches})")
            return "\n".join([*lines, f"# net.initialize(ctx=ctx), and batches of {layout.batch_size}"])
        options = [f"micro_batches={layout.micro_batches}"]
        options += [f"schedule={layout.schedule!r}"] if layout.schedule != SCHEDULES[0] else []
        options += ["recompute=True"] * layout.recompute
        p = layout.stages
        return "\n".join(
            [
                *lines,
                f"stages = mgpu.split_stages(net, {p}, X[:{max(1, layout.batch_size // layout.micro_batches)}])"
                "  # net.initialize(ctx=ctx[0])",
                f"replicas = [ctx[begin : begin + {p}] for begin in range(0, len(ctx), {p})]",
                f"net = mgpu.Pipeline(stages, replicas, {', '.join(options)})",
                f"# then Trainer(net, ...), and batches of {layout.batch_size}",
            ]
        )


Target = Union[Program, File]


def target_of(what: str, arguments: Sequence[str]) -> Target:
    """Return what the command line names: a training program, or a function of a file."""
    if what in PROGRAMS:
        return Program(what, arguments)
    if ":" not in what:
        raise click.UsageError(f"got {what!r}; expected {', '.join(PROGRAMS)} or FILE.py:FUNCTION. Name the function.")
    if arguments:
        raise click.UsageError(f"got {' '.join(arguments)} after --; expected it with {' or '.join(PROGRAMS)} only.")
    return File(what)


def names_of(contexts: Sequence[Context]) -> str:
    """Return contexts as a specification of these devices and no others: `gpu:free` would name others the next time."""
    return ",".join(f"{context.device_type}:{context.device_id}-{context.device_id}" for context in contexts)
