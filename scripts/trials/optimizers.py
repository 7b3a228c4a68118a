"""Optimizers of random options against gluon.Trainer on one device, with layers left out, and with states that are resumed."""

from __future__ import annotations

import os
import random
import tempfile
from functools import partial
from typing import Any, Dict, List, Optional, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

_SCHEDULES: Dict[str, Any] = {
    "none": lambda: None,
    "factor": lambda: mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.05),
    "multifactor": lambda: mx.lr_scheduler.MultiFactorScheduler(step=[2, 3, 6], factor=0.3, base_lr=0.05),
    "poly": lambda: mx.lr_scheduler.PolyScheduler(max_update=20, base_lr=0.05, warmup_steps=3, warmup_begin_lr=0.01),
    "cosine": lambda: mx.lr_scheduler.CosineScheduler(max_update=9, base_lr=0.05),
}
_OPTIONS: Dict[str, Tuple[str, ...]] = {
    "sgd": ("momentum",),
    "nag": ("momentum",),
    "lars": ("momentum",),
    "lbsgd": ("momentum", "warmup_strategy", "batch_scale"),
    "signum": ("momentum",),
}
_VALUES: Dict[str, List[Any]] = {
    "momentum": [0.0, 0.9],
    "warmup_strategy": ["linear", "power2", "sqrt", "lars"],
    "batch_scale": [1, 2, 3],
}
_NOISY = ("sgld",)  # k devices draw other numbers than one
_REFUSED = ("test",)  # it is not an optimizer


def trial(seed: int) -> str:
    """Return how the weights differ from those of `gluon.Trainer` on one device."""
    draw = random.Random(seed)
    name = draw.choice([name for name in sorted(mx.optimizer.Optimizer.opt_registry) if name not in _REFUSED])
    options: Dict[str, Any] = {"learning_rate": draw.choice([0.1, 0.01]), "wd": draw.choice([0.0, 0.0, 0.1])}
    options.update({option: draw.choice(_VALUES[option]) for option in _OPTIONS.get(name, ())})
    if draw.random() < 0.3:
        options["clip_gradient"] = 0.05
    if draw.random() < 0.3:
        options["multi_precision"] = True
    if name == "groupadagrad":
        options["wd"] = 0.0
    schedule, num_layers = draw.choice(sorted(_SCHEDULES)), draw.choice([2, 5, 12])
    if name == "sgld":
        schedule = "none"  # it fails at a rate of 0
    begin, num_devices, is_np = draw.choice([0, 7, 97]), draw.choice([1, 1, 2, 3]), draw.random() < 0.5
    steps = [draw.sample(range(num_layers), draw.randint(1, num_layers)) for _ in range(10)]
    if draw.random() < 0.6:
        steps = [list(range(num_layers))] * 10
    resumed = draw.choice([None, None, "ours", "gluon's", "to gluon"])
    if resumed in ("gluon's", "to gluon") and any(len(taking_part) < num_layers for taking_part in steps):
        num_devices = 1  # Gluon applies stale gradients on several
    bias = name != "groupadagrad" and draw.random() < 0.7
    label = f"{name} {options} {schedule}, {num_layers} layers from {begin}, {num_devices} devices, np {is_np}, {resumed}, {bias}"
    if is_np:
        mx.npx.set_np()
    try:
        run = partial(_run, name, options, schedule, num_layers, begin, steps, bias)
        theirs = run(1, "gluon", "gluon" if resumed else None)
        if theirs is None:
            return ""
        middle = {"ours": ("ours", "ours"), "gluon's": ("gluon", "ours"), "to gluon": ("ours", "gluon"), None: ("ours", None)}
        ours = run(num_devices, *middle[resumed])
    finally:
        mx.npx.reset_np()
    if ours is None:
        return f"seed {seed}: {label}: refused"
    if not all(np.isfinite(one).all() for one in theirs):
        return ""
    largest = max(float(np.abs(one - other).max()) for one, other in zip(theirs, ours))
    if not largest <= (0.0 if num_devices == 1 else 1e-5) and not (num_devices > 1 and name in _NOISY):
        return f"seed {seed}: {label}: {largest:.2e}"
    return ""


def _run(
    name: str,
    options: Dict[str, Any],
    schedule: str,
    num_layers: int,
    begin: int,
    steps: List[List[int]],
    bias: bool,
    num_devices: int,
    trainers: str,
    then: Optional[str],
) -> Optional[List[np.ndarray]]:
    """Return the weights after these steps, whose lists say which layers take part; None where Gluon raises."""
    ctx = [mx.cpu(i) for i in range(num_devices)]
    layers = [nn.Dense(3, in_units=3, use_bias=bias, prefix=f"dense{begin + i}_") for i in range(num_layers)]
    net = nn.HybridSequential(prefix="")
    net.add(*layers)
    mx.random.seed(3)
    net.initialize(mx.init.Uniform(1.0), ctx=ctx)
    numbers = np.random.RandomState(5)

    def make(kind: str) -> Any:
        known = {**options, **({} if schedule == "none" else {"lr_scheduler": _SCHEDULES[schedule]()})}
        if schedule != "none":
            known.pop("learning_rate")
        made = gluon.Trainer if kind == "gluon" else mgpu.Trainer
        return made(net.collect_params() if kind == "gluon" else net, name, known)

    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    trainer: Any = make(trainers)
    mx.random.seed(9)
    for at, taking_part in enumerate(steps):
        if at == 5 and then is not None:
            with tempfile.TemporaryDirectory() as folder:
                fname = os.path.join(folder, "states")
                trainer.save_states(fname)
                trainer = make(then)
                trainer.load_states(fname)
        X = numbers.uniform(-1, 1, (6, 3)).astype("float32")
        with autograd.record():
            losses = []
            for part, context in zip(np.array_split(X, num_devices), ctx):
                x = array(part, ctx=context)
                for i in taking_part:
                    x = layers[i](x)
                losses.append((x * x).sum())
        autograd.backward(losses)
        try:
            trainer.step(6, ignore_stale_grad=True)
        except Exception:
            if trainers == "gluon" and then in (None, "gluon"):
                return None
            raise
    return [param.list_data()[-1].asnumpy() for param in net.collect_params().values()]
