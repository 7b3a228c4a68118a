"""What must be settled before MXNet runs: NumPy aliases, engine resource copies, threads of each CPU context."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import threading
import warnings
from types import ModuleType
from typing import Any, Dict, List, Sequence, Set

from gluon_mgpu_numpy import add_aliases

from .errors import MissingExtraError

logger = logging.getLogger("gluon_mgpu")

# Defaults, never overrides: what the environment already says stands.
ENVIRONMENT = {
    # CPU contexts share MXNET_CPU_TEMP_COPY temporary buffers, in turn; with MXNet's 4, or 32, the
    # engine makes the contexts of a ResNet-18 wait for each other (scripts/RESULTS.md).
    # It is read at the first operator, so setting it here works after `import mxnet`, too.
    "MXNET_CPU_TEMP_COPY": "128",
}


def is_off() -> bool:
    """Return whether `GLUON_MGPU_RUNTIME=off` asks to leave all runtime settings alone."""
    return os.environ.get("GLUON_MGPU_RUNTIME", "").lower() == "off"


def load_mxnet() -> ModuleType:
    """Return the `mxnet` module, imported with what it needs on today's machines.

    Raises
    ------
    MissingExtraError
        MXNet is not installed; the message names the extras that bring it.
    ImportError
        MXNet, NumPy or a system library is there, but in a version that cannot work together.
    """
    if importlib.util.find_spec("mxnet") is None:
        raise MissingExtraError(
            "import gluon_mgpu: got no package mxnet; need MXNet 1.9.1. Install it with pip install 'gluon_mgpu[cpu]' "
            "(any machine), or 'gluon_mgpu[cu112]' (NVIDIA GPUs)."
        )
    numpy = importlib.import_module("numpy")
    if int(numpy.__version__.split(".")[0]) >= 2:
        raise ImportError(
            f"import gluon_mgpu: got numpy {numpy.__version__}; need 1.17 to 1.26, which MXNet 1.9.1 was written for. "
            "Run pip install 'numpy<2'."
        )
    add_aliases()
    if not is_off():
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    try:
        mxnet = importlib.import_module("mxnet")
    except OSError as error:  # the dynamic linker: libgomp.so.1, libcuda.so.1, ...
        raise ImportError(
            f"import gluon_mgpu: got {error}; need the system libraries that MXNet's wheel is linked to. "
            "libgomp.so.1 is Debian's and Ubuntu's package libgomp1; CUDA's come with the GPU driver and CUDA 11.2."
        ) from error
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "distutils":
            raise
        raise ImportError(
            "import gluon_mgpu: got a Python without distutils, which MXNet 1.9.1 imports; need setuptools, "
            "which carries it from "
            "Python 3.12 on. Run pip install setuptools."
        ) from error
    if not mxnet.__version__.startswith("1."):
        raise ImportError(
            f"import gluon_mgpu: got mxnet {mxnet.__version__}; need MXNet 1.9.1, whose Gluon this toolkit is written "
            "for. Run pip install 'mxnet==1.9.1'."
        )
    return mxnet


def require(module: str, extra: str, operation: str) -> Any:
    """Return an optional module, imported.

    Raises
    ------
    MissingExtraError
        It is not installed; the message names `extra`, which installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{operation}: got no package {module.split('.')[0]} ({error}); need the extra {extra!r}. "
            f"Run pip install 'gluon_mgpu[{extra}]'."
        ) from error


