"""Reads the NVIDIA driver's GPUs through NVML: memory, load, temperature and processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, List, Optional, Tuple

from ...errors import MissingExtraError
from .. import environment

_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: used memory belongs to programs
# Bits of nvmlDeviceGetCurrentClocksThrottleReasons. An idle GPU, bit 1, is not slowed down. Source: nvml.h.
THROTTLE_REASONS = {
    0x002: "application clocks",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "temperature",
    0x040: "temperature, by hardware",
    0x080: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU.

    Attributes
    ----------
    pid : int
        Inside a container it may be the host's number, which belongs to another process or none here.
    name : str
        Its program; "" if the process has ended, is hidden, or may not be read.
    used_bytes : int or None
        Its memory on the GPU.
    """

    pid: int
    name: str
    used_bytes: Optional[int]


@dataclass(frozen=True)
class Gpu:
    """A GPU at one moment. Values that the card or the driver does not report are None.

    Attributes
    ----------
    index : int
        Its position in the order of PCI addresses, as in `nvidia-smi`.
    uuid : str
        `GPU-...`; "", like the name, if `trouble` prevented reading it.
    name : str
    pci_bus_id : str
        `00000000:3B:00.0`
    total_bytes, used_bytes, free_bytes : int or None
        Used memory belongs to programs; memory of the driver is neither used nor free.
    utilization : int or None
        Percent of the last sampling period, a sixth of a second to one second, in which a kernel ran.
    temperature_c : int or None
    power_w : float or None
    throttle_reasons : tuple of str, or None
        Why its clocks are below their maximum, from `THROTTLE_REASONS`.
    compute_capability : tuple of (int, int), or None
    processes : tuple of GpuProcess, or None
        Processes that compute. A container may hide those outside it, so an empty tuple does not mean that the GPU is idle.
    mig_enabled : bool
        Whether it is in MIG mode, in which CUDA shows a process one part of it and no other GPU.
    trouble : str
        NVML's error if the GPU failed: `GPU is lost`.
    """

    index: int
    uuid: str = ""
    name: str = ""
    pci_bus_id: str = ""
    total_bytes: Optional[int] = None
    used_bytes: Optional[int] = None
    free_bytes: Optional[int] = None
    utilization: Optional[int] = None
    temperature_c: Optional[int] = None
    power_w: Optional[float] = None
    throttle_reasons: Optional[Tuple[str, ...]] = None
    compute_capability: Optional[Tuple[int, int]] = None
    processes: Optional[Tuple[GpuProcess, ...]] = None
    mig_enabled: bool = False
    trouble: str = ""


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and its GPUs at one moment.

    Attributes
    ----------
    version : str
        `535.104.05`
    cuda_version : str
        The newest CUDA that it can run: `12.2`.
    gpus : tuple of Gpu
    """

    version: str
    cuda_version: str
    gpus: Tuple[Gpu, ...]


class DriverError(RuntimeError):
    """The NVIDIA driver, or its library NVML, is missing or reports an error."""


class Nvml:
    """NVML, opened once and read many times.

    Constant values are read when it is opened; `read()` reads the others, with about ten calls per GPU.

    Raises
    ------
    MissingExtraError
        The package nvidia-ml-py is not installed.
    DriverError
        There is no NVIDIA driver, or it reports an error.

    Examples
    --------
    >>> with Nvml() as nvml:                                        # doctest: +SKIP
    ...     print([gpu.free_bytes for gpu in nvml.read().gpus])
    """

    def __init__(self) -> None:
        self._nvml = environment.require("pynvml", "gpu", "nvml")
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise _driver_error(self._nvml, error) from error
        try:
            self._version = str(self._ask("nvmlSystemGetDriverVersion") or "")
            self._cuda_version = _cuda_version(self._ask("nvmlSystemGetCudaDriverVersion_v2"))
            self._known = self._find()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the library. A second call does nothing."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError as error:
                environment.logger.debug("nvml: %s while closing it", error)

    def read(self) -> Driver:
        """Return the driver's current values.

        Raises
        ------
        DriverError
            It was closed.
        """
        if self._nvml is None:
            raise DriverError("nvml: got a library that was closed; expected an open one. Make a new Nvml().")
        gpus = tuple(self._read_gpu(known, handle) for known, handle in self._known)
        return Driver(self._version, self._cuda_version, gpus)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return the result of a function of NVML, None if it fails or does not exist. The error of a lost GPU is raised."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError, AttributeError, UnicodeDecodeError):
            return None  # also where the driver is older than the package

    def _find(self) -> List[Tuple[Gpu, Any]]:
        """Return each GPU's constant values and handle, in the order of PCI addresses; a handle that cannot be opened is None."""
        found = []
        for i in range(self._ask("nvmlDeviceGetCount") or 0):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(i)
                pci = self._ask("nvmlDeviceGetPciInfo", handle)
            except self._nvml.NVMLError:
                handle, pci = None, None
            found.append((pci.busId if pci else "", handle))
        found.sort(key=lambda one: (not one[0], one[0]))
        return [(self._identify(i, address, handle), handle) for i, (address, handle) in enumerate(found)]

    def _identify(self, index: int, address: str, handle: Any) -> Gpu:
        """Return the constant values of a GPU."""
        if handle is None:
            return Gpu(index, trouble="The driver lists it, but cannot open it.")
        try:
            return Gpu(
                index,
                uuid=self._ask("nvmlDeviceGetUUID", handle) or "",
                name=self._ask("nvmlDeviceGetName", handle) or "",
                pci_bus_id=address,
                compute_capability=self._ask("nvmlDeviceGetCudaComputeCapability", handle),
            )
        except self._nvml.NVMLError as error:
            return Gpu(index, trouble=str(error))

    def _read_gpu(self, known: Gpu, handle: Any) -> Gpu:
        """Return the current values of a GPU."""
        if handle is None:
            return known
        try:
            total, used, free = self._memory(handle)
            rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
            milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
            mig_mode = self._ask("nvmlDeviceGetMigMode", handle)
            return replace(
                known,
                total_bytes=total,
                used_bytes=used,
                free_bytes=free,
                utilization=rates.gpu if rates is not None else None,
                temperature_c=self._ask("nvmlDeviceGetTemperature", handle, 0),  # NVML_TEMPERATURE_GPU
                power_w=None if milliwatts is None else milliwatts / 1000,
                throttle_reasons=self._throttle_reasons(handle),
                processes=self._processes(handle),
                mig_enabled=bool(mig_mode and mig_mode[0]),
            )
        except self._nvml.NVMLError as error:
            return replace(known, trouble=str(error))

    def _memory(self, handle: Any) -> Tuple[Optional[int], Optional[int], Optional[int]]:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
        if memory is None:  # drivers before 510, which count their own memory as used
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return (memory.total, memory.used, memory.free) if memory is not None else (None, None, None)

    def _throttle_reasons(self, handle: Any) -> Optional[Tuple[str, ...]]:
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)  # its name in all drivers; 535 has a new one
        return None if bits is None else tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)

    def _processes(self, handle: Any) -> Optional[Tuple[GpuProcess, ...]]:
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if found is None:
            return None
        names = [self._ask("nvmlSystemGetProcessName", one.pid) or "" for one in found]
        return tuple(GpuProcess(one.pid, name, one.usedGpuMemory) for one, name in zip(found, names))


