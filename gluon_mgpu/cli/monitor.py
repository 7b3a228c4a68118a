"""gluon-mgpu monitor: the state of the GPUs and the host, once a second."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from typing import Optional

import click
from rich.console import Console
from rich.live import Live

from ._options import Real, Whole


@click.command()
@click.option("--interval", type=Real(0.1, 86400), default=1.0, help="Seconds between two samples.")
@click.option("--count", type=Whole(1), help="End after this many samples.")
@click.option("--pid", type=Whole(1), help="A training process, or its launcher: also show it and its children.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON, also on a terminal.")
def monitor(interval: float, count: Optional[int], pid: Optional[int], as_json: bool) -> None:
    """Show the load and memory of GPUs and host.

    It ends with Ctrl-C. On a terminal it shows a table that is updated; elsewhere, one line of JSON per sample. It works
    without a GPU, with GPUs that MXNet does not support, and without MXNet. It needs the extra monitor. The callback
    Monitor writes the same from within a training program.

    \b
    gluon-mgpu monitor
    gluon-mgpu monitor --pid 1234
    gluon-mgpu monitor --count 60 > monitor.jsonl
    """
    from ..monitor import Reader
    from ..monitor.sample import to_json
    from ..monitor.terminal_tables import view

    reader = Reader(pid or 0)
    is_table = sys.stdout.isatty() and not as_json
    if reader.why_no_gpu and not is_table:
        click.echo(f"no GPU: {reader.why_no_gpu}", err=True)
    due = time.monotonic()
    try:
        with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") if is_table else nullcontext() as live:
            num_shown = 0
            while num_shown != count:
                due = max(due + interval, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
                if not reader.is_running():
                    click.echo(f"Process {pid} has ended.", err=True)
                    break
                sample = reader.read()
                if live is None:
                    click.echo(to_json(sample))
                else:
                    live.update(view(sample, pid=pid or 0, why_no_gpu=reader.why_no_gpu), refresh=True)
                num_shown += 1
    except KeyboardInterrupt:
        return  # the usual way to end a monitor
    except BrokenPipeError:  # the reader has ended; Python would print an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        reader.close()
