"""Which machines there are: from a host file, over ssh, or from Slurm's environment."""

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
# Without a terminal, which would echo what is sent there, and log it. The launcher there ends when its input does.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_PASSED_ON = ("MXNET_", "OMP_", "PS_")
_MOST_PASSED = 48 * 1024  # bytes; a pipe holds more
# ps shows commands to every user of a machine, so the environment and the token come through standard input, in one line. The
# launcher sets them itself, before it imports MXNet: /proc/PID/environ holds only what a process was started with.
_RUN_THERE = (
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
        As ssh takes it.
    slots : int
        Processes there.
    """

    name: str
    slots: int


def parse_hosts(text: str, *, slots: int) -> List[Host]:
    """Return the hosts of a host file: one a line, `node1 slots=4`; `#` begins a comment.

    Parameters
    ----------
    text : str
    slots : int
        For lines that say none.

    Raises
    ------
    LaunchError
        A line is something else, a host is named twice, or there is none.

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
        said = re.fullmatch(r"slots=([1-9]\d{0,4})", words[1]) if len(words) > 1 else None
        if len(words) > 2 or (len(words) > 1 and said is None) or words[0].startswith("-") or not words[0].isprintable():
            raise LaunchError(f"launch: got {line!r} in the host file; expected a host a line. Write node1, or node1 slots=4.")
        found.append(Host(words[0], int(said.group(1)) if said else slots))
    if len({host.name for host in found}) != len(found) or not found:
        raise LaunchError(
            f"launch: got hosts {[host.name for host in found]}; expected one or more, each once. See the host file."
        )
    return found


def expand_nodelist(text: str) -> List[str]:
    """Return the host names of Slurm's short form.

    Raises
    ------
    LaunchError
        It is not one.

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
    """Return how many nodes Slurm runs this on, which this is, and the rendezvous; None where it runs on one, or not in Slurm.

    The rendezvous is the first host, at a port that depends on the job's number, so that jobs do not meet.

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
            f"launch: got SLURM_NNODES={count!r}, SLURM_NODEID={node!r}; expected numbers. Pass --nodes and --node-rank."
        )
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_NODES" in environ
    if not in_step or environ.get("SLURM_LOCALID", "0") != "0" or not re.fullmatch(r"1(\(x\d+\))?", tasks):
        raise LaunchError(
            f"launch: got {count} nodes of Slurm's and {tasks} tasks a node; expected one launcher a node, which starts "
            "the processes. Write srun --ntasks-per-node=1 gluon-mgpu launch -n ..., or pass --nodes 1."
        )
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    job = environ.get("SLURM_JOB_ID", "0")
    port = PORT + (int(job) % 1000 if job.isascii() and job.isdigit() else 0)
    return int(count), int(node), (expand_nodelist(nodelist)[0], port)


@dataclass(frozen=True)
class SshHosts:
    """A launcher to start on every host, by ssh: to a `Node` they are its processes.

    Each gets the token, and those variables of the environment that are passed on, through ssh's standard input.

    Attributes
    ----------
    hosts : tuple of Host
    rendezvous : tuple of (str, int)
    arguments : tuple of str
        What follows `gluon-mgpu launch`, but for nodes, rendezvous and number of processes.
    token : str
        What the launchers prove to each other that they know.
    host : str
        The address of this machine; nobody asks for it.

    Raises
    ------
    LaunchError
        There is more to pass on than a pipe holds.
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
                f"launch: got {size} bytes of {', '.join(name + '*' for name in _PASSED_ON)} to pass on by ssh; expected at most "
                f"{_MOST_PASSED}. Unset what the other hosts do not need."
            )

    def tasks(self, plan: Plan, node_rank: int) -> List[Task]:
        """Return one ssh a host."""
        environ = {name: value for name, value in os.environ.items() if name != TOKEN}
        passed = self._environ()
        return [
            Task(f"node {host.name}", rank, (*_SSH, host.name, self._command(rank, host)), environ, True, stdin=passed)
            for rank, host in enumerate(self.hosts)
        ]

    def _environ(self) -> bytes:
        """Return the line that each launcher reads first."""
        passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        return json.dumps({**passed, "NO_COLOR": "1", TOKEN: self.token}).encode("ascii") + b"\n"

    def _command(self, node_rank: int, host: Host) -> str:
        where = f"{self.rendezvous[0]}:{self.rendezvous[1]}"
        placed = ["--nodes", str(len(self.hosts)), "--node-rank", str(node_rank), "--rendezvous", where, "--end-with-input"]
        slots = ["-n", str(host.slots)]
        command = [sys.executable, "-c", _RUN_THERE, "gluon_mgpu", "launch", *placed, *slots, *self.arguments]
        return f"cd {shlex.quote(os.getcwd())} && exec {_quoted(command)}"


def _quoted(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))
