"""Options and progress lines that several subcommands share."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import click

from ..checkpoint.atomic_folder import recover_path
from ..data_parallel.compiled import MODES
from ._gpus import choosing_gpus

FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
HYBRIDIZE: Dict[str, Optional[Dict[str, bool]]] = {
    "off": None,
    "on": {},
    "static": {"static_alloc": True, "static_shape": True},
}


def all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that applies all of these; `--help` shows them in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def finite(_context: click.Context, _parameter: click.Parameter, number: Optional[float]) -> Optional[float]:
    """Return the number of an option; raise if it is infinite or NaN."""
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"got {number}; expected a finite number.")
    return number


def shares(_context: click.Context, _parameter: click.Parameter, text: Optional[str]) -> Union[None, str, List[float]]:
    """Return "auto", or a number for each device."""
    if text is None or text == "auto":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"got {text!r}; expected auto, or a number for each device, separated by commas.") from None


count = partial(click.option, type=click.IntRange(1), show_default=True)
positive = partial(click.option, callback=finite, type=click.FloatRange(0, min_open=True))
share = partial(click.option, callback=finite, type=click.FloatRange(0, 1, max_open=True), show_default=True)

devices_option = all_of(
    click.option(
        "--devices",
        default="auto",
        show_default=True,
        help="auto, gpu (all), gpu*2 (two GPUs), gpu:0,2 and gpu:4-7 (GPUs with these numbers), gpu:free (unused GPUs), "
        "gpu:free*2, cpu*2 (two CPU contexts), or a count. Quote *, as in 'gpu*2'.",
    ),
    choosing_gpus,
)


def output_option(default: str, content: str) -> Callable[[Any], Any]:
    """Return `--output`, the folder of a training program."""
    return click.option("--output", type=FOLDER, default=Path(default), show_default=True, help=f"Folder for {content}.")


def seed_option(purpose: str) -> Callable[[Any], Any]:
    """Return `--seed`."""
    return click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help=purpose)


def training_options(*, hybridize: str, clip_norm: Optional[float], precise_layers: str) -> Callable[[Any], Any]:
    """Return the options that the training programs share, from `--hybridize` on: how to train, save and check.

    Parameters
    ----------
    hybridize : str
        The default of `--hybridize`.
    clip_norm : float, optional
        The default of `--clip-norm`.
    precise_layers : str
        The layers to which `--precision` applies.
    """
    no_limit = "" if clip_norm is not None else "; no limit by default"
    return all_of(
        click.option(
            "--hybridize",
            type=click.Choice(list(HYBRIDIZE)),
            default=hybridize,
            show_default=True,
            help="Compile the network: off, on, or with memory that is kept between steps (static).",
        ),
        click.option(
            "--compiled",
            type=click.Choice(MODES),
            default="auto",
            show_default=True,
            help="Run network and loss as one compiled graph on each device, which needs less time of the host: auto does so "
            "where it can, and on raises elsewhere.",
        ),
        count("--micro-steps", default=1, help="Compute each batch in this many parts, one after the other, to save memory."),
        positive("--clip-norm", default=clip_norm, show_default=True, help=f"Largest norm of the gradient{no_limit}."),
        positive("--clip-value", help="Largest absolute value of an element of the gradient; no limit by default."),
        click.option(
            "--average-every",
            type=click.IntRange(1),
            help="Train each device separately, and average their weights every so many steps (local SGD). By default gradients "
            "are summed at each step.",
        ),
        click.option(
            "--shard-optimizer",
            is_flag=True,
            help="Divide the optimizer's states over the devices: one device updates each parameter for all (ZeRO stage 1).",
        ),
        click.option(
            "--virtual-shards",
            type=click.IntRange(1),
            help="Cut every batch into so many parts and add them up in one order: the same bits on any number of devices that "
            "divides it, such as 8. By default each device computes one part.",
        ),
        click.option(
            "--check-replicas-every",
            type=click.IntRange(1),
            help="Every so many updates, compare the bits of all devices' weights and states, to find a device that computes "
            "wrongly. By default they are not compared.",
        ),
        click.option(
            "--precision",
            type=click.Choice(["fp32", "bf16", "fp16"]),
            default="fp32",
            show_default=True,
            help=f"Number format of {precise_layers}: bf16 on CPUs with AVX-512, fp16 on GPUs.",
        ),
        click.option(
            "--weights",
            callback=shares,
            help="How to split batches over devices: auto, by measured speed; or numbers, such as 3,1. By default evenly.",
        ),
        click.option(
            "--checkpoint-every",
            type=click.IntRange(1),
            help="Also save every so many batches. By default after each epoch, and when Ctrl-C stops training.",
        ),
        count("--keep", default=1, help="How many of the last checkpoints to keep."),
        click.option(
            "--resume",
            metavar="auto|FOLDER",
            help="Resume from a checkpoint, with the other options unchanged except for --epochs: auto, the latest good one in "
            "--output, or the beginning if there is none; or its folder.",
        ),
        click.option(
            "--resume-schedule",
            type=click.Choice(["stretch", "keep"]),
            default="stretch",
            show_default=True,
            help="Resuming with other --epochs: stretch the schedule of the learning rate to them, or keep the old one.",
        ),
        click.option(
            "--deterministic",
            is_flag=True,
            help="Let cuDNN use deterministic algorithms only, which may be slower, and reject --weights auto.",
        ),
        click.option("--debug", is_flag=True, help="Run one operation at a time, and check every layer, label and index. Slow."),
        click.option(
            "--tensorboard", is_flag=True, help="Write event files to the folder tensorboard in --output (extra tensorboard)."
        ),
        click.option(
            "--trace",
            type=FILE,
            metavar="FILE.json",
            help="Write where the time of steps 11 to 20 goes: a trace for https://ui.perfetto.dev, and a picture FILE.png; with "
            "--stages also the schedule, FILE-schedule.png.",
        ),
        positive("--watchdog", help="Seconds without a step after which the stacks of all threads are printed."),
        click.option("--leak-check", is_flag=True, help="Report at the end whether memory grows with the steps."),
    )


def numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> List[int]:
    """Return whole numbers of 1 or more from a text with commas; a callback of click."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise click.BadParameter(f"got {text!r}; expected whole numbers of 1 or more, separated by commas.")
    return found


def size_in_bytes(_context: click.Context, _parameter: click.Parameter, text: Optional[str]) -> Optional[int]:
    """Return the bytes of a size such as 4GiB; a callback of click."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    if not found:
        raise click.BadParameter(f"got {text!r}; expected a size such as 4GiB, 1.5G or 800MiB.")
    return int(float(found.group(1)) * 2 ** _UNITS[found.group(2).lower()])


def best_of(folder: Path, holds: Sequence[str]) -> Path:
    """Return the folder to read: this one if it holds one of these files, else its `best`, else its `last`.

    It prints to standard error which folder of a run it took.
    """
    if any((folder / name).exists() for name in holds):
        return folder
    for name in ("best", "last"):
        if any((recover_path(folder / name) / file).exists() for file in holds):
            click.echo(f"{folder} is the folder of a run: reading {folder / name}.", err=True)
            return folder / name
    return folder
