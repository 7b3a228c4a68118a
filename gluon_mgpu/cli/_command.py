"""The command line of a training program, kept in the folder of its run: command.json."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, List

import click

from .. import schema
from ..checkpoint.atomic_folder import explained
from ..distributed.process import this_process
from ..errors import StateError
from ..loop.callbacks import Callback, FitState

COMMAND = "command.json"
_FORMAT = "gluon_mgpu command"
_ARGUMENTS = "gluon_mgpu.arguments"  # in click's `meta`
_ADVICE = "Restore the file as the training program wrote it, or train again"
_SCHEMA = schema.record(
    {
        "format": schema.constant(_FORMAT),
        "version": schema.constant(1),
        "program": schema.constant("resnet18", "seq2seq"),
        "arguments": schema.list_of(schema.text()),
        "folder": schema.text(),
        "devices": schema.list_of(schema.text()),
        "num_processes": schema.integer(1, 2**16),
    }
)


class RecordedCommand(click.Command):
    """A command of click that remembers its arguments."""

    def parse_args(self, ctx: click.Context, args: List[str]) -> List[str]:
        """Parse the arguments."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class TrainingCommand:
    """How a run was started.

    Attributes
    ----------
    program : str
        `resnet18` or `seq2seq`.
    arguments : list of str
        As the user wrote them.
    folder : str
        The working directory, for relative paths.
    devices : list of str
        The contexts of one process.
    num_processes : int
    """

    program: str
    arguments: List[str]
    folder: str
    devices: List[str]
    num_processes: int


class SaveCommand(Callback):
    """Writes the command line of the current program into the folder of its run; in a job, process 0 does.

    Parameters
    ----------
    folder : pathlib.Path
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_fit_begin(self, state: FitState) -> None:
        context, process = click.get_current_context(), this_process()
        if process.rank or _ARGUMENTS not in context.meta:
            return
        devices = list(map(str, state.trainer.contexts))
        arguments = context.meta[_ARGUMENTS]
        command = TrainingCommand(context.command.name or "", arguments, os.getcwd(), devices, process.num_processes)
        with explained("train", self._folder):
            new = self._folder / f".{COMMAND}.new"
            new.write_text(json.dumps({"format": _FORMAT, "version": 1, **asdict(command)}, indent=1), encoding="utf-8")
            os.replace(new, self._folder / COMMAND)


def read_command(folder: Path, operation: str) -> TrainingCommand:
    """Return how a run was started.

    Raises
    ------
    StateError
        The folder has no valid command.json.
    """
    path = folder / COMMAND
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StateError(
            f"{operation}: got {folder}, whose {COMMAND} cannot be read ({error.strerror}); expected the folder of a run of "
            "gluon-mgpu train. Check the path; older versions wrote no such file."
        ) from error
    values: Any = schema.parse_json(content, operation=operation, file=path, advice=_ADVICE)
    schema.check(_SCHEMA, values, operation=operation, file=path, advice=_ADVICE)
    return TrainingCommand(**{name: values[name] for name in TrainingCommand.__dataclass_fields__})
