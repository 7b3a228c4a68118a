"""gluon-mgpu doctor: what is here, which runtime settings are in effect and why, and what is wrong."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Dict, List, Sequence, Tuple

import click
import mxnet as mx
import numpy as np
from mxnet import Context

from .. import __version__, runtime, threads
from ..devices import DeviceInfo, describe_devices, resolve_devices
from ..errors import DeviceError, MissingExtraError
from ._output import print_table

_FEATURES = ("OPENMP", "BLAS_OPEN", "MKLDNN", "CUDA", "CUDNN", "NCCL", "DIST_KVSTORE")
_OPTIONAL = {"matplotlib": "train", "scikit-learn": "train", "scipy": "train", "d2l": "d2l", "threadpoolctl": "doctor"}


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes
    ----------
    what : str
    to_do : str
    stops_training : bool
        Whether nothing can be trained on the devices that were asked for until it is mended.
    """

    what: str
    to_do: str
    stops_training: bool


@click.command()
@click.option(
    "--devices",
    "spec",
    default="auto",
    show_default=True,
    help="Devices to look at, as use_devices takes them: auto, gpu, cpu:2, 2.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def doctor(spec: str, as_json: bool) -> None:
    """Show the machine, the devices, each runtime setting with its reason, and what is wrong.

    Exits with 1 if something is wrong that stops training on the devices.
    """
    devices = describe_devices()
    here = {**_machine(devices[0]), **_packages()}
    contexts, problems = _try_devices(spec)
    settings = runtime.settings(contexts)
    pools, no_pools = _thread_pools()
    problems += _other_problems(devices)
    if as_json:
        report: Dict[str, Any] = {"here": here, "devices": [asdict(device) for device in devices]}
        report["settings"] = [asdict(setting) for setting in settings]
        report["thread_pools"] = pools
        report["problems"] = [asdict(problem) for problem in problems]
        click.echo(json.dumps(report, indent=1))
    else:
        print_table("what is here", ["what", "value"], [[name, value] for name, value in here.items()])
        print_table("devices", ["device", "what it is", "can train", "why not"], [_device_row(device) for device in devices])
        rows = [[setting.name, setting.value, setting.source] for setting in settings]
        print_table("runtime settings", ["setting", "value", "set by"], rows)
        print_table("why", ["setting", "reason"], [[setting.name, setting.reason] for setting in settings])  # 80 columns hold it
        columns = ["library", "kind", "threads"]
        rows = [[str(pool[name]) for name in columns] for pool in pools]
        print_table("thread pools in this process", columns, rows or [["not looked for", no_pools, "-"]])
        wrong = [[problem.what, problem.to_do, "yes" if problem.stops_training else "no"] for problem in problems]
        print_table("what is wrong", ["what", "what to do", "stops training"], wrong or [["nothing", "nothing", "no"]])
    if any(problem.stops_training for problem in problems):
        sys.exit(1)


def _machine(cpu: DeviceInfo) -> Dict[str, str]:
    quota = threads.cpu_quota()
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = f"{runtime.num_cores()} to use: this process is bound to {bound} of {os.cpu_count()}"
    return {
        "system": platform.platform(),
        "CPU": cpu.description,
        "cores": f"{cores}, {f'and a cgroup allows {quota:g}' if quota else 'without a quota'}",
        "memory": f"{cpu.memory_bytes / 2**30:.1f} GiB",
    }


def _packages() -> Dict[str, str]:
    """Return the version of each package, or the extra that brings it."""
    found = {"Python": platform.python_version(), "gluon_mgpu": __version__, "mxnet": mx.__version__, "numpy": np.__version__}
    enabled = mx.runtime.Features()
    found["mxnet was built with"] = ", ".join(name for name in _FEATURES if enabled.is_enabled(name)) or "none of its options"
    for name, extra in _OPTIONAL.items():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = f"not installed: pip install 'gluon_mgpu[{extra}]'"
    return found


def _try_devices(spec: str) -> Tuple[List[Context], List[Problem]]:
    """Return the contexts, [] where they are not there, and what stops training on them: a small gradient is computed on each."""
    try:
        contexts = resolve_devices(spec)
    except DeviceError as error:
        what, _, to_do = str(error).partition("; need ")
        return [], [Problem(what, f"Need {to_do}", True)]
    return contexts, [problem for context in contexts for problem in _try_training(context)]


def _try_training(context: Context) -> List[Problem]:
    """Return what is wrong with the gradient of x * x on a device, which is 2 x."""
    try:
        x = mx.nd.array([1.0, -2.0], ctx=context)
        x.attach_grad()
        with mx.autograd.record():
            y = x * x
        y.backward()
        found = x.grad.asnumpy().tolist()
    except mx.MXNetError as error:
        what = f"{context} failed: {str(error).strip().splitlines()[-1]}"
        return [Problem(what, "Train on other devices: --devices cpu.", True)]
    if found != [2.0, -4.0]:
        return [Problem(f"{context} computed {found}, not [2.0, -4.0].", "Train on other devices: --devices cpu.", True)]
    return []


def _other_problems(devices: Sequence[DeviceInfo]) -> List[Problem]:
    """Return what is wrong, but lets training go on."""
    found = [Problem(f"{one.name} {one.description} cannot be used.", one.reason, False) for one in devices if not one.usable]
    names = (str(package.metadata["Name"]).lower() for package in metadata.distributions())
    wheels = sorted({name for name in names if re.fullmatch(r"mxnet(-cu\d+|-native)?", name)})
    if len(wheels) > 1:
        to_do = f"Run pip uninstall {' '.join(wheels)}, and install one of them again."
        found.append(Problem(f"{' and '.join(wheels)} are installed over one another.", to_do, False))
    switch = os.environ.get("GLUON_MGPU_RUNTIME", "")
    if switch and not runtime.is_off():
        found.append(Problem(f"GLUON_MGPU_RUNTIME={switch} does nothing.", "Set it to off, or unset it.", False))
    late = [setting.name for setting in runtime.settings() if setting.reason == runtime.TOO_LATE]
    if late:
        found.append(Problem(f"{', '.join(late)} could not be set.", runtime.TOO_LATE, False))
    return found


def _thread_pools() -> Tuple[List[Dict[str, Any]], str]:
    """Return what threadpoolctl finds, and what to do where it is not there."""
    try:
        found = runtime.require("threadpoolctl", "doctor", "doctor").threadpool_info()
    except MissingExtraError as error:
        return [], str(error)
    keys = {"library": "filepath", "kind": "internal_api", "version": "version", "threads": "num_threads"}
    pools = [{name: pool[key] for name, key in keys.items()} for pool in found]
    return [{**pool, "library": "/".join(pool["library"].split(os.sep)[-2:])} for pool in pools], ""


def _device_row(device: DeviceInfo) -> List[str]:
    return [device.name, device.description, "yes" if device.usable else "no", device.reason]
