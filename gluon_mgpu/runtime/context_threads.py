"""A thread for each device, with MXNet's temporary arrays and random numbers to itself."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Callable, Dict, Iterator, TypeVar

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
    shapes, arrays, variables = mx.util.is_np_shape(), mx.util.is_np_array(), copy_context()

    def call() -> Result:
        with mx.util.np_shape(shapes), mx.util.np_array(arrays):
            return variables.run(function)

    thread = _threads.get(context)
    if thread is not None:
        return thread.submit(call).result()
    # kept, because MXNet keeps a thread's resources when the thread ends; it makes them when they are first asked for
    thread = _threads[context] = ThreadPoolExecutor(1, thread_name_prefix=f"tasks of {context}")
    with environment_with({"MXNET_CPU_TEMP_COPY": "1"}):
        return thread.submit(call).result()


_threads: Dict[Context, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_threads.clear)  # a forked process has none of them


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
