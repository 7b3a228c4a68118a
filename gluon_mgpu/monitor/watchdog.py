"""Watchdog: reports every thread, the engine's workers and the unwritten arrays when no step ends."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Sized, TextIO, Tuple

import mxnet as mx
import numpy as np

from ..checks import real_number
from ..loop.callbacks import Callback, FitState
from ..loop.epoch import EpochProgress
from ..nested import Array, leaves, num_bytes
from ..runtime.engine import ON_WORKER, Marker, is_ready, is_serial
from ..runtime.threads import contexts_seen, read_lines
from .leaks import held_arrays

EXIT_STALLED = 75  # sysexits.h: a temporary failure, after which a supervisor may restart
_SHOWN = 5
_MARKER_S = 0.3  # for a free worker to reach its marker
_SPINS = 0.5  # of a core


@dataclass(frozen=True)
class NativeThread:
    """A thread of this process in the kernel's counters; `cpu_s` is its processor time."""

    number: int
    name: str
    state: str
    waits_in: str
    cpu_s: float


def native_threads() -> Dict[int, NativeThread]:
    """Return all threads of this process by their native ids; {} without `/proc`.

    Source: the manual page proc(5).
    """
    found = {}
    for number in map(int, os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []):
        task = f"/proc/self/task/{number}"
        _, _, stat = _read(f"{task}/stat").rpartition(")")  # the name may hold any character
        if stat:
            fields = stat.split()
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            place = _read(f"{task}/wchan").strip("0\n") or _syscall(_read(f"{task}/syscall"))
            found[number] = NativeThread(number, _read(f"{task}/comm").strip(), fields[0], place, cpu_s)
    return found


def _syscall(text: str) -> str:
    number = text.split(maxsplit=1)[:1]
    return f"syscall {number[0]}" if number and number[0].isdigit() else ""


def _read(path: str) -> str:
    return "\n".join(read_lines(path))  # [] if the thread has ended, or only root may read it


@dataclass(frozen=True)
class Worker:
    """The engine's worker of a CPU context: whether it is inside an operation, and how much of a core it uses."""

    context: str
    busy: bool
    cpu: float = 0.0


def diagnose(workers: Sequence[Worker], num_pending: int, *, serial: bool = False) -> str:
    """Return the likely cause of a stall and what to do, from information that is available without waiting.

    Parameters
    ----------
    workers : sequence of Worker
        Of the CPU contexts. The workers of GPUs cannot be inspected.
    num_pending : int
        Arrays that are not written yet.
    serial : bool
        Whether the engine has no queue.
    """
    busy = [worker for worker in workers if worker.busy]
    spinning = [worker.context for worker in busy if worker.cpu >= _SPINS]
    names = " and ".join(worker.context for worker in busy)
    if serial:
        return "The engine is serial and has no queue: the Python stack of the thread that called MXNet shows the operation."
    if spinning and len(workers) > 1:
        return (
            f"An operation computes on {' and '.join(spinning)} for a long time or without end. If two CPU contexts run dot with "
            "several OpenMP threads each, they can deadlock in OpenBLAS: call use_devices before the first operation, or set "
            "OMP_NUM_THREADS=1. If an operation only takes long, increase timeout_s."
        )
    if spinning:
        return (
            f"An operation computes on {spinning[0]} for a long time or without end. If it only takes long, increase timeout_s."
        )
    if busy:
        return (
            f"An operation on {names} sleeps: it waits for a lock, another device or another process. SyncBatchNorm requires "
            "num_devices, MXNET_CPU_WORKER_NTHREADS=2, MXNET_CPU_TEMP_COPY=64 or more, and every device in every step. A "
            "distributed store waits for workers that may have died."
        )
    if num_pending:
        return (
            f"No worker of a CPU context is inside an operation, but {num_pending} arrays are not written yet. They are written "
            "elsewhere, by an operation that has not finished: a custom operator (see the Python stacks), a GPU, or a store."
        )
    return (
        "The devices have finished all queued work: the program itself is blocked. Check the stack of MainThread: data, a lock?"
    )


