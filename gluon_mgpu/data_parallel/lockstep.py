"""Tasks in lockstep: each runs until it exchanges values with the others, and continues when all have."""

from __future__ import annotations

import threading
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd

from ..errors import StepError
from ..mxnet_internals.c_calls import set_context
from ..runtime.environment import require


@dataclass(eq=False)
class Exchange:
    """The values that all tasks passed at one point.

    Attributes
    ----------
    values : list
        In the order of the tasks.
    result : object
        Set by the first task that continues, for the others.
    """

    values: List[Any]
    result: Any = None


def run_in_lockstep(tasks: Sequence[Callable[[], Any]]) -> List[Any]:
    """Run tasks one at a time, each until it exchanges values or ends, and return their results.

    ```
    task 0  ──run──► exchange ·················· ──run──► exchange ················· ──run──► end
    task 1  ·················· ──run──► exchange ·················· ──run──► exchange ················· ──run──► end
    ```

    All tasks dispatch their operations before an exchange, and only then operations after it. MXNet's engine allocates memory in
    the order of dispatch, so it cannot deadlock. The tasks are greenlets, not threads: in a new thread MXNet draws other random
    numbers, the same in each new thread.

    Parameters
    ----------
    tasks : sequence of callables () -> object

    Raises
    ------
    StepError
        A task has ended or waits at another point while others exchange values. All are stopped.
    MissingExtraError
        The package greenlet is not installed.
    Exception
        The exception of a task. The others are stopped.

    Examples
    --------
    >>> run_in_lockstep([lambda i=i: sum(exchange("a sum", i).values) - i for i in range(3)])
    [3, 2, 1]
    """
    greenlet = require("greenlet", "sync", "SyncBatchNorm").greenlet
    workers = [greenlet(task) for task in tasks]
    for worker in workers:
        worker.gr_context = copy_context()
    deferred = _here.deferred = []
    states = [_state()] * (len(workers) + 1)  # of the tasks, and the caller's
    arguments: Tuple[Any, ...] = ()
    results: List[Any] = [None] * len(workers)
    try:
        while not all(worker.dead for worker in workers):
            for i, worker in enumerate(workers):
                _set_state(states[i])
                results[i] = worker.switch(*arguments)
                states[i] = _state()
            arguments = (_joint_exchange([None if worker.dead else found for worker, found in zip(workers, results)]),)
    finally:
        for worker in workers:
            worker.throw()  # unwinds tasks that still wait
        _here.deferred = None
        _set_state(states[-1])
    for function in deferred:
        function()
    return results


def exchange(point: Any, value: Any) -> Exchange:
    """Wait at a point, such as a layer, for the other tasks, and return the values of all.

    Outside of `run_in_lockstep` there is one task.

    Raises
    ------
    StepError
        Other tasks have ended or wait at another point.
    """
    if not is_in_lockstep():
        return Exchange([value])
    return require("greenlet", "sync", "SyncBatchNorm").getcurrent().parent.switch((point, value))


def defer(function: Callable[[], Any]) -> None:
    """Call a function when all tasks have ended without an error; outside of tasks, call it now."""
    if is_in_lockstep():
        _here.deferred.append(function)
    else:
        function()


def is_in_lockstep() -> bool:
    """Return whether a task of `run_in_lockstep` calls this."""
    return getattr(_here, "deferred", None) is not None


_here = threading.local()  # .deferred: a list while tasks run


def _joint_exchange(found: Sequence[Optional[Tuple[Any, Any]]]) -> Optional[Exchange]:
    """Return the exchange of tasks that wait with (point, value), None if all have ended; raise if their points differ."""
    if not any(found):
        return None
    points = ["the end" if one is None else one[0] for one in found]
    if any(point is not points[0] for point in points):
        names = ", ".join(str(getattr(point, "name", point)) for point in points)
        raise StepError(
            f"train_batch: got shards that are at {names}; expected all at one layer, to compute the statistics of the batch. "
            "Send every shard through the same layers, or call revert_sync_batchnorm(net)."
        )
    return Exchange([one[1] for one in found if one])


State = Tuple[bool, bool, mx.Context]


def _state() -> State:
    """Return the state of MXNet that belongs to a thread and that a network may set temporarily."""
    return autograd.is_recording(), autograd.is_training(), mx.current_context()


def _set_state(state: State) -> None:
    recording, training, device = state
    autograd.set_recording(recording)
    autograd.set_training(training)
    set_context(device)
