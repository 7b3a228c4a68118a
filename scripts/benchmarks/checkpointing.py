"""The cost of checkpoints for the training loop: steps with a checkpoint compared with their neighbours in one fit()."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import report
from case import Case
from gluon_mgpu.checkpoint.rotation import CheckpointRotation, Write
from gluon_mgpu.loop.callbacks import Callback, Checkpoint, FitState
from measure import NUM_CLASSES, inputs
from mxnet import Context, gluon, init
from report import Spread, Table, interval
from workloads import TRAIN

NONE, BACKGROUND, IN_LOOP = WAYS = ("none", "background", "in the loop")
TARGET_SHARE = 0.02  # of the time of training
_MINUTE_S = 60.0


@dataclass(frozen=True)
class Cost:
    """The extra time of a lap over the mean of the previous and the next lap, which have no checkpoint. A lap is some steps.

    Attributes
    ----------
    way : str
        One of `WAYS`. `none` is a lap without a checkpoint: its extra time is noise.
    num_contexts : int
    step_s : float, seconds
        Time per step of the two neighbours.
    wall_s, cpu_s : float, seconds
        The extra time. CPU time is that of all threads of this process.
    held_s : float, seconds
        How long saving blocked the loop's thread, with the devices idle.
    writing_s, writing_cpu_s : float, seconds
        Time until the files were on the disk, and CPU time of the thread that wrote them.
    is_late : bool
        Whether the files were still being written when the lap ended, which spoils the measurement.
    """

    way: str
    num_contexts: int
    step_s: float
    wall_s: float
    cpu_s: float
    held_s: float = 0.0
    writing_s: float = 0.0
    writing_cpu_s: float = 0.0
    is_late: bool = False


def measure(
    contexts: Sequence[Context],
    *,
    rounds: int = 25,
    every: int = 5,
    case: Case = TRAIN,
    folder: Optional[Path] = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> List[Cost]:
    """Return the extra time that checkpoints add to steps of ResNet-18; all ways take turns within one run.

    ```
    warm up │ none │ background │ none │ none │ none │ in the loop │ none │ in the loop │ none │ none │ none │ background │ ...
                   └─ a lap: `every` steps, and the checkpoint before the first of them
    ```

    Each lap is compared with its two neighbours, so that a machine that is slower for some seconds, or becomes slower, does
    not spoil it. The checkpoint at the end of `fit` does not count: there is one per run.

    Parameters
    ----------
    contexts : list of mxnet.Context
        Give each one thread: threads that spin would count as CPU time.
    rounds : int
        Laps of each way; every other round goes through the ways in reverse order.
    every : int
        Steps of a lap. A lap must take longer than writing.
    case : Case
        Only its `batch_size` and `image_size` are used.
    folder : pathlib.Path, optional
        A folder on the disk to write to; by default the one of temporary files.
    on_message : callable (str)
        Called with the current activity.
    """
    net = mgpu.models.resnet18(NUM_CLASSES)
    net.initialize(init.Xavier(), ctx=list(contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    # A learning rate at which no batch, however small, overflows.
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1e-5, "momentum": 0.9})
    ways = [NONE, NONE]
    for number in range(rounds):
        ways += [lap for way in (WAYS[::-1] if number % 2 else WAYS) for lap in (way, NONE)]
    num_contexts, laps_of_round = len(contexts), 2 * len(WAYS)

    def on_lap(lap: int) -> None:
        if lap > 1 and (lap - 2) % laps_of_round == 0 and lap < len(ways):
            on_message(f"round {(lap - 2) // laps_of_round + 1} of {rounds} with {_counted(num_contexts)}")

    with tempfile.TemporaryDirectory(dir=folder) as place:
        savings = {way: _Saving(Path(place, way), background=way == BACKGROUND) for way in (BACKGROUND, IN_LOOP)}
        laps = _Laps(ways, every, savings, on_lap)
        batches = inputs(case)[:1] * (every * len(ways))
        mgpu.fit(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, batches, epochs=1, metrics=(), callbacks=[laps])
    return laps.costs(num_contexts)


def tables(found: Sequence[Cost]) -> List[Table]:
    """Return two tables for each number of contexts: the time a checkpoint adds, and its parts."""
    groups = _groups(found)
    return [made for group, ways in groups.items() for made in (_cost_table(group, ways), _parts_table(group, ways))]


def _cost_table(group: str, ways: Dict[str, List[Cost]]) -> Table:
    """Return the table of the added time, its share with one checkpoint per minute, and the interval for `TARGET_SHARE`."""
    lines = []
    for way, those in ways.items():
        added = _added(those)
        apart = "-" if way == NONE else _format(added, 1 / TARGET_SHARE, 1, least=0.0)
        lines.append([way, _format(added, 1e3), _format(added, 100 / _MINUTE_S, 2), apart])
    every = [one for those in ways.values() for one in those]
    num_laps = len(every) // len(WAYS)
    step_ms = median(one.step_s for one in every) * 1e3
    title = (
        f"{group}: the time a checkpoint adds to steps of {step_ms:.0f} ms, {num_laps} laps each:\n"
        f"the median, and {'its 95 % confidence interval' if num_laps > 5 else 'the range: too few for an interval'}"
    )
    return title, ["checkpoints", "ms added", "% of a minute", f"s apart for {TARGET_SHARE:.0%}"], lines


def _parts_table(group: str, ways: Dict[str, List[Cost]]) -> Table:
    """Return the table of CPU time, of how long the loop is blocked, and of the time to write."""
    lines = []
    for way, those in ways.items():
        parts = [
            f"{median(times) * 1e3:.0f}" for times in zip(*((one.held_s, one.writing_s, one.writing_cpu_s) for one in those))
        ]
        cpu = _format(interval([one.cpu_s for one in those]), 1e3)
        lines.append([way, cpu, *(["-"] * len(parts) if way == NONE else parts), str(sum(one.is_late for one in those))])
    title = f"{group}: ms of CPU time a checkpoint adds in all threads, and its parts: medians"
    return title, ["checkpoints", "CPU", "loop blocked", "writing", "CPU of writing", "late"], lines


def results(found: Sequence[Cost], made: Sequence[Table], *, rounds: int, every: int) -> Dict[str, Any]:
    """Return the content of the JSON file."""
    common = report.results("checkpoint", [], rounds=rounds, tables=made)
    return {**common, "reference": NONE, "every": every, "costs": [asdict(one) for one in found]}


def ranges(found: Sequence[Cost]) -> Dict[str, Dict[str, Tuple[float, float, float]]]:
    """Return the median milliseconds that a checkpoint adds and their interval, for `plot_ranges`."""
    bars: Dict[str, Dict[str, Tuple[float, float, float]]] = {}
    for group, ways in _groups(found).items():
        for way, those in ways.items():
            added = _added(those)
            bars.setdefault(group, {})[way] = (added.median * 1e3, added.low * 1e3, added.high * 1e3)
    return bars


def _groups(found: Sequence[Cost]) -> Dict[str, Dict[str, List[Cost]]]:
    """Return costs by number of contexts and by way."""
    return {
        _counted(n): {way: [one for one in found if (one.num_contexts, one.way) == (n, way)] for way in WAYS}
        for n in sorted({one.num_contexts for one in found})
    }


def _counted(num_contexts: int) -> str:
    return f"{num_contexts} context{'s' if num_contexts > 1 else ''}"


def _added(costs: Sequence[Cost]) -> Spread:
    return interval([one.wall_s for one in costs])


def _format(one: Spread, factor: float, digits: int = 0, *, least: float = float("-inf")) -> str:
    rounded = [round(max(least, value * factor), digits) + 0.0 for value in (one.median, one.low, one.high)]  # -0.0 + 0.0 is 0.0
    middle, low, high = (f"{value:.{digits}f}" for value in rounded)
    return f"{middle} ({low} to {high})"


class _Mark(NamedTuple):
    """The clocks between two laps, and whether a checkpoint is still being written."""

    wall_s: float
    cpu_s: float
    is_late: bool


class _Laps(Callback):
    """Reads the clocks between two laps, and saves the checkpoint with which the next lap begins."""

    def __init__(self, ways: Sequence[str], every: int, savings: Dict[str, _Saving], on_lap: Callable[[int], None]) -> None:
        self._ways, self._every, self._savings, self._on_lap = ways, every, savings, on_lap
        self._marks: List[_Mark] = []  # at the end of each lap
        self._held: Dict[int, float] = {}  # seconds, by the lap that begins with the checkpoint

    def on_fit_begin(self, state: FitState) -> None:
        for saving in self._savings.values():
            saving.on_fit_begin(state)

    def on_batch_end(self, state: FitState) -> None:
        lap, rest = divmod(state.step, self._every)
        if rest:
            return
        is_late = any(saving.rotation.is_writing for saving in self._savings.values())
        self._marks.append(_Mark(time.perf_counter(), time.process_time(), is_late))
        self._on_lap(lap)
        saving = self._savings.get(self._ways[lap]) if lap < len(self._ways) else None
        if saving is not None:
            mx.nd.waitall()  # as saving does for running statistics: from here on the devices are idle
            began = time.perf_counter()
            saving.on_batch_end(state)
            self._held[lap] = time.perf_counter() - began

    def on_fit_end(self, state: FitState) -> None:
        for saving in self._savings.values():
            saving.on_fit_end(state)

    def costs(self, num_contexts: int) -> List[Cost]:
        """Return the extra time of each lap that lies between two laps without a checkpoint."""
        writings = {way: iter(saving.rotation.writings) for way, saving in self._savings.items()}
        marks, found = self._marks, []
        for lap in range(2, len(self._ways) - 1, 2):
            way = self._ways[lap]
            wall_s, cpu_s = (
                [after[clock] - before[clock] for before, after in zip(marks[lap - 2 : lap + 1], marks[lap - 1 : lap + 2])]
                for clock in (0, 1)
            )
            writing_s, writing_cpu_s = next(writings[way]) if way in writings else (0.0, 0.0)
            found.append(
                Cost(
                    way,
                    num_contexts,
                    step_s=(wall_s[0] + wall_s[2]) / 2 / self._every,
                    wall_s=_extra(wall_s),
                    cpu_s=_extra(cpu_s),
                    held_s=self._held.get(lap, 0.0),
                    writing_s=writing_s,
                    writing_cpu_s=writing_cpu_s,
                    is_late=marks[lap].is_late,
                )
            )
        return found


def _extra(three: Sequence[float]) -> float:
    return three[1] - (three[0] + three[2]) / 2


class _Saving(Checkpoint):
    """Saves when called within an epoch, and not at its end."""

    def __init__(self, folder: Path, *, background: bool) -> None:
        super().__init__(folder, None, every=1, background=background)
        self._rotation = self.rotation = _TimedRotation(folder, background=background)

    def on_epoch_end(self, state: FitState) -> None:
        pass


class _TimedRotation(CheckpointRotation):
    """Records the time to write each folder.

    Attributes
    ----------
    writings : list of (float, float), seconds
        Time until it was on the disk, and CPU time of the thread that wrote it.
    is_writing : bool
    """

    def __init__(self, folder: Path, *, background: bool) -> None:
        super().__init__(folder, background=background)
        self.writings: List[Tuple[float, float]] = []
        self.is_writing = False

    def put(self, write: Write, step: int, *, is_best: bool = False, num_bytes: int = 0) -> None:
        self.wait()  # for the previous checkpoint: its end resets `is_writing`
        self.is_writing = True
        super().put(write, step, is_best=is_best, num_bytes=num_bytes)

    def _put(self, write: Write, step: int, is_best: bool) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        super()._put(write, step, is_best)
        self.writings.append((time.perf_counter() - began, time.thread_time() - cpu))
        self.is_writing = False
