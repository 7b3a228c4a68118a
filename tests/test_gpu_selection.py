import os

import pytest
from gluon_mgpu.errors import DeviceError
from gluon_mgpu.runtime.nvidia.demand import Demand, num_bytes, why_not_free
from gluon_mgpu.runtime.nvidia.nvml import read_driver
from gluon_mgpu.runtime.nvidia.visible import visible_gpus

from .fake_nvml import install, v100s

GIB = 2**30


@pytest.fixture
def nvml(monkeypatch):
    """Four idle V100s."""
    return install(monkeypatch, v100s(4))


def look():
    return visible_gpus(read_driver(), {}).devices


def test_idle_gpus_are_free(nvml):
    nvml.gpus[0].used_bytes = 400 * 2**20  # a desktop
    nvml.gpus[1].utilization = 9
    nvml.gpus[2].refuses = dict.fromkeys(
        ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo"), "NotSupported"
    )
    nvml.gpus[3].processes, nvml.gpus[3].used_bytes = [(os.getpid(), "python", 3 * GIB)], 3 * GIB
    assert [why_not_free(device, Demand("gpu:free")) for device in look()] == [""] * 4


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"processes": [(17, "/usr/bin/python3 train.py", GIB)]}, "process 17 (python3) computes there"),
        ({"processes": [(17, "", None)]}, "process 17 computes there"),
        ({"processes": [(os.getpid(), "python", GIB), (18, "julia", 1)]}, "process 18 (julia) computes there"),
        ({"utilization": 10}, "it is 10 % busy"),
        ({"used_bytes": 2 * GIB}, "2.0 GiB are in use, 14.0 GiB of 16.0 GiB are free"),
        ({"refuses": {"nvmlDeviceGetTemperature": "GpuIsLost"}}, "GPU is lost"),
    ],
    ids=["process", "hidden process", "own and other", "busy", "memory in use", "lost"],
)
def test_gpus_that_are_not_free(nvml, values, reason):
    for name, value in values.items():
        setattr(nvml.gpus[1], name, value)
    assert [why_not_free(device, Demand("gpu:free")) for device in look()] == ["", reason, "", ""]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "", "much", "8 apples", "-1GiB", "0", "1e9", b"8GiB"], ids=repr)
def test_sizes_that_are_none(size):
    with pytest.raises(DeviceError, match="min_free_memory"):
        num_bytes(size)
