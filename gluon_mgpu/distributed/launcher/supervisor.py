"""A job from its first attempt to its last: the first failure is the cause, everything ends with it, all begin again.

gather the nodes ──► plan ──► start ──► look, look, look ──► all workers ended well ──► 0
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

from ..process import LaunchError
from .connection import wait_for_news
from .node import TIMED_OUT, Activity, Failure, Node
from .plan import Plan, spread_servers
from .rendezvous import Member, Rendezvous, reserve_port

_SOONER_S = 2.0  # by which a process that was stopped, and that all others wait for, is told first
_RETURN_S = 10.0  # for a node to come back, where the job may go on without
_ALONE = 0.1  # of the time that all may do nothing: when some have ended already, the others rarely wait for something else
_LATE_S = 3.0  # what a node may take to end the store, or to kill, and to say so
_FAILED_S = 5.0  # for the other workers to end when one has failed: there is nothing to save together
_GRACES = 10  # the longest time between the first signal and SIGKILL, in times of the grace
_MOST_GARBAGE = 10  # restarts after garbage on ps-lite's ports that do not count towards `max_restarts`
_SAME_S = 0.5  # timeout(1) sends SIGTERM twice: so close together, two are one
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Site = Union[Node, Member]


@dataclass(frozen=True)
class Limits:
    """How long and how often.

    Attributes
    ----------
    max_restarts : int
        Ten more are allowed after garbage on ps-lite's ports, unless this is 0.
    fewest : int
        Processes with which the job may go on; 0 if their number must stay.
    most : int
        Processes with which it may begin; 0 for no such limit.
    grace_s : float, seconds
        After a signal from outside: how long all together may do nothing, a tenth of it when some have ended; ten times as long
        in all. Then the rest is killed.
    timeout_s : float, seconds
        How long a process may be stopped, and how long all together may do nothing, a tenth of it when some have ended well; 0
        for ever.
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
        """Seconds between SIGTERM and SIGKILL for the others when a process has failed, or the launcher was killed."""
        return min(self.grace_s, _FAILED_S)


class Signals:
    """SIGINT, SIGTERM and SIGHUP, which are noted instead of ending this process.

    A terminal that was closed, or a lost ssh connection (SIGHUP), is passed on as a Ctrl-C, after which programs save.
    """

    def __init__(self) -> None:
        self.first = 0  # the signal that came first, 0 for none
        self.new: List[int] = []  # those that nobody has passed on
        self._first_at = 0.0
        self._before: Dict[int, object] = {}

    def __enter__(self) -> Signals:
        for signum in _PASSED_ON:
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def take(self) -> List[int]:
        """Return those that have come since the last call; a second request is a SIGKILL."""
        new, self.new = self.new, []
        return new

    def _note(self, signum: int, _frame: Optional[FrameType]) -> None:
        if not self.first:
            self.first, self._first_at = signum, time.monotonic()
            self.new.append(signal.SIGINT if signum == signal.SIGHUP else signum)
        elif signum != signal.SIGTERM or time.monotonic() - self._first_at >= _SAME_S:
            self.new.append(signal.SIGKILL)


