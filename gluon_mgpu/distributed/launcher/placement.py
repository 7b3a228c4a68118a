"""Which of a job's machines this is, from the variables of `srun` and `mpirun`."""

from __future__ import annotations

import re
from typing import Mapping, Optional, Tuple

from ..process import LaunchError

_PORT = 12_000  # ports from here on are below those that Linux gives to clients
_JOBS = 400  # jobs of one machine with ports of their own
_PORTS = 50  # of each job
_FIRST_HOST = re.compile(r"[\w.-]+(?:\[[0-9][0-9,-]*\][\w.-]*)*(?=,|$)")


Placement = Tuple[int, int, Optional[Tuple[str, int]]]  # machines, this one's rank, the address of node 0 if it is known


def placement(environ: Mapping[str, str]) -> Placement:
    """Return this launcher's place among those that `srun` or `mpirun` has started; one machine outside of both.

    Raises
    ------
    LaunchError
        Slurm gave several machines, but the launcher was not started once on each.

    Examples
    --------
    >>> step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "90001"}
    >>> placement({**step, "SLURM_STEP_NODELIST": "n[07-08]"})
    (2, 1, ('n07', 12050))
    >>> placement({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"})
    (4, 3, None)
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return (*_rank(environ, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), None)
    if "SLURM_STEP_NUM_TASKS" in environ:
        return _slurm_step(environ)
    if "PMI_SIZE" in environ:
        return (*_rank(environ, "PMI_SIZE", "PMI_RANK"), None)
    if environ.get("SLURM_NNODES", "1") != "1":
        raise _error(environ, "SLURM_NNODES", "a step of srun")
    return 1, 0, None


def _slurm_step(environ: Mapping[str, str]) -> Placement:
    count, rank = _rank(environ, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if count == 1:
        return 1, 0, None
    if environ.get("SLURM_STEP_NUM_NODES") != str(count):
        raise _error(environ, "SLURM_STEP_NUM_TASKS", "one launcher on each machine, which starts the processes")
    first = _FIRST_HOST.match(environ.get("SLURM_STEP_NODELIST", ""))
    if first is None:
        raise _error(environ, "SLURM_STEP_NODELIST", "host names such as gpu[01-03,7]")
    digits = [re.sub("[^0-9]", "", environ.get(name, "")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    number = sum(int(text or 0) for text in digits) % _JOBS
    return count, rank, (re.sub(r"\[(\d+)[^]]*\]", r"\1", first.group()), _PORT + number * _PORTS)


def _rank(environ: Mapping[str, str], size: str, rank: str) -> Tuple[int, int]:
    texts = environ[size], environ.get(rank, "")
    if not all(re.fullmatch(r"[0-9]{1,9}", text) for text in texts) or int(texts[1]) >= int(texts[0]):
        raise _error(environ, rank, f"a rank below {size}={texts[0]!r}")
    return int(texts[0]), int(texts[1])


def _error(environ: Mapping[str, str], name: str, expected: str) -> LaunchError:
    return LaunchError(
        f"launch: got {name}={environ.get(name, '')[:200]!r}; expected {expected}. Write srun --ntasks-per-node=1 gluon-mgpu "
        "launch -n ..., or pass --nodes, --node-rank and --master."
    )
