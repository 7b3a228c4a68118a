"""Defaults that must be set before MXNet runs: CUDA libraries, NumPy names, engine resource copies, memory, threads."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Iterator, List, Sequence, Set

from ..errors import MissingExtraError
from . import cuda_libraries, mxnet2, threads
from .numpy_names import ALIASES, add_aliases
from .threads import num_cores as num_cores
from .threads import threads_of as threads_of

logger = logging.getLogger("gluon_mgpu")

# Defaults, never overrides: values that the environment sets are kept.
ENVIRONMENT = {
    # CPU contexts share MXNET_CPU_TEMP_COPY temporary buffers, in turn; with MXNet's 4, or 32, the
    # engine makes the contexts of a ResNet-18 wait for each other (scripts/benchmarks/RESULTS.md).
    # It is read at the first operator, so setting it here also works after `import mxnet`.
    "MXNET_CPU_TEMP_COPY": "128",
    # gpu(i) is then GPU i of nvidia-smi. CUDA reads it when a program first asks for its devices (CUDA Programming Guide).
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
_MXNETS_OWN = {
    "MXNET_CPU_TEMP_COPY": "4",
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    "MXNET_CPU_PARALLEL_RAND_COPY": "1",
    "MXNET_CPU_WORKER_NTHREADS": "1",
}

# glibc returns the large arrays of each operator to the kernel, and takes new pages for the next (scripts/benchmarks/RESULTS.md).
# Numbers from malloc.h. The threshold for mmap can be raised to 32 MiB only, and the scores of a vocabulary are larger. So no
# array gets its own mapping, and trimming is "never", -1.
ALLOCATOR = {
    "M_MMAP_MAX": (-4, 0),
    "M_TRIM_THRESHOLD": (-1, -1),
}

_REASONS = {
    "MXNET_CPU_TEMP_COPY": "CPU contexts share this number of temporary buffers, and wait for each other if there are few.",
    "CUDA_DEVICE_ORDER": "gpu(i) is GPU i of nvidia-smi. By default CUDA numbers the fastest kind of GPU first.",
    "MXNET_CPU_PARALLEL_RAND_COPY": "CPU contexts share it in Dropout; 64 was not faster, took 300 MB and draws other numbers.",
    "MXNET_CPU_WORKER_NTHREADS": "Engine threads of a context, read by import mxnet; two were not faster, and may hang in dot.",
}
TOO_LATE = "MXNet had run operators before gluon_mgpu was imported. Write import gluon_mgpu above import mxnet."
_OFF = "GLUON_MGPU_RUNTIME=off keeps the value that it has without gluon_mgpu."

# MXNet creates its temporary buffers when an operator first needs one, and its engine with the first array. These bytes of the
# wheel's library show whether they exist. The second is of an engine with workers: the serial one has no such pool.
_BUFFERS_MADE = "_ZGVZN4dmlc16ThreadLocalStoreIN5mxnet8resource19ResourceManagerImplEE9SingletonEvE4inst"
_ENGINE_MADE = "_ZGVZN5mxnet6common10ObjectPoolINS_6engine11ThreadedOprEE13_GetSharedRefEvE8inst_ptr"

_set_here: Set[str] = set()  # names in ENVIRONMENT and ALLOCATOR that took effect through this package
_too_late: Set[str] = set()  # names in ENVIRONMENT that MXNet had read before


@dataclass(frozen=True)
class Setting:
    """The current state of a runtime setting.

    Attributes
    ----------
    name : str
    value : str
        The value in effect.
    source : str
        Where it comes from: `environment`, `gluon_mgpu`, `MXNet's default`, `glibc's default`, or `off`: with
        `GLUON_MGPU_RUNTIME=off` it has the value that it would have without this package.
    reason : str
        The reason for the value, in a sentence.
    """

    name: str
    value: str
    source: str
    reason: str


def is_off() -> bool:
    """Return whether `GLUON_MGPU_RUNTIME=off` asks to change no runtime setting."""
    return os.environ.get("GLUON_MGPU_RUNTIME", "").lower() == "off"


def is_debug() -> bool:
    """Return whether `GLUON_MGPU_DEBUG` asks for serial debugging: any value except for "", `0` and `off`."""
    return os.environ.get("GLUON_MGPU_DEBUG", "").lower() not in ("", "0", "off")


def load_mxnet() -> ModuleType:
    """Import `mxnet` with the libraries and names that it needs on current machines, and return it.

    Raises
    ------
    MissingExtraError
        MXNet is not installed; the message names the extras that install it.
    ImportError
        Versions of MXNet, NumPy or a system library are incompatible, or a CUDA library is missing.
    """
    if importlib.util.find_spec("mxnet") is None:
        raise MissingExtraError(
            "import gluon_mgpu: got no package mxnet; expected MXNet 1.9.1. Install it with pip install 'gluon_mgpu[cpu]' "
            "(Linux on x86-64), or 'gluon_mgpu[cu112]' (also NVIDIA GPUs up to Ada). docs/compatibility.md names builds for "
            "newer GPUs, Apple silicon and other systems."
        )
    numpy = importlib.import_module("numpy")
    if int(numpy.__version__.split(".")[0]) >= 2:
        raise ImportError(
            f"import gluon_mgpu: got numpy {numpy.__version__}; expected 1.17 to 1.26, which MXNet 1.9.1 was written for. "
            "Run pip install 'numpy<2'."
        )
    add_aliases()
    apply_settings()
    if is_debug():  # an explicit request, so GLUON_MGPU_RUNTIME=off does not disable it
        _set_engine()
    try:
        mxnet = importlib.import_module("mxnet")
    except OSError as error:  # the dynamic linker: libgomp.so.1, libcuda.so.1, ...
        raise ImportError(
            f"import gluon_mgpu: got {error}; expected the system libraries that MXNet's wheel is linked to. "
            "libgomp.so.1 is Debian's and Ubuntu's package libgomp1; libcuda.so.1 comes with the NVIDIA driver; CUDA's others "
            "come with pip install 'gluon_mgpu[cu112]', and are found there unless GLUON_MGPU_RUNTIME=off."
        ) from error
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "distutils":
            raise
        raise ImportError(
            "import gluon_mgpu: got a Python without distutils, which MXNet 1.9.1 imports; expected setuptools, "
            "which contains it from "
            "Python 3.12 on. Run pip install setuptools."
        ) from error
    if mxnet.__version__.startswith("2."):
        mxnet2.adapt(mxnet)
    elif not mxnet.__version__.startswith(("1.8.", "1.9.")):
        raise ImportError(
            f"import gluon_mgpu: got mxnet {mxnet.__version__}; expected MXNet 1.9.1, whose Gluon this toolkit is written "
            "for. Run pip install 'mxnet==1.9.1'."
        )
    return mxnet


def apply_settings() -> None:
    """Set what MXNet's library must find when it is loaded: variables, malloc, CUDA libraries."""
    if not is_off():
        _set_environment()
        _set_allocator()
        cuda_libraries.load()


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
            f"{operation}: got no package {module.split('.')[0]} ({error}); expected the extra {extra!r}. "
            f"Run pip install 'gluon_mgpu[{extra}]'."
        ) from error


