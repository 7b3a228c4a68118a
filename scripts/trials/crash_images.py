"""Images of a run's folder as each change of the file system leaves it: every one resumes and ends like the undisturbed run.

A trial records a small run that saves: an audit hook sees every name that is made, renamed or removed before it happens, and
keeps the folder as it stands there. An image is what a kill leaves at that moment. The variants of an image are what a power
loss leaves: of files that were not forced to the disk, nothing, a part, or zeros. A trial resumes one image with
`resume="auto"` and compares `last` and `best` with those of a run that nothing has disturbed. Some runs are killed twice.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from gluon_mgpu.checkpoint.rotation import checkpoint_in
from gluon_mgpu.data import PairLoader, SentencePairs, build_vocabulary, encode_pairs
from gluon_mgpu.models.seq2seq.callbacks import SaveTranslator
from gluon_mgpu.models.seq2seq.translator import Translator, load_translator
from mxnet.gluon import nn

TIMES = ("seconds", "examples_per_s")
EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink")
CTX = [mx.cpu(0), mx.cpu(1)]
EPOCHS = 3

Files = Dict[str, Optional[bytes]]  # by path; None for a folder


@dataclass(frozen=True)
class Image:
    """A folder at one moment.

    Attributes
    ----------
    event : str
        What would have happened next.
    files : dict of str to bytes or None
        What a kill leaves; None for a folder.
    unsynced : tuple of str
        Files that were not forced to the disk.
    """

    event: str
    files: Files
    unsynced: Tuple[str, ...]


@dataclass(frozen=True)
class Scenario:
    """A run: what it trains, and how it saves."""

    kind: str
    keep: int
    every: Optional[int]
    background: bool
    best: Tuple[int, ...]  # epochs that are better than all before

    def __str__(self) -> str:
        return f"{self.kind}, keep={self.keep}, every={self.every}, background={self.background}, best={self.best}"


SCENARIOS = [
    Scenario(kind, keep, every, background, best)
    for kind in ("network", "translator")
    for keep, every in ((1, None), (2, None), (3, 1), (1, 2))
    for background in (False, True)
    for best in ((1, 2, 3), (1, 2), (1, 3), (1,))
]


class Recorder:
    """Keeps an image of a folder before each change of a name in it. An audit hook cannot be removed: there is one."""

    def __init__(self) -> None:
        self._folder: Optional[Path] = None
        self._images: List[Image] = []
        self._synced: Set[Tuple[int, int, int, int]] = set()
        self._busy = threading.local()
        fsync = os.fsync

        def noted(fd: Any) -> None:
            fsync(fd)
            if self._folder is not None:
                self._synced.add(_state(os.fstat(fd)))

        os.fsync = noted
        sys.addaudithook(self._hear)

    @contextmanager
    def recording(self, folder: Path) -> Iterator[List[Image]]:
        """Yield a list that images are added to."""
        self._images = []
        self._synced = {_state(path.stat()) for path in folder.rglob("*") if path.is_file()}  # they have outlived a crash
        self._folder = folder
        try:
            yield self._images
        finally:
            self._note("the end")
            self._folder = None

    def _hear(self, event: str, arguments: Tuple[Any, ...]) -> None:
        if self._folder is None or event not in EVENTS or getattr(self._busy, "now", False):
            return
        path = arguments[0]
        is_in_it = isinstance(path, (str, os.PathLike)) and str(path).startswith(str(self._folder))
        if not is_in_it and event not in ("os.rmdir", "os.remove"):  # shutil.rmtree names those within an open folder
            return
        if event == "open" and not _writes(arguments):
            return
        self._note(f"{event} {path}")

    def _note(self, event: str) -> None:
        self._busy.now = True
        try:
            assert self._folder is not None
            files: Files = {}
            unsynced = []
            for path in sorted(self._folder.rglob("*")):
                name = str(path.relative_to(self._folder))
                if path.is_dir():
                    files[name] = None
                    continue
                files[name] = path.read_bytes()
                if _state(path.stat()) not in self._synced:
                    unsynced.append(name)
            self._images.append(Image(event.replace(str(self._folder), ""), files, tuple(unsynced)))
        except FileNotFoundError:  # another thread has removed it
            pass
        finally:
            self._busy.now = False


def _writes(arguments: Tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or any(letter in (mode or "") for letter in "wax+")


def _state(status: os.stat_result) -> Tuple[int, int, int, int]:
    """Return what changes when a file is written to again."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Scripted(mgpu.Callback):
    """Says which epochs are the best."""

    def __init__(self, best: Tuple[int, ...]) -> None:
        self._best = best

    def on_epoch_end(self, state: Any) -> None:
        epoch = state.epoch
        state.history.rows[-1]["score"] = float(epoch if epoch in self._best else -epoch)