class Watchdog(Callback):
    """Prints the stacks of all threads and the engine's pending work when no step has ended for some time.

    It runs in a separate thread, which works while other threads wait inside MXNet. If a thread holds Python's lock, so that the
    watchdog cannot run, `faulthandler` prints the Python stacks only. The watchdog uses its single timer
    (`dump_traceback_later`).

    As a callback of `fit`, it gets reports of training twice a second. Pass `watchdog.watch(test_iter)` if an evaluation takes
    longer than `timeout_s`. In a loop by hand, use a `with` block and call `beat` after each step.

    It cannot report which operation a worker runs, or for which operation an array waits: MXNet does not expose either.

    Parameters
    ----------
    timeout_s : float, seconds
        Longer than compiling and the first step on a GPU.
    file : file, optional
        `sys.stderr` by default.
    end_process : bool
        End the process afterwards with status 75, so that a supervisor can restart it. Nothing is saved.

    Raises
    ------
    TrainerError
        `timeout_s` is not a finite number above 0.

    Examples
    --------
    >>> with Watchdog(timeout_s=60) as watchdog:
    ...     for X in watchdog.watch([mx.nd.ones((2, 3))]):
    ...         y = X * 2
    """

    def __init__(self, timeout_s: float = 120.0, *, file: Optional[TextIO] = None, end_process: bool = False) -> None:
        self.timeout_s = real_number("Watchdog", "timeout_s", timeout_s, above=True, advice="120 seconds are usual.")
        self._poll_s = min(5.0, self.timeout_s / 4)
        self._file, self._end_process = file, end_process
        self._thread: Optional[threading.Thread] = None
        self._stop = threading.Event()
        self._beat_at, self._num_beats, self._shapes = 0.0, 0, ""
        self._reported = False
        self._used: Set[int] = set()  # CPU contexts
        self._scanned_at = 0.0
        self._markers: Dict[str, Marker] = {}  # the last one queued on each CPU context's worker
        self._worker_ids: Dict[str, int] = {}  # native ids, known after a marker has run
        self._seen: Tuple[float, Dict[int, NativeThread]] = (0.0, {})

    def start(self) -> None:
        """Start the watchdog."""
        self.stop()
        self._stop.clear()
        self._num_beats, self._shapes, self._scanned_at = 0, "", 0.0
        self._alive()
        self._thread = threading.Thread(target=self._run, name="Watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the watchdog."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join()

    def beat(self, *batch: Any) -> None:
        """Report that a step was made; `batch` is nested data whose shapes the watchdog prints."""
        self._num_beats += 1
        if batch:
            self._shapes = ", ".join(str(getattr(leaf, "shape", ())) for _, leaf in leaves(batch))
        self._alive()

    def watch(self, data_iter: Iterable[Any]) -> Iterable[Any]:
        """Return the same batches; each calls `beat` when it arrives."""
        return _SizedBatches(self, data_iter) if isinstance(data_iter, Sized) else _Batches(self, data_iter)

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def on_fit_begin(self, state: FitState) -> None:
        self.start()

    def on_epoch_begin(self, state: FitState) -> None:
        self._alive()

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        self.beat()

    def on_epoch_end(self, state: FitState) -> None:
        self._alive()

    def on_fit_end(self, state: FitState) -> None:
        self.stop()

    def _alive(self) -> None:
        self._beat_at = time.monotonic()
        if self._beat_at - self._scanned_at >= self._poll_s:
            self._scanned_at = self._beat_at
            # In this thread: the watchdog's thread could get an array whose memory this thread is freeing.
            self._used |= {array.context.device_id for array in held_arrays() if array.context.device_type == "cpu"}

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            self._arm_faulthandler()
            quiet_s = time.monotonic() - self._beat_at
            if quiet_s < self.timeout_s:
                self._reported = self._recovered()
                self._mark()
                self._seen = time.monotonic(), native_threads()
            elif not self._reported:
                self._reported = True
                self._report(quiet_s)
        faulthandler.cancel_dump_traceback_later()

    def _recovered(self) -> bool:
        if self._reported:
            self._print("gluon_mgpu: steps continue after the stall.\n")
        return False

    def _arm_faulthandler(self) -> None:
        # without a real file, or with too many seconds, it raises
        with suppress(AttributeError, OSError, OverflowError, RuntimeError, ValueError):
            faulthandler.dump_traceback_later(self.timeout_s + 2 * self._poll_s, file=self._file or sys.stderr)

    def _mark(self) -> None:
        """Queue a marker on each CPU context's worker that has none, and record the threads that ran the last ones."""
        for context in map(mx.cpu, sorted(self._used.union(contexts_seen()))):
            marker = self._markers.get(str(context))
            if marker is not None and marker.done:
                self._worker_ids[str(context)] = marker.thread
            if marker is None or marker.done:
                self._markers[str(context)] = Marker(context=context, where=ON_WORKER)

    def _report(self, quiet_s: float) -> None:
        num_beats = self._num_beats
        # Part by part: if one fails or blocks, the parts before it are printed.
        self._print(
            f"gluon_mgpu: no step for {quiet_s:.1f} s, after {self._num_beats}; last batch: {self._shapes or 'unknown'}\n"
        )
        self._print("".join(_python_stacks()))
        arrays = [array for array in held_arrays() if not is_ready(array)]
        serial = is_serial()
        workers = [] if serial else self._workers(arrays)
        self._print(self._describe_threads())
        for worker in workers:
            does = "inside an operation" if worker.busy else "free"
            self._print(f"worker of {worker.context}: {does}, {worker.cpu:.0%} of a core\n")
        self._print(_describe_arrays(arrays))
        self._print(f"Likely cause: {diagnose(workers, len(arrays), serial=serial)}\n")
        if self._end_process and num_beats == self._num_beats:  # no step has ended meanwhile
            self._print(f"gluon_mgpu: the watchdog ends this process with status {EXIT_STALLED}.\n")
            os._exit(EXIT_STALLED)

    def _workers(self, arrays: Sequence[Array]) -> List[Worker]:
        self._used |= {array.context.device_id for array in arrays if array.context.device_type == "cpu"}
        self._mark()
        time.sleep(_MARKER_S)  # a free worker runs its marker at once
        shares = self._cpu_shares(native_threads())
        names = self._names()
        unnamed = sorted((share for number, share in shares.items() if number not in names), reverse=True)
        workers = []
        for context, marker in self._markers.items():
            known = self._worker_ids.get(context)
            # The id of a worker that was never free is unknown: assume the busiest thread without a name.
            share = shares.get(known, 0.0) if known else unnamed.pop(0) if unnamed and not marker.done else 0.0
            workers.append(Worker(context, not marker.done, share))
        return workers

    def _names(self) -> Dict[int, str]:
        """Return the known names of native threads, by their ids."""
        names = {thread.native_id or 0: thread.name for thread in threading.enumerate()}
        return {**names, **{number: f"worker of {context}" for context, number in self._worker_ids.items()}}

    def _cpu_shares(self, now: Dict[int, NativeThread]) -> Dict[int, float]:
        """Return the cores that each thread has used since the last reading before the stall."""
        at, before = self._seen
        seconds = max(1e-9, time.monotonic() - at)
        spent = {number: thread.cpu_s - before[number].cpu_s for number, thread in now.items() if number in before}
        return {number: max(0.0, cpu_s) / seconds for number, cpu_s in spent.items()}

    def _describe_threads(self) -> str:
        now = native_threads()
        shares = self._cpu_shares(now)
        names = self._names()
        rows = Counter(
            f"  {names.get(number, thread.name)}: {thread.state} {thread.waits_in or '-'}, {shares.get(number, 0):.0%} of a core"
            for number, thread in now.items()
        )
        lines = [f"{row}{f' ({count} threads)' if count > 1 else ''}\n" for row, count in rows.items()]
        return "native threads (R runs, S sleeps, D waits for a disk):\n" + "".join(lines)

    def _print(self, text: str) -> None:
        file = self._file or sys.stderr
        file.write(text)
        file.flush()


class _Batches:
    """Batches that call a watchdog's `beat` when they arrive."""

    def __init__(self, watchdog: Watchdog, data_iter: Iterable[Any]) -> None:
        self._watchdog, self._data_iter = watchdog, data_iter

    def __iter__(self) -> Iterator[Any]:
        for batch in self._data_iter:
            self._watchdog.beat(batch)
            yield batch
        self._watchdog._alive()


class _SizedBatches(_Batches):
    def __len__(self) -> int:
        return len(self._data_iter)  # type: ignore[arg-type]


def _python_stacks() -> Iterator[str]:
    names = {thread.ident: f"{thread.name} ({thread.native_id})" for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            yield f"{names.get(ident, f'a thread that Python did not start ({ident})')}:\n"
            yield from traceback.format_stack(frame)


def _describe_arrays(arrays: Sequence[Array]) -> str:
    kinds = Counter(f"{np.dtype(array.dtype).name} {array.shape} on {array.context}" for array in arrays)
    lines = [f"  {count} of {kind}\n" for kind, count in kinds.most_common(_SHOWN)]
    size = sum(map(num_bytes, arrays))
    return f"arrays that are not written yet: {len(arrays)}, {size} bytes{', most:' if lines else ''}\n" + "".join(lines)
