"""Sums over processes, training with them, each contender in turns, and a projection to more processes."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

from case import Case
from compare import ContenderError, OnMessage, Row
from gluon_mgpu.distributed import horovod
from gluon_mgpu.runtime import environment
from report import values
from scaling_job import Crew
from scaling_model import Fit, Link, Projection, Traffic, between_machines, fit, project

# The launcher's options for each contender. With dist_sync the launcher chooses the servers: two on one machine.
OPTIONS: Dict[str, Dict[str, Any]] = {
    "dist_sync": {},
    "dist_sync-1-server": {"servers": 1},
    "horovod": {"backend": "horovod"},
    "torch": {"servers": 0},
}
CONTENDERS = tuple(OPTIONS)
OTHER = "torch"
SINGLE = "ours"  # one process of ours, without a store
SUM = Case("sum")
TRAIN = Case("train", network="resnet18", num_steps=4)
_MOST_REPEATS, _LEAST_REPEATS, _ROUND_BYTES = 30, 3, 2**25


def sum_rows(contenders: Sequence[str], num_processes: Sequence[int], sizes: Sequence[int]) -> List[Row]:
    """Return the rows of sums of float32 arrays, for each size in bytes and each number of processes."""
    return [
        Row(contender, _group(n, f"{size:,} bytes"), _sum_case(n, size), _environment(contender))
        for n in num_processes
        for size in sizes
        for contender in contenders
    ]


def train_rows(contenders: Sequence[str], num_processes: Sequence[int], case: Case = TRAIN) -> List[Row]:
    """Return the rows of training: one process with one thread of ours and of PyTorch, then several of each contender.

    Parameters
    ----------
    contenders : sequence of str
        Contenders that differ only in the number of servers are left out.
    num_processes : sequence of int
    case : Case
        Its `batch_size` is per process.
    """
    trained = [contender for contender in contenders if not contender.endswith("server")]
    singles = [SINGLE] * any(one != OTHER for one in trained) + [OTHER] * (OTHER in trained)
    found = [Row(contender, _group(1), replace(case, num_devices=1), _environment(contender)) for contender in singles]
    for n in num_processes:
        several = replace(case, num_devices=n, batch_size=n * case.batch_size)
        found += [Row(contender, _group(n), several, _environment(contender)) for contender in trained]
    return found


def measure(
    rows: Sequence[Row],
    *,
    rounds: int,
    pythons: Optional[Dict[str, str]] = None,
    timeout_s: float = 120.0,
    on_message: OnMessage = lambda text: None,
) -> None:
    """Fill the rows with the measurements of each round, or with the reason why there are none, as `compare` does.

    Rows of a contender with the same number of processes share these processes. If one of them fails, all these rows fail:
    the processes wait for each other.
    """
    crews: Dict[Tuple[str, int], Crew] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in rows:
                if _crew_of(row) not in crews:
                    on_message(f"starting: {row.contender}, {_group(row.case.num_devices)}")
                    python = (pythons or {}).get(row.contender, sys.executable)
                    place = os.path.join(folder, str(len(crews)))
                    options = OPTIONS.get(row.contender, {})
                    crews[_crew_of(row)] = Crew(row, options, python=python, folder=place, timeout_s=timeout_s)
            for number, row in enumerate(rows):
                on_message(f"{number + 1} of {len(rows)}: {row.contender} prepares {row.group}")
                _attempt(row, crews[_crew_of(row)].set_up)
            for number in range(rounds):
                for i, row in enumerate(rows if number % 2 == 0 else list(rows)[::-1]):
                    if not row.reason:
                        on_message(f"round {number + 1} of {rounds}, {i + 1} of {len(rows)}: {row.contender}, {row.group}")
                        _attempt(row, crews[_crew_of(row)].run_round)
        finally:
            for crew in crews.values():
                crew.close()


def sum_fits(rows: Sequence[Row]) -> Dict[Tuple[str, int], Fit]:
    """Return the link fitted to each contender's sums, for each number of processes, if two sizes were measured."""
    found: Dict[Tuple[str, int], Fit] = {}
    for key in dict.fromkeys(_crew_of(row) for row in rows):
        points = [point for row in rows if _crew_of(row) == key for point in _points(row)]
        if len({size for size, _ in points}) > 1:
            found[key] = fit(points, traffic_of(*key))
    return found


