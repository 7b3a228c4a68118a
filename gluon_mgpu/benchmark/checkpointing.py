"""What checkpoints cost the training loop: steps after a checkpoint beside those before and after, within one run of fit()."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context, gluon, init

from ..checkpoint.rotation import CheckpointRotation, Write
from ..loop.callbacks import Callback, Checkpoint, FitState
from ..loop.fit import fit
from ..models.resnet import resnet18
from ..trainer.trainer import Trainer
from . import report
from .case import Case
from .measure import NUM_CLASSES, inputs
from .report import Spread, Table, interval
from .workloads import TRAIN

NONE, BACKGROUND, IN_LOOP = WAYS = ("none", "background", "in the loop")
ASK = 0.02  # of the time of training, at most
_MINUTE_S = 60.0


@dataclass(frozen=True)
class Cost:
    """What a lap, some steps, took beyond the mean of the lap before and the lap after, which have no checkpoint.

    Attributes
    ----------
    way : str
        `none` is a lap without a checkpoint, too: what it adds is noise.
    num_contexts : int
    step_s : float, seconds
        Of a step of these two laps.
    wall_s, cpu_s : float, seconds
        What was added. Of processor time, that of all threads of this process.
    held_s : float, seconds
        How long the loop's thread was held up in saving, the devices idle.
    writing_s, writing_cpu_s : float, seconds
        Until the files were on the disk, and of processor time of the thread that wrote them.
    is_late : bool
        Whether they were still being written when the lap ended, which spoils it.
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
    tell: Callable[[str], None] = lambda text: None,
) -> List[Cost]:
    """Return what checkpoints add to steps of ResNet-18, each way in turns, within one run.

    ```
    warm up │ none │ background │ none │ none │ none │ in the loop │ none │ in the loop │ none │ none │ none │ background │ ...
                   └─ a lap: `every` steps, and what comes before the first of them
    ```

    Each lap is compared with its two neighbours, so that a machine that is slower for some seconds, or becomes slower, does
    not spoil it. What `fit` saves at its end is not counted: it comes once a run.

    Parameters
    ----------
    contexts : list of mxnet.Context
        Those that have one thread each do not spin: processor time is work then.
    rounds : int
        Laps of each way; every other round goes through the ways backwards.
    every : int
        Steps of a lap, which must take longer than writing.
    case : Case
        Its `batch_size` and `image_size`.
    folder : pathlib.Path, optional
        On the disk to write to; by default where temporary files go.
    tell : callable (str)
    """
    net = resnet18(NUM_CLASSES)
    net.initialize(init.Xavier(), ctx=list(contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    # Such a rate that nothing overflows, however small the batch.
    trainer = Trainer(net, "sgd", {"learning_rate": 1e-5, "momentum": 0.9})
    ways = [NONE, NONE]
    for number in range(rounds):
        ways += [lap for way in (WAYS[::-1] if number % 2 else WAYS) for lap in (way, NONE)]
    num_contexts, laps_of_round = len(contexts), 2 * len(WAYS)

    def told(lap: int) -> None:
        if lap > 1 and (lap - 2) % laps_of_round == 0 and lap < len(ways):
            tell(f"round {(lap - 2) // laps_of_round + 1} of {rounds} with {_counted(num_contexts)}")

    with tempfile.TemporaryDirectory(dir=folder) as place:
        savings = {way: _Saving(Path(place, way), background=way == BACKGROUND) for way in (BACKGROUND, IN_LOOP)}
        laps = _Laps(ways, every, savings, told)
        batches = inputs(case)[:1] * (every * len(ways))
        fit(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, batches, epochs=1, metrics=(), callbacks=[laps])
    return laps.costs(num_contexts)


def tables(found: Sequence[Cost]) -> List[Table]:
    """Return two tables for each number of contexts: what a checkpoint adds, and what of it other programs hardly touch."""
    groups = _groups(found)
    return [made for group, ways in groups.items() for made in (_cost_table(group, ways), _parts_table(group, ways))]


def _cost_table(group: str, ways: Dict[str, List[Cost]]) -> Table:
    """Return what a checkpoint adds, its share where there is one a minute, and how far apart they must be for what is asked."""
    lines = []
    for way, those in ways.items():
        added = _added(those)
        apart = "-" if way == NONE else _told(added, 1 / ASK, 1, least=0.0)
        lines.append([way, _told(added, 1e3), _told(added, 100 / _MINUTE_S, 2), apart])
    every = [one for those in ways.values() for one in those]
    num_laps = len(every) // len(WAYS)
    title = (
        f"{group}: what a checkpoint adds to steps of {median(one.step_s for one in every) * 1e3:.0f} ms, {num_laps} laps each:\n"
        f"the median, and {'the interval that holds it with 95 %' if num_laps > 5 else 'the range: too few for an interval'}"
    )
    return title, ["checkpoints", "ms it adds", "% of a minute", f"s apart for {ASK:.0%}"], lines


def _parts_table(group: str, ways: Dict[str, List[Cost]]) -> Table:
    """Return processor time, how long the loop is held up, and what writing takes."""
    lines = []
    for way, those in ways.items():
        parts = [
            f"{median(times) * 1e3:.0f}" for times in zip(*((one.held_s, one.writing_s, one.writing_cpu_s) for one in those))
        ]
        cpu = _told(interval([one.cpu_s for one in those]), 1e3)
        lines.append([way, cpu, *(["-"] * len(parts) if way == NONE else parts), str(sum(one.is_late for one in those))])
    title = f"{group}: ms of processor time it adds in all threads, and its parts: medians"
    return title, ["checkpoints", "CPU", "loop held up", "writing", "its CPU", "late"], lines


def results(found: Sequence[Cost], made: Sequence[Table], *, rounds: int, every: int) -> Dict[str, Any]:
    """Return what the JSON file holds."""
    told = report.results("checkpoint", [], rounds=rounds, tables=made)
    return {**told, "reference": NONE, "every": every, "costs": [asdict(one) for one in found]}


def ranges(found: Sequence[Cost]) -> Dict[str, Dict[str, Tuple[float, float, float]]]:
    """Return the median milliseconds that a checkpoint adds and their interval: what `plots.plot_ranges` takes."""
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


def _told(one: Spread, factor: float, digits: int = 0, *, least: float = float("-inf")) -> str:
    rounded = [round(max(least, value * factor), digits) + 0.0 for value in (one.median, one.low, one.high)]  # -0.0 + 0.0 is 0.0
    middle, low, high = (f"{value:.{digits}f}" for value in rounded)
    return f"{middle} ({low} to {high})"


class _Mark(NamedTuple):
    """The clocks between two laps, and whether a checkpoint is still being written there."""

    wall_s: float
    cpu_s: float
    is_late: bool


class _Laps(Callback):
    """Reads the clocks between two laps, and saves there what the next one is to begin with."""

    def __init__(self, ways: Sequence[str], every: int, savings: Dict[str, _Saving], tell: Callable[[int], None]) -> None:
        self._ways, self._every, self._savings, self._tell = ways, every, savings, tell
        self._marks: List[_Mark] = []  # where each lap ends
        self._held: Dict[int, float] = {}  # seconds, by the lap that begins so

    def on_fit_begin(self, state: FitState) -> None:
        for saving in self._savings.values():
            saving.on_fit_begin(state)

    def on_batch_end(self, state: FitState) -> None:
        lap, rest = divmod(state.step, self._every)
        if rest:
            return
        is_late = any(saving.shelf.is_writing for saving in self._savings.values())
        self._marks.append(_Mark(time.perf_counter(), time.process_time(), is_late))
        self._tell(lap)
        saving = self._savings.get(self._ways[lap]) if lap < len(self._ways) else None
        if saving is not None:
            mx.nd.waitall()  # as saving does, for running statistics: what it holds up from here on are idle devices
            began = time.perf_counter()
            saving.on_batch_end(state)
            self._held[lap] = time.perf_counter() - began

    def on_fit_end(self, state: FitState) -> None:
        for saving in self._savings.values():
            saving.on_fit_end(state)

    def costs(self, num_contexts: int) -> List[Cost]:
        """Return what each lap adds that lies between two without a checkpoint."""
        writings = {way: iter(saving.shelf.writings) for way, saving in self._savings.items()}
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
                    wall_s=_beyond(wall_s),
                    cpu_s=_beyond(cpu_s),
                    held_s=self._held.get(lap, 0.0),
                    writing_s=writing_s,
                    writing_cpu_s=writing_cpu_s,
                    is_late=marks[lap].is_late,
                )
            )
        return found


