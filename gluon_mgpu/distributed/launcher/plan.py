"""Which process runs where: the plan that every node receives, and the commands and environments of a node's processes."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ...runtime.threads import num_cores
from ..process import LaunchError, Process
from .fields import address, integer, list_of, one_of, pair, record
from .interfaces import interface_of
from .tokens import TOKEN

STARTUP = str(Path(__file__).parent / "startup")
_SERVER = (sys.executable, "-c", "from gluon_mgpu_startup.server import main; main()")
_HOROVOD_RENDEZVOUS = str(Path(__file__).parent / "horovod_rendezvous.py")
_STALE = {*Process(0, 1, 0, 1, 0, 1, 0).variables(), "HOROVOD_RANK", TOKEN}  # workers must not get the launchers' secret
BACKENDS = ("dist_sync", "horovod")
MOST_NODES = 2**16
MOST_PROCESSES = 2**16
MOST_RESTARTS = 2**31
_COUNTS = list_of(integer(0, MOST_PROCESSES), 1, MOST_NODES)
_FIELDS = record(
    restart=integer(0, MOST_RESTARTS),
    counts=_COUNTS,
    servers=_COUNTS,
    root=pair(address, integer(1, 65535)),
    backend=one_of(*BACKENDS),
)


@dataclass(frozen=True)
class Plan:
    """The layout of one attempt, the same on every node. It holds numbers and an address, and no code or commands.

    Attributes
    ----------
    restart : int
        Restarts of the job so far.
    counts : tuple of int
        Workers of each node.
    servers : tuple of int
        Parameter servers of each node; 0 if one worker trains alone.
    root : tuple of (str, int)
        Address and port on node 0 of the scheduler, or of Horovod's rendezvous.
    backend : str
        Connects the workers: `dist_sync`, MXNet's store, or `horovod`.
    """

    restart: int
    counts: Tuple[int, ...]
    servers: Tuple[int, ...]
    root: Tuple[str, int]
    backend: str = "dist_sync"

    @property
    def num_processes(self) -> int:
        """The number of workers."""
        return sum(self.counts)

    def process(self, node_rank: int, local_rank: int) -> Process:
        """Return the place of a node's worker. Ranks count up node by node.

        Examples
        --------
        >>> Plan(0, (2, 3), (1, 1), ("10.0.0.1", 9000)).process(1, 2).rank
        4
        """
        rank = sum(self.counts[:node_rank]) + local_rank
        count = self.counts[node_rank]
        return Process(rank, self.num_processes, local_rank, count, node_rank, len(self.counts), self.restart)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Plan:
        """Return the plan that another node has sent as `vars(plan)`.

        Raises
        ------
        LaunchError
            The fields are not a plan.
        """
        try:
            plan = cls(**_FIELDS(fields))
        except ValueError as error:
            raise LaunchError(
                f"launch: got {str(fields)[:200]!r} ({error}); expected a plan. Run the same version on every node."
            ) from None
        if len(plan.counts) != len(plan.servers) or not 0 < plan.num_processes <= MOST_PROCESSES:
            raise LaunchError(
                f"launch: got {str(fields)[:200]!r}; expected a plan with processes and servers for each node, "
                f"at most {MOST_PROCESSES} in all. Run the same version on every node."
            )
        return plan


@dataclass(frozen=True)
class Task:
    """One process to start.

    Attributes
    ----------
    name : str
        A worker's rank, "server 0", "scheduler" or "rendezvous".
    number : int
        Chooses its colour.
    command : tuple of str
    environ : dict of str to str
        The complete environment.
    is_worker : bool
        Whether it runs the program, rather than serving the workers.
    cores : tuple of int
        The cores that it is bound to; () leaves it unbound.
    stdin : bytes
        Its standard input. If this is not empty, the input stays open until the process must end, instead of a signal.
    """

    name: str
    number: int
    command: Tuple[str, ...]
    environ: Mapping[str, str]
    is_worker: bool = False
    cores: Tuple[int, ...] = ()
    stdin: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Machine:
    """One machine of a job: the program, and the cores and GPUs that its processes share.

    Attributes
    ----------
    program : tuple of str
        As `program_command` returns it.
    host : str
        The address at which the other nodes reach this one.
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
        base = {name: value for name, value in os.environ.items() if name not in _STALE and not name.startswith("DMLC_")}
        tasks: List[Task] = []
        if plan.backend == "horovod" and plan.num_processes > 1:
            if not node_rank:
                command = (sys.executable, "-I", "-S", _HOROVOD_RENDEZVOUS, plan.root[0], str(plan.root[1]))
                tasks = [Task("rendezvous", 0, command, base)]
            base = {**_hooked(base), **self._horovod_environ(plan)}
        elif any(plan.servers):
            store = {**base, **self._store_environ(plan)}
            tasks = (
                [] if node_rank else [Task("scheduler", 0, _SERVER, {**store, "DMLC_ROLE": "scheduler", "GLUON_MGPU_DEBUG": ""})]
            )
            first = sum(plan.servers[:node_rank])
            for number in range(first, first + plan.servers[node_rank]):
                tasks.append(Task(f"server {number}", number, _SERVER, {**store, "DMLC_ROLE": "server", "GLUON_MGPU_DEBUG": ""}))
            base = {**_hooked(store), "DMLC_ROLE": "worker"}
        return tasks + [self._worker(plan.process(node_rank, i), base, plan) for i in range(plan.counts[node_rank])]

    def _store_environ(self, plan: Plan) -> Dict[str, str]:
        """Return the variables of ps-lite, MXNet's transport. It binds to `DMLC_NODE_HOST`, the scheduler to the root."""
        return {
            "DMLC_PS_ROOT_URI": plan.root[0],
            "DMLC_PS_ROOT_PORT": str(plan.root[1]),
            "DMLC_NUM_WORKER": str(plan.num_processes),
            "DMLC_NUM_SERVER": str(sum(plan.servers)),
            "DMLC_NODE_HOST": self.host,
        }

    def _horovod_environ(self, plan: Plan) -> Dict[str, str]:
        """Return the variables of all Horovod processes. Horovod binds to the first address of an interface."""
        interface = interface_of(self.host)
        return {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": plan.root[0],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(plan.root[1]),
            **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
        }

    def _worker(self, process: Process, base: Mapping[str, str], plan: Plan) -> Task:
        local, count = process.local_rank, process.local_processes
        environ = {"PYTHONUNBUFFERED": "1", **base, **process.variables()}  # keeps the last lines of a killed process
        if plan.backend == "horovod" and plan.num_processes > 1:
            environ.update(_horovod_place(process, plan))
        cores: Tuple[int, ...] = ()
        if count > 1 and len(self.cores) >= count:
            cores = shares(self.cores, count)[local]
        elif count > 1:
            environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // count)))
        if self.gpus_per_process:
            gpus = self.gpus[local * self.gpus_per_process :][: self.gpus_per_process]
        else:
            gpus = shares(self.gpus, count)[local] if len(self.gpus) >= count else self.gpus
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return Task(str(process.rank), process.rank, self.program, environ, True, cores)


