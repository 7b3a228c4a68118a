"""recompute(): a block whose activations are not kept, but computed again in the backward pass."""

from __future__ import annotations

import ctypes
import re
import threading
import traceback
from typing import Any, Dict, List, Optional, Tuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.base import _LIB, MXCallbackList, NDArrayHandle, c_array, c_handle_array, check_call

from ..checks import short
from ..errors import TrainerError
from ..nested import Array, is_float, leaves, map_leaves
from ..runtime.c_api import on_backward, unallocated
from ..runtime.environment import logger
from .running_stats import batch_norms
from .stage import draws_numbers


def recompute(block: gluon.Block) -> Recomputed:
    """Return a block that computes what this one does, and keeps only its inputs for the backward pass.

    ```
    plain        forward: keeps all activations of the block        backward
    recompute    forward: keeps its inputs                          forward again, then backward: memory for time
    ```

    The second forward pass draws the same random numbers as the first, so that gradients fit the outputs, also with Dropout.
    The first one draws other numbers than a plain block: it sets a seed of its own, which `mx.random.seed` determines.

    The host waits for the end of a backward pass that goes through such a block: its second forward pass must read the weights
    before the update writes them. For a `Pipeline`, pass `recompute=True` to that instead, which does not wait.

    A parameter that the block holds and does not use gets a gradient of zero.

    Parameters
    ----------
    block : gluon.Block
        Hybridized or not. Its parameters keep their names. The result is a Block, so a HybridSequential does not take it: use
        a Sequential around it, and hybridize the block itself.

    Returns
    -------
    gluon.Block

    Raises
    ------
    TrainerError
        It is no Block.

    Examples
    --------
    >>> net = gluon.nn.Sequential()
    >>> net.add(recompute(gluon.nn.Dense(8, in_units=4)), gluon.nn.Dense(1, in_units=8))
    >>> net.initialize()
    >>> with autograd.record():
    ...     loss = net(mx.nd.ones((2, 4))).sum()
    >>> loss.backward()
    >>> net[0].block.weight.grad().shape
    (8, 4)

    Source: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016.
    """
    if not isinstance(block, gluon.Block):
        raise TrainerError(f"recompute: got {short(block)}; expected a gluon.Block. Pass a layer, or several in a Sequential.")
    return Recomputed(block)


class Recomputed(gluon.Block):  # type: ignore[misc]
    """The result of `recompute`."""

    def __init__(self, block: gluon.Block) -> None:
        super().__init__(prefix="")
        self.block = block
        self._draws: Optional[bool] = None

    def forward(self, *args: Any) -> Any:
        """Return what the block returns."""
        if not autograd.is_recording():
            return self.block(*args)
        if any(param._data is None for param in self.block.collect_params().values()):
            with autograd.pause(train_mode=False):
                self.block(*args)  # it decides shapes
        inputs = [leaf for _, leaf in leaves(args)]
        return _Recorded(self, args, inputs).outputs()

    def draws(self, inputs: List[Array]) -> bool:
        """Return whether the block may draw random numbers."""
        if self._draws is None:
            self._draws = draws_numbers(self.block, inputs)
        return self._draws

    def _collect_params_with_prefix(self, prefix: str = "") -> Dict[str, gluon.Parameter]:
        found: Dict[str, gluon.Parameter] = self.block._collect_params_with_prefix(prefix)
        return found


