"""Where the time of a step goes: the host's phases, the devices' operations, and what the host does while a device is idle."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import Any, Dict, Iterable, Iterator, List, Sequence, Tuple

from ..runtime.profiler import Operation, batches_of, is_mark, tasks_of

_SHORT_S = 1e-4  # the engine's threads hand an operation over in less
HOST = "host"
_UPDATES = "sums and updates"
_PHASES = {name: f"dispatch: {name}" for name in ("forward", "backward", "update")}
_PHASES.update({"devices": "wait", "": "between epochs"})


class Timeline:
    """Some steps, by lane: the host; each device; the sums and updates of each device; the tasks of each device of a pipeline.

    Parameters
    ----------
    steps : sequence of Operation
        One after the other, on the lane `HOST`.
    phases : sequence of (float, str)
        When each of the host's phases began, seconds, and its name as in `EpochOptions.on_phase`.
    operations : sequence of Operation
        By their begin.
    devices : sequence of str
        Also those on which nothing ran.
    """

    def __init__(
        self,
        steps: Sequence[Operation],
        phases: Sequence[Tuple[float, str]],
        operations: Sequence[Operation],
        devices: Sequence[str],
    ) -> None:
        self.steps, self.begin, self.end = list(steps), steps[0].begin, steps[-1].end
        ends = [begin for begin, _ in phases[1:]] + [self.end]
        self.phases = self._within(
            Operation(HOST, _PHASES.get(name, name), begin, end) for (begin, name), end in zip(phases, ends)
        )
        ran = [one for one in operations if not is_mark(one.name)]
        places = dict.fromkeys([*devices, *(one.device for one in ran)])
        spans = {device: self._within(_on(device, ran)) for device in places}
        self.updates = {device: [one for one in spans[device] if _is_update(one.name)] for device in places}
        self.operations = {device: [one for one in spans[device] if not _is_update(one.name)] for device in places}
        batches = batches_of(tasks_of(operations))
        # the devices may still be at the batch before when the trace begins
        tasks = [task for batch in batches if batch[0].begin >= self.begin for task in batch]
        self.tasks = {device: _on(device, tasks) for device in devices} if batches else {}
        self.idle = {device: list(self._idle(device)) for device in devices}

    def shares(self) -> Dict[str, Dict[str, float]]:
        """Return the share of the time that each name takes: of the host, and of each device."""
        total = self.end - self.begin
        found = {HOST: _sums(self.phases, total)}
        for device, idle in self.idle.items():
            updating = sum(end - begin for begin, end in _union(self.updates[device])) / total
            idling = _sums(idle, total)
            found[device] = {"operations": 1 - updating - sum(idling.values()), _UPDATES: updating, **idling}
        return found

    def events(self) -> List[Dict[str, Any]]:
        """Return the lanes as events of Chrome's trace format, times in microseconds.

        Source: Google, "Trace Event Format", duration and metadata events.
        """
        lanes = [(HOST, "training thread", [*self.steps, *self.phases])]
        for group, of_group in (("devices", self.operations), (_UPDATES, self.updates)):
            for device, spans in of_group.items():
                idle = self.idle.get(device, []) if group == "devices" else []
                for number, lane in enumerate(_without_overlap(sorted([*spans, *idle], key=lambda span: span.begin)), 1):
                    lanes.append((group, device if number == 1 else f"{device}, thread {number}", lane))
        lanes += [("tasks", device, spans) for device, spans in self.tasks.items()]
        groups = list(dict.fromkeys(group for group, _, _ in lanes))
        found: List[Dict[str, Any]] = []
        for tid, (group, name, spans) in enumerate(lanes, 1):
            place = {"pid": 1 + groups.index(group), "tid": tid}
            found.append({"ph": "M", **place, "name": "process_name", "args": {"name": group}})
            found.append({"ph": "M", **place, "name": "thread_name", "args": {"name": name}})
            for span in spans:
                begin, length = 1e6 * (span.begin - self.begin), 1e6 * (span.end - span.begin)
                times = {"ts": round(begin, 3), "dur": round(length, 3)}
                found.append({"ph": "X", **place, "cat": group, "name": span.name, **times})
        return found

    def _within(self, spans: Iterable[Operation]) -> List[Operation]:
        clipped = (replace(span, begin=max(self.begin, span.begin), end=min(self.end, span.end)) for span in spans)
        return [span for span in clipped if span.begin < span.end]

    def _idle(self, device: str) -> Iterator[Operation]:
        """Yield the time in which a device runs nothing, each piece named by what the host does."""
        busy = _union([*self.operations[device], *self.updates[device]])
        edges = [self.begin, *(edge for interval in busy for edge in interval), self.end]
        begins = [phase.begin for phase in self.phases]
        for begin, end in zip(edges[::2], edges[1::2]):
            if begin < end < begin + _SHORT_S:
                yield Operation(device, "idle: between operations", begin, end)
            elif begin < end:
                for phase in self.phases[max(0, bisect_right(begins, begin) - 1) : bisect_left(begins, end)]:
                    name = "waits for others" if phase.name == "wait" else f"host in {phase.name.split(':')[0]}"
                    yield Operation(device, f"idle: {name}", max(begin, phase.begin), min(end, phase.end))


def _on(device: str, operations: Iterable[Operation]) -> List[Operation]:
    return [one for one in operations if one.device == device]


def _is_update(name: str) -> bool:
    return name == "ElementwiseSum" or "_update" in name or name.startswith(("KVStore", "horovod", "multi_"))


def _union(spans: Iterable[Operation]) -> List[Tuple[float, float]]:
    """Return the times that are covered, in order."""
    found: List[Tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if found and span.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.begin, span.end))
    return found


def _without_overlap(spans: Sequence[Operation]) -> List[List[Operation]]:
    """Return the spans on as few lanes as do not show one above another."""
    lanes: List[List[Operation]] = [[]]
    for span in spans:
        free = next((lane for lane in lanes if not lane or lane[-1].end <= span.begin), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _sums(spans: Sequence[Operation], total: float) -> Dict[str, float]:
    found: Dict[str, float] = {}
    for span in spans:
        found[span.name] = found.get(span.name, 0.0) + (span.end - span.begin) / total
    return found