def num_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Context(ctypes.Structure):
    """The C++ `mxnet::Context` that the engine's C interface takes."""

    _fields_ = [("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int32)]


_ENGINE_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_WAIT_S = 30.0
_CPU = 1  # mxnet.Context.devtype2mask: what MXNet's C interface calls a CPU
_TASKS = "/proc/self/task"
_seen: Set[int] = set()  # ids of the CPU contexts that were used through this package
_threads: Dict[int, int] = {}  # CPU context id -> OpenMP threads of its engine workers, once settled
_settling = threading.Lock()
_alive: List[Any] = []  # functions that the engine may still call


def settle_threads(contexts: Sequence[Any]) -> None:
    """Give each of several CPU contexts one OpenMP thread, before it runs its first operation.

    Two contexts inside `dot` at once, each with two threads or more, wait for each other for ever in the OpenBLAS of MXNet's
    wheel. OpenBLAS asks OpenMP, in the thread that calls it, how many threads to use: `OPENBLAS_NUM_THREADS` and threadpoolctl
    change nothing. MXNet reads `OMP_NUM_THREADS` only when it is loaded. So the number is set from inside: a function is pushed
    through the engine onto the context's own worker.

    ```
    settle_threads([cpu(0), cpu(1)])  ─push─►  new worker of cpu(0): omp_set_num_threads(1)
                                      ─push─►  new worker of cpu(1): omp_set_num_threads(1)
    ```

    A worker that has run something is left as it is: MXNet keeps oneDNN's primitives for each worker, made for its number
    of threads. Run with fewer they give wrong gradients, with more they write beyond their memory. Where that leaves two
    contexts with several threads, a warning says so. One context alone keeps the threads that MXNet gives it.

    Parameters
    ----------
    contexts : sequence of mxnet.Context
        The devices that are about to work together, or beside those of earlier calls. GPUs are not touched.

    Warns
    -----
    RuntimeWarning
        Two contexts have run with several threads already, so that `dot` may hang.
    """
    ids = {context.device_id for context in contexts if context.device_type == "cpu"}
    if is_off() or ids <= _seen:
        return
    with _settling:
        _seen.update(ids)
        if len(_seen) == 1:
            return
        for device_id in sorted(_seen - set(_threads)):
            _threads[device_id] = _settle(device_id)
        several = [f"cpu({device_id}) with {number}" for device_id, number in sorted(_threads.items()) if number > 1]
        if len(several) > 1:
            warnings.warn(
                f"use_devices: got contexts that have run already, {' and '.join(several)} threads; need one thread each, or dot "
                "may hang in OpenBLAS. Call use_devices before the first operation, or set OMP_NUM_THREADS=1.",
                RuntimeWarning,
                stacklevel=4,
            )


def threads_of(device_id: int) -> int:
    """Return the OpenMP threads of this CPU context, 0 where `settle_threads` has not looked at it."""
    return _threads.get(device_id, 0)


def _settle(device_id: int) -> int:
    """Set the threads of a context's engine workers to one if they are new, and return how many they have."""
    openmp = _openmp()
    if openmp is None or not os.path.isdir(_TASKS):
        return 0
    mxnet_base = importlib.import_module("mxnet.base")
    num_workers = max(1, int(os.environ.get("MXNET_CPU_WORKER_NTHREADS") or 1))
    together = threading.Barrier(num_workers)  # holds each worker until all are here, so that none runs twice
    done = threading.Semaphore(0)
    before = set(os.listdir(_TASKS))  # ids of the threads that exist: the engine starts a context's workers when it is first used
    found: List[int] = []

    def run(_run_context: int, _param: int) -> None:
        try:
            if str(threading.get_native_id()) not in before:
                openmp.omp_set_num_threads(1)
            found.append(openmp.omp_get_max_threads())
            together.wait(timeout=_WAIT_S)
        except threading.BrokenBarrierError:
            logger.debug("not every engine worker of cpu(%d) was free to be asked for its threads", device_id)
        finally:
            done.release()

    function = _ENGINE_FUNCTION(run)
    _alive.append(function)
    push = mxnet_base._LIB.MXEnginePushSync
    for _ in range(num_workers):
        context = ctypes.byref(_Context(_CPU, device_id))
        mxnet_base.check_call(push(function, None, None, context, None, 0, None, 0, None, 0, b"settle_threads"))
    if all(done.acquire(timeout=_WAIT_S) for _ in range(num_workers)):
        _alive.remove(function)
    return max(found, default=0)


def _openmp() -> Any:
    """Return the OpenMP library that MXNet is linked to, None where it is another one."""
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None
