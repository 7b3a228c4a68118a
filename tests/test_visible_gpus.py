import ctypes
import uuid

import pytest
from gluon_mgpu.runtime.nvidia import visible as module
from gluon_mgpu.runtime.nvidia.nvml import Gpu, read_driver
from gluon_mgpu.runtime.nvidia.visible import ask_cuda, parse_visible, visible_gpus
from hypothesis import given
from hypothesis import strategies as st

from .fake_nvml import FakeMig, a100_mig, h200, install, v100s

UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932f940-0000-0000-0000-000000000001",
    "GPU-0b000000-0000-0000-0000-000000000002",
    "GPU-1c000000-0000-0000-0000-000000000003",
]
GPUS = [Gpu(i, uuid=name, name="Tesla V100") for i, name in enumerate(UUIDS)]


def indices(variable, gpus=GPUS):
    return [gpu.index for gpu, _ in parse_visible(variable, gpus)]


@pytest.mark.parametrize(
    "variable, expected",
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("0,9,1", [0]),
        (" 3 , 0 ", [3, 0]),
        ("+2", [2]),
        ("1gpu2,2ampere", [1, 2]),
        ("0,,1", [0]),
        ("0,0", []),
        ("0,1,0", []),
        ("0,-1,0", [0]),
        ("0,GPU-0b", [0]),
        (UUIDS[2], [2]),
        (f"{UUIDS[3]},{UUIDS[0]}", [3, 0]),
        ("GPU-8932f937", [0]),
        ("GPU-0b,GPU-8932f94", [2, 1]),
        ("GPU-8932f9", []),
        ("GPU-0b,GPU-8932f9,GPU-1c", [2]),
        ("GPU-0b,GPU-none,GPU-1c", [2]),
        ("GPU-0b,1", [2]),
        ("GPU-0b,GPU-0b000000", []),
        ("MIG-none", []),
    ],
)
def test_what_the_variable_names(variable, expected):
    assert indices(variable) == expected


@given(st.lists(st.integers(0, 3), unique=True))
def test_different_numbers_are_taken_in_their_order(numbers):
    assert indices(",".join(map(str, numbers))) == numbers


@given(st.lists(st.integers(0, 3), unique=True), st.sampled_from(["-1", "4", "x", "", "GPU-0b"]), st.lists(st.integers(0, 3)))
def test_what_names_nothing_ends_the_list(before, wrong, after):
    text = ",".join([*map(str, before), wrong, *map(str, after)])
    if before or wrong != "GPU-0b":
        assert indices(text) == before


@given(st.permutations(range(4)), st.integers(1, 4), st.data())
def test_prefixes_name_what_whole_uuids_name(order, count, data):
    def cut(name):
        fewest = next(n for n in range(5, len(name) + 1) if sum(other.startswith(name[:n]) for other in UUIDS) == 1)
        return name[: data.draw(st.integers(fewest, len(name)))]

    assert indices(",".join(cut(UUIDS[i]) for i in order[:count])) == list(order[:count])


@given(st.lists(st.integers(0, 3), min_size=1), st.integers(0, 3))
def test_naming_one_twice_hides_all(numbers, again):
    numbers = [*numbers, again] if again in numbers else [*numbers, numbers[0]]
    assert indices(",".join(map(str, numbers))) == []


@given(st.text(alphabet="0123456789-,GPUMI/abcdef +x", max_size=30))
def test_any_text_names_different_gpus_that_are_there(text):
    found = indices(text)
    assert len(set(found)) == len(found)
    assert set(found) <= {0, 1, 2, 3}


