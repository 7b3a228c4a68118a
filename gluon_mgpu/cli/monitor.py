"""gluon-mgpu monitor: the state of GPUs, CPU contexts and the host, once a second."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import contextmanager
from typing import Callable, Deque, Iterator, List, Optional

import click
from rich.console import Console
from rich.live import Live

from ..monitor import Finding, Reader, Sample, diagnose
from ..monitor.sample import to_json
from ..monitor.view import view

_RECENT = 10  # samples that the diagnosis uses

Show = Callable[[Sample, List[Finding]], None]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between two samples.")
@click.option("--count", type=click.IntRange(1), help="End after this many samples.")
@click.option("--duration", type=click.FloatRange(0, min_open=True), help="End after this many seconds.")
@click.option("--pid", type=click.IntRange(1), help="A training process, or its launcher: also show it and its children.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON, also on a terminal.")
def monitor(interval: float, count: Optional[int], duration: Optional[float], pid: Optional[int], as_json: bool) -> None:
    """Show the state of GPUs, CPU contexts and the host, until Ctrl-C.

    On a terminal it shows a table that is updated; elsewhere, one line of JSON per sample. It works without a GPU, and with GPUs
    that MXNet does not support. Problems appear below the table with their likely cause, such as a GPU that is slowed down or
    idle, or whose memory is fuller than that of the others.

    The callback Monitor reports more from within a training program: gluon_mgpu.monitor, docs/monitoring.md.

    \b
    gluon-mgpu monitor
    gluon-mgpu monitor --pid 1234
    gluon-mgpu monitor --count 60 > monitor.jsonl
    """
    reader = Reader(pid or 0, whole_tree=True)
    due = time.monotonic()
    ends = due + duration if duration else float("inf")
    try:
        with _lines(reader, pid or 0) if as_json or not sys.stdout.isatty() else _live(reader, pid or 0) as show:
            recent: Deque[Sample] = deque(maxlen=_RECENT)
            num_shown = 0
            while num_shown != count:
                due = min(max(due + interval, time.monotonic()), ends)
                time.sleep(max(0.0, due - time.monotonic()))
                if not reader.host.is_running():
                    click.echo(f"Process {pid} has ended.", err=True)
                    break
                recent.append(reader.read())
                show(recent[-1], diagnose(recent))
                num_shown += 1
                if time.monotonic() >= ends:
                    break
    except KeyboardInterrupt:
        return  # the usual way to end a monitor
    except BrokenPipeError:  # the reader has ended; Python would print an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        reader.close()


@contextmanager
def _lines(reader: Reader, _pid: int) -> Iterator[Show]:
    if reader.gpus.why_not:
        click.echo(f"no GPU: {reader.gpus.why_not}", err=True)
    yield lambda sample, _findings: click.echo(to_json(sample))


@contextmanager
def _live(reader: Reader, pid: int) -> Iterator[Show]:
    with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda sample, findings: live.update(view(sample, findings, pid=pid, why_no_gpu=reader.gpus.why_not), refresh=True)
