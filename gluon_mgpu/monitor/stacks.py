"""What a thread is doing, from its Python stack: waiting for data, queueing work, or waiting for the devices."""

from __future__ import annotations

import linecache
import os
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import mxnet as mx

_MXNET = os.path.dirname(mx.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
# MXNet waits for a device in these functions only; `_sync_copyfrom` waits for the worker of a CPU context.
_WAITS = {"wait_to_read", "wait_to_write", "waitall", "asnumpy", "_sync_copyfrom"}
_DATA = (_MXNET + "gluon/data/", _MXNET + "io/", _OURS + "data/", _OURS + "data_parallel/prefetch.py")
# What run_epoch calls in addition to the data iterator.
_EPOCH, _RUN = _OURS + "loop/epoch.py", _OURS + "loop/run.py"
_BATCH = {_OURS + "data_parallel/step.py", _OURS + "loop/evaluate.py", _OURS + "loop/metrics.py"}
_STEP = {_EPOCH, _RUN, *_BATCH, _STDLIB + "contextlib.py"}
_DEEPEST = 200


@dataclass(frozen=True)
class Frame:
    """A running function: its file, its name and its current line."""

    file: str
    function: str
    line: int

    @property
    def location(self) -> str:
        """The frame as text: `train.py:42 (decode)`."""
        return f"{os.path.basename(self.file)}:{self.line} ({self.function})"


@dataclass(frozen=True)
class Activity:
    """What a thread does, one of `sample.PLACES`, and the line of the program that does it."""

    kind: str
    where: str


def frames_of(ident: int) -> List[Frame]:
    """Return the Python stack of a thread, the innermost function first; [] if the thread has ended."""
    frame = sys._current_frames().get(ident)
    found: List[Frame] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append(Frame(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return found


def place_of(frames: Sequence[Frame]) -> Activity:
    """Return what a thread with this stack does: in `fit` by its place in the epoch loop, elsewhere by the running functions.

    Parameters
    ----------
    frames : sequence of Frame
        The innermost first.
    """
    waits = _waits(frames)
    epoch = next((i for i, frame in enumerate(frames) if frame.file == _EPOCH and frame.function == "run_epoch"), None)
    kind = _kind_by_hand(frames, waits) if epoch is None else _kind_in_epoch(frames[: epoch + 1], waits)
    return Activity(kind, _where(frames, waits))


def _kind_in_epoch(frames: Sequence[Frame], waits: bool) -> str:
    *inner, loop = frames
    if not inner:  # an iterator that is not written in Python, or the loop itself
        return "data" if linecache.getline(loop.file, loop.line).lstrip().startswith("for ") else "dispatch"
    names = {frame.function for frame in inner if frame.file == _RUN}
    if "call_each" in names:
        return "sync" if waits else "callbacks"
    if inner[-1].file not in _STEP and not inner[-1].file.startswith(_OURS + "prefetch"):
        return "data"
    if not waits:
        return "dispatch"
    # fit waits for its oldest batch, and reads its sums, while later batches are queued; its own step never waits
    in_step = "_train_batch" in names or any(frame.function in ("eval_batch", "train_batch", "_naming") for frame in inner)
    return "sync" if in_step else "devices"


def _kind_by_hand(frames: Sequence[Frame], waits: bool) -> str:
    if any(frame.file == _RUN and frame.function == "call_each" for frame in frames) or _in_callback(frames):
        return "callbacks"
    innermost = next((frame for frame in frames if frame.file.startswith((_OURS, _MXNET))), None)
    if any(frame.file.startswith(_DATA) for frame in frames) and not any(_is_split(frame) for frame in frames):
        return "data"
    if waits:
        return "sync"
    return "dispatch" if innermost is not None and innermost.file != _OURS + "loop/fit.py" else "other"


def _in_callback(frames: Sequence[Frame]) -> bool:
    return any(frame.function.startswith("on_") and frame.file.startswith(_OURS) for frame in frames)


def _is_split(frame: Frame) -> bool:
    return frame.file == _OURS + "data_parallel/sharding.py"


def _waits(frames: Sequence[Frame]) -> bool:
    """Return whether the innermost of MXNet's functions waits."""
    for frame in frames:
        if not frame.file.startswith(_MXNET):
            return False
        if frame.function in _WAITS:
            return True
    return False


def _where(frames: Sequence[Frame], waits: bool) -> str:
    """Return the innermost line of the user's program; of this package if there is none."""
    own = next((frame for frame in frames if not _is_library(frame)), None)
    epoch = next((i for i, frame in enumerate(frames) if frame.file == _EPOCH), len(frames))
    if own is not None and frames.index(own) < epoch:
        return own.location
    ours = next((frame for frame in frames if frame.file.startswith(_OURS)), None)
    found = ours if epoch < len(frames) else own or ours
    return found.location if found is not None else ""


def _is_library(frame: Frame) -> bool:
    return frame.file.startswith((_MXNET, _OURS, _STDLIB, "<")) or "site-packages" in frame.file


class StackSampler:
    """Counts what a thread was doing.

    Parameters
    ----------
    ident : int
        Python's id of the thread.
    """

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self._found: Counter[Activity] = Counter()

    def sample(self) -> None:
        """Record the thread's current stack."""
        frames = frames_of(self._ident)
        if frames:
            self._found[place_of(frames)] += 1

    def take(self) -> Tuple[Dict[str, float], Dict[str, str]]:
        """Return the share of each kind of place and its most frequent line, and reset the counts."""
        found, self._found = self._found, Counter()
        return shares_of(found)


def shares_of(found: Counter[Activity]) -> Tuple[Dict[str, float], Dict[str, str]]:
    """Return the share of each kind of place, and its most frequent line."""
    total = sum(found.values())
    shares: Dict[str, float] = {}
    where: Dict[str, str] = {}
    for place, number in found.most_common():
        shares[place.kind] = shares.get(place.kind, 0.0) + number / total
        where.setdefault(place.kind, place.where)
    return shares, where
