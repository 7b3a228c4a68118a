"""Draw docs/images/same.png, the picture of the README, from short trainings: python scripts/picture.py

A small LeNet learns scikit-learn's digits. Left: the loss with `Trainer(virtual_shards=4)` on 1, 2 and 4 CPU contexts,
and of a run that is stopped on 4 contexts and resumed on 2. Right: weights compared with those on one context, for
Gluon's loop and for `Trainer`. There, the last batch of each epoch holds one image, so that one context has none.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, List, Optional, Tuple

import gluon_mgpu as mgpu
import numpy as np
from mxnet import autograd, gluon, init, nd

EPOCHS, BATCH_SIZE, STOP = 4, 64, 35
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
PATH = Path(__file__).parent.parent / "docs" / "images" / "same.png"


def lenet(ctx: List[Any]) -> Any:
    """Return the same initial network on all contexts."""
    mgpu.seed_everything(0)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            gluon.nn.Conv2D(8, 3, activation="relu"),
            gluon.nn.MaxPool2D(),
            gluon.nn.Dense(64, activation="relu"),
            gluon.nn.Dense(10),
        )
    net.initialize(init.Xavier(), ctx=ctx)
    net(nd.zeros((1, 1, 8, 8), ctx=ctx[0]))
    return net


def train(num_devices: int, kind: str, *, stop: Optional[int] = None, folder: str = "") -> Tuple[List[float], List[np.ndarray]]:
    """Return the mean loss of each batch, and the weights after each; `kind` is "gluon", "ours" or "virtual"."""
    digits = mgpu.data.load_digits()
    count = 20 * BATCH_SIZE if kind == "virtual" else 21 * BATCH_SIZE + 1
    data = mgpu.data.ArrayLoader(digits.train_images[:count], digits.train_labels[:count], BATCH_SIZE, shuffle=True)
    means, weights = [], []
    with mgpu.use_devices(f"cpu*{num_devices}", one_thread=True) as ctx:
        net = lenet(ctx)
        options = {"learning_rate": 0.05, "momentum": 0.9}
        if kind == "gluon":
            trainer = gluon.Trainer(net.collect_params(), "sgd", options)
        else:
            trainer = mgpu.Trainer(net, "sgd", options, virtual_shards=4 if kind == "virtual" else None)
        if folder and stop is None:
            mgpu.load_checkpoint(net, folder, trainer)
        for number, (X, y) in enumerate(pair for _ in range(EPOCHS) for pair in data):
            if folder and (number >= stop if stop is not None else number < STOP):
                continue
            losses = gluon_step(net, trainer, X, y, ctx) if kind == "gluon" else mgpu.train_batch(net, LOSS, trainer, X, y).losses
            means.append(float(sum(one.sum().asscalar() for one in losses)) / len(X))
            weights.append(np.concatenate([param.data(ctx[0]).asnumpy().ravel() for param in net.collect_params().values()]))
        if stop is not None:
            mgpu.save_checkpoint(net, folder, trainer)
    return means, weights


def gluon_step(net: Any, trainer: Any, X: np.ndarray, y: np.ndarray, ctx: List[Any]) -> List[Any]:
    """Make a step as Gluon's examples do; a context without an image computes nothing."""
    parts = zip(np.array_split(X, len(ctx)), np.array_split(y, len(ctx)), ctx)
    with autograd.record():
        losses = [LOSS(net(nd.array(x, ctx=one)), nd.array(t, ctx=one)) for x, t, one in parts if len(x)]
    for loss in losses:
        loss.backward()
    trainer.step(BATCH_SIZE)
    return losses


def main() -> None:
    """Train, print what the curves show, and draw them."""
    losses = {count: train(count, "virtual")[0] for count in (1, 2, 4)}
    with tempfile.TemporaryDirectory() as folder:
        train(4, "virtual", stop=STOP, folder=folder)
        resumed, _ = train(2, "virtual", folder=folder)
    print("same bits:", losses[1] == losses[2] == losses[4] and losses[1][STOP:] == resumed)
    gaps = {}
    for name, kind in (("Gluon's loop", "gluon"), ("gluon_mgpu", "ours")):
        (_, one), (_, two) = train(1, kind), train(2, kind)
        gaps[name] = [float(np.abs(a - b).max()) for a, b in zip(one, two)]
        print(f"{name}: weights differ by {gaps[name][20]:.0e} after 21 steps, by {gaps[name][-1]:.0e} after {len(one)}")
    made = mgpu.plots.figure(10, 3.6)
    left, right = made.subplots(1, 2)
    for count, width, color in ((1, 7, "#bfe3dd"), (2, 4, "#5cb8ac"), (4, 1.5, "#0b6e6e")):
        left.plot(losses[count], linewidth=width, color=color, label=f"{count} device{'s' if count > 1 else ''}")
    left.plot(
        range(STOP, STOP + len(resumed)), resumed, "--", linewidth=1.5, color="#e07b39", label="4 devices, stopped, resumed on 2"
    )
    left.axvline(STOP, color="gray", linewidth=0.8, linestyle=":")
    left.set(title="the same bits on any devices", xlabel="step", ylabel="loss", ylim=(0, None))
    for name, color in (("Gluon's loop", "#c0392b"), ("gluon_mgpu", "#0b6e6e")):
        right.plot(np.maximum(gaps[name], 1e-9), color=color, linewidth=2, label=name)
    for step in range(21, len(gaps["gluon_mgpu"]), 22):
        right.axvline(step, color="gray", linewidth=0.8, linestyle=":")
    right.set(
        title="weights: 2 devices compared with 1",
        xlabel="step (dotted: batches of one image)",
        ylabel="largest difference",
        yscale="log",
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    made.tight_layout()
    made.savefig(str(PATH), dpi=100)


if __name__ == "__main__":
    main()
