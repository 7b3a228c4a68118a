"""Memory and CPU time of a process and its children, of their CPU contexts, and of the machine."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Generic, List, Mapping, Optional, Sequence, Tuple, TypeVar

from ..errors import DataError
from ..runtime.environment import require
from ..runtime.threads import num_cores, read_lines
from .sample import CpuSample, HostSample

T = TypeVar("T")
THREAD_NAME = "mxnet {}"  # name of a context's worker threads; the kernel keeps 15 characters
_NAMED = re.compile(r"mxnet (cpu\(\d+\))")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Throttled(Generic[T]):
    """Caches a value that is expensive to find, and finds it again only within a small share of the time.

    Parameters
    ----------
    find : callable () -> T
    every_s : float, seconds
        The shortest time between two calls of `find`.
    share : float
        The largest share of the time that `find` may take.
    """

    def __init__(self, find: Callable[[], T], *, every_s: float, share: float = 0.001) -> None:
        self._find, self._every_s, self._share = find, every_s, share
        self._due = 0.0
        self._value: Optional[T] = None

    def __call__(self) -> Optional[T]:
        """Return the last value found."""
        began = time.monotonic()
        if began >= self._due:
            self._value = self._find()
            ended = time.monotonic()
            self._due = ended + max(self._every_s, (ended - began) / self._share)
        return self._value


@dataclass(frozen=True)
class Thread:
    """A thread's counters in the kernel: the seconds that it computed, and that it was ready but had no core."""

    name: str
    cpu_s: float
    waited_s: float


def threads_of(pid: int) -> Dict[int, Thread]:
    """Return the threads of a process by their ids; {} if it has ended or may not be read.

    Source: the manual page proc(5); the kernel's `Documentation/scheduler/sched-stats.rst`.
    """
    folder = f"/proc/{pid}/task"
    try:
        numbers = [int(name) for name in os.listdir(folder)]
    except OSError:
        return {}
    found = {}
    for number in numbers:
        stat = " ".join(read_lines(f"{folder}/{number}/stat"))
        name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split()
        if len(fields) > 12:
            waited_s = 0.0
            if _NAMED.match(name):
                counts = " ".join(read_lines(f"{folder}/{number}/schedstat")).split()
                waited_s = int(counts[1]) * 1e-9 if len(counts) == 3 else 0.0
            found[number] = Thread(name, (int(fields[11]) + int(fields[12])) * _TICK_S, waited_s)
    return found


def name_thread(number: int, context: str) -> None:
    """Name a thread of this process after the context that it computes for; `HostReader` and `top -H` read the name."""
    try:
        with open(f"/proc/self/task/{number}/comm", "w", encoding="utf-8") as file:
            file.write(THREAD_NAME.format(context))
    except OSError:
        return  # the thread has ended


