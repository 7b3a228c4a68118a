"""gluon-mgpu: its subcommands, and its exit on errors, Ctrl-C, SIGTERM and SIGUSR1."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from functools import partial
from typing import Any, Dict, List, Optional, Tuple

import click

from .. import errors
from ..version import __version__

_COMMANDS = {  # module and function, and the first line of the help
    "agree": ("agree.agree", "Check that several devices train like one."),
    "devices": ("devices.devices", "List the CPU and every GPU."),
    "doctor": ("doctor.doctor", "Check this machine, and say what to fix."),
    "explain": ("explain.explain", "Explain what an error MESSAGE means and what to do."),
    "export": ("export.export", "Export a trained network, and check the files."),
    "find-batch-size": ("find_batch_size.find_batch_size_", "Find the largest batch that fits in memory."),
    "launch": ("launch.launch", "Run a program in several processes that train together."),
    "monitor": ("monitor.monitor", "Show the load and memory of GPUs and host."),
    "predict": ("predict.predict", "Predict with a trained network."),
    "translate": ("translate.translate", "Translate sentences with a trained translator."),
}
_FUNCTION = "FILE.py:FUNCTION"
_TRAIN = {
    "resnet18": ("train.train_resnet18", "Train ResNet-18 on images."),
    "seq2seq": ("train.train_seq2seq", "Train a translator with attention."),
    _FUNCTION: ("train.train_function", "Train the network that a function of yours returns."),
}


class CommandGroup(click.Group):
    """A group that prints errors in one line, and exits with 130 on Ctrl-C, 143 on SIGTERM and 85 on SIGUSR1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # no process reads the output any more: see `run`
            raise
        except KeyboardInterrupt as interrupt:
            click.echo(f"\nInterrupted. {interrupt}".rstrip(), err=True)
            sys.exit(130)
        except SystemExit as end:
            if hasattr(end, "title") and ctx.parent is None:  # loop.stop_signals.Terminated, after a signal; told once
                click.echo(f"{end.title}. {end}", err=True)
            raise
        except Exception as error:
            is_ours = type(error).__module__.startswith("gluon_mgpu.")
            if is_ours or isinstance(error, OSError) or type(error).__name__ == "MXNetError":
                told = errors.one_line(str(error)) + _hint(error)
                if isinstance(error, OSError) and type(error) in (FileNotFoundError, PermissionError) and error.filename:
                    told = f"{ctx.info_name}: got {error.filename} ({error.strerror}); expected one that can be read or written."
                raise click.ClickException(told) from error
            if isinstance(error, ImportError) and not hasattr(sys.modules.get("mxnet"), "nd"):
                raise click.ClickException(f"{error} Run gluon-mgpu doctor, which reports what is missing.") from error
            raise


class _LazyGroup(CommandGroup):
    """A group whose commands are imported when they are asked for: some need MXNet, which takes seconds."""

    def __init__(self, *args: Any, lazy: Dict[str, Tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> List[str]:
        return sorted([*super().list_commands(ctx), *self._lazy])

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, function = self._lazy[cmd_name][0].partition(".")
        return getattr(importlib.import_module(f"gluon_mgpu.cli.{module}"), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: command.get_short_help_str(limit=100) for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted({**own, **{name: text for name, (_, text) in self._lazy.items()}}.items()))


def _hint(error: BaseException) -> str:
    """Return how to look an error of MXNet up, also one that another error reports; nothing if no entry fits."""
    cause: Optional[BaseException] = error
    while cause is not None and type(cause).__name__ != "MXNetError":
        cause = cause.__cause__
    if cause is None:
        return ""
    from ..doctor.known_errors import explain_message

    answers = explain_message(str(cause))
    return f" explained by: gluon-mgpu explain {answers[0].name}" if answers else ""


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(cls=_LazyGroup, lazy=_COMMANDS, context_settings=_HELP)
@click.version_option(__version__, package_name="gluon_mgpu")
def main() -> None:
    """Train Gluon networks on several devices.

    gluon-mgpu devices lists the devices; gluon-mgpu train resnet18 trains a network on them.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


class _TrainGroup(_LazyGroup):
    """A group that also takes the place of a function, FILE.py:FUNCTION or MODULE:FUNCTION, as a command."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        if ":" not in cmd_name:
            if cmd_name.endswith(".py"):
                raise click.UsageError(f"got {cmd_name}; expected FILE.py:FUNCTION. Name its function, such as {cmd_name}:make.")
            return super().get_command(ctx, cmd_name)
        command = copy.copy(super().get_command(ctx, _FUNCTION))
        if command is not None and command.callback is not None:
            command.callback = partial(command.callback, cmd_name)
        return command


@main.group(cls=_TrainGroup, lazy=_TRAIN)
def train() -> None:
    """Train a network on several devices."""


def run() -> None:
    """Run the command; end without a traceback if its output cannot be written, and without a word if nobody reads it."""
    has_failed = False
    try:
        try:
            main(prog_name="gluon-mgpu")
        except SystemExit as end:
            has_failed = bool(end.code)
            raise
        finally:
            if sys.stdout is not None:  # which a shell's >&- leaves
                sys.stdout.flush()  # now: at its end, Python would print an error
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1 if has_failed or isinstance(error, BrokenPipeError) else f"Error: {error}")
