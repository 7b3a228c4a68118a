"""Sums that stay on their device until they are read."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, DefaultDict, Dict, Hashable, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx
from mxnet import Context

from ..checks import check_function, is_whole, short
from ..data_parallel.step import Batch
from ..distributed import group
from ..errors import TrainerError
from ..mxnet_internals.versions import ContextType
from ..nested import Array, is_device_array, joinable
from .metrics import Metric, Metrics, joins_shards, named_metrics, total_of

_MOST_SHARDS = 256
_MOST_BYTES = 2**23  # device memory of the shards of one place that wait to be joined

Place = Union[Context, int, None]  # a device, a virtual shard, or a whole process
Part = Dict[str, Tuple[float, int]]  # a sum and a count for each metric


Form = Tuple[Hashable, ...]  # of losses, or of shards for the metrics: what arrays must have in common to be joined


class About(NamedTuple):
    """What is known of a shard: its place, what it can be joined with ((): nothing), and its elements."""

    place: Place
    form: Form
    size: int


@dataclass
class Held:
    """Losses and shards of one place that wait to be joined."""

    arrays: DefaultDict[Form, List[Tuple[Array, ...]]] = field(default_factory=lambda: defaultdict(list))
    num_bytes: int = 0


class MetricSums:
    """Adds up metrics, each on the device where its shards are, and reads them once.

    Sums are in float64, so that rounding depends neither on the number of devices nor on the number of examples. Up to 256 shards
    are joined before a metric is computed: a few operations per 256 shards instead of ten per shard.

    Parameters
    ----------
    metrics : sequence of functions, or dict name -> function
        Each takes a shard's output and label and returns (sum, count): see `accuracy`.
    num_shards : int, optional
        Of virtual shards: each is added up by itself, and then their sums in their order. So the means have the same bits on any
        number of devices and processes.

    Examples
    --------
    >>> sums = MetricSums()
    >>> sums.add("right", mx.nd.array([3]), 4)
    >>> sums.read()
    {'right': 0.75}
    """

    def __init__(self, metrics: Metrics = (), *, num_shards: Optional[int] = None) -> None:
        self._metrics = named_metrics(metrics)
        for name, metric in self._metrics.items():
            check_function("MetricSums", str(name), metric, advice="Pass metric objects of MXNet to evaluate or fit.")
        self._joined = {name: metric for name, metric in self._metrics.items() if joins_shards(metric)}
        self._num_shards = num_shards
        self._known: Dict[Hashable, About] = {}  # by the plan of a batch
        self._held: DefaultDict[Place, Held] = defaultdict(Held)
        self._sums: Dict[Tuple[Place, str], Array] = {}
        self._counts: Dict[Tuple[Place, str], int] = defaultdict(int)

    def add_batch(self, batch: Batch) -> None:
        """Add every metric of a batch, and its losses, if any, as `loss`."""
        for i, (output, label) in enumerate(zip(batch.outputs, batch.labels)):
            if label is None and self._joined:
                raise TrainerError("metrics: got a batch without labels; expected one for each example. Pass (X, y).")
            about = self._about(batch, i, output, label)
            if about.form and self._joined:
                pair = (output, label) if batch.plan else (output.detach(), label.detach())
                self._hold(about, *pair)
            for name, metric in self._metrics.items():
                if not about.form or name not in self._joined:
                    self._apply(name, metric, output, label, None if self._num_shards is None else about.place)
        if batch.losses and batch.num_units is not None:  # the mean is over the units that the loss counts, not over its elements
            self._counts[None, "loss"] += batch.num_units - sum(losses.size for losses in batch.losses)
        for i, losses in enumerate(batch.losses):
            about = self._about(batch, i, losses)
            self._hold(about, losses if batch.plan else losses.detach())

    def add(self, name: str, value: Array, count: int, *, place: Place = None) -> None:
        """Add a sum over `count` things: an array of one element, on any device; with virtual shards, equal in all processes."""
        if not isinstance(name, str) or not is_device_array(value) or value.size != 1 or not is_whole(count) or count < 0:
            raise TrainerError(
                f"metrics: got {short(value)} and {short(count)} of {short(name)}; expected an MXNet array of one element and a "
                "whole number: the sum, and of how many. See gluon_mgpu.accuracy."
            )
        if place is None:
            place = value.context if self._num_shards is None else 0
        self._counts[place, name] += count
        self._sum(name, place, value.detach().as_nd_ndarray())

    def read(self) -> Dict[str, float]:
        """Return each metric's mean over everything that was added, waiting once for each device.

        Neither the sums nor the shards that wait to be joined change, so reading does not affect later results, bit for bit.

        In a job of several processes, it covers this process only: see `read_all`.
        """
        return self._means(self._copy()._parts().values())

    def read_all(self) -> Dict[str, float]:
        """Return each metric's mean over everything that was added in any process. All processes wait and return the same."""
        return self._means(self._copy()._parts_of_all().values())

    def state(self) -> Tuple[Dict[str, int], Dict[str, Array]]:
        """Return what `restore` takes: counts by `place/metric`, and sums by `place/metric`, on their devices.

        It does not wait for the devices. In a job, all processes wait for each other, and from then on the first one holds the
        sums of all; with virtual shards, each holds its own.
        """
        self._add_up()
        if group() is None:
            counts = {f"{place}/{name}": count for (place, name), count in self._counts.items()}
            return counts, {f"{place}/{name}": value for (place, name), value in self._sums.items()}
        found = {f"{place}/{name}": pair for place, part in self._parts_of_all().items() for name, pair in part.items()}
        counts = {key: count for key, (_, count) in found.items()}
        sums = {key: mx.nd.array([total], dtype="float64") for key, (total, _) in found.items()}
        if self._num_shards is None:
            self._sums, self._counts = {}, defaultdict(int)
            self.restore(counts, sums, [mx.cpu()])
        return counts, sums

    def restore(self, counts: Mapping[str, int], sums: Mapping[str, Any], ctx: Sequence[Context]) -> None:
        """Continue from the result of `state`, on these devices."""
        by_name: Dict[str, Place] = {"None": None, **{str(context): context for context in ctx}}
        for key, count in counts.items():
            text, name = key.split("/", 1)
            place = int(text) if text.isdigit() else by_name.get(text, ctx[0])
            if not self._is_own(place):
                continue
            self._counts[place, name] += count
            if key in sums:
                context = place if isinstance(place, ContextType) else ctx[0]
                self._sum(name, place, mx.nd.array(sums[key], ctx=context, dtype="float64"))

    def _is_own(self, place: Place) -> bool:
        """Return whether this process holds the sums of a place: of its own virtual shards; of others, the first one does."""
        processes = group()
        if processes is None or self._num_shards is None or not isinstance(place, int):
            return processes is None or not processes.process.rank
        return place // (self._num_shards // processes.process.num_processes) == processes.process.rank

    def _about(self, batch: Batch, i: int, array: Any, label: Any = None) -> About:
        """Return what is known of a shard's losses, or with a label of its output: of compiled batches, decided once a plan."""
        key = batch.plan, i, label is None
        found = self._known.get(key) if batch.plan else None
        if found is None:
            form = ("loss", array.shape[1:], array.dtype) if label is None else _form_of(array, label)
            place: Place = array.context if form else None
            if self._num_shards is not None:
                place = 0 if batch.shard_numbers is None else batch.shard_numbers[i]
            found = About(place, form, array.size if form else 0)
            if batch.plan:
                self._known[key] = found
        return found

    def _hold(self, about: About, *arrays: Array) -> None:
        """Hold arrays, and join those of this place if there are many."""
        place, form, size = about
        held = self._held[place]
        held.arrays[form].append(arrays)
        held.num_bytes += 8 * size
        if sum(map(len, held.arrays.values())) >= _MOST_SHARDS or held.num_bytes >= _MOST_BYTES:
            self._join(place)

    def _join(self, place: Place) -> None:
        """Compute the metrics of what a place holds."""
        for form, held in self._held.pop(place).arrays.items():
            kinds = [[joinable(array.as_nd_ndarray()) for array in arrays] for arrays in zip(*held)]
            joined = [arrays[0] if len(arrays) == 1 else mx.nd.concat(*arrays, dim=0) for arrays in kinds]
            if form[0] == "loss":  # in float64, so that rounding hardly depends on how they were joined
                self.add("loss", total_of(joined[0].astype("float64")), joined[0].size, place=place)
            else:
                output, label = joined
                for name, metric in self._joined.items():
                    self._apply(name, metric, output, label, place)

    def _apply(self, name: str, metric: Metric, output: Any, label: Any, place: Place) -> None:
        result = metric(output, label)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TrainerError(
                f"metrics: got {type(result).__name__} from {name}; expected a pair (sum, count). See gluon_mgpu.accuracy."
            )
        self.add(name, *result, place=place)

    def _sum(self, name: str, place: Place, value: Array) -> None:
        total = value.astype("float64").reshape((1,))
        self._sums[place, name] = self._sums[place, name] + total if (place, name) in self._sums else total

    def _add_up(self) -> None:
        """Compute the metrics of all shards that wait to be joined."""
        for place in list(self._held):
            self._join(place)

    def _copy(self) -> MetricSums:
        """Return a copy, which can be added up without changing this object."""
        other = copy.copy(self)
        other._held, other._sums, other._counts = self._held.copy(), self._sums.copy(), self._counts.copy()
        return other

    def _parts(self) -> Dict[str, Part]:
        """Return the sums and counts of each place in this process, read with one copy to the host for each."""
        self._add_up()
        parts: Dict[str, Part] = {}
        for place in dict.fromkeys(place for place, _ in self._counts):
            sums = {name: value for (at, name), value in self._sums.items() if at == place}
            totals = dict(zip(sums, mx.nd.concat(*sums.values(), dim=0).asnumpy().tolist())) if sums else {}
            counts = {name: count for (at, name), count in self._counts.items() if at == place}
            parts[str(place)] = {name: (totals.get(name, 0.0), count) for name, count in counts.items()}
        if self._num_shards is not None:
            parts = {key: parts[key] for key in (*map(str, range(self._num_shards)), "None") if key in parts}
        return parts

    def _parts_of_all(self) -> Dict[str, Part]:
        """Return the sums and counts of each place over all processes, the same in each."""
        processes = group()
        own = self._parts()
        if processes is None:
            return own
        found = [json.loads(one) for one in processes.all_gather_bytes(json.dumps(own).encode())]
        if self._num_shards is None:
            return {"all": _merged(part for parts in found for part in parts.values())}
        each = self._num_shards // len(found)
        parts = {str(number): found[number // each].get(str(number), {}) for number in range(self._num_shards)}
        return {**parts, "None": _merged(parts.get("None", {}) for parts in found)}

    def _means(self, parts: Iterable[Part]) -> Dict[str, float]:
        merged = _merged(parts)
        found = {name: merged[name] for name in (*self._metrics, *merged) if name in merged and merged[name][1]}
        return {name: total / count for name, (total, count) in found.items()}


def _merged(parts: Iterable[Part]) -> Part:
    """Return the sums and counts of all parts, added in their order."""
    merged: Part = {}
    for part in parts:
        for name, (total, count) in part.items():
            before = merged.get(name, (0.0, 0))
            merged[name] = before[0] + total, before[1] + count
    return merged


def _form_of(output: Any, label: Any) -> Form:
    """Return the form of a shard with one array of scores and one label for each; () if it cannot be joined to others."""
    if not is_device_array(output) or not is_device_array(label):
        return ()
    scores, labels = output.shape, label.shape
    fits = labels and labels[0] and scores[:1] + scores[2:] == labels and output.context == label.context
    is_dense = output.stype == label.stype == "default"
    return ("shards", scores[1:], output.dtype, labels[1:], label.dtype) if fits and is_dense else ()
