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
        Why nobody looked for them; empty where somebody did.
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


def look_at_engine() -> Engine:
    """Return which engine the environment asks for."""
    return Engine(threads.num_engine_workers(), threads.runs_serially())


def look_at_pools() -> Pools:
    """Return what threadpoolctl finds, and what to do where it is not there."""
    try:
        found = environment.require("threadpoolctl", "doctor", "doctor").threadpool_info()
    except MissingExtraError as error:
        return Pools((), str(error))
    keys = {"library": "filepath", "kind": "internal_api", "version": "version", "threads": "num_threads"}
    pools = [{name: pool[key] for name, key in keys.items()} for pool in found]
    return Pools(tuple({**pool, "library": "/".join(pool["library"].split(os.sep)[-2:])} for pool in pools), "")


def check_settings(settings: Sequence[Setting], switch: str) -> List[Problem]:
    """Return which settings do not do what they seem to; `switch` is what `GLUON_MGPU_RUNTIME` says."""
    found = []
    if switch and switch.lower() != "off":
        found.append(Problem("settings", f"GLUON_MGPU_RUNTIME={switch} does nothing.", "Set it to off, or unset it."))
    late = [setting.name for setting in settings if setting.reason == environment.TOO_LATE]
    if late:
        found.append(Problem("settings", f"{', '.join(late)} could not be set.", environment.TOO_LATE))
    return found


def check_openblas(settings: Sequence[Setting], features: Sequence[str], engine: Engine) -> List[Problem]:
    """Return whether two engine workers can be inside `dot` at once with several threads each, where they may hang for ever.

    Parameters
    ----------
    settings : sequence of Setting
        With the threads of each CPU context that is to be trained on.
    features : sequence of str
        What MXNet was built with.
    engine : Engine
    """
    counts = {setting.name[len(_PREFIX) : -1]: setting.value for setting in settings if setting.name.startswith(_PREFIX)}
    several = {device: int(value) for device, value in counts.items() if value.isdigit() and int(value) > 1}
    if engine.is_serial or "BLAS_OPEN" not in features or len(several) * engine.num_workers < 2:
        return []
    who = " and ".join(f"cpu({device}) with {number} threads" for device, number in sorted(several.items()))
    what = f"dot may hang for ever in MXNet's OpenBLAS: two workers may be in it at once, of {who}."
    to_do = "Set OMP_NUM_THREADS=1, or let use_devices set one thread each: unset GLUON_MGPU_RUNTIME, and call it first."
    if engine.num_workers > 1:
        to_do = "Unset MXNET_CPU_WORKER_NTHREADS, or set OMP_NUM_THREADS=1."
    return [Problem("OpenBLAS", what, to_do)]
