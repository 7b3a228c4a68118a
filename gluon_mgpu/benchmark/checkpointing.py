"""What checkpoints cost the training loop: steps after a checkpoint beside as many that follow these, within one run of fit()."""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from mxnet import Context, gluon, init

from ..callbacks import Callback, Checkpoint, FitState
from ..fit import fit
from ..models.resnet import resnet18
from ..trainer import Trainer
from . import report
from .case import Case
from .measure import NUM_CLASSES, inputs
from .report import Table, ranged, spread
from .workloads import TRAIN

NONE, BACKGROUND, IN_LOOP = WAYS = ("none", "background", "in the loop")
ASK = 0.02  # of the time of training, at most
_THREAD = "gluon_mgpu checkpoint"  # as `Shelf` calls it


@dataclass(frozen=True)
class Pair:
    """So many steps right after a checkpoint, and as many that follow them.

    Attributes
    ----------
    way : str
        `none` is a pair without a checkpoint: what it adds is noise.
    with_s, without_s : float, seconds
    is_late : bool
        Whether the checkpoint was still being written in the second half, which makes its cost look smaller.
    """

    way: str
    with_s: float
    without_s: float
    is_late: bool

    @property
    def cost_s(self) -> float:
        """The seconds that the checkpoint adds; less than none is noise."""
        return self.with_s - self.without_s


def measure(
    contexts: Sequence[Context],
    *,
    rounds: int = 2,
    every: int = 10,
    num_checkpoints: int = 5,
    case: Case = TRAIN,
    folder: Optional[Path] = None,
    tell: Callable[[str], None] = lambda text: None,
) -> List[Pair]:
    """Return what checkpoints add to steps of ResNet-18, each way in turns.

    ```
    2 x every steps │ checkpoint │ every steps │ every steps │ checkpoint │ every steps │ every steps │ ...
                    └──── with_s ──────────────┘└─ without_s ─┘
    ```

    A pair is measured within seconds, so that a machine that slows down from minute to minute does not spoil it. What `fit`
    saves at its end is not counted: it comes once a run.

    Parameters
    ----------
    contexts : list of mxnet.Context
    rounds : int
        Runs of each way; every other one goes through the ways backwards.
    every, num_checkpoints : int
        Steps of half a pair, which must take longer than writing, and pairs of a run.
    case : Case
        Its `batch_size` and `image_size`.
    folder : pathlib.Path, optional
        On the disk to write to; by default where temporary files go.
    tell : callable (str)
    """
    net = resnet18(NUM_CLASSES)
    net.initialize(init.Xavier(), ctx=list(contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    batches = inputs(case)[:1] * (2 * every * (num_checkpoints + 1))
    found = []
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            tell(f"round {number + 1} of {rounds}: checkpoints {way}")
            with tempfile.TemporaryDirectory(dir=folder) as place:
                saving = [] if way == NONE else [Checkpoint(place, None, every=2 * every, background=way == BACKGROUND)]
                halves = _Halves(every)
                loss = gluon.loss.SoftmaxCrossEntropyLoss()
                fit(net, loss, trainer, batches, epochs=1, metrics=(), callbacks=[halves, *saving])
                found += halves.pairs(way)
    return found


def table(found: Sequence[Pair], every: int) -> Table:
    """Return milliseconds of a step, what a checkpoint adds, and how far apart checkpoints must be for what is asked."""
    lines = []
    for way in WAYS:
        costs = [one.cost_s for one in found if one.way == way]
        steps = [one.without_s / every for one in found if one.way == way]
        apart = "-" if way == NONE else f"{max(0.0, median(costs)) / ASK:.1f}"
        added = f"{median(costs) * 1e3:.0f} ({min(costs) * 1e3:.0f} to {max(costs) * 1e3:.0f})"
        late = sum(one.is_late for one in found if one.way == way)
        lines.append([way, ranged(spread(steps), 1e3), added, apart, str(late)])
    title = f"ResNet-18: {every} steps after a checkpoint, and {every} that follow: median (range)"
    return title, ["checkpoints", "ms a step", "ms it adds", f"s apart for {ASK:.0%}", "late"], lines


def results(found: Sequence[Pair], made: Table, every: int, rounds: int) -> Dict[str, Any]:
    """Return what the JSON file holds."""
    told = report.results("checkpoint", [], rounds=rounds, tables=[made])
    return {**told, "reference": NONE, "every": every, "pairs": [{**asdict(one), "cost_s": one.cost_s} for one in found]}


def ranges(found: Sequence[Pair]) -> Dict[str, Dict[str, Tuple[float, float, float]]]:
    """Return median, lowest and highest milliseconds that a checkpoint adds in each way: what `plots.plot_ranges` takes."""
    bars = {}
    for way in WAYS:
        costs = [one.cost_s * 1e3 for one in found if one.way == way]
        bars[way] = (median(costs), min(costs), max(costs))
    return {"a checkpoint": bars}


class _Halves(Callback):
    """Notes the time after every so many steps, if it stands before what saves then."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._times: List[float] = []
        self._late: List[bool] = []

    def on_batch_end(self, state: FitState) -> None:
        if state.step % self._every == 0:
            self._times.append(time.perf_counter())
            self._late.append(any(thread.name == _THREAD for thread in threading.enumerate()))

    def pairs(self, way: str) -> List[Pair]:
        # The first two halves warm up; the third begins with the first checkpoint.
        borders = range(1, len(self._times) - 2, 2)
        times, late = self._times, self._late
        return [Pair(way, times[i + 1] - times[i], times[i + 2] - times[i + 1], late[i + 1]) for i in borders]
