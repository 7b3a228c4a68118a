"""Whether the engine has written an array, and functions that it calls when it has. Nothing here waits."""

from __future__ import annotations

import threading
from typing import Any, Callable, Sequence

import mxnet as mx

from ..nested import Array
from .engine_push import AT_ONCE, CPU, EngineContext, push
from .engine_push import ON_PRIORITY_WORKER as ON_PRIORITY_WORKER
from .engine_push import ON_WORKER as ON_WORKER


def is_serial() -> bool:
    """Return whether MXNet runs each operation in the thread that calls it. This starts the engine."""
    # The other engines never run this kind of function in the caller's thread. It starts no worker of a context.
    return Marker(where=ON_PRIORITY_WORKER).thread == threading.get_native_id()


def is_ready(array: Array) -> bool:
    """Return, without waiting, whether all pending writes of an array are done. After a failed write it is never ready.

    Examples
    --------
    >>> array = mx.nd.ones((2, 3))
    >>> array.wait_to_read()
    >>> is_ready(array)
    True
    """
    return Marker([array]).done


class Marker:
    """A position in the engine's queue that notes when the engine reaches it.

    Parameters
    ----------
    arrays : sequence of NDArray
        The engine reaches the marker after the pending writes of these arrays, and before later ones.
    context : mxnet.Context, optional
        The CPU context whose worker runs it, `cpu(0)` by default.
    where : int
        `AT_ONCE`, `ON_WORKER` or `ON_PRIORITY_WORKER`; see `engine_push.push`.

    Attributes
    ----------
    done : bool
    thread : int
        Native id of the engine's thread that reached it, 0 before.
    """

    def __init__(self, arrays: Sequence[Array] = (), context: Any = None, *, where: int = AT_ONCE) -> None:
        self.done, self.thread = False, 0
        context = context or mx.cpu(0)
        device = EngineContext(context.device_typeid, context.device_id)
        push(self._reach, device=device, reads=arrays, where=where)

    def _reach(self) -> None:
        self.thread = threading.get_native_id()
        self.done = True


def when_ready(arrays: Sequence[Array], function: Callable[[], None], *, on_worker: bool = False) -> None:
    """Let MXNet's engine call a function after the pending writes of these arrays. It does not wait.

    Later operations that write the arrays wait for the function. If a pending operation fails, the function is never called.

    Parameters
    ----------
    arrays : sequence of NDArray
        Also on GPUs: the engine counts an operation as done when its stream has run it.
    function : callable ()
        Short, and without calls of MXNet. It runs in one of the engine's threads.
    on_worker : bool
        Run it in the thread that runs the operations of the first array's CPU context, behind that thread's queue.
    """
    arrays = list(arrays)
    device = EngineContext(CPU, arrays[0].context.device_id if on_worker else 0)
    push(function, device=device, reads=arrays, where=ON_WORKER if on_worker else ON_PRIORITY_WORKER)
