"""SIGTERM and Ctrl-C at random moments of a training with steps of a second, alone and launched: the step under way is saved.

A seed decides who gets the signal and when: seeds 0 to 79 are 20 moments of each of {alone, launch} x {SIGTERM, SIGINT}. The
moments include the import of the program, evaluations, checkpoints, and the end. Each trial then resumes the run and compares
the bits with those of a run that was not disturbed.
"""

from __future__ import annotations

import functools
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
from pathlib import Path
from typing import Dict, List, Optional, Tuple

BOUND_S = 45.0  # between the signal and the end; an idle machine takes 3 s, a busy one also has to import and to save
NUM_STEPS, NUM_TESTS, EPOCHS = 4, 3, 2
PROGRAM = f"""
import sys, time
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import gluon, init

folder, step_s, place = sys.argv[1], float(sys.argv[2]), sys.argv[3]
me = mgpu.this_process()

class Slow:
    def __init__(self, num, seconds):
        self.num, self.seconds = num, seconds
    def __len__(self):
        return self.num
    def __iter__(self):
        for i in range(self.num):
            time.sleep(self.seconds * (place == "data"))
            generator = np.random.RandomState(i)
            yield generator.normal(size=(6, 5)).astype("float32"), generator.randint(0, 4, 6)

entropy = gluon.loss.SoftmaxCrossEntropyLoss()
def loss(output, label):
    time.sleep(step_s * (place == "loss"))
    return entropy(output, label)

class Tell(mgpu.Callback):
    def on_fit_begin(self, state):
        self.tell("fit")
    def on_batch_end(self, state):
        self.tell(f"step {{state.step}}")
    def tell(self, text):
        if not me.rank:
            print(text, flush=True)

mx.random.seed(1)
with mgpu.use_devices("cpu:1") as ctx:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, in_units=5, activation="tanh"), gluon.nn.Dense(4, in_units=8))
    net.initialize(init.Xavier(), ctx=ctx)
    trainer = mgpu.Trainer(net, "adam", {{"learning_rate": 0.01}})
    saves = mgpu.Checkpoint(f"{{folder}}/run", monitor=None, background=place == "loss")
    train, test = Slow({NUM_STEPS}, step_s), Slow({NUM_TESTS}, step_s / 3)
    mgpu.fit(net, loss, trainer, train, test, epochs={EPOCHS}, callbacks=[saves, Tell()], resume="auto")
Tell().tell("done")
"""


def trial(seed: int) -> str:
    """Send one signal at a random moment; return the error, "" if there is none."""
    rng = random.Random(seed)
    launched, signum = bool(seed % 2), [signal.SIGTERM, signal.SIGINT][seed // 2 % 2]
    place = rng.choice(["data", "loss"])
    after = rng.choice(["", "fit", *(f"step {step}" for step in range(1, NUM_STEPS * EPOCHS + 1))])
    wait_s = rng.uniform(0.0, 6.0 if not after else 1.3)
    to_group = signum == signal.SIGINT and rng.random() < 0.5
    label = (
        f"seed {seed}: {'launch' if launched else 'alone'}, {signum.name}, {wait_s:.2f} s after {after or 'the start'!r}, {place}"
    )
    folder = Path(tempfile.mkdtemp(prefix="trial-signals-"))
    try:
        code, lines, sent_after, took_s, left = _disturb(folder, launched, signum, place, after, wait_s, to_group)
        wrong = _wrong(folder, launched, signum, code, lines, sent_after, took_s)
        if left:
            wrong = f"left processes {left}"
        if not wrong and code != 0:
            wrong = _resume(folder, launched, place)
        output = (folder / "output").read_text(errors="replace")[-3000:]
        return f"{label}: {wrong}; it ended with {code}, {took_s:.1f} s after the signal\n{output}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _disturb(
    folder: Path, launched: bool, signum: int, place: str, after: str, wait_s: float, to_group: bool
) -> Tuple[int, List[str], str, float, List[int]]:
    """Run the program with steps of a second; return its exit code, its lines, the last one before the signal, the seconds."""
    mark = f"{folder.name}-{os.getpid()}"
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            _command(folder, launched, 1.0, place),
            stdout=subprocess.PIPE,
            stderr=output,
            env=_environment(mark),
            cwd=folder,
            start_new_session=True,
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler),  # not a shell's & ignoring it
        )
    lines: List[str] = []
    reader = threading.Thread(target=_read, args=(process, lines))
    reader.start()
    deadline = time.monotonic() + 120
    while after and after not in lines and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(wait_s)
    sent_after = lines[-1] if lines else ""
    sent_at = time.monotonic()
    if process.poll() is None:
        (os.killpg if to_group else os.kill)(process.pid, signum)
    try:
        code = process.wait(timeout=3 * BOUND_S)
    except subprocess.TimeoutExpired:
        code = 1000
    took_s = time.monotonic() - sent_at
    left = _marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    reader.join()
    return code, lines, sent_after, took_s, left