def set_threads(contexts: Sequence[Any]) -> None:
    """Set the threads of CPU contexts before their first operation: one each, or all cores for a single context.

    See `threads.set_threads`. A number in the environment is kept for a single context. For several it is not: `dot` may hang.
    """
    if not is_off():
        threads.set_threads(contexts, alone=_threads_alone)


@contextmanager
def one_thread(is_on: bool = True) -> Iterator[None]:
    """Let a single CPU context that is first used here compute with one thread, as several do, if `is_on`."""
    _alone.extend([1] * is_on)
    try:
        yield
    finally:
        del _alone[len(_alone) - is_on :]


_alone: List[int] = []  # the number of threads of a single context, if it was chosen


def _threads_alone() -> int:
    return _alone[-1] if _alone else 0 if _why_not_all_cores() else num_cores()


def settings(contexts: Sequence[Any] = ()) -> List[Setting]:
    """Return the runtime settings in effect, their sources and reasons.

    Parameters
    ----------
    contexts : sequence of mxnet.Context
        Contexts to include, in addition to those used before. It reads their threads, which starts their engine workers.

    Examples
    --------
    >>> [setting.value for setting in settings() if setting.name == "MXNET_CPU_TEMP_COPY"]
    ['128']
    """
    ids = {context.device_id for context in contexts if context.device_type == "cpu"}
    found = [_threads_setting(device_id) for device_id in sorted(ids.union(threads.contexts_seen()))]
    found += [_allocator_setting(name) for name in ALLOCATOR]
    found += [_environment_setting(name, reason) for name, reason in _REASONS.items()]
    return [*found, _gradient_flags_setting(), _aliases_setting()]


