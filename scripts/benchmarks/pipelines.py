"""Two stages on two contexts against one context with the same micro-batches: time of a step, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Sequence, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import psutil
from gluon_mgpu.models.resnet import Residual
from mxnet import Context, gluon, init
from mxnet.gluon import nn, rnn

NETWORKS = ("mlp", "resnet", "gru")  # of two equal halves whose tasks take 20 ms and more
PLANS = ("one context", "gpipe", "1f1b", "1f1b, recompute")
_WARM_UP = 2

Found = Dict[Tuple[str, str], List[float]]  # by network and plan: seconds per round


class _Recurrent(nn.HybridBlock):  # type: ignore[misc]
    """A GRU over arrays of shape (N, T, size)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        with self.name_scope():
            self.layer = rnn.GRU(size, input_size=size)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return F.swapaxes(self.layer(F.swapaxes(x, 0, 1)), 0, 1)


def workload(network: str, micro_batches: int) -> Tuple[nn.HybridSequential, Any, Any]:
    """Return a network and its batch: features, and labels of their shape."""
    net = nn.HybridSequential()
    if network == "mlp":
        net.add(*[nn.Dense(1024, activation="tanh", in_units=1024) for _ in range(8)])
        shape: Tuple[int, ...] = (48 * micro_batches, 1024)
    elif network == "resnet":
        net.add(*[Residual(64) for _ in range(4)])
        shape = (6 * micro_batches, 64, 28, 28)
    else:
        net.add(*[_Recurrent(256) for _ in range(4)])
        shape = (16 * micro_batches, 30, 256)
    mx.random.seed(0)
    net.initialize(init.Xavier())
    net.hybridize()
    X = mx.nd.random.normal(shape=shape)
    net(X[:1])
    return net, X, mx.nd.zeros(shape)


def step_of(network: str, plan: str, contexts: Sequence[Context], micro_batches: int) -> Callable[[], Any]:
    """Return a function that trains on one batch."""
    net, X, y = workload(network, micro_batches)
    loss = gluon.loss.L2Loss()
    options: Dict[str, Any] = {}
    if plan == "one context":
        options = {"micro_steps": micro_batches}
    else:
        stages = mgpu.split_stages(net, 2, X[: len(X) // micro_batches], balance="bytes")
        net = mgpu.Pipeline(stages, contexts, micro_batches, plan.split(",")[0], recompute="recompute" in plan)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1e-4})
    return lambda: mgpu.train_batch(net, loss, trainer, X, y, **options)


def measure(
    contexts: Sequence[Context], *, rounds: int, micro_batches: int, on_message: Callable[[str], None] = lambda text: None
) -> Found:
    """Return the seconds of a step of each network by each plan, in turns."""
    found: Found = {}
    for network in NETWORKS:
        steps = {plan: step_of(network, plan, contexts, micro_batches) for plan in PLANS}
        for number in range(_WARM_UP + rounds):
            on_message(f"pipeline: {network}, round {number + 1} of {_WARM_UP + rounds}")
            for plan, step in steps.items():
                mx.nd.waitall()
                begin = time.perf_counter()
                step()
                mx.nd.waitall()
                if number >= _WARM_UP:
                    found.setdefault((network, plan), []).append(time.perf_counter() - begin)
    return found


def peaks(micro_batches: int, on_message: Callable[[str], None] = lambda text: None) -> Dict[Tuple[str, str], float]:
    """Return by how many MB each plan's step raises the memory of a process of its own, at most."""
    found = {}
    for network in NETWORKS:
        for plan in PLANS:
            on_message(f"pipeline: memory of {network}, {plan}")
            # malloc gives memory back at once, so that what is in use shows
            settings = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            command = [sys.executable, str(Path(__file__)), network, plan, str(micro_batches)]
            done = subprocess.run(
                command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300, check=True
            )
            found[network, plan] = float(done.stdout)
    return found


def _peak(network: str, plan: str, micro_batches: int) -> float:
    with mgpu.use_devices("cpu:2") as contexts:
        step = step_of(network, plan, contexts, micro_batches)
        step()  # gradients and buffers are made
        mx.nd.waitall()
        process, highest, has_ended = psutil.Process(), [0], threading.Event()
        before = process.memory_info().rss

        def watch() -> None:
            while not has_ended.wait(0.002):
                highest[0] = max(highest[0], process.memory_info().rss)

        thread = threading.Thread(target=watch)
        thread.start()
        step()
        mx.nd.waitall()
        has_ended.set()
        thread.join()
    return (highest[0] - before) / 1e6


def table(found: Found, memory: Dict[Tuple[str, str], float], micro_batches: int) -> Tuple[str, List[str], List[List[str]]]:
    """Return title, columns and rows: medians, and the ratio over the rounds with its range."""
    rows = []
    for (network, plan), times in found.items():
        ratios = [one / other for one, other in zip(found[network, "one context"], times)]
        speed = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([network, plan, f"{1e3 * median(times):.0f}", speed, f"{memory[network, plan]:.0f}"])
    ideal = 2 * micro_batches / (micro_batches + 1)
    title = f"Two stages, {micro_batches} micro-batches: a step against one context (ideal {ideal:.2f})"
    return title, ["network", "plan", "ms", "times as fast (range)", "peak memory of a step, MB"], rows


def results(found: Found, memory: Dict[Tuple[str, str], float], **options: int) -> Dict[str, Any]:
    """Return what the JSON file holds."""
    rows = [
        {"network": network, "plan": plan, "seconds": times, "peak_mb": memory[network, plan]}
        for (network, plan), times in found.items()
    ]
    return {"command": "python scripts/benchmarks pipeline", **options, "rows": rows}


if __name__ == "__main__":
    print(_peak(sys.argv[1], sys.argv[2], int(sys.argv[3])))
