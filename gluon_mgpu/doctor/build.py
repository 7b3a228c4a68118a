"""Which MXNet this is: what it was built with, and which GPUs its library holds code for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import List, Optional, Tuple

from ..runtime import environment
from ..runtime.fat_binary import FatBinaries, read_fat_binaries, version_text
from .findings import Problem, describe_error

_LIBRARY = "libmxnet.so"


@dataclass(frozen=True)
class Build:
    """The MXNet that `import mxnet` takes.

    Attributes
    ----------
    library : str
        The file of its compiled library; empty where there is none.
    version : str
        What it calls itself; empty where it cannot be imported.
    why_not : str
        Why it cannot be imported, empty where it can.
    to_do : str
        What to do about that.
    features : tuple of str
        What it was built with, by its own words; empty where it cannot be imported.
    code : FatBinaries or None
        Which GPUs the library holds code for; None where that could not be read.
    """

    library: str
    version: str
    why_not: str
    to_do: str
    features: Tuple[str, ...]
    code: Optional[FatBinaries]

    @property
    def is_for_gpus(self) -> bool:
        """Whether it was built for GPUs at all."""
        return bool(self.code and self.code.num_binaries) or "CUDA" in self.features

    def described(self) -> str:
        """Return which GPUs there is code for, in words."""
        if self.code is None:
            return "unknown"
        if not self.code.num_binaries:
            return "none: this is a build for CPUs"
        machine_code = ", ".join(map(version_text, self.code.machine_code)) or "none"
        ptx = ", ".join(map(version_text, self.code.ptx))
        return f"machine code for compute capability {machine_code}; {f'PTX for {ptx}' if ptx else 'no PTX'}"


def look_at_build() -> Build:
    """Return what is known of MXNet, which is imported for that where it can be."""
    library = _find_library()
    try:
        mxnet = sys.modules.get("mxnet") or environment.load_mxnet()
    except Exception as error:
        return Build(library, "", *describe_error(error), (), None)
    features = mxnet.runtime.Features()
    return Build(library, mxnet.__version__, "", "", tuple(sorted(name for name in features if features.is_enabled(name))), None)


def look_at_code(library: str) -> Optional[FatBinaries]:
    """Return which GPUs a library holds code for, None where there is no library."""
    return read_fat_binaries(library) if library else None


def check_build(build: Build) -> List[Problem]:
    """Return why MXNet cannot be imported, if it cannot."""
    return [Problem("MXNet", build.why_not, build.to_do, True)] if build.why_not else []


def _find_library() -> str:
    """Return the path of MXNet's compiled library, without importing it."""
    spec = importlib.util.find_spec("mxnet")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = [os.environ.get("MXNET_LIBRARY_PATH", ""), *(os.path.join(folder, _LIBRARY) for folder in folders)]
    return next((path for path in paths if path and os.path.isfile(path)), "")
