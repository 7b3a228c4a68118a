"""The rank of this process in its job, read from the launcher's environment variables."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from typing import Dict, Mapping, Optional

PREFIX = "GLUON_MGPU_"
COLLECTIVES = f"{PREFIX}COLLECTIVES"  # names the file in which the processes of a machine note their collective calls
LATEST = 64  # calls in it: of each process their number, then a checksum of the kinds up to each of the latest ones
REQUEUE = 85  # the exit code after SIGUSR1: saved, start the same command again. sysexits.h and shells use no code near it


def exit_code_of(signum: int) -> int:
    """Return the exit code of a program that a signal has asked to stop: 128 plus its number, `REQUEUE` after SIGUSR1.

    Examples
    --------
    >>> exit_code_of(signal.SIGTERM), exit_code_of(signal.SIGUSR1)
    (143, 85)
    """
    return REQUEUE if signum == signal.SIGUSR1 else 128 + signum


class LaunchError(ValueError):
    """A job cannot be launched as requested, or the variables that hold a process's rank contradict each other."""


@dataclass(frozen=True)
class Process:
    """A process's place in its job.

    Attributes
    ----------
    rank : int
        Its number among all processes, from 0.
    num_processes : int
    local_rank : int
        Its number among the processes of its machine, from 0.
    local_processes : int
        Processes of its machine.
    node_rank : int
        The number of its machine, from 0.
    num_nodes : int
        Machines of the job.
    restart : int
        Restarts of the job so far.
    """

    rank: int
    num_processes: int
    local_rank: int
    local_processes: int
    node_rank: int
    num_nodes: int
    restart: int

    def variables(self) -> Dict[str, str]:
        """Return the environment variables from which `this_process` reads this place.

        Examples
        --------
        >>> Process(1, 2, 1, 2, 0, 1, 0).variables()["GLUON_MGPU_RANK"]
        '1'
        """
        return {PREFIX + name.upper(): str(value) for name, value in vars(self).items()}


ALONE = Process(0, 1, 0, 1, 0, 1, 0)
_OURS = {name: PREFIX + name.upper() for name in vars(ALONE)}
HOROVODS = {  # "cross" counts the processes with the same local rank on all machines
    "rank": "HOROVOD_RANK",
    "num_processes": "HOROVOD_SIZE",
    "local_rank": "HOROVOD_LOCAL_RANK",
    "local_processes": "HOROVOD_LOCAL_SIZE",
    "node_rank": "HOROVOD_CROSS_RANK",
    "num_nodes": "HOROVOD_CROSS_SIZE",
}


def this_process(environ: Optional[Mapping[str, str]] = None) -> Process:
    """Return this process's place in its job. A program started without a launcher (ours or horovodrun) is a job of one process.

    Parameters
    ----------
    environ : mapping of str to str, optional
        Holds `GLUON_MGPU_RANK`, `..._NUM_PROCESSES`, `..._LOCAL_RANK`, `..._LOCAL_PROCESSES`, `..._NODE_RANK`,
        `..._NUM_NODES` and `..._RESTART`, or Horovod's `HOROVOD_RANK`, `..._SIZE`, `..._LOCAL_RANK`, `..._LOCAL_SIZE`,
        `..._CROSS_RANK` and `..._CROSS_SIZE`; this process's environment by default.

    Raises
    ------
    LaunchError
        Only some of the variables are set, or one is not a number, or contradicts the others.

    Examples
    --------
    >>> this_process({})
    Process(rank=0, num_processes=1, local_rank=0, local_processes=1, node_rank=0, num_nodes=1, restart=0)
    """
    environ = os.environ if environ is None else environ
    variables = _OURS
    if not any(environ.get(variable) for variable in _OURS.values()):
        if "HOROVOD_RANK" not in environ:
            return ALONE
        variables = HOROVODS
    numbers = {}
    for name, variable in variables.items():
        text = environ.get(variable) or ""
        if not re.fullmatch("[0-9]{1,9}", text):
            raise LaunchError(
                f"this_process: got {variable}={text[:100]!r}; expected a whole number, as the launcher sets. Start the program "
                f"with gluon-mgpu launch, or unset the {PREFIX}* variables of a process's rank."
            )
        numbers[name] = int(text)
    place = Process(**{"restart": 0, **numbers})
    if not (place.rank < place.num_processes and place.local_rank < place.local_processes and place.node_rank < place.num_nodes):
        raise LaunchError(f"this_process: got {place}; expected ranks below their numbers. Start it with gluon-mgpu launch.")
    return place
