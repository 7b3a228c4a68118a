"""Training ResNet-18 on several contexts and in several processes, one thread each. This file is also the measured program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, Sequence

from report import Table, ranged, spread

_SHARD, _WARM_UP_STEPS, _LIMIT_S = 64, 3, 600


@dataclass
class Row:
    """One way to use several devices.

    Attributes
    ----------
    label : str
    num_contexts, num_processes : int
        Contexts of each process, and processes.
    options : list of str
        Of `gluon-mgpu launch`.
    images_per_s : list of float
        One figure per round, over all devices; each device has 64 images a step.
    """

    label: str
    num_contexts: int = 1
    num_processes: int = 1
    options: List[str] = field(default_factory=list)
    images_per_s: List[float] = field(default_factory=list)


def scaling_rows(num_processes: Sequence[int], *, with_horovod: bool = False) -> List[Row]:
    """Return the rows: one context, then for each number contexts, processes with dist_sync, and with Horovod."""
    rows = [Row("1 context")]
    for n in num_processes:
        rows += [Row(f"{n} contexts", num_contexts=n), Row(f"{n} processes, dist_sync", num_processes=n)]
        if with_horovod:
            rows.append(Row(f"{n} processes, horovod", num_processes=n, options=["--backend", "horovod"]))
    return rows


def measure(rows: Sequence[Row], *, rounds: int, steps: int, on_message: Callable[[str], None]) -> None:
    """Add each round's figure to the rows; every other round goes through them in reverse order."""
    for number in range(rounds):
        for row in rows if number % 2 == 0 else list(rows)[::-1]:
            on_message(f"round {number + 1} of {rounds}: {row.label}")
            row.images_per_s.append(_run(row, steps))


def table(rows: Sequence[Row]) -> Table:
    """Return the table of images per second, and of the rounds' ratios to one context."""
    one = rows[0].images_per_s
    lines = []
    for row in rows:
        speed_ups = [several / alone for several, alone in zip(row.images_per_s, one)]
        lines.append([row.label, ranged(spread(row.images_per_s)), ranged(spread(speed_ups))])
    return "ResNet-18, 64 images of 28 x 28 per device: median (range)", ["on", "images/s", "speed-up"], lines


def _run(row: Row, steps: int) -> float:
    launcher = ["-m", "gluon_mgpu", "launch", "-n", str(row.num_processes), *row.options] if row.num_processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        program = [__file__, str(row.num_contexts), str(steps), str(result)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, *program]
        ended = subprocess.run(command, env=environ, cwd=folder, timeout=_LIMIT_S, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{row.label}: ended with {ended.returncode}\n{ended.stderr[-2000:]}")
        found: Dict[str, float] = json.loads(result.read_text())
    return found["images_per_s"]


def main(num_contexts: int, steps: int, result: Path) -> None:
    """Train in this process; rank 0 writes the images per second of all processes."""
    import gluon_mgpu as mgpu
    import mxnet as mx
    import numpy as np
    from mxnet import gluon, init

    process = mgpu.distributed.this_process()
    with mgpu.use_devices(f"cpu*{num_contexts}") as ctx:
        net = mgpu.models.resnet18(10)
        net.initialize(init.Xavier(), ctx=ctx)
        net.hybridize(static_alloc=True, static_shape=True)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01, "momentum": 0.9})
        batch_size = _SHARD * num_contexts * process.num_processes
        X = np.random.RandomState(0).uniform(-1, 1, (batch_size, 1, 28, 28)).astype("float32")
        y = np.arange(batch_size) % 10
        for step in range(_WARM_UP_STEPS + steps):
            if step == _WARM_UP_STEPS:
                mx.nd.waitall()
                begun = time.perf_counter()
            mgpu.train_batch(net, loss, trainer, X, y)
        mx.nd.waitall()
        if process.rank == 0:
            result.write_text(json.dumps({"images_per_s": steps * batch_size / (time.perf_counter() - begun)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
