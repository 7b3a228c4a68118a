"""How many cores there are, and how many OpenMP threads each CPU context works with."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import warnings
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Callable, Dict, List, Sequence, Set

from .engine_push import CPU, ON_WORKER, EngineContext, push

logger = logging.getLogger("gluon_mgpu")

_OWN_CGROUPS = "/proc/self/cgroup"
_CGROUPS = "/sys/fs/cgroup"


def num_cores() -> int:
    """Return how many CPU cores this process may use: those it is bound to, or fewer where a quota says so, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def cpu_quota() -> float:
    """Return the processor time that this process's cgroups allow, in cores (`docker --cpus`), 0.0 where there is no limit.

    A limit of any group above counts, too. In a container the path may be that of the host, which is not there: then the
    container's own group stands at the root.

    Source: the kernel's `Documentation/admin-guide/cgroup-v2.rst` (`cpu.max`) and `Documentation/scheduler/sched-bwc.rst`.
    """
    quotas = []
    for line in read_lines(_OWN_CGROUPS):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            folders, read = ["", "unified"], _quota_v2
        elif "cpu" in controllers.split(","):
            folders, read = ["cpu", controllers], _quota_v1
        else:
            continue
        groups = [PurePosixPath(path), *PurePosixPath(path).parents]
        quotas += [read(os.path.join(_CGROUPS, folder, str(group).lstrip("/"))) for folder in folders for group in groups]
    return min((quota for quota in quotas if quota > 0), default=0.0)


def _quota_v2(group: str) -> float:
    return _ratio(" ".join(read_lines(os.path.join(group, "cpu.max"))).split())


def _quota_v1(group: str) -> float:
    return _ratio([*read_lines(os.path.join(group, "cpu.cfs_quota_us")), *read_lines(os.path.join(group, "cpu.cfs_period_us"))])


def _ratio(parts: Sequence[str]) -> float:
    """Return quota / period; 0.0 for "max", -1, or no file."""
    if len(parts) != 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return 0.0
    return int(parts[0]) / max(1, int(parts[1]))


def read_lines(path: str) -> List[str]:
    """Return the lines of a file of the kernel's, none where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


_WAIT_S = 30.0
SERIAL_ENGINE = "NaiveEngine"
_TASKS = "/proc/self/task"
_seen: Set[int] = set()  # ids of the CPU contexts that were used through this package
_threads: Dict[int, int] = {}  # CPU context id -> OpenMP threads of its engine workers, once settled
_new: Set[int] = set()  # ids of those whose threads were set here: their workers were new
_settling = threading.Lock()


def settle(contexts: Sequence[Any], *, alone: Callable[[], int]) -> None:
    """Give each of several CPU contexts one OpenMP thread, and a single one `alone()` threads, before its first operation.

    Two contexts inside `dot` at once, each with two threads or more, wait for each other for ever in the OpenBLAS of MXNet's
    wheel. OpenBLAS asks OpenMP, in the thread that calls it, how many threads to use: `OPENBLAS_NUM_THREADS` and threadpoolctl
    change nothing. MXNet reads `OMP_NUM_THREADS` only when it is loaded. So the number is set from inside: a function is pushed
    through the engine onto the context's own worker.

    ```
    settle([cpu(0), cpu(1)])  ─push─►  new worker of cpu(0): omp_set_num_threads(1)
                              ─push─►  new worker of cpu(1): omp_set_num_threads(1)
    ```

    A worker that has run something is left as it is: MXNet keeps oneDNN's primitives for each worker, made for its number
    of threads. Run with fewer they give wrong gradients, with more they write beyond their memory. Where that leaves two
    contexts with several threads, a warning says so. For the same reason a context that was alone, and got several threads,
    keeps them when others join it; those get one each. The serial engine has no workers, and is left alone.

    Parameters
    ----------
    contexts : sequence of mxnet.Context
        The devices that are about to work together, or beside those of earlier calls. GPUs are not touched.
    alone : callable () -> int
        Threads of a CPU context that has no others beside it; 0 leaves it the number that MXNet gives it. Asked when one is new.

    Warns
    -----
    RuntimeWarning
        Two contexts have run with several threads already, so that `dot` may hang.
    """
    ids = {context.device_id for context in contexts if context.device_type == "cpu"}
    if ids <= _seen:  # every split asks
        return
    with _settling:
        if ids <= _seen:
            return
        _seen.update(ids)
        number = 1 if len(_seen) > 1 else alone()
        if not number or runs_serially():  # one operation at a time: two are never inside dot
            return
        for device_id in sorted(_seen - set(_threads)):
            _threads[device_id] = _on_workers(device_id, number)
            if device_id not in _new:
                logger.info("cpu(%d) had run before use_devices saw it, and keeps its %d threads", device_id, _threads[device_id])
        several = [f"cpu({device_id}) with {number}" for device_id, number in sorted(_threads.items()) if number > 1]
        if len(several) > 1:
            warnings.warn(
                f"use_devices: got contexts that have run already, {' and '.join(several)} threads; expected one thread "
                "each, or dot may hang in OpenBLAS. Call use_devices before the first operation, or set OMP_NUM_THREADS=1.",
                RuntimeWarning,
                stacklevel=5,
            )


def threads_of(device_id: int) -> int:
    """Return the OpenMP threads that `settle` found or set for this CPU context, 0 where it has not looked at it."""
    return _threads.get(device_id, 0)


def were_set(device_id: int) -> bool:
    """Return whether `settle` set this CPU context's threads; False where it left them as they were."""
    return device_id in _new


