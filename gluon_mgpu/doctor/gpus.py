"""The GPUs: whether MXNet holds code for each, and other problems that affect training on them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

from ..runtime.fat_binary import Capability, version_text
from ..runtime.nvidia.nvml import Driver, Gpu, try_driver
from ..runtime.nvidia.visible import visible_gpus
from ..runtime.units import format_bytes
from .build import Build
from .findings import Problem

NO_WHEEL = (9, 0)  # from Hopper on; the newest code in a wheel of MXNet 1.9.1 is for 8.6, which 8.9 also runs
_OLDEST = (5, 0)
_OLDEST_CUDA = (11, 0)  # a driver must support it for libraries of CUDA 11.2, by CUDA's minor version compatibility
_SLOWED = {"hardware slowdown", "temperature", "temperature, by hardware", "power brake"}
_CROWDED = 0.5  # of a GPU's memory
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last is Windows's, in WSL 2

_TRAIN_ELSEWHERE = (
    "Train on the CPU (--devices cpu), or on a GPU of compute capability 5.0 to 8.9: Maxwell to Ada (V100, A100, L4)."
)


@dataclass(frozen=True)
class Reading:
    """The NVIDIA driver and its GPUs, as read.

    Attributes
    ----------
    driver : Driver or None
    why_not : str
        Why the driver could not be read; "" if it was read.
    has_signs : bool
        Whether the system shows signs of a driver, even if it could not be read.
    environ : dict of str to str
        The variables `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`, if set.
    pid : int
        Of this process.
    """

    driver: Optional[Driver]
    why_not: str
    has_signs: bool
    environ: Dict[str, str] = field(default_factory=dict)
    pid: int = 0

    @property
    def gpus(self) -> Tuple[Gpu, ...]:
        """The GPUs; () if the driver could not be read."""
        return self.driver.gpus if self.driver else ()


def read_gpus() -> Reading:
    """Read the NVIDIA driver and its GPUs."""
    driver, why_not = try_driver()
    has_signs = driver is not None or any(os.path.exists(path) for path in _SIGNS)
    environ = {name: os.environ[name] for name in (_VISIBLE, "CUDA_DEVICE_ORDER") if name in os.environ}
    return Reading(driver, why_not, has_signs, environ, os.getpid())


def check_driver(reading: Reading, build: Build) -> List[Problem]:
    """Return problems with the driver; [] if none is installed or required."""
    if reading.driver is None:
        if not (reading.has_signs or build.is_for_gpus):
            return []
        what, _, to_do = reading.why_not.partition("; expected ")
        to_do = f"Expected {to_do}" if to_do else "Check the output of nvidia-smi."
        return [Problem("driver", f"The GPUs cannot be read: {what}.", to_do)]
    newest = reading.driver.cuda_version
    if newest and _numbers(newest) < _OLDEST_CUDA and build.is_for_gpus:
        what = f"Driver {reading.driver.version} runs CUDA up to {newest}; MXNet's wheel needs 11.0 or newer."
        return [Problem("driver", what, "Install a newer NVIDIA driver: 450.80.02 at least.")]
    return []


def check_gpus(reading: Reading, build: Build) -> List[Problem]:
    """Return the problems of each GPU."""
    found = _without_gpu_code(reading.gpus, build)
    for gpu in reading.gpus:
        found += [*_trouble(gpu), *_no_code(gpu, build), *_mig(gpu), *_crowded(gpu, reading.pid), *_slowed(gpu)]
    return [*found, *_hidden(reading), *(_doubted(reading) if build.is_for_gpus else ())]


def explains(reading: Reading, build: Build) -> bool:
    """Return whether `check_gpus` explains for every GPU why MXNet cannot run on it."""
    gpus = reading.gpus
    without = (bool(gpu.trouble or _without_gpu_code([gpu], build) or _no_code(gpu, build)) for gpu in gpus)
    return bool(gpus) and (bool(_hidden(reading)) or all(without))


def barred(reading: Reading, build: Build) -> Dict[int, str]:
    """Return the numbers of GPUs for which the library holds no code, each with the problem found."""
    return {gpu.index: finding.what for gpu in reading.gpus for finding in _no_code(gpu, build)}


def names_in_mxnet(reading: Reading) -> Dict[int, str]:
    """Return MXNet's name for each GPU of the driver's list that CUDA sees: {0: "gpu(1)"}."""
    devices = visible_gpus(reading.driver, reading.environ).devices if reading.driver else ()
    return {device.gpu.index: f"gpu({device.number})" for device in devices}


def code_for(gpu: Gpu, build: Build) -> str:
    """Return a description of the library's code that this GPU runs."""
    if build.code is None or gpu.compute_capability is None:
        return "unknown"
    return build.code.code_for(gpu.compute_capability) or "none"


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}, {gpu.name or 'name unknown'},"


def _trouble(gpu: Gpu) -> List[Problem]:
    if not gpu.trouble:
        return []
    to_do = "Check sudo dmesg for NVRM and Xid, and restart the machine. If it happens again, replace the card."
    return [Problem("GPUs", f"{_name(gpu)} has failed: {gpu.trouble.rstrip('.')}.", to_do)]


