"""Small operations on a GPU, one for each library that training needs, in a process of their own: see `operations.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Dict, List, Sequence

from ..runtime import environment
from .findings import Problem

_LIMIT_S = 120.0  # for all operations of a device: loading cuDNN alone takes several seconds
_OF_LIBRARIES = "Check its version: docs/troubleshooting.md#cuda-cudnn-and-nccl."
_TO_DO = {
    "NVRTC": "Set MXNET_USE_FUSION=0, or install a newer NVIDIA driver: 520.61 at least for CUDA 11.8.",
    "peer access": "Set MXNET_ENABLE_GPU_P2P=0: GPUs then copy through the host. docs/troubleshooting.md#nccl-and-peer-access.",
}


def check_operations(device: str, others: Sequence[str], limit_s: float = _LIMIT_S) -> List[Problem]:
    """Return the operations that fail on a device, hang, or crash, run in a process of their own.

    Parameters
    ----------
    device, others : str
        Contexts of MXNet as it prints them: `gpu(0)`.
    """
    command = [sys.executable, "-W", "ignore", "-m", "gluon_mgpu.doctor.operations", device, *others]
    end = ""
    try:
        done = subprocess.run(command, env=environment.without_ours(), capture_output=True, timeout=limit_s, check=False)
        printed = done.stdout
        if done.returncode:
            end = f"it ended the process with status {done.returncode}"
    except subprocess.TimeoutExpired as late:
        printed, end = late.stdout or b"", f"it did not end within {limit_s:.0f} s"
    found, begun = [], {"begins": "import mxnet", "library": "CUDA"}
    for line in printed.decode("utf-8", "replace").splitlines():
        if line.startswith('{"begins"'):
            begun = json.loads(line)
        elif line.startswith('{"error"'):
            found.append(_problem(device, begun, json.loads(line)["error"]))
    return [*found, _problem(device, begun, end)] if end else found


def _problem(device: str, begun: Dict[str, str], error: str) -> Problem:
    what = f"{device}: {begun['begins']} failed ({begun['library']}): {error}."
    return Problem("devices", what, _TO_DO.get(begun["library"], _OF_LIBRARIES), True)