def contexts_seen() -> List[int]:
    """Return the ids of the CPU contexts that `settle` has been told of."""
    return sorted(_seen)


def ask_threads(device_id: int) -> int:
    """Return the OpenMP threads that this CPU context works with, as its worker says; 0 where it cannot be asked.

    It starts the context's workers if they are new.
    """
    with _settling:
        return _on_workers(device_id, 0)


def _on_workers(device_id: int, number: int) -> int:
    """Set the threads of a context's engine workers if they are new and `number` is not 0; return how many they have."""
    openmp = _openmp()
    if openmp is None or not os.path.isdir(_TASKS):
        return 0
    before = set(os.listdir(_TASKS))  # ids of the threads that exist: the engine starts a context's workers when it is first used
    found: List[int] = []

    def look() -> None:
        if number and str(threading.get_native_id()) not in before:
            openmp.omp_set_num_threads(number)
            _new.add(device_id)
        # for top -H and gluon-mgpu monitor; the OpenMP threads that it starts inherit the name
        with suppress(OSError), open(f"{_TASKS}/{threading.get_native_id()}/comm", "w", encoding="ascii") as file:
            file.write(f"mxnet cpu({device_id})")
        found.append(openmp.omp_get_max_threads())

    _run_on_each(device_id, look)
    return max(found, default=0)


def _run_on_each(device_id: int, function: Callable[[], None]) -> None:
    """Run a function once on each engine worker of a CPU context, and wait for it."""
    num_workers = num_engine_workers()
    together = threading.Barrier(num_workers)  # holds each worker until all are here, so that none runs twice
    done = threading.Semaphore(0)

    def run() -> None:
        try:
            function()
            together.wait(timeout=_WAIT_S)
        except threading.BrokenBarrierError:
            logger.debug("not every engine worker of cpu(%d) was free to be asked for its threads", device_id)
        finally:
            done.release()

    for _ in range(num_workers):
        push(run, device=EngineContext(CPU, device_id), where=ON_WORKER, name=b"set_threads")
    for _ in range(num_workers):
        done.acquire(timeout=_WAIT_S)


def has_own_workers() -> bool:
    """Return whether MXNet's engine is the usual one, in which each context has workers of its own."""
    return os.environ.get("MXNET_ENGINE_TYPE") in (None, "", "ThreadedEnginePerDevice")


def runs_serially() -> bool:
    """Return whether the environment asks for MXNet's serial engine: each operation runs in the thread that calls it."""
    return os.environ.get("MXNET_ENGINE_TYPE") == SERIAL_ENGINE


def num_engine_workers() -> int:
    """Return how many engine workers each CPU context has."""
    number = os.environ.get("MXNET_CPU_WORKER_NTHREADS", "")
    return max(1, int(number)) if number.isascii() and number.isdigit() and has_own_workers() else 1


def _openmp() -> Any:
    """Return the OpenMP library that MXNet is linked to, None where it is another one."""
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None
