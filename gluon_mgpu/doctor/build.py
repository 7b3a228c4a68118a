"""The installed MXNet: its features, and the GPUs for which its library holds code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import List, Optional, Tuple

from ..runtime import environment
from ..runtime.cuda_libraries import mxnet_library
from ..runtime.fat_binary import FatBinaries, read_fat_binaries, version_text
from .findings import Problem, describe_error


@dataclass(frozen=True)
class Build:
    """The MXNet that `import mxnet` imports.

    Attributes
    ----------
    library : str
        The file of its compiled library; "" if there is none.
    version : str
        Its version; "" if it cannot be imported.
    why_not : str
        Why it cannot be imported; "" if it can.
    to_do : str
        How to fix that.
    features : tuple of str
        Its enabled build features; empty if it cannot be imported.
    code : FatBinaries or None
        The GPU code in the library; None if it could not be read.
    elsewhere : str
        The sign that it was not built for PyPI; "" if there is none.
    """

    library: str
    version: str
    why_not: str
    to_do: str
    features: Tuple[str, ...]
    code: Optional[FatBinaries]
    elsewhere: str = ""

    @property
    def is_for_gpus(self) -> bool:
        """Whether it was built for GPUs."""
        return bool(self.code and self.code.num_binaries) or "CUDA" in self.features

    def described(self) -> str:
        """Return a description of the GPU code in the library."""
        if self.code is None:
            return "unknown"
        if not self.code.num_binaries:
            return "none: this is a build for CPUs"
        machine_code = ", ".join(map(version_text, self.code.machine_code)) or "none"
        ptx = ", ".join(map(version_text, self.code.ptx))
        return f"machine code for compute capability {machine_code}; {f'PTX for {ptx}' if ptx else 'no PTX'}"


def inspect_build() -> Build:
    """Return the installed MXNet; import it if possible."""
    library = mxnet_library()
    try:
        mxnet = sys.modules.get("mxnet") or environment.load_mxnet()
    except Exception as error:
        return Build(library, "", *describe_error(error), (), None)
    features = mxnet.runtime.Features()
    return Build(library, mxnet.__version__, "", "", tuple(sorted(name for name in features if features.is_enabled(name))), None)


def inspect_code(library: str) -> Optional[FatBinaries]:
    """Return the GPU code in a library; None if there is no library."""
    return read_fat_binaries(library) if library else None


def check_build(build: Build) -> List[Problem]:
    """Return why MXNet cannot be imported, if it cannot."""
    return [Problem("MXNet", build.why_not, build.to_do, True)] if build.why_not else []
