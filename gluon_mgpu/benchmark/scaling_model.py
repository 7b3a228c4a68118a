"""A model of training on many processes: what a step takes to compute, and what sending the gradients takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import numpy as np

PATTERNS: Dict[str, str] = {
    "ring": "each sends to the next, and receives from the one before",
    "servers": "each sends all to the servers, and receives the sum of all",
    "rows": "each sends all to the servers, and receives what every process has sent",
}


@dataclass(frozen=True)
class Link:
    """What a message takes: `latency_s`, and a second for each `bytes_per_s`.

    Attributes
    ----------
    latency_s : float, seconds
    bytes_per_s : float
        Infinite where sending takes no longer for more.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Traffic:
    """How a sum over processes is sent.

    Attributes
    ----------
    pattern : str
        One of `PATTERNS`.
    num_processes : int
    num_servers : int
        Of the patterns with servers.
    wait_s : float, seconds
        Before a sum begins: once a sum, however many processes there are, such as a cycle of Horovod's.
    """

    pattern: str
    num_processes: int
    num_servers: int = 1
    wait_s: float = 0.0

    @property
    def num_messages(self) -> float:
        """How many messages follow one another: each waits for the one before.

        Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005, for the ring;
        to the servers and back otherwise.

        Examples
        --------
        >>> Traffic("ring", 4).num_messages, Traffic("servers", 4).num_messages
        (6, 2)
        """
        if self.num_processes == 1:
            return 0
        return 2 * (self.num_processes - 1) if self.pattern == "ring" else 2

    @property
    def share(self) -> float:
        """How often the array's bytes pass through the link that has the most to carry: a process's, or a server's.

        A ring: 2 (n - 1) / n. Servers, each of which holds 1 / s of the array: 2 max(1, n / s), to them and back; where every
        process receives the n arrays, (1 + n) max(1, n / s).

        Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, for the ring.

        Examples
        --------
        >>> Traffic("ring", 4).share, Traffic("servers", 4, 2).share, Traffic("servers", 2, 4).share, Traffic("rows", 4, 4).share
        (1.5, 4.0, 2.0, 5.0)
        """
        n = self.num_processes
        if n == 1:
            return 0.0
        if self.pattern == "ring":
            return 2 * (n - 1) / n
        return (2 if self.pattern == "servers" else 1 + n) * max(1.0, n / self.num_servers)

    @property
    def is_bound_by_servers(self) -> bool:
        """Whether the servers have more to carry than the processes."""
        return self.pattern != "ring" and self.num_servers < self.num_processes

    def seconds(self, num_bytes: float, link: Link) -> Tuple[float, float]:
        """Return what waiting and the messages' latency take, and what their bytes take, in seconds; nothing with one process.

        Examples
        --------
        >>> Traffic("ring", 3, wait_s=0.01).seconds(3e6, Link(0.001, 1e9))
        (0.014, 0.004)
        """
        wait_s = self.wait_s if self.num_processes > 1 else 0.0
        return wait_s + self.num_messages * link.latency_s, self.share * num_bytes / link.bytes_per_s


@dataclass(frozen=True)
class Fit:
    """A link that explains what was measured.

    Attributes
    ----------
    traffic : Traffic
    link : Link
    error : float
        By how much the worst measurement is from the fit, relative to the measurement.
    """

    traffic: Traffic
    link: Link
    error: float