def _wrong(folder: Path, launched: bool, signum: int, code: int, lines: List[str], sent_after: str, took_s: float) -> str:
    if took_s > BOUND_S:
        return f"took {took_s:.0f} s"
    steps = [int(line.split()[1]) for line in lines if line.startswith("step")]
    reached, saved = max(steps, default=0), _saved_step(folder)
    # Before the program has begun, or after fit has ended, the signal ends it as any other program.
    outside = code in (128 + signum, -signum, 0, 1) and sent_after in ("", "done")
    documented = 128 + signum if launched or signum == signal.SIGTERM else -signum
    late = "done" in lines and code == 0
    in_the_end = reached == NUM_STEPS * EPOCHS and code in (-signum, 128 + signum)
    if not (code == documented or outside or late or in_the_end):
        return f"exit code {code}; expected {documented}"
    if reached != (saved or 0):
        return f"step {saved} is saved; expected {reached}, the step under way"
    return ""


def _resume(folder: Path, launched: bool, place: str) -> str:
    """Let the run end; return how it differs from one that was not disturbed."""
    with open(folder / "output", "ab") as output:
        code = subprocess.call(
            _command(folder, launched, 0.0, place), stdout=output, stderr=output, env=_environment("resumed"), cwd=folder
        )
    if code:
        return f"resuming ended with {code}"
    return "" if _bits(folder) == _undisturbed(launched) else "the resumed run has other bits"


@functools.lru_cache(maxsize=None)
def _undisturbed(launched: bool) -> Dict[str, str]:
    folder = Path(tempfile.mkdtemp(prefix="trial-signals-"))
    try:
        subprocess.run(
            _command(folder, launched, 0.0, "data"), check=True, env=_environment("undisturbed"), cwd=folder, capture_output=True
        )
        return _bits(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bits(folder: Path) -> Dict[str, str]:
    last = folder / "run" / "last"
    return {name: hashlib.sha256((last / name).read_bytes()).hexdigest() for name in ("net.params", "states.npz")}


def _saved_step(folder: Path) -> Optional[int]:
    """Return the step of the checkpoint `last`, None where there is none."""
    last = folder / "run" / "last"
    if not last.exists():
        return None
    for path in last.glob("*.json"):
        step = _find(json.loads(path.read_text()), "step")
        if step is not None:
            return step
    raise AssertionError(f"no step in {last}")


def _find(value: object, name: str) -> Optional[int]:
    if isinstance(value, dict):
        if isinstance(value.get(name), int):
            return int(value[name])
        return next((found for found in (_find(part, name) for part in value.values()) if found is not None), None)
    return None


def _command(folder: Path, launched: bool, step_s: float, place: str) -> List[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    launcher = ["-m", "gluon_mgpu", "launch", "-n", "2", "--log-dir", str(folder / "logs")] if launched else []
    return [sys.executable, *launcher, str(program), str(folder), str(step_s), place]


def _environment(mark: str) -> Dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLUON_MGPU_", "DMLC_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "TRIAL_MARK": mark}


def _read(process: subprocess.Popen, lines: List[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        text = line.decode(errors="replace").strip()
        lines.append(text.rpartition("] ")[2])


def _marked(mark: str) -> List[int]:
    """Return the processes that have this mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ, state = (path / "environ").read_bytes(), (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"TRIAL_MARK={mark}".encode() in environ and state != "Z":
            found.append(int(path.name))
    return found
