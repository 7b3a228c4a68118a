"""BatchNorm's running statistics move by the mean of the changes of all parts of a batch, weighted by examples.

Shards move those of their devices, which are averaged when they are read:

```
cpu(0)  0, 1 ─► batches of 6 ─► mean 0.8 ── weight 12 ─┐
cpu(1)  0, 1 ─► batches of 3 ─► mean 1.1 ── weight 6  ─┼─► 0.9 on every device; examples are counted from 0 again
cpu(2)  0, 1 ─► no data      ─► mean 0.0 ── weight 0  ─┘
```
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple
from zlib import crc32

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from ..distributed import group
from ..nested import Array
from ..runtime.mxnet2 import layers_of
from .parameters import Params, average_replicas, named_params

_RECORD = "_seen_by_devices"  # attribute of a parameter, so that copies of the network contain it


@dataclass(eq=False)
class _Record:
    """The history of one running statistic since all devices had the same values of it.

    Attributes
    ----------
    contexts : list of mxnet.Context
        Gluon's list, which is a new one if Gluon makes new arrays.
    equal : numpy.ndarray, optional
        The values that all devices had.
    examples : dict of Context to number
        The number of examples of each device since then.
    behind : (number, number)
        The examples, and the devices with data, of the common values since all processes had the same ones.
    """

    contexts: Any
    equal: Optional[np.ndarray] = None
    examples: Dict[Context, float] = field(default_factory=dict)
    behind: Tuple[float, float] = (0.0, 0.0)


_unclaimed: Dict[Context, float] = {}  # examples of backward passes before the next step


def note_examples(examples: Iterable[Tuple[Context, float]]) -> None:
    """Note the number of examples in each device's backward pass, for the next step."""
    for context, number in examples:
        _unclaimed[context] = _unclaimed.get(context, 0) + number


def claim_examples(stats: Iterable[gluon.Parameter]) -> None:
    """Count the examples of the latest backward passes for these running statistics."""
    if _unclaimed:
        for param in stats:
            examples = _record(param).examples
            for context, number in _unclaimed.items():
                examples[context] = examples.get(context, 0) + number
        _unclaimed.clear()


def drop_examples() -> None:
    """Forget the examples of backward passes that no step has used: they may be of another network."""
    _unclaimed.clear()


def is_running_stat(param: gluon.Parameter) -> bool:
    """Return whether a parameter is a running mean or variance, or another value that a layer updates without a gradient."""
    # Gluon marks them as not differentiable; a frozen weight has grad_req "null" but is differentiable.
    # Integers are counters or masks, not BatchNorm's statistics.
    return not param._differentiable and np.issubdtype(np.dtype(param.dtype), np.floating)


def running_stats(params: Params) -> List[gluon.Parameter]:
    """Return BatchNorm's running means and variances that have values."""
    return [param for param in named_params(params).values() if param._data and is_running_stat(param)]


class StatsOfParts:
    """Lets the parts of a batch move running statistics on one device from the same values: virtual shards, or micro-batches.

    ```
    before ── part 0 ──► change 0, put back ─┐
    before ── part 1 ──► change 1, put back ─┴─► before + mean of the changes, weighted by examples
    ```

    Where MXNet moves nothing, as in frozen layers that no backward pass reaches, the change is 0.

    Parameters
    ----------
    params : sequence of gluon.Parameter
        One or more.
    context : mxnet.Context

    Attributes
    ----------
    arrays : list of NDArray
        The statistics.
    before : NDArray
        All of them before the batch, in one array.

    Source: Kim et al., "torchgpipe", 2020, section on deferred batch normalization.
    """

    def __init__(self, params: Sequence[gluon.Parameter], context: Context) -> None:
        self.arrays: List[Array] = [param.data(context).as_nd_ndarray() for param in params]
        self._flat = [array.reshape((-1,)) for array in self.arrays]
        ends = [0]
        for array in self.arrays:
            ends.append(ends[-1] + array.size)
        self._bounds = list(zip(ends, ends[1:]))
        self.begin()

    def begin(self) -> None:
        """Note the values before a batch."""
        self.before: Array = self._now()

    def take(self, num_examples: int) -> Array:
        """Put the values back, and return how far the latest part has moved them, times its examples."""
        moved = (self._now() - self.before) * num_examples
        self.put_back()
        return moved

    def put_back(self) -> None:
        """Set the values to those before the batch."""
        self._write(self.before)

    def move(self, change: Array) -> None:
        """Move the values before the batch."""
        self._write(self.before + change)

    def _now(self) -> Array:
        return mx.nd.concat(*self._flat, dim=0)

    def _write(self, values: Array) -> None:
        for (begin, end), flat in zip(self._bounds, self._flat):
            values[begin:end].copyto(flat)


