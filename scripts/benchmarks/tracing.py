"""What a Trace costs a run: in its steps, and in those before and after."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Callable, Dict, List, Sequence, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import Context, gluon, init
from with_mxnet import mlp

_LAYERS, _UNITS, _BATCH_SIZE = 31, 32, 64  # the network of `step`: its steps are short, so what each of them adds shows
WARM_UP, PARTS = 20, ("before", "in", "after")

Found = Dict[str, List[float]]  # seconds per step of each part of a run, one per round; the traced ones end in `traced`


def measure(
    contexts: Sequence[Context], *, rounds: int, num_steps: int, on_message: Callable[[str], None] = lambda text: None
) -> Found:
    """Return the training thread's CPU seconds per step before, in and after a trace, and without one, in turns."""
    found: Found = {f"{part}{kind}": [] for part in PARTS for kind in ("", " traced")}
    rng = np.random.RandomState(0)
    X, y = rng.randn(_BATCH_SIZE, _UNITS).astype("float32"), rng.randint(0, 10, _BATCH_SIZE).astype("float32")
    data = [(mx.nd.array(X), mx.nd.array(y))] * (WARM_UP + 3 * num_steps)
    net = mlp(_LAYERS, _UNITS)
    net.initialize(init.Xavier(), ctx=list(contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            on_message(f"trace: round {number + 1} of {rounds}")
            for traced in (False, True) if number % 2 else (True, False):
                clock = _Clock(WARM_UP, num_steps)
                trace = mgpu.Trace(Path(folder) / "trace.json", warm_up=WARM_UP + num_steps, steps=num_steps) if traced else None
                mgpu.fit(net, loss, trainer, data, epochs=1, metrics=(), callbacks=[clock], trace=trace)
                for part, seconds in zip(PARTS, clock.seconds()):
                    found[f"{part}{' traced' if traced else ''}"].append(seconds)
    return found


class _Clock(mgpu.Callback):
    """Takes the CPU time of the training thread in three parts of a run, which other programs of the machine change little.

    What a trace does between its last step and the next is in none of them.
    """

    def __init__(self, first: int, num_steps: int) -> None:
        # the profiler starts five steps before the trace; two steps are left out on each side of a border
        self._borders = [first, first + num_steps - 7, first + num_steps, first + 2 * num_steps]
        self._borders += [first + 2 * num_steps + 2, first + 3 * num_steps]
        self._number = 0
        self._times: List[float] = []

    def on_batch_end(self, state: Any) -> None:
        self._number += 1
        if self._number in self._borders:
            self._times.append(time.thread_time())

    def seconds(self) -> List[float]:
        """Return the seconds per step of each part."""
        spans = zip(self._times[::2], self._times[1::2], self._borders[::2], self._borders[1::2])
        return [(end - begin) / (last - first) for begin, end, first, last in spans]


def table(found: Found) -> Tuple[str, List[str], List[List[str]]]:
    """Return title, columns and rows: for each part the medians, and the ratio over the rounds with its quartiles."""
    rows = []
    for part in PARTS:
        without, traced = found[part], found[f"{part} traced"]
        ratios = [one / other for one, other in zip(traced, without)]
        quarter, _, three_quarters = quantiles(ratios)
        times = [f"{1e3 * median(times):.3f}" for times in (without, traced)]
        rows.append([f"{part} the trace", *times, f"{median(ratios):.3f} ({quarter:.3f} to {three_quarters:.3f})"])
    columns = ["steps", "without a trace", "with it", "with / without (quartiles)"]
    return "CPU ms of the training thread per step, with a trace and without", columns, rows


def results(found: Found, *, rounds: int, num_steps: int) -> Dict[str, Any]:
    """Return what the JSON file holds."""
    return {"command": "python scripts/benchmarks trace", "rounds": rounds, "num_steps": num_steps, "seconds": found}
