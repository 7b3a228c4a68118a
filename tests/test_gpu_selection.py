import os

import pytest
from gluon_mgpu.devices.free_gpus import wait_for
from gluon_mgpu.errors import DeviceError
from gluon_mgpu.runtime.nvidia.nvml import read_driver
from gluon_mgpu.runtime.nvidia.request import Demand, num_bytes, why_not_free
from gluon_mgpu.runtime.nvidia.visible import visible_gpus

from .fake_nvml import install, v100s

GIB = 2**30


@pytest.fixture
def nvml(monkeypatch):
    """Four idle V100s."""
    return install(monkeypatch, v100s(4))


def look():
    return visible_gpus(read_driver(), {}).devices


def runs(number):
    return ""


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


class Clock:
    """Time that passes when somebody sleeps, and what happens then."""

    def __init__(self, **events):
        self.time, self.events = 0.0, {float(name[1:]): event for name, event in events.items()}
        self.slept = []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds
        for when in [when for when in self.events if when <= self.time]:
            self.events.pop(when)()


def wait(demand, wait_s, clock, told):
    return wait_for(look, demand, runs=runs, wait_s=wait_s, tell=told.append, sleep=clock.sleep, now=clock.now)


def test_waiting_until_a_gpu_is_free(nvml):
    for gpu in nvml.gpus:
        gpu.processes = [(17, "python", GIB)]
    told = []
    clock = Clock(t12=nvml.gpus[2].processes.clear)
    (device,) = wait(Demand("gpu:free"), 600, clock, told)
    assert device.number == 2
    assert clock.slept == [5.0, 5.0, 5.0]
    assert told[0].startswith("waiting for a free GPU for at most 600 s: gpu(0): process 17 (python) computes there; gpu(1)")
    assert told[0].endswith("Ctrl-C ends it.")
    assert told[1].startswith(f"gpu:free takes gpu(2) (Tesla V100-SXM2-16GB, {device.gpu.uuid}, 16.0 GiB free)")
    assert "not gpu(0): process 17" in told[1]
    assert len(told) == 2


def test_waiting_in_vain(nvml):
    nvml.gpus[0].utilization = 97
    clock = Clock()
    with pytest.raises(DeviceError) as caught:
        wait(Demand("gpu:free*4", count=4), 12, clock, [])
    assert "got 'gpu:free*4' after 12 s; expected 4 free GPUs: gpu(0): it is 97 % busy; gpu(1): it would do" in str(caught.value)
    assert clock.slept == [5.0, 5.0, 2.0]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "", "much", "8 apples", "-1GiB", "0", "1e9", b"8GiB"], ids=repr)
def test_sizes_that_are_none(size):
    with pytest.raises(DeviceError, match="min_free_memory"):
        num_bytes(size)
