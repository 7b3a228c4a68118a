import stat
import tempfile

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.devices import mxnet_gpus
from gluon_mgpu.errors import DeviceError
from gluon_mgpu.runtime.nvidia import locks

from .conftest import assert_house_style
from .fake_nvml import a100_mig, h200, install, v100s
from .test_fat_binary import CUBIN, binary, entry, library


@pytest.fixture
def gpus(monkeypatch):
    """A machine with eight GPUs, of which the last cannot run: contexts are made, and nothing runs on them."""
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 8)
    monkeypatch.setattr(mxnet_gpus, "why_not", lambda i: "A test operation failed: no kernel image." if i == 7 else "")


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    """Eight V100s that the driver describes, all idle, MXNet sees, and can run on; locks of this test alone."""
    fake = install(monkeypatch, v100s(8))
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 8)
    monkeypatch.setattr(mxnet_gpus, "why_not", lambda i: "")
    monkeypatch.setattr(mxnet_gpus, "cuda_uuids", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(locks, "_held", {})
    yield fake
    for uuid in list(locks._held):
        locks.release(uuid)


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """A driver that lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H100, 81559\\nTesla V100-SXM2-16GB, 16160\\n'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    "spec, ids",
    [
        ("cpu", [0]),
        ("cpu:1", [0]),
        ("cpu:3", [0, 1, 2]),
        (" CPU:2 ", [0, 1]),
        ("cpu*3", [0, 1, 2]),
        (" CPU * 2 ", [0, 1]),
        ("cpu:0", [0]),
        ("cpu:0,cpu:3", [0, 3]),
        ("cpu:1,2", [1, 2]),
        ("cpu:1-3", [1, 2, 3]),
        (mx.cpu(2), [2]),
        ([mx.cpu(2), mx.cpu(1)], [2, 1]),
        ((mx.cpu(1),), [1]),
    ],
)
def test_cpu_specs(spec, ids):
    assert mgpu.resolve_devices(spec) == [mx.cpu(i) for i in ids]


@pytest.mark.skipif(bool(mx.context.num_gpus()), reason="there are GPUs")
def test_without_a_gpu():
    assert mgpu.resolve_devices() == mgpu.resolve_devices("auto") == [mx.cpu(0)]
    assert mgpu.resolve_devices(3) == mgpu.resolve_devices("3") == [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    assert mgpu.try_all_gpus() == [mx.cpu()]
    assert mgpu.try_gpu() == mgpu.try_gpu(5) == mx.cpu()
    for spec in ("gpu", "gpu:0", "gpu*2", "cpu:0,gpu:0", [mx.gpu(0)], mx.gpu(1)):
        with pytest.raises(DeviceError, match=r"holds no GPU code.*cu112") as caught:
            mgpu.resolve_devices(spec)
        assert_house_style(caught.value)


def test_with_gpus(gpus):
    assert mgpu.resolve_devices() == mgpu.resolve_devices("auto") == [mx.gpu(i) for i in range(7)]
    assert mgpu.resolve_devices("gpu:4-6") == [mx.gpu(4), mx.gpu(5), mx.gpu(6)]
    assert mgpu.resolve_devices("gpu:0,2") == [mx.gpu(0), mx.gpu(2)]
    assert mgpu.resolve_devices("gpu:1") == [mx.gpu(1)]
    assert mgpu.resolve_devices("cpu:0,gpu:0") == [mx.cpu(0), mx.gpu(0)]
    assert mgpu.resolve_devices(2) == mgpu.resolve_devices("gpu*2") == [mx.gpu(0), mx.gpu(1)]
    assert mgpu.resolve_devices("cpu*2") == [mx.cpu(0), mx.cpu(1)]
    assert mgpu.try_gpu(6) == mx.gpu(6)
    assert mgpu.try_gpu(7) == mx.cpu()
    assert mgpu.try_all_gpus() == [mx.gpu(i) for i in range(7)]


@pytest.mark.parametrize(
    "spec, told",
    [("gpu", "no kernel image"), ("gpu:7", "no kernel image"), ("gpu:8", "got gpu(8)"), (9, "at most 7"), ("gpu*9", "at most 7")],
)
def test_gpus_that_cannot_be_had(gpus, spec, told):
    with pytest.raises(DeviceError) as caught:
        mgpu.resolve_devices(spec)
    assert told in str(caught.value)
    assert_house_style(caught.value)


BAD = ["tpu", "", "gpu:", "cpu:-1", "cpu:x", "gpu:3-1", "cpu:1-2-3", "1,2", ",", "cpu:0,,cpu:1", "cpu:99999999999", "cpu:0-99999"]
BAD += [
    "cpu*0",
    "cpu*",
    "gpu*0",
    "*2",
    "gpu*2,cpu*2",
    "cpu*99999",
    "gpu:*2",
    "gpu:free*0",
]
BAD += ["gpu:free:0", "gpu:free:", "gpu:free:two", "gpu:free,cpu:0", "free", "gpu:free:1,2", "cpu:free"]
BAD += [
    0,
    -1,
    True,
    1.5,
    [],
    (),
    [mx.cpu(0), mx.cpu(0)],
    ["cpu:0"],
    {"cpu": 1},
    "cpu:0,cpu:0",
    [mx.cpu_pinned(0)],
    [0, 1],
    b"cpu",
]


@pytest.mark.parametrize("spec", BAD, ids=repr)
def test_bad_specs(spec):
    with pytest.raises(DeviceError) as caught, mgpu.use_devices(spec):
        pass
    assert_house_style(caught.value)


def test_a_number_is_not_a_count(gpus):
    with pytest.raises(DeviceError, match=r"'gpu:9' is a number, not a count: 'gpu\*9' requests that many GPUs") as caught:
        mgpu.resolve_devices("gpu:9")
    assert_house_style(caught.value)
    for spec in ("gpu:7,9", [mx.gpu(9)]):
        with pytest.raises(DeviceError) as caught:
            mgpu.resolve_devices(spec)
        assert "count" not in str(caught.value)


def test_the_first_is_the_default_context_inside():
    assert mx.current_context() == mx.cpu(0)
    with mgpu.use_devices("cpu:1-2") as ctx:
        assert ctx == [mx.cpu(1), mx.cpu(2)]
        assert mx.nd.ones((2,)).context == mx.cpu(1)
        with mgpu.use_devices("cpu:3,cpu:0"):
            assert mx.current_context() == mx.cpu(3)
        assert mx.current_context() == mx.cpu(1)
    assert mx.current_context() == mx.cpu(0)


def test_leaving_raises_what_a_device_still_owes():
    with pytest.raises(mx.MXNetError), mgpu.use_devices("cpu:2") as ctx:
        mx.nd.random.normal(loc=0, scale=-1, shape=(2,), ctx=ctx[1])
    mx.nd.waitall()  # nothing is left behind


def test_an_error_of_the_block_comes_first(caplog):
    with pytest.raises(KeyError, match="mine"), mgpu.use_devices("cpu:2") as ctx:
        mx.nd.random.normal(loc=0, scale=-1, shape=(2,), ctx=ctx[1])
        raise KeyError("mine")
    assert "a device reported" in caplog.text
    assert mx.current_context() == mx.cpu(0)
    mx.nd.waitall()


def test_leaving_waits(monkeypatch):
    waited = []
    monkeypatch.setattr(mx.nd, "waitall", lambda: waited.append(1))
    with mgpu.use_devices("cpu:2"):
        assert not waited
    assert waited


GIB = 2**30


def gpu_ids(spec, **options):
    contexts = mgpu.resolve_devices(spec, **options)
    assert all(context.device_type == "gpu" for context in contexts)
    return [context.device_id for context in contexts]


def test_free_gpus(nvml, caplog):
    nvml.gpus[0].processes = nvml.gpus[2].processes = [(17, "python", GIB)]
    nvml.gpus[5].used_bytes, nvml.gpus[1].used_bytes = 200 * 2**20, 100 * 2**20
    with caplog.at_level("INFO", "gluon_mgpu"):
        assert gpu_ids("gpu:free") == [3, 4, 6, 7, 1, 5]
    assert "gpu:free takes gpu(3) (Tesla V100-SXM2-16GB, GPU-8932f903" in caplog.text
    assert "not gpu(0): process 17 (python) computes there" in caplog.text
    assert gpu_ids(" GPU:free : 2 ") == gpu_ids("gpu:free*2") == [3, 4]
    assert gpu_ids("gpu:free", min_free_memory="15.9GiB") == [3, 4, 6, 7, 1]
    told = []
    assert gpu_ids("gpu:free:1", tell=told.append) == [3]
    assert len(told) == 1


def test_too_few_free_gpus(nvml):
    for gpu in nvml.gpus[1:]:
        gpu.utilization = 90
    with pytest.raises(DeviceError) as caught, mgpu.use_devices("gpu:free:2", wait_s=0):
        pass
    assert_house_style(caught.value)
    assert "expected 2 free GPUs: gpu(0): it would do; gpu(1): it is 90 % busy" in str(caught.value)


def test_memory_that_must_be_free(nvml):
    nvml.gpus[0].used_bytes = nvml.gpus[3].used_bytes = 10 * GIB
    nvml.gpus[4].processes = [(17, "python", GIB)]  # may be shared: nobody has asked for a free one
    assert gpu_ids("auto", min_free_memory="8GiB") == gpu_ids(None, min_free_memory=8 * GIB) == [1, 2, 4, 5, 6, 7]
    assert gpu_ids(2, min_free_memory="8GiB") == gpu_ids("2", min_free_memory="8GiB") == [1, 2]
    assert gpu_ids("gpu*2", min_free_memory="8GiB") == [1, 2]
    assert gpu_ids("gpu:2,1", min_free_memory="8GiB") == gpu_ids([mx.gpu(2), mx.gpu(1)], min_free_memory="8GiB") == [2, 1]
    assert gpu_ids(mx.gpu(4), min_free_memory="8GiB") == [4]
    assert not locks._held
    for spec, told in [
        ("gpu", "expected 8 GPUs with 8.0 GiB of free memory: gpu(0): 6.0 GiB of 16.0 GiB are free; gpu(1): it would do"),
        ("gpu:0", "expected a GPU with 8.0 GiB of free memory: gpu(0): 6.0 GiB of 16.0 GiB are free"),
        (7, "expected 7 GPUs with 8.0 GiB of free memory"),
        ("gpu*7", "expected 7 GPUs with 8.0 GiB of free memory"),
        ("gpu:8", "expected one of the GPUs that MXNet can see"),
    ]:
        with pytest.raises(DeviceError) as caught:
            mgpu.resolve_devices(spec, min_free_memory="8GiB")
        assert told in str(caught.value)
        assert_house_style(caught.value)


def test_auto_takes_the_cpu_where_memory_is_short(nvml, caplog):
    assert mgpu.resolve_devices("auto", min_free_memory="17GiB") == [mx.cpu(0)]
    assert "auto takes the CPU; not gpu(0): 16.0 GiB of 16.0 GiB are free" in caplog.text


def test_waiting_means_free(nvml):
    nvml.gpus[2].processes = [(17, "python", GIB)]
    assert gpu_ids("gpu:2,1", min_free_memory=GIB) == [2, 1]
    assert gpu_ids("gpu:1", wait_s=0) == [1]
    assert gpu_ids("auto", wait_s=0) == [0, 1, 3, 4, 5, 6, 7]
    assert gpu_ids(2, wait_s=0) == [0, 1]
    with pytest.raises(DeviceError, match=r"expected 2 free GPUs: gpu\(1\): it would do; gpu\(2\): process 17"):
        mgpu.resolve_devices("gpu:2,1", wait_s=0)


@pytest.mark.skipif(bool(mx.context.num_gpus()), reason="there are GPUs")
def test_free_gpus_where_there_is_none():
    for spec, options in [
        ("gpu:free", {}),
        ("gpu:free:2", {"wait_s": 600}),
        ("auto", {"wait_s": 1}),
        (1, {"min_free_memory": 1}),
    ]:
        with pytest.raises(DeviceError, match="holds no GPU code") as caught:
            mgpu.resolve_devices(spec, **options)
        assert_house_style(caught.value)
    assert mgpu.resolve_devices("auto", min_free_memory="8GiB") == [mx.cpu(0)]


@pytest.mark.parametrize("options", [{"wait_s": 5}, {"min_free_memory": "8GiB"}], ids=["wait", "memory"])
@pytest.mark.parametrize("spec", ["cpu", "cpu:2", "cpu:0,gpu:0", [mx.cpu(0)]], ids=repr)
def test_cpus_are_not_asked_for_free_memory(nvml, spec, options):
    with pytest.raises(DeviceError, match="expected only GPUs") as caught:
        mgpu.resolve_devices(spec, **options)
    assert_house_style(caught.value)


@pytest.mark.parametrize("wait_s", [-1, float("nan"), float("inf"), True, "5"], ids=repr)
def test_times_that_are_none(nvml, wait_s):
    with pytest.raises(DeviceError, match="wait_s") as caught:
        mgpu.resolve_devices("gpu:free", wait_s=wait_s)
    assert_house_style(caught.value)


@pytest.mark.parametrize("how, told", [({"missing": True}, r"gluon_mgpu\[gpu\]"), ({"error": "DriverNotLoaded"}, "modprobe")])
def test_nobody_tells_what_is_free(nvml, monkeypatch, how, told):
    install(monkeypatch, **how)
    with pytest.raises(DeviceError, match=told) as caught:
        mgpu.resolve_devices("gpu:free")
    assert_house_style(caught.value)


def test_free_gpus_among_those_that_cuda_shows(nvml, monkeypatch):
    """The last four of eight: MXNet numbers them from 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 4)
    nvml.gpus[5].processes = [(17, "python", GIB)]
    assert gpu_ids("gpu:free") == [0, 2, 3]
    assert locks.is_ours(nvml.gpus[6].uuid)


