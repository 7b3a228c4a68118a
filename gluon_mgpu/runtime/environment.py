"""What MXNet needs on current machines and before it runs: NumPy's names, CUDA's libraries, variables, memory, threads.

`import gluon_mgpu` calls `prepare`; so it stands above `import mxnet`. MXNet itself is imported by `runtime/loaded.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Sequence, Set

from ..errors import MissingExtraError, last_line
from ..mxnet_internals import mxnet_import
from . import cuda_libraries, openmp_threads
from .openmp_threads import num_cores as num_cores

logger = logging.getLogger("gluon_mgpu")

# Defaults, never overrides: values that the environment sets are kept.
ENVIRONMENT = {
    # CPU contexts share MXNET_CPU_TEMP_COPY temporary buffers, in turn; with MXNet's 4, or 32, the
    # engine makes the contexts of a ResNet-18 wait for each other (scripts/benchmarks/RESULTS.md).
    # It is read at the first operator, so setting it here also works after `import mxnet`.
    "MXNET_CPU_TEMP_COPY": "128",
    # A bound graph draws from the generators that were next when it was bound; with one, the seed alone decides Dropout's masks
    # (MXNet 1.9.1, src/resource.cc:93,362; src/executor/attach_op_resource_pass.cc:81).
    "MXNET_GPU_PARALLEL_RAND_COPY": "1",
    # gpu(i) is then GPU i of nvidia-smi. CUDA reads it when a program first asks for its devices (CUDA Programming Guide).
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
# glibc returns the large arrays of each operator to the kernel, and takes new pages for the next (scripts/benchmarks/RESULTS.md).
# Numbers from malloc.h. The threshold for mmap can be raised to 32 MiB only, and the scores of a vocabulary are larger. So no
# array gets its own mapping, and trimming is "never", -1.
ALLOCATOR = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}

set_here: Set[str] = set()  # names in ENVIRONMENT and ALLOCATOR that took effect through this package


def is_off() -> bool:
    """Return whether `GLUON_MGPU_RUNTIME=off` asks to change no runtime setting."""
    return os.environ.get("GLUON_MGPU_RUNTIME", "").lower() == "off"


def prepare() -> None:
    """Set what MXNet must find when it is imported and runs: NumPy's names, variables, malloc, CUDA's libraries."""
    if mxnet_import.Finder not in sys.meta_path:
        sys.meta_path.insert(0, mxnet_import.Finder)
    if not is_off():
        if "mxnet" in sys.modules:
            logger.warning(
                "gluon_mgpu: got mxnet imported before it; expected import gluon_mgpu above import mxnet. Its settings of "
                "memory, threads and CUDA's libraries may have no effect. Swap the imports."
            )
        missing = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
        os.environ.update(missing)
        set_here.update(missing)
        _set_allocator()
        cuda_libraries.preload()


def require(module: str, extra: str, operation: str) -> Any:
    """Return an optional module, imported.

    Raises
    ------
    MissingExtraError
        It is not installed, or cannot be imported; the message names `extra` and the packages in it.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # of a package that is there and does not fit others: a system library, NumPy, protobuf
        raise MissingExtraError(
            f"{operation}: got no package {module.split('.')[0]} that works ({last_line(error)}); expected the extra {extra!r}. "
            f"Run {install(extra)}."
        ) from error


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra: gluon_mgpu itself is not on PyPI.

    Examples
    --------
    >>> install("monitor")
    "pip install 'nvidia-ml-py>=12.535' 'psutil>=5'"
    """
    from importlib import metadata  # which imports email and zipfile, for an error only

    try:
        required = metadata.requires("gluon_mgpu") or []
    except metadata.PackageNotFoundError:  # imported from a clone that is not installed
        return f"pip install '.[{extra}]' in the clone"
    # setuptools for Python 3.8 writes: psutil >=5 ; extra == 'monitor'
    found = [line.split(";")[0].replace(" ", "") for line in required if f'extra == "{extra}"' in line.replace("'", '"')]
    return " ".join(["pip install", *map(repr, found)])


def set_threads(contexts: Sequence[Any]) -> None:
    """Set the threads of CPU contexts before their first operation: one each, or all cores for a single context.

    See `openmp_threads`. A number in the environment is kept for a single context. For several it is not: `dot` may hang.
    """
    if not is_off():
        openmp_threads.set_threads(contexts, alone=_threads_alone)


@contextmanager
def one_thread(is_on: bool = True) -> Iterator[None]:
    """Let a single CPU context that is first used here compute with one thread, as several do, if `is_on`."""
    _one_thread.append(is_on)
    try:
        yield
    finally:
        _one_thread.pop()


_one_thread: List[bool] = []  # of the blocks around


def _threads_alone() -> int:
    return 1 if any(_one_thread) else 0 if why_not_all_cores() else num_cores()


def without_ours() -> Dict[str, str]:
    """Return the environment that this process was given, without the variables that it has set here."""
    return {name: value for name, value in os.environ.items() if name not in set_here}


def set_one_context() -> None:
    """Let a program of one context use MXNet's own number of temporary buffers: each keeps the size of its largest use."""
    if "MXNET_CPU_TEMP_COPY" in set_here:
        os.environ["MXNET_CPU_TEMP_COPY"] = "4"


def _set_allocator() -> None:
    """Let malloc keep the memory of large arrays for the next ones, unless the environment chooses otherwise."""
    if why_not_allocator():
        return
    mallopt = ctypes.CDLL(None).mallopt
    for name, (parameter, value) in ALLOCATOR.items():
        if mallopt(parameter, value) != 1:
            return
        set_here.add(name)


def why_not_allocator() -> str:
    """Return why malloc's settings are not changed, "" if they are."""
    variables = [name for name in sorted(os.environ) if name.startswith("MALLOC_")]
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        variables.append("GLIBC_TUNABLES")
    if "malloc" in os.environ.get("LD_PRELOAD", ""):
        variables.append("LD_PRELOAD")
    if variables:
        return f"{' and '.join(variables)} in the environment has priority."
    return "" if hasattr(ctypes.CDLL(None), "mallopt") else "The C library is not glibc."


def why_not_all_cores() -> str:
    """Return why a single CPU context keeps its threads, "" if it gets all cores."""
    for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]} has priority for one context."
    if not openmp_threads.has_own_workers():
        return "MXNET_ENGINE_TYPE is not the default engine, whose contexts have their own workers."
    return ""