def _set_environment() -> None:
    """Set variables that the environment lacks, unless MXNet has already read them; then log a warning."""
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing and _is_made(_BUFFERS_MADE):
        _too_late.update(missing)
        logger.warning(
            "import gluon_mgpu: got an mxnet that has run operators before; expected gluon_mgpu first, so that its settings take "
            "effect: %s, and the threads of contexts that have run, are MXNet's. Write import gluon_mgpu above import mxnet.",
            ", ".join(f"{name}={_MXNETS_OWN[name]}" for name in missing),
        )
        return
    for name in missing:
        os.environ[name] = ENVIRONMENT[name]
        _set_here.add(name)


def _set_engine() -> None:
    """Choose MXNet's serial engine, so that errors come from the line of their operation, unless the environment chooses one."""
    if "MXNET_ENGINE_TYPE" in os.environ:
        return
    if _is_made(_ENGINE_MADE):  # MXNet has chosen, and threads.py must not read another value
        logger.warning(
            "import gluon_mgpu: got an mxnet that has run operations before; expected gluon_mgpu first, so that GLUON_MGPU_DEBUG "
            "takes effect: errors of a backward pass come late. Write import gluon_mgpu above import mxnet."
        )
        return
    os.environ["MXNET_ENGINE_TYPE"] = threads.SERIAL_ENGINE


def _is_made(what: str) -> bool:
    """Return whether MXNet was imported and has created this; False if its library does not show it."""
    mxnet_base = sys.modules.get("mxnet.base")
    try:
        return mxnet_base is not None and bool(ctypes.c_ubyte.in_dll(mxnet_base._LIB, what).value)
    except (AttributeError, ValueError):
        return False


def _set_allocator() -> None:
    """Let malloc keep the memory of large arrays for the next ones, unless the environment chooses otherwise."""
    if _why_not_allocator():
        return
    libc = ctypes.CDLL(None)
    for name, (parameter, value) in ALLOCATOR.items():
        if libc.mallopt(parameter, value) != 1:
            return
        _set_here.add(name)


def _why_not_allocator() -> str:
    """Return why malloc's settings are not changed, "" if they are."""
    variables = [name for name in sorted(os.environ) if name.startswith("MALLOC_")]
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        variables.append("GLIBC_TUNABLES")
    if variables:
        return f"{' and '.join(variables)} in the environment has priority."
    libc = ctypes.CDLL(None)
    try:
        if _library_of(libc.malloc) != _library_of(libc.gnu_get_libc_version):
            return f"The allocator is {os.path.basename(_library_of(libc.malloc)) or 'not that of glibc'}."
    except AttributeError:
        return "The C library is not glibc."
    return ""


