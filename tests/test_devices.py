import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.devices import mxnet_gpus
from gluon_mgpu.errors import DeviceError

from .fake_nvml import h200, install, let_mxnet_see, v100s


@pytest.fixture
def gpus(monkeypatch):
    """A machine with eight GPUs, of which the last cannot run: contexts are made, and nothing runs on them."""
    let_mxnet_see(monkeypatch, 8, {7: "A test operation failed: no kernel image."})


@pytest.fixture
def nvml(monkeypatch):
    """Eight V100s that the driver describes, all idle, MXNet sees, and can run on."""
    fake = install(monkeypatch, v100s(8))
    let_mxnet_see(monkeypatch, 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


SPECS = [("cpu", [0]), ("cpu*3", [0, 1, 2]), (" CPU * 2 ", [0, 1]), ("cpu:0", [0]), ("cpu:2", [2]), ("CPU(0), cpu:3", [0, 3])]
SPECS += [("cpu:1,2", [1, 2]), ("cpu:1-3", [1, 2, 3]), (mx.cpu(2), [2]), ([mx.cpu(2), mx.cpu(1)], [2, 1]), ((mx.cpu(1),), [1])]


@pytest.mark.parametrize("spec, ids", SPECS)
def test_cpu_specs(spec, ids):
    assert mgpu.devices.resolve_devices(spec) == [mx.cpu(i) for i in ids]


@pytest.mark.skipif(bool(mx.context.num_gpus()), reason="there are GPUs")
def test_without_a_gpu():
    assert mgpu.devices.resolve_devices() == mgpu.devices.resolve_devices("auto", min_free_memory="8GiB") == [mx.cpu(0)]
    assert mgpu.devices.resolve_devices(3) == mgpu.devices.resolve_devices("3") == [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    assert mgpu.try_all_gpus() == [mx.cpu()]
    assert mgpu.try_gpu() == mgpu.try_gpu(5) == mx.cpu()
    for spec in ("gpu", "gpu:0", "gpu*2", "cpu:0,gpu:0", [mx.gpu(0)], mx.gpu(1), "gpu:free"):
        with pytest.raises(DeviceError, match=r"holds no GPU code.*cu112"):
            mgpu.devices.resolve_devices(spec)
    for spec, options in [("gpu:free*2", {}), (1, {"min_free_memory": 1})]:
        with pytest.raises(DeviceError, match="holds no GPU code"):
            mgpu.devices.resolve_devices(spec, **options)


def test_with_gpus(gpus):
    assert mgpu.devices.resolve_devices() == mgpu.devices.resolve_devices("auto") == [mx.gpu(i) for i in range(7)]
    assert mgpu.devices.resolve_devices("gpu:4-6") == [mx.gpu(4), mx.gpu(5), mx.gpu(6)]
    assert mgpu.devices.resolve_devices("gpu:0,2") == [mx.gpu(0), mx.gpu(2)]
    assert mgpu.devices.resolve_devices("gpu:1") == [mx.gpu(1)]
    assert mgpu.devices.resolve_devices("cpu:0,gpu:0") == [mx.cpu(0), mx.gpu(0)]
    assert mgpu.devices.resolve_devices(2) == mgpu.devices.resolve_devices("gpu*2") == [mx.gpu(0), mx.gpu(1)]
    assert mgpu.devices.resolve_devices("cpu*2") == [mx.cpu(0), mx.cpu(1)]
    assert mgpu.try_gpu(6) == mx.gpu(6)
    assert mgpu.try_gpu(7) == mx.cpu()
    assert mgpu.try_all_gpus() == [mx.gpu(i) for i in range(7)]
    found = mgpu.devices.describe_devices()[1:]
    assert [device.usable for device in found] == [True] * 7 + [False] and "no kernel image" in found[7].reason


@pytest.mark.parametrize(
    "spec, shown",
    [
        ("gpu", "no kernel image"),
        ("gpu:7", "no kernel image"),
        ("gpu:8", "got gpu(8)"),
        ("gpu:9", "gpu*9"),  # a number is not a count
        (9, "at most 7"),
        ("gpu*9", "at most 7"),
    ],
)
def test_gpus_that_cannot_be_had(gpus, spec, shown):
    with pytest.raises(DeviceError) as caught:
        mgpu.devices.resolve_devices(spec)
    assert shown in str(caught.value)


BAD = ["tpu", "", "gpu:", "cpu:-1", "cpu:x", "gpu:3-1", "cpu:1-2-3", "1,2", ",", "cpu:0,,cpu:1", "cpu:99999999999", "cpu:0-99999"]
BAD += ["cpu*0", "cpu*", "gpu*0", "*2", "gpu*2,cpu*2", "cpu*99999", "gpu:*2", "gpu:free*0", "cpu:0,cpu:0", "\u00b2"]
BAD += ["gpu:free:2", "gpu:free:", "gpu:free:two", "gpu:free,cpu:0", "free", "gpu:free:1,2", "cpu:free"]
BAD += [0, -1, True, 1.5, [], (), [mx.cpu(0), mx.cpu(0)], ["cpu:0"], {"cpu": 1}, [mx.cpu_pinned(0)], [0, 1], b"cpu"]
BAD += [mx.cpu(-1), [mx.cpu(10**6)]]


@pytest.mark.parametrize("spec", BAD, ids=repr)
def test_bad_specs(spec):
    with pytest.raises(DeviceError), mgpu.use_devices(spec):
        pass


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
    with pytest.raises(mx.MXNetError), mgpu.use_devices("cpu*2") as ctx:
        mx.nd.random.normal(loc=0, scale=-1, shape=(2,), ctx=ctx[1])
    mx.nd.waitall()  # nothing is left behind


def test_an_error_of_the_block_comes_first(caplog):
    with pytest.raises(KeyError, match="mine"), mgpu.use_devices("cpu*2") as ctx:
        mx.nd.random.normal(loc=0, scale=-1, shape=(2,), ctx=ctx[1])
        raise KeyError("mine")
    assert "a device reported" in caplog.text
    assert mx.current_context() == mx.cpu(0)
    mx.nd.waitall()


GIB = 2**30


def gpu_ids(spec, **options):
    contexts = mgpu.devices.resolve_devices(spec, **options)
    assert all(context.device_type == "gpu" for context in contexts)
    return [context.device_id for context in contexts]


def test_free_gpus(nvml, caplog):
    nvml.gpus[0].processes = nvml.gpus[2].processes = [(17, "python", GIB)]
    nvml.gpus[5].used_bytes, nvml.gpus[1].used_bytes = 200 * 2**20, 100 * 2**20
    with caplog.at_level("INFO", "gluon_mgpu"):
        assert gpu_ids("gpu:free") == [3, 4, 6, 7, 1, 5]
    assert "gpu:free takes gpu(3) (Tesla V100-SXM2-16GB, GPU-8932f903" in caplog.text
    assert "not gpu(0): process 17 (python) computes there" in caplog.text
    assert gpu_ids(" GPU:free * 2 ") == gpu_ids("gpu:free*2") == [3, 4]
    assert gpu_ids("gpu:free", min_free_memory="15.9GiB") == [3, 4, 6, 7, 1]


def test_memory_that_must_be_free(nvml, caplog):
    nvml.gpus[0].used_bytes = nvml.gpus[3].used_bytes = 10 * GIB
    nvml.gpus[4].processes = [(17, "python", GIB)]  # may be shared: no free GPU was requested
    assert gpu_ids("auto", min_free_memory="8GiB") == gpu_ids(None, min_free_memory=8 * GIB) == [1, 2, 4, 5, 6, 7]
    assert gpu_ids(2, min_free_memory="8GiB") == gpu_ids("2", min_free_memory="8GiB") == [1, 2]
    assert gpu_ids("gpu*2", min_free_memory="8GiB") == [1, 2]
    assert gpu_ids("gpu:2,1", min_free_memory="8GiB") == gpu_ids([mx.gpu(2), mx.gpu(1)], min_free_memory="8GiB") == [2, 1]
    assert gpu_ids(mx.gpu(4), min_free_memory="8GiB") == [4]
    assert mgpu.devices.resolve_devices("auto", min_free_memory="17GiB") == [mx.cpu(0)]
    assert "auto takes the CPU; not gpu(0): 6.0 GiB of 16.0 GiB are free" in caplog.text


@pytest.mark.parametrize(
    "spec, options, shown",
    [
        ("gpu", {"min_free_memory": "8GiB"}, "expected 8 GPUs with 8.0 GiB of free memory: gpu(0): 6.0 GiB of 16.0 GiB are free"),
        ("gpu:0", {"min_free_memory": "8GiB"}, "expected a GPU with 8.0 GiB of free memory: gpu(0)"),
        (8, {"min_free_memory": "8GiB"}, "expected 8 GPUs with 8.0 GiB"),
        ("gpu*8", {"min_free_memory": "8GiB"}, "expected 8 GPUs with 8.0 GiB"),
        ("gpu:8", {"min_free_memory": "8GiB"}, "expected one of the GPUs that MXNet can see"),
        ("gpu:free*7", {}, "expected 7 free GPUs: gpu(0): 10.0 GiB are in use"),
        ("cpu*2", {"min_free_memory": "8GiB"}, "expected only GPUs"),
        ([mx.cpu(0)], {"min_free_memory": "8GiB"}, "expected only GPUs"),
    ],
    ids=repr,
)
def test_free_gpus_that_cannot_be_had(nvml, spec, options, shown):
    nvml.gpus[0].used_bytes = 10 * GIB
    nvml.gpus[2].processes = [(17, "python", GIB)]
    with pytest.raises(DeviceError) as caught:
        mgpu.devices.resolve_devices(spec, **options)
    assert shown in str(caught.value)


def test_free_gpus_among_those_that_cuda_shows(nvml, monkeypatch):
    """The last four of eight: MXNet numbers them from 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    let_mxnet_see(monkeypatch, 4)
    nvml.gpus[5].processes = [(17, "python", GIB)]
    assert gpu_ids("gpu:free") == [0, 2, 3]


def test_numbers_of_mxnet_and_of_the_driver_that_do_not_agree(nvml, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    let_mxnet_see(monkeypatch, 5)
    with pytest.raises(DeviceError, match="got 5 GPUs from MXNet; .*The driver lists 8"):
        mgpu.devices.resolve_devices("gpu:free")
    nvml.gpus.append(h200())
    let_mxnet_see(monkeypatch, 9)
    with pytest.raises(DeviceError, match="Set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        mgpu.devices.resolve_devices("gpu:free")
    assert all("CUDA_DEVICE_ORDER=PCI_BUS_ID" in device.note for device in mgpu.devices.describe_devices()[1:])
    let_mxnet_see(monkeypatch, 5)
    found = mgpu.devices.describe_devices()[1:]
    assert [device.name for device in found] == [*(f"gpu({i})" for i in range(5)), *["-"] * 9]
    assert all(device.uuid is None for device in found[:5])


@pytest.mark.skipif(mx.runtime.Features().is_enabled("CUDA"), reason="the wheel holds GPU code")
@pytest.mark.parametrize(
    "machine, error, note",
    [
        (v100s(2), "pip install '.[cu112]'", "Run pip uninstall mxnet, then pip install '.[cu112]' in a clone of gluon_mgpu."),
        ([h200(), h200()], "mxnet:24.06-py3", "mxnet:24.06-py3"),
        ([], "driver cannot be read", None),
    ],
    ids=["V100", "H200", "no driver"],
)
def test_a_library_without_gpu_code_names_the_build_for_the_machine(monkeypatch, machine, error, note):
    install(monkeypatch, machine, error="" if machine else "LibraryNotFound")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DeviceError) as caught:
        mgpu.devices.resolve_devices("gpu")
    assert error in str(caught.value)
    found = mgpu.devices.describe_devices()[1:]
    assert [(device.name, device.index, device.usable) for device in found] == [("-", i, False) for i in range(len(machine))]
    assert all("holds no GPU code" in device.reason and note in device.note for device in found)


def test_a_gpu_without_code_in_the_library_names_the_builds_for_it(monkeypatch):
    """MXNet sees it, and its operations fail."""
    install(monkeypatch, [h200()])
    let_mxnet_see(monkeypatch, 1, "A test operation failed: no kernel image is available.")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(DeviceError, match=r"no kernel image.*no code for compute capability 9.0.*24.06"):
        mgpu.devices.resolve_devices("gpu")
    (found,) = mgpu.devices.describe_devices()[1:]
    assert found.reason == "A test operation failed: no kernel image is available."
    assert "mxnet:24.06-py3" in found.note
    install(monkeypatch, v100s(1))  # it fails in spite of code for it
    assert mxnet_gpus.what_to_do(0) == ""


# What MXNet itself answers, without the stand-ins above


@pytest.mark.skipif(bool(mx.context.num_gpus()), reason="there are GPUs")
def test_a_gpu_is_usable_if_an_operation_gives_the_right_numbers(monkeypatch):
    ask = mxnet_gpus.why_not.__wrapped__
    assert ask(0).startswith("A test operation failed: ") and "\n" not in ask(0)
    monkeypatch.setattr(mx, "gpu", mx.cpu)  # a device that works
    assert ask(0) == ""
    monkeypatch.setattr(mx.nd, "ones", mx.nd.zeros)  # a kernel that did not run leaves old memory
    assert "gave a wrong result" in ask(0)
