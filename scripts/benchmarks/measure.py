"""One round of a workload: which calls are timed, and where it waits for the devices."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
from case import Case

NUM_CLASSES = 10


def inputs(case: Case) -> List[Tuple[np.ndarray, np.ndarray]]:
    """Return the batches of a case, the same for every contender: features (B, ...) and labels (B,)."""
    shapes = {"resnet18": (1, case.image_size, case.image_size), "mlp": (case.units,)}
    rng = np.random.RandomState(0)
    batches = []
    for _ in range(case.num_batches):
        X = rng.uniform(-1, 1, (case.batch_size, *shapes[case.network])).astype("float32")
        batches.append((X, rng.randint(0, NUM_CLASSES, case.batch_size).astype("int32")))
    return batches


def run_round(contender: Any, case: Case) -> Dict[str, float]:
    """Return the measurements of one round of a contender: seconds (`..._s`), accuracy."""
    rounds = {"step": _step, "train": _train, "evaluate": _evaluate, "seq2seq": _pass}
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


def _warm_up(contender: Any) -> None:
    """Refill the processor's caches: another contender ran before."""
    contender.step()
    contender.wait()


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