class _Recorded:
    """One call of a recomputed block, as an operation of autograd's graph. Its inputs are the block's and its parameters.

    `mxnet.autograd.Function` does not add to gradients, and stops at the first input without one.
    """

    def __init__(self, owner: Recomputed, args: Any, inputs: List[Array]) -> None:
        self._block, self._args, self._inputs = owner.block, args, [one.detach() for one in inputs]
        context = inputs[0].context
        params = [param for param in owner.block.collect_params().values() if param.grad_req != "null"]
        self._weights: List[Array] = [param.data(context) for param in params]
        self._is_training = autograd.is_training()
        self._modes = mx.util.is_np_shape(), mx.util.is_np_array()
        self._seed: Optional[int] = None
        self._shape: Any = None
        self._context = context
        self._stats = batch_norms(owner.block, list(owner.block.collect_params().values()))
        with autograd.pause(train_mode=self._is_training):
            if self._is_training and owner.draws(self._inputs):
                self._seed, after = mx.nd.random.randint(0, 2**31 - 1, shape=(2,), ctx=context).asnumpy().tolist()
                mx.random.seed(self._seed, context)
            kept = self._kept_stats()
            # other objects: a block may return an input, which this one keeps, and which would keep the graph
            self._shape = map_leaves(lambda _, leaf: leaf.detach(), self._run(self._inputs))
            self._put_back_stats(kept)
            if self._seed is not None:
                mx.random.seed(after, context)
        self._found = [leaf for _, leaf in leaves(self._shape)]
        self._record([*inputs, *self._weights])

    def outputs(self) -> Any:
        """Return what the block returned; the graph holds the rest."""
        found, self._shape, self._found = self._shape, None, []
        return found

    def _run(self, inputs: List[Array]) -> Any:
        rest = iter(inputs)
        return self._block(*map_leaves(lambda _, leaf: next(rest), self._args))

    def _gradients(self, given: List[Array]) -> List[Optional[Array]]:
        """Compute the forward pass again, and return the gradients of the inputs and the weights."""
        inputs = [array.detach() for array in self._inputs]
        floats = [array for array in inputs if is_float(array)]
        if floats:  # autograd returns their gradients: the arrays for them get no memory
            autograd.mark_variables(floats, [unallocated(array) for array in floats])
        if self._seed is not None:
            mx.random.seed(self._seed, self._context)
        with autograd.record(train_mode=self._is_training):
            found = [leaf for _, leaf in leaves(self._run(inputs))]
        heads = [(output, gradient) for output, gradient in zip(found, given) if is_float(output)]
        if not heads:
            return [None] * (len(self._inputs) + len(self._weights))
        outputs, gradients = map(list, zip(*heads))
        wanted = floats + self._weights
        by_array: Dict[int, Optional[Array]] = dict.fromkeys(map(id, wanted))  # None: the outputs do not depend on it
        while wanted:
            try:
                returned = autograd.grad(outputs, wanted, gradients, train_mode=self._is_training)
            except mx.MXNetError as error:
                unreached = re.search(r"the (\d+)-th variable because it is unreachable", str(error))
                if unreached is None:
                    raise
                del wanted[int(unreached[1]) - 1]
            else:
                by_array.update(zip(map(id, wanted), returned))
                break
        return [by_array.get(id(array)) for array in (*inputs, *self._weights)]

    def _kept_stats(self) -> List[Tuple[Array, Array]]:
        """Return copies of running statistics that this forward pass moves: with cuDNN only, elsewhere the backward pass does."""
        if self._context.device_type != "gpu":
            return []
        arrays = [param.data(self._context) for layer in self._stats for param in (layer.running_mean, layer.running_var)]
        return [(array, array.copy()) for array in arrays]

    def _put_back_stats(self, kept: List[Tuple[Array, Array]]) -> None:
        for array, before in kept:
            before.copyto(array)

    def _record(self, inputs: List[Array]) -> None:
        """Add the call to autograd's graph."""
        key = _calls.add(self)

        def backward(num_given: int, num_wanted: int, handles: Any, reqs: Any, *_: Any) -> bool:
            try:
                arrays = [mx.nd.NDArray(ctypes.cast(handles[i], NDArrayHandle)) for i in range(num_given + num_wanted)]
                with _calls.one_at_a_time:
                    with mx.util.np_shape(self._modes[0]), mx.util.np_array(self._modes[1]):
                        found = self._gradients(arrays[:num_given])
                    for target, gradient, req in zip(arrays[num_given:], found, (reqs[i] for i in range(num_wanted))):
                        if req == _ADD and gradient is not None:
                            target += gradient.as_nd_ndarray()
                        elif req != _NOTHING:
                            target[:] = 0 if gradient is None else gradient.as_nd_ndarray()
            except Exception:  # the C++ code that calls cannot pass it on
                logger.error("recompute: %s failed in the backward pass: %s", self._block.name, traceback.format_exc())
                return False
            return True

        functions = [_BACKWARD(backward), _DELETE(lambda _: _calls.drop(key))]
        generic = ctypes.CFUNCTYPE(ctypes.c_int)
        pointers = ctypes.cast(c_array(generic, [ctypes.cast(f, generic) for f in functions]), ctypes.POINTER(generic))
        nothing = ctypes.cast(c_array(ctypes.c_void_p, [None] * 2), ctypes.POINTER(ctypes.c_void_p))
        callbacks = MXCallbackList(ctypes.c_int(2), pointers, nothing)
        _calls.keep(key, functions, callbacks)
        handles = c_handle_array(inputs), c_handle_array(self._found)
        sizes = ctypes.c_int(len(inputs)), ctypes.c_int(len(self._found))
        check_call(_LIB.MXCustomFunctionRecord(sizes[0], handles[0], sizes[1], handles[1], ctypes.byref(callbacks)))


_NOTHING, _ADD = 0, 3  # MXNet's OpReqType
_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_BACKWARD = ctypes.CFUNCTYPE(_INT, _INT, _INT, ctypes.POINTER(_POINTER), ctypes.POINTER(_INT), _INT, _POINTER)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class _Calls:
    """The calls of recomputed blocks whose graphs exist."""

    def __init__(self) -> None:
        self.one_at_a_time = threading.RLock()  # a block's Python code runs for one device at a time
        self._kept: Dict[int, Any] = {}
        self._next = 0

    def add(self, call: _Recorded) -> int:
        self._next += 1
        self._kept[self._next] = call
        return self._next

    def keep(self, key: int, *things: Any) -> None:
        self._kept[key] = (self._kept[key], *things)

    def drop(self, key: int) -> bool:
        self._kept.pop(key, None)
        return True

    def wait(self) -> None:
        """Wait for the backward pass, if it may go through a recomputed block."""
        if self._kept:
            mx.nd.waitall()


_calls = _Calls()
on_backward(lambda: None, lambda _: _calls.wait())
