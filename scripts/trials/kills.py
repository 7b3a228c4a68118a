"""A process that trains and saves, killed at random moments while another one reads its checkpoints.

Every start resumes; the last one ends like an undisturbed run. Whatever the reader loads is one checkpoint, never a mixture, and
nothing but the errors of this package comes out of it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import List

import gluon_mgpu as mgpu
import mxnet as mx
from crash_images import CTX, SCENARIOS, Scenario, ends, place, recorded
from gluon_mgpu.checkpoint.rotation import checkpoint_in, find_checkpoints
from gluon_mgpu.checkpoint.snapshot import read_content
from gluon_mgpu.errors import StateError
from gluon_mgpu.models.seq2seq.translator import load_translator
from mxnet.gluon import nn

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import crash_images
print("ready", flush=True)
crash_images.run(crash_images.SCENARIOS[int(sys.argv[2])], Path(sys.argv[3]))
"""


def trial(seed: int) -> str:
    """Kill a run some times, let it end, and return the errors in its checkpoints and in those read meanwhile."""
    rng = random.Random(seed)
    number = rng.randrange(len(SCENARIOS))
    scenario = SCENARIOS[number]
    before, wrong = recorded(scenario), []
    with place() as folder:
        for kills_left in range(rng.randrange(1, 4), -1, -1):
            with _started(number, folder) as child:
                assert child.stdout is not None
                child.stdout.readline()
                end = time.monotonic() + rng.random() * 0.6 if kills_left else float("inf")
                while child.poll() is None and time.monotonic() < end:
                    wrong += _read(scenario, folder)
                    time.sleep(0.01)
                child.kill()
                errors = child.communicate(timeout=60)[1]
            if not kills_left and child.returncode:
                wrong.append(f"the last start ended with {child.returncode}: {errors[-600:]}")
        if not wrong:
            after = ends(scenario, folder)
            wrong += [f"{name} is another one" for name in before.ends if before.ends[name] != after[name]]
    return "\n  ".join([str(scenario), *wrong[:5]]) if wrong else ""


def _started(number: int, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(number), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _read(scenario: Scenario, folder: Path) -> List[str]:
    """Return the errors in the checkpoints of a running run; none if there is no checkpoint yet."""
    try:
        for path in find_checkpoints(folder):
            try:
                content = read_content(path, with_training=True)
            except StateError as error:
                if "without" not in str(error):  # it may be gone by now
                    return [f"{path}: {error}"]
                continue
            training = content.training or {}
            counts = set(training["counts"].values())
            if counts != {training["place"]["step"]}:
                return [f"{path}: counts {counts} at step {training['place']['step']}: {json.dumps(content.progress)[:200]}"]
        for name in ("last", "best"):
            if checkpoint_in(folder / name) is None:
                continue
            if scenario.kind == "translator":
                load_translator(folder / name)
            else:
                net = nn.HybridSequential()
                net.add(nn.Dense(3, in_units=4), nn.Dropout(0.3), nn.Dense(2, in_units=3))
                net.initialize(ctx=CTX)
                mgpu.load_checkpoint(folder / name, net)
        mx.nd.waitall()
    except Exception as error:
        return [f"reading: {type(error).__name__}: {error}"]
    return []
