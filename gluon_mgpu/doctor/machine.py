"""The machine and its Python packages."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Dict, List, Tuple

from ..runtime import environment, threads
from .findings import Problem

_OPTIONAL = {
    "matplotlib": "train",
    "scikit-learn": "train",
    "scipy": "train",
    "d2l": "d2l",
    "threadpoolctl": "doctor",
    "nvidia-ml-py": "gpu",
}
_WHEEL = re.compile(r"mxnet(-cu\d+(mkl)?|-native)?")


@dataclass(frozen=True)
class Machine:
    """The machine, as the operating system reports it.

    Attributes
    ----------
    system : str
    cpu : str
    usable_cores, bound_cores, cores : int
        Cores that this process may use, to which it is bound, and of the machine.
    quota : float
        Processor time that a cgroup allows, in cores; 0.0 without a limit.
    memory_bytes, available_bytes : int
        Of the machine; 0 if unknown.
    """

    system: str
    cpu: str
    usable_cores: int
    bound_cores: int
    cores: int
    quota: float
    memory_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Packages:
    """The Python packages that matter.

    Attributes
    ----------
    versions : dict of str to str
        In display order.
    wheels : tuple of str
        The distributions that install a package `mxnet`.
    folders : tuple of str
        Where those are installed.
    """

    versions: Dict[str, str]
    wheels: Tuple[str, ...]
    folders: Tuple[str, ...] = ()


def inspect_machine() -> Machine:
    """Return the machine's current state."""
    memory = _meminfo()
    cores = os.cpu_count() or 1
    models = (line.partition(":")[2].strip() for line in threads.read_lines("/proc/cpuinfo") if line.startswith("model name"))
    return Machine(
        platform.platform(),
        next(models, "?"),
        environment.num_cores(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        cores,
        threads.cpu_quota(),
        memory.get("MemTotal", 0),
        memory.get("MemAvailable", 0),
    )


def inspect_packages() -> Packages:
    """Return the version of each package, or the extra that installs it."""
    wheels = _wheels()
    found = {"Python": platform.python_version(), "gluon_mgpu": _version("gluon_mgpu") or "not installed, but imported"}
    found["mxnet"] = next((_version(wheel) for wheel in wheels), "not installed")
    found["numpy"] = _version("numpy") or "not installed"
    for name, extra in _OPTIONAL.items():
        found[name] = _version(name) or f"not installed: pip install 'gluon_mgpu[{extra}]'"
    return Packages(found, tuple(wheels), tuple(sorted(set(wheels.values()))))


def check_packages(packages: Packages) -> List[Problem]:
    """Return problems with the packages."""
    found = []
    wheels = packages.wheels
    if len(wheels) > 1:
        to_do = f"Run pip uninstall {' '.join(wheels)}, then install one of them again."
        found.append(Problem("packages", f"{' and '.join(wheels)} are installed and overwrite each other.", to_do))
    numpy = packages.versions.get("numpy", "")
    if numpy.split(".")[0].isdigit() and int(numpy.split(".")[0]) >= 2:
        what = f"NumPy {numpy} is too new for MXNet 1.9.1, which was written for 1.17 to 1.26."
        found.append(Problem("packages", what, "Run pip install 'numpy<2'.", True))
    return found


def _wheels() -> Dict[str, str]:
    """Return the folder of each distribution that installs a package `mxnet`, by its name."""
    named = ((str(package.metadata["Name"]).lower().replace("_", "-"), package) for package in metadata.distributions())
    return {
        name: str(package.locate_file("")) for name, package in sorted(named, key=lambda pair: pair[0]) if _WHEEL.fullmatch(name)
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _meminfo() -> Dict[str, int]:
    """Return the kernel's memory counters in bytes."""
    rows = (re.match(r"(\w+):\s+(\d+) kB", line) for line in threads.read_lines("/proc/meminfo"))
    return {row.group(1): int(row.group(2)) * 1024 for row in rows if row}
