"""A job from its first attempt to its last: the first failure stops everything, and is the cause or leads to a restart.

machines join ──► start ──► poll, poll, poll ──► all workers of all machines exit with 0 ──► 0
       ▲                                   │
       └─ restarts left, perhaps one fewer ┴── a failure, a lost machine, a signal ──► stop everything ──► exit code
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
import time
from array import array
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import Callable, Dict, List, Optional, Sequence

from ..process import LATEST, LaunchError, exit_code_of
from . import guard
from .heartbeats import JOINED
from .job import Job
from .network import find_addresses, reserve_port
from .output import Output
from .started import Failure, Started
from .tasks import MACHINES, Task, tasks

_NOT_JOINED = (
    "got no connection of all {} machines for {:.0f} s; expected each to join node 0 at {}:{}. Start the same command on each, "
    "with its --node-rank. Check that node 0 can be reached, and that its output reports no port in use."
)
_EQUAL = (
    "Give every process the same number of steps, evaluations and saves: let a ShardedSampler divide the data, or pass "
    "mgpu.data.JoinedBatches(train_iter)."
)
_ROUND_S = 0.1  # the end of an output ends the wait earlier
_FAILED_S = 1.0  # for the other workers to end after a failure: they have nothing to save together
_RETURN_S = 60.0  # for the other machines to stop their processes, and to join again
_LATE_S = 5.0  # for a launcher to end after a second signal
_LONG_S = 60.0
_SAME_S = 0.5  # timeout(1) sends SIGTERM twice: two within this time count as one
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """Records SIGINT, SIGTERM, SIGHUP and SIGUSR1 instead of letting them end this process.

    SIGHUP (a closed terminal or a lost ssh connection) is passed on as a Ctrl-C, after which programs save. After SIGUSR1, the
    first SIGTERM is the scheduler's own, at the time limit, and is passed on.
    """

    def __init__(self) -> None:
        self.first = 0  # the signal that came first, 0 for none
        self.new: List[int] = []  # signals that have not been passed on
        self._last = (0, 0.0)  # the signal that counted last, and when
        self._before: Dict[int, object] = {}
        self._late = threading.Timer(_LATE_S, _end_late)  # after a second signal

    def __enter__(self) -> Signals:
        for signum in _CAUGHT:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # started by nohup
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._late.cancel()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def take(self) -> List[int]:
        """Return the signals since the last call; a second request to stop counts as SIGKILL."""
        new, self.new = self.new, []
        return new

    def _note(self, signum: int, _frame: Optional[FrameType]) -> None:
        (last, at), now = self._last, time.monotonic()
        if self.first and (signum == signal.SIGUSR1 or (signum == last == signal.SIGTERM and now - at < _SAME_S)):
            return
        if last and (last, signum) != (signal.SIGUSR1, signal.SIGTERM):
            self.new.append(signal.SIGKILL)
            self._late.cancel()
            self._late = threading.Timer(_LATE_S, _end_late, (exit_code_of(self.first),))
            self._late.daemon = True
            self._late.start()
            return
        self.first, self._last = self.first or signum, (signum, now)
        self.new.append(signal.SIGINT if signum == signal.SIGHUP else signum)


def _end_late(code: int) -> None:
    """End the job after a second signal, also if this process waits for a reader of its output, which may never come."""
    guard.kill_descendants()
    os._exit(code)


class Supervisor:
    """Runs this machine's part of a job.

    Parameters
    ----------
    job : Job
    signals : Signals
    output : Output

    Raises
    ------
    LaunchError
        An address is not available.
    """

    def __init__(self, job: Job, signals: Signals, output: Output) -> None:
        self._job, self._signals, self._output = job, signals, output
        self._host, self._root = find_addresses(job)
        self._slots: List[int] = []  # the numbers of the processes that have failed
        self._started: List[Started] = []
        self._woken = threading.Event()  # an output has ended

    def attempt(self, restart: int) -> Optional[Failure]:
        """Run all processes once; return the first failure."""
        job = self._job = self._next() if restart else self._job
        with ExitStack() as stack:
            if job.master and job.num_nodes > 1:
                port = job.master[1] + restart * 2  # late messages of an earlier attempt do not reach it
                for own in (0,) if job.node_rank else (port, port + 1):
                    stack.enter_context(reserve_port(self._host, own))
            else:
                port = stack.enter_context(reserve_port(self._host)).getsockname()[1]
            self._started = []
            self._counts = stack.enter_context(NamedTemporaryFile(prefix="gluon_mgpu-"))
            self._counts.truncate(8 * job.num_processes * (1 + LATEST))  # int64, see `Group`
            wanted = tasks(job, self._host, (self._root, port), self._counts.name)
            _check_limit(len(wanted))
            try:
                first = next(at for at, task in enumerate(wanted) if task.name != MACHINES)
                failure = self._run(wanted[:first], self._have_all_joined) if first else None
                failure = failure or self._run(wanted[first:], self._have_all_ended)
                if failure is not None:
                    self._stop_workers(failure)
                    self._slots.append(failure.slot)
                return failure
            finally:  # leave nothing running, whatever happened
                guard.kill_descendants()
                self._poll()
                for task in wanted:
                    guard.remove_socket(task.environ)  # those of guards that were killed

    def _next(self) -> Job:
        """Return the job of the next attempt: with one process fewer if the same one has failed twice in a row."""
        job, count, slots = self._job, self._job.num_processes, self._slots
        if slots[-2:] == 2 * slots[-1:] and slots[-1] >= 0 and 0 < job.min_processes < count:
            count, self._slots = count - 1, []
            self._output.report(f"one process fewer: {count} in all")
        return replace(job, num_processes=count, restart=job.restart + 1)

    def _run(self, wanted: Sequence[Task], is_done: Callable[[], bool]) -> Optional[Failure]:
        """Start processes, and poll all until something is done; return the first failure."""
        job, began, is_told = self._job, time.monotonic(), False
        for number, task in enumerate(wanted):
            if self._signals.new:  # many processes take long to start
                break
            try:
                self._started.append(Started(task, self._output.log(task.name, job.restart), self._woken))
            except (BlockingIOError, RuntimeError) as error:  # no process, or no thread to read its output
                what = f"got a limit of processes ({error}) after {number} of {len(wanted)}; expected one that allows all"
                raise LaunchError(f"launch: {what}. Raise it with ulimit -u, or pass a smaller -n.") from None
        while not self._signals.new:
            self._poll()
            if any(one.status for one in self._started):
                time.sleep(_ROUND_S)  # the guard of one that failed earlier may take longer to end
                self._poll()
                first = min((one for one in self._started if one.status), key=lambda one: one.ended_at)
                where = f" on node {job.node_rank} ({socket.gethostname()})" if job.num_nodes > 1 else ""
                return first.failure(job.num_processes * job.num_nodes, where)
            if is_done():
                return None
            ended = [one for one in self._started if one.task.slot >= 0 and one.gone]
            waits = self._first_waiting()
            if waits:
                return Failure(f"{waits}. {_EQUAL}", 1, can_restart=False)
            if self._workers_left() and ended and not is_told and time.monotonic() - ended[0].ended_at > _LONG_S:
                is_told = True
                self._output.report(
                    f"rank {ended[0].task.name} ended with status 0 {_LONG_S:.0f} s ago, and others run on. {_EQUAL} "
                    "Watchdog(end_process=True) ends processes that wait."
                )
            patience_s = min(job.join_s, _RETURN_S) if job.restart else job.join_s
            if is_done == self._have_all_joined and time.monotonic() - began > patience_s:
                return Failure(_NOT_JOINED.format(job.num_nodes, patience_s, *(job.master or ())), 1, can_restart=False)
        return Failure("got a signal", 1)

    def _first_waiting(self) -> str:
        """Return which worker has begun a collective call that another never will: that has ended well, or is in another call."""
        self._counts.seek(0)
        noted, size = array("q", self._counts.read()), 1 + LATEST  # see `Group`
        workers = [(one, noted[one.task.slot * size :][:size]) for one in self._started if one.task.slot >= 0]
        for first, calls in workers:
            for other, others in workers:
                place, name, last = 1 + calls[0] % LATEST, first.task.name, other.task.name
                if first.gone and not other.gone and calls[0] < others[0]:
                    return f"rank {last} waits for rank {name}, which has ended with status 0"
                if 0 < calls[0] <= others[0] < calls[0] + LATEST and calls[place] != others[place]:
                    return f"rank {last} and rank {name} wait for each other, in different calls, such as a step and a save"
        return ""

    def _have_all_joined(self) -> bool:
        return JOINED in self._started[-1].log.path.read_text("utf-8", "replace")

    def _have_all_ended(self) -> bool:
        """Report when the workers of this machine have ended; return whether those of all machines have."""
        if self._workers_left():
            return False
        watches = [one for one in self._started if one.task.name == MACHINES]
        for watch in watches:
            watch.end_input()
        return all(watch.gone for watch in watches)

    def _stop_workers(self, failure: Failure) -> None:
        """End the workers: pass on the signals that this launcher got, or the workers of other machines, else SIGTERM."""
        asked = failure.asked or self._signals.first
        grace_s = self._job.grace_s if asked else min(self._job.grace_s, _FAILED_S)
        if not asked:
            for one in self._started:
                if one.task.name == MACHINES:
                    one.signal(signal.SIGKILL)  # the other machines notice
        signals, deadline = self._signals.take() or [failure.asked or signal.SIGTERM], time.monotonic() + grace_s
        while self._workers_left():
            if time.monotonic() > deadline:
                if asked:
                    self._output.report("killing the processes that have not ended; see --grace")
                return
            for signum in signals:
                if signum == signal.SIGKILL:
                    return
                for one in self._workers_left():
                    one.signal(signum)
            self._poll()
            signals = self._signals.take()
        deadline = time.monotonic() + grace_s  # for the other machines to save: srun and mpirun kill them when a launcher fails
        while asked and not (self._have_all_ended() or self._signals.take()) and time.monotonic() < deadline:
            self._poll()

    def _workers_left(self) -> List[Started]:
        return [one for one in self._started if one.task.slot >= 0 and not one.gone]

    def _poll(self) -> None:
        """Wait a moment, and check which processes have ended."""
        self._woken.wait(_ROUND_S)
        self._woken.clear()
        for one in self._started:
            one.poll()


def _check_limit(count: int) -> None:
    """Raise if this process may not open the files of so many others: for each one a log and three pipes."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4 * count + len(os.listdir("/proc/self/fd")) + 6
    if 0 <= limit < needed:
        what = f"got a limit of {limit} open files for {count} processes, servers included; expected {needed} at least"
        raise LaunchError(f"launch: {what}. Raise it with ulimit -n {needed}, or pass a smaller -n.")


