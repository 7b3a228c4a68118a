"""Layouts of a training over devices: which there are, what is predicted for each, and which one to use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ..pipeline.schedule import SCHEDULES, Planned, most_held, plan

_MOST_PER_STAGE = 4  # micro-batches, as the training programs use them
_MOST_MICRO_STEPS = 4


@dataclass(frozen=True)
class Layout:
    """One way to train on all devices.

    Attributes
    ----------
    kind : str
        `"data"`: each device holds the network. `"model"`: each holds a stage. `"hybrid"`: each holds a stage, and all share the
        last one.
    batch_size : int
        Of the whole batch, in the unit of the training program's option: examples, or tokens.
    precision : str
    stages : int
        Devices that hold the network together; the others hold replicas.
    micro_batches : int
        The parts of a replica's batch: micro-batches of a pipeline, micro-steps of data parallelism.
    schedule : str
    recompute : bool
    """

    kind: str
    batch_size: int
    precision: str = "fp32"
    stages: int = 1
    micro_batches: int = 1
    schedule: str = SCHEDULES[0]
    recompute: bool = False

    def __str__(self) -> str:
        parts = ["data parallel" if self.kind == "data" else f"{'hybrid of ' * (self.kind == 'hybrid')}{self.stages} stages"]
        parts += [f"batch {self.batch_size}", self.precision]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-{'steps' if self.kind == 'data' else 'batches'}")
        parts += [self.schedule] * (self.schedule != SCHEDULES[0]) + ["recompute"] * self.recompute
        return ", ".join(parts)

    @property
    def network(self) -> Layout:
        """The layout without what can be changed while the same network stays on the devices."""
        return Layout(self.kind, self.batch_size, self.precision, self.stages)


def layouts_of(
    num_devices: int, batch_sizes: Sequence[int], precisions: Sequence[str] = ("fp32",), kinds: Sequence[str] = ("data", "model")
) -> List[Layout]:
    """Return all layouts; the first one is the default: data parallel, with the first batch size and precision.

    Examples
    --------
    >>> for layout in layouts_of(2, [64])[:7]:
    ...     print(layout)
    data parallel, batch 64, fp32
    data parallel, batch 64, fp32, 2 micro-steps
    data parallel, batch 64, fp32, 4 micro-steps
    2 stages, batch 64, fp32, 2 micro-batches
    2 stages, batch 64, fp32, 2 micro-batches, recompute
    2 stages, batch 64, fp32, 2 micro-batches, gpipe
    2 stages, batch 64, fp32, 2 micro-batches, gpipe, recompute
    """
    found = []
    for precision in precisions:
        for size in batch_sizes:
            found += [Layout("data", size, precision, micro_batches=parts) for parts in powers_of_2(_MOST_MICRO_STEPS)]
            divisors = [stages for stages in range(2, num_devices + 1) if not num_devices % stages]
            for kind, stages in product((kind for kind in kinds if kind != "data"), divisors):
                for parts in sorted(powers_of_2(_MOST_PER_STAGE * stages), key=lambda parts: (parts < stages, parts)):
                    for schedule in SCHEDULES if parts > 1 else SCHEDULES[:1]:
                        found += [Layout(kind, size, precision, stages, parts, schedule, how) for how in (False, True)]
    return found


def powers_of_2(most: int) -> List[int]:
    """Return 1, 2, 4, ... up to a number.

    Examples
    --------
    >>> powers_of_2(12)
    [1, 2, 4, 8]
    """
    return [2**power for power in range(most.bit_length())]


class Curve:
    """The shortest times measured at some sizes: other programs only lengthen them. Lines between them continue on both sides.

    Examples
    --------
    >>> curve = Curve({8: 1.0, 16: 1.5, 64: 6.3})
    >>> curve.at(12), curve.at(4), round(curve.at(80), 6)
    (1.25, 0.75, 7.9)
    >>> Curve({8: 1.0}).at(12), Curve({8: 2.0, 16: 8.0}).at(4)
    (1.5, 0.0)
    >>> curve.add(8, [0.9, 1.1])
    >>> curve.at(8)
    0.9
    """

    def __init__(self, points: Optional[Mapping[float, float]] = None) -> None:
        self.points: Dict[float, float] = dict(points or {})

    def add(self, size: float, seconds: Iterable[float]) -> None:
        """Add measurements at a size."""
        self.points[size] = min([*seconds, self.points.get(size, math.inf)])

    def at(self, size: float) -> float:
        """Return the value at a size, 0 or more."""
        if size in self.points:
            return self.points[size]
        if len(self.points) == 1:
            ((known, value),) = self.points.items()
            return value * size / known
        sizes = sorted(self.points)
        upper = min(max(1, sum(known < size for known in sizes)), len(sizes) - 1)
        (left, low), (right, high) = ((known, self.points[known]) for known in sizes[upper - 1 : upper + 1])
        return max(0.0, low + (high - low) * (size - left) / (right - left))


@dataclass
class Costs:
    """What was measured of a network on its devices, in one precision.

    Attributes
    ----------
    batches : dict of int to Curve
        Data parallel: seconds of a batch by its examples, for each number of micro-steps.
    tasks : list of dict
        Pipeline: for each stage, `F` and `B`, the seconds of its tasks by the examples of a micro-batch, with the copies that
        they read.
    rest : Curve
        Pipeline: seconds of a batch outside its tasks, to load the data, to sum and to update, by its examples.
    sources, devices : list
        Pipeline: see `schedule.plan`.
    num_parts : int
        Pipeline: the last stages that compute the loss, one on each device of a hybrid.
    whole : Curve
        Pipeline: seconds of a batch as it ran, by its examples.
    slowdown : float
        Pipeline: the seconds of the tasks of that batch, divided by those of the simulation, whose tasks were measured one at a
        time. Devices that share a memory or a host slow each other down.
    fixed_bytes : list of int
        Weights, gradients and the optimizer's states, for each device of a replica; data parallel: one number.
    held_bytes : dict of bool to list of float
        Activations per example that is held, on the same devices: without recomputation, and with it. Empty if unknown.
    """

    batches: Dict[int, Curve] = field(default_factory=dict)
    tasks: List[Dict[str, Curve]] = field(default_factory=list)
    rest: Curve = field(default_factory=Curve)
    sources: List[List[int]] = field(default_factory=list)
    devices: List[int] = field(default_factory=list)
    num_parts: int = 1
    whole: Curve = field(default_factory=Curve)
    slowdown: float = 1.0
    fixed_bytes: List[int] = field(default_factory=list)
    held_bytes: Dict[bool, List[float]] = field(default_factory=dict)

    def simulate(self, layout: Layout, part: float) -> List[Planned]:
        """Return the tasks of a pipeline's batch, with so many examples in each micro-batch."""
        times = []
        for stage, task in enumerate(self.tasks):
            forward, backward = task["F"].at(part), task["B"].at(part)
            times.append((forward, backward + forward * (layout.recompute and not self._is_last(stage))))
        return plan(self.sources, self.devices, layout.micro_batches, layout.schedule, costs=times)

    def num_held(self, planned: Sequence[Planned], *, recompute: bool) -> List[int]:
        """Return of how many micro-batches each device holds the activations, at most. The last stages do not recompute."""
        found = [1] * (max(self.devices) + 1)
        for stage, device in enumerate(self.devices):
            if not recompute or self._is_last(stage):
                found[device] = max(found[device], most_held(planned, stage))
        return found

    def _is_last(self, stage: int) -> bool:
        return stage >= len(self.devices) - self.num_parts


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a layout.

    Attributes
    ----------
    layout : Layout
    seconds : float
        Of a batch.
    examples_per_s : float
    bytes_per_device : int, optional
        On the fullest device; None if activations could not be measured.
    """

    layout: Layout
    seconds: float
    examples_per_s: float
    bytes_per_device: Optional[int]


def predict(layout: Layout, costs: Costs, num_examples: int, num_devices: int) -> Optional[Prediction]:
    """Return what is predicted for a layout; None if it was not measured, or has more micro-batches than examples.

    Parameters
    ----------
    layout : Layout
    costs : Costs
        Of its network and precision.
    num_examples : int
        Of the whole batch.
    num_devices : int
    """
    part = num_examples * layout.stages / num_devices / layout.micro_batches  # examples of a micro-batch of one replica
    if part < costs.num_parts:
        return None
    if layout.kind == "data":
        if layout.micro_batches not in costs.batches:
            return None
        seconds, held = costs.batches[layout.micro_batches].at(num_examples), [1]
    else:
        if not costs.rest.points:
            return None
        planned = costs.simulate(layout, part)
        seconds = costs.rest.at(num_examples) + costs.slowdown * max(one.end for one in planned)
        held = costs.num_held(planned, recompute=layout.recompute)
    num_bytes = None
    if layout.recompute in costs.held_bytes:
        per_device = zip(costs.fixed_bytes, held, costs.held_bytes[layout.recompute])
        num_bytes = max(int(fixed + count * part * one) for fixed, count, one in per_device)
    return Prediction(layout, seconds, num_examples / seconds, num_bytes)


def ranked(predictions: Sequence[Prediction], memory_limit: Optional[int] = None) -> List[Prediction]:
    """Return predictions by speed, the fastest first, without those of more bytes per device than the limit."""
    fitting = [one for one in predictions if not memory_limit or (one.bytes_per_device or 0) <= memory_limit]
    return sorted(fitting, key=lambda one: -one.examples_per_s)


@dataclass(frozen=True)
class Margin:
    """How many times as fast a layout is as another: the median over rounds, the lowest and the highest."""

    times: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.times:.2f} ({self.lowest:.2f}-{self.highest:.2f})"


def margin(rates: Sequence[float], reference: Sequence[float]) -> Margin:
    """Compare the examples/s of two layouts round by round: what slows the machine down for a round slows both.

    Examples
    --------
    >>> print(margin([12.0, 6.0, 13.0], [10.0, 5.0, 10.0]))
    1.20 (1.20-1.30)
    """
    ratios = [one / other for one, other in zip(rates, reference)]
    return Margin(median(ratios), min(ratios), max(ratios))


def choose(rates: Mapping[Layout, Sequence[float]], default: Layout) -> Tuple[Layout, Layout, Margin]:
    """Return the layout to use, the fastest one, and the fastest one's margin over the default.

    The layout to use is the fastest one if it beats the default in every round, otherwise the default.

    Examples
    --------
    >>> default, other = layouts_of(2, [64])[0], layouts_of(2, [64])[3]
    >>> choose({default: [10.0, 11.0], other: [12.0, 12.0]}, default)[0] is other
    True
    >>> choose({default: [10.0, 13.0], other: [14.0, 12.0]}, default)[0] is default
    True
    """
    fastest = max(rates, key=lambda layout: margin(rates[layout], rates[default]).times)
    found = margin(rates[fastest], rates[default])
    return (fastest if found.lowest > 1 else default), fastest, found