def test_numbers_that_nobody_can_tell(nvml, monkeypatch):
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 5)
    with pytest.raises(DeviceError, match="got 5 GPUs from MXNet and 8 from the driver") as caught:
        mgpu.resolve_devices("gpu:free")
    assert_house_style(caught.value)
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 9)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    nvml.gpus.append(h200())
    with pytest.raises(DeviceError, match="Set CUDA_DEVICE_ORDER=PCI_BUS_ID") as caught:
        mgpu.resolve_devices("gpu:free")
    assert_house_style(caught.value)
    said = tuple(gpu.uuid[4:] for gpu in [nvml.gpus[8], *nvml.gpus[:8]])  # CUDA itself clears it up: the fastest is first
    monkeypatch.setattr(mxnet_gpus, "cuda_uuids", lambda: said)
    monkeypatch.setattr(mxnet_gpus, "why_not", lambda i: "no kernel image" if i == 0 else "")
    assert gpu_ids("gpu:free:2") == [1, 2]


@pytest.mark.parametrize("i", [-1, -5])
def test_try_gpu_takes_no_negative_number(i):
    with pytest.raises(DeviceError):
        mgpu.try_gpu(i)


def test_the_cpu_is_described():
    cpu = mgpu.describe_devices()[0]
    assert (cpu.name, cpu.usable, cpu.reason) == ("cpu(0)", True, "")
    assert f"{mgpu.runtime.num_cores()} cores" in cpu.description
    assert 2**20 < cpu.free_bytes < cpu.memory_bytes
    assert cpu.memory_bytes > 2**28


