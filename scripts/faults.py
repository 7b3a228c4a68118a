"""Search for faults in saving and resuming: kill runs, damage their folders, and compare with a run that nothing disturbed.

python scripts/faults.py images --seconds 600   # what a kill or a power loss leaves on the disk, at every change of a name
python scripts/faults.py kills                  # SIGKILL, SIGTERM and Ctrl-C at random moments, while checkpoints are read
python scripts/faults.py damage                 # files of a checkpoint altered, cut off, missing
python scripts/faults.py forgery                # the same, and the manifest says that they are right

Each trial has a seed; a finding prints the command that repeats it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from gluon_mgpu import errors
from mxnet.gluon import nn

EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink")
EPOCHS, STEPS_PER_EPOCH = 3, 3
_TIMES = ("seconds", "examples_per_s")
_LIMIT_S = 120
_OURS = tuple(one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, BaseException))

Files = Dict[str, Optional[bytes]]  # by path; None for a folder


class Scenario(NamedTuple):
    """How a run saves, whether its network has Dropout, and which epochs are better than all before."""

    dropout: bool
    keep: int
    every: Optional[int]
    background: bool
    best: Tuple[int, ...]


SCENARIOS = [
    Scenario(dropout, keep, every, background, best)
    for dropout in (True, False)
    for keep, every in ((1, None), (2, None), (3, 1), (1, 2))
    for background in (False, True)
    for best in ((1, 2, 3), (1, 3), (1,))
]


class Image(NamedTuple):
    """A folder before one event: what a kill leaves there, and the files that were not forced to the disk."""

    event: str
    files: Files
    unsynced: List[str]


# The run


class Scripted(mgpu.Callback):
    """Writes a score that says which epochs are the best. With seconds per step, it prints each step."""

    def __init__(self, best: Tuple[int, ...], step_s: Optional[float]) -> None:
        self._best, self._step_s = best, step_s

    def on_batch_end(self, state: Any) -> None:
        if self._step_s is not None:
            time.sleep(self._step_s)
            print(f"step {state.step}", flush=True)

    def on_epoch_end(self, state: Any) -> None:
        state.history.rows[-1]["score"] = float(state.epoch if state.epoch in self._best else -state.epoch)


def network(dropout: bool = False) -> nn.HybridSequential:
    """Return the network of all runs, on two contexts."""
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=4), nn.Dropout(0.3 if dropout else 0.0), nn.Dense(2, in_units=3))
    net.initialize(mx.init.Xavier(), ctx=mgpu.devices.resolve_devices("cpu*2"))
    return net


def run(scenario: Scenario, folder: Path, step_s: Optional[float] = None) -> None:
    """Train from the beginning, or from the folder's checkpoint."""
    mgpu.seed_everything(1)
    net = network(scenario.dropout)
    X, y = np.random.RandomState(0).rand(4 * STEPS_PER_EPOCH, 4).astype("float32"), np.arange(4 * STEPS_PER_EPOCH) % 2
    data = mgpu.data.ArrayLoader(X, y, 4, shuffle=True, seed=2)
    options: Dict[str, Any] = {"every": scenario.every, "keep": scenario.keep, "background": scenario.background}
    callbacks = [Scripted(scenario.best, step_s), mgpu.Checkpoint(folder, "score", mode="max", **options)]
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.05})
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    mgpu.fit(net, loss, trainer, data, epochs=EPOCHS, metrics=(), callbacks=callbacks, resume="auto")


def ends(folder: Path) -> Dict[str, Any]:
    """Return the content of `last` and `best`: bytes, and the history without times. Both must load."""
    found: Dict[str, Any] = {"hidden": [path.name for path in folder.iterdir() if path.name.startswith(".")]}
    for name in ("last", "best"):
        if not (folder / name).is_dir():
            found[name] = "no checkpoint"
            continue
        mgpu.load_checkpoint(network(), folder / name)
        rows = json.loads((folder / name / "progress.json").read_text())["history"]
        rows = [{key: value for key, value in row.items() if key not in _TIMES} for row in rows]
        found[name] = rows, {path.name: path.read_bytes() for path in (folder / name).glob("*.[pn]*") if path.suffix != ".json"}
    return found


@lru_cache(maxsize=None)
def undisturbed(scenario: Scenario) -> Tuple[List[Image], Dict[str, Any]]:
    """Return the images of a run that nothing disturbs, and how it ends."""
    with place() as folder:
        return images_of(folder, lambda: run(scenario, folder)), ends(folder)


