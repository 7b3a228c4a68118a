"""recompute(): a block whose activations are not kept, but computed again in the backward pass."""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from ..checks import instance
from ..data_parallel.graph import draws_numbers
from ..data_parallel.passes import WaitingPass
from ..nested import Array, is_float, leaves, map_leaves, with_leaves
from ..refusals import refusal
from ..runtime.c_api import unallocated
from ..trainer.parameters import blocks_of
from ..trainer.running_stats import is_running_stat, running_stats
from ..trainer.slab import place_of
from .stage import recorded, use_dynamic_memory


def recompute(block: gluon.Block) -> Recomputed:
    """Return a block that computes what this one does, and keeps only its inputs for the backward pass.

    ```
    plain        forward: keeps all activations of the block        backward
    recompute    forward: keeps its inputs                          forward again, then backward: memory for time
    ```

    The second forward pass draws the same random numbers as the first, so that gradients fit the outputs, also with Dropout.
    The first one draws other numbers than a plain block: it sets a seed of its own, which `mx.random.seed` determines.

    Call `mgpu.backward(losses)`, or train with `train_batch` or `fit`: the host then waits for the end of the backward pass, as
    the second forward pass must read the weights before the update writes them. Other backward passes through the block fail.
    A `Pipeline` does not take such blocks: pass `recompute=True` to that instead, which does not wait.

    A parameter that the block holds and does not use gets a gradient of zero.

    Parameters
    ----------
    block : gluon.Block
        Hybridized or not; static memory becomes dynamic. Its parameters keep their names. The result is a Block, so a
        HybridSequential does not take it: use a Sequential around it, and hybridize the block itself.

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
    >>> from gluon_mgpu import backward
    >>> with autograd.record():
    ...     loss = net(mx.nd.ones((2, 4))).sum()
    >>> backward([loss])
    >>> net[0].block.weight.grad().shape
    (8, 4)

    Source: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016.
    """
    instance("recompute", "block", block, gluon.Block, "a gluon.Block", advice="Pass a layer, or several in a Sequential.")
    return Recomputed(block)


class Recomputed(gluon.Block):  # type: ignore[misc]
    """The result of `recompute`."""

    def __init__(self, block: gluon.Block) -> None:
        super().__init__(prefix="")
        self.block = block
        # MXNet orders operations by the memory that they use. In a bucket, those of layers before this block, which wait for its
        # backward pass, would come before the operations of that pass.
        for param in filter(is_running_stat, block.collect_params().values()):
            param.keeps_arrays = True  # also in a copy of the network
            if place_of(param) is not None:
                param._data = [array.copy() for array in param._data]
        self._draws: Optional[bool] = None

    def forward(self, *args: Any) -> Any:
        """Return what the block returns."""
        if not autograd.is_recording():
            return self.block(*args)
        use_dynamic_memory(blocks_of(self.block))
        if any(param._data is None for param in self.block.collect_params().values()):
            with autograd.pause(train_mode=False):
                self.block(*args)  # it decides shapes
        inputs = [leaf for _, leaf in leaves(args)]
        if self._draws is None:
            self._draws = draws_numbers(self.block, args)
        return _Call(self.block, args, inputs, draws=self._draws).recorded(inputs)

    def _collect_params_with_prefix(self, prefix: str = "") -> Dict[str, gluon.Parameter]:
        return self.block._collect_params_with_prefix(prefix)


