"""Ctrl-C and SIGTERM end a command at once while it imports modules: an import may lose an exception, or turn it into another.

It imports little itself, because it comes first.
"""

import os
import signal
import sys

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_MAIN = os.path.join(os.path.dirname(__file__), "__main__.py")


def begin_imports() -> None:
    """Let both signals end this process, until `end_imports`, if it is the command gluon-mgpu. A program's own handlers stay."""
    if os.path.basename(_first()) in ("gluon-mgpu", "-m") or _first() == _MAIN:
        for signum, default in _DEFAULTS.items():
            _replace(signum, default, _end)


def end_imports(*, of_command: bool = True) -> None:
    """Give both signals back to Python; if not `of_command`, leave them to the command, which imports more."""
    if of_command or _first() == "-m":
        for signum, default in _DEFAULTS.items():
            _replace(signum, _end, default)


def _first() -> str:
    """Return the program. It is "-m" while `python -m` imports a package: this one, or another one that imports it."""
    return (getattr(sys, "argv", None) or [""])[0]


def _replace(signum: int, handler: object, other: object) -> None:
    if signal.getsignal(signum) is handler:
        try:  # noqa: SIM105  (contextlib takes longer than this module)
            signal.signal(signum, other)  # type: ignore[arg-type]
        except ValueError:  # not in the main thread
            pass


def _end(signum: int, _frame: object) -> None:
    try:
        os.write(2, b"\nInterrupted.\n")
    finally:  # also without standard error
        os._exit(128 + signum)
