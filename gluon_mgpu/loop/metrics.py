"""Sums that stay on their device until they are read."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from ..checks import explaining, is_whole, short, whole_number
from ..data_parallel.step import Batch
from ..distributed import Group, group
from ..errors import TrainerError
from ..nested import Array, is_device_array
from .mx_metrics import MXMetric, unpacked

# (output, label) of one shard -> (sum over the shard, an array of one element on its device; how many it sums over)
Metric = Callable[[Any, Any], Tuple[Array, int]]
_MOST_SHARDS = 64
_MOST_BYTES = 2**23  # device memory of shards that wait to be joined
Metrics = Union[Sequence[Metric], Mapping[str, Metric]]  # a Metric may be an mx.metric.EvalMetric


class MetricSum(NamedTuple):
    """The sum of a metric over a shard, an array of one element on its device, and the number of summed values.

    `float()` divides them and waits for the device.
    """

    total: Array
    num: int

    def __float__(self) -> float:
        return float(self.total.asnumpy().item()) / self.num


def accuracy(output: Array, label: Array) -> MetricSum:
    """Return the number of correct predictions and the number of predictions; `float()` of the pair is the accuracy.

    It is a pair, because `fit`, `evaluate` and `DeviceSums`, which take the function itself, add up shards of different sizes.

    Parameters
    ----------
    output : NDArray, shape (B, classes, ...) or (B,) or (B, 1)
        Scores, of which the largest along axis 1 is the prediction; or predictions.
    label : NDArray, shape (B, ...)

    Returns
    -------
    MetricSum (NDArray of shape (1,), int)

    Examples
    --------
    >>> scores, labels = mx.nd.array([[0.1, 0.9], [0.8, 0.2]]), mx.nd.array([1, 1])
    >>> float(accuracy(scores, labels))
    0.5
    >>> right, count = accuracy(scores, labels)
    >>> right.asscalar(), count
    (1.0, 2)

    Raises
    ------
    TrainerError
        The output is not one array, or does not hold one row of scores for each label.

    Source: d2l's `accuracy`.
    """
    _check_scores("accuracy", output, label, ndim=1)
    if len(output.shape) > 1 and output.shape[1] > 1:
        output = output.argmax(axis=1)
    if label.dtype == np.bool_:
        label = label.astype("int32")
    right = output.astype(label.dtype, copy=False).reshape(label.shape) == label
    return MetricSum(_total(right), label.size)


accuracy.joins_shards = True  # type: ignore[attr-defined]  # for joined shards it returns the sum over them


def top_k_accuracy(k: int) -> Metric:
    """Return a metric that counts the labels among the k largest scores.

    Examples
    --------
    >>> right, count = top_k_accuracy(2)(mx.nd.array([[0.1, 0.7, 0.2], [0.1, 0.7, 0.2]]), mx.nd.array([2, 0]))
    >>> right.asscalar(), count
    (1.0, 2)
    """

    k = whole_number("top_k_accuracy", "k", k, advice="5 is usual.")

    def top_k(output: Array, label: Array) -> MetricSum:
        _check_scores(f"top_{k}_accuracy", output, label, ndim=2)
        scores = output.as_nd_ndarray()
        labels = label.as_nd_ndarray().reshape((scores.shape[0],) + scores.shape[2:])
        best = mx.nd.topk(scores, axis=1, k=min(k, scores.shape[1]))
        return MetricSum(_total(mx.nd.broadcast_equal(best, labels.astype(best.dtype).expand_dims(1))), label.size)

    top_k.__name__ = f"top_{k}_accuracy"
    top_k.joins_shards = True  # type: ignore[attr-defined]
    return top_k


def _check_scores(name: str, output: Any, label: Any, *, ndim: int) -> None:
    """Raise `TrainerError` unless this output holds one row of scores, or one prediction, for each label."""
    if not is_device_array(output) or not is_device_array(label):
        kinds = [type(one).__name__ + (f" of {len(one)}" if isinstance(one, (list, tuple)) else "") for one in (output, label)]
        picked = ", ".join(_first(word, one) for word, one in (("output", output), ("label", label)))
        raise TrainerError(
            f"{name}: got {kinds[0]} as the output and {kinds[1]} as the label; expected one MXNet array each. Pass metrics=(), "
            f"or a function that picks one: metrics={{'{name}': lambda output, label: accuracy({picked})}}."
        )
    shape = output.shape
    rest = shape[:1] + shape[2:] if len(shape) > 1 and (shape[1] > 1 or ndim > 1) else shape
    if len(shape) < ndim or int(np.prod(rest)) != label.size:
        raise TrainerError(
            f"{name}: got an output of shape {shape} and a label of shape {label.shape}; expected a row of scores for each "
            "label, with the classes along axis 1. Pass metrics=() where the labels are not classes."
        )


def _first(word: str, data: Any) -> str:
    """Return the expression that picks the first array of nested data."""
    if isinstance(data, Mapping) and data:
        return f"{word}[{next(iter(data))!r}]"
    return f"{word}[0]" if isinstance(data, (list, tuple)) else word


def metrics_for(metrics: Union[str, Metrics], loss: Any) -> Metrics:
    """Return the metrics of `fit` and `evaluate`; for "auto", the accuracy, unless the labels of a Gluon loss are no classes.

    Examples
    --------
    >>> metrics_for("auto", gluon.loss.L2Loss()), metrics_for("auto", gluon.loss.SoftmaxCELoss()) == [accuracy]
    ([], True)
    """
    if not isinstance(metrics, str) or metrics != "auto":
        return metrics  # type: ignore[return-value]  # named_metrics rejects other texts
    kind = next((kind for kind in type(loss).__mro__ if kind.__module__ == gluon.loss.__name__), gluon.loss.Loss)
    has_classes = kind is gluon.loss.Loss or (issubclass(kind, gluon.loss.SoftmaxCELoss) and loss._sparse_label)
    return [accuracy] if has_classes else []


def check_metrics(metrics: Metrics, output: Any, label: Any) -> None:
    """Raise `TrainerError` if this package's metrics reject a shard. Others, which may count calls, are not called."""
    for metric in named_metrics(metrics).values():
        if getattr(metric, "joins_shards", False):
            metric(output, label)


