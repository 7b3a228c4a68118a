"""Ctrl-C while a command starts: a module that is being imported may lose Python's KeyboardInterrupt."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import Any, Iterator, List

_came: List[int] = []


def _note(signum: int, frame: Any) -> None:
    _came.append(signum)
    signal.default_int_handler(signum, frame)


@contextmanager
def noting_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, as Python does, and note it for `raise_lost`. A program's own handler stays."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        _give_back()


def raise_lost() -> None:
    """Raise KeyboardInterrupt if a Ctrl-C came, and let Python's own handler take over."""
    _give_back()
    if _came:
        raise KeyboardInterrupt


def _give_back() -> None:
    if signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, signal.default_int_handler)
