"""Runtime settings, the threads of this process's libraries, and whether OpenBLAS can hang."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Dict, List, Sequence, Tuple

from ..errors import MissingExtraError
from ..runtime import environment, threads
from ..runtime.environment import Setting
from .findings import Problem

_PREFIX = "threads of cpu("


@dataclass(frozen=True)
class Pools:
    """The thread pools in this process.

    Attributes
    ----------
    found : tuple of dict
        `library`, `kind`, `version` and `threads` of each.
    why_not : str
        Why they could not be listed; "" if they were.
    """

    found: Tuple[Dict[str, Any], ...]
    why_not: str


@dataclass(frozen=True)
class Engine:
    """MXNet's engine.

    Attributes
    ----------
    num_workers : int
        Of each CPU context.
    is_serial : bool
        Whether it runs one operation after the other.
    """

    num_workers: int
    is_serial: bool


def inspect_engine() -> Engine:
    """Return the engine that the environment requests."""
    return Engine(threads.num_engine_workers(), threads.runs_serially())


def inspect_pools() -> Pools:
    """Return the thread pools that threadpoolctl finds, or how to install it."""
    try:
        found = environment.require("threadpoolctl", "doctor", "doctor").threadpool_info()
    except MissingExtraError as error:
        return Pools((), str(error))
    keys = {"library": "filepath", "kind": "internal_api", "version": "version", "threads": "num_threads"}
    pools = [{name: pool[key] for name, key in keys.items()} for pool in found]
    return Pools(tuple({**pool, "library": "/".join(pool["library"].split(os.sep)[-2:])} for pool in pools), "")


def check_settings(settings: Sequence[Setting], switch: str) -> List[Problem]:
    """Return settings without the intended effect; `switch` is the value of `GLUON_MGPU_RUNTIME`."""
    found = []
    if switch and switch.lower() != "off":
        found.append(Problem("settings", f"GLUON_MGPU_RUNTIME={switch} has no effect.", "Set it to off, or unset it."))
    late = [setting.name for setting in settings if setting.reason == environment.TOO_LATE]
    if late:
        found.append(Problem("settings", f"{', '.join(late)} could not be set.", environment.TOO_LATE))
    return found


def check_openblas(settings: Sequence[Setting], features: Sequence[str], engine: Engine) -> List[Problem]:
    """Return a problem if two engine workers with several threads each can run `dot` at once, which may deadlock.

    Parameters
    ----------
    settings : sequence of Setting
        With the threads of each CPU context to train on.
    features : sequence of str
        MXNet's build features.
    engine : Engine
    """
    counts = {setting.name[len(_PREFIX) : -1]: setting.value for setting in settings if setting.name.startswith(_PREFIX)}
    several = {device: int(value) for device, value in counts.items() if value.isdigit() and int(value) > 1}
    if engine.is_serial or "BLAS_OPEN" not in features or len(several) * engine.num_workers < 2:
        return []
    who = " and ".join(f"cpu({device}) with {number} threads" for device, number in sorted(several.items()))
    what = f"dot may hang indefinitely in MXNet's OpenBLAS: two workers may run it at once, of {who}."
    to_do = "Set OMP_NUM_THREADS=1, or let use_devices set one thread each: unset GLUON_MGPU_RUNTIME and call it first."
    if engine.num_workers > 1:
        to_do = "Unset MXNET_CPU_WORKER_NTHREADS, or set OMP_NUM_THREADS=1."
    return [Problem("OpenBLAS", what, to_do)]
