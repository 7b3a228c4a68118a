"""What must be settled before MXNet runs: NumPy aliases, engine resource copies, threads of each CPU context."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import threading
from types import ModuleType
from typing import Any, Dict, List, Sequence

from gluon_mgpu_numpy import add_aliases

from .errors import MissingExtraError

logger = logging.getLogger("gluon_mgpu")

# Defaults, never overrides: what the environment already says stands.
ENVIRONMENT = {
    # CPU contexts share MXNET_CPU_TEMP_COPY temporary buffers; with MXNet's 4 the engine runs contexts one after another.
    # It is read at the first operator, so setting it here works after `import mxnet`, too.
    "MXNET_CPU_TEMP_COPY": "32",
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
_threads: Dict[int, int] = {}  # CPU context id -> OpenMP threads of its engine workers
_settling = threading.Lock()


def settle_threads(contexts: Sequence[Any]) -> None:
    """Give the engine workers of these CPU contexts their number of OpenMP threads.

    One CPU context alone gets every core (or the user's `OMP_NUM_THREADS`). Several get one thread each, whatever the
    environment says: two contexts inside `dot` at once, each with two threads, wait for each other for ever in the
    OpenBLAS of MXNet's wheel. For the same reason no context keeps several threads while another one has them.

    OpenBLAS asks OpenMP, in the thread that calls it, how many threads to use, so neither `OPENBLAS_NUM_THREADS` nor
    threadpoolctl changes anything; and MXNet reads `OMP_NUM_THREADS` only when it is loaded. So the number is set
    from inside: a function is pushed through the engine onto each context's own workers, and sets it there. That
    works at any time, and also if MXNet was imported first.

    ```
    settle_threads([cpu(0), cpu(1)])        engine worker of cpu(0): omp_set_num_threads(1)
                                    ─push─► engine worker of cpu(1): omp_set_num_threads(1)
    ```

    Parameters
    ----------
    contexts : sequence of mxnet.Context
        The devices that are about to work together. GPUs are not touched.
    """
    ids = [context.device_id for context in contexts if context.device_type == "cpu"]
    if is_off() or not ids:
        return
    with _settling:
        num_threads = 1 if len(ids) > 1 else _threads_alone()
        if all(_threads.get(device_id) == num_threads for device_id in ids):
            return
        if num_threads > 1:
            for device_id in [other for other, number in _threads.items() if number > 1 and other not in ids]:
                _set_threads(device_id, 1)
        elif _threads_asked() > 1:
            logger.info("OMP_NUM_THREADS=%d is not used for %d CPU contexts: OpenBLAS could hang", _threads_asked(), len(ids))
        for device_id in ids:
            _set_threads(device_id, num_threads)


def threads_of(device_id: int) -> int:
    """Return the OpenMP threads that `settle_threads` gave to this CPU context, 0 where it has not been called."""
    return _threads.get(device_id, 0)


def _threads_asked() -> int:
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _threads_alone() -> int:
    return _threads_asked() or num_cores()


def _set_threads(device_id: int, num_threads: int) -> None:
    openmp = _openmp()
    if openmp is None:
        return
    mxnet_base = importlib.import_module("mxnet.base")
    num_workers = max(1, int(os.environ.get("MXNET_CPU_WORKER_NTHREADS", "1") or 1))
    together = threading.Barrier(num_workers)  # holds each worker until all are here, so that none runs twice
    done = threading.Semaphore(0)

    def run(_run_context: int, _param: int) -> None:
        try:
            openmp.omp_set_num_threads(num_threads)
            together.wait(timeout=_WAIT_S)
        except threading.BrokenBarrierError:
            logger.debug("not every engine worker of cpu(%d) was free to have its threads set", device_id)
        finally:
            done.release()

    function = _ENGINE_FUNCTION(run)
    _alive.append(function)  # the engine may call it after this function has returned
    context = _Context(1, device_id)
    for _ in range(num_workers):
        mxnet_base.check_call(
            mxnet_base._LIB.MXEnginePushSync(
                function, None, None, ctypes.byref(context), None, 0, None, 0, None, 0, b"settle_threads"
            )
        )
    if all(done.acquire(timeout=_WAIT_S) for _ in range(num_workers)):
        _alive.remove(function)
    _threads[device_id] = num_threads


_alive: List[Any] = []


def _openmp() -> Any:
    """Return the OpenMP library that MXNet is linked to, None where there is none."""
    for name in ("libgomp.so.1", "libomp.dylib"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