def traffic_of(contender: str, num_processes: int, num_servers: int = 0) -> Traffic:
    """Return how a contender sums: gloo and Horovod in a ring, MXNet's store through servers.

    Two processes receive the sum from the store. Three or more receive every process's array, so that all add them up in the
    same order; see `gluon_mgpu.distributed.dist_sync`. A sum of Horovod that follows a finished one has just missed a cycle
    and begins with the next.
    """
    if contender in ("horovod", OTHER):
        return Traffic("ring", num_processes, wait_s=horovod.cycle_s() if contender == "horovod" else 0.0)
    servers = num_servers or OPTIONS[contender].get("servers", 2)
    return Traffic("servers" if num_processes <= 2 else "rows", num_processes, servers)


@dataclass(frozen=True)
class Job:
    """A training step to project.

    Attributes
    ----------
    compute_s : float, seconds
        Time of a step of one process.
    num_bytes : int
        Size of the gradients.
    wire : Link
        The link between machines that run one process each.
    """

    compute_s: float
    num_bytes: int
    wire: Link


def projections(fits: Dict[Tuple[str, int], Fit], num_processes: Sequence[int], job: Job) -> Dict[str, List[Projection]]:
    """Return the projected steps of many processes, by contender, with its way of summing and its fitted link.

    The store is projected with the measured number of servers, and with one server per process.
    """
    found: Dict[str, List[Projection]] = {}
    for contender in dict.fromkeys(contender for contender, _ in fits):
        _, fitted = min((n, one) for (name, n), one in fits.items() if name == contender)
        link = between_machines(fitted.link, job.wire)
        for label, servers in _server_choices(contender):
            ways = [traffic_of(contender, n, n if servers is None else servers) for n in num_processes]
            found[label] = [project(way, link, compute_s=job.compute_s, num_bytes=job.num_bytes) for way in ways]
    return found


def compute_s_of(rows: Sequence[Row]) -> float:
    """Return the seconds per step of one process of ours, else of PyTorch; 0.0 if none was measured."""
    for contender in (SINGLE, OTHER):
        for row in rows:
            found = values(row, "whole_s")
            if (row.contender, row.case.num_devices) == (contender, 1) and found:
                return found.median
    return 0.0


def _server_choices(contender: str) -> List[Tuple[str, Optional[int]]]:
    """Return labels and numbers of servers; None is one per process."""
    if contender in ("horovod", OTHER):
        return [(f"{contender}'s ring", 0)]
    servers = OPTIONS[contender].get("servers", 2)
    fixed: Tuple[str, Optional[int]] = ("1 server" if servers == 1 else f"{servers} servers", servers)
    return [fixed, ("one server per process", None)] if contender == "dist_sync" else [fixed]


def _points(row: Row) -> List[Tuple[float, float]]:
    found = values(row, "sum_s")
    return [(4.0 * row.case.total_size, found.median)] if found else []


def _sum_case(num_processes: int, size: int) -> Case:
    repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, _ROUND_BYTES // size))
    return replace(SUM, num_devices=num_processes, total_size=max(1, size // 4), repeats=repeats)


def _crew_of(row: Row) -> Tuple[str, int]:
    return row.contender, row.case.num_devices


def _group(num_processes: int, what: str = "") -> str:
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    return f"{what}, {processes}" if what else processes


def _environment(contender: str) -> Dict[str, str]:
    if contender == OTHER:
        return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {"OMP_NUM_THREADS": "1", **environment.ENVIRONMENT}


def _attempt(row: Row, work: Any) -> None:
    try:
        work(row)
    except ContenderError as error:
        row.reason = str(error)