def _beyond(three: Sequence[float]) -> float:
    return three[1] - (three[0] + three[2]) / 2


class _Saving(Checkpoint):
    """Saves whenever it is asked in an epoch, and not at its end."""

    def __init__(self, folder: Path, *, background: bool) -> None:
        super().__init__(folder, None, every=1, background=background)
        self._shelf = self.shelf = _TimedShelf(folder, background=background)

    def on_epoch_end(self, state: FitState) -> None:
        pass


class _TimedShelf(CheckpointRotation):
    """Notes what writing each folder took.

    Attributes
    ----------
    writings : list of (float, float), seconds
        Until it was on the disk, and of processor time of the thread that wrote it.
    is_writing : bool
    """

    def __init__(self, folder: Path, *, background: bool) -> None:
        super().__init__(folder, background=background)
        self.writings: List[Tuple[float, float]] = []
        self.is_writing = False

    def put(self, write: Write, step: int, *, is_best: bool = False, num_bytes: int = 0) -> None:
        self.wait()  # what it is still writing, before it is said to begin anew
        self.is_writing = True
        super().put(write, step, is_best=is_best, num_bytes=num_bytes)

    def _put(self, write: Write, step: int, is_best: bool) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        super()._put(write, step, is_best)
        self.writings.append((time.perf_counter() - began, time.thread_time() - cpu))
        self.is_writing = False
