"""Where the time of a step goes: the host's phases, the devices' operations, and the time in which a device is idle."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple

from ..runtime.profiler import Operation, batches_of, is_mark, tasks_of

_SHORT_S = 1e-4  # the engine's threads hand an operation over in less
_HOST = "host"
_UPDATES = "sums and updates"
_TASKS = "tasks"
_UNEXPLAINED = "idle: no cause found"
_PHASES = {
    "data": "data",
    "split": "split",
    "dispatch": "dispatch",
    "forward": "dispatch: forward",
    "backward": "dispatch: backward",
    "update": "dispatch: update",
    "devices": "wait",
    "callbacks": "callbacks",
    "": "between epochs",
}
_Interval = Tuple[float, float]


@dataclass(frozen=True)
class Span:
    """A named piece of time on a lane; begin and end in seconds, on the clock of `time.time`."""

    name: str
    begin: float
    end: float

    def clipped(self, begin: float, end: float) -> Span:
        """Return the part within these bounds."""
        return Span(self.name, max(self.begin, begin), min(self.end, end))


class Timeline:
    """Some steps, by lane: the host; each device; the sums and updates of each device; the tasks of each device of a pipeline.

    Parameters
    ----------
    steps : sequence of Span
        One after the other.
    phases : sequence of (float, str)
        When each of the host's phases began, seconds, and its name as in `EpochOptions.on_phase`.
    operations : sequence of Operation
        By their begin.
    devices : sequence of str
        Also those on which nothing ran.
    """

    def __init__(
        self,
        steps: Sequence[Span],
        phases: Sequence[Tuple[float, str]],
        operations: Sequence[Operation],
        devices: Sequence[str],
    ) -> None:
        self.steps = list(steps)
        self.begin, self.end = steps[0].begin, steps[-1].end
        ends = [begin for begin, _ in phases[1:]] + [self.end]
        self.phases = self._within(Span(_PHASES.get(name, name), begin, end) for (begin, name), end in zip(phases, ends))
        self._devices = list(devices)
        by_device: Dict[str, List[Operation]] = {device: [] for device in devices}
        for operation in operations:
            if not is_mark(operation.name):
                by_device.setdefault(operation.device, []).append(operation)
        self.operations: Dict[str, List[Span]] = {}
        self.updates: Dict[str, List[Span]] = {}
        for device, own in by_device.items():
            is_update = _belong_to_updates([operation.name for operation in own])
            spans = [Span(operation.name, operation.begin, operation.end) for operation in own]
            self.operations[device] = self._within(span for span, updates in zip(spans, is_update) if not updates)
            self.updates[device] = self._within(span for span, updates in zip(spans, is_update) if updates)
        self._batches = _without_waiting(batches_of(tasks_of(operations)), by_device)
        self.tasks = self._tasks()
        self._busy = {one: _union([*self.operations[one], *self.updates[one]]) for one in self.operations}
        # MXNet's store of several processes works on a context of its own, which is never idle
        self.idle = {device: list(self._idle(device)) if device in self._devices else [] for device in self.operations}

    def shares(self) -> Dict[str, Dict[str, float]]:
        """Return the share of the time that each name takes: of the host, and of each device."""
        total = self.end - self.begin
        found = {_HOST: _sums(self.phases, total)}
        for device in self.operations:
            updating = _length(_union(self.updates[device])) / total
            computing = _length(self._busy[device]) / total - updating
            found[device] = {"operations": computing, _UPDATES: updating, **_sums(self.idle[device], total)}
        return found

    def attributed(self) -> float:
        """Return the share of the time that has a name, of the lane where it is lowest."""
        covered = _length(_union(self.phases)) / (self.end - self.begin)
        return min(covered, *(1 - shares.get(_UNEXPLAINED, 0.0) for shares in self.shares().values()))

    def events(self) -> List[Dict[str, Any]]:
        """Return the lanes as events of Chrome's trace format, times in microseconds.

        Source: Google, "Trace Event Format", duration and metadata events.
        """
        lanes = [(_HOST, "training thread", [*self.steps, *self.phases])]
        for kind, of_kind in (("devices", self.operations), (_UPDATES, self.updates)):
            for device, spans in of_kind.items():
                spans = sorted([*spans, *(self.idle[device] if of_kind is self.operations else [])], key=lambda span: span.begin)
                for number, lane in enumerate(_without_overlap(spans), 1):
                    lanes.append((kind, device if number == 1 else f"{device}, thread {number}", lane))
        lanes += [(_TASKS, device, spans) for device, spans in self.tasks.items()]
        groups = list(dict.fromkeys(group for group, _, _ in lanes))
        found = [_metadata("process", group, {"pid": pid}, pid) for pid, group in enumerate(groups, 1)]
        for tid, (group, name, spans) in enumerate(lanes, 1):
            place = {"pid": 1 + groups.index(group), "tid": tid}
            found.append(_metadata("thread", name, place, tid))
            for span in spans:
                times = {"ts": 1e6 * (span.begin - self.begin), "dur": 1e6 * (span.end - span.begin)}
                rounded = {key: round(value, 3) for key, value in times.items()}
                found.append([{"ph": "X", **place, "cat": group, "name": span.name, **rounded}])
        return [event for events in found for event in events]

    def _within(self, spans: Iterable[Span]) -> List[Span]:
        return [span.clipped(self.begin, self.end) for span in spans if span.begin < self.end and span.end > self.begin]

    def _tasks(self) -> Dict[str, List[Span]]:
        """Return the tasks of each device: of all batches since the steps began, even of one that was queued and ran later."""
        found: Dict[str, List[Span]] = {device: [] for device in self._devices if self._batches}
        for batch in self._batches:
            if batch[0].begin >= self.begin:
                for task in batch:
                    found.setdefault(task.device, []).append(Span(task.name, task.begin, task.end))
        return found

    def _between_tasks(self, device: str) -> List[_Interval]:
        """Return the times in which a device has tasks of a batch to do, and others compute: it waits for them."""
        batches: List[_Interval] = []
        for batch in self._batches:
            ends = [task.end for task in batch if task.device == device]
            batches += [(batch[0].begin, max(ends))] if ends else []
        return _common(batches, self._busy_on([other for other in self._devices if other != device]))

    def _busy_on(self, devices: Iterable[str]) -> List[_Interval]:
        return _union(Span("", *busy) for device in devices for busy in self._busy[device])

    def _idle(self, device: str) -> Iterator[Span]:
        """Yield the time in which a device runs nothing, each piece named by what it waits for."""
        causes = [
            ("idle: waits for another device", self._busy_on([other for other in self._devices if other != device])),
            ("idle: waits for other processes", self._busy_on([other for other in self._busy if other not in self._devices])),
        ]
        others = causes[0][0], self._between_tasks(device)
        updates = {span.begin for span in self.updates[device]}
        edges = [self.begin, *(edge for busy in self._busy[device] for edge in busy), self.end]
        begins = [phase.begin for phase in self.phases]
        for begin, end in zip(edges[::2], edges[1::2]):
            if end <= begin:
                continue
            if end - begin < _SHORT_S:
                yield Span("idle: between operations", begin, end)
                continue
            waits_for_devices = end in updates  # the next operation adds or applies gradients
            for phase in self.phases[max(0, bisect_right(begins, begin) - 1) : bisect_left(begins, end)]:
                piece = phase.clipped(begin, end)
                if phase.name == "wait" or (waits_for_devices and any(intervals for _, intervals in causes)):
                    yield from _divided(piece, causes)
                else:
                    yield from _divided(piece, [others], f"idle: host in {phase.name.split(':')[0]}")


def _metadata(kind: str, name: str, place: Dict[str, int], order: int) -> List[Dict[str, Any]]:
    """Return the events that name a group of lanes (`process`) or a lane (`thread`), and put it in its place."""
    common: Dict[str, Any] = {"ph": "M", **place}
    return [
        {**common, "name": f"{kind}_name", "args": {"name": name}},
        {**common, "name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]


def _divided(piece: Span, causes: Sequence[Tuple[str, List[_Interval]]], last: str = "") -> Iterator[Span]:
    """Yield idle time divided by what goes on elsewhere: the first of these causes that has an interval there, or the last."""
    if not causes:
        yield Span(last, piece.begin, piece.end) if last else _unexplained(piece.begin, piece.end)
        return
    (name, intervals), *rest = causes
    at = piece.begin
    for begin, end in intervals[max(0, bisect_right(intervals, (at,)) - 1) :]:
        if begin >= piece.end:
            break
        if end <= at:
            continue
        if begin > at:
            yield from _divided(Span("", at, begin), rest, last)
        yield Span(name, max(at, begin), min(end, piece.end))
        at = min(end, piece.end)
    if at < piece.end:
        yield from _divided(Span("", at, piece.end), rest, last)


def _unexplained(begin: float, end: float) -> Span:
    return Span(_UNEXPLAINED if end - begin >= _SHORT_S else "idle: between operations", begin, end)


def _belong_to_updates(names: Sequence[str]) -> List[bool]:
    """Return whether each of a device's operations sums gradients over devices, moves them for that, or updates weights."""
    found = [_is_update(name) for name in names]
    others = [place for place, name in enumerate(names) if not name.startswith("Copy")]
    for before, after in zip([-1, *others], others):
        if found[after]:
            found[before + 1 : after] = [True] * (after - before - 1)  # copies that end in a sum or an update
    return found