def run_job(job: Job) -> int:
    """Run this machine's part of a job to its end, from the main thread of a process without other children.

    Return the exit code: 0, or that of the first failure. It is 128 plus the signal's number if a signal killed that process, 130
    after a Ctrl-C here, 143 after a SIGTERM, 85 after a SIGUSR1, and 1 if another machine was lost.
    When this returns, all processes and ports of the job are released.

    Raises
    ------
    LaunchError
        An address is not available, or Horovod is not installed.
    """
    if job.backend == "horovod" and job.num_nodes * job.num_processes > 1 and find_spec("horovod") is None:
        told = "expected it in this Python. Run sh scripts/build_horovod.sh, or leave --backend out."
        raise LaunchError(f"launch: got --backend horovod without Horovod; {told}")
    output = job_output(job.log_dir)
    guard.adopt_orphans()  # if a guard is killed, its program's children become ours
    with Signals() as signals:
        return restart_on_failure(Supervisor(job, signals, output).attempt, job.max_restarts, signals, output)


def restart_on_failure(attempt: Callable[[int], Optional[Failure]], max_restarts: int, signals: Signals, output: Output) -> int:
    """Attempt a job until it ends well, has been restarted often enough, or gets a signal; return its exit code."""
    restart = 0
    while True:
        failure = attempt(restart)
        if signals.first:
            failure = Failure(f"ended by {signal.Signals(signals.first).name}", exit_code_of(signals.first), can_restart=False)
        if failure is None:
            return 0
        if restart == max_restarts or not failure.can_restart:
            output.report(f"{failure.cause}\nThe logs are in {output.folder}.")
            return failure.code
        restart += 1
        output.report(failure.cause)
        output.report(f"restart {restart} of {max_restarts}")


def job_output(folder: Optional[Path]) -> Output:
    """Return the output of a job to this process's streams, and to a folder: by default one named after the time."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"
    return Output(folder or Path("runs/launch", name), sys.stdout.buffer, sys.stderr.buffer)
