"""The GPUs: whether MXNet holds code for each, and other problems that affect training on them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

from ..runtime.cuda_libraries import cuda_major, needed
from ..runtime.fat_binary import Capability, version_text
from ..runtime.gpu_builds import NO_WHEEL, OLDEST, WHEEL, advice, titled
from ..runtime.nvidia.nvml import Driver, Gpu, try_driver
from ..runtime.nvidia.visible import visible_gpus
from ..runtime.units import format_bytes
from .build import Build
from .findings import Problem

# A driver runs every CUDA of a major version, from these on. Source: NVIDIA, "CUDA Compatibility", minor version compatibility.
_OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_IN_ANOTHER = f"create another environment and run {WHEEL} there."  # pip cannot uninstall an MXNet that it does not list
_NO_WHEEL_HERE = "no MXNet 1.9.1 wheel on PyPI holds code"
_SLOWED = {"hardware slowdown", "temperature", "temperature, by hardware", "power brake"}
_CROWDED = 0.5  # of a GPU's memory
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last is Windows's, in WSL 2


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
    major = cuda_major(needed(build.library)) or 11
    if newest and _numbers(newest) < (major, 0) and build.is_for_gpus:
        what = f"Driver {reading.driver.version} runs CUDA up to {newest}; MXNet's library needs {major}.0 or newer."
        oldest = _OLDEST_DRIVERS.get(major, f"one for CUDA {major}")
        return [Problem("driver", what, f"Install a newer NVIDIA driver: {oldest} at least.")]
    return []


def check_gpus(reading: Reading, build: Build) -> List[Problem]:
    """Return the problems of each GPU."""
    found = [*_without_gpu_code(reading.gpus, build), *_no_code(reading.gpus, build, reading.driver)]
    for gpu in reading.gpus:
        found += [*_trouble(gpu), *_mig(gpu), *_crowded(gpu, reading.pid), *_slowed(gpu)]
    return [*found, *_hidden(reading), *(_doubted(reading) if build.is_for_gpus else ())]


def explains(reading: Reading, build: Build) -> bool:
    """Return whether `check_gpus` explains for every GPU why MXNet cannot run on it."""
    gpus = reading.gpus
    without = (bool(gpu.trouble or _without_gpu_code([gpu], build) or _no_code([gpu], build, reading.driver)) for gpu in gpus)
    return bool(gpus) and (bool(_hidden(reading)) or all(without))


def barred(reading: Reading, build: Build) -> Dict[int, str]:
    """Return the numbers of GPUs for which the library holds no code, each with the problem found."""
    return {gpu.index: finding.what for gpu in reading.gpus for finding in _no_code([gpu], build, reading.driver)}


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
    helped = [gpu for gpu in gpus if gpu.compute_capability is None or OLDEST <= gpu.compute_capability < NO_WHEEL]
    if not helped:
        return []  # _no_code reports each
    names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in helped)
    to_do = f"Build it again with -DUSE_CUDA=ON, or {_IN_ANOTHER}" if build.elsewhere else advice(OLDEST)
    return [Problem("GPUs", f"The installed MXNet is a build for CPUs, and cannot use GPU {names}.", to_do)]


def _no_code(gpus: Sequence[Gpu], build: Build, driver: Optional[Driver]) -> List[Problem]:
    """Return a problem for each kind of GPU for which the library holds no code, except those of `_without_gpu_code`."""
    kinds: Dict[Tuple[Capability, str], List[Gpu]] = {}
    for gpu in gpus:
        if build.code and gpu.compute_capability and not build.code.code_for(gpu.compute_capability):
            kinds.setdefault((gpu.compute_capability, gpu.name), []).append(gpu)
    here = f"The installed library holds {build.described()}" if build.is_for_gpus else "The installed MXNet is a build for CPUs"
    found = []
    for (capability, _), alike in kinds.items():
        has_wheel = OLDEST <= capability < NO_WHEEL
        if has_wheel and not build.is_for_gpus:
            continue
        names = _name(alike[0]) if len(alike) == 1 else f"GPUs {', '.join(str(gpu.index) for gpu in alike)}, {alike[0].name},"
        what = f"{names} {'have' if len(alike) > 1 else 'has'} compute capability {titled(capability)}"
        lacks = "" if has_wheel else f", for which {_NO_WHEEL_HERE if capability >= NO_WHEEL else 'mxnet-cu112 holds no code'}"
        found.append(Problem("GPUs", f"{what}{lacks}. {here}.", _get_code(capability, build, driver)))
    return found


def _get_code(capability: Capability, build: Build, driver: Optional[Driver]) -> str:
    """Return how to get an MXNet with code for a GPU, in place of this build."""
    has_wheel = OLDEST <= capability < NO_WHEEL
    others = advice(capability, driver.version if driver else "")
    if build.elsewhere:
        with_cuda = "" if build.is_for_gpus else "-DUSE_CUDA=ON "
        again = f"Build this MXNet again with {with_cuda}-DMXNET_CUDA_ARCH={version_text(capability)}."
        return f"{again} Or {_IN_ANOTHER}" if has_wheel else f"{again} Otherwise: {others}"
    if has_wheel:  # another wheel for GPUs is here
        return f"Uninstall this wheel of MXNet, then run {WHEEL}: code for compute capability 5.0 to 8.9."
    return others


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
    return [
        Problem(
            "GPUs",
            what,
            "Wait for them, stop them, or train on another device, for example --devices gpu:1, the GPU with number 1.",
        )
    ]


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
