"""find_batch_size(): the largest batch that fits, by doubling and halving; each size trains in a process of its own."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, NoReturn, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, init

from ..checks import real_number, whole_number
from ..data_parallel.step import most_in_flight
from ..devices.select import use_devices
from ..errors import StepError, TrainerError, last_line
from ..models import resnet18
from ..runtime.openmp_threads import read_lines
from ..runtime.units import format_bytes
from ..trainer.trainer import Trainer
from .workload import Workload, load_workload, reference_of, step_of

INSIDE = "GLUON_MGPU_PROBE"  # in the environment of a probe's process

_START = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from gluon_mgpu.tuning.batch_size_search import serve
serve(*sys.argv[2:])"""
_WITHIN = 0.05
_POLL_S = 0.01
_WARM_UP_STEPS = 3  # the first makes the graph and the gradients, the second the optimizer's states
_NUM_ROUNDS = 5
_ROUND_S = 0.2
_MOST = 2**63 - 1
_LEFT = 0.9  # of the free memory: the rest is left to other processes
_HINT = "The cause is not a lack of memory: run the step alone."

# Messages of malloc, C++, NumPy, MXNet, CUDA, cuDNN and cuBLAS when they are out of memory.
# MXNet's wheels support arrays of at most 2**31 elements; a smaller batch helps in this case as in the others.
_NO_MEMORY = (
    "bad_alloc|cannot allocate memory|(unable|failed) to allocate|memory allocation failed|out of memory|ALLOC_FAILED|"
    "larger than 2\\^31 elements"
)


class NoMemoryError(MemoryError):
    """The batch does not fit; `peak_bytes` is the largest memory seen."""

    def __init__(self, reason: str, seen_bytes: int) -> None:
        super().__init__(reason)
        self.peak_bytes = seen_bytes


@dataclass(frozen=True)
class Probe:
    """The result of one batch size.

    Attributes
    ----------
    batch_size : int
        Over all devices.
    fits : bool
    memory_bytes : int
        Memory in use on the fullest GPU; on CPU contexts, the peak of the process. If the batch does not fit, the memory seen
        before the process was stopped.
    examples_per_s : tuple of float
        One number per round; empty if the batch does not fit.
    reason : str
        Why it does not fit; "" if it does.
    """

    batch_size: int
    fits: bool
    memory_bytes: int
    examples_per_s: Tuple[float, ...] = ()
    reason: str = ""

    @property
    def rate(self) -> float:
        """The median of the rounds, examples/s; 0.0 if the batch does not fit."""
        return median(self.examples_per_s) if self.examples_per_s else 0.0

    def __str__(self) -> str:
        size = f"batch {self.batch_size}: {format_bytes(self.memory_bytes, digits=2)}"
        if not self.fits:
            return f"{size}, does not fit ({self.reason})"
        return f"{size}, {self.rate:.4g} ({min(self.examples_per_s):.4g} to {max(self.examples_per_s):.4g}) examples/s, fits"


@dataclass(frozen=True)
class BatchSizes:
    """The result of `find_batch_size`.

    Attributes
    ----------
    devices : tuple of str
    memory_limit_bytes : int
    probes : tuple of Probe
        In the order of the search.
    largest : int
        The largest batch size that fits; 0 before one does.
    recommended : int
        See `recommend`; 0 before a batch fits.
    """

    devices: Tuple[str, ...]
    memory_limit_bytes: int
    probes: Tuple[Probe, ...]
    largest: int
    recommended: int


