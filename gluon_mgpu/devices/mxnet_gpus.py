"""The GPUs that MXNet sees, whether it can run on them, and their numbers in the driver's list."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import List, Sequence

import mxnet as mx
from mxnet import Context

from ..errors import DeviceError, last_line
from ..runtime.nvidia.nvml import Driver, try_driver
from ..runtime.nvidia.visible import CudaDevice, visible_gpus
from .gpu_builds import BUILDS, advice


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
        return f"A test operation failed: {last_line(error)}"


def what_to_do(device_id: int) -> str:
    """Return how to get an MXNet that runs on a GPU of MXNet's; "" if MXNet's wheel supports it."""
    driver, _ = try_driver()
    devices = visible_gpus(driver).devices if driver else ()
    capability = next((device.gpu.compute_capability for device in devices if device.number == device_id), None)
    if capability is None:
        return "docs/compatibility.md#gpus lists the GPUs that each build of MXNet supports."
    if BUILDS[0].supports(capability):
        return ""
    return f"MXNet's wheel holds no code for compute capability {capability[0]}.{capability[1]}. {advice(capability)}"


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
    driver, _ = try_driver()
    num_there = len(driver.gpus) if driver else 0
    reason = why_hidden(num_gpus(), num_there)
    if not num_there:
        reason = f"The NVIDIA driver {'lists no GPU here' if driver else 'cannot be read (see gluon-mgpu doctor)'}. {reason}"
    if is_for_gpus():
        return reason
    kinds = {gpu.compute_capability for gpu in driver.gpus} if driver else set()
    capability = kinds.pop() if len(kinds) == 1 else None
    return f"{reason} {advice(capability)}"


def seen_by_cuda(driver: Driver) -> Sequence[CudaDevice]:
    """Return the driver's GPUs with MXNet's numbers.

    Raises
    ------
    DeviceError
        MXNet's numbers cannot be matched to the driver's GPUs.
    """
    visible = visible_gpus(driver)
    if visible.doubt or len(visible.devices) != num_gpus():
        why = visible.doubt or f"The driver lists {len(visible.devices)}. Name GPUs by number, as in 'gpu:0'."
        raise DeviceError(
            f"use_devices: got {num_gpus()} GPUs from MXNet; expected to know which of the driver's is gpu(0). {why}"
        )
    return visible.devices