def fit(points: Sequence[Tuple[float, float]], traffic: Traffic) -> Fit:
    """Return the link that explains the times of sums best: least squares of the relative errors, so that small sums count.

    Parameters
    ----------
    points : sequence of (bytes, seconds)
        Of at least two sizes.
    traffic : Traffic
        How they were sent, by two processes or more. Its `wait_s` is known, and in the times: the link explains the rest.

    Examples
    --------
    >>> found = fit([(1e3, 101e-6), (1e6, 1.1e-3)], Traffic("ring", 2))
    >>> round(found.link.latency_s * 1e6), round(found.link.bytes_per_s / 1e9)
    (50, 1)
    >>> found = fit([(1e3, 5.101e-3), (1e6, 6.1e-3)], Traffic("ring", 2, wait_s=5e-3))
    >>> round(found.link.latency_s * 1e6), round(found.link.bytes_per_s / 1e9)
    (50, 1)
    """
    sizes, times = np.array(points, dtype=float).T
    if len(set(sizes)) < 2 or traffic.num_processes < 2:
        raise ValueError(
            f"fit: got {len(set(sizes))} sizes of {traffic.num_processes} processes; expected two of each. Measure more sizes."
        )
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    rest = 1 - traffic.wait_s / times
    (begin, slope), *_ = np.linalg.lstsq(terms, rest, rcond=None)
    if begin < 0 or slope < 0:  # neither is possible: the other alone explains the times
        kept = 1 if begin < 0 else 0
        alone = terms[:, kept]
        best = max(0.0, float(alone @ rest / (alone @ alone)))
        begin, slope = (0.0, best) if kept else (best, 0.0)
    error = float(np.abs(terms @ np.array([begin, slope]) - rest).max())
    return Fit(traffic, Link(begin / traffic.num_messages, traffic.share / slope if slope else float("inf")), error)


@dataclass(frozen=True)
class Projection:
    """What a step of so many processes would take. It is computed, not measured.

    Attributes
    ----------
    traffic : Traffic
    compute_s, latency_s, transfer_s : float, seconds
        The parts of a step, one after the other. `latency_s` is that of all messages, and the wait before them.
    """

    traffic: Traffic
    compute_s: float
    latency_s: float
    transfer_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.latency_s + self.transfer_s

    @property
    def efficiency(self) -> float:
        """How much of the time is spent computing: with n processes, n times this is how many times as fast they are as one."""
        return self.compute_s / self.step_s

    @property
    def bound(self) -> str:
        """What takes most of a step: `compute`, `latency`, `bandwidth` or `servers`."""
        busy = "servers" if self.traffic.is_bound_by_servers else "bandwidth"
        parts = {"compute": self.compute_s, "latency": self.latency_s, busy: self.transfer_s}
        return max(parts, key=lambda name: parts[name])


def project(traffic: Traffic, link: Link, *, compute_s: float, num_bytes: float) -> Projection:
    """Return what a step takes with this traffic over this link: computing, then sending the gradients, nothing at once.

    Each process computes as much as one alone does, on a batch of its own. All gradients are one sum, which waits `wait_s` once.
    Those of a step are ready at any moment of a cycle, and wait half of one on average. A whole one is counted, as of sums that
    follow each other: no step waits longer, and the projection is not better than what comes.

    Examples
    --------
    >>> found = project(Traffic("ring", 2), Link(0.05, 1e6), compute_s=0.1, num_bytes=5e5)
    >>> round(found.step_s, 6), found.bound, round(found.efficiency, 6)
    (0.7, 'bandwidth', 0.142857)
    """
    return Projection(traffic, compute_s, *traffic.seconds(num_bytes, link))


def between_machines(here: Link, wire: Link) -> Link:
    """Return what processes on several machines get: the software's latency and the wire's, and what is slower of both.

    `here` is a link as it was measured in one machine, where the network is memory: it stands for what the software takes. Its
    latency is counted for every message. What comes once a sum is known of Horovod alone (`Traffic.wait_s`); two processes
    cannot tell the rest of it apart, so that a ring of many comes out slower than it need be.
    """
    return Link(here.latency_s + wire.latency_s, min(here.bytes_per_s, wire.bytes_per_s))


def traffics(pattern: str, num_processes: Sequence[int], num_servers: int = 0) -> List[Traffic]:
    """Return the traffic of each number of processes, with so many servers, or one for each process."""
    return [Traffic(pattern, n, num_servers or n) for n in num_processes]
