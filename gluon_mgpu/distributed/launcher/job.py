"""A job as the user requested it: check it, run this machine's part, and leave nothing running."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from ..process import LaunchError
from . import guard
from .follower import Follower, Seat
from .hosts import SshHosts
from .interfaces import address_of
from .node import Node
from .output import Output
from .plan import BACKENDS, Machine, bindable_cores
from .rendezvous import Rendezvous
from .supervisor import Limits, Signals, Supervisor
from .tokens import TOKEN, check_token, token_in_environment


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


@dataclass(frozen=True)
class Job:
    """A program, and the processes and machines that run it.

    Attributes
    ----------
    program : tuple of str
        The command, as `program_command` returns it.
    num_processes : int
        On this machine.
    servers : int, optional
        Parameter servers of the whole job; `default_servers` by default.
    backend : str
        Connects the processes: `dist_sync`, MXNet's store, or `horovod`, where it is installed.
    num_nodes, node_rank : int
        The number of machines, and the rank of this one.
    rendezvous : tuple of (str, int), optional
        Address of node 0, and a port there. Required for several machines.
    interface : str, optional
        Network interface or address of this machine that everything binds to: by default loopback on one machine, and the
        address from which the rendezvous is reached on several.
    token : str
        The secret that the launchers of several machines share; `GLUON_MGPU_TOKEN` by default.
    end_with_input : bool
        Whether the end of standard input ends the job as a lost terminal does.
    silence_s : float, seconds
        A machine is lost when it is silent for longer.
    bind : bool
        Whether to bind each process to separate cores, if there are enough.
    gpus : tuple of str
        The GPUs of this machine, as `CUDA_VISIBLE_DEVICES` names them.
    gpus_per_process : int
        0 divides them evenly.
    log_dir : pathlib.Path, optional
        Folder for the logs; by default a new one in `runs/launch`, named after the time.
    limits : Limits
    """

    program: Tuple[str, ...]
    num_processes: int = 1
    servers: Optional[int] = None
    backend: str = "dist_sync"
    num_nodes: int = 1
    node_rank: int = 0
    rendezvous: Optional[Tuple[str, int]] = None
    interface: Optional[str] = None
    token: str = field(default_factory=token_in_environment, repr=False)
    end_with_input: bool = False
    silence_s: float = 10.0
    bind: bool = True
    gpus: Tuple[str, ...] = ()
    gpus_per_process: int = 0
    log_dir: Optional[Path] = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        wrong = _wrong(self)
        if wrong:
            raise LaunchError(f"launch: got {wrong}")
        if self.num_nodes > 1:
            check_token(self.token, "the job")


def run_job(job: Job) -> int:
    """Run a job to its end, from the main thread; return the exit code: 0, or that of the first process that failed.

    The code is 128 plus the signal's number if a signal killed that process, 130 after a Ctrl-C here, 143 after a SIGTERM, 85
    after a SIGUSR1, and 124 for processes that hang. When this returns, all processes and ports of the job are released.

    Raises
    ------
    LaunchError
        The nodes do not find each other, or an address or port is not available.

    Examples
    --------
    >>> import tempfile
    >>> job = Job((sys.executable, "-c", "raise SystemExit(3)"), num_processes=2, servers=0, log_dir=Path(tempfile.mkdtemp()))
    >>> run_job(job)
    3
    """
    host = address_of(job.interface or _default_interface(job))
    if job.num_nodes > 1 and not job.node_rank:
        _check_reachable(job, host)
    cores = bindable_cores() if job.bind else ()
    machine = Machine(job.program, host, cores, job.gpus, job.gpus_per_process)
    with _stage(job, machine) as (node, report, common):
        return report(*(_follow(job, machine, node, common) if job.node_rank else _lead(job, node, common)))


def run_over_ssh(job: Job, hosts: SshHosts) -> int:
    """Start a launcher on every host by ssh, and wait for them; return the exit code as `run_job` does."""
    with _stage(job, hosts) as (node, report, common):
        return report(*_lead(job, node, common))


@contextmanager
def _stage(job: Job, machine: Union[Machine, SshHosts]) -> Iterator[Tuple[Node, Callable[[int, str], int], Dict[str, Any]]]:
    """Set up this machine's node, a function that reports the end of the job, the selector and the signal handlers."""
    output = Output(job.log_dir or make_log_dir(), _binary(sys.stdout, sys.__stdout__), _binary(sys.stderr, sys.__stderr__))

    def report_end(code: int, cause: str) -> int:
        if code:
            output.report(f"{cause}\nThe logs are in {output.folder}.")
        return code

    adopted = guard.adopt_orphans(True)  # if a guard is killed, its program's children become ours
    try:
        with selectors.DefaultSelector() as selector, Signals() as signals:
            if job.end_with_input:
                _watch_input(selector)
            node = Node(machine, output, selector, grace_s=job.limits.failed_s, timeout_s=job.limits.timeout_s)
            yield node, report_end, {"limits": job.limits, "selector": selector, "signals": signals, "report": output.report}
    finally:
        guard.adopt_orphans(adopted)


