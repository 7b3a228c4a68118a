"""gluon-mgpu: its subcommands, and its exit on errors, Ctrl-C, SIGTERM and SIGUSR1."""

from __future__ import annotations

import os
import sys
from typing import Any, Optional

import click
from mxnet import MXNetError

from .. import errors
from ..distributed.process import LaunchError
from ..explain import explain_message
from ..loop.stopping import Terminated
from ..runtime.nvidia.nvml import DriverError
from ..version import __version__
from .agree import agree
from .average import average
from .bench import bench
from .devices import devices
from .doctor import doctor
from .explain import explain
from .export import export
from .find_batch_size import find_batch_size_
from .launch import launch
from .monitor import monitor
from .plan import plan
from .predict import predict
from .replay import replay
from .search import search
from .train import train
from .train_seq2seq import train_seq2seq
from .translate import translate

_SHORT_ERRORS = (
    errors.DeviceError,
    errors.ShardError,
    errors.TrainerError,
    errors.StateError,
    errors.DataError,
    errors.StepError,
    errors.NonFiniteLossError,
    errors.MissingExtraError,
    errors.ProcessError,
    LaunchError,
    DriverError,
    MXNetError,
    OSError,
)


class CommandGroup(click.Group):
    """A group that prints errors in one line, and exits with 130 on Ctrl-C, 143 on SIGTERM and 85 on SIGUSR1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # no process reads the output any more: see gluon_mgpu_startup/command.py
            raise
        except _SHORT_ERRORS as error:
            raise click.ClickException(errors.one_line(_text(error)) + _hint(error)) from error
        except KeyboardInterrupt as interrupt:
            click.echo(f"\nInterrupted. {interrupt}".rstrip(), err=True)
            sys.exit(130)
        except Terminated as end:
            click.echo(f"{end.title}. {end}", err=True)
            raise


def _text(error: BaseException) -> str:
    """Return an error's message: of a file of the operating system, without its number, and with the place of a relative path."""
    if type(error) is not FileNotFoundError or not isinstance(error.filename, str) or not error.strerror:
        return str(error)
    place = "" if os.path.isabs(error.filename) else f", which is relative to {os.getcwd()}"
    return f"{error.strerror}: {error.filename}. Check the path{place}."


def _hint(error: BaseException) -> str:
    """Return how to look an error of MXNet up, also one that another error reports; nothing if no entry fits."""
    cause: Optional[BaseException] = error
    while cause is not None and not isinstance(cause, MXNetError):
        cause = cause.__cause__
    answers = explain_message(str(cause)) if cause is not None else []
    return f" explained by: gluon-mgpu explain {answers[0].entry.name}" if answers else ""


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="gluon_mgpu")
def main() -> None:
    """Train Gluon networks on several devices.

    gluon-mgpu devices lists the devices; gluon-mgpu train resnet18 trains a network on them.
    """


main.add_command(devices)
main.add_command(doctor)
main.add_command(explain)
main.add_command(bench)
train.add_command(train_seq2seq)
main.add_command(train)
main.add_command(translate)
main.add_command(predict)
main.add_command(export)
main.add_command(average)
main.add_command(find_batch_size_)
main.add_command(plan)
main.add_command(search)
main.add_command(agree)
main.add_command(replay)
main.add_command(launch)
main.add_command(monitor)
