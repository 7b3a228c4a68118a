"""gluon-mgpu train: the options of the training programs, which need no MXNet to be shown."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple

import click

from ._options import FILE, Real, Whole, all_of, count, devices_option, image_options, output_option, positive, seed_option

TEXT_DEFAULTS = {"epochs": 30, "lr": 0.004, "patience": 31}
NUMBER_DEFAULTS = {"epochs": 8, "lr": 0.003, "patience": 6}  # of Korean numbers


def _shares(_context: click.Context, _parameter: click.Parameter, text: Optional[str]) -> Optional[List[float]]:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"got {text!r}; expected a number for each device, separated by commas.") from None


def _by_data(name: str, kind: click.ParamType, help: str) -> Callable[[Any], Any]:
    """Return an option whose default depends on the data."""
    default = f"{TEXT_DEFAULTS[name]}; for Korean numbers, {NUMBER_DEFAULTS[name]}"
    return click.option(f"--{name}", type=kind, show_default=default, help=help)


_precision = click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    help="Number format of convolutions and Dense layers: bf16 on CPUs with AVX-512, fp16 on GPUs.",
)
_seed = seed_option(help="Seed of the weights, of the split of the data, and of its order.")
_virtual_shards = count(
    "--virtual-shards",
    type=Whole(1, 2**16),
    help="Cut every batch into this many parts and add them up in one order, which makes results bit-identical on any number "
    "of devices that divides it. By default each device computes one part.",
)
_stages = count(
    "--stages",
    help="Divide the network into this many stages of about equal time. 4 devices with 2 stages hold the network twice; 2 "
    "devices with 4 stages hold two stages each, in turn.",
)
_micro_batches = count(
    "--micro-batches",
    type=Whole(1, 2**16),
    help="Parts of a batch that follow one another through the stages. By default 4 for each stage.",
)
_checkpoint_every = count(
    "--checkpoint-every", help="Also save every so many batches. By default after each epoch, and when Ctrl-C stops training."
)
_resume = click.option(
    "--resume",
    metavar="auto|FOLDER",
    help="Resume from a checkpoint, with the same network, data and seed; --epochs and --lr may change: auto, the latest good "
    "one in --output, or the beginning if there is none; or its folder. The learning rate follows the new schedule.",
)
_limit_batches = count(
    "--limit-batches", help="Train on and evaluate only the first so many batches of each epoch, for a quick try."
)
_training_options = all_of(
    count("--epochs", default=8, help="Passes over the training data."),
    count("--batch-size", default=64, help="Examples per batch, over all devices together."),
    positive("--lr", default=0.1, help="Highest learning rate: it warms up, then follows a cosine."),
    click.option("--optimizer", default="sgd", help="Any optimizer of MXNet: sgd, nag, adam, ..."),
    click.option(
        "--bn",
        type=click.Choice(["local", "sync"]),
        default="local",
        help="BatchNorm's statistics: of each device's part of a batch (local), or of the whole batch (sync; extra sync).",
    ),
    _precision,
    _seed,
    _limit_batches,
)
_device_options = all_of(
    devices_option,
    click.option(
        "--weights",
        callback=_shares,
        help="How to split batches over devices of different speed: numbers, such as 3,1. By default evenly.",
    ),
    _virtual_shards,
    _stages,
    _micro_batches,
    count("--micro-steps", default=1, type=Whole(1, 2**16), help="Compute each batch in this many parts, to save memory."),
)
_saved = "curves.png, history.csv, history.json, and the checkpoints best and last"
_result_options = all_of(
    _checkpoint_every,
    count("--keep", default=1, help="How many of the last checkpoints to keep."),
    _resume,
    click.option(
        "--trace",
        type=FILE,
        metavar="FILE.json",
        help="Write where the time of steps 11 to 20 goes: a trace for https://ui.perfetto.dev, and a picture FILE.png; with "
        "--stages also the schedule, FILE-schedule.png.",
    ),
)


def _option_group(title: str, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that applies all of these options; a `_GroupedCommand` shows them under the title."""

    def decorate(command: Any) -> Any:
        num_known = len(getattr(command, "__click_params__", []))
        command = all_of(*options)(command)
        for parameter in command.__click_params__[num_known:]:
            parameter.group = title
        return command

    return decorate


