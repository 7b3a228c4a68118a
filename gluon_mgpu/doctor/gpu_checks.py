"""The NVIDIA driver and its GPUs, and problems that the driver shows."""

from __future__ import annotations

import os
from typing import Iterator, List, Optional, Tuple

from ..runtime.nvidia.nvml import Driver, Gpu
from ..runtime.nvidia.visible import visible_gpus
from ..runtime.units import format_bytes
from .findings import Problem, describe_error

_OLDEST_DRIVER = "450.80.02"  # for CUDA 11. Source: NVIDIA, "CUDA Compatibility", minor version compatibility.
NVRTC = "nvidia-cuda-nvrtc-cu11"  # the wheel
_FOR_FUSION = "520.61.05"  # for CUDA 11.8. Source: NVIDIA, "CUDA Toolkit Release Notes", versions of toolkit and driver.
_LAST_BRANCH = 580  # of drivers for Maxwell, Pascal and Volta: compute capability 5.0 to 7.0
_SLOWED = {"hardware slowdown", "temperature", "temperature, by hardware", "power brake"}
_CROWDED = 0.5  # of a GPU's memory
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last is Windows's, in WSL 2


def check_driver(driver: Optional[Driver], why_not: str, *, has_cuda: bool, nvrtc: str = "") -> List[Problem]:
    """Return problems with the driver; [] if none is installed or required.

    Parameters
    ----------
    driver : Driver or None
    why_not : str
        Why it could not be read.
    has_cuda : bool
        Whether MXNet was built for GPUs.
    nvrtc : str
        The version of the wheel of NVRTC; "" if it is not installed.
    """
    if driver is None:
        if not has_cuda and not any(map(os.path.exists, _SIGNS)):
            return []
        what, to_do = describe_error(why_not, "Check the output of nvidia-smi.")
        return [Problem("driver", f"The GPUs cannot be read: {what}.", to_do)]
    major = driver.cuda_version.partition(".")[0]
    if has_cuda and major.isdigit() and int(major) < 11:
        what = f"Driver {driver.version} runs CUDA up to {driver.cuda_version}; MXNet's wheel for GPUs needs 11.0 or newer."
        return [Problem("driver", what, f"Install a newer NVIDIA driver: {_OLDEST_DRIVER} at least.")]
    number = driver.version.partition(".")[0]
    if not driver.gpus and number.isdigit() and int(number) > _LAST_BRANCH:
        what = f"Driver {driver.version} lists no GPU."
        return [Problem("driver", what, f"For Maxwell, Pascal and Volta, install a driver of branch {_LAST_BRANCH}, their last.")]
    # NVRTC writes PTX, which only a driver of its CUDA or a newer one translates (MXNet 1.9.1, fused_op.cu:188,663)
    if has_cuda and nvrtc and driver.cuda_version and _numbers(driver.cuda_version) < _numbers(nvrtc)[:2]:
        what = f"Driver {driver.version} runs CUDA up to {driver.cuda_version}; hybridized networks fuse with NVRTC {nvrtc}."
        to_do = f"Install a driver from {_FOR_FUSION} on, or set MXNET_USE_FUSION=0."
        return [Problem("driver", what, to_do)]
    return []


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def check_gpus(driver: Driver) -> List[Problem]:
    """Return the problems of each GPU, and of the environment that chooses among them."""
    found = [problem for gpu in driver.gpus for problem in _problems(gpu)]
    visible = visible_gpus(driver)
    if _VISIBLE in os.environ and not visible.devices and visible_gpus(driver, {}).devices:
        what = f"CUDA_VISIBLE_DEVICES={os.environ[_VISIBLE]!r} shows none of the GPUs."
        found.append(Problem("GPUs", what, "Unset it, or set it to the numbers of the GPUs to use, each once: 0,1."))
    if visible.doubt:
        what, _, to_do = visible.doubt.partition(" Set ")
        found.append(Problem("GPUs", what, f"Set {to_do}"))
    return found


def _problems(gpu: Gpu) -> Iterator[Problem]:
    name = f"GPU {gpu.index}, {gpu.name or 'name unknown'},"
    if gpu.trouble:
        to_do = "Check sudo dmesg for NVRM and Xid, and restart the machine. If it happens again, replace the card."
        yield Problem("GPUs", f"{name} has failed: {gpu.trouble.rstrip('.')}.", to_do)
    if gpu.mig_enabled:
        what = f"{name} is in MIG mode: a process sees at most one of its parts, and no other GPU."
        to_do = f"Choose one: CUDA_VISIBLE_DEVICES=MIG-... To train on the undivided GPU: sudo nvidia-smi -i {gpu.index} -mig 0."
        yield Problem("GPUs", what, to_do)
    elif gpu.total_bytes and gpu.used_bytes is not None and gpu.used_bytes >= _CROWDED * gpu.total_bytes:
        who = ", ".join(f"process {one.pid} ({one.name or 'name hidden'})" for one in gpu.processes or ())
        what = f"{name} has {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} in use"
        to_do = "Wait until they end, stop them, or name other devices: --devices gpu:1 or --devices cpu."
        yield Problem("GPUs", f"{what}, by {who or 'processes that are hidden here'}.", to_do)
    reasons = [reason for reason in gpu.throttle_reasons or () if reason in _SLOWED]
    if reasons:
        what = f"{name} is slowed down: {', '.join(reasons)}."
        yield Problem("GPUs", what, "Check its cooling and its power supply; nvidia-smi -q -d PERFORMANCE shows details.")
