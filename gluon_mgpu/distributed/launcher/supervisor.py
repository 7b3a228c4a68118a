"""A job from its first attempt to its last: the first failure stops everything, and is the cause or leads to a restart.

gather the nodes ──► plan ──► start ──► poll, poll, poll ──► all workers exit with 0 ──► 0
       ▲                                      │
       └── restarts left, perhaps one fewer ──┴── a failure, a signal ──► stop everything ──► the cause's exit code
"""

from __future__ import annotations

import selectors
import signal
import time
from dataclasses import dataclass, replace
from types import FrameType
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from ..process import REQUEUE, LaunchError, exit_code_of
from .connection import wait_for_events
from .node import TIMED_OUT, Activity, Failure, Node
from .plan import Plan, spread_servers
from .rendezvous import Member, Rendezvous, reserve_port

_SOONER_S = 2.0  # so that a node reports a stopped process, for which all others wait, before the job counts as hung
_RETURN_S = 10.0  # for a node to reconnect, if the job may continue without it
_ALONE = 0.1  # of the idle time allowed: once some processes have ended, the others rarely wait for anything else
_LATE_S = 3.0  # for a node to stop the store, or to kill, and to report it
_FAILED_S = 5.0  # for the other workers to end after a failure: they have nothing to save together
_GRACES = 10  # the longest time between the first signal and SIGKILL, in grace times
_MOST_GARBAGE = 10  # restarts after garbage on ps-lite's ports that do not count towards `max_restarts`
_SAME_S = 0.5  # timeout(1) sends SIGTERM twice: two within this time count as one
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
Site = Union[Node, Member]


