"""The builds of MXNet with GPU code, and the GPUs that each supports.

Sources: the wheels' own libraries; NVIDIA's release notes of MXNet 24.06; the README of smolix/mxnet. docs/compatibility.md#gpus
lists them with links and commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

Capability = Tuple[int, int]

CONTAINER = "nvcr.io/nvidia/mxnet:24.06-py3"
WHEEL = "pip install '.[cu112]' in a clone of gluon_mgpu"
_ELSEWHERE = "Or train on the CPU (--devices cpu). docs/compatibility.md#gpus has the commands."


@dataclass(frozen=True)
class GpuBuild:
    """A build of MXNet: the compute capabilities from `oldest` to below `end` that it supports, and how to get it."""

    oldest: Capability
    end: Capability
    how: str

    def supports(self, capability: Capability) -> bool:
        """Return whether it runs on GPUs of a compute capability."""
        return self.oldest <= capability < self.end


BUILDS = (
    # The newest code in a wheel of MXNet 1.9.1 is for 8.6, which 8.9 also runs.
    GpuBuild((5, 0), (9, 0), f"run pip uninstall mxnet, then {WHEEL}"),
    GpuBuild((9, 0), (10, 0), f"use NVIDIA's container {CONTAINER} (Docker, driver 545)"),
    GpuBuild((9, 0), (10, 0), "use a build of MXNet 1.9.1 from source (CUDA 11.8)"),
    GpuBuild((9, 0), (13, 0), "use the fork smolix/mxnet (MXNet 2.0, np arrays only; CUDA 13, driver 590)"),
)


def advice(capability: Optional[Capability]) -> str:
    """Return how to get an MXNet with code for a GPU of this compute capability; None if it is unknown.

    Examples
    --------
    >>> advice((8, 0))
    "Run pip uninstall mxnet, then pip install '.[cu112]' in a clone of gluon_mgpu."
    >>> advice((3, 7))
    'No build of MXNet is known to run there. Or train on the CPU (--devices cpu). docs/compatibility.md#gpus has the commands.'
    """
    if capability is None:
        return f"For GPUs up to Ada, {BUILDS[0].how}. For Hopper, {BUILDS[1].how}; see docs/compatibility.md#gpus for newer ones."
    ways = [build.how for build in BUILDS if build.supports(capability)]
    if ways == [BUILDS[0].how]:
        return f"R{ways[0][1:]}."
    text = "; or ".join(ways) or "no build of MXNet is known to run there"
    return f"{text[0].upper()}{text[1:]}. {_ELSEWHERE}"