def read_driver() -> Driver:
    """Return the current values of the NVIDIA driver and its GPUs. Use `Nvml` to read them repeatedly.

    Raises
    ------
    MissingExtraError
        The package nvidia-ml-py is not installed.
    DriverError
        There is no NVIDIA driver, or it reports an error.
    """
    with Nvml() as nvml:
        return nvml.read()


def try_driver() -> Tuple[Optional[Driver], str]:
    """Return the result of `read_driver` and "", or None and the reason why it failed."""
    try:
        return read_driver(), ""
    except (MissingExtraError, DriverError) as error:
        return None, str(error)


def _driver_error(nvml: Any, error: Exception) -> DriverError:
    to_do = {
        nvml.NVMLError_LibraryNotFound: "Install NVIDIA's driver, which brings libnvidia-ml.so.1; a container gets it with "
        "--gpus all.",
        nvml.NVMLError_DriverNotLoaded: "Load NVIDIA's kernel module: sudo modprobe nvidia; after installing the driver, reboot.",
        nvml.NVMLError_NoPermission: "Get permission to read /dev/nvidiactl and /dev/nvidia0.",
        nvml.NVMLError_LibRmVersionMismatch: "The driver was updated while it was loaded: reboot.",
    }
    return DriverError(
        f"nvml: got {str(error)!r} from the NVIDIA driver; expected a working driver. "
        f"{to_do.get(type(error), 'Check the output of nvidia-smi.')}"
    )


def _cuda_version(number: Optional[int]) -> str:
    """Return 12020 as "12.2"."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""
