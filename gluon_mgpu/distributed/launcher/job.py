"""A job as the user asked for it: the program, its processes and machines, and the limits of its restarts and waiting times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Tuple

from ..process import LaunchError

_FAILED_S = 5.0  # for the other workers to end after a failure: they have nothing to save together


@dataclass(frozen=True)
class Limits:
    """Limits of a job: restarts, numbers of processes, and waiting times.

    Attributes
    ----------
    max_restarts : int
    fewest : int
        The smallest number of processes with which the job may continue; 0 if their number must not change.
    grace_s : float, seconds
        How long all processes together may be idle after a signal to the launcher; a tenth of it when some have ended. Processes
        left after this time, or after ten times this time in all, are killed. Machines wait for each other as long.
    timeout_s : float, seconds
        How long a process may be stopped (SIGSTOP), and how long all together may be idle; a tenth of it when some have exited
        with status 0. 0 for no limit.
    patience_s : float, seconds
        How long machines wait for each other at the start.
    """

    max_restarts: int = 0
    fewest: int = 0
    grace_s: float = 60.0
    timeout_s: float = 300.0
    patience_s: float = 300.0

    @property
    def failed_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL for the other processes when one has failed, or the launcher was killed."""
        return min(self.grace_s, _FAILED_S)


@dataclass(frozen=True)
class Job:
    """A program, and the processes and machines that run it.

    Attributes
    ----------
    program : tuple of str
        The command, as `program_command` returns it.
    num_processes : int
        On each machine.
    servers : int, optional
        Parameter servers of the whole job; `default_servers` by default.
    backend : str
        Connects the processes: `dist_sync`, MXNet's store, or `horovod`, where it is installed.
    num_nodes, node_rank : int
        The number of machines, and the rank of this one.
    master : tuple of (str, int), optional
        Address of node 0, and the first of a few ports that are free there. Required for several machines.
    interface : str, optional
        Network interface or address of this machine that everything binds to: by default loopback on one machine, and the
        address from which node 0 is reached on several.
    bind : bool
        Whether to bind each process to separate cores, if there are enough.
    gpus : tuple of str
        The GPUs of this machine, as `CUDA_VISIBLE_DEVICES` names them.
    gpus_per_process : int
        0 divides them evenly.
    log_dir : pathlib.Path, optional
        Folder for the logs; by default a new one in `runs/launch`, named after the time.
    limits : Limits
    restart : int
        How often the job has been started before, by something else than this launcher.

    Raises
    ------
    LaunchError
        The job cannot be run as described.
    """

    program: Tuple[str, ...]
    num_processes: int = 1
    servers: Optional[int] = None
    backend: str = "dist_sync"
    num_nodes: int = 1
    node_rank: int = 0
    master: Optional[Tuple[str, int]] = None
    interface: Optional[str] = None
    bind: bool = True
    gpus: Tuple[str, ...] = ()
    gpus_per_process: int = 0
    log_dir: Optional[Path] = None
    limits: Limits = Limits()
    restart: int = 0

    def __post_init__(self) -> None:
        wrong = next((text for is_wrong, text in self._checks() if is_wrong), "")
        if wrong:
            raise LaunchError(f"launch: got {wrong}")

    def port(self, restart: int) -> int:
        """Return the first port on node 0 for an attempt; late messages of an earlier one must not reach it."""
        return (self.master[1] if self.master else 0) + restart * (self.num_nodes + 2)

    def _checks(self) -> List[Tuple[bool, str]]:
        limits, count, last = self.limits, self.num_processes, self.port(self.limits.max_restarts + 1) - 1
        needed, found = self.gpus_per_process * count, len(self.gpus)
        return [
            (
                self.backend == "horovod" and bool(self.servers),
                f"{self.servers} servers with Horovod; expected none, as it has no servers. Leave --servers out.",
            ),
            (
                not 0 <= self.node_rank < self.num_nodes,
                f"node {self.node_rank} of {self.num_nodes}; expected a rank from 0 to {self.num_nodes - 1}. See --node-rank.",
            ),
            (
                self.num_nodes > 1 and self.master is None,
                f"{self.num_nodes} machines; expected the address of node 0 and a port. Pass --master HOST:PORT.",
            ),
            (
                self.num_nodes > 1 and last > 65535,
                f"ports up to {last} for {limits.max_restarts} restarts; expected 65535 or less. See --master.",
            ),
            (
                bool(limits.fewest) and (self.num_nodes > 1 or limits.fewest > count),
                f"--min-processes {limits.fewest} with {count} processes on {self.num_nodes} machines; expected one machine with "
                "as many processes or more. See -n.",
            ),
            (
                needed > found,
                f"{found} GPUs for {count} processes; expected {needed}. Request fewer. On CPUs, leave "
                "--devices-per-process out, and pass the devices to the program.",
            ),
        ]