def find_batch_size(
    workload: Workload,
    *,
    ctx: Union[None, str, int] = None,
    memory_limit_bytes: int = 0,
    first: int = 16,
    max_batch_size: int = 65536,
    timeout_s: float = 300.0,
    on_result: Callable[[BatchSizes], None] = lambda found: None,
) -> BatchSizes:
    """Try batch sizes, each in a separate process, and return the largest that fits and the recommended one.

    The sizes are multiples of the number of devices. They double until one does not fit; then the gap is halved. The search
    assumes that memory grows with the batch: sizes above one that does not fit are not tried. Each probe makes some steps before
    it is timed, because the first one creates the momentum, then measures five rounds. The batch size is a hyper-parameter: after
    a change, tune the learning rate again.

    Parameters
    ----------
    workload : str or callable (batch_size, ctx)
        The training to measure: `"module:function"`, `"path/to/file.py:function"`, or a function at the top level of a module
        or script, which calls `npx.set_np()` itself if it uses np arrays. It returns a function without arguments that makes
        one step, or the arguments of `train_batch`, `(net, loss, trainer, X, y)`. A script that passes its own function calls
        this below `if __name__ == "__main__":`.
    ctx : None, str or int
        As `use_devices` accepts them. Only the new processes use them, so this process takes no GPU memory.
    memory_limit_bytes : int
        0, the default: a GPU's memory; on CPU contexts nine tenths of the free memory. There the complete process of the probe
        counts (about 200 MB before the first array), but not the processes that it starts.
    first : int
        The first batch size.
    max_batch_size : int
    timeout_s : float, seconds
        For each probe.
    on_result : callable (BatchSizes)
        Called with the result so far after each probe, the latest of `probes`. A search that is interrupted, or raises,
        returns nothing.

    Raises
    ------
    TrainerError
        An argument is invalid, or the workload cannot be found. Nothing was tried.
    StepError
        A device does not exist, the step fails for a reason other than memory, a probe does not answer in time, or the
        smallest batch does not fit.

    Examples
    --------
    >>> found = find_batch_size("train.py:make", ctx="cpu*2", on_result=lambda found: print(found.probes[-1]))
    ... # doctest: +SKIP
    batch 16: 0.55 GiB, 181 (178 to 184) examples/s, fits
    ...
    >>> found.recommended  # doctest: +SKIP
    64
    """
    reference, spec = reference_of("find_batch_size", workload), "auto" if ctx is None else str(ctx)
    whole_number("find_batch_size", "first", first, high=_MOST, advice="Pass an int.")
    whole_number("find_batch_size", "max_batch_size", max_batch_size, high=_MOST, advice="Pass an int.")
    whole_number("find_batch_size", "memory_limit_bytes", memory_limit_bytes, low=0, high=_MOST, advice="Pass an int.")
    real_number("find_batch_size", "timeout_s", timeout_s, above=True, advice="300 seconds are usual.")
    if INSIDE in os.environ:
        raise TrainerError(
            "find_batch_size: got a call from a probe, which imports the workload's file; expected the call below "
            'if __name__ == "__main__":. Move it there, or move the workload into a separate file.'
        )
    ask_here = partial(ask, reference, spec, timeout_s=timeout_s)
    there = ask_here()
    unit = len(there["devices"])
    whole_number(
        "find_batch_size", "max_batch_size", max_batch_size, low=unit, high=_MOST, advice="Each device takes an example."
    )
    limit = memory_limit_bytes or there["room_bytes"]
    probes: List[Probe] = []

    def fits(batch_size: int) -> bool:
        probes.append(_probe(ask_here, batch_size, there["devices"], limit))
        on_result(result())
        return probes[-1].fits

    def result() -> BatchSizes:
        largest = max((probe.batch_size for probe in probes if probe.fits), default=0)
        return BatchSizes(tuple(there["devices"]), limit, tuple(probes), largest, recommend(probes))

    search(fits, first=first, most=max_batch_size, multiple_of=unit)
    if not any(probe.fits for probe in probes):
        raise StepError(
            f"find_batch_size: got {probes[-1].reason} with a batch of {probes[-1].batch_size}, the smallest; expected one "
            f"that fits in {format_bytes(limit, digits=2)}. Raise the limit, or make the network or its inputs smaller."
        )
    return result()


