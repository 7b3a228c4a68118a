"""From what a user asks for to a list of contexts, and what each device is and whether MXNet can run on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, Iterator, List, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context

from . import runtime
from .errors import DeviceError

DeviceSpec = Union[None, str, int, Context, Sequence[Context]]

_FORMS = "Use 'auto', 'gpu', 'gpu:4-7', 'gpu:0,2', 'cpu:2' (a number of CPU contexts), 'cpu:0,gpu:0', a count, or contexts."


@dataclass(frozen=True)
class DeviceInfo:
    """What a device is, and whether MXNet can run on it.

    Attributes
    ----------
    name : str
        `cpu(0)`, `gpu(1)`.
    description : str
        The maker's name for it.
    memory_bytes : int
        Its memory; 0 where nobody tells.
    usable : bool
    reason : str
        Why it cannot be used, and what to do; empty where it can.
    """

    name: str
    description: str
    memory_bytes: int
    usable: bool
    reason: str


@contextmanager
def use_devices(spec: DeviceSpec = None) -> Iterator[List[Context]]:
    """Yield the contexts that `spec` asks for, the first being the default context inside.

    On leaving it waits for the devices, and raises what they still owed: MXNet reports the error of an operation only
    when somebody waits for it. An error of the block's own comes first.

    Parameters
    ----------
    spec : None, str, int, mxnet.Context or sequence of mxnet.Context
        See `resolve_devices`.

    Raises
    ------
    DeviceError
        The spec is malformed, names a device twice, or names one that is not there.
    mxnet.MXNetError
        An operation that was still under way on a device failed.

    Examples
    --------
    >>> with use_devices("cpu:2") as ctx:
    ...     print(ctx, mx.current_context())
    [cpu(0), cpu(1)] cpu(0)
    """
    contexts = resolve_devices(spec)
    with contexts[0]:
        try:
            yield contexts
        except BaseException:
            _wait_quietly()
            raise
        mx.nd.waitall()


def _wait_quietly() -> None:
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        runtime.logger.warning("use_devices: while another error was on its way, a device reported: %s", _first_line(error))


def resolve_devices(spec: DeviceSpec = None) -> List[Context]:
    """Return the contexts that `spec` asks for.

    Parameters
    ----------
    spec : None, str, int, mxnet.Context or sequence of mxnet.Context
        - `None` or `"auto"`: every GPU that MXNet can run on, else `cpu(0)`. Only this falls back to the CPU.
        - an int n, or `"n"`: the first n GPUs where MXNet can run on any, else n CPU contexts.
        - `"gpu"`, `"gpu:1"`, `"gpu:4-7"`, `"gpu:0,2"`: all GPUs, or those with these numbers.
        - `"cpu"`, `"cpu:2"`: one CPU context, or `cpu(0)` and `cpu(1)`. CPU contexts share the processor, so one number
          alone says how many.
        - `"cpu:0,gpu:0"`: a list of devices, each with its number.
        - contexts: checked and returned.

    Raises
    ------
    DeviceError
        The spec is malformed, names a device twice, or names one that is not there.

    Examples
    --------
    >>> resolve_devices("cpu:2")
    [cpu(0), cpu(1)]
    >>> resolve_devices("cpu:0,cpu:3")
    [cpu(0), cpu(3)]
    >>> resolve_devices("tpu")
    Traceback (most recent call last):
    gluon_mgpu.errors.DeviceError: use_devices: got 'tpu'; need a device name. ...
    """
    if isinstance(spec, str) and spec.isascii() and spec.strip().isdigit():
        spec = int(spec)
    if spec is None or (isinstance(spec, str) and spec.strip().lower() == "auto"):
        contexts = usable_gpus() or [mx.cpu(0)]
    elif isinstance(spec, (int, np.integer)) and not isinstance(spec, bool):
        contexts = _first(int(spec))
    elif isinstance(spec, str):
        contexts = [mx.Context(kind, i) for kind, i in _parse(spec)]
    elif isinstance(spec, Context):
        contexts = [spec]
    elif isinstance(spec, (list, tuple)):
        contexts = list(spec)
    else:
        raise DeviceError(f"use_devices: got {spec!r} of type {type(spec).__name__}; need a device spec. {_FORMS}")
    check_contexts(contexts, "use_devices")
    for context in contexts:
        _check_present(context)
    return contexts


def check_contexts(contexts: Sequence[Context], operation: str) -> None:
    """Raise `DeviceError` unless these are one or more different CPU or GPU contexts, and settle their threads."""
    if not isinstance(contexts, (list, tuple)):
        raise DeviceError(f"{operation}: got {contexts!r} for the devices; need a list of contexts. Pass [mx.cpu(0)], for one.")
    if not contexts:
        raise DeviceError(f"{operation}: got an empty list of devices; need at least one. try_all_gpus() always holds one.")
    for context in contexts:
        if not isinstance(context, Context) or context.device_type not in ("cpu", "gpu"):
            raise DeviceError(f"{operation}: got {context!r} among the devices; need mx.cpu(i) or mx.gpu(i). {_FORMS}")
    if len({(context.device_typeid, context.device_id) for context in contexts}) < len(contexts):
        twice = next(context for i, context in enumerate(contexts) if context in contexts[:i])
        raise DeviceError(f"{operation}: got {twice} twice in {list(contexts)}; need different devices. Name each once.")
    runtime.settle_threads(contexts)


def try_gpu(i: int = 0) -> Context:
    """Return `gpu(i)` if MXNet can run on it, else `cpu()`.

    Examples
    --------
    >>> try_gpu(99)
    cpu(0)

    Source: d2l, chapter "GPUs".
    """
    if isinstance(i, bool) or not isinstance(i, (int, np.integer)) or i < 0:
        raise DeviceError(f"try_gpu: got {i}; need the number of a GPU, 0 or more. The first one is try_gpu(0).")
    return mx.gpu(i) if mx.gpu(i) in usable_gpus() else mx.cpu()


def try_all_gpus() -> List[Context]:
    """Return all GPUs that MXNet can run on, or `[cpu()]` where there is none.

    d2l 1.0.3 documents the same, but returns an empty list.

    Source: d2l, chapter "GPUs".
    """
    return usable_gpus() or [mx.cpu()]


def usable_gpus() -> List[Context]:
    """Return the GPUs on which MXNet has just run, or ran before in this process, a small operation."""
    return [mx.gpu(i) for i in range(_num_gpus()) if not _why_not(i)]


def describe_devices() -> List[DeviceInfo]:
    """Return what is there: the CPU, then every GPU that MXNet or the NVIDIA driver knows of."""
    found = [DeviceInfo("cpu(0)", _cpu_name(), _memory_bytes(), True, "")]
    by_driver = _nvidia_smi()
    num_gpus = _num_gpus()
    if num_gpus:
        names = by_driver if len(by_driver) == num_gpus else [("NVIDIA GPU", 0)] * num_gpus
        found += [DeviceInfo(f"gpu({i})", name, memory, not _why_not(i), _why_not(i)) for i, (name, memory) in enumerate(names)]
        hidden = by_driver if len(by_driver) > num_gpus else []
    else:
        hidden = by_driver
    if hidden:
        reason = _why_hidden(num_gpus, len(by_driver))
        listed = hidden if not num_gpus else [(f"{len(hidden)} GPUs in the driver's list", 0)]
        found += [DeviceInfo("-", name, memory, False, reason) for name, memory in listed]
    return found


def _first(num_devices: int) -> List[Context]:
    gpus = usable_gpus()
    if num_devices < 1:
        raise DeviceError(f"use_devices: got {num_devices} devices; need 1 or more. {_FORMS}")
    if gpus and num_devices > len(gpus):
        raise DeviceError(
            f"use_devices: got {num_devices} devices; need at most {len(gpus)}, the GPUs that MXNet can run on. "
            f"Pass 'cpu:{num_devices}' to use CPU contexts instead."
        )
    return gpus[:num_devices] or [mx.cpu(i) for i in range(num_devices)]


def _parse(spec: str) -> List[Tuple[str, int]]:
    """Return (kind, number) pairs of a spec such as 'gpu:0,2', 'gpu:4-7', 'cpu:0,gpu:0', 'cpu:2'."""
    text = re.sub(r"\s+", "", spec.lower())
    count = re.fullmatch(r"cpu:([1-9]\d{0,5})", text)
    if count:
        return [("cpu", i) for i in range(int(count.group(1)))]
    if text == "cpu":
        return [("cpu", 0)]
    if text == "gpu":
        return [("gpu", i) for i in _all_gpus()]
    pairs: List[Tuple[str, int]] = []
    kind = ""
    for item in text.split(","):
        match = re.fullmatch(r"(?:(cpu|gpu):)?(\d{1,6})(?:-(\d{1,6}))?", item)
        kind = match.group(1) or kind if match else ""
        if not match or not kind:
            raise DeviceError(f"use_devices: got {spec!r}; need a device name. {_FORMS}")
        first, last = int(match.group(2)), int(match.group(3) or match.group(2))
        if last < first:
            raise DeviceError(f"use_devices: got the range {first}-{last} in {spec!r}; need the smaller number first. {_FORMS}")
        if last - first > 4096:
            raise DeviceError(f"use_devices: got the range {first}-{last} in {spec!r}; need at most 4096 devices. {_FORMS}")
        pairs += [(kind, i) for i in range(first, last + 1)]
    return pairs


def _all_gpus() -> List[int]:
    if not _num_gpus():
        raise DeviceError(f"use_devices: got 'gpu'; need a GPU that MXNet can see. {_why_no_gpu()}")
    return list(range(_num_gpus()))


def _check_present(context: Context) -> None:
    if context.device_type != "gpu":
        return
    if context.device_id >= _num_gpus():
        there = ", ".join(f"gpu({i})" for i in range(_num_gpus())) or "none"
        raise DeviceError(f"use_devices: got {context}; need one of the GPUs that MXNet can see ({there}). {_why_no_gpu()}")
    reason = _why_not(context.device_id)
    if reason:
        raise DeviceError(f"use_devices: got {context}; need a GPU that MXNet can run on. {reason}")


def _why_no_gpu() -> str:
    why = _why_hidden(_num_gpus(), len(_nvidia_smi()))
    return f"{why} 'auto' takes the CPU where there is no GPU; 'cpu:2' asks for two CPU contexts."


def _why_hidden(num_seen: int, num_there: int) -> str:
    if not mx.runtime.Features().is_enabled("CUDA"):
        return (
            f"The installed mxnet {mx.__version__} holds no GPU code. "
            "Run pip uninstall mxnet, then pip install 'gluon_mgpu[cu112]'."
        )
    if num_there > num_seen and "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} lets MXNet see {num_seen} of {num_there}."
    return "gluon-mgpu devices lists what is there."


@lru_cache(maxsize=None)
def _num_gpus() -> int:
    try:
        return int(mx.context.num_gpus())
    except mx.MXNetError:  # a CUDA build without a working driver
        return 0


@lru_cache(maxsize=None)
def _why_not(device_id: int) -> str:
    """Return why MXNet cannot run on this GPU, "" where it can. Asked once a process: it runs an operation there."""
    try:
        if (mx.nd.ones((2,), ctx=mx.gpu(device_id)) * 2).asnumpy().tolist() == [2.0, 2.0]:
            return ""
        return "A test operation gave a wrong result: MXNet 1.9.1 holds no code for GPUs of compute capability 9.0 or newer."
    except mx.MXNetError as error:
        return f"A test operation failed: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "error" in line or "Check failed" in line]
    return (told or lines or [type(error).__name__])[-1]


def _nvidia_smi() -> List[Tuple[str, int]]:
    """Return (name, memory in bytes) of each GPU that the NVIDIA driver lists, [] where there is no driver."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in listed.stdout.decode(errors="replace").splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name:
            found.append((name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else 0))
    return found


def _cpu_name() -> str:
    name = _proc_values("/proc/cpuinfo").get("model name", "CPU")
    return f"{name}, {runtime.num_cores()} cores"


def _memory_bytes() -> int:
    kilobytes = _proc_values("/proc/meminfo").get("MemTotal", "0 kB").split()[0]
    return int(kilobytes) * 1024


def _proc_values(path: str) -> Dict[str, str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            pairs = (line.partition(":") for line in file)
            return {key.strip(): value.strip() for key, _, value in pairs}
    except OSError:
        return {}