@pytest.mark.skipif(mx.runtime.Features().is_enabled("CUDA"), reason="the wheel holds GPU code")
def test_gpus_that_the_wheel_holds_no_code_for(nvidia_smi):
    _, first, second = mgpu.describe_devices()
    assert (first.name, first.description, first.memory_bytes, first.usable) == ("-", "NVIDIA H100", 81559 * 2**20, False)
    assert second.reason == first.reason == f"The installed mxnet {mx.__version__} holds no GPU code."
    assert first.note == second.note  # printed once
    assert "pip install 'gluon_mgpu[cu112]'" in second.note and "nvcr.io/nvidia/mxnet:24.06-py3" in second.note


def test_gpus_that_mxnet_sees(gpus, monkeypatch):
    monkeypatch.setattr(mxnet_gpus, "nvidia_smi", lambda: [(f"GPU {i}", 2**30) for i in range(8)])
    found = mgpu.describe_devices()[1:]
    assert [device.name for device in found] == [f"gpu({i})" for i in range(8)]
    assert [device.usable for device in found] == [True] * 7 + [False]
    assert "no kernel image" in found[7].reason


def test_gpus_that_the_driver_describes(nvml, monkeypatch):
    monkeypatch.setattr(mxnet_gpus, "why_not", lambda i: "no kernel image" if i == 3 else "")
    nvml.gpus[2].used_bytes = GIB
    found = mgpu.describe_devices()[1:]
    assert [device.name for device in found] == [f"gpu({i})" for i in range(8)]
    assert [device.usable for device in found] == [i != 3 for i in range(8)]
    third = found[2]
    assert (third.description, third.memory_bytes, third.free_bytes) == ("Tesla V100-SXM2-16GB", 16 * GIB, 15 * GIB)
    assert (third.index, third.uuid, third.pci_bus_id) == (2, nvml.gpus[2].uuid, "00000000:20:00.0")
    assert third.note == ""


