import pytest
from gluon_mgpu.errors import MissingExtraError
from gluon_mgpu.runtime.nvidia import nvml as module
from gluon_mgpu.runtime.nvidia.nvml import DriverError, GpuProcess, Link, Nvml, read_driver, try_driver

from .conftest import assert_house_style
from .fake_nvml import CODES, FakeGpu, FakeNvml, a100_mig, h200, install, v100s

GIB = 2**30


def test_a_gpu_as_it_is(monkeypatch):
    processes = [(17, "/usr/bin/python3", 3 * GIB), (18, "", None)]
    gpu = h200(used_bytes=4 * GIB, utilization=93, temperature_c=71, power_w=612.25, throttle_bits=0x24, processes=processes)
    install(monkeypatch, [gpu], driver="550.54.15", cuda=12040)
    driver = read_driver()
    assert (driver.version, driver.cuda_version, driver.links) == ("550.54.15", "12.4", ())
    (found,) = driver.gpus
    assert (found.index, found.uuid, found.name, found.pci_bus_id) == (0, gpu.uuid, "NVIDIA H200", "00000000:19:00.0")
    assert (found.total_bytes, found.used_bytes, found.free_bytes) == (141 * GIB, 4 * GIB, 137 * GIB)
    assert (found.utilization, found.temperature_c, found.power_w, found.power_limit_w) == (93, 71, 612.25, 700.0)
    assert found.throttle_reasons == ("power limit", "temperature")
    assert found.compute_capability == (9, 0)
    assert found.processes == (GpuProcess(17, "/usr/bin/python3", 3 * GIB), GpuProcess(18, "", None))
    assert (found.mig, found.mig_enabled, found.trouble) == ((), False, "")


def test_an_idle_gpu_is_not_slowed_down(monkeypatch):
    install(monkeypatch, v100s(1))
    assert read_driver().gpus[0].throttle_reasons == ()