class _DlInfo(ctypes.Structure):
    """The result of `dladdr`."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _library_of(function: Any) -> str:
    """Return the file that contains a C function."""
    info = _DlInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    return os.fsdecode(info.file or b"")


def _why_not_all_cores() -> str:
    """Return why a single CPU context keeps its threads, "" if it gets all cores."""
    for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]} has priority for one context."
    if not threads.has_own_workers():
        return "MXNET_ENGINE_TYPE is not the default engine, whose contexts have their own workers."
    if threads.num_engine_workers() > 1:
        return "With MXNET_CPU_WORKER_NTHREADS above 1 two workers could hang inside OpenBLAS."
    return ""


def _threads_setting(device_id: int) -> Setting:
    name, value = f"threads of cpu({device_id})", str(threads.ask_threads(device_id) or "unknown")
    if is_off():
        return Setting(name, value, "off", _OFF)
    if threads.were_set(device_id):
        if value == "1" and len(threads.contexts_seen()) > 1:
            return Setting(
                name, value, "gluon_mgpu", "Two CPU contexts with several threads each can hang in OpenBLAS: one each."
            )
        cores = num_cores()
        reason = "A single context gets every core of this process; MXNet takes half of them."
        if value == "1" and cores > 1:
            reason = f"It was asked for with one_thread=True, which leaves {cores - 1} of {cores} cores idle."
        elif value != "1":
            reason += f" virtual_shards needs one thread, and so cpu*{cores} to use {cores} cores."
        return Setting(name, value, "gluon_mgpu", reason)
    variables = [name for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS") if os.environ.get(name)]
    reason = "It ran operations before use_devices; other threads now would give wrong gradients. Call use_devices earlier."
    if not threads.threads_of(device_id):
        reason = _why_not_all_cores() or "gluon_mgpu does not know it: pass it to use_devices."
    return Setting(name, value, "environment" if variables else "MXNet's default", reason)


def _allocator_setting(name: str) -> Setting:
    if name in _set_here:
        value = {"M_MMAP_MAX": "0", "M_TRIM_THRESHOLD": "never"}[name]
        return Setting(
            name, value, "gluon_mgpu", "malloc keeps the memory of arrays for the next ones: the kernel clears fewer pages."
        )
    if is_off():
        return Setting(name, "glibc's default", "off", _OFF)
    return Setting(name, "unknown", "environment", _why_not_allocator() or "mallopt refused it.")


def _environment_setting(name: str, reason: str) -> Setting:
    own = _MXNETS_OWN[name]
    if name in _too_late:
        return Setting(name, own, "MXNet's default", TOO_LATE)
    value = os.environ.get(name)
    if name in _set_here:
        return Setting(name, value or own, "gluon_mgpu", reason)
    if value:
        return Setting(name, value, "environment", reason)
    return Setting(name, own, "off" if is_off() and name in ENVIRONMENT else "MXNet's default", reason)


def _gradient_flags_setting() -> Setting:
    gradient_flags = importlib.import_module(f"{__package__}.gradient_flags")  # it imports MXNet, which this module sets up
    why_not = gradient_flags.why_not_memory()
    if not why_not:
        reason = "Trainers read in one operation which gradients are fresh; a self-check agreed with MXNet's C interface."
        return Setting("gradient flags", "memory", "gluon_mgpu", reason)
    source = "environment" if gradient_flags.is_switched_off() else "gluon_mgpu"
    return Setting("gradient flags", "C interface", source, why_not)


def _aliases_setting() -> Setting:
    numpy = importlib.import_module("numpy")
    if tuple(int(part) for part in numpy.__version__.split(".")[:2]) < (1, 24):
        return Setting("NumPy names", "not needed", "-", f"NumPy {numpy.__version__} has the names that MXNet 1.9.1 uses.")
    reason = "NumPy 1.24 removed names that MXNet 1.9.1 uses; import mxnet fails without them, so they are added even with off."
    return Setting("NumPy names", f"{sum(name in vars(numpy) for name in ALIASES)} put back", "gluon_mgpu", reason)