def run(scenario: Scenario, folder: Path) -> None:
    """Train from the beginning, or from the folder's checkpoint."""
    random.seed(1), np.random.seed(1), mx.random.seed(1)
    options: Dict[str, Any] = {
        "every": scenario.every,
        "keep": scenario.keep,
        "background": scenario.background,
        "mode": "max",
    }
    if scenario.kind == "network":
        net = nn.HybridSequential()
        net.add(nn.Dense(3, in_units=4), nn.Dropout(0.3), nn.Dense(2, in_units=3))
        saves = mgpu.Checkpoint(folder, "score", **options)
        X, y = np.random.RandomState(0).rand(12, 4).astype("float32"), np.arange(12) % 2
        data: Any = mgpu.data.ArrayLoader(X, y, 4, shuffle=True, seed=2)
        loss, split_f = mx.gluon.loss.SoftmaxCrossEntropyLoss(), partial(mgpu.split_batch)
        net.initialize(mx.init.Xavier(), ctx=CTX)
    else:
        pairs = SentencePairs(
            ["하나 둘", "둘 셋 넷", "넷 하나 셋", "셋"] * 2, ["one two", "two three four", "four one", "three"] * 2
        )
        sides = [build_vocabulary(side, "words") for side in (pairs.source, pairs.target)]
        translator = Translator(*sides, embed_size=3, hidden_size=4)
        net = translator.net
        net.initialize(mx.init.Xavier(), ctx=CTX)
        saves = SaveTranslator(folder, translator, "score", **options)
        data = PairLoader(*encode_pairs(pairs, *sides), 24, shuffle=True, seed=2)
        loss = mgpu.models.SequenceLoss()
        split_f = partial(mgpu.split_batch, batch_axis=data.split_axes)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.05})
    callbacks = [Scripted(scenario.best), saves]
    mgpu.fit(net, loss, trainer, data, epochs=EPOCHS, metrics=(), callbacks=callbacks, split_f=split_f, resume="auto")


def ends(scenario: Scenario, folder: Path) -> Dict[str, Any]:
    """Return the content of `last` and `best`: bytes, and the history without times. Both must load."""
    found: Dict[str, Any] = {"names": sorted(path.name for path in folder.iterdir())}
    for name in ("last", "best"):
        inner = checkpoint_in(folder / name)
        if inner is None:
            found[name] = "no checkpoint"
            continue
        progress = json.loads((inner / "progress.json").read_text())
        rows = [{key: value for key, value in row.items() if key not in TIMES} for row in progress["history"]]
        training = json.loads((inner / "training.json").read_text())
        files = {path.name: path.read_bytes() for path in inner.iterdir() if path.suffix in (".params", ".npz")}
        outer = {path.name: path.read_bytes() for path in (folder / name).iterdir() if path.suffix in (".vocab",)}
        found[name] = (rows, training["place"]["step"], training["counts"], files, outer)
        net = load_translator(folder / name).net if scenario.kind == "translator" else None
        if net is None:
            net = nn.HybridSequential()
            net.add(nn.Dense(3, in_units=4), nn.Dropout(0.3), nn.Dense(2, in_units=3))
            net.initialize(ctx=CTX)
            mgpu.load_checkpoint(folder / name, net)
    return found


def write(files: Files, folder: Path) -> None:
    """Make a folder of an image."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def damaged(image: Image, rng: random.Random) -> Tuple[str, Files]:
    """Return a variant of an image: what a kill leaves in the middle of a file, or a power loss."""
    files = dict(image.files)
    if not image.unsynced or rng.random() < 0.3:
        return "killed", files
    kind = rng.choice(["empty", "cut off", "zeros", "missing", "one of them"])
    chosen = [rng.choice(image.unsynced)] if kind == "one of them" else list(image.unsynced)
    for name in chosen:
        content = files[name] or b""
        how = rng.choice(["empty", "cut off", "zeros"]) if kind == "one of them" else kind
        if how == "missing":
            del files[name]
        else:
            cut = content[: rng.randrange(len(content) + 1)]
            files[name] = {"empty": b"", "cut off": cut, "zeros": b"\0" * len(content)}[how]
    return f"power loss, {kind}: {', '.join(chosen)}", files


@dataclass
class Recorded:
    """The images of an undisturbed run, and how it ends."""

    images: List[Image] = field(default_factory=list)
    ends: Dict[str, Any] = field(default_factory=dict)


_recorder: List[Recorder] = []
_recorded: Dict[Scenario, Recorded] = {}


@contextmanager
def place() -> Iterator[Path]:
    """Yield a folder for a trial, in memory where there is a disk of it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="crash_images_", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "run"


def recorded(scenario: Scenario) -> Recorded:
    """Return the images of a scenario, recorded once in a process."""
    if scenario not in _recorded:
        with place() as folder:
            images = images_of(folder, lambda: run(scenario, folder))
            _recorded[scenario] = Recorded(images, ends(scenario, folder))
    return _recorded[scenario]


def images_of(folder: Path, act: Callable[[], None]) -> List[Image]:
    """Return the images of a folder while something is done in it."""
    if not _recorder:
        _recorder.append(Recorder())
    with _recorder[0].recording(folder) as images:
        act()
    return images


def trial(seed: int) -> str:
    """Resume one image of one scenario, and return how its end differs from the undisturbed one."""
    rng = random.Random(seed)
    scenario = rng.choice(SCENARIOS)
    before = recorded(scenario)
    image = rng.choice(before.images)
    lines = [str(scenario)]
    with place() as folder:
        how, files = damaged(image, rng)
        lines.append(f"before {image.event!r}: {how}")
        write(files, folder)
        try:
            if rng.random() < 0.3:  # killed a second time
                second = rng.choice(images_of(folder, lambda: run(scenario, folder)))
                how, files = damaged(second, rng)
                lines.append(f"then before {second.event!r}: {how}")
                write(files, folder)
            run(scenario, folder)
            after = ends(scenario, folder)
        except Exception as error:
            return "\n  ".join([*lines, f"{type(error).__name__}: {error}"])
    wrong = [name for name in before.ends if before.ends[name] != after[name]]
    return "\n  ".join([*lines, *(f"{name}: {_worded(after[name])}" for name in wrong)]) if wrong else ""


def _worded(found: Any) -> str:
    return f"step {found[1]}, {len(found[0])} epochs" if isinstance(found, tuple) else str(found)
