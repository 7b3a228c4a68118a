import os
import re
from contextlib import contextmanager

import pytest
from gluon_mgpu.devices import free_gpus
from gluon_mgpu.devices.free_gpus import most_free_first, select, wait_for
from gluon_mgpu.errors import DeviceError
from gluon_mgpu.runtime.nvidia import locks
from gluon_mgpu.runtime.nvidia.nvml import Nvml, read_driver
from gluon_mgpu.runtime.nvidia.request import Demand, num_bytes, why_not_free
from gluon_mgpu.runtime.nvidia.visible import visible_gpus

from .conftest import assert_house_style
from .fake_nvml import a100_mig, install, own_locks, v100s

__all__ = ["own_locks"]  # a fixture

GIB = 2**30


@pytest.fixture
def nvml(monkeypatch):
    """Four idle V100s."""
    return install(monkeypatch, v100s(4))


def look():
    return visible_gpus(read_driver(links=False), {}).devices


def runs(number):
    return ""


def numbers(devices):
    return [device.number for device in devices]


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


def test_memory_that_is_asked_for(nvml):
    nvml.gpus[0].used_bytes = 8 * GIB
    nvml.gpus[1].used_bytes = 8 * GIB + 1
    nvml.gpus[2].processes = [(17, "python", GIB)]
    nvml.gpus[3].refuses["nvmlDeviceGetMemoryInfo"] = "NotSupported"
    first, second, third, fourth = look()
    shared, free = (Demand("gpu", free=free, min_free_bytes=8 * GIB) for free in (False, True))
    assert why_not_free(first, shared) == why_not_free(first, free) == ""  # memory that leaves enough hinders nobody
    assert why_not_free(second, shared) == "8.0 GiB of 16.0 GiB are free"
    assert why_not_free(third, shared) == ""
    assert "process 17" in why_not_free(third, free)
    assert "does not report" in why_not_free(fourth, shared)


def test_mig_devices_are_free_one_by_one(monkeypatch):
    gpu = a100_mig()
    gpu.processes = gpu.mig[1].processes = [(17, "python", GIB)]
    install(monkeypatch, [gpu])
    (device,) = look()
    assert why_not_free(device, Demand("gpu:free")) == ""
    (device,) = visible_gpus(read_driver(), {"CUDA_VISIBLE_DEVICES": gpu.mig[1].uuid}).devices
    assert "process 17" in why_not_free(device, Demand("gpu:free"))


def test_the_most_free_come_first(nvml):
    for gpu, used in zip(nvml.gpus, (300, 100, 0, 100)):
        gpu.used_bytes = used * 2**20
    assert numbers(most_free_first(look())) == [2, 1, 3, 0]
    assert numbers(select(look(), Demand("gpu:free"), runs=runs)[0]) == [2, 1, 3, 0]
    assert numbers(select(look(), Demand("gpu:free:2", count=2), runs=runs)[0]) == [2, 1]


def test_named_gpus_keep_their_order(nvml):
    nvml.gpus[1].used_bytes = GIB
    demand = Demand("gpu:3,1", (3, 1), free=False, min_free_bytes=15 * GIB, every=True)
    assert numbers(select(look(), demand, runs=runs)[0]) == [3, 1]
    nvml.gpus[1].used_bytes = GIB + 1
    found, reasons = select(look(), demand, runs=runs)
    assert found == []
    assert reasons == {1: "15.0 GiB of 16.0 GiB are free", 3: "it would do"}
    missing = Demand("gpu:3,9", (3, 9), free=False, min_free_bytes=1, every=True)
    assert select(look(), missing, runs=runs)[1] == {3: "it would do", 9: "CUDA does not see it"}


def test_what_was_taken_is_ours_alone(nvml):
    found, _ = select(look(), Demand("gpu:free:3", count=3), runs=runs)
    assert numbers(found) == [0, 1, 2]
    assert [locks.is_ours(device.uuid) for device in look()] == [True, True, True, False]
    locks._held.clear()  # as another process sees it: the open files lock
    found, reasons = select(look(), Demand("gpu:free"), runs=runs)
    assert numbers(found) == [3]
    assert sorted(reasons) == [0, 1, 2]
    assert all(reason.startswith(f"taken by process {os.getpid()}") for reason in reasons.values())


def test_too_few_take_nothing(nvml):
    nvml.gpus[0].utilization = nvml.gpus[2].utilization = 99
    asked = []
    found, reasons = select(look(), Demand("gpu:free:3", count=3), runs=lambda number: asked.append(number) or "")
    assert found == []
    assert reasons == {0: "it is 99 % busy", 1: "it would do", 2: "it is 99 % busy", 3: "it would do"}
    assert not any(locks.is_ours(device.uuid) for device in look())
    assert asked == []  # an operation takes memory that is not given back while the process waits


def test_gpus_that_mxnet_cannot_run_on_are_left(nvml):
    nvml.gpus[1].total_bytes = 141 * GIB  # it would be the first
    asked = []

    def no_second(number):
        asked.append(number)
        return "no kernel image" if number == 1 else ""

    found, reasons = select(look(), Demand("gpu:free:2", count=2), runs=no_second)
    assert numbers(found) == [0, 2]
    assert reasons == {1: "no kernel image"}
    assert set(asked) == {0, 1, 2}
    assert not locks.is_ours(nvml.gpus[1].uuid)
    assert select(look(), Demand("gpu:1", (1,), every=True), runs=no_second)[0] == []


