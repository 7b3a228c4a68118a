"""gluon-mgpu monitor: the state of the GPUs and the host, once a second."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable, Iterator, Optional

import click
from rich.console import Console
from rich.live import Live

from ._options import Real, Whole

if TYPE_CHECKING:
    from ..monitor import Reader, Sample

    Show = Callable[[Sample], None]


@click.command()
@click.option("--interval", type=Real(0.1, 86400), default=1.0, help="Seconds between two samples.")
@click.option("--count", type=Whole(1), help="End after this many samples.")
@click.option("--pid", type=Whole(1), help="A training process, or its launcher: also show it and its children.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON, also on a terminal.")
def monitor(interval: float, count: Optional[int], pid: Optional[int], as_json: bool) -> None:
    """Show the load and memory of GPUs and host.

    It ends with Ctrl-C. On a terminal it shows a table that is updated; elsewhere, one line of JSON per sample. It works
    without a GPU, and with GPUs that MXNet does not support. It needs the extra monitor. The callback Monitor writes the
    same from within a training program.

    \b
    gluon-mgpu monitor
    gluon-mgpu monitor --pid 1234
    gluon-mgpu monitor --count 60 > monitor.jsonl
    """
    from ..monitor import Reader

    reader = Reader(pid or 0)
    due = time.monotonic()
    try:
        with _lines(reader, pid or 0) if as_json or not sys.stdout.isatty() else _live(reader, pid or 0) as show:
            num_shown = 0
            while num_shown != count:
                due = max(due + interval, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
                if not reader.is_running():
                    click.echo(f"Process {pid} has ended.", err=True)
                    break
                show(reader.read())
                num_shown += 1
    except KeyboardInterrupt:
        return  # the usual way to end a monitor
    except BrokenPipeError:  # the reader has ended; Python would print an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        reader.close()


@contextmanager
def _lines(reader: Reader, _pid: int) -> Iterator[Show]:
    from ..monitor.sample import to_json

    if reader.why_no_gpu:
        click.echo(f"no GPU: {reader.why_no_gpu}", err=True)
    yield lambda sample: click.echo(to_json(sample))


@contextmanager
def _live(reader: Reader, pid: int) -> Iterator[Show]:
    from ..monitor.terminal_tables import view

    with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda sample: live.update(view(sample, pid=pid, why_no_gpu=reader.why_no_gpu), refresh=True)
