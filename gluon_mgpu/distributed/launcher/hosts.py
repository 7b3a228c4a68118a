"""The machines of a job: from a host file (started over ssh), or from Slurm's environment."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from typing import List, Mapping, Optional, Sequence, Tuple

from ..process import LaunchError
from .plan import Plan, Task
from .tokens import TOKEN

PORT = 29400
# Without a terminal, which would echo and log its input. The launcher on the host ends when its input ends.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_PASSED_ON = ("MXNET_", "OMP_", "PS_")
_MOST_PASSED = 48 * 1024  # bytes; a pipe holds more
# ps shows commands to every user of a machine, so the environment and the token are sent through standard input, in one line.
# The launcher sets them itself before it imports MXNet: /proc/PID/environ holds only the initial environment of a process.
_RUN_ON_HOST = (
    "import json, os, runpy, sys; os.environ.update(json.loads(sys.stdin.readline())); "
    'runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 10_000


@dataclass(frozen=True)
class Host:
    """A machine to start processes on.

    Attributes
    ----------
    name : str
        A name that ssh accepts.
    slots : int
        Processes on this machine.
    """

    name: str
    slots: int


def parse_hosts(text: str, *, slots: int) -> List[Host]:
    """Return the hosts of a host file: one per line, `node1 slots=4`; `#` begins a comment.

    Parameters
    ----------
    text : str
    slots : int
        For lines without `slots=`.

    Raises
    ------
    LaunchError
        A line has another form, a host appears twice, or there is no host.

    Examples
    --------
    >>> parse_hosts("node1 slots=4  # the old one\\nnode2\\n", slots=2)
    [Host(name='node1', slots=4), Host(name='node2', slots=2)]
    """
    found = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        option = re.fullmatch(r"slots=([1-9]\d{0,4})", words[1]) if len(words) > 1 else None
        if len(words) > 2 or (len(words) > 1 and option is None) or words[0].startswith("-") or not words[0].isprintable():
            raise LaunchError(
                f"launch: got {line!r} in the host file; expected one host per line. Write node1, or node1 slots=4."
            )
        found.append(Host(words[0], int(option.group(1)) if option else slots))
    if len({host.name for host in found}) != len(found) or not found:
        raise LaunchError(
            f"launch: got hosts {[host.name for host in found]}; expected one or more, each once. Correct the host file."
        )
    return found


def expand_nodelist(text: str) -> List[str]:
    """Return the host names of a Slurm node list.

    Raises
    ------
    LaunchError
        The text is not a node list.

    Examples
    --------
    >>> expand_nodelist("gpu[01-03,7],login,rack[1-2]n[0-1]")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login', 'rack1n0', 'rack1n1', 'rack2n0', 'rack2n1']
    """
    names: List[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        found = [""]
        for piece in re.split(r"(\[[^\]]*\])", part):
            ends = _expand_brackets(piece, text) if piece.startswith("[") else [piece]
            if len(names) + len(found) * len(ends) > _MOST:
                raise _not_a_nodelist(text)
            found = [name + end for name in found for end in ends]
        names += found
    if not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise _not_a_nodelist(text)
    return names


def _expand_brackets(piece: str, text: str) -> List[str]:
    found: List[str] = []
    for part in piece[1:-1].split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None:
            raise _not_a_nodelist(text)
        first, last = matched.group(1), matched.group(2) or matched.group(1)
        if not int(first) <= int(last) < int(first) + _MOST:
            raise _not_a_nodelist(text)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _not_a_nodelist(text: str) -> LaunchError:
    return LaunchError(f"launch: got SLURM_JOB_NODELIST={text[:200]!r}; expected host names such as gpu[01-03,7]. Pass --nodes.")


def slurm_nodes(environ: Mapping[str, str]) -> Optional[Tuple[int, int, Tuple[str, int]]]:
    """Return the number of Slurm's nodes, this node's rank, and the rendezvous; None on a single node, or outside Slurm.

    The rendezvous is the first host, at a port that depends on the job's number, so that two jobs use different ports.

    Raises
    ------
    LaunchError
        Slurm gave several nodes, but the launcher was not started once on each.

    Examples
    --------
    >>> step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[7-8]", "SLURM_JOB_ID": "90001"}
    >>> slurm_nodes(step)
    (2, 1, ('n7', 29401))
    """
    count = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    node = environ.get("SLURM_NODEID", "")
    if count == "1":
        return None
    if not (count.isascii() and count.isdigit() and node.isascii() and node.isdigit() and int(node) < int(count)):
        raise LaunchError(
            f"launch: got SLURM_NNODES={count!r}, SLURM_NODEID={node!r}; expected a number of nodes and a smaller node number. "
            "Pass --nodes and --node-rank."
        )
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_NODES" in environ
    if not in_step or environ.get("SLURM_LOCALID", "0") != "0" or not re.fullmatch(r"1(\(x\d+\))?", tasks):
        raise LaunchError(
            f"launch: got {count} Slurm nodes and {tasks} tasks per node; expected one launcher per node, which starts "
            "the processes. Write srun --ntasks-per-node=1 gluon-mgpu launch -n ..., or pass --nodes 1."
        )
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    job = environ.get("SLURM_JOB_ID", "0")
    port = PORT + (int(job) % 1000 if job.isascii() and job.isdigit() else 0)
    return int(count), int(node), (expand_nodelist(nodelist)[0], port)


@dataclass(frozen=True)
class SshHosts:
    """The launchers to start on every host, by ssh. A `Node` runs them as its processes.

    Each gets the token and the forwarded environment variables through ssh's standard input.

    Attributes
    ----------
    hosts : tuple of Host
    rendezvous : tuple of (str, int)
    arguments : tuple of str
        The arguments of `gluon-mgpu launch`, except for nodes, rendezvous and number of processes.
    token : str
        The secret that the launchers share.
    host : str
        The address of this machine; not used.

    Raises
    ------
    LaunchError
        The forwarded variables do not fit into a pipe.
    """

    hosts: Tuple[Host, ...]
    rendezvous: Tuple[str, int]
    arguments: Tuple[str, ...]
    token: str = field(repr=False)
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        size = len(self._environ())
        if size > _MOST_PASSED:
            raise LaunchError(
                f"launch: got {size} bytes of {', '.join(name + '*' for name in _PASSED_ON)} to forward by ssh; expected at most "
                f"{_MOST_PASSED}. Unset the variables that the other hosts do not use."
            )

    def tasks(self, plan: Plan, node_rank: int) -> List[Task]:
        """Return one ssh task per host."""
        environ = {name: value for name, value in os.environ.items() if name != TOKEN}
        passed = self._environ()
        return [
            Task(f"node {host.name}", rank, (*_SSH, host.name, self._command(rank, host)), environ, True, stdin=passed)
            for rank, host in enumerate(self.hosts)
        ]

    def _environ(self) -> bytes:
        """Return the line with environment and token, which each launcher reads first."""
        passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        return json.dumps({**passed, "NO_COLOR": "1", TOKEN: self.token}).encode("ascii") + b"\n"

    def _command(self, node_rank: int, host: Host) -> str:
        where = f"{self.rendezvous[0]}:{self.rendezvous[1]}"
        placed = ["--nodes", str(len(self.hosts)), "--node-rank", str(node_rank), "--rendezvous", where, "--end-with-input"]
        slots = ["-n", str(host.slots)]
        command = [sys.executable, "-c", _RUN_ON_HOST, "gluon_mgpu", "launch", *placed, *slots, *self.arguments]
        return f"cd {shlex.quote(os.getcwd())} && exec {_quoted(command)}"


def _quoted(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))
