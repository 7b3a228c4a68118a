"""One round of a workload: which calls are timed, and where it waits for the devices."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
from case import Case

NUM_CLASSES = 10
_WAIT_EVERY = 50  # steps: the memory of an unbounded queue is not compared


def inputs(case: Case) -> List[Tuple[np.ndarray, np.ndarray]]:
    """Return the batches of a case, the same for every contender: features (B, ...) and labels (B,)."""
    shapes = {"resnet18": (1, case.image_size, case.image_size), "mlp": (case.units,), "many": (1,)}
    rng = np.random.RandomState(0)
    batches = []
    for _ in range(case.num_batches):
        X = rng.uniform(-1, 1, (case.batch_size, *shapes[case.network])).astype("float32")
        batches.append((X, rng.randint(0, NUM_CLASSES, case.batch_size).astype("int32")))
    return batches


def run_round(contender: Any, case: Case) -> Dict[str, float]:
    """Return the measurements of one round of a contender: seconds (`..._s`), bytes, accuracy."""
    rounds: Dict[str, Callable[[Any, Case], Dict[str, float]]] = {
        "step": _step,
        "memory": _memory,
        "train": _train,
        "evaluate": _evaluate,
        "size": _size,
        "seq2seq": _pass,
    }
    return rounds[case.workload](contender, case)


def _step(contender: Any, case: Case) -> Dict[str, float]:
    """Time each part with the engine idle before it, so that only the host's time counts; then whole steps in a steady queue.

    ```
    wait │split│ wait │forward│ wait │backward│ wait │update│   then   wait │step│   then   wait │step step step ... wait│
    ```
    """
    _warm_up(contender)
    parts: Dict[str, List[float]] = {name: [] for name in (*contender.parts, "step")}
    for _ in range(case.repeats):
        for name, times in parts.items():
            contender.wait()
            times.append(_seconds(getattr(contender, name)))
    found = {f"{name}_s": median(times) for name, times in parts.items()}
    return {"dispatch_s": found.pop("step_s"), **found, **_train(contender, case)}


def _train(contender: Any, case: Case) -> Dict[str, float]:
    def steps() -> None:
        for _ in range(case.num_steps):
            contender.step()
        contender.wait()

    contender.wait()
    return {"whole_s": _seconds(steps) / case.num_steps}


def _pass(contender: Any, _case: Case) -> Dict[str, float]:
    def train() -> None:
        contender.train()
        contender.wait()

    contender.wait()
    return {"pass_s": _seconds(train)}


def _evaluate(contender: Any, _case: Case) -> Dict[str, float]:
    contender.wait()
    started = time.perf_counter()
    accuracy = contender.evaluate()
    return {"evaluate_s": time.perf_counter() - started, "accuracy": accuracy}


def _size(contender: Any, case: Case) -> Dict[str, float]:
    """Time the update alone: until its call returns, and until the devices have finished."""
    _warm_up(contender)
    dispatched, done = [], []
    for _ in range(case.repeats):
        for part in (contender.split, contender.forward, contender.backward):
            part()
        contender.wait()
        started = time.perf_counter()
        contender.update()
        dispatched.append(time.perf_counter() - started)
        contender.wait()
        done.append(time.perf_counter() - started)
    return {"update_s": median(dispatched), "done_s": median(done)}


def _memory(contender: Any, case: Case) -> Dict[str, float]:
    found = {}
    for number in range(1, case.last_steps + 1):
        contender.step()
        if number % _WAIT_EVERY == 0 or number in (case.first_steps, case.last_steps):
            contender.wait()
        if number == case.first_steps:
            found["first_bytes"] = _resident_bytes()
    found["last_bytes"] = _resident_bytes()
    return found


def _warm_up(contender: Any) -> None:
    """Refill the processor's caches: another contender ran before."""
    contender.step()
    contender.wait()


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _resident_bytes() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
