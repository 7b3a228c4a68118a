"""The builds of MXNet with GPU code: which GPUs each supports, what each needs, and where an installed one comes from.

Sources: the wheels' own libraries; NVIDIA's release notes of MXNet 24.06; CUDA's release notes for 11.8 and 12.8; the README of
smolix/mxnet. docs/compatibility.md lists them with links.
"""

from __future__ import annotations

import os
import re
import sys
from textwrap import indent
from typing import Optional, Sequence

from .fat_binary import Capability, FatBinaries, version_text

CONTAINER = "nvcr.io/nvidia/mxnet:24.06-py3"
FORK = "https://github.com/smolix/mxnet/releases"
IMAGE = "docker build -t gluon_mgpu -f docker/Dockerfile ."
RUN = "docker run --rm -it --gpus all --ipc=host gluon_mgpu"
WHEEL = "pip install 'gluon_mgpu[cu112]'"

OLDEST = (5, 0)  # in the wheel mxnet-cu112
NO_WHEEL = (9, 0)  # from Hopper on; the newest code in a wheel of MXNet 1.9.1 is for 8.6, which 8.9 also runs
_NO_CONTAINER = (10, 0)  # its release notes end with Hopper
_FORK_CODE = FatBinaries(((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)), ((12, 0),), 1)  # as of its README

_ON_OTHERS = (
    "Train on the CPU (--devices cpu), or on a GPU of compute capability 5.0 to 9.0: Maxwell to Hopper (V100, A100, H100)."
)
_FORK = f"""The fork smolix/mxnet has wheels for Linux on x86-64 with code for Ampere to Blackwell:
{FORK}
They are MXNet 2.0, on which gluon_mgpu trains with np arrays; that was tested on CPUs, with 2.0.0b1, and not with
this fork. They need Python 3.11 or 3.12, CUDA 13, and NVIDIA driver 590 or newer."""
_FORK_DRIVER = 590
_GENERATIONS = {3: "Kepler", 5: "Maxwell", 6: "Pascal", 7: "Volta", 8: "Ampere", 9: "Hopper", 10: "Blackwell", 12: "Blackwell"}
_LATER = {(7, 5): "Turing", (8, 9): "Ada"}  # generations that share a major version with an older one

# The container runs with driver 545 and newer, and on GPUs for data centers, as all of Hopper are, also with these.
_DRIVER = 545
_DATA_CENTER_DRIVERS = {470: 57, 525: 85, 535: 86}


def generation(capability: Capability) -> str:
    """Return NVIDIA's name for the GPUs of a compute capability, "" if it is not known here.

    Examples
    --------
    >>> [generation(one) for one in ((7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (12, 0), (13, 0))]
    ['Volta', 'Turing', 'Ampere', 'Ada', 'Hopper', 'Blackwell', '']
    """
    return _LATER.get(capability, _GENERATIONS.get(capability[0], ""))


def titled(capability: Capability) -> str:
    """Return a compute capability with its generation: `9.0 (Hopper)`."""
    name = generation(capability)
    return f"{version_text(capability)} ({name})" if name else version_text(capability)


def advice(capability: Optional[Capability], driver: str = "") -> str:
    """Return how to get an MXNet with code for a GPU. If that takes several lines, the first is a summary.

    Parameters
    ----------
    capability : (int, int), or None
        The GPU's compute capability; None if it is unknown.
    driver : str
        The version of the NVIDIA driver; "" if it is unknown.

    Examples
    --------
    >>> print(advice((8, 0)))
    Run pip uninstall mxnet, then pip install 'gluon_mgpu[cu112]'.
    """
    if capability is None:
        return f"{short_advice(None)} pip install 'gluon_mgpu[gpu]' lets gluon-mgpu doctor choose among these for your GPU."
    if OLDEST <= capability < NO_WHEEL:
        return short_advice(capability)
    if NO_WHEEL <= capability < _NO_CONTAINER:
        return _for_hopper(capability, driver)
    if capability < OLDEST:
        return f"The wheel of {WHEEL} starts at {titled(OLDEST)}. {_ON_OTHERS}"
    return _for_newer(capability, driver)


def short_advice(capability: Optional[Capability]) -> str:
    """Return `advice` in the length of an error message.

    Examples
    --------
    >>> print(short_advice((7, 0)))
    Run pip uninstall mxnet, then pip install 'gluon_mgpu[cu112]'.
    """
    if capability is None:
        return (
            f"For GPUs up to Ada, run pip uninstall mxnet, then {WHEEL}. For Hopper: NVIDIA's container {CONTAINER} (Docker, "
            "driver 545) or a build from source (CUDA 11.8). For Hopper, Blackwell: the fork smolix/mxnet (MXNet 2.0, CUDA 13, "
            "driver 590). See docs/compatibility.md#gpus."
        )
    if capability < OLDEST:
        return _ON_OTHERS
    if capability < NO_WHEEL:
        return f"Run pip uninstall mxnet, then {WHEEL}."
    fork = "the fork smolix/mxnet (MXNet 2.0, np arrays only; CUDA 13, driver 590)"
    if capability < _NO_CONTAINER:
        return (
            f"MXNet for Hopper: NVIDIA's container {CONTAINER} (Docker, driver 545), a build from source (CUDA 11.8), or {fork}. "
            "gluon-mgpu doctor shows the commands."
        )
    if not _FORK_CODE.code_for(capability):
        return f"No build of MXNet is known to run there. {_ON_OTHERS}"
    return f"No build of MXNet 1.9.1 is known to run there. Use {fork}: gluon-mgpu doctor has details."


