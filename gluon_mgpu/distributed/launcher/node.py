"""The processes of one machine: start, watch and stop them."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, List, Optional, Sequence, Set, Tuple

from . import guard
from .output import Log, Output
from .plan import Machine, Plan, Task

TIMED_OUT = 124  # the exit status of timeout(1)
_CHECK_S = 1.0
_ROUND_S = 0.1  # the end of an output ends the wait earlier
_LATE_S = 1.0  # for the rest of an output
_IDLE = 0.01  # of a core: all processes together use less when they wait for one another
_TICKS_S = 0.02  # the kernel counts hundredths of a second
_READ = 1 << 16


@dataclass(frozen=True)
class Failure:
    """Why a job has ended: the first of its processes that failed, not those that failed because of it.

    Attributes
    ----------
    who : str
        Such as "rank 1".
    what : str
        Such as "exited with status 3".
    code : int
        The exit code of the launcher.
    lines : tuple of str
        The last traceback, or the last lines of standard error.
    log : str
        The file that holds everything.
    slot : int
        A worker's number on its machine, else -1.
    """

    who: str
    what: str
    code: int
    lines: Tuple[str, ...] = ()
    log: str = ""
    slot: int = -1


class Node:
    """This machine's part of a job: start its processes, poll them, and stop them until none is running.

    Parameters
    ----------
    machine : Machine
    output : Output
    grace_s : float, seconds
        Between SIGTERM and SIGKILL when the launcher has died.
    timeout_s : float, seconds
        How long a process may be stopped (SIGSTOP); 0 for no limit.
    """

    def __init__(self, machine: Machine, output: Output, *, grace_s: float, timeout_s: float) -> None:
        self.failure: Optional[Failure] = None
        self.cpu_s = 0.0  # processor time that the processes have used
        self.machine, self._output = machine, output
        self._grace_s, self._timeout_s = grace_s, timeout_s
        self._started: List[_Started] = []
        self._woken = threading.Event()  # an output has ended
        self._passed_on: Set[int] = set()  # signals sent to the workers
        self._checked_at = 0.0
        self._spare: List[int] = []

    @property
    def running(self) -> bool:
        """Whether any process is left, including those of the store."""
        return any(not one.gone for one in self._started)

    @property
    def workers_left(self) -> int:
        """The number of workers that have not ended."""
        return sum(one.task.slot >= 0 and not one.gone for one in self._started)

    @property
    def ended_well(self) -> List[str]:
        """The ranks of the workers that have ended with status 0."""
        return [one.task.name for one in self._started if one.task.slot >= 0 and one.gone and one.failed_at is None]

    def start(self, plan: Plan, node_rank: int) -> None:
        """Start this node's processes of the plan."""
        self.failure, self._passed_on = None, set()
        self._spare = [pid for pid, stat in guard.processes().items() if stat.parent == os.getpid()]
        self._started = []
        for task in self.machine.tasks(plan, node_rank):
            log = self._output.log(task.name, plan.restart)
            self._started.append(_Started(task, log, self._woken, self._grace_s))

    def poll(self) -> None:
        """Wait a moment, and check which processes have ended or stopped."""
        self._woken.wait(_ROUND_S)
        self._woken.clear()
        for one in self._started:
            one.poll()
        ended = [one for one in self._started if one.failed_at is not None]
        first = min(ended, key=lambda one: one.failed_at or 0.0, default=None)
        if first is not None and first.gone and self.failure is None and not self._passed_on:
            self.failure = first.failure()
        if time.monotonic() - self._checked_at >= _CHECK_S and self.running:
            self._checked_at = time.monotonic()
            self._check_states()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Pass a signal to the workers, each signal once. The caller decides how long to wait, and calls `kill`."""
        if signum == signal.SIGKILL:
            self.kill()
        elif signum not in self._passed_on:
            for one in self._started:
                if one.task.slot >= 0:
                    one.signal(signum)
        self._passed_on.add(signum)

    def stop_store(self) -> None:
        """Ask the processes that serve the workers to end."""
        self._passed_on.add(signal.SIGTERM)
        for one in self._started:
            one.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes at once, including their orphans."""
        guard.kill_descendants(self._spare)
        for one in self._started:
            one.poll()

    def _check_states(self) -> None:
        stats = guard.processes()
        trees = {one: {one.guard, *guard.descendants(one.guard, stats)} for one in self._started if not one.gone}
        self.cpu_s = sum(stats[pid].cpu_s for tree in trees.values() for pid in tree if pid in stats)
        for one in trees:
            stopped_s = one.stopped_s([stats[pid].state for pid in (one.guard, one.pid) if pid in stats])
            if self._timeout_s and stopped_s > self._timeout_s and self.failure is None and not self._passed_on:
                self.failure = one.failure(f"was stopped (SIGSTOP) for {stopped_s:.0f} s", TIMED_OUT)


