"""MXNet's profiler: which operation ran on which device, and when."""

from __future__ import annotations

import gc
import json
import re
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Sequence, Set, Tuple

import mxnet as mx


@dataclass(frozen=True)
class Operation:
    """An operation of MXNet's engine: one operator, or several that ran as one.

    Attributes
    ----------
    device : str
        As `str(context)`: `cpu(0)`.
    name : str
    begin, end : float, seconds
        On the clock of `time.time`.
    """

    device: str
    name: str
    begin: float
    end: float


class Recording:
    """MXNet's profiler while it runs. There is one profiler in a process, so a program that uses it must not record here.

    Attributes
    ----------
    is_on : bool
        Of the class: whether one records now.
    """

    is_on = False

    def __init__(self) -> None:
        _finish_queued()
        self._folder = tempfile.TemporaryDirectory(prefix="gluon-mgpu-")
        self._devices = recordable_devices()
        self._path = _configure(self._folder.name)
        mx.profiler.set_state("run")
        Recording.is_on = True

    def stop(self) -> List[Operation]:
        """Wait for the devices, stop the profiler, and return the operations that were queued since it began, by their begin."""
        Recording.is_on = False
        mx.nd.waitall()  # an operation that runs after the stop is not recorded
        mx.profiler.set_state("stop")
        mx.profiler.dump(True)
        with self._folder:
            return operations_of(self._path.read_text(encoding="utf-8"), self._devices)


@lru_cache(maxsize=None)
def recordable_devices() -> Tuple[str, ...]:
    """Return the devices that the profiler has a place for, by their number in its files.

    It counts as many CPU contexts as this process had cores when MXNet was loaded. An operation on a device without a place ends
    the process. Where there are no GPUs, two more CPU contexts get the places of pinned and shared memory.

    Source: MXNet 1.9.1, src/profiler/profiler.cc, Profiler::Profiler, and profiler.h, Profiler::DeviceIndex.
    """
    _finish_queued()
    with tempfile.TemporaryDirectory(prefix="gluon-mgpu-") as folder:
        path = _configure(folder)
        mx.profiler.set_state("run")  # without it, nothing is written
        mx.profiler.set_state("stop")
        mx.profiler.dump(True)  # only the first file of a process lists them
        events = _events(path.read_text(encoding="utf-8"))
    names = [event["args"]["name"] for event in events if event["ph"] == "M" and "/" in event["args"]["name"]]
    if not any(name.startswith("gpu/") for name in names):
        return tuple(f"cpu({i})" for i in range(len(names)))
    parts = [name.replace(" ", "_").partition("/") for name in names]
    return tuple(f"{kind}({number or 0})" for kind, _, number in parts)


def task_mark(task: str, device: str, edge: str) -> str:
    """Return the name of an operation that does nothing and marks where a pipeline's task `begins` or `ends`.

    `F0.3` is the forward pass of stage 0 for micro-batch 3.
    """
    return f"task {task} on {device} {edge}"


def tasks_of(operations: Sequence[Operation]) -> List[Operation]:
    """Return the tasks of pipelines among a recording's operations, by their begin: those whose begin and end were marked.

    Examples
    --------
    >>> marks = [(task_mark("F0.0", "cpu(1)", edge), at) for edge, at in (("begins", 1.0), ("ends", 3.0))]
    >>> tasks_of([Operation("cpu(0)", mark, at, at) for mark, at in marks])
    [Operation(device='cpu(1)', name='F0.0', begin=1.0, end=3.0)]
    """
    # the first task of the next batch may be ready before this batch's has ended: several begins of one name
    begun: Dict[Tuple[str, str], List[float]] = {}
    found = []
    for operation in operations:
        mark = _MARK.fullmatch(operation.name)
        if mark is None:
            continue
        task, device, edge = mark.groups()
        if edge == "begins":
            begun.setdefault((task, device), []).append(operation.end)
        elif begun.get((task, device)):
            found.append(Operation(device, task, begun[task, device].pop(0), operation.begin))
    return sorted(found, key=lambda task: task.begin)


_MARK = re.compile(r"task (\S+) on (\S+) (begins|ends)")


def is_mark(name: str) -> bool:
    """Return whether the operation of this name is a `task_mark`."""
    return _MARK.fullmatch(name) is not None


def batches_of(tasks: Sequence[Operation]) -> List[List[Operation]]:
    """Return tasks by batch: a batch has each task once on each device, and they end before those of the next batch.

    Examples
    --------
    >>> tasks = [Operation("cpu(0)", name, at, at + 1) for at, name in enumerate(["F0.0", "F0.1", "B0.0", "F0.0", "B0.0"])]
    >>> [[task.name for task in batch] for batch in batches_of(tasks)]
    [['F0.0', 'F0.1', 'B0.0'], ['F0.0', 'B0.0']]
    """
    found: List[List[Operation]] = []
    known: Set[Tuple[str, str]] = set()
    for task in sorted(tasks, key=lambda task: task.end):
        if not found or (task.device, task.name) in known:
            found.append([])
            known.clear()
        found[-1].append(task)
        known.add((task.device, task.name))
    return [sorted(batch, key=lambda task: task.begin) for batch in found]


def operations_of(text: str, devices: Tuple[str, ...]) -> List[Operation]:
    """Return the operations of one of the profiler's files, by their begin.

    Parameters
    ----------
    text : str
    devices : tuple of str
        By their number in the file.

    Examples
    --------
    >>> events = [dict(ph=ph, name="dot", pid=1, tid=7, ts=ts) for ph, ts in (("B", 2000000), ("E", 2500000))]
    >>> operations_of(json.dumps({"traceEvents": events}), ("cpu(0)", "cpu(1)"))
    [Operation(device='cpu(1)', name='dot', begin=2.0, end=2.5)]
    """
    begun: Dict[Tuple[Any, ...], float] = {}
    found = []
    for event in _events(text):
        if event["ph"] not in "BE" or event["name"] == "DeleteVariable":  # it runs on whichever thread drops an array
            continue
        key = event["pid"], event["tid"], event["name"]
        if event["ph"] == "B":
            begun[key] = event["ts"] / 1e6
        elif key in begun:
            found.append(Operation(devices[event["pid"]], event["name"], begun.pop(key), event["ts"] / 1e6))
    return sorted(found, key=lambda operation: operation.begin)


def _finish_queued() -> None:
    """Finish what is queued, and drop garbage: freeing an array is an operation, too, on a context that may have no place."""
    gc.collect()
    mx.nd.waitall()


def _configure(folder: str) -> Path:
    path = Path(folder) / "profile.json"
    # a continuous dump starts a thread that fails when the profiler is used a second time
    kinds = {"profile_symbolic": True, "profile_imperative": True, "profile_memory": False, "profile_api": False}
    mx.profiler.set_config(**kinds, aggregate_stats=False, continuous_dump=False, filename=str(path))
    return path


def _events(text: str) -> List[Dict[str, Any]]:
    # from its second file on, MXNet writes a comma before the first event
    return json.loads(re.sub(r"\[\s*,", "[", text, count=1))["traceEvents"]
