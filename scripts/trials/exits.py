"""Small launched scripts that end in many ways: those that end well do, all of them; a failure is reported, and ends the job.

gluon-mgpu launch -n 2|3 script.py              loops by hand, fit, saves of rank 0, ranks that end at different times
gluon-mgpu launch -n 2 gluon-mgpu train resnet18 ...
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple

BOUND_S = 150.0  # a busy machine takes a minute to import and train; a job that hangs is ended after 30 s without a computation
BEGIN = """
import atexit, os, sys, threading, time
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, init

ctx = mgpu.resolve_devices("cpu:{devices}")
rank = mgpu.this_process().rank
mx.random.seed(0)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense({width}, in_units=32, activation="relu"), gluon.nn.Dense(4, in_units={width}))
net.initialize(init.Xavier(), ctx=ctx)
trainer = mgpu.Trainer(net, "{optimizer}", {{"learning_rate": 0.01}})
entropy = gluon.loss.SoftmaxCrossEntropyLoss()
generator = np.random.RandomState(0)
batches = [(generator.normal(size=({batch}, 32)).astype("float32"), generator.randint(0, 4, {batch})) for _ in range({steps})]

def loop():
    for X, y in batches:
        Xs, ys = mgpu.split_batch(X, y, ctx)
        with autograd.record():
            losses = [entropy(net(x), label) for x, label in zip(Xs, ys)]
        mgpu.backward(losses)
        trainer.step(len(X))
"""
TRAINS = {
    "by hand": "loop()",
    "train_batch": "for X, y in batches:\n    mgpu.train_batch(net, entropy, trainer, X, y)",
    "fit": "mgpu.fit(net, entropy, trainer, batches, batches[:1], epochs=2, callbacks=[mgpu.Checkpoint('run', monitor=None)])",
    "in a thread": "thread = threading.Thread(target=loop)\nthread.start()",
    "at exit": "atexit.register(loop)",
}
WELL = {
    "nothing": "",
    "rank 0 saves": "if not rank:\n    net.save_parameters('net.params')",
    "rank 0 saves, sleeps": "if not rank:\n    net.save_parameters('net.params')\n    time.sleep(3)",
    "others sleep": "time.sleep(2 * rank)",
    "sys.exit(0)": "sys.exit(0)",
    "sys.exit()": "if rank:\n    sys.exit()",
    "an exit handler reads": "atexit.register(lambda: print('sum', sum(float(p.data(ctx[0]).sum().asscalar()) "
    "for p in net.collect_params().values())))",
    "an exit handler saves": "atexit.register(lambda: rank or net.save_parameters('net.params'))",
    "a thread saves": "thread2 = threading.Thread(target=lambda: rank or net.save_parameters('net.params'))\nthread2.start()",
    "an exit handler works alone": "atexit.register(lambda: mx.nd.ones((300, 300)).dot(mx.nd.ones((300, 300))) and None)",
    "a daemon thread": "threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()",
    "more work that nobody reads": "for _ in range(30):\n    work = mx.nd.dot(mx.nd.ones((400, 400)), mx.nd.ones((400, 400)))",
    "an error that was read": "try:\n    mx.nd.linalg.potrf(-mx.nd.ones((2, 2))).asnumpy()\nexcept mx.MXNetError:\n    pass",
}
BAD: Dict[str, Tuple[str, int, str]] = {
    "an exception in one rank": ("if rank == {one}:\n    raise ValueError('of rank {one}')", 1, "ValueError: of rank {one}"),
    "a status of one rank": ("if rank == {one}:\n    sys.exit(7)", 7, "rank {one} exited with status 7"),
    "an error that nobody has read": (
        "if rank == {one}:\n    failing = mx.nd.linalg.potrf(-mx.nd.ones((2, 2)))",
        1,
        "An operation failed after the program had last waited",
    ),
}


def trial(seed: int) -> str:
    """Launch one script, or the training command; return the error, "" if there is none."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="trial-exits-"))
    try:
        return _train(rng, folder, seed) if rng.random() < 0.15 else _script(rng, folder, seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _script(rng: random.Random, folder: Path, seed: int) -> str:
    num = rng.choice([2, 2, 3])
    how, one = rng.choice(list(TRAINS)), rng.randrange(num)
    sizes = {"devices": rng.choice([1, 1, 2]), "width": rng.choice([8, 256, 1024]), "batch": rng.choice([4, 30, 128])}
    text = BEGIN.format(optimizer=rng.choice(["sgd", "adam"]), steps=rng.choice([1, 5, 30]), **sizes) + TRAINS[how] + "\n"
    expected, expected_text = 0, ""
    if rng.random() < 0.25:  # an error that surfaces in an exit handler is printed by Python, and does not fail the program
        end = rng.choice(list(BAD)[: 2 if how == "at exit" else 3])
        code, expected, expected_text = BAD[end]
        text, expected_text = text + code.format(one=one), expected_text.format(one=one)
    else:
        apart = [end for end in WELL if how != "in a thread" or end in ("nothing", "others sleep", "sys.exit(0)")]
        end = " and ".join(rng.sample(apart, rng.choice([1, 1, 2])))
        text += "\n".join(WELL[part] for part in end.split(" and "))
    (folder / "script.py").write_text(text + "\n", encoding="utf-8")
    return _launch(
        folder, f"seed {seed}: -n {num}, {how}, {end}, {sizes}", ["-n", str(num), "script.py"], expected, expected_text
    )


def _train(rng: random.Random, folder: Path, seed: int) -> str:
    more = rng.choice([[], ["--checkpoint-every", "2"], ["--lr", "0.05"]])
    program = ["gluon-mgpu", "train", "resnet18", "--epochs", "1", "--batch-size", "512", "--devices", "cpu:1", "--output", "out"]
    return _launch(folder, f"seed {seed}: -n 2 {' '.join([*program, *more])}", ["-n", "2", *program, *more], 0, "")


def _launch(folder: Path, name: str, arguments: List[str], expected: int, expected_text: str) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GLUON_MGPU_", "DMLC_"))}
    began = time.monotonic()
    code: Optional[int] = None
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gluon_mgpu", "launch", "--log-dir", "logs", *arguments],
            cwd=folder,
            env={**environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
        try:
            code = process.wait(timeout=BOUND_S * (4 if "train resnet18" in name else 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    text = (folder / "output").read_text(errors="replace")
    if code == expected and expected_text in text:
        return ""
    what = "does not end" if code is None else f"ended with {code}, expected {expected} and {expected_text!r}"
    return f"{name}: {what} after {time.monotonic() - began:.0f} s\n{text[-3000:]}"
