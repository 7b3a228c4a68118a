"""What only a process with MXNet can find out: its build, the devices, the settings, and a gradient on each device.

`python -m gluon_mgpu.doctor.probe auto` prints it as JSON. The doctor runs it in a process of its own, which may crash.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from typing import Any, Dict, List, Sequence

from ..devices.describe import DeviceInfo, describe_devices
from ..devices.select import resolve_devices
from ..errors import DeviceError, MissingExtraError, last_line
from ..runtime import environment, openmp_threads
from ..runtime.loaded import mxnet as mx
from .findings import Examination, Problem, describe_error
from .settings import Setting
from .settings import settings as settings_of

_PREFIX = "threads of cpu("
_LIBRARY = re.compile(r"lib(cudart|cudnn|cublas|nccl|cufft|curand|cusolver|nvrtc|cuda)[-_.]\S*|libmxnet\.so")


def probe(spec: str) -> Dict[str, Any]:
    """Return MXNet's version, features and libraries, the devices, settings, thread pools and problems, as plain values."""
    exam = Examination()
    features = sorted(name for name, feature in mx.runtime.Features().items() if feature.enabled)
    devices = exam.run("devices", [], describe_devices)
    contexts: List[mx.Context] = []
    try:
        contexts = resolve_devices(spec)
    except DeviceError as error:
        exam.findings.append(Problem("devices", *describe_error(str(error)), True))
    for context in contexts:
        exam.check("devices", try_gradient, context)
    exam.check("devices", check_devices, devices)
    settings = exam.run("settings", [], settings_of, contexts)
    exam.check("settings", check_settings, os.environ.get("GLUON_MGPU_RUNTIME", ""))
    several = openmp_threads.num_engine_workers() > 1
    exam.check("OpenBLAS", check_openblas, settings, features, several)
    return {
        "version": mx.__version__,
        "features": features,
        "libraries": exam.run("libraries", [], loaded_libraries),
        "devices": [asdict(one) for one in devices],
        "trained": [str(context) for context in contexts],
        "settings": [asdict(one) for one in settings],
        "thread_pools": exam.run("thread pools", [], thread_pools),
        "problems": [asdict(one) for one in exam.findings],
    }


def try_gradient(context: mx.Context) -> List[Problem]:
    """Return a problem if a device computes a wrong gradient of x * x, which is 2 x."""
    to_do = "Train on other devices: --devices cpu."
    try:
        x = mx.nd.array([1.0, -2.0], ctx=context)
        x.attach_grad()
        with mx.autograd.record():
            y = x * x
        y.backward()
        found = x.grad.asnumpy().tolist()
    except mx.MXNetError as error:
        return [Problem("devices", f"{context} failed: {last_line(error)}", to_do, True)]
    if found != [2.0, -4.0]:
        return [Problem("devices", f"{context} computed {found}, not [2.0, -4.0].", to_do, True)]
    return []


def check_devices(devices: Sequence[DeviceInfo]) -> List[Problem]:
    """Return the devices that cannot be used, equal ones once."""
    unusable = [one for one in devices if not one.usable]
    found = [
        Problem("devices", f"{one.name} {one.description} cannot be used: {one.reason}", one.note or "See docs/devices.md.")
        for one in unusable
    ]
    return list(dict.fromkeys(found))


def check_settings(switch: str) -> List[Problem]:
    """Return a problem if the value of `GLUON_MGPU_RUNTIME` has no effect."""
    if not switch or switch.lower() == "off":
        return []
    return [Problem("settings", f"GLUON_MGPU_RUNTIME={switch} has no effect.", "Set it to off, or unset it.")]


def check_openblas(settings: Sequence[Setting], features: Sequence[str], several_workers: bool) -> List[Problem]:
    """Return a problem if two engine workers with several threads each can run `dot` at once, which may deadlock."""
    counts = [one.value for one in settings if one.name.startswith(_PREFIX)]
    several = [count for count in counts if count.isdigit() and int(count) > 1]
    if "BLAS_OPEN" not in features or openmp_threads.runs_serially() or not several or (len(several) < 2 and not several_workers):
        return []
    what = "dot may hang indefinitely in MXNet's OpenBLAS: two engine workers with several threads may run it at once."
    to_do = "Set OMP_NUM_THREADS=1, or unset GLUON_MGPU_RUNTIME and MXNET_CPU_WORKER_NTHREADS and call use_devices first."
    return [Problem("OpenBLAS", what, to_do)]


def loaded_libraries() -> List[str]:
    """Return the files of MXNet's and CUDA's libraries that this process has loaded."""
    files = {line.split(maxsplit=5)[-1] for line in openmp_threads.read_lines("/proc/self/maps") if "/" in line}
    return sorted(file for file in files if _LIBRARY.match(os.path.basename(file)))


def thread_pools() -> List[Dict[str, Any]]:
    """Return the thread pools in this process; [] without threadpoolctl."""
    try:
        found = environment.require("threadpoolctl", "doctor", "doctor").threadpool_info()
    except MissingExtraError:
        return []
    return [{"library": pool["filepath"], "kind": pool["internal_api"], "threads": pool["num_threads"]} for pool in found]


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
