"""The rows of each workload, with the threads and the environment of every contender."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Sequence, Tuple

from case import Case
from compare import Row
from gluon_mgpu.runtime import environment

_OTHERS = ("gluoncv", "d2l", "torch", "torch-compile", "torch-ddp")
STEP_CONTENDERS = ("ours", "ours-compiled", "gluon", *_OTHERS)
TRAIN_CONTENDERS = ("ours", "ours-compiled", "gluon", "gluon-defaults", *_OTHERS)
EVALUATE_CONTENDERS = ("ours", "gluon", "d2l", "torch", "torch-compile")
SEQ2SEQ_CONTENDERS = ("ours", "ours-compiled", "gluon", "torch")
_ALL = (STEP_CONTENDERS, TRAIN_CONTENDERS, EVALUATE_CONTENDERS, SEQ2SEQ_CONTENDERS)
CONTENDERS = tuple(dict.fromkeys(name for names in _ALL for name in names))

STEPS = {"mlp": Case("step"), "resnet18": Case("step", network="resnet18", batch_size=8, num_steps=5)}
TRAIN = Case("train", network="resnet18", num_steps=2)
EVALUATE = Case("evaluate", num_layers=3, units=64, batch_size=16, num_batches=200)

_DDP_PROCESSES = 2


def quick(case: Case) -> Case:
    """Return a case so small that it only shows whether the benchmark works."""
    return replace(
        case, num_layers=3, units=8, image_size=8, batch_size=8, num_batches=min(case.num_batches, 4), repeats=2, num_steps=2
    )


def step_rows(contenders: Sequence[str], num_devices: Sequence[int], case: Case) -> List[Row]:
    """Return the rows of a step's cost for the host, for each number of contexts."""
    return [
        Row(contender, _contexts(k), replace(case, num_devices=k), _environment(contender, k if _is_torch(contender) else 0))
        for k in num_devices
        for contender in contenders
        if _runs_on(contender, k)
    ]


def train_rows(contenders: Sequence[str], num_devices: Sequence[int], case: Case) -> Tuple[List[Row], List[Row]]:
    """Return the rows of training ResNet-18, in two parts: one context with all cores; several contexts that share the cores,
    with one context of one thread to compare them with. The parts are measured one after the other: a process takes 1 GiB.
    """
    several = [k for k in num_devices if k > 1]
    singles = [c for c in contenders if c in ("ours", "gluon", "torch")] if several else []
    alone = [k for k in num_devices if k == 1]
    rows = single_thread_rows(singles, case) + rows_with_threads(contenders, several, case)
    return rows_with_threads(contenders, alone, case), rows


def single_thread_rows(contenders: Sequence[str], case: Case) -> List[Row]:
    """Return the rows of one context with one thread; none on a machine with one core, where other rows have that."""
    singles = contenders if environment.num_cores() > 1 else ()
    return [Row(c, _contexts(1, 1), replace(case, num_devices=1), _environment(c, 1, threads=1)) for c in singles]


def rows_with_threads(contenders: Sequence[str], num_devices: Sequence[int], case: Case) -> List[Row]:
    """Return the rows of each number of contexts; the contexts share the cores."""
    return [
        Row(contender, _contexts(k, _threads(k)), replace(case, num_devices=k), _environment(contender, k))
        for k in num_devices
        for contender in contenders
        if _runs_on(contender, k)
    ]


def _is_torch(contender: str) -> bool:
    return contender.startswith("torch")


def _runs_on(contender: str, num_devices: int) -> bool:
    """Return whether a contender runs on so many devices: PyTorch runs in one process, or with DDP in two."""
    if contender == "torch-ddp":
        return num_devices == _DDP_PROCESSES
    return not _is_torch(contender) or num_devices == 1


def _threads(num_devices: int) -> int:
    return max(1, environment.num_cores() // num_devices)


def _environment(contender: str, num_devices: int = 0, *, threads: int = 0) -> Dict[str, str]:
    """Return the variables of a contender's process. Without a number of devices, each context has one thread.

    The loops on MXNet get the settings that importing gluon_mgpu makes, so that only the code differs. d2l and
    gluon-defaults run as published, without settings. Ours chooses its own on one context with all cores.
    """
    ours = contender in ("ours", "ours-compiled")
    if contender in ("d2l", "gluon-defaults") or (ours and num_devices == 1 and not threads):
        return {}
    variables = {"OMP_NUM_THREADS": str(threads or (_threads(num_devices) if num_devices else 1))}
    if ours:
        return {**variables, **environment.ENVIRONMENT}
    if contender == "torch-ddp":
        return {**variables, "GLOO_SOCKET_IFNAME": "lo"}
    if contender == "torch-compile":  # the compile workers would run next to the measured process
        return {**variables, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return variables if _is_torch(contender) else {**variables, **environment.ENVIRONMENT, **_allocator()}


def _allocator() -> Dict[str, str]:
    """Return the malloc settings of `runtime`, as glibc reads them from the environment."""
    return {f"MALLOC_{name[2:]}_": str(value) for name, (_, value) in environment.ALLOCATOR.items()}


def _contexts(num_devices: int, threads: int = 0) -> str:
    name = "1 context" if num_devices == 1 else f"{num_devices} contexts"
    if not threads:
        return name
    each = " each" if num_devices > 1 else ""
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}{each}"
