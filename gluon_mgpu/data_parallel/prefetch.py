"""Loads shards onto their devices before their step, into reused memory."""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections import deque
from contextlib import contextmanager
from typing import Any, Deque, Generator, Iterable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context

from ..checks import check_function, flag, whole_number
from ..devices.select import check_contexts
from ..nested import Array
from ..runtime.c_api import write_unheld
from .iterators import as_pair, batches_of, check_iterable
from .sharding import loading, new_array, split_batch
from .step import SplitFunction

Shards = Tuple[List[Any], List[Any]]

NUM_HELD = 4  # batches in use in addition to those loaded ahead: the user's, and those of steps that still run
CLOSE_S = 10.0
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_END = object()


def prefetch(
    data_iter: Iterable[Any],
    devices: Sequence[Context],
    *,
    split_f: SplitFunction = split_batch,
    num_batches: int = 2,
    background: bool = False,
) -> Generator[Shards, None, None]:
    """Yield the shards of every batch, each on its device, and load the next batches while the last step runs.

    ```
    your loop      step 1 queued           step 2 queued        step 3 queued
                        │    ▲                  │    ▲               │    ▲
    prefetch   load 1 ──┘    └ load 2, load 3 ──┘    └── load 4 ─────┘    └── load 5     (num_batches=2)
    devices             ├──── step 1 ───────────┼──── step 2 ────────┼──── step 3 ───
    ```

    In a loop that never waits, slicing and copying overlap with the queued step. A loop that reads a number in every step
    (`float(loss)`) leaves the devices idle until the next batch is loaded; `background=True` draws from the iterator during that
    wait.

    NumPy arrays are written into the memory of earlier batches; for a GPU, into pinned memory that is copied asynchronously.
    Memory is reused only when no variable, view, recorded or queued operation holds it, so you may keep shards. The result is
    bit-identical to that of `split_f`.

    Parameters
    ----------
    data_iter : iterable of (X, y)
        Shapes (B, ...). While your step runs, `num_batches - 1` more batches have been drawn than yielded, and up to
        `num_batches` more with `background`. Other readers of the same iterator do not see them.
    devices : list of mxnet.Context
    split_f : callable (X, y, devices) -> (list of X shards, list of y shards)
    num_batches : int
        Batches loaded ahead, including the next one. 1 loads each batch when you ask for it.
    background : bool
        Draw from `data_iter` in a thread. This helps an iterator that waits for a disk, a network or a decoder outside of Python.
        The iterator must not share random numbers with the loop, or have another reader. Slicing and copying stay in your
        thread.

    Yields
    ------
    (list of X shards, list of y shards)

    Raises
    ------
    TrainerError
        An argument is invalid (raised at once), or an item is not a pair.
    Exception
        The exception of the iterator or of `split_f`, with its traceback, after the batches before it.

    Examples
    --------
    >>> batches = [(np.ones((4, 3)), np.arange(4)), (np.ones((2, 3)), np.arange(2))]
    >>> for Xs, ys in prefetch(batches, [mx.cpu(0), mx.cpu(1)]):
    ...     print([x.shape for x in Xs], [y.asnumpy().tolist() for y in ys])
    [(2, 3), (2, 3)] [[0, 1], [2, 3]]
    [(1, 3), (1, 3)] [[0], [1]]
    """
    check_contexts(devices, "prefetch")
    flag("prefetch", "background", background)
    num_batches = whole_number("prefetch", "num_batches", num_batches, advice="2 is usual.")
    check_iterable("prefetch", "data_iter", data_iter)
    check_function("prefetch", "split_f", split_f, advice="Pass split_batch, which takes (X, y, devices).")
    return _load_ahead(data_iter, list(devices), split_f, num_batches, background)


def _load_ahead(
    data_iter: Iterable[Any], devices: List[Context], split_f: SplitFunction, num_batches: int, background: bool
) -> Generator[Shards, None, None]:
    buffers = Buffers(num_batches + NUM_HELD)
    loaded: Deque[Shards] = deque()
    failed: Optional[Exception] = None
    with _draw_in_background(data_iter, num_batches) if background else _draw(data_iter) as items:
        wanted = 1  # the first step starts as soon as its batch is loaded
        ended = False
        while True:
            while len(loaded) < wanted and not ended:
                try:
                    item = next(items, _END)
                    ended = item is _END
                    if not ended:
                        X, y = as_pair(item, "prefetch")
                        with buffers.used():
                            loaded.append(split_f(X, y, list(devices)))
                        del item, X, y  # the iterator's batch must not outlive its shards
                except Exception as error:  # raised after the batches before it
                    failed, ended = error, True
            if not loaded:
                break
            wanted = num_batches
            yield loaded.popleft()
    if failed is not None:
        raise failed


@contextmanager
def _draw(data_iter: Iterable[Any]) -> Iterator[Iterator[Any]]:
    yield batches_of(data_iter)


