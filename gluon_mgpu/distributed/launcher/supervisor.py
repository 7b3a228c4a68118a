"""A job from its first attempt to its last: the first failure stops everything, and is the cause or leads to a restart.

machines join ──► plan ──► start ──► poll, poll, poll ──► all workers of all machines exit with 0 ──► 0
       ▲                                   │
       └─ restarts left, perhaps one fewer ┴── a failure, a lost machine, a signal ──► stop everything ──► exit code
"""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType
from typing import Dict, List, Optional, Sequence, Tuple

from ..process import REQUEUE, LaunchError, exit_code_of
from .job import Job, Limits
from .machines import Machines
from .network import reserve_port
from .node import TIMED_OUT, Activity, Failure, Node
from .output import Output
from .plan import Plan, default_servers

_SOONER_S = 2.0  # so that a node reports a stopped process, for which all others wait, before the job counts as hung
_RETURN_S = 60.0  # for the other machines to stop their processes, and to join again
_ALONE = 0.1  # of the idle time allowed: once some processes have ended, the others rarely wait for anything else
_STORE_S = 5.0  # for the store to end
_GRACES = 10  # the longest time between the first signal and SIGKILL, in grace times
_SAME_S = 0.5  # timeout(1) sends SIGTERM twice: two within this time count as one
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_ASKED = {exit_code_of(signum): int(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


class Signals:
    """Records SIGINT, SIGTERM, SIGHUP and SIGUSR1 instead of letting them end this process.

    SIGHUP (a closed terminal or a lost ssh connection) is passed on as a Ctrl-C, after which programs save. After SIGUSR1, the
    first SIGTERM is the scheduler's own, at the time limit, and is passed on.
    """

    def __init__(self) -> None:
        self.first = 0  # the signal that came first, 0 for none
        self.new: List[int] = []  # signals that have not been passed on
        self._first_at = 0.0
        self._is_last_call = False  # whether the next SIGTERM kills
        self._before: Dict[int, object] = {}

    def __enter__(self) -> Signals:
        for signum in _PASSED_ON:
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def take(self) -> List[int]:
        """Return the signals since the last call; a second request to stop counts as SIGKILL."""
        new, self.new = self.new, []
        return new

    def _note(self, signum: int, _frame: Optional[FrameType]) -> None:
        if not self.first:
            self.first, self._first_at = signum, time.monotonic()
            self._is_last_call = signum != signal.SIGUSR1
            self.new.append(signal.SIGINT if signum == signal.SIGHUP else signum)
        elif signum == signal.SIGUSR1:
            pass
        elif signum == signal.SIGTERM and not self._is_last_call:
            self._is_last_call, self._first_at = True, time.monotonic()
            self.new.append(signum)
        elif signum != signal.SIGTERM or time.monotonic() - self._first_at >= _SAME_S:
            self.new.append(signal.SIGKILL)


class Grace:
    """How long to wait for processes to stop: as long as they compute, within a limit; shortly after a failure.

    Parameters
    ----------
    limits : Limits
    failed : bool
        Whether a process has failed, so that the others have nothing to save together.
    """

    def __init__(self, limits: Limits, *, failed: bool) -> None:
        self._since = time.monotonic()
        self._idle_s = limits.failed_s if failed else limits.grace_s
        self._most_s = limits.failed_s if failed else _GRACES * limits.grace_s
        self._activity = Activity()

    def is_over(self, cpu_s: float, num_ended: int) -> bool:
        """Return whether to kill the rest, from the processor time of all and the number of workers that have ended."""
        now = time.monotonic()
        idle_s = self._activity.idle_s(cpu_s, now)
        return now - self._since > self._most_s or idle_s > self._idle_s * (_ALONE if num_ended else 1.0) + _SOONER_S


class Supervisor:
    """Runs this machine's part of a job.

    Parameters
    ----------
    job : Job
    node : Node
        The processes of this machine.
    root : str
        The address of node 0.
    signals : Signals
    output : Output
    """

    def __init__(self, job: Job, node: Node, root: str, *, signals: Signals, output: Output) -> None:
        self._job, self._node, self._root, self._limits = job, node, root, job.limits
        self._signals, self._output = signals, output
        self._num_processes = job.num_processes
        self._slot = -1  # the number of the process that failed in the last attempt

    def run(self) -> Tuple[int, str]:
        """Run the job; return the exit code, and its cause if the code is not 0."""
        restart = 0
        while True:
            failure = self._attempt(restart)
            if failure is None:
                return self._ended(0, "")
            cause = describe_failure(failure, self._num_processes * self._job.num_nodes)
            if self._asked(failure):  # a worker has saved and ended: another launcher got the signal, or Slurm sent it to all
                return self._ended(failure.code, f"{failure.who} {failure.what}: it has saved. Start the job again")
            if self._signals.first or restart == self._limits.max_restarts:
                return self._ended(failure.code, cause)
            self._output.report(cause)
            restart += 1
            self._shrink(failure)
            self._output.report(f"restart {restart} of {self._limits.max_restarts}")

    def _ended(self, code: int, cause: str) -> Tuple[int, str]:
        if self._signals.first:
            code, cause = exit_code_of(self._signals.first), f"ended by {signal.Signals(self._signals.first).name}"
        return code, cause

    def _asked(self, failure: Failure) -> int:
        """Return the signal after which a worker has saved and exited, 0 if it has failed."""
        exited = failure.slot >= 0 and failure.what == f"exited with status {failure.code}"
        return _ASKED.get(failure.code, 0) if exited and (self._job.num_nodes > 1 or failure.code == REQUEUE) else 0

    def _attempt(self, restart: int) -> Optional[Failure]:
        """Run all processes once; return the first failure."""
        with ExitStack() as stack:
            plan = self._plan(restart, stack)
            log = self._output.folder / "machines.log"
            host, node_rank = self._node.machine.host, self._job.node_rank
            machines = stack.enter_context(Machines(plan, node_rank, host, log=log))
            failure = self._join(machines, restart)
            if failure is not None:
                return failure
            try:
                self._node.start(plan, node_rank)
                failure = self._poll_until_end(machines)
                asked = self._asked(failure) if failure is not None else 0
                if failure is not None and not (asked or self._signals.first):
                    machines.leave()
                self._stop_workers(asked)
                if asked or self._signals.first:
                    self._wait_for_others(machines)
                return failure
            finally:  # leave nothing running, whatever happened
                self._stop_all()

    def _plan(self, restart: int, stack: ExitStack) -> Plan:
        job, port = self._job, self._job.port(restart)
        if job.num_nodes == 1:
            port = stack.enter_context(reserve_port(self._root)).getsockname()[1]
        elif not job.node_rank:
            for one in (port, port + 1):
                stack.enter_context(reserve_port(self._root, one))
        num_servers = default_servers(job.num_nodes, self._num_processes) if job.servers is None else job.servers
        if job.backend == "horovod" or job.num_nodes * self._num_processes == 1:
            num_servers = 0
        root = (self._root, port)
        return Plan(job.restart + restart, job.num_nodes, self._num_processes, num_servers, root, job.backend)

    def _join(self, machines: Machines, restart: int) -> Optional[Failure]:
        """Wait until all machines are there."""
        since, patience_s = time.monotonic(), min(self._limits.patience_s, _RETURN_S if restart else float("inf"))
        while not machines.ready:
            if self._signals.new:
                return Failure("the launcher", "got a signal", 1)
            if machines.failure is not None:
                return machines.failure
            if time.monotonic() - since > patience_s:
                raise LaunchError(
                    f"launch: got no connection of all {self._job.num_nodes} machines for {patience_s:.0f} s; expected each to "
                    "join. Start the same command on each, with its --node-rank, and check that node 0 can be reached."
                )
            self._node.poll()
        return None

    def _poll_until_end(self, machines: Machines) -> Optional[Failure]:
        activity = Activity()
        while True:
            self._node.poll()
            num_left = self._node.workers_left
            if self._node.failure is not None:
                return self._on_this_machine(self._node.failure)
            if machines.failure is not None:
                return machines.failure
            if not num_left:
                machines.end()
                if machines.all_ended:
                    return None
            if self._signals.new:
                return Failure("the launcher", "got a signal", 1)
            idle_s = activity.idle_s(self._node.cpu_s, time.monotonic())
            is_alone = num_left < self._num_processes
            if num_left and self._limits.timeout_s and idle_s > self._limits.timeout_s * (_ALONE if is_alone else 1) + _SOONER_S:
                return _hung(idle_s, self._node.ended_well)

    def _on_this_machine(self, failure: Failure) -> Failure:
        if self._job.num_nodes == 1:
            return failure
        return replace(failure, who=f"{failure.who} on node {self._job.node_rank} ({socket.gethostname()})")

    def _stop_workers(self, asked: int) -> None:
        """End the workers: pass on the signals that this launcher got, or the workers of other machines, else SIGTERM."""
        signals = self._signals.take() or [asked or signal.SIGTERM]
        grace = Grace(self._limits, failed=not (asked or self._signals.first))
        while self._node.workers_left:
            for one in signals:
                self._node.stop(one)
            self._node.poll()
            signals = self._signals.take()
            num_left = self._node.workers_left
            if grace.is_over(self._node.cpu_s, self._num_processes - num_left):
                signals.append(signal.SIGKILL)
                if num_left and self._signals.first:
                    self._output.report(f"killing {num_left} processes that have not ended; see --grace")

    def _wait_for_others(self, machines: Machines) -> None:
        """Wait until the other machines have saved: `srun` and `mpirun` kill them when a launcher exits with an error."""
        machines.end()
        deadline = time.monotonic() + self._limits.grace_s
        while not machines.all_ended and machines.failure is None and time.monotonic() < deadline:
            if signal.SIGKILL in self._signals.take():
                break
            self._node.poll()

    def _stop_all(self) -> None:
        """End what serves the workers, and kill what is left."""
        self._node.stop_store()
        deadline = time.monotonic() + _STORE_S
        while self._node.running and not self._node.workers_left and time.monotonic() < deadline:
            self._node.poll()
        self._node.kill()

    def _shrink(self, failure: Failure) -> None:
        """Leave one process out if the same one has failed twice in a row, and the job may continue without it."""
        again, self._slot = failure.slot == self._slot >= 0, failure.slot
        if again and 0 < self._limits.fewest < self._num_processes:
            self._num_processes -= 1
            self._slot = -1
            self._output.report(f"one process fewer: {self._num_processes} in all")


def _hung(idle_s: float, ranks: Sequence[str]) -> Failure:
    """Return the failure of processes that hang: all are idle, or those of `ranks` have exited with 0."""
    if not ranks:
        what = f"has computed for {idle_s:.0f} s: all wait for each other, or for something else"
        return Failure("no process", what, TIMED_OUT)
    what = (
        f"ended with status 0, and the others have computed nothing for {idle_s:.0f} s: they wait for a process that has ended. "
        "Give every process the same number of steps, as ShardedSampler does, and let all evaluate and save equally often. Do "
        "not end a process with os._exit, which drops queued steps"
    )
    return Failure(f"rank {', '.join(ranks)}", what, TIMED_OUT)


def describe_failure(failure: Failure, num_processes: int) -> str:
    """Return a sentence with the cause of a job's end, and the last lines of the failed process.

    Examples
    --------
    >>> print(describe_failure(Failure("rank 1", "exited with status 3", 3, ("ValueError: no",), "rank-1.log"), 2))
    rank 1 exited with status 3, the first of 2 processes to fail. Its log is rank-1.log, its last lines:
      ValueError: no
    """
    text = f"{failure.who} {failure.what}"
    if failure.slot >= 0 or failure.log:
        text += f", the first of {num_processes} processes to fail"
    text += f". Its log is {failure.log}" if failure.log else ""
    if not failure.lines:
        return text + "."
    return f"{text}, its last lines:\n" + "\n".join(f"  {line}" for line in failure.lines)
