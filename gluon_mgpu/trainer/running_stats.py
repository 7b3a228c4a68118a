"""BatchNorm's running statistics over devices and processes, averaged by the number of their examples.

```
cpu(0)  0, 1 ─► batches of 6 ─► mean 0.8 ── weight 12 ─┐
cpu(1)  0, 1 ─► batches of 3 ─► mean 1.1 ── weight 6  ─┼─► 0.9 on every device; examples are counted from 0 again
cpu(2)  0, 1 ─► no data      ─► mean 0.0 ── weight 0  ─┘
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from .. import schema
from ..distributed import group
from ..nested import Array
from ..runtime.mxnet2 import layers_of
from .parameters import Params, average_replicas, blocks_of, named_params

_RECORD = "_seen_by_devices"  # attribute of a parameter, so that copies of the network contain it
_INITIAL = {"running_mean": 0.0, "running_var": 1.0}


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


def note_examples(losses: Sequence[Array]) -> None:
    """Note the number of examples in each device's backward pass: the size of each loss's first axis."""
    for loss in losses:
        context, shape = loss.context, loss.shape
        _unclaimed[context] = _unclaimed.get(context, 0) + (shape[0] if shape else 1)


def note_examples_on(contexts: Iterable[Context], number: int) -> None:
    """Note examples of a backward pass that goes through several devices."""
    for context in contexts:
        _unclaimed[context] = _unclaimed.get(context, 0) + number


def claim_examples(stats: Iterable[gluon.Parameter]) -> None:
    """Count the examples of the latest backward passes for these running statistics."""
    if _unclaimed:
        for param in stats:
            examples = _record(param).examples
            for context, number in _unclaimed.items():
                examples[context] = examples.get(context, 0) + number
        _unclaimed.clear()


def is_running_stat(param: gluon.Parameter) -> bool:
    """Return whether a parameter is a running mean or variance, or another value that a layer updates without a gradient."""
    # Gluon marks them as not differentiable; a frozen weight has grad_req "null" but is differentiable.
    # Integers are counters or masks, not BatchNorm's statistics.
    return not param._differentiable and np.issubdtype(np.dtype(param.dtype), np.floating)


def running_stats(params: Params) -> List[gluon.Parameter]:
    """Return BatchNorm's running means and variances that have values."""
    return [param for param in named_params(params).values() if param._data and is_running_stat(param)]


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


def remember_equal(params: Params) -> None:
    """Count examples from 0 if all devices have the same values: for a new trainer or run, or after values were loaded."""
    several = group() is not None
    stats = [param for param in running_stats(params) if several or len(param._data) > 1]
    if stats:
        mx.nd.waitall()
    for param, found in zip(stats, _values(stats)):
        behind = _record(param).behind
        if _all_same(found) and (len(found) > 1 or _record(param).equal is None):
            setattr(param, _RECORD, _Record(param._ctx_list, found[0], behind=behind))


def weights_of(params: Params) -> Dict[int, List[float]]:
    """Return, by the id of each running statistic, the weights of its devices in `average_running_stats`.

    Wait for the devices before.
    """
    found: Dict[int, List[float]] = {}
    for layer in _layers([param for param in running_stats(params) if len(param._data) > 1]):
        weights, _ = _weights(layer, _values(layer))
        found.update({id(param): weights for param in layer})
    return found


def stats_of(net: gluon.Block) -> Iterator[gluon.Parameter]:
    """Yield the running statistics of a network; not sorted or named, as each step does this."""
    for block in blocks_of(net):
        for param in block.params.values():
            if not param._differentiable and is_running_stat(param):
                yield param


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
    untouched = _untouched(layer, values, any(counted))
    examples = [0.0 if idle else float(number) for number, idle in zip(counted, untouched)]
    touched = [0.0 if idle else 1.0 for idle in untouched]
    weights = examples if any(examples) else touched if any(touched) else [1.0] * len(contexts)
    return weights, (sum(examples), sum(touched))


def _untouched(layer: Sequence[gluon.Parameter], values: Sequence[Sequence[np.ndarray]], is_counted: bool) -> List[bool]:
    """Return which devices still have the common values: training changes every statistic of a layer, or none."""
    devices = range(len(values[0]))
    known = [_record(param).equal for param in layer]
    if all(equal is not None for equal in known):
        return [all(_same(found[at], equal) for found, equal in zip(values, known)) for at in devices]
    initial = [[_is_initial(param, found[at]) for param, found in zip(layer, values)] for at in devices]
    if all(len(set(one)) == 1 for one in initial) and any(one[0] for one in initial):
        return [one[0] for one in initial]
    if is_counted:
        return [False for _ in devices]
    # Two devices with data have different statistics.
    return [any(all(_same(found[at], found[i]) for found in values) for i in devices if i != at) for at in devices]


def _is_initial(param: gluon.Parameter, values: np.ndarray) -> bool:
    return any(param.name.endswith(name) and bool((values == number).all()) for name, number in _INITIAL.items())


def _all_same(values: Sequence[np.ndarray]) -> bool:
    return all(_same(values[0], other) for other in values[1:])


def _same(one: np.ndarray, other: Optional[np.ndarray]) -> bool:
    """Return whether two arrays have the same bits, not-a-number included."""
    return other is not None and one.shape == other.shape and one.tobytes() == other.tobytes()


_SEEN = {"examples": schema.list_of(schema.number(0, 2**63)), "as_before": schema.list_of(schema.constant(True, False))}
SEEN = schema.mapping(schema.text(), schema.record(_SEEN))  # what `describe_seen` returns