@contextmanager
def _draw_in_background(data_iter: Iterable[Any], num_batches: int) -> Iterator[Iterator[Any]]:
    """Yield an iterator over `data_iter` that a thread draws from, at most `num_batches` items in advance.

    The thread runs only `next`, in the mode (np or legacy arrays) and on the device of this thread: MXNet keeps both per thread.
    When the block is left, the thread ends after the current item.
    """
    source = batches_of(data_iter)
    drawn: queue.SimpleQueue = queue.SimpleQueue()
    room = threading.Semaphore(num_batches)
    closing = threading.Event()
    modes = mx.util.np_shape(mx.util.is_np_shape()), mx.util.np_array(mx.util.is_np_array()), mx.current_context()

    def draw() -> None:
        try:
            with modes[0], modes[1], Context(modes[2]):
                item: Any = None
                while item is not _END and room.acquire() and not closing.is_set():
                    item = next(source, _END)
                    drawn.put((item, None))
        except BaseException as error:
            drawn.put((_END, error))

    def items() -> Iterator[Any]:
        while True:
            item, error = drawn.get()
            if error is not None:
                raise error
            if item is _END:
                return
            room.release()
            yield item

    thread = threading.Thread(target=draw, name="gluon_mgpu.data_parallel.prefetch", daemon=True)
    thread.start()
    try:
        yield items()
    finally:
        closing.set()
        room.release()
        thread.join(CLOSE_S)  # one reader at a time; an iterator that blocks forever keeps its thread


class Buffers:
    """Arrays on the devices that are reused when nothing holds them, for batches of repeating shapes.

    ```
    CPU  NumPy ──written──► free array, or a new one ──► returned as another handle of its memory
    GPU  NumPy ──written──► free pinned array, which no copy reads ──queued copy──► array of MXNet's own GPU memory pool
    ```

    Parameters
    ----------
    num_batches : int
        The number of batches for which arrays are kept.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._num_loaded = 0
        self._is_ahead = False  # the loop is ahead of the devices by more batches than are kept
        # Legacy arrays that only we know, each with (shape, device, dtype); the last one written at the end.
        self._arrays: Deque[Tuple[Any, Array]] = deque()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Load one batch: the splits of `sharding` in this block use this memory."""
        self._num_loaded = 0
        with loading(self.load):
            yield
        most = self._num_batches * self._num_loaded
        self._is_ahead = len(self._arrays) > most and all(num_holders(array) > 1 for _, array in self._arrays)
        while len(self._arrays) > most:
            self._arrays.popleft()

    def load(self, data: np.ndarray, ctx: Context, dtype: np.dtype) -> Array:
        """Return a NumPy array as an MXNet array of the current mode on a device."""
        if not can_count_holders():
            return new_array(data, ctx, dtype)
        pinned = _pinned(ctx)
        array = self._free(data.shape, pinned or ctx, dtype)
        if pinned or self._is_ahead or not data.size:
            array._sync_copyfrom(data)  # waits for a worker thread: a loop that never waits must not fill the memory
        else:
            write_unheld(array, data)
        loaded = array.copyto(ctx) if pinned else array.detach()
        return loaded.as_np_ndarray() if mx.util.is_np_array() else loaded

    def _free(self, shape: Tuple[int, ...], ctx: Context, dtype: np.dtype) -> Array:
        """Return an array that nothing else holds."""
        wanted = (shape, ctx, np.dtype(dtype))
        for i, (known, array) in enumerate(self._arrays):
            if known == wanted and num_holders(array) == 1:
                del self._arrays[i]
                break
        else:
            array = mx.nd.empty(shape, ctx=ctx, dtype=dtype)
        self._arrays.append((wanted, array))
        self._num_loaded += 1
        return array


def _pinned(ctx: Context) -> Optional[Context]:
    """Return the pinned memory from which arrays are copied to this device, None if the host can write its arrays."""
    return mx.cpu_pinned(ctx.device_id) if ctx.device_type == "gpu" else None


def num_holders(array: Array) -> int:
    """Return how many of MXNet's objects share an array's memory: itself, views, and recorded or queued operations.

    Python's reference count includes no slices, and nothing that `autograd.record` keeps for a later backward pass. MXNet has its
    own count, without a function that returns it, so it is read in memory. An NDArray begins with a `std::shared_ptr`: two
    pointers, of which the second leads to the counts, a pointer and an int32.

    Source: mxnet/ndarray.h, `NDArray::ptr_`; libstdc++'s bits/shared_ptr_base.h, `_Sp_counted_base`.
    """
    counts = ctypes.c_void_p.from_address(array.handle.value + _POINTER).value or 0
    return ctypes.c_int32.from_address(counts + _POINTER).value


@functools.lru_cache(maxsize=None)
def can_count_holders() -> bool:
    """Return whether `num_holders` works in this build of MXNet, tried on an array. Elsewhere no memory is reused."""
    array = mx.nd.empty((2,))
    found = [num_holders(array)]
    view = array[0:1]
    found.append(num_holders(array))
    del view
    return [*found, num_holders(array)] == [1, 2, 1]
