"""Runs this machine's part of a job, and leaves nothing running."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO, TextIO

from ..process import LaunchError
from . import guard
from .job import Job
from .network import address_of, address_towards
from .node import Node
from .output import Output
from .plan import Machine, bindable_cores
from .supervisor import Signals, Supervisor


def make_log_dir(folder: Path = Path("runs/launch")) -> Path:
    """Make a folder named after the time, and return it. Each launch gets its own, even within one second."""
    folder.mkdir(parents=True, exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S")
    made, number = folder / name, 1
    while True:
        try:
            made.mkdir()
            return made
        except FileExistsError:
            number += 1
            made = folder / f"{name}-{number}"


def run_job(job: Job) -> int:
    """Run this machine's part of a job to its end, from the main thread; return the exit code: 0, or that of the first failure.

    The code is 128 plus the signal's number if a signal killed that process, 130 after a Ctrl-C here, 143 after a SIGTERM, 85
    after a SIGUSR1, 124 for processes that hang, and 1 if another machine was lost. When this returns, all processes and ports
    of the job are released.

    Raises
    ------
    LaunchError
        The machines do not find each other, or an address or port is not available.

    Examples
    --------
    >>> import tempfile
    >>> job = Job((sys.executable, "-c", "raise SystemExit(3)"), num_processes=2, servers=0, log_dir=Path(tempfile.mkdtemp()))
    >>> run_job(job)
    3
    """
    host, root = _addresses(job)
    machine = Machine(job.program, host, bindable_cores() if job.bind else (), job.gpus, job.gpus_per_process)
    output = Output(job.log_dir or make_log_dir(), _binary(sys.stdout, sys.__stdout__), _binary(sys.stderr, sys.__stderr__))
    adopted = guard.adopt_orphans(True)  # if a guard is killed, its program's children become ours
    try:
        with Signals() as signals:
            node = Node(machine, output, grace_s=job.limits.failed_s, timeout_s=job.limits.timeout_s)
            code, cause = Supervisor(job, node, root, signals=signals, output=output).run()
    finally:
        guard.adopt_orphans(adopted)
    if code:
        output.report(f"{cause}\nThe logs are in {output.folder}.")
    return code


def _addresses(job: Job) -> tuple[str, str]:
    """Return the addresses of this machine and of node 0."""
    if job.num_nodes == 1 or job.master is None:
        host = address_of(job.interface or "127.0.0.1")
        return host, host
    named = job.master[0]
    host = address_of(job.interface or named)
    if job.node_rank:
        root = address_of(named)
        return (host if job.interface else address_towards(root)), root
    if host.startswith("127.") and not job.interface and named != "localhost" and not named.startswith("127."):
        raise LaunchError(
            f"launch: got --master {named}, which is {host} on this machine; expected an address that other machines reach. "
            "Pass --interface."
        )
    return host, host


def _binary(stream: TextIO, original: TextIO | None) -> BinaryIO:
    """Return the binary stream below a text stream, or below Python's original one."""
    stream.flush()
    return getattr(stream, "buffer", None) or original.buffer  # type: ignore[union-attr]
