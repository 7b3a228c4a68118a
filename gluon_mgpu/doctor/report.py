"""Runs all checks, and returns the report. This process imports no MXNet: that may be what fails."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, Optional, Tuple

from ..runtime import environment
from ..runtime.nvidia.nvml import Driver, try_driver
from ..runtime.units import format_bytes
from .findings import Examination, Problem, describe_error
from .gpu_checks import NVRTC, check_driver, check_gpus
from .machine_checks import Machine, Packages, check_packages, inspect_machine, inspect_packages
from .operation_checks import check_operations

_LIMIT_S = 300.0  # for MXNet's import and the gradients; a GPU's first operation may compile for minutes
_NOTHING: Dict[str, Any] = {
    "version": "", "features": [], "libraries": [], "devices": [], "trained": [], "settings": [], "thread_pools": []
}  # fmt: skip

Row = Tuple[str, str]


@dataclass(frozen=True)
class Report:
    """The state of the machine and its problems. A part that could not be inspected is None or empty, and a finding says so.

    Attributes
    ----------
    machine : Machine or None
    packages : Packages
    driver : Driver or None
    why_no_driver : str
    mxnet : dict
        The result of `probe.probe`; its lists are empty if MXNet cannot be imported.
    findings : tuple of Problem
    """

    machine: Optional[Machine]
    packages: Packages
    driver: Optional[Driver]
    why_no_driver: str
    mxnet: Dict[str, Any]
    findings: Tuple[Problem, ...]

    @property
    def stops_training(self) -> bool:
        """Whether a problem prevents training on the requested devices."""
        return any(finding.stops_training for finding in self.findings)

    def as_json(self) -> Dict[str, Any]:
        """Return everything as plain values."""
        found = asdict(self)
        found["problems"] = found.pop("findings")
        return found

    def rows(self, *, verbose: bool = False) -> Iterator[Row]:
        """Yield a short report as labels and lines: versions, GPUs, devices, threads; all details with `verbose`."""
        if self.machine:
            one = self.machine
            yield "machine", f"{one.cpu}, {one.usable_cores} of {one.cores} cores, {one.system}"
            yield "memory", f"{format_bytes(one.memory_bytes)}, {format_bytes(one.available_bytes)} of it available"
        yield from self.packages.versions.items()
        if self.packages.wheels and self.packages.versions.get("numpy", "").startswith("2."):
            yield "pip check", "reports that mxnet asks for numpy<2 and graphviz<0.9: ignore it, gluon_mgpu adapts MXNet"
        built = "with CUDA" if "CUDA" in self.mxnet["features"] else "a build for CPUs"
        yield "imported mxnet", f"{self.mxnet['version']}, {built}" if self.mxnet["version"] else "no: see the problems"
        yield "NVIDIA driver", _driver_text(self.driver) or f"not read: {self.why_no_driver.partition('; expected ')[0]}"
        for gpu in self.driver.gpus if self.driver else ():
            capability = ".".join(map(str, gpu.compute_capability or "?"))
            memory = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
            yield f"GPU {gpu.index}", f"{gpu.name or gpu.trouble}, compute capability {capability}, {memory}"
        for device in self.mxnet["devices"]:
            checked = "; its gradient was checked" if device["name"] in self.mxnet["trained"] else ""
            yield device["name"], f"can train{checked}" if device["usable"] else f"cannot train: {device['reason']}"
        listed = [device["name"] for device in self.mxnet["devices"]]  # of several contexts of the CPU, the first one
        yield from ((name, "its gradient was checked") for name in self.mxnet["trained"] if name not in listed)
        for setting in self.mxnet["settings"]:
            if verbose:
                yield setting["name"], f"{setting['value']}, by {setting['source']}. {setting['reason']}"
            elif setting["name"].startswith("threads"):
                yield setting["name"], f"{setting['value']}, by {setting['source']}"
        if verbose:
            yield from self._details()

    def _details(self) -> Iterator[Row]:
        yield "MXNet's features", ", ".join(self.mxnet["features"]) or "?"
        yield from {**self.packages.optional, **self.packages.cuda}.items()
        yield from (("loaded library", file) for file in self.mxnet["libraries"])
        yield from (("thread pool", f"{pool['threads']} threads, {pool['library']}") for pool in self.mxnet["thread_pools"])
        for gpu in self.driver.gpus if self.driver else ():
            for one in gpu.processes or ():
                yield f"on GPU {gpu.index}", f"process {one.pid} ({one.name or 'name hidden'}), {format_bytes(one.used_bytes)}"


def _driver_text(driver: Optional[Driver]) -> str:
    return f"{driver.version}, runs CUDA up to {driver.cuda_version or '?'}" if driver else ""


def examine(spec: str = "auto") -> Report:
    """Inspect the machine and return a report with all problems. It never raises: a check that fails is itself a finding.

    ```
    this process: machine, packages, driver ─┐
    a new process: MXNet, devices, settings ─┼─► findings
    one for each GPU: operations, copies    ─┘
    ```

    Parameters
    ----------
    spec : str
        The devices to train on, as `use_devices` accepts them; a small gradient is computed on each, and on GPUs one
        operation of each library, and copies to the others.
    """
    exam = Examination()
    machine = exam.run("the machine", None, inspect_machine)
    packages = exam.run("packages", Packages({}, {}, {}, ()), inspect_packages)
    exam.check("packages", check_packages, packages)
    mxnet = exam.run("MXNet", dict(_NOTHING), run_probe, spec)
    exam.findings += [Problem(**one) for one in mxnet.pop("problems", [])]
    gpus = [name for name in mxnet["trained"] if name.startswith("gpu") and mxnet["version"].startswith("1.")]
    for gpu in gpus:
        exam.check("devices", check_operations, gpu, [other for other in gpus if other != gpu])
    driver, why_not = exam.run("GPUs", (None, "the driver could not be read"), try_driver)
    has_cuda = "CUDA" in mxnet["features"] or any("-cu" in wheel for wheel in packages.wheels)
    exam.check("driver", lambda: check_driver(driver, why_not, has_cuda=has_cuda, nvrtc=packages.cuda.get(NVRTC, "")))
    if driver is not None:
        exam.check("GPUs", check_gpus, driver)
    return Report(machine, packages, driver, why_not, mxnet, tuple(dict.fromkeys(exam.findings)))


def run_probe(spec: str) -> Dict[str, Any]:
    """Return the result of `probe.probe` in a new process; why it failed as a problem."""
    command = [sys.executable, "-W", "ignore", "-m", "gluon_mgpu.doctor.probe", spec]
    try:
        done = subprocess.run(command, env=environment.without_ours(), capture_output=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        to_do = "Run gluon-mgpu doctor --devices cpu; if that works, a GPU or its driver hangs: restart the machine."
        return {**_NOTHING, "problems": [asdict(Problem("MXNet", f"It did not answer within {_LIMIT_S:.0f} s.", to_do, True))]}
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode == 0 and lines:
        found: Dict[str, Any] = json.loads(lines[-1])
        return found
    errors = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"it ended with status {done.returncode}"]
    what, to_do = describe_error(errors[-1])
    return {**_NOTHING, "problems": [asdict(Problem("MXNet", f"It cannot be used: {what}", to_do, True))]}
