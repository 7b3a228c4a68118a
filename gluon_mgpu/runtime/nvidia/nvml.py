"""Reads the NVIDIA driver's GPUs through NVML: memory, load, temperature, processes, MIG devices, and links."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

from ...errors import MissingExtraError
from .. import environment
from .driver import THROTTLE_REASONS as THROTTLE_REASONS
from .driver import Driver as Driver
from .driver import Gpu as Gpu
from .driver import GpuProcess as GpuProcess
from .driver import Link as Link
from .driver import MigDevice as MigDevice

# nvmlDeviceGetTopologyCommonAncestor: the connection of two GPUs. Source: nvml.h, nvmlGpuTopologyLevel_t.
_PATHS = {
    0: "on one board",
    10: "through one PCIe switch",
    20: "through several PCIe switches",
    30: "through one host bridge",
    40: "through several host bridges of one NUMA node",
    50: "from one NUMA node to another",
}
_LANE_BYTES_PER_S = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}  # after encoding, each way. PCI-SIG.

_P2P_READ, _P2P_NVLINK = 0, 2  # nvmlGpuP2PCapsIndex_t; the module's own NVML_P2P_CAPS_INDEX_READ is a tuple
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: used memory belongs to programs
_FIELD_NVLINK_MBYTES_PER_S = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON


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
            self._handles = self._find()
            self._version = str(self._ask("nvmlSystemGetDriverVersion") or "")
            self._cuda_version = _cuda_version(
                self._ask("nvmlSystemGetCudaDriverVersion_v2", or_else="nvmlSystemGetCudaDriverVersion")
            )
            self._known = [self._identify(i, handle) for i, handle in enumerate(self._handles)]
            self._links: Optional[Tuple[Link, ...]] = None
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

    def read(self, *, links: bool = True) -> Driver:
        """Return the driver's current values.

        Parameters
        ----------
        links : bool
            Whether to include the links between GPUs, which are read once.

        Raises
        ------
        DriverError
            It was closed.
        """
        if self._nvml is None:
            raise DriverError("nvml: got a library that was closed; expected an open one. Make a new Nvml().")
        if links and self._links is None:
            self._links = tuple(self._find_links())
        gpus = tuple(self._read_gpu(known, handle) for known, handle in zip(self._known, self._handles))
        return Driver(self._version, self._cuda_version, gpus, self._links if links and self._links else ())

    def _ask(self, function: str, *arguments: Any, or_else: str = "") -> Any:
        """Return the result of a function of NVML, None if it fails or does not exist; `or_else` is its older name.

        The error of a lost GPU is raised.
        """
        ask = getattr(self._nvml, function, None)
        if ask is not None:
            try:
                return ask(*arguments)
            except self._nvml.NVMLError_GpuIsLost:
                raise
            except (self._nvml.NVMLError_FunctionNotFound, self._nvml.NVMLLibraryMismatchError):
                pass  # the driver is older than the package
            except (self._nvml.NVMLError, UnicodeDecodeError):
                return None
        return self._ask(or_else, *arguments) if or_else else None

    def _find(self) -> List[Any]:
        """Return the GPUs' handles in the order of their PCI addresses; None for one that cannot be opened, at the end."""
        found: List[Tuple[bool, str, int, Any]] = []
        for i in range(self._ask("nvmlDeviceGetCount") or 0):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(i)
                pci = self._ask("nvmlDeviceGetPciInfo", handle)
            except self._nvml.NVMLError:
                handle, pci = None, None
            found.append((pci is None, pci.busId if pci else "", i, handle))
        return [handle for *_, handle in sorted(found, key=lambda one: one[:3])]

    def _identify(self, index: int, handle: Any) -> Gpu:
        """Return the constant values of a GPU."""
        if handle is None:
            return Gpu(index, trouble="The driver lists it, but cannot open it.")
        try:
            pci = self._ask("nvmlDeviceGetPciInfo", handle)
            return Gpu(
                index,
                uuid=self._ask("nvmlDeviceGetUUID", handle) or "",
                name=self._ask("nvmlDeviceGetName", handle) or "",
                pci_bus_id=pci.busId if pci else "",
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
            mig_mode = self._ask("nvmlDeviceGetMigMode", handle)
            mig_enabled = bool(mig_mode and mig_mode[0])
            return Gpu(
                known.index,
                known.uuid,
                known.name,
                known.pci_bus_id,
                total,
                used,
                free,
                utilization=rates.gpu if rates is not None else None,
                temperature_c=self._ask("nvmlDeviceGetTemperature", handle, 0),  # NVML_TEMPERATURE_GPU
                power_w=_watts(self._ask("nvmlDeviceGetPowerUsage", handle)),
                power_limit_w=_watts(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
                throttle_reasons=self._throttle_reasons(handle),
                compute_capability=known.compute_capability,
                processes=self._processes(handle),
                mig=self._mig_devices(handle) if mig_enabled else (),
                mig_enabled=mig_enabled,
                trouble=known.trouble,
            )
        except self._nvml.NVMLError as error:
            return Gpu(known.index, known.uuid, known.name, known.pci_bus_id, trouble=str(error))

    def _memory(self, handle: Any) -> Tuple[Optional[int], Optional[int], Optional[int]]:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
        if memory is None:  # drivers before 510, which count their own memory as used
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return (memory.total, memory.used, memory.free) if memory is not None else (None, None, None)

    def _throttle_reasons(self, handle: Any) -> Optional[Tuple[str, ...]]:
        old = "nvmlDeviceGetCurrentClocksThrottleReasons"  # its name before driver 535
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle, or_else=old)
        return None if bits is None else tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)

    def _processes(self, handle: Any) -> Optional[Tuple[GpuProcess, ...]]:
        old = "nvmlDeviceGetComputeRunningProcesses_v2"  # drivers before 510
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", handle, or_else=old)
        if found is None:
            return None
        return tuple(GpuProcess(one.pid, self._name_of(one.pid), one.usedGpuMemory) for one in found)

    def _name_of(self, pid: int) -> str:
        return self._ask("nvmlSystemGetProcessName", pid) or ""

    def _mig_devices(self, handle: Any) -> Tuple[MigDevice, ...]:
        found = []
        for i in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            part = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
            if part is None:  # a place without a device
                continue
            total, _, free = self._memory(part)
            gi, ci = self._ask("nvmlDeviceGetGpuInstanceId", part), self._ask("nvmlDeviceGetComputeInstanceId", part)
            found.append(
                MigDevice(
                    self._ask("nvmlDeviceGetUUID", part) or "",
                    self._ask("nvmlDeviceGetName", part) or "",
                    total,
                    free,
                    self._processes(part),
                    None if gi is None or ci is None else (gi, ci),
                )
            )
        return tuple(found)

    def _find_links(self) -> List[Link]:
        pairs = [(a, b) for b in range(len(self._handles)) for a in range(b)]
        found = []
        for a, b in sorted(pairs):
            try:
                found.append(self._link(a, b))
            except self._nvml.NVMLError as error:
                environment.logger.debug("nvml: no answer about the link of GPUs %d and %d: %s", a, b, error)
        return found

    def _link(self, a: int, b: int) -> Link:
        ends = (self._handles[a], self._handles[b])
        if None in ends:
            return Link(a, b, "PCIe")
        path = _PATHS.get(self._ask("nvmlDeviceGetTopologyCommonAncestor", *ends), "")
        reads = self._ask("nvmlDeviceGetP2PStatus", *ends, _P2P_READ)
        peer_access = None if reads is None else reads == 0
        if self._ask("nvmlDeviceGetP2PStatus", *ends, _P2P_NVLINK) == 0:
            num_links = self._num_nvlinks(a, b)
            speeds = [self._nvlink_bytes_per_s(end) for end in ends]
            known = [speed for speed in speeds if speed]
            return Link(a, b, "NVLink", path, num_links, min(known) * num_links if known and num_links else None, peer_access)
        slower = min(self._pcie_bytes_per_s(end) for end in ends)
        return Link(a, b, "PCIe", path, None, slower or None, peer_access)

    def _num_nvlinks(self, a: int, b: int) -> Optional[int]:
        """Return the number of NVLinks between two GPUs: those that end at the other one; with a switch, all active ones."""
        ends = [self._nvlink_ends(self._handles[i]) for i in (a, b)]
        direct = ends[0].count(self._known[b].pci_bus_id.lower())
        return direct or min(map(len, ends)) or None

    def _nvlink_ends(self, handle: Any) -> List[str]:
        """Return the PCI address at the other end of each active NVLink."""
        found = []
        for i in range(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 18)):
            if self._ask("nvmlDeviceGetNvLinkState", handle, i):
                pci = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, i)
                found.append(pci.busId.lower() if pci is not None else "")
        return found

    def _nvlink_bytes_per_s(self, handle: Any) -> Optional[float]:
        values = self._ask("nvmlDeviceGetFieldValues", handle, [_FIELD_NVLINK_MBYTES_PER_S])
        if not values or values[0].nvmlReturn:
            return None
        return values[0].value.uiVal * 1e6 or None

    def _pcie_bytes_per_s(self, handle: Any) -> float:
        generation = self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        width = self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
        return _LANE_BYTES_PER_S.get(generation, 0.0) * (width or 0)


def read_driver(*, links: bool = True) -> Driver:
    """Return the current values of the NVIDIA driver and its GPUs. Use `Nvml` to read them repeatedly.

    Parameters
    ----------
    links : bool
        Whether to read the links between GPUs.

    Raises
    ------
    MissingExtraError
        The package nvidia-ml-py is not installed.
    DriverError
        There is no NVIDIA driver, or it reports an error.
    """
    with Nvml() as nvml:
        return nvml.read(links=links)


def try_driver(*, links: bool = True) -> Tuple[Optional[Driver], str]:
    """Return the result of `read_driver` and "", or None and the reason why it failed."""
    try:
        return read_driver(links=links), ""
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


def _watts(milliwatts: Optional[int]) -> Optional[float]:
    return None if milliwatts is None else milliwatts / 1000