def _hooked(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return an environment whose Python runs `startup/sitecustomize.py`, which ends workers in order."""
    return {**environ, "PYTHONPATH": os.pathsep.join([STARTUP, *filter(None, [environ.get("PYTHONPATH")])])}


def _horovod_place(process: Process, plan: Plan) -> Dict[str, str]:
    """Return a worker's place in Horovod's variables. "Cross" counts the workers with the same local rank on all machines."""
    peers = [node for node, count in enumerate(plan.counts) if count > process.local_rank]
    place = {
        "RANK": process.rank,
        "SIZE": process.num_processes,
        "LOCAL_RANK": process.local_rank,
        "LOCAL_SIZE": process.local_processes,
        "CROSS_RANK": peers.index(process.node_rank),
        "CROSS_SIZE": len(peers),
        "HOSTNAME": f"node{process.node_rank}",
    }
    return {f"HOROVOD_{name}": str(value) for name, value in place.items()}


def program_command(program: Sequence[str], *, module: bool = False) -> Tuple[str, ...]:
    """Return the command for `train.py ...`, for a module with its arguments, or for a program on the PATH.

    Raises
    ------
    LaunchError
        The script or program does not exist.

    Examples
    --------
    >>> program_command(["timeit", "-n", "1"], module=True)[1:]
    ('-m', 'timeit', '-n', '1')
    """
    first, *arguments = program
    if module:
        return (sys.executable, "-m", first, *arguments)
    if first.endswith(".py"):
        if not os.path.isfile(first):
            raise LaunchError(
                f"launch: got {first!r}; expected an existing script. Check the path, which starts from {os.getcwd()}."
            )
        return (sys.executable, first, *arguments)
    found = shutil.which(first) or shutil.which(first, path=str(Path(sys.executable).parent))
    if found is None:
        raise LaunchError(
            f"launch: got {first!r}; expected a script that ends in .py, or a program on the PATH. Pass -m to run a module."
        )
    return (found, *arguments)


def shares(things: Sequence[Any], count: int) -> List[Tuple[Any, ...]]:
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
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0), key=_place)
    return tuple(cores) if num_cores() == len(cores) else ()


def _place(core: int) -> Tuple[int, int, int]:
    return (_topology(core, "physical_package_id"), _topology(core, "core_id"), core)


def _topology(core: int, what: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/{what}").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def default_servers(counts: Sequence[int]) -> Tuple[int, ...]:
    """Return the default number of parameter servers of each node.

    A single worker needs no server. On one machine, two servers were faster than one and than four, for two workers and for
    four. Several machines have one each, so that each sends as much as it receives.

    Examples
    --------
    >>> default_servers([1]), default_servers([4]), default_servers([2, 2])
    ((0,), (2,), (1, 1))
    """
    each = 0 if sum(counts) == 1 else 2 if len(counts) == 1 else 1
    return tuple(each for _ in counts)


def spread_servers(servers: Optional[int], counts: Sequence[int]) -> Tuple[int, ...]:
    """Divide `servers` over the nodes; the first nodes get one more if the division leaves a remainder."""
    if servers is None or sum(counts) == 1:
        return default_servers(counts)
    return tuple(len(share) for share in shares(range(servers), len(counts)))