@contextmanager
def place() -> Iterator[Path]:
    """Yield a folder for a trial, in memory where there is a disk of it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="faults_", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "run"


def compared(scenario: Scenario, folder: Path) -> List[str]:
    """Return how the end of a resumed run differs from the undisturbed one."""
    before, after = undisturbed(scenario)[1], ends(folder)
    return [f"{name} differs" for name in before if before[name] != after[name]]


# Images


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
            self._synced.add(_identity(os.fstat(fd)))

        os.fsync = noted
        sys.addaudithook(self._hear)

    def record(self, folder: Path, act: Callable[[], None]) -> List[Image]:
        """Return the images of a folder while something is done in it."""
        self._images = []
        self._synced = {_identity(path.stat()) for path in folder.rglob("*") if path.is_file()}  # they have outlived a crash
        self._folder = folder
        try:
            act()
            self._note("the end")
        finally:
            self._folder = None
        return self._images

    def _hear(self, event: str, arguments: Tuple[Any, ...]) -> None:
        if self._folder is None or event not in EVENTS or getattr(self._busy, "now", False):
            return
        path = str(arguments[0])
        if not path.startswith(str(self._folder)) and event not in ("os.rmdir", "os.remove"):  # named within an open folder
            return
        if event == "open" and not ((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        self._note(f"{event} {path}")

    def _note(self, event: str) -> None:
        assert self._folder is not None
        self._busy.now = True
        try:
            files: Files = {}
            unsynced = []
            for path in sorted(self._folder.rglob("*")):
                name = str(path.relative_to(self._folder))
                files[name] = None if path.is_dir() else path.read_bytes()
                if path.is_file() and _identity(path.stat()) not in self._synced:
                    unsynced.append(name)
            self._images.append(Image(event.replace(str(self._folder), ""), files, unsynced))
        except FileNotFoundError:  # another thread has removed it
            pass
        finally:
            self._busy.now = False


def _identity(status: os.stat_result) -> Tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_recorders: List[Recorder] = []


def images_of(folder: Path, act: Callable[[], None]) -> List[Image]:
    """Return the images of a folder while something is done in it."""
    if not _recorders:
        _recorders.append(Recorder())
    return _recorders[0].record(folder, act)


def after_crash(image: Image, rng: random.Random) -> Tuple[str, Files]:
    """Return what a kill leaves of an image, or a power loss: unsynced files may be empty, cut off, zeros or missing."""
    files = dict(image.files)
    if not image.unsynced or rng.random() < 0.3:
        return f"killed before {image.event!r}", files
    how = rng.choice(["empty", "cut off", "zeros", "missing"])
    for name in rng.choice([image.unsynced, [rng.choice(image.unsynced)]]):
        content = files[name] or b""
        if how == "missing":
            del files[name]
        else:
            cut = content[: rng.randrange(len(content) + 1)]
            files[name] = {"empty": b"", "cut off": cut, "zeros": b"\0" * len(content)}[how]
    return f"power loss before {image.event!r}, {how}", files


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


def try_image(rng: random.Random) -> List[str]:
    """Resume one image of one scenario, sometimes after a second crash."""
    scenario = rng.choice(SCENARIOS)
    label, files = after_crash(rng.choice(undisturbed(scenario)[0]), rng)
    told = [str(scenario), label]
    with place() as folder:
        write(files, folder)
        try:
            if rng.random() < 0.3:
                label, files = after_crash(rng.choice(images_of(folder, lambda: run(scenario, folder))), rng)
                told.append(label)
                write(files, folder)
            run(scenario, folder)
            wrong = compared(scenario, folder)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
    return told + wrong if wrong else []


# Kills


def try_kill(rng: random.Random) -> List[str]:
    """Disturb a run some times, let it end, and read its checkpoints meanwhile."""
    number = rng.randrange(len(SCENARIOS))
    # A signal saves between two checkpoints, and every save reseeds MXNet: what Dropout draws later differs.
    signals = [signal.SIGKILL] if SCENARIOS[number].dropout else [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    told, wrong = [str(SCENARIOS[number])], []
    with place() as folder:
        for left in range(rng.randrange(1, 4), -1, -1):
            signum = rng.choice(signals) if left else 0
            child = _started(number, folder, step_s=rng.choice([0.0, 0.05]) if left else 0.0)
            steps: List[str] = []
            assert child.stdout is not None
            child.stdout.readline()  # it has been imported
            end = time.monotonic() + (rng.random() * 0.6 if left else _LIMIT_S)
            while child.poll() is None and time.monotonic() < end:
                wrong += _read(folder)
                time.sleep(0.01)
            if signum:
                child.send_signal(signum)
            output, errors_ = child.communicate(timeout=_LIMIT_S)
            steps = [line for line in output.splitlines() if line.startswith("step")]
            told.append(f"{signal.Signals(signum).name if signum else 'the end'} after {steps[-1:] or 'no step'}")
            if signum in (signal.SIGTERM, signal.SIGINT) and child.returncode != 0:
                wrong += _unsaved(folder, steps)
            if not signum and child.returncode:
                wrong.append(f"the last start ended with {child.returncode}: {errors_[-600:]}")
        wrong += [] if wrong else compared(SCENARIOS[number], folder)
    return told + wrong[:5] if wrong else []


def _started(number: int, folder: Path, step_s: float) -> subprocess.Popen:
    command = [sys.executable, __file__, "run", str(number), str(folder), str(step_s)]
    # A shell's & leaves SIGINT ignored; the child has Python's own handler.
    options: Dict[str, Any] = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def _unsaved(folder: Path, steps: List[str]) -> List[str]:
    """Return an error unless the last step is saved: SIGTERM and Ctrl-C end a run after the step under way."""
    reached = int(steps[-1].split()[1]) if steps else 0
    if not reached:
        return []
    saved = json.loads((folder / "last" / "training.json").read_text())["place"]["step"]
    return [] if saved == reached else [f"step {saved} is saved; expected {reached}"]


def _read(folder: Path) -> List[str]:
    """Return the errors of loading the checkpoints of a running run; none where there is no checkpoint yet."""
    for name in ("last", "best"):
        if (folder / name).is_dir():
            try:
                mgpu.load_checkpoint(network(), folder / name)
            except errors.StateError as error:
                if "without" not in str(error):  # it may be gone by now
                    return [f"reading {name}: {error}"]
            except Exception as error:
                return [f"reading {name}: {type(error).__name__}: {error}"]
    return []


# Damage


def try_damage(rng: random.Random, *, forged: bool = False) -> List[str]:
    """Alter a checkpoint: loading it raises an error of ours, and the network stays as it was.

    A forged one, whose manifest was written again, may have other numbers.
    """
    images = undisturbed(SCENARIOS[0])[0]
    with place() as folder:
        write(images[-1].files, folder)
        label = _alter(folder / "last", rng)
        net = network()
        before = _weights(net)
        if forged:
            _renew(folder / "last")
        try:
            mgpu.load_checkpoint(net, folder / "last", mgpu.Trainer(net, "adam") if forged else None)
        except _OURS:
            return [] if _weights(net) == before else [label, "refused, but the network has changed"]
        except Exception as error:
            return [label, f"{type(error).__name__}: {error}"]
        if forged:
            return []
        loaded = _weights(net)
        write(images[-1].files, folder)
        mgpu.load_checkpoint(net, folder / "last")
    return [] if loaded == _weights(net) else [label, "loaded other weights"]


def _alter(folder: Path, rng: random.Random) -> str:
    """Change one file; return what was changed."""
    path = rng.choice(sorted(one for one in folder.iterdir() if one.is_file()))
    content = path.read_bytes()
    how = rng.choice(["bytes", "cut off", "missing", "empty", "link", "value"])
    if how == "missing":
        path.unlink()
    elif how == "link":
        path.unlink()
        path.symlink_to("/dev/zero")
    elif how == "value" and path.suffix == ".json":
        path.write_bytes(json.dumps(_changed(json.loads(content), rng)).encode())
    elif how in ("cut off", "empty"):
        path.write_bytes(content[: rng.randrange(len(content)) if how == "cut off" else 0])
    else:
        at = rng.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :])
    return f"{path.name}: {how}"


def _renew(folder: Path) -> None:
    """Write the sizes and checksums of the files into the manifest, if it is one."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes() if path.is_file() else "")
        for name in list(manifest["files"]):
            if (folder / name).is_file():
                content = (folder / name).read_bytes()
                manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        path.write_text(json.dumps(manifest))
    except (ValueError, KeyError, TypeError, OSError):
        return