def test_numbers_of_mxnet_and_of_the_driver(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,4")
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 2)
    monkeypatch.setattr(mx.runtime.Features, "is_enabled", lambda self, name: True)
    found = mgpu.describe_devices()[1:]
    assert [(device.name, device.index) for device in found[:2]] == [("gpu(0)", 7), ("gpu(1)", 4)]
    assert [(device.name, device.index) for device in found[2:]] == [("-", i) for i in (0, 1, 2, 3, 5, 6)]
    assert all(device.reason == "CUDA_VISIBLE_DEVICES=7,4 lets MXNet see 2 of 8." for device in found[2:])


def test_numbers_in_doubt_are_noted(nvml, monkeypatch):
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 9)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    nvml.gpus.append(h200())
    assert all("CUDA_DEVICE_ORDER=PCI_BUS_ID" in device.note for device in mgpu.describe_devices()[1:])
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 5)  # and where the two do not agree at all
    found = mgpu.describe_devices()[1:]
    assert [device.name for device in found] == [*(f"gpu({i})" for i in range(5)), *["-"] * 9]
    assert all(device.uuid is None for device in found[:5])


def test_mig_devices_are_listed(nvml, monkeypatch):
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 1)
    nvml.gpus[:] = [a100_mig()]
    first, second = mgpu.describe_devices()[1:]
    assert (first.name, first.memory_bytes, first.uuid) == ("gpu(0)", 5 * GIB, nvml.gpus[0].mig[0].uuid)
    assert second.name == "-"
    assert "one part of a GPU" in second.reason