class HostReader:
    """Reads the counters of a process, its children and the machine; rates are means since the previous read.

    Parameters
    ----------
    pid : int, optional
        This process by default. 0 reads only the machine.
    whole_tree : bool
        Also search the children for CPU contexts.
    num_threads : mapping of str to int
        The number of threads of each CPU context; by default the threads with its name are counted.
    alone : str
        The only CPU context of this process. All threads that Python has not started then count for it: they are OpenMP's.

    Raises
    ------
    MissingExtraError
        psutil is not installed.
    DataError
        There is no such process.
    """

    def __init__(
        self,
        pid: Optional[int] = None,
        *,
        whole_tree: bool = False,
        num_threads: Optional[Mapping[str, int]] = None,
        alone: str = "",
    ) -> None:
        self._psutil = require("psutil", "monitor", "monitor")
        self.pid = os.getpid() if pid is None else pid
        try:
            self._process: Any = self._psutil.Process(self.pid) if self.pid else None
        except self._psutil.Error as error:
            raise DataError(
                f"monitor: got pid {self.pid} ({error}); expected a running process. List processes with ps aux."
            ) from error
        self._whole_tree = whole_tree
        self._num_threads = num_threads if num_threads is not None else {}
        self._alone = alone
        # finding them reads every process of the machine
        self._children: Throttled[List[Any]] = Throttled(
            self._find_children, every_s=0.0 if whole_tree else 5.0, share=0.05 if whole_tree else 0.002
        )
        self._before = self._count()

    def is_running(self) -> bool:
        """Return whether the process still runs."""
        if self._process is None:
            return True
        try:
            return bool(self._process.is_running()) and self._process.status() != self._psutil.STATUS_ZOMBIE
        except self._psutil.Error:
            return False

    def pids(self) -> List[int]:
        """Return the process's id and its children's."""
        return [process.pid for process in self._tree()]

    def read(self) -> Tuple[HostSample, Tuple[CpuSample, ...]]:
        """Return the process with the machine, and its CPU contexts."""
        before, now = self._before, self._count()
        self._before = now
        seconds = max(1e-3, now.at - before.at)
        memory = self._psutil.virtual_memory()
        host = HostSample(
            rss_bytes=sum(now.rss[:1]),
            children_bytes=sum(now.rss[1:]),
            num_children=max(0, len(now.rss) - 1),
            cores=_rate(before.processes, now.processes, seconds),
            main_cores=self._main_cores(before, now, seconds),
            machine_cores=max(0.0, now.machine_s - before.machine_s) / seconds,
            num_cores=num_cores(),
            available_bytes=memory.available,
            total_bytes=memory.total,
        )
        return host, self._contexts(before, now, seconds)

    def _tree(self) -> List[Any]:
        return [] if self._process is None else [self._process, *(self._children() or ())]

    def _find_children(self) -> List[Any]:
        try:
            return list(self._process.children(recursive=True))
        except self._psutil.Error:
            return []

    def _count(self) -> _Counts:
        processes: Dict[int, float] = {}
        rss: List[int] = []
        for process in self._tree():
            try:
                times = process.cpu_times()
                processes[process.pid] = times.user + times.system
                rss.append(process.memory_info().rss)
            except self._psutil.Error:  # the process has ended
                rss.extend([0] if process is self._process else [])
        searched = self.pids() if self._whole_tree else self.pids()[:1]
        threads = {(pid, number): thread for pid in searched for number, thread in threads_of(pid).items()}
        machine = self._psutil.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # also counted in user and nice
        return _Counts(time.monotonic(), processes, tuple(rss), threads, sum(machine) - idle - guests)

    def _main_cores(self, before: _Counts, now: _Counts, seconds: float) -> float:
        main = [(self.pid, self.pid)]
        return _rate(_of(before, main, "cpu_s"), _of(now, main, "cpu_s"), seconds)

    def _contexts(self, before: _Counts, now: _Counts, seconds: float) -> Tuple[CpuSample, ...]:
        groups: Dict[Tuple[int, str], List[Tuple[int, int]]] = {}
        pythons = {thread.native_id for thread in threading.enumerate()} if self._alone else set()
        for (pid, number), thread in now.threads.items():
            named = _NAMED.match(thread.name)
            context = named.group(1) if named else "" if number in pythons else self._alone
            if context:
                groups.setdefault((pid, context), []).append((pid, number))
        several = len({pid for pid, _ in groups}) > 1
        found = []
        for (pid, context), keys in sorted(groups.items()):
            busy, waited = (_rate(_of(before, keys, what), _of(now, keys, what), seconds) for what in ("cpu_s", "waited_s"))
            name = f"{context} of {pid}" if several else context
            found.append(CpuSample(name, busy, waited, self._num_threads.get(context) or len(keys)))
        return tuple(found)


@dataclass(frozen=True)
class _Counts:
    at: float
    processes: Dict[int, float]
    rss: Tuple[int, ...]
    threads: Dict[Tuple[int, int], Thread]
    machine_s: float


def _of(counts: _Counts, keys: Sequence[Tuple[int, int]], what: str) -> Dict[Tuple[int, int], float]:
    """Return a counter of these threads, for those that existed."""
    return {key: getattr(counts.threads[key], what) for key in keys if key in counts.threads}


def _rate(before: Mapping[Any, float], now: Mapping[Any, float], seconds: float) -> float:
    """Return the increase per second of all counters that existed before."""
    return max(0.0, sum(value - before[key] for key, value in now.items() if key in before)) / seconds
