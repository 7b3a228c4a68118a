"""A probe's process: trains a few steps with one batch size, and tells what they took."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import re
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context

from ...devices.select import use_devices
from ...errors import last_line
from .workload import Question, load_workload, step_of

_END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_WARM_UP_STEPS = 3  # the first makes the graph and the gradients, the second the optimizer's states
_NUM_ROUNDS = 5
_ROUND_S = 0.2
_QUEUED = 2  # steps, as fit's max_inflight: a longer queue would hold the memory of batches that no training holds
_LEFT = 0.9  # of the memory that is free: the rest is left to others

# What malloc, C++, NumPy, MXNet, CUDA, cuDNN and cuBLAS say when there is no memory left.
# Arrays of 2**31 elements are as far as MXNet's wheels go; a smaller batch is what helps there, too.
_NO_MEMORY = (
    "bad_alloc|cannot allocate memory|(unable|failed) to allocate|memory allocation failed|out of memory|ALLOC_FAILED|"
    "larger than 2\\^31 elements"
)


def serve(question: str) -> None:
    """Answer one question, in a line of JSON, and end the process. What the workload prints goes to standard error.

    ```
    {"examples_per_s": [...], "memory_bytes": ..., "peak_bytes": ..., "room_bytes": ..., "devices": [...]}
    {"kind": "ValueError", "message": ..., "traceback": ..., "no_memory": false, "peak_bytes": ...}
    ```
    A process that runs out of memory may not come to answer.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    with suppress(OSError):  # the kernel, short of memory, is to end this process, and not the one that asks
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            answer = _answer(Question(**json.loads(question)))
        except Exception as error:
            answer = {"kind": type(error).__name__, "message": last_line(error), "traceback": traceback.format_exc()}
            answer["no_memory"] = _lacks_memory(error)
        answers.write(json.dumps({**answer, "peak_bytes": peak_bytes(os.getpid())}) + "\n")
    os._exit(0)  # how an engine ends that ran out of memory is of no interest


def _answer(question: Question) -> Dict[str, Any]:
    if question.np:
        mx.npx.set_np()
    with use_devices(question.devices) as ctx:
        make = load_workload(question)
        rates: List[float] = []
        coming = 0.0
        if question.batch_size:
            step = step_of(make(question.batch_size, ctx, **question.options), question.workload)
            seconds, coming = _measure(step, len(ctx))
            rates = [question.batch_size / one for one in seconds]
        used, room = _memory(ctx, coming)
    return {"examples_per_s": rates, "memory_bytes": used, "room_bytes": room, "devices": [str(one) for one in ctx]}


def _measure(step: Callable[[], Any], num_contexts: int) -> Tuple[List[float], float]:
    """Return the seconds of a step in each round, and the bytes that CPU contexts would still come to take.

    ```
    warm-up: 3 steps │ round 1 │ round 2 │ ... │ round 5
                     └────── growth a step ──────┘ x steps until every temporary buffer is as large as it gets
    ```
    MXNet's CPU contexts take MXNET_CPU_TEMP_COPY temporary buffers in turn, and a buffer grows when an operation comes to it that
    needs more. So memory grows for about that many steps, shared by the contexts, which are too many to wait for.
    """
    for _ in range(_WARM_UP_STEPS):
        seconds = _seconds(step, 1)
    num_steps = max(1, math.ceil(_ROUND_S / max(seconds, 1e-4)))
    before = _resident_bytes()
    rounds = [_seconds(step, num_steps) / num_steps for _ in range(_NUM_ROUNDS)]
    measured = num_steps * _NUM_ROUNDS
    growth = max(0, _resident_bytes() - before) / measured
    copies = os.environ.get("MXNET_CPU_TEMP_COPY", "")
    left = (int(copies) if copies.isascii() and copies.isdigit() else 4) / num_contexts - measured - _WARM_UP_STEPS
    return rounds, growth * max(0.0, left)


def _seconds(step: Callable[[], Any], num_steps: int) -> float:
    mx.nd.waitall()
    started = time.perf_counter()
    for number in range(1, num_steps + 1):
        step()
        if number % _QUEUED == 0 or number == num_steps:
            mx.nd.waitall()
    return time.perf_counter() - started


def _memory(ctx: Sequence[Context], coming: float) -> Tuple[int, int]:
    """Return the bytes that training takes, and those that there are for it: on the fullest GPU, or of this process.

    MXNet's pool on a GPU keeps what it has taken, so that what is in use at the end is the peak.
    """
    gpus = [mx.context.gpu_memory_info(one.device_id) for one in ctx if one.device_type == "gpu"]
    if gpus:
        return max(total - free for free, total in gpus), min(total for _, total in gpus)
    peak = peak_bytes(os.getpid())
    available = _kilobytes("/proc/meminfo").get("MemAvailable", 0) * 1024
    return max(peak, _resident_bytes() + int(coming)), int(_LEFT * (available + _resident_bytes()))


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has held at once, and what is swapped out; 0 where it has ended.

    The kernel keeps the peak, so that nothing is missed between two looks. Address space, which `RLIMIT_AS` limits, says nothing:
    MXNet's grows to gigabytes that are never touched.

    Examples
    --------
    >>> 2**20 < peak_bytes(os.getpid()) < 2**40
    True
    """
    found = _kilobytes(f"/proc/{pid}/status")
    return (found.get("VmHWM", 0) + found.get("VmSwap", 0)) * 1024


def _resident_bytes() -> int:
    return _kilobytes("/proc/self/status").get("VmRSS", 0) * 1024


def _kilobytes(path: str) -> Dict[str, int]:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # the process has ended
        return {}
    return {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def says_no_memory(text: str) -> bool:
    """Return whether a message is one of a lack of memory.

    Examples
    --------
    >>> says_no_memory("cudaMalloc retry failed: out of memory"), says_no_memory("Shape inconsistent")
    (True, False)
    """
    return re.search(_NO_MEMORY, text, re.IGNORECASE) is not None


def _lacks_memory(error: Optional[BaseException]) -> bool:
    """Return whether an error, or one that it came from, is a lack of memory. MXNetError and StepError are RuntimeErrors."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and says_no_memory(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
