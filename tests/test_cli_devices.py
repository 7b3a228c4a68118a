import json

import pytest

from .fake_nvml import h200, install, let_mxnet_see, v100s
from .test_cli import invoke, run

GIB = 2**30


@pytest.fixture
def nvml(monkeypatch):
    """Four V100s, of which the third is in use; MXNet sees the last two as gpu(0) and gpu(1)."""
    fake = install(monkeypatch, v100s(4))
    fake.gpus[2].processes, fake.gpus[2].used_bytes = [(17, "python", 9 * GIB)], 9 * GIB
    fake.gpus[3].used_bytes = 300 * 2**20
    let_mxnet_see(monkeypatch, 2, {1: "A test operation failed"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    return fake


def test_gpus_have_their_names(nvml):
    lines = run("devices").splitlines()
    (row,) = [line for line in lines if nvml.gpus[3].uuid in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["gpu(0)", "3", nvml.gpus[3].uuid, "28:00.0"]
    told = next(line for line in lines if "gpu(0)" in line)
    assert [cell.strip() for cell in told.strip("│").split("│")][2:5] == ["16.0 GiB", "15.7 GiB", "yes"]
    (hidden,) = [line for line in lines if nvml.gpus[1].uuid in line]
    assert hidden.strip("│").split("│")[0].strip() == "-"
    (told,) = [line for line in lines if "gpu(1)" in line and "GiB" in line]
    assert [cell.strip() for cell in told.strip("│").split("│")][4:] == ["no", "A test"]
    assert "CUDA_DEVICE_ORDER" not in "".join(lines)


def test_gpus_have_their_names_in_json(nvml):
    _, first, second, *hidden = json.loads(run("devices", "--json"))
    assert (first["name"], first["index"], first["uuid"]) == ("gpu(0)", 3, nvml.gpus[3].uuid)
    assert (second["name"], second["free_bytes"], second["pci_bus_id"]) == ("gpu(1)", 7 * GIB, nvml.gpus[2].bus_id)
    assert [device["index"] for device in hidden] == [0, 1]


def test_numbers_in_doubt_are_reported(nvml, monkeypatch):
    nvml.gpus.append(h200())
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert run("devices").count("CUDA_DEVICE_ORDER=PCI_BUS_ID") == 1


@pytest.mark.parametrize(
    "program", [["train", "resnet18"], ["train", "seq2seq"], ["predict", "resnet18"], ["translate"]], ids=" ".join
)
def test_programs_choose_gpus(monkeypatch, program):
    """Each gives use_devices what it was asked for, and before it has made a file."""
    asked = []

    def refuse(spec, **options):
        asked.append((spec, options))
        raise KeyboardInterrupt

    monkeypatch.setattr("gluon_mgpu.devices.select.use_devices", refuse)
    result = invoke(*program, "--devices", "gpu:free*2", "--min-free-memory", "8GiB")
    one_thread = {"one_thread": False} if program[0] == "train" else {}
    assert asked == [("gpu:free*2", {"min_free_memory": "8GiB", **one_thread})]
    assert result.exit_code == 130


def test_programs_are_told_what_is_not_free(nvml):
    told = run("train", "resnet18", "--devices", "gpu:free*2", exit_code=1)
    assert "Error: use_devices: got 'gpu:free*2'; expected 2 free GPUs: gpu(0): it would do; gpu(1): process 17" in told
