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
from ..runtime.nvidia.driver import Driver
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
        return "A test operation gave a wrong result: MXNet 1.9.1 holds no code for GPUs of compute capability 9.0 or newer."
    except mx.MXNetError as error:
        return f"A test operation failed: {first_line(error)}"


def usable_gpus() -> List[Context]:
    """Return the GPUs on which MXNet has run a small operation, now or earlier in this process."""
    return [mx.gpu(i) for i in range(num_gpus()) if not why_not(i)]


def why_hidden(num_seen: int, num_there: int) -> str:
    """Return why MXNet sees fewer GPUs than the machine has."""
    if not mx.runtime.Features().is_enabled("CUDA"):
        return (
            f"The installed mxnet {mx.__version__} holds no GPU code. "
            "Run pip uninstall mxnet, then pip install 'gluon_mgpu[cu112]'; no wheel helps GPUs of compute capability 9.0 or "
            "newer (Hopper, Blackwell), which cannot run MXNet 1.9.1."
        )
    if num_there > num_seen and "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} lets MXNet see {num_seen} of {num_there}."
    return "List the devices with gluon-mgpu devices."


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