class _GroupedCommand(click.Command):
    """A command whose `--help` shows the options in groups: see `_option_group`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: Dict[str, List[Tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Help"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _TrainGroup(click.Group):
    """A group that also takes the place of a function, FILE.py:FUNCTION or MODULE:FUNCTION, as a command."""

    command_class = _GroupedCommand

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        if ":" in cmd_name:
            command = copy.copy(train_function)
            command.callback = partial(train_function.callback, cmd_name)  # type: ignore
            return command
        if cmd_name.endswith(".py"):
            raise click.UsageError(f"got {cmd_name}; expected FILE.py:FUNCTION. Name its function, such as {cmd_name}:make.")
        return super().get_command(ctx, cmd_name)


@click.group(cls=_TrainGroup)
def train() -> None:
    """Train a network on several devices."""


@train.command("resnet18")
@_option_group("Data", image_options)
@_option_group("Training", _training_options)
@_option_group("Devices", _device_options)
@_option_group("Results", output_option("runs/resnet18", _saved), _result_options)
def train_resnet18(**options: Any) -> None:
    """Train ResNet-18 on images.

    The defaults train on scikit-learn's handwritten digits. Ctrl-C and SIGTERM stop after the current batch and save;
    --resume auto resumes. What has no option here takes a few lines of Python: see mgpu.fit and mgpu.Trainer.
    """
    from .train_resnet18 import train as run

    run(SimpleNamespace(parallel=None, max_steps=None, evaluate_every=None, **options))


@train.command("FILE.py:FUNCTION")
@_option_group(
    "Training",
    _training_options,
    count("--max-steps", help="End after so many batches, and evaluate once more."),
    count("--evaluate-every", help="Also evaluate within an epoch, every so many batches."),
)
@_option_group("Devices", _device_options)
@_option_group("Results", output_option("runs/train", _saved), _result_options)
def train_function(reference: str = "", **options: Any) -> None:
    """Train the network that a function of yours returns.

    FILE.py:FUNCTION or MODULE:FUNCTION names it. It takes (batch_size, ctx) and returns (net, loss, train_iter), or also
    test_iter; docs/training.md shows one. The network need not be initialised. Ctrl-C and SIGTERM stop after the current batch
    and save; --resume auto resumes.
    """
    from .train_function import train as run

    run(reference, SimpleNamespace(parallel=None, **options))


@train.command("seq2seq")
@_option_group(
    "Data",
    click.option(
        "--data",
        type=FILE,
        multiple=True,
        help="Text to train on: a file with a source, a tab and its translation in each line; or twice, a file of sources and "
        "one of translations. By default, Korean numbers written out, with their English.",
    ),
    click.option("--reverse", is_flag=True, help="Translate from the target to the source: English to Korean numbers."),
    count("--held-out", default=200, help="Pairs of text to validate after each epoch, and as many to test at the end."),
    click.option(
        "--vocabulary",
        type=click.Choice(["subwords", "words", "characters"]),
        help="Tokens of both sides. By default subwords; for Korean numbers, characters and English words.",
    ),
    click.option(
        "--vocabulary-size",
        type=Whole(5),
        help="Largest number of tokens per side. By default 8000, or fewer subwords for a small corpus.",
    ),
)
@_option_group(
    "Network",
    count(
        "--hidden-size", help="Size of the recurrent layers, per direction. By default 256 from 3000 pairs of text on, else 128."
    ),
    count("--num-layers", default=1, type=Whole(1, 64), help="Number of recurrent layers of encoder and decoder."),
    click.option(
        "--dropout",
        type=Real(0, 1, max_open=True),
        help="Dropout of embeddings and between layers. By default 0.3 from 3000 pairs of text on, 0.2 for fewer, 0 for numbers.",
    ),
)
@_option_group(
    "Training",
    _by_data("epochs", Whole(1), "Largest number of passes over the training pairs."),
    count(
        "--batch-tokens",
        help="Source and target tokens per batch, over all devices together. By default 1200; fewer for a small corpus of text.",
    ),
    _by_data("lr", Real(0, min_open=True), "Highest learning rate: it warms up, then follows a cosine."),
    _by_data("patience", Whole(1), "Stop after this many epochs in a row without a better validation."),
    _precision,
    _seed,
    _limit_batches,
)
@_option_group(
    "Devices",
    devices_option,
    _virtual_shards,
    click.option(
        "--parallel",
        type=click.Choice(["data", "model", "hybrid"]),
        help="data, the default: each device holds the network and takes a part of the batch; model: divide the network over the "
        "devices; hybrid: divide all layers except attention and output; each device computes these for its part of the batch.",
    ),
    _stages,
    _micro_batches,
)
@_option_group(
    "Results",
    output_option("runs/seq2seq", "curves.png, history.csv, history.json, and the models best and last"),
    _checkpoint_every,
    _resume,
)
def train_seq2seq(**options: Any) -> None:
    """Train a translator with attention.

    The defaults train on Korean numbers, times and counts written out, with their English. Pass --data to train on your own text.
    Ctrl-C and SIGTERM stop after the current batch and save; --resume auto resumes. What has no option here takes a few lines of
    Python: see mgpu.models.Translator and mgpu.fit.
    """
    from .train_seq2seq import train as run

    for name, default in (TEXT_DEFAULTS if options["data"] else NUMBER_DEFAULTS).items():
        options[name] = options[name] or default
    run(SimpleNamespace(**options))
