"""All checks, one after the other: what is here, and what is wrong."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from ..runtime import environment
from ..runtime.cuda_libraries import CudaLibrary, libraries
from ..runtime.environment import Setting
from ..runtime.fat_binary import version_text
from ..runtime.units import format_bytes
from .build import Build, check_build, look_at_build, look_at_code
from .findings import Examination, Problem
from .gpus import Reading, barred, check_driver, check_gpus, code_for, explains, read_gpus
from .libraries import check_libraries
from .machine import Machine, Packages, check_packages, look_at_machine, look_at_packages
from .settings import Engine, Pools, check_openblas, check_settings, look_at_engine, look_at_pools
from .storage import (
    StorageLocation,
    check_checkpoints,
    check_shared_memory,
    check_temporary,
    look_at_checkpoints,
    look_at_shared_memory,
    look_at_temporary,
)
from .stores import Horovod, Store, check_horovod, look_at_horovod, stores_of

if TYPE_CHECKING:
    from mxnet import Context

    from ..devices.describe import DeviceInfo


@dataclass(frozen=True)
class Report:
    """What is here, and what is wrong. What could not be looked at is None or empty, and a finding says so.

    Attributes
    ----------
    machine : Machine or None
    packages : Packages
    build : Build
    libraries : tuple of CudaLibrary
        CUDA's.
    reading : Reading
        The NVIDIA driver and its GPUs.
    devices : tuple of DeviceInfo
        What MXNet can train on.
    settings : tuple of Setting
    pools : Pools
    places : tuple of StorageLocation
    stores : tuple of Store
    horovod : Horovod
    findings : tuple of Problem
    """

    machine: Optional[Machine]
    packages: Packages
    build: Build
    libraries: Tuple[CudaLibrary, ...]
    reading: Reading
    devices: Tuple[DeviceInfo, ...]
    settings: Tuple[Setting, ...]
    pools: Pools
    places: Tuple[StorageLocation, ...]
    stores: Tuple[Store, ...]
    horovod: Horovod
    findings: Tuple[Problem, ...]

    @property
    def stops_training(self) -> bool:
        """Whether something stops training on the devices that were asked for."""
        return any(finding.stops_training for finding in self.findings)

    def as_json(self) -> Dict[str, Any]:
        """Return everything as plain values."""
        driver = self.reading.driver
        return {
            "here": self.here(),
            "features": list(self.build.features),
            "gpu_code": self._gpu_code(),
            "driver": {
                "version": driver.version if driver else None,
                "cuda_version": driver.cuda_version if driver else None,
                "why_not": self.reading.why_not,
            },
            "gpus": [{**asdict(gpu), "code": code_for(gpu, self.build)} for gpu in self.reading.gpus],
            "links": [asdict(link) for link in driver.links] if driver else [],
            "libraries": [asdict(library) for library in self.libraries],
            "devices": [asdict(device) for device in self.devices],
            "settings": [asdict(setting) for setting in self.settings],
            "thread_pools": list(self.pools.found),
            "places": [asdict(place) for place in self.places],
            "stores": [asdict(store) for store in self.stores],
            "horovod": asdict(self.horovod),
            "problems": [asdict(finding) for finding in self.findings],
        }

    def here(self) -> Dict[str, str]:
        """Return the machine and the packages in words."""
        found = {}
        if self.machine:
            one = self.machine
            cores = f"{one.usable_cores} to use: this process is bound to {one.bound_cores} of {one.cores}"
            found["system"] = one.system
            found["CPU"] = one.cpu
            found["cores"] = f"{cores}, {f'and a cgroup allows {one.quota:g}' if one.quota else 'without a quota'}"
            found["memory"] = f"{format_bytes(one.memory_bytes)}, {format_bytes(one.available_bytes)} of it available"
        found.update(self.packages.versions)
        found["mxnet"] = self.build.version or found.get("mxnet", "?")
        found["mxnet's library"] = self.build.library or "not found"
        found["mxnet was built with"] = ", ".join(self.build.features) or "unknown: it cannot be imported"
        found["its code for GPUs"] = self.build.described()
        return found

    def _gpu_code(self) -> Optional[Dict[str, Any]]:
        if self.build.code is None:
            return None
        code = self.build.code
        ptx, machine_code = list(map(version_text, code.ptx)), list(map(version_text, code.machine_code))
        return {"machine_code": machine_code, "ptx": ptx, "num_binaries": code.num_binaries}


def examine(spec: str = "auto", *, output: str = "runs") -> Report:
    """Return what is here and what is wrong. It never raises: a check that fails is itself a finding.

    ```
    recorded: machine, packages, build, libraries, GPUs, devices, settings, places, stores ─► checks ─► findings
    ```

    Parameters
    ----------
    spec : str
        The devices to train on, as `use_devices` takes them; a small gradient is computed on each.
    output : str
        The folder that checkpoints will go to.
    """
    exam = Examination()
    here = exam.look("the machine", None, look_at_machine)
    packages = exam.look("packages", Packages({}, ()), look_at_packages)
    exam.judge("packages", check_packages, packages)
    build = _look_at_build(exam)
    found_libraries: List[CudaLibrary] = exam.look("CUDA libraries", [], libraries)
    exam.judge("CUDA libraries", check_libraries, found_libraries, build)
    reading = exam.look("GPUs", Reading(None, "nobody could ask", False), read_gpus)
    exam.judge("driver", check_driver, reading, build)
    exam.judge("GPUs", check_gpus, reading, build)
    with_mxnet = _WithMxnet() if build.why_not else _look_with_mxnet(spec, build, reading, exam)
    places = _look_at_places(output, exam)
    known_stores: List[Store] = exam.look("stores", [], stores_of, build.features) if build.features else []
    return Report(
        here,
        packages,
        build,
        tuple(found_libraries),
        reading,
        with_mxnet.devices,
        with_mxnet.settings,
        with_mxnet.pools,
        places,
        tuple(known_stores),
        with_mxnet.horovod,
        tuple(exam.findings),
    )


@dataclass(frozen=True)
class _WithMxnet:
    """What only a process that has imported MXNet can tell; the defaults where it has not."""

    devices: Tuple[DeviceInfo, ...] = ()
    settings: Tuple[Setting, ...] = ()
    pools: Pools = Pools((), "MXNet cannot be imported.")
    horovod: Horovod = Horovod("", "MXNet cannot be imported.", ())


def _look_at_build(exam: Examination) -> Build:
    build = exam.look("MXNet", Build("", "", "", "", (), None), look_at_build)
    build = replace(build, code=exam.look("GPU code", None, look_at_code, build.library))
    exam.judge("MXNet", check_build, build)
    return build


def _look_with_mxnet(spec: str, build: Build, reading: Reading, exam: Examination) -> _WithMxnet:
    from ..devices import describe  # here and not above: these import MXNet, which may be what is broken
    from . import training

    devices: List[DeviceInfo] = exam.look("devices", [], describe.describe_devices)
    known: Dict[int, str] = exam.look("GPUs", {}, barred, reading, build)
    devices = exam.look("devices", devices, training.with_reasons, devices, known)
    none: Tuple[List[Context], List[Problem]] = ([], [])
    contexts, wrong = exam.look("devices", none, training.try_devices, spec)
    exam.findings += wrong
    exam.judge("devices", training.check_devices, devices, exam.look("GPUs", False, explains, reading, build))
    settings: List[Setting] = exam.look("settings", [], environment.settings, contexts)
    exam.judge("settings", check_settings, settings, os.environ.get("GLUON_MGPU_RUNTIME", ""))
    engine = exam.look("OpenBLAS", Engine(1, False), look_at_engine)
    exam.judge("OpenBLAS", check_openblas, settings, build.features, engine)
    pools = exam.look("thread pools", Pools((), "The look failed."), look_at_pools)
    horovod = exam.look("Horovod", Horovod("", "", ()), look_at_horovod)
    exam.judge("Horovod", check_horovod, horovod)
    return _WithMxnet(tuple(devices), tuple(settings), pools, horovod)


def _look_at_places(output: str, exam: Examination) -> Tuple[StorageLocation, ...]:
    checkpoints = exam.look("disk space", None, look_at_checkpoints, output)
    temporary = exam.look("disk space", None, look_at_temporary)
    shared = exam.look("shared memory", None, look_at_shared_memory)
    if checkpoints is not None:
        exam.judge("disk space", check_checkpoints, checkpoints)
    exam.judge("disk space", check_temporary, temporary)
    exam.judge("shared memory", check_shared_memory, shared)
    return tuple(place for place in (checkpoints, temporary, shared) if place is not None)
