import pytest
from gluon_mgpu.runtime.nvidia.nvml import Gpu, read_driver
from gluon_mgpu.runtime.nvidia.visible import parse_visible, visible_gpus
from hypothesis import given
from hypothesis import strategies as st

from .fake_nvml import h200, install, v100s

UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932f940-0000-0000-0000-000000000001",
    "GPU-0b000000-0000-0000-0000-000000000002",
    "GPU-1c000000-0000-0000-0000-000000000003",
]
GPUS = [Gpu(i, uuid=name, name="Tesla V100") for i, name in enumerate(UUIDS)]


def indices(variable, gpus=GPUS):
    return [gpu.index for gpu in parse_visible(variable, gpus)]


@pytest.mark.parametrize(
    "variable, expected",
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("0,9,1", [0]),
        ("1gpu2,2ampere", [1, 2]),
        ("0,0", []),
        ("0,GPU-0b", [0]),
        (UUIDS[2], [2]),
        (f"{UUIDS[3]},{UUIDS[0]}", [3, 0]),
        ("GPU-8932f937", [0]),
        ("GPU-0b,GPU-8932f94", [2, 1]),
        ("GPU-8932f9", []),
        (UUIDS[2].upper() + "x", [2]),  # these four as the driver of an H100 does
        ("GPU-0b*", []),
        (f" {UUIDS[2]}", []),
        ("\t+2", [2]),
        ("GPU-0b,GPU-none,GPU-1c", [2]),
        ("MIG-none", []),
    ],
)
def test_what_the_variable_names(variable, expected):
    assert indices(variable) == expected


@given(st.text(alphabet="0123456789-,GPUMI/abcdef +x", max_size=30))
def test_any_text_names_different_gpus_that_are_there(text):
    found = indices(text)
    assert len(set(found)) == len(found)
    assert set(found) <= {0, 1, 2, 3}


def test_the_last_four_of_eight(monkeypatch):
    install(monkeypatch, v100s(8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    visible = visible_gpus(read_driver())
    assert [(device.number, device.gpu.index) for device in visible.devices] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert not visible.doubt


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
    assert [device.gpu.name for device in visible_gpus(driver, by_name).devices] == ["NVIDIA H200", "Tesla V100-SXM2-16GB"]
    assert not visible_gpus(driver, {"CUDA_VISIBLE_DEVICES": ""}).doubt
