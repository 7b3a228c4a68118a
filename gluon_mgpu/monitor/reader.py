"""Reads samples: the host through psutil, and the GPUs through NVML."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..errors import DataError, MissingExtraError
from ..runtime.environment import require
from ..runtime.nvidia.nvml import DriverError, Gpu, Nvml
from ..runtime.nvidia.visible import visible_gpus
from .sample import GpuSample, HostSample, Sample


class Reader:
    """Reads samples of a process, its children, the machine and its GPUs. Rates are means since the previous sample.

    Parameters
    ----------
    pid : int, optional
        This process by default. 0 reads only the machine.
    gpu_ids : sequence of int, optional
        Numbers of MXNet's GPU contexts in this process, named `gpu(0)`. By default all GPUs of the machine, named `GPU 0`.

    Attributes
    ----------
    why_no_gpu : str
        Why no GPU can be read, and what to do; "" otherwise.

    Raises
    ------
    MissingExtraError
        psutil is not installed.
    DataError
        The process does not exist.
    """

    def __init__(self, pid: Optional[int] = None, *, gpu_ids: Optional[Sequence[int]] = None) -> None:
        self._psutil = require("psutil", "monitor", "monitor")
        self.pid = os.getpid() if pid is None else pid
        try:
            self._process: Any = self._psutil.Process(self.pid) if self.pid else None
        except self._psutil.Error as error:
            raise DataError(
                f"monitor: got pid {self.pid} ({error}); expected a running process. List processes with ps aux."
            ) from error
        self._gpu_ids = gpu_ids
        self.why_no_gpu = ""
        self._nvml: Optional[Nvml] = None
        if gpu_ids is None or gpu_ids:
            try:
                self._nvml = Nvml()
            except (MissingExtraError, DriverError) as error:
                self.why_no_gpu = str(error)
        self._began = time.monotonic()
        self._before: Tuple[float, Dict[int, float]] = (0.0, {})
        self._host()  # from here on, rates are known

    def read(self, *, step: int = 0, epoch: int = 0) -> Sample:
        """Return a sample of this moment."""
        return Sample(time.time(), time.monotonic() - self._began, step, epoch, self._host(), self._gpus())

    def is_running(self) -> bool:
        """Return whether the process still runs."""
        if self._process is None:
            return True
        try:
            return bool(self._process.is_running()) and self._process.status() != self._psutil.STATUS_ZOMBIE
        except self._psutil.Error:
            return False

    def close(self) -> None:
        """Close the connection to the driver."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _host(self) -> HostSample:
        now = time.monotonic()
        spent: Dict[int, float] = {}
        rss: Dict[int, int] = {}
        for process in self._tree():
            try:
                times = process.cpu_times()
                spent[process.pid], rss[process.pid] = times.user + times.system, process.memory_info().rss
            except self._psutil.Error:  # the process has ended
                continue
        before_at, before = self._before
        self._before = now, spent
        memory = self._psutil.virtual_memory()
        own_bytes, num_cores = rss.pop(self.pid, 0), os.cpu_count() or 1
        return HostSample(
            rss_bytes=own_bytes,
            children_bytes=sum(rss.values()),
            num_children=len(rss),
            cores=sum(value - before[pid] for pid, value in spent.items() if pid in before) / max(1e-3, now - before_at),
            machine_cores=self._psutil.cpu_percent() / 100 * num_cores,
            num_cores=num_cores,
            available_bytes=memory.available,
            total_bytes=memory.total,
        )

    def _tree(self) -> List[Any]:
        if self._process is None:
            return []
        try:
            return [self._process, *self._process.children(recursive=True)]
        except self._psutil.Error:  # it has ended
            return []

    def _gpus(self) -> Tuple[GpuSample, ...]:
        if self._nvml is None:
            return ()
        driver = self._nvml.read()
        if self._gpu_ids is None:
            return tuple(_sample(gpu, f"GPU {gpu.index}") for gpu in driver.gpus)
        seen = {device.number: device.gpu for device in visible_gpus(driver).devices}
        return tuple(_sample(seen[number], f"gpu({number})") for number in self._gpu_ids if number in seen)


def _sample(gpu: Gpu, name: str) -> GpuSample:
    return GpuSample(
        name,
        gpu.name,
        used_bytes=gpu.used_bytes,
        total_bytes=gpu.total_bytes,
        load=None if gpu.utilization is None else gpu.utilization / 100,
        temperature_c=gpu.temperature_c,
        power_w=gpu.power_w,
        throttled=gpu.throttle_reasons or (),
        trouble=gpu.trouble,
    )
