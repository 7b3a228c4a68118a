"""Which process runs where: the plan that every machine works out, and the commands and environments of its processes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple, TypeVar

from ...runtime.openmp_threads import num_cores
from ..process import PREFIX, Process
from .network import interface_of

_SERVER = (sys.executable, "-m", "gluon_mgpu.distributed.launcher.server")
_HOROVOD_RENDEZVOUS = str(Path(__file__).parent / "horovod_rendezvous.py")
_STALE = {*Process(0, 1, 0, 1, 0, 1, 0).variables(), "HOROVOD_RANK", f"{PREFIX}DEBUG"}  # of a launcher around this one
BACKENDS = ("dist_sync", "horovod")
_Thing = TypeVar("_Thing")


@dataclass(frozen=True)
class Plan:
    """The layout of one attempt. Every machine works out the same one.

    Attributes
    ----------
    restart : int
        Restarts of the job so far.
    num_nodes, num_local : int
        Machines, and workers of each.
    num_servers : int
        Parameter servers of the whole job.
    root : tuple of (str, int)
        Address and port on node 0 of the scheduler, or of Horovod's rendezvous. The next ports are those of `machines`.
    backend : str
        Connects the workers: `dist_sync`, MXNet's store, or `horovod`.
    """

    restart: int
    num_nodes: int
    num_local: int
    num_servers: int
    root: Tuple[str, int]
    backend: str = "dist_sync"

    @property
    def num_processes(self) -> int:
        """The number of workers."""
        return self.num_nodes * self.num_local

    def process(self, node_rank: int, local_rank: int) -> Process:
        """Return the place of a machine's worker. Ranks count up machine by machine.

        Examples
        --------
        >>> Plan(0, 2, 3, 2, ("10.0.0.1", 9000)).process(1, 2).rank
        5
        """
        rank = node_rank * self.num_local + local_rank
        return Process(rank, self.num_processes, local_rank, self.num_local, node_rank, self.num_nodes, self.restart)


@dataclass(frozen=True)
class Task:
    """One process to start.

    Attributes
    ----------
    name : str
        A worker's rank, "server 0", "scheduler" or "rendezvous".
    command : tuple of str
    environ : dict of str to str
        The complete environment.
    slot : int
        A worker's number on its machine; -1 for a process that serves the workers.
    cores : tuple of int
        The cores that it is bound to; () leaves it unbound.
    """

    name: str
    command: Tuple[str, ...]
    environ: Mapping[str, str]
    slot: int = -1
    cores: Tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """One machine of a job: the program, and the cores and GPUs that its processes share.

    Attributes
    ----------
    program : tuple of str
        As `program_command` returns it.
    host : str
        The address at which the other machines reach this one.
    cores : tuple of int
        Each worker is bound to an equal share of them; () leaves all unbound.
    gpus : tuple of str
        The GPUs as `CUDA_VISIBLE_DEVICES` names them.
    gpus_per_process : int
        0 gives each worker an equal share of the GPUs, or all GPUs if there are fewer GPUs than workers.
    """

    program: Tuple[str, ...]
    host: str = "127.0.0.1"
    cores: Tuple[int, ...] = ()
    gpus: Tuple[str, ...] = ()
    gpus_per_process: int = 0

    def tasks(self, plan: Plan, node_rank: int) -> List[Task]:
        """Return the processes of this machine: on node 0 the scheduler or the rendezvous, then servers, then workers."""
        base = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
        for name in _STALE - {f"{PREFIX}DEBUG"}:
            base.pop(name, None)
        tasks: List[Task] = []
        if plan.num_processes > 1 and plan.backend == "horovod":
            address, port = plan.root[0], str(plan.root[1])
            if not node_rank:
                tasks.append(Task("rendezvous", (sys.executable, "-I", "-S", _HOROVOD_RENDEZVOUS, address, port), base))
            base.update(self._horovod_environ(address, port))
        elif plan.num_servers:
            base.update(store_environ(plan.root, plan.num_processes, plan.num_servers), DMLC_NODE_HOST=self.host)
            serving = {name: value for name, value in base.items() if name not in _STALE}
            if not node_rank:
                tasks.append(Task("scheduler", _SERVER, {**serving, "DMLC_ROLE": "scheduler"}))
            for number in range(node_rank, plan.num_servers, plan.num_nodes):
                tasks.append(Task(f"server {number}", _SERVER, {**serving, "DMLC_ROLE": "server"}))
            base["DMLC_ROLE"] = "worker"
        return [*tasks, *(self._worker(plan.process(node_rank, slot), base) for slot in range(plan.num_local))]

    def _horovod_environ(self, address: str, port: str) -> Dict[str, str]:
        """Return the variables of all Horovod processes. Horovod binds to the first address of an interface."""
        interface = interface_of(self.host)
        return {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
        }

    def _worker(self, process: Process, base: Mapping[str, str]) -> Task:
        local, count = process.local_rank, process.local_processes
        environ = {"PYTHONUNBUFFERED": "1", **base, **process.variables()}  # keeps the last lines of a killed process
        if "HOROVOD_CONTROLLER" in base:
            environ.update(_horovod_place(process))
        cores: Tuple[int, ...] = ()
        if count > 1 and len(self.cores) >= count:
            cores = shares(self.cores, count)[local]
        elif count > 1:
            environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // count)))
        gpus = self.gpus
        if self.gpus_per_process:
            gpus = gpus[local * self.gpus_per_process :][: self.gpus_per_process]
        elif len(gpus) >= count:
            gpus = shares(gpus, count)[local]
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return Task(str(process.rank), self.program, environ, local, cores)


def store_environ(root: Tuple[str, int], num_workers: int, num_servers: int) -> Dict[str, str]:
    """Return the variables of ps-lite, MXNet's transport. It binds to `DMLC_NODE_HOST`, the scheduler to the root."""
    return {
        "DMLC_PS_ROOT_URI": root[0],
        "DMLC_PS_ROOT_PORT": str(root[1]),
        "DMLC_NUM_WORKER": str(num_workers),
        "DMLC_NUM_SERVER": str(num_servers),
    }


