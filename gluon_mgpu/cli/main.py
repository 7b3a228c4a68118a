"""gluon-mgpu: its subcommands, and its exit on errors, Ctrl-C, SIGTERM and SIGUSR1."""

from __future__ import annotations

import importlib
import io
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, List, Optional

import click

from .. import errors, interrupts
from ..checks import reason_of
from ..known_errors import advice_on, explain_message
from ..version import __version__

_COMMANDS = {  # modules that hold a function of this name, and the first line of its help
    "agree": "Check that several devices train like one.",
    "devices": "List the CPU and every GPU.",
    "doctor": "Check this machine, and say what to fix.",
    "explain": "Explain what an error MESSAGE means and what to do.",
    "export": "Export a trained network, and check the files.",
    "find-batch-size": "Find the largest batch that fits in memory.",
    "launch": "Run a program in several processes that train together.",
    "monitor": "Show the load and memory of GPUs and host.",
    "predict": "Predict with a trained network.",
    "train": "Train a network on several devices.",
    "translate": "Translate sentences with a trained translator.",
}


class CommandGroup(click.Group):
    """A group that prints errors in one line, and exits with 130 on Ctrl-C, 143 on SIGTERM and 85 on SIGUSR1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            interrupts.end_imports()
            return super().invoke(ctx)
        except BrokenPipeError:  # no process reads the output any more: see `run`
            raise
        except KeyboardInterrupt as interrupt:
            click.echo(f"\nInterrupted. {interrupt}".rstrip(), err=True)
            sys.exit(130)
        except SystemExit as end:
            if hasattr(end, "title"):  # loop.stop_signals.Terminated, after a signal
                click.echo(f"{end.title}. {end}", err=True)
            raise
        except Exception as error:
            if _is_interrupt(error):
                click.echo("\nInterrupted.", err=True)
                sys.exit(130)
            is_ours, command = type(error).__module__.startswith("gluon_mgpu."), ctx.invoked_subcommand or ctx.info_name
            if is_ours:
                raise click.ClickException(errors.one_line(str(error)) + _hint(error)) from error
            if isinstance(error, MemoryError) or type(error).__name__ == "MXNetError":
                text = f"{type(error).__name__}: {error}"
                told = f"{command}: got {reason_of(error)}; expected no error of MXNet. {advice_on(text)}".strip()
                raise click.ClickException(told + _hint(error)) from error
            if isinstance(error, OSError):
                told = f"({error.strerror or error}); expected a readable or writable file."
                raise click.ClickException(f"{command}: got {error.filename or 'an output'} {told}") from error
            if isinstance(error, ImportError) and not hasattr(sys.modules.get("mxnet"), "nd"):
                raise click.ClickException(f"{error} Run gluon-mgpu doctor, which reports what is missing.") from error
            frames = _own_frames(error)
            if frames is None:
                raise
            traceback.print_exception(type(error), error, frames)
            sys.exit(1)


def _own_frames(error: BaseException) -> Optional[TracebackType]:
    """Return the part of a traceback that begins in the user's code; None if there is none."""
    others = {path for name, path in sysconfig.get_paths().items() if "lib" in name}
    others |= {str(Path(__file__).parents[1]), os.path.abspath(sys.argv[0]), "<frozen"}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(tuple(others)):
        frames = frames.tb_next
    return frames


class _Main(CommandGroup):
    """The group of `_COMMANDS`, which are imported when they are asked for: some need MXNet, which takes seconds."""

    def list_commands(self, ctx: click.Context) -> List[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        return getattr(importlib.import_module(f"gluon_mgpu.cli.{name}"), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def _is_interrupt(error: Optional[BaseException]) -> bool:
    """Return whether a Ctrl-C has led to this error, as in MXNet's assignments, and in modules that were being imported."""
    return isinstance(error, KeyboardInterrupt) or (error is not None and _is_interrupt(error.__context__))


def _hint(error: BaseException) -> str:
    """Return how to look an error of MXNet up, also one that another error reports; nothing if no entry fits."""
    cause: Optional[BaseException] = error
    while cause is not None and type(cause).__name__ != "MXNetError":
        cause = cause.__cause__
    if cause is None:
        return ""
    answers = explain_message(str(cause))
    return f" explained by: gluon-mgpu explain {answers[0].name}" if answers else ""


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(cls=_Main, context_settings=_HELP)
@click.version_option(__version__, package_name="gluon_mgpu")
def main() -> None:
    """Train Gluon networks on several devices.

    gluon-mgpu devices lists the devices; gluon-mgpu train resnet18 trains a network on them.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        if isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")  # a terminal may not have all letters


def run() -> None:
    """Run the command; end without a traceback if its output cannot be written, and silently if its reader has closed it."""
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
        told = f"Error: got {error.filename or 'an output'} ({error.strerror or error}); expected a writable file."
        sys.exit(1 if has_failed or isinstance(error, BrokenPipeError) else f"{told} Check the path and the disk.")