class Activity:
    """Measures how long processes have been idle, from the processor time that they have used.

    Examples
    --------
    >>> activity = Activity()
    >>> [activity.idle_s(cpu_s, now) for cpu_s, now in [(0.0, 0.0), (5.0, 5.0), (5.01, 65.0), (6.5, 70.0)]]
    [0.0, 0.0, 60.0, 0.0]
    """

    def __init__(self) -> None:
        self._since: Optional[Tuple[float, float]] = None

    def idle_s(self, cpu_s: float, now: float) -> float:
        """Return for how many seconds less than a hundredth of a core has been used."""
        before_s, since = self._since or (-1.0, now)
        if self._since is None or cpu_s < before_s or cpu_s - before_s > max(_TICKS_S, _IDLE * (now - since)):
            self._since = (cpu_s, now)
            return 0.0
        return now - since


class _Started:
    """A process with the guard around it, and a thread for its outputs."""

    def __init__(self, task: Task, log: Log, woken: threading.Event, grace_s: float) -> None:
        self.task, self._log, self._woken = task, log, woken
        self.pid = 0
        self.gone = False  # including all processes that it has started
        self._status: Optional[int] = None
        self._ended_at = 0.0
        self._stopped_at: Optional[float] = None
        self._popen, self._report = self._start(grace_s)
        self.guard = self._popen.pid
        self._reader = threading.Thread(target=self._copy, daemon=True)
        self._reader.start()

    @property
    def failed_at(self) -> Optional[float]:
        """When it failed, by the guard's clock, which keeps the order of failures; None if it has not failed."""
        return self._ended_at if self._status else None

    def poll(self) -> None:
        """Check whether the program has ended, and its guard."""
        if self.gone:
            return
        has_ended = self._popen.poll() is not None
        self._read_report()
        if has_ended:
            if self._status is None:  # the guard was killed, and the program with it
                self._status, self._ended_at = signal.SIGKILL, time.monotonic()
            self._reader.join(_LATE_S)
            self._report.close()
            self._log.close()
            self.gone = True

    def signal(self, signum: int) -> None:
        """Pass a signal to the program, unless it has ended."""
        if not self.gone:
            self._popen.send_signal(signum)

    def stopped_s(self, states: Sequence[str]) -> float:
        """Return for how many seconds one of the states has been "stopped"."""
        self._stopped_at = (self._stopped_at or time.monotonic()) if "T" in states else None
        return time.monotonic() - self._stopped_at if self._stopped_at else 0.0

    def failure(self, what: str = "", code: int = 0) -> Failure:
        """Return the failure of this process: its exit status, or `what` and `code`."""
        who = f"rank {self.task.name}" if self.task.name.isdigit() else self.task.name
        status = self._status or 0
        if not what and os.WIFSIGNALED(status):
            what, code = f"was killed by {_name(os.WTERMSIG(status))}", 128 + os.WTERMSIG(status)
        elif not what:
            what, code = f"exited with status {os.WEXITSTATUS(status)}", os.WEXITSTATUS(status)
        return Failure(who, what, code, tuple(self._log.last_lines()), str(self._log.path), self.task.slot)

    def _start(self, grace_s: float) -> Tuple[subprocess.Popen, IO[bytes]]:
        report, report_end = os.pipe()
        cores = ",".join(map(str, self.task.cores)) or "-"
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(report_end), str(grace_s), cores]
        pipe = subprocess.PIPE
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, guard.PASSED_ON)  # until the guard is ready for them
        try:
            popen = subprocess.Popen(
                [*guarded, *self.task.command],
                env=dict(self.task.environ),
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                pass_fds=[report_end],
                start_new_session=True,  # so that only the launcher gets the terminal's Ctrl-C
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(report_end)
        os.set_blocking(report, False)
        return popen, open(report, "rb", buffering=0)

    def _copy(self) -> None:
        """Write both outputs to the log, in the order of their arrival."""
        out, err = self._popen.stdout, self._popen.stderr
        assert out is not None and err is not None
        with out, err, selectors.DefaultSelector() as selector:
            for stream, pipe in enumerate((out, err)):
                selector.register(pipe, selectors.EVENT_READ, stream)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, _READ)
                    self._log.write(data, key.data)
                    if not data:
                        selector.unregister(key.fileobj)
        self._woken.set()

    def _read_report(self) -> None:
        for line in (self._report.read() or b"").splitlines():  # a line is written at once
            word, *numbers = line.split()
            if word == b"pid":
                self.pid = int(numbers[0])
            else:
                self._ended_at, self._status = float(numbers[0]), int(numbers[1])


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