def test_what_this_process_has_taken_is_free_for_it(nvml):
    select(look(), Demand("gpu:free:1", count=1), runs=runs)
    nvml.gpus[0].used_bytes = 6 * GIB  # ours; a container may hide that
    nvml.gpus[0].utilization = 99
    nvml.gpus[1].utilization = nvml.gpus[2].utilization = nvml.gpus[3].utilization = 99
    assert numbers(select(look(), Demand("gpu:free:1", count=1), runs=runs)[0]) == [0]


def test_one_process_after_the_other_chooses(nvml, monkeypatch):
    order = []

    @contextmanager
    def choosing():
        order.append("begin")
        yield
        order.append("end")

    monkeypatch.setattr(locks, "choosing", choosing)
    monkeypatch.setattr(locks, "claim", lambda uuid: order.append(uuid) or "")
    select(look(), Demand("gpu:free:2", count=2), runs=lambda number: order.append(number) or "")
    assert order == ["begin", nvml.gpus[0].uuid, nvml.gpus[1].uuid, "end", 0, 1]


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
    assert told[0].startswith("waiting for a free GPU, 0 s of 600: gpu(0): process 17 (python) computes there; gpu(1)")
    assert told[0].endswith("Ctrl-C ends it.")
    assert told[1].startswith(f"gpu:free takes gpu(2) (Tesla V100-SXM2-16GB, {device.uuid}, 00000000:20:00.0, 16.0 GiB free)")
    assert "not gpu(0): process 17" in told[1]
    assert len(told) == 2


def test_waiting_tells_what_changes_each_minute_at_most(nvml):
    for gpu in nvml.gpus:
        gpu.utilization = 50
    changes = {f"t{i}": lambda i=i: setattr(nvml.gpus[0], "utilization", 10 + i) for i in range(2, 80)}
    told = []
    with pytest.raises(DeviceError):
        wait(Demand("gpu:free"), 250, Clock(**changes), told)
    seconds = [re.match(r"waiting for a free GPU, (\d+) s of 250: ", line).group(1) for line in told]
    assert seconds == ["0", "60", "120"]  # after second 79 nothing changes


def test_waiting_in_vain(nvml):
    nvml.gpus[0].utilization = 97
    clock = Clock()
    with pytest.raises(DeviceError) as caught:
        wait(Demand("gpu:free:4", count=4), 12, clock, [])
    assert_house_style(caught.value)
    assert "got 'gpu:free:4' after 12 s; expected 4 free GPUs: gpu(0): it is 97 % busy; gpu(1): it would do" in str(caught.value)
    assert clock.slept == [5.0, 5.0, 2.0]
    assert not locks._held


def test_not_waiting(nvml):
    nvml.gpus[1].processes = [(17, "python", GIB)]
    clock = Clock()
    with pytest.raises(DeviceError, match="wait_s=600") as caught:
        wait(Demand("gpu:1", (1,), every=True, min_free_bytes=8 * GIB), 0, clock, [])
    assert_house_style(caught.value)
    assert "expected a free GPU with 8.0 GiB of free memory: gpu(1): process 17 (python) computes there" in str(caught.value)
    assert clock.slept == []


def test_ctrl_c_ends_the_waiting(nvml):
    def interrupt(seconds):
        raise KeyboardInterrupt

    nvml.gpus[0].utilization = 97
    with pytest.raises(KeyboardInterrupt):
        wait_for(look, Demand("x", count=4), runs=runs, wait_s=600, tell=print, sleep=interrupt)
    assert not locks._held


def test_no_gpu_is_not_waited_for(monkeypatch):
    install(monkeypatch, [])
    clock = Clock()
    with pytest.raises(DeviceError, match="MXNet sees none"):
        wait(Demand("gpu:free"), 600, clock, [])
    assert clock.slept == []


def test_the_driver_is_opened_once(nvml, monkeypatch):
    """Each opening takes long where no other program keeps the driver awake."""
    monkeypatch.setattr(free_gpus.mxnet_gpus, "seen_by_cuda", lambda driver: visible_gpus(driver, {}).devices)
    monkeypatch.setattr(free_gpus.mxnet_gpus, "why_not", lambda number: "")
    monkeypatch.setattr(free_gpus, "_EVERY_S", 0.001)
    nvml.gpus[0].utilization = 97
    reads = []
    read = Nvml.read

    def read_four_times(self, **options):
        reads.append(1)
        nvml.gpus[0].utilization = 97 if len(reads) < 4 else 0
        return read(self, **options)

    monkeypatch.setattr(Nvml, "read", read_four_times)
    assert len(free_gpus.acquire(Demand("gpu:free:4", count=4), 60.0, [].append)) == 4
    assert nvml.calls["nvmlInit"] == 1
    assert nvml.users == 0


@pytest.mark.parametrize(
    "size, expected",
    [
        (None, 0),
        (1, 1),
        (8 * GIB, 8 * GIB),
        ("8GiB", 8 * GIB),
        ("8 g", 8 * GIB),
        ("1.5GB", 3 * GIB // 2),
        ("800m", 800 * 2**20),
        ("17", 17),
    ],
)
def test_sizes(size, expected):
    assert num_bytes(size) == expected


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "", "much", "8 apples", "-1GiB", "0", "1e9", b"8GiB"], ids=repr)
def test_sizes_that_are_none(size):
    with pytest.raises(DeviceError, match="min_free_memory") as caught:
        num_bytes(size)
    assert_house_style(caught.value)
