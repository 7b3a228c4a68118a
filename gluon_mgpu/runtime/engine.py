"""What the engine has not done yet, told without waiting."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any, Callable, Dict, Sequence

import mxnet as mx
from mxnet.base import _LIB, NDArrayHandle, c_handle_array, check_call

from ..nested import Array
from .threads import EngineContext

# Where the engine runs a function: see `Marker`. Numbers of MXNet's FnProperty (include/mxnet/engine.h).
ON_WORKER, ON_PRIORITY_WORKER, AT_ONCE = 0, 3, 4


def is_serial() -> bool:
    """Return whether MXNet runs each operation in the thread that calls it. Its engine starts, if it has not."""
    # The other engines never run this kind of function in the caller's thread; no context's worker is started for it.
    return Marker(where=ON_PRIORITY_WORKER).thread == threading.get_native_id()


def is_ready(array: Array) -> bool:
    """Return, without waiting, whether everything that was to be written into an array has been. What failed never is.

    Examples
    --------
    >>> array = mx.nd.ones((2, 3))
    >>> array.wait_to_read()
    >>> is_ready(array)
    True
    """
    return Marker([array]).done


class Marker:
    """A place in the engine's queue: tells, without anybody waiting, whether the engine has come there.

    Parameters
    ----------
    arrays : sequence of NDArray
        What must have been written. All that is pending on them now counts, nothing that comes later.
    context : mxnet.Context, optional
        The CPU context on whose worker it is queued, `cpu(0)` by default.
    where : int
        `AT_ONCE`: in the calling thread if the arrays are ready now, else on the worker when they are. `ON_WORKER`: on the
        worker, behind what it has to do. `ON_PRIORITY_WORKER`: on those that belong to no context.

    Attributes
    ----------
    done : bool
    thread : int
        Native id of the thread that has done it, 0 before.
    """

    _pending: Dict[int, Marker] = {}
    _numbers = itertools.count(1)

    def __init__(self, arrays: Sequence[Array] = (), context: Any = None, *, where: int = AT_ONCE) -> None:
        self.done, self.thread = False, 0
        context = context or mx.cpu(0)
        number = next(self._numbers)
        self._pending[number] = self
        place = ctypes.byref(EngineContext(context.device_typeid, context.device_id))
        handles = c_handle_array(arrays) if arrays else (NDArrayHandle * 1)()
        read, written = (handles, len(arrays)), (None, 0)
        how = ctypes.byref(ctypes.c_int(where)), 0, b"gluon_mgpu_marker"
        param = ctypes.c_void_p(number)
        check_call(_LIB.MXEnginePushSyncND(_REACHED, param, None, place, *read, *written, *how))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def _REACHED(_run_context: int, number: int) -> None:  # noqa: N802  one for all markers: it must outlive what the engine queues
    marker = Marker._pending.pop(number)
    marker.thread = threading.get_native_id()
    marker.done = True


_waiting: Dict[int, Callable[[], None]] = {}


_numbers = itertools.count(1)


def when_ready(arrays: Sequence[Array], function: Callable[[], None], *, on_worker: bool = False) -> None:
    """Let MXNet's engine call a function once all that was queued before has written these arrays. It does not wait.

    Later operations that write the arrays wait for the function. If an operation before it fails, it is never called.

    Parameters
    ----------
    arrays : sequence of NDArray
        On GPUs, too: the engine takes an operation as done when its stream is.
    function : callable ()
        Short, and without calls of MXNet. It runs in a thread of the engine's.
    on_worker : bool
        In the thread that runs the operations of the first array's CPU context, when it has come through those before.
    """
    arrays = list(arrays)
    number = next(_numbers)
    _waiting[number] = function
    context = EngineContext(1, arrays[0].context.device_id if on_worker else 0)
    handles = (ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays))
    kind = ctypes.c_int(ON_WORKER if on_worker else ON_PRIORITY_WORKER)
    push, nothing = _LIB.MXEnginePushSyncND, (None, 0)
    given = _CALL, ctypes.c_void_p(number), None, ctypes.byref(context), handles, len(arrays)
    check_call(push(*given, *nothing, ctypes.byref(kind), 0, b"when_ready"))


def _call(_run_context: int, number: int) -> None:
    _waiting.pop(number)()


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(_call)  # one for all, which lives as long as the engine