def _horovod_place(process: Process) -> Dict[str, str]:
    """Return a worker's place in Horovod's variables. "Cross" counts the workers with the same local rank on all machines."""
    return {
        "HOROVOD_RANK": str(process.rank),
        "HOROVOD_SIZE": str(process.num_processes),
        "HOROVOD_LOCAL_RANK": str(process.local_rank),
        "HOROVOD_LOCAL_SIZE": str(process.local_processes),
        "HOROVOD_CROSS_RANK": str(process.node_rank),
        "HOROVOD_CROSS_SIZE": str(process.num_nodes),
        "HOROVOD_HOSTNAME": f"node{process.node_rank}",
    }


def shares(things: Sequence[_Thing], count: int) -> List[Tuple[_Thing, ...]]:
    """Divide things into `count` consecutive shares; the first ones are longer by one if the division leaves a remainder.

    Examples
    --------
    >>> shares([0, 1, 2, 3, 4], 2)
    [(0, 1, 2), (3, 4)]
    """
    size, longer = divmod(len(things), count)
    ends = [i * size + min(i, longer) for i in range(count + 1)]
    return [tuple(things[begin:end]) for begin, end in zip(ends, ends[1:])]


def bindable_cores() -> Tuple[int, ...]:
    """Return the cores of this process, threads of one core next to each other; () if a quota allows fewer cores."""
    cores = sorted(os.sched_getaffinity(0), key=_place)
    return tuple(cores) if num_cores() == len(cores) else ()


def _place(core: int) -> Tuple[int, int, int]:
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package, place = (int((folder / name).read_text("ascii")) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # some containers do not show it
        return 0, 0, core
    return package, place, core


def default_servers(num_nodes: int, num_local: int) -> int:
    """Return the default number of parameter servers.

    A single worker needs none. On one machine, two servers were faster than one and than four, for two workers and for four.
    Several machines have one each, so that each sends as much as it receives.
    """
    return num_nodes if num_nodes > 1 else 2 if num_local > 1 else 0