def mean_loss(losses: Array) -> Tuple[Array, int]:
    """Return the sum of a shard's losses, and their number; in float64, so that rounding hardly depends on how they were joined.

    Parameters
    ----------
    losses : NDArray, shape (B, ...)
    """
    return _total(losses.as_nd_ndarray().astype("float64")), losses.size


class DeviceSums:
    """Adds up metrics, each on the device where its shards are, and reads them once.

    Sums are in float64, so that rounding depends neither on the number of devices nor on the number of examples. Up to 64 shards
    are joined before a metric is computed: a few operations per 64 shards instead of ten per shard.

    Parameters
    ----------
    metrics : sequence of functions, or dict name -> function
        Each takes a shard's output and label and returns (sum, count): see `accuracy`. Or objects of `mx.metric`: see `MXMetric`.

    Examples
    --------
    >>> sums = DeviceSums([accuracy])
    >>> sums.add_shard(mx.nd.array([[0.1, 0.9], [0.8, 0.2]]), mx.nd.array([1, 1]))
    >>> sums.read()
    {'accuracy': 0.5}
    """

    def __init__(self, metrics: Metrics = ()) -> None:
        self._metrics = named_metrics(metrics)
        self._of_batches = {name: metric for name, metric in self._metrics.items() if isinstance(metric, MXMetric)}
        self._of_shards = {name: metric for name, metric in self._metrics.items() if name not in self._of_batches}
        self._joined = {name: metric for name, metric in self._of_shards.items() if getattr(metric, "joins_shards", False)}
        self._alone = {name: metric for name, metric in self._of_shards.items() if name not in self._joined}
        self._pairs: Dict[Hashable, Shards] = {}  # outputs and labels of one form and device, for the metrics that join shards
        self._losses: Dict[Hashable, Shards] = {}
        self._values: Dict[Tuple[str, Context, Any], Shards] = {}  # of a metric, on one device
        self._sums: Dict[Context, Dict[str, Array]] = {}
        self._counts: Dict[str, int] = {}

    def add_shard(self, output: Any, label: Any) -> None:
        """Add every metric of one shard. Its arrays may be overwritten afterwards."""
        if self._joined and is_device_array(label) and is_device_array(output):
            output, label = output.copy(), label.copy()
        expected = "an output and a label that the metrics take"
        with explaining("DeviceSums.add_shard", "an error", expected, advice="Try them on one example."):
            self._add_shard(output, label)
            self._add_whole([output], [label])

    def _add_whole(self, outputs: Sequence[Any], labels: Sequence[Any]) -> None:
        """Add the metrics of MXNet, which take a batch as a whole."""
        for name, metric in self._of_batches.items() if outputs else ():
            self.add(name, *metric.of_batch(outputs, labels))

    def _add_shard(self, output: Any, label: Any) -> None:
        form = _form(output, label) if self._joined else None
        if form is None:
            self._apply(self._of_shards, output, label)
            return
        held = self._pairs.setdefault(form, Shards())
        if held.add(output, label):
            self._apply(self._joined, *held.take())
        elif len(self._pairs) > 1 and sum(one.num_bytes for one in self._pairs.values()) >= _MOST_BYTES:
            self._take_pairs()
        if self._alone:
            self._apply(self._alone, output, label)

    def add_batch(self, batch: Batch) -> None:
        """Add every metric of a batch, and its losses, if any, as `loss`."""
        for output, label in zip(batch.outputs, batch.labels):
            self._add_shard(output, label)
        self._add_whole(batch.outputs, batch.labels)
        if batch.losses and batch.num_units is not None:  # the mean is over the units that the loss counts, not over its elements
            more = batch.num_units - sum(losses.size for losses in batch.losses)
            self._counts["loss"] = self._counts.get("loss", 0) + more
        for losses in batch.losses:
            held = self._losses.setdefault((losses.context, losses.shape[1:], losses.dtype), Shards())
            if held.add(losses):
                self.add("loss", *mean_loss(*held.take()))

    def add(self, name: str, value: Array, count: int) -> None:
        """Add a sum over `count` things: an array of one element, on any device."""
        if not isinstance(name, str) or not is_device_array(value) or value.size != 1 or not is_whole(count) or count < 0:
            raise TrainerError(
                f"metrics: got {short(value)} and {short(count)} of {short(name)}; expected an MXNet array of one element and a "
                "whole number: the sum, and of how many. See gluon_mgpu.accuracy."
            )
        key = (name, value.context, value.dtype)
        self._counts[name] = self._counts.get(name, 0) + count
        held = self._values.setdefault(key, Shards())
        if held.add(value.reshape((1,))):
            self._sum(name, *held.take())

    def read(self) -> Dict[str, float]:
        """Return each metric's mean over everything that was added, waiting once for each device.

        Neither the sums nor the shards that wait to be joined change, so reading does not affect later results, bit for bit.

        In a job of several processes, it covers this process only: see `read_all`.
        """
        now = self._copy()
        return self._means(now._totals(), now._counts)

    def read_all(self) -> Dict[str, float]:
        """Return each metric's mean over everything that was added in any process. All processes wait and return the same."""
        processes = group()
        if processes is None:
            return self.read()
        return self._means(*self._copy()._all_totals(processes))

    def state(self) -> Tuple[Dict[str, int], Dict[Tuple[str, Context], Array]]:
        """Return what `restore` takes: counts by metric, and sums by metric and device, on that device.

        It does not wait for the devices. In a job, all processes wait for each other, and from then on the first one holds the
        sums of all.
        """
        processes = group()
        if processes is None:
            self._add_up()
        else:
            totals, counts = self._all_totals(processes)
            context = next(iter(self._sums), mx.cpu())
            self._sums, self._counts = {}, {}
            if not processes.process.rank:
                self.restore(counts, [(name, context, [total]) for name, total in totals.items()])
        sums = {(name, context): value for context, held in self._sums.items() for name, value in held.items()}
        return dict(self._counts), sums

    def restore(self, counts: Mapping[str, int], sums: Sequence[Tuple[str, Context, Any]]) -> None:
        """Continue from the result of `state`: counts, and triples of metric, device and sum."""
        self._counts = dict(counts)
        for name, context, value in sums:
            self._sum(name, mx.nd.array(value, ctx=context, dtype="float64"))

    def _all_totals(self, processes: Group) -> Tuple[Dict[str, float], Dict[str, int]]:
        """Return the sums and counts over all processes, the same in each."""
        own = json.dumps([self._totals(), self._counts]).encode()
        pairs = [json.loads(content) for content in processes.all_gather_bytes(own)]
        names = dict.fromkeys(name for totals, _ in pairs for name in totals)
        totals = {name: sum(totals.get(name, 0.0) for totals, _ in pairs) for name in names}
        return totals, {name: sum(counts.get(name, 0) for _, counts in pairs) for name in names}

    def _copy(self) -> DeviceSums:
        """Return a copy, which can be added up without changing this object."""
        other = DeviceSums(self._metrics)
        for name in ("_pairs", "_losses", "_values"):
            setattr(other, name, {key: held.copy() for key, held in getattr(self, name).items()})
        other._sums = {context: dict(sums) for context, sums in self._sums.items()}
        other._counts = dict(self._counts)
        return other

    def _totals(self) -> Dict[str, float]:
        self._add_up()
        totals = dict.fromkeys([name for name in (*self._metrics, *self._counts) if name in self._counts], 0.0)
        for on_device in self._sums.values():
            for name, value in zip(on_device, read_together(list(on_device.values()))):
                totals[name] += value
        return totals

    def _add_up(self) -> None:
        """Compute the metrics of all shards that wait to be joined."""
        self._take_pairs()
        for held in self._losses.values():
            if held:
                self.add("loss", *mean_loss(*held.take()))
        for (name, _, _), held in self._values.items():
            if held:
                self._sum(name, *held.take())
        self._pairs, self._losses, self._values = {}, {}, {}  # the next shards decide their order

    def _take_pairs(self) -> None:
        for held in self._pairs.values():
            if held:
                self._apply(self._joined, *held.take())

    def _apply(self, metrics: Mapping[str, Metric], output: Any, label: Any) -> None:
        for name, metric in metrics.items():
            result = metric(output, label)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TrainerError(
                    f"metrics: got {type(result).__name__} from {name}; expected a pair (sum, count). See gluon_mgpu.accuracy."
                )
            self.add(name, *result)

    def _means(self, totals: Mapping[str, float], counts: Mapping[str, int]) -> Dict[str, float]:
        means = {name: total / counts[name] for name, total in totals.items() if counts[name]}
        own = {name: metric.mean(totals[name], counts[name]) for name, metric in self._of_batches.items() if name in means}
        return {**means, **own}

    def _sum(self, name: str, values: Array) -> None:
        total = mx.nd.sum(values.astype("float64")).reshape((1,))
        on_device = self._sums.setdefault(total.context, {})
        on_device[name] = on_device[name] + total if name in on_device else total


