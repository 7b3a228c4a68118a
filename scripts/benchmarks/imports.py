"""The processor time of imports, each in a process of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from statistics import median
from typing import Callable, Dict, List

from report import Table, ranged, spread

MXNET = "import mxnet"
PROGRAMS = (MXNET, "import gluon_mgpu, mxnet", "from gluon_mgpu import Trainer")


def measure(*, rounds: int, on_message: Callable[[str], None]) -> Dict[str, List[float]]:
    """Return the seconds of each program, one figure per round, after a round that fills the caches of bytecode and files."""
    found: Dict[str, List[float]] = {program: [] for program in PROGRAMS}
    for number in range(rounds + 1):
        on_message(f"round {number} of {rounds}")
        for program in PROGRAMS if number % 2 == 0 else PROGRAMS[::-1]:
            found[program].append(_processor_s(program))
    return {program: seconds[1:] for program, seconds in found.items()}


def table(found: Dict[str, List[float]]) -> Table:
    """Return the table of milliseconds, and of the rounds' ratios to `import mxnet`."""
    lines = []
    for program, seconds in found.items():
        ratios = [one / other for one, other in zip(seconds, found[MXNET])]
        lines.append([program, ranged(spread(seconds), 1000), f"{median(ratios):.3f}"])
    return "Processor time, user and system: median (range)", ["program", "ms", "ratio"], lines


def _processor_s(program: str) -> float:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # with it, all of a checkout is compiled each time; pip compiles what it installs
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