@pytest.mark.parametrize(
    "function, attributes",
    [
        ("nvmlDeviceGetMemoryInfo", ["total_bytes", "used_bytes", "free_bytes"]),
        ("nvmlDeviceGetUtilizationRates", ["utilization"]),
        ("nvmlDeviceGetTemperature", ["temperature_c"]),
        ("nvmlDeviceGetPowerUsage", ["power_w"]),
        ("nvmlDeviceGetEnforcedPowerLimit", ["power_limit_w"]),
        ("nvmlDeviceGetCurrentClocksEventReasons", ["throttle_reasons"]),
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
    optional = set(module.Gpu.__dataclass_fields__) - {"index", "uuid", "name", "pci_bus_id", "mig", "mig_enabled", "trouble"}
    assert all(getattr(refusing, name) is not None for name in optional - set(attributes))
    assert all(getattr(other, name) is not None for name in optional)


def test_drivers_that_are_older_than_the_package(monkeypatch):
    """Driver 470, the last one for Kepler, knows neither clock event reasons nor the third form of processes."""
    fake = install(monkeypatch, [FakeGpu("GPU-1", throttle_bits=4, processes=[(17, "python", GIB)])])
    fake.without = {
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlSystemGetCudaDriverVersion_v2",
    }
    driver = read_driver()
    assert driver.cuda_version == "12.2"
    assert driver.gpus[0].throttle_reasons == ("power limit",)
    assert driver.gpus[0].processes == (GpuProcess(17, "python", GIB),)


def test_what_the_driver_keeps_is_not_in_use(monkeypatch):
    fake = install(monkeypatch, [h200(used_bytes=GIB, reserved_bytes=GIB // 2)])
    (gpu,) = read_driver().gpus
    assert (gpu.total_bytes, gpu.used_bytes, gpu.free_bytes) == (141 * GIB, GIB, 139 * GIB + GIB // 2)
    fake.without = {"nvmlDeviceGetMemoryInfo_v2"}
    assert read_driver().gpus[0].used_bytes == GIB + GIB // 2


def test_a_package_that_lacks_a_function(monkeypatch):
    fake = install(monkeypatch, v100s(1))
    monkeypatch.delattr(type(fake), "nvmlDeviceGetMigMode")
    assert not read_driver().gpus[0].mig_enabled


def test_a_lost_gpu_leaves_the_others(monkeypatch):
    fake = install(monkeypatch, v100s(3))
    with Nvml() as nvml:
        fake.gpus[1].refuses["nvmlDeviceGetTemperature"] = "GpuIsLost"
        gpus = nvml.read().gpus
    assert [gpu.trouble for gpu in gpus] == ["", "GPU is lost", ""]
    assert gpus[1].uuid == fake.gpus[1].uuid
    assert gpus[1].free_bytes is None
    assert gpus[2].free_bytes == 16 * GIB


@pytest.mark.parametrize("refuses", [{"*": "GpuIsLost"}, {"nvmlDeviceGetHandleByIndex": "Unknown"}])
def test_a_gpu_that_is_lost_from_the_start(monkeypatch, refuses):
    fake = install(monkeypatch, v100s(3))
    fake.gpus[0].refuses.update(refuses)
    gpus = read_driver().gpus
    assert [gpu.uuid for gpu in gpus] == [fake.gpus[1].uuid, fake.gpus[2].uuid, ""]
    assert gpus[2].trouble
    assert gpus[2].free_bytes is None


def test_a_gpu_that_is_lost_while_it_is_identified_leaves_the_others(monkeypatch):
    fake = install(monkeypatch, v100s(3))
    fake.gpus[1].refuses["nvmlDeviceGetUUID"] = "GpuIsLost"
    gpus = read_driver().gpus
    assert [(gpu.index, gpu.uuid, gpu.trouble) for gpu in gpus] == [
        (0, fake.gpus[0].uuid, ""),
        (1, "", "GPU is lost"),
        (2, fake.gpus[2].uuid, ""),
    ]


def test_a_gpu_that_is_lost_while_links_are_read_has_none(monkeypatch):
    fake = install(monkeypatch, v100s(3))
    with Nvml() as nvml:
        fake.gpus[0].refuses["nvmlDeviceGetTopologyCommonAncestor"] = "GpuIsLost"
        assert [(link.a, link.b) for link in nvml.read().links] == [(1, 2)]


def test_a_library_that_does_not_close_is_not_an_error(monkeypatch):
    fake = install(monkeypatch, v100s(1))
    nvml = Nvml()

    def failing():
        raise fake._error("Unknown")

    fake.nvmlShutdown = failing
    nvml.close()
    with pytest.raises(DriverError, match="closed"):
        nvml.read()


def test_the_order_is_that_of_pci_addresses(monkeypatch):
    install(monkeypatch, [FakeGpu("GPU-b", bus=0xB0), FakeGpu("GPU-a", bus=0x0A)])
    assert [(gpu.index, gpu.uuid) for gpu in read_driver().gpus] == [(0, "GPU-a"), (1, "GPU-b")]


def test_mig_devices(monkeypatch):
    gpu = a100_mig()
    gpu.mig[1].used_bytes, gpu.mig[1].processes = GIB, [(5, "python", GIB)]
    install(monkeypatch, [gpu])
    (found,) = read_driver().gpus
    assert found.mig_enabled
    assert found.utilization is None
    first, second = found.mig
    assert (first.uuid, first.name, first.instance) == (gpu.mig[0].uuid, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", (7, 0))
    assert (second.total_bytes, second.free_bytes) == (5 * GIB, 4 * GIB)
    assert (first.processes, second.processes) == ((), (GpuProcess(5, "python", GIB),))


def test_links(monkeypatch):
    install(monkeypatch, v100s(6))
    links = {(link.a, link.b): link for link in read_driver().links}
    assert len(links) == 15
    assert links[0, 1] == Link(0, 1, "NVLink", "through one PCIe switch", 2, 2 * 25781e6, True)
    assert links[0, 2] == Link(0, 2, "PCIe", "through one PCIe switch", None, 16 * 985e6, True)
    assert links[0, 5] == Link(0, 5, "PCIe", "from one NUMA node to another", None, 16 * 985e6, False)


def test_links_through_an_nvswitch(monkeypatch):
    gpus = [h200(uuid=f"GPU-{i}", bus=i, nvlinks={"switch": 18 - i}, nvlink_mbytes_per_s=26562) for i in range(2)]
    install(monkeypatch, gpus)
    (link,) = read_driver().links
    assert (link.kind, link.num_links, link.bytes_per_s) == ("NVLink", 17, 17 * 26562e6)


def test_nvlinks_of_unknown_speed(monkeypatch):
    fake = install(monkeypatch, v100s(2))
    for gpu in fake.gpus:
        gpu.refuses["nvmlDeviceGetFieldValues"] = "NotSupported"
    (link,) = read_driver().links
    assert (link.kind, link.num_links, link.bytes_per_s) == ("NVLink", 2, None)


def test_links_that_nobody_tells_of(monkeypatch):
    fake = install(monkeypatch, v100s(2))
    for name in ("TopologyCommonAncestor", "P2PStatus", "MaxPcieLinkWidth"):
        fake.gpus[0].refuses[f"nvmlDeviceGet{name}"] = "NotSupported"
    assert read_driver().links == (Link(0, 1, "PCIe"),)


def test_opened_once_and_asked_often(monkeypatch):
    fake = install(monkeypatch, v100s(2))
    with Nvml() as nvml:
        nvml.read()
        fake.gpus[1].used_bytes = 5 * GIB
        before = fake.calls.copy()
        assert nvml.read().gpus[1].used_bytes == 5 * GIB
        asked = fake.calls - before
        assert fake.users == 1
    assert not {"nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetP2PStatus"} & set(asked)
    assert sum(asked.values()) <= 2 * 10
    assert fake.users == 0
    nvml.close()
    assert fake.users == 0
    with pytest.raises(DriverError, match="closed") as caught:
        nvml.read()
    assert_house_style(caught.value)


def test_links_are_not_asked_for_unless_wanted(monkeypatch):
    fake = install(monkeypatch, v100s(2))
    assert read_driver(links=False).links == ()
    assert not fake.calls["nvmlDeviceGetP2PStatus"]


@pytest.mark.parametrize(
    "error, told",
    [
        ("LibraryNotFound", "libnvidia-ml.so.1"),
        ("DriverNotLoaded", "modprobe"),
        ("NoPermission", "/dev/nvidiactl"),
        ("LibRmVersionMismatch", "reboot"),
        ("Unknown", "nvidia-smi"),
    ],
)
def test_no_driver(monkeypatch, error, told):
    install(monkeypatch, error=error)
    with pytest.raises(DriverError, match=told) as caught:
        read_driver()
    assert_house_style(caught.value)
    assert try_driver() == (None, str(caught.value))


def test_no_package(monkeypatch):
    install(monkeypatch, missing=True)
    with pytest.raises(MissingExtraError, match=r"gluon_mgpu\[gpu\]") as caught:
        read_driver()
    assert_house_style(caught.value)
    assert try_driver() == (None, str(caught.value))


def test_the_library_is_let_go_when_opening_fails(monkeypatch):
    fake = install(monkeypatch, v100s(1))
    monkeypatch.setattr(module, "_cuda_version", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_driver()
    assert fake.users == 0


def test_the_stand_in_has_only_what_the_package_has():
    pynvml = pytest.importorskip("pynvml")
    assert pynvml.nvmlMemory_v2 == module._MEMORY_V2

    assert [name for name in vars(FakeNvml) if name.startswith("nvml") and not hasattr(pynvml, name)] == []
    for name, (code, said) in CODES.items():
        assert getattr(pynvml, f"NVMLError_{name}")().value == code
        assert pynvml.NVMLError._errcode_to_string[code] == said
