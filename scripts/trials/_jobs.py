"""Launches jobs, and compares what their processes wrote with the plain world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Dict, List, Tuple

import mxnet as mx
import numpy as np
from _joined import joint_programs
from _program import ROUNDING, Failure, Outcome, Program, difference_of, furthest, judged, noise_of, run_plain
from _worlds import Plain

_LIMIT_S = 240.0

_Ended = Tuple[Program, Outcome]


def outcomes_of(seed: int) -> List[_Ended]:
    """Return the result of each program of a job: after a rejected one, another job continues with the rest."""
    num_processes, _, programs = joint_programs(seed)
    ended: Dict[int, Outcome] = {}
    plain_ones = {}
    with tempfile.TemporaryDirectory(prefix="job-") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        for place, program in enumerate(programs):
            (mx.npx.set_np if program.setting.arrays == "np" else mx.npx.reset_np)()
            plain_ones[place] = plain = run_plain(program, folder)
            if plain.skipped or plain.stopped < len(program.statements):
                ended[place] = Outcome(skipped=plain.skipped or "stale gradients")
        while len(ended) < len(programs):
            places = [place for place in range(len(programs)) if place not in ended]
            failure = _launched(seed, num_processes, places, folder)
            for place in places:
                program = programs[place]
                (mx.npx.set_np if program.setting.arrays == "np" else mx.npx.reset_np)()
                results = [folder / f"{place}-{rank}" / "result.npz" for rank in range(num_processes)]
                failures = list(folder.glob(f"{place}-*/failure.json"))
                if failures:
                    ended[place] = judged(Failure(**json.loads(failures[0].read_text())), program, plain_ones[place])
                    break
                if not all(path.exists() for path in results):
                    ended[place] = Outcome(f"job: {failure}")
                    break
                ended[place] = _compared(program, results, plain_ones[place].world, folder)
            else:
                if failure:
                    ended[places[-1]] = Outcome(f"job: {failure} after its programs had ended")
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    mx.npx.reset_np()
    return [(program, ended[place]) for place, program in enumerate(programs)]


def _compared(program: Program, results: List[Path], plain: Plain, folder: Path) -> Outcome:
    found = []
    for path in results:
        with np.load(path) as arrays:
            found.append(dict(arrays))
    for rank, arrays in enumerate(found):
        if arrays.pop("apart"):
            return Outcome(f"replicas differ: in process {rank}")
        for name, array in arrays.items():
            if not np.array_equal(found[0][name], array, equal_nan=True):
                return Outcome(f"processes differ: {name} of process {rank} by {np.abs(found[0][name] - array).max()}")
    if plain.drew_noise:
        return Outcome()
    outputs = [array for name, array in found[0].items() if name.startswith("output")]
    weights = [array for name, array in found[0].items() if name.startswith("weight")]
    difference = difference_of(outputs, weights, plain)
    if difference:
        largest = max(
            furthest(*pair) for pair in zip([*outputs, *weights], [*plain.outputs, *(one for _, one in plain.weights())])
        )
        if noise_of(program, plain, folder) * ROUNDING > largest:
            return Outcome(skipped="it amplifies rounding")
    return Outcome(difference)


def _launched(seed: int, num_processes: int, places: List[int], folder: Path) -> str:
    """Run a job; return how it failed, "" if it ended well."""
    command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", str(num_processes), "--log-dir", str(folder / "logs")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [str(Path(__file__).with_name("_joined.py")), str(seed), ",".join(map(str, places)), str(folder)]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen([*command, *script], stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environ)
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"no end in {_LIMIT_S:.0f} s\n{(folder / 'output').read_text(errors='replace')[-2000:]}"
    return "" if code == 0 else f"it ended with {code}\n{(folder / 'output').read_text(errors='replace')[-2000:]}"
