"""The GPUs that MXNet sees, whether it can run on them, and their numbers in the driver's list."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from typing import List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context

from ..errors import DeviceError
from ..runtime.cuda_libraries import mxnet_library
from ..runtime.fat_binary import FatBinaryError, read_fat_binaries
from ..runtime.gpu_builds import advice, short_advice, titled
from ..runtime.nvidia.driver import Driver
from ..runtime.nvidia.nvml import try_driver
from ..runtime.nvidia.visible import CudaDevice, ask_cuda, visible_gpus


@lru_cache(maxsize=None)
def num_gpus() -> int:
    """Return the number of GPUs that MXNet sees. Determined once per process."""
    try:
        return int(mx.context.num_gpus())
    except mx.MXNetError:  # a CUDA build without a working driver
        return 0


@lru_cache(maxsize=None)
def why_not(device_id: int) -> str:
    """Return why MXNet cannot run on this GPU, "" if it can. Determined once per process by running an operation on it."""
    try:
        if (mx.nd.ones((2,), ctx=mx.gpu(device_id)) * 2).asnumpy().tolist() == [2.0, 2.0]:
            return ""
        return "A test operation gave a wrong result."
    except mx.MXNetError as error:
        return f"A test operation failed: {first_line(error)}"


@lru_cache(maxsize=None)
def what_to_do(device_id: int, *, short: bool = False) -> str:
    """Return how to get an MXNet that runs on a GPU of MXNet's; "" if its library holds code for it, or cannot be read.

    `short` fits an error message.
    """
    driver, _ = try_driver(links=False)
    devices = visible_gpus(driver, cuda_uuids=cuda_uuids()).devices if driver else ()
    capability = next((device.gpu.compute_capability for device in devices if device.number == device_id), None)
    if driver is None or capability is None:
        return "gluon-mgpu doctor shows for which GPUs MXNet's library holds code."
    try:
        code = read_fat_binaries(mxnet_library())
    except (FatBinaryError, OSError):
        return ""
    if code.code_for(capability):
        return ""
    lacks = f"The installed MXNet holds no code for compute capability {titled(capability)}."
    return f"{lacks} {short_advice(capability) if short else advice(capability, driver.version)}"


def usable_gpus() -> List[Context]:
    """Return the GPUs on which MXNet has run a small operation, now or earlier in this process."""
    return [mx.gpu(i) for i in range(num_gpus()) if not why_not(i)]


def is_for_gpus() -> bool:
    """Return whether MXNet was built for GPUs."""
    return bool(mx.runtime.Features().is_enabled("CUDA"))


def why_hidden(num_seen: int, num_there: int) -> str:
    """Return why MXNet sees fewer GPUs than the machine has."""
    if not is_for_gpus():
        return f"The installed mxnet {mx.__version__} holds no GPU code."
    if num_there > num_seen and "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} lets MXNet see {num_seen} of {num_there}."
    return "List the devices with gluon-mgpu devices."


def why_none() -> str:
    """Return why MXNet does not see a GPU, and what to do about it."""
    driver, _ = try_driver(links=False)
    num_there = len(driver.gpus) if driver else len(nvidia_smi())
    reason = why_hidden(num_gpus(), num_there)
    if not num_there:
        reason = f"The NVIDIA driver lists no GPU here. {reason}"
    if is_for_gpus():
        return reason
    kinds = {gpu.compute_capability for gpu in driver.gpus} if driver else set()
    capability = kinds.pop() if len(kinds) == 1 else None
    return f"{reason} {short_advice(capability)}"


def seen_by_cuda(driver: Driver) -> Sequence[CudaDevice]:
    """Return the driver's GPUs with MXNet's numbers.

    Raises
    ------
    DeviceError
        MXNet's numbers cannot be matched to the driver's GPUs.
    """
    visible = visible_gpus(driver, cuda_uuids=cuda_uuids())
    if visible.doubt:
        raise DeviceError(
            f"use_devices: got {num_gpus()} GPUs of several kinds; expected to know which is gpu(0). {visible.doubt}"
        )
    if len(visible.devices) != num_gpus():
        variable = os.environ.get("CUDA_VISIBLE_DEVICES", "(unset)")
        raise DeviceError(
            f"use_devices: got {num_gpus()} GPUs from MXNet and {len(visible.devices)} from the driver, CUDA_VISIBLE_DEVICES="
            f"{variable}; expected the same number from both. Name GPUs by number, as in 'gpu:0'."
        )
    return visible.devices


@lru_cache(maxsize=None)
def cuda_uuids() -> Optional[Tuple[str, ...]]:
    """Return the UUIDs of CUDA's GPUs by number, which never change in a process; MXNet has started CUDA when it sees GPUs."""
    uuids = ask_cuda() if num_gpus() else None
    return None if uuids is None else tuple(uuids)


def first_line(error: BaseException) -> str:
    """Return the line of an MXNet error that describes the failure."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    failures = [line for line in lines if "Error" in line or "error" in line or "Check failed" in line]
    return (failures or lines or [type(error).__name__])[-1]


def nvidia_smi() -> List[Tuple[str, int]]:
    """Return (name, memory in bytes) of each GPU that the NVIDIA driver lists, [] without a driver."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in listed.stdout.decode(errors="replace").splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name:
            found.append((name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else 0))
    return found