class ShardSums:
    """Does what `DeviceSums` does, for virtual shards: adds up each by itself, and then their sums in their order.

    So the means have the same bits on any number of devices and processes.

    Parameters
    ----------
    metrics
        As for `DeviceSums`.
    num_shards : int
    """

    def __init__(self, metrics: Metrics, num_shards: int) -> None:
        self._of_shards = [DeviceSums(metrics) for _ in range(num_shards)]
        if self._of_shards[0]._of_batches:
            raise TrainerError(
                f"metrics: got {', '.join(self._of_shards[0]._of_batches)} of mx.metric with virtual_shards; expected functions "
                "(output, label) -> (sum, count), which are added up for each virtual shard. Use mgpu.accuracy, for example."
            )
        self._more: Dict[str, int] = {}  # counts that belong to no shard

    def add_batch(self, batch: Batch) -> None:
        """Add every metric of a batch of virtual shards, and its losses."""
        for place, number in enumerate(batch.shard_numbers or ()):
            here = slice(place, place + 1)
            self._of_shards[number].add_batch(Batch(batch.outputs[here], batch.labels[here], batch.losses[here], 0))
        if batch.losses and batch.num_units is not None:
            more = batch.num_units - sum(losses.size for losses in batch.losses)
            self._more["loss"] = self._more.get("loss", 0) + more

    def read(self) -> Dict[str, float]:
        """Return each metric's mean in this process."""
        return _means_of_shards(self._own(), [self._more])

    def read_all(self) -> Dict[str, float]:
        """Return each metric's mean over everything that was added in any process."""
        return _means_of_shards(*self._of_all())

    def state(self) -> Tuple[Dict[str, int], Dict[Tuple[str, Context], Array]]:
        """Return what `restore` takes: counts and sums by metric and shard."""
        for sums in self._of_shards:
            sums._add_up()
        shards, mores = self._of_all()
        counts: Dict[str, int] = {}
        found: Dict[Tuple[str, Context], Array] = {}
        for number, (totals, of_shard) in enumerate(shards):
            for name, total in totals.items():
                counts[f"{name}#{number}"] = of_shard[name]
                found[f"{name}#{number}", mx.cpu()] = mx.nd.array([total], dtype="float64")
        for name in sorted(set().union(*mores)):
            counts[f"{name}#"] = sum(more.get(name, 0) for more in mores)
            found[f"{name}#", mx.cpu()] = mx.nd.zeros(1, dtype="float64")
        return counts, found

    def restore(self, counts: Mapping[str, int], sums: Sequence[Tuple[str, Context, Any]]) -> None:
        """Continue from the result of `state`: a process takes the sums of its own shards."""
        processes = group()
        rank, num_processes = (0, 1) if processes is None else (processes.process.rank, processes.process.num_processes)
        each = len(self._of_shards) // num_processes
        for key, context, value in sums:
            name, _, number = key.rpartition("#")
            if number and int(number) // each == rank:
                own = self._of_shards[int(number)]
                own._counts[name] = counts[key]
                own._sum(name, mx.nd.array(value, ctx=context, dtype="float64"))
            elif not number and rank == 0:
                self._more[name] = counts[key]

    def _own(self) -> List[Tuple[Dict[str, float], Dict[str, int]]]:
        """Return totals and counts of each shard in this process."""
        copies = [sums._copy() for sums in self._of_shards]
        return [(copy._totals(), copy._counts) for copy in copies]

    def _of_all(self) -> Tuple[List[Tuple[Dict[str, float], Dict[str, int]]], List[Dict[str, int]]]:
        """Return totals and counts of each shard, and the further counts of each process."""
        own = self._own()
        processes = group()
        if processes is None:
            return own, [self._more]
        found = [json.loads(one) for one in processes.all_gather_bytes(json.dumps([own, self._more]).encode())]
        each = len(own) // len(found)
        return [found[number // each][0][number] for number in range(len(own))], [more for _, more in found]


def sums_of(metrics: Metrics, num_shards: Optional[int]) -> Any:
    """Return the sums of a pass: `ShardSums` with virtual shards, else `DeviceSums`."""
    return DeviceSums(metrics) if num_shards is None else ShardSums(metrics, num_shards)


def _means_of_shards(
    shards: Sequence[Tuple[Mapping[str, float], Mapping[str, int]]], mores: Sequence[Mapping[str, int]]
) -> Dict[str, float]:
    totals: Dict[str, float] = {}
    counts: Dict[str, int] = {}
    for of_shard, count in shards:
        for name, total in of_shard.items():
            totals[name] = totals.get(name, 0.0) + total
        for name, number in count.items():
            counts[name] = counts.get(name, 0) + number
    for more in mores:
        for name, number in more.items():
            counts[name] = counts.get(name, 0) + number
    return {name: total / counts[name] for name, total in totals.items() if counts[name]}


class Shards:
    """Arrays of several shards, of one form and on one device, that wait to be joined."""

    def __init__(self) -> None:
        self._held: List[Tuple[Array, ...]] = []
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, *arrays: Array) -> bool:
        """Hold the arrays of a shard, and return whether it is time to join them."""
        self._held.append(tuple(array.detach() for array in arrays))  # without the recorded graph
        self.num_bytes += max(array.size for array in arrays) * 8
        return len(self._held) >= _MOST_SHARDS or self.num_bytes >= _MOST_BYTES

    def copy(self) -> Shards:
        """Return a copy that can be emptied separately."""
        other = Shards()
        other._held, other.num_bytes = list(self._held), self.num_bytes
        return other

    def take(self) -> List[Array]:
        """Return the arrays, each kind joined along its first axis, as legacy arrays, and release them."""
        kinds = [[array.as_nd_ndarray() for array in arrays] for arrays in zip(*self._held)]
        self._held, self.num_bytes = [], 0
        return [arrays[0] if len(arrays) == 1 else mx.nd.concat(*arrays, dim=0) for arrays in kinds]


def _form(output: Any, label: Any) -> Optional[Hashable]:
    """Return what shards must have in common to be joined along their first axis: one array of scores, one label for each.

    None if this shard cannot be joined.
    """
    if not is_device_array(output) or not is_device_array(label):
        return None
    scores, labels = output.shape, label.shape
    if not labels or not labels[0] or (scores[:1] + scores[2:] if len(scores) > 1 else scores) != labels:
        return None
    if output.stype != "default" or label.stype != "default":
        return None
    return (output.context, scores[1:], output.dtype, label.context, labels[1:], label.dtype)


def read_together(arrays: List[Array]) -> List[float]:
    """Return the values of arrays of one element, all on one device, with one copy to the host."""
    numbers: np.ndarray = mx.nd.concat(*arrays, dim=0).asnumpy()
    return [float(number) for number in numbers]


def named_metrics(metrics: Optional[Metrics]) -> Dict[str, Metric]:
    """Return metrics by name; a function without one gets its own name.

    Raises
    ------
    TrainerError
        Something is not a function, or two metrics have the same name.
    """
    if isinstance(metrics, Mapping):
        named = {name: MXMetric(one) if isinstance(one, mx.metric.EvalMetric) else one for name, one in metrics.items()}
    else:
        metrics = [metrics] if isinstance(metrics, mx.metric.EvalMetric) else metrics
        if metrics is not None and not callable(metrics) and not isinstance(metrics, (list, tuple)):
            raise TrainerError(
                f"metrics: got {short(metrics)}; expected a list of functions, or a dict name -> function. Pass [accuracy]."
            )
        listed = unpacked([metrics] if callable(metrics) else list(metrics or ()))
        named = {getattr(metric, "__name__", str(metric)): metric for metric in listed}
        if len(named) < len(listed):
            raise TrainerError(
                f"metrics: got {len(listed)} of which some share a name; expected different names. Pass a dict name -> metric."
            )
    if "loss" in named:
        raise TrainerError(
            "metrics: got a metric named 'loss'; expected another name: the loss itself is reported under it. Rename it."
        )
    for name, metric in named.items():
        if not callable(metric):
            raise TrainerError(
                f"metrics: got {short(metric)} for {str(name)[:60]}; expected a function (output, label) -> (sum, count). Use "
                "gluon_mgpu.accuracy, for example."
            )
    return named


def _total(array: Array) -> Array:
    """Return the sum of an array as a legacy array of shape (1,), on its device, counted in float32 or better."""
    classic = array.as_nd_ndarray().reshape((-1,))
    if classic.dtype in (np.float16, np.bool_, np.int8, np.uint8):
        classic = classic.astype("float32")
    return mx.nd.sum(classic).reshape((1,))