def average_running_stats(params: Params) -> None:
    """Set BatchNorm's running means and variances, on every device, to their mean over the devices, weighted by examples.

    It also averages the weights if a `LocalSGD` trains the devices separately.

    Each device has its own statistics, because it sees its own shards; Gluon evaluates with those of one device and saves their
    mean. The weight of a device is the number of its examples since all devices had the same values. A device without examples
    has no weight; if no device has examples, nothing changes. Averaging is linear, like the running update, so an average now
    does not change a later one.

    If every device has the same part of each batch (equal shards, fixed `weights`, idle devices), the result equals the running
    statistic of one device that takes, for each batch, the mean of the shards' statistics weighted by their sizes. It is close to
    that if the parts change from batch to batch, as in the last batch of an epoch: a device that missed some batches still holds
    more of the earlier values.

    `train_batch` counts the examples, also in `fit`. So does `backward` followed by the trainer's step, by the first axis of each
    loss. Loops with `autograd.backward` count nothing: a device that still has the initial values has no weight, and all others
    have equal weights.

    It waits for the devices: a network hybridized with `static_alloc` and `static_shape` writes these arrays without notifying
    the engine.
    """
    average_replicas(params)
    several = group() is not None
    stats = [param for param in running_stats(params) if several or len(param._data) > 1]
    if stats:
        mx.nd.waitall()
    for layer in _layers(stats):
        values = _values(layer)
        weights, behind = _weights(layer, values)
        for param, found in zip(layer, values):
            record = _record(param)
            result = found[0]
            if not _all_same(found):
                result = weighted_mean(found, weights)
                for array in param.list_data():
                    array.as_nd_ndarray()[:] = mx.nd.array(result, ctx=array.context, dtype=array.dtype)
            record.behind = (record.behind[0] + behind[0], record.behind[1] + behind[1])
            record.equal = result
            record.examples.clear()


def average_over_group(params: Params) -> None:
    """Do the same over the devices of all processes of a job. All processes must call it."""
    processes = group()
    stats = running_stats(params) if processes is not None else []
    if processes is None or not stats:
        return
    average_running_stats(params)
    processes.average([param.list_data()[0] for param in stats], [_record(param).behind for param in stats])
    for param in stats:
        first, *others = param.list_data()
        for other in others:
            first.copyto(other)
        setattr(param, _RECORD, _Record(param._ctx_list, first.asnumpy()))


def remember_equal(params: Params, *, in_job: bool = False) -> None:
    """Count examples from 0 if all devices have the same values: for a new trainer or run, or after values were loaded.

    With `in_job`, only if all processes have them: all must call it.
    """
    processes = group()
    stats = [param for param in running_stats(params) if processes is not None or len(param._data) > 1]
    if not stats:
        return
    mx.nd.waitall()
    layers = _layers(stats)
    values = [_values(layer) for layer in layers]
    same = [all(map(_all_same, found)) for found in values]  # of two devices, the variances alone may be equal
    in_job = in_job and processes is not None
    if in_job:
        same = _same_in_job(processes, values, same)
    for layer, found, is_same in zip(layers, values, same):
        for param, (first, *others) in zip(layer if is_same else (), found):
            record = _record(param)
            examples = record.examples.values()
            behind = record.behind[0] + sum(examples), record.behind[1] + len(examples)
            if in_job or others or record.equal is None:
                setattr(param, _RECORD, _Record(param._ctx_list, first, behind=(0.0, 0.0) if in_job else behind))


def _same_in_job(processes: Any, values: Sequence[Sequence[Sequence[np.ndarray]]], same: Sequence[bool]) -> List[bool]:
    """Return which layers have the same values in all processes."""
    own = [
        crc32(b"".join(replicas[0].tobytes() for replicas in found)) if is_same else -1 for found, is_same in zip(values, same)
    ]
    everyone = [json.loads(one) for one in processes.all_gather_bytes(json.dumps(own).encode())]
    return [layer[0] >= 0 and len(set(layer)) == 1 for layer in zip(*everyone)]


