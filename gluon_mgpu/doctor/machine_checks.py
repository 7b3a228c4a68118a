"""The machine and its Python packages."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Dict, List, Tuple

from ..runtime import environment
from ..runtime.openmp_threads import read_lines
from .findings import Problem

_OPTIONAL = ("matplotlib", "scikit-learn", "scipy", "d2l", "horovod", "nvidia-ml-py", "onnx", "psutil", "ray", "threadpoolctl")
_WHEEL = re.compile(r"mxnet(-cu\d+(mkl)?|-native)?")
_CUDA = re.compile(r"nvidia-[a-z-]+-cu\d+")


@dataclass(frozen=True)
class Machine:
    """The machine, as the operating system reports it.

    Attributes
    ----------
    system, cpu : str
    usable_cores, cores : int
        Cores that this process may use, with a cgroup's limit, and of the machine.
    memory_bytes, available_bytes : int
        Of the machine; 0 if unknown.
    """

    system: str
    cpu: str
    usable_cores: int
    cores: int
    memory_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Packages:
    """The Python packages that matter.

    Attributes
    ----------
    versions : dict of str to str
        Python's, and those of gluon_mgpu, mxnet and numpy, `not installed` if missing.
    optional, cuda : dict of str to str
        The versions of installed optional packages, and of wheels of CUDA's libraries.
    wheels : tuple of str
        The distributions that install a package `mxnet`.
    """

    versions: Dict[str, str]
    optional: Dict[str, str]
    cuda: Dict[str, str]
    wheels: Tuple[str, ...]


def inspect_machine() -> Machine:
    """Return the machine's current state."""
    rows = (re.match(r"(\w+):\s+(\d+) kB", line) for line in read_lines("/proc/meminfo"))
    memory = {row.group(1): int(row.group(2)) * 1024 for row in rows if row}
    models = (line.partition(":")[2].strip() for line in read_lines("/proc/cpuinfo") if line.startswith("model name"))
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    return Machine(platform.platform(), next(models, "?"), environment.num_cores(), os.cpu_count() or 1, total, available)


def inspect_packages() -> Packages:
    """Return the versions of the packages."""
    found = reversed(list(metadata.distributions()))  # the first of a name is the one that is imported
    installed = {str(one.metadata["Name"]).lower().replace("_", "-"): one.version for one in found}
    wheels = tuple(sorted(name for name in installed if _WHEEL.fullmatch(name)))
    versions = {"Python": platform.python_version(), "gluon_mgpu": installed.get("gluon-mgpu", "not installed")}
    versions["mxnet"] = ", ".join(f"{installed[name]} ({name})" for name in wheels) or "not installed"
    versions["numpy"] = installed.get("numpy", "not installed")
    optional = {name: installed[name] for name in _OPTIONAL if name in installed}
    cuda = {name: version for name, version in sorted(installed.items()) if _CUDA.fullmatch(name)}
    return Packages(versions, optional, cuda, wheels)


def check_packages(packages: Packages) -> List[Problem]:
    """Return problems with the packages."""
    found = []
    wheels = packages.wheels
    if len(wheels) > 1:
        to_do = f"Run pip uninstall {' '.join(wheels)}, then install one of them again."
        found.append(Problem("packages", f"{' and '.join(wheels)} are installed and overwrite each other.", to_do))
    return found
