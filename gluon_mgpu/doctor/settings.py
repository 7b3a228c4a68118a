"""The runtime settings in effect, their sources and reasons."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, List, Sequence

from ..runtime import environment, openmp_threads

_KEEPS_MEMORY = "malloc keeps the memory of arrays for the next ones: the kernel clears fewer pages."
# The settings' values by this package and with GLUON_MGPU_RUNTIME=off, and the reason.
_SETTINGS = {
    "M_MMAP_MAX": ("0", "glibc's default", _KEEPS_MEMORY),
    "M_TRIM_THRESHOLD": ("never", "glibc's default", _KEEPS_MEMORY),
    "MXNET_CPU_TEMP_COPY": ("128", "4", "CPU contexts share so many temporary buffers, and wait for each other if few."),
    "MXNET_GPU_PARALLEL_RAND_COPY": ("1", "4", "Dropout of a GPU draws from so many generators in turn; with one, as seeded."),
    "CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "FASTEST_FIRST", "gpu(i) is GPU i of nvidia-smi; CUDA puts the fastest kind first."),
}
_OFF = "GLUON_MGPU_RUNTIME=off keeps the value that it has without gluon_mgpu."


@dataclass(frozen=True)
class Setting:
    """The current state of a runtime setting.

    Attributes
    ----------
    name : str
    value : str
        The value in effect.
    source : str
        Where it comes from: `environment`, `gluon_mgpu`, `MXNet's default`, or `off`: with
        `GLUON_MGPU_RUNTIME=off` it has the value that it would have without this package.
    reason : str
        The reason for the value, in a sentence.
    """

    name: str
    value: str
    source: str
    reason: str


def settings(contexts: Sequence[Any] = ()) -> List[Setting]:
    """Return the runtime settings in effect, their sources and reasons.

    Parameters
    ----------
    contexts : sequence of mxnet.Context
        Contexts to include, in addition to those used before. It reads their threads, which starts their engine workers.

    Examples
    --------
    >>> "MXNET_CPU_TEMP_COPY" in [setting.name for setting in settings()]
    True
    """
    ids = {context.device_id for context in contexts if context.device_type == "cpu"}
    found = [_threads_setting(device_id) for device_id in sorted(ids.union(openmp_threads.contexts_seen()))]
    return found + [_setting(name) for name in _SETTINGS]


def _threads_setting(device_id: int) -> Setting:
    name, value = f"threads of cpu({device_id})", str(openmp_threads.ask_threads(device_id) or "unknown")
    if environment.is_off():
        return Setting(name, value, "off", _OFF)
    if openmp_threads.were_set(device_id):
        reason = "A single context gets every core of this process; MXNet takes half of them."
        if value == "1":
            reason = "One thread each: several CPU contexts with several threads each can hang in OpenBLAS."
        return Setting(name, value, "gluon_mgpu", reason)
    is_given = any(os.environ.get(one) for one in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"))
    reason = environment.why_not_all_cores() or "It ran operations before use_devices. Call use_devices earlier."
    return Setting(name, value, "environment" if is_given else "MXNet's default", reason)


def _setting(name: str) -> Setting:
    ours, own, reason = _SETTINGS[name]
    if name in environment.set_here:
        return Setting(name, os.environ.get(name, ours), "gluon_mgpu", reason)
    if name in os.environ:
        return Setting(name, os.environ[name], "environment", reason)
    if environment.is_off():
        return Setting(name, own, "off", _OFF)
    return Setting(name, "unknown", "environment", environment.why_not_allocator() or "mallopt refused it.")