@pytest.mark.skipif(mx.runtime.Features().is_enabled("CUDA"), reason="the wheel holds GPU code")
def test_gpus_of_the_driver_that_the_wheel_holds_no_code_for(monkeypatch):
    install(monkeypatch, v100s(2))
    found = mgpu.describe_devices()[1:]
    assert [(device.name, device.index, device.usable) for device in found] == [("-", 0, False), ("-", 1, False)]
    assert all("holds no GPU code" in device.reason for device in found)
    assert all(device.note == "Run pip uninstall mxnet, then pip install 'gluon_mgpu[cu112]'." for device in found)


@pytest.mark.skipif(mx.runtime.Features().is_enabled("CUDA"), reason="the wheel holds GPU code")
def test_an_error_on_a_machine_with_an_h200_names_the_builds_for_it(monkeypatch):
    install(monkeypatch, [h200(), h200()])
    with pytest.raises(DeviceError, match=r"mxnet:24.06-py3.*from source.*smolix/mxnet") as caught:
        mgpu.resolve_devices("gpu")
    assert "cu112" not in str(caught.value)
    assert_house_style(caught.value)
    assert "535.104.05 is new enough" in mgpu.describe_devices()[1].note


@pytest.mark.skipif(mx.runtime.Features().is_enabled("CUDA"), reason="the wheel holds GPU code")
def test_an_error_on_a_machine_without_a_gpu_says_so(monkeypatch):
    install(monkeypatch, [], error="LibraryNotFound")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DeviceError, match=r"driver lists no GPU here.*driver 545.*CUDA 11.8.*CUDA 13, driver 590") as caught:
        mgpu.resolve_devices("gpu")
    assert_house_style(caught.value)


@pytest.mark.skipif(mx.runtime.Features().is_enabled("CUDA"), reason="the wheel holds GPU code")
def test_the_advice_for_each_of_several_kinds_of_gpu_names_it(monkeypatch):
    install(monkeypatch, [h200(), *v100s(2)])
    shown = CliRunner().invoke(main, ["devices"]).output
    assert "\nNVIDIA H200:\nGet an MXNet for Hopper" in shown and "\nTesla V100-SXM2-16GB:\nRun pip uninstall" in shown
    install(monkeypatch, v100s(2))
    assert "Tesla V100-SXM2-16GB:" not in CliRunner().invoke(main, ["devices"]).output


