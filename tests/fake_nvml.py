"""A stand-in for the module pynvml, made of plain values, where there is no NVIDIA driver.

    from .fake_nvml import FakeGpu, h200, install, v100s

    def test_it(monkeypatch):
        nvml = install(monkeypatch, v100s(8))            # `import pynvml` gives it from here on, in this test
        nvml.gpus[3].used_bytes = 2**30                  # values may be changed at any time
        nvml.gpus[3].processes = [(4242, "python", 2**30)]
        nvml.gpus[5].refuses["nvmlDeviceGetPowerUsage"] = "NotSupported"      # or "GpuIsLost", "NoPermission"
        nvml.gpus[6].refuses["*"] = "GpuIsLost"                               # whatever it is asked
        assert gluon_mgpu.runtime.nvidia.nvml.read_driver().gpus[3].free_bytes == 15 * 2**30

    install(monkeypatch, [], error="LibraryNotFound")    # no driver; "DriverNotLoaded", "NoPermission", ...
    install(monkeypatch, missing=True)                   # no package nvidia-ml-py

Errors are named as pynvml names their classes, without `NVMLError_`. `nvml.calls` counts the calls by name, `nvml.users` those
who have opened it and not closed it; `nvml.without` holds names of functions that the driver is too old for.
"""

# ruff: noqa: N802

import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Set, Tuple

from gluon_mgpu.devices import mxnet_gpus

CODES = {
    "NotSupported": (3, "Not Supported"),
    "NoPermission": (4, "Insufficient Permissions"),
    "NotFound": (6, "Not Found"),
    "DriverNotLoaded": (9, "Driver Not Loaded"),
    "LibraryNotFound": (12, "NVML Shared Library Not Found"),
    "FunctionNotFound": (13, "Function Not Found"),
    "GpuIsLost": (15, "GPU is lost"),
    "LibRmVersionMismatch": (18, "RM has detected an NVML/RM version mismatch."),
    "Unknown": (999, "Unknown Error"),
}


@dataclass
class FakeGpu:
    """A GPU: what it is, what it says, and which functions it refuses, by their error's name."""

    uuid: str
    name: str = "Tesla V100-SXM2-16GB"
    bus: int = 0x3B
    total_bytes: int = 16 * 2**30
    used_bytes: int = 0
    reserved_bytes: int = 0  # what the driver keeps, which drivers before 510 count as used
    utilization: int = 0
    temperature_c: int = 40
    power_w: float = 55.5
    throttle_bits: int = 1  # idle
    compute_capability: Tuple[int, int] = (7, 0)
    processes: List[Tuple[int, str, Optional[int]]] = field(default_factory=list)  # pid, name ("" has gone), bytes
    mig_enabled: bool = False
    refuses: Dict[str, str] = field(default_factory=dict)

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.bus:02X}:00.0"


def h200(**values: Any) -> FakeGpu:
    """An H200, which MXNet 1.9.1 holds no code for."""
    about = {"name": "NVIDIA H200", "bus": 0x19, "total_bytes": 141 * 2**30, "compute_capability": (9, 0)}
    return FakeGpu(**{"uuid": "GPU-d2f0a4c1-7a0b-4c43-8d55-000000000200", **about, **values})


def v100s(count: int) -> List[FakeGpu]:
    """V100s."""
    return [FakeGpu(f"GPU-8932f9{i:02d}-5d7a-3b2e-9c1f-000000000{i:03d}", bus=0x10 + 8 * i) for i in range(count)]


def install(monkeypatch, gpus=(), *, missing=False, **about):
    """Let `import pynvml` give a FakeNvml of these GPUs, or fail as where the package is missing."""
    module = None if missing else FakeNvml(gpus, **about)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def let_mxnet_see(monkeypatch, number, why_not=""):
    """Let MXNet see GPUs: it makes contexts, and nothing runs on them. `why_not` (of all, or by number): why they cannot run."""
    reasons = why_not if isinstance(why_not, dict) else dict.fromkeys(range(number), why_not)
    for name, stand_in in {"num_gpus": lambda: number, "why_not": lambda i: reasons.get(i, "")}.items():
        monkeypatch.setattr(mxnet_gpus, name, stand_in)


class FakeNvml(types.ModuleType):
    """The module: the functions of pynvml that the project calls, and its errors."""

    def __init__(self, gpus=(), *, driver="535.104.05", cuda=12020, error="") -> None:
        super().__init__("pynvml")
        self.gpus = list(gpus)
        self.driver, self.cuda, self.error = driver, cuda, error
        self.calls: Counter = Counter()
        self.users = 0
        self.without: Set[str] = set()
        self.NVMLError = type("NVMLError", (Exception,), {})
        self.NVMLLibraryMismatchError = type("NVMLLibraryMismatchError", (Exception,), {})  # no NVMLError, as in pynvml
        for name, (code, _) in CODES.items():
            setattr(self, f"NVMLError_{name}", type(f"NVMLError_{name}", (self.NVMLError,), {"value": code}))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("nvml"):
            return found

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            if name in self.without:
                raise self.NVMLLibraryMismatchError(name) if name.endswith("Processes") else self._error("FunctionNotFound")
            if not self.users and name != "nvmlInit":
                raise self._error("Unknown")
            refuses = getattr(arguments[0], "refuses", {}) if arguments else {}
            refusal = refuses.get(name) or refuses.get("*")
            if refusal:
                raise self._error(refusal)
            return found(*arguments)

        return call

    def _error(self, name: str) -> Exception:
        return getattr(self, f"NVMLError_{name}")(CODES[name][1])

    # The library
    def nvmlInit(self):
        if self.error:
            raise self._error(self.error)
        self.users += 1

    def nvmlShutdown(self):
        self.users -= 1

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlSystemGetProcessName(self, pid):
        parts = self.gpus
        names = {number: name for part in parts for number, name, _ in part.processes}
        if not names.get(pid):
            raise self._error("NotFound")
        return names[pid]

    # A GPU
    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        gpu = self.gpus[index]
        if "nvmlDeviceGetHandleByIndex" in gpu.refuses:
            raise self._error(gpu.refuses["nvmlDeviceGetHandleByIndex"])
        return gpu

    def nvmlDeviceGetName(self, gpu):
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu):
        return gpu.uuid

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=gpu.bus_id)

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return gpu.compute_capability

    def nvmlDeviceGetMemoryInfo(self, gpu, version=None):
        if version and "nvmlDeviceGetMemoryInfo_v2" in self.without:
            raise self._error("FunctionNotFound")
        reserved = getattr(gpu, "reserved_bytes", 0)
        used = gpu.used_bytes if version else gpu.used_bytes + reserved
        return SimpleNamespace(total=gpu.total_bytes, used=used, free=gpu.total_bytes - gpu.used_bytes - reserved)

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=gpu.utilization, memory=0)

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return gpu.temperature_c

    def nvmlDeviceGetPowerUsage(self, gpu):
        return int(gpu.power_w * 1000)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return gpu.throttle_bits

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, _, used in gpu.processes]

    # MIG
    def nvmlDeviceGetMigMode(self, gpu):
        if gpu.compute_capability < (8, 0):
            raise self._error("NotSupported")
        return [int(gpu.mig_enabled), int(gpu.mig_enabled)]
