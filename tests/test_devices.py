import stat

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu import devices as module
from gluon_mgpu.errors import DeviceError

from .conftest import assert_house_style


@pytest.fixture
def gpus(monkeypatch):
    """A machine with eight GPUs, of which the last cannot run: contexts are made, and nothing runs on them."""
    monkeypatch.setattr(module, "_num_gpus", lambda: 8)
    monkeypatch.setattr(module, "_why_not", lambda i: "A test operation failed: no kernel image." if i == 7 else "")


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
    for spec in ("gpu", "gpu:0", "cpu:0,gpu:0", [mx.gpu(0)], mx.gpu(1)):
        with pytest.raises(DeviceError, match=r"holds no GPU code.*cu112") as caught:
            mgpu.resolve_devices(spec)
        assert_house_style(caught.value)


def test_with_gpus(gpus):
    assert mgpu.resolve_devices() == mgpu.resolve_devices("auto") == [mx.gpu(i) for i in range(7)]
    assert mgpu.resolve_devices("gpu:4-6") == [mx.gpu(4), mx.gpu(5), mx.gpu(6)]
    assert mgpu.resolve_devices("gpu:0,2") == [mx.gpu(0), mx.gpu(2)]
    assert mgpu.resolve_devices("gpu:1") == [mx.gpu(1)]
    assert mgpu.resolve_devices("cpu:0,gpu:0") == [mx.cpu(0), mx.gpu(0)]
    assert mgpu.resolve_devices(2) == [mx.gpu(0), mx.gpu(1)]
    assert mgpu.try_gpu(6) == mx.gpu(6)
    assert mgpu.try_gpu(7) == mx.cpu()
    assert mgpu.try_all_gpus() == [mx.gpu(i) for i in range(7)]


@pytest.mark.parametrize(
    "spec, told", [("gpu", "no kernel image"), ("gpu:7", "no kernel image"), ("gpu:8", "got gpu(8)"), (9, "at most 7")]
)
def test_gpus_that_cannot_be_had(gpus, spec, told):
    with pytest.raises(DeviceError) as caught:
        mgpu.resolve_devices(spec)
    assert told in str(caught.value)
    assert_house_style(caught.value)


BAD = ["tpu", "", "gpu:", "cpu:-1", "cpu:x", "gpu:3-1", "cpu:1-2-3", "1,2", ",", "cpu:0,,cpu:1", "cpu:99999999999", "cpu:0-99999"]
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


@pytest.mark.parametrize("i", [-1, -5])
def test_try_gpu_takes_no_negative_number(i):
    with pytest.raises(DeviceError):
        mgpu.try_gpu(i)


def test_the_cpu_is_described():
    cpu = mgpu.describe_devices()[0]
    assert (cpu.name, cpu.usable, cpu.reason) == ("cpu(0)", True, "")
    assert f"{mgpu.runtime.num_cores()} cores" in cpu.description
    assert cpu.memory_bytes > 2**28


@pytest.mark.skipif(mx.runtime.Features().is_enabled("CUDA"), reason="the wheel holds GPU code")
def test_gpus_that_the_wheel_holds_no_code_for(nvidia_smi):
    _, first, second = mgpu.describe_devices()
    assert (first.name, first.description, first.memory_bytes, first.usable) == ("-", "NVIDIA H100", 81559 * 2**20, False)
    assert "pip install 'gluon_mgpu[cu112]'" in second.reason


def test_gpus_that_mxnet_sees(gpus, monkeypatch):
    monkeypatch.setattr(module, "_nvidia_smi", lambda: [(f"GPU {i}", 2**30) for i in range(8)])
    found = mgpu.describe_devices()[1:]
    assert [device.name for device in found] == [f"gpu({i})" for i in range(8)]
    assert [device.usable for device in found] == [True] * 7 + [False]
    assert "no kernel image" in found[7].reason


def test_gpus_that_an_environment_variable_hides(gpus, monkeypatch):
    monkeypatch.setattr(module, "_nvidia_smi", lambda: [(f"GPU {i}", 2**30) for i in range(10)])
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
    assert module._nvidia_smi() == []


@pytest.mark.gpu
def test_a_gpu_runs():
    with mgpu.use_devices("gpu") as ctx:
        assert [mx.nd.ones((2,), ctx=context).asnumpy().tolist() for context in ctx] == [[1.0, 1.0]] * len(ctx)


def test_digits_of_other_scripts_are_no_counts():
    with pytest.raises(DeviceError):
        mgpu.resolve_devices("\u00b2")
