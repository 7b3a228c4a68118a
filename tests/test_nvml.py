import pytest
from gluon_mgpu.runtime.nvidia import nvml as module
from gluon_mgpu.runtime.nvidia.nvml import DriverError, GpuProcess, Nvml, read_driver, try_driver

from .fake_nvml import CODES, FakeGpu, FakeNvml, h200, install, v100s

GIB = 2**30


def test_gpus_as_they_are_in_the_order_of_their_pci_addresses(monkeypatch):
    processes = [(17, "/usr/bin/python3", 3 * GIB), (18, "", None)]
    gpu = h200(used_bytes=4 * GIB, utilization=93, temperature_c=71, power_w=612.25, throttle_bits=0x24, processes=processes)
    idle = h200(uuid="GPU-2", bus=0x0A, mig_enabled=True)
    install(monkeypatch, [gpu, idle], driver="550.54.15", cuda=12040)
    driver = read_driver()
    assert (driver.version, driver.cuda_version) == ("550.54.15", "12.4")
    first, found = driver.gpus
    assert (first.index, first.uuid, first.throttle_reasons, first.mig_enabled) == (0, "GPU-2", (), True)
    assert (found.index, found.uuid, found.name, found.pci_bus_id) == (1, gpu.uuid, "NVIDIA H200", "00000000:19:00.0")
    assert (found.total_bytes, found.used_bytes, found.free_bytes) == (141 * GIB, 4 * GIB, 137 * GIB)
    assert (found.utilization, found.temperature_c, found.power_w) == (93, 71, 612.25)
    assert found.throttle_reasons == ("power limit", "temperature")
    assert found.compute_capability == (9, 0)
    assert found.processes == (GpuProcess(17, "/usr/bin/python3", 3 * GIB), GpuProcess(18, "", None))
    assert (found.mig_enabled, found.trouble) == (False, "")


@pytest.mark.parametrize(
    "function, attributes",
    [
        ("nvmlDeviceGetMemoryInfo", ["total_bytes", "used_bytes", "free_bytes"]),
        ("nvmlDeviceGetUtilizationRates", ["utilization"]),
        ("nvmlDeviceGetTemperature", ["temperature_c"]),
        ("nvmlDeviceGetPowerUsage", ["power_w"]),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", ["throttle_reasons"]),
        ("nvmlDeviceGetCudaComputeCapability", ["compute_capability"]),
        ("nvmlDeviceGetComputeRunningProcesses", ["processes"]),
    ],
)
@pytest.mark.parametrize("error", ["NotSupported", "NoPermission", "Unknown"])
def test_what_a_card_refuses_is_none(monkeypatch, function, attributes, error):
    fake = install(monkeypatch, v100s(2))
    fake.gpus[0].refuses[function] = error
    refusing, other = read_driver().gpus
    assert all(getattr(refusing, name) is None for name in attributes)
    assert not refusing.trouble
    optional = set(module.Gpu.__dataclass_fields__) - {"index", "uuid", "name", "pci_bus_id", "mig_enabled", "trouble"}
    assert all(getattr(refusing, name) is not None for name in optional - set(attributes))
    assert all(getattr(other, name) is not None for name in optional)


def test_a_driver_that_is_older_than_the_package_leaves_values_out(monkeypatch):
    """Driver 470 does not know the third form of processes."""
    fake = install(monkeypatch, [FakeGpu("GPU-1", throttle_bits=4, processes=[(17, "python", GIB)])])
    fake.without = {"nvmlDeviceGetComputeRunningProcesses", "nvmlSystemGetCudaDriverVersion_v2"}
    driver = read_driver()
    assert driver.cuda_version == ""
    assert (driver.gpus[0].throttle_reasons, driver.gpus[0].processes) == (("power limit",), None)
    assert driver.gpus[0].free_bytes == 16 * GIB


@pytest.mark.parametrize(
    "function, named", [("nvmlDeviceGetTemperature", True), ("nvmlDeviceGetUUID", False), ("nvmlDeviceGetHandleByIndex", False)]
)
def test_a_lost_gpu_leaves_the_others(monkeypatch, function, named):
    fake = install(monkeypatch, v100s(3))
    fake.gpus[1].refuses[function] = "GpuIsLost"
    (lost,) = (gpu for gpu in read_driver().gpus if gpu.trouble)
    assert lost.uuid == (fake.gpus[1].uuid if named else "")
    others = {gpu.uuid: gpu.free_bytes for gpu in read_driver().gpus if not gpu.trouble}
    assert others == {fake.gpus[i].uuid: 16 * GIB for i in (0, 2)}


def test_a_driver_is_opened_once_and_closed(monkeypatch):
    fake = install(monkeypatch, v100s(2))
    with Nvml() as nvml:
        nvml.read()
        fake.gpus[1].used_bytes = 5 * GIB
        assert nvml.read().gpus[1].used_bytes == 5 * GIB
    assert (fake.calls["nvmlInit"], fake.users) == (1, 0)
    with pytest.raises(DriverError, match="closed"):
        nvml.read()


TROUBLES = [("LibraryNotFound", "libnvidia-ml.so.1"), ("DriverNotLoaded", "modprobe"), ("NoPermission", "/dev/nvidiactl")]
TROUBLES += [("LibRmVersionMismatch", "reboot"), ("Unknown", "nvidia-smi")]


@pytest.mark.parametrize("error, told", TROUBLES)
def test_no_driver(monkeypatch, error, told):
    install(monkeypatch, error=error)
    with pytest.raises(DriverError, match=told) as caught:
        read_driver()
    assert try_driver() == (None, str(caught.value))


def test_the_stand_in_has_only_what_the_package_has():
    pynvml = pytest.importorskip("pynvml")
    assert pynvml.nvmlMemory_v2 == module._MEMORY_V2

    assert [name for name in vars(FakeNvml) if name.startswith("nvml") and not hasattr(pynvml, name)] == []
    for name, (code, said) in CODES.items():
        assert getattr(pynvml, f"NVMLError_{name}")().value == code
        assert pynvml.NVMLError._errcode_to_string[code] == said
