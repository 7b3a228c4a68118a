"""The CUDA libraries that MXNet's library is linked to."""

from __future__ import annotations

from typing import List, Sequence

from ..runtime.cuda_libraries import CudaLibrary
from ..runtime.gpu_builds import WHEEL
from .build import Build
from .findings import Problem

_DRIVER = "libcuda.so"
_CPU_WHEEL = "run pip uninstall mxnet-cu112, then pip install 'gluon_mgpu[cpu]'"


def check_libraries(libraries: Sequence[CudaLibrary], build: Build) -> List[Problem]:
    """Return the missing libraries, except for those that the error of `import mxnet` names."""
    missing = [library for library in libraries if not library.path and library.soname not in build.why_not]
    found = []
    stops = bool(build.why_not)
    driver = [library for library in missing if library.soname.startswith(_DRIVER)]
    if driver:
        what = f"The driver's {driver[0].soname} is missing. This MXNet is linked to it, even for training on the CPU."
        to_do = "Install the driver (in a container: docker run --gpus all)"
        to_do += "." if build.elsewhere else f"; to train on the CPU, {_CPU_WHEEL}."
        found.append(Problem("CUDA libraries", what, to_do, stops))
    others = [f"{library.name} ({library.soname})" for library in missing if library not in driver]
    if others:
        what = f"This MXNet is linked to {_joined(others)}, which {'are' if len(others) > 1 else 'is'} missing."
        to_do = f"Run {WHEEL}, which installs CUDA's libraries; to train on the CPU, {_CPU_WHEEL}."
        if build.elsewhere:
            to_do = (
                "Install those libraries in the versions that this MXNet was built for, or run in the container it comes from."
            )
        found.append(Problem("CUDA libraries", what, to_do, stops))
    return found


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
