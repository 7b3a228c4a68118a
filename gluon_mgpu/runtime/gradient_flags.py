"""The fresh flags of gradients: which gradients a backward pass has written since a step used them."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import lru_cache, partial
from typing import Any, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, check_call

from ..nested import Array

logger = logging.getLogger("gluon_mgpu")

SWITCH = "GLUON_MGPU_GRADIENT_FLAGS"
_MEMORY = "/proc/self/mem"
_NODE_IN_NDARRAY, _INFO_IN_NODE, _FLAG_IN_INFO = 88, 176, 80  # bytes


class Flags:
    """The fresh flags of some parameters: set by a backward pass, cleared when a step has used the gradient.

    MXNet keeps one flag per variable and has no function that reads many. Where `why_not_memory()` finds no objection, two
    NumPy operations read or clear all flags in MXNet's memory. Elsewhere the C interface is called twice per flag.

    Parameters
    ----------
    weights : list of lists of NDArray
        One list per parameter, with one array per replica. They are marked as variables. Make new `Flags` when they are marked
        again.
    """

    def __init__(self, weights: Sequence[Sequence[Array]]) -> None:
        self._shape = (len(weights), len(weights[0]) if weights else 0)
        self._kept = [_shallow_copy(weight) for replicas in weights for weight in replicas]  # keeps the flags' memory alive
        self._handles = [array.handle for array in self._kept]
        self._get, self._set = _flag_functions()
        addresses = _addresses_of_flags(self._handles)
        self._memory = _memory_between(addresses)
        self._offsets: Any = None if self._memory is None else np.array(addresses).reshape(self._shape) - min(addresses)

    def all(self) -> bool:
        """Return whether every gradient is fresh on every device."""
        return bool(self.read().all())

    def read(self) -> Any:
        """Return the flags as a NumPy array of bool, shape (parameters, replicas)."""
        if self._memory is not None:
            return self._memory[self._offsets]
        return np.array([_read_flag(self._get, handle) for handle in self._handles], dtype=bool).reshape(self._shape)

    def clear(self, which: Optional[Sequence[bool]] = None) -> None:
        """Clear all flags, or those of the parameters that `which` selects."""
        if self._memory is not None:
            self._memory[self._offsets if which is None else self._offsets[np.array(which, dtype=bool)]] = False
            return
        for i, handle in enumerate(self._handles):
            if which is None or which[i // self._shape[1]]:
                check_call(self._set(handle, 0))

    def put(self, which: Any, value: bool) -> None:
        """Set or clear the flags where `which`, an array of bool of shape (parameters, replicas), is true."""
        if self._memory is not None:
            self._memory[self._offsets[which]] = value
            return
        for handle, is_selected in zip(self._handles, np.ravel(which)):
            if is_selected:
                check_call(self._set(handle, int(value)))


def is_switched_off() -> bool:
    """Return whether `GLUON_MGPU_GRADIENT_FLAGS=api` asks for the C interface."""
    return os.environ.get(SWITCH, "").lower() == "api"


@lru_cache(maxsize=None)
def why_not_memory() -> str:
    """Return why this process reads flags through the C interface; "" if it reads them in MXNet's memory.

    It is decided once per process. `GLUON_MGPU_GRADIENT_FLAGS=api` chooses the C interface, and so does a failed self-check.
    """
    if is_switched_off():
        return f"{SWITCH}=api asks for the C interface."
    if mx.__version__ != "1.9.1" or platform.machine() != "x86_64":
        return (
            f"The places of the flags are known for MXNet 1.9.1 on x86-64 only; this is {mx.__version__} on {platform.machine()}."
        )
    if not _self_check():
        reason = "The flags in memory differ from those of MXNet's C interface."
        logger.debug("%s Flags are read through the C interface.", reason)
        return reason
    return ""


def _self_check() -> bool:
    """Return whether flags in memory agree with the C interface, on two arrays made for it, for both values of a flag.

    MXNet sets the flags and memory is read, then memory is written and MXNet reads the flags.
    """
    arrays = [mx.nd.empty((1,), ctx=mx.cpu()) for _ in range(2)]  # no operation: no context's worker starts
    autograd.mark_variables(arrays, [mx.nd.empty((1,), ctx=mx.cpu()) for _ in arrays])
    handles = [array.handle for array in arrays]
    get, set_ = _flag_functions()
    try:
        with open(_MEMORY, "rb", buffering=0) as memory:
            addresses = [_follow(memory, handle.value) for handle in handles]
            for values in ((0, 1), (1, 0)):
                for handle, value in zip(handles, values):
                    check_call(set_(handle, value))
                in_memory = [_read_byte(memory, address) for address in addresses]
                if in_memory != list(values) or [_read_flag(get, handle) for handle in handles] != in_memory:
                    return False
    except (OSError, OverflowError):
        return False
    written = _memory_between(addresses)
    for values in ((0, 1), (1, 0)):
        written[np.array(addresses) - min(addresses)] = values
        if [_read_flag(get, handle) for handle in handles] != list(values):
            return False
    return True


def _addresses_of_flags(handles: Sequence[Any]) -> List[int]:
    """Return the address of each array's flag, [] where they are to be read through the C interface.

    ```
    NDArray ── autograd_entry_.node ──► Node ── info, a dmlc::any ──► AGInfo ── fresh_out_grad
    ```

    Each address is checked: its byte must follow what the C interface sets. An address outside of the process's memory raises
    an error there, and does not end the process.

    Source: MXNet 1.9.1, mxnet/ndarray.h, nnvm/node.h, mxnet/imperative.h, as its wheels for x86-64 lay them out.
    """
    if not handles or why_not_memory():
        return []
    try:
        with open(_MEMORY, "rb", buffering=0) as memory:
            addresses = [_follow(memory, handle.value) for handle in handles]
            return addresses if all(map(partial(_is_flag, memory), handles, addresses)) else []
    except (OSError, OverflowError):
        return []


def _is_flag(memory: Any, handle: Any, address: int) -> bool:
    """Return whether the byte at an address is the flag of an array. The flag keeps its value."""
    get, set_ = _flag_functions()
    before = _read_flag(get, handle)
    seen: List[int] = []
    for value in (1 - before, before):
        check_call(set_(handle, value))
        seen.append(_read_byte(memory, address))
    return seen == [1 - before, before]


def _follow(memory: Any, address: int) -> int:
    for offset in (_NODE_IN_NDARRAY, _INFO_IN_NODE):
        address = int.from_bytes(os.pread(memory.fileno(), 8, address + offset), "little")
    return address + _FLAG_IN_INFO


def _read_byte(memory: Any, address: int) -> int:
    return int.from_bytes(os.pread(memory.fileno(), 1, address), "little")


def _memory_between(addresses: Sequence[int]) -> Any:
    """Return this process's memory from the lowest address to the highest as a NumPy array of bool, None without addresses.

    Index it with arrays of integers only: some memory between the addresses may not exist.
    """
    if not addresses:
        return None

    class Memory:
        __array_interface__ = {
            "version": 3,
            "data": (min(addresses), False),
            "shape": (max(addresses) - min(addresses) + 1,),
            "typestr": "|b1",
        }

    return np.asarray(Memory())


def _read_flag(get: Any, handle: Any) -> int:
    """Return one flag through the C interface."""
    value = ctypes.c_int()
    check_call(get(handle, ctypes.byref(value)))
    return value.value


def _shallow_copy(array: Array) -> Array:
    """Return another NDArray of the same memory and variable, which exist as long as it does."""
    handle = NDArrayHandle()
    check_call(_LIB.MXShallowCopyNDArray(array.handle, ctypes.byref(handle)))
    return mx.nd.NDArray(handle)


@lru_cache(maxsize=None)
def _flag_functions() -> Tuple[Any, Any]:
    """Return MXNet's functions that read and write a flag. A PyDLL keeps the interpreter's lock, which is cheaper."""
    library = ctypes.PyDLL(_LIB._name)
    return library.MXNDArrayGetGradState, library.MXNDArraySetGradState