@pytest.fixture
def visible_h200(monkeypatch):
    """A GPU that MXNet sees, but on which its operations fail."""
    install(monkeypatch, [h200()])
    monkeypatch.setattr(mxnet_gpus, "num_gpus", lambda: 1)
    monkeypatch.setattr(mxnet_gpus, "why_not", lambda i: "A test operation failed: no kernel image is available.")
    monkeypatch.setattr(mxnet_gpus, "cuda_uuids", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(mxnet_gpus, "what_to_do", mxnet_gpus.what_to_do.__wrapped__)  # nothing is kept from another test


def test_a_gpu_without_code_in_the_library_names_the_builds_for_it(visible_h200):
    with pytest.raises(DeviceError, match=r"no kernel image.*no code for compute capability 9.0 \(Hopper\).*24.06") as caught:
        mgpu.resolve_devices("gpu")
    assert_house_style(caught.value)
    (found,) = mgpu.describe_devices()[1:]
    assert found.reason == "A test operation failed: no kernel image is available."
    assert "mxnet:24.06-py3" in found.note


def test_a_gpu_that_fails_in_spite_of_code_for_it_gets_no_advice_about_builds(visible_h200, monkeypatch, tmp_path):
    path = library(tmp_path / "libmxnet.so", binary(entry(CUBIN, 90)))
    monkeypatch.setattr(mxnet_gpus, "mxnet_library", lambda: str(path))
    assert mxnet_gpus.what_to_do(0) == ""
    (tmp_path / "libmxnet.so").write_bytes(b"")
    assert mxnet_gpus.what_to_do(0) == ""  # a library that cannot be read accuses no GPU
    assert "gluon-mgpu doctor" in mxnet_gpus.what_to_do(1)  # which the driver does not list


def test_gpus_that_an_environment_variable_hides(gpus, monkeypatch):
    monkeypatch.setattr(mxnet_gpus, "nvidia_smi", lambda: [(f"GPU {i}", 2**30) for i in range(10)])
    monkeypatch.setattr(mx.runtime.Features, "is_enabled", lambda self, name: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    hidden = mgpu.describe_devices()[-1]
    assert (hidden.usable, hidden.reason) == (False, "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 lets MXNet see 8 of 10.")


@pytest.mark.parametrize("script", ["exit 9", "echo nonsense", "exit 0"])
def test_a_broken_driver_program_lists_nothing(monkeypatch, tmp_path, script):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert mxnet_gpus.nvidia_smi() == []


@pytest.mark.gpu
def test_a_gpu_runs():
    with mgpu.use_devices("gpu") as ctx:
        assert [mx.nd.ones((2,), ctx=context).asnumpy().tolist() for context in ctx] == [[1.0, 1.0]] * len(ctx)


def test_digits_of_other_scripts_are_no_counts():
    with pytest.raises(DeviceError):
        mgpu.resolve_devices("\u00b2")


# What MXNet itself answers, without the stand-ins above


@pytest.mark.skipif(bool(mx.context.num_gpus()), reason="there are GPUs")
def test_a_gpu_is_usable_if_an_operation_gives_the_right_numbers(monkeypatch):
    ask = mxnet_gpus.why_not.__wrapped__
    assert ask(0).startswith("A test operation failed: ") and "\n" not in ask(0)
    monkeypatch.setattr(mx, "gpu", mx.cpu)  # a device that works
    assert ask(0) == ""
    monkeypatch.setattr(mx.nd, "ones", mx.nd.zeros)  # a kernel that did not run leaves old memory
    assert "gave a wrong result" in ask(0)


def test_a_driver_that_does_not_work_shows_no_gpu(monkeypatch):
    def failing():
        raise mx.MXNetError("CUDA: initialization error")

    monkeypatch.setattr(mx.context, "num_gpus", failing)
    assert mxnet_gpus.num_gpus.__wrapped__() == 0
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 3)
    assert mxnet_gpus.num_gpus.__wrapped__() == 3


def test_why_gpus_are_hidden(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "holds no GPU code" in mxnet_gpus.why_hidden(0, 2)
    monkeypatch.setattr(mx.runtime.Features, "is_enabled", lambda self, feature: feature == "CUDA")
    assert mxnet_gpus.why_hidden(0, 2) == "List the devices with gluon-mgpu devices."
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert mxnet_gpus.why_hidden(1, 2) == "CUDA_VISIBLE_DEVICES=1 lets MXNet see 1 of 2."
