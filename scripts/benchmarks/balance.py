"""A split by measured speed compared with an even one, on two CPU contexts, one of which may share its core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from gluon_mgpu.errors import DeviceError
from gluon_mgpu.runtime.engine import when_ready
from mxnet import Context, autograd, gluon

UNITS, NUM_CLASSES = 512, 10
MAX_INFLIGHT = 2
_BUSY = (
    "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile os.getppid() == int(sys.argv[2]): pass"
)


@dataclass(frozen=True)
class Round:
    """Seconds per step with both splits, measured one after the other, and the shares in use at the end.

    Attributes
    ----------
    group : str
        `one core shared` or `equal cores`.
    even_s, auto_s : float, seconds
    weights : list of float
    """

    group: str
    even_s: float
    auto_s: float
    weights: List[float]

    @property
    def gain(self) -> float:
        """The even split's time divided by the measured split's."""
        return self.even_s / self.auto_s


def measure(
    contexts: Sequence[Context],
    *,
    shared: bool,
    rounds: int = 7,
    num_steps: int = 20,
    num_first: int = 20,
    batch_size: int = 1024,
    on_message: Callable[[str], None] = lambda text: None,
) -> List[Round]:
    """Return the seconds per step of a small network with an even split and with a Balancer, measured in turns.

    Each context's worker is bound to a core of its own. With `shared`, a busy process is bound to the first core, so that the
    first context gets half of it and acts as a device of half the speed. Other programs on these cores spoil the measurement.

    Parameters
    ----------
    contexts : list of two mxnet.Context
        CPU contexts with one thread each.
    shared : bool
    rounds, num_steps : int
        Steps of each split in every round; every other round begins with the other split.
    num_first : int
        Warm-up steps of each split. In these the Balancer measures.
    batch_size : int
    on_message : callable (str)
        Called with the current activity.

    Raises
    ------
    DeviceError
        Not two CPU contexts, or fewer than two cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if [context.device_type for context in contexts] != ["cpu", "cpu"] or len(cores) < 2:
        raise DeviceError(
            f"benchmark balance: got {list(contexts)} on {len(cores)} cores; expected two CPU contexts and two cores to bind "
            "them to, on Linux. Run it on another machine."
        )
    group = "one core shared" if shared else "equal cores"
    with _bound(contexts, cores), _busy(cores[0]) if shared else nullcontext():
        even, _ = _looper(contexts, batch_size, balanced=False)
        auto, balancer = _looper(contexts, batch_size, balanced=True)
        found = []
        for work in (even, auto):
            work(num_first)
        for number in range(rounds):
            on_message(f"{group}: round {number + 1} of {rounds}")
            seconds = {work: work(num_steps) for work in ((even, auto) if number % 2 == 0 else (auto, even))}
            found.append(Round(group, seconds[even], seconds[auto], balancer.weights))
    return found


def table(found: Sequence[Round]) -> Tuple[str, List[str], List[List[str]]]:
    """Return title, columns and rows: for each group the medians, the ratio over the rounds, and the shares."""
    rows = []
    for group in dict.fromkeys(one.group for one in found):
        ours = [one for one in found if one.group == group]
        gains = [one.gain for one in ours]
        shares = " : ".join(f"{weight:.2f}" for weight in ours[-1].weights)
        times = [f"{median(getattr(one, name) for one in ours) * 1e3:.1f}" for name in ("even_s", "auto_s")]
        rows.append([group, *times, f"{median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})", shares])
    return "a step with an even split and with measured shares", ["cores", "even, ms", "auto, ms", "even / auto", "shares"], rows


def ranges(found: Sequence[Round]) -> Dict[str, Dict[str, Tuple[float, float, float]]]:
    """Return median, lowest and highest milliseconds of each split, by group, for `plot_ranges`."""
    bars: Dict[str, Dict[str, Tuple[float, float, float]]] = {}
    for group in dict.fromkeys(one.group for one in found):
        for label, name in (("even", "even_s"), ("auto", "auto_s")):
            times = [getattr(one, name) * 1e3 for one in found if one.group == group]
            bars.setdefault(group, {})[label] = (median(times), min(times), max(times))
    return bars


def _looper(contexts: Sequence[Context], batch_size: int, *, balanced: bool) -> Tuple[Callable[[int], float], mgpu.Balancer]:
    """Return a function that trains for some steps and returns the seconds per step, and the Balancer it may use."""
    net = gluon.nn.HybridSequential()
    for _ in range(2):
        net.add(gluon.nn.Dense(UNITS, activation="relu", in_units=UNITS))
    net.add(gluon.nn.Dense(NUM_CLASSES, in_units=UNITS))
    net.initialize(mx.init.Xavier(), ctx=list(contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    balancer, loss = mgpu.Balancer(trainer), gluon.loss.SoftmaxCrossEntropyLoss()
    rng = np.random.RandomState(0)
    X = rng.uniform(-1, 1, (batch_size, UNITS)).astype("float32")
    y = rng.randint(0, NUM_CLASSES, batch_size).astype("int32")
    split: Any = balancer if balanced else mgpu.split_batch

    def step() -> List[Any]:
        Xs, ys = split(X, y, list(contexts))
        with autograd.record():
            losses = [loss(net(x), t) for x, t in zip(Xs, ys)]
        mgpu.backward(losses)
        if balanced:
            balancer.watch(losses)
        trainer.step(batch_size)
        return losses

    def work(num_steps: int) -> float:
        mx.nd.waitall()
        started = time.perf_counter()
        queued: List[List[Any]] = []
        for _ in range(num_steps):
            queued.append(step())
            if len(queued) > MAX_INFLIGHT:
                for losses in queued.pop(0):
                    losses.wait_to_read()
        mx.nd.waitall()
        return (time.perf_counter() - started) / num_steps

    return work, balancer


@contextmanager
def _bound(contexts: Sequence[Context], cores: Sequence[int]) -> Iterator[None]:
    """Bind each context's worker to a core of its own; release it at the end."""
    _bind(contexts, [{core} for core in cores])
    try:
        yield
    finally:
        _bind(contexts, [set(cores)] * len(contexts))


def _bind(contexts: Sequence[Context], cores: Sequence[Any]) -> None:
    """Restrict the engine's worker of each CPU context to these cores, and wait until it is done."""
    for context, mine in zip(contexts, cores):
        when_ready([mx.nd.zeros((1,), ctx=context)], partial(os.sched_setaffinity, 0, mine), on_worker=True)
    mx.nd.waitall()


@contextmanager
def _busy(core: int) -> Iterator[Any]:
    """Keep a core busy with a process that ends with the block or with this process."""
    command = [sys.executable, "-c", _BUSY, str(core), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()  # type: ignore[union-attr]
            yield process
        finally:
            process.kill()
