"""The number of cores, and of OpenMP threads of each CPU context."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import warnings
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Dict, List, Sequence, Set

from ..errors import DeviceError
from ..mxnet_internals.engine import CPU, ON_WORKER, EngineContext, push

_OWN_CGROUPS = "/proc/self/cgroup"
_CGROUPS = "/sys/fs/cgroup"


def num_cores() -> int:
    """Return the number of CPU cores that this process may use: those it is bound to, or fewer with a quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def cpu_quota() -> float:
    """Return the processor time that this process's cgroups allow, in cores (`docker --cpus`), 0.0 without a limit.

    Limits of parent groups count as well. In a container the path may be that of the host and not exist: then the container's own
    group is at the root.

    Source: the kernel's `Documentation/admin-guide/cgroup-v2.rst` (`cpu.max`).
    """
    paths = [line[3:] for line in read_lines(_OWN_CGROUPS) if line.startswith("0::")]
    groups = [group for path in paths for group in (PurePosixPath(path), *PurePosixPath(path).parents)]
    quotas = [_quota(os.path.join(_CGROUPS, str(group).lstrip("/"), "cpu.max")) for group in groups]
    return min((quota for quota in quotas if quota > 0), default=0.0)


def _quota(path: str) -> float:
    """Return quota / period; 0.0 for "max", or no file."""
    parts = " ".join(read_lines(path)).split()
    if len(parts) != 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return 0.0
    return int(parts[0]) / max(1, int(parts[1]))


def read_lines(path: str) -> List[str]:
    """Return the lines of a file of the kernel, [] if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


_WAIT_S = 30.0
SERIAL_ENGINE = "NaiveEngine"
_TASKS = "/proc/self/task"
_seen: Set[int] = set()  # ids of the CPU contexts that were used through this package
_threads: Dict[int, int] = {}  # CPU context id -> OpenMP threads of its engine workers, once they are set
_new: Set[int] = set()  # ids of those whose threads were set here: their workers were new
_lock = threading.Lock()


def set_threads(contexts: Sequence[Any], *, alone: Callable[[], int]) -> None:
    """Set one OpenMP thread for each of several CPU contexts, and `alone()` threads for a single one, before its first operation.

    Two contexts inside `dot` at the same time, each with two threads or more, deadlock in the OpenBLAS of MXNet's wheel. OpenBLAS
    asks OpenMP for the number of threads in the calling thread: `OPENBLAS_NUM_THREADS` and threadpoolctl have no effect. MXNet
    reads `OMP_NUM_THREADS` only when it is loaded. So a function that sets the number is pushed through the engine onto the
    context's own worker.

    ```
    set_threads([cpu(0), cpu(1)])  ─push─►  new worker of cpu(0): omp_set_num_threads(1)
                                   ─push─►  new worker of cpu(1): omp_set_num_threads(1)
    ```

    A worker that has run an operation is not changed: MXNet keeps oneDNN's primitives per worker, made for its number of threads.
    With fewer threads they give wrong gradients, with more they write outside of their memory. If two contexts keep several
    threads, a warning is issued. For the same reason a context that started alone with several threads keeps them when others
    join; the others get one each. The serial engine has no workers, so nothing is set.

    Parameters
    ----------
    contexts : sequence of mxnet.Context
        The devices that will work together, and with those of earlier calls. GPUs are ignored.
    alone : callable () -> int
        The number of threads of a single CPU context; 0 keeps MXNet's number. Called only for a new context.

    Raises
    ------
    DeviceError
        `MXNET_CPU_WORKER_NTHREADS` asks for several workers of each context.

    Warns
    -----
    RuntimeWarning
        Two contexts have already run with several threads, so `dot` may hang.
    """
    ids = {context.device_id for context in contexts if context.device_type == "cpu"}
    if ids <= _seen:  # every split calls this
        return
    with _lock:
        if ids <= _seen:
            return
        if num_engine_workers() > 1:
            raise DeviceError(
                f"use_devices: got MXNET_CPU_WORKER_NTHREADS={num_engine_workers()}; expected 1, the default: two workers "
                "of a context may hang in OpenBLAS. Unset it."
            )
        _seen.update(ids)
        number = 1 if len(_seen) > 1 else alone()
        if not number or runs_serially():  # one operation at a time: two are never inside dot
            return
        for device_id in sorted(_seen - set(_threads)):
            _threads[device_id] = _on_workers(device_id, number)
        several = [f"cpu({device_id}) with {number}" for device_id, number in sorted(_threads.items()) if number > 1]
        if len(several) > 1:
            warnings.warn(
                f"use_devices: got contexts that have already run, {' and '.join(several)} threads; expected one thread "
                "each, or dot may hang in OpenBLAS. Call use_devices before the first operation, or set OMP_NUM_THREADS=1.",
                RuntimeWarning,
                stacklevel=5,
            )


def threads_of(device_id: int) -> int:
    """Return the number of OpenMP threads that `set_threads` found or set for this CPU context, 0 if it has not checked it."""
    return _threads.get(device_id, 0)


def were_set(device_id: int) -> bool:
    """Return whether `set_threads` has set this CPU context's threads; False if it has kept them."""
    return device_id in _new


def contexts_seen() -> List[int]:
    """Return the ids of the CPU contexts that were passed to `set_threads`."""
    return sorted(_seen)


def ask_threads(device_id: int) -> int:
    """Return the number of OpenMP threads in this CPU context's worker; 0 if it is unknown.

    It starts the context's workers if they are new.
    """
    with _lock:
        return _on_workers(device_id, 0)


def _on_workers(device_id: int, number: int) -> int:
    """Set the threads of a context's engine workers if they are new and `number` is not 0; return their number."""
    try:
        openmp = ctypes.CDLL("libgomp.so.1")
        before = set(os.listdir(_TASKS))  # existing threads: the engine starts a context's workers at its first use
    except OSError:  # MXNet is linked to another library, or this is not Linux
        return 0
    found: List[int] = []
    done = threading.Event()

    def set_and_read() -> None:
        if number and str(threading.get_native_id()) not in before:
            openmp.omp_set_num_threads(number)
            _new.add(device_id)
        found.append(openmp.omp_get_max_threads())
        done.set()

    push(set_and_read, device=EngineContext(CPU, device_id), where=ON_WORKER)
    done.wait(timeout=_WAIT_S)
    return max(found, default=0)


def has_own_workers() -> bool:
    """Return whether MXNet's engine is the default, in which each context has its own workers."""
    return os.environ.get("MXNET_ENGINE_TYPE") in (None, "", "ThreadedEnginePerDevice")


def runs_serially() -> bool:
    """Return whether the environment asks for MXNet's serial engine: each operation runs in the thread that calls it."""
    return os.environ.get("MXNET_ENGINE_TYPE") == SERIAL_ENGINE


def num_engine_workers() -> int:
    """Return the number of engine workers of each CPU context."""
    number = os.environ.get("MXNET_CPU_WORKER_NTHREADS", "")
    return max(1, int(number)) if number.isascii() and number.isdigit() and has_own_workers() else 1