def _lead(job: Job, node: Node, common: Dict[str, Any]) -> Tuple[int, str]:
    if job.num_nodes == 1 or job.rendezvous is None:
        return Supervisor(node, None, job.num_processes, servers=job.servers, backend=job.backend, **common).run()
    store: Dict[str, Any] = {"servers": job.servers, "backend": job.backend}
    options = {"silence_s": job.silence_s, "token": job.token, "selector": common["selector"], "report": common["report"]}
    rendezvous = Rendezvous(node.machine.host, job.rendezvous[1], job.num_nodes, **store, **options)
    code, cause = 1, "the launcher of node 0 failed"
    try:
        code, cause = Supervisor(node, rendezvous, job.num_processes, **store, **common).run()
    finally:
        rendezvous.finish(code, cause)
    return code, cause


def _follow(job: Job, machine: Machine, node: Node, common: Dict[str, Any]) -> Tuple[int, str]:
    assert job.rendezvous is not None
    seat = Seat(job.node_rank, job.num_nodes, job.num_processes, job.servers, job.backend)
    source = machine.host if job.interface else None
    options: Dict[str, Any] = {"rendezvous": job.rendezvous, "token": job.token, "source": source, "silence_s": job.silence_s}
    return Follower(node, machine, seat, **options, **common).run()


def _watch_input(selector: selectors.BaseSelector) -> None:
    """End the job as a lost terminal does when standard input ends: the input comes through ssh, which has then ended."""
    descriptor = 0

    def read() -> None:
        if not os.read(descriptor, 1 << 16):
            selector.unregister(descriptor)
            os.kill(os.getpid(), signal.SIGHUP)

    try:
        selector.register(descriptor, selectors.EVENT_READ, read)
    except PermissionError:
        raise LaunchError(
            "launch: got a file as standard input; expected a pipe with --end-with-input. Leave that option out."
        ) from None


def _wrong(job: Job) -> str:
    """Return why a job is invalid and what it should have, "" if it is valid."""
    limits = job.limits
    needed = job.gpus_per_process * job.num_processes
    checks: List[Tuple[bool, str]] = [
        (not job.program, "no program; expected a script, a module or a command. Name it after the options."),
        (job.num_processes < 1, f"{job.num_processes} processes; expected 1 or more. See -n."),
        (job.servers is not None and job.servers < 0, f"{job.servers} servers; expected 0 or more. See --servers."),
        (job.backend not in BACKENDS, f"backend {job.backend!r}; expected {' or '.join(BACKENDS)}. See --backend."),
        (
            job.backend == "horovod" and bool(job.servers),
            f"{job.servers} servers with Horovod; expected none, as it has no servers. Leave --servers out.",
        ),
        (
            not 0 <= job.node_rank < job.num_nodes,
            f"node {job.node_rank} of {job.num_nodes}; expected a rank from 0 to {job.num_nodes - 1}. See --node-rank.",
        ),
        (
            job.num_nodes > 1 and job.rendezvous is None,
            f"{job.num_nodes} nodes; expected the address of node 0 and a port. See --rendezvous.",
        ),
        (
            job.num_nodes > 1 and not job.token,
            f"no token for {job.num_nodes} nodes; expected the one that node 0 shows. Set {TOKEN} to it, or pass --token-file.",
        ),
        (
            not 0 < limits.grace_s < 1e6 or not 0 < job.silence_s < 1e6,
            f"a grace time of {limits.grace_s} s and a node timeout of {job.silence_s} s; expected each above 0 and below "
            "1,000,000 s. See --grace and --node-timeout.",
        ),
        (limits.max_restarts < 0, f"{limits.max_restarts} restarts; expected 0 or more. See --max-restarts."),
        (
            bool(limits.fewest) and job.num_nodes == 1 and not limits.fewest <= job.num_processes <= limits.most,
            f"{job.num_processes} processes and --elastic {limits.fewest}:{limits.most}; expected MIN <= processes <= MAX. "
            "See -n.",
        ),
        (
            needed > len(job.gpus),
            f"{job.gpus_per_process} GPUs for each of {job.num_processes} processes; expected {needed} GPUs, and this machine "
            f"has {len(job.gpus)}. Request fewer. On CPUs, leave --devices-per-process out, and pass the devices to the program.",
        ),
    ]
    return next((text for wrong, text in checks if wrong), "")


def _default_interface(job: Job) -> str:
    """Return the address that node 0 binds to by default; the other nodes learn theirs when they connect."""
    return job.rendezvous[0] if job.rendezvous and job.num_nodes > 1 and not job.node_rank else "127.0.0.1"


def _check_reachable(job: Job, host: str) -> None:
    """Raise if the name of the rendezvous means loopback on this machine, as /etc/hosts may define it."""
    assert job.rendezvous is not None
    named = job.rendezvous[0]
    if host.startswith("127.") and not job.interface and named != "localhost" and not named.startswith("127."):
        raise LaunchError(
            f"launch: got --rendezvous {named}, which is {host} on this machine; expected an address that other nodes reach. "
            "Pass --interface."
        )


def _binary(stream: Any, original: Any) -> Any:
    """Return the binary stream below a text stream, or below Python's original one."""
    stream.flush()
    return getattr(stream, "buffer", None) or original.buffer