def _changed(value: Any, rng: random.Random) -> Any:
    """Return JSON data with one change at a random depth."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: _changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place_ = rng.randrange(len(value))
        return [_changed(one, rng) if i == place_ else one for i, one in enumerate(value)]
    numbers = [True, -1, 0, 7, 2**63, 0.5, float("nan"), float("inf")]
    return rng.choice([*numbers, None, "", "a\n\x1b[31mb", "x" * 5000, [], [[]], {}])


def _weights(net: nn.HybridSequential) -> List[bytes]:
    return [array.asnumpy().tobytes() for param in net.collect_params().values() for array in param.list_data()]


KINDS: Dict[str, Callable[[random.Random], List[str]]] = {"images": try_image, "kills": try_kill, "damage": try_damage}
KINDS["forgery"] = partial(try_damage, forged=True)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--seed", default=0, show_default=True, help="Seed of the first trial; each later one adds 1.")
@click.option("--count", default=0, help="Stop after this number of trials. 0: no limit.")
@click.option("--seconds", default=600.0, show_default=True, help="Start no trial after this time.")
def main(kind: str, seed: int, count: int, seconds: float) -> None:
    """Run trials of one kind, and exit with 1 if any found something."""
    begun, num_trials, num_findings = time.monotonic(), 0, 0
    while (not count or num_trials < count) and time.monotonic() - begun < seconds:
        try:
            found = KINDS[kind](random.Random(seed + num_trials))
        except Exception:
            found = [f"the trial itself failed\n{traceback.format_exc()}"]
        if found:
            num_findings += 1
            repeat = f"repeat: python scripts/faults.py {kind} --seed {seed + num_trials} --count 1"
            print("\n  ".join([f"{kind} {seed + num_trials}", *found, repeat]), flush=True)
        num_trials += 1
    print(f"{kind}: {num_trials} trials, {num_findings} findings, {time.monotonic() - begun:.0f} s")
    sys.exit(1 if num_findings else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        print("ready", flush=True)
        run(SCENARIOS[int(sys.argv[2])], Path(sys.argv[3]), float(sys.argv[4]))
    else:
        main(prog_name="python scripts/faults.py")