def _for_hopper(capability: Capability, driver: str) -> str:
    return f"""Get an MXNet for Hopper, in one of the three ways below.
1. NVIDIA's container {CONTAINER} is MXNet 1.9.1 with code for Hopper. In a clone of gluon_mgpu, build an image
   and run the doctor in it:

       {IMAGE}
       {RUN}

   It needs Docker, the NVIDIA Container Toolkit, and NVIDIA driver 545 or newer (on data-center GPUs also 535.86, 525.85 or
   470.57).{_enough_for_container(driver)}
2. A build of MXNet 1.9.1 from source needs CUDA 11.8, cuDNN 8 and the CMake option -DMXNET_CUDA_ARCH={version_text(capability)}.
3. {indent(_FORK, "   ").lstrip()}{_verdict(driver, _major(driver) >= _FORK_DRIVER)}
Details: docs/compatibility.md#gpus. Until then, train on the CPU: --devices cpu."""


def _for_newer(capability: Capability, driver: str) -> str:
    has_fork = bool(_FORK_CODE.code_for(capability))
    first = "Use the fork smolix/mxnet, below: no build of MXNet 1.9.1 is known" if has_fork else "No build of MXNet is known"
    fork = f"{_FORK}{_verdict(driver, _major(driver) >= _FORK_DRIVER)}\n" if has_fork else ""
    return f"""{first} to run there.
{fork}NVIDIA's container {CONTAINER} ends with Hopper. A build from source needs CUDA 12.8 or newer, for which MXNet 1.9.1
was not written.
Details: docs/compatibility.md#gpus. {_ON_OTHERS}"""


def _enough_for_container(driver: str) -> str:
    """Return whether a GPU for data centers can run the container with this driver, as a sentence; "" if it is unknown."""
    numbers = [int(part) for part in driver.split(".")[:2] if part.isdigit()]
    if len(numbers) < 2:
        return ""
    return _verdict(driver, numbers[0] >= _DRIVER or numbers[1] >= _DATA_CENTER_DRIVERS.get(numbers[0], sys.maxsize))


def _major(driver: str) -> int:
    first = driver.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _verdict(driver: str, is_enough: bool) -> str:
    """Return whether a driver suffices, as a sentence; "" if its version is unknown."""
    state = "new enough" if is_enough else "too old: upgrade it first"
    return f" Your driver {driver} is {state}." if _major(driver) else ""


def why_built_elsewhere(
    version: str, library: str, wheels: Sequence[str], *, code: Optional[FatBinaries], folders: Sequence[str] = ()
) -> str:
    """Return the sign that the installed MXNet is not a wheel from PyPI; "" if there is none.

    Parameters
    ----------
    version : str
        `mxnet.__version__`; "" if MXNet cannot be imported.
    library : str
        The file of its compiled library; "" if there is none.
    wheels : sequence of str
        The installed distributions that contain a package `mxnet`.
    code : FatBinaries or None
        The GPU code in the library; None if it could not be read.
    folders : sequence of str
        Where those distributions are installed; () if unknown.

    Examples
    --------
    >>> why_built_elsewhere("1.9.1", "/site-packages/mxnet/libmxnet.so", ["mxnet"], code=None)
    ''
    >>> why_built_elsewhere("2.0.0+cu13.bw.20260617", "/site-packages/mxnet/libmxnet.so", ["mxnet"], code=None)
    'its version, 2.0.0+cu13.bw.20260617, has a suffix'
    """
    if not library:
        return ""
    if not wheels:
        return "pip lists no package mxnet"
    if version and not re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+|(a|b|rc|beta)\d+)?", version):
        return f"its version, {version}, has a suffix"
    if os.path.basename(os.path.dirname(os.path.abspath(library))) != "mxnet":
        return f"its library, {library}, is outside the package"
    if folders and os.path.realpath(os.path.dirname(os.path.dirname(library))) not in map(os.path.realpath, folders):
        return f"its library, {library}, is not where pip installed {wheels[0]}"  # a source tree in PYTHONPATH
    return _foreign(wheels, code) if code else ""


def _foreign(wheels: Sequence[str], code: FatBinaries) -> str:
    """Return the GPU code that the wheels of these names do not hold; "" if there is none."""
    newer = [version_text(one) for one in code.machine_code if one >= NO_WHEEL]
    if newer:
        return f"its library holds machine code for {', '.join(newer)}"
    if code.num_binaries and not any("-cu" in wheel for wheel in wheels):
        return f"pip lists the CPU wheel {wheels[0]}, but its library holds GPU code"
    return ""
