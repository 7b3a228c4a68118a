"""Measure on GPUs what CPU contexts do not show, and print one JSON object: a part of scripts/gpu_report.py.

python scripts/gpu_measurements.py gpu 2        # kind of device, number of devices
python scripts/gpu_measurements.py cpu 2        # a rehearsal with small arrays
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any, Callable, Dict, List, Sequence

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from gluon_mgpu.devices.transfer import Uploads
from gluon_mgpu.trainer.seeded_dropout import seed_dropout
from gluon_mgpu.trainer.sums import make_sum
from mxnet import autograd, gluon
from mxnet.gluon import nn

ROUNDS = 7


def main(kind: str, number: int) -> Dict[str, Any]:
    """Return all measurements; one that fails is its error."""
    contexts = [mx.Context(kind, i) for i in range(number)]
    found: Dict[str, Any] = {"devices": [str(context) for context in contexts], "units": "seconds, medians of 7"}
    for measure in (uploads, large_sum, dropout, batch_norm, overlap):
        try:
            found[measure.__name__] = measure(contexts, 1.0 if kind == "gpu" else 0.05)
        except Exception as error:  # the others are measured nevertheless
            found[measure.__name__] = {"error": f"{type(error).__name__}: {error}"}
    return found


def seconds(run: Callable[[], Any], between: Callable[[], Any] = lambda: None) -> float:
    """Return the median time of a call, with all that it queues."""
    times = []
    for _ in range(ROUNDS + 1):
        between()
        mx.nd.waitall()
        began = time.perf_counter()
        run()
        mx.nd.waitall()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def uploads(contexts: Sequence[mx.Context], scale: float) -> Dict[str, float]:
    """Return the times to copy a shard of 38.5 MB to the first device: pinned memory used again, and new for each copy."""
    shard = np.ones((max(1, int(64 * scale)), 3, 224, 224), "float32")
    ring = Uploads()
    return {
        "bytes": shard.nbytes,
        "ring": seconds(lambda: ring(shard, contexts[0], shard.dtype)),
        "new": seconds(lambda: Uploads()(shard, contexts[0], shard.dtype)),
    }


def large_sum(contexts: Sequence[mx.Context], scale: float) -> Dict[str, float]:
    """Return the time of the sum over the devices of a parameter of 98 MB, an embedding of 32,000 words."""
    net, trainer = embedding(contexts, int(32000 * scale))
    slabs = trainer.steps.layout.slabs
    total = make_sum("device")
    return {"bytes": net.weight.data(contexts[0]).size * 4, "sum": seconds(lambda: total.run(slabs))}


def embedding(contexts: Sequence[mx.Context], words: int) -> Any:
    """Return an embedding and its trainer."""
    net = nn.Embedding(words, 768)
    net.initialize(ctx=list(contexts))
    return net, mgpu.Trainer(net, "sgd")


def dropout(contexts: Sequence[mx.Context], scale: float) -> Dict[str, bool]:
    """Return whether two masks of one seed are equal: with Gluon's layer, and with the one that a trainer's network has."""
    found = {}
    for name in ("Gluon", "gluon_mgpu"):
        layer = nn.Dropout(0.5)
        if name == "gluon_mgpu":
            seed_dropout(contexts, layer)
        masks = []
        for _ in range(2):
            mx.random.seed(1)
            with autograd.record():
                masks.append(layer(mx.nd.ones((4096,), ctx=contexts[0])).asnumpy())
        found[name] = bool((masks[0] == masks[1]).all())
    return found


def batch_norm(contexts: Sequence[mx.Context], scale: float) -> Dict[str, List[float]]:
    """Return a layer's running variance, 1 before: after a forward pass on two values and on one, and after the backward pass."""
    found = {}
    for name, values in (("two values", [[1.0], [3.0]]), ("one value", [[1.0]])):
        layer = nn.BatchNorm(in_channels=1, momentum=0.0)
        layer.initialize(ctx=contexts[0])
        variance = layer.running_var.data(contexts[0])
        with autograd.record():
            y = layer(mx.nd.array(values, ctx=contexts[0]))
        found[name] = [float(variance.asscalar())]
        y.backward()
        mx.nd.waitall()
        found[name].append(float(variance.asscalar()))
    return found


def overlap(contexts: Sequence[mx.Context], scale: float) -> Dict[str, float]:
    """Return the times of a step, of its passes alone, and of its sums and update alone; overlap makes the step shorter."""
    net = nn.HybridSequential()
    width = int(1024 * scale)
    for _ in range(16):
        net.add(nn.Dense(width, in_units=width, activation="relu"))
    net.initialize(ctx=list(contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer, loss = mgpu.Trainer(net, "sgd", {"learning_rate": 1e-6}), gluon.loss.L2Loss()
    X = [mx.nd.ones((int(256 * scale), width), ctx=context) for context in contexts]

    def passes() -> None:
        with autograd.record():
            losses = [loss(net(x), x) for x in X]
        trainer.backward(losses)

    def step() -> None:
        passes()
        trainer.step(len(X) * len(X[0]))

    found = {
        "step": seconds(step),
        "passes": seconds(passes),
        "update": seconds(lambda: trainer.step(len(X) * len(X[0])), passes),
    }
    return {**found, "hidden": found["passes"] + found["update"] - found["step"]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
