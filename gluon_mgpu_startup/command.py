"""The command gluon-mgpu. If MXNet cannot be imported, its only subcommands are doctor, which reports why, and explain."""

from __future__ import annotations

import importlib
import importlib.util
import os
import select
import signal
import sys
from typing import Any

_BY_SIGPIPE = 128 + 13  # a shell's status of a program whose reader has ended, such as `yes | head -1`


def main() -> None:
    """Run the command, or only the doctor; exit silently if the reader of its output has ended."""
    stdout, reader = sys.stdout, _reader()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    try:
        try:
            _run()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # now: at its end, Python would print an error
    except BrokenPipeError as error:
        if not _is_left(1) and not _is_left(2):
            sys.exit(f"Error: {error}")
        _write_nowhere()
        done = error.__context__  # the command has already ended
        sys.exit(done.code if isinstance(done, SystemExit) else _BY_SIGPIPE)
    except SystemExit as done:  # click and rich replace a broken pipe and exit with 1
        if done.code == 1 and (sys.stdout is not stdout or _reader() != reader):
            _write_nowhere()
            sys.exit(_BY_SIGPIPE)
        raise


def _end(signum: int, frame: Any) -> None:
    """End on Ctrl-C during the imports, which take seconds: quietly, and wherever their code is."""
    os._exit(128 + signum)


def _take_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: the commands handle it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run() -> None:
    from .quick_help import quick_help  # only here: Ctrl-C is handled by now, and click takes a moment

    help_alone = quick_help(sys.argv[1:])
    if help_alone is not None:
        help_alone(prog_name="gluon-mgpu")
    if sys.argv[1:2] == ["explain"]:
        _run_alone("explain")
        return
    try:
        command = importlib.import_module("gluon_mgpu.cli").main
    except ImportError as error:
        _without_mxnet(error)
    else:
        _take_interrupts()
        command(prog_name="gluon-mgpu")


def _without_mxnet(error: ImportError) -> None:
    if sys.argv[1:2] != ["doctor"]:
        sys.exit(f"Error: {error}\nRun gluon-mgpu doctor, which reports what is installed and what is missing.")
    _run_alone("doctor")


def _run_alone(subcommand: str) -> None:
    """Run a subcommand without the package's __init__, which imports MXNet."""
    for name in ("gluon_mgpu", "gluon_mgpu.cli"):  # created for imports of their submodules, but not run: they would import MXNet
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"No module named {name!r}")
        sys.modules[name] = importlib.util.module_from_spec(spec)
    module = importlib.import_module(f"gluon_mgpu.cli.{subcommand}")
    _take_interrupts()
    getattr(module, subcommand)(sys.argv[2:], prog_name=f"gluon-mgpu {subcommand}")


def _reader() -> Any:
    """Return the identity of standard output, to notice a replacement; None if it is closed."""
    try:
        return os.fstat(1)[:3]
    except OSError:
        return None


def _is_left(number: int) -> bool:
    """Return whether the reader of a pipe has ended."""
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
