"""Runs all checks, one after the other, and returns the report."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from ..runtime import environment
from ..runtime.cuda_libraries import CudaLibrary, libraries
from ..runtime.environment import Setting
from ..runtime.fat_binary import version_text
from ..runtime.gpu_builds import why_built_elsewhere
from ..runtime.units import format_bytes
from .build import Build, check_build, inspect_build, inspect_code
from .findings import Examination, Problem
from .gpus import Reading, barred, check_driver, check_gpus, code_for, explains, read_gpus
from .libraries import check_libraries
from .machine import Machine, Packages, check_packages, inspect_machine, inspect_packages
from .settings import Engine, Pools, check_openblas, check_settings, inspect_engine, inspect_pools
from .storage import (
    StorageLocation,
    check_checkpoints,
    check_shared_memory,
    check_temporary,
    inspect_checkpoints,
    inspect_shared_memory,
    inspect_temporary,
)
from .stores import Horovod, Store, check_horovod, inspect_horovod, stores_of

if TYPE_CHECKING:
    from mxnet import Context

    from ..devices.describe import DeviceInfo


@dataclass(frozen=True)
class Report:
    """The state of the machine and its problems. A part that could not be inspected is None or empty, and a finding says so.

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
        The devices on which MXNet can train.
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
        """Whether a problem prevents training on the requested devices."""
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
        """Return descriptions of the machine and the packages."""
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
        if self.build.library:
            elsewhere = self.build.elsewhere
            found["mxnet was built"] = f"elsewhere: {elsewhere}" if elsewhere else f"for PyPI: {', '.join(self.packages.wheels)}"
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
    """Inspect the machine and return a report with all problems. It never raises: a check that fails is itself a finding.

    ```
    inspected: machine, packages, build, libraries, GPUs, devices, settings, places, stores ─► checks ─► findings
    ```

    Parameters
    ----------
    spec : str
        The devices to train on, as `use_devices` accepts them; a small gradient is computed on each.
    output : str
        The folder for checkpoints.
    """
    exam = Examination()
    here = exam.run("the machine", None, inspect_machine)
    packages = exam.run("packages", Packages({}, ()), inspect_packages)
    exam.check("packages", check_packages, packages)
    build = _inspect_build(exam, packages)
    found_libraries: List[CudaLibrary] = exam.run("CUDA libraries", [], libraries)
    exam.check("CUDA libraries", check_libraries, found_libraries, build)
    reading = exam.run("GPUs", Reading(None, "the driver could not be read", False), read_gpus)
    exam.check("driver", check_driver, reading, build)
    exam.check("GPUs", check_gpus, reading, build)
    with_mxnet = _WithMxnet() if build.why_not else _inspect_with_mxnet(spec, build, reading, exam)
    places = _inspect_places(output, exam)
    known_stores: List[Store] = exam.run("stores", [], stores_of, build.features) if build.features else []
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
    """The parts of the report that require MXNet; the defaults if it cannot be imported."""

    devices: Tuple[DeviceInfo, ...] = ()
    settings: Tuple[Setting, ...] = ()
    pools: Pools = Pools((), "MXNet cannot be imported.")
    horovod: Horovod = Horovod("", "MXNet cannot be imported.", ())


def _inspect_build(exam: Examination, packages: Packages) -> Build:
    build = exam.run("MXNet", Build("", "", "", "", (), None), inspect_build)
    build = replace(build, code=exam.run("GPU code", None, inspect_code, build.library))
    exam.check("MXNet", check_build, build)
    sign = why_built_elsewhere(build.version, build.library, packages.wheels, code=build.code, folders=packages.folders)
    return replace(build, elsewhere=sign)


def _inspect_with_mxnet(spec: str, build: Build, reading: Reading, exam: Examination) -> _WithMxnet:
    from ..devices import describe  # imported here, because these import MXNet, which may be broken
    from . import training

    devices: List[DeviceInfo] = exam.run("devices", [], describe.describe_devices)
    known: Dict[int, str] = exam.run("GPUs", {}, barred, reading, build)
    devices = exam.run("devices", devices, training.with_reasons, devices, known)
    none: Tuple[List[Context], List[Problem]] = ([], [])
    contexts, wrong = exam.run("devices", none, training.try_devices, spec)
    exam.findings += wrong
    exam.check("devices", training.check_devices, devices, exam.run("GPUs", False, explains, reading, build))
    settings: List[Setting] = exam.run("settings", [], environment.settings, contexts)
    exam.check("settings", check_settings, settings, os.environ.get("GLUON_MGPU_RUNTIME", ""))
    engine = exam.run("OpenBLAS", Engine(1, False), inspect_engine)
    exam.check("OpenBLAS", check_openblas, settings, build.features, engine)
    pools = exam.run("thread pools", Pools((), "The check failed."), inspect_pools)
    horovod = exam.run("Horovod", Horovod("", "", ()), inspect_horovod)
    exam.check("Horovod", check_horovod, horovod)
    return _WithMxnet(tuple(devices), tuple(settings), pools, horovod)


def _inspect_places(output: str, exam: Examination) -> Tuple[StorageLocation, ...]:
    checkpoints = exam.run("disk space", None, inspect_checkpoints, output)
    temporary = exam.run("disk space", None, inspect_temporary)
    shared = exam.run("shared memory", None, inspect_shared_memory)
    if checkpoints is not None:
        exam.check("disk space", check_checkpoints, checkpoints)
    exam.check("disk space", check_temporary, temporary)
    exam.check("shared memory", check_shared_memory, shared)
    return tuple(place for place in (checkpoints, temporary, shared) if place is not None)
