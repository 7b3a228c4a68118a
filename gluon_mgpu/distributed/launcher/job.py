"""A job as the user asked for it: the program, its processes and machines, the limits of its restarts and waiting times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Tuple

from ..process import LaunchError, Process

BACKENDS = ("dist_sync", "horovod")


@dataclass(frozen=True)
class Job:
    """A program, and the processes and machines that run it. Every machine has the same, except for its rank and what is its own.

    Attributes
    ----------
    program : tuple of str
        The command, as `program_command` returns it.
    num_processes : int
        On each machine.
    servers : int, optional
        Parameter servers of the whole job; `num_servers` has the default. Horovod has none.
    backend : str
        Connects the processes: `dist_sync`, MXNet's store, or `horovod`, where it is installed.
    num_nodes, node_rank : int
        The number of machines, and the rank of this one.
    master : tuple of (str, int), optional
        Address of node 0, and the first of a few ports that are free there. Required for several machines.
    interface : str, optional
        Network interface or address of this machine to which TCP sockets bind: by default loopback on one machine, and the
        address from which node 0 is reached on several.
    gpus : tuple of str
        The GPUs of this machine, as `CUDA_VISIBLE_DEVICES` names them.
    gpus_per_process : int
        0 divides the GPUs evenly, or gives each process all if there are fewer GPUs than processes.
    log_dir : pathlib.Path, optional
        Folder for the logs; by default a new one in `runs/launch`, named after the time.
    max_restarts : int
    min_processes : int
        The smallest number of processes with which the job may continue; 0 if their number must not change.
    grace_s : float, seconds
        After a signal to the launcher, processes left after this time are killed. Then machines wait for each other as long.
    join_s : float, seconds
        How long machines wait for each other at the start.
    restart : int
        Restarts of the job so far.
    accept_optimizers : bool
        Whether servers unpickle the optimizers that workers send.

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
    gpus: Tuple[str, ...] = ()
    gpus_per_process: int = 0
    log_dir: Optional[Path] = None
    max_restarts: int = 0
    min_processes: int = 0
    grace_s: float = 120.0
    join_s: float = 300.0
    restart: int = 0
    accept_optimizers: bool = False

    def __post_init__(self) -> None:
        nodes, count, needed = self.num_nodes, self.num_processes, self.gpus_per_process * self.num_processes
        if self.node_rank >= nodes:
            raise LaunchError(f"launch: got --node-rank {self.node_rank}; expected 0 to {nodes - 1}. Compare it with --nodes.")
        if nodes > 1 and self.master is None:
            raise LaunchError(f"launch: got {nodes} machines; expected the address of node 0. Pass --master HOST:PORT.")
        if self.min_processes and (nodes > 1 or self.min_processes > count):
            raise LaunchError(
                f"launch: got --min-processes {self.min_processes} with -n {count} and --nodes {nodes}; expected one machine, "
                "and at most as many as it has processes. Lower it, or raise -n."
            )
        if needed > len(self.gpus):
            raise LaunchError(
                f"launch: got {len(self.gpus)} GPUs for {count} processes; expected {needed}. Request fewer. On CPUs, leave "
                "--devices-per-process out, and pass the devices to the program."
            )

    @property
    def num_servers(self) -> int:
        """The number of parameter servers.

        A single worker needs none. On one machine, two servers were faster than one and than four, for two workers and for four.
        Several machines have one each, so that each sends as much as it receives.
        """
        if self.backend == "horovod" or self.num_nodes * self.num_processes == 1:
            return 0
        return max(2, self.num_nodes) if self.servers is None else self.servers

    def process(self, node_rank: int, local_rank: int) -> Process:
        """Return the place of a machine's worker. Ranks count up machine by machine.

        Examples
        --------
        >>> Job(("true",), 3, num_nodes=2, master=("10.0.0.1", 9000)).process(1, 2).rank
        5
        """
        count, nodes = self.num_processes, self.num_nodes
        rank = node_rank * count + local_rank
        return Process(rank, count * nodes, local_rank, count, node_rank, nodes, self.restart)
