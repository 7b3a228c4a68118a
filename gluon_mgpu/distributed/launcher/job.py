"""A job as it was asked for: checked, run on this machine's part of the nodes, and nothing of it left behind."""

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
    """Make a folder that is named after the time, and return it. Launches in one second get one each."""
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
    """What is to run, and where.

    Attributes
    ----------
    program : tuple of str
        What to execute, as `program_command` returns it.
    num_processes : int
        On this machine.
    servers : int, optional
        Parameter servers of the whole job; one a node by default.
    backend : str
        What joins the processes: `dist_sync`, MXNet's store, or `horovod`, where it is installed.
    num_nodes, node_rank : int
        How many machines there are, and which this is.
    rendezvous : tuple of (str, int), optional
        Address of node 0, and a port there. Needed for several machines.
    interface : str, optional
        Network interface or address of this machine that everything binds to: by default loopback on one machine, and the
        address from which the rendezvous is reached on several.
    token : str
        What the launchers of several machines prove to each other that they know; by default `GLUON_MGPU_TOKEN`.
    end_with_input : bool
        Whether the end of standard input ends the job as a lost terminal does.
    silence_s : float, seconds
        After which a machine that says nothing is lost.
    bind : bool
        Whether each process gets cores of its own, where there are enough.
    gpus : tuple of str
        The GPUs here, as `CUDA_VISIBLE_DEVICES` names them.
    gpus_per_process : int
        0 shares them out evenly.
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

    128 and a signal's number stand for a process that it has killed, 130 for a Ctrl-C here, 143 for a SIGTERM, 124 for
    processes that hang. When this returns, no process and no port of the job is left.

    Raises
    ------
    LaunchError
        The nodes do not find each other, or an address or port cannot be had.

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
    with _stage(job, machine) as (node, tell, common):
        return tell(*(_follow(job, machine, node, common) if job.node_rank else _lead(job, node, common)))


def run_over_ssh(job: Job, hosts: SshHosts) -> int:
    """Start a launcher on every host, by ssh, and end with them; return the exit code as `run_job` does."""
    with _stage(job, hosts) as (node, tell, common):
        return tell(*_lead(job, node, common))


@contextmanager
def _stage(job: Job, machine: Union[Machine, SshHosts]) -> Iterator[Tuple[Node, Callable[[int, str], int], Dict[str, Any]]]:
    """Give this machine's node, how to tell the end, and what else needs an end: the selector and the signal handlers."""
    output = Output(job.log_dir or make_log_dir(), _binary(sys.stdout, sys.__stdout__), _binary(sys.stderr, sys.__stderr__))

    def tell_end(code: int, cause: str) -> int:
        if code:
            output.tell(f"{cause}\nThe logs are in {output.folder}.")
        return code

    adopted = guard.adopt_orphans(True)  # should a guard be killed, what it guarded comes here
    try:
        with selectors.DefaultSelector() as selector, Signals() as signals:
            if job.end_with_input:
                _watch_input(selector)
            node = Node(machine, output, selector, grace_s=job.limits.failed_s, timeout_s=job.limits.timeout_s)
            yield node, tell_end, {"limits": job.limits, "selector": selector, "signals": signals, "tell": output.tell}
    finally:
        guard.adopt_orphans(adopted)


def _lead(job: Job, node: Node, common: Dict[str, Any]) -> Tuple[int, str]:
    if job.num_nodes == 1 or job.rendezvous is None:
        return Supervisor(node, None, job.num_processes, servers=job.servers, backend=job.backend, **common).run()
    asked: Dict[str, Any] = {"servers": job.servers, "backend": job.backend}
    waits = {"silence_s": job.silence_s, "token": job.token, "selector": common["selector"], "tell": common["tell"]}
    rendezvous = Rendezvous(node.machine.host, job.rendezvous[1], job.num_nodes, **asked, **waits)
    code, cause = 1, "the launcher of node 0 failed"
    try:
        code, cause = Supervisor(node, rendezvous, job.num_processes, **asked, **common).run()
    finally:
        rendezvous.finish(code, cause)
    return code, cause


def _follow(job: Job, machine: Machine, node: Node, common: Dict[str, Any]) -> Tuple[int, str]:
    assert job.rendezvous is not None
    seat = Seat(job.node_rank, job.num_nodes, job.num_processes, job.servers, job.backend)
    source = machine.host if job.interface else None
    knows: Dict[str, Any] = {"rendezvous": job.rendezvous, "token": job.token, "source": source, "silence_s": job.silence_s}
    return Follower(node, machine, seat, **knows, **common).run()


def _watch_input(selector: selectors.BaseSelector) -> None:
    """End the job as a lost terminal does when standard input ends: it comes through ssh, which has ended then."""
    descriptor = 0

    def read() -> None:
        if not os.read(descriptor, 1 << 16):
            selector.unregister(descriptor)
            os.kill(os.getpid(), signal.SIGHUP)

    try:
        selector.register(descriptor, selectors.EVENT_READ, read)
    except PermissionError:
        raise LaunchError(
            "launch: got a file as standard input; expected a pipe with --end-with-input. Leave that out."
        ) from None


def _wrong(job: Job) -> str:
    """Return what is wrong with a job and what it needs, "" where it can be tried."""
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
            f"node {job.node_rank} of {job.num_nodes}; expected 0 to the number less 1. See --node-rank.",
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
            "a time that is no time; expected some seconds. See --grace and --node-timeout.",
        ),
        (limits.max_restarts < 0, f"{limits.max_restarts} restarts; expected 0 or more. See --max-restarts."),
        (
            bool(limits.fewest) and job.num_nodes == 1 and not limits.fewest <= job.num_processes <= limits.most,
            f"{job.num_processes} processes and --elastic {limits.fewest}:{limits.most}; expected MIN <= processes <= MAX. "
            "See -n.",
        ),
        (
            needed > len(job.gpus),
            f"{job.gpus_per_process} GPUs for each of {job.num_processes} processes; expected {needed}, here are "
            f"{len(job.gpus)}. "
            "Leave --devices-per-process out on CPUs, and give the program its devices.",
        ),
    ]
    return next((text for wrong, text in checks if wrong), "")


def _default_interface(job: Job) -> str:
    """Return what node 0 binds to where nobody has said; the others learn their address when they connect."""
    return job.rendezvous[0] if job.rendezvous and job.num_nodes > 1 and not job.node_rank else "127.0.0.1"


def _check_reachable(job: Job, host: str) -> None:
    """Refuse a rendezvous at a name that means this machine to itself alone, as /etc/hosts may have it."""
    assert job.rendezvous is not None
    named = job.rendezvous[0]
    if host.startswith("127.") and not job.interface and named != "localhost" and not named.startswith("127."):
        raise LaunchError(
            f"launch: got --rendezvous {named}, which is {host} here; expected an address that other nodes reach. Pass "
            "--interface."
        )


def _binary(stream: Any, original: Any) -> Any:
    """Return the stream of bytes below a stream of text, or below the one that Python began with."""
    stream.flush()
    return getattr(stream, "buffer", None) or original.buffer
