"""Ways to divide a translator over devices: data, model and hybrid parallelism, measured here and projected to more devices."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from gluon_mgpu.models import Seq2Seq, SequenceLoss
from gluon_mgpu.pipeline.schedule import plan
from mxnet import Context, autograd, init

WAYS = (
    "one context",
    "data",
    "model, 2 x 4",
    "hybrid, 2 x 1",
    "hybrid, 2 x 2",
    "hybrid, 2 x 4",
    "hybrid, 4 x 2",
    "hybrid, 4 x 4",
)
_NUM_TOKENS = 30
_WARM_UP = 2
_LOSS = SequenceLoss()


@dataclass(frozen=True)
class Size:
    """A translator and its batch."""

    num_layers: int
    batch_size: int
    hidden: int = 300
    vocabulary: int = 8000
    cell: str = "gru"

    def __str__(self) -> str:
        layers = f"{self.num_layers} layer{'s' * (self.num_layers > 1)}"
        return f"{self.cell.upper()}, {layers} of {self.hidden}, batch {self.batch_size}"

    def network(self, ctx: Any) -> Seq2Seq:
        """Return the network on these devices."""
        mx.random.seed(0)
        sizes: Dict[str, Any] = {"embed_size": self.hidden, "hidden_size": self.hidden, "num_layers": self.num_layers}
        net = Seq2Seq(self.vocabulary, self.vocabulary, cell=self.cell, **sizes)
        net.initialize(init.Xavier(), ctx=ctx)
        net.hybridize()
        return net

    def batch(self) -> Tuple[Tuple[Any, ...], Tuple[Any, ...]]:
        """Return (source, lengths, target) and (wanted, lengths) of full length."""
        drawn = np.random.RandomState(0).randint(4, self.vocabulary, (3, self.batch_size, _NUM_TOKENS)).astype("int32")
        source, target, wanted = map(mx.nd.array, drawn)
        lengths = mx.nd.full((self.batch_size,), _NUM_TOKENS)
        return (source, lengths, target), (wanted, lengths)


@dataclass
class Found:
    """What was measured of one way to train one size.

    Attributes
    ----------
    seconds : list of float
        Of a step, round by round.
    held : list of int
        Bytes of weights, gradients, states and sums on each device.
    moved : int
        Bytes between devices in a step: copies of activations and their gradients as they were counted, and of each sum over k
        devices 2 (k - 1) times its size.
    """

    seconds: List[float]
    held: List[int]
    moved: int


def _step(size: Size, way: str, contexts: Sequence[Context]) -> Tuple[Callable[[], Any], mgpu.Trainer]:
    X, y = size.batch()
    kind, _, numbers = way.partition(", ")
    if numbers:
        num_stages, micro_batches = map(int, numbers.split(" x "))
        net: Any = pipeline(size, kind, num_stages, micro_batches, contexts)
    else:
        net = size.network(contexts[:1] if way == "one context" else contexts)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 1e-4}, clip_norm=5.0)
    if not numbers:
        step = mgpu.compile_step(net, _LOSS, trainer)
        return lambda: step(X, y), trainer
    return lambda: mgpu.train_batch(net, _LOSS, trainer, X, y), trainer


def pipeline(size: Size, kind: str, num_stages: int, micro_batches: int, contexts: Sequence[Context]) -> mgpu.Pipeline:
    """Return a translator in stages of equal time, on the contexts in turn; `hybrid`: attention and output layer on all."""
    net = size.network(contexts[0])
    X, _ = size.batch()
    sample = tuple(array[: -(-size.batch_size // micro_batches)] for array in X)
    shared = net.data_parallel_layers() if kind == "hybrid" else ()
    stages = mgpu.split_stages(net, num_stages, sample, data_parallel=shared)
    return mgpu.Pipeline(stages, [contexts[number % len(contexts)] for number in range(num_stages)], micro_batches)


@contextmanager
def _counting_copies() -> Iterator[List[int]]:
    """Count the bytes of copies from one context to another."""
    copies, former = [0], mx.nd.NDArray.copyto

    def copyto(self: Any, other: Any) -> Any:
        context = other if isinstance(other, Context) else other.context
        copies[0] += self.size * np.dtype(self.dtype).itemsize * (context != self.context)
        return former(self, other)

    mx.nd.NDArray.copyto = copyto
    try:
        yield copies
    finally:
        mx.nd.NDArray.copyto = former


def measure(
    sizes: Sequence[Size], contexts: Sequence[Context], *, rounds: int, on_message: Callable[[str], None] = lambda text: None
) -> Dict[Tuple[Size, str], Found]:
    """Return what a step of each size takes by each way, in turns."""
    found: Dict[Tuple[Size, str], Found] = {}
    for size in sizes:
        steps = {way: _step(size, way, contexts) for way in WAYS}
        for way, (step, trainer) in steps.items():
            step()
            mx.nd.waitall()
            with _counting_copies() as copies:
                step()
            mx.nd.waitall()
            held = [sum(kinds.values()) for kinds in trainer.bytes_per_device().values()]
            found[size, way] = Found([], held, copies[0] + _summed(trainer))
        for number in range(_WARM_UP + rounds):
            on_message(f"hybrid: {size}, round {number + 1} of {_WARM_UP + rounds}")
            for way, (step, _) in steps.items():
                mx.nd.waitall()
                begin = time.perf_counter()
                step()
                mx.nd.waitall()
                if number >= _WARM_UP:
                    found[size, way].seconds.append(time.perf_counter() - begin)
    return found


def _summed(trainer: mgpu.Trainer) -> int:
    """Return the bytes that the sums over devices move in a step."""
    params = trainer._params
    return sum(2 * (len(param.list_ctx()) - 1) * _bytes_of(param) for param in params if param.grad_req != "null")


def _bytes_of(param: Any) -> int:
    return int(np.prod(param.shape)) * np.dtype(param.dtype).itemsize


def table(found: Dict[Tuple[Size, str], Found]) -> Tuple[str, List[str], List[List[str]]]:
    """Return title, columns and rows: medians, and the ratio over the rounds with its range."""
    rows = []
    for (size, way), one in found.items():
        ratios = [[a / b for a, b in zip(found[size, other].seconds, one.seconds)] for other in ("one context", "data")]
        speeds = [f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in ratios]
        held = " and ".join(f"{number / 1e6:.0f}" for number in one.held)
        rows.append([str(size), way, f"{1e3 * median(one.seconds):.0f}", *speeds, f"{one.moved / 1e6:.1f}", held])
    columns = ["translator", "way", "ms", "of one context", "of data", "MB moved a step", "MB held a device"]
    return "A step of data, model and hybrid parallelism: times as fast (range)", columns, rows


# The projection

_PROJECTED = (("model", 1, 1), ("model", 1, 2), ("hybrid", 1, 1), ("hybrid", 1, 2), ("hybrid", 2, 1))  # for each device


@dataclass(frozen=True)
class Tasks:
    """Seconds of the tasks of one stage for one micro-batch, and the bytes that it reads from other stages."""

    forward: float
    backward: float
    read: int


def task_times(
    size: Size, kind: str, num_stages: int, num_devices: int, micro_batches: int, context: Context, rounds: int
) -> List[Tasks]:
    """Measure the tasks of each stage on one context. The shared stage has its part of a micro-batch, a k-th."""
    model = pipeline(size, kind, num_stages, micro_batches, [context])
    (source, lengths, target), (wanted, wanted_lengths) = size.batch()
    rows = -(-size.batch_size // micro_batches)
    X, y = (source[:rows], lengths[:rows], target[:rows]), (wanted[:rows], wanted_lengths[:rows])
    outputs: List[List[Any]] = []
    found = []
    arrays = model.stages.inputs(X)
    for number, stage in enumerate(model.stages):
        inputs = model.inputs_of(number, arrays, outputs)
        read = sum(one.size * 4 for one, (producer, _) in zip(inputs, model.sources(number) or []) if producer >= 0)
        label = y
        if stage.is_data_parallel:
            part = -(-rows // num_devices)
            inputs, label, read = [one[:part] for one in inputs], tuple(one[:part] for one in y), read // num_devices
        wanted_gradients = stage.gradients_for(len(inputs), is_first=number == 0)
        inputs = [one.copy() for one in inputs]
        for array, is_wanted in zip(inputs, wanted_gradients):
            if is_wanted and array.dtype == np.float32:
                array.attach_grad()
        is_last = number == len(model.stages) - 1
        times: List[Tuple[float, float]] = []
        for _ in range(rounds + 1):
            mx.nd.waitall()
            begin = time.perf_counter()
            with autograd.record():
                results = stage.run(inputs)
                heads = [_LOSS(model.stages.output(results), label)] if is_last else results
            mx.nd.waitall()
            between = time.perf_counter()
            autograd.backward([one for one in heads if one.dtype == np.float32])
            mx.nd.waitall()
            times.append((between - begin, time.perf_counter() - between))
        outputs.append([one.detach() for one in results])
        forward, backward = (median(column) for column in zip(*times[1:]))
        found.append(Tasks(forward, backward, read))
    return found


def bandwidth(contexts: Sequence[Context], num_bytes: int = 64 << 20) -> float:
    """Return the bytes per second of a copy from one context to another."""
    array = mx.nd.zeros((num_bytes // 4,), ctx=contexts[0])
    seconds = []
    for _ in range(6):
        mx.nd.waitall()
        begin = time.perf_counter()
        array.copyto(contexts[1])
        mx.nd.waitall()
        seconds.append(time.perf_counter() - begin)
    return num_bytes / median(seconds[1:])


def simulated(tasks: Sequence[Tasks], num_stages: int, num_devices: int, micro_batches: int, copies: float) -> float:
    """Return the seconds of all passes of a batch by the schedule, with copies at so many bytes per second.

    A stage's task includes the copies of what it reads, and of its gradients, as both devices wait for them.
    """
    stages = list(tasks)
    sources: List[List[int]] = [[number - 1] if number else [] for number in range(num_stages)]
    devices = [number % num_devices for number in range(num_stages)]
    if len(stages) > num_stages:  # one that all devices share
        stages += [stages[-1]] * (num_devices - 1)
        sources += [list(range(num_stages))] * num_devices
        devices += range(num_devices)
    costs = [(one.forward + one.read / copies, one.backward + one.read / copies) for one in stages]
    return max(one.end for one in plan(sources, devices, micro_batches, costs=costs))


def project(
    size: Size, num_devices: int, copies: Sequence[float], context: Context, *, rounds: int, on_message: Callable[[str], None]
) -> Tuple[str, List[str], List[List[str]]]:
    """Return title, columns and rows: a step of each way on so many devices, from tasks that are measured on one context.

    Every device is as fast as that context. An update takes the time of adam with a clipped norm, measured for all parameters on
    one context, by its share of the parameters.

    Parameters
    ----------
    copies : sequence of float
        Bytes per second from one device to another: a column for each. A device that is n times as fast, with copies n times
        as fast, has the same ratios.
    """
    net = size.network(context)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 1e-4}, clip_norm=5.0)
    X, y = size.batch()
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]
    total = sum(map(_bytes_of, params))
    shared = {param.name for layer in net.data_parallel_layers() for param in layer.collect_params().values()}
    of_shared = sum(_bytes_of(param) for param in params if param.name in shared)

    def passes(rows: int) -> float:
        part = tuple(one[:rows] for one in X), tuple(one[:rows] for one in y)
        seconds = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            with autograd.record():
                loss = _LOSS(net(part[0]), part[1])
            loss.backward()
            mx.nd.waitall()
            seconds.append(time.perf_counter() - begin)
        return median(seconds[1:])

    on_message(f"projection: {size}, one device")
    whole, shard = passes(size.batch_size), passes(-(-size.batch_size // num_devices))
    updates = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        trainer.step(1, ignore_stale_grad=True)
        mx.nd.waitall()
        updates.append(time.perf_counter() - begin)
    update = median(updates[1:])
    moved = 2 * (num_devices - 1) / num_devices  # of each byte of a sum: a k-th is summed on each device
    one = whole + update
    rows = [["one device", *[f"{one:.2f} s"] * len(copies)]]
    data = [shard + total * moved / speed + update for speed in copies]
    rows.append(["data", *[f"{seconds:.2f} s, {one / seconds:.2f} times" for seconds in data]])
    for kind, num_stages, micro_batches in _PROJECTED:
        num_stages, micro_batches = num_stages * num_devices, micro_batches * num_devices
        on_message(f"projection: {size}, {kind}, {num_stages} stages, {micro_batches} micro-batches")
        tasks = task_times(size, kind, num_stages, num_devices, micro_batches, context, rounds)
        everywhere = of_shared if kind == "hybrid" else 0
        own = (total - everywhere) / num_devices + everywhere
        row = [f"{kind}, {num_stages} x {micro_batches}"]
        for speed in copies:
            passing = simulated(tasks, num_stages, num_devices, micro_batches, speed)
            seconds = passing + everywhere * moved / speed + update * own / total
            row.append(f"{seconds:.2f} s, {one / seconds:.2f} times")
        rows.append(row)
    title = f"A projection, not a measurement: a step of {size}, on {num_devices} devices as fast as this context"
    return title, ["way", *[f"copies at {speed / 1e9:.2g} GB/s" for speed in copies]], rows


def results(found: Dict[Tuple[Size, str], Found], rounds: int) -> Dict[str, Any]:
    """Return what the JSON file holds."""
    rows = [
        {"translator": str(size), "way": way, "seconds": one.seconds, "held": one.held, "moved": one.moved}
        for (size, way), one in found.items()
    ]
    return {"command": "python scripts/benchmarks hybrid", "rounds": rounds, "rows": rows}
