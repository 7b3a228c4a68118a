"""Training programs at random on 1 to 8 CPU contexts, each compared with one device's plain Gluon.

```
_composing   puts a program together          _statements   what users write, and what it means on one device
_program     runs it in both worlds,          _worlds       the two worlds: gluon_mgpu, and gluon.Trainer with NumPy
             compares, makes it shorter       _models       networks and losses
```

A finding is a difference of weights or outputs above 1e-5, replicas that are not the same bits, a hang, a crash, an error that
is not one of `gluon_mgpu.errors` in the house's form, or a refusal of a program that is right. What several devices cannot decide
may be refused: these refusals are counted, by reason.
"""

from __future__ import annotations

import atexit
from collections import Counter
from typing import Any, Dict

from _child import Child

_child = Child("programs")
atexit.register(_child.end)
_counts: Counter[str] = Counter()


def trial(seed: int) -> str:
    """Return the error of the program of a seed, with the shortest form that shows it; "" if there is none."""
    answer = _child.ask(seed)
    _counts[answer.get("outcome", "found")] += 1
    return f"seed {seed}: {answer['found']}" if answer.get("found") else ""


def summary() -> str:
    """Count the programs by result: equal weights, rejected with a reason, or skipped because plain Gluon cannot run them."""
    return "\n".join(f"{count:6d}  {outcome}" for outcome, count in _counts.most_common())


def run(seed: int) -> Dict[str, Any]:
    """Run one program, in the process that does so."""
    import gc
    import sys

    import gluon_mgpu  # noqa: F401  before MXNet
    from _composing import composed
    from _program import outcome_of, shortened

    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()  # a Trainer searches all objects for graphs; this excludes imported ones
    program = composed(seed)
    print(f"seed {seed}\n{program}", file=sys.stderr, flush=True)
    outcome = outcome_of(program)
    if not outcome.found:
        return {"outcome": str(outcome)}
    program, outcome = shortened(program)
    return {"found": f"{outcome.found}\n{program}"}
