"""The command gluon-mgpu. Where MXNet cannot be imported, its one subcommand is doctor, which says why."""

from __future__ import annotations

import importlib
import importlib.util
import os
import select
import sys
from typing import Any

_BY_SIGPIPE = 128 + 13  # a shell's status of a program that nobody reads any more, as of `yes | head -1`


def main() -> None:
    """Run the command, or the doctor alone; end without a word where nobody reads its output any more."""
    stdout, reader = sys.stdout, _reader()
    try:
        try:
            _run()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # here, and not when Python ends, which would complain
    except BrokenPipeError as error:
        if not _is_left(1) and not _is_left(2):
            sys.exit(f"Error: {error}")
        _write_nowhere()
        done = error.__context__  # the command itself had ended
        sys.exit(done.code if isinstance(done, SystemExit) else _BY_SIGPIPE)
    except SystemExit as done:  # click and rich exit with 1 where a pipe is broken, having replaced it
        if done.code == 1 and (sys.stdout is not stdout or _reader() != reader):
            _write_nowhere()
            sys.exit(_BY_SIGPIPE)
        raise


def _run() -> None:
    try:
        command = importlib.import_module("gluon_mgpu.cli").main
    except ImportError as error:
        _without_mxnet(error)
    else:
        command(prog_name="gluon-mgpu")


def _without_mxnet(error: ImportError) -> None:
    if sys.argv[1:2] != ["doctor"]:
        sys.exit(f"Error: {error}\ngluon-mgpu doctor tells what is here, and what is missing.")
    for name in ("gluon_mgpu", "gluon_mgpu.cli"):  # there for what is imported from them, but not run: they would import MXNet
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise error
        sys.modules[name] = importlib.util.module_from_spec(spec)
    importlib.import_module("gluon_mgpu.cli.doctor").doctor(sys.argv[2:], prog_name="gluon-mgpu doctor")


def _reader() -> Any:
    """Return what standard output is, to see whether it was replaced; None where it is closed."""
    try:
        return os.fstat(1)[:3]
    except OSError:
        return None


def _is_left(number: int) -> bool:
    """Return whether nobody reads a pipe any more."""
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def _write_nowhere() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        if _is_left(number):
            os.dup2(nowhere, number)


if __name__ == "__main__":
    main()
