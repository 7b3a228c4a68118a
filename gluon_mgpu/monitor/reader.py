"""Reads samples: the host and the GPUs at one moment."""

from __future__ import annotations

import time
from typing import Any, Mapping, Optional, Sequence

from .gpus import GpuReader
from .host import HostReader
from .sample import Sample


class Reader:
    """Reads samples of a process, its children and the machine. Rates are means since the previous sample.

    Parameters
    ----------
    pid : int, optional
        This process by default.
    gpu_ids : sequence of int, optional
        See `GpuReader`.
    options
        Options of `HostReader`.
    """

    def __init__(self, pid: Optional[int] = None, *, gpu_ids: Optional[Sequence[int]] = None, **options: Any) -> None:
        self.host = HostReader(pid, **options)
        self.gpus = GpuReader(gpu_ids)
        self._began = self._before = time.monotonic()

    def read(
        self, *, spent: Optional[Mapping[str, float]] = None, where: Optional[Mapping[str, str]] = None, **place: Any
    ) -> Sample:
        """Return a sample of this moment; `spent`, `where`, `step`, `epoch` and `steps_per_s` are as in `Sample`."""
        now = time.monotonic()
        over_s, self._before = now - self._before, now
        host, cpus = self.host.read()
        gpus = self.gpus.read(self.host.pids())
        return Sample(time.time(), now - self._began, over_s, host, cpus, gpus, spent=spent or {}, where=where or {}, **place)

    def close(self) -> None:
        """Close the connection to the driver."""
        self.gpus.close()