def weights_of(params: Params) -> Dict[int, List[float]]:
    """Return, by the id of each running statistic, the weights of its devices in `average_running_stats`.

    Wait for the devices before.
    """
    found: Dict[int, List[float]] = {}
    for layer in _layers([param for param in running_stats(params) if len(param._data) > 1]):
        weights, _ = _weights(layer, _values(layer))
        found.update({id(param): weights for param in layer})
    return found


def weighted_mean(values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return the weighted mean of arrays in the first one's dtype. The mean of a single array is bit-identical to it."""
    parts = [(one.astype("float64"), weight) for one, weight in zip(values, weights) if weight]
    total = sum((one * weight for one, weight in parts[1:]), parts[0][0] * parts[0][1])
    result: np.ndarray = (total / sum(weight for _, weight in parts)).astype(values[0].dtype)
    return result


def describe_seen(params: Dict[str, gluon.Parameter]) -> Dict[str, Any]:
    """Return the history of running statistics for JSON, by name: examples, and unchanged values, of each device."""
    content = {}
    for name, param in params.items():
        record, (values,) = _record(param), _values([param])
        examples = [record.examples.get(context, 0) for context in param.list_ctx()]
        content[name] = {"examples": examples, "as_before": [_same(one, record.equal) for one in values]}
    return content


def restore_seen(params: Dict[str, gluon.Parameter], content: Dict[str, Any]) -> None:
    """Restore a result of `describe_seen`, on the same number of devices, which have the values of that time."""
    for name, param in params.items():
        if name in content:
            (values,) = _values([param])
            equal = next((one for one, as_before in zip(values, content[name]["as_before"]) if as_before), None)
            examples = {context: number for context, number in zip(param.list_ctx(), content[name]["examples"]) if number}
            setattr(param, _RECORD, _Record(param._ctx_list, equal, examples))


def _record(param: gluon.Parameter) -> _Record:
    record = getattr(param, _RECORD, None)
    if record is None or record.contexts is not param._ctx_list:  # Gluon has made new arrays
        record = _Record(param._ctx_list)
        setattr(param, _RECORD, record)
    return record


def _layers(stats: Iterable[gluon.Parameter]) -> List[List[gluon.Parameter]]:
    """Return the statistics grouped by layer: a device has sent data through all of a layer or none."""
    layers: Dict[str, List[gluon.Parameter]] = {}
    found = list(stats)
    for name, param in zip(layers_of(found), found):
        layers.setdefault(name, []).append(param)
    return list(layers.values())


def _values(stats: Sequence[gluon.Parameter]) -> List[List[np.ndarray]]:
    return [[array.asnumpy() for array in param.list_data()] for param in stats]


def _weights(layer: Sequence[gluon.Parameter], values: Sequence[Sequence[np.ndarray]]) -> Tuple[List[float], Tuple[float, float]]:
    """Return the weight of each device in the mean, and the numbers of examples and of devices with data."""
    contexts = layer[0].list_ctx()
    counted = [max(_record(param).examples.get(context, 0) for param in layer) for context in contexts]
    untouched = _untouched(layer, values)
    examples = [0.0 if idle else float(number) for number, idle in zip(counted, untouched)]
    touched = [0.0 if idle else 1.0 for idle in untouched]
    weights = examples if any(examples) else touched if any(touched) else [1.0] * len(contexts)
    return weights, (sum(examples), sum(touched))


def _untouched(layer: Sequence[gluon.Parameter], values: Sequence[Sequence[np.ndarray]]) -> List[bool]:
    """Return which devices still have the common values: training changes a statistic of a layer, or none of them."""
    common = [_common(param, found[0]) for param, found in zip(layer, values)]
    return [all(_same(found[at], value) for found, value in zip(values, common)) for at in range(len(values[0]))]


def _common(param: gluon.Parameter, like: np.ndarray) -> np.ndarray:
    """Return the last values that all devices had: initial ones if nothing is known."""
    equal = _record(param).equal
    return np.full_like(like, float(param.name.endswith("running_var"))) if equal is None else equal


def _all_same(values: Sequence[np.ndarray]) -> bool:
    return all(_same(values[0], other) for other in values[1:])


def _same(one: np.ndarray, other: Optional[np.ndarray]) -> bool:
    """Return whether two arrays have the same bits, not-a-number included."""
    return other is not None and one.shape == other.shape and one.tobytes() == other.tobytes()