class Grace:
    """How long to wait for processes that were told to end: as long as they compute, within a limit; shortly after a failure.

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
        """Return whether to kill: given the processor time of all, how many workers have ended, and how many are left."""
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
        Where the other nodes come to; None where there are no others.
    num_processes : int
        Of this machine.
    servers : int, optional
        Of the whole job.
    backend : str
        What joins the processes; see `plan.BACKENDS`.
    limits : Limits
    selector : selectors.BaseSelector
    signals : Signals
    tell : callable (str) -> None
        For what a person should know.
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
        tell: Callable[[str], None],
    ) -> None:
        self._node, self._rendezvous, self._num_processes = node, rendezvous, num_processes
        self._servers, self._backend, self._limits = servers, backend, limits
        self._selector, self._signals, self._tell = selector, signals, tell
        self._num_nodes = rendezvous.num_nodes if rendezvous else 1
        self._fewer: Dict[int, int] = {}  # node -> how many of its processes are left out
        self._num_garbage = 0  # restarts that do not count
        self._slot: Tuple[int, int] = (-1, -1)  # node and number of the process that failed in the last attempt

    def run(self) -> Tuple[int, str]:
        """Run the job; return the exit code, and its cause where that is not 0."""
        ended = self._run()
        if self._num_garbage:
            self._tell(f"{self._num_garbage} restarts after garbage on ps-lite's ports")
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
            is_free = failure.is_garbage and self._num_garbage < _MOST_GARBAGE and self._limits.max_restarts > 0
            if self._signals.first or not (is_free or restart - self._num_garbage < self._limits.max_restarts):
                return self._ended(failure.code, cause)
            self._tell(cause)
            restart += 1
            if is_free:
                self._num_garbage += 1
                self._tell(
                    f"restart after garbage on ps-lite's ports, {self._num_garbage} of {_MOST_GARBAGE} that do not count. Let no "
                    "stranger reach them: see --interface, a firewall, or --backend horovod"
                )
            else:
                self._shrink(failure, sum(counts))
                self._tell(f"restart {restart - self._num_garbage} of {self._limits.max_restarts}")

    def _ended(self, code: int, cause: str) -> Tuple[int, str]:
        if self._signals.first:
            code, cause = 128 + self._signals.first, f"ended by {signal.Signals(self._signals.first).name}"
        return code, cause

    def _gather(self, restart: int) -> Tuple[Dict[int, Site], List[int]]:
        """Wait for the nodes; return those that take part, by their numbers, and how many processes each runs."""
        since = time.monotonic()
        while True:
            sites, counts = self._here()
            waited_s, missing = time.monotonic() - since, self._missing()
            if not missing or self._signals.first or self._can_do_without(missing, sum(counts), waited_s, restart):
                break
            if waited_s > self._limits.patience_s:
                raise LaunchError(
                    f"launch: got no {missing} for {waited_s:.0f} s; expected {self._num_nodes} nodes. Start the same "
                    "command there, with its --node-rank, and see that the rendezvous can be reached."
                )
            self._round([])
        if self._limits.most and sum(counts) > self._limits.most:
            raise LaunchError(
                f"launch: got {sum(counts)} processes on {len(counts)} nodes; expected at most {self._limits.most}. See "
                "--elastic."
            )
        return sites, counts

    def _here(self) -> Tuple[Dict[int, Site], List[int]]:
        """Return the nodes that are here and have something to run, and how many processes."""
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
        """Return whether the job may go on with fewer nodes, and those that are missing have had their time."""
        patience_s = min(self._limits.patience_s, _RETURN_S) if restart else self._limits.patience_s
        if not 0 < self._limits.fewest <= num_processes or waited_s <= patience_s:
            return False
        self._tell(f"without {missing}: {num_processes} processes")
        return True

    def _attempt(self, restart: int, sites: Dict[int, Site], counts: Sequence[int]) -> Optional[Failure]:
        """Run all processes once; return what failed first."""
        host = self._node.machine.host
        with reserve_port(host) as held:
            servers = spread_servers(0 if self._backend == "horovod" else self._servers, counts)
            plan = Plan(restart, tuple(counts), servers, (host, held.getsockname()[1]), self._backend)
            try:
                for number, site in enumerate(sites.values()):
                    site.start(plan, number)
                failure = self._look_until_it_ends(sites, counts)
                if failure is not None and failure.signum:
                    self._stop(list(sites.values()), sum(counts), failure.signum)
                return failure
            finally:  # whatever has happened: nothing is left behind
                self._stop(list(sites.values()), sum(counts))

    def _look_until_it_ends(self, sites: Dict[int, Site], counts: Sequence[int]) -> Optional[Failure]:
        activity = Activity()
        while True:
            for rank, site in sites.items():
                if site.failure is not None:
                    return replace(site.failure, node_rank=rank)
            if not any(site.workers_left for site in sites.values()):
                return None
            if self._signals.new:
                return Failure("the launcher", "was told to end", 1)
            idle_s = activity.idle_s(sum(site.cpu_s for site in sites.values()), time.monotonic())
            ended = sum(counts) - sum(site.workers_left for site in sites.values())
            if self._limits.timeout_s and idle_s > self._limits.timeout_s * (_ALONE if ended else 1.0) + _SOONER_S:
                return _hung(idle_s, ended, self._node.ended_well)
            self._round(sites.values())

    def _stop(self, sites: Sequence[Site], num_processes: int, signum: int = 0) -> None:
        """Pass on what has come from outside, here or to another node's launcher, else SIGTERM, until everything has ended."""
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
                    self._tell(f"kills {num_left} processes that have not ended; see --grace")
        for site in sites:
            site.kill()

    def _round(self, sites: Iterable[Site]) -> None:
        wait_for_news(self._selector)
        if self._rendezvous:
            self._rendezvous.look()
        for site in sites:
            site.look()

    def _shrink(self, failure: Failure, num_processes: int) -> None:
        """Leave one process out where the same one has failed twice in a row, and the job may go on without."""
        slot = (failure.node_rank, failure.slot)
        again, self._slot = slot == self._slot and failure.slot >= 0, slot
        if again and 0 < self._limits.fewest < num_processes:
            self._fewer[failure.node_rank] = self._fewer.get(failure.node_rank, 0) + 1
            self._slot = (-1, -1)
            self._tell(f"one process fewer on node {failure.node_rank}: {num_processes - 1} in all")


def _hung(idle_s: float, num_ended: int, ranks: Sequence[str]) -> Failure:
    """Return why a job goes no further, of which so many workers have ended well, those with these ranks on this machine."""
    if not num_ended:
        return Failure(
            "no process", f"has computed for {idle_s:.0f} s: all wait for each other, or for something else", TIMED_OUT
        )
    who = f"rank {', '.join(ranks)}" if len(ranks) == num_ended else f"{num_ended} processes, not all of this node,"
    what = (
        f"ended with status 0, and the others have computed nothing for {idle_s:.0f} s: they wait for what has ended. Let every "
        "process make as many steps, as ShardedSampler does, and evaluate and save as often. End none of them by os._exit, which "
        "drops steps that its devices have not done yet"
    )
    return Failure(who, what, TIMED_OUT)


def describe_failure(failure: Failure, num_processes: int) -> str:
    """Return the sentence that says why a job has ended, and the lines that belong to it.

    Examples
    --------
    >>> print(describe_failure(Failure("rank 1", "exited with status 3", 3, ("ValueError: no",), "rank-1.log"), 2))
    rank 1 exited with status 3, the first of 2 processes to fail. Its log is rank-1.log, its last words:
      ValueError: no
    """
    text = f"{failure.who} {failure.what}"
    if failure.slot >= 0 or failure.log:
        text += f", the first of {num_processes} processes to fail"
    text += f". Its log is {failure.log}" if failure.log else ""
    if not failure.lines:
        return text + "."
    return f"{text}, its last words:\n" + "\n".join(f"  {line}" for line in failure.lines)
