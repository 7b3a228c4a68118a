"""Running statistics of random programs against NumPy: idle devices, uneven shards, averages and checkpoints in between."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from functools import partial
from typing import Any, Callable, List, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

_MODES: List[Any] = [None, {}, {"static_alloc": True, "static_shape": True}]
_LOSS = gluon.loss.L2Loss()

Stats = List[np.ndarray]


class _Oracle:
    """Each device's statistics and the examples behind them."""

    def __init__(self, num_devices: int, momentum: float) -> None:
        self.momentum = momentum
        self.stats: List[Stats] = [[np.zeros(2), np.ones(2)] for _ in range(num_devices)]
        self.examples = [0] * num_devices

    def step(self, shards: List[np.ndarray], counts: bool) -> None:
        for i, shard in enumerate(shards):
            if len(shard):
                moments = shard.mean(axis=0), shard.var(axis=0)
                self.stats[i] = [self.momentum * a + (1 - self.momentum) * b for a, b in zip(self.stats[i], moments)]
                self.examples[i] = self.examples[i] + len(shard) if counts else 1

    def mean(self) -> Stats:
        if not any(self.examples):
            return self.stats[0]
        return [np.average([one[i] for one in self.stats], axis=0, weights=self.examples) for i in (0, 1)]

    def average(self) -> None:
        self.stats = [self.mean() for _ in self.stats]
        self.examples = [0] * len(self.stats)


def trial(seed: int) -> str:
    """Return how the statistics differ from NumPy's."""
    draw = random.Random(seed)
    num_devices, is_np = draw.randint(1, 4), draw.random() < 0.5
    momentum, mode, loop = draw.choice([0.9, 0.5, 0.99]), draw.choice(_MODES), draw.choice([_train_batch, _backward, _autograd])
    weights = draw.choice([None, None, [draw.randint(0, 3) for _ in range(num_devices)]])
    if weights is not None and not any(weights):
        weights = None
    sizes = draw.choice([[1], [1, 2], [1, 2, 3, 4, 5, 8], [8]])
    events = [draw.choice(["step"] * 6 + ["average", "evaluate", "save", "copy", "trainer"]) for _ in range(12)]
    label = f"{num_devices} devices, np {is_np}, {loop.__name__}, weights {weights}, sizes {sizes}, {mode}, {events}"
    if is_np:
        mx.npx.set_np()
    try:
        found = _run(draw, num_devices, momentum, mode, loop, weights, sizes, events)
    finally:
        mx.npx.reset_np()
    return f"seed {seed}: {label}: {found}" if found else ""


def _run(
    draw: random.Random,
    num_devices: int,
    momentum: float,
    mode: Any,
    loop: Callable[..., None],
    weights: Any,
    sizes: List[int],
    events: List[str],
) -> str:
    def build() -> Tuple[Any, Any]:
        net = nn.HybridSequential()
        net.add(nn.BatchNorm(in_channels=2, momentum=momentum), nn.Dense(1, in_units=2))
        net.initialize(ctx=[mx.cpu(i) for i in range(num_devices)])
        if mode is not None:
            net.hybridize(**mode)
        return net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})

    net, trainer = build()
    oracle, counts = _Oracle(num_devices, momentum), loop is not _autograd
    split = partial(mgpu.split_batch, weights=weights) if weights else mgpu.split_batch
    numbers = np.random.RandomState(draw.randint(0, 10**6))
    for at, event in enumerate(events):
        X = numbers.normal(numbers.uniform(-2, 2), 1.5, (draw.choice(sizes), 2)).astype("float32")
        y = np.zeros((len(X), 1), "float32")
        if event == "step":
            loop(net, trainer, X, y, split)
            ends = np.cumsum(mgpu.plan_shards(len(X), num_devices, weights))
            oracle.step(np.split(X, ends[:-1]), counts)
        elif event == "average":
            mgpu.average_running_stats(net)
            oracle.average()
        elif event == "evaluate":
            mgpu.evaluate(net, [(X, y)], {}, loss=_LOSS)
            oracle.average()
        elif event == "trainer":
            trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})
        elif event == "copy":
            net = copy.deepcopy(net)
            trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})
        else:
            with tempfile.TemporaryDirectory() as folder:
                mgpu.save_checkpoint(os.path.join(folder, "c"), net, trainer)
                saved = mx.nd.load(os.path.join(folder, "c", "net.params"))
                net, trainer = build()
                mgpu.load_checkpoint(os.path.join(folder, "c"), net, trainer)
            for name, wanted in zip(("0.running_mean", "0.running_var"), oracle.mean()):
                if np.abs(saved[name].asnumpy() - wanted).max() > 1e-5:
                    return f"after event {at}, saved {name}: {saved[name].asnumpy()}, NumPy {wanted}"
    mgpu.average_running_stats(net)
    for param, wanted in zip((net[0].running_mean, net[0].running_var), oracle.mean()):
        for array in param.list_data():
            if np.abs(array.asnumpy() - wanted).max() > 1e-5:
                return f"{param.name} on {array.context}: {array.asnumpy()}, NumPy {wanted}"
    return ""


def _train_batch(net: Any, trainer: Any, X: np.ndarray, y: np.ndarray, split: Any) -> None:
    mgpu.train_batch(net, _LOSS, trainer, X, y, split_f=split)


def _backward(net: Any, trainer: Any, X: np.ndarray, y: np.ndarray, split: Any, backward: Any = mgpu.backward) -> None:
    Xs, ys = split(X, y, trainer.contexts)
    with autograd.record():
        losses = [_LOSS(net(x), t) for x, t in zip(Xs, ys)]
    backward(losses)
    trainer.step(len(X))


def _autograd(net: Any, trainer: Any, X: np.ndarray, y: np.ndarray, split: Any) -> None:
    _backward(net, trainer, X, y, split, autograd.backward)