def _is_update(name: str) -> bool:
    return name == "ElementwiseSum" or "_update" in name or name.startswith(("KVStore", "horovod", "multi_"))


def _without_waiting(
    batches: Sequence[Sequence[Operation]], operations: Mapping[str, Sequence[Operation]]
) -> List[List[Operation]]:
    """Return the tasks of batches, each from its first operation on: its mark may be early, as a task also waits for weights."""
    begins: Dict[str, List[float]] = {}
    for device, own in operations.items():
        is_update = _belong_to_updates([operation.name for operation in own])
        begins[device] = [operation.begin for operation, updates in zip(own, is_update) if not updates]
    free: Dict[str, float] = {}  # when the task before ended
    found = []
    for batch in batches:
        tasks = []
        for task in sorted(batch, key=lambda task: task.end):
            earliest, first = max(task.begin, free.get(task.device, task.begin)), begins.get(task.device, [])
            at = bisect_left(first, earliest)
            tasks.append(replace(task, begin=first[at] if at < len(first) and first[at] < task.end else earliest))
            free[task.device] = task.end
        found.append(sorted(tasks, key=lambda task: task.begin))
    return found


def _union(spans: Iterable[Span]) -> List[_Interval]:
    """Return the times that are covered, in order."""
    found: List[_Interval] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if found and span.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.begin, span.end))
    return found


def _common(left: Sequence[_Interval], right: Sequence[_Interval]) -> List[_Interval]:
    """Return the times that are in both; the intervals of each are in order and do not overlap."""
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a in left for b in right[max(0, bisect_right(right, a) - 1) :] if b[0] < a[1]]
    return [(begin, end) for begin, end in both if begin < end]


def _without_overlap(spans: Sequence[Span]) -> List[List[Span]]:
    """Return the spans on as few lanes as do not show one above another."""
    lanes: List[List[Span]] = [[]]
    for span in spans:
        free = next((lane for lane in lanes if not lane or lane[-1].end <= span.begin), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _length(intervals: Sequence[_Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _sums(spans: Sequence[Span], total: float) -> Dict[str, float]:
    found: Dict[str, float] = {}
    for span in spans:
        found[span.name] = found.get(span.name, 0.0) + (span.end - span.begin) / total
    return found
