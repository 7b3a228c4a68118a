"""A model of training on many processes: the time to compute a step, and the time to send the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import numpy as np

PATTERNS: Dict[str, str] = {
    "ring": "each process sends to the next one, and receives from the previous one",
    "servers": "each process sends all to the servers, and receives the sum",
    "rows": "each process sends all to the servers, and receives the arrays of every process",
}


@dataclass(frozen=True)
class Link:
    """The time of a message: `latency_s`, plus its bytes divided by `bytes_per_s`.

    Attributes
    ----------
    latency_s : float, seconds
    bytes_per_s : float
        Infinite if the time does not depend on the size.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Traffic:
    """How processes exchange a sum.

    Attributes
    ----------
    pattern : str
        One of `PATTERNS`.
    num_processes : int
    num_servers : int
        For the patterns with servers.
    wait_s : float, seconds
        Wait before each sum, independent of the number of processes, such as Horovod's cycle.
    """

    pattern: str
    num_processes: int
    num_servers: int = 1
    wait_s: float = 0.0

    @property
    def num_messages(self) -> float:
        """The number of consecutive messages, each of which waits for the previous one.

        Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005, for the ring.
        Otherwise there are two: to the servers and back.

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
        """How often the array's bytes pass through the busiest link, of a process or of a server.

        A ring: 2 (n - 1) / n. Servers, each of which holds 1 / s of the array: 2 max(1, n / s), to them and back. If every
        process receives the n arrays: (1 + n) max(1, n / s).

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
        """Whether the servers' links carry more than those of the processes."""
        return self.pattern != "ring" and self.num_servers < self.num_processes

    def seconds(self, num_bytes: float, link: Link) -> Tuple[float, float]:
        """Return the seconds of waiting and latency, and the seconds of transfer. Both are 0 with one process.

        Examples
        --------
        >>> Traffic("ring", 3, wait_s=0.01).seconds(3e6, Link(0.001, 1e9))
        (0.014, 0.004)
        """
        wait_s = self.wait_s if self.num_processes > 1 else 0.0
        return wait_s + self.num_messages * link.latency_s, self.share * num_bytes / link.bytes_per_s


@dataclass(frozen=True)
class Fit:
    """A link fitted to measurements.

    Attributes
    ----------
    traffic : Traffic
    link : Link
    error : float
        The largest difference between a measurement and the fit, relative to the measurement.
    """

    traffic: Traffic
    link: Link
    error: float


def fit(points: Sequence[Tuple[float, float]], traffic: Traffic) -> Fit:
    """Return the link that fits the times of sums best: least squares of the relative errors, so that small sums count.

    Parameters
    ----------
    points : sequence of (bytes, seconds)
        At least two sizes.
    traffic : Traffic
        How two or more processes exchanged them. The times contain the known `wait_s`; the link explains the rest.

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
    if begin < 0 or slope < 0:  # impossible: fit the other one alone
        kept = 1 if begin < 0 else 0
        alone = terms[:, kept]
        best = max(0.0, float(alone @ rest / (alone @ alone)))
        begin, slope = (0.0, best) if kept else (best, 0.0)
    error = float(np.abs(terms @ np.array([begin, slope]) - rest).max())
    return Fit(traffic, Link(begin / traffic.num_messages, traffic.share / slope if slope else float("inf")), error)


@dataclass(frozen=True)
class Projection:
    """The computed, not measured, time of a step of many processes.

    Attributes
    ----------
    traffic : Traffic
    compute_s, latency_s, transfer_s : float, seconds
        The parts of a step, one after the other. `latency_s` is the latency of all messages and the wait before them.
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
        """The share of the time spent computing. With n processes, n times this is the speed-up over one process."""
        return self.compute_s / self.step_s

    @property
    def bound(self) -> str:
        """The largest part of a step: `compute`, `latency`, `bandwidth` or `servers`."""
        busy = "servers" if self.traffic.is_bound_by_servers else "bandwidth"
        parts = {"compute": self.compute_s, "latency": self.latency_s, busy: self.transfer_s}
        return max(parts, key=lambda name: parts[name])


def project(traffic: Traffic, link: Link, *, compute_s: float, num_bytes: float) -> Projection:
    """Return the time of a step with this traffic over this link: computing, then sending the gradients, without overlap.

    Each process computes a batch of its own, as one process alone does. All gradients are one sum, which waits `wait_s` once.
    The gradients are ready at any moment of a Horovod cycle and wait half a cycle on average. The projection counts a whole
    cycle, the longest wait, so that it is not too optimistic.

    Examples
    --------
    >>> found = project(Traffic("ring", 2), Link(0.05, 1e6), compute_s=0.1, num_bytes=5e5)
    >>> round(found.step_s, 6), found.bound, round(found.efficiency, 6)
    (0.7, 'bandwidth', 0.142857)
    """
    return Projection(traffic, compute_s, *traffic.seconds(num_bytes, link))


def between_machines(here: Link, wire: Link) -> Link:
    """Return the link of processes on several machines: the latency of software and wire, and the slower bandwidth of both.

    `here` is a link measured within one machine, where the network is memory, so it stands for the software's share. Its
    latency counts for every message. A wait per sum is known for Horovod alone (`Traffic.wait_s`). Measurements of two
    processes cannot separate further waits per sum from latency, so the projection of a large ring is pessimistic.
    """
    return Link(here.latency_s + wire.latency_s, min(here.bytes_per_s, wire.bytes_per_s))


def traffics(pattern: str, num_processes: Sequence[int], num_servers: int = 0) -> List[Traffic]:
    """Return the traffic of each number of processes, with `num_servers` servers, or one per process."""
    return [Traffic(pattern, n, num_servers or n) for n in num_processes]