def test_the_last_four_of_eight(monkeypatch):
    install(monkeypatch, v100s(8))
    visible = visible_gpus(read_driver(), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [(device.number, device.gpu.index) for device in visible.devices] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert not visible.doubt


def test_the_environment_is_asked_by_default(monkeypatch):
    install(monkeypatch, v100s(3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [device.gpu.index for device in visible_gpus(read_driver()).devices] == [2, 0]


def test_numbers_are_in_doubt_where_gpus_differ(monkeypatch):
    install(monkeypatch, [*v100s(2), h200()])
    driver = read_driver()
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "1,0"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}):
        doubt = visible_gpus(driver, environ).doubt
        assert "NVIDIA H200, Tesla V100-SXM2-16GB" in doubt
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in doubt
    by_name = {"CUDA_VISIBLE_DEVICES": f"{h200().uuid},GPU-8932f900"}
    assert not visible_gpus(driver, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).doubt
    assert not visible_gpus(driver, by_name).doubt
    assert [device.name for device in visible_gpus(driver, by_name).devices] == ["NVIDIA H200", "Tesla V100-SXM2-16GB"]
    assert not visible_gpus(driver, {"CUDA_VISIBLE_DEVICES": ""}).doubt


def test_a_mig_device_is_alone(monkeypatch):
    gpu = a100_mig()
    install(monkeypatch, [*v100s(2), gpu])
    driver = read_driver()
    old = f"MIG-{gpu.uuid}/8/0"
    for variable, expected in [
        (None, gpu.mig[0].uuid),
        ("0,2", gpu.mig[0].uuid),
        (gpu.uuid, gpu.mig[0].uuid),
        (gpu.mig[1].uuid, gpu.mig[1].uuid),
        (f"{gpu.mig[1].uuid},{gpu.mig[0].uuid}", gpu.mig[1].uuid),
        (old, gpu.mig[1].uuid),
    ]:
        environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
        (device,) = visible_gpus(driver, environ).devices
        assert (device.number, device.uuid) == (0, expected), variable
        assert (device.total_bytes, device.utilization) == (5 * 2**30, None)
    for variable in (f"MIG-{gpu.uuid}/9/0", "MIG-c7384736", "-1"):
        assert visible_gpus(driver, {"CUDA_VISIBLE_DEVICES": variable}).devices == ()
    (device,) = visible_gpus(driver, {"CUDA_VISIBLE_DEVICES": "1"}).devices
    assert (device.uuid, device.mig) == (v100s(2)[1].uuid, None)


def test_a_gpu_in_mig_mode_that_is_not_cut_yet(monkeypatch):
    install(monkeypatch, [a100_mig(mig=[]), *v100s(1)])
    assert [device.name for device in visible_gpus(read_driver(), {}).devices] == ["Tesla V100-SXM2-16GB"]


def test_what_cuda_says_goes_before_the_environment(monkeypatch):
    parts = [FakeMig("MIG-c7384736-a75d-5afc-978f-000000000000")]
    fakes = [*v100s(2), h200(), a100_mig(mig=parts)]
    install(monkeypatch, fakes)
    driver = read_driver()
    said = [fakes[2].uuid[4:], fakes[0].uuid[4:]]
    visible = visible_gpus(driver, {"CUDA_VISIBLE_DEVICES": "1"}, cuda_uuids=said)
    assert [device.uuid for device in visible.devices] == [fakes[2].uuid, fakes[0].uuid]
    assert not visible.doubt
    (device,) = visible_gpus(driver, {}, cuda_uuids=[parts[0].uuid[4:]]).devices
    assert device.mig.uuid == parts[0].uuid
    for unknown in (
        ["not-there"],
        [fakes[3].uuid[4:]],
    ):  # the whole of a GPU in MIG mode: an old driver, which parts have one UUID
        (device,) = visible_gpus(driver, {"CUDA_VISIBLE_DEVICES": "GPU-8932f901"}, cuda_uuids=unknown).devices
        assert device.uuid == fakes[1].uuid


class FakeCuda:
    """libcuda with these devices; `fails` names a function that returns an error."""

    def __init__(self, uuids, fails="", old=False):
        self.uuids, self.fails = uuids, fails
        if not old:
            self.cuDeviceGetUuid_v2 = self.cuDeviceGetUuid

    def cuInit(self, flags):  # noqa: N802
        return int(self.fails == "cuInit")

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = len(self.uuids)
        return int(self.fails == "cuDeviceGetCount")

    def cuDeviceGet(self, device, number):  # noqa: N802
        device._obj.value = number + 10  # a handle need not be the number
        return int(self.fails == "cuDeviceGet")

    def cuDeviceGetUuid(self, number, device):  # noqa: N802
        number._obj[:] = uuid.UUID(self.uuids[device.value - 10]).bytes
        return int(self.fails == "cuDeviceGetUuid")


@pytest.mark.parametrize("old", [False, True])
def test_cuda_is_asked(old):
    names = [name[4:] for name in UUIDS]
    assert ask_cuda(FakeCuda(names, old=old)) == names


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid"])
def test_cuda_that_fails_says_nothing(function):
    assert ask_cuda(FakeCuda([UUIDS[0][4:]], fails=function)) is None


def test_no_cuda_says_nothing(monkeypatch):
    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", none)
    assert ask_cuda() is None
    assert ask_cuda(object()) is None
    assert ctypes.CDLL is none