def _without_gpu_code(gpus: Sequence[Gpu], build: Build) -> List[Problem]:
    """Return the GPUs that a CPU build leaves idle and another wheel could use."""
    if not gpus or build.code is None or build.is_for_gpus:
        return []
    helped = [gpu for gpu in gpus if gpu.compute_capability is None or _OLDEST <= gpu.compute_capability < NO_WHEEL]
    if not helped:
        return []  # _no_code reports each
    names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in helped)
    to_do = "Run pip uninstall mxnet, then pip install 'gluon_mgpu[cu112]'."
    return [Problem("GPUs", f"The installed MXNet is a build for CPUs, and cannot use GPU {names}.", to_do)]


def _no_code(gpu: Gpu, build: Build) -> List[Problem]:
    capability = gpu.compute_capability
    if build.code is None or capability is None or build.code.code_for(capability):
        return []
    which = f"{_name(gpu)} has compute capability {version_text(capability)}"
    here = f"the installed library holds {build.described()}" if build.is_for_gpus else "the installed one is a build for CPUs"
    if capability >= NO_WHEEL:
        what = f"{which}: no MXNet 1.9.1 wheel can run there, and {here}."
        return [Problem("GPUs", what, f"{_TRAIN_ELSEWHERE} No driver, CUDA or setting changes that.")]
    if capability < _OLDEST:
        return [Problem("GPUs", f"{which}: no wheel of MXNet for CUDA 11 can run there, and {here}.", _TRAIN_ELSEWHERE)]
    if not build.is_for_gpus:
        return []  # _without_gpu_code reports all of them at once
    to_do = "Run pip install 'gluon_mgpu[cu112]', whose wheel holds code for compute capability 5.0 to 8.9."
    return [Problem("GPUs", f"{which}, and {here}.", to_do)]


def _mig(gpu: Gpu) -> List[Problem]:
    if not gpu.mig_enabled:
        return []
    off = f"sudo nvidia-smi -i {gpu.index} -mig 0 makes it one GPU again."
    if not gpu.mig:
        what = f"{_name(gpu)} is in MIG mode, but has no MIG device: CUDA cannot see it."
        return [Problem("GPUs", what, f"Make one: sudo nvidia-smi mig -i {gpu.index} -cgi 0 -C. Or {off}")]
    parts = _counted(len(gpu.mig), "device")
    what = f"{_name(gpu)} is split by MIG into {parts}: a process sees only one MIG device, and no other GPU."
    to_do = f"Choose one: CUDA_VISIBLE_DEVICES={gpu.mig[0].uuid or 'MIG-...'}. To train on the undivided GPU, {off}"
    return [Problem("GPUs", what, to_do)]


def _crowded(gpu: Gpu, pid: int) -> List[Problem]:
    """Return a problem if other processes use most of the memory."""
    if not gpu.total_bytes or gpu.used_bytes is None or gpu.used_bytes < _CROWDED * gpu.total_bytes or gpu.mig_enabled:
        return []
    others = [process for process in gpu.processes or () if process.pid != pid]
    if gpu.processes and not others:
        return []
    who = ", ".join(process_text(one.pid, one.name, one.used_bytes) for one in others) or "processes that are hidden here"
    what = f"{_name(gpu)} has {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} in use, by {who}."
    return [Problem("GPUs", what, "Wait for them, stop them, or train on another device, for example --devices gpu:1.")]


def _slowed(gpu: Gpu) -> List[Problem]:
    reasons = [reason for reason in gpu.throttle_reasons or () if reason in _SLOWED]
    if not reasons:
        return []
    heat = "" if gpu.temperature_c is None else f" at {gpu.temperature_c} C"
    what = f"{_name(gpu)} is slowed down{heat}: {', '.join(reasons)}."
    return [Problem("GPUs", what, "Check its cooling and its power supply; nvidia-smi -q -d PERFORMANCE shows details.")]


def _hidden(reading: Reading) -> List[Problem]:
    """Return a problem if the environment hides every GPU that CUDA could see."""
    if reading.driver is None or _VISIBLE not in reading.environ or visible_gpus(reading.driver, reading.environ).devices:
        return []
    if not visible_gpus(reading.driver, {}).devices:  # they are not visible without the variable either
        return []
    what = f"CUDA_VISIBLE_DEVICES={reading.environ[_VISIBLE]!r} shows none of {_counted(len(reading.gpus), 'GPU')}."
    return [Problem("GPUs", what, "Unset it, or set it to the numbers of the GPUs to use, each once: 0,1.")]


def _doubted(reading: Reading) -> List[Problem]:
    """Return a problem if CUDA may number the GPUs differently from the driver."""
    doubt = visible_gpus(reading.driver, reading.environ).doubt if reading.driver else ""
    what, _, to_do = doubt.partition(" Set ")
    return [Problem("GPUs", what, f"Set {to_do}")] if doubt else []


def process_text(pid: int, name: str, used_bytes: Optional[int]) -> str:
    """Return a description of a process."""
    return f"process {pid} ({name or 'name hidden'}, {format_bytes(used_bytes)})"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _numbers(version: str) -> Capability:
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit() else (0, 0)