class _Call:
    """One call of a block, without its activations.

    Attributes
    ----------
    modes : (bool, bool)
        Of np shapes and np arrays.
    num_inputs : int
        The arrays that it depends on: the block's inputs and its weights.
    results : list of NDArray
        The outputs that get gradients, until they were copied into those of the operator.
    forms : list of (shape, dtype)
        Those of these outputs.
    """

    def __init__(self, block: gluon.Block, args: Any, inputs: Sequence[Array], *, draws: bool) -> None:
        self._block, self._args, self._inputs = block, args, [one.detach() for one in inputs]
        self._context = inputs[0].context
        params = [param for param in block.collect_params().values() if param.grad_req != "null"]
        if any(param._grad_stype != "default" for param in params):
            raise refusal("recompute", "recompute()", "sparse gradients")
        self._weights: List[Array] = [param.data(self._context) for param in params]
        self.num_inputs = len(inputs) + len(self._weights)
        self._is_training = autograd.is_training()
        self.modes = mx.util.is_np_shape(), mx.util.is_np_array()
        self._seed: Optional[int] = None
        # with cuDNN a forward pass moves them, elsewhere the backward pass does
        stats = running_stats(block) if self._context.device_type == "gpu" else []
        with autograd.pause(train_mode=self._is_training):
            if self._is_training and draws:
                self._seed, after = mx.nd.random.randint(0, 2**31 - 1, shape=(2,), ctx=self._context).asnumpy().tolist()
                mx.random.seed(self._seed, self._context)
            kept = [(param.data(self._context), param.data(self._context).copy()) for param in stats]
            self._form = self._run(self._inputs)
            for array, before in kept:
                before.copyto(array)
            if self._seed is not None:
                mx.random.seed(after, self._context)
        self.results = [one.as_nd_ndarray() for one in self._computed(self._form, self._inputs)]
        self.forms = [(one.shape, one.dtype) for one in self.results]

    def recorded(self, inputs: Sequence[Array]) -> Any:
        """Return what the block returned, as outputs of an operator in autograd's graph."""
        key = str(id(self))
        WaitingPass.calls[key] = self
        form, self._form = self._form, None
        arrays = [array.as_nd_ndarray() for array in (*inputs, *self._weights)]
        found = mx.nd.Custom(*arrays, op_type=_OPERATOR, key=key) if self.results else []
        # Without these products, a convolution or a pooling behind the block may give their gradients in oneDNN's own layout:
        # MXNet then reorders them for the operator into memory that it frees before Python reads it.
        # Source: MXNet 1.x, src/imperative/imperative_utils.h, PushOperator; src/operator/custom/custom.cc, BackwardEx.
        products = [one * 1 for one in (found if isinstance(found, list) else [found])]
        outputs = [one.as_np_ndarray() for one in products] if self.modes[1] else products
        by_array = dict(zip(map(id, self._inputs), inputs))  # an output may be an input
        by_array.update(zip(map(id, self._computed(form, self._inputs)), outputs))
        return map_leaves(lambda _, leaf: by_array.get(id(leaf), leaf), form)

    def gradients(self, given: Sequence[Array], needed: Sequence[bool]) -> List[Optional[Array]]:
        """Compute the forward pass again, and return the gradients of the inputs that need one and of the weights."""
        if not WaitingPass.is_running:
            raise refusal("recompute", "recompute()", "loss.backward()")
        inputs = [array.detach() for array in self._inputs]
        floats = [array for array, is_needed in zip(inputs, needed) if is_needed and is_float(array)]
        if floats:  # autograd returns their gradients: the arrays for them get no memory
            autograd.mark_variables(floats, [unallocated(array) for array in floats])
        if self._seed is not None:
            mx.random.seed(self._seed, self._context)
        with autograd.record(train_mode=self._is_training):
            found = self._computed(self._run(inputs), inputs)
            wanted = floats + self._weights
            reached = [mx.nd.zeros_like(array.as_nd_ndarray()) for array in wanted]  # MXNet raises without a way to them
        pairs = recorded(list(zip(found, given))) + [(zeros, zeros) for zeros in reached]
        outputs, gradients = [one for one, _ in pairs], [gradient for _, gradient in pairs]
        found = autograd.grad(outputs, wanted, gradients, train_mode=self._is_training) if wanted else []
        by_array = dict(zip(map(id, wanted), found))
        return [by_array.get(id(array)) for array in (*inputs, *self._weights)]

    def _computed(self, form: Any, inputs: Sequence[Array]) -> List[Array]:
        """Return the outputs that may depend on weights: each array once, no inputs, no whole numbers."""
        known = set(map(id, inputs))
        return list({id(one): one for _, one in leaves(form) if is_float(one) and id(one) not in known}.values())

    def _run(self, inputs: Sequence[Array]) -> Any:
        return self._block(*with_leaves(self._args, inputs))


_OPERATOR = "gluon_mgpu_recompute"
_one_at_a_time = threading.RLock()  # a block's Python code runs for one device at a time


class _Operator(mx.operator.CustomOp):  # type: ignore[misc]
    """A call as an operator. `autograd.Function` does not add to gradients, and stops at the first input without one."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        for target, how, result in zip(out_data, req, self._call.results):
            self.assign(target.as_nd_ndarray(), how, result)
        self._call.results = []

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        is_np_shape, is_np_array = self._call.modes
        try:
            with _one_at_a_time, mx.util.np_shape(is_np_shape), mx.util.np_array(is_np_array):
                found = self._call.gradients(out_grad, [how != "null" for how in req])
        except Exception as error:  # MXNet cannot pass it on
            WaitingPass.error = error
            raise
        for target, how, gradient in zip(in_grad, req, found):
            self.assign(target.as_nd_ndarray(), how, 0 if gradient is None else gradient.as_nd_ndarray())


@mx.operator.register(_OPERATOR)
class _Properties(mx.operator.CustomOpProp):  # type: ignore[misc]
    def __init__(self, key: str) -> None:
        super().__init__()
        self._call = WaitingPass.calls[key]

    def list_arguments(self) -> List[str]:
        return [f"input{number}" for number in range(self._call.num_inputs)]

    def list_outputs(self) -> List[str]:
        # MXNet asks this before it reads the arrays for a backward pass, by the dependencies of the operator that was made last
        mx.operator._registry.result_deps = set()
        return [f"output{number}" for number in range(len(self._call.forms))]

    def infer_shape(self, in_shape: Any) -> Tuple[Any, ...]:
        return in_shape, [shape for shape, _ in self._call.forms], []

    def infer_type(self, in_type: Any) -> Tuple[Any, ...]:
        return in_type, [dtype for _, dtype in self._call.forms], []

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> _Operator:
        return _Operator(self._call)

    def declare_backward_dependency(self, out_grad: Any, in_data: Any, out_data: Any) -> Any:
        return out_grad
