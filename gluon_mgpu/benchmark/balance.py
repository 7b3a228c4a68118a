"""Splitting by measured speed beside an even split, on two CPU contexts of which one may share its core with another program."""

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

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..data_parallel.balancer import Balancer
from ..data_parallel.sharding import split_batch
from ..data_parallel.step import backward
from ..errors import DeviceError
from ..runtime.engine import when_ready
from ..trainer.trainer import Trainer

UNITS, NUM_CLASSES = 512, 10
MAX_INFLIGHT = 2
_BUSY = (
    "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile os.getppid() == int(sys.argv[2]): pass"
)


@dataclass(frozen=True)
class Round:
    """Seconds of a step with either split, measured one after the other, and the shares that were in use at the end.

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
        """How many times as fast the measured split is."""
        return self.even_s / self.auto_s


def measure(
    contexts: Sequence[Context],
    *,
    shared: bool,
    rounds: int = 7,
    num_steps: int = 20,
    num_first: int = 20,
    batch_size: int = 1024,
    tell: Callable[[str], None] = lambda text: None,
) -> List[Round]:
    """Return what steps of a small network take with an even split and with a Balancer, in turns.

    Each context's worker is bound to a core of its own. With `shared`, a program that counts for ever is bound to the first
    one, so that the kernel gives the first context half of it: a device of half the speed. Other programs on these cores
    spoil it.

    Parameters
    ----------
    contexts : list of two mxnet.Context
        CPU contexts with one thread each.
    shared : bool
    rounds, num_steps : int
        Steps of each split in every round; every other round begins with the other one.
    num_first : int
        Steps of each before, of which the Balancer's measure.
    batch_size : int
    tell : callable (str)

    Raises
    ------
    DeviceError
        Not two CPU contexts, or fewer than two cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if [context.device_type for context in contexts] != ["cpu", "cpu"] or len(cores) < 2:
        raise DeviceError(
            f"bench balance: got {list(contexts)} on {len(cores)} cores; expected two CPU contexts and two cores to bind "
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
            tell(f"{group}: round {number + 1} of {rounds}")
            seconds = {work: work(num_steps) for work in ((even, auto) if number % 2 == 0 else (auto, even))}
            found.append(Round(group, seconds[even], seconds[auto], balancer.weights))
    return found


def table(found: Sequence[Round]) -> Tuple[str, List[str], List[List[str]]]:
    """Return title, columns and rows: for each group the medians, their ratio over the rounds, and the shares."""
    rows = []
    for group in dict.fromkeys(one.group for one in found):
        ours = [one for one in found if one.group == group]
        gains = [one.gain for one in ours]
        shares = " : ".join(f"{weight:.2f}" for weight in ours[-1].weights)
        times = [f"{median(getattr(one, name) for one in ours) * 1e3:.1f}" for name in ("even_s", "auto_s")]
        rows.append([group, *times, f"{median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})", shares])
    return "a step with an even split, and with shares as measured", ["cores", "even, ms", "auto, ms", "gain", "shares"], rows


def ranges(found: Sequence[Round]) -> Dict[str, Dict[str, Tuple[float, float, float]]]:
    """Return median, lowest and highest milliseconds of each split, by group: what `plots.plot_ranges` takes."""
    bars: Dict[str, Dict[str, Tuple[float, float, float]]] = {}
    for group in dict.fromkeys(one.group for one in found):
        for label, name in (("even", "even_s"), ("auto", "auto_s")):
            times = [getattr(one, name) * 1e3 for one in found if one.group == group]
            bars.setdefault(group, {})[label] = (median(times), min(times), max(times))
    return bars


def _looper(contexts: Sequence[Context], batch_size: int, *, balanced: bool) -> Tuple[Callable[[int], float], Balancer]:
    """Return a function that trains for some steps and returns the seconds of one, and a balancer, which it may use."""
    net = gluon.nn.HybridSequential()
    for _ in range(2):
        net.add(gluon.nn.Dense(UNITS, activation="relu", in_units=UNITS))
    net.add(gluon.nn.Dense(NUM_CLASSES, in_units=UNITS))
    net.initialize(mx.init.Xavier(), ctx=list(contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.01})
    balancer, loss = Balancer(trainer), gluon.loss.SoftmaxCrossEntropyLoss()
    rng = np.random.RandomState(0)
    X = rng.uniform(-1, 1, (batch_size, UNITS)).astype("float32")
    y = rng.randint(0, NUM_CLASSES, batch_size).astype("int32")
    split: Any = balancer if balanced else split_batch

    def step() -> List[Any]:
        Xs, ys = split(X, y, list(contexts))
        with autograd.record():
            losses = [loss(net(x), t) for x, t in zip(Xs, ys)]
        backward(losses)
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
    """Bind each context's worker to a core of its own, and let it go again."""
    _bind(contexts, [{core} for core in cores])
    try:
        yield
    finally:
        _bind(contexts, [set(cores)] * len(contexts))


def _bind(contexts: Sequence[Context], cores: Sequence[Any]) -> None:
    """Let the engine's worker of each CPU context run on these cores only, and wait for that."""
    for context, mine in zip(contexts, cores):
        when_ready([mx.nd.zeros((1,), ctx=context)], partial(os.sched_setaffinity, 0, mine), on_worker=True)
    mx.nd.waitall()


@contextmanager
def _busy(core: int) -> Iterator[Any]:
    """Keep a core busy with a process that ends with the block, or with this process."""
    command = [sys.executable, "-c", _BUSY, str(core), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()  # type: ignore[union-attr]
            yield process
        finally:
            process.kill()
