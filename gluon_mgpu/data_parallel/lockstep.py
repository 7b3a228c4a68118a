"""Tasks that take turns: each runs until it has to meet the others, and goes on when all have come."""

from __future__ import annotations

import threading
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd

from ..errors import StepError
from ..runtime.environment import require


@dataclass(eq=False)
class Exchange:
    """What all tasks have brought to one place.

    Attributes
    ----------
    place : object
    values : list
        In the order of the tasks.
    result : object
        For the first task that goes on, to leave something for the others.
    """

    place: Any
    values: List[Any]
    result: Any = None


def run_in_turns(tasks: Sequence[Callable[[], Any]]) -> List[Any]:
    """Run tasks one at a time, each until it meets the others or ends, and return their results.

    ```
    task 0  ──run──► meet ·············· ──run──► meet ············· ──run──► end
    task 1  ·············· ──run──► meet ·············· ──run──► meet ············· ──run──► end
    ```

    So all tasks dispatch what comes before a meeting before any dispatches what comes after. MXNet's engine hands out memory in
    the order of dispatch, and never waits in a circle then. The tasks are greenlets, not threads: in a thread of its own MXNet
    draws other random numbers, the same ones in each new thread.

    Parameters
    ----------
    tasks : sequence of callables () -> object

    Raises
    ------
    StepError
        A task has ended, or is elsewhere, where another wants to meet it. All are stopped.
    MissingExtraError
        The package greenlet is not installed.
    Exception
        What a task raises. The others are stopped.

    Examples
    --------
    >>> run_in_turns([lambda i=i: sum(exchange("a sum", i).values) - i for i in range(3)])
    [3, 2, 1]
    """
    greenlet = require("greenlet", "sync", "train_batch").greenlet
    workers = [greenlet(task) for task in tasks]
    for worker in workers:
        worker.gr_context = copy_context()
    deferred = _here.deferred = []
    states = [_state()] * (len(workers) + 1)  # of the tasks, and the caller's
    arguments: Tuple[Any, ...] = ()
    try:
        while not all(worker.dead for worker in workers):
            came = []
            for i, worker in enumerate(workers):
                _set_state(states[i])
                came.append(worker.switch(*arguments))
                states[i] = _state()
            arguments = (_meeting([None if worker.dead else arrival for worker, arrival in zip(workers, came)]),)
    finally:
        for worker in workers:
            worker.throw()  # unwinds those that still wait
        _here.deferred = None
        _set_state(states[-1])
    for function in deferred:
        function()
    return came


def exchange(place: Any, value: Any) -> Exchange:
    """Wait at a place for the other tasks, and return what all have brought. Outside of tasks there are no others.

    Raises
    ------
    StepError
        The others have ended, or are elsewhere.
    """
    if not is_in_turns():
        return Exchange(place, [value])
    meeting: Exchange = require("greenlet", "sync", "train_batch").getcurrent().parent.switch((place, value))
    return meeting


def defer(function: Callable[[], Any]) -> None:
    """Call a function when all tasks have ended well; now, outside of tasks."""
    if is_in_turns():
        _here.deferred.append(function)
    else:
        function()


def is_in_turns() -> bool:
    """Return whether a task calls this."""
    return getattr(_here, "deferred", None) is not None


_here = threading.local()  # .deferred: a list while tasks run


def _meeting(arrivals: Sequence[Optional[Tuple[Any, Any]]]) -> Optional[Exchange]:
    """Return the meeting of tasks that have come with (place, value), None if all have ended; raise if they cannot meet."""
    if not any(arrivals):
        return None
    places = ["the end" if arrival is None else arrival[0] for arrival in arrivals]
    if any(place is not places[0] for place in places):
        told = ", ".join(str(getattr(place, "name", place)) for place in places)
        raise StepError(
            f"train_batch: got shards that are at {told}; expected all at one layer, to take the whole batch's statistics. Send "
            "every shard through the same layers, or call revert_sync_batchnorm(net)."
        )
    return Exchange(places[0], [arrival[1] for arrival in arrivals if arrival])


State = Tuple[bool, bool, mx.Context]


def _state() -> State:
    """Return what MXNet keeps for a thread, and a network may set for a while."""
    return autograd.is_recording(), autograd.is_training(), mx.current_context()


def _set_state(state: State) -> None:
    recording, training, device = state
    autograd.set_recording(recording)
    autograd.set_training(training)
    mx.Context._default_ctx.value = device
