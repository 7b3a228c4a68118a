"""Training programs at random in jobs of 2 or 3 processes, each compared with one device's plain Gluon.

The programs are those of `programs`, without what a job refuses. One job runs some, as starting it takes most of its time. A
finding is a difference of weights above 1e-5, processes or devices whose weights are not the same bits, a job that does not end,
that fails without an error of ours, or that refuses a right program.
"""

from __future__ import annotations

import atexit
from collections import Counter
from typing import Any, Dict

from _child import Child

_child = Child("processes")
atexit.register(_child.end)
_counts: Counter[str] = Counter()


def trial(seed: int) -> str:
    """Return the errors of the programs of a job; "" if there are none."""
    answer = _child.ask(seed)
    _counts.update(answer.get("outcomes", []))
    return f"seed {seed}: {answer['found']}" if answer.get("found") else ""


def summary() -> str:
    """Return how many programs ended how."""
    return "\n".join(f"{count:6d}  {outcome}" for outcome, count in _counts.most_common())


def run(seed: int) -> Dict[str, Any]:
    """Run a job, in the process that does so."""
    import gluon_mgpu  # noqa: F401  before MXNet
    from _jobs import outcomes_of

    outcomes = outcomes_of(seed)
    found = [f"{outcome.found}\n{program}" for program, outcome in outcomes if outcome.found]
    return {"found": "\n".join(found), "outcomes": [str(outcome) for _, outcome in outcomes if not outcome.found]}