@dataclass(frozen=True)
class Limits:
    """Limits of a job: restarts, numbers of processes, and waiting times.

    Attributes
    ----------
    max_restarts : int
        Ten more are allowed after garbage on ps-lite's ports, unless this is 0.
    fewest : int
        The smallest number of processes with which the job may continue; 0 if their number must not change.
    most : int
        The largest number of processes with which the job may begin; 0 for no limit.
    grace_s : float, seconds
        How long all processes together may be idle after a signal to the launcher; a tenth of it when some have ended. Processes
        left after this time, or after ten times this time in all, are killed.
    timeout_s : float, seconds
        How long a process may be stopped (SIGSTOP), and how long all together may be idle; a tenth of it when some have exited
        with status 0. 0 for no limit.
    patience_s : float, seconds
        How long nodes wait for each other.
    """

    max_restarts: int = 0
    fewest: int = 0
    most: int = 0
    grace_s: float = 60.0
    timeout_s: float = 300.0
    patience_s: float = 300.0

    @property
    def failed_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL for the other processes when one has failed, or the launcher was killed."""
        return min(self.grace_s, _FAILED_S)


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
        self._since = self._stored_since = time.monotonic()
        self._idle_s = limits.failed_s if failed else limits.grace_s
        self._most_s = limits.failed_s if failed else _GRACES * limits.grace_s
        self._store_s = max(_LATE_S, limits.failed_s)
        self._activity = Activity()

    def is_over(self, cpu_s: float, num_ended: int, num_left: int) -> bool:
        """Return whether to kill the rest, from the processor time of all and the numbers of ended and remaining workers."""
        now = time.monotonic()
        if num_left:
            self._stored_since = now
        idle_s = self._activity.idle_s(cpu_s, now)
        most_idle_s = self._idle_s * (_ALONE if num_ended else 1.0) + _SOONER_S
        return now - self._stored_since > self._store_s or now - self._since > self._most_s or idle_s > most_idle_s


class Supervisor:
    """Runs a job from node 0.

    Parameters
    ----------
    node : Node
        This machine's part.
    rendezvous : Rendezvous, optional
        Accepts the other nodes; None for a single node.
    num_processes : int
        On this machine.
    servers : int, optional
        Parameter servers of the whole job.
    backend : str
        Connects the processes; see `plan.BACKENDS`.
    limits : Limits
    selector : selectors.BaseSelector
    signals : Signals
    report : callable (str) -> None
        Shows the user a message.
    """

    def __init__(
        self,
        node: Node,
        rendezvous: Optional[Rendezvous],
        num_processes: int,
        *,
        servers: Optional[int],
        backend: str,
        limits: Limits,
        selector: selectors.BaseSelector,
        signals: Signals,
        report: Callable[[str], None],
    ) -> None:
        self._node, self._rendezvous, self._num_processes = node, rendezvous, num_processes
        self._servers, self._backend, self._limits = servers, backend, limits
        self._selector, self._signals, self._report = selector, signals, report
        self._num_nodes = rendezvous.num_nodes if rendezvous else 1
        self._fewer: Dict[int, int] = {}  # node -> how many of its processes are left out
        self._num_garbage = 0  # restarts that do not count
        self._slot: Tuple[int, int] = (-1, -1)  # node and number of the process that failed in the last attempt

    def run(self) -> Tuple[int, str]:
        """Run the job; return the exit code, and its cause if the code is not 0."""
        ended = self._run()
        if self._num_garbage:
            self._report(f"{self._num_garbage} restarts after garbage on ps-lite's ports")
        return ended

    def _run(self) -> Tuple[int, str]:
        restart, cause = 0, ""
        while True:
            try:
                sites, counts = self._gather(restart)
            except LaunchError as error:
                return self._ended(1, f"{cause} {error}".strip())
            if self._signals.first:
                return self._ended(1, cause)
            failure = self._attempt(restart, sites, counts)
            if failure is None:
                return self._ended(0, "")
            cause = describe_failure(failure, sum(counts))
            if failure.code == REQUEUE:  # the workers got SIGUSR1 and have saved: this machine's time is over
                return self._ended(REQUEUE, f"{failure.who} {failure.what}: it has saved. Start the job again")
            is_free = failure.is_garbage and self._num_garbage < _MOST_GARBAGE and self._limits.max_restarts > 0
            if self._signals.first or not (is_free or restart - self._num_garbage < self._limits.max_restarts):
                return self._ended(failure.code, cause)
            self._report(cause)
            restart += 1
            if is_free:
                self._num_garbage += 1
                self._report(
                    f"restart after garbage on ps-lite's ports, {self._num_garbage} of {_MOST_GARBAGE} that do not count. "
                    "Protect these ports: pass --interface, use a firewall, or pass --backend horovod"
                )
            else:
                self._shrink(failure, sum(counts))
                self._report(f"restart {restart - self._num_garbage} of {self._limits.max_restarts}")

    def _ended(self, code: int, cause: str) -> Tuple[int, str]:
        if self._signals.first:
            code, cause = exit_code_of(self._signals.first), f"ended by {signal.Signals(self._signals.first).name}"
        return code, cause

    def _gather(self, restart: int) -> Tuple[Dict[int, Site], List[int]]:
        """Wait for the nodes; return those that take part, by rank, and the number of processes of each."""
        since = time.monotonic()
        while True:
            sites, counts = self._here()
            waited_s, missing = time.monotonic() - since, self._missing()
            if not missing or self._signals.first or self._can_do_without(missing, sum(counts), waited_s, restart):
                break
            if waited_s > self._limits.patience_s:
                raise LaunchError(
                    f"launch: got no {missing} for {waited_s:.0f} s; expected {self._num_nodes} nodes. Start the same "
                    "command there, with its --node-rank, and check that the rendezvous can be reached."
                )
            self._round([])
        if self._limits.most and sum(counts) > self._limits.most:
            raise LaunchError(
                f"launch: got {sum(counts)} processes on {len(counts)} nodes; expected at most {self._limits.most}. Raise the "
                "maximum of --elastic, or start fewer."
            )
        return sites, counts

    def _here(self) -> Tuple[Dict[int, Site], List[int]]:
        """Return the nodes that have joined and have processes to run, and the number of processes of each."""
        sites: Dict[int, Site] = {0: self._node}
        counts = [self._num_processes - self._fewer.get(0, 0)]
        for member in self._rendezvous.members if self._rendezvous else []:
            count = member.num_processes - self._fewer.get(member.node_rank, 0)
            if count > 0:
                sites[member.node_rank] = member
                counts.append(count)
        return sites, counts

    def _missing(self) -> str:
        here = {0, *(member.node_rank for member in self._rendezvous.members)} if self._rendezvous else {0}
        missing = [str(rank) for rank in range(self._num_nodes) if rank not in here]
        return f"node {', '.join(missing)}" if missing else ""

    def _can_do_without(self, missing: str, num_processes: int, waited_s: float, restart: int) -> bool:
        """Return whether the job may continue with fewer nodes, and the time for the missing ones is over."""
        patience_s = min(self._limits.patience_s, _RETURN_S) if restart else self._limits.patience_s
        if not 0 < self._limits.fewest <= num_processes or waited_s <= patience_s:
            return False
        self._report(f"continuing without {missing}, with {num_processes} processes")
        return True

    def _attempt(self, restart: int, sites: Dict[int, Site], counts: Sequence[int]) -> Optional[Failure]:
        """Run all processes once; return the first failure."""
        host = self._node.machine.host
        with reserve_port(host) as held:
            servers = spread_servers(0 if self._backend == "horovod" else self._servers, counts)
            plan = Plan(restart, tuple(counts), servers, (host, held.getsockname()[1]), self._backend)
            try:
                for number, site in enumerate(sites.values()):
                    site.start(plan, number)
                failure = self._poll_until_end(sites, counts)
                if failure is not None and failure.signum:
                    self._stop(list(sites.values()), sum(counts), failure.signum)
                return failure
            finally:  # leave nothing running, whatever happened
                self._stop(list(sites.values()), sum(counts))

    def _poll_until_end(self, sites: Dict[int, Site], counts: Sequence[int]) -> Optional[Failure]:
        activity = Activity()
        while True:
            for rank, site in sites.items():
                if site.failure is not None:
                    return replace(site.failure, node_rank=rank)
            if not any(site.workers_left for site in sites.values()):
                return None
            if self._signals.new:
                return Failure("the launcher", "got a signal", 1)
            idle_s = activity.idle_s(sum(site.cpu_s for site in sites.values()), time.monotonic())
            ended = sum(counts) - sum(site.workers_left for site in sites.values())
            if self._limits.timeout_s and idle_s > self._limits.timeout_s * (_ALONE if ended else 1.0) + _SOONER_S:
                return _hung(idle_s, ended, self._node.ended_well)
            self._round(sites.values())

    def _stop(self, sites: Sequence[Site], num_processes: int, signum: int = 0) -> None:
        """Stop everything: pass on the signals that this or another node's launcher got, else SIGTERM, and wait for the end."""
        signals = self._signals.take() or [signum or signal.SIGTERM]
        grace, killed_at = Grace(self._limits, failed=not (signum or self._signals.first)), 0.0
        while any(site.running for site in sites) and not (killed_at and time.monotonic() > killed_at + _LATE_S):
            for one in signals:
                for site in sites:
                    site.stop(one)
                killed_at = killed_at or (time.monotonic() if one == signal.SIGKILL else 0.0)
            self._round(sites)
            signals = self._signals.take()
            num_left = sum(site.workers_left for site in sites)
            if not killed_at and grace.is_over(sum(site.cpu_s for site in sites), num_processes - num_left, num_left):
                signals.append(signal.SIGKILL)
                if num_left and self._signals.first:
                    self._report(f"killing {num_left} processes that have not ended; see --grace")
        for site in sites:
            site.kill()

    def _round(self, sites: Iterable[Site]) -> None:
        wait_for_events(self._selector)
        if self._rendezvous:
            self._rendezvous.poll()
        for site in sites:
            site.poll()

    def _shrink(self, failure: Failure, num_processes: int) -> None:
        """Leave one process out if the same one has failed twice in a row, and the job may continue without it."""
        slot = (failure.node_rank, failure.slot)
        again, self._slot = slot == self._slot and failure.slot >= 0, slot
        if again and 0 < self._limits.fewest < num_processes:
            self._fewer[failure.node_rank] = self._fewer.get(failure.node_rank, 0) + 1
            self._slot = (-1, -1)
            self._report(f"one process fewer on node {failure.node_rank}: {num_processes - 1} in all")


def _hung(idle_s: float, num_ended: int, ranks: Sequence[str]) -> Failure:
    """Return the failure of a job that hangs: all are idle, or `num_ended` exited with 0; `ranks` are those of this machine."""
    if not num_ended:
        return Failure(
            "no process", f"has computed for {idle_s:.0f} s: all wait for each other, or for something else", TIMED_OUT
        )
    who = f"rank {', '.join(ranks)}" if len(ranks) == num_ended else f"{num_ended} processes, not all of this node,"
    what = (
        f"ended with status 0, and the others have computed nothing for {idle_s:.0f} s: they wait for a process that has ended. "
        "Give every process the same number of steps, as ShardedSampler does, and let all evaluate and save equally often. Do "
        "not end a process with os._exit, which drops queued steps"
    )
    return Failure(who, what, TIMED_OUT)


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
