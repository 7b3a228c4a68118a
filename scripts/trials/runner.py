"""Run trials one after the other, and report those that found something."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Callable

_REPORT_S = 10.0


def search(
    kind: str, trial: Callable[[int], str], *, seed: int = 0, count: int = 0, seconds: float = 600.0, keep_going: bool = True
) -> int:
    """Run trials with the seeds `seed`, `seed + 1`, ... and return the exit code: 1 if any found something, else 0.

    Parameters
    ----------
    kind : str
        Name of the module that holds the trial.
    trial : callable (int) -> str
        Returns what went wrong; "" where all is well. An exception counts as a finding.
    seed : int
    count : int
        Most trials; 0 for no limit.
    seconds : float
        No trial starts after this time.
    keep_going : bool
        Continue after a finding.
    """
    begun = reported = time.monotonic()
    num_trials = num_findings = 0
    try:
        while (not count or num_trials < count) and time.monotonic() - begun < seconds:
            found = _outcome(trial, seed + num_trials)
            if found:
                num_findings += 1
                print(f"{found}\n  repeat: python scripts/trials {kind} --seed {seed + num_trials} --count 1", flush=True)
            num_trials += 1
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                passed_s = reported - begun
                print(f"{kind}: {num_trials} trials, {num_findings} findings, {passed_s:.0f} s", file=sys.stderr, flush=True)
            if found and not keep_going:
                break
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    print(f"{kind}: {num_trials} trials, {num_findings} findings, {time.monotonic() - begun:.0f} s")
    return 1 if num_findings else 0


def _outcome(trial: Callable[[int], str], seed: int) -> str:
    try:
        return trial(seed)
    except Exception:
        return f"seed {seed}: the trial itself failed\n{traceback.format_exc()}"
