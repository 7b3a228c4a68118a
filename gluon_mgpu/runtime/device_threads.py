"""A thread for each device, with MXNet's temporary arrays and random numbers to itself."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Callable, Dict, Iterator, Tuple, TypeVar

import mxnet as mx
from mxnet import Context

Result = TypeVar("Result")


def in_own_thread(context: Context, function: Callable[[], Result]) -> Result:
    """Return `function()`, called in a thread of this device, in the caller's mode of arrays. It waits for the function.

    MXNet has one set of temporary arrays and one source of random numbers for all CPU contexts, but another for each thread that
    binds a graph or calls an operator. Operators that hold the same ones run one after the other, and its recurrent operator
    holds random numbers even if it draws none. The operators of one context run one after the other anyway, and share one
    temporary array here.

    `mx.random.seed` reaches the sources of the thread that calls it. So an operator that draws must not be bound here, unless the
    function seeds.

    Source: MXNet 1.9.1, src/operator/rnn.cc, RNNResourceEx, and src/resource.cc, ResourceManager.
    """
    worker = _workers.get(context)
    if worker is None:
        # kept, because MXNet keeps a thread's resources when the thread ends; it makes them when they are first asked for
        worker = _workers[context] = _Worker(context)
        with environment_with({"MXNET_CPU_TEMP_COPY": "1"}):
            return worker.result_of(function)
    return worker.result_of(function)


class _Worker(threading.Thread):
    """Calls one function after another. Queues of C are several times cheaper than an executor's futures."""

    def __init__(self, context: Context) -> None:
        super().__init__(name=f"tasks of {context}", daemon=True)
        self._tasks: SimpleQueue[Tuple[Callable[[], Any], SimpleQueue[Any]]] = SimpleQueue()
        self._modes = mx.util.is_np_shape(), mx.util.is_np_array()
        self.start()

    def result_of(self, function: Callable[[], Result]) -> Result:
        """Return `function()`, called in this thread with the caller's modes and context variables."""
        modes = mx.util.is_np_shape(), mx.util.is_np_array()
        done: SimpleQueue[Any] = SimpleQueue()
        call = partial(copy_context().run, function)
        self._tasks.put((call if modes == self._modes else partial(_in_modes, modes, call), done))
        result, error = done.get()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def run(self) -> None:
        """Wait for functions."""
        with mx.util.np_shape(self._modes[0]), mx.util.np_array(self._modes[1]):
            while True:
                function, done = self._tasks.get()
                try:
                    done.put((function(), None))
                except BaseException as error:
                    done.put((None, error))
                del function, done  # and what they hold


def _in_modes(modes: Tuple[bool, bool], function: Callable[[], Result]) -> Result:
    # np arrays need np shapes: those are changed while these are off
    with mx.util.np_array(False), mx.util.np_shape(modes[0]), mx.util.np_array(modes[1]):
        return function()


_workers: Dict[Context, _Worker] = {}
os.register_at_fork(after_in_child=_workers.clear)  # a forked process has none of them


@contextmanager
def environment_with(wanted: Dict[str, str]) -> Iterator[None]:
    """Set variables of the environment within this block. Those that were not set are empty afterwards: unset, for MXNet.

    MXNet's recurrent operator reads the environment each time it runs, in another thread. The C library moves the environment
    when a variable is added, and a read at this moment crashes the process. So a variable is added once, while no operator
    runs, and stays; a new value moves nothing.
    """
    if not wanted.keys() <= os.environ.keys():
        mx.nd.waitall()
    before = {name: os.environ.get(name, "") for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.update(before)