def search(fits: Callable[[int], bool], *, first: int, most: int, multiple_of: int = 1) -> int:
    """Return the largest multiple, up to `most`, that fits, or 0, by doubling and then halving the gap.

    Examples
    --------
    >>> tried = []
    >>> search(lambda n: tried.append(n) or n <= 44, first=16, most=1000, multiple_of=2)
    44
    >>> tried
    [16, 32, 64, 48, 40, 44, 46]
    """
    top = most // multiple_of
    low, high, number = 0, top + 1, min(top, -(-first // multiple_of))
    while low + 1 < high:
        if fits(number * multiple_of):
            low = number
        else:
            high = number
        number = min(2 * low, top) if high > top else (low + high) // 2
    return low * multiple_of


def recommend(probes: Sequence[Probe]) -> int:
    """Return the smallest batch whose median rate is within 5 % of the best: a larger one would only take memory.

    Examples
    --------
    >>> recommend([Probe(16, True, 1, (80.0,)), Probe(32, True, 2, (96.0,)), Probe(64, True, 4, (100.0,)), Probe(128, False, 8)])
    32
    """
    best = max(probe.rate for probe in probes)
    return min((probe.batch_size for probe in probes if probe.fits and probe.rate >= (1 - _WITHIN) * best), default=0)


def resnet18_workload(batch_size: int, ctx: Sequence[Context]) -> Tuple[Any, ...]:
    """Return the arguments of `train_batch` to train the toolkit's ResNet-18 on random grey images of ten classes."""
    net = resnet18(10)
    net.initialize(init.Xavier(), ctx=list(ctx))
    net.hybridize(static_alloc=True, static_shape=True)
    X = np.random.uniform(size=(batch_size, 1, 28, 28)).astype("float32")
    y = np.random.randint(0, 10, batch_size).astype("int32")
    return net, gluon.loss.SoftmaxCrossEntropyLoss(), Trainer(net, "sgd", {"learning_rate": 0.01}), X, y


def _probe(ask_here: Callable[..., Dict[str, Any]], batch_size: int, devices: Sequence[str], limit_bytes: int) -> Probe:
    on_gpus = any(device.startswith("gpu") for device in devices)
    try:
        found = ask_here(batch_size, limit_bytes=0 if on_gpus else limit_bytes)
    except NoMemoryError as error:
        return Probe(batch_size, False, error.peak_bytes, reason=str(error))
    used_bytes = found["memory_bytes"]
    if used_bytes > limit_bytes:
        return Probe(batch_size, False, used_bytes, reason="more than the limit")
    return Probe(batch_size, True, used_bytes, tuple(found["examples_per_s"]))


def ask(workload: str, devices: str, batch_size: int = 0, *, limit_bytes: int = 0, timeout_s: float = 300.0) -> Dict[str, Any]:
    """Return the answer of a new process, in the form of `serve`; limits of 0 are none.

    A batch size of 0 only checks that the devices and the workload exist.

    The process has its own group, and no process of the group is left when this returns or raises. Each size gets a new process,
    because MXNet cannot be used after it ran out of memory, and a pool that has grown does not shrink.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+b") as log:
        path = Path(folder) / "answer.json"
        question = workload + (f" with a batch of {batch_size}" if batch_size else "")
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), str(path), workload, devices, str(batch_size)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, INSIDE: "1"},
            start_new_session=True,
        )
        try:
            seen_bytes = _watch(process.pid, question, limit_bytes, timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        if not path.exists():
            _raise_end(process.returncode, log.read().decode(errors="replace").strip(), question, seen_bytes)
        answer: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "error" not in answer:
        return answer
    if answer["no_memory"]:
        raise NoMemoryError(answer["error"], answer["peak_bytes"])
    told = answer["error"].split(": ", 1)[-1]
    if not told.startswith("find_batch_size: got "):  # that says what to do
        told = f"find_batch_size: got {answer['error']} from {question}; expected a step that trains. {_HINT}"
    raise StepError(told) from RuntimeError(f"\n{answer['traceback']}")  # as it was in the other process


def _watch(pid: int, question: str, limit_bytes: int, timeout_s: float) -> int:
    """Wait for the end of a process, and return the largest memory seen."""
    seen_bytes, end = 0, time.monotonic() + timeout_s
    # WNOWAIT keeps the exit status, so that the numbers of the process and its group stay reserved until the group has ended.
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        seen_bytes = max(seen_bytes, peak_bytes(pid))
        if 0 < limit_bytes < seen_bytes:
            raise NoMemoryError("more than the limit", seen_bytes)
        if time.monotonic() > end:
            raise StepError(
                f"find_batch_size: got no answer within {timeout_s:g} s from {question}; expected one. Raise the "
                "timeout, or lower the largest batch size, and check that the step ends when it is run alone."
            )
        time.sleep(_POLL_S)
    return seen_bytes


def _raise_end(code: int, log: str, question: str, seen_bytes: int) -> NoReturn:
    """Raise an error for a process that has ended without an answer: SIGKILL is a lack of memory."""
    last = log.splitlines()[-1].strip() if log else "without output"
    how = f"ended with exit status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL or says_no_memory(last):
        raise NoMemoryError(f"{how}: {last}", seen_bytes)
    raise StepError(f"find_batch_size: got a process that {how} ({last}) from {question}; expected a step that trains. {_HINT}")


def serve(path: str, workload: str, devices: str, batch_size: str) -> None:
    """Answer one question by a file of JSON, and end the process.

    ```
    {"examples_per_s": [...], "memory_bytes": ..., "peak_bytes": ..., "room_bytes": ..., "devices": [...]}
    {"error": "ValueError: ...", "traceback": ..., "no_memory": false, "peak_bytes": ...}
    ```
    A process that runs out of memory may end without an answer.
    """
    with suppress(OSError):  # out of memory, the kernel must kill this process and not the one that asks
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        answer = _answer(workload, devices, int(batch_size))
    except Exception as error:
        trace = traceback.format_exc()  # with the errors that this one reports
        no_memory = isinstance(error, MemoryError) or says_no_memory(trace)
        answer = {"error": f"{type(error).__name__}: {last_line(error)}", "traceback": trace, "no_memory": no_memory}
    Path(path).write_text(json.dumps({**answer, "peak_bytes": peak_bytes(os.getpid())}), encoding="utf-8")
    os._exit(0)  # skips the exit of an engine that may have run out of memory


def _answer(workload: str, devices: str, batch_size: int) -> Dict[str, Any]:
    with use_devices(devices) as ctx:
        make = load_workload("find_batch_size", workload)
        rates: List[float] = []
        if batch_size:
            rates = [batch_size / one for one in _measure(step_of(make(batch_size, ctx), workload), most_in_flight(ctx))]
        used, room = _memory(ctx)
    return {"examples_per_s": rates, "memory_bytes": used, "room_bytes": room, "devices": [str(one) for one in ctx]}


def _measure(step: Callable[[], Any], num_queued: int) -> List[float]:
    """Return the seconds per step in each round, after some steps of warm-up."""
    for _ in range(_WARM_UP_STEPS):
        seconds = _seconds(step, 1, 1)
    num_steps = max(1, math.ceil(_ROUND_S / max(seconds, 1e-4)))
    return [_seconds(step, num_steps, num_queued) / num_steps for _ in range(_NUM_ROUNDS)]


def _seconds(step: Callable[[], Any], num_steps: int, num_queued: int) -> float:
    mx.nd.waitall()
    started = time.perf_counter()
    for number in range(1, num_steps + 1):
        step()
        if number % num_queued == 0 or number == num_steps:
            mx.nd.waitall()  # a longer queue would hold more batches in memory than train_batch() does
    return time.perf_counter() - started


def _memory(ctx: Sequence[Context]) -> Tuple[int, int]:
    """Return the bytes that training uses and the bytes available: on the fullest GPU, or for this process.

    MXNet's pool on a GPU keeps its memory, so the use at the end is the peak.
    """
    gpus = [mx.context.gpu_memory_info(one.device_id) for one in ctx if one.device_type == "gpu"]
    if gpus:
        return max(total - free for free, total in gpus), min(total for _, total in gpus)
    available, resident = _bytes("/proc/meminfo", "MemAvailable"), _bytes("/proc/self/status", "VmRSS")
    return peak_bytes(os.getpid()), int(_LEFT * (available + resident))


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process, including swapped memory; 0 if it has ended.

    The kernel records the peak, so no peak between two reads is missed. The address space, which `RLIMIT_AS` limits, is no
    measure: MXNet reserves gigabytes that it never uses.

    Examples
    --------
    >>> 2**20 < peak_bytes(os.getpid()) < 2**40
    True
    """
    return _bytes(f"/proc/{pid}/status", "VmHWM") + _bytes(f"/proc/{pid}/status", "VmSwap")


def _bytes(path: str, name: str) -> int:
    return 1024 * sum(int(line.split()[1]) for line in read_lines(path) if line.startswith(f"{name}:"))


def says_no_memory(text: str) -> bool:
    """Return whether a message reports a lack of memory.

    Examples
    --------
    >>> says_no_memory("cudaMalloc retry failed: out of memory"), says_no_memory("Shape inconsistent")
    (True, False)
    """
    return re.search(_NO_MEMORY, text, re.IGNORECASE) is not None
