"""The processes that a machine starts for a job: their commands, environments and GPUs."""

from __future__ import annotations

import os
import sys
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from ...runtime.openmp_threads import num_cores
from ..process import ALONE, COLLECTIVES, HOROVODS
from . import heartbeats
from .job import Job
from .network import interface_of, unused_numbers

_SERVER = (sys.executable, "-m", "gluon_mgpu.distributed.launcher.server")
_RENDEZVOUS = (sys.executable, "-m", "gluon_mgpu.distributed.launcher.rendezvous")
MACHINES = "machines"


class Task(NamedTuple):
    """One process to start.

    Attributes
    ----------
    name : str
        A worker's rank, "server 0", "scheduler", "rendezvous", or `MACHINES`, the watch.
    command : tuple of str
    environ : dict of str to str
        The complete environment.
    slot : int
        A worker's number on its machine; -1 for a process that serves the workers.
    """

    name: str
    command: Tuple[str, ...]
    environ: Mapping[str, str]
    slot: int = -1


def tasks(job: Job, host: str, root: Tuple[str, int], counts: str = "") -> List[Task]:
    """Return the processes of this machine: on node 0 the scheduler or Horovod's rendezvous, then servers, then workers.

    Parameters
    ----------
    job : Job
    host : str
        The address at which the other machines reach this one.
    root : tuple of (str, int)
        The address and the port of the scheduler or the rendezvous. The next port is that of the heartbeats.
    counts : path, optional
        The file in which the workers count their collective calls.
    """
    own = {*ALONE.variables(), "HOROVOD_RANK"}  # those of a launcher around this one
    base = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_") and name not in own}
    base[COLLECTIVES] = counts
    serving = [_watch(job, host, root, base)] if job.num_nodes > 1 else []
    if job.backend == "horovod" and job.num_nodes * job.num_processes > 1:
        if not job.node_rank:
            serving.append(Task("rendezvous", (*_RENDEZVOUS, root[0], str(root[1])), base))
        gloo = {"RENDEZVOUS_ADDR": root[0], "RENDEZVOUS_PORT": str(root[1]), "IFACE": interface_of(host)}
        base = {**base, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        base.update({f"HOROVOD_GLOO_{name}": value for name, value in gloo.items() if value})
    elif job.num_servers:
        base.update(_store_environ(root, job.num_nodes * job.num_processes, job.num_servers), DMLC_NODE_HOST=host)
        command = (*_SERVER, "--accept-optimizers") if job.accept_optimizers else _SERVER
        if not job.node_rank:
            serving.append(Task("scheduler", command, {**base, "DMLC_ROLE": "scheduler"}))
        for number in range(job.node_rank, job.num_servers, job.num_nodes):
            serving.append(Task(f"server {number}", command, {**base, "DMLC_ROLE": "server"}))
        base["DMLC_ROLE"] = "worker"
    found = serving + [_worker(job, slot, base) for slot in range(job.num_processes)]
    return _with_unix_sockets(found) if job.num_servers and job.num_nodes == 1 else found


def _with_unix_sockets(found: Sequence[Task]) -> List[Task]:
    """Let ps-lite use Unix sockets, `/tmp/NUMBER`, instead of ports, to which every user of the machine can connect.

    `PORT` is the number of each process. The scheduler, the first one, takes it from the root.
    """
    numbers = unused_numbers(len(found))
    ours = {"DMLC_LOCAL": "1", "DMLC_PS_ROOT_PORT": str(numbers[0])}
    return [task._replace(environ={**task.environ, **ours, "PORT": str(number)}) for task, number in zip(found, numbers)]


def _watch(job: Job, host: str, root: Tuple[str, int], base: Mapping[str, str]) -> Task:
    """Return this machine's watch, which exchanges heartbeats with node 0."""
    numbers = map(str, (job.node_rank, job.num_nodes, job.num_processes))
    script = (sys.executable, "-I", "-S", heartbeats.__file__)
    return Task(MACHINES, (*script, root[0], str(root[1] + 1), host, *numbers), base)


def _store_environ(root: Tuple[str, int], num_workers: int, num_servers: int) -> Dict[str, str]:
    """Return the variables of ps-lite, MXNet's transport. It binds to `DMLC_NODE_HOST`, the scheduler to the root."""
    return {
        "DMLC_PS_ROOT_URI": root[0],
        "DMLC_PS_ROOT_PORT": str(root[1]),
        "DMLC_NUM_WORKER": str(num_workers),
        "DMLC_NUM_SERVER": str(num_servers),
    }


def _worker(job: Job, slot: int, base: Mapping[str, str]) -> Task:
    process, count = job.process(job.node_rank, slot), job.num_processes
    environ = {"PYTHONUNBUFFERED": "1", **base, **process.variables()}  # unbuffered: keeps the last lines of a killed process
    if "HOROVOD_CONTROLLER" in base:
        environ.update({variable: str(getattr(process, name)) for name, variable in HOROVODS.items()})
        environ["HOROVOD_HOSTNAME"] = f"node{process.node_rank}"
    if count > 1:
        environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // count)))
    each = job.gpus_per_process or len(job.gpus) // count
    gpus = job.gpus[slot * each :][:each] or job.gpus
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return Task(str(process.rank), job.program, environ, slot)
