"""Python functions in the queue of MXNet's engine, and what it has written. Nothing here waits."""

from __future__ import annotations

import ctypes
import importlib
import itertools
from functools import lru_cache
from typing import Any, Callable, Dict, List, Sequence, Tuple

# Where the engine runs a function; numbers of MXNet's FnProperty (include/mxnet/engine.h).
ON_WORKER, ON_PRIORITY_WORKER, AT_ONCE = 0, 3, 4
CPU = 1  # mxnet.Context.devtype2mask: the number of a CPU in MXNet's C interface

_functions: Dict[int, Callable[[], None]] = {}  # queued, by number
_numbers = itertools.count(1)


class EngineContext(ctypes.Structure):
    """The C++ `mxnet::Context` that the engine's C interface takes."""

    _fields_ = [("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int32)]


def push(function: Callable[[], None], *, device: EngineContext, reads: Sequence[Any] = (), where: int) -> None:
    """Queue a function in MXNet's engine. The engine calls it once, unless an operation that writes `reads` fails.

    It has no name, so MXNet's profiler leaves it out: the profiler ends the process at operations on contexts that it has no
    place for.

    Parameters
    ----------
    function : callable ()
        Short, and without calls of MXNet that wait.
    device : EngineContext
    reads : sequence of NDArray
        The function runs after the pending operations that write them. Operations queued later that write them run after it.
    where : int
        `AT_ONCE`: in the calling thread if `reads` are ready, otherwise on the device's worker as soon as they are.
        `ON_WORKER`: on the device's worker, behind its queue. `ON_PRIORITY_WORKER`: on a worker that belongs to no device.
    """
    library, check_call = _mxnet()
    number = next(_numbers)
    _functions[number] = function
    handles = (ctypes.c_void_p * max(1, len(reads)))(*(array.handle.value for array in reads))
    queued = handles, len(reads), None, 0, ctypes.byref(ctypes.c_int(where)), 0, None
    check_call(library.MXEnginePushSyncND(_CALL, ctypes.c_void_p(number), None, ctypes.byref(device), *queued))


def is_ready(array: Any) -> bool:
    """Return, without waiting, whether all pending writes of an array are done. After a failed write it is never ready.

    Examples
    --------
    >>> import mxnet as mx
    >>> array = mx.nd.ones((2, 3))
    >>> array.wait_to_read()
    >>> is_ready(array)
    True
    """
    reached: List[bool] = []
    push(lambda: reached.append(True), device=EngineContext(CPU, 0), reads=[array], where=AT_ONCE)
    return bool(reached)


def queue_in_order(device: Any, reads: Sequence[Any], writes: Sequence[Any], name: str = "") -> None:
    """Let operations that use `writes` wait for the pending operations that write `reads`.

    Parameters
    ----------
    device : mxnet.Context
        Where those operations run. On a CPU context, its own worker does this: another one's may be busy.
    reads, writes : sequence of NDArray
        No array of one shares memory with one of the other: the engine would wait for itself.
    name : str
        For MXNet's profiler, which notes when the order lets the operations begin. Without a name it leaves this out.
    """
    library, check_call = _mxnet()
    is_cpu = device.device_type == "cpu"
    worker = EngineContext(CPU, device.device_id if is_cpu else 0)
    check_call(library.MXEnginePushSyncND(*_order(reads, writes, worker, AT_ONCE if is_cpu else ON_PRIORITY_WORKER, name)))


def _order(reads: Sequence[Any], writes: Sequence[Any], device: EngineContext, where: int, name: str = "") -> Tuple[Any, ...]:
    """Return the arguments that queue a function without an effect, between reads and writes."""
    arrays = [one.handle for one in reads], [one.handle for one in writes]
    handles = [(ctypes.c_void_p * max(1, len(some)))(*some) for some in arrays]
    queued = handles[0], len(reads), handles[1], len(writes), ctypes.byref(ctypes.c_int(where)), 0, name.encode() or None
    return (_NOTHING, None, None, ctypes.byref(device), *queued)


_NOTHING = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # a C function without an effect: it needs no interpreter


class WrittenWith:
    """Lets arrays count as written when others are: for operations that write them without telling the engine.

    Parameters
    ----------
    arrays : sequence of NDArray
    others : sequence of NDArray
        No two of all these arrays share memory: the engine would wait for itself.
    device : EngineContext
    """

    def __init__(self, arrays: Sequence[Any], others: Sequence[Any], device: EngineContext) -> None:
        self._library, self._check_call = _mxnet()
        own = [[one.detach() for one in some] for some in (others, arrays)]  # a trainer may give an array other memory
        self._kept = own, device
        self._arguments = _order(own[0], own[1], device, AT_ONCE)

    def push(self) -> None:
        """Queue it, behind the pending operations that write the others."""
        self._check_call(self._library.MXEnginePushSyncND(*self._arguments))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def _CALL(_run_context: int, number: int) -> None:  # noqa: N802  one for all functions: it must outlive the engine's queue
    _functions.pop(number)()


@lru_cache(maxsize=None)
def _mxnet() -> Any:
    """Return MXNet's library and the check of its calls. Modules that set MXNet up import this one before MXNet."""
    base = importlib.import_module("mxnet.base")
    return base._LIB, base.check_call
